"""The output of a batch: a line of JSON for each row, appended when the row is done.

What is written when: a line is handed to the system whole and at once, so that whatever ends the
process loses none; about a second later, between two decodes, and at the end, it is synchronised
with the disk, so that a machine that loses power loses the rows of the last second. With a name
that ends in .gz every line is a gzip member of its own.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import mmap
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specllama.batch_input import STANDARD
from specllama.batch_lock import locked
from specllama.errors import SpecllamaError, UsageError
from specllama.storage import replace

_SYNC_SECONDS = 1.0
_CHUNK = 1 << 16
_MEMBER_CHUNK = 1 << 12  # a record is about as long
_LONGEST = 1 << 28  # bytes of a line, far more than a context's text has; what is longer is none
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})  # a file system without it
# How a gzip member begins, and one without a name and a time, as ours are.
_MEMBER, _OURS = b"\x1f\x8b\x08\x00", b"\x1f\x8b\x08\x00\0\0\0\0"
# Characters that JSON takes as they are, and some programs for the end of a line.
_ENDS = {end: f"\\u{end:04x}" for end in (0x85, 0x2028, 0x2029)}


class Output:
    """Where records go: an ordinary file, or standard output.

    is_locked: whether no other process can write it meanwhile; a few file systems have no locks.
    Raises UsageError for a path that cannot be written or is locked by another process.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.is_locked = True
        self._clock = clock
        self._synced = clock()
        self._is_settled = True
        self._stack = contextlib.ExitStack()
        self._fd = -1
        if not self.is_file:
            return
        _require_ordinary(path)
        with contextlib.ExitStack() as stack:
            self.is_locked = stack.enter_context(locked(path))
            self._open(os.O_CREAT)
            stack.callback(self._close)
            self._stack = stack.pop_all()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._sync()
            else:
                with contextlib.suppress(SpecllamaError):  # why it ends now is worth more
                    self._sync()
        finally:
            self._stack.close()

    @property
    def is_file(self) -> bool:
        """Whether it can be read again, to go on with it."""
        return self.path != STANDARD

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record whole, whatever interrupts it."""
        text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_ENDS)
        # Half a surrogate pair, of a path that is no text for example, becomes its escape in JSON.
        line = f"{text}\n".encode("utf-8", "backslashreplace")
        if not self.is_file:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        self._is_settled = False
        self._write(self._packed(line))
        self.settle()

    def settle(self) -> None:
        """Synchronise with the disk, if something was appended and the last time is a second ago.

        To be called now and then while nothing is appended.
        """
        if not self._is_settled and self._clock() - self._synced >= _SYNC_SECONDS:
            self._sync()

    def _packed(self, line: bytes) -> bytes:
        return gzip.compress(line, mtime=0) if is_packed(self.path) else line

    def _write(self, data: bytes) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            self._write_from(end, data)
        except OSError as error:  # a full disk: nothing of a line, or all of it
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise SpecllamaError(
                f"{self.path} takes no more: {error.strerror}; make room and run the same command "
                "again, which goes on where it stopped"
            ) from None
        except BaseException:
            self._write_from(end, data)
            raise

    def _write_from(self, end: int, data: bytes) -> None:
        """What the file lacks of a line that begins at `end`.

        An interrupt may have come before the count of what was written could be kept, so the file
        is asked.
        """
        while (done := os.lseek(self._fd, 0, os.SEEK_END) - end) < len(data):
            os.write(self._fd, memoryview(data)[done:])

    def _sync(self) -> None:
        if self._is_settled or self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise SpecllamaError(
                    f"{self.path} cannot be kept on its disk: {error.strerror}; check the disk, "
                    "and run the same command again"
                ) from None
        self._synced, self._is_settled = self._clock(), True

    def lines(self) -> Iterator[Line]:
        """What is there already, in order; the last may be torn."""
        if self.is_file:
            with open(self.path, "rb") as file:
                yield from _packed_lines(file) if is_packed(self.path) else _plain_lines(file)

    def mend(self, torn: Line) -> None:
        """Take away a line that was torn when its process or machine died."""
        os.ftruncate(self._fd, torn.begin)

    def finish_line(self) -> None:
        """Give the last line the end that it lacks."""
        self._write(self._packed(b"\n"))

    def drop(self, spans: Iterable[tuple[int, int]]) -> None:
        """Write the file anew without these bytes, (begin, end) in order; all of it or nothing."""
        self._close()  # Windows replaces no file that is open
        try:
            replace(self.path, _without(self.path, spans))
        except OSError as error:
            raise SpecllamaError(
                f"{self.path} cannot be written anew without the rows that are done again: "
                f"{error.strerror}; it is as it was, make room beside it"
            ) from None
        finally:
            self._open()

    def _open(self, flags: int = 0) -> None:
        try:
            self._fd = os.open(self.path, _FLAGS | flags, 0o666)
        except OSError as error:
            reason = error.strerror
            raise UsageError(f"{self.path} cannot be written: {reason}; check the path") from None

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _require_ordinary(path: Path) -> None:
    try:
        is_other = path.exists() and not path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be written: {reason}; check the path") from None
    if is_other:
        raise UsageError(
            f"{path} is a folder, a device or a pipe; name an ordinary file, or - for standard "
            "output"
        )


# --- what is there already ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the output, and the bytes of the file that hold it. torn: its end is missing."""

    begin: int
    end: int
    text: bytes
    torn: bool = False


def is_packed(path: Path) -> bool:
    """Whether a file of this name is compressed."""
    return path.suffix.lower() == ".gz"


def _plain_lines(file: BinaryIO) -> Iterator[Line]:
    at = 0
    while line := file.readline(_LONGEST):
        is_torn = not line.endswith(b"\n") and len(line) < _LONGEST
        yield Line(at, at + len(line), line, is_torn)
        at += len(line)


def _packed_lines(file: BinaryIO) -> Iterator[Line]:
    """Members of a gzip file, a line each; damage reaches to where the next one begins."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        begin = 0
        while begin < size:
            text, end = _member(data, begin)
            torn = False
            if end is None:
                following = data.find(_MEMBER, begin + 1)
                end = following if following >= 0 else size
                torn = following < 0 and _OURS.startswith(data[begin : begin + len(_OURS)])
            yield Line(begin, end, text, torn)
            begin = end


def _member(data: mmap.mmap, begin: int) -> tuple[bytes, int | None]:
    """What is there of a gzip member, and where it ends; None when it is cut or damaged."""
    unpack, text, at = zlib.decompressobj(wbits=31), b"", begin
    try:
        while not unpack.eof and at < len(data) and len(text) < _LONGEST:
            text += unpack.decompress(data[at : at + _MEMBER_CHUNK])
            at = min(at + _MEMBER_CHUNK, len(data))
    except zlib.error:
        return b"?", None
    if unpack.eof:
        return text, at - len(unpack.unused_data)
    return text[:-2], None  # without its end no record, even where only the checksum is missing


def _without(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of a file outside these spans."""
    with open(path, "rb") as file:
        at = 0
        for begin, end in spans:
            yield from _part(file, at, begin)
            at = end
        yield from _part(file, at, os.fstat(file.fileno()).st_size)


def _part(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    file.seek(begin)
    while begin < end:
        data = file.read(min(_CHUNK, end - begin))
        begin += len(data)
        yield data
