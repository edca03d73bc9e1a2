"""The Hugging Face hub: what it has, and fetching it into huggingface-hub's own cache.

Its variables hold: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Nothing gets its final name in
the cache before its size and checksum are those of the hub: a file arrives in a folder beside, and
is moved when it has been read through.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specllama import pulled
from specllama.errors import HubError
from specllama.hub_cache import cache_dir, is_sha256, storage
from specllama.hub_errors import no_hub, offline, told
from specllama.parts import part_names
from specllama.sources import HubFile, describe

log = logging.getLogger(__name__)

LOCK_SECONDS = 10.0
_CHUNK = 1024 * 1024
_STAGING = ".specllama"
# Commit and checksum name folders and files of the cache, so none may lead out of it.
_FOLDER_NAME = re.compile(r"[\w+=@~-][\w.+=@~-]{0,127}")


@dataclass(frozen=True)
class Remote:
    """What the hub says of one file. etag: its checksum, where it is one; size: bytes."""

    repo: str
    file: str
    revision: str
    commit: str
    etag: str
    size: int

    @property
    def name(self) -> str:
        """The file in one line, for messages."""
        return describe(HubFile(self.repo, self.file, self.revision))


# --- what the hub has ------------------------------------------------------------------------


def look_up(source: HubFile) -> list[Remote]:
    """What the hub says of a model's files, first part first. Raises HubError."""
    first, *others = part_names(source.file)
    remotes = [_head(source, first, source.revision)]
    # Of one commit, though the branch may move meanwhile.
    remotes += [_head(source, file, remotes[0].commit) for file in others]
    wanted, had = source.sha256, remotes[0].etag
    if wanted and is_sha256(had) and had != wanted:
        raise HubError(
            f"the hub's {describe(source)} has the SHA-256 {had}, and the registry wants {wanted}; "
            "name the revision that had it, or correct the checksum"
        )
    return remotes


def _head(source: HubFile, file: str, at: str) -> Remote:
    """What the hub says of a file at a revision, or at the commit that it stands for."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    what = HubFile(source.repo, file, source.revision)
    if offline():
        raise HubError(
            f"offline (HF_HUB_OFFLINE is set), so {describe(what)} cannot be asked for; "
            f"unset the variable to pull it, or use what is in the cache at {cache_dir()}"
        )
    with told(what):
        url = hf_hub_url(source.repo, file, revision=at)
        found = get_hf_file_metadata(url)
    commit, etag, size = found.commit_hash or "", found.etag or "", found.size
    are_names = _FOLDER_NAME.fullmatch(commit) and _FOLDER_NAME.fullmatch(etag)
    if size is None or size < 0 or not are_names:
        raise HubError(no_hub(what))
    return Remote(source.repo, file, source.revision, commit, etag, size)


def choose_file(repo: str, revision: str = "main", part_of_name: str = "") -> HubFile:
    """The one model file of a repository, or the one whose name has that part. Raises HubError."""
    from huggingface_hub import HfApi

    whole = HubFile(repo, "any file", revision)
    if offline():
        raise HubError(
            f"offline (HF_HUB_OFFLINE is set), so {repo} cannot be listed; name the file"
        )
    with told(whole):
        files = HfApi().list_repo_files(repo, revision=revision)
    # "mmproj" files turn pictures into tokens of a model; they are none themselves.
    models = [
        name
        for name in files
        if name.lower().endswith(".gguf") and not Path(name).name.lower().startswith("mmproj")
    ]
    firsts = sorted({part_names(name)[0] for name in models})
    chosen = [name for name in firsts if part_of_name.lower() in name.lower()]
    if len(chosen) == 1:
        return HubFile(repo, chosen[0], revision)
    if not firsts:
        raise HubError(f"{repo} has no .gguf file; name another repository")
    if not chosen:
        raise HubError(
            f'{repo} has no .gguf file like "{part_of_name}"; name one of {", ".join(firsts)}'
        )
    raise HubError(f"{repo} has several models; name one, hf:{repo}/FILE: {', '.join(chosen)}")


# --- fetching --------------------------------------------------------------------------------


def missing(remotes: Sequence[Remote]) -> list[Remote]:
    """Those that have yet to come."""
    return [remote for remote in remotes if not _has_right_size(remote)]


def sweep(repo: str, announce: Callable[[str], None] = log.info) -> None:
    """Delete what downloads from a repository have left that were killed."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    for folder in (storage(repo) / _STAGING).glob("*/"):
        lock = folder.with_name(f"{folder.name}.lock")
        # One that is under way holds its lock, and stays.
        with contextlib.suppress(TimeoutError, OSError), WeakFileLock(lock, timeout=0.05):
            shutil.rmtree(folder)
            announce(f"an earlier download from {repo} was cut off; it starts over")


def require_space(remotes: Sequence[Remote]) -> None:
    """Raises HubError when the disk has no room for what has yet to come."""
    needed = sum(remote.size for remote in missing(remotes))
    folders = (cache_dir(), *cache_dir().parents)
    free = next((shutil.disk_usage(each).free for each in folders if each.exists()), None)
    if free is not None and needed > free:
        raise HubError(
            f"the download needs {needed / 1e9:.2f} GB, and the disk of {cache_dir()} has "
            f"{free / 1e9:.2f} GB free; make room, or set HF_HOME to a folder on another disk"
        )


def fetch(remote: Remote, announce: Callable[[str], None] = log.info) -> bool:
    """Have a file in the cache, whole and verified; whether it had to be fetched.

    announce: told of what a person should know. Raises HubError; then, as after an interrupt,
    nothing of the file is left under its name.
    """
    if _named(remote).exists() and _has_right_size(remote):
        is_fixed = not os.access(storage(remote.repo), os.W_OK)  # somebody else's, say
        if _verified(remote) or (is_fixed and _checksum_fits(_at(remote), remote)):
            return False
    with _locked(remote):
        blob = storage(remote.repo) / "blobs" / remote.etag
        fetched = True
        if _has_right_size(remote):
            if _verified(remote) or _checksum_fits(_at(remote), remote):
                fetched = False
            else:
                announce(f"{_at(remote)} is damaged; fetching {remote.name} again")
        if fetched:
            _download(remote, blob, announce)
        with told(HubFile(remote.repo, remote.file, remote.revision), cache_dir()):
            _link(remote, blob)
        return fetched


def _download(remote: Remote, blob: Path, announce: Callable[[str], None]) -> None:
    """Download beside the cache's own files, verify, and move to the final name."""
    from huggingface_hub import hf_hub_download

    source = HubFile(remote.repo, remote.file, remote.revision)
    staging = storage(remote.repo) / _STAGING / remote.etag[:16]
    try:
        with told(source, cache_dir()):
            arrived = hf_hub_download(
                remote.repo, remote.file, revision=remote.commit, cache_dir=staging
            )
            path = Path(os.path.realpath(arrived))
            _require_intact(path, remote)
            blob.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, blob)
    except (KeyboardInterrupt, SystemExit):
        announce(f"the download of {remote.name} was stopped; nothing of it is kept, pull it again")
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _link(remote: Remote, blob: Path) -> None:
    """Give the content its name in the cache, as huggingface-hub does.

    Not by huggingface-hub itself, which asks the hub again, and would take what it says then.
    """
    named = _named(remote)
    if blob.is_file() and not (named.is_file() and named.samefile(blob)):
        named.parent.mkdir(parents=True, exist_ok=True)
        named.unlink(missing_ok=True)
        try:
            os.symlink(os.path.relpath(blob, named.parent), named)
        except OSError:  # links cannot be made everywhere, and there the content has the name
            os.replace(blob, named)
    if remote.revision != remote.commit:
        # As huggingface-hub itself does for a branch or a tag, so that others find the file too.
        ref = storage(remote.repo) / "refs" / remote.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(remote.commit, encoding="utf-8")


def _require_intact(path: Path, remote: Remote) -> None:
    size = path.stat().st_size
    if size != remote.size:
        problem = f"{size:,} bytes arrived instead of {remote.size:,}"
    elif not _checksum_fits(path, remote):
        problem = f"what arrived does not have its checksum, {remote.etag}"
    else:
        return
    raise HubError(
        f"{remote.name} came damaged: {problem}; nothing of it is kept, pull it again, and if it "
        "stays so, ask whoever runs the server or the proxy"
    )


def _checksum_fits(path: Path, remote: Remote) -> bool:
    """Whether a file has the hub's checksum: SHA-256, or Git's own of a file that is not in LFS."""
    if is_sha256(remote.etag):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", remote.etag):
        digest = hashlib.sha1(f"blob {remote.size}\0".encode(), usedforsecurity=False)
    else:
        return True  # a mirror with entity tags of its own; the size is all there is
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == remote.etag


def _named(remote: Remote) -> Path:
    return storage(remote.repo) / "snapshots" / remote.commit / remote.file


def _at(remote: Remote) -> Path:
    """Where the content of a file is, if it is: under its own name, else under its checksum."""
    named = _named(remote)
    return named if named.exists() else storage(remote.repo) / "blobs" / remote.etag


def _has_right_size(remote: Remote) -> bool:
    path = _at(remote)
    return path.is_file() and path.stat().st_size == remote.size


def _verified(remote: Remote) -> bool:
    """Whether it was read through before, by the record of what was pulled."""
    records = [record for record in pulled.every() if record.repo == remote.repo]
    known = {part.etag for record in records for part in record.parts}
    return remote.etag in known


@contextlib.contextmanager
def _locked(remote: Remote) -> Iterator[None]:
    """Keep another specllama from fetching the same file; the kernel frees a dead one's lock."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock = storage(remote.repo) / _STAGING / f"{remote.etag[:16]}.lock"
    with contextlib.ExitStack() as stack:
        with told(HubFile(remote.repo, remote.file, remote.revision), cache_dir()):
            lock.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(WeakFileLock(lock, timeout=LOCK_SECONDS))
            except TimeoutError:
                raise HubError(
                    f"another process is fetching {remote.name}; wait until it is done, or end it "
                    f"(it holds {lock})"
                ) from None
        yield
