"""The registry: the pairs that `models.toml` names, as values.

Two files are read, the one that ships with specllama and the user's own, whose pairs come first
and replace those of the same name. A leaf: it reads TOML and opens no model.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from specllama.errors import UsageError
from specllama.folders import config_folder
from specllama.sources import REPO, FileSource, HubFile, LocalFile, PackageFile, Requantised, Source
from specllama.tables import Table, did_you_mean, parse_toml, read_text

CACHE_KINDS = ("attention", "sliding window", "recurrent", "hybrid")
_NAME = r"[\w.+-]+"


@dataclass(frozen=True)
class PairSpec:
    """A named target and draft, and what is known of them without opening a file.

    context: tokens that both were trained for. cache: what llama.cpp keeps of a text, one of
    CACHE_KINDS. gated: whether the hub wants its terms accepted first. size_gb: both files;
    memory_gb and gpu_memory_gb: what a machine should have to run the pair on its processor, or
    whole on a GPU; all in 10^9 bytes. chat_template: Jinja text that replaces the target's own.
    registry: the file that names the pair.
    """

    name: str
    target: Source
    draft: Source
    licence: str | None = None
    about: str | None = None
    context: int | None = None
    cache: str | None = None
    gated: bool = False
    size_gb: float | None = None
    memory_gb: float | None = None
    gpu_memory_gb: float | None = None
    chat_template: str | None = None
    registry: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Registry:
    """The pairs of one registry file or of several, in their order."""

    paths: tuple[Path, ...]
    pairs: tuple[PairSpec, ...]

    def pair(self, name: str) -> PairSpec:
        """The pair of that name; UsageError with the nearest name when there is none."""
        for pair in self.pairs:
            if pair.name == name:
                return pair
        names = [pair.name for pair in self.pairs]
        hint = did_you_mean(name, names) or f"the pairs are: {', '.join(names) or '(none)'}"
        files = " and ".join(str(path) for path in self.paths)
        has = "has" if len(self.paths) == 1 else "have"
        raise UsageError(f'{files} {has} no pair named "{name}"; {hint}')


def is_pair_name(text: str) -> bool:
    """Whether a text can be the name of a pair; one that ends like a model file cannot."""
    return bool(re.fullmatch(_NAME, text)) and not text.lower().endswith(".gguf")


def is_quantisation(text: str) -> bool:
    """Whether a text can be llama.cpp's name of a quantisation type, such as Q2_K."""
    return bool(re.fullmatch(r"[A-Za-z0-9_]+", text))


def shipped_path() -> Path:
    """The registry that ships with specllama: in a wheel inside the package, else beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def own_path() -> Path:
    """The user's own registry, which may not exist."""
    return config_folder() / "models.toml"


def load_registry(path: Path | None = None) -> Registry:
    """Read a registry file alone or, without one, the user's own and the one that is shipped.

    A byte-order mark is tolerated. Raises UsageError, naming file, line and key, when a file cannot
    be read or says something that it should not.
    """
    if path is not None:
        path = Path(os.path.expanduser(path))
        return Registry((path,), _read(path))
    shipped = Registry((shipped_path(),), _read(shipped_path()))
    if not os.path.lexists(own_path()):
        return shipped
    own = _read(own_path())
    names = {pair.name for pair in own}
    rest = tuple(pair for pair in shipped.pairs if pair.name not in names)
    return Registry((own_path(), *shipped.paths), own + rest)


def _read(path: Path) -> tuple[PairSpec, ...]:
    return parse_registry(path, read_text(path))


def parse_registry(path: Path, text: str) -> tuple[PairSpec, ...]:
    """The pairs that a text names, in whose refusals it is the content of that path.

    Raises UsageError.
    """
    document = parse_toml(path, text)
    document.allow({"pairs"})
    if "pairs" not in document.values:
        return ()
    pairs = document.table("pairs")
    return tuple(_parse_pair(pairs, name) for name in pairs.values)


def require_name(name: str) -> None:
    """Raises UsageError for what no pair may be called."""
    if not is_pair_name(name):
        raise UsageError(
            'a pair is named with letters, digits, ".", "_", "+" and "-", and not like a .gguf '
            f'file, not "{name}"; choose another name'
        )


def _parse_pair(pairs: Table, name: str) -> PairSpec:
    try:
        require_name(name)
    except UsageError as error:
        pairs.refuse(str(error), name)
    table = pairs.table(name)
    table.allow({
        *("target", "draft", "licence", "about", "context", "cache", "gated", "chat_template"),
        *("size_gb", "memory_gb", "gpu_memory_gb"),
    })
    target = _parse_source(table.table("target"))
    return PairSpec(
        name,
        target,
        _parse_source(table.table("draft"), target),
        licence=table.optional_text("licence"),
        about=table.optional_text("about"),
        context=table.optional_count("context"),
        cache=_parse_cache(table),
        gated=table.truth("gated"),
        size_gb=table.optional_number("size_gb"),
        memory_gb=table.optional_number("memory_gb"),
        gpu_memory_gb=table.optional_number("gpu_memory_gb"),
        chat_template=table.optional_text("chat_template"),
        registry=table.path,
    )


def _parse_cache(table: Table) -> str | None:
    cache = table.optional_text("cache")
    if cache is not None and cache not in CACHE_KINDS:
        hint = did_you_mean(cache, CACHE_KINDS) or f"it can be {', '.join(CACHE_KINDS)}"
        table.refuse(f'{table.key("cache")} cannot be "{cache}"; {hint}', "cache")
    return cache


def _parse_source(table: Table, target: Source | None = None) -> Source:
    """One side of a pair; the target is what a draft means by `requantise = "target"`."""
    if "requantise" not in table.values:
        return _parse_file(table)
    table.allow({"requantise", "type"})
    kind = table.text("type")
    if not is_quantisation(kind):
        wanted = 'must be a quantisation type like "Q2_K"'
        table.refuse(f'{table.key("type")} {wanted}, not "{kind}"', "type")
    if target is None or table.values["requantise"] != "target":
        return Requantised(_parse_file(table.table("requantise")), kind.upper())
    if isinstance(target, Requantised):
        table.refuse(f'"{".".join(table.place)}" requantises a target that is requantised already')
    return Requantised(target, kind.upper())


def _parse_file(table: Table) -> FileSource:
    marks = [mark for mark in ("repo", "path", "package") if mark in table.values]
    if len(marks) != 1:
        found = " and ".join(marks) or ", ".join(table.values) or "an empty table"
        place = ".".join(table.place)
        table.refuse(f'"{place}" must name a file by repo, path or package, not {found}')
    if marks == ["repo"]:
        return _parse_hub_file(table)
    if marks == ["package"]:
        table.allow({"package", "version", "file"})
        return PackageFile(table.text("package"), table.optional_text("version"), _file(table))
    table.allow({"path"})
    # Joining leaves an absolute path as it is.
    path = table.path.parent / os.path.expanduser(table.text("path"))
    return LocalFile(Path(os.path.abspath(path)))


def _parse_hub_file(table: Table) -> HubFile:
    table.allow({"repo", "file", "revision", "sha256"})
    repo = table.text("repo")
    if not re.fullmatch(REPO, repo):
        table.refuse(f'{table.key("repo")} must be "owner/name", not "{repo}"', "repo")
    sha256 = table.optional_text("sha256")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        wanted = "must be 64 hexadecimal digits"
        table.refuse(f'{table.key("sha256")} {wanted}, not "{sha256}"', "sha256")
    revision = table.text("revision", "main")
    if ".." in revision.split("/"):
        table.refuse(f'{table.key("revision")} cannot be "{revision}"', "revision")
    return HubFile(repo, _file(table), revision, sha256 and sha256.lower())


def _file(table: Table) -> str:
    file = table.text("file")
    if file.startswith("/") or ".." in file.split("/") or "\\" in file:
        wanted = 'must be a relative path with "/"'
        table.refuse(f'{table.key("file")} {wanted}, not "{file}"', "file")
    return file
