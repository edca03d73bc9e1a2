"""Many prompts from a file, their answers into another, and nothing lost whatever happens.

The input is read twice: first to find out what the output lacks, then to do it. A finished row
whose fingerprint (see `batch_recipe`) is another now is not simply kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specllama import batch_records as records
from specllama.acceptance import Round
from specllama.batch_input import Entry, entries
from specllama.batch_ledger import PARTS, Fingerprint, Ledger, line_key, row_key
from specllama.batch_output import Output
from specllama.batch_recipe import Recipe
from specllama.batch_rows import Row
from specllama.batch_values import RowError, shown
from specllama.errors import (
    DecodeError,
    InvalidLogits,
    ModelError,
    PromptTooLong,
    RollbackError,
    SpecllamaError,
    UsageError,
)
from specllama.generation import Pair
from specllama.parallel import Answer, Job, Parallel
from specllama.prompts import Message

_CODES: tuple[tuple[type[SpecllamaError], str], ...] = (
    (PromptTooLong, "prompt_too_long"),
    (InvalidLogits, "invalid_logits"),
    (DecodeError, "decode_error"),
    (RollbackError, "rollback_refused"),
    (ModelError, "template_error"),
    (UsageError, "invalid_request"),
)
# Tokens that a template adds to a conversation, and to each of its messages, at most.
_TEMPLATE, _MARKERS = 1024, 16


class Format(Protocol):
    """How messages become a prompt; see `prompts.ChatFormat`."""

    notices: list[str]

    def tokens(self, messages: list[Message], *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation. Raises UsageError, ModelError."""
        ...


@dataclass
class Survey:
    """What the input holds: rows, those that the output has already, and of these failed ones.

    n_changed: finished rows that are others now. n_others: records of the output that are of no
    row of the input. longest: most tokens that a row may need, prompt and answer; inf when one has
    no limit.
    """

    n_rows: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_changed: int = 0
    n_others: int = 0
    longest: float = 0

    @property
    def n_todo(self) -> int:
        """Rows that are to be done."""
        return self.n_rows - self.n_done


@dataclass
class Counts:
    """What became of the rows of a run, and of those that were there before it.

    codes: of the rows that failed in this run.
    """

    n_done: int = 0
    n_before: int = 0
    n_failed_before: int = 0
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def n_failed(self) -> int:
        """Rows without an answer."""
        return self.codes.total() + self.n_failed_before

    @property
    def n_rows(self) -> int:
        """All of them."""
        return self.n_done + self.n_before + self.n_failed


class Batch:
    """An input, and an output that may hold some of it already."""

    def __init__(self, source: Path, output: Output, ledger: Ledger, recipe: Recipe) -> None:
        self.source, self.recipe = source, recipe
        self.on_record: Callable[[bool], None] = lambda _: None  # told whether a row failed
        self._output, self._ledger = output, ledger

    # --- what there is to do ----------------------------------------------------------------

    def survey(self, *, retry_failed: bool, rerun_changed: bool) -> Survey:
        """Find out what is to be done; nothing is written yet.

        A failed row is done again when it or its settings are others now, or with `retry_failed`.
        Raises UsageError when finished rows are others now, unless `rerun_changed` has them done
        again.
        """
        found, first = Survey(), ""
        self._ledger.begin_again()
        for entry in self._entries():
            found.n_rows += 1
            found.longest = max(found.longest, self._longest(entry.row))
            first = self._compare(entry, found, retry_failed) or first
        if found.n_changed and not rerun_changed:
            rows = "row is" if found.n_changed == 1 else "rows are"
            raise UsageError(
                f"{found.n_changed} finished {rows} not what {self._output.path} was made from: "
                f"{first}; do them again with --rerun-changed, or name another output"
            )
        found.n_others = self._ledger.n_done - found.n_done
        return found

    def _compare(self, entry: Entry, found: Survey, retry_failed: bool) -> str:
        """Look for a row in the output; in what it differs, if it is the first that does."""
        key = _key(entry)
        if key != line_key(entry.line):
            self._ledger.drop(line_key(entry.line))  # what was wrong with this line is mended
        done = self._ledger.find(key)
        if done is None:
            return ""
        wanted = self.recipe.fingerprint(entry)
        is_changed = done.fingerprint != wanted
        if is_changed or (done.failed and retry_failed):
            self._ledger.drop(key)
        else:
            found.n_done += 1
            found.n_failed += done.failed
        if not is_changed or done.failed:
            return ""
        found.n_changed += 1
        return _difference(entry, done.fingerprint, wanted) if found.n_changed == 1 else ""

    def _longest(self, row: Row | None) -> float:
        """Most tokens that a row may need. One has a byte at least."""
        if row is None:
            return 0
        size = 8 + len(row.prompt.encode() if isinstance(row.prompt, str) else row.prompt or ())
        size += sum(_MARKERS + len(message.content.encode()) for message in row.messages)
        size += _TEMPLATE if row.messages else 0
        limit = self.recipe.max_tokens(row)
        return math.inf if limit is None else size + limit

    def clean(self) -> None:
        """Take out of the output what is done again, or was of a line that is mended."""
        if self._ledger.has_stale:
            self._output.drop(self._ledger.stale())
            self._ledger.forget_stale()

    def _entries(self) -> Iterator[Entry]:
        """Those of the input; a row whose id was there before is an error."""
        for entry in entries(self.source):
            name = entry.id
            first = entry.line if name is None else self._ledger.first_line(name, entry.line)
            if first != entry.line:
                said = entry.row or entry.error
                assert said is not None
                problem = f"its id {shown(name)} is that of line {first}"
                error = RowError("duplicate_id", problem, name, said.style)
                entry = Entry(entry.index, entry.line, None, error)
            yield entry

    # --- doing it ---------------------------------------------------------------------------

    def run(self, pair: Pair, make_format: Callable[[], Format], parallel: Parallel) -> Counts:
        """Do what is missing; a record for each row as it is done.

        make_format: of the chat, asked for when a row has messages.
        """
        counts = Counts()
        on_round = parallel.on_round

        def told(outcomes: Sequence[Round]) -> None:
            self._output.settle()
            on_round(outcomes)

        parallel.on_round = told
        self.clean()
        self._ledger.begin_again()
        for answer in parallel.run(self._jobs(pair, make_format, counts)):
            self._finish(answer, pair, counts)
        return counts

    def _jobs(
        self, pair: Pair, make_format: Callable[[], Format], counts: Counts
    ) -> Iterator[Job[Entry]]:
        """The rows that are to be answered; those that cannot be get their record here."""
        chat: list[Format] = []

        def tokens(row: Row) -> list[int]:
            try:
                chat[:] = chat or [make_format()]
                return chat[0].tokens(list(row.messages), thinking=row.thinking)
            except UsageError as error:
                raise RowError("invalid_messages", str(error), row.id, row.style) from None

        for entry in self._entries():
            if (done := self._ledger.find(_key(entry))) is not None:
                counts.n_before += not done.failed
                counts.n_failed_before += done.failed
                continue
            try:
                if entry.error is not None:
                    raise entry.error
                assert entry.row is not None
                yield self._job(entry, entry.row, pair, tokens)
            except RowError as error:
                self._fail(entry, error, counts)

    def _job(
        self, entry: Entry, row: Row, pair: Pair, tokens: Callable[[Row], list[int]]
    ) -> Job[Entry]:
        """A row as a question. Raises RowError."""
        recipe = self.recipe
        try:
            params = row.params(recipe.defaults.params)
        except UsageError as error:
            raise RowError("invalid_parameter", str(error), row.id, row.style) from None
        try:
            question = pair.question(
                tokens(row) if row.prompt is None else row.prompt,
                params,
                max_tokens=recipe.max_tokens(row),
                stop=recipe.stop(row),
                ignore_eos=recipe.ignores_eos(row),
            )
        except SpecllamaError as error:
            raise _row_error(error, row) from None
        return Job(row.id, question, recipe.seed(row), entry)

    def _finish(self, answer: Answer[Entry], pair: Pair, counts: Counts) -> None:
        entry = answer.job.source
        assert entry.row is not None
        if answer.error is not None:
            self._fail(entry, _row_error(answer.error, entry.row), counts)
            return
        fingerprint = self.recipe.fingerprint(entry)
        name = pair.target.name
        self._output.append(records.answered(entry, entry.row, answer, fingerprint, name))
        counts.n_done += 1
        self.on_record(False)

    def _fail(self, entry: Entry, error: RowError, counts: Counts) -> None:
        self._output.append(records.failed(entry, error, self.recipe.fingerprint(entry)))
        counts.codes[error.code] += 1
        self.on_record(True)


def _key(entry: Entry) -> str:
    """What an entry is found again by: its id, or the number of a line that has none of its own."""
    is_double = entry.error is not None and entry.error.code == "duplicate_id"
    return line_key(entry.line) if entry.id is None or is_double else row_key(entry.id)


def _row_error(error: SpecllamaError, row: Row) -> RowError:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
    return RowError(code, str(error), row.id, row.style)


def _difference(entry: Entry, old: Fingerprint, new: Fingerprint) -> str:
    """Which row is another now, and in what."""
    parts = [part for part, a, b in zip(PARTS, old, new, strict=True) if a != b]
    return f"{shown(entry.id)} in line {entry.line} has other {' and other '.join(parts)}"
