"""Logits that are no distribution, and parameters that mean nothing: found, and blamed rightly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specllama.errors import InvalidLogits, UsageError
from specllama.sampling import SamplingParams, next_law

Row = NDArray[np.float32]
WHOLE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
INF = math.inf


def logits(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def gaussian(size: int) -> Row:
    return (np.random.default_rng(4).normal(size=size) * 3).astype(np.float32)


def frozen(row: Row) -> Row:
    row.flags.writeable = False
    return row


EVERY_PATH = {
    "defaults": SamplingParams(),
    "temperature 0": SamplingParams(temperature=0),
    "top-k": replace(WHOLE, top_k=2),
    "top-k 1": replace(WHOLE, top_k=1),
    "top-p": replace(WHOLE, top_p=0.9),
    "min-p": replace(WHOLE, min_p=0.1),
    "whole": WHOLE,
    "penalties": SamplingParams(repeat_penalty=1.3),
    "bias": SamplingParams(logit_bias={3: 1.0}),
    "bias at temperature 0": SamplingParams(temperature=0, logit_bias={3: -INF}),
}


@pytest.mark.parametrize("bad", [math.nan, -math.nan, INF])
@pytest.mark.parametrize("name", EVERY_PATH)
def test_one_bad_logit_anywhere_is_found(name: str, bad: float) -> None:
    row = gaussian(331)  # just enough for the strided search of top-k 2, with a rest
    row[100] = 20
    for at in range(row.size):
        broken = row.copy()
        broken[at] = bad
        with pytest.raises(InvalidLogits) as caught:
            next_law(frozen(broken), EVERY_PATH[name], [3, 5], position=17)
        assert caught.value.position == 17


@pytest.mark.parametrize("name", EVERY_PATH)
@pytest.mark.parametrize("size", [9, 50_257])
def test_rows_without_a_usable_logit_are_refused(name: str, size: int) -> None:
    nothing = np.full(size, -INF, np.float32)
    some_nan, all_nan, all_inf = nothing.copy(), np.full(size, math.nan, np.float32), -nothing
    some_nan[[0, 4, -1]] = math.nan
    for row in (nothing, some_nan, all_nan, all_inf):
        with pytest.raises(InvalidLogits, match="invalid logits at position 17"):
            next_law(frozen(row), EVERY_PATH[name], [3, 5], position=17)


@pytest.mark.parametrize("n_bad", [1, 39, 40, 41, 500])
def test_bad_logits_below_the_reach_of_top_k_are_found(n_bad: int) -> None:
    for bad in (math.nan, INF):
        row = gaussian(50_257) - np.float32(100)
        row[:2_000] += 100
        row[30_000 : 30_000 + n_bad] = bad
        with pytest.raises(InvalidLogits):
            next_law(frozen(row), SamplingParams())


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_ban_does_not_hide_a_bad_logit(bad: float, temperature: float) -> None:
    params = SamplingParams(temperature, logit_bias={1: -INF})
    with pytest.raises(InvalidLogits):
        next_law(logits(1, bad, 2), params)


@pytest.mark.parametrize("name", EVERY_PATH)
def test_a_bias_that_bans_every_token_is_a_usage_error(name: str) -> None:
    params = replace(EVERY_PATH[name], logit_bias=dict.fromkeys(range(3), -INF))
    with pytest.raises(UsageError, match="ban fewer tokens"):
        next_law(logits(1, 2, 3), params, [1])
    with pytest.raises(UsageError, match="ban fewer tokens"):
        next_law(logits(1, -INF, 3, -INF), params, [1])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logit_bias={1: 1e39}),
        SamplingParams(repeat_penalty=1e-50),
        SamplingParams(presence_penalty=-1e300),
        SamplingParams(frequency_penalty=-3e38, presence_penalty=-3e38),
    ],
)
def test_numbers_that_overflow_a_logit_are_a_usage_error(params: SamplingParams) -> None:
    with pytest.raises(UsageError, match="smaller numbers"):
        next_law(logits(1, 2, 3), params, [1])


# Parameters


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (-1, -1e-9, math.nan, INF, -INF)),
        ("top_k", (-1, -40)),
        ("top_p", (-0.1, 1.0001, math.nan, INF)),
        ("min_p", (-0.1, 1.0001, math.nan, -INF)),
        ("repeat_penalty", (0, -1, math.nan, INF)),
        ("presence_penalty", (math.nan, INF, -INF)),
        ("frequency_penalty", (math.nan, INF, -INF)),
        ("penalty_last_n", (-2, -64)),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: Sequence[float]) -> None:
    for value in values:
        changed: dict[str, Any] = {name: value}
        with pytest.raises(UsageError, match=f"^{name} must be .*, not {value}$"):
            replace(SamplingParams(), **changed)


@pytest.mark.parametrize("bias", [{-1: 0.0}, {0: math.nan}, {0: INF}])
def test_an_unusable_bias_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(UsageError, match="logit bias"):
        SamplingParams(logit_bias=bias)


def test_the_ends_of_every_range_are_allowed() -> None:
    SamplingParams(0, 0, 0, 0, 1e-3, -2, -2, 0, {0: -INF})
    SamplingParams(100, 10**9, 1, 1, 5, 2, 2, -1)


def test_the_defaults_are_llama_cpps() -> None:
    assert SamplingParams() == SamplingParams(0.8, 40, 0.95, 0.05, 1.0, 0.0, 0.0, 64, {})
