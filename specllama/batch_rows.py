"""A line of a batch's input as a row: its own format, and that of OpenAI's Batch API.

Own: {"id", "prompt" or "messages"} and sampling parameters beside them. OpenAI's: {"custom_id",
"method", "url", "body"}, for /v1/chat/completions and /v1/completions. A value of null is one that
is not given.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specllama import batch_values as values
from specllama.batch_values import CHAT, COMPLETION, PLAIN, Check, RowError, kind, shown
from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.suggestions import nearest

_LONGEST_KEY = 100  # characters of a key that is looked for among the known ones


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
    given = _object(data)
    is_openai = "custom_id" in given or "body" in given
    style = PLAIN
    if is_openai:
        style = COMPLETION if given.get("url") == COMPLETION else CHAT
    name = None
    try:
        name = values.name(given, "custom_id" if is_openai else "id")
        if is_openai:
            return _openai(given, name)
        return _row(name, PLAIN, {key: given[key] for key in given if key != "id"}, _OWN)
    except RowError as error:
        raise RowError(error.code, error.message, name, style) from None


def _object(data: bytes) -> dict[str, Any]:
    """What a line holds, if that is an object. Raises RowError."""
    try:
        given = json.loads(data.decode("utf-8"), object_pairs_hook=_without_doubles)
    except UnicodeDecodeError as error:
        raise RowError(
            "invalid_utf8", f"it is not UTF-8 at byte {error.start}; convert it, with iconv"
        ) from None
    except json.JSONDecodeError as error:
        raise RowError(
            "invalid_json", f"it is no JSON: {error.msg} at character {error.pos}"
        ) from None
    except (RecursionError, ValueError):
        problem = "its JSON is nested too deeply, or a number too long"
        raise RowError("invalid_json", problem) from None
    if isinstance(given, list):
        problem = "it is a list; put each of its objects on a line of its own"
        raise RowError("not_an_object", problem)
    if not isinstance(given, dict):
        raise RowError("not_an_object", f"it is {kind(given)} and not an object with a prompt")
    return given


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; which of two values is meant nobody knows."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise RowError("invalid_json", f"it has a key twice, {shown(key)}; leave one of them out")
    return found


def _row(name: str, style: str, given: Mapping[str, Any], known: Mapping[str, Check]) -> Row:
    """A row from its values by name, which are all known."""
    found: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        target = _ALIASES.get(key, key)
        if target not in known:
            meant = nearest(key[:_LONGEST_KEY], known)
            hint = f"; did you mean {meant}?" if meant else ""
            raise RowError("unknown_key", f"it has {shown(key)}, which means nothing here{hint}")
        if value is None:
            continue
        place = overrides if target in _PARAMS else found
        if target in place:
            raise RowError("invalid_parameter", f"it gives {target} twice; leave one of them out")
        place[target] = known[target](value, key)
    if ("prompt" in found) == ("messages" in found):
        both = "both a prompt and messages" if "prompt" in found else "no prompt and no messages"
        raise RowError("invalid_request", f"it has {both}; give one of them")
    return Row(name, style, digest([style, given]), overrides=overrides, **found)


def digest(value: Any) -> str:
    """32 hexadecimal digits for a value of JSON, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- OpenAI ---------------------------------------------------------------------------------


def _openai(given: Mapping[str, Any], name: str) -> Row:
    url, body = given.get("url"), given.get("body")
    if unknown := set(given) - {"custom_id", "method", "url", "body"}:
        raise RowError("unknown_key", f"it has {shown(min(unknown))}, which means nothing here")
    if given.get("method", "POST") != "POST":
        raise RowError("invalid_request", f'its method is {shown(given["method"])}, not "POST"')
    if url not in (CHAT, COMPLETION):
        problem = f"its url is {shown(url)}; {CHAT} and {COMPLETION} are known"
        raise RowError("invalid_request", problem)
    if not isinstance(body, dict):
        raise RowError("invalid_request", f"its body is {kind(body)} and not an object")
    asked = {}
    for key, value in body.items():
        if key in _FIXED and value is not None and value not in _FIXED[key]:
            raise RowError("unsupported_parameter", f'"{key}" cannot be {shown(value)} here')
        if key not in _FIXED and key not in _IDLE:
            asked[key] = value
    wanted = "messages" if url == CHAT else "prompt"
    if asked.get(wanted) is None:
        raise RowError("invalid_request", f"its body has no {wanted}")
    return _row(name, url, asked, _OPENAI)


# --- names ----------------------------------------------------------------------------------

_PARAMS: dict[str, Check] = {
    "temperature": values.number,
    "top_k": values.whole,
    "top_p": values.number,
    "min_p": values.number,
    "repeat_penalty": values.number,
    "presence_penalty": values.number,
    "frequency_penalty": values.number,
    "penalty_last_n": values.whole,
    "logit_bias": values.bias,
}
_OWN: dict[str, Check] = {
    **_PARAMS,
    "prompt": values.prompt,
    "messages": values.messages,
    "max_tokens": values.limit,
    "seed": values.whole,
    "stop": values.stops,
    "ignore_eos": values.flag,
    "thinking": values.flag,
}
_ALIASES = {
    "temp": "temperature",
    "n_predict": "max_tokens",
    "predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_last_n": "penalty_last_n",
}
_OPENAI: dict[str, Check] = {**_OWN, "model": values.text}
# Of OpenAI's parameters those that change nothing here, and those that may only have some values.
_IDLE = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "prediction"),
    }
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "audio": (),
    "reasoning_effort": (),
    "stream_options": (),
    "top_logprobs": (0,),
    "web_search_options": (),
}
