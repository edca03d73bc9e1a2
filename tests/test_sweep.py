"""Two thousand random settings on real contexts, each compared with plain decoding.

Sizes of contexts and batches, lengths of prompts around every edge, draft lengths from 0 to 16, all
three rules and all kinds of caches, as target and as draft. Seeded: the number in a failure's
message is the setting's, and `setting(number)` makes it again. About a minute and a half.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tiny import tiny

from specllama import llama
from specllama.acceptance import VERIFIERS
from specllama.coupling import KeyedStreams
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.lm import CachedLM, Request, common_prefix
from specllama.lookahead import FixedLength
from specllama.sampling import SamplingParams, Streams, next_law
from specllama.speculation import Speculator

N_SETTINGS, N_PARTS = 2000, 20
N_TOKENS = 397
# name: (tiny model, options of the context)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {}),
    "full window": ("swa", {}),
    "small window": ("swa", {"full_window": False}),
    "recurrent": ("recurrent", {}),
    "snapshots": ("hybrid", {"n_snapshots": 5}),
    "checkpoints": ("hybrid", {}),
}
OPENED: list[llama.Model] = []
EXACT: dict[str, Any] = {"threads": 1, "kv_type": "f32", "flash_attention": False}
# (context, batch): smaller than a draft, odd, with the batch below, at and above the context
SIZES = [(5, 17), (17, 17), (64, 17), (65, 32), (96, 96), (128, 50)]
# With these the texts of a seed part where noise and logits nearly tie; see `parts_at_a_tie`.
WARM = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Setting:
    target: str
    draft: str
    noise: float
    size: tuple[int, int]
    prompt: tuple[int, ...]
    n_draft: int
    n_left: int
    verifier: str
    seed: int

    @property
    def params(self) -> SamplingParams:
        return WARM if self.verifier == "coupled" else GREEDY

    def state(self) -> SequenceState:
        kind = KeyedStreams.keyed if self.verifier == "coupled" else Streams.seeded
        return SequenceState(
            0, list(self.prompt), self.params, kind(self.seed), self.n_left
        )


def setting(number: int) -> Setting:
    rng = random.Random(number)
    n_ctx, n_batch = size = rng.choice(SIZES)
    n_draft = rng.randint(0, 16)
    edges = {1, 2, 3, n_batch - 1, n_batch, n_batch + 1, n_ctx // 2}
    edges |= {n_ctx - n_draft + i for i in (-2, -1, 0, 1)} | {n_ctx - 2, n_ctx - 1}
    length = rng.choice([n for n in sorted(edges) if 1 <= n < n_ctx])
    return Setting(
        target=rng.choice(list(KINDS)),
        draft=rng.choice(list(KINDS)),
        noise=rng.choice([0.0, 0.02, 0.1, 2.0]),
        size=size,
        prompt=tuple(rng.randrange(20, 380) for _ in range(length)),
        n_draft=n_draft,
        n_left=min(n_ctx - length, rng.choice([1, 2, 5, 12, 30])),
        verifier=rng.choice(["block", "token", "coupled"]),
        seed=rng.randrange(1000),
    )


@pytest.fixture(scope="module", autouse=True)
def released() -> Iterator[None]:
    """Whoever is tested next in this process need not carry all these contexts."""
    yield
    while OPENED:
        OPENED.pop().close()
    model.cache_clear()
    lm.cache_clear()


@functools.cache
def model(kind: str, noise: float) -> llama.Model:
    OPENED.append(llama.Model(tiny(kind, noise=noise) if noise else tiny(kind)))
    return OPENED[-1]


@functools.cache
def lm(role: str, kind: str, noise: float, size: tuple[int, int]) -> CachedLM:
    """A context that settings share; each finds what the last one left."""
    of, options = KINDS[kind]
    options = {**EXACT, **options}
    n_ctx, n_batch = size
    context = llama.Context(
        model(of, noise), n_ctx=n_ctx, n_batch=n_batch, n_outputs=17, **options
    )
    return CachedLM(context)


def text(speculator: Speculator, state: SequenceState) -> list[int]:
    speculator.prefill(state)
    while state.n_left > 0:
        speculator.round([state])
        held = speculator.target.held(0)
        assert speculator.target._context.length(0) == len(held)
    return state.tokens


def parts_at_a_tie(here: Setting, whole: list[int], other: int) -> bool:
    """Whether the last of `whole` and another token are within what rounding moves."""
    alone = lm("plain", here.target, 0.0, here.size)
    tokens = whole[:-1]
    logits = alone.logits([Request(0, tokens)])[0][0][:N_TOKENS]
    law = next_law(logits, here.params, tokens, len(tokens))
    assert law.ids is None
    rng = here.state().streams.at(len(tokens)).draft
    pair = np.array([whole[-1], other])
    first, second = -np.log1p(-rng.uniforms(pair)) / law.probs[pair]  # type: ignore[attr-defined]
    return bool(abs(np.log(first / second)) < 0.01)


@pytest.mark.parametrize("part", range(N_PARTS))
def test_random_settings(part: int) -> None:
    n_ties = n_drafted = 0
    for number in range(part, N_SETTINGS, N_PARTS):
        here = setting(number)
        big = lm("target", here.target, 0.0, here.size)
        small = lm("draft", here.draft, here.noise, here.size)
        drafter: Drafter = ModelDrafter(small, FixedLength(here.n_draft), N_TOKENS)
        rule = VERIFIERS[here.verifier]
        found = text(Speculator(big, drafter, rule, N_TOKENS), here.state())
        alone = lm("plain", here.target, 0.0, here.size)
        expected = text(Speculator(alone, NullDrafter(), rule, N_TOKENS), here.state())
        assert len(found) == len(expected) == len(here.prompt) + here.n_left, number
        n_drafted += small.rows_decoded
        at = common_prefix(found, expected)
        if at == len(found):
            continue
        assert here.verifier == "coupled", number
        assert parts_at_a_tie(here, found[: at + 1], expected[at]), number
        n_ties += 1
    assert n_ties <= 2 and n_drafted > 1000
