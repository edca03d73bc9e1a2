"""Statistical bounds that any seed passes, for tests of the real random streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

Cell = TypeVar("Cell")

# The chance that an assertion fails although the code is right.
LEVEL = 1e-9


def chi_square(counts: Mapping[Cell, int], law: Mapping[Cell, float]) -> tuple[float, float]:
    """Pearson's statistic, and the limit that it passes with a chance below LEVEL.

    The limit is the tail bound of Laurent and Massart, "Adaptive estimation of a quadratic
    functional by model selection" (2000), lemma 1: no quantile function needed. A law that is off
    by a total variation distance of d adds at least 4 * n * d**2 to the statistic.
    """
    n = sum(counts.values())
    cells = {cell: prob for cell, prob in law.items() if prob > 0}
    assert set(counts) <= set(cells), "a cell of probability 0 was hit"
    assert min(cells.values()) * n >= 20, "too few draws for the rarest cell"
    statistic = sum((counts.get(c, 0) - n * p) ** 2 / (n * p) for c, p in cells.items())
    freedom, log_level = len(cells) - 1, -math.log(LEVEL)
    return statistic, freedom + 2 * math.sqrt(freedom * log_level) + 2 * log_level


def frequency_error(n: int) -> float:
    """How far a frequency out of n trials strays with a chance below LEVEL (Hoeffding)."""
    return math.sqrt(math.log(2 / LEVEL) / (2 * n))
