"""The KV state of a pair in a file, so that a conversation goes on without reading it again.

A line that names the kind, a line of JSON (what the parts are), then the states, one after the
other. The JSON is held by its checksum in whatever refers to the file, the states by theirs in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from specllama.errors import SpecllamaError, StateError
from specllama.generation import Pair
from specllama.lm import CachedLM
from specllama.storage import write

_KIND = b"specllama KV state 1\n"
_ENDS = 2**20  # bytes at each end of a model file that its identity is made of
_LONGEST_HEAD = 64 * 2**20


@dataclass(frozen=True)
class Identity:
    """A model file: its name, its size in bytes, and SHA-256 of its first and last MiB."""

    name: str
    size: int
    sha256: str

    def __eq__(self, other: object) -> bool:
        """A file that was renamed is the same."""
        if not isinstance(other, Identity):
            return NotImplemented
        return (self.size, self.sha256) == (other.size, other.sha256)

    def __hash__(self) -> int:
        return hash((self.size, self.sha256))


@dataclass(frozen=True)
class Reference:
    """What a saved conversation knows of its KV file: the checksum of the line that tells all."""

    sha256: str


def identities(pair: Pair) -> list[Identity]:
    """Those of the files of target and draft. Raises SpecllamaError for one that is gone."""
    return [identity(path) for path in pair.files]


def identity(path: Path) -> Identity:
    """That of a model file. Raises SpecllamaError for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(_ENDS))
            size = file.seek(0, 2)
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    except OSError as error:
        raise SpecllamaError(
            f"{path} cannot be read any more: {error.strerror}; put the model file back"
        ) from None
    return Identity(path.name, size, digest.hexdigest())


def save(path: Path, pair: Pair) -> Reference:
    """Write what target and draft hold. Raises SpecllamaError, with the old file as it was."""
    if not pair.files:
        raise StateError("the files of the models are not known")
    heads: list[dict[str, Any]] = []
    states: list[bytes] = []
    for (role, lm), identity in zip(_models(pair), identities(pair), strict=False):
        tokens, state = lm.save(0) if lm.n_held(0) else ((), b"")
        told = {"role": role, "tokens": list(tokens), "size": len(state), "sha256": _sha256(state)}
        heads.append({**told, "model": asdict(identity)})
        states.append(state)
    head = json.dumps({"library": _library(), "parts": heads}).encode() + b"\n"
    write(path, [_KIND, head, *states])
    return Reference(_sha256(head))


def load(path: Path, pair: Pair, reference: Reference) -> list[str]:
    """Restore what fits; a notice if something does not."""
    try:
        with open(path, "rb") as file:
            for part in _parts(file, reference, path.stat().st_size):
                _restore(part, file, pair)
    except (OSError, SpecllamaError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [f"the KV state in {path} is not used, so the conversation is read anew: {reason}"]
    return []


def _parts(file: BinaryIO, reference: Reference, size: int) -> Iterator[dict[str, Any]]:
    """The heads of the parts, all checked before the first. Raises StateError."""
    kind = file.readline(len(_KIND))
    head = file.readline(_LONGEST_HEAD)
    if kind != _KIND or _sha256(head) != reference.sha256:
        raise StateError("it is damaged, or belongs to another conversation")
    told = json.loads(head)
    if file.tell() + sum(part["size"] for part in told["parts"]) != size:
        raise StateError("it is cut or damaged")
    if told["library"] != _library():
        raise StateError(f"it was saved with llama-cpp-python {told['library']}")
    yield from told["parts"]


def _restore(part: dict[str, Any], file: BinaryIO, pair: Pair) -> None:
    state, tokens = file.read(part["size"]), part["tokens"]
    if not tokens:
        return
    known = dict(zip(("target", "draft"), identities(pair), strict=False))
    lm = dict(_models(pair)).get(part["role"])
    if lm is None or known.get(part["role"]) != Identity(**part["model"]):
        raise StateError(f"it is of the {part['role']} {part['model']['name']}")
    if len(tokens) > lm.n_ctx:
        raise StateError(
            f"it holds {len(tokens)} tokens of the {part['role']}, whose context has {lm.n_ctx}"
        )
    if _sha256(state) != part["sha256"]:
        raise StateError("it is damaged")
    lm.restore(0, tokens, state)


def _models(pair: Pair) -> list[tuple[str, CachedLM]]:
    draft = [] if pair.draft is None else [("draft", pair.draft)]
    return [("target", pair.target), *draft]


def _library() -> str:
    """The version of the library, whose states others may not read."""
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return "unknown"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
