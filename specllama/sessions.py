"""Saved conversations: readable JSON, and beside it on request what the caches hold.

The JSON is one object. Keys that this version does not know are ignored when it is loaded, and gone
when it is saved again; a format number above FORMAT is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from specllama import kv_files
from specllama.conversation import Conversation
from specllama.errors import SpecllamaError, UsageError
from specllama.kv_files import Identity
from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.storage import read, write

FORMAT = 1
_PARAMS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_LARGEST = 64 * 2**20  # bytes; a model that is loaded by mistake is larger


@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a file holds, checked.

    draft: who drafts, None if it does not say. target: the model's identity, None if it was not
    known.
    """

    messages: list[Message]
    dropped: list[Message]
    attempt: int
    settings: dict[str, Any]
    draft: str | int | None
    target: Identity | None
    kv: kv_files.Reference | None


def save(path: str | Path, conversation: Conversation, *, kv: bool = False) -> list[str]:
    """Write the conversation to a file, whole or not at all; what the user should know.

    kv: also write the KV state of target and draft, to the same name with ".kv" behind it; when
    that fails, the conversation is saved without. Raises UsageError for a path that is no file's,
    SpecllamaError when it cannot be written; the file that was there is then as it was.
    """
    conversation.settle()
    path = Path(path)
    notices: list[str] = []
    reference = None
    if kv:
        try:
            reference = kv_files.save(_kv_path(path), conversation.pair)
        except SpecllamaError as error:
            notices.append(f"the KV state is not saved: {error}")
    document = _document(conversation, reference)
    # A lone surrogate stands only inside a string, where this is JSON's own way to write it.
    write(path, [_readable(document).encode("utf-8", "backslashreplace")])
    return notices


def is_session(path: Path) -> bool:
    """Whether a file is a saved conversation, which another one may replace."""
    try:
        _parse(path.read_bytes())
    except (OSError, ValueError, SpecllamaError, RecursionError, OverflowError):
        return False
    return True


def load(
    path: str | Path, conversation: Conversation, keep: Collection[str] = ()
) -> list[str]:
    """Go on with a saved conversation: messages and settings, and its KV state where it fits.

    keep: settings that stay as they are whatever the file says: names of a conversation's
    attributes, of the fields of SamplingParams, and "draft". Returns what the user should know.
    Token ids of answers, and the KV state, are used only with the model that they came from.
    Raises UsageError for a file that is not there, damaged or not a saved conversation,
    SpecllamaError for a model file that is gone; the conversation is then as it was.
    """
    path = Path(path)
    data = read(path, _LARGEST)
    try:
        saved = _parse(data)
    except (ValueError, OverflowError, RecursionError, UsageError) as error:
        raise UsageError(
            f"{path} is not a conversation that this version of specllama can read: "
            f"{_reason(error)}; name a file that /save made"
        ) from None
    notices: list[str] = []
    messages, dropped = saved.messages, saved.dropped
    same = saved.target is not None and saved.target in kv_files.identities(conversation.pair)[:1]
    if same:
        _require_ids(path, [*messages, *dropped], conversation.pair.tokenizer.n_vocab)
    else:
        messages, dropped = _without_tokens(messages), _without_tokens(dropped)
        if saved.target is not None:
            notices.append(
                f"the conversation was held with {saved.target.name}; its text goes on with "
                f"{conversation.pair.target.name}"
            )
    conversation.resume(messages, dropped, saved.attempt)
    params = {name: getattr(conversation.params, name) for name in keep if name in _PARAMS}
    settings = {**saved.settings, "params": dataclasses.replace(saved.settings["params"], **params)}
    for name in settings.keys() - set(keep):
        setattr(conversation, name, settings[name])
    if saved.draft is not None and "draft" not in keep:
        notices += _speculate(conversation, saved.draft)
    if saved.kv is not None:
        notices += kv_files.load(_kv_path(path), conversation.pair, saved.kv)
    return notices


def _speculate(conversation: Conversation, choice: str | int) -> list[str]:
    """Let draft who drafted before; a notice where that cannot be."""
    if choice != conversation.speculation:
        try:
            conversation.speculate(choice)
        except UsageError as error:
            return [f"drafting stays at {conversation.speculation}, and was at {choice}: {error}"]
    return []


def _require_ids(path: Path, messages: Sequence[Message], n_vocab: int) -> None:
    # llama.cpp ends the process for an id that it does not have.
    highest = max((token for message in messages for token in message.tokens), default=0)
    if highest >= n_vocab:
        raise UsageError(
            f"{path} has tokens beyond the last one of the model, {n_vocab - 1}; take the "
            '"tokens" out of the file, and the text goes on without them'
        )


def _kv_path(path: Path) -> Path:
    return path.with_name(path.name + ".kv")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def _without_tokens(messages: Sequence[Message]) -> list[Message]:
    return [dataclasses.replace(message, tokens=()) for message in messages]


# --- writing ------------------------------------------------------------------------------------


def _document(conversation: Conversation, kv: kv_files.Reference | None) -> dict[str, Any]:
    from specllama import __version__

    known = map(dataclasses.asdict, kv_files.identities(conversation.pair))
    return {
        "format": FORMAT,
        "program": "specllama",
        "version": __version__,
        "pair": dict(zip(("target", "draft"), known, strict=False)),
        "system": conversation.system,
        "params": _params_object(conversation.params),
        "seed": conversation.seed,
        "max_tokens": conversation.max_tokens,
        "stop": list(conversation.stop),
        "ignore_eos": conversation.ignore_eos,
        "thinking": conversation.thinking,
        "context_full": conversation.context_full,
        "draft": conversation.speculation,
        "attempt": conversation.attempt,
        "kv": None if kv is None else dataclasses.asdict(kv),
        "dropped": list(map(_message_object, conversation.dropped)),
        "messages": list(map(_message_object, conversation.messages)),
    }


def _message_object(message: Message) -> dict[str, Any]:
    told = {"role": message.role, "content": message.content}
    return {**told, "tokens": list(message.tokens)} if message.tokens else told


def _params_object(params: SamplingParams) -> dict[str, Any]:
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    # JSON has no infinity, which bans a token.
    bias = {str(t): b if math.isfinite(b) else str(b) for t, b in params.logit_bias.items()}
    return {**values, "logit_bias": bias}


def _readable(document: Mapping[str, Any]) -> str:
    """JSON with one entry on a line, and one message."""
    lines = (f"  {_json(name)}: {_value(value)}" for name, value in document.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return _json(value)
    return "[\n" + ",\n".join(f"    {_json(item)}" for item in value) + "\n  ]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


# --- reading ------------------------------------------------------------------------------------


def _parse(data: bytes) -> _Saved:
    """The checked content of a file.

    Raises ValueError, UsageError, RecursionError, and OverflowError for a number beyond floats.
    """
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON, or cut, at line {error.lineno}") from None
    if not isinstance(document, dict) or document.get("program") != "specllama":
        raise ValueError("it is something else")
    number = _typed(document, "format", int)
    if number > FORMAT:
        raise ValueError(f"a newer version saved it, in format {number}")
    settings = {
        "system": _typed(document, "system", str, None),
        "params": _params(_typed(document, "params", dict)),
        "seed": _typed(document, "seed", int, None),
        "max_tokens": _typed(document, "max_tokens", int, None),
        "stop": _stops(_typed(document, "stop", list, [])),
        "ignore_eos": _typed(document, "ignore_eos", bool, False),
        "thinking": _typed(document, "thinking", bool, None),
    }
    if (settings["max_tokens"] or 0) < -1:
        raise ValueError("max_tokens is below -1")
    context_full = _typed(document, "context_full", str, None)
    if context_full not in (None, "drop", "stop"):
        raise ValueError("its context_full is neither drop nor stop")
    if context_full is not None:  # which older files do not tell
        settings["context_full"] = context_full
    attempt = _typed(document, "attempt", int, 0)
    kv = _typed(document, "kv", dict, None)
    target = _typed(_typed(document, "pair", dict), "target", dict, None)
    return _Saved(
        [_message(item) for item in _typed(document, "messages", list)],
        [_message(item) for item in _typed(document, "dropped", list, [])],
        attempt,
        settings,
        _draft(document.get("draft")),
        None if target is None else _record(Identity, target),
        None if kv is None else _record(kv_files.Reference, kv),
    )


def _draft(choice: Any) -> str | int | None:
    is_count = type(choice) is int and choice > 0
    if not (choice is None or is_count or choice in ("auto", "off", "only")):
        raise ValueError("its draft is neither auto, off, only nor a number")
    return choice  # type: ignore[no-any-return]


_REQUIRED: Any = object()


def _typed(found: Any, name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """An entry of a JSON object; the default where it is missing, or null where that is None."""
    if not isinstance(found, dict):
        raise ValueError(f"where {name} should be there is no object")
    value = found.get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"it has no {name}")
    if value is default:
        return default
    # JSON's true is an int for Python.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"its {name} is of a wrong kind")
    return value


def _message(item: Any) -> Message:
    role = _typed(item, "role", str)
    if role not in ("user", "assistant"):
        raise ValueError("a message has an unknown role")
    tokens = _typed(item, "tokens", list, [])
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("the tokens of a message are no ids")
    return Message(role, _typed(item, "content", str), tuple(tokens))


def _params(found: dict[str, Any]) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, default in dataclasses.asdict(SamplingParams()).items():
        if name in found and name != "logit_bias":
            kind = type(default)
            whole = kind is float and isinstance(found[name], int)  # 1 is a number like 1.0
            values[name] = _typed(found, name, int if whole else kind)
    bias = _typed(found, "logit_bias", dict, {})
    values["logit_bias"] = {int(token): _bias(value) for token, value in bias.items()}
    return SamplingParams(**values)


def _bias(value: Any) -> float:
    if value == "-inf":
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a logit bias is no number")
    return float(value)


def _stops(found: list[Any]) -> tuple[str, ...]:
    if not all(isinstance(stop, str) and stop for stop in found):
        raise ValueError("a stop string is no text")
    return tuple(found)


def _record(kind: Any, found: dict[str, Any]) -> Any:
    """A dataclass of texts and whole numbers."""
    types = {"str": str, "int": int}
    fields = dataclasses.fields(kind)
    return kind(**{f.name: _typed(found, f.name, types[str(f.type)]) for f in fields})


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
