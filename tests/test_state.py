"""Saved states of a context: put back they give the very logits, and damage is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rounding import assert_close, assert_same
from tiny import tiny
from toys import Iid, ToyContext

from specllama import llama
from specllama.errors import StateError
from specllama.lm import CachedLM, LogitRows, Request

TEXT = [300 + 7 * i % 60 for i in range(90)]
NEXT = [*TEXT, 280, 290]
KINDS = pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])

Opener = Callable[..., CachedLM]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens contexts over tiny models, that close with the test."""
    with ExitStack() as stack:

        def open_context(path: Path, **options: Any) -> CachedLM:
            model = stack.enter_context(llama.Model(path))
            settings = {"n_ctx": 256, "n_batch": 64, "threads": 1, **options}
            return CachedLM(stack.enter_context(llama.Context(model, **settings)))

        yield open_context


def after(lm: CachedLM, tokens: list[int], slot: int = 0) -> LogitRows:
    [rows] = lm.logits([Request(slot, tokens)])
    return rows.copy()


@KINDS
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_restored_state_goes_on_as_the_saved_one_to_the_last_bit(
    opened: Opener, kind: str, kv_type: str
) -> None:
    path = tiny(kind)
    first = opened(path, kv_type=kv_type)
    after(first, TEXT)
    tokens, data = first.save(0)
    assert list(tokens) == TEXT
    expected = after(first, NEXT)

    second = opened(path, kv_type=kv_type)
    second.restore(0, tokens, data)
    assert second.held(0) == tokens
    assert_same(after(second, NEXT), expected)
    assert second.rows_decoded == len(NEXT) - len(TEXT)


@KINDS
@pytest.mark.parametrize("n_more", [1, 3, 40])
def test_tokens_behind_a_restored_state_can_be_taken_back(
    opened: Opener, kind: str, n_more: int
) -> None:
    """Also more than the last decode's: of a window only what the next token looks at is saved."""
    path, more = tiny(kind), [300 + 3 * i % 50 for i in range(n_more)]
    first, second, fresh = opened(path), opened(path), opened(path)
    after(first, TEXT)
    second.restore(0, *first.save(0))
    second.logits([Request(0, [*TEXT, *more], min(n_more, 16), n_more - 1)])
    ways = ([*TEXT, more[0], 280], [*TEXT, 281], [*TEXT[:-3], 280], [*TEXT[:40], 280], [280, 281])
    for tokens in ways:
        assert_close(after(second, tokens), after(fresh, tokens), atol=1e-2)
        assert second.held(0) == tuple(tokens)


@KINDS
def test_what_a_slot_held_before_is_gone(opened: Opener, kind: str) -> None:
    path = tiny(kind)
    first, second = opened(path), opened(path)
    after(first, TEXT)
    saved = first.save(0)
    expected = after(first, NEXT)
    after(second, TEXT[30:] + TEXT[:70])
    second.restore(0, *saved)
    assert_same(after(second, NEXT), expected)


def test_an_empty_slot_can_be_saved_and_put_back(opened: Opener) -> None:
    first, second = opened(tiny()), opened(tiny())
    tokens, data = first.save(0)
    assert tokens == ()
    after(second, TEXT)
    second.restore(0, tokens, data)
    assert_same(after(second, NEXT[60:]), after(first, NEXT[60:]))


def test_each_slot_has_a_state_of_its_own(opened: Opener) -> None:
    lm = opened(tiny(), n_slots=3)
    after(lm, TEXT[:20], slot=0)
    after(lm, TEXT[40:], slot=2)
    saved = lm.save(2)
    lm.restore(1, *saved)
    assert [list(lm.held(slot)) for slot in range(3)] == [TEXT[:20], TEXT[40:], TEXT[40:]]
    alone = after(opened(tiny()), [*TEXT[40:], 280])
    # The cells of the slots lie apart, which changes the order of some sums.
    assert_close(after(lm, [*TEXT[40:], 280], slot=1), alone, atol=1e-2)
    assert_close(after(lm, [*TEXT[40:], 280], slot=2), alone, atol=1e-2)


@pytest.fixture
def saved(opened: Opener) -> tuple[tuple[int, ...], bytes]:
    lm = opened(tiny())
    after(lm, TEXT)
    return lm.save(0)


def damaged(data: bytes) -> Iterator[bytes]:
    """Cut at every scale, one bit flipped in every region, or more than there should be."""
    rng = random.Random(3)
    yield from (data[:length] for length in (0, 1, 31, 32, 63, 64, 65, 100, len(data) // 2))
    yield data[:-1]
    yield data + b"\0"
    for at in (0, 40, 64, 70, 80, 100, *(rng.randrange(len(data)) for _ in range(20))):
        yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    yield bytes(len(data))


def test_damaged_data_is_refused_and_the_context_goes_on(
    opened: Opener, saved: tuple[tuple[int, ...], bytes]
) -> None:
    tokens, data = saved
    lm = opened(tiny())
    expected = after(opened(tiny()), NEXT)
    after(lm, TEXT[:50])
    for wrong in damaged(data):
        with pytest.raises(StateError, match="the text is read again"):
            lm.restore(0, tokens, wrong)
        assert lm.held(0) == ()
    assert_same(after(lm, NEXT), expected)
    lm.restore(0, tokens, data)
    assert lm.held(0) == tokens


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        (lambda: tiny("swa"), {}, "another model"),
        (lambda: tiny(extra=8), {}, "another model"),
        (tiny, {"kv_type": "f32"}, "cache type"),
        (tiny, {"n_ctx": 64}, "larger context"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_the_context_goes_on(
    opened: Opener,
    saved: tuple[tuple[int, ...], bytes],
    path: Callable[[], Path],
    options: dict[str, Any],
    reason: str,
) -> None:
    lm = opened(path(), **options)
    after(lm, TEXT[:20])
    with pytest.raises(StateError, match=reason):
        lm.restore(0, *saved)
    fresh = opened(path(), **options)
    assert_same(after(lm, TEXT[:40]), after(fresh, TEXT[:40]))


def test_other_tokens_than_the_state_holds_are_refused(
    opened: Opener, saved: tuple[tuple[int, ...], bytes]
) -> None:
    lm = opened(tiny())
    with pytest.raises(StateError, match="holds 90 tokens and not the 89"):
        lm.restore(0, saved[0][:-1], saved[1])
    assert_same(after(lm, TEXT), after(opened(tiny()), TEXT))


def test_rows_that_an_interrupt_left_behind_are_not_saved() -> None:
    toy = ToyContext(Iid(0.5, 0.5), 2)
    lm = CachedLM(toy)
    lm.logits([Request(0, [0, 1, 1])])
    toy.slots[0].append(0)  # decoded, and interrupted before it was noted
    assert lm.save(0) == ((0, 1, 1), bytes([0, 1, 1]))
