"""huggingface-hub's cache as it lies on the disk: what is there, and what may go.

No socket is opened here. The layout is huggingface-hub's own: contents by checksum in `blobs`, and
links to them by name in one folder of `snapshots` for each commit.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from specllama import pulled
from specllama.errors import ModelError
from specllama.hub_errors import offline
from specllama.parts import part_names
from specllama.sources import HubFile, describe, hub_text


def cache_dir() -> Path:
    """huggingface-hub's cache folder, which may not exist yet."""
    from huggingface_hub import constants

    return Path(os.path.abspath(os.path.expanduser(constants.HF_HUB_CACHE)))


def find(source: HubFile) -> list[Path | None]:
    """The files of a model in the cache, first part first, and None for each that is not there.

    The commit that was pulled counts before what the cache knows under the revision's name.
    """
    record = pulled.find(source)
    commits = [record.commit] if record else []
    found: list[Path | None] = []
    for revision in [*commits, source.revision]:
        found = [_cached(source.repo, file, revision) for file in part_names(source.file)]
        if all(found):
            break
    return found


def locate(source: HubFile, pull: str | None = None) -> Path:
    """The file to open for a model; no socket is opened. Raises ModelError when it is not there.

    pull: what to pull, for the message.
    """
    files = part_names(source.file)
    found = find(source)
    missing = [file for file, path in zip(files, found, strict=True) if path is None]
    first = found[0]
    if first is not None and not missing:
        _require_named_checksum(source, first)
        return first
    what = describe(source)
    if first is not None:
        what = f"the part {missing[0]} of {what}"
    command = f"`specllama models pull {pull or hub_text(source)}`"
    if offline():
        raise ModelError(
            f"offline (HF_HUB_OFFLINE is set), and {what} is not in the cache at {cache_dir()}; "
            f"run {command} while online, or set HF_HOME to the folder that it was fetched to"
        )
    raise ModelError(f"{what} is not in the cache at {cache_dir()}; run {command}")


def _cached(repo: str, file: str, revision: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(repo, file, revision=revision, cache_dir=cache_dir())
    except ValueError:
        raise ModelError(f'the hub has no repository called "{repo}"; correct the name') from None
    return Path(found) if isinstance(found, str) else None


def _require_named_checksum(source: HubFile, path: Path) -> None:
    """The cache names a large file by its SHA-256, so a wrong one is noticed without reading it."""
    held = os.path.basename(os.path.realpath(path))
    if source.sha256 and is_sha256(held) and held != source.sha256:
        raise ModelError(
            f"{path} has the SHA-256 {held}, and the registry wants {source.sha256}; "
            "correct the registry, or name the revision that it is of"
        )


def storage(repo: str) -> Path:
    """The cache's folder of a repository, which may not exist yet."""
    return cache_dir() / f"models--{repo.replace('/', '--')}"


def is_sha256(text: str) -> bool:
    """Whether a text is a SHA-256 as the hub writes it."""
    return bool(re.fullmatch(r"[0-9a-f]{64}", text))


def discard(record: pulled.Pulled, part: pulled.Part) -> int:
    """Take a file's name away, and its content unless another name has it; the bytes freed.

    Raises OSError.
    """
    snapshots = storage(record.repo) / "snapshots"
    named = snapshots / record.commit / part.file
    if not os.path.lexists(named):
        return 0
    content = Path(os.path.realpath(named))
    size = content.stat().st_size if content.is_file() else 0
    named.unlink()
    if content != named and any(
        path.is_symlink() and Path(os.path.realpath(path)) == content
        for path in snapshots.rglob("*")
    ):
        return 0
    content.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # only folders that are now empty
        for folder in named.relative_to(snapshots).parents:
            if folder != Path("."):
                (snapshots / folder).rmdir()
    return size
