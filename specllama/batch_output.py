"""The output of a batch: a line of JSON for each row, appended when the row is done.

What is written when: a line is handed to the system whole and at once, so that whatever ends the
process loses none; at most a second later, and at the end, it is synchronised with the disk, so
that a machine that loses power loses the rows of the last second. With a name that ends in .gz
every line is a gzip member of its own.

While it is written, a lock is held on a file beside it; the system lets go of it when the process
ends, however it ends.
"""

from __future__ import annotations

import contextlib
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
from specllama.errors import SpecllamaError, UsageError
from specllama.storage import write

_SYNC_SECONDS = 1.0
_CHUNK = 1 << 16
_FLAGS = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
_MEMBER = gzip.compress(b"", mtime=0)[:4]  # how a gzip member begins


class Output:
    """Where records go: an ordinary file, or standard output.

    Raises UsageError for a path that cannot be written or is locked by another process.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._synced = clock()
        self._stack = contextlib.ExitStack()
        self._fd = -1
        if path == STANDARD:
            return
        self._stack.enter_context(_locked(path))
        try:
            self._fd = os.open(path, _FLAGS | os.O_CREAT, 0o666)
        except OSError as error:
            self._stack.close()
            reason = error.strerror
            raise UsageError(f"{path} cannot be written: {reason}; check the path") from None
        self._stack.callback(lambda: os.close(self._fd))

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._sync()
        finally:
            self._stack.close()

    @property
    def is_file(self) -> bool:
        """Whether it can be read again, to go on with it."""
        return self._fd >= 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record whole, whatever interrupts it."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")
        if not self.is_file:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        self._write(self._packed(line))
        if self._clock() - self._synced >= _SYNC_SECONDS:
            self._sync()

    def _packed(self, line: bytes) -> bytes:
        return gzip.compress(line, mtime=0) if is_packed(self.path) else line

    def _write(self, data: bytes) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:  # a full disk: nothing of a line, or all of it
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise SpecllamaError(
                f"{self.path} takes no more: {error.strerror}; make room and run the same command "
                "again, which goes on where it stopped"
            ) from None
        except BaseException:
            while view:
                view = view[os.write(self._fd, view) :]
            raise

    def _sync(self) -> None:
        if self.is_file:
            os.fsync(self._fd)
            self._synced = self._clock()

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
        os.close(self._fd)  # Windows replaces no file that is open
        try:
            write(self.path, _without(self.path, spans))
        finally:
            self._fd = os.open(self.path, _FLAGS)


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
    for line in file:
        yield Line(at, at + len(line), line, torn=not line.endswith(b"\n"))
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
            if end is None:
                following = data.find(_MEMBER, begin + 1)
                end = following if following >= 0 else size
                is_begun = data[begin : begin + len(_MEMBER)] == _MEMBER[: size - begin]
                torn = is_begun and following < 0
                yield Line(begin, end, b"?", torn)
            else:
                yield Line(begin, end, text)
            begin = end


def _member(data: mmap.mmap, begin: int) -> tuple[bytes, int | None]:
    """The content of a gzip member and where it ends; None when it is cut or damaged."""
    unpack, text, at = zlib.decompressobj(wbits=31), b"", begin
    try:
        while not unpack.eof and at < len(data):
            text += unpack.decompress(data[at : at + _CHUNK])
            at = min(at + _CHUNK, len(data))
    except zlib.error:
        return b"", None
    return text, at - len(unpack.unused_data) if unpack.eof else None


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


# --- the lock -------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of an output. Raises UsageError while another process holds it."""
    try:
        real = path.resolve()
        if real.exists() and not real.is_file():
            raise UsageError(f"{path} is a folder, a device or a pipe; name an ordinary file")
        lock = real.with_name(f".{real.name[:200]}.lock")
        fd = _open_lock(lock)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be written: {reason}; check the path") from None
    if fd is None:
        raise UsageError(
            f"another process is writing {path}; wait for it, or name another output "
            f"(it holds {lock}, which is free as soon as it ends)"
        )
    try:
        yield
    finally:
        # Removed before it is let go: whoever opened it meanwhile sees that it is no longer there.
        if os.name == "nt":
            os.close(fd)
        with contextlib.suppress(OSError):
            lock.unlink()
        if os.name != "nt":
            os.close(fd)


def _open_lock(lock: Path) -> int | None:
    """A file descriptor that holds the lock, or None while another process does."""
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        if not _try_lock(fd):
            os.close(fd)
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(lock)):
                return fd
        os.close(fd)  # its last holder has removed it


def _try_lock(fd: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
