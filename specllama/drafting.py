"""Who proposes the next tokens.

A drafter must report the very laws that it drew from; beyond that anything goes, and no choice it
makes can change the law of the output, only how much of the proposal is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from specllama.acceptance import Draft, Round
from specllama.errors import DecodeError, InvalidLogits, UsageError
from specllama.lm import CachedLM, Request
from specllama.lookahead import LengthPolicy
from specllama.sampling import Law, Logits, SamplingParams, Streams, next_law


@dataclass(slots=True)
class SequenceState:
    """One sequence in the loop.

    slot: its number in the contexts. tokens: prompt and answer so far, all of them committed and
    at least one. n_left: how many tokens may still be emitted, at least 1 when a round begins.
    highest: the largest token id so far, which tells whether a draft with fewer tokens can read it.
    """

    slot: int
    tokens: list[int]
    params: SamplingParams
    streams: Streams
    n_left: int
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
    """A draft in the making: `tokens` are the committed ones and then the drafted ones.

    skip: how many of the first tokens are not shown to the draft model.
    """

    state: SequenceState
    params: SamplingParams
    limit: int
    skip: int
    tokens: list[int]
    laws: list[Law]
    failed: bool = False

    def request(self) -> Request:
        return Request(self.state.slot, self.tokens[self.skip :])

    def draft(self) -> Draft:
        drafted = self.tokens[len(self.tokens) - len(self.laws) :]
        return Draft(tuple(drafted), tuple(self.laws), self.failed)


# What a one-hot law is softened to: enough of the row to tell a sure token from a doubtful one.
_SOFT = SamplingParams(temperature=1, top_k=16, top_p=1, min_p=0)


def _shape(law: Law, logits: Logits, params: SamplingParams) -> Law:
    """A law that shows how sure the draft is, which the one-hot law of temperature 0 does not."""
    return law if params.temperature > 0 else next_law(logits, _SOFT)


class ModelDrafter:
    """Samples the proposal from a smaller model, all sequences together, one decode per depth.

    n_shared: ids below it mean the same in both models; others are never drafted, and a sequence
    that contains one is not shown to the draft model. temperature: the draft's own sampling
    temperature; None takes the target's. At target temperature 0 the draft is greedy too.

    A draft model that was not asked for a while reads only the last tokens of what it missed: its
    context may be any function of the committed text, and reading it all would cost more than
    asking it is worth.
    """

    _WINDOW = 64  # tokens

    def __init__(
        self,
        lm: CachedLM,
        policy: LengthPolicy,
        n_shared: int,
        temperature: float | None = None,
    ) -> None:
        self.lm = lm
        self.policy = policy
        self._n_shared = n_shared
        self._temperature = temperature
        self._skipped: dict[int, int] = {}  # by slot: how many first tokens are not shown

    def prepare(self, state: SequenceState) -> None:
        """Decode all of the prompt but its last token, if the policy would draft now."""
        self._skipped[state.slot] = 0
        self.policy.start([self.lm.missing(state.slot, state.tokens)])
        if state.n_left > 1 and self.room(state) > 0 and self.policy.expects(0):
            self.lm.prefill(state.slot, state.tokens[:-1])

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
        skip = self._skipped.get(state.slot, 0)
        missing = self.lm.missing(state.slot, state.tokens[skip:])
        if missing > self._WINDOW:
            self._skipped[state.slot] = len(state.tokens) - self._WINDOW
        return min(missing, self._WINDOW)

    def _begin(self, state: SequenceState, limit: int) -> _Working:
        skip = self._skipped.get(state.slot, 0)
        limit = min(limit, self.room(state))
        return _Working(state, self._params(state.params), limit, skip, list(state.tokens), [])

    def room(self, state: SequenceState) -> int:
        """How many tokens the draft model can propose for a sequence; none that it cannot read."""
        if state.highest >= self._n_shared:
            return 0
        # The last draft token is never decoded here, so k of them need k - 1 cells more.
        return max(0, self.lm.n_ctx - len(state.tokens) + self._skipped.get(state.slot, 0) + 1)

    def _params(self, params: SamplingParams) -> SamplingParams:
        if self._temperature is None or params.temperature == 0:
            return params
        return replace(params, temperature=self._temperature)

    def _extend(self, work: Sequence[_Working], active: Sequence[int]) -> list[int]:
        """One more token for each active draft; those that go on."""
        try:
            rows = self.lm.logits([work[i].request() for i in active])
        except DecodeError:
            for i in active:
                work[i].failed = True
            return []
        going = []
        for i, logits in zip(active, rows, strict=True):
            w = work[i]
            try:
                shared = logits[0][: self._n_shared]
                law = next_law(shared, w.params, w.tokens, len(w.tokens))
            except (InvalidLogits, UsageError):
                # NaN, or nothing left that is not banned: the target goes on alone.
                w.failed = True
                continue
            if self.policy.submit(i, lambda: _shape(law, shared, w.params)):  # noqa: B023
                w.laws.append(law)
                rng = w.state.streams.at(len(w.tokens)).draft
                w.tokens.append(rng.categorical(law))
                going.append(i)
        return going
