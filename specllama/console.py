"""The standard streams as a command needs them: nothing is lost, and a note costs no answer."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import Any


def prepare() -> None:
    """Replace closed streams, and wrap standard output and standard error.

    Standard output waits where it is non-blocking and full. What standard error cannot take is
    dropped. A character that a console cannot show becomes a question mark.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    sys.stdout = _over(sys.stdout, _Patient)
    sys.stderr = _over(sys.stderr, _Forgiving)


def _over(stream: Any, kind: type[_Patient]) -> Any:
    """The same text stream with another way to write its bytes."""
    if not isinstance(stream, io.TextIOWrapper):  # somebody else's
        return stream
    # python -u asks for streams that hold nothing back.
    buffered = _Unbuffered if stream.write_through else io.BufferedWriter
    return io.TextIOWrapper(
        buffered(kind(stream)),
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Unbuffered(io.BufferedWriter):
    """Writes whole what it is given, at once."""

    def write(self, data: Any) -> int:
        """All of the bytes."""
        count = super().write(data)
        self.flush()
        return count


class _Patient(io.RawIOBase):
    """A raw stream that waits until it can write."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__()
        self._stream = stream  # which would be closed with its last reference
        self._raw: Any = getattr(stream.buffer, "raw", stream.buffer)  # python -u has no buffer

    def write(self, data: Any) -> int:
        """Some of the bytes, at least one; the count."""
        while (count := self._raw.write(data)) is None:  # non-blocking, and full
            select.select([], [self._raw], [])
        return int(count)

    def writable(self) -> bool:
        """Yes."""
        return True

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return bool(self._raw.isatty())

    def fileno(self) -> int:
        """The file descriptor."""
        return int(self._raw.fileno())


class _Forgiving(_Patient):
    """A raw stream that loses what it cannot write: notes must not cost an answer."""

    def write(self, data: Any) -> int:
        """All of the bytes, as far as the caller can tell."""
        left = memoryview(data).cast("B")
        with contextlib.suppress(OSError):
            while left:
                left = left[super().write(left) :]
        return memoryview(data).nbytes
