"""Many prompts from a file, their answers into another, and nothing lost whatever happens.

The input is read twice: first to find out what the output lacks, then to do it. What an answer was
made from is told by the digests of its fingerprint: the row, the settings that apply to it, and the
files of both models. A finished row whose fingerprint is another now is not simply kept.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from specllama import batch_records as records
from specllama.batch_input import Entry, entries
from specllama.batch_ledger import PARTS, Fingerprint, Ledger, line_key
from specllama.batch_output import Output
from specllama.batch_rows import PLAIN, Defaults, Row, RowError, digest
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

_NOT_MADE = "-"  # in the fingerprint of a line that is no row
_CODES: tuple[tuple[type[SpecllamaError], str], ...] = (
    (PromptTooLong, "prompt_too_long"),
    (InvalidLogits, "invalid_logits"),
    (DecodeError, "decode_error"),
    (RollbackError, "rollback_refused"),
    (ModelError, "template_error"),
    (UsageError, "invalid_request"),
)


class Format(Protocol):
    """How messages become a prompt; see `prompts.ChatFormat`."""

    notices: list[str]

    def tokens(self, messages: list[Message], *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation. Raises UsageError, ModelError."""
        ...


@dataclass(frozen=True)
class Recipe:
    """What answers are made from, besides the row.

    verifier: the rule of acceptance. models: a digest of both files. template: of what makes
    prompts of messages.
    """

    defaults: Defaults
    verifier: str
    models: str
    template: str

    def fingerprint(self, entry: Entry) -> Fingerprint:
        """Of a row, or of what is wrong with its line."""
        row = entry.row
        if row is None:
            assert entry.error is not None
            error = [entry.error.code, entry.error.message, entry.error.id]
            return digest(error), _NOT_MADE, _NOT_MADE
        defaults = self.defaults
        biases = dict(defaults.params.logit_bias)
        settings = {
            **asdict(replace(defaults.params, logit_bias=biases)),
            **row.overrides,
            "max_tokens": self.max_tokens(row),
            "stop": row.stop if row.stop is not None else defaults.stop,
            "seed": row.seed if row.seed is not None else defaults.seed,
            "ignore_eos": self.ignores_eos(row),
            "verifier": self.verifier,
            "template": self.template if row.messages else "",
        }
        return row.digest, digest(settings), self.models

    def max_tokens(self, row: Row) -> int | None:
        """Most tokens of a row's answer, None for no limit."""
        limit = row.max_tokens if row.max_tokens is not None else self.defaults.max_tokens
        return None if limit == -1 else limit

    def ignores_eos(self, row: Row) -> bool:
        """Whether the model cannot end the answer."""
        return row.ignore_eos if row.ignore_eos is not None else self.defaults.ignore_eos

    def seed(self, row: Row) -> int:
        """The seed of a row; -1 draws one."""
        seed = row.seed if row.seed is not None else self.defaults.seed
        return secrets.randbits(32) if seed == -1 else seed


@dataclass
class Survey:
    """What the input holds: rows, those that the output has already, and of these failed ones.

    longest: most tokens that a row may need, prompt and answer; inf when one has no limit.
    """

    n_rows: int = 0
    n_done: int = 0
    n_failed: int = 0
    n_changed: int = 0
    has_messages: bool = False
    longest: float = 0

    @property
    def n_todo(self) -> int:
        """Rows that are to be done."""
        return self.n_rows - self.n_done


@dataclass
class Counts:
    """What became of the rows of a run. codes: of those that failed, now or before."""

    n_done: int = 0
    n_before: int = 0
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def n_failed(self) -> int:
        """Rows without an answer."""
        return self.codes.total()


class Batch:
    """An input, and an output that may hold some of it already."""

    # Tokens that a template adds to a conversation, and to each of its messages, at most.
    _TEMPLATE, _MARKERS = 1024, 16

    def __init__(self, source: Path, output: Output, ledger: Ledger, recipe: Recipe) -> None:
        self.source, self.recipe = source, recipe
        self.on_record: Callable[[bool], None] = lambda _: None  # told whether a row failed
        self._output, self._ledger = output, ledger

    def survey(self, *, retry_failed: bool, rerun_changed: bool) -> Survey:
        """Find out what is to be done, and take out of the output what is done again.

        A failed row is done again when it or its settings are others now, or with `retry_failed`.
        Raises UsageError when finished rows are others now, unless `rerun_changed` has them done
        again.
        """
        found, first = Survey(), ""
        self._ledger.begin_again()
        for entry in self._entries():
            found.n_rows += 1
            self._measure(entry, found)
            key, wanted = _key(entry), self.recipe.fingerprint(entry)
            if key != line_key(entry.line):
                self._ledger.drop(line_key(entry.line))  # what was wrong with this line is mended
            done = self._ledger.find(key)
            if done is None:
                continue
            same = done.fingerprint == wanted
            if not same and not done.failed:
                found.n_changed += 1
                first = first or _difference(entry, done.fingerprint, wanted)
            if (done.failed and retry_failed) or not same:
                self._ledger.drop(key)
                continue
            found.n_done += 1
            found.n_failed += done.failed
        if found.n_changed and not rerun_changed:
            rows = "row is" if found.n_changed == 1 else "rows are"
            raise UsageError(
                f"{found.n_changed} finished {rows} not what {self._output.path} was made from: "
                f"{first}; do them again with --rerun-changed, or name another output"
            )
        if self._ledger.has_stale:
            self._output.drop(self._ledger.stale())
        return found

    def _measure(self, entry: Entry, found: Survey) -> None:
        """Take note of what a row needs."""
        row = entry.row
        if row is None:
            return
        found.has_messages |= bool(row.messages)
        # A token has one byte at least.
        size = 8 + (len(row.prompt.encode()) if isinstance(row.prompt, str) else 0)
        size += len(row.prompt) if isinstance(row.prompt, tuple) else 0
        for message in row.messages:
            size += self._MARKERS + len(message.content.encode())
        size += self._TEMPLATE if row.messages else 0
        limit = self.recipe.max_tokens(row)
        found.longest = max(found.longest, math.inf if limit is None else size + limit)

    def run(
        self, pair: Pair, make_format: Callable[[], Format], parallel: Parallel
    ) -> Counts:
        """Do what is missing; a record for each row as it is done.

        make_format: of the chat, asked for when a row has messages.
        """
        counts = Counts()
        self._ledger.begin_again()
        for answer in parallel.run(self._jobs(pair, make_format, counts)):
            self._finish(answer, pair, counts)
        return counts

    def _entries(self) -> Iterator[Entry]:
        """Those of the input; a row whose id was there before is an error."""
        for entry in entries(self.source):
            name = _id(entry)
            first = entry.line if name is None else self._ledger.first_line(name, entry.line)
            if first != entry.line:
                style = entry.row.style if entry.row is not None else PLAIN
                error = RowError(
                    "duplicate_id", f'its id "{name}" is that of line {first}', name, style
                )
                entry = Entry(entry.index, entry.line, None, error)
            yield entry

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
                counts.n_before += 1
                counts.codes["failed before"] += done.failed
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
                stop=row.stop if row.stop is not None else recipe.defaults.stop,
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
    name = _id(entry)
    is_double = entry.error is not None and entry.error.code == "duplicate_id"
    return line_key(entry.line) if name is None or is_double else name


def _id(entry: Entry) -> str | None:
    if entry.row is not None:
        return entry.row.id
    return entry.error.id if entry.error is not None else None


def _row_error(error: SpecllamaError, row: Row) -> RowError:
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "failed")
    return RowError(code, str(error), row.id, row.style)


def _difference(entry: Entry, old: Fingerprint, new: Fingerprint) -> str:
    """Which row is another now, and in what."""
    parts = [part for part, a, b in zip(PARTS, old, new, strict=True) if a != b]
    return f'"{_id(entry)}" in line {entry.line} has other {" and other ".join(parts)}'
