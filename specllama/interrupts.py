"""Ctrl-C that does not wait for a native call to return.

Python runs the handler of a signal when the main thread executes Python again, and the evaluation
of a long prompt may keep it away for many seconds. The interpreter can write the number of a signal
to a socket at once, from C; a thread reads it there and raises a flag that the evaluation looks at.
When it has ended, the handler runs as ever and raises what it raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator

_STOPPING = frozenset(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
)
_set_quietly = functools.partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
_watch: _Watch | None = None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end a decode of this thread at once, if Python handles them.

    Only the main thread receives signals; in another one, and within another such block, it does
    nothing. A wakeup fd that somebody else has set gets its bytes all the same, and is set again
    after each decode.
    """
    global _watch
    if _watch is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = _Watch()
    try:
        yield
    finally:
        watch, _watch = _watch, None
        watch.close()


def begin(flag: bytearray) -> None:
    """A native call begins that ends early once `flag[0]` is not 0; followed by `end`, always."""
    flag[0] = 0
    if _watch is not None and threading.get_ident() == _watch.main_thread:
        _watch.begin(flag)


def end() -> None:
    """It has ended."""
    if _watch is not None and threading.get_ident() == _watch.main_thread:
        _watch.end()


class _Watch:
    """A socket that signals are written to, and the thread that reads it.

    A late reading must not stop the next call, whose reader knows of no signal. So bytes are taken
    under a lock, and a call begins by taking those of signals before it: what comes out later was
    written during the call.
    """

    def __init__(self) -> None:
        self.main_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)
        self._flag: bytearray | None = None
        self._replaced: list[int] = []  # wakeup fds that gave way to ours
        self._elsewhere = -1  # who else wants to know of signals
        self._thread = threading.Thread(target=self._run, daemon=True, name="interrupts")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self.end()
        self._in.close()
        self._thread.join()
        self._out.close()

    def begin(self, flag: bytearray) -> None:
        """Raise this flag when a signal comes."""
        with self._lock:
            self._take()
            flag[0] = 0
            self._flag = flag
            # One call of C, between whose parts no handler can run and lose the old fd.
            self._replaced.extend(map(_set_quietly, (self._in.fileno(),)))
            self._elsewhere = self._old_fd()

    def end(self) -> None:
        """Raise it no more."""
        with self._lock:
            self._flag = None
            if self._replaced:
                with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                    signal.set_wakeup_fd(self._old_fd())
                self._replaced.clear()

    def _old_fd(self) -> int:
        """What was set before ours; ours too may have been found, after an interrupt in `end`."""
        ours = self._in.fileno()
        return next((fd for fd in reversed(self._replaced) if fd != ours), -1)

    def _run(self) -> None:
        is_open = True
        while is_open:
            select.select([self._out], [], [])
            with self._lock:
                is_open = self._take()

    def _take(self) -> bool:
        """Deal with the signals that were written so far; False when no more can come."""
        try:
            numbers = self._out.recv(4096)
        except BlockingIOError:
            return True
        if self._flag is not None and not _STOPPING.isdisjoint(numbers):
            self._flag[0] = 1
        if numbers and self._elsewhere >= 0:
            with contextlib.suppress(OSError):  # full, or closed meanwhile
                os.write(self._elsewhere, numbers)
        return bool(numbers)
