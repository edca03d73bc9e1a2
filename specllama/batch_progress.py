"""How far a batch is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from specllama.acceptance import Round

_LINE_SECONDS = 10.0


class Progress:
    """Counts rows and rounds, and shows them on standard error. Use it in a with statement.

    total: rows to be done, None where that is not known. terminal: where a bar can be drawn, None
    where there are only lines.
    """

    def __init__(
        self,
        total: int | None,
        terminal: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.n_rows = self.n_failed = self.n_tokens = self.n_drafted = self.n_accepted = 0
        self._total, self._terminal = total, terminal
        self._clock = clock
        self._begun = self._shown = clock()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        self._begun = self._shown = self._clock()
        if self._terminal is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="row", file=self._terminal, dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._begun

    def record(self, failed: bool) -> None:
        """A row is done, or failed."""
        self.n_rows += 1
        self.n_failed += failed
        if self._bar is not None:
            self._bar.update()
        self._show()

    def round(self, outcomes: Sequence[Round]) -> None:
        """A round of some rows is done."""
        for outcome in outcomes:
            self.n_tokens += len(outcome.tokens)
            self.n_drafted += outcome.proposed
            self.n_accepted += outcome.accepted
        self._show()

    def speed(self) -> str:
        """Tokens a second, and the share of drafted tokens that was kept."""
        parts = [f"{self.n_tokens / max(self.seconds, 1e-9):.1f} tokens/s"]
        if self.n_drafted:
            parts.append(f"{100 * self.n_accepted / self.n_drafted:.0f} % of drafts kept")
        return ", ".join(parts)

    def _show(self) -> None:
        if self._bar is not None:
            failed = f"{self.n_failed} failed, " if self.n_failed else ""
            self._bar.set_postfix_str(failed + self.speed(), refresh=False)
        elif self._clock() - self._shown >= _LINE_SECONDS:
            self._shown = self._clock()
            click.echo(self.line(), err=True)

    def line(self) -> str:
        """All of it in a line."""
        rows = f"{self.n_rows}" if self._total is None else f"{self.n_rows} of {self._total}"
        parts = [f"{rows} rows", f"{self.n_failed} failed", self.speed()]
        if self._total and self.n_rows:
            left = self.seconds / self.n_rows * (self._total - self.n_rows)
            parts.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(parts)
