"""llama.cpp at arm's length: models, contexts, and tokenizers of its C interface.

In go Python integers, strings and paths; out come integers, bytes, read-only NumPy views and
Python exceptions. No pointer, struct or return code crosses. Models and contexts are closed
explicitly, the contexts first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specllama import devices, header, interrupts, parts
from specllama.errors import (
    DecodeError,
    ModelError,
    RollbackError,
    SpecllamaError,
    StateError,
    UsageError,
)
from specllama.native import Native, amx_notice, start
from specllama.native import lib as lib
from specllama.native import supports_gpu as supports_gpu
from specllama.native import version as version
from specllama.placement import CACHE_TYPES, Cache, Placement

# llama.cpp's own numbers.
_ABORTED = 2  # what llama_decode returns when the abort callback said so
_MOST_CELLS = 2**31 - 256  # llama.cpp counts positions with 32 bits, and rounds the size up
_DIGEST = 32  # bytes
_ROWS_AT_ONCE = 64
_SHORT = 64  # tokens of a sequence
_PLAIN_CACHES = (0, 1)  # GGML_TYPE_F32, GGML_TYPE_F16; a quantised one needs flash attention
_KINDS = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
_SHARED_FILE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r--s \S+ \S+ \S+ +(.+)$", re.MULTILINE)
_DONTNEED = 4  # MADV_DONTNEED of Linux


def _load_failure(path: Path, cause: str) -> ModelError:
    if "unknown model architecture" in cause:
        return ModelError(
            f"{path}: {cause}; the file may be fine, but this llama-cpp-python "
            f"({lib.__version__}) does not know it: upgrade it or choose another model"
        )
    if "split file" in cause:
        return header.misnamed_part(path)
    detail = f" ({cause})" if cause else ""
    return header.damage(path) or ModelError(
        f"llama.cpp cannot load {path}, {path.stat().st_size:,} bytes{detail}; "
        "check the file, or run again with -v for its whole log"
    )


class _Loading:
    """Listens to llama.cpp while it reads weights: lets Ctrl-C in, and gives copied pages back.

    Weights that are repacked for this processor, or sent to a GPU, are copies. The pages of the
    mapped file that they came from would stay in memory beside them, counted twice; they come back
    from the file should anything need them again.
    """

    _STEP = 1 / 16  # of all weights

    def __init__(self, native: Native, path: Path) -> None:
        self._native = native
        # A split model is mapped part by part.
        self._prefix = parts.stem(path)
        self._next = 0.0
        self.callback = lib.llama_progress_callback(self._progress)

    def _progress(self, done: float, _user_data: Any) -> bool:
        if done >= self._next:
            self._next = done + self._STEP
            self.give_back()
        return not self._native.raised

    def give_back(self) -> None:
        """Let go of the mapped pages, if some weights were copied from them."""
        devices = [device for device, kind, _ in self._native.sizes if kind == "model"]
        if all(device.endswith("Mapped") for device in devices):
            return
        try:
            maps = Path("/proc/self/maps").read_bytes()
        except OSError:  # no Linux
            return
        advise = ctypes.CDLL(None).madvise
        for begin, end, path in _SHARED_FILE.findall(maps):
            if os.fsdecode(path).startswith(self._prefix):
                first = int(begin, 16)
                advise(ctypes.c_void_p(first), ctypes.c_size_t(int(end, 16) - first), _DONTNEED)


class _Closing:
    """Something native that is freed once, by `close` or at the end of a with block."""

    def __init__(self, handle: Any, free: Callable[[Any], None], what: str) -> None:
        self._open: Any = handle
        self._free = free
        self._what = what

    @property
    def _handle(self) -> Any:
        if self._open is None:
            raise SpecllamaError(f"{self._what} is closed; load it again")
        return self._open

    def close(self) -> None:
        """Free it; more than once does nothing."""
        handle, self._open = self._open, None
        if handle is not None:
            with start().calling():
                self._free(handle)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tokenizer(_Closing):
    """A model's vocabulary. The model closes it."""

    def __init__(self, name: str, vocab: Any) -> None:
        super().__init__(vocab, lambda _: None, f"model {name}")
        self.name = name
        self._pieces: dict[int, bytes] = {}
        self.n_vocab: int = lib.llama_vocab_n_tokens(vocab)
        self.kind = _KINDS.get(lib.llama_vocab_type(vocab), "other")
        self.bos = _token(lib.llama_vocab_bos(vocab))
        self.eos = _token(lib.llama_vocab_eos(vocab))
        self.eot = _token(lib.llama_vocab_eot(vocab))
        self.add_bos: bool = lib.llama_vocab_get_add_bos(vocab)
        self.add_eos: bool = lib.llama_vocab_get_add_eos(vocab)
        is_end = lib.llama_vocab_is_eog
        self.end_tokens = frozenset(t for t in range(self.n_vocab) if is_end(vocab, t))

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        """Token ids of a text; see `specllama.lm.Tokenizer`.

        Raises UsageError for half a surrogate pair, which has no bytes.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds half a surrogate pair at character {error.start}, "
                "which is no character; remove it"
            ) from None
        capacity = len(data) + 8
        while True:
            ids = np.empty(capacity, dtype=np.int32)
            buffer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = lib.llama_tokenize(
                self._handle, data, len(data), buffer, capacity, add_special, special
            )
            if count >= 0:
                return [int(t) for t in ids[:count]]
            if -count <= capacity:
                raise UsageError("the text is too long for the tokenizer; shorten it")
            capacity = -count

    def piece(self, token: int) -> bytes:
        """The bytes a token prints, none for a control token. Raises UsageError for no token's id.

        llama.cpp ends the process at an id that it does not know.
        """
        if token not in self._pieces:
            if not 0 <= token < self.n_vocab:
                raise UsageError(
                    f"{self.name} has only token ids 0 to {self.n_vocab - 1}, and {token} is none; "
                    "use this model's own tokens"
                )
            self._pieces[token] = self._render(token)
        return self._pieces[token]

    def _render(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = lib.llama_token_to_piece(self._handle, token, buffer, size, 0, False)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def token_texts(self) -> list[bytes]:
        """Every token's text as it stands in the file, in order of ids."""
        text, vocab = lib.llama_vocab_get_text, self._handle
        return [text(vocab, t) or b"" for t in range(self.n_vocab)]

    def token_attributes(self) -> NDArray[np.int32]:
        """Every token's llama_token_attr bits. [n_vocab] int32"""
        attribute, vocab = lib.llama_vocab_get_attr, self._handle
        ids = range(self.n_vocab)
        return np.fromiter((attribute(vocab, t) for t in ids), np.int32, self.n_vocab)


def _token(value: int) -> int | None:
    """llama.cpp writes -1 for a token that a vocabulary lacks."""
    return None if value < 0 else int(value)


class Model(_Closing):
    """The weights of one GGUF file.

    placement: where they lie; a build without GPU support ignores what it cannot do. Raises
    UsageError for a device that is not there, and ModelError, with llama.cpp's reason, when the
    file cannot be loaded.
    """

    def __init__(
        self, path: Path, *, placement: Placement = Placement(), vocab_only: bool = False
    ) -> None:
        self._load(path, _model_params(placement), vocab_only)

    def _load(self, path: Path, params: Any, vocab_only: bool = False) -> None:
        header.check_file(path)
        native = start()
        params.vocab_only = vocab_only
        self.notice = amx_notice()
        params.use_extra_bufts = self.notice is None
        loading = _Loading(native, path)
        params.progress_callback = loading.callback
        handle = native.create(
            lambda: lib.llama_model_load_from_file(os.fsencode(path), params), lib.llama_model_free
        )
        if not handle:
            raise _load_failure(path, native.cause())
        super().__init__(handle, lib.llama_model_free, f"model {path.name}")
        self._contexts: set[Context] = set()
        self.path = path
        self.vocab_only = vocab_only
        self.name = path.name
        self.buffers = tuple(native.sizes)
        self.layers = dict(native.layers)
        self.is_unlocked = native.unlocked
        try:
            self._read()
        except BaseException:  # an interrupt, while the tokens are counted
            super().close()
            raise

    def _read(self) -> None:
        """What the file says of itself."""
        handle = self._handle
        self.tokenizer = Tokenizer(self.name, lib.llama_model_get_vocab(handle))
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(handle)
        self.n_bytes: int = lib.llama_model_size(handle)
        self.n_layer: int = lib.llama_model_n_layer(handle)
        self.n_embd: int = lib.llama_model_n_embd(handle)
        self.cache_kind = self._cache_kind()
        # A state has overwritten what it was before the newest tokens.
        self.has_state = self.cache_kind in ("recurrent", "hybrid")
        self.window: int = lib.llama_model_n_swa(handle)

    def close(self) -> None:
        """Free the weights, after the contexts that still use them; more than once does nothing."""
        for context in list(self._contexts):
            context.close()
        self.tokenizer.close()
        super().close()

    def lend(self, context: Context) -> None:
        """Remember a context, to close it before the weights."""
        self._contexts.add(context)

    @property
    def has_encoder(self) -> bool:
        """Whether it reads a text as a whole first; llama.cpp then ends the process at a decode."""
        return bool(lib.llama_model_has_encoder(self._handle))

    def _cache_kind(self) -> str:
        """ "attention", "sliding window", "recurrent" or "hybrid"."""
        if lib.llama_model_is_recurrent(self._handle):
            return "recurrent"
        if lib.llama_model_is_hybrid(self._handle):
            return "hybrid"
        return "sliding window" if lib.llama_model_n_swa(self._handle) > 0 else "attention"

    @property
    def description(self) -> str:
        """Architecture, size and quantisation in llama.cpp's words, such as "llama 8B Q4_K"."""
        buffer = ctypes.create_string_buffer(256)
        lib.llama_model_desc(self._handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of the file, which renders a conversation, or None without one."""
        template = lib.llama_model_chat_template(self._handle, None)
        return template.decode("utf-8", "replace") if template else None


class Outline(Model):
    """A model without its weights, to tell what it and its contexts would take.

    llama.cpp goes through the motions and allocates next to nothing.
    """

    def __init__(self, path: Path, *, placement: Placement = Placement()) -> None:
        params = _model_params(placement)
        params.no_alloc = True
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE
        self._load(path, params)

    def check_size(self, n_ctx: int, n_slots: int = 1) -> None:
        """Raises UsageError for a context that llama.cpp could not count, SpecllamaError."""
        _check_context(self, n_ctx, n_slots)

    def context_buffers(
        self,
        n_ctx: int,
        *,
        n_batch: int,
        n_outputs: int,
        n_slots: int,
        cache: Cache,
        n_snapshots: int = 0,
    ) -> list[tuple[str, str, float]]:
        """Buffers that a context would make: (device, kind, MiB).

        Raises UsageError for a size out of range, ModelError for a cache type that does not fit.
        """
        _check_context(self, n_ctx, n_slots)
        n_batch = min(n_batch, n_ctx * n_slots)
        params = _context_params(n_ctx * n_slots, n_batch, min(n_outputs, n_batch), n_slots)
        params.kv_unified = n_slots > 1 and _on_gpu(self)
        params.type_k, params.type_v = _cache_type(cache.type_k), _cache_type(cache.type_v)
        _attention(params, self, cache.flash)
        _keep(params, self, n_snapshots, cache.full_window)
        native = start()
        handle = _make_context(self, params)
        made, caches = list(native.sizes), list(native.cache_sizes)
        remembers = bool(lib.llama_get_memory(handle))
        lib.llama_free(handle)
        if not remembers:
            raise _no_generator(self)
        # What it holds of keys and values is not allocated, and lies where its layers do.
        kept = [size for size in made if size[1] != "KV"]
        total = sum(caches)
        places = [self.layers.get(i, "CPU") for i in range(self.n_layer)]
        shares = {place: places.count(place) / self.n_layer for place in places}
        return [*kept, *((place, "KV", total * share) for place, share in shares.items())]


class Context(_Closing):
    """A KV cache over a model, holding `n_slots` independent sequences of `n_ctx` tokens each.

    n_batch: rows of one decode. n_outputs: how many of them can give logits; the buffers for logits
    are sized by it, so it is small. threads: for few rows, None leaves llama.cpp's choice;
    threads_batch: for many rows, None takes `threads`. kv_type: of the cache, see
    placement.CACHE_TYPES; kv_type_v: of its values, None takes the same. flash_attention: None
    takes it where it is faster, see `_attention`. n_snapshots: of a recurrent state, one for each
    token of a decode that can be taken back; `n_tentative` tells how many the architecture has.
    full_window: whether a sliding window keeps all tokens, so that any can be taken back, or little
    more than the model looks at. Raises ModelError when the memory cannot be had.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_outputs: int = 32,
        n_slots: int = 1,
        threads: int | None = None,
        threads_batch: int | None = None,
        kv_type: str = "f16",
        kv_type_v: str | None = None,
        flash_attention: bool | None = None,
        n_snapshots: int = 0,
        full_window: bool = True,
    ) -> None:
        native = start()
        types = (kv_type, kv_type_v or kv_type)
        _check_context(model, n_ctx, n_slots)
        self.n_batch = min(n_batch, n_ctx * n_slots)
        self.n_outputs = min(n_outputs, self.n_batch)
        # In one buffer every row attends over the cells of all sequences, masked or not, which
        # only a GPU's kernels do quickly; with a buffer each, rows beside others cost no more.
        self.is_split = n_slots > 1 and not _on_gpu(model)
        params = _context_params(n_ctx * n_slots, self.n_batch, self.n_outputs, n_slots)
        params.kv_unified = n_slots > 1 and not self.is_split
        params.type_k, params.type_v = map(_cache_type, types)
        _attention(params, model, flash_attention)
        _keep(params, model, n_snapshots, full_window)
        # Python must not run between any two nodes of the graph, so the callback is C's strlen: it
        # reads a length of 0, false, until an interrupt writes a byte before the terminating one.
        self._stop = bytearray(2)
        self._stop_address = (ctypes.c_char * 2).from_buffer(self._stop)
        params.abort_callback = _never_python()
        params.abort_callback_data = ctypes.addressof(self._stop_address)
        if threads is not None:
            params.n_threads = params.n_threads_batch = threads
        if threads_batch is not None:
            params.n_threads_batch = threads_batch
        handle = _make_context(model, params)
        super().__init__(handle, lib.llama_free, f"the context of {model.name}")
        model.lend(self)
        self._memory = lib.llama_get_memory(handle)
        if not self._memory:
            self.close()
            raise _no_generator(model)
        self.name = model.name
        self.n_ctx = n_ctx
        self.n_slots = n_slots
        self.n_vocab = model.tokenizer.n_vocab
        self.has_state = model.has_state
        self._window = model.window
        # What is dropped from a small window as it moves on cannot come back.
        self.can_rollback = not self.has_state and (bool(params.swa_full) or self._window == 0)
        self.n_tentative = n_ctx if self.can_rollback else int(params.n_ubatch)
        if self.has_state:  # llama.cpp takes fewer silently
            self.n_tentative = int(lib.llama_n_rs_seq(handle))
        # By slot: how many newest tokens the snapshots of its state reach back now.
        self._reach = [0] * n_slots
        self.buffers = tuple(native.sizes)
        self._batch = _Batch(self.n_batch)
        self._native = native
        self.cache_types = types
        self.has_flash_attention = bool(params.flash_attn_type)
        self._mark = _state_mark(model, types)

    def decode(self, batch: Sequence[Any]) -> list[NDArray[np.float32]]:
        """Decode all rows in one call; see `specllama.lm.Context`.

        Raises DecodeError, after which the touched sequences hold something unknown. Within
        `specllama.interrupts.interruptible` a signal ends it at once with what its handler raises;
        then a context that can roll back holds what it held, perhaps with some of the rows.
        """
        self._check_size(batch)
        try:
            filled = self._batch.fill(batch)
        except OverflowError as error:
            raise DecodeError(f"{self.name}: a token id is out of range ({error})") from None
        while (code := self._evaluate(filled)) == _ABORTED:
            # A signal came, and its handler raised nothing: the answer goes on.
            if not self.can_rollback:
                raise DecodeError(f"{self.name}: a signal stopped the evaluation; ask again")
            for rows in batch:
                self.truncate(rows.slot, rows.start)
        if self.has_state:
            self._reach = [0] * self.n_slots
        if code != 0:
            raise self._decode_failure(code)
        if self.has_state:
            for rows in batch:
                self._reach[rows.slot] = min(self.n_tentative, len(rows.tokens) - 1)
        return self._logits(batch)

    def _evaluate(self, filled: Any) -> int:
        """The return code of one decode."""
        with self._native.calling():
            try:
                interrupts.begin(self._stop)
                return int(lib.llama_decode(self._handle, filled))
            finally:
                interrupts.end()

    def _check_size(self, batch: Sequence[Any]) -> None:
        """llama.cpp would end the process at some of what is refused here."""
        n_outputs = sum(rows.n_logits for rows in batch)
        n_rows = sum(len(rows.tokens) for rows in batch)
        if n_rows > self.n_batch or n_outputs > self.n_outputs:
            raise DecodeError(
                f"{self.name}: {n_rows} rows with {n_outputs} outputs exceed the batch of "
                f"{self.n_batch} and {self.n_outputs}; raise --batch-size or draft fewer tokens"
            )
        for rows in batch:
            if rows.start + len(rows.tokens) > self.n_ctx:
                raise DecodeError(
                    f"{self.name}: a sequence of {rows.start + len(rows.tokens)} tokens exceeds "
                    f"the context of {self.n_ctx}; use a larger --ctx-size"
                )

    def _decode_failure(self, code: int) -> DecodeError:
        if code == 1:
            return DecodeError(f"{self.name}: the KV cache is full; use a larger --ctx-size")
        cause = self._native.cause() or "no reason given"
        return DecodeError(
            f"{self.name}: llama.cpp could not evaluate a batch (code {code}: {cause}); "
            "run again with -v for its log"
        )

    def _logits(self, batch: Sequence[Any]) -> list[NDArray[np.float32]]:
        n_outputs = sum(rows.n_logits for rows in batch)
        if n_outputs == 0:
            return [np.empty((0, self.n_vocab), np.float32) for _ in batch]
        pointer = lib.llama_get_logits(self._handle)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise DecodeError(f"{self.name}: llama.cpp gave no logits; run again with -v")
        flat: Any = (ctypes.c_float * (n_outputs * self.n_vocab)).from_address(address)
        read_only = memoryview(flat).toreadonly()
        rows = np.frombuffer(read_only, np.float32).reshape(n_outputs, self.n_vocab)
        ends = np.cumsum([r.n_logits for r in batch])
        return [rows[end - r.n_logits : end] for r, end in zip(batch, ends, strict=True)]

    def length(self, slot: int) -> int:
        """Number of tokens that the slot holds."""
        return int(lib.llama_memory_seq_pos_max(self._memory_of(slot), slot)) + 1

    def reach(self, slot: int) -> int:
        """How many of its newest tokens `truncate` can take back now.

        llama.cpp says yes to more, and leaves a wrong state or a window with a hole. A window that
        keeps all tokens has holes too where it was restored: what is saved of it is what the next
        token looks at.
        """
        if self.has_state:
            return self._reach[slot]
        length = self.length(slot)
        first = int(lib.llama_memory_seq_pos_min(self._memory_of(slot), slot))
        return length if first <= 0 else max(0, length - first - self._window)

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on. Raises RollbackError if refused."""
        memory = self._memory_of(slot)
        is_within = self.length(slot) - length <= self.reach(slot)
        self._reach[slot] = 0  # one removal per decode
        if not is_within or not lib.llama_memory_seq_rm(memory, slot, length, -1):
            raise self._no_rollback()

    def _no_rollback(self) -> RollbackError:
        return RollbackError(
            f"{self.name}: its KV cache cannot take back rejected tokens; "
            "run it without a draft (--drafter none)"
        )

    def checkpoint(self, slot: int) -> bytes:
        """The recurrent state after what the slot holds now, for `rewind`. Raises StateError."""
        return self._state(slot, lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def rewind(self, slot: int, length: int, data: bytes) -> None:
        """Hold the first `length` tokens again, with the state that `checkpoint` gave for them.

        Keys and values of these must still be there. Raises RollbackError.
        """
        memory = self._memory_of(slot)
        self._reach[slot] = 0
        state, flags = np.frombuffer(data, np.uint8), lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        with self._native.calling():
            read = lib.llama_state_seq_set_data_ext(
                self._handle, _bytes_of(state), len(state), slot, flags
            )
        if read != len(state) or not lib.llama_memory_seq_rm(memory, slot, length, -1):
            raise self._no_rollback()
        if self.length(slot) != length:
            raise self._no_rollback()

    def clear(self, slot: int) -> None:
        """Forget the whole sequence."""
        memory = self._memory_of(slot)
        self._reach[slot] = 0
        if not lib.llama_memory_seq_rm(memory, slot, -1, -1):
            raise RollbackError(f"{self.name}: its KV cache could not be cleared; load it again")

    def wipe(self) -> None:
        """Forget all sequences, and overwrite what they left: a NaN reaches whoever comes after."""
        assert self._handle is not None
        self._reach = [0] * self.n_slots
        lib.llama_memory_clear(self._memory, True)

    def copy(self, source: int, slot: int) -> None:
        """Let a slot hold what another one does; `source` is left as it is."""
        memory = self._memory_of(slot)
        self._memory_of(source)
        self.clear(slot)
        # With a buffer for each sequence, llama.cpp copies whole ones or none.
        lib.llama_memory_seq_cp(memory, source, slot, -1, -1)

    def save(self, slot: int) -> bytes:
        """What the slot holds: a mark of the model, a digest, and llama.cpp's own format.

        Raises StateError.
        """
        state = self._state(slot, lib.LLAMA_STATE_SEQ_FLAGS_NONE)
        return b"".join((self._mark, _digest(state), state))

    def _state(self, slot: int, flags: int) -> bytes:
        """llama.cpp's own format of what a slot holds, or of a part of it."""
        self._memory_of(slot)
        with self._native.calling():
            size = lib.llama_state_seq_get_size_ext(self._handle, slot, flags)
            state = np.empty(size, np.uint8)
            written = lib.llama_state_seq_get_data_ext(
                self._handle, _bytes_of(state), size, slot, flags
            )
        if size == 0 or written != size:
            raise StateError(f"{self.name}: its state cannot be saved; go on without it")
        return state.tobytes()

    def restore(self, slot: int, data: bytes) -> None:
        """Let the slot hold what `save` gave; the mark tells models of one shape not apart.

        Raises StateError: before anything is changed for data that is cut, damaged or another
        model's, and with an empty slot where llama.cpp refuses it.
        """
        self._memory_of(slot)
        # llama.cpp ends the process at some damage, so it gets to see none.
        if data[:_DIGEST] != self._mark:
            raise self._unusable("it was saved with another model, cache type or llama-cpp-python")
        digest, state = data[_DIGEST : 2 * _DIGEST], np.frombuffer(data, np.uint8)[2 * _DIGEST :]
        if digest != _digest(state.data):
            raise self._unusable("it is incomplete or damaged")
        self.clear(slot)  # an empty state would leave what is there
        with self._native.calling():
            size = len(state)
            read = lib.llama_state_seq_set_data(self._handle, _bytes_of(state), size, slot)
        if read != size or self.length(slot) > self.n_ctx:
            self.clear(slot)
            raise self._unusable("it needs a larger context or other settings")

    def _unusable(self, reason: str) -> StateError:
        return StateError(
            f"{self.name}: the saved state cannot be used, since {reason}; "
            "go on without it, and the text is read again"
        )

    def _memory_of(self, slot: int) -> Any:
        assert self._handle is not None  # raises the sentence of a closed context
        if not 0 <= slot < self.n_slots:  # llama.cpp would end the process
            raise SpecllamaError(f"{self.name}: there is no slot {slot} in {self.n_slots}")
        return self._memory


@functools.cache
def _never_python() -> Any:
    """C's strlen as a callback that takes an address and gives a truth value."""
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    return ctypes.cast(library.strlen, lib.ggml_abort_callback)


def _state_mark(model: Model, cache_types: tuple[str, str]) -> bytes:
    """What a saved state must share with the context that takes it. [_DIGEST bytes]"""
    shape = (model.description, model.n_bytes, model.n_embd, model.n_layer, model.cache_kind)
    text = repr((lib.__version__, cache_types, model.tokenizer.n_vocab, *shape))
    return _digest(text.encode("utf-8"))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _bytes_of(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _check_context(model: Model, n_ctx: int, n_slots: int) -> None:
    """Refuse what llama.cpp would not refuse itself, or only with the end of the process."""
    if not 0 < n_ctx * n_slots <= _MOST_CELLS:
        raise UsageError(
            f"a context of {n_ctx} tokens is out of range; choose 1 to {_MOST_CELLS // n_slots}"
        )
    if model.vocab_only:
        raise SpecllamaError(f"{model.name} was opened for its vocabulary only; load it whole")
    if model.has_encoder:
        raise _no_generator(model)


def _cache_type(name: str) -> int:
    """llama.cpp's number of a type. Raises UsageError."""
    if name not in CACHE_TYPES:
        known = ", ".join(CACHE_TYPES)
        raise UsageError(f"there is no KV cache type {name}; use one of {known}")
    return CACHE_TYPES[name]


def _model_params(placement: Placement) -> Any:
    """llama.cpp's parameters for a placement. Raises UsageError for what is not there."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = placement.gpu_layers
    params.split_mode = getattr(lib, f"LLAMA_SPLIT_MODE_{placement.split_mode.upper()}")
    # Without a GPU it is ignored, and llama.cpp would look for it.
    params.main_gpu = placement.main_gpu if supports_gpu() else 0
    params.load_mode = _load_mode(placement)
    if placement.devices:
        # ctypes keeps no array alive that a field of type void * points to; the struct does.
        params.kept_devices = devices.pointers(placement.devices)
        params.devices = ctypes.cast(params.kept_devices, ctypes.c_void_p)
    if placement.tensor_split:
        most = int(lib.llama_max_devices())
        if len(placement.tensor_split) > most:
            raise UsageError(
                f"the tensor split has {len(placement.tensor_split)} shares, and this build takes "
                f"at most {most} devices; leave some out"
            )
        shares = (ctypes.c_float * most)(*placement.tensor_split)
        params.kept_shares = shares
        params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
    return params


def _load_mode(placement: Placement) -> int:
    if placement.mlock:
        return int(
            lib.LLAMA_LOAD_MODE_MMAP_MLOCK if placement.mmap else lib.LLAMA_LOAD_MODE_MLOCK
        )
    return int(lib.LLAMA_LOAD_MODE_AUTO if placement.mmap else lib.LLAMA_LOAD_MODE_NONE)


def _context_params(n_cells: int, n_batch: int, n_outputs: int, n_slots: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = n_cells
    params.n_batch = n_batch
    params.n_ubatch = min(n_batch, params.n_ubatch)
    params.n_outputs_max = n_outputs
    params.n_seq_max = n_slots
    params.no_perf = True
    return params


def _attention(params: Any, model: Model, flash: bool | None) -> None:
    """Choose how attention is computed, and in how large parts.

    llama.cpp's flash attention for processors reads the cache again for every row of a small batch:
    with 500 tokens of context one row takes twice as long as without, and eight rows three times,
    at 3,500 three and nine times. Without it the scores are kept in memory, which parts of 64 rows
    bound; larger parts are no faster. Only where many short sequences have a buffer each is it
    faster: with 24 tokens of each a row takes 28 ms instead of 39, and with 160 tokens 69.
    """
    if flash is None and (_on_gpu(model) or params.type_v not in _PLAIN_CACHES):
        params.flash_attn_type = -1  # llama.cpp's own choice
        return
    if flash is None:
        is_short = params.n_ctx <= _SHORT * params.n_seq_max
        flash = params.n_seq_max > 1 and not params.kv_unified and is_short
    params.flash_attn_type = int(bool(flash))
    if not flash:
        params.n_ubatch = min(params.n_ubatch, _ROWS_AT_ONCE)


def _keep(params: Any, model: Model, n_snapshots: int, full_window: bool) -> None:
    """Choose what is kept beyond the newest token, to take some back."""
    params.swa_full = full_window or model.has_state
    if model.has_state:
        # llama.cpp ends the process unless more rows are decoded at once than states are kept.
        params.n_rs_seq = max(0, min(n_snapshots, params.n_ubatch - 2))


def _on_gpu(model: Model) -> bool:
    """Whether any weights lie elsewhere than in main memory."""
    places = {device for device, kind, _ in model.buffers if kind == "model"}
    return any(not place.startswith("CPU") and place != "AMX" for place in places)


def _make_context(model: Model, params: Any) -> Any:
    """A native context. Raises ModelError with llama.cpp's reason."""
    native = start()
    handle = native.create(
        lambda: lib.llama_init_from_model(model._handle, params), lib.llama_free
    )
    if not handle:
        raise ModelError(
            f"{model.name}: no context of {params.n_ctx} tokens could be made "
            f"({native.cause() or 'no reason given'}); try a smaller --ctx-size, or another "
            "type of KV cache if one was chosen"
        )
    return handle


def _no_generator(model: Model) -> ModelError:
    return ModelError(
        f"{model.name} ({model.description}) does not continue a text token by token; "
        "choose a model for text generation"
    )


class _Batch:
    """A llama_batch over NumPy arrays, filled by slices."""

    def __init__(self, n_rows: int) -> None:
        self._tokens = np.zeros(n_rows, np.int32)
        self._positions = np.zeros(n_rows, np.int32)
        self._slots = np.zeros(n_rows, np.int32)
        self._wanted = np.zeros(n_rows, np.int8)
        self._counts = np.ones(n_rows, np.int32)
        first = self._slots.ctypes.data
        self._pointers = np.arange(first, first + 4 * n_rows, 4, dtype=np.uintp)
        self._struct = lib.llama_batch()
        for name, array in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._wanted),
        ):
            kind = dict(lib.llama_batch._fields_)[name]
            setattr(self._struct, name, ctypes.cast(array.ctypes.data, kind))

    def fill(self, batch: Sequence[Any]) -> Any:
        """The struct for these rows, to be passed by value."""
        end = 0
        for rows in batch:
            begin, end = end, end + len(rows.tokens)
            self._tokens[begin:end] = rows.tokens
            self._positions[begin:end] = np.arange(rows.start, rows.start + end - begin)
            self._slots[begin:end] = rows.slot
            self._wanted[begin : end - rows.n_logits] = 0
            self._wanted[end - rows.n_logits : end] = 1
        self._struct.n_tokens = end
        return self._struct


def requantise(source: Path, destination: Path, kind: str) -> None:
    """Write a copy of a model in another quantisation, such as "Q2_K".

    The copy appears under its name only when it is complete. Raises ModelError.
    """
    ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}", None)
    if ftype is None:
        raise ModelError(f"llama.cpp knows no quantisation {kind}; use one such as Q2_K or Q4_0")
    header.check_file(source)
    native = start()
    params = lib.llama_model_quantize_default_params()
    params.ftype = ftype
    params.allow_requantize = True
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        with native.calling():
            code = lib.llama_model_quantize(
                os.fsencode(source), os.fsencode(temporary), ctypes.byref(params)
            )
        if code != 0:
            cause = native.cause() or f"code {code}"
            raise header.damage(source) or ModelError(
                f"{source.name} could not be requantised to {kind} ({cause}); "
                "check the free disk space"
            )
        temporary.replace(destination)
    finally:
        temporary.unlink(missing_ok=True)
