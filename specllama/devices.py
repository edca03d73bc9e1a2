"""The devices and backends of this build of llama.cpp, and what they have left."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specllama.errors import UsageError
from specllama.native import lib, start, supports_gpu

_CPU, _GPU, _INTEGRATED, _ACCELERATOR = range(4)
_KINDS = {_CPU: "cpu", _GPU: "gpu", _INTEGRATED: "integrated gpu", _ACCELERATOR: "accelerator"}
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """What llama.cpp can compute on. kind: "cpu", "gpu", "integrated gpu" or "accelerator".

    free, total: bytes of its memory; 0 and 0 where it shares the main memory or does not tell.
    """

    name: str
    description: str
    kind: str
    backend: str
    free: int
    total: int

    @property
    def is_gpu(self) -> bool:
        """Whether layers can be put on it."""
        return self.kind in ("gpu", "integrated gpu")


def every() -> list[Device]:
    """All devices, the processor too, in llama.cpp's order."""
    start()
    count = _call("ggml_backend_dev_count", ctypes.c_size_t)
    return [_device(_call("ggml_backend_dev_get", ctypes.c_void_p, i)) for i in range(count)]


def _device(handle: int) -> Device:
    device = ctypes.c_void_p(handle)
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    _call("ggml_backend_dev_memory", None, device, ctypes.byref(free), ctypes.byref(total))
    backend = ctypes.c_void_p(_call("ggml_backend_dev_backend_reg", ctypes.c_void_p, device))
    return Device(
        _text("ggml_backend_dev_name", device),
        _text("ggml_backend_dev_description", device),
        _KINDS.get(_call("ggml_backend_dev_type", ctypes.c_int, device), "other"),
        _text("ggml_backend_reg_name", backend),
        free.value,
        total.value,
    )


def gpus() -> list[Device]:
    """The devices that layers can be put on; integrated ones only where there are no others."""
    found = [device for device in every() if device.is_gpu]
    return [device for device in found if device.kind == "gpu"] or found


def backends() -> list[str]:
    """The names of the backends that are compiled in, such as CUDA and CPU."""
    start()
    count = _call("ggml_backend_reg_count", ctypes.c_size_t)
    handles = (_call("ggml_backend_reg_get", ctypes.c_void_p, i) for i in range(count))
    return [_text("ggml_backend_reg_name", ctypes.c_void_p(handle)) for handle in handles]


def listing() -> list[str]:
    """The devices a line each, as llama.cpp's own programs list them."""
    found = [device for device in every() if device.kind != "cpu"]
    lines = [_line(device) for device in found] or ["  none but the processor"]
    return ["Available devices:", *lines]


def _line(device: Device) -> str:
    memory = f"{device.total // _MIB} MiB, {device.free // _MIB} MiB free"
    return f"  {device.name}: {device.description} ({memory})"


def require(names: Sequence[str]) -> None:
    """Raises UsageError for a name that is no device of this build, or the processor's."""
    if not names or list(names) == ["none"]:
        return
    usable = [device.name for device in every() if device.kind != "cpu"]
    for name in names:
        if name not in usable:
            known = f"there is {', '.join(usable)}" if usable else no_gpu()
            raise UsageError(
                f'there is no device "{name}" here, {known}; --list-devices lists them, and '
                "--device none uses the processor alone"
            )


def pointers(names: Sequence[str]) -> Any:
    """The devices of these names as the null-terminated array that llama.cpp takes."""
    chosen = [] if list(names) == ["none"] else list(names)
    require(chosen)
    handles = [
        _call("ggml_backend_dev_by_name", ctypes.c_void_p, name.encode("utf-8")) for name in chosen
    ]
    return (ctypes.c_void_p * (len(handles) + 1))(*handles, None)


def no_gpu() -> str:
    """Why no GPU is used, or an empty string where one can be."""
    if supports_gpu():
        return ""
    others = [name for name in backends() if name not in ("CPU", "BLAS", "RPC")]
    if others:
        return f"this llama-cpp-python was built with {', '.join(others)} and finds no GPU"
    return "this llama-cpp-python was built without GPU support"


def install_line(system: str) -> str:
    """How to get a build that can use a GPU. system: as `platform.system` names it."""
    backend = "METAL" if system == "Darwin" else "CUDA"
    return (
        f'CMAKE_ARGS="-DGGML_{backend}=on" pip install --force-reinstall --no-cache-dir '
        f"--no-binary llama-cpp-python llama-cpp-python=={lib.__version__}"
    )


def cpu_features() -> list[str]:
    """What of this processor the build uses, in llama.cpp's words, such as AVX2."""
    start()
    pairs = (part.partition("=") for part in _system_info().split("|"))
    found = [(name.split(":")[-1].strip(), value.strip()) for name, _, value in pairs]
    return [name for name, value in found if value == "1"]


def _system_info() -> str:
    return str(lib.llama_print_system_info().decode("utf-8", "replace"))


def _text(name: str, *arguments: Any) -> str:
    return (_call(name, ctypes.c_char_p, *arguments) or b"").decode("utf-8", "replace")


def _call(name: str, result: Any, *arguments: Any) -> Any:
    """Call a function of ggml, which the bindings leave out."""
    function = _function(name)
    function.restype = result
    return function(*arguments)


@functools.cache
def _function(name: str) -> Any:
    """A function of ggml by its name, whichever of its libraries holds it."""
    for library in _libraries():
        with contextlib.suppress(AttributeError):
            return getattr(library, name)
    raise UsageError(
        f"this llama-cpp-python ({lib.__version__}) has no {name}; install the version that "
        "specllama asks for"
    )


@functools.cache
def _libraries() -> list[Any]:
    """ggml's libraries. On Windows a library does not show the names of those it needs."""
    from llama_cpp import _ctypes_extensions, _ggml

    loaded = [lib.llama_cpp._lib, _ggml.libggml]
    with contextlib.suppress(OSError, FileNotFoundError):
        base: Any = _ctypes_extensions
        loaded.append(base.load_shared_library("ggml-base", _ggml.libggml_base_path))
    return loaded
