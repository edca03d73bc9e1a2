"""A model in several files, as llama.cpp's gguf-split names them: which they are, which is opened.

Names alone tell: the files need not be there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_CUT = re.compile(r"[.-](part-?\d+(of\d+)?|split-[a-z]|part-?a[a-z])$", re.IGNORECASE)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})(\.gguf)$", re.IGNORECASE)


def part_names(file: str) -> tuple[str, ...]:
    """The files of the model that a file is of, first part first: all of a split one, or itself."""
    found = _SPLIT.search(file)
    if found is None:
        return (file,)
    before, count = file[: found.start()], int(found[1])
    return tuple(f"{before}-{i:05}-of-{count:05}{found[2]}" for i in range(1, count + 1)) or (file,)


def part_paths(path: Path) -> list[Path]:
    """The same for a path."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_part(path: Path) -> Path:
    """The file that llama.cpp opens for a model: its first part, where that is there."""
    if not path.name:
        return path
    first = part_paths(path)[0]
    return first if os.path.isfile(first) else path


def joining(path: Path) -> str | None:
    """How to join a file that was cut without regard to what it holds, or None for any other."""
    found = _CUT.search(path.name)
    if found is None:
        return None
    whole = path.name[: found.start()]
    return f"it is a piece of {whole}: join all pieces, in their order (cat), and name the result"


def stem(path: Path) -> str:
    """What the names of all parts of a model begin with, links resolved."""
    return _SPLIT.sub("", os.path.realpath(path))
