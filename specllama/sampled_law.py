"""Many short speculative answers after one text, counted against the target's own law.

What is tested is the joint law of several tokens: some wrong rules leave the first one right. The
rows of both models are remembered, so that thousands of answers cost few decodes and both sides of
the comparison use the same rows; what is left to differ is the rule, the laws that the drafter
reports, and the random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from specllama.acceptance import Verifier
from specllama.coupling import KeyedStreams
from specllama.drafting import Drafter, ModelDrafter, SequenceState
from specllama.lm import CachedLM, LogitRows, Request
from specllama.sampling import Law, Logits, SamplingParams, Streams, next_law
from specllama.significance import chi_square_tail, detectable_distance
from specllama.speculation import Speculator

LEVEL = 1e-6
"""The chance that a right build is called wrong by one test."""
_LEAST = 5.0  # answers expected in a cell of the chi-square test


class Memo(CachedLM):
    """A model whose rows are decoded one at a time and remembered by their prefix."""

    def __init__(self, lm: CachedLM) -> None:
        super().__init__(lm._context)
        self._held = lm._held  # one mirror for one context
        self._rows: dict[tuple[int, ...], Logits] = {}

    def row(self, tokens: Sequence[int]) -> Logits:
        """Next-token logits after these tokens, to be kept."""
        key = tuple(tokens)
        if key not in self._rows:
            [[row]] = super().logits([Request(0, list(tokens))])
            self._rows[key] = row.copy()
        return self._rows[key]

    def logits(self, requests: Sequence[Request]) -> list[LogitRows]:
        """Lists of rows, which is all that the loop asks of an array."""
        return [
            cast(LogitRows, [self.row(tokens[:end]) for end in ends])
            for tokens, ends in (
                (r.tokens, range(len(r.tokens) - r.n_last + 1, len(r.tokens) + 1))
                for r in requests
            )
        ]

    def prefill(self, slot: int, tokens: list[int]) -> int:
        """Nothing: what is needed is decoded when it is asked for."""
        return 0

    def missing(self, slot: int, tokens: list[int]) -> int:
        """As if all were held."""
        return 1


@dataclass(frozen=True)
class Setting:
    """What is sampled: the models with remembered rows, and how answers are drawn.

    n_tokens: as in Speculator. length: tokens of an answer. seed: of the random streams.
    """

    target: Memo
    drafter: Drafter
    params: SamplingParams
    n_tokens: int
    length: int
    seed: int
    is_coupled: bool = False

    def law(self, tokens: Sequence[int]) -> Law:
        """The target's law after these tokens, computed without the loop."""
        row = self.target.row(tokens)[: self.n_tokens]
        return next_law(row, self.params, tokens, len(tokens))

    def answers(self, verify: Verifier, prefix: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """One answer after another, without end."""
        speculator = Speculator(self.target, self.drafter, verify, self.n_tokens)
        streams = KeyedStreams.keyed if self.is_coupled else Streams.seeded
        row = 0
        while True:
            state = SequenceState(
                0, list(prefix), self.params, streams(self.seed, row), self.length
            )
            self.drafter.prepare(state)
            while state.n_left > 0:
                speculator.round([state])
            yield tuple(state.tokens[len(prefix) :])
            row += 1


def remembered(drafter: Drafter) -> Drafter:
    """A drafter that was made for this, with its model's rows remembered."""
    if isinstance(drafter, ModelDrafter):
        drafter.lm = Memo(drafter.lm)
    return drafter


@dataclass(frozen=True)
class Fit:
    """How well answers fit a law: Pearson's statistic, its degrees of freedom, and their number.

    impossible: answers with a token to which the law gives no chance.
    """

    statistic: float = 0.0
    freedom: int = 0
    n: int = 0
    impossible: int = 0

    def __add__(self, other: Fit) -> Fit:
        """Both together."""
        return Fit(
            self.statistic + other.statistic,
            self.freedom + other.freedom,
            self.n + other.n,
            self.impossible + other.impossible,
        )

    @property
    def tail(self) -> float:
        """The chance of so large a statistic if the law is right."""
        return 0.0 if self.impossible else chi_square_tail(self.statistic, self.freedom)

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against the law."""
        return self.tail >= LEVEL

    @property
    def detectable(self) -> float:
        """The total variation distance that would have been found."""
        return detectable_distance(self.n, self.freedom, LEVEL)


def fit(setting: Setting, prefix: Sequence[int], answers: Mapping[tuple[int, ...], int]) -> Fit:
    """Chi-square of answers against the target's law of so many tokens after a text.

    Cells are beginnings of answers with at least five expected; what is rarer is counted together
    with what it has in common.
    """
    n = sum(answers.values())
    root = _Cell.grown(setting, prefix, 1.0, n, setting.length)
    impossible = sum(times for tokens, times in answers.items() if not root.count(tokens, times))
    cells = [(count, n * prob) for count, prob in root.leaves()]
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return Fit(statistic, len(cells) - 1, n, impossible)


@dataclass
class _Cell:
    """Answers that begin in one way, of this probability; parted by their next token if possible.

    rest: the cell of all other next tokens, where there are any.
    """

    prob: float
    law: Law | None = None
    parts: dict[int, _Cell] = field(default_factory=dict)
    rest: _Cell | None = None
    counted: int = 0

    @classmethod
    def grown(
        cls, setting: Setting, prefix: Sequence[int], prob: float, n: int, depth: int
    ) -> _Cell:
        """The cell with its parts, each of at least _LEAST of n answers."""
        cell = cls(prob)
        if depth == 0 or n * prob < 2 * _LEAST:
            return cell
        law = cell.law = setting.law(prefix)
        falling = np.argsort(-law.probs, kind="stable")
        n_likely = int(np.count_nonzero(n * prob * law.probs >= _LEAST))
        rest = float(law.probs[falling[n_likely:]].sum())
        while n_likely and 0 < n * prob * rest < _LEAST:
            n_likely -= 1
            rest += float(law.probs[falling[n_likely]])
        if n_likely and rest > 0:
            cell.rest = cls(prob * rest)
        for at in falling[:n_likely].tolist():
            token = at if law.ids is None else int(law.ids[at])
            part = prob * float(law.probs[at])
            cell.parts[token] = cls.grown(setting, [*prefix, token], part, n, depth - 1)
        return cell

    def count(self, tokens: Sequence[int], times: int) -> bool:
        """Count an answer where it belongs; whether it is a possible one."""
        if self.law is None or not tokens:
            self.counted += times
            return True
        if self.law.prob(tokens[0]) <= 0:
            return False
        part = self.parts.get(tokens[0], self.rest)
        if part is None:
            self.counted += times
            return True
        return part.count(tokens[1:], times)

    def leaves(self) -> Iterator[tuple[int, float]]:
        """(answers counted, probability) of the cells that are not parted."""
        parts = [*self.parts.values(), *([self.rest] if self.rest else [])]
        if not parts:
            yield self.counted, self.prob
        for part in parts:
            yield from part.leaves()

