"""What memory a pair would take, told before it is loaded, against what llama.cpp then takes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command import specllama
from tiny import tiny

from specllama import devices, estimate, llama, loading, memory, native
from specllama.errors import ModelError
from specllama.estimate import MAIN, Part, Shortage
from specllama.header import tensor_bytes
from specllama.llama import Context, Model, Outline
from specllama.loading import load
from specllama.placement import Cache, Decoding

MIB, GIB = 2**20, 2**30
# What llama.cpp's log rounds away, and one percent.
ROUNDING, MARGIN = 0.02 * MIB, 0.01
on_a_cpu = pytest.mark.skipif(llama.supports_gpu(), reason="the memory that counts is the GPU's")


def estimated(path: Path, n_ctx: int, decoding: Decoding, n_slots: int = 1) -> Part:
    with Outline(path) as outline:
        return estimate.measure(
            outline, "target", n_ctx, decoding, n_outputs=17, n_slots=n_slots
        )


def allocated(path: Path, n_ctx: int, decoding: Decoding, n_slots: int = 1) -> tuple[float, float]:
    """Bytes of the cache and of the other buffers of a real context."""
    with Model(path) as model, Context(
        model,
        n_ctx=n_ctx,
        n_batch=decoding.batch_size,
        n_outputs=17,
        n_slots=n_slots,
        threads=1,
        kv_type=decoding.cache.type_k,
        kv_type_v=decoding.cache.type_v,
        flash_attention=decoding.cache.flash,
    ) as context:
        kept = sum(mib for _, kind, mib in context.buffers if kind in ("KV", "RS"))
        return kept * MIB, sum(mib for _, _, mib in context.buffers) * MIB - kept * MIB


def weights(path: Path) -> Counter[str]:
    """Bytes of the weights of a model by place, as loading tells them.

    Main memory lets go of what was repacked, which is as large as the file again.
    """
    gpus = [device.name for device in devices.gpus()]
    if not gpus:
        return Counter({MAIN: path.stat().st_size})
    sizes: Counter[str] = Counter()
    with Model(path):
        for device, kind, mib in native.start().sizes:
            if kind == "model":
                sizes[estimate.place_of(device, gpus)] += mib * MIB  # type: ignore[assignment]
    return sizes


@pytest.mark.parametrize("kind", ["attention", "swa", "recurrent", "hybrid"])
@pytest.mark.parametrize(
    ("n_ctx", "decoding", "n_slots"),
    [
        (512, Decoding(), 1),
        (4096, Decoding(64), 1),
        (1024, Decoding(), 4),
        (2048, Decoding(cache=Cache("q8_0", "q4_0")), 1),
        (2048, Decoding(cache=Cache("f32", "f32", "off")), 1),
    ],
)
def test_a_dry_run_tells_what_is_then_allocated(
    kind: str, n_ctx: int, decoding: Decoding, n_slots: int
) -> None:
    part = estimated(tiny(kind), n_ctx, decoding, n_slots)
    cache, buffers = allocated(tiny(kind), n_ctx, decoding, n_slots)
    assert sum(part.cache.values()) == pytest.approx(cache, rel=MARGIN, abs=2 * ROUNDING)
    assert sum(part.buffers.values()) == pytest.approx(buffers, rel=MARGIN, abs=4 * ROUNDING)


def test_a_long_context_is_extrapolated() -> None:
    n_ctx = 150_016
    assert n_ctx > estimate._MOST_CELLS
    part = estimated(tiny(), n_ctx, Decoding(64))
    cache, buffers = allocated(tiny(), n_ctx, Decoding(64))
    assert sum(part.cache.values()) == pytest.approx(cache, rel=MARGIN)
    assert sum(part.buffers.values()) == pytest.approx(buffers, rel=5 * MARGIN)


def test_the_default_pair_is_estimated_to_a_percent() -> None:
    files = loading.find_files()
    for path in (files.target, files.draft):
        assert path is not None
        part = estimated(path, 4096, Decoding())
        cache, buffers = allocated(path, 4096, Decoding())
        assert sum(part.cache.values()) == pytest.approx(cache, rel=MARGIN)
        assert sum(part.buffers.values()) == pytest.approx(buffers, rel=MARGIN)
        assert part.weights == pytest.approx(weights(path), rel=0.05)


def test_an_outline_takes_next_to_no_memory_for_a_context_of_gigabytes() -> None:
    code = """
import resource, sys
from pathlib import Path
from specllama import estimate
from specllama.llama import Outline
from specllama.placement import Decoding
with Outline(Path(sys.argv[1])) as outline:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    part = estimate.measure(outline, "target", 30_000_000, Decoding(), n_outputs=17)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sum(part.cache.values()))
"""
    result = specllama(tiny(), python=("-c", code))
    assert result.code == 0, result.err
    grown, cache = map(float, result.text.split())
    assert cache > 4 * GIB
    assert grown < 200 * 1024  # kilobytes; on a Mac, bytes


# --- places -------------------------------------------------------------------------------------

GPUS = ("CUDA0", "CUDA10", "CUDA1", "MTL0")


@pytest.mark.parametrize(
    ("buffer", "place"),
    [
        ("CUDA0", "CUDA0"), ("CUDA1", "CUDA1"), ("CUDA10", "CUDA10"), ("MTL0_Mapped", "MTL0"),
        ("CUDA_Host", MAIN), ("CPU", MAIN), ("CPU_Mapped", MAIN), ("CPU_REPACK", MAIN),
    ],
)  # fmt: skip
def test_a_buffer_lies_on_the_device_that_its_name_begins_with(buffer: str, place: str) -> None:
    assert estimate.place_of(buffer, GPUS) == place


TENSORS = {
    b"token_embd.weight": 100, b"blk.0.attn_q.weight": 10, b"blk.0.ffn_up.weight": 20,
    b"blk.1.attn_q.weight": 10, b"output_norm.weight": 1, b"output.weight": 70,
}  # fmt: skip


def test_layers_lie_where_llama_cpp_puts_them_and_embeddings_in_main_memory() -> None:
    layers = {0: "CPU", 1: "CUDA0", 2: "CUDA1"}
    assert estimate.by_layer(TENSORS, layers, 2, GPUS) == {
        MAIN: 130, "CUDA0": 10, "CUDA1": 71,
    }  # fmt: skip


def test_embeddings_that_are_the_output_too_are_there_twice() -> None:
    tied = {name: size for name, size in TENSORS.items() if name != b"output.weight"}
    layers = {0: "CUDA0", 1: "CUDA0", 2: "CUDA0"}
    assert estimate.by_layer(tied, layers, 2, GPUS) == {MAIN: 100, "CUDA0": 141}
    assert estimate.by_layer(tied, {}, 2, GPUS) == {MAIN: 141}


def test_the_sizes_in_the_header_are_those_that_llama_cpp_counts() -> None:
    sizes = tensor_bytes(tiny())
    assert sizes is not None and b"token_embd.weight" in sizes
    with Model(tiny()) as model:
        assert sum(sizes.values()) == model.n_bytes
        assert sorted(model.layers) == list(range(model.n_layer + 1))


def part(n_ctx: int = 4096, gpu: float = 0.0, main: float = 0.0, n_offloaded: int = 0) -> Part:
    """A model whose cache takes 1 KiB a token on each place where it has weights."""
    weights = {name: size for name, size in (("CUDA0", gpu), (MAIN, main)) if size}
    cache = dict.fromkeys(weights, 1024.0 * n_ctx)
    return Part("target", "big.gguf", n_ctx, weights, cache, {}, n_offloaded,
                dict.fromkeys(weights, 1024.0))  # fmt: skip


def test_what_fits_is_no_shortage_and_unknown_places_are_not_judged() -> None:
    assert estimate.shortage([part(main=GIB)], {MAIN: 2 * GIB}) is None
    assert estimate.shortage([part(gpu=GIB)], {MAIN: 2 * GIB}) is None


def test_models_that_fit_alone_can_be_too_much_together() -> None:
    free = {"CUDA0": 1.5 * GIB, MAIN: GIB}
    assert estimate.shortage([part(gpu=GIB)], free) is None
    short = estimate.shortage([part(gpu=GIB), part(gpu=GIB)], free)
    assert short == Shortage("CUDA0", 2 * (GIB + 4 * MIB), 1.5 * GIB)


def test_the_context_that_is_named_fits_and_one_step_more_does_not() -> None:
    def found(n_ctx: int) -> Shortage | None:
        return estimate.shortage([part(n_ctx, main=GIB)], {MAIN: GIB + 150 * MIB})

    short = found(200_000)
    assert short is not None
    n_ctx = estimate.fitting_context([part(200_000, main=GIB)], short)
    assert n_ctx is not None and n_ctx % 256 == 0
    assert found(n_ctx) is None and found(n_ctx + 256) is not None


def test_where_no_context_fits_none_is_named() -> None:
    parts = [part(main=3 * GIB)]
    short = estimate.shortage(parts, {MAIN: GIB})
    assert short is not None and estimate.fitting_context(parts, short) is None
    assert "smaller model" in estimate.refusal(parts, short)


def test_a_gpu_that_is_too_small_is_offered_fewer_layers() -> None:
    whole = part(gpu=10 * GIB, n_offloaded=41)
    short = estimate.shortage([whole], {"CUDA0": 5 * GIB})
    assert short is not None
    layers = estimate.fitting_layers(whole, short)
    assert 17 <= layers <= 20
    assert f"--gpu-layers {layers}" in estimate.refusal([whole], short)
    assert "CUDA0" in estimate.refusal([whole], short)


# --- loading ------------------------------------------------------------------------------------


def has(monkeypatch: pytest.MonkeyPatch, n_bytes: float) -> None:
    """Let the machine have so much free memory."""
    monkeypatch.setattr(memory, "available_bytes", lambda: int(n_bytes))


@on_a_cpu
def test_a_context_that_memory_cannot_hold_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ModelError, match=r"GiB of main memory, and .* are free") as refused:
        load(model=tiny(), ctx_size=2_000_000_000, threads=1)
    found = re.search(r"--ctx-size (\d+) fits", str(refused.value))
    assert found is not None and int(found[1]) > 100_000


@on_a_cpu
def test_the_command_ends_with_code_3_before_anything_is_loaded() -> None:
    result = specllama("generate", "a", "-m", tiny(), "-c", "2000000000")
    assert result.code == 3 and result.out == b""
    assert result.err.startswith("Error: ") and result.err.count("\n") == 1


def test_check_tells_what_a_context_would_take_that_nothing_could_hold() -> None:
    result = specllama("check", tiny(), "-c", "2000000000")
    assert (result.code, result.err) == (0, "")
    notes = [line for line in result.text.splitlines() if line.startswith("note")]
    assert any(" memory " in line and "MiB of this machine's" in line for line in notes)


BIG: dict[str, Any] = {"vocab": "bpe", "extra": 30_000, "extra_type": "normal"}


def needed(paths: Sequence[Path]) -> float:
    """Bytes of main memory for a pair with contexts of 512 tokens."""
    parts = [estimated(path, 512, Decoding()) for path in paths]
    return sum(part.on(MAIN) for part in parts) + estimate.OVERHEAD


@on_a_cpu
@pytest.mark.parametrize("drafter", ["auto", "model"])
def test_a_draft_that_does_not_fit_is_left_out_unless_it_was_asked_for(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny(), tiny(**BIG)
    target = tiny(noise=0.05, **BIG)
    has(monkeypatch, needed([target]) + 0.5 * (needed([target, draft]) - needed([target])))
    if drafter == "model":
        with pytest.raises(ModelError, match=f"{target.name} and {draft.name} .* need"):
            load(model=target, draft=draft, ctx_size=512, threads=1, drafter=drafter)
        return
    with load(model=target, draft=draft, ctx_size=512, threads=1, draft_tokens=2) as pair:
        assert pair.draft is None
        assert any("the draft is left out" in notice for notice in pair.notices)


@pytest.mark.parametrize("drafter", ["auto", "model"])
def test_a_draft_whose_context_cannot_be_made_is_left_out_unless_it_was_asked_for(
    drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = tiny(), tiny(noise=0.05)
    real = loading.open_context

    def full(model: Model, *arguments: Any, **options: Any) -> Context:
        if model.path == draft:
            raise ModelError("no context could be made (out of memory)")
        return real(model, *arguments, **options)

    monkeypatch.setattr(loading, "open_context", full)
    options: dict[str, Any] = {"model": target, "draft": draft, "threads": 1, "draft_tokens": 2}
    if drafter == "model":
        with pytest.raises(ModelError, match="out of memory"):
            load(drafter=drafter, **options)
        return
    with load(**options) as pair:
        assert pair.draft is None
        assert any("left out" in notice and "memory" in notice for notice in pair.notices)
        assert len(list(pair.generate("hello", max_tokens=5, seed=1))) > 0


@on_a_cpu
def test_what_just_fits_is_loaded_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, needed([tiny(), tiny(noise=0.05)]) + MIB)
    with load(
        model=tiny(), draft=tiny(noise=0.05), ctx_size=512, threads=1, draft_tokens=2
    ) as pair:
        assert pair.draft is not None
        assert not any("GiB" in notice for notice in pair.notices)


@on_a_cpu
def test_force_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, MIB)
    with pytest.raises(ModelError, match="--force"):
        load(model=tiny(), ctx_size=512, threads=1)
    with load(model=tiny(), ctx_size=512, threads=1, draft_tokens=0, force=True) as pair:
        assert any("--force goes on" in notice for notice in pair.notices)
        assert pair.target.n_ctx == 512
