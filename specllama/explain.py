"""Why a rejected token must be replaced from the residual: the mass balance of one position.

p is the target's law of the next token, q the draft's. The numbers come from the same functions
that generation uses (`specllama.acceptance`), so what is demonstrated is the code that runs.
Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192), section 2, Algorithm 1, and the proof in appendix A.1.
"""

from __future__ import annotations

import html
import json
import math
import re
import string
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specllama import storage
from specllama.acceptance import accepted_mass, residual
from specllama.errors import UsageError
from specllama.sampling import Law

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEWEST_TOKENS, MOST_TOKENS = 2, 12
# Laws typed as decimals sum to one up to this; masses below it are rounding.
TOLERANCE = 1e-9
_TABLE_WIDTH = 79
# The page's colours, in its light theme.
_ACCEPTED, _CORRECTED, _INK = "#2a6b8d", "#dd9330", "#1c2127"
_WRONG, _HATCH = "#ecc4bd", "#b4473a"


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the probability of one position goes; every field has one entry per token.

    p, q: the target's and the draft's law.
    accepted: min(p, q), the unconditional mass of proposals that are kept.
    rejected: q - accepted.
    residual: max(0, p - q), normalised; all zero where nothing is rejected.
    corrected: rejection * residual.
    total: accepted + corrected, the law of the output, which equals p.
    plain: accepted + rejection * p, what correcting from p itself would give.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    accepted: tuple[float, ...]
    rejected: tuple[float, ...]
    residual: tuple[float, ...]
    corrected: tuple[float, ...]
    total: tuple[float, ...]
    plain: tuple[float, ...]

    @property
    def acceptance(self) -> float:
        """sum min(p, q): how often a proposal is kept."""
        return math.fsum(self.accepted)

    @property
    def rejection(self) -> float:
        """How often a correction is drawn: 1 - acceptance."""
        return math.fsum(self.rejected)

    @property
    def nothing_rejected(self) -> bool:
        """Whether p and q are the same law, up to rounding."""
        return self.rejection <= TOLERANCE


def parse_law(text: str, name: str) -> tuple[float, ...]:
    """A law from text such as "0.2,0.5,0.3" or "1/3,2/3", scaled to sum to one to the last bit.

    name: the option it came from, for the message.
    Raises UsageError unless there are 2 to 12 finite, non-negative numbers that sum to one.
    """
    pieces = [piece.strip() for piece in text.split(",")]
    if not FEWEST_TOKENS <= len(pieces) <= MOST_TOKENS:
        raise UsageError(
            f"{name} has {len(pieces)} {'entry' if len(pieces) == 1 else 'entries'}; give "
            f"{FEWEST_TOKENS} to {MOST_TOKENS} probabilities separated by commas, "
            "such as 0.2,0.5,0.3"
        )
    masses = [_parse_mass(piece, name) for piece in pieces]
    if max(masses) > 1 + TOLERANCE:
        raise UsageError(f"{name} has an entry of {max(masses):.6g}; a probability is at most 1")
    total = math.fsum(masses)
    if abs(total - 1) > TOLERANCE:
        change = "lower" if total > 1 else "raise"
        raise UsageError(
            f"{name} sums to {total:.10g}, not to 1; {change} its entries by "
            f"{abs(total - 1):.10g} in all (fractions such as 1/3 are understood)"
        )
    return tuple(mass / total for mass in masses)


def _parse_mass(piece: str, name: str) -> float:
    """One probability, a decimal or a fraction."""
    over, slash, under = piece.partition("/")
    try:
        # Adding 0.0 turns a typed -0 into 0.
        mass = (float(over) / float(under) if slash else float(over)) + 0.0
    except (ValueError, ZeroDivisionError):
        mass = math.nan
    if not math.isfinite(mass):
        raise UsageError(
            f"{name} has the entry {piece!r}, which is not a finite number; "
            "write decimals with a point, or fractions, such as 0.5,1/3,1/6"
        )
    if mass < 0:
        raise UsageError(
            f"{name} has the negative entry {piece}; probabilities are 0 or more and sum to 1"
        )
    return mass


def parse_labels(text: str, n_tokens: int) -> tuple[str, ...]:
    """Names for the tokens from text such as "A,B,C".

    Raises UsageError unless there are n_tokens of them, none empty.
    """
    labels = tuple(label.strip() for label in text.split(","))
    if len(labels) != n_tokens:
        raise UsageError(
            f"--labels has {len(labels)} names, but there are {n_tokens} tokens; "
            "give one name for each, separated by commas"
        )
    if not all(labels):
        raise UsageError("--labels has an empty name; give one name for each token")
    return labels


def default_labels(n_tokens: int) -> tuple[str, ...]:
    """A, B, C, ..."""
    return tuple(string.ascii_uppercase[:n_tokens])


def balance(p: Sequence[float], q: Sequence[float]) -> Balance:
    """The exact mass balance of one position under `specllama.acceptance`.

    p, q: laws over the same tokens, [n_tokens] each. Raises UsageError when they differ in length.
    """
    if len(p) != len(q):
        raise UsageError(
            f"p has {len(p)} tokens and q has {len(q)}; "
            "give both a probability for every token, 0 where one is impossible"
        )
    target, draft = Law(np.array(p, dtype=np.float64)), Law(np.array(q, dtype=np.float64))
    accepted = accepted_mass(target, draft)
    rejected = draft.probs - accepted
    rejection = math.fsum(rejected)
    # The core answers p here, which no round would ever draw from.
    missing = residual(target, draft).probs if rejection > 0 else np.zeros_like(target.probs)
    corrected = rejection * missing
    columns = (
        target.probs,
        draft.probs,
        accepted,
        rejected,
        missing,
        corrected,
        accepted + corrected,
        accepted + rejection * target.probs,
    )
    return Balance(*(tuple(column.tolist()) for column in columns))


def table(books: Balance, labels: Sequence[str] | None = None) -> str:
    """The balance as a table of ASCII text, and one sentence for what each column shows."""
    names = [_ascii(label) for label in labels or default_labels(len(books.p))]
    columns = (
        ("p", books.p),
        ("q", books.q),
        ("accepted", books.accepted),
        ("rejected", books.rejected),
        ("residual", books.residual),
        ("corrected", books.corrected),
        ("total", books.total),
        ("plain p", books.plain),
    )
    rows = [["token", *(title for title, _ in columns)]]
    rows += [[name, *(_four_decimals(c[i]) for _, c in columns)] for i, name in enumerate(names)]
    rows.append(["sum", *(_four_decimals(math.fsum(values)) for _, values in columns)])
    if books.nothing_rejected:
        without = rows[0].index("residual")
        rows[1:] = [[*row[:without], "-", *row[without + 1 :]] for row in rows[1:]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    rule = "-" * len(lines[0])
    notes = [_note(title, sentence) for title, sentence in _sentences(books, names)]
    return "\n".join(
        [
            "Mass balance of one position: p is the target's law, q the draft's.",
            "",
            lines[0],
            rule,
            *lines[1:-1],
            rule,
            lines[-1],
            "",
            *notes,
            "",
            textwrap.fill(_conclusion(books), _TABLE_WIDTH),
        ]
    )


def _sentences(books: Balance, names: Sequence[str]) -> list[tuple[str, str]]:
    """What each column shows, by its title."""
    rejection = _four_decimals(books.rejection)
    error = max(abs(total - p) for total, p in zip(books.total, books.p, strict=True))
    return [
        ("p", "what the output has to follow."),
        ("q", "what the proposal is drawn from."),
        (
            "accepted",
            "min(p, q), as a proposal x is kept with probability min(1, p(x)/q(x)): "
            "no token gets more than p from acceptance alone.",
        ),
        (
            "rejected",
            f"q - accepted, what the draft offered too often: a correction is needed with "
            f"probability {rejection}.",
        ),
        (
            "residual",
            "max(0, p - q), scaled to sum to one, the law of the correction: "
            "only tokens that still miss something can be drawn.",
        ),
        ("corrected", f"{rejection} x residual: it fills exactly the gap p - accepted."),
        (
            "total",
            "accepted + corrected, the law of the output: it is p, whatever q is "
            f"(largest difference here {error:.1e}).",
        ),
        ("plain p", f"accepted + {rejection} x p, correcting from p itself: {_miss(books, names)}"),
    ]


def _miss(books: Balance, names: Sequence[str]) -> str:
    """What correcting from plain p does to this p and q."""
    offsets = [plain - p for plain, p in zip(books.plain, books.p, strict=True)]
    worst = max(range(len(offsets)), key=lambda i: abs(offsets[i]))
    if books.nothing_rejected:
        return "no harm here, as there is nothing to correct."
    if abs(offsets[worst]) <= TOLERANCE:
        return "no harm for this pair by coincidence, as its residual is p."
    plain, p = _four_decimals(books.plain[worst]), _four_decimals(books.p[worst])
    return f"a different law; {names[worst]} comes out with {plain} instead of {p}."


def _conclusion(books: Balance) -> str:
    """The balance in one sentence."""
    if books.nothing_rejected:
        return "p equals q: nothing is rejected, and no correction is needed."
    return (
        f"{_four_decimals(books.acceptance)} of the probability is accepted; the rejected "
        f"{_four_decimals(books.rejection)} is paid out again, to the tokens that the draft had "
        "offered too rarely, and every token ends with exactly what the target gives it."
    )


def _note(title: str, sentence: str) -> str:
    """One explanatory line, wrapped and hung beside its title."""
    return textwrap.fill(
        f"{title:<11}{sentence}",
        _TABLE_WIDTH,
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _four_decimals(x: float) -> str:
    """Fixed width, and no minus sign on what rounds to zero."""
    return f"{0.0 if abs(x) < 5e-5 else x:.4f}"


def _ascii(label: str) -> str:
    """The label in printable ASCII, so that the table survives any terminal's encoding."""
    return "".join(
        c if " " <= c <= "~" else c.encode("unicode_escape").decode("ascii") for c in label
    )


def page(p: Sequence[float], q: Sequence[float], labels: Sequence[str] | None = None) -> str:
    """The same balance as one self-contained HTML page with a slider per token, starting at p, q.

    Raises UsageError when p and q differ in length.
    """
    books = balance(p, q)
    names = tuple(labels or default_labels(len(books.p)))
    start = json.dumps({"labels": names, "p": books.p, "q": books.q})
    parts = {
        # "<" is escaped so that no label can close the script element that holds the data.
        "@@START@@": start.replace("<", "\\u003c"),
        "@@TABLE@@": html.escape(table(books, names)),
    }
    template = resources.files("specllama").joinpath("explain.html").read_text(encoding="utf-8")
    return re.sub("|".join(parts), lambda match: parts[match.group()], template)


def write_page(
    path: Path, p: Sequence[float], q: Sequence[float], labels: Sequence[str] | None = None
) -> None:
    """Write `page` to a file; raises UsageError when that is impossible."""
    try:
        path.write_text(page(p, q, labels), encoding="utf-8")
    except OSError as error:
        raise storage.unwritable(path, error) from error


def plot(books: Balance, path: Path, labels: Sequence[str] | None = None) -> None:
    """The balance as a picture of two stacked bar charts; the file's ending chooses the format.

    Raises UsageError without matplotlib, for an unknown ending and for an unwritable file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "the picture needs matplotlib, which is not installed; "
            "install it with: pip install matplotlib"
        ) from error

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise UsageError(
            f"{path} has no ending that names a picture format; use one of {', '.join(known)}"
        )
    names = [label.replace("$", r"\$") for label in labels or default_labels(len(books.p))]
    wrong = tuple(plain - kept for plain, kept in zip(books.plain, books.accepted, strict=True))
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, "Correction from the residual", books, books.corrected, names, _CORRECTED)
    _draw(right, "Correction from plain p", books, wrong, names, _WRONG, "////")
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise storage.unwritable(path, error) from error
    except RuntimeError as error:  # a format that another program makes, which is not there
        reason = str(error).split(";")[0]
        raise UsageError(
            f"cannot draw {path}: {reason}; choose another ending, such as .png or .svg"
        ) from error


def _draw(
    axes: Axes,
    title: str,
    books: Balance,
    added: Sequence[float],
    names: Sequence[str],
    colour: str,
    hatch: str = "",
) -> None:
    """Accepted mass with `added` stacked on it, inside the outline of the target's law."""
    at = range(len(names))
    axes.bar(at, books.accepted, color=_ACCEPTED, label="accepted")
    stacked = axes.bar(at, added, bottom=books.accepted, color=colour, label="corrected")
    for patch in stacked:
        patch.set(hatch=hatch, edgecolor=_HATCH, linewidth=0)
    outline = axes.bar(at, books.p, width=0.9, fill=False, edgecolor=_INK, label="target p")
    for patch in outline:
        patch.set(linestyle="--", linewidth=1.4)
    for x, (kept, more, p) in enumerate(zip(books.accepted, added, books.p, strict=True)):
        axes.annotate(
            f"{kept + more:.2f}",
            (x, max(kept + more, p)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    crowded = sum(map(len, names)) > 40
    axes.set_xticks(at, names, rotation=90 if crowded else 0)
    axes.set_title(title, fontsize=11)
    axes.set_ylim(0, 1.25 * max(*books.p, *books.plain))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, ncols=3, loc="upper center")
