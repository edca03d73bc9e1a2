"""What decodes cost on this machine, and what a round may spend: measured, never modelled."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence


class CostTable:
    """Milliseconds of one decode by its number of rows, for one model: a staircase, looked up.

    A number of rows that was never measured costs what the next larger measured one does; beyond
    the largest, time grows in proportion. More rows can cost less: kernels that take four rows at
    a time are slower with three.
    """

    _KEPT = 9  # timings per number of rows
    _STALE = 4  # new timings after which the steps are taken again

    def __init__(self, timings: Mapping[int, Sequence[float]] | None = None) -> None:
        self._timings = {
            rows: deque(values, self._KEPT) for rows, values in (timings or {}).items()
        }
        self._steps: list[tuple[int, float]] = []
        self._new = self._STALE

    def record(self, rows: int, ms: float) -> None:
        """One more measured decode."""
        known = len(self._timings.get(rows, ())) >= self._STALE
        self._timings.setdefault(rows, deque(maxlen=self._KEPT)).append(ms)
        self._new += 1 if known else self._STALE

    @property
    def is_measured(self) -> bool:
        """Whether there is a time for one row and for more."""
        return 1 in self._timings and len(self._timings) > 1

    def ms(self, rows: int) -> float:
        """Milliseconds of a decode of so many rows; 0 for none."""
        if rows <= 0:
            return 0.0
        if self._new >= self._STALE:
            self._steps = [(n, _typical(self._timings[n])) for n in sorted(self._timings)]
            self._new = 0
        for measured, ms in self._steps:
            if rows <= measured:
                return ms
        largest, ms = self._steps[-1]
        return ms * rows / largest

    def timings(self) -> dict[int, list[float]]:
        """What is kept, for storing; the constructor takes it back."""
        return {rows: list(values) for rows, values in sorted(self._timings.items())}

    def least(self, before: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
        """The shortest of these times and of those from before, as many as make a step stale.

        Long texts and other work only ever add to a time, and neither needs to be there when the
        times are used again.
        """
        least = {}
        for rows in sorted({*before, *self._timings}):
            # What was recalled before is among the times that are kept now: it counts once.
            both = Counter(before.get(rows, ())) | Counter(self._timings.get(rows, ()))
            least[rows] = sorted(both.elements())[: self._STALE]
        return least


def _typical(times: Iterable[float]) -> float:
    """The lower quartile: other work on the machine only ever adds to a time."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


class Budget:
    """What one more row of the target's decode costs in tokens, at the pace of recent rounds.

    One for all drafters of a loop: a row is a row, whoever asks for it. Now and then a round is
    left without drafts, so that the time of plain decoding, which all is measured against, stays
    fresh. clock: seconds. redoes: whether a rejection means that the tokens before it are decoded
    again in the next round.
    """

    # The pace of the last hundred rounds, and of some plain ones: a lucky streak must not make
    # ordinary gains look too small.
    _DECAY, _PLAIN_ROUNDS = 0.99, 16
    _REST_AFTER = 64  # rounds with drafts; the gain of one in so many is lost

    def __init__(
        self,
        costs: CostTable,
        clock: Callable[[], float] = time.perf_counter,
        *,
        redoes: bool = False,
    ) -> None:
        self.costs = costs
        self._clock = clock
        self._redoes = redoes
        self._tokens = self._ms = 0.0
        self._begun = 0.0
        self.n_sequences = 1
        self._since_rest = 0
        self.rows = self._least_rows = 1
        self.last_ms = 0.0

    def start(self, n_sequences: int, n_rows: int | None = None) -> None:
        """A round begins: n_rows are decoded whatever is drafted, None: one per sequence."""
        self._begun = self._clock()
        self.n_sequences = n_sequences
        self.rows = self._least_rows = n_sequences if n_rows is None else n_rows

    def take(self, n_rows: int) -> None:
        """So many rows more will be decoded."""
        self.rows += n_rows

    def finish(self, n_tokens: int) -> None:
        """The round is over and gave so many tokens."""
        self._since_rest = self._since_rest + 1 if self.rows > self._least_rows else 0
        self.rows = self.n_sequences  # what is asked before the next round is asked of a new one
        self.last_ms = 1000 * (self._clock() - self._begun)
        self._tokens = self._DECAY * self._tokens + n_tokens
        self._ms = self._DECAY * self._ms + self.last_ms

    @property
    def is_resting(self) -> bool:
        """Whether this round is one without drafts."""
        return self._since_rest >= self._REST_AFTER

    @property
    def rate(self) -> float:
        """Tokens per millisecond that a choice has to beat, at least those of plain decoding."""
        n, ms = self.n_sequences, self.costs.ms(self.n_sequences)
        mixed = (self._tokens + self._PLAIN_ROUNDS * n) / (self._ms + self._PLAIN_ROUNDS * ms)
        return max(n / ms, mixed)

    def extra_ms(self, n_rows: int) -> float:
        """Milliseconds that so many rows more add to the decode."""
        return self.costs.ms(self.rows + n_rows) - self.costs.ms(self.rows)

    def best(
        self, chances: Sequence[float], drafting_ms: Callable[[int], float]
    ) -> tuple[float, int]:
        """How many draft tokens gain most: (tokens gained net of the time's worth, how many).

        chances: that the first m of them survive, for m = 1, 2, ..., at least one; drafting_ms(m):
        time to draft m. The gain is negative when none pays.
        """
        rate, worth = self.rate, 0.0
        best, at = -math.inf, 0
        alone = self.costs.ms(self.rows)
        for m, chance in enumerate(chances, 1):
            beside = self.costs.ms(self.rows + m)
            spent = drafting_ms(m) + beside - alone
            if self._redoes:
                # One row, and those of the accepted tokens where not all m are.
                spent += self._redone_ms(m, 1 + worth - m * chance, beside)
            worth += chance
            gain = worth - rate * spent
            if gain > best:
                best, at = gain, m
        return best, at

    def _redone_ms(self, m: int, expected: float, beside: float) -> float:
        """What a rejection among m tokens is expected to cost in the next round.

        The row of the last token before them and those of the accepted ones are decoded again.
        expected: rows, over all outcomes. beside: milliseconds of a decode of that round without.
        """
        n_rows = max(1, math.ceil(expected))
        return expected / n_rows * (self.costs.ms(self.rows + m + n_rows) - beside)
