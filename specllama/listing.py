"""The pairs that are known, as `specllama models list` shows them: what fits, and what is here.

No socket is opened, and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama import hub_cache, memory, sources
from specllama.errors import SpecllamaError
from specllama.registry import PairSpec, Registry
from specllama.sources import HubFile, Requantised, Source

_SPARE_GB = 1.0
_NOMINAL = 0.95  # a machine of 16 GB shows a little less than 16 x 10^9 bytes


@dataclass(frozen=True)
class Row:
    """A pair as `list` shows it. fits: on this machine, None where that cannot be told."""

    spec: PairSpec
    fits: bool | None
    here: str  # "yes", "no", or "part" when one of the two files is there


def rows(found: Registry) -> list[Row]:
    """Every pair of a registry, with what this machine makes of it. Opens no socket."""
    physical = memory.physical_bytes()
    listed = []
    for spec in found.pairs:
        present = {is_here(spec.target), is_here(spec.draft)}
        here = "part" if len(present) == 2 else "yes" if True in present else "no"
        listed.append(Row(spec, _fits(spec, physical), here))
    return listed


def as_object(row: Row) -> dict[str, object]:
    """A row for JSON."""
    spec = row.spec
    return {
        "name": spec.name,
        "target": sources.describe(spec.target),
        "draft": sources.describe(spec.draft),
        "about": spec.about,
        "licence": spec.licence,
        "gated": spec.gated,
        "context": spec.context,
        "cache": spec.cache,
        "size_gb": spec.size_gb,
        "memory_gb": spec.memory_gb,
        "gpu_memory_gb": spec.gpu_memory_gb,
        "fits": row.fits,
        "here": row.here,
        "registry": str(spec.registry),
    }


def table(listed: Sequence[Row]) -> str:
    """The rows as text, a line each."""
    head = ("name", "size", "memory", "fits", "here", "what it is for")
    cells = [head, *(_cells(row) for row in listed)]
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in (1, 2) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, [*widths, 0], strict=True))
        ).rstrip()
        for line in cells
    )


def _cells(row: Row) -> tuple[str, ...]:
    spec = row.spec
    about = (spec.about or sources.describe(spec.target)) + (" Gated." if spec.gated else "")
    size, needed = (f"{gb:g} GB" if gb else "?" for gb in (spec.size_gb, spec.memory_gb))
    fits = {True: "yes", False: "no", None: "?"}[row.fits]
    return spec.name, size, needed, fits, row.here, about


def _fits(spec: PairSpec, physical: int | None) -> bool | None:
    needed = spec.memory_gb or (spec.size_gb and spec.size_gb + _SPARE_GB)
    if physical is None or needed is None:
        return None
    return physical >= _NOMINAL * needed * 1e9


def is_here(source: Source) -> bool:
    """Whether the file that it is, or is made of, is on this machine, all parts of it."""
    if isinstance(source, Requantised):
        return is_here(source.source)
    try:
        if isinstance(source, HubFile):
            return all(hub_cache.find(source))
        return sources.locate(source).is_file()
    except SpecllamaError:
        return False
