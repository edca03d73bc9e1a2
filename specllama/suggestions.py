"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], mark: str = "") -> str:
    """A clause that names the most similar known name, or nothing when none is similar."""
    names = list(known)
    begun = [candidate for candidate in names if name and candidate.startswith(name)]
    found = begun[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f", did you mean {mark}{found[0]}" if found else ""
