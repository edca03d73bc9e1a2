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

from specllama import (
    calibration,
    hub_cache,
    llama,
    memory,
    parallelism,
    registry,
    sources,
    tuning,
    vocabulary,
)
from specllama.acceptance import VERIFIERS
from specllama.errors import ModelError, UsageError
from specllama.folders import cache_folder
from specllama.generation import Pair
from specllama.lm import CachedLM
from specllama.lookahead import MAX_DRAFT_TOKENS, FixedLength

log = logging.getLogger(__name__)

Model = llama.Model  # for annotations of those who get one from here

DEFAULT_PAIR = "smollm2"
DEFAULT_CTX_SIZE = 4096
DEFAULT_BATCH_SIZE = 512
MAX_PARALLEL = 256  # sequences of one context in llama.cpp
MAX_THREADS = 512  # llama.cpp crashes far above its own limit instead of refusing
# Rows of logits that several sequences share in one decode: a guess of each of 32.
_SHARED_OUTPUTS = 64
_PROBED = 256  # tokens of the context in which decodes are timed


@dataclass(frozen=True)
class Files:
    """The model files of a pair; draft is None when only the target is asked for.

    chat_template: Jinja text of the registry that replaces the target's own, if it has one.
    """

    target: Path
    draft: Path | None
    chat_template: str | None = None


def find_files(
    pair: str | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    models: str | os.PathLike[str] | None = None,
    need_draft: bool = True,
    announce: Callable[[str], None] = log.info,
) -> Files:
    """The files of a named pair, or those that are given; the default pair when nothing is named.

    model, draft: a path, `hf:owner/name/file.gguf`, or a pair's name for its target or draft.
    models: another registry file. need_draft: whether the draft is looked for at all. announce:
    told what takes a while, such as requantising.
    Raises UsageError for a contradiction, ModelError for a file that is not there.
    """
    if model is not None and pair is not None:
        raise UsageError("name either a pair or a model file, not both")
    if draft is not None and model is None and pair is None:
        raise UsageError("a draft model needs a target; name it with --model, or name a --pair")
    where = None if models is None else Path(models)
    drafting = _given(draft, "draft", where, announce) if draft is not None and need_draft else None
    if model is not None:
        return Files(_given(model, "target", where, announce), drafting)
    spec = registry.load_registry(where).pair(pair or DEFAULT_PAIR)
    target = prepare(spec.target, announce, spec.name)
    if need_draft and drafting is None:
        drafting = prepare(spec.draft, announce, spec.name)
    return Files(target, drafting, spec.chat_template)


def _given(
    name: str | os.PathLike[str], role: str, models: Path | None, announce: Callable[[str], None]
) -> Path:
    """The file that a path, a file on the hub or a pair's name means; a file that exists wins."""
    text = Path(name).as_posix() if isinstance(name, Path) else os.fspath(name)
    if text.startswith(sources.HUB_PREFIX) and not os.path.lexists(text):
        return hub_cache.locate(sources.parse_hub(text))
    if os.path.lexists(text) or not registry.is_pair_name(text):
        return Path(name)
    try:
        spec = registry.load_registry(models).pair(text)
    except UsageError as error:
        raise ModelError(f"there is no file {text}, and {error}") from None
    return prepare(spec.target if role == "target" else spec.draft, announce, spec.name)


def prepare(
    source: sources.Source, announce: Callable[[str], None] = log.info, pull: str | None = None
) -> Path:
    """The file of a source, requantised first if it has to be. Nothing is downloaded.

    pull: what to pull when it is not there, for the message. Raises ModelError.
    """
    if isinstance(source, sources.HubFile):
        return hub_cache.locate(source, pull)
    if not isinstance(source, sources.Requantised):
        return sources.locate(source)
    original = prepare(source.source, announce, pull)
    path = sources.copy_path(source, original)
    if not path.is_file():
        announce(f"making {path} once: {sources.describe(source)}")
        llama.requantise(original, path, source.type)
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
    verifier: str | None = None,
    ctx_size: int | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    threads: int | None = None,
    threads_batch: int | None = None,
    gpu_layers: int = -1,
    gpu_layers_draft: int = -1,
    parallel: int | None = 1,
    most_parallel: int = parallelism.MOST,
    announce: Callable[[str], None] = log.info,
) -> Pair:
    """Load a pair of models: `load("smollm2")`, or `load(model="big.gguf", draft="small.gguf")`.

    drafter: "model", "lookup" or "none"; "auto" uses what pays of the first two. draft_tokens: how
    many tokens to draft a round, 0 to 16; None decides from measured times and acceptances. With a
    number, "auto" is the draft model alone. draft_temperature: the draft's own sampling
    temperature, the target's when None. verifier: "block", "token" or "coupled"; None is coupled
    where an answer's seed is named and block elsewhere. ctx_size: tokens that prompt and answer may
    have together; 4096 or what the model was trained for when None, the latter when 0. parallel:
    how many answers `specllama.parallel` works on at once, each in a context of that size; None
    takes what is fastest here, at most `most_parallel` and what fits into half of the free memory.

    Raises UsageError for a wrong option, ModelError for files that cannot be used or do not fit
    together.
    """
    _check_options(drafter, verifier, draft_temperature)
    check_sizes(ctx_size, batch_size)
    for count, name in ((threads, "threads"), (threads_batch, "threads_batch")):
        if count is not None and not 1 <= count <= MAX_THREADS:
            raise UsageError(f"{name} must be between 1 and {MAX_THREADS}, not {count}")
    for count, name in ((gpu_layers, "gpu_layers"), (gpu_layers_draft, "gpu_layers_draft")):
        if count < -1:
            raise UsageError(f"{name} must be -1 (all of them) or more, not {count}")
    if parallel is not None and not 1 <= parallel <= MAX_PARALLEL:
        raise UsageError(f"parallel must be between 1 and {MAX_PARALLEL}, not {parallel}")
    if draft_tokens is not None:
        FixedLength(draft_tokens)  # refuses what is out of range before anything is loaded
    if drafter == "model" and model is not None and draft is None:
        raise UsageError("the model drafter needs a draft model; name one with --model-draft")
    files = find_files(
        pair,
        model=model,
        draft=draft,
        models=models,
        need_draft=drafter in ("auto", "model") and draft_tokens != 0,
        announce=announce,
    )
    decoding = (batch_size, default_threads() if threads is None else threads, threads_batch)
    with ExitStack() as stack:
        target = stack.enter_context(open_model(files.target, gpu_layers))
        n_ctx = context_size(ctx_size, target)
        memo = memo_path(files, decoding, (gpu_layers, gpu_layers_draft))
        n_slots = parallel or _slots(target, n_ctx, decoding, memo, most_parallel)
        if n_slots > 1:
            single = memo
            memo = memo_path(files, decoding, (gpu_layers, gpu_layers_draft), n_slots)
            parallelism.grown(memo, single)
        notices = _notices(target, n_ctx, max(gpu_layers, gpu_layers_draft))
        notices += _crowded(max(threads or 1, threads_batch or 1))
        refusal = rollback_refusal(target, "target")
        if refusal and drafter != "none" and draft_tokens != 0:
            notices.append(f"{refusal}, so speculation is off and decoding is plain")
        draft_lm, draft_tokenizer, n_tokens_draft, shared = None, None, None, 0
        if files.draft is not None and not refusal:
            small = stack.enter_context(open_model(files.draft, gpu_layers_draft))
            shared = vocabulary.require_compatible(target.tokenizer, small.tokenizer)
            size, problems = _draft_size(small, n_ctx)
            notices += problems
            if size:
                draft_lm = CachedLM(
                    stack.enter_context(open_context(small, size, *decoding, n_slots=n_slots))
                )
                draft_tokenizer = small.tokenizer
                n_tokens_draft = vocabulary.real_tokens(small.tokenizer)
        target_lm = CachedLM(
            stack.enter_context(open_context(target, n_ctx, *decoding, n_slots=n_slots))
        )
        speculation = _speculation(
            target_lm, draft_lm, shared, memo, drafter, draft_tokens, draft_temperature
        )
        stack.callback(speculation.save)
        closing = stack.pop_all()

        def auto() -> tuning.Speculation:
            kind = "lookup" if drafter == "none" else drafter
            what_pays = _speculation(
                target_lm, draft_lm, shared, memo, kind, None, draft_temperature
            )
            closing.callback(what_pays.save)
            return what_pays

        return Pair(
            target_lm,
            target.tokenizer,
            speculation,
            verifier,
            n_tokens=vocabulary.real_tokens(target.tokenizer),
            draft=draft_lm,
            draft_tokenizer=draft_tokenizer,
            n_tokens_draft=n_tokens_draft,
            chat_template=files.chat_template or target.chat_template,
            files=tuple(path for path in (files.target, files.draft) if path is not None),
            auto=auto,
            notices=notices,
            close=closing.close,
        )


def _slots(
    target: llama.Model,
    n_ctx: int,
    decoding: tuple[int, int, int | None],
    memo: Path,
    most: int,
) -> int:
    """The number of answers at once that is fastest, and fits into half of the free memory."""
    size = min(_PROBED, target.n_ctx_train)
    with open_context(target, size, *decoding, n_outputs=parallelism.MOST) as probe:
        costs = parallelism.measured(CachedLM(probe), memo)
        sizes = {kind: 0.0 for _, kind, _ in probe.buffers}
        for _, kind, mib in probe.buffers:
            sizes[kind] += mib * 2**20
    slot_bytes = sizes.get("KV", 0.0) * n_ctx / size + sizes.get("RS", 0.0)
    free = memory.available_bytes()
    if free is not None and slot_bytes and not llama.supports_gpu():
        most = min(most, int(free / 2 / slot_bytes))
    return parallelism.choose(costs, max(1, most))


def _draft_size(small: llama.Model, n_ctx: int) -> tuple[int, list[str]]:
    """Tokens of the draft's context, 0 when it cannot be used, and what the user should know."""
    if refusal := rollback_refusal(small, "draft"):
        return 0, [f"{refusal}, so it proposes nothing"]
    if small.n_ctx_train >= n_ctx:
        return n_ctx, []
    return small.n_ctx_train, [
        f"the draft {small.name} was trained for {small.n_ctx_train} tokens, so it proposes "
        "nothing beyond them"
    ]


def _speculation(
    target: CachedLM,
    draft: CachedLM | None,
    n_shared: int,
    memo: Path,
    drafter: str,
    draft_tokens: int | None,
    draft_temperature: float | None,
) -> tuning.Speculation:
    """The way to speculate that the options ask for, as far as the models allow it."""
    if drafter == "none" or draft_tokens == 0 or not target.can_rollback:
        return tuning.plain()
    if drafter == "model" and draft is None:  # refused, which the notices say
        return tuning.plain()
    if draft is not None and draft_tokens is not None:
        return tuning.fixed(draft, n_shared, draft_tokens, draft_temperature)
    return tuning.measured(
        target,
        draft,
        n_shared,
        memo,
        lookup=drafter != "model",
        limit=MAX_DRAFT_TOKENS if draft_tokens is None else draft_tokens,
        temperature=draft_temperature,
    )


def memo_path(
    files: Files,
    decoding: tuple[int, int, int | None],
    gpu_layers: tuple[int, int],
    n_slots: int = 1,
) -> Path:
    """Where the measured costs of a pair with these settings are kept."""
    several = {"n_slots": n_slots} if n_slots > 1 else {}
    name = calibration.identity(
        [path for path in (files.target, files.draft) if path is not None],
        decoding=decoding,
        gpu_layers=gpu_layers,
        library=llama.version(),
        **several,
    )
    return cache_folder() / "costs" / f"{name}.json"


def _crowded(threads: int) -> list[str]:
    """What the user should know of more threads than processors."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every platform
        usable = os.cpu_count() or threads
    if threads <= usable:
        return []
    return [
        f"{threads} threads share the {usable} processors that this process may use, and wait for "
        "each other; fewer are faster (--threads)"
    ]


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
    *,
    n_slots: int = 1,
    n_outputs: int = MAX_DRAFT_TOKENS + 1,
) -> llama.Context:
    """A context that is as large as speculation needs and no larger, to be closed."""
    if n_slots > 1:
        n_outputs = max(_SHARED_OUTPUTS, n_slots)
    return llama.Context(
        model,
        n_ctx=n_ctx,
        n_batch=max(n_batch, n_slots),
        n_outputs=n_outputs,
        n_slots=n_slots,
        threads=threads,
        threads_batch=threads_batch,
    )


def _check_options(drafter: str, verifier: str | None, draft_temperature: float | None) -> None:
    if drafter not in ("auto", "model", "lookup", "none"):
        raise UsageError(f'there is no drafter "{drafter}"; use auto, model, lookup or none')
    if verifier is not None and verifier not in VERIFIERS:
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
    if model.can_rollback:
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
