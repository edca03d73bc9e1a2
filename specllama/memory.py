"""How much memory this machine has left."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can still be had, swap included, or None where that cannot be told.

    On Linux what the kernel calls available, and no more than the limit of the control group;
    elsewhere all that the machine has. root: where /proc and /sys are.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return physical_bytes(root)
    fields = (line.partition(":") for line in lines)
    sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in fields}
    if "MemAvailable" not in sizes:
        return physical_bytes(root)
    return _limited(sizes["MemAvailable"] + sizes.get("SwapFree", 0), root)


def physical_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that the machine has, or None where that cannot be told.

    No more than the limit of the control group. root: where /sys is.
    """
    try:
        return _limited(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), root)
    except (AttributeError, ValueError, OSError):
        return None


def _limited(size: int, root: Path) -> int:
    with contextlib.suppress(OSError, ValueError):  # no limit, or none that is a number
        return min(size, int((root / "sys/fs/cgroup/memory.max").read_text()))
    return size
