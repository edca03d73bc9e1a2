"""What a pair would take of each memory, told by llama.cpp's dry run before it is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specllama import devices, header, llama, memory
from specllama.placement import Decoding

MAIN = "main memory"
_MIB, _GIB = 2**20, 2**30
# A dry run keeps a record of each cell, so beyond this it is extrapolated: all grows linearly.
_MOST_CELLS = 1 << 16
_STEP = 256  # tokens; llama.cpp rounds contexts up to it
# What a process takes besides: libraries, vocabularies, the interpreter. Bytes.
OVERHEAD = 100 * _MIB


@dataclass(frozen=True)
class Part:
    """What one model takes with a context of n_ctx tokens. Bytes by place.

    A place is "main memory" or a device. n_offloaded: layers on GPUs. per_token: what one
    token more of context takes.
    """

    role: str
    name: str
    n_ctx: int
    weights: Mapping[str, float]
    cache: Mapping[str, float]
    buffers: Mapping[str, float]
    n_offloaded: int = 0
    per_token: Mapping[str, float] = field(default_factory=dict)

    def on(self, place: str) -> float:
        """Bytes on one place."""
        return sum(kind.get(place, 0.0) for kind in (self.weights, self.cache, self.buffers))

    @property
    def places(self) -> set[str]:
        """Where anything of it lies."""
        return {*self.weights, *self.cache, *self.buffers}

    def describe(self) -> str:
        """The sizes in words, over all places."""
        weights, cache, buffers = (
            sum(kind.values()) / _MIB for kind in (self.weights, self.cache, self.buffers)
        )
        return (
            f"weights {weights:.0f} MiB, KV cache {cache:.0f} MiB for {self.n_ctx} tokens, "
            f"buffers {buffers:.0f} MiB"
        )


@dataclass(frozen=True)
class Shortage:
    """More is asked of a place than is free there. Bytes."""

    place: str
    needed: float
    free: float


def of_file(
    path: Path, role: str, n_ctx: int, decoding: Decoding, n_outputs: int
) -> Part:
    """What the model of a file would take, put where it goes by default. Raises ModelError."""
    with llama.Outline(path) as outline:
        return measure(outline, role, n_ctx, decoding, n_outputs=n_outputs)


def measure(
    outline: llama.Outline,
    role: str,
    n_ctx: int,
    decoding: Decoding,
    *,
    n_outputs: int,
    n_slots: int = 1,
) -> Part:
    """What a model would take. Raises UsageError, ModelError for a context that cannot be."""
    outline.check_size(n_ctx, n_slots)
    gpus = [device.name for device in devices.gpus()]
    size = n_ctx
    if n_ctx * n_slots > _MOST_CELLS:
        size = max(_STEP, _MOST_CELLS // n_slots // _STEP * _STEP)
    whole = _context(outline, size, decoding, n_outputs, n_slots, gpus)
    half_size = max(1, size // 2 // _STEP * _STEP or size // 2)
    half = _context(outline, half_size, decoding, n_outputs, n_slots, gpus)
    slopes = {key: (whole[key] - half[key]) / max(1, size - half_size) for key in whole}
    sizes = {key: whole[key] + slopes[key] * (n_ctx - size) for key in whole}
    per_token: Counter[str] = Counter()
    for (place, _), slope in slopes.items():
        per_token[place] += slope  # type: ignore[assignment]
    return Part(
        role,
        outline.name,
        n_ctx,
        _weights(outline, gpus),
        {place: sizes[place, kind] for place, kind in sizes if kind == "cache"},
        {place: sizes[place, kind] for place, kind in sizes if kind == "buffers"},
        sum(device in gpus for device in outline.layers.values()),
        dict(per_token),
    )


def _context(
    outline: llama.Outline,
    n_ctx: int,
    decoding: Decoding,
    n_outputs: int,
    n_slots: int,
    gpus: Sequence[str],
) -> Counter[tuple[str, str]]:
    """Bytes of a context by place, and by whether they are the cache's."""
    sizes: Counter[tuple[str, str]] = Counter()
    buffers = outline.context_buffers(
        n_ctx,
        n_batch=decoding.batch_size,
        n_outputs=n_outputs,
        n_slots=n_slots,
        cache=decoding.cache,
        n_snapshots=decoding.n_snapshots if n_slots == 1 else 0,
    )
    for device, kind, mib in buffers:
        part = "cache" if kind in ("KV", "RS") else "buffers"
        sizes[place_of(device, gpus), part] += mib * _MIB  # type: ignore[assignment]
    return sizes


def place_of(buffer: str, gpus: Sequence[str]) -> str:
    """The place of a buffer, such as CUDA0 of CUDA0 and MTL0 of MTL0_Mapped, by its name."""
    for gpu in sorted(gpus, key=len, reverse=True):
        if buffer == gpu or buffer.startswith(f"{gpu}_"):
            return gpu
    return MAIN


def _weights(outline: llama.Outline, gpus: Sequence[str]) -> dict[str, float]:
    if not any(device in gpus for device in outline.layers.values()):
        return {MAIN: float(outline.n_bytes)}
    sizes = header.tensor_bytes(outline.path)
    if sizes is None:  # a type that is not known here
        share = Counter(place_of(device, gpus) for device in outline.layers.values())
        total = sum(share.values())
        return {place: outline.n_bytes * count / total for place, count in share.items()}
    return by_layer(sizes, outline.layers, outline.n_layer, gpus)


def by_layer(
    sizes: Mapping[bytes, int], layers: Mapping[int, str], n_layer: int, gpus: Sequence[str]
) -> dict[str, float]:
    """Bytes of tensors by place. layers: the device of each layer, and of the output behind them.

    Token embeddings stay in main memory, and serve as the output too where there is no other.
    """
    places: Counter[str] = Counter()
    output = place_of(layers.get(n_layer, "CPU"), gpus)
    for name, size in sizes.items():
        if name.startswith(b"blk."):
            layer = int(name.split(b".")[1])
            places[place_of(layers.get(layer, "CPU"), gpus)] += size
        elif name.startswith(b"token_embd"):
            places[MAIN] += size
            if b"output.weight" not in sizes and output != MAIN:
                places[output] += size
        else:
            places[output] += size
    return {place: float(size) for place, size in places.items()}


def free_memory() -> dict[str, float]:
    """Bytes that are free, by place; places that cannot be told are left out."""
    free = {device.name: float(device.free) for device in devices.gpus() if device.total}
    main = memory.available_bytes()
    if main is not None:
        free[MAIN] = float(main)
    return free


def shortage(parts: Sequence[Part], free: Mapping[str, float]) -> Shortage | None:
    """The first place where the parts together do not fit."""
    for place in sorted({place for part in parts for place in part.places}):
        needed = sum(part.on(place) for part in parts) + (OVERHEAD if place == MAIN else 0)
        if place in free and needed > free[place]:
            return Shortage(place, needed, free[place])
    return None


def fitting_context(parts: Sequence[Part], short: Shortage) -> int | None:
    """The largest context of the target that fits in a place, or None when none does.

    A draft's context shrinks with it once they are of one size.
    """
    excess = short.needed - short.free
    target = parts[0]
    per_token = sum(
        part.per_token.get(short.place, 0.0) for part in parts if part.n_ctx == target.n_ctx
    )
    if per_token <= 0:
        return None
    size = int(target.n_ctx - excess / per_token) // _STEP * _STEP
    return size if size >= _STEP else None


def fitting_layers(part: Part, short: Shortage) -> int:
    """About how many layers of a model fit on a GPU, by the mean of those that are on it."""
    if part.n_offloaded == 0:
        return 0
    moved = part.weights.get(short.place, 0.0) + part.cache.get(short.place, 0.0)
    excess = (short.needed - short.free) / (moved / part.n_offloaded) if moved else 0
    return max(0, int(part.n_offloaded - excess) - 1)


def refusal(parts: Sequence[Part], short: Shortage) -> str:
    """Why it is too much, and what would fit."""
    return f"{excess(parts, short)}; {_advice(parts, short)}, or --force tries it anyway"


def excess(parts: Sequence[Part], short: Shortage) -> str:
    """How much is needed and how much there is."""
    names = " and ".join(part.name for part in parts)
    verb = "need" if len(parts) > 1 else "needs"
    return (
        f"{names} with a context of {parts[0].n_ctx} tokens {verb} "
        f"{short.needed / _GIB:.1f} GiB of {short.place}, and {short.free / _GIB:.1f} GiB are free"
    )


def _advice(parts: Sequence[Part], short: Shortage) -> str:
    ways = []
    if (n_ctx := fitting_context(parts, short)) is not None:
        ways.append(f"--ctx-size {n_ctx} fits")
    if short.place != MAIN:
        ways.append(f"--gpu-layers {fitting_layers(parts[0], short)} should fit")
    return ", ".join(ways) or "choose a smaller model or quantisation"


def is_plainly_enough(paths: Sequence[Path], n_ctx: int | None, decoding: Decoding) -> bool:
    """Whether main memory is so large that a closer look is not worth its fraction of a second."""
    if n_ctx is not None and not 0 < n_ctx <= 8192:
        return False
    free = memory.available_bytes()
    if free is None or llama.supports_gpu():
        return free is None
    size = sum(path.stat().st_size for path in paths)
    return 4 * size + 2 * _GIB < free and decoding.batch_size <= 2048
