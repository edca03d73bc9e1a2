"""What `specllama` and `python -m specllama` run: the command line, once it is loaded."""

from __future__ import annotations

import os
import signal
from typing import Any, NoReturn


def main() -> NoReturn:
    """Load the command line and run it; exits with its code."""
    can_be_interrupted = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if can_be_interrupted:
        signal.signal(signal.SIGINT, _leave)
    from specllama import cli

    if can_be_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _leave(_signal: int, _frame: Any) -> NoReturn:
    # A module that is being imported may swallow an exception, and nothing is open yet.
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
