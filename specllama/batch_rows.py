"""A line of a batch's input as a row: its own format, and that of OpenAI's Batch API.

Own: {"id", "prompt" or "messages"} and sampling parameters beside them. OpenAI's: {"custom_id",
"method", "url", "body"}, for /v1/chat/completions and /v1/completions. A value of null is one that
is not given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.suggestions import nearest

PLAIN, CHAT, COMPLETION = "plain", "/v1/chat/completions", "/v1/completions"

Value = Callable[[Any, str], Any]


class RowError(Exception):
    """A row that cannot be answered: a code for programs, and a sentence.

    id: the row's, where that much is known of it. style: as `Row.style`.
    """

    def __init__(self, code: str, message: str, id: str | None = None, style: str = PLAIN) -> None:
        super().__init__(message)
        self.code, self.message, self.id, self.style = code, message, id, style


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a row is answered with where it says nothing itself. max_tokens: None is no limit."""

    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A request. Either prompt, text or token ids, or messages; the rest None where not given.

    style: PLAIN, CHAT or COMPLETION, the format in which it is answered. model: what an OpenAI
    request calls the model, which the answer repeats. digest: of all that it says but its id.
    """

    id: str
    style: str
    digest: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[Message, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    thinking: bool | None = None
    model: str | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling parameters. Raises UsageError for a value that cannot be."""
        return replace(defaults, **self.overrides)


def parse(data: bytes) -> Row:
    """A row from a line of UTF-8. Raises RowError."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "invalid_utf8", f"it is not UTF-8 at byte {error.start}; convert it, with iconv"
        ) from None
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError(
            "invalid_json", f"it is no JSON: {error.msg} at character {error.pos}"
        ) from None
    except (RecursionError, ValueError):
        problem = "its JSON is nested too deeply, or a number too long"
        raise RowError("invalid_json", problem) from None
    if not isinstance(given, dict):
        raise RowError("not_an_object", f"it is {_kind(given)} and not an object with a prompt")
    is_openai = "custom_id" in given or "body" in given
    name = _id(given, "custom_id" if is_openai else "id")
    style = PLAIN
    try:
        if is_openai:
            style = str(given.get("url", PLAIN))
            return _openai(given, name)
        return _row(name, PLAIN, {key: given[key] for key in given if key != "id"}, _OWN)
    except RowError as error:
        error.id, error.style = name, style
        raise


def _id(given: Mapping[str, Any], key: str) -> str:
    name = given.get(key)
    if name is None:
        raise RowError("missing_id", f'it has no "{key}"; give every row a text of its own')
    if not isinstance(name, str):
        raise RowError("invalid_id", f'"{key}" is {_kind(name)} and not a text; put it in quotes')
    if not name:
        raise RowError("invalid_id", f'"{key}" is empty; give every row a text of its own')
    return _text(name, key)


def _row(name: str, style: str, given: Mapping[str, Any], known: Mapping[str, Value]) -> Row:
    """A row from its values by name, which are all known."""
    values: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        target = _ALIASES.get(key, key)
        if target not in known:
            meant = nearest(key, known)
            hint = f"; did you mean {meant}?" if meant else ""
            raise RowError("unknown_key", f'it has a key "{key}", which means nothing here{hint}')
        if value is None:
            continue
        place = overrides if target in _PARAMS else values
        if target in place:
            raise RowError("invalid_parameter", f"it gives {target} twice; leave one of them out")
        place[target] = known[target](value, key)
    if ("prompt" in values) == ("messages" in values):
        both = "both a prompt and messages" if "prompt" in values else "no prompt and no messages"
        raise RowError("invalid_request", f"it has {both}; give one of them")
    return Row(name, style, digest(given), overrides=overrides, **values)


def digest(value: Any) -> str:
    """32 hexadecimal digits for a value of JSON, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- values ---------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a text",
             list: "a list", dict: "an object"}
    return kinds.get(type(value), "null")


def _wrong(value: Any, key: str, wanted: str, code: str = "invalid_parameter") -> RowError:
    return RowError(code, f'"{key}" is {_kind(value)} and not {wanted}')


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(value, key, "a number")
    try:
        return float(value)
    except OverflowError:
        raise RowError("invalid_parameter", f'"{key}" is far too large') from None


def _whole(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, key, "a whole number")
    return value


def _limit(value: Any, key: str) -> int:
    limit = _whole(value, key)
    if limit < -1:
        raise RowError("invalid_parameter", f'"{key}" must be -1 (no limit) or more, not {value}')
    return limit


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, key, "true or false")
    return value


def _text(value: Any, key: str) -> str:
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


def _stops(value: Any, key: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _wrong(value, key, "a text or a list of texts")
    if "" in stops:
        raise RowError("invalid_parameter", f'"{key}" holds an empty text; leave it out')
    return tuple(_text(stop, key) for stop in stops)


def _bias(value: Any, key: str) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _wrong(value, key, "an object of token ids and numbers")
    try:
        return {int(token): _number(bias, key) for token, bias in value.items()}
    except ValueError:
        raise RowError("invalid_parameter", f'"{key}" has a key that is no token id') from None


def _prompt(value: Any, key: str) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    if not isinstance(value, str):
        raise _wrong(value, key, "a text or a list of token ids", "invalid_request")
    return _text(value, key)


def _messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(value, key, "a list of messages", "invalid_request")
    return tuple(_message(each, number) for number, each in enumerate(value, 1))


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise RowError("invalid_messages", f"message {number} is no object with a role and content")
    if value.get("tool_calls") or value.get("function_call"):
        raise RowError("unsupported_parameter", f"message {number} calls tools, which are not here")
    content = value.get("content")
    if isinstance(content, list):
        content = _parts(content, number)
    if not isinstance(content, str):
        raise RowError(
            "invalid_messages", f"the content of message {number} is {_kind(content)}, not a text"
        )
    role = "system" if value["role"] == "developer" else value["role"]
    return Message(_text(role, "role"), _text(content, f"message {number}"))


def _parts(parts: Sequence[Any], number: int) -> str:
    """The text of a content in parts."""
    texts = []
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise RowError(
                "invalid_messages", f"message {number} has a part that is no text; leave it out"
            )
        texts.append(part["text"])
    return "".join(texts)


# --- names ----------------------------------------------------------------------------------

_PARAMS: dict[str, Value] = {
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repeat_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "penalty_last_n": _whole,
    "logit_bias": _bias,
}
_OWN: dict[str, Value] = {
    **_PARAMS,
    "prompt": _prompt,
    "messages": _messages,
    "max_tokens": _limit,
    "seed": _whole,
    "stop": _stops,
    "ignore_eos": _flag,
    "thinking": _flag,
}
_ALIASES = {
    "temp": "temperature",
    "n_predict": "max_tokens",
    "predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_last_n": "penalty_last_n",
}
_OPENAI: dict[str, Value] = {**_OWN, "model": _text}
# Of OpenAI's parameters those that change nothing, and those that may only have one value.
_IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "stream_options": (),
    "top_logprobs": (),
    "tool_choice": ("none", "auto"),
}


def _openai(given: Mapping[str, Any], name: str) -> Row:
    url, body = given.get("url"), given.get("body")
    if unknown := set(given) - {"custom_id", "method", "url", "body"}:
        raise RowError("unknown_key", f'it has a key "{min(unknown)}", which means nothing here')
    if given.get("method", "POST") != "POST":
        raise RowError("invalid_request", f'its method is {given["method"]!r} and not "POST"')
    if url not in (CHAT, COMPLETION):
        raise RowError("invalid_request", f"its url is {url!r}; {CHAT} and {COMPLETION} are known")
    if not isinstance(body, dict):
        raise RowError("invalid_request", f"its body is {_kind(body)} and not an object")
    asked = {}
    for key, value in body.items():
        if key in _FIXED and value is not None and value not in _FIXED[key]:
            raise RowError("unsupported_parameter", f'"{key}" cannot be {json.dumps(value)} here')
        if key not in _FIXED and key not in _IDLE:
            asked[key] = value
    wanted = "messages" if url == CHAT else "prompt"
    if asked.get(wanted) is None:
        raise RowError("invalid_request", f"its body has no {wanted}")
    return _row(name, url, asked, _OPENAI)

