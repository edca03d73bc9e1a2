"""The record of what was pulled: which commit a name stood for, and what the hub said of its files.

One small JSON file for each name in the user's configuration folder, so that two pulls at once do
not meet. A record that is damaged counts as none: the model is then looked up by its name alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specllama.folders import config_folder, write_whole
from specllama.parts import part_names
from specllama.sources import HubFile


@dataclass(frozen=True)
class Part:
    """A file of a model. etag: the hub's checksum of it. fetched: by specllama, not found there."""

    file: str
    size: int
    etag: str
    fetched: bool


@dataclass(frozen=True)
class Pulled:
    """The verified files of a model and the commit that they are of."""

    repo: str
    file: str
    revision: str
    commit: str
    parts: tuple[Part, ...]


def find(source: HubFile) -> Pulled | None:
    """The record of a model, if it was pulled."""
    return _read(_path(source))


def every() -> list[Pulled]:
    """All records."""
    found = (_read(path) for path in sorted(_folder().glob("*.json")))
    return [record for record in found if record is not None]


def save(record: Pulled) -> None:
    """Keep a record, in the place of an older one of that name. Raises OSError."""
    source = HubFile(record.repo, record.file, record.revision)
    write_whole(_path(source), (json.dumps(asdict(record), indent=1) + "\n").encode())


def forget(source: HubFile) -> None:
    """Drop the record of a model, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(source))


def _folder() -> Path:
    return config_folder() / "pulled"


def _path(source: HubFile) -> Path:
    first = part_names(source.file)[0]
    key = "\n".join((source.repo, first, source.revision)).encode("utf-8", "surrogateescape")
    return _folder() / f"{hashlib.sha256(key).hexdigest()[:24]}.json"


def _read(path: Path) -> Pulled | None:
    try:
        values: Any = json.loads(path.read_bytes())
        parts = tuple(Part(**part) for part in values.pop("parts"))
        record = Pulled(**values, parts=parts)
        return record if _is_sound(record) else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def _is_sound(record: Pulled) -> bool:
    texts = [record.repo, record.file, record.revision, record.commit]
    texts += [text for part in record.parts for text in (part.file, part.etag)]
    return all(isinstance(text, str) for text in texts) and ".." not in "/".join(texts).split("/")
