"""Writing the user's own `models.toml`: a pair comes in or goes out, the rest stays as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specllama.errors import SpecllamaError, UsageError
from specllama.folders import write_whole
from specllama.registry import PairSpec, load_registry, own_path
from specllama.sources import FileSource, HubFile, LocalFile, PackageFile, Requantised, Source

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

LOCK_SECONDS = 10.0
_KEYS = (
    *("licence", "about", "context", "cache", "gated", "size_gb", "memory_gb", "gpu_memory_gb"),
    "chat_template",
)


def require_free(name: str) -> None:
    """Raises UsageError when the user's own registry has that pair, or cannot be read."""
    path = own_path()
    if os.path.lexists(path) and any(pair.name == name for pair in load_registry(path).pairs):
        raise UsageError(
            f"{path} has a pair {name} already; choose another name, or take it out first with "
            f"`specllama models remove {name}`"
        )


def add(spec: PairSpec) -> None:
    """Write a pair at the end of the user's own registry, which is made if there is none.

    Raises UsageError for a name that is taken meanwhile and for a text that TOML cannot hold,
    SpecllamaError while another process is writing, OSError.
    """
    import tomlkit

    table = tomlkit.table()
    table.add("target", _inline(spec.target))
    table.add("draft", _inline(spec.draft))
    for key in _KEYS:
        value = getattr(spec, key)
        if value not in (None, False):
            table.add(key, value)
    with _locked():
        require_free(spec.name)
        document = _read()
        pairs: Any = document.setdefault("pairs", tomlkit.table(is_super_table=True))
        pairs[spec.name] = table
        _write(document)


def remove(name: str) -> bool:
    """Take a pair out of the user's own registry; whether it was there.

    Raises SpecllamaError while another process is writing, OSError.
    """
    if not os.path.lexists(own_path()):
        return False
    with _locked():
        document = _read()
        pairs: Any = document.get("pairs", {})
        if name not in pairs:
            return False
        del pairs[name]
        _write(document)
        return True


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep another specllama from writing the file; the kernel frees a dead one's lock."""
    from filelock import FileLock, Timeout

    path = Path(os.path.realpath(own_path()))
    lock = path.with_name(f".{path.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=LOCK_SECONDS):
            yield
    except Timeout:
        raise SpecllamaError(
            f"another process is writing {path}; wait until it is done, or end it (it holds {lock})"
        ) from None


def _read() -> TOMLDocument:
    import tomlkit

    path = own_path()
    if not os.path.lexists(path):
        return tomlkit.document()
    load_registry(path)  # for the refusal of a file that is not right as it stands
    return tomlkit.parse(path.read_bytes().decode("utf-8-sig"))


def _write(document: TOMLDocument) -> None:
    try:
        data = document.as_string().encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            "a path or a text is not UTF-8, and the registry is; rename the file"
        ) from None
    write_whole(own_path(), data)


def _inline(source: Source) -> Any:
    import tomlkit

    values: dict[str, Any]
    if isinstance(source, Requantised):
        values = {"requantise": _inline(source.source), "type": source.type}
    else:
        values = _file(source)
    table = tomlkit.inline_table()
    table.update(values)
    return table


def _file(source: FileSource) -> dict[str, str]:
    match source:
        case LocalFile(path):
            return {"path": str(Path(path))}
        case PackageFile(distribution, version, file):
            named = {"package": distribution, "file": file}
            return named if version is None else {**named, "version": version}
        case HubFile(repo, file, revision, sha256):
            values = {"repo": repo, "file": file}
            if revision != "main":
                values["revision"] = revision
            return values if sha256 is None else {**values, "sha256": sha256}
