"""From measured answers to figures: medians and spreads, paired ratios, and what they mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from specllama.bench import PLAIN, Answer, Cell, Variant
from specllama.bench_stand import Stand
from specllama.costs import CostTable
from specllama.generation import Stats

# Ratios closer to 1 than this are told as no difference.
_NOTICEABLE = 0.02
# Where fewer rounds than this share drafted anything, speculation was off but for trials.
_ASIDE = 0.1


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, with the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """What one variant did in a cell.

    rates: tokens per second of the generation phase, by repetition. ratios: each over the rate of
    plain decoding in the same repetition. totals: the counts and times of all its answers. target,
    draft, python: shares of the generation phase spent in the target's decodes, in the draft's,
    and in everything else; None where that cannot be seen. predicted: the ratio that the costs of
    the decodes alone would give.
    """

    variant: str
    length: int | None
    rates: tuple[float, ...]
    ratios: tuple[float, ...]
    prompt_ms: Spread
    totals: Stats
    target: float | None
    draft: float | None
    python: float | None
    predicted: float | None

    @property
    def rate(self) -> Spread:
        """Of the rates."""
        return Spread.of(self.rates)

    @property
    def ratio(self) -> Spread:
        """Of the ratios; their median is not the ratio of the medians."""
        return Spread.of(self.ratios)

    @property
    def aside(self) -> float:
        """Share of the rounds in which nothing was drafted."""
        return self.totals.lengths.get(0, 0) / self.totals.rounds if self.totals.rounds else 1.0


@dataclass(frozen=True)
class Comparison:
    """A cell in figures, plain decoding first, and in one sentence what they say."""

    workload: str
    setting: str
    figures: tuple[Figures, ...]
    verdict: str

    @property
    def plain(self) -> Figures:
        """Plain decoding."""
        return self.figures[0]

    @property
    def own(self) -> Figures:
        """The way to speculate that is being judged."""
        return self.figures[1]

    def best_fixed(self) -> Figures | None:
        """The fixed number of draft tokens with the best median, plain decoding being none.

        None unless several were tried.
        """
        fixed = [found for found in self.figures if found.length is not None]
        return max(fixed, key=lambda found: found.rate.median) if len(fixed) > 2 else None

    def against(self, other: Figures) -> Spread:
        """The ratio of the judged one's rates to another's, repetition by repetition."""
        return Spread.of(quotients(self.own.rates, other.rates))


def quotients(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Each of `a` over its partner in `b`."""
    return tuple(x / y for x, y in zip(a, b, strict=True))


def compare(
    cell: Cell, variants: Sequence[Variant], stand: Stand, notices: Sequence[str] = ()
) -> Comparison:
    """The figures of a cell whose first variant is plain decoding and second the one to judge."""
    plain_rates = [_rate(answers) for answers in cell.answers[PLAIN]]
    figures = tuple(
        _figures(variant, cell.answers[variant.name], plain_rates, stand) for variant in variants
    )
    subject = f"{cell.workload} at temperature {cell.setting.name}"
    sentence = verdict(figures[0], figures[1], notices)
    return Comparison(cell.workload, cell.setting.name, figures, f"{subject}: {sentence}")


def _figures(
    variant: Variant,
    runs: Sequence[Sequence[Answer]],
    plain_rates: Sequence[float],
    stand: Stand,
) -> Figures:
    answers = [answer for run in runs for answer in run]
    totals = total(answer.stats for answer in answers)
    rates = [_rate(run) for run in runs]
    target = draft = python = predicted = None
    if any(answer.target.by_rows for answer in answers):
        target = sum(answer.target.ms for answer in answers) / totals.predicted_ms
        draft = sum(answer.draft.ms for answer in answers) / totals.predicted_ms
        python = 1 - target - draft
        meters = (stand.target, stand.draft)
        predicted = predict(answers, [meter.costs for meter in meters if meter is not None])
    return Figures(
        variant.name,
        variant.length,
        tuple(rates),
        quotients(rates, plain_rates),
        Spread.of([answer.stats.prompt_ms for answer in answers]),
        totals,
        target,
        draft,
        python,
        predicted,
    )


def _rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of the generation phase over some answers."""
    return total(answer.stats for answer in answers).tokens_per_second


def predict(answers: Sequence[Answer], costs: Sequence[CostTable]) -> float | None:
    """The speed-up by the costs of the decodes that were made: the target's, then the draft's.

    A decode of one row a token is what plain decoding takes; Python is left out on both sides.
    None where there are no costs.
    """
    if not all(table.is_measured for table in costs):
        return None
    n_tokens = sum(answer.stats.predicted_n for answer in answers)
    taken = sum(
        decodes.priced(table)
        for answer in answers
        for decodes, table in zip((answer.target, answer.draft), costs, strict=False)
    )
    return n_tokens * costs[0].ms(1) / taken


def total(stats: Iterable[Stats]) -> Stats:
    """The counts and times of several answers together, with the last one's names and verdict."""
    whole = Stats()
    for each in stats:
        for name in (
            *("prompt_n", "prompt_cached_n", "prompt_ms", "predicted_n", "predicted_ms", "rounds"),
            *("draft_n", "draft_n_accepted", "corrected_n", "bonus_n", "discarded"),
            "draft_failures",
        ):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        positions = zip_longest(whole.by_position, each.by_position, fillvalue=(0, 0))
        whole.by_position = [(a + c, b + d) for (a, b), (c, d) in positions]
        for length, count in each.lengths.items():
            whole.lengths[length] = whole.lengths.get(length, 0) + count
        whole.seed, whole.verifier, whole.drafter = each.seed, each.verifier, each.drafter
        whole.verdict = each.verdict
    return whole


def verdict(plain: Figures, own: Figures, notices: Sequence[str] = ()) -> str:
    """What the comparison says, in one sentence."""
    ratio = own.ratio
    measured = f"{ratio.median:.2f} of plain decoding's speed ({ratio.low:.2f} to {ratio.high:.2f})"
    if not own.totals.draft_n:
        return f"speculation stood aside, at {measured}: {_reason(own, notices)}"
    if own.aside > 1 - _ASIDE:
        n_drafting = round((1 - own.aside) * own.totals.rounds)
        return (
            f"speculation stood aside but for {n_drafting} of {own.totals.rounds} rounds, at "
            f"{measured}: {_reason(own, notices)}"
        )
    if ratio.median < 1 - _NOTICEABLE:
        return (
            f"speculation is slower than plain decoding, the speed-up is below 1: {measured}; "
            f"{_price(plain, own)}"
        )
    if ratio.median <= 1 + _NOTICEABLE:
        return f"speculation makes no difference: {measured}; {_price(plain, own)}"
    return (
        f"speculation is {ratio.median:.2f} times as fast as plain decoding "
        f"({ratio.low:.2f} to {ratio.high:.2f}); {_price(plain, own)}"
    )


def _reason(own: Figures, notices: Sequence[str]) -> str:
    if own.totals.verdict:
        return own.totals.verdict
    if own.totals.drafter == "lookup":
        return "the text repeats itself too seldom for lookup to pay"
    return "; ".join(notices) or "nothing was there to draft with"


def _price(plain: Figures, own: Figures) -> str:
    """What a round brings and takes."""
    tokens = own.totals.tokens_per_round
    if math.isnan(tokens):
        return "the rounds were not counted"
    per_round = own.totals.predicted_ms / own.totals.rounds
    per_token = plain.totals.predicted_ms / plain.totals.predicted_n
    return (
        f"a round gives {tokens:.2f} tokens and takes as long as {per_round / per_token:.2f} plain "
        "ones"
    )
