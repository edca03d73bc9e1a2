"""The input of a batch, line by line: a file, standard input, and either compressed by gzip.

It is read as a stream. Blank lines count as lines and are no rows.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import stat
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from specllama.batch_rows import Row, parse
from specllama.batch_values import RowError
from specllama.errors import SpecllamaError, UsageError

STANDARD = Path("-")
LONGEST = 16 << 20  # bytes of a line; no context holds as much
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a line of the input holds.

    index: number of the row, from 0. line: number of the line, from 1. row: None where the line
    cannot be understood, which `error` then tells.
    """

    index: int
    line: int
    row: Row | None
    error: RowError | None = None

    @property
    def id(self) -> str | None:
        """The row's own, where that much is known of it."""
        if self.row is not None:
            return self.row.id
        return self.error.id if self.error is not None else None


def entries(path: Path) -> Iterator[Entry]:
    """Every row of the input, STANDARD for standard input.

    Raises UsageError for a file that cannot be read or is no text of lines, SpecllamaError for a
    compressed one that is cut or damaged.
    """
    index = 0
    with _opened(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line is not None and not line:
                continue
            yield _entry(index, number, line)
            index += 1


def _entry(index: int, number: int, line: bytes | None) -> Entry:
    try:
        if line is None:
            raise RowError(
                "line_too_long", f"it is longer than {LONGEST >> 20} MiB, more than a context holds"
            )
        return Entry(index, number, parse(line))
    except RowError as error:
        return Entry(index, number, None, error)


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes | None]:
    """Lines without their ends and byte-order marks; None for one that is too long."""
    try:
        line = file.readline(LONGEST + 1)
        if line.startswith(_UTF16):
            raise UsageError(f"{name(path)} is UTF-16; convert it to UTF-8, with iconv for example")
        while line:
            if len(line) > LONGEST and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST)
                yield None
            else:
                # Files with a mark may have been put one behind the other.
                yield line.strip(b" \t\r\n").removeprefix(_BOM).strip(b" \t")
            line = file.readline(LONGEST + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SpecllamaError(
            f"{name(path)} is cut or damaged: {error}; give the whole of it, and the same command "
            "does what is missing"
        ) from None
    except OSError as error:
        raise UsageError(f"{name(path)} cannot be read: {error.strerror or error}") from None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of the input, unpacked."""
    with contextlib.ExitStack() as stack:
        if path == STANDARD:
            raw = cast("io.BufferedReader", sys.stdin.buffer)
        else:
            require_readable(path)
            raw = stack.enter_context(open(path, "rb"))
        try:
            is_packed = raw.peek(2)[:2] == _GZIP
        except OSError as error:  # a folder, for example
            raise UsageError(f"{name(path)} cannot be read: {error.strerror or error}") from None
        if is_packed:
            yield cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=raw)))
        else:
            yield raw


def require_readable(path: Path) -> None:
    """Raises UsageError for a path that is no file to read rows from."""
    if path == STANDARD:
        return
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path} is a folder; name a file with a JSON object on each line")
        if stat.S_ISREG(mode):  # a pipe that is opened and closed has lost its writer
            path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read: {reason}; check the path") from None


def can_be_read_twice(path: Path) -> bool:
    """Whether the input is an ordinary file."""
    return path != STANDARD and path.is_file()


def name(path: Path) -> str:
    """What the input is called in messages."""
    return "standard input" if path == STANDARD else str(path)
