"""Signals that end a batch: nothing is finished halfway, and a second one does not wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP drops the rows in flight, the second ends the process."""

    def leave(number: int, _frame: Any) -> NoReturn:
        os._exit(128 + number)

    def stop(number: int, frame: Any) -> None:
        for each in old:
            signal.signal(each, leave)
        handler = old[number]
        if callable(handler):  # it raises what ends the command
            handler(number, frame)
        raise SystemExit(128 + number)

    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    # What is ignored stays ignored, as nohup wants it.
    old = {each: signal.getsignal(each) for each in numbers}
    old = {each: handler for each, handler in old.items() if handler not in (signal.SIG_IGN, None)}
    for each in old:
        signal.signal(each, stop)
    yield
    # Not after an interrupt: what is still to be closed can be left at once, too.
    for each, handler in old.items():
        signal.signal(each, handler)
