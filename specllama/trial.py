"""A few seconds with the default pair: what rows cost here, and how fast it answers."""

from __future__ import annotations

from dataclasses import dataclass

from specllama import calibration, loading, tuning
from specllama.costs import CostTable
from specllama.generation import Pair, Stats
from specllama.lookahead import MAX_DRAFT_TOKENS
from specllama.sampling import SamplingParams

_SECONDS = 1.5
_N_TOKENS = 48
_N_DRAFT = 3
_PROMPT = "Once upon a time, in a small village by the sea, there lived an old fisherman who"


@dataclass(frozen=True)
class Trial:
    """What was measured.

    layout: where the models lie, a sentence each. rows_ms: milliseconds of a decode of the target
    by its rows. plain, speculative: tokens a second, the latter with `n_draft` tokens drafted a
    round. acceptance: share of them kept, None when none was drafted.
    """

    target: str
    draft: str
    threads: int
    layout: tuple[str, ...]
    rows_ms: dict[int, float]
    plain: float
    speculative: float
    n_draft: int
    acceptance: float | None


def run(threads: int | None = None) -> Trial:
    """Measure the default pair. Raises SpecllamaError, such as ModelError without its files."""
    params = SamplingParams(temperature=0)
    with loading.load(ctx_size=512, threads=threads, draft_tokens=_N_DRAFT) as pair:
        costs = CostTable()
        most = min(MAX_DRAFT_TOKENS + 1, pair.target.max_rows)
        calibration.measure(pair.target, costs, most, all_logits=True, seconds=_SECONDS)
        drafting, pair.speculation = pair.speculation, tuning.plain()
        plain = _answer(pair, params)
        pair.speculation = drafting
        speculative = _answer(pair, params)
        return Trial(
            pair.files[0].name,
            pair.files[1].name if len(pair.files) > 1 else "",
            threads or loading.default_threads(),
            pair.layout,
            {n: round(costs.ms(n), 2) for n in sorted(costs.timings())},
            plain.tokens_per_second,
            speculative.tokens_per_second,
            _N_DRAFT,
            speculative.acceptance if speculative.draft_n else None,
        )


def _answer(pair: Pair, params: SamplingParams) -> Stats:
    chunks = pair.generate(_PROMPT, params, max_tokens=_N_TOKENS, seed=1, ignore_eos=True)
    stats = [chunk.stats for chunk in chunks][-1]
    assert stats is not None
    return stats
