"""What `specllama check` does: every rule that a pair must pass, what it needs, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from specllama import estimate, memory, pairing, vocabulary
from specllama.errors import ModelError
from specllama.loading import (
    DEFAULT_BATCH_SIZE,
    SNAPSHOTS,
    Files,
    Model,
    check_sizes,
    context_size,
    open_context,
    open_model,
)
from specllama.lookahead import MAX_DRAFT_TOKENS
from specllama.placement import Decoding

_MIB = 1024 * 1024
_SMALL = 64  # tokens, of a context that only tells what its cache can do


@dataclass(frozen=True)
class Finding:
    """One rule and its result. required: whether the pair is refused when it fails."""

    name: str
    ok: bool
    detail: str
    required: bool = True


@dataclass(frozen=True)
class Report:
    """All findings, and in one sentence why the pair is refused, or None."""

    findings: tuple[Finding, ...]
    refusal: str | None


def examine(
    files: Files, ctx_size: int | None = None, batch_size: int = DEFAULT_BATCH_SIZE
) -> Report:
    """Load both models and hold every rule against them.

    Raises UsageError for a wrong size, ModelError for a bad file.
    """
    check_sizes(ctx_size, batch_size)
    with ExitStack() as stack:
        target = stack.enter_context(open_model(files.target))
        models = [("target", target)]
        if files.draft is not None:
            models.append(("draft", stack.enter_context(open_model(files.draft))))
        findings = [_file(role, model) for role, model in models]
        refusal = None
        if len(models) > 1:
            tokens, refusal = _tokens(target, models[1][1])
            findings += tokens
        for role, model in models:
            findings.append(_cache(role, model))
        findings += _memory(models, context_size(ctx_size, target), batch_size)
        return Report(tuple(findings), refusal)


def _tokens(target: Model, draft: Model) -> tuple[list[Finding], str | None]:
    """How the vocabularies compare and what is shared, and why they cannot work together."""
    rules = vocabulary.compare(target.tokenizer, draft.tokenizer).rules
    try:
        joint, refusal = pairing.join(target.tokenizer, draft.tokenizer), None
    except ModelError as error:
        joint, refusal = None, str(error)
    # What differs is only worth a note where the rest can be paired.
    findings = [
        Finding(rule.name, rule.ok, rule.detail, rule.required and joint is None)
        for rule in rules
    ]
    if joint is not None:
        findings.append(Finding("shared tokens", joint.is_same, joint.detail, required=False))
    return findings, refusal


def _file(role: str, model: Model) -> Finding:
    detail = (
        f"{model.name}: {model.description}, {model.n_bytes / 1e9:.2f} GB, "
        f"trained for {model.n_ctx_train} tokens"
    )
    if model.notice:
        return Finding(f"{role} file", False, f"{detail}; {model.notice}", required=False)
    return Finding(f"{role} file", True, detail)


def _cache(role: str, model: Model) -> Finding:
    """How rejected tokens are taken back from it."""
    how = "can be taken back"
    if model.has_state:
        with open_context(model, _SMALL, Decoding(n_snapshots=1)) as context:
            has_snapshots = context.n_tentative > 0
        how = "are taken back "
        how += "with snapshots of its state" if has_snapshots else "from a checkpoint of its state"
    return Finding(f"{role} cache", True, f"{model.cache_kind}: rejected tokens {how}")


def _memory(models: Sequence[tuple[str, Model]], n_ctx: int, n_batch: int) -> list[Finding]:
    """What llama.cpp would allocate for each model with this context, by its own account."""
    findings, total = [], 0.0
    for role, model in models:
        size = n_ctx if role == "target" else min(n_ctx, model.n_ctx_train)
        decoding = Decoding(n_batch, n_snapshots=SNAPSHOTS if role == "target" else 0)
        part = estimate.of_file(model.path, role, size, decoding, MAX_DRAFT_TOKENS + 1)
        total += sum(map(part.on, part.places)) / _MIB
        findings.append(Finding(f"{role} memory", True, part.describe()))
    present = memory.physical_bytes()
    detail = f"about {total:.0f} MiB"
    if present is not None:
        detail += f" of this machine's {present / _MIB:.0f} MiB"
    enough = present is None or total <= present / _MIB
    return [*findings, Finding("memory", enough, detail, required=False)]


def table(report: Report) -> str:
    """The findings, a line each."""
    width = max(len(found.name) for found in report.findings)
    marks = {(True, True): "ok", (True, False): "ok", (False, True): "NO", (False, False): "note"}
    return "\n".join(
        f"{marks[found.ok, found.required]:<5}{found.name:<{width}}  {found.detail}"
        for found in report.findings
    )
