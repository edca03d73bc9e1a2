"""Writing the user's own `models.toml`: a pair comes in or goes out, the rest stays as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specllama.errors import SpecllamaError, UsageError
from specllama.folders import write_whole
from specllama.registry import PairSpec, load_registry, own_path, parse_registry
from specllama.sources import FileSource, HubFile, LocalFile, PackageFile, Requantised, Source
from specllama.tables import read_text

LOCK_SECONDS = 10.0
_KEYS = (
    *("licence", "about", "context", "cache", "gated", "size_gb", "memory_gb", "gpu_memory_gb"),
    "chat_template",
)


def require_free(name: str) -> None:
    """Raises UsageError when the user's own registry has that pair, or cannot be read."""
    if _has(name):
        raise UsageError(
            f"{own_path()} has a pair {name} already; choose another name, or take it out first "
            f"with `specllama models remove {name}`"
        )


def add(spec: PairSpec) -> None:
    """Write a pair at the end of the user's own registry, which is made if there is none.

    Raises UsageError for a name that is taken meanwhile and for a text that TOML cannot hold,
    SpecllamaError while another process is writing, OSError.
    """
    with _locked():
        require_free(spec.name)
        _write(_with(_read(), spec))


def remove(name: str) -> bool:
    """Take a pair out of the user's own registry; whether it was there.

    Raises SpecllamaError while another process is writing, OSError.
    """
    import tomlkit

    if not _has(name):  # also where nothing can be written
        return False
    with _locked():
        document = tomlkit.parse(_read())
        pairs: Any = document.get("pairs", {})
        if name not in pairs:
            return False
        del pairs[name]
        _write(document.as_string())
        return True


def _has(name: str) -> bool:
    path = own_path()
    return os.path.lexists(path) and any(pair.name == name for pair in load_registry(path).pairs)


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


def _read() -> str:
    path = own_path()
    if not os.path.lexists(path):
        return ""
    text = read_text(path)
    parse_registry(path, text)  # for the refusal of a file that is not right as it stands
    return text


def _with(text: str, spec: PairSpec) -> str:
    """The text of a registry with one pair more."""
    import tomlkit
    from tomlkit.items import InlineTable

    pair = {"target": _inline(spec.target), "draft": _inline(spec.draft)}
    known = {key: getattr(spec, key) for key in _KEYS}
    pair |= {key: value for key, value in known.items() if value and str(value).strip()}
    document = tomlkit.parse(text)
    pairs: Any = document.get("pairs")
    if isinstance(pairs, InlineTable):  # which takes nothing outside its braces
        pairs[spec.name] = _braced(pair)
        return document.as_string()
    more = tomlkit.table(is_super_table=True)
    more[spec.name] = pair
    return f"{text.rstrip()}\n\n{tomlkit.dumps({'pairs': more})}".lstrip()


def _write(text: str) -> None:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            "a path or a text is not UTF-8, and the registry is; rename the file"
        ) from None
    parse_registry(own_path(), text)  # what it would refuse is not written
    write_whole(own_path(), data)


def _inline(source: Source) -> Any:
    values: dict[str, Any]
    if isinstance(source, Requantised):
        values = {"requantise": _inline(source.source), "type": source.type}
    else:
        values = _file(source)
    return _braced(values)


def _braced(values: dict[str, Any]) -> Any:
    import tomlkit

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
