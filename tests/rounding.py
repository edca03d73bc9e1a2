"""How far apart two right results may lie on what the tests run on.

A row is decoded by other kernels when it comes with other rows, and its sums are in another order
when its cells lie elsewhere. On the processor that moves the last bits of float32; a GPU multiplies
in half precision, which moves logits of the tiny models, some 50 in size, by 0.03. Wrong rows or
caches move them by more than 0.5 (see test_llama).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specllama.llama import Context, Model
from specllama.lm import CachedLM, Request
from specllama.sampling import SamplingParams, next_law

ON_GPU = os.environ.get("SPECLLAMA_TEST_GPU") == "1"
CLOSE = 0.1  # of logits on a GPU
_ROWS = 16
GREEDY = SamplingParams(temperature=0)


def assert_close(found: Any, expected: Any, atol: float = 1e-3) -> None:
    """The same logits, decoded with other rows. atol: on the processor, where it is known."""
    np.testing.assert_allclose(found, expected, atol=CLOSE if ON_GPU else atol)


def assert_same(found: Any, expected: Any) -> None:
    """The same logits to the last bit on the processor, up to the order of sums on a GPU."""
    if ON_GPU:
        assert_close(found, expected)
    else:
        np.testing.assert_array_equal(found, expected)


def assert_plain(
    said: Sequence[int],
    expected: Sequence[int],
    path: Path,
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
) -> None:
    """The tokens of plain decoding at temperature 0.

    A GPU may part from it where two tokens are nearly as likely. So there each token has to be one
    that a fresh context, which reads the whole text, finds within that of the likeliest.
    """
    if not ON_GPU or list(said) == list(expected):
        assert list(said) == list(expected)
        return
    assert len(said) == len(expected)
    assert max(behind(said, path, prompt, params)) <= 2 * CLOSE


def behind(
    said: Sequence[int], path: Path, prompt: Sequence[int], params: SamplingParams = GREEDY
) -> list[float]:
    """How far each token's logit, after penalties, is below the largest."""
    whole = [*prompt, *said]
    laws = replace(params, temperature=1, top_k=0, top_p=1, min_p=0)
    below = []
    with Model(path) as model, Context(
        model, n_ctx=len(whole), n_outputs=_ROWS, kv_type="f32", flash_attention=False
    ) as context:
        fresh = CachedLM(context)
        for begin in range(len(prompt), len(whole), _ROWS):
            end = min(begin + _ROWS, len(whole))
            [rows] = fresh.logits([Request(0, whole[: end - 1], end - begin)])
            for n, row in zip(range(begin, end), rows, strict=True):
                law = next_law(row, laws, whole[:n])
                below.append(float(np.log(law.probs.max() / max(law.prob(whole[n]), 1e-300))))
    return below
