"""The values of a batch's row: what each may be, and the error of one that cannot be.

A check takes the value and the key that it was given under, and returns what the row holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specllama.prompts import Message

# How a row is asked for and answered: our own format, or an endpoint of OpenAI's.
PLAIN, CHAT, COMPLETION = "plain", "/v1/chat/completions", "/v1/completions"

Check = Callable[[Any, str], Any]

_SHOWN = 60  # characters of a value in a message
_TOKEN = re.compile(r"[0-9]{1,20}")
# What a message of another program may have besides, which changes nothing in a prompt.
_IDLE = frozenset({"role", "content", "name", "refusal", "annotations"})


class RowError(Exception):
    """A row that cannot be answered: a code for programs, and a sentence.

    id: the row's, where that much is known of it. style: PLAIN, CHAT or COMPLETION.
    """

    def __init__(self, code: str, message: str, id: str | None = None, style: str = PLAIN) -> None:
        super().__init__(message)
        self.code, self.message, self.id, self.style = code, message, id, style


def shown(value: Any) -> str:
    """A value of the input for a message: as JSON, on one line, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def kind(value: Any) -> str:
    """What a value of JSON is, for a message."""
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a text",
             list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def _wrong(value: Any, key: str, wanted: str, code: str = "invalid_parameter") -> RowError:
    return RowError(code, f'"{key}" is {kind(value)} and not {wanted}')


def name(given: Mapping[str, Any], key: str) -> str:
    """The id of a row, which stands under this key."""
    value = given.get(key)
    if value is None:
        raise RowError("missing_id", f'it has no "{key}"; give every row a text of its own')
    if not isinstance(value, str):
        raise RowError("invalid_id", f'"{key}" is {kind(value)} and not a text; put it in quotes')
    if not value:
        raise RowError("invalid_id", f'"{key}" is empty; give every row a text of its own')
    return text(value, key)


def number(value: Any, key: str) -> float:
    """A number; NaN and infinity are for the parameter's own rule to refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, key, "a number")
    try:
        return float(value)
    except OverflowError:
        raise RowError("invalid_parameter", f'"{key}" is far too large') from None


def whole(value: Any, key: str) -> int:
    """A whole number, which JSON writes without a point."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, key, "a whole number")
    return value


def limit(value: Any, key: str) -> int:
    """A number of tokens, -1 for no limit."""
    count = whole(value, key)
    if count < -1:
        raise RowError("invalid_parameter", f'"{key}" must be -1 (no limit) or more, not {count}')
    return count


def flag(value: Any, key: str) -> bool:
    """True or false, and nothing that is like it."""
    if not isinstance(value, bool):
        raise _wrong(value, key, "true or false")
    return value


def text(value: Any, key: str) -> str:
    """A text of whole characters."""
    if not isinstance(value, str):
        raise _wrong(value, key, "a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            "invalid_text",
            f'"{key}" holds half a surrogate pair at character {error.start}, which is no '
            "character; remove it",
        ) from None
    return value


def stops(value: Any, key: str) -> tuple[str, ...]:
    """One stop string or a list of them; an empty list is none."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise _wrong(value, key, "a text or a list of texts")
    if "" in found:
        raise RowError("invalid_parameter", f'"{key}" holds an empty text; leave it out')
    return tuple(text(stop, key) for stop in found)


def bias(value: Any, key: str) -> dict[int, float]:
    """Numbers by token id, which JSON has as texts."""
    if not isinstance(value, dict):
        raise _wrong(value, key, "an object of token ids and numbers")
    for token in value:
        if not _TOKEN.fullmatch(token):
            raise RowError("invalid_parameter", f'"{key}" has {shown(token)}, which is no token id')
    biases = {int(token): number(each, key) for token, each in value.items()}
    if len(biases) < len(value):
        raise RowError("invalid_parameter", f'"{key}" has a token id twice; leave one of them out')
    return biases


def prompt(value: Any, key: str) -> str | tuple[int, ...]:
    """A text or token ids; also a text in a list, as the service takes several."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if isinstance(value, list) and all(isinstance(each, str | list) for each in value):
        what = "several prompts; give each a row of its own" if value else "empty"
        raise RowError("invalid_request", f'"{key}" is {what}')
    if not isinstance(value, str):
        raise _wrong(value, key, "a text or a list of token ids", "invalid_request")
    return text(value, key)


def messages(value: Any, key: str) -> tuple[Message, ...]:
    """A conversation."""
    if not isinstance(value, list):
        raise _wrong(value, key, "a list of messages", "invalid_request")
    if not value:
        raise RowError("invalid_request", f'"{key}" is empty; give it a user\'s message')
    return tuple(_message(each, count) for count, each in enumerate(value, 1))


def _message(value: Any, count: int) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RowError("invalid_messages", f"message {count} is no object with a role and content")
    for key in value:
        if key not in _IDLE and value[key]:  # what is null or empty is not there
            raise RowError(
                "unsupported_parameter",
                f"message {count} has {shown(key)}, and nothing but its role and text can be used",
            )
    content = value.get("content")
    if isinstance(content, list):
        content = _parts(content, count)
    if not isinstance(content, str):
        raise RowError(
            "invalid_messages", f"the content of message {count} is {kind(content)}, not a text"
        )
    role = "system" if value["role"] == "developer" else value["role"]
    return Message(text(role, "role"), text(content, f"message {count}"))


def _parts(parts: Sequence[Any], count: int) -> str:
    """The text of a content in parts."""
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RowError(
                "invalid_messages", f"message {count} has a part that is no text; leave it out"
            )
        texts.append(part["text"])
    return "".join(texts)
