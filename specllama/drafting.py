"""Who proposes the next tokens.

A drafter must report the very laws that it drew from; beyond that anything goes, and no choice it
makes can change the law of the output, only how much of the proposal is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specllama.acceptance import Draft, Round
from specllama.errors import DecodeError, InvalidLogits, UsageError
from specllama.lm import CachedLM, Request
from specllama.lookahead import LengthPolicy
from specllama.sampling import Law, Logits, SamplingParams, Streams, next_law
from specllama.vocabulary_map import SharedIds, VocabularyMap


@dataclass(slots=True)
class SequenceState:
    """One sequence in the loop.

    slot: its number in the contexts. tokens: prompt and answer so far, all of them committed and
    at least one. n_left: how many tokens may still be emitted, at least 1 when a round begins.
    end_tokens: those behind which nothing needs to be drafted. highest: the largest token id so
    far, which tells whether a draft with fewer tokens can read it.
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    streams: Streams
    n_left: int
    end_tokens: frozenset[int] = frozenset()
    highest: int = field(init=False)

    def __post_init__(self) -> None:
        self.highest = max(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit what a round added."""
        self.tokens.extend(tokens)
        self.n_left -= len(tokens)
        self.highest = max(self.highest, *tokens)


class Drafter(Protocol):
    """Proposes tokens for each sequence of a round."""

    def prepare(self, state: SequenceState) -> None:
        """Read a new sequence's prompt, if a proposal will need it."""
        ...

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """One draft per sequence, of at most `limits[i]` tokens."""
        ...

    def observe(self, rounds: Sequence[Round]) -> None:
        """How the proposals of the last call fared."""
        ...


class NullDrafter:
    """Proposes nothing: plain decoding through the same loop."""

    def prepare(self, state: SequenceState) -> None:
        """Nothing to read."""

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """Empty drafts."""
        return [Draft() for _ in sequences]

    def observe(self, rounds: Sequence[Round]) -> None:
        """Nothing to learn."""


@dataclass(slots=True)
class _Working:
    """A draft in the making: `shown` is what the draft model sees, in its own tokens."""

    state: SequenceState
    params: SamplingParams
    limit: int
    shown: list[int]
    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)
    failed: bool = False

    @property
    def position(self) -> int:
        """The place of the next token in the sequence."""
        return len(self.state.tokens) + len(self.tokens)

    def law(self, row: Logits) -> Law:
        # The drafted tokens are part of the history: penalties see them.
        history = [*self.state.tokens, *self.tokens] if self.params.uses_history else ()
        return next_law(row, self.params, history, self.position)

    def draft(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(self.laws), self.failed)


# What a one-hot law is softened to: enough of the row to tell a sure token from a doubtful one.
_SOFT = SamplingParams(temperature=1, top_k=16, top_p=1, min_p=0)


def _shape(law: Law, logits: Logits, params: SamplingParams) -> Law:
    """A law that shows how sure the draft is, which the one-hot law of temperature 0 does not."""
    return law if params.temperature > 0 else next_law(logits, _SOFT)


class ModelDrafter:
    """Samples the proposal from a smaller model, all sequences together, one decode per depth.

    vocabulary: how it reads the target's tokens, and which of them it can propose; a number means
    that ids below it are the same in both models. temperature: the draft's own sampling
    temperature; None takes the target's. At target temperature 0 the draft is greedy too.

    A draft model that was not asked for a while reads only the last tokens of what it missed: its
    context may be any function of the committed text, and reading it all would cost more than
    asking it is worth. For the same reason its context may be smaller than the text: when it is
    full, the model goes on from the last half of what it holds.
    """

    _WINDOW = 64  # tokens
    _MARGIN = 16  # cells that are kept for what is drafted

    def __init__(
        self,
        lm: CachedLM,
        policy: LengthPolicy,
        vocabulary: VocabularyMap | int,
        temperature: float | None = None,
    ) -> None:
        self.lm = lm
        self.policy = policy
        self.vocabulary = SharedIds(vocabulary) if isinstance(vocabulary, int) else vocabulary
        self._temperature = temperature
        # By slot: how many first tokens, in the draft's count, are not shown.
        self._skipped: dict[int, int] = {}

    def prepare(self, state: SequenceState) -> None:
        """Decode all of the prompt but its last token, if the policy would draft now."""
        self._skipped[state.slot] = 0
        tokens = self._read(state)
        skip = self._skipped[state.slot] = self._fitting_skip(state, len(tokens))
        self.policy.start([self.lm.missing(state.slot, tokens[skip:])])
        if state.n_left > 1 and self.room(state) > 0 and self.policy.expects(0):
            with contextlib.suppress(DecodeError):  # the target goes on alone, or it works later
                self.lm.prefill(state.slot, tokens[skip:-1])

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """Draft until the policy, the limit or the draft model's context says stop."""
        self.policy.start([self._catch_up(s) for s in sequences])
        work = [self._begin(s, limit) for s, limit in zip(sequences, limits, strict=True)]
        active = list(range(len(work)))
        while True:
            active = [i for i in active if len(work[i].laws) < work[i].limit and self.policy.go(i)]
            if not active:
                return [w.draft() for w in work]
            active = self._extend(work, active)

    def observe(self, rounds: Sequence[Round]) -> None:
        """Pass the outcome on to the length policy."""
        self.policy.observe(rounds)

    def _catch_up(self, state: SequenceState) -> int:
        """How many tokens the draft model would read now, after what it missed is cut short."""
        tokens = self._read(state)
        before = self._skipped.get(state.slot, 0)
        missing = self.lm.missing(state.slot, tokens[before:])
        if missing > self._WINDOW:
            self._skipped[state.slot] = len(tokens) - self._WINDOW
        skip = self._skipped[state.slot] = self._fitting_skip(state, len(tokens))
        return missing if skip == before else self.lm.missing(state.slot, tokens[skip:])

    def _fitting_skip(self, state: SequenceState, n_tokens: int) -> int:
        """How many first tokens are not shown, so that the rest and a draft fit the context."""
        skip = self._skipped.get(state.slot, 0)
        wanted = min(self._MARGIN, self.lm.n_ctx // 4, state.n_left - 1)
        # The last draft token is never decoded here, so k of them need k - 1 cells more.
        if self.lm.n_ctx - (n_tokens - skip) + 1 >= wanted:
            return skip
        return n_tokens - max(1, self.lm.n_ctx // 2)

    def _begin(self, state: SequenceState, limit: int) -> _Working:
        skip = self._skipped.get(state.slot, 0)
        limit = min(limit, self.room(state))
        return _Working(state, self._params(state.params), limit, self._read(state)[skip:])

    def _read(self, state: SequenceState) -> list[int]:
        return self.vocabulary.read(state.slot, state.tokens)

    def room(self, state: SequenceState) -> int:
        """How many tokens the draft model can propose for a sequence; none that it cannot read."""
        if not self.vocabulary.can_read(state.highest):
            return 0
        n_tokens = len(self._read(state))
        n_shown = n_tokens - self._fitting_skip(state, n_tokens)
        return max(0, self.lm.n_ctx - n_shown + 1) if n_shown > 0 else 0

    def _params(self, params: SamplingParams) -> SamplingParams:
        if self._temperature is None or params.temperature == 0:
            return params
        return replace(params, temperature=self._temperature)

    def _extend(self, work: Sequence[_Working], active: Sequence[int]) -> list[int]:
        """One more token for each active draft; those that go on."""
        try:
            rows = self.lm.logits(
                [Request(work[i].state.slot, work[i].shown, 1, len(work[i].laws)) for i in active]
            )
        except DecodeError:
            for i in active:
                work[i].failed = True
            return []
        going = []
        for i, logits in zip(active, rows, strict=True):
            w = work[i]
            row = self.vocabulary.row(logits[0])
            if row is None:  # known before a token is drawn, so that it biases nothing
                self.policy.miss(i)
                continue
            try:
                law = w.law(row)
            except (InvalidLogits, UsageError):
                # NaN, or nothing left that is not banned: the target goes on alone.
                w.failed = True
                continue
            if self.policy.submit(i, lambda: _shape(law, row, w.params)):  # noqa: B023
                token = w.state.streams.at(w.position).draft.categorical(law)
                w.laws.append(law)
                w.tokens.append(token)
                w.shown.append(self.vocabulary.drafted(token))
                # The end is submitted like any other token; only what would follow is left out.
                if token not in w.state.end_tokens:
                    going.append(i)
        return going
