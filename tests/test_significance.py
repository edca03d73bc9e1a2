from __future__ import annotations

import math

import numpy as np
import pytest

from specllama.significance import chi_square_limit, chi_square_tail, detectable_distance


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [
        # From tables of the chi-square distribution.
        (3.841459, 1, 0.05),
        (6.634897, 1, 0.01),
        (9.487729, 4, 0.05),
        (18.30704, 10, 0.05),
        (29.58830, 10, 0.001),
        (124.3421, 100, 0.05),
        (77.92947, 100, 0.95),
    ],
)
def test_tails_are_those_of_the_tables(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)


@pytest.mark.parametrize("x", [0.1, 1, 3, 10, 100, 300])
def test_two_degrees_of_freedom_are_an_exponential(x: float) -> None:
    assert chi_square_tail(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-10)


@pytest.mark.parametrize("x", [0.5, 3, 20, 60])
def test_four_degrees_of_freedom_have_a_closed_form_too(x: float) -> None:
    assert chi_square_tail(x, 4) == pytest.approx(math.exp(-x / 2) * (1 + x / 2), rel=1e-10)


def test_the_edges() -> None:
    assert chi_square_tail(5, 0) == 1
    assert chi_square_tail(0, 3) == 1
    assert chi_square_tail(math.inf, 3) == 0
    assert 0 <= chi_square_tail(1e5, 50) < 1e-300


@pytest.mark.parametrize("freedom", [1, 7, 400])
def test_the_limit_is_where_the_tail_is_the_level(freedom: int) -> None:
    assert chi_square_tail(chi_square_limit(freedom, 1e-6), freedom) == pytest.approx(1e-6)


def test_the_distance_that_is_stated_is_found() -> None:
    n, cells = 4000, 8
    distance = detectable_distance(n, cells - 1, 1e-6)
    limit = chi_square_limit(cells - 1, 1e-6)
    flat = np.full(cells, 1 / cells)
    # The hardest to find: every cell off by as much, up and down.
    off = flat + distance * np.where(np.arange(cells) % 2, 1, -1) * 2 / cells
    rng = np.random.default_rng(3)
    counts = rng.multinomial(n, off, size=2000)
    statistics = ((counts - n * flat) ** 2 / (n * flat)).sum(axis=1)
    assert (statistics > limit).mean() > 0.97
    half = flat + (off - flat) / 2
    counts = rng.multinomial(n, half, size=2000)
    statistics = ((counts - n * flat) ** 2 / (n * flat)).sum(axis=1)
    assert (statistics > limit).mean() < 0.5


def test_nothing_is_found_without_draws_or_cells() -> None:
    assert detectable_distance(0, 5, 1e-6) == 1
    assert detectable_distance(100, 0, 1e-6) == 1
