"""Is this a GGUF file, and is all of it there? What llama.cpp's own messages leave open."""

from __future__ import annotations

import math
import stat
import struct
from pathlib import Path
from typing import BinaryIO

from specllama.errors import ModelError
from specllama.parts import joining, part_paths

# Bytes per value of metadata, by the type numbers of the GGUF specification.
_STRING, _ARRAY = 8, 9
_VALUE_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

# Weights per block and bytes per block, by ggml's type number.
_TENSOR_SIZES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176),
    14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98),
    19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}


def check_file(path: Path) -> None:
    """Refuse what is plainly no GGUF file, with the reason. Raises ModelError."""
    try:
        if path.is_dir():
            raise ModelError(f"{path} is a directory; name a .gguf file inside it")
        # The weights are mapped, and a pipe would keep us waiting for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is a pipe or a device, not a regular file; save it to one")
        with path.open("rb") as file:
            head = file.read(64)
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; check the path") from None
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"{path} cannot be read ({reason}); check its permissions") from None
    if not head:
        raise ModelError(f"{path} is empty; download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is a Git LFS pointer, not the model; run `git lfs pull` there")
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise ModelError(f"{path} is a web page, not a model; download the file itself")
    if not head.startswith(b"GGUF"):
        advice = joining(path) or "download the model in that format"
        raise ModelError(f"{path} is not a GGUF file; {advice}")


def damage(path: Path) -> ModelError | None:
    """What is missing from a model that does not load, or None when it has its full size."""
    return next((error for part in part_paths(path) if (error := _cut(part)) is not None), None)


def _missing(part: Path) -> ModelError:
    return ModelError(f"the part {part} of the model is missing; download it beside the others")


def _cut(path: Path) -> ModelError | None:
    if not path.is_file():
        return _missing(path)
    size = path.stat().st_size
    advice = joining(path) or "download it again"
    try:
        expected = expected_size(path)
    except CutHeader:
        return ModelError(
            f"{path} is incomplete: at {size:,} bytes it ends within its header; {advice}"
        )
    if expected is None or size >= expected:
        return None
    return ModelError(f"{path} is incomplete: it has {size:,} of {expected:,} bytes; {advice}")


def misnamed_part(path: Path) -> ModelError:
    """For a part of a split model under another name, or without the first one beside it."""
    missing = [part for part in part_paths(path) if not part.is_file()]
    if missing:
        return _missing(missing[0])
    return ModelError(
        f"{path} is of a split model and has another name than its part should; put all parts "
        "under names like model-00001-of-00003.gguf into one folder and name the first, or join "
        "them with llama.cpp's llama-gguf-split --merge"
    )


class CutHeader(Exception):
    """The file ends before its header does."""


def expected_size(path: Path) -> int | None:
    """Bytes of the complete file by its own account, or None when it cannot be told.

    It cannot for a format version, a type of values or a type of tensors that is not known here.
    Raises CutHeader, OSError.
    """
    with path.open("rb") as file:
        try:
            return _Header(file).file_size()
        except (KeyError, ValueError, ArithmeticError, MemoryError):
            return None


def tensor_bytes(path: Path) -> dict[bytes, int] | None:
    """Bytes of each tensor of a model, all parts of it, or None when they cannot be told.

    Raises OSError.
    """
    sizes: dict[bytes, int] = {}
    for part in part_paths(path):
        with part.open("rb") as file:
            try:
                sizes |= _Header(file).tensor_sizes()
            except (CutHeader, KeyError, ValueError, ArithmeticError, MemoryError):
                return None
    return sizes


class _Header:
    """A reader that knows where the file ends, since lengths in a damaged header can be huge."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = file.seek(0, 2)
        file.seek(0)

    def file_size(self) -> int:
        """Where the last tensor ends. [GGUF specification, "File Structure"]"""
        n_tensors, alignment = self._metadata()
        ends = [offset + size for _, offset, size in (self._tensor() for _ in range(n_tensors))]
        header = self._file.tell()
        if not ends:
            return header
        return math.ceil(header / alignment) * alignment + max(ends)

    def tensor_sizes(self) -> dict[bytes, int]:
        """Bytes of each tensor by its name."""
        n_tensors, _ = self._metadata()
        return {name: size for name, _, size in (self._tensor() for _ in range(n_tensors))}

    def _metadata(self) -> tuple[int, int]:
        """The number of tensors that follow, and the alignment of what follows them."""
        magic = self._read(4)
        version, n_tensors, n_values = self._unpack("<IQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"version {version}")
        alignment = 32
        for _ in range(n_values):
            key, value = self._text(), self._value()
            if key == b"general.alignment" and isinstance(value, int):
                alignment = value
        return n_tensors, alignment

    def _value(self) -> int | None:
        """One value of metadata; only what fits the alignment's type is really read."""
        (kind,) = self._unpack("<I")
        if kind == 4:
            return int(self._unpack("<I")[0])
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            item, count = self._unpack("<IQ")
            if item == _STRING:
                for _ in range(count):
                    self._text()
            else:
                self._skip(count * _VALUE_SIZES[item])
        else:
            self._skip(_VALUE_SIZES[kind])
        return None

    def _tensor(self) -> tuple[bytes, int, int]:
        """A tensor's name, where it begins counted from the first one's beginning, and its size."""
        name = self._text()
        (n_dimensions,) = self._unpack("<I")
        shape = self._unpack(f"<{n_dimensions}Q")
        kind, offset = self._unpack("<IQ")
        per_block, block_bytes = _TENSOR_SIZES[kind]
        return name, offset, math.prod(shape) // per_block * block_bytes

    def _text(self) -> bytes:
        (length,) = self._unpack("<Q")
        return self._read(length)

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._read(struct.calcsize(layout)))

    def _read(self, count: int) -> bytes:
        if count > self._end - self._file.tell():
            raise CutHeader
        return self._file.read(count)

    def _skip(self, count: int) -> None:
        if count > self._end - self._file.tell():
            raise CutHeader
        self._file.seek(count, 1)
