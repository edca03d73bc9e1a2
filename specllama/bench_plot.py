"""A benchmark as a picture: what speculation brings, and what rows cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specllama import storage
from specllama.bench_report import Head, meters, require_writable
from specllama.bench_stand import Stand
from specllama.comparison import Comparison, Spread
from specllama.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_ROWS = 17
_COLOURS = ("#2f6f9f", "#d98b2b", "#5b8c5a", "#8a6fa8", "#b0554f", "#7f7f7f")



def require_plottable(path: Path) -> None:
    """Raises UsageError without matplotlib, for an unknown ending and for an unwritable file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "the picture needs matplotlib, which is not installed; "
            "install it with: pip install matplotlib"
        ) from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise UsageError(
            f"{path} has no ending that names a picture format; use one of {', '.join(known)}"
        )
    require_writable(path)


def plot(path: Path, head: Head, stand: Stand, comparisons: Sequence[Comparison]) -> None:
    """Ratios as bars with their spread, and the staircases, as a picture."""
    from matplotlib.figure import Figure

    n_bars = sum(len(comparison.figures) - 1 for comparison in comparisons)
    figure = Figure(figsize=(max(9.0, 5 + 0.45 * n_bars), 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(max(2.0, 0.25 * n_bars), 1))
    _draw_ratios(left, comparisons)
    _draw_costs(right, stand)
    title = f"{head.target}, draft {head.draft or 'none'}"
    figure.suptitle(f"{title}\n{head.note}" if head.note else title, fontsize=9)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise storage.unwritable(path, error) from error


def _draw_ratios(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    names = [found.variant for found in comparisons[0].figures[1:]]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        spreads = [comparison.figures[1 + i].ratio for comparison in comparisons]
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(comparisons))]
        colour = _COLOURS[i % len(_COLOURS)]
        _bars(axes, at, spreads, width, colour, name)
    axes.axhline(1, color="#444444", linewidth=1, linestyle="--")
    labels = [f"{comparison.workload}\n{comparison.setting}" for comparison in comparisons]
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylabel("tokens/s over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4)


def _bars(
    axes: Axes,
    at: Sequence[float],
    spreads: Sequence[Spread],
    width: float,
    colour: str,
    name: str,
) -> None:
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.low for spread in spreads]
    above = [spread.high - spread.median for spread in spreads]
    axes.bar(
        at, medians, 0.9 * width, yerr=(below, above), capsize=2, color=colour, label=name
    )


def _draw_costs(axes: Axes, stand: Stand) -> None:
    for (role, meter), colour in zip(meters(stand), _COLOURS, strict=False):
        if meter.costs.is_measured:
            rows = range(1, min(_MOST_ROWS, max(meter.costs.timings())) + 1)
            times = [meter.costs.ms(n) for n in rows]
            axes.step(rows, times, where="mid", color=colour, label=role)
    axes.set_xlabel("rows of a decode")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
