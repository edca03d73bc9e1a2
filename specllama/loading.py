"""From names and files to a ready pair; only this file sees the registry, llama.cpp and the core.

Every check that can be made before the first token is made here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specllama import (
    calibration,
    estimate,
    header,
    hub_cache,
    llama,
    memory,
    notes,
    pairing,
    parallelism,
    processor,
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
from specllama.parts import first_part
from specllama.placement import Cache, Decoding, Placement
from specllama.vocabulary_map import VocabularyMap

log = logging.getLogger(__name__)

Model = llama.Model  # for annotations of those who get one from here

DEFAULT_PAIR = "smollm2"
DEFAULT_CTX_SIZE = 4096
DEFAULT_BATCH_SIZE = 512
MAX_PARALLEL = 256  # sequences of one context in llama.cpp
MAX_THREADS = 512  # llama.cpp crashes far above its own limit instead of refusing
# Rows of logits that several sequences share in one decode: a guess of each of 32.
_SHARED_OUTPUTS = 64
# Of a target's recurrent state: as many as draft tokens that a round may have there.
SNAPSHOTS = 8
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
    if os.path.lexists(text):
        return first_part(Path(name))
    if not registry.is_pair_name(text):
        return first_part(Path(os.path.expanduser(name)))
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
    gpu_layers: int | None = None,
    gpu_layers_draft: int | None = None,
    ctx_size_draft: int | None = None,
    threads_draft: int | None = None,
    placement: Placement = Placement(),
    devices_draft: tuple[str, ...] | None = None,
    cache: Cache = Cache(),
    cache_draft: Cache = Cache(),
    force: bool = False,
    parallel: int | None = 1,
    most_parallel: int = parallelism.MOST,
    most_ctx: int | None = None,
    announce: Callable[[str], None] = log.info,
) -> Pair:
    """Load a pair of models: `load("smollm2")`, or `load(model="big.gguf", draft="small.gguf")`.

    drafter: "model", "lookup" or "none"; "auto" uses what pays of the first two. draft_tokens: how
    many tokens to draft a round, 0 to 16; None decides from measured times and acceptances. With a
    number, "auto" is the draft model alone. draft_temperature: the draft's own sampling
    temperature, the target's when None. verifier: "block", "token" or "coupled"; None is coupled
    where an answer's seed is named and block elsewhere. ctx_size: tokens that prompt and answer may
    have together; 4096 or what the model was trained for when None, the latter when 0. The draft
    takes at most `ctx_size_draft`, and sees the last of what is longer. placement, cache: where the
    models lie and how they keep keys and values; the draft may have other layers, devices and
    cache types. force: go on when memory seems too small. parallel: how many answers
    `specllama.parallel` works on at once, each in a context of that size; None takes what is
    fastest here, at most `most_parallel` and what fits into half of the free memory.
    most_ctx: tokens that are enough, where ctx_size is None.

    Raises UsageError for a wrong option, ModelError for files that cannot be used or do not fit
    together.
    """
    _check_options(drafter, verifier, draft_temperature)
    check_sizes(ctx_size, batch_size)
    check_sizes(ctx_size_draft, batch_size)
    given = {"threads": threads, "threads_batch": threads_batch, "threads_draft": threads_draft}
    _check_counts(
        {name: (1, count, MAX_THREADS) for name, count in given.items()}
        | {"parallel": (1, parallel, MAX_PARALLEL)}
    )
    layers = {"gpu_layers": gpu_layers, "gpu_layers_draft": gpu_layers_draft}
    for name, count in layers.items():
        if count is not None and count < -1:
            raise UsageError(f"{name} must be -1 (all of them) or more, not {count}")
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
    n_snapshots = SNAPSHOTS if draft_tokens is None else draft_tokens
    if drafter == "none":
        n_snapshots = 0
    decoding = Decoding(
        batch_size, threads or default_threads(), threads_batch, cache, n_snapshots
    )
    decoding_draft = Decoding(
        batch_size, threads_draft or decoding.threads, threads_draft or threads_batch, cache_draft
    )
    where = placement if gpu_layers is None else replace(placement, gpu_layers=gpu_layers)
    where_draft = replace(
        placement,
        gpu_layers=placement.gpu_layers if gpu_layers_draft is None else gpu_layers_draft,
        devices=placement.devices if devices_draft is None else devices_draft,
    )
    settings = (decoding, decoding_draft, where, where_draft)
    plan = _Plan(settings, (ctx_size, ctx_size_draft), parallel or 1, drafter, force)
    files, notices = _fitting(files, plan)
    with ExitStack() as stack:
        target = stack.enter_context(open_model(files.target, where))
        n_ctx = context_size(ctx_size, target)
        if ctx_size is None and most_ctx is not None:
            n_ctx = min(n_ctx, most_ctx)
        n_slots, memo = _slots(target, files, plan, n_ctx, parallel, most_parallel)
        layout = [notes.layout("target", target, decoding)]
        notices += notes.of_target(target, n_ctx)
        notices += notes.of_options(where, where_draft, cache, cache_draft)
        notices += notes.of_threads(max(count or 1 for count in given.values()))
        refusal = rollback_refusal(target, n_slots)
        if refusal and drafter != "none" and draft_tokens != 0:
            notices.append(f"{refusal}, so speculation is off and decoding is plain")
        small = _Draft()
        if files.draft is not None and not refusal:
            small = _open_draft(stack, files.draft, plan, target, n_ctx, n_slots)
        notices += small.notices
        layout += small.layout
        target_lm = CachedLM(
            stack.enter_context(open_context(target, n_ctx, decoding, n_slots=n_slots))
        )
        speculate = partial(_speculation, target_lm, small, memo, temperature=draft_temperature)
        speculation = speculate(drafter, draft_tokens)
        stack.callback(speculation.save)
        closing = stack.pop_all()

        def auto() -> tuning.Speculation:
            what_pays = speculate("lookup" if drafter == "none" else drafter, None)
            closing.callback(what_pays.save)
            return what_pays

        return Pair(
            target_lm,
            target.tokenizer,
            speculation,
            verifier,
            n_tokens=vocabulary.real_tokens(target.tokenizer),
            draft=small.lm,
            draft_tokenizer=small.tokenizer,
            n_tokens_draft=small.n_tokens,
            chat_template=files.chat_template or target.chat_template,
            files=tuple(path for path in (files.target, files.draft) if path is not None),
            auto=auto,
            notices=notices,
            layout=layout,
            close=closing.close,
        )


def _slots(
    target: llama.Model,
    files: Files,
    plan: _Plan,
    n_ctx: int,
    parallel: int | None,
    most: int,
) -> tuple[int, Path]:
    """How many answers are worked on at once, and where their costs are kept."""
    memo = memo_path(files, plan.settings)
    n_slots = parallel or _fastest(target, n_ctx, plan.settings[0], memo, most)
    if n_slots == 1:
        return 1, memo
    shared = memo_path(files, plan.settings, n_slots)
    parallelism.grown(shared, memo)
    return n_slots, shared


def _fastest(
    target: llama.Model, n_ctx: int, decoding: Decoding, memo: Path, most: int
) -> int:
    """The number of answers at once that is fastest, and fits into half of the free memory."""
    size = min(_PROBED, target.n_ctx_train)
    with open_context(target, size, decoding, n_outputs=parallelism.MOST) as probe:
        costs = parallelism.measured(CachedLM(probe), memo)
        sizes = {kind: 0.0 for _, kind, _ in probe.buffers}
        for _, kind, mib in probe.buffers:
            sizes[kind] += mib * 2**20
    slot_bytes = sizes.get("KV", 0.0) * n_ctx / size + sizes.get("RS", 0.0)
    free = memory.available_bytes()
    if free is not None and slot_bytes and not llama.supports_gpu():
        most = min(most, int(free / 2 / slot_bytes))
    return parallelism.choose(costs, max(1, most))


def _other_tokens(small: llama.Model, joint: pairing.Joint) -> list[str]:
    """What the user should know of a draft with other tokens."""
    if joint.is_same:
        return []
    return [
        f"the draft {small.name} has other tokens than the target: it shares {joint.n_paired} of "
        f"its {joint.n_draft}, which make up {100 * joint.coverage:.1f} % of ordinary text, and "
        "proposes no others"
    ]


@dataclass(frozen=True)
class _Draft:
    """A draft model that is ready, or none. shared: how it reads the target's tokens."""

    lm: CachedLM | None = None
    tokenizer: llama.Tokenizer | None = None
    n_tokens: int | None = None
    shared: VocabularyMap | int = 0
    notices: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()


def _open_draft(
    stack: ExitStack, path: Path, plan: _Plan, target: llama.Model, n_ctx: int, n_slots: int
) -> _Draft:
    """The draft over a context of its own, or without one where the memory is not there.

    Raises ModelError for the latter when the draft model alone was asked for, and when the two
    models have too little in common.
    """
    _, decoding, _, where = plan.settings
    small = stack.enter_context(open_model(path, where))
    joint = pairing.join(target.tokenizer, small.tokenizer)
    size = min(n_ctx, plan.ctx_sizes[1] or small.n_ctx_train)
    notices = [
        *_other_tokens(small, joint),
        *notes.of_draft(small, size),
        *_short_sight(small, size, n_ctx, plan.ctx_sizes[1] is not None),
    ]
    try:
        lm = CachedLM(open_context(small, size, decoding, n_slots=n_slots))
    except ModelError as error:
        if plan.drafter == "model":
            raise
        small.close()
        return _Draft(notices=(*notices, f"the draft is left out: {error}"))
    return _Draft(
        lm,
        small.tokenizer,
        vocabulary.real_tokens(small.tokenizer),
        joint.map,
        tuple(notices),
        (notes.layout("draft", small, decoding),),
    )


def _short_sight(small: llama.Model, size: int, n_ctx: int, was_asked: bool) -> list[str]:
    """What the user should know of a draft whose context is smaller than the target's."""
    if size == n_ctx:
        return []
    reason = (
        f"has a context of {size} tokens" if was_asked else f"was trained for {size} tokens"
    )
    return [
        f"the draft {small.name} {reason}, so of longer texts it sees only the last "
        f"{size // 2} to {size}"
    ]


@dataclass(frozen=True)
class _Plan:
    """What the memory that a pair needs depends on."""

    settings: tuple[Decoding, Decoding, Placement, Placement]
    ctx_sizes: tuple[int | None, int | None]
    n_slots: int
    drafter: str
    force: bool


def _fitting(files: Files, plan: _Plan) -> tuple[Files, list[str]]:
    """The files without a draft that memory cannot hold, and what the user should know.

    Raises ModelError when memory cannot hold the rest.
    """
    paths = [path for path in (files.target, files.draft) if path is not None]
    decoding, decoding_draft, where, where_draft = plan.settings
    for path in paths:
        header.check_file(path)
    if estimate.is_plainly_enough(paths, plan.ctx_sizes[0], decoding):
        return files, []
    size = partial(estimate.measure, n_outputs=MAX_DRAFT_TOKENS + 1, n_slots=plan.n_slots)
    free = estimate.free_memory()
    with llama.Outline(files.target, placement=where) as outline:
        n_ctx = context_size(plan.ctx_sizes[0], outline)
        parts = [size(outline, "target", n_ctx, decoding)]
    short = estimate.shortage(parts, free)
    if short is None and files.draft is not None:
        with llama.Outline(files.draft, placement=where_draft) as outline:
            n_ctx_draft = min(n_ctx, plan.ctx_sizes[1] or outline.n_ctx_train)
            parts.append(size(outline, "draft", n_ctx_draft, decoding_draft))
        short = estimate.shortage(parts, free)
    for part in parts:
        log.info("%s: %s", part.name, part.describe())
    if short is None:
        return files, []
    if plan.force:
        return files, [f"{estimate.excess(parts, short)}, and --force goes on"]
    if len(parts) > 1 and plan.drafter != "model":
        reason = estimate.excess(parts, short)
        return replace(files, draft=None), [f"{reason}, so the draft is left out"]
    raise ModelError(estimate.refusal(parts, short))


def _speculation(
    target: CachedLM,
    small: _Draft,
    memo: Path,
    drafter: str,
    draft_tokens: int | None,
    *,
    temperature: float | None,
) -> tuning.Speculation:
    """The way to speculate that the options ask for, as far as the models allow it."""
    if drafter == "none" or draft_tokens == 0 or target.max_draft == 0:
        return tuning.plain()
    if drafter == "model" and small.lm is None:  # which the notices say
        return tuning.plain()
    if small.lm is not None and draft_tokens is not None:
        return tuning.fixed(small.lm, small.shared, draft_tokens, temperature)
    return tuning.measured(
        target,
        small.lm,
        small.shared,
        memo,
        lookup=drafter != "model",
        limit=MAX_DRAFT_TOKENS if draft_tokens is None else draft_tokens,
        temperature=temperature,
    )


def memo_path(
    files: Files,
    settings: tuple[Decoding, Decoding, Placement, Placement],
    n_slots: int = 1,
) -> Path:
    """Where the measured costs of a pair with these settings are kept."""
    several = {"n_slots": n_slots} if n_slots > 1 else {}
    name = calibration.identity(
        [path for path in (files.target, files.draft) if path is not None],
        settings=settings,
        library=llama.version(),
        **several,
    )
    return cache_folder() / "costs" / f"{name}.json"


def open_model(path: Path, placement: Placement = Placement()) -> llama.Model:
    """The weights of a GGUF file, to be closed. Raises ModelError."""
    return llama.Model(path, placement=placement)


def open_context(
    model: llama.Model,
    n_ctx: int,
    decoding: Decoding = Decoding(),
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
        n_batch=max(decoding.batch_size, n_slots),
        n_outputs=n_outputs,
        n_slots=n_slots,
        threads=decoding.threads,
        threads_batch=decoding.threads_batch,
        kv_type=decoding.cache.type_k,
        kv_type_v=decoding.cache.type_v,
        flash_attention=decoding.cache.flash,
        n_snapshots=decoding.n_snapshots if n_slots == 1 else 0,
        full_window=decoding.cache.full_window,
    )


def _check_counts(counts: dict[str, tuple[int, int | None, int]]) -> None:
    """Raises UsageError for a number that is given and not between the other two."""
    for name, (least, count, most) in counts.items():
        if count is not None and not least <= count <= most:
            raise UsageError(f"{name} must be between {least} and {most}, not {count}")


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


def rollback_refusal(target: llama.Model, n_slots: int) -> str | None:
    """Why rejected tokens are not taken back from a target's cache, or None when they are."""
    if not target.has_state or n_slots == 1:
        return None
    return (
        f"the target {target.name} keeps a {target.cache_kind} state, which takes back rejected "
        "tokens for one answer at a time only"
    )


def default_threads() -> int:
    """One thread per physical core that this process may use."""
    return processor.cores()
