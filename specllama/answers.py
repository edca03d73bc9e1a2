"""A finished answer: as an object for programs, and in two lines for a person."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specllama.generation import Chunk, Stats


def answer_object(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The whole answer, its tokens with their provenance, why it ended, and the statistics."""
    last = chunks[-1]
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [dataclasses.asdict(token) for chunk in chunks for token in chunk.tokens],
        "finish_reason": last.finish_reason,
        "finish_detail": last.finish_detail,
        "seed": last.stats.seed if last.stats else None,
        "stats": stats_object(last.stats) if last.stats else None,
    }


def stats_object(stats: Stats) -> dict[str, Any]:
    """The statistics as JSON has them: no NaN, and the derived figures with the counts."""
    derived = {
        "acceptance": stats.acceptance,
        "tokens_per_round": stats.tokens_per_round,
        "tokens_per_second": stats.tokens_per_second,
    }
    clean = {name: None if math.isnan(value) else value for name, value in derived.items()}
    return {**dataclasses.asdict(stats), **clean}


def print_object(answer: Mapping[str, Any]) -> None:
    """Print an object on one line, in UTF-8 whatever the console's encoding."""
    line = json.dumps(answer, ensure_ascii=False) + "\n"
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode("utf-8"))
    sys.stdout.buffer.flush()


def summary(stats: Stats) -> str:
    """The statistics in two lines or three."""
    first = (
        f"{stats.predicted_n} tokens in {stats.predicted_ms / 1000:.2f} s "
        f"({stats.tokens_per_second:.1f} tokens/s) after a prompt of {stats.prompt_n} "
        f"in {stats.prompt_ms / 1000:.2f} s"
    )
    if stats.verifier == "coupled":  # elsewhere the seed alone does not give the text again
        first += f"; seed {stats.seed}"
    if stats.verdict:
        first = f"{first}\n{stats.verdict}"
    if not stats.draft_n:
        return f"{first}\nnothing was drafted in {stats.rounds} rounds, drafter {stats.drafter}"
    return (
        f"{first}\n{stats.rounds} rounds, {stats.tokens_per_round:.2f} tokens a round; "
        f"{stats.draft_n_accepted} of {stats.draft_n} drafted tokens accepted "
        f"({100 * stats.acceptance:.0f} %), verifier {stats.verifier}"
    )
