"""Proposals without a model: what followed the same words before, in the prompt or the answer.

Drafting costs nothing, so it is worth a try wherever a text repeats itself: code that is edited, a
text that is quoted, a list with a form. The law of such a guess is one-hot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specllama.acceptance import Draft, Round, overlap
from specllama.costs import Budget
from specllama.drafting import ModelDrafter, SequenceState
from specllama.lookahead import MAX_DRAFT_TOKENS, MeasuredLength
from specllama.sampling import Law


class SuffixAutomaton:
    """The longest end of a text that occurred before, kept up to date token by token.

    Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985): amortised
    constant time a token. Every state stands for substrings that end at the same positions; the
    suffix link of the last state leads to the longest end that also ends elsewhere.
    """

    # Links followed to note the newest place of shorter ends; more would cost more than it brings.
    _NOTED = 8

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._ends = [0]  # where an occurrence ends: the newest that was noted
        self._last = 0

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self._note_ends()
        self.tokens.append(token)
        current = self._new_state(self._length[self._last] + 1, len(self.tokens))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state < 0:
            self._link[current] = 0
        else:
            self._link[current] = self._split(state, token)
        self._last = current

    def _new_state(self, length: int, end: int) -> int:
        self._next.append({})
        self._link.append(0)
        self._length.append(length)
        self._ends.append(end)
        return len(self._length) - 1

    def _split(self, state: int, token: int) -> int:
        """The state that `token` leads to from `state`, without the longer substrings it means."""
        target = self._next[state][token]
        if self._length[state] + 1 == self._length[target]:
            return target
        clone = self._new_state(self._length[state] + 1, self._ends[target])
        self._next[clone] = dict(self._next[target])
        self._link[clone], self._link[target] = self._link[target], clone
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _note_ends(self) -> None:
        """Before the text grows, its present end becomes the newest place of what it ends with."""
        state = self._link[self._last]
        for _ in range(self._NOTED):
            if state <= 0:
                return
            self._ends[state] = len(self.tokens)
            state = self._link[state]

    def match(self) -> tuple[int, int]:
        """(length, end) of the longest end of the text that occurred before; (0, 0) if none did."""
        state = self._link[self._last]
        if state <= 0:
            return 0, 0
        return self._length[state], self._ends[state]


class LookupDrafter:
    """Proposes what followed the longest repeated end of the text.

    Guesses are kept by how long the repetition is, as a posterior mean of their acceptance with a
    slow forgetting; a proposal is made as long as the budget says that it pays.
    """

    _BUCKETS = (1, 3, 4, 6, 9, 16, 32)
    # What guesses are worth before any was seen: the longer the repetition, the surer.
    _EXPECTED = (0.3, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9)
    _PRIOR = 2.0  # tokens that this counts as
    _FORGET = 0.99
    _FORGIVE = 0.98

    def __init__(
        self, budget: Budget, limit: int = MAX_DRAFT_TOKENS, shortest: int = 3
    ) -> None:
        self.budget = budget
        self.shortest = shortest  # repetitions of fewer tokens say too little
        self._limit = limit
        self._texts: dict[int, SuffixAutomaton] = {}
        self._counts = [[0.0, 0.0] for _ in self._BUCKETS]  # accepted and rejected mass
        self._buckets: list[int | None] = []

    def prepare(self, state: SequenceState) -> None:
        """Read the prompt."""
        self._text(state)

    def offer(self, state: SequenceState, limit: int) -> tuple[float, list[int], int | None]:
        """(tokens expected to be gained, the proposal, its bucket); empty when it does not pay."""
        text = self._text(state)
        length, end = text.match()
        if length < self.shortest or not self.budget.costs.is_measured or self.budget.is_resting:
            return 0.0, [], None
        bucket = max(i for i, least in enumerate(self._BUCKETS) if length >= least)
        chance = self._chance(bucket)
        most = min(limit, self._limit, 4 * length, len(text.tokens) - end)
        following = text.tokens[end : end + most]
        ends = (i for i, token in enumerate(following, 1) if token in state.end_tokens)
        most = next(ends, most)
        gain, count = self.budget.best([chance**m for m in range(1, most + 1)], lambda m: 0.0)
        if gain <= 0:
            self._forgive(bucket)
            return 0.0, [], bucket
        return gain, text.tokens[end : end + count], bucket

    def _chance(self, bucket: int) -> float:
        """A bucket's acceptance; where little was seen, that of shorter repetitions at least."""
        mean = 0.0
        counts = zip(self._EXPECTED, self._counts, strict=True)
        for expected, (accepted, rejected) in itertools.islice(counts, bucket + 1):
            prior = self._PRIOR * max(expected, mean)
            mean = (prior + accepted) / (self._PRIOR + accepted + rejected)
        return mean

    def _forgive(self, bucket: int) -> None:
        """Move a bucket that is not tried any more back to where it began: texts change."""
        self._counts[bucket] = [self._FORGIVE * n for n in self._counts[bucket]]

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """The offers, as drafts."""
        self._buckets = []
        drafts = []
        for state, limit in zip(sequences, limits, strict=True):
            _, tokens, bucket = self.offer(state, limit)
            self._buckets.append(bucket)
            drafts.append(self.draft(tokens))
        return drafts

    def draft(self, tokens: Sequence[int]) -> Draft:
        """A draft of these tokens, with its rows taken from the budget."""
        self.budget.take(len(tokens))
        return Draft(tuple(tokens), tuple(map(Law.one_hot, tokens)))

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn how often guesses of each bucket are accepted."""
        for outcome, bucket in zip(rounds, self._buckets, strict=True):
            self.learn(outcome, bucket)

    def learn(self, outcome: Round, bucket: int | None) -> None:
        """The outcome of one offer."""
        if bucket is None:
            return
        counts = self._counts[bucket]
        for i, p in enumerate(outcome.target_laws[: outcome.accepted + 1]):
            kept = overlap(p, outcome.draft.laws[i])
            counts[0] = self._FORGET * counts[0] + kept
            counts[1] = self._FORGET * counts[1] + 1 - kept

    def _text(self, state: SequenceState) -> SuffixAutomaton:
        """The automaton of a sequence, brought up to date; built again for another text."""
        # Out of the table while it changes: an interrupt would leave it in pieces.
        text = self._texts.pop(state.slot, None)
        known = 0 if text is None else len(text.tokens)
        if text is None or text.tokens != state.tokens[:known]:
            text, known = SuffixAutomaton(), 0
        for token in state.tokens[known:]:
            text.append(token)
        self._texts[state.slot] = text
        return text


class BestDrafter:
    """Lookup or model, whichever is expected to gain more; chosen before anything is drawn."""

    def __init__(self, lookup: LookupDrafter, model: ModelDrafter, policy: MeasuredLength) -> None:
        self.lookup, self.model, self._policy = lookup, model, policy
        # Per sequence: its place among those of the model, or -1, and the bucket of a lookup.
        self._chosen: list[tuple[int, int | None]] = []

    def prepare(self, state: SequenceState) -> None:
        """Read the prompt, the draft model too if it would draft now."""
        self.lookup.prepare(state)
        self.model.prepare(state)

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        """One draft per sequence."""
        drafts = [Draft() for _ in sequences]
        self._chosen = [(-1, None)] * len(sequences)
        self._policy.start([1] * len(sequences))
        for_model: list[int] = []
        for i, (state, limit) in enumerate(zip(sequences, limits, strict=True)):
            gain, tokens, bucket = self.lookup.offer(state, limit)
            if tokens and gain >= self._model_gain(i, state):
                drafts[i] = self.lookup.draft(tokens)
                self._chosen[i] = (-1, bucket)
            else:
                self._chosen[i] = (len(for_model), None)
                for_model.append(i)
        if for_model:
            proposed = self.model.propose(
                [sequences[i] for i in for_model], [limits[i] for i in for_model]
            )
            for i, draft in zip(for_model, proposed, strict=True):
                drafts[i] = draft
        return drafts

    def _model_gain(self, i: int, state: SequenceState) -> float:
        """Tokens that the draft model is expected to gain, nothing where it cannot draft."""
        if not self._policy.is_measured or self.model.room(state) == 0:
            return 0.0
        return self._policy.expected(i)

    def observe(self, rounds: Sequence[Round]) -> None:
        """Tell each what became of its own proposals."""
        of_model = []
        for outcome, (at, bucket) in zip(rounds, self._chosen, strict=True):
            self.lookup.learn(outcome, bucket)
            if at >= 0:
                of_model.append(outcome)
        if of_model:
            self.model.observe(of_model)
