"""What the caches of a loop hold, against what it fed them."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.acceptance import Round
from specllama.drafting import ModelDrafter
from specllama.speculation import Speculator


def check_caches(speculator: Speculator, before: Sequence[int], outcome: Round) -> None:
    """Each context holds what it was fed in the round, by its own count and by the loop's."""
    drafted = list(outcome.draft.tokens)
    fed = {speculator.target: [*before, *drafted]}
    if isinstance(speculator.drafter, ModelDrafter) and drafted:
        fed[speculator.drafter.lm] = [*before, *drafted[:-1]]
    for lm, tokens in fed.items():
        assert list(lm.held(0)) == tokens
        assert lm._context.length(0) == len(tokens)
