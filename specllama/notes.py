"""What the user should know of how a pair runs: options that are ignored, and odd choices."""

from __future__ import annotations

import platform
from collections import Counter

from specllama import devices, llama, processor
from specllama.placement import Cache, Decoding, Placement


def layout(role: str, model: llama.Model, decoding: Decoding) -> str:
    """Where a model lies and what works on it, such as "target: 31/31 layers on CUDA0"."""
    counts = Counter(model.layers.values())
    total = sum(counts.values())
    places = ", ".join(f"{count}/{total} layers on {place}" for place, count in counts.items())
    cache = decoding.cache
    return f"{role}: {places}, {decoding.threads} threads, KV cache {cache.type_k}/{cache.type_v}"


def of_target(target: llama.Model, n_ctx: int) -> list[str]:
    """Of the build, and of a context that is longer than the target was trained for."""
    found = [target.notice] if target.notice else []
    if target.is_unlocked:
        found.append(
            f"{target.name} could not be locked in memory; raise the limit (ulimit -l unlimited) "
            "or leave --mlock out"
        )
    if n_ctx > target.n_ctx_train:
        found.append(
            f"{target.name} was trained for {target.n_ctx_train} tokens, so what it says beyond "
            f"them, in a context of {n_ctx}, may make little sense"
        )
    return found


def of_draft(draft: llama.Model, n_ctx: int) -> list[str]:
    """Of a context that is longer than the draft was trained for."""
    if n_ctx <= draft.n_ctx_train:
        return []
    return [
        f"the draft {draft.name} was trained for {draft.n_ctx_train} tokens, so in a context of "
        f"{n_ctx} little of what it proposes beyond them may be kept; --ctx-size-draft 0 lets it "
        "see no more than that"
    ]


def of_options(target: Placement, draft: Placement, *caches: Cache) -> list[str]:
    """Of options that this build ignores, and of what a cache type brings with it."""
    found = []
    asked = [*target.asks_for_gpu]
    if draft.gpu_layers > 0:
        asked.insert(1, "--gpu-layers-draft")
    if asked and (reason := devices.no_gpu()):
        found.append(
            f"{reason}, so {' and '.join(asked)} {'is' if len(asked) == 1 else 'are'} ignored and "
            f"everything runs on the CPU; to change that: {devices.install_line(platform.system())}"
        )
    if any(cache.is_quantised_v and cache.flash is None for cache in caches):
        found.append(
            "a quantised V cache is read with flash attention, which on a processor is slower for "
            "the few rows of a round"
        )
    return found


def of_threads(threads: int) -> list[str]:
    """Of more threads than physical cores."""
    cores = processor.cores()
    if threads <= cores:
        return []
    share = "1 core" if cores == 1 else f"{cores} cores"
    return [
        f"{threads} threads share the {share} that this process may use, and wait for each other; "
        f"--threads {cores} is likely faster"
    ]
