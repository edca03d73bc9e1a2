"""What a decode costs on this machine: a short measurement the first time, kept for the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specllama.costs import CostTable
from specllama.folders import write_whole
from specllama.lm import CachedLM, Request
from specllama.lookahead import AcceptancePredictor

_FORMAT = 2
# Row counts in the order of their use: the first few already show where the steps of most kernels
# lie, and a model that is too slow for the rest learns it while it runs.
_ROWS = (1, 4, 2, 8, 3, 5, 16, 6, 12, 9, 17, 7, 10, 13, 64, 32)
_BASE = 32  # tokens that stand before the measured rows
_PASSES = 3
_SECONDS = 6.0


@dataclass
class Knowledge:
    """What is known of a pair on this machine.

    target, draft: times of a decode by rows. predictor, forecast, worth: what acceptance was like,
    see `MeasuredLength`.
    """

    target: CostTable = field(default_factory=CostTable)
    draft: CostTable = field(default_factory=CostTable)
    predictor: AcceptancePredictor = field(default_factory=AcceptancePredictor)
    forecast: float = 0.7
    worth: float | None = None


def measure(
    lm: CachedLM,
    costs: CostTable,
    max_rows: int,
    *,
    all_logits: bool,
    seconds: float = _SECONDS,
    counts: Sequence[int] = _ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Time decodes of 1 to max_rows rows, for at most about so many seconds.

    All numbers of rows take turns, so that a machine that slows down meanwhile slows them all.
    all_logits: whether every row gives logits, as in verification, or only the last. counts: the
    numbers of rows, in the order of their use.
    """
    begun = clock()
    base = [_token(lm, i) for i in range(min(_BASE, lm.n_ctx - max_rows))]
    if not base:
        return
    for _ in range(_PASSES):
        for n_rows in (n for n in counts if n <= max_rows):
            rows = [_token(lm, i) for i in range(len(base), len(base) + n_rows)]
            lm.prefill(0, base)
            before = clock()
            # As in verification: all but the first may be taken back.
            lm.logits(
                [Request(0, [*base, *rows], n_rows, n_rows - 1)]
                if all_logits
                else [Request(0, [*base, *rows])]
            )
            costs.record(n_rows, 1000 * (clock() - before))
            if clock() - begun > seconds and costs.is_measured:
                lm.forget(0)
                return
    lm.forget(0)


def _token(lm: CachedLM, i: int) -> int:
    return (1000 + 37 * i) % lm.n_vocab


def identity(files: Sequence[Path], **settings: Any) -> str:
    """A name for what the times depend on: the files as they are now, and the settings."""
    parts = [repr(sorted(settings.items()))]
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue  # for whoever opens it to refuse, with a better sentence
        parts += [str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def recall(path: Path) -> Knowledge | None:
    """What was stored, or None when there is nothing that can be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != _FORMAT:
            return None
        return Knowledge(
            CostTable(_timings(stored["target"])),
            CostTable(_timings(stored["draft"])),
            AcceptancePredictor(stored["predictor"]),
            min(1.0, max(0.0, float(stored["forecast"]))),
            _finite(stored["worth"]),
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError):
        # It is a memo: what cannot be read is measured again.
        return None


def _finite(stored: float | None) -> float | None:
    if stored is not None and not math.isfinite(stored):
        raise ValueError(f"{stored} is no gain")
    return stored


def _timings(stored: dict[str, list[float]]) -> dict[int, list[float]]:
    """Times by rows. Raises ValueError for what cannot be times."""
    timings = {int(rows): [float(ms) for ms in times] for rows, times in stored.items()}
    for rows, times in timings.items():
        if rows < 1 or not times or not all(0 < ms < math.inf for ms in times):
            raise ValueError(f"{times} for {rows} rows")
    return timings


def refresh(lm: CachedLM, costs: CostTable, clock: Callable[[], float] = time.perf_counter) -> None:
    """Time a few decodes of one row anew, in case that they were disturbed before."""
    for _ in range(_PASSES):
        before = clock()
        lm.logits([Request(0, [_token(lm, 0)])])
        costs.record(1, 1000 * (clock() - before))
        lm.forget(0)


def store(path: Path, known: Knowledge) -> None:
    """Keep it for the next time; a full or read-only disk costs only the memo."""
    before = recall(path) or Knowledge()
    content = {
        "format": _FORMAT,
        "target": known.target.least(before.target.timings()),
        "draft": known.draft.least(before.draft.timings()),
        "predictor": known.predictor.state(),
        "forecast": known.forecast,
        "worth": known.worth,
    }
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(content).encode("utf-8"))
