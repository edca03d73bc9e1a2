"""A pair on the test stand: its contexts under meters, and the ways to decode with them."""

from __future__ import annotations

from functools import partial

from specllama import calibration, tuning
from specllama.bench import PLAIN, Answer, Decodes, Variant
from specllama.costs import Budget, CostTable
from specllama.drafting import ModelDrafter
from specllama.generation import Pair
from specllama.lm import CachedLM
from specllama.lookahead import MAX_DRAFT_TOKENS, MeasuredLength
from specllama.lookup import LookupDrafter
from specllama.sampling import SamplingParams
from specllama.tuning import Speculation

_MOST_TIMED = 64  # decodes of more rows are prompts, not rounds
_LONGEST_FIXED = 15


class Meter:
    """Watches the decodes of one model, and keeps a table of what they cost.

    only_full: the table counts decodes in which every row gives logits, as the target's do. The
    table is this meter's own; who was told of decodes before still is, in answers that it may
    learn from.
    """

    def __init__(self, lm: CachedLM, most_rows: int, only_full: bool) -> None:
        self.lm = lm
        self.costs = CostTable()
        self.decodes = Decodes()
        self._only_full = only_full
        self._learner = self._told = lm.on_decode
        lm.on_decode = None
        calibration.measure(lm, self.costs, most_rows, all_logits=only_full)
        lm.on_decode = self._learner

    def start(self, learning: bool) -> None:
        """An answer begins, from an empty cache."""
        self.lm.forget(0)
        self.decodes = Decodes()
        self._told = self._learner if learning else None
        self.lm.on_decode = self._count

    def stop(self) -> Decodes:
        """The answer is over; its decodes."""
        self.lm.on_decode = self._learner
        return self.decodes

    def _count(self, n_rows: int, n_logits: int, ms: float) -> None:
        if n_logits > 0:
            self.decodes.add(n_rows, ms)
            if n_rows <= _MOST_TIMED and (n_rows == n_logits or not self._only_full):
                self.costs.record(n_rows, ms)
        if self._told is not None:
            self._told(n_rows, n_logits, ms)


class Stand:
    """A pair on the test stand: its contexts with a meter on each, and the ways to use them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._own = pair.speculation
        self.target = Meter(pair.target, min(MAX_DRAFT_TOKENS + 1, pair.target.max_rows), True)
        draft = _draft_model(self._own)
        self.draft = None if draft is None else Meter(draft, _MOST_TIMED, False)

    def plain(self) -> Variant:
        """Decoding without any draft, through the same loop."""
        return Variant(PLAIN, partial(self._answer, tuning.plain(), False), 0)

    def own(self, draft_tokens: int | None) -> Variant:
        """The pair's way to speculate. draft_tokens: the fixed number that it was loaded with."""
        if draft_tokens is None or self._own.at_length is None:
            return Variant("auto", partial(self._answer, self._own, True))
        return self.fixed(draft_tokens)

    def fixed(self, n_tokens: int) -> Variant:
        """The draft model with always so many tokens, or lookup with as many as it finds."""
        if self._own.at_length is None:
            speculation = _longest_lookup(n_tokens)
            return Variant(
                f"up to {n_tokens}", partial(self._answer, speculation, False), n_tokens
            )
        speculation = self._own.at_length(n_tokens)
        answer = partial(self._answer, speculation, False)
        return Variant(f"fixed {n_tokens}", answer, n_tokens, must_draft=True)

    def variants(self, draft_tokens: int | None, all_lengths: bool) -> list[Variant]:
        """Plain decoding, the pair's own way, and if wanted every fixed number up to 15."""
        chosen = [self.plain(), self.own(draft_tokens)]
        if all_lengths:
            known = {variant.name for variant in chosen}
            fixed = (self.fixed(n) for n in range(1, _LONGEST_FIXED + 1))
            chosen += [variant for variant in fixed if variant.name not in known]
        return chosen

    def break_even(self) -> float | None:
        """The acceptance from which on the draft model pays; inf if never, None if not known."""
        if self.draft is None:
            return None
        policy = MeasuredLength(Budget(self.target.costs), self.draft.costs)
        return policy.break_even() if policy.is_measured else None

    def _answer(
        self,
        speculation: Speculation,
        learning: bool,
        prompt: str,
        params: SamplingParams,
        n_tokens: int,
        seed: int,
    ) -> Answer:
        meters = [meter for meter in (self.target, self.draft) if meter is not None]
        for meter in meters:
            meter.start(learning)
        self.pair.speculation = speculation
        try:
            stats = None
            for chunk in self.pair.generate(
                prompt, params, max_tokens=n_tokens, seed=seed, ignore_eos=True
            ):
                stats = chunk.stats
        finally:
            self.pair.speculation = self._own
            decodes = [meter.stop() for meter in meters]
        assert stats is not None
        return Answer(stats, *decodes)


def _draft_model(speculation: Speculation) -> CachedLM | None:
    if speculation.at_length is None:
        return None
    drafter = speculation.at_length(1).drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter.lm


def _longest_lookup(n_tokens: int) -> Speculation:
    """Lookup that proposes all it finds, up to a number: where rows are free, more always pays."""
    budget = Budget(CostTable({1: [1.0], _MOST_TIMED: [1.0]}))
    return Speculation(LookupDrafter(budget, n_tokens), "lookup", budget)
