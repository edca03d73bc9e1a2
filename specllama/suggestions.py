"""What a mistyped name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one begins or is most similar to, if there is one."""
    names = list(known)
    begun = [candidate for candidate in names if name and candidate.startswith(name)]
    found = begun or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None
