"""Every kind of cache, as target, as draft and as both: the text is the plain one.

The caches are float32 where their type is not what is tried, as in test_pair.
"""

from __future__ import annotations

import functools
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import check_caches
from rounding import assert_close, assert_plain
from tiny import tiny

from specllama import llama
from specllama.acceptance import Round, verify_block
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.errors import RollbackError
from specllama.interrupts import interruptible
from specllama.lm import CachedLM, Request
from specllama.lookahead import FixedLength
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator

GREEDY = SamplingParams(temperature=0)
N_TOKENS = 397  # real ones of the tiny vocabulary
N_DRAFT = 4
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attention": False}


@dataclass(frozen=True)
class Kind:
    """A tiny model and how its context is made."""

    model: str
    target: dict[str, Any]  # of the context as a target
    draft: dict[str, Any]  # and as a draft, which decodes token by token

    def path(self, noise: float = 0.0) -> Path:
        return tiny(self.model, noise=noise) if noise else tiny(self.model)


KINDS = {
    "attention": Kind("attention", {}, {}),
    "full window": Kind("swa", {}, {}),
    "small window": Kind("swa", {"full_window": False}, {"full_window": False}),
    "recurrent": Kind("recurrent", {}, {}),
    "hybrid with snapshots": Kind("hybrid", {"n_snapshots": N_DRAFT}, {"n_snapshots": 2}),
    "hybrid without": Kind("hybrid", {}, {}),
}
EACH = pytest.mark.parametrize("kind", KINDS)
STATES = pytest.mark.parametrize(
    "kind", ["recurrent", "hybrid with snapshots", "hybrid without", "small window"]
)


@functools.cache
def model(path: Path) -> llama.Model:
    return llama.Model(path)


@contextmanager
def lm(path: Path, options: dict[str, Any], n_ctx: int = 640) -> Iterator[CachedLM]:
    options = {**EXACT, **options}
    with llama.Context(model(path), n_ctx=n_ctx, n_batch=128, **options) as context:
        yield CachedLM(context)


@contextmanager
def pair(
    target: str, draft: str | None, noise: float = 0.1, n_ctx: int = 640, n_draft: int = N_DRAFT
) -> Iterator[Speculator]:
    with ExitStack() as stack:
        one = KINDS[target]
        big = stack.enter_context(lm(one.path(), one.target, n_ctx))
        drafter: Drafter = NullDrafter()
        if draft is not None:
            other = KINDS[draft]
            small = stack.enter_context(lm(other.path(noise), other.draft, n_ctx))
            drafter = ModelDrafter(small, FixedLength(n_draft), N_TOKENS)
        yield Speculator(big, drafter, verify_block, N_TOKENS)


def prompt(n: int = 40) -> list[int]:
    return [20 + (7 * i + i * i) % 300 for i in range(n)]


def answer(
    speculator: Speculator, tokens: Sequence[int], n: int, check: bool = False
) -> tuple[list[int], list[Round]]:
    """n more tokens, and the rounds that gave them."""
    state = SequenceState(0, list(tokens), GREEDY, Streams.seeded(1), n)
    speculator.prefill(state)
    rounds = []
    while state.n_left > 0:
        before = list(state.tokens)
        [outcome] = speculator.round([state])
        rounds.append(outcome)
        if check:
            check_caches(speculator, before, outcome)
    return state.tokens[len(tokens) :], rounds


# What was read and what was answered.
Turn = tuple[tuple[int, ...], tuple[int, ...]]


@functools.cache
def plain(kind: str, n_ctx: int = 640) -> tuple[Turn, ...]:
    """Three turns of 100 tokens without a draft."""
    with pair(kind, None, n_ctx=n_ctx) as speculator:
        return turns(speculator)[0]


def turns(speculator: Speculator, check: bool = False) -> tuple[tuple[Turn, ...], list[Round]]:
    history, said, rounds = prompt(), [], []
    for turn in range(3):
        tokens, some = answer(speculator, history, 100, check)
        said.append((tuple(history), tuple(tokens)))
        rounds += some
        # The next turn goes on from the whole answer, without its end, and from within it.
        history = [*history, *tokens[: 100 - 3 * turn], 30 + turn, 31]
    return tuple(said), rounds


def check_turns(said: Sequence[Turn], kind: str) -> None:
    """They are those of plain decoding."""
    for (history, tokens), (known, expected) in zip(said, plain(kind), strict=True):
        if history != known:  # an earlier answer parted at a tie
            expected = tuple(fresh_answer(kind, history, len(tokens)))
        assert_plain(tokens, expected, KINDS[kind].path(), history)


def check_first(tokens: Sequence[int], kind: str) -> None:
    """They are the first ones of plain decoding's first turn."""
    expected = plain(kind)[0][1][: len(tokens)]
    assert_plain(tokens, expected, KINDS[kind].path(), prompt())


def fresh_answer(kind: str, tokens: Sequence[int], n: int) -> list[int]:
    with pair(kind, None) as speculator:
        return answer(speculator, tokens, n)[0]


@EACH
@pytest.mark.parametrize("noise", [0.01, 0.05, 2.0])
def test_three_turns_are_those_of_plain_decoding(kind: str, noise: float) -> None:
    """As target with any draft, and with the same kind as its draft, after every round's check."""
    for draft in dict.fromkeys((kind, "attention")):
        with pair(kind, draft, noise) as speculator:
            said, rounds = turns(speculator, check=True)
        check_turns(said, kind)
        kept = {outcome.accepted for outcome in rounds}
        assert 0 in kept
        if draft == kind and noise < 1:  # rounds that keep none, some and all
            assert kept == set(range(N_DRAFT + 1))


@EACH
def test_as_the_draft_of_another(kind: str) -> None:
    """The draft is of another kind, and so proposes tokens of its own, mostly wrong ones."""
    with pair("attention", kind) as speculator:
        said, rounds = turns(speculator, check=True)
    check_turns(said, "attention")
    assert sum(outcome.proposed for outcome in rounds) > 300


@STATES
def test_what_a_context_holds_is_what_the_loop_believes(kind: str) -> None:
    """Not only as many tokens: both contexts go on from them as fresh ones do."""
    with pair(kind, kind) as speculator:
        history = prompt()
        for _ in range(12):
            tokens, _ = answer(speculator, history, 9)
            history = [*history, *tokens]
            assert isinstance(speculator.drafter, ModelDrafter)
            for each, path in (
                (speculator.target, KINDS[kind].path()),
                (speculator.drafter.lm, KINDS[kind].path(0.1)),
            ):
                held = [*history, 33]
                [found] = each.logits([Request(0, held)])
                with lm(path, {"full_window": True}) as fresh:
                    [expected] = fresh.logits([Request(0, held)])
                    assert_close(found, expected, atol=2e-3)


@STATES
@pytest.mark.parametrize("room", [1, 2, 3, 5, 6, 9])
def test_at_the_edge_of_the_context(kind: str, room: int) -> None:
    with pair(kind, None, n_ctx=128) as speculator:
        expected, _ = answer(speculator, prompt(128 - room), room)
    with pair(kind, kind, noise=0.02, n_ctx=128, n_draft=8) as speculator:
        said, _ = answer(speculator, prompt(128 - room), room)
    assert_plain(said, expected, KINDS[kind].path(), prompt(128 - room))


@EACH
def test_after_an_interrupt_at_any_moment(kind: str) -> None:
    rng = random.Random(3)
    with pair(kind, kind) as speculator, interruptible():
        for _ in range(8):
            timer = threading.Timer(rng.uniform(0, 0.1), signal.raise_signal, [signal.SIGINT])
            try:
                with pytest.raises(KeyboardInterrupt):
                    timer.start()
                    while True:
                        answer(speculator, prompt(60), 150)
            finally:
                timer.join()
            check_first(answer(speculator, prompt(), 40)[0], kind)


@pytest.mark.parametrize("type_kv", ["q8_0", "q4_0"])
@pytest.mark.parametrize("model_kind", ["attention", "swa", "hybrid"])
def test_quantised_caches_up_to_near_ties(model_kind: str, type_kv: str) -> None:
    """Where the texts part, plain decoding itself had two tokens within what rows move logits."""
    options = {
        "kv_type": type_kv, "flash_attention": None,
        "n_snapshots": N_DRAFT if model_kind == "hybrid" else 0,
    }  # fmt: skip
    with ExitStack() as stack:
        big = stack.enter_context(lm(tiny(model_kind), options))
        small = stack.enter_context(lm(tiny(model_kind, noise=0.1), options))
        drafter = ModelDrafter(small, FixedLength(N_DRAFT), N_TOKENS)
        said, rounds = answer(Speculator(big, drafter, verify_block, N_TOKENS), prompt(), 200)
        alone = stack.enter_context(lm(tiny(model_kind), options))
        whole = [*prompt(), *said]
        behind, moved = [], 0.0
        for n in range(len(prompt()), len(whole)):
            one = alone.logits([Request(0, whole[:n])])[0][0][:N_TOKENS].copy()
            behind.append(float(one.max() - one[whole[n]]))
            if n % 5 == 0:  # the same row, last of five
                alone.forget(0)
                alone.prefill(0, whole[: n - 5])
                five = alone.logits([Request(0, whole[:n], 5)])[0][-1][:N_TOKENS]
                moved = max(moved, float(np.abs(five - one).max()))
    assert max(behind) <= 2 * moved < 2
    assert 0 < sum(r.accepted for r in rounds) < sum(r.proposed for r in rounds)


@STATES
def test_a_rollback_that_fails_once_stops_the_generation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(kind, "attention", noise=2.0) as speculator:
        real = llama.lib.llama_memory_seq_rm
        refused: list[int] = []
        target_memory = speculator.target._context._memory  # type: ignore[attr-defined]

        def refuse_once(memory: Any, slot: int, begin: int, end: int) -> bool:
            if begin > 0 and memory == target_memory and not refused:
                refused.append(begin)
                return False
            return bool(real(memory, slot, begin, end))

        monkeypatch.setattr(llama.lib, "llama_memory_seq_rm", refuse_once)
        with pytest.raises(RollbackError, match="cannot take back"):
            answer(speculator, prompt(), 100)
        assert refused
        check_first(answer(speculator, prompt(), 100)[0], kind)
