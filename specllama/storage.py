"""Files that are read with care, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from specllama.errors import SpecllamaError, UsageError


def read(path: Path, largest: int) -> bytes:
    """The bytes of an ordinary file.

    Raises UsageError for one that is not there, not an ordinary file, not readable, or larger.
    """
    try:
        _require_file(path)
        size = path.stat().st_size
        if size > largest:
            raise UsageError(
                f"{path} has {size / 2**20:.0f} MiB, more than a saved conversation has; "
                "name another file"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {_cause(error)}; name another file") from None


def write(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file: to a temporary name beside it, which is renamed when it is on the disk.

    A link is followed, and a file that is replaced keeps its permissions. Raises UsageError for a
    path that names something else than a file, SpecllamaError when the file cannot be written; what
    was there is then as it was.
    """
    try:
        path = path.resolve()
        if path.exists():
            _require_file(path)
        replace(path, parts)
    except (OSError, RuntimeError, ValueError) as error:
        raise SpecllamaError(
            f"{path} cannot be written: {_cause(error)}; nothing is saved, name another file"
        ) from None


def replace(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file so that a reader finds either the old content or all of the new.

    A link is followed, and a file that is replaced keeps its permissions. Raises OSError, after
    which, as after an exception from `parts`, what was there is as it was.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(6)}.tmp")
    try:
        _fill(temporary, parts, path)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def unwritable(path: Path, error: OSError) -> UsageError:
    """The error for a result that cannot be written, with the system's reason."""
    return UsageError(
        f"cannot write {path}: {error.strerror or error}; choose a file in a folder that exists "
        "and that you may write to"
    )


def _require_file(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is a device or a pipe; name an ordinary file")


def _fill(temporary: Path, parts: Iterable[bytes], replaced: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
        if replaced.exists():
            temporary.chmod(stat.S_IMODE(replaced.stat().st_mode))
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the new name last, where folders can be synchronised."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cause(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
