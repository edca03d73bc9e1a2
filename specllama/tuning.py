"""From loaded models to a drafter that fits this machine: which one, how long, and why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specllama import calibration
from specllama.calibration import Knowledge
from specllama.costs import Budget, CostTable
from specllama.drafting import Drafter, ModelDrafter, NullDrafter
from specllama.lm import CachedLM
from specllama.lookahead import MAX_DRAFT_TOKENS, FixedLength, MeasuredLength
from specllama.lookup import BestDrafter, LookupDrafter
from specllama.shared_length import SharedLength
from specllama.vocabulary_map import VocabularyMap

log = logging.getLogger(__name__)

# Decodes of more rows are prompts, not rounds.
_MOST_TIMED = 64


@dataclass(frozen=True)
class Speculation:
    """How a pair speculates.

    budget: for the loop to report rounds to, or None where nothing is measured. verdict: in one
    sentence, what speculation is worth now. save: keeps what was learnt for the next time.
    at_length: the same draft model with so many draft tokens every round, to compare with, and with
    a `temperature` of its own if one is given.
    """

    drafter: Drafter
    name: str
    budget: Budget | None = None
    verdict: Callable[[], str | None] = lambda: None
    save: Callable[[], None] = lambda: None
    at_length: Callable[..., Speculation] | None = None


def plain() -> Speculation:
    """No speculation at all."""
    return Speculation(NullDrafter(), "none")


def fixed(
    draft: CachedLM,
    vocabulary: VocabularyMap | int,
    n_tokens: int,
    temperature: float | None = None,
) -> Speculation:
    """The draft model with a fixed number of draft tokens."""
    if n_tokens == 0:
        return plain()
    model = ModelDrafter(draft, FixedLength(n_tokens), vocabulary, temperature)
    at_length = partial(fixed, draft, vocabulary, temperature=temperature)
    return Speculation(model, "model", at_length=at_length)


def measured(
    target: CachedLM,
    draft: CachedLM | None,
    vocabulary: VocabularyMap | int,
    memo: Path,
    *,
    lookup: bool,
    limit: int = MAX_DRAFT_TOKENS,
    temperature: float | None = None,
) -> Speculation:
    """Draft lengths from measured costs and acceptances; measured now if `memo` has none yet.

    draft: None to propose by lookup alone. lookup: whether repetitions are proposed too; not where
    several sequences want drafts of one length, see `SharedLength`.
    """
    if target.n_slots > 1 and target.is_split:
        if draft is None:
            return plain()
        return _shared(target, draft, vocabulary, memo, limit, temperature)
    known = calibration.recall(memo) or Knowledge()
    _calibrate(target, draft, known)
    target.on_decode = _recorder(known.target, only_full=True)
    budget = Budget(known.target, redoes=target.redoes)
    limit = min(limit, target.max_draft)
    guesses = LookupDrafter(budget, limit)
    if draft is None:
        return Speculation(
            guesses, "lookup", budget, save=lambda: calibration.store(memo, known)
        )
    draft.on_decode = _recorder(known.draft, only_full=False)
    policy = MeasuredLength(
        budget, known.draft, known.predictor, known.forecast, known.worth, limit
    )
    model = ModelDrafter(draft, policy, vocabulary, temperature)

    def save() -> None:
        known.forecast, known.worth = policy.forecast, policy.worth
        calibration.store(memo, known)

    at_length = partial(fixed, draft, vocabulary, temperature=temperature)
    if not lookup:
        return Speculation(model, "model", budget, lambda: verdict(policy), save, at_length)
    both = BestDrafter(guesses, model, policy)
    return Speculation(
        both, "model and lookup", budget, lambda: verdict(policy), save, at_length
    )


def _shared(
    target: CachedLM,
    draft: CachedLM,
    vocabulary: VocabularyMap | int,
    memo: Path,
    limit: int,
    temperature: float | None,
) -> Speculation:
    """One draft length for all sequences of a round."""
    known = calibration.recall(memo) or Knowledge()
    _calibrate(target, draft, known)
    target.on_decode = _recorder(known.target, only_full=True)
    draft.on_decode = _recorder(known.draft, only_full=False)
    budget = Budget(known.target)
    policy = SharedLength(budget, known.draft, known.forecast, limit)

    def save() -> None:
        known.forecast = policy.forecast
        calibration.store(memo, known)

    model = ModelDrafter(draft, policy, vocabulary, temperature)
    return Speculation(
        model, "model", budget, lambda: _shared_verdict(policy), save,
        partial(fixed, draft, vocabulary, temperature=temperature),
    )


def _shared_verdict(policy: SharedLength) -> str | None:
    """What the draft model is worth to several sequences, in one sentence."""
    if not policy.is_measured:
        return None
    n, costs = policy.budget.n_sequences, policy.budget.costs
    state = "on" if policy.is_on else "off"
    return (
        f"the draft model is {state}: {n} at once take {costs.ms(n):.1f} ms a token each, "
        f"{policy.draft.ms(n):.1f} ms a draft token, and acceptance is "
        f"{100 * policy.forecast:.0f} %"
    )


def _calibrate(target: CachedLM, draft: CachedLM | None, known: Knowledge) -> None:
    if not known.target.is_measured:
        log.info("measuring what a decode costs here, once for this pair")
        most = target.max_rows if target.n_slots > 1 else MAX_DRAFT_TOKENS + 1
        most = min(most, target.max_rows, target.max_draft + 1)
        calibration.measure(target, known.target, most, all_logits=True)
    if draft is None:
        return
    if known.draft.is_measured:
        # A draft that seems too dear is never run again, and its times would never be mended.
        calibration.refresh(draft, known.draft)
    else:
        calibration.measure(draft, known.draft, _MOST_TIMED, all_logits=False, seconds=1.0)


def _recorder(costs: CostTable, only_full: bool) -> Callable[[int, int, float], None]:
    """Keeps a cost table up to date. only_full: count decodes in which every row gives logits."""

    def record(n_rows: int, n_logits: int, ms: float) -> None:
        if n_logits > 0 and n_rows <= _MOST_TIMED and (n_rows == n_logits or not only_full):
            costs.record(n_rows, ms)

    return record


def verdict(policy: MeasuredLength) -> str | None:
    """What the draft model is worth here, in one sentence."""
    if not policy.is_measured:
        return None
    step, plain_ms = policy.draft.ms(1), policy.budget.costs.ms(1)
    pays_from = policy.break_even()
    times = f"a draft token takes {step:.1f} ms and a target token {plain_ms:.1f} ms"
    if pays_from > 1:
        return f"the draft model is off: {times}, so that even perfect drafts would not pay"
    state = "on" if policy.is_on else "off"
    return (
        f"the draft model is {state}: {times}, so drafting pays from an acceptance of about "
        f"{100 * pays_from:.0f} %, and it is {100 * policy.forecast:.0f} % now"
    )
