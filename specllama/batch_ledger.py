"""What is done already: the rows that an output holds, and those of the input that were seen.

It is kept in a temporary database on the disk, so that memory does not grow with the rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from specllama.batch_output import Line, Output
from specllama.errors import SpecllamaError, UsageError

Fingerprint = tuple[str, str, str]

PARTS = ("prompt", "settings", "models")
_ENOUGH = 1000  # lines that are no records show that a file is something else
# How every record begins.
_BEGINNING = b'{"id": '
# Errors of a line rather than of a row: it has no id, or one that is another row's.
LINE_CODES = frozenset(
    {
        *("invalid_utf8", "invalid_json", "not_an_object", "line_too_long"),
        *("missing_id", "invalid_id", "duplicate_id"),
    }
)


@dataclass(frozen=True, slots=True)
class Done:
    """A row of the output. fingerprint: digests of what it was made from, in order of PARTS."""

    fingerprint: Fingerprint
    failed: bool


def row_key(name: str) -> str:
    """The key of a row with an id."""
    return f"={name}"


def line_key(number: int) -> str:
    """The key of a line of the input that has no id of its own."""
    return f"#{number}"


class Ledger:
    """Rows by key, `row_key` or `line_key`. Close it.

    Its methods raise SpecllamaError when the folder of temporary files has no room for it.
    """

    def __init__(self) -> None:
        # Without a name it is private and temporary, and leaves memory when it grows.
        self._database = sqlite3.connect("", isolation_level=None)
        self._run("PRAGMA journal_mode=OFF")
        self._run("PRAGMA synchronous=OFF")
        self._run(
            "CREATE TABLE done (key TEXT PRIMARY KEY, fingerprint TEXT, failed INT, "
            "begin INT, end INT) WITHOUT ROWID"
        )
        self._run("CREATE TABLE stale (begin INT PRIMARY KEY, end INT) WITHOUT ROWID")
        self._run("CREATE TABLE seen (key TEXT PRIMARY KEY, line INT) WITHOUT ROWID")
        self.unreadable = 0  # lines of the output

    def _run(self, command: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        try:
            return self._database.execute(command, values)
        except sqlite3.Error as error:
            raise SpecllamaError(
                f"the list of what is done cannot be kept in a temporary file: {error}; make room "
                "for it, or name another folder in the variable SQLITE_TMPDIR"
            ) from None

    def close(self) -> None:
        """Forget everything."""
        self._database.close()

    @property
    def n_done(self) -> int:
        """Rows that the output holds."""
        return int(self._run("SELECT count(*) FROM done").fetchone()[0])

    def find(self, key: str) -> Done | None:
        """What the output holds of a row."""
        row = self._run(
            "SELECT fingerprint, failed FROM done WHERE key = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        first, second, third = str(row[0]).split()
        return Done((first, second, third), bool(row[1]))

    def add(self, key: str, done: Done, line: Line) -> None:
        """A record of the output; an earlier one of the same row is stale then."""
        self.drop(key)
        self._run(
            "INSERT INTO done VALUES (?, ?, ?, ?, ?)",
            (key, " ".join(done.fingerprint), done.failed, line.begin, line.end),
        )

    def drop(self, key: str) -> None:
        """The record of a row is to go, since the row is done again."""
        self._run("INSERT INTO stale SELECT begin, end FROM done WHERE key = ?", (key,))
        self._run("DELETE FROM done WHERE key = ?", (key,))

    def stale(self) -> Iterator[tuple[int, int]]:
        """Bytes of the output that are to go, in order."""
        return self._run("SELECT begin, end FROM stale ORDER BY begin")

    @property
    def has_stale(self) -> bool:
        """Whether any are."""
        return self._run("SELECT 1 FROM stale LIMIT 1").fetchone() is not None

    def forget_stale(self) -> None:
        """They are gone."""
        self._run("DELETE FROM stale")

    def first_line(self, key: str, line: int) -> int:
        """The line at which a key of the input came first, which may be this one."""
        self._run("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line))
        found = self._run("SELECT line FROM seen WHERE key = ?", (key,)).fetchone()
        return int(found[0])

    def begin_again(self) -> None:
        """The input is read from its beginning once more."""
        self._run("DELETE FROM seen")


def read(output: Output) -> Ledger:
    """The rows of an output; a torn last line is taken away, for its row to be done again.

    A line that is no record counts as unreadable and is left alone. Raises UsageError for a file
    that holds lines and no record at all: it is something else.
    """
    ledger = Ledger()
    for line in output.lines():
        found = _record(line.text)
        if line.torn and found is not None:
            output.finish_line()
            line = replace(line, end=line.end + 1)
        elif line.torn and (ledger.n_done or (not ledger.unreadable and _is_begun(line.text))):
            output.mend(line)
            continue
        if found is not None:
            ledger.add(*found, line)
        elif line.text.strip():
            ledger.unreadable += 1
            if ledger.unreadable == _ENOUGH:
                _require_some(ledger, output)
    _require_some(ledger, output)
    return ledger


def _require_some(ledger: Ledger, output: Output) -> None:
    """Refuse a file with lines none of which is a record."""
    if ledger.unreadable and not ledger.n_done:
        ledger.close()
        raise UsageError(
            f"{output.path} exists and is no output of specllama batch; name another file, "
            "or remove it"
        )


def _is_begun(torn: bytes) -> bool:
    """Whether the only line of a file is the beginning of a record: nothing else is cut away."""
    if not torn.startswith(_BEGINNING[: len(torn)]):
        return False
    try:
        json.loads(torn)
    except (ValueError, RecursionError):
        return True
    return False  # an object, and whole


def _record(text: bytes) -> tuple[str, Done] | None:
    """(key, what it says) of a line of an output, or None."""
    try:
        record: dict[str, Any] = json.loads(text)
        fingerprint = [record["fingerprint"][part] for part in PARTS]
        first, second, third = (str(part) for part in fingerprint)
        error = record.get("error")
        name = record["custom_id"] if "custom_id" in record else record["id"]
        if name is None or (error is not None and error["code"] in LINE_CODES):
            key = line_key(int(record["line"]))
        else:
            name.encode("utf-8")
            key = row_key(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if any(len(part.split()) != 1 for part in (first, second, third)):
        return None
    return key, Done((first, second, third), error is not None)
