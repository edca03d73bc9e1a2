"""The library of llama.cpp in this process: its log, and signals that come while it works.

The first of the files that know its C interface; `devices` and `llama` stand on it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The threads of a decode wait for each other hundreds of times. GNU OpenMP lets them spin for some
# 15 ms before they yield, so beside other work each wait can cost a time slice, and a token a
# second instead of 15 ms. 1,000 turns, some 50 microseconds, are as fast on an idle machine.
# The library reads this once, when it is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import llama_cpp

# The bindings are ctypes functions whose stubs do not type-check; they stay in the files that know
# ctypes.
lib: Any = llama_cpp

log = logging.getLogger("specllama.llama")
# Without a handler `logging` itself would print llama.cpp's warnings on standard error.
logging.getLogger("specllama").addHandler(logging.NullHandler())

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUES = 5
_FUNCTION_NAMES = re.compile(r"^(\w+: |error loading model: )*")
_BUFFER_SIZE = re.compile(r"(\S+) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_CACHE_SIZE = re.compile(r"size = +([\d.]+) MiB \(.*, K \(")
_LAYER = re.compile(r"layer +(\d+) assigned to device (\S+),")


class _Heard(threading.local):
    """What one thread's calls into llama.cpp led to.

    errors: the last lines of the log that are errors. sizes: (device, kind, MiB) of the buffers
    made. cache_sizes: MiB of the caches of keys and values. layers: the device of each layer.
    unlocked: whether weights could not be locked. raised: exceptions of signal handlers that ran in
    a callback.
    """

    def __init__(self) -> None:
        self.errors: collections.deque[str] = collections.deque(maxlen=8)
        self.sizes: list[tuple[str, str, float]] = []
        self.cache_sizes: list[float] = []
        self.layers: dict[int, str] = {}
        self.unlocked = False
        self.raised: list[BaseException] = []
        self.is_calling = False
        self.level = logging.DEBUG  # of a line that the next one may continue


class Native:
    """llama.cpp's side of a conversation: its log, and signals that come while it works.

    One for the process; calls from several threads do not disturb each other.
    """

    def __init__(self) -> None:
        self._heard = _Heard()
        # An exception in a callback cannot cross the C frames; ctypes hands it to this hook.
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._catch
        self._callback = lib.llama_log_callback(self._receive)
        self._listen()

    def _listen(self) -> None:
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    @property
    def sizes(self) -> list[tuple[str, str, float]]:
        """Buffers that the last call made: (device, kind, MiB)."""
        return self._heard.sizes

    @property
    def cache_sizes(self) -> list[float]:
        """MiB of the caches of keys and values that the last call made, or would have made."""
        return self._heard.cache_sizes

    @property
    def layers(self) -> dict[int, str]:
        """The device of each layer of the model of the last call, and of the output behind them."""
        return self._heard.layers

    @property
    def unlocked(self) -> bool:
        """Whether the last call could not lock weights in memory."""
        return self._heard.unlocked

    @property
    def raised(self) -> list[BaseException]:
        """What signals raised during the call that is under way."""
        return self._heard.raised

    def _receive(self, level: int, text: bytes, _user_data: Any) -> None:
        heard, line = self._heard, text.decode("utf-8", "replace").rstrip()
        if level != _CONTINUES:
            heard.level = _LEVELS.get(level, logging.DEBUG)
        if not line.strip("."):
            return
        if heard.level >= logging.ERROR:
            heard.errors.append(line)
        if found := _BUFFER_SIZE.search(line):
            heard.sizes.append((found[1], found[2], float(found[3])))
        elif found := _CACHE_SIZE.search(line):
            heard.cache_sizes.append(float(found[1]))
        elif found := _LAYER.search(line):
            heard.layers[int(found[1])] = found[2]
        elif "failed to mlock" in line:
            heard.unlocked = True
        log.log(heard.level, "%s", line)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Around native calls: forget old errors, and raise what a signal raised meanwhile.

        A signal that comes during the call is noticed by the next callback into Python.
        """
        if sys.unraisablehook != self._catch:  # somebody else's, set meanwhile
            self._hook, sys.unraisablehook = sys.unraisablehook, self._catch
        heard = self._heard
        heard.errors.clear()
        heard.sizes.clear()
        heard.cache_sizes.clear()
        heard.layers.clear()
        heard.unlocked = False
        heard.raised.clear()
        heard.is_calling = True
        try:
            yield
        finally:
            heard.is_calling = False
        if heard.raised:
            raise heard.raised[0]

    def _catch(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        from_callback = "ctypes callback" in (unraisable.err_msg or "")
        if self._heard.is_calling and from_callback and error is not None:
            self._heard.raised.append(error)
        else:
            self._hook(unraisable)

    def create(self, make: Callable[[], Any], free: Callable[[Any], None]) -> Any:
        """The handle that a native call makes, or None; freed again if a signal came meanwhile."""
        handle = None
        self._listen()  # what is made is known from the log, which others may have taken meanwhile
        try:
            with self.calling():
                handle = make()
        except BaseException:
            if handle:
                free(handle)
            raise
        return handle

    def cause(self) -> str:
        """What llama.cpp said last, without its function names, or an empty string."""
        lines = [_FUNCTION_NAMES.sub("", line) for line in self._heard.errors]
        chosen = [line for line in lines if not line.startswith("failed to load model")] or lines
        return chosen[0] if chosen else ""


_backend_lock = threading.Lock()


@functools.cache
def _started() -> Native:
    native = Native()
    with native.calling():
        lib.llama_backend_init()
    return native


def start() -> Native:
    """Start the backend once, and take over its log."""
    with _backend_lock:
        return _started()


def version() -> str:
    """The version of llama-cpp-python, and what its build can do."""
    start()
    features = lib.llama_print_system_info().decode("utf-8", "replace")
    return f"{lib.__version__} {features}"


def supports_gpu() -> bool:
    """Whether this build of llama.cpp can use a GPU."""
    start()  # looking for one is already something to log
    return bool(lib.llama_supports_gpu_offload())


def amx_notice() -> str | None:
    """Why a build with Intel AMX kernels is run without them, or None for any other build.

    GCC drops the stores that fill the tile configuration, since llama.cpp's inline assembly does
    not name the memory it reads, and the first batch ends the process with an illegal instruction
    (ggml-org/llama.cpp#26954). Whether a build has the fault cannot be seen without trying it.
    """
    start()
    if b"AMX_INT8 = 1" not in lib.llama_print_system_info():
        return None
    if os.environ.get("SPECLLAMA_AMX") == "1":
        return None
    return (
        "llama-cpp-python was built with Intel AMX kernels, which crash in many builds, so it runs "
        "without repacked weights and slower; rebuild it with "
        'CFLAGS="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16", or set SPECLLAMA_AMX=1 to try them'
    )
