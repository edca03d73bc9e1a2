"""How surprising a chi-square statistic is, and what difference it would have shown."""

from __future__ import annotations

import math

_STEPS = 10_000


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-square variate with `freedom` degrees exceeds `statistic`.

    The regularised incomplete gamma function Q(freedom / 2, statistic / 2): its series below the
    mean, Lentz's continued fraction above it (Abramowitz and Stegun, 6.5.29 and 6.5.31). 1 without
    any freedom, and 0 for an infinite statistic.
    """
    if math.isinf(statistic):
        return 0.0
    if freedom <= 0 or statistic <= 0:
        return 1.0
    a, x = freedom / 2, statistic / 2
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1 - scale * _series(a, x) if x < a + 1 else scale * _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1 / a
    for n in range(1, _STEPS):
        term *= x / (a + n)
        total += term
        if term < total * 1e-16:
            break
    return total


def _fraction(a: float, x: float) -> float:
    b = x + 1 - a
    c, d = math.inf, 1 / b
    value = d
    for n in range(1, _STEPS):
        factor = -n * (n - a)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def chi_square_limit(freedom: int, level: float) -> float:
    """The statistic that is exceeded with a chance of `level`."""
    low, high = 0.0, 10.0 * freedom + 1000
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if chi_square_tail(middle, freedom) > level else (low, middle)
        )
    return high


def detectable_distance(n: int, freedom: int, level: float) -> float:
    """The total variation distance that n draws show, in 99 of 100 cases, at this level.

    A law that is off by d adds N >= 4 n d^2 to the mean of the statistic; what is above the limit
    then is taken from the normal approximation, of mean freedom + N and variance 2 freedom + 4 N.
    At most 1, and 1 where no distance would show.
    """
    if n == 0 or freedom <= 0:
        return 1.0
    limit, low, high = chi_square_limit(freedom, level), 0.0, 1e9
    for _ in range(200):
        added = (low + high) / 2
        reached = freedom + added - 2.33 * math.sqrt(2 * freedom + 4 * added)
        low, high = (added, high) if reached < limit else (low, added)
    return min(1.0, math.sqrt(high / (4 * n)))
