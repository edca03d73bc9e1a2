"""Signals while llama.cpp computes: they end it at once, and the next answer is right."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tiny import tiny

from specllama import llama
from specllama.interrupts import interruptible
from specllama.lm import CachedLM, LogitRows, Request, Rows

# Long enough that one decode takes some tenths of a second, on any machine.
LONG = [300 + (i * i) % 60 for i in range(5000)]
ABORTED = "removing memory module entries"  # what llama.cpp logs of a batch that it stopped

posix = pytest.mark.skipif(os.name == "nt", reason="no process can send SIGINT to itself there")
pytestmark = posix


@contextlib.contextmanager
def opened(kind: str = "attention", n_batch: int = len(LONG)) -> Iterator[llama.Context]:
    with llama.Model(tiny(kind, context=8192)) as model:
        yield llama.Context(model, n_ctx=8192, n_batch=n_batch, threads=1)


@contextlib.contextmanager
def signalled(after: float, number: int = signal.SIGINT) -> Iterator[None]:
    """Send this process a signal in so many seconds; the block lasts until it was sent."""
    timer = threading.Timer(after, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    old = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, old)


def after(lm: CachedLM, tokens: list[int]) -> LogitRows:
    [rows] = lm.logits([Request(0, tokens)])
    return rows.copy()


def test_an_interrupt_ends_a_decode_before_all_its_rows() -> None:
    with opened() as context, interruptible():
        with pytest.raises(KeyboardInterrupt), signalled(0.05):
            context.decode([Rows(0, 0, LONG, 1)])
        assert context.length(0) < len(LONG)


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
def test_after_an_interrupt_the_next_answer_is_that_of_a_fresh_context(kind: str) -> None:
    shorter = [*LONG[:2500], 280]
    with opened(kind, 2048) as context:
        whole = after(CachedLM(context), LONG)
    with opened(kind, 2048) as context:
        part = after(CachedLM(context), shorter)
    with opened(kind, 2048) as context, interruptible():
        lm = CachedLM(context)
        for delay, tokens, expected in (
            (0.0, shorter, part),
            (0.01, LONG, whole),
            (0.05, shorter, part),
            (0.1, shorter, part),
            (0.15, LONG, whole),
        ):
            lm.forget(0)
            with pytest.raises(KeyboardInterrupt):
                with signalled(delay):
                    after(lm, LONG)
                pytest.fail("the signal was lost")
            assert np.array_equal(after(lm, tokens), expected), delay


def test_what_was_read_before_an_interrupt_is_not_read_again() -> None:
    with opened(n_batch=2048) as context, interruptible():
        lm = CachedLM(context)
        after(lm, LONG[:4096])
        with pytest.raises(KeyboardInterrupt), signalled(0.05):
            after(lm, LONG)
        assert lm.n_held(0) >= 4096


def test_signals_at_any_moment_of_short_decodes_stop_no_later_one() -> None:
    rng = random.Random(5)
    text = LONG[:400]
    with opened(n_batch=64) as context:
        expected = [after(CachedLM(context), text[:n]) for n in (300, 350, 400)]
    with opened(n_batch=64) as context, interruptible():
        lm = CachedLM(context)
        for i in range(60):
            with contextlib.suppress(KeyboardInterrupt), signalled(rng.uniform(0, 0.02)):
                while True:
                    after(lm, text[: rng.choice((300, 350, 400))])
                    lm.forget(0)
            lm.forget(0)
            assert np.array_equal(after(lm, text[: 300 + 50 * (i % 3)]), expected[i % 3])


def test_a_handler_that_raises_nothing_lets_the_answer_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []
    with opened() as context:
        [rows] = context.decode([Rows(0, 0, LONG, 1)])
        expected = rows.copy()
    with (
        opened() as context,
        interruptible(),
        caplog.at_level(logging.WARNING, "specllama.llama"),
        handled(signal.SIGINT, lambda number, _frame: seen.append(number)),
        signalled(0.05),
    ):
        [rows] = context.decode([Rows(0, 0, LONG, 1)])
        assert np.array_equal(rows, expected)
    assert seen == [signal.SIGINT]
    assert ABORTED in caplog.text


@pytest.mark.parametrize("number", [signal.SIGWINCH, signal.SIGUSR1])
def test_other_signals_stop_nothing(number: int, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    with (
        opened() as context,
        interruptible(),
        caplog.at_level(logging.WARNING, "specllama.llama"),
        handled(number, lambda number, _frame: seen.append(number)),
        signalled(0.05, number),
    ):
        context.decode([Rows(0, 0, LONG, 1)])
    assert seen == [number]
    assert ABORTED not in caplog.text


def test_sigterm_ends_a_decode_too() -> None:
    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(143)

    with opened() as context, interruptible(), handled(signal.SIGTERM, leave):
        with pytest.raises(SystemExit), signalled(0.05, signal.SIGTERM):
            context.decode([Rows(0, 0, LONG, 1)])
        assert context.length(0) < len(LONG)


@pytest.fixture
def wakeup() -> Iterator[tuple[socket.socket, int]]:
    """A socket that somebody else has set for wakeups, and its file descriptor."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        old = signal.set_wakeup_fd(theirs.fileno())
        yield ours, theirs.fileno()
        signal.set_wakeup_fd(old)


def test_the_wakeup_fd_of_somebody_else_is_told_and_set_again(
    wakeup: tuple[socket.socket, int],
) -> None:
    reader, fd = wakeup
    with opened() as context, interruptible():
        with pytest.raises(KeyboardInterrupt), signalled(0.05):
            context.decode([Rows(0, 0, LONG, 1)])
        assert context.length(0) < len(LONG)
        assert signal.set_wakeup_fd(fd) == fd
        context.decode([Rows(0, context.length(0), LONG[:10], 1)])
    assert signal.set_wakeup_fd(fd) == fd
    assert reader.recv(100) == bytes([signal.SIGINT])


def test_a_wakeup_fd_that_is_closed_meanwhile_harms_nothing() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def close() -> None:
        ours.close()
        theirs.close()

    old = signal.set_wakeup_fd(theirs.fileno())
    try:
        with opened() as context, interruptible():
            closing = threading.Timer(0.02, close)
            closing.start()
            with pytest.raises(KeyboardInterrupt), signalled(0.1):
                context.decode([Rows(0, 0, LONG, 1)])
            closing.join()
            context.decode([Rows(0, context.length(0), LONG[:10], 1)])
    finally:
        signal.set_wakeup_fd(old)


def test_a_decode_in_another_thread_is_not_stopped() -> None:
    with opened() as context, interruptible(), ThreadPoolExecutor() as elsewhere:
        done = elsewhere.submit(context.decode, [Rows(0, 0, LONG, 1)])
        with pytest.raises(KeyboardInterrupt), signalled(0.05):
            done.result()
        done.result()
        assert context.length(0) == len(LONG)


def test_blocks_within_blocks_and_in_other_threads_are_one() -> None:
    before = threading.active_count()

    def elsewhere() -> int:
        with interruptible():
            return threading.active_count()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(elsewhere).result() == before + 1
    with interruptible():
        with interruptible():
            assert threading.active_count() == before + 1
        with opened() as context:
            with pytest.raises(KeyboardInterrupt), signalled(0.05):
                context.decode([Rows(0, 0, LONG, 1)])
            assert context.length(0) < len(LONG)
    assert threading.active_count() == before
