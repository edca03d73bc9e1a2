"""What is done already: the rows that an output holds, and those of the input that were seen.

It is kept in a temporary database on the disk, so that memory does not grow with the rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from specllama.batch_output import Line, Output, is_packed
from specllama.errors import UsageError

Fingerprint = tuple[str, str, str]

PARTS = ("prompt", "settings", "models")
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


def line_key(number: int) -> str:
    """The key of a line of the input that has no id; no id holds a NUL and a number like it."""
    return f"\0{number}"


class Ledger:
    """Rows by key, an id or `line_key`. Close it."""

    def __init__(self) -> None:
        # Without a name it is private and temporary, and leaves memory when it grows.
        self._database = sqlite3.connect("", isolation_level=None)
        run = self._database.execute
        run("PRAGMA journal_mode=OFF")
        run("PRAGMA synchronous=OFF")
        run(
            "CREATE TABLE done (key TEXT PRIMARY KEY, fingerprint TEXT, failed INT, "
            "begin INT, end INT) WITHOUT ROWID"
        )
        run("CREATE TABLE stale (begin INT PRIMARY KEY, end INT) WITHOUT ROWID")
        run("CREATE TABLE seen (key TEXT PRIMARY KEY, line INT) WITHOUT ROWID")
        self.unreadable = 0  # lines of the output

    def close(self) -> None:
        """Forget everything."""
        self._database.close()

    @property
    def n_done(self) -> int:
        """Rows that the output holds."""
        return int(self._database.execute("SELECT count(*) FROM done").fetchone()[0])

    def find(self, key: str) -> Done | None:
        """What the output holds of a row."""
        row = self._database.execute(
            "SELECT fingerprint, failed FROM done WHERE key = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        first, second, third = str(row[0]).split()
        return Done((first, second, third), bool(row[1]))

    def add(self, key: str, done: Done, line: Line) -> None:
        """A record of the output; an earlier one of the same row is stale then."""
        self.drop(key)
        self._database.execute(
            "INSERT INTO done VALUES (?, ?, ?, ?, ?)",
            (key, " ".join(done.fingerprint), done.failed, line.begin, line.end),
        )

    def drop(self, key: str) -> None:
        """The record of a row is to go, since the row is done again."""
        run = self._database.execute
        run("INSERT INTO stale SELECT begin, end FROM done WHERE key = ?", (key,))
        run("DELETE FROM done WHERE key = ?", (key,))

    def stale(self) -> Iterator[tuple[int, int]]:
        """Bytes of the output that are to go, in order."""
        return self._database.execute("SELECT begin, end FROM stale ORDER BY begin")

    @property
    def has_stale(self) -> bool:
        """Whether any are."""
        return self._database.execute("SELECT 1 FROM stale LIMIT 1").fetchone() is not None

    def first_line(self, key: str, line: int) -> int:
        """The line at which a key of the input came first, which may be this one."""
        run = self._database.execute
        run("INSERT OR IGNORE INTO seen VALUES (?, ?)", (key, line))
        return int(run("SELECT line FROM seen WHERE key = ?", (key,)).fetchone()[0])

    def begin_again(self) -> None:
        """The input is read from its beginning once more."""
        self._database.execute("DELETE FROM seen")


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
        elif line.torn and (ledger.n_done or _may_be_ours(line.text, output)):
            output.mend(line)
            continue
        if found is None:
            ledger.unreadable += bool(line.text.strip())
        else:
            ledger.add(*found, line)
    if ledger.unreadable and not ledger.n_done:
        ledger.close()
        raise UsageError(
            f"{output.path} exists and is no output of specllama batch; name another file, "
            "or remove it"
        )
    return ledger


def _may_be_ours(torn: bytes, output: Output) -> bool:
    """Whether a file's only line, which is torn, begins like a record."""
    return is_packed(output.path) or torn.startswith(_BEGINNING[: len(torn)])


def _record(text: bytes) -> tuple[str, Done] | None:
    """(key, what it says) of a line of an output, or None."""
    try:
        record: dict[str, Any] = json.loads(text)
        fingerprint = [record["fingerprint"][part] for part in PARTS]
        first, second, third = (str(part) for part in fingerprint)
        error = record.get("error")
        name = record["custom_id"] if "custom_id" in record else record["id"]
        if name is None or (error is not None and error["code"] in LINE_CODES):
            name = line_key(int(record["line"]))
        name.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if any(len(part.split()) != 1 for part in (first, second, third)):
        return None
    return name, Done((first, second, third), error is not None)
