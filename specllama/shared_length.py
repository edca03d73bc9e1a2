"""How many tokens to draft for several sequences at once, all of them equally many.

Where a pass over the weights takes equally many rows of every sequence, one that drafts more than
the others costs a pass of its own. So a round has one draft length, chosen from past rounds and
measured times before anything is drawn. Each row is worth the same to all: with rows to spare for
more sequences than there are drafts to gain from, nothing is drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specllama.acceptance import Round
from specllama.costs import Budget, CostTable
from specllama.lookahead import MAX_DRAFT_TOKENS
from specllama.sampling import Law


class SharedLength:
    """The number of draft tokens that gains most for all sequences of a round together.

    draft: times of the draft model's decode by rows. forecast: acceptance of a draft token, the
    mean of the last hundred and more. limit: most draft tokens of a sequence in a round.

    While drafting does not pay, one token is drafted as seldom as keeps what it is expected to lose
    at about a hundredth of the time, and not at all when even perfect drafts could not pay.
    """

    _PROBE_SHARE = 0.012
    _MOST_SAVED_MS = 2000.0
    _LABEL_WEIGHT = 0.01
    _PRIOR = 4
    # Tokens that the draft missed are read once and then serve many rounds.
    _AMORTISED = 64
    _UNMEASURED = 1  # draft tokens until there are times to go by

    def __init__(
        self,
        budget: Budget,
        draft: CostTable,
        forecast: float = 0.7,
        limit: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self.budget, self.draft = budget, draft
        self.forecast = forecast
        self.is_on = True  # whether drafting paid when it was last asked
        self.length = 0  # draft tokens of each sequence in this round
        self._limit = limit
        self._drafted: list[int] = []
        self._saved_ms = 0.0
        self._probing = False
        self._n_labels = 0

    @property
    def is_measured(self) -> bool:
        """Whether there are times to go by."""
        return self.budget.costs.is_measured and self.draft.is_measured

    def start(self, behind: Sequence[int]) -> None:
        """Choose the length of this round."""
        self._drafted = [0] * len(behind)
        self._probing = False
        if not self.is_measured:
            self.length = min(self._UNMEASURED, self._limit)
            return
        if self.budget.is_resting:
            self.length = 0
            return
        reading_ms = max(0.0, self.draft.ms(sum(behind)) - self.draft.ms(len(behind)))
        gain, self.length = self._best(self.forecast, reading_ms)
        self.is_on = gain > 0
        if gain <= 0:
            self.length = 1 if self._may_probe(gain, reading_ms) else 0

    def _best(self, acceptance: float, reading_ms: float) -> tuple[float, int]:
        """(tokens gained by all sequences net of the time's worth, draft tokens of each)."""
        n, rate = self.budget.n_sequences, self.budget.rate
        step, tokens, survival = self.draft.ms(n), 0.0, 1.0
        best, at = -math.inf, 0
        for m in range(1, self._limit + 1):
            survival *= acceptance
            tokens += n * survival
            ms = m * step + self.budget.extra_ms(n * m) + reading_ms / self._AMORTISED
            if tokens - rate * ms > best:
                best, at = tokens - rate * ms, m
        return best, at

    def _may_probe(self, gain: float, reading_ms: float) -> bool:
        """Whether perfect drafts would pay, and what a probe loses has been saved up."""
        if self._best(1.0, 0.0)[0] <= 0:
            return False
        loss = -gain / self.budget.rate + reading_ms
        if loss > self._saved_ms:
            return False
        self._saved_ms -= loss
        self._probing = True
        return True

    def expects(self, i: int) -> bool:
        """Whether drafting paid in the last rounds, so that a prompt is read for it."""
        return self.is_on

    def go(self, i: int) -> bool:
        """Up to the length of the round."""
        return self._drafted[i] < self.length

    def submit(self, i: int, shape: Callable[[], Law]) -> bool:
        """Always: the length is chosen already."""
        self._drafted[i] += 1
        self.budget.take(1)
        return True

    def miss(self, i: int) -> None:
        """What was not proposed was not accepted either, so that it counts for the next lengths."""
        self._learn(0.0)

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn from the verified positions how much of a draft is kept."""
        if not self._probing:
            saved = self._saved_ms + self._PROBE_SHARE * self.budget.last_ms
            self._saved_ms = min(saved, self._MOST_SAVED_MS)
        for outcome in rounds:
            for label in outcome.acceptances:
                self._learn(label)

    def _learn(self, label: float) -> None:
        self._n_labels += 1
        weight = max(self._LABEL_WEIGHT, 1 / (self._n_labels + self._PRIOR))
        self.forecast += weight * (label - self.forecast)
