"""How many drafted tokens are kept, against what the laws of each round say.

The difference has mean zero whatever the models are, so a few hundred rounds show a rule that keeps
too much or too little, and a drafter that reports other laws than it drew from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specllama.acceptance import VERIFIERS, Draft, Round, TargetLaws, overlap
from specllama.sampling import Streams

FEWEST_ROUNDS = 30
"""Rounds below which nothing is said."""
_SIGMAS = 5.0


@dataclass(frozen=True)
class Acceptance:
    """Kept tokens a round against what the laws of each round say.

    kept: the mean over rounds. low, high: what it should be, which for the coupled rule is known
    within bounds only. error: one standard error of the difference.
    """

    rounds: int = 0
    kept: float = math.nan
    low: float = math.nan
    high: float = math.nan
    error: float = math.nan

    @property
    def ok(self) -> bool:
        """Whether enough was seen and the difference is within _SIGMAS standard errors."""
        if self.rounds < FEWEST_ROUNDS:
            return False
        slack = _SIGMAS * self.error + 1e-9
        return self.low - slack <= self.kept <= self.high + slack


class Tally:
    """A verifier that also adds up what is kept and what should be."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.kept: list[int] = []
        self.bounds: list[tuple[float, float]] = []

    def __call__(self, draft: Draft, target: TargetLaws, streams: Streams) -> Round:
        outcome = VERIFIERS[self._name](draft, target, streams)
        if draft.tokens:
            expected = _of_block if self._name == "block" else _of_tokens
            self.kept.append(outcome.accepted)
            self.bounds.append(expected(draft, target, outcome.accepted, self._name))
        return outcome

    def summary(self) -> Acceptance:
        """What was seen so far."""
        if not self.kept:
            return Acceptance()
        kept, bounds = np.array(self.kept, float), np.array(self.bounds)
        low, high = bounds.mean(axis=0).tolist()
        error = float((kept - bounds.mean(axis=1)).std() / math.sqrt(kept.size))
        return Acceptance(kept.size, float(kept.mean()), low, high, error)


def _of_block(
    draft: Draft, target: TargetLaws, accepted: int, rule: str
) -> tuple[float, float]:
    """Kept tokens of the block rule: a token is kept with its survival b' = min(1, b p/q), so from
    those before it the next one is kept with a chance of sum min(q, b p)."""
    expected, survival = 0.0, 1.0
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(i)
        expected += float(np.minimum(survival * p.probs, q.on(p)).sum())
        drafted = q.prob(token)
        survival = min(1.0, survival * p.prob(token) / drafted) if drafted > 0 else 0.0
        if survival == 0:
            break
    return expected, expected


def _of_tokens(
    draft: Draft, target: TargetLaws, accepted: int, rule: str
) -> tuple[float, float]:
    """Kept tokens of the other rules, position by position as far as the round came.

    The token rule keeps sum min(p, q) = 1 - d there, at a total variation distance of d; the
    coupled one between (1 - d) / (1 + d) and 1 - d.
    """
    low = high = 0.0
    for i in range(min(accepted + 1, len(draft.tokens))):
        same = overlap(target(i), draft.laws[i])
        high += same
        low += same if rule == "token" else same / (2 - same)
    return low, high
