"""Where a model lies and how its cache is kept: what devices and memory are asked for."""

from __future__ import annotations

from dataclasses import dataclass

from specllama.errors import UsageError

SPLIT_MODES = ("none", "layer", "row")
# What keys and values can be kept as, with the number that ggml gives the type.
CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2,
    "iq4_nl": 20,
}  # fmt: skip
FLASH_ATTENTION = ("auto", "on", "off")
_MOST = 2**31 - 1  # that llama.cpp takes; beyond it a number would become another one
_PLAIN_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of one model lie.

    gpu_layers: how many layers GPUs take, -1 for all. devices: their names as `--list-devices`
    prints them, all GPUs when empty; "none" keeps everything in main memory. split_mode: "layer"
    parts the layers between GPUs, "row" the tensors, "none" uses `main_gpu` alone. tensor_split:
    the share of each GPU. mmap: map the file instead of reading it. mlock: keep it from being
    swapped out. Raises UsageError.
    """

    gpu_layers: int = -1
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    mmap: bool = True
    mlock: bool = False

    def __post_init__(self) -> None:
        if not -1 <= self.gpu_layers <= _MOST:
            raise UsageError(
                f"the number of GPU layers must be -1 (all of them) or more, not {self.gpu_layers}"
            )
        if self.split_mode not in SPLIT_MODES:
            raise UsageError(
                f'there is no split mode "{self.split_mode}"; use {", ".join(SPLIT_MODES)}'
            )
        if not all(0 <= share <= _MOST for share in self.tensor_split):
            raise UsageError("the shares of a tensor split must be numbers from 0 on, like 3,1")
        if self.tensor_split and not any(self.tensor_split):
            raise UsageError("a tensor split of zeros leaves no GPU; give one a share, like 3,1")
        if not 0 <= self.main_gpu <= _MOST:
            raise UsageError(f"the main GPU must be 0 or more, not {self.main_gpu}")
        if "none" in self.devices and len(self.devices) > 1:
            raise UsageError('the device "none" means main memory alone; leave the others out')

    @property
    def asks_for_gpu(self) -> tuple[str, ...]:
        """The options in it that mean nothing without a GPU."""
        asked = {
            "--gpu-layers": self.gpu_layers > 0,
            "--split-mode": self.split_mode != "layer",
            "--tensor-split": bool(self.tensor_split),
            "--main-gpu": self.main_gpu > 0,
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)


@dataclass(frozen=True, slots=True)
class Cache:
    """How one model keeps and reads its keys and values.

    type_k, type_v: of what is kept, see CACHE_TYPES. flash_attention: "on", "off", or "auto" for
    what is faster; a quantised V cannot be read without. full_window: whether layers that look at
    the last tokens only keep all of them, so that a text can be gone on from at any place, or
    little more than they look at. Raises UsageError.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: str = "auto"
    full_window: bool = True

    def __post_init__(self) -> None:
        for name in (self.type_k, self.type_v):
            if name not in CACHE_TYPES:
                raise UsageError(
                    f"there is no KV cache type {name}; use one of {', '.join(CACHE_TYPES)}"
                )
        if self.flash_attention not in FLASH_ATTENTION:
            raise UsageError(
                f'flash attention is "auto", "on" or "off", not "{self.flash_attention}"'
            )
        if self.is_quantised_v and self.flash_attention == "off":
            raise UsageError(
                f"a V cache of type {self.type_v} cannot be read without flash attention; "
                "leave --flash-attn off out, or keep V as f16"
            )

    @property
    def is_quantised_v(self) -> bool:
        """Whether the values are kept in blocks, which only flash attention reads."""
        return self.type_v not in _PLAIN_TYPES

    @property
    def flash(self) -> bool | None:
        """Whether to use flash attention; None where that is left to what is faster."""
        return {"auto": None, "on": True, "off": False}[self.flash_attention]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How one model decodes.

    batch_size: rows of one decode. threads: for few rows, and threads_batch for many, the same
    where it is None. cache: of keys and values. n_snapshots: of a recurrent state, as many as
    tokens of a round can be taken back from it.
    """

    batch_size: int = 512
    threads: int | None = None
    threads_batch: int | None = None
    cache: Cache = Cache()
    n_snapshots: int = 0
