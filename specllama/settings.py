"""The sampling parameters of a conversation by the command line's names, to look at and to change.

A value that cannot be raises UsageError and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specllama.errors import UsageError
from specllama.options import parse_bias, parse_count
from specllama.suggestions import nearest

if TYPE_CHECKING:
    from specllama.conversation import Conversation

NONE = "none"


@dataclass(frozen=True)
class Setting:
    """show: the value as it would be typed. change: set it from what was typed, or ValueError."""

    show: Callable[[Conversation], str]
    change: Callable[[Conversation, str], None]


def names() -> list[str]:
    """Every name, in the order of the command line's help."""
    return list(_SETTINGS)


def show(conversation: Conversation, name: str) -> str:
    """A parameter with its value. Raises UsageError for a name that is none."""
    name = _known(name)
    return f"{name} {_SETTINGS[name].show(conversation)}"


def change(conversation: Conversation, name: str, value: str) -> None:
    """Set a parameter. Raises UsageError for a name or a value that cannot be."""
    name = _known(name)
    try:
        _SETTINGS[name].change(conversation, value)
    except ValueError as error:
        raise UsageError(f"{name} cannot be {value!r}: {error}") from None


def _known(name: str) -> str:
    """The name as the command line has it."""
    plain = name.lstrip("-").replace("_", "-").lower()
    plain = _ALIASES.get(plain, plain)
    if plain not in _SETTINGS:
        meant = nearest(plain, _SETTINGS)
        next_step = f"did you mean {meant}?" if meant else "/set lists them"
        raise UsageError(f'there is no parameter "{name}"; {next_step}')
    return plain


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("it is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("it is no number") from None


def _parameter(field: str, parse: Callable[[str], Any]) -> Setting:
    """A number among the sampling parameters."""

    def change(conversation: Conversation, text: str) -> None:
        conversation.params = replace(conversation.params, **{field: parse(text)})

    return Setting(lambda conversation: f"{getattr(conversation.params, field):.15g}", change)


def _change_bias(conversation: Conversation, text: str) -> None:
    """Bias one token more, or none at all."""
    biases = {}
    if text.lower() != NONE:
        token, bias = parse_bias(text)
        biases = {**conversation.params.logit_bias, token: bias}
    conversation.params = replace(conversation.params, logit_bias=biases)


def _show_bias(conversation: Conversation) -> str:
    biases = conversation.params.logit_bias.items()
    return " ".join(f"{token}{bias:+.15g}" for token, bias in biases) or NONE


def _change_seed(conversation: Conversation, text: str) -> None:
    seed = None if text.lower() == NONE else _whole(text)
    conversation.seed = None if seed == -1 else seed


def _show_seed(conversation: Conversation) -> str:
    return "-1" if conversation.seed is None else str(conversation.seed)


def _change_predict(conversation: Conversation, text: str) -> None:
    count = parse_count(text)
    conversation.max_tokens = None if count == -1 else count


def _show_predict(conversation: Conversation) -> str:
    return "-1" if conversation.max_tokens is None else str(conversation.max_tokens)


def _change_stop(conversation: Conversation, text: str) -> None:
    conversation.stop = () if text.lower() == NONE else (text,)


def _show_stop(conversation: Conversation) -> str:
    return " or ".join(repr(stop) for stop in conversation.stop) or NONE


def _change_ignore_eos(conversation: Conversation, text: str) -> None:
    try:
        conversation.ignore_eos = {"on": True, "off": False}[text.lower()]
    except KeyError:
        raise ValueError("it is neither on nor off") from None


def _show_ignore_eos(conversation: Conversation) -> str:
    return "on" if conversation.ignore_eos else "off"


_ALIASES = {"temperature": "temp", "n": "predict", "max-tokens": "predict", "s": "seed"}
_SETTINGS = {
    "seed": Setting(_show_seed, _change_seed),
    "temp": _parameter("temperature", _number),
    "top-k": _parameter("top_k", _whole),
    "top-p": _parameter("top_p", _number),
    "min-p": _parameter("min_p", _number),
    "repeat-penalty": _parameter("repeat_penalty", _number),
    "presence-penalty": _parameter("presence_penalty", _number),
    "frequency-penalty": _parameter("frequency_penalty", _number),
    "repeat-last-n": _parameter("penalty_last_n", _whole),
    "logit-bias": Setting(_show_bias, _change_bias),
    "stop": Setting(_show_stop, _change_stop),
    "predict": Setting(_show_predict, _change_predict),
    "ignore-eos": Setting(_show_ignore_eos, _change_ignore_eos),
}
