"""A model's chat template: Jinja that came with a file, so run in a sandbox and within bounds."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from specllama.errors import ModelError, UsageError

MAX_CHARACTERS = 20_000_000
"""What a template may write, and the longest text or list it may build on the way."""
MAX_SECONDS = 20.0
_NEXT_STEP = "give another template with --chat-template FILE, or use --raw"
_FILE = "<template>"  # jinja2's name for a template without a file, in tracebacks


class _Refusal(Exception):
    """The template called `raise_exception`: it does not take such a conversation."""


class _TooMuch(Exception):
    """The template ran for too long or built too much."""


class Template:
    """A chat template with the names that templates expect, as Hugging Face transformers sets up.

    name: the model's, for messages. now: what `strftime_now` tells, all through a conversation, so
    that midnight does not change a prompt that is in the cache.
    Raises ModelError, with the line, for Jinja that cannot be read.
    """

    def __init__(self, source: str, name: str, now: datetime) -> None:
        self.source = source
        self._name = name
        self._env = _environment(now)
        try:
            tree = _Bounds().visit(self._env.parse(source))
            self._template = self._env.from_string(tree)
        except TemplateSyntaxError as error:
            raise self._broken(f"is broken at line {error.lineno}: {error.message}") from None
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise self._broken(f"cannot be compiled: {_sentence(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation.

        Raises UsageError with the template's words where it refuses the conversation, ModelError
        with the line where it fails, runs longer than MAX_SECONDS or writes more than
        MAX_CHARACTERS. Its loops, operators and calls are watched, which ends what never comes to
        an end and what grows by steps; one single operation of Python, such as a filter over a long
        text, cannot be stopped from within the process.
        """
        self._env.begin()
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=list(messages), **variables):
                pieces.append(piece)
                length += len(piece)
                _require_size(length)
        except _Refusal as error:
            raise UsageError(
                f"the chat template of {self._name} refuses this conversation: {_sentence(error)}; "
                "change it, or give another template with --chat-template FILE"
            ) from None
        except (_TooMuch, OverflowError, MemoryError) as error:
            raise self._broken(f"was stopped: {_sentence(error)}") from None
        except RecursionError:
            raise self._broken("was stopped: its macros call each other without an end") from None
        except Exception as error:  # whatever an expression of a foreign file can raise
            where = _line(error)
            raise self._broken(f"fails{where}: {_sentence(error)}") from None
        return "".join(pieces)

    def _broken(self, what: str) -> ModelError:
        return ModelError(f"the chat template of {self._name} {what}; {_NEXT_STEP}")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on time, and on the size of what operators build."""

    intercepted_binops = frozenset(["+", "*", "**"])

    def begin(self) -> None:
        """Start the clock of a rendering."""
        self._deadline = time.monotonic() + MAX_SECONDS

    def tick(self) -> bool:
        """Called for every turn of a loop and every run of a macro."""
        if time.monotonic() > self._deadline:
            raise _TooMuch(f"it was still running after {MAX_SECONDS:.0f} seconds")
        return True

    def concatenate(self, *parts: Any) -> str:
        """What the operator ~ does."""
        texts = [str(part) for part in parts]
        _require_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _require_size(_bits(left) * _times(right))
        elif operator == "*":
            _require_size(_length(left) * _times(right), _length(right) * _times(left))
        else:
            _require_size(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls with huge numbers are refused: `"".ljust(10 ** 9)` and its like."""
        _require_size(*(_times(value) for value in (*args, *kwargs.values())))
        return super().call(context, called, *args, **kwargs)


class _Bounds(NodeTransformer):
    """Puts the environment's `tick` into every loop and macro, and replaces ~ by its own."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        tick = _call("tick", [], node.lineno)
        if node.test is not None:  # a loop whose filter lets nothing through has no turns
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        tick = _call("tick", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node.lineno)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(target, arguments, [], None, None, lineno=line)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: datetime) -> _Environment:
    env = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = now.strftime
    return env


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which would be part of the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _refuse(message: object = "") -> NoReturn:
    raise _Refusal(str(message))


def _require_size(*sizes: int) -> None:
    if any(size > MAX_CHARACTERS for size in sizes):
        raise _TooMuch(f"it builds more than {MAX_CHARACTERS:,} characters")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _line(error: BaseException) -> str:
    """Jinja maps its frames back to the template's lines."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    return f" at line {lines[-1]}" if lines else ""


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or "it does not say why"
    return text if len(text) <= 300 else f"{text[:300]}…"


