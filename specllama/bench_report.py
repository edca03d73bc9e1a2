"""A benchmark as a person reads it, and as an object for machines."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import specllama
from specllama import storage
from specllama.bench import Plan
from specllama.bench_stand import Meter, Stand
from specllama.comparison import Comparison, Figures
from specllama.costs import CostTable
from specllama.loading import default_threads

FORMAT = 1
# Numbers of rows whose cost is told.
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17)


@dataclass(frozen=True)
class Head:
    """What a result depends on besides the numbers.

    note: what the user wants said with it. layout: where the models lie, a sentence each.
    """

    target: str
    draft: str | None
    threads: int
    verifier: str
    note: str | None = None
    layout: tuple[str, ...] = ()


def head(stand: Stand, threads: int | None, verifier: str, note: str | None = None) -> Head:
    """The head of a report on the pair on the stand; verifier: "auto" is what a seed gives."""
    draft = None if stand.draft is None else stand.draft.lm.name
    rule = "coupled" if verifier == "auto" else verifier
    return Head(
        stand.target.lm.name, draft, threads or default_threads(), rule, note, stand.pair.layout
    )


def machine() -> dict[str, Any]:
    """The machine and the software that the numbers belong to."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "specllama": specllama.__version__,
        "llama-cpp-python": metadata.version("llama-cpp-python"),
    }


def command(name: str) -> list[str]:
    """The command line of this process, with files by their names alone."""
    return [name, *(Path(word).name if os.sep in word else word for word in sys.argv[1:])]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no Linux
        pass
    return platform.processor() or platform.machine()


# --- the table ----------------------------------------------------------------------------------


def table(
    head: Head, plan: Plan, stand: Stand, comparisons: Sequence[Comparison]
) -> str:
    """Everything, for a terminal."""
    return "\n\n".join(
        (
            _title(head, plan),
            _rows(comparisons),
            *(_details(comparison) for comparison in comparisons),
            _costs(stand),
            "\n".join(comparison.verdict for comparison in comparisons),
        )
    )


def _title(head: Head, plan: Plan) -> str:
    here = machine()
    lines = [
        f"target   {head.target}",
        f"draft    {head.draft or 'none'}",
        f"machine  {here['processor']}, {here['cores']} cores, {head.threads} threads; "
        f"llama-cpp-python {here['llama-cpp-python']}",
        f"runs     {plan.n_tokens} tokens an answer, {plan.repetitions} repetitions, verifier "
        f"{head.verifier}",
    ]
    lines += [f"         {sentence}" for sentence in head.layout]
    return "\n".join([*lines, f"note     {head.note}"] if head.note else lines)


def _rows(comparisons: Sequence[Comparison]) -> str:
    """A line for each variant of each cell."""
    header = (
        "workload", "temperature", "variant", "tokens/s", "", "ratio", "", "accepted", "a round",
        "prompt s",
    )
    rows: list[tuple[str, ...]] = [header]
    for comparison in comparisons:
        for i, found in enumerate(comparison.figures):
            place = ("", "") if i else (comparison.workload, comparison.setting)
            rows.append((*place, *_cells(found)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cells(found: Figures) -> tuple[str, ...]:
    totals = found.totals
    rounds = "" if math.isnan(totals.tokens_per_round) else f"{totals.tokens_per_round:.2f}"
    return (
        found.variant,
        f"{found.rate.median:.1f}",
        f"{found.rate.low:.1f}-{found.rate.high:.1f}",
        f"{found.ratio.median:.2f}",
        f"{found.ratio.low:.2f}-{found.ratio.high:.2f}",
        f"{100 * totals.acceptance:.0f} %" if totals.draft_n else "",
        rounds,
        f"{found.prompt_ms.median / 1000:.2f}",
    )


def _details(comparison: Comparison) -> str:
    """What the judged variant did in one cell."""
    own, totals = comparison.own, comparison.own.totals
    lines = [f"{comparison.workload} at temperature {comparison.setting}, {own.variant}:"]
    lengths = sorted(totals.lengths.items())
    lines.append("  rounds by drafted tokens  " + ", ".join(f"{k}: {n}" for k, n in lengths))
    if totals.by_position:
        shares = (f"{100 * kept / reached:.0f}" for reached, kept in totals.by_position if reached)
        lines.append(f"  accepted by position      {' '.join(shares)} %")
    if own.target is not None and own.draft is not None and own.python is not None:
        lines.append(
            f"  time                      target {100 * own.target:.1f} %, draft "
            f"{100 * own.draft:.1f} %, Python {100 * own.python:.1f} %"
        )
    if own.predicted is not None:
        lines.append(
            f"  speed-up                  {own.predicted:.2f} by the costs of the decodes, "
            f"{own.ratio.median:.2f} measured"
        )
    if best := comparison.best_fixed():
        share = comparison.against(best)
        lines.append(
            f"  best of the fixed numbers {best.variant}, {best.ratio.median:.2f}; this reaches "
            f"{share.median:.2f} of it ({share.low:.2f} to {share.high:.2f})"
        )
    return "\n".join(lines)


def _costs(stand: Stand) -> str:
    """The staircases, and from where on drafting pays."""
    lines = ["milliseconds of a decode by its rows"]
    for role, meter in meters(stand):
        if meter.costs.is_measured:
            largest = max(meter.costs.timings())
            steps = (f"{n}: {meter.costs.ms(n):.1f}" for n in _ROWS if n <= largest)
            lines.append(f"  {role:<7} {', '.join(steps)}")
    pays_from = stand.break_even()
    if pays_from is not None:
        lines.append(
            "  even perfect drafts would not pay"
            if pays_from > 1
            else f"  the draft model pays from an acceptance of {100 * pays_from:.0f} % on"
        )
    return "\n".join(lines)


def meters(stand: Stand) -> list[tuple[str, Meter]]:
    """The meters that there are, by role."""
    roles = (("target", stand.target), ("draft", stand.draft))
    return [(role, meter) for role, meter in roles if meter is not None]


# --- the object ---------------------------------------------------------------------------------


def as_object(
    head: Head, plan: Plan, stand: Stand, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    """Everything, as JSON has it: no NaN and no infinity."""
    pays_from = stand.break_even()
    return {
        "format": FORMAT,
        "command": command("specllama"),
        "machine": machine(),
        **asdict(head),
        "n_tokens": plan.n_tokens,
        "repetitions": plan.repetitions,
        "seed": plan.seed,
        "settings": {setting.name: asdict(setting.params) for setting in plan.settings},
        "costs_ms": {role: _staircase(meter.costs) for role, meter in meters(stand)},
        "draft_can_pay": None if pays_from is None else pays_from <= 1,
        "break_even": pays_from if pays_from is not None and pays_from <= 1 else None,
        "results": [
            {
                "workload": comparison.workload,
                "setting": comparison.setting,
                "verdict": comparison.verdict,
                "variants": [_variant(found) for found in comparison.figures],
            }
            for comparison in comparisons
        ],
    }


def _staircase(costs: CostTable) -> dict[str, float]:
    """The milliseconds by rows, as the draft lengths are chosen by."""
    if not costs.is_measured:
        return {}
    return {str(rows): round(costs.ms(rows), 3) for rows in costs.timings()}


def _variant(found: Figures) -> dict[str, Any]:
    totals = found.totals
    return {
        "variant": found.variant,
        "length": found.length,
        "drafter": totals.drafter,
        "tokens_per_second": {**asdict(found.rate), "all": list(found.rates)},
        "ratio": {**asdict(found.ratio), "all": list(found.ratios)},
        "prompt_ms": asdict(found.prompt_ms),
        "predicted_ratio": found.predicted,
        "shares": {"target": found.target, "draft": found.draft, "python": found.python},
        "predicted_n": totals.predicted_n,
        "rounds": totals.rounds,
        "draft_n": totals.draft_n,
        "draft_n_accepted": totals.draft_n_accepted,
        "acceptance": totals.acceptance if totals.draft_n else None,
        "tokens_per_round": totals.tokens_per_round if totals.rounds else None,
        "by_position": [list(counts) for counts in totals.by_position],
        "lengths": {str(length): count for length, count in sorted(totals.lengths.items())},
        "pair_verdict": totals.verdict,
    }


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Write it as indented JSON; the file is complete or as it was. Raises UsageError."""
    try:
        storage.replace(path, [(json.dumps(content, indent=1) + "\n").encode("utf-8")])
    except OSError as error:
        raise storage.unwritable(path, error) from error


def require_writable(path: Path) -> None:
    """Raises UsageError where no file can be written, before the time is spent."""
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        # A file beside it, since the result replaces what may be there.
        probe = path.with_name(f".{path.name}.{os.getpid()}.part")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise storage.unwritable(path, error) from error
