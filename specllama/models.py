"""What `specllama models` does: fetch pairs, find them, add some, remove some."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specllama import check, hub, hub_cache, listing, own_registry, pulled, registry, sources
from specllama.errors import ModelError, UsageError
from specllama.hub_errors import offline
from specllama.loading import Files, prepare
from specllama.parts import part_paths
from specllama.registry import PairSpec, Registry
from specllama.sources import HubFile, LocalFile, Requantised, Source

Announce = Callable[[str], None]


# --- pull and path ---------------------------------------------------------------------------


def named(name: str, found: Callable[[], Registry]) -> list[Source]:
    """What a pair's name or a `hf:` text stands for.

    Of a repository alone, `hf:owner/name` or `hf:owner/name:Q4_K_M`, the one model that it has, or
    the one with these letters in its name, for which the hub is asked. Raises SpecllamaError.
    """
    if name.startswith(sources.HUB_PREFIX):
        return [_on_hub(name)]
    spec = found().pair(name)
    return [spec.target, spec.draft]


def _on_hub(text: str) -> HubFile:
    repo = re.fullmatch(rf"hf:({sources.REPO})(?::(\w+))?", text)
    if repo is not None:
        return hub.choose_file(repo[1], part_of_name=repo[2] or "")
    return sources.parse_hub(text)


def pull(wanted: Sequence[Source], announce: Announce, again: str | None = None) -> list[Path]:
    """Have every file on this machine, fetched and verified; where each is, in the same order.

    Room on the disk for all of them is looked for before the first is fetched. again: what to pull
    when a file is not there, for messages. Raises SpecllamaError.
    """
    files = list(dict.fromkeys(filter(None, (_hub_file(source) for source in wanted))))
    if offline():
        files = []  # what is in the cache is found below, and what is not is named there
    for repo in dict.fromkeys(file.repo for file in files):
        hub.sweep(repo, announce)
    looked_up = [(file, hub.look_up(file)) for file in files]
    remotes = [remote for _, each in looked_up for remote in each]
    hub.require_space(remotes)
    for remote in hub.missing(remotes):
        announce(f"fetching {remote.name}, {remote.size / 1e9:.2f} GB")
    for file, each in looked_up:
        _fetch(file, each, announce)
    return [prepare(source, announce, again) for source in wanted]


def _hub_file(source: Source) -> HubFile | None:
    original = source.source if isinstance(source, Requantised) else source
    return original if isinstance(original, HubFile) else None


def _fetch(source: HubFile, remotes: Sequence[hub.Remote], announce: Announce) -> None:
    """Fetch the files of a model, then record them; what an older pull left goes."""
    before = pulled.find(source)
    ours = {part.etag for part in before.parts if part.fetched} if before else set()
    parts = tuple(
        pulled.Part(
            remote.file,
            remote.size,
            remote.etag,
            hub.fetch(remote, announce) or remote.etag in ours,
        )
        for remote in remotes
    )
    first = remotes[0]
    pulled.save(pulled.Pulled(source.repo, first.file, source.revision, first.commit, parts))
    if before is not None and before.commit != first.commit:
        for part in before.parts:
            if part.fetched:
                hub_cache.discard(before, part)


# --- add and remove --------------------------------------------------------------------------


def add(
    name: str,
    target: str,
    draft: str | None,
    announce: Announce,
    *,
    requantise: str | None = None,
    licence: str | None = None,
    about: str | None = None,
) -> PairSpec:
    """Check two models as a pair, and write it into the user's own registry.

    target, draft: paths or `hf:` texts, which are fetched first. requantise: the type of a smaller
    copy of the target, in the place of a draft. Nothing is written when the pair cannot work.
    Raises UsageError for a name that is taken, ModelError for a pair that is refused.
    """
    registry.require_name(name)
    own_registry.require_free(name)
    if (draft is None) == (requantise is None):
        raise UsageError("name either a draft model or a type to requantise the target to")
    if requantise is not None and not registry.is_quantisation(requantise):
        raise UsageError(f'a quantisation type is like Q2_K, not "{requantise}"; choose another')
    large = _given(target)
    if draft is not None:
        small: Source = _given(draft)
    else:
        small = Requantised(large, str(requantise).upper())
    paths = pull((large, small), announce)
    report = check.examine(Files(paths[0], paths[1]))
    if report.refusal:
        raise ModelError(f"{report.refusal}; nothing was added")
    size = sum(part.stat().st_size for part in _files(paths)) / 1e9
    size_gb = round(size, 2) or None
    spec = PairSpec(name, large, small, licence=licence, about=about, size_gb=size_gb)
    own_registry.add(spec)
    return spec


def _given(text: str) -> HubFile | LocalFile:
    if text.startswith(sources.HUB_PREFIX) and not os.path.lexists(text):
        return _on_hub(text)
    return LocalFile(Path(os.path.abspath(os.path.expanduser(text))))


def _files(models: Sequence[Path]) -> Iterator[Path]:
    """All files of models that are given by their first."""
    for path in models:
        yield from (part for part in part_paths(path) if part.is_file())


def remove(name: str, found: Registry) -> Iterator[str]:
    """Delete what was fetched for a pair and take it out of the user's own registry.

    name: of a pair, or the `hf:` text of one file. Yields a sentence for each thing done or left.
    What another pair that is here uses stays, and so does what was not fetched by specllama, and
    every file that is no download. Raises SpecllamaError.
    """
    if name.startswith(sources.HUB_PREFIX):
        yield from _remove_unused(sources.parse_hub(name), found, name)
        return
    spec = found.pair(name)
    sides = (spec.target, spec.draft)
    for source in sides:  # before the files that they are copies of
        if isinstance(source, Requantised):
            yield from _remove_copy(source, found, name)
    for file in dict.fromkeys(filter(None, map(_hub_file, sides))):
        yield from _remove_unused(file, found, name)
    if own_registry.remove(name):
        yield f"{name} is no longer in {registry.own_path()}"
    elif spec.registry is not None:
        yield f"{name} stays listed by {spec.registry}"


def _remove_unused(file: HubFile, found: Registry, name: str) -> Iterator[str]:
    users = [
        row.spec.name
        for row in listing.rows(found)
        if row.here == "yes"
        and row.spec.name != name
        and file in (_hub_file(row.spec.target), _hub_file(row.spec.draft))
    ]
    if users:
        yield f"{sources.describe(file)} stays, for {', '.join(users)}"
    else:
        yield from _remove_download(file)


def _remove_copy(source: Requantised, found: Registry, name: str) -> Iterator[str]:
    if not listing.is_here(source):
        return
    for other in found.pairs:
        if other.name != name and source in (other.target, other.draft):
            return
    copy = sources.copy_path(source, prepare(source.source))
    if copy.is_file():
        size = copy.stat().st_size
        copy.unlink()
        yield f"removed {copy}, {size / 1e9:.2f} GB"


def _remove_download(file: HubFile) -> Iterator[str]:
    record = pulled.find(file)
    if record is None:
        if any(hub_cache.find(file)):
            yield f"{sources.describe(file)} stays, since specllama did not fetch it"
        return
    for part in record.parts:
        what = sources.describe(HubFile(file.repo, part.file, file.revision))
        if not part.fetched:
            yield f"{what} stays, since specllama did not fetch it"
            continue
        freed = hub_cache.discard(record, part)
        yield f"removed {what}, {freed / 1e9:.2f} GB freed"
    pulled.forget(file)


def find(name: str, found: Callable[[], Registry], announce: Announce) -> list[Path]:
    """Where the files of a pair, or of a `hf:` text, are. Raises ModelError when one is not."""
    if not name.startswith(sources.HUB_PREFIX):
        registry_pair = found().pair(name)
        sides = (registry_pair.target, registry_pair.draft)
        return [prepare(source, announce, name) for source in sides]
    if re.fullmatch(rf"hf:{sources.REPO}(:\w+)?", name):
        raise UsageError(f"{name} names no file; write hf:owner/name/file.gguf")
    return [prepare(sources.parse_hub(name), announce, name)]
