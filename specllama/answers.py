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


def status_line(stats: Stats, context: tuple[int, int], plain_ms: float | None) -> str:
    """One answer of a chat: its length, its speed, what speculation did for it, and the context.

    context: tokens in use, and how many there may be. plain_ms: milliseconds of a token of plain
    decoding, where that is measured.
    """
    used, n_ctx = context
    parts = [f"{stats.predicted_n} {'token' if stats.predicted_n == 1 else 'tokens'}"]
    if stats.predicted_ms:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.draft_n:
        parts.append(f"{stats.tokens_per_round:.2f} a round")
        parts.append(f"{100 * stats.acceptance:.0f} % of {stats.draft_n} drafted kept")
        if plain_ms:
            worth = stats.tokens_per_second * plain_ms / 1000
            parts.append(f"about {worth:.1f} times plain decoding")
    else:
        parts.append("nothing drafted")
    return f"[{', '.join(parts)}; context {used} of {n_ctx}]"


def details(stats: Stats) -> str:
    """The statistics in full."""
    lines = [
        summary(stats),
        f"{stats.prompt_cached_n} of the {stats.prompt_n} prompt tokens were still in the cache",
    ]
    if stats.by_position:
        kept = (f"{100 * kept / reached:.0f} %" for reached, kept in stats.by_position if reached)
        lines.append(f"kept by position in the draft: {', '.join(kept)}")
        lengths = (f"{count} x {length}" for length, count in sorted(stats.lengths.items()))
        lines.append(f"rounds by tokens drafted: {', '.join(lengths)}")
    return "\n".join(lines)
