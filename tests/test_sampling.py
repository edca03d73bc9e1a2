"""next_law against a slow twin, and every way in which logits and parameters can be unusable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specllama.sampling import Law, SamplingParams, next_law

Row = NDArray[np.float32]
WHOLE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
INF = math.inf


def twin(
    logits: Row, params: SamplingParams, history: Sequence[int] = ()
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that llama.cpp's chain keeps, likeliest first, and their probabilities.

    In the order logit bias, penalties, top-k, top-p, min-p, temperature; float64; everything
    sorted; ties by lowest id.
    """
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    n = params.penalty_last_n
    window = list(history) if n < 0 else list(history)[max(0, len(history) - n) :]
    for token in set(window):
        repeat = params.repeat_penalty
        values[token] = values[token] * repeat if values[token] <= 0 else values[token] / repeat
        values[token] -= window.count(token) * params.frequency_penalty + params.presence_penalty
    ids = np.argsort(-values, kind="stable")
    if params.top_k > 0:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        before = np.cumsum(softmax(values[ids])) - softmax(values[ids])
        ids = ids[(before < params.top_p) | (ids == ids[0])]
    if params.min_p > 0:
        ids = ids[values[ids] - values[ids[0]] >= math.log(params.min_p)]
    if params.temperature == 0:
        return ids[:1], np.ones(1)
    top = values[ids[0]]
    probs = softmax((values[ids] - top) / params.temperature)
    return ids[values[ids] > -INF], probs[values[ids] > -INF]


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def assert_equal_laws(logits: Row, params: SamplingParams, history: Sequence[int] = ()) -> None:
    law = next_law(frozen(logits), params, history)
    ids = np.arange(law.probs.size) if law.ids is None else law.ids
    wanted_ids, wanted = twin(logits, params, history)
    assert (np.diff(ids) > 0).all()
    # A banned token may stay in the law, with probability 0.
    extra = np.setdiff1d(ids, wanted_ids)
    assert np.setdiff1d(wanted_ids, ids).size == 0, "a token is missing"
    assert (law.probs[np.searchsorted(ids, extra)] == 0).all(), "a token should have been cut"
    got = law.probs[np.searchsorted(ids, wanted_ids)]
    assert np.abs(got - wanted).max() < 1e-6
    assert law.probs.sum() == pytest.approx(1, abs=1e-12)


def frozen(row: Row) -> Row:
    copy = row.copy()
    copy.flags.writeable = False
    return copy


def logits(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def gaussian(seed: int, size: int, scale: float = 3.0) -> Row:
    return (np.random.default_rng(seed).normal(size=size) * scale).astype(np.float32)


def with_ties(seed: int, size: int) -> Row:
    """Multiples of a quarter: ties everywhere, at every threshold too."""
    return np.round(gaussian(seed, size) * 4) / np.float32(4)


def masked(seed: int, size: int) -> Row:
    row = gaussian(seed, size)
    row[np.random.default_rng(seed).random(size) < 0.7] = -INF
    row[seed % size] = 1
    return row


def peaked(seed: int, size: int) -> Row:
    """As models are: a few tokens far above the rest."""
    row = gaussian(seed, size)
    likely = np.random.default_rng(seed).choice(size, 5, replace=False)
    row[likely] = logits(24, 23, 22.5, 21, 20)
    return row


SHAPES: list[Callable[[int, int], Row]] = [gaussian, with_ties, masked, peaked]
TEMPERATURES = (0, 1e-8, 1e-3, 0.7, 1, 1.5)
TOP_K = (0, 1, 5, 40, 400_000)
TOP_P = (0, 1e-9, 0.5, 0.95, 1)
MIN_P = (0, 0.05, 1)
GRID = [SamplingParams(*each) for each in itertools.product(TEMPERATURES, TOP_K, TOP_P, MIN_P)]
# Their factors are powers of two, so that float32 rounds nothing and ties stay ties.
PENALTIES: list[Callable[[SamplingParams], SamplingParams]] = [
    lambda params: replace(params, repeat_penalty=2.0),
    lambda params: replace(params, presence_penalty=0.5, frequency_penalty=0.25, penalty_last_n=4),
    lambda params: replace(
        params,
        repeat_penalty=0.5,
        frequency_penalty=-0.5,
        penalty_last_n=-1,
        logit_bias={2: -INF, 4: 1.5},
    ),
]
HISTORY = (4, 1, 1, 0, 9, 3, 1, 3)


@pytest.mark.parametrize("shape", SHAPES)
def test_small_rows_have_the_law_of_the_twin(shape: Callable[[int, int], Row]) -> None:
    for seed, params in enumerate(GRID):
        assert_equal_laws(shape(seed, 10), params)


@pytest.mark.parametrize("penalties", PENALTIES)
def test_small_rows_have_the_law_of_the_twin_under_bias_and_penalties(
    penalties: Callable[[SamplingParams], SamplingParams],
) -> None:
    for seed, params in enumerate(GRID):
        changed = penalties(params)
        assert_equal_laws(with_ties(seed, 10), changed, HISTORY)
        if params.temperature >= 0.7:  # else the rounding of float32 logits is blown up
            assert_equal_laws(gaussian(seed, 10), changed, HISTORY)


@pytest.mark.parametrize("size", [50_257, 151_936, 262_144])
@pytest.mark.parametrize("shape", SHAPES)
def test_large_rows_have_the_law_of_the_twin(shape: Callable[[int, int], Row], size: int) -> None:
    row = shape(size, size)
    for params in LARGE:
        assert_equal_laws(row, params, HISTORY)


LARGE = [
    SamplingParams(),
    WHOLE,
    replace(WHOLE, temperature=0.7, top_p=0.95),
    replace(WHOLE, top_p=0.5, min_p=0.05),
    replace(WHOLE, min_p=0.05),
    SamplingParams(1.5, 5, 1, 0, repeat_penalty=2.0),
    replace(WHOLE, top_k=1000, top_p=0.95),
]


def test_top_p_without_top_k_can_keep_all_but_a_few() -> None:
    flat = gaussian(3, 151_936, scale=0.1)
    for top_p in (1e-9, 0.1, 0.999, 1 - 1e-9):
        assert_equal_laws(flat, replace(WHOLE, top_p=top_p))


def test_top_p_a_rounding_error_below_one_keeps_everything() -> None:
    almost = replace(WHOLE, top_p=float(np.nextafter(1, 0)))
    for seed in range(20):
        row = gaussian(seed, 3_000, scale=0.1)
        assert next_law(row, almost).on(next_law(row, WHOLE)) == pytest.approx(
            next_law(row, WHOLE).probs, abs=1e-9
        )


# Where the largest k hide


def kept(row: Row, k: int) -> list[int]:
    ids = next_law(frozen(row), replace(WHOLE, top_k=k)).ids
    assert ids is not None
    return [int(t) for t in ids]


def first_by_value(row: Row, k: int) -> list[int]:
    return sorted(sorted(range(row.size), key=lambda t: (-row[t], t))[:k])


def one_column(row: Row, columns: int) -> Row:
    row[7::columns] += 50
    return row


def at_the_end(row: Row) -> Row:
    row[-45:] += 50
    return row


def scattered_ties(row: Row) -> Row:
    # More ties at the threshold than there is room for, from the first token to the last.
    row[:: row.size // 99] = 30
    row[-1] = 30
    row[500:520] = 31
    return row


def few_above_minus_infinity(row: Row) -> Row:
    row[:] = -INF
    row[[5, 4_000, row.size - 1]] = [1, 3, 2]
    return row


HIDING: dict[str, Callable[[Row], Row]] = {
    "one column": lambda row: one_column(row, row.size // 64),
    "another stride": lambda row: one_column(row, 97),
    "the end": at_the_end,
    "ties": scattered_ties,
    "all tied": lambda row: row * 0,
    "rising": lambda row: np.sort(row),
    "falling": lambda row: -np.sort(-row),
    "mostly minus infinity": few_above_minus_infinity,
    "ties of minus infinity at the threshold": lambda row: np.where(row > 11, row, -INF),
}


@pytest.mark.parametrize("size", [10_037, 50_257, 128_256])
@pytest.mark.parametrize("name", HIDING)
def test_top_k_finds_the_largest_wherever_they_are(name: str, size: int) -> None:
    row = np.ascontiguousarray(HIDING[name](gaussian(1, size)), dtype=np.float32)
    assert kept(row, 40) == first_by_value(row, 40)


def test_top_k_of_every_size() -> None:
    row = with_ties(2, 20_011)
    order = sorted(range(row.size), key=lambda t: (-row[t], t))
    for k in (2, 3, 63, 64, 65, 155, 156, 157, 5_000, 20_010):
        assert kept(row, k) == sorted(order[:k])


def test_all_of_these_take_the_lowest_id_of_a_tie() -> None:
    row = logits(1, 4, 2, 4, 4)
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, top_k=0, top_p=0.9),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0),
        SamplingParams(top_k=0, top_p=1e-9),
        SamplingParams(top_k=3, top_p=1e-9),
    ):
        law = next_law(row, params)
        assert law.probs.tolist() == [1]
        assert law.ids is not None and law.ids.tolist() == [1]


def test_temperature_goes_last() -> None:
    # At temperature 1.5 applied first, the second token would pass min-p and top-p alike.
    row = logits(0, -3.1, -9)
    assert next_law(row, SamplingParams(temperature=1.5, top_p=1)).probs.tolist() == [1]
    assert next_law(row, SamplingParams(temperature=1.5, min_p=0)).probs.tolist() == [1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e40, 1e308])
def test_temperatures_beyond_float32_take_the_limit(temperature: float) -> None:
    law = next_law(logits(1, -INF, 2, 2.5), replace(WHOLE, temperature=temperature))
    wanted = [0, 0, 0, 1] if temperature < 1 else [1 / 3, 0, 1 / 3, 1 / 3]
    assert law.probs == pytest.approx(wanted)


def test_enormous_logits_are_no_problem() -> None:
    for params in (WHOLE, SamplingParams(), replace(WHOLE, top_p=0.9), replace(WHOLE, min_p=0.5)):
        assert next_law(logits(3e38, -3e38, 0), params).prob(0) == 1


# Penalties and bias


def test_penalties_by_hand() -> None:
    row = logits(2, -2, 1, 0, 5)
    params = replace(
        WHOLE,
        repeat_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        penalty_last_n=4,
    )
    # The window: 0 once, 1 twice, 3 once; token 4 has left it.
    law = next_law(row, params, [4, 4, 0, 1, 3, 1])
    wanted = [2 / 2 - 0.75, -2 * 2 - 1.25, 1, 0 - 0.75, 5]
    assert law.probs == pytest.approx(softmax(np.array(wanted)), abs=1e-7)


@pytest.mark.parametrize(("last_n", "seen"), [(-1, {0, 1, 2}), (0, set()), (1, {2}), (2, {1, 2})])
def test_the_window_ends_where_it_should(last_n: int, seen: set[int]) -> None:
    params = SamplingParams(1, 0, 1, 0, presence_penalty=1.0, penalty_last_n=last_n)
    law = next_law(np.zeros(4, np.float32), params, [0, 0, 1, 2])
    wanted = softmax(np.array([-1.0 if t in seen else 0.0 for t in range(4)]))
    assert law.probs == pytest.approx(wanted, abs=1e-7)


def test_penalties_with_inexact_factors_stay_close_to_the_twin() -> None:
    for seed in range(50):
        params = SamplingParams(0.8, 0, 1, 0, 1.3, 0.37, 0.11, penalty_last_n=5)
        assert_equal_laws(gaussian(seed, 50), params, [int(t) for t in gaussian(seed, 20) ** 2])


def test_tokens_beyond_the_row_are_passed_over() -> None:
    params = replace(WHOLE, presence_penalty=1.0, logit_bias={7: 3.0})
    assert next_law(logits(1, 1), params, [5, 2]).probs.tolist() == [0.5, 0.5]


def test_a_banned_token_has_no_probability() -> None:
    for params in GRID:
        law = next_law(logits(1, 2, 3), replace(params, logit_bias={2: -INF}))
        assert law.prob(2) == 0


def test_history_is_read_only_when_it_is_used() -> None:
    class Unreadable(Sequence[int]):
        def __len__(self) -> int:
            raise AssertionError("read")

        def __getitem__(self, _: Any) -> Any:
            raise AssertionError("read")

    for params in (SamplingParams(), SamplingParams(repeat_penalty=1.3, penalty_last_n=0)):
        assert not params.uses_history
        next_law(logits(1, 2, 3), params, Unreadable())
    for params in (
        SamplingParams(repeat_penalty=0.5),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
    ):
        assert params.uses_history
        with pytest.raises(AssertionError, match="read"):
            next_law(logits(1, 2, 3), params, Unreadable())


def test_logits_are_left_as_they_were() -> None:
    busy = SamplingParams(repeat_penalty=1.3, logit_bias={1: 2.0, 2: -INF})
    for params in (busy, SamplingParams(), WHOLE, replace(WHOLE, top_p=0.9)):
        row = gaussian(1, 30_000)
        before = row.copy()
        law = next_law(row, params, [1, 2, 3])
        assert (row == before).all()
        assert not np.shares_memory(law.probs, row)


# Law


def test_a_law_knows_the_probability_of_every_token() -> None:
    dense = Law(np.array([0.25, 0.75]))
    sparse = Law(np.array([0.25, 0.75]), np.array([3, 8], dtype=np.int64))
    assert [dense.prob(t) for t in range(4)] == [0.25, 0.75, 0, 0]
    assert [sparse.prob(t) for t in (0, 3, 5, 8, 9)] == [0, 0.25, 0, 0.75, 0]
    assert [Law.one_hot(4).prob(t) for t in (3, 4, 5)] == [0, 1, 0]
