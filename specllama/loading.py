"""From names and files to a ready pair; only this file sees the registry, llama.cpp and the core.

Every check that can be made before the first token is made here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from specllama import llama, registry, vocabulary
from specllama.acceptance import VERIFIERS
from specllama.drafting import Drafter, ModelDrafter, NullDrafter
from specllama.errors import UsageError
from specllama.generation import Pair
from specllama.lm import CachedLM
from specllama.lookahead import MAX_DRAFT_TOKENS, FixedLength

log = logging.getLogger(__name__)

Model = llama.Model  # for annotations of those who get one from here

DEFAULT_PAIR = "smollm2"
DEFAULT_CTX_SIZE = 4096
DEFAULT_BATCH_SIZE = 512
DEFAULT_DRAFT_TOKENS = 3
MAX_THREADS = 512  # llama.cpp crashes far above its own limit instead of refusing


@dataclass(frozen=True)
class Files:
    """The model files of a pair; draft is None when only the target is asked for."""

    target: Path
    draft: Path | None


def find_files(
    pair: str | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    announce: Callable[[str], None] = log.info,
) -> Files:
    """The files of a named pair, or those given by path; the default pair when neither is named.

    models: another registry file. announce: told what takes a while, such as requantising.
    Raises UsageError for a contradiction, ModelError for a file that is not there.
    """
    if model is not None:
        if pair is not None:
            raise UsageError("name either a pair or a model file, not both")
        return Files(Path(model), None if draft is None else Path(draft))
    found = registry.load_registry(None if models is None else Path(models))
    spec = found.pair(pair or DEFAULT_PAIR)
    target = _prepare(spec.target, announce)
    return Files(target, _prepare(spec.draft, announce) if draft is None else Path(draft))


def _prepare(source: registry.Source, announce: Callable[[str], None]) -> Path:
    """The file of a source, requantised first if it has to be."""
    if not isinstance(source, registry.Requantised):
        return registry.locate(source)
    path = registry.cache_path(source)
    if not path.is_file():
        announce(f"making {path} once: {registry.describe(source)}")
        llama.requantise(registry.locate(source.source), path, source.type)
    return path


def load(
    pair: str | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    drafter: str = "auto",
    draft_tokens: int | None = None,
    draft_temperature: float | None = None,
    verifier: str = "block",
    ctx_size: int | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    threads: int | None = None,
    threads_batch: int | None = None,
    gpu_layers: int = -1,
    gpu_layers_draft: int = -1,
    announce: Callable[[str], None] = log.info,
) -> Pair:
    """Load a pair of models: `load("smollm2")`, or `load(model="big.gguf", draft="small.gguf")`.

    drafter: "model" or "none"; "auto" uses the draft model where there is one. draft_tokens: how
    many tokens to draft a round, 0 to 16. draft_temperature: the draft's own sampling temperature,
    the target's when None. verifier: "block" or "token". ctx_size: tokens that prompt and answer
    may have together; 4096 or what the model was trained for when None, the latter when 0.

    Raises UsageError for a wrong option, ModelError for files that cannot be used or do not fit
    together.
    """
    _check_options(drafter, verifier, draft_temperature)
    check_sizes(ctx_size, batch_size)
    for count, name in ((threads, "threads"), (threads_batch, "threads_batch")):
        if count is not None and not 1 <= count <= MAX_THREADS:
            raise UsageError(f"{name} must be between 1 and {MAX_THREADS}, not {count}")
    policy = FixedLength(DEFAULT_DRAFT_TOKENS if draft_tokens is None else draft_tokens)
    if drafter == "model" and model is not None and draft is None:
        raise UsageError("the model drafter needs a draft model; name one with --model-draft")
    files = find_files(pair, model=model, draft=draft, models=models, announce=announce)
    with ExitStack() as stack:
        target = stack.enter_context(open_model(files.target, gpu_layers))
        n_ctx = context_size(ctx_size, target)
        rows = (batch_size, default_threads() if threads is None else threads, threads_batch)
        notices = _notices(target, n_ctx, max(gpu_layers, gpu_layers_draft))
        proposer: Drafter = NullDrafter()
        if files.draft is not None and drafter != "none" and policy.n_tokens > 0:
            small = stack.enter_context(open_model(files.draft, gpu_layers_draft))
            shared = vocabulary.require_compatible(target.tokenizer, small.tokenizer)
            refusal = rollback_refusal(target, "target") or rollback_refusal(small, "draft")
            if refusal:
                notices.append(f"{refusal}, so speculation is off and decoding is plain")
            else:
                size = min(n_ctx, small.n_ctx_train)
                if size < n_ctx:
                    notices.append(
                        f"the draft {small.name} was trained for {size} tokens, so decoding is "
                        "plain beyond them"
                    )
                lm = CachedLM(stack.enter_context(open_context(small, size, *rows)))
                proposer = ModelDrafter(lm, policy, shared, draft_temperature)
        lm = CachedLM(stack.enter_context(open_context(target, n_ctx, *rows)))
        return Pair(
            lm,
            proposer,
            target.tokenizer,
            VERIFIERS[verifier],
            n_tokens=vocabulary.real_tokens(target.tokenizer),
            names=("none" if isinstance(proposer, NullDrafter) else "model", verifier),
            notices=notices,
            close=stack.pop_all().close,
        )


def _notices(target: llama.Model, n_ctx: int, gpu_layers: int) -> list[str]:
    """What the user should know of how the target runs."""
    notices = [target.notice] if target.notice else []
    if gpu_layers > 0 and not llama.supports_gpu():
        notices.append(
            "this llama-cpp-python was built without GPU support, so GPU layers are ignored and "
            "everything runs on the CPU"
        )
    if n_ctx > target.n_ctx_train:
        notices.append(
            f"{target.name} was trained for {target.n_ctx_train} tokens, so what it says beyond "
            f"them, in a context of {n_ctx}, may make little sense"
        )
    return notices


def open_model(path: Path, gpu_layers: int = -1) -> llama.Model:
    """The weights of a GGUF file, to be closed. Raises ModelError."""
    return llama.Model(path, gpu_layers=gpu_layers)


def open_context(
    model: llama.Model,
    n_ctx: int,
    n_batch: int = DEFAULT_BATCH_SIZE,
    threads: int | None = None,
    threads_batch: int | None = None,
) -> llama.Context:
    """A context that is as large as speculation needs and no larger, to be closed."""
    return llama.Context(
        model,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_outputs=MAX_DRAFT_TOKENS + 1,
        threads=threads,
        threads_batch=threads_batch,
    )


def _check_options(drafter: str, verifier: str, draft_temperature: float | None) -> None:
    if drafter not in ("auto", "model", "none"):
        raise UsageError(f'there is no drafter "{drafter}"; use auto, model or none')
    if verifier not in VERIFIERS:
        raise UsageError(f'there is no verifier "{verifier}"; use {" or ".join(VERIFIERS)}')
    if draft_temperature is not None and not 0 <= draft_temperature < float("inf"):
        raise UsageError(f"the draft temperature must be 0 or more, not {draft_temperature}")


def check_sizes(ctx_size: int | None, batch_size: int) -> None:
    """Raises UsageError for a context or a batch of a size that cannot be."""
    if ctx_size is not None and ctx_size < 0:
        raise UsageError(f"the context size must be 0 (the model's own) or more, not {ctx_size}")
    if batch_size <= MAX_DRAFT_TOKENS:
        raise UsageError(
            f"the batch size must be more than {MAX_DRAFT_TOKENS}, the most draft tokens of a "
            f"round, not {batch_size}"
        )


def context_size(asked: int | None, model: llama.Model) -> int:
    """Tokens of a context: as asked for, 0 as trained, None a default that fits the training."""
    if asked is None:
        return min(DEFAULT_CTX_SIZE, model.n_ctx_train)
    return asked or model.n_ctx_train


def rollback_refusal(model: llama.Model, role: str) -> str | None:
    """Why rejected tokens cannot be taken back from a model's cache, or None when they can."""
    if model.cache_kind in ("attention", "sliding window"):
        return None
    return (
        f"the {role} {model.name} keeps a {model.cache_kind} state, "
        "which cannot take back rejected tokens"
    )


def default_threads() -> int:
    """One thread per physical core that this process may use."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:  # not on every platform
        return max(1, os.cpu_count() or 1)
    cores = set()
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))
