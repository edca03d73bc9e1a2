"""The random numbers: tokens drawn from a law, and the streams that a seed gives to each row."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from typing import cast

import numpy as np
import pytest
from chance import chi_square, frequency_error

from specllama.sampling import Law, NumpyRng, Rng, SamplingParams, Streams, next_law

JUST_BELOW_ONE = 1 - 2.0**-53
WHOLE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


class Given:
    """In place of a NumPy generator: the uniforms it is told to give."""

    def __init__(self, *uniforms: float) -> None:
        self._uniforms = itertools.cycle(uniforms)

    def random(self) -> float:
        return next(self._uniforms)


def given(*uniforms: float) -> NumpyRng:
    return NumpyRng(cast(np.random.Generator, Given(*uniforms)))


def fresh(seed: int) -> NumpyRng:
    return NumpyRng(np.random.default_rng(seed))


def test_each_uniform_picks_the_token_whose_cell_it_lies_in() -> None:
    law = Law(np.array([0.25, 0.0, 0.5, 0.25]))
    sparse = Law(law.probs, np.array([2, 3, 5, 8]))
    for uniform, at in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (0.9999, 3)):
        assert given(uniform).categorical(law) == at
        assert given(uniform).categorical(sparse) == [2, 3, 5, 8][at]


@pytest.mark.parametrize(
    "probs",
    [
        [0, 0.3, 0, 0.7, 0],
        [0, 0, 1, 0, 0],
        [0.1] * 10 + [0],
        [0, 1e-300, 1 - 1e-15, 0, 1e-15, 0],
        [0, *[1 / 3] * 3, 0, 0],
    ],
)
def test_a_cell_of_width_zero_is_never_hit_at_its_edges(probs: list[float]) -> None:
    edges = np.cumsum([0.0, *probs]) / sum(probs)
    uniforms = {0.0, JUST_BELOW_ONE}
    for edge in edges:
        uniforms |= {float(np.nextafter(edge, side)) for side in (-1, 2)} | {float(edge)}
    # 1.0 is no uniform, but a product that rounds up to the whole mass acts as one.
    for uniform in sorted(u for u in uniforms if 0 <= u <= 1):
        assert probs[given(uniform).categorical(Law(np.array(probs)))] > 0


def test_every_token_of_a_large_vocabulary_has_its_cell() -> None:
    # In a float32 running sum tens of thousands of these would have none.
    row = (np.random.default_rng(3).normal(size=151_936) * 2).astype(np.float32)
    law = next_law(row, WHOLE)
    before = Fraction(0)
    middles = {}
    for token, prob in enumerate(law.probs.tolist()):
        if token % 1_000 == 0:
            middles[token] = float(before + Fraction(prob) / 2)
        before += Fraction(prob)
    assert [given(middle).categorical(law) for middle in middles.values()] == list(middles)


@pytest.mark.parametrize("ids", [None, np.array([1, 4, 6, 7, 90])])
def test_tokens_come_as_often_as_the_law_says(ids: np.ndarray | None) -> None:
    law = Law(np.array([0.4, 0.05, 0.0, 0.3, 0.25]), ids)
    rng = fresh(1)
    counts = Counter(rng.categorical(law) for _ in range(30_000))
    exact = {t: law.prob(t) for t in (range(5) if ids is None else ids.tolist())}
    statistic, limit = chi_square(counts, exact)
    assert statistic < limit
    # The same counts refute a law that is off by 0.05.
    exact[min(exact)] -= 0.05
    exact[max(exact)] += 0.05
    statistic, limit = chi_square(counts, exact)
    assert statistic > limit


def test_coins_fall_as_often_as_they_should() -> None:
    rng, n = fresh(2), 20_000
    for prob in (0.1, 0.5, 0.93):
        heads = sum(rng.bernoulli(prob) for _ in range(n))
        assert heads / n == pytest.approx(prob, abs=frequency_error(n))


def test_certain_coins_are_certain_at_the_ends_of_the_unit_interval() -> None:
    for uniform in (0.0, JUST_BELOW_ONE):
        assert given(uniform).bernoulli(0.0) is False
        assert given(uniform).bernoulli(1.0) is True
    assert given(0.0).bernoulli(5e-324) is True


# Streams

FOUR = Law(np.full(4, 0.25))
KINDS = ("draft", "acceptance", "correction")


def draws(rng: Rng, n: int) -> list[int]:
    return [rng.categorical(FOUR) for _ in range(n)]


def of(streams: Streams, kind: str, n: int = 40) -> list[int]:
    return draws(getattr(streams, kind), n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63, -(2**64), 2**500])
@pytest.mark.parametrize("row", [0, 3, -1, "a name", "имя", "\ud83d", ""])
def test_the_same_seed_and_row_give_the_same_numbers(kind: str, seed: int, row: int | str) -> None:
    assert of(Streams.seeded(seed, row), kind) == of(Streams.seeded(seed, row), kind)


def test_other_seeds_rows_and_kinds_give_other_numbers() -> None:
    seeds = [0, 1, 2, -1, -2, 2**32, 2**32 + 1, 2**64, -(2**64), 2**500, 10**40]
    rows: list[int | str] = [0, 1, 2, 50, -1, "", "a", "b", "a " * 100, "1.0"]
    made = {
        (seed, row, kind): tuple(of(Streams.seeded(seed, row), kind))
        for seed in seeds
        for row in rows
        for kind in KINDS
    }
    assert len(set(made.values())) == len(made) == len(seeds) * len(rows) * len(KINDS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 0, "draft"), (0, 0, "acceptance")),
        ((0, 0, "acceptance"), (0, 0, "correction")),
        ((0, 0, "draft"), (0, 0, "correction")),
        ((0, 0, "draft"), (1, 0, "draft")),
        ((1, 0, "draft"), (-1, 0, "draft")),
        ((0, 0, "draft"), (0, 1, "draft")),
        ((0, "a", "correction"), (0, "b", "correction")),
    ],
)
def test_streams_are_independent(one: tuple[int, int, str], other: tuple[int, int, str]) -> None:
    left, right = (of(Streams.seeded(seed, row), kind, 6_000) for seed, row, kind in (one, other))
    uniform = {(a, b): 1 / 16 for a in range(4) for b in range(4)}
    for lag in (0, 1):
        counts = Counter(zip(left[lag:], right, strict=False))
        statistic, limit = chi_square(counts, uniform)
        assert statistic < limit


def test_a_row_does_not_depend_on_the_rows_before_it() -> None:
    alone = of(Streams.seeded(5, "x"), "draft")
    together = [Streams.seeded(5, name) for name in ("a", "x", "b")]
    mixed = [[draws(streams.draft, 1)[0] for streams in together] for _ in range(40)]
    assert [each[1] for each in mixed] == alone


def test_numbers_are_the_same_in_every_process_and_release() -> None:
    streams = Streams.seeded(-7, "row")
    law = Law(np.full(1000, 1e-3))
    drawn = [r.categorical(law) for r in (streams.draft, streams.acceptance, streams.correction)]
    assert drawn == [709, 680, 613]


def text(seed: int, params: SamplingParams) -> tuple[int, ...]:
    """Twenty tokens of a model that depends on the last one."""
    rng = Streams.seeded(seed).correction
    tokens = [0]
    for _ in range(20):
        row = np.random.default_rng(tokens[-1]).normal(size=50).astype(np.float32)
        tokens.append(rng.categorical(next_law(row, params)))
    return tuple(tokens)


def test_seeds_matter_above_temperature_zero_and_not_at_it() -> None:
    assert len({text(seed, WHOLE) for seed in range(10)}) >= 9
    assert len({text(seed, SamplingParams(temperature=0)) for seed in range(10)}) == 1
