"""The command line as a person runs it: a process of its own, with its streams and exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from tiny import CHECKOUT

# Said of some builds of llama-cpp-python whatever the command; it is no part of any test.
BUILD_NOTE = "Note: llama-cpp-python was built with Intel AMX"


@dataclass(frozen=True)
class Result:
    """How a command ended: its exit code, or minus the signal that killed it, and its output."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.out.decode("utf-8")


def specllama(
    *arguments: str | os.PathLike[str],
    stdin: bytes | None = None,
    env: dict[str, str] | None = None,
    python: tuple[str, ...] = ("-m", "specllama.cli"),
) -> Result:
    """Run `specllama` with these arguments; without `stdin` there is nothing to read.

    python: what the interpreter runs instead of the command line itself.
    """
    done = subprocess.run(
        [sys.executable, *python, *(os.fspath(argument) for argument in arguments)],
        input=b"" if stdin is None else stdin,
        capture_output=True,
        timeout=60,
        env=environment(env),
    )
    return Result(done.returncode, done.stdout, without_build_note(done.stderr))


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The variables of a child process: ours, the checkout's modules, and some more."""
    # Without a debugger's trace, an abort ends the process at once.
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "GGML_NO_BACKTRACE": "1", **(extra or {})}


def without_build_note(data: bytes) -> str:
    """Standard error as text, without a remark on how llama-cpp-python was built."""
    lines = data.decode("utf-8", "replace").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(BUILD_NOTE))
