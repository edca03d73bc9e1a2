"""A person before a terminal: keys go in, and the screen shows what a terminal would show."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pexpect
import pyte
from command import BUILD_NOTE, environment

PROMPT = ">"
# Much higher than a real one, so that nothing scrolls away.
ROWS = 600
PATIENCE = 15  # seconds without a byte


class Terminal:
    """A command in a terminal of its own.

    raw: every byte it wrote. Waiting fails when the command ends first or is silent too long.
    """

    def __init__(
        self, *command: str | os.PathLike[str], columns: int = 80, env: dict[str, str] | None = None
    ) -> None:
        self.raw = b""
        self._lines: list[str] | None = None
        self._screen = pyte.Screen(columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self.child: pexpect.spawn[bytes] = pexpect.spawn(
            sys.executable,
            ["-m", "specllama.cli", *(os.fspath(word) for word in command)],
            dimensions=(ROWS, columns),
            env=environment({"TERM": "xterm-256color", **(env or {})}),
        )
        self.child.delaybeforesend = None

    @property
    def lines(self) -> list[str]:
        """What the screen shows, without empty lines at the end."""
        if self._lines is None:
            shown = (line.rstrip() for line in self._screen.display)
            self._lines = [line for line in shown if not line.startswith(BUILD_NOTE)]
            while self._lines and not self._lines[-1]:
                del self._lines[-1]
        return self._lines

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Read until the screen is as wanted."""
        while not ready():
            self._read()

    def _read(self) -> None:
        """Read what comes until there is a pause, but not for long: looking takes its time."""
        try:
            data = self.child.read_nonblocking(1 << 16, timeout=PATIENCE)
        except pexpect.TIMEOUT:
            raise AssertionError(f"nothing more comes; the screen shows\n{self.text}") from None
        begun = time.monotonic()
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            while time.monotonic() < begun + 0.2:
                data += self.child.read_nonblocking(1 << 16, timeout=0.01)
        self.raw += data
        self._stream.feed(data)
        self._lines = None

    def wait_for(self, text: str) -> None:
        """Read until the screen shows a text."""
        self.wait(lambda: text in self.text)

    def wait_for_prompt(self, n_prompts: int | None = None) -> None:
        """Read until the last line is an empty prompt, the n-th if a number is given."""

        def is_ready() -> bool:
            counted = n_prompts is None or self.n_prompts >= n_prompts
            return counted and self.lines[-1:] == [PROMPT]

        self.wait(is_ready)

    @property
    def n_prompts(self) -> int:
        """How many prompts there are on the screen."""
        return sum(line == PROMPT or line.startswith(f"{PROMPT} ") for line in self.lines)

    def keys(self, keys: str) -> None:
        """Type without Enter."""
        self.child.send(keys)

    def say(self, line: str) -> str:
        """Type a line and Enter at a prompt; what the screen shows between it and the next."""
        before = self.n_prompts
        n_lines = len(self.lines)
        self.keys(f"{line}\r")
        self.wait_for_prompt(before + 1)
        return "\n".join(self.lines[n_lines:-1])

    def paste(self, text: str) -> None:
        """Paste as a terminal does that marks pastes."""
        self.keys(f"\x1b[200~{text}\x1b[201~")

    def resize(self, columns: int) -> None:
        """Change the width of the window."""
        self.child.setwinsize(ROWS, columns)
        self._screen.resize(ROWS, columns)
        self._lines = None

    @property
    def modes(self) -> list[object]:
        """How the terminal treats what is typed and shown."""
        return termios.tcgetattr(self.child.child_fd)

    def end(self) -> int:
        """Read to the end; the exit code, or minus the signal that ended it."""
        try:
            self.wait(lambda: False)
        except pexpect.EOF:
            self.child.wait()
        if self.child.exitstatus is None:
            return -(self.child.signalstatus or 0)
        return int(self.child.exitstatus)


@contextmanager
def terminal(
    *command: str | os.PathLike[str], columns: int = 80, env: dict[str, str] | None = None
) -> Iterator[Terminal]:
    """A command in a terminal, ended with the block if it has not ended by itself."""
    started = Terminal(*command, columns=columns, env=env)
    try:
        yield started
    finally:
        try:
            started.child.close(force=True)
        except pexpect.ExceptionPexpect:  # killed, and a busy machine takes longer over it
            started.child.wait()
