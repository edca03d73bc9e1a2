"""How many answers to work on at once: as many as give the most rows a millisecond."""

from __future__ import annotations

from pathlib import Path

from specllama import calibration
from specllama.calibration import Knowledge
from specllama.costs import CostTable
from specllama.lm import CachedLM

COUNTS = (1, 2, 4, 8, 16, 32)
MOST = COUNTS[-1]
# Fewer answers at once take less memory and are finished sooner, which is worth a little.
_NEARLY = 0.95


def measured(target: CachedLM, memo: Path) -> CostTable:
    """Times of the target's decode for every number that is considered.

    memo: where they are kept with what else is known of the pair. target: a context for one
    sequence, with `MOST` rows of logits.
    """
    known = calibration.recall(memo) or Knowledge()
    timings = known.target.timings()
    counts = [n for n in COUNTS if n not in timings and n <= target.max_rows]
    if counts:
        calibration.measure(target, known.target, MOST, all_logits=True, counts=counts)
        calibration.store(memo, known)
    return known.target


def choose(costs: CostTable, most: int) -> int:
    """The number of rows, at most so many, that come nearly fastest: rows over milliseconds."""
    rates = {n: n / costs.ms(n) for n in (*COUNTS, most) if n <= most}
    best = max(rates.values())
    return min(n for n, rate in rates.items() if rate >= _NEARLY * best)


def grown(memo: Path, single: Path) -> None:
    """Begin the knowledge of a pair with several sequences with that of one sequence."""
    if calibration.recall(memo) is None and (known := calibration.recall(single)) is not None:
        calibration.store(memo, known)
