"""What the processor of this machine is, and how much of it this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

# The kernel's name of an instruction set, and llama.cpp's.
_FEATURES = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2",
    "avx_vnni": "AVX_VNNI", "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8",
    "asimddp": "DOTPROD", "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip


def name(root: Path = Path("/")) -> str:
    """The processor's name. root: where /proc is."""
    return _fields(root).get("model name") or platform.processor() or platform.machine()


def features(root: Path = Path("/")) -> list[str]:
    """What llama.cpp could use of it, in llama.cpp's words; empty where that cannot be told."""
    fields = _fields(root)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return [theirs for ours, theirs in _FEATURES.items() if ours in flags]


def usable() -> int:
    """How many processors, hyperthreads counted, this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        return os.cpu_count() or 1


def cores(root: Path = Path("/")) -> int:
    """How many physical cores this process may keep busy, those of a container's quota at most.

    root: where /sys is.
    """
    try:
        numbers = os.sched_getaffinity(0)
    except AttributeError:  # not on every platform
        return max(1, os.cpu_count() or 1)
    found = set()
    for number in numbers:
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        try:
            found.add(siblings.read_text())
        except OSError:
            found.add(str(number))
    limit = quota(root)
    return max(1, len(found) if limit is None else min(len(found), int(limit)))


def quota(root: Path = Path("/")) -> float | None:
    """How many processors' time a container may use, or None without such a limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    return None


def load() -> float | None:
    """Threads that wanted to run in the last minute, or None where that cannot be told."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _fields(root: Path) -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
