"""Model files for tests: tiny random models, and llama.cpp's vocabulary-only files."""

from __future__ import annotations

import functools
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


def tiny(kind: str = "attention", **options: Any) -> Path:
    """Path of a tiny random model, written once per test session for each set of options.

    The options are the fields of `Options` in scripts/make_tiny_gguf: `tiny("swa", pad=64)`.
    A wrong name raises TypeError, options that do not fit together ValueError.
    """
    return _write(kind, tuple(sorted(options.items())))


def vocab_file(name: str) -> Path:
    """Path of llama.cpp's vocabulary-only file `ggml-vocab-<name>.gguf`; FileNotFoundError."""
    path = CHECKOUT / ".cache" / "llama.cpp-models" / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; run scripts/check, which fetches it")
    return path


def template_files() -> list[Path]:
    """llama.cpp's collection of real chat templates; FileNotFoundError."""
    folder = CHECKOUT / ".cache" / "llama.cpp-models" / "templates"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing; run scripts/check, which fetches it")
    return sorted(folder.glob("*.jinja"))


@functools.cache
def _write(kind: str, options: tuple[tuple[str, Any], ...]) -> Path:
    script = _script()
    path = Path(_folder().name) / f"{kind}-{_write.cache_info().currsize}.gguf"
    script.write_model(kind, path, script.Options(**dict(options)))
    return path


@functools.cache
def _script() -> ModuleType:
    """The script as a module; it has no .py suffix, so the loader is named explicitly."""
    loader = SourceFileLoader("make_tiny_gguf", str(CHECKOUT / "scripts" / "make_tiny_gguf"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up there
    loader.exec_module(module)
    return module


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-gguf-")
