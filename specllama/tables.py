"""A table of a TOML file that knows its place, so that a refusal names file, line and key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from specllama.errors import UsageError
from specllama.suggestions import nearest

_LARGEST = 1e15  # of anything that is counted here, so that no sum overflows


def read_text(path: Path) -> str:
    """The text of a file, without a byte-order mark. Raises UsageError."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot read the registry {path}: {reason}; check the path") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save it as UTF-8") from None


def parse_toml(path: Path, text: str) -> Table:
    """The top table of a text, in whose refusals it is that of the path. Raises UsageError."""
    try:
        return Table(path, text, (), tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}; correct the line") from None
    except ValueError as error:  # a number with more digits than Python converts
        raise UsageError(f"{path} cannot be read: {error}; correct the number") from None
    except RecursionError:
        raise UsageError(f"{path} is not valid TOML: nested too deeply; correct it") from None


@dataclass(frozen=True)
class Table:
    """The values of a table, taken out by key and type. All methods raise UsageError."""

    path: Path
    content: str
    place: tuple[str, ...]
    values: Mapping[str, object]

    def refuse(self, problem: str, key: str | None = None) -> NoReturn:
        """Raise the error, with the line of the key, or of the table's beginning."""
        place = self.place if key is None else (*self.place, key)
        line = _line(self.content, place)
        raise UsageError(f"{self.path}{f', line {line}' if line else ''}: {problem}")

    def key(self, key: str) -> str:
        """The whole name of a key, in quotes for a message."""
        return f'"{".".join((*self.place, key))}"'

    def allow(self, keys: Collection[str]) -> None:
        """Refuse every other key."""
        for key in self.values:
            if key not in keys:
                hint = did_you_mean(key, keys) or f"the keys here are: {', '.join(sorted(keys))}"
                self.refuse(f"unknown key {self.key(key)}; {hint}", key)

    def text(self, key: str, default: str | None = None) -> str:
        """A text, the default when it is left out."""
        value = self.optional_text(key)
        if value is not None:
            return value
        if default is None:
            self.refuse(f"{self.key(key)} is missing; add it")
        return default

    def optional_text(self, key: str) -> str | None:
        """A text that is not blank, or None when it is left out."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            self.refuse(f"{self.key(key)} must be a text in quotes, not {_shown(value)}", key)
        if "\0" in value:
            self.refuse(f"{self.key(key)} must not contain a null character", key)
        return value

    def optional_number(self, key: str) -> float | None:
        """A number above 0, or None when it is left out."""
        value = self.values.get(key)
        if value is None:
            return None
        # A bool is an int to Python, and the comparison is false for "nan".
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < _LARGEST:  # type: ignore[operator]
            wanted = "must be a number above 0 and below 1e15"
            self.refuse(f"{self.key(key)} {wanted}, not {_shown(value)}", key)
        return value  # type: ignore[return-value]

    def optional_count(self, key: str) -> int | None:
        """A whole number above 0, or None when it is left out."""
        value = self.optional_number(key)
        if value is not None and not isinstance(value, int):
            self.refuse(f"{self.key(key)} must be a whole number, not {_shown(value)}", key)
        return value

    def truth(self, key: str) -> bool:
        """true or false; false when it is left out."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(f"{self.key(key)} must be true or false, not {_shown(value)}", key)
        return value

    def table(self, key: str) -> Table:
        """A table in this one."""
        if key not in self.values:
            self.refuse(f"{self.key(key)} is missing; add it")
        value = self.values[key]
        if not isinstance(value, dict):
            self.refuse(f"{self.key(key)} must be a table, not {_shown(value)}", key)
        return Table(self.path, self.content, (*self.place, key), value)


def _shown(value: object) -> str:
    """A value in few characters."""
    try:
        text = repr(value)
    except ValueError:  # a number with more digits than Python converts
        return "so large a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def did_you_mean(word: str, known: Collection[str]) -> str | None:
    """`did you mean "x"?` with the known word that is most like this one, if any is."""
    meant = nearest(word, known)
    return None if meant is None else f'did you mean "{meant}"?'


def _line(text: str, place: tuple[str, ...]) -> int | None:
    """The line, from 1, at which a key is first complete: `tomllib` does not tell positions.

    It is the last line of the shortest beginning of the file that has the key. Such a beginning
    ends in a line with the key's own name, or where the value that starts there is complete.
    """
    if not place:
        return None
    lines, begun = text.split("\n"), False
    for count, line in enumerate(lines, 1):
        begun = begun or place[-1] in line or "\\" in line  # a quoted key may be escaped
        if not begun:
            continue
        try:
            value: object = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        begun = False
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return count
    return None
