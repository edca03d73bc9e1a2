"""One process at a time: a lock on a file beside the one that is written.

The system lets go of it when the process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from specllama.errors import UsageError

_LONGEST = 200  # bytes of a name that is taken over as it is; file systems take 255
# How the system says that somebody else holds a lock; anything else means that it has none.
_HELD = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which need not exist; false where the file system has no locks.

    Raises UsageError while another process holds it, and for a path whose folder takes no files.
    """
    lock = _beside(path)
    try:
        fd, is_safe = _open(lock)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{path} cannot be written: {reason}; its folder must be there and take a file "
            f"beside it, {lock.name}"
        ) from None
    if fd is None:
        raise UsageError(
            f"another process is writing {path}; wait for it, or name another output "
            f"(it holds {lock}, which is free as soon as it ends)"
        )
    try:
        yield is_safe
    finally:
        # Removed before it is let go: whoever opened it meanwhile sees that it is no longer there.
        if os.name == "nt":
            os.close(fd)
        with contextlib.suppress(OSError):
            lock.unlink()
        if os.name != "nt":
            os.close(fd)


def _beside(path: Path) -> Path:
    """The file to lock: the same one whatever links lead to it."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be written: {reason}; check the path") from None
    name = os.fsencode(real.name)
    if len(name) > _LONGEST:
        name = hashlib.sha256(name).hexdigest().encode()
    return real.with_name(f".{os.fsdecode(name)}.lock")


def _open(lock: Path) -> tuple[int | None, bool]:
    """A file descriptor that holds the lock, None while another process does, and whether it is
    safe that none does."""
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(fd)
            is_safe = True
        except OSError as error:
            if error.errno in _HELD:
                os.close(fd)
                return None, True
            is_safe = False
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(lock)):
                return fd, is_safe
        os.close(fd)  # its last holder has removed it


def _lock(fd: int) -> None:
    """Take the lock at once. Raises OSError."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
