"""`specllama chat` on the command line: a terminal, a pipe, or a single message."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import specllama
from specllama.errors import SpecllamaError, UsageError
from specllama.options import (
    file_options,
    file_path,
    load_pair,
    run_options,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from specllama.chat import Chat
    from specllama.conversation import Conversation
    from specllama.generation import Pair
    from specllama.markers import ChatTokenizer
    from specllama.presentation import Presentation, Screen
    from specllama.prompts import ChatFormat, RawFormat
    from specllama.terminal import LineEditor


_MUCH = 512  # tokens that take long enough to read for a word about it
# What an option sets of a conversation, by the names that `sessions.load` has for it.
_SETS = {
    "temp": "temperature", "repeat_last_n": "penalty_last_n",
    "predict": "max_tokens", "system_file": "system", "drafter": "draft", "draft_tokens": "draft",
}  # fmt: skip


def _text(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Refuse what cannot be a text before models are loaded."""
    try:
        os.fsencode(value or "").decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"it is not UTF-8 at byte {error.start}; convert it, with iconv for example"
        ) from None
    return value


@click.command()
@file_options
@run_options
@sampling_options
@click.option("-sys", "--system", metavar="TEXT", callback=_text,
              help="What the model is told to be.")
@click.option("--system-file", type=file_path, help="A file with that text.")
@click.option("--chat-template", type=file_path, help="A Jinja file instead of the model's own.")
@click.option("--raw", is_flag=True, help="No template: messages and answers just follow.")
@click.option("-p", "--prompt", metavar="TEXT", callback=_text,
              help="Answer this message and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as an object, on a line.")
@click.option("--context-full", type=click.Choice(["drop", "stop"]), default="drop",
              show_default=True, help="Drop the oldest turns, or refuse another message.")
@click.option("--hide-thinking", is_flag=True, help="Do not show what the model thinks.")
@click.option("--session", type=file_path,
              help="Go on with the conversation in this file, if it is there, and keep it there.")
@click.option("--kv", is_flag=True, help="Save what both models hold in their caches, too.")
@click.option("--no-history", is_flag=True, help="Keep no history of what is typed.")
@click.option("--stats/--no-stats", default=None,
              help="A line on each answer, on standard error.  [default: on a terminal]")
def chat(
    prompt: str | None, session: Path | None, stats: bool | None, no_history: bool, **options: Any
) -> None:
    """Talk with a model; /help lists the commands.

    On a terminal Enter sends, Alt-Enter or a backslash at the end begins a new line, a paste is
    one message, Ctrl-C stops an answer and Ctrl-D leaves. From a pipe each line is one message,
    in turn, and commands work too. Answers go to standard output, everything else to standard
    error. A question for a first try, which needs no files of your own:

    \b
      specllama chat --prompt "Why is the sky blue?"
    """
    from specllama.chat import Chat
    from specllama.folders import state_folder
    from specllama.terminal import LineEditor, Screen

    if prompt is not None and not prompt.strip():
        raise UsageError("the prompt is empty; give --prompt some text")
    session = _session(session)
    system = _system(options["system"], options["system_file"])
    screen = Screen()
    with load_pair(options) as pair:
        chat_format = _format(pair, options["chat_template"], options["raw"])
        conversation = _conversation(pair, chat_format, system, screen, options)
        the_chat = Chat(
            conversation,
            screen,
            present=_presentation(options["as_json"], options["hide_thinking"]),
            kv=options["kv"],
        )
        the_chat.tell_notices()
        if prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
            if stats is not False and sys.stderr.isatty():
                the_chat.status = screen.aside
            history = None if no_history else state_folder() / "history"
            with _kept(the_chat, session), LineEditor(history, _completions()) as line_editor:
                _converse(the_chat, line_editor)
            return
        if stats:
            the_chat.status = screen.aside
        with _kept(the_chat, session) as problem:
            code = _lines(the_chat) if prompt is None else _one_message(the_chat, prompt)
        if code or problem:
            raise click.exceptions.Exit(code or problem[0])


def _session(path: Path | None) -> Path | None:
    """Where the conversation is kept. Raises UsageError before anything is said."""
    from specllama.commands import expanded

    path = path and expanded(str(path))
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for --session; make it first")
    return path


def _system(text: str | None, path: Path | None) -> str | None:
    """The system prompt, given as it is or in a file."""
    from specllama.commands import text_of

    if text is not None and path is not None:
        raise UsageError("give either --system or --system-file, not both")
    system = text if path is None else text_of(path)
    return system if system and system.strip() else None


def _format(pair: Pair, path: Path | None, raw: bool) -> ChatFormat | RawFormat:
    """How the model is spoken to. Raises ModelError when that is not known."""
    from specllama.commands import text_of
    from specllama.prompts import ChatFormat, RawFormat

    if raw and path is not None:
        raise UsageError("give either --chat-template or --raw, not both")
    # A file's tokenizer knows its tokens' kinds; only the core makes do with less.
    tokenizer = cast("ChatTokenizer", pair.tokenizer)
    if raw:
        return RawFormat(tokenizer)
    template = pair.chat_template if path is None else text_of(path)
    return ChatFormat.of(template, tokenizer, tokenizer.name)


def _conversation(
    pair: Pair,
    chat_format: ChatFormat | RawFormat,
    system: str | None,
    screen: Screen,
    options: dict[str, Any],
) -> Conversation:
    from specllama.conversation import Conversation

    conversation = Conversation(
        pair,
        chat_format,
        params=sampling_params(options),
        system=system,
        max_tokens=None if options["predict"] == -1 else options["predict"],
        stop=options["stop"],
        seed=None if options["seed"] == -1 else options["seed"],
        ignore_eos=options["ignore_eos"],
        context_full=options["context_full"],
        notify=lambda notice: screen.say(f"Note: {notice}"),
    )
    if sys.stderr.isatty():
        conversation.on_reading = partial(_tell_reading, screen)
    return conversation


def _tell_reading(screen: Screen, n_tokens: int) -> None:
    """Why nothing is seen for a while."""
    if n_tokens >= _MUCH:
        screen.aside(f"reading {n_tokens:,} tokens; Ctrl-C stops")


def _presentation(as_json: bool, hide_thinking: bool) -> Presentation:
    from specllama import presentation

    if as_json:
        if hide_thinking:
            return presentation.print_turn_without_thinking
        return presentation.print_turn
    return presentation.stream_without_thinking if hide_thinking else presentation.stream


def _given() -> set[str]:
    """What the command line says itself, and a session's file therefore does not change."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    given = {name for name in context.params if context.get_parameter_source(name) == source}
    return {_SETS.get(name, name) for name in given}


@contextlib.contextmanager
def _kept(chat: Chat, session: Path | None) -> Iterator[list[int]]:
    """Go on with the session's file, and keep it; the exit code where it could not be loaded.

    A file that cannot be loaded is left as it is.
    """
    problem: list[int] = []
    if session is not None:
        try:
            if session.exists():
                chat.load(session, _given())
            chat.session = session
        except SpecllamaError as error:
            chat.screen.say(f"Error: {error}; the chat goes on without it and leaves it alone")
            problem.append(error.exit_code)
    try:
        yield problem
    except BaseException:
        with contextlib.suppress(SpecllamaError):  # the other one is told
            chat.keep()
        raise
    chat.keep()


def _one_message(chat: Chat, prompt: str) -> int:
    chat.send(prompt)
    return 0


_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _lines(chat: Chat) -> int:
    """Take standard input line by line; the exit code of the first line that failed, or 0."""
    from specllama.commands import take

    code, number = 0, 0
    for number, data in enumerate(sys.stdin.buffer, 1):
        if number == 1 and data.startswith(_UTF_16):
            raise UsageError("standard input is UTF-16; convert it, with iconv for example")
        try:
            line = _decoded(data).removeprefix("\ufeff" if number == 1 else "")
            if not take(chat, line):
                return code
        except SpecllamaError as error:
            chat.screen.say(f"Error: line {number}: {error}")
            code = code or error.exit_code
    chat.send("")  # what was read with /read for a message that did not come
    return code


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"standard input is not UTF-8 at byte {error.start} of this line; "
            "convert it, with iconv for example"
        ) from None


def _completions() -> dict[str, bool]:
    """What Tab completes at the beginning of a line, and whether a path follows."""
    from specllama.commands import COMMANDS

    return {f"/{name}": command.has_path for name, command in COMMANDS.items()}


def _converse(chat: Chat, line_editor: LineEditor) -> None:
    """A chat on a terminal, until the user leaves."""
    chat.editor = line_editor.edit
    names = [lm.name for lm in (chat.conversation.pair.target, chat.conversation.pair.draft) if lm]
    chat.screen.aside(
        f"specllama {specllama.__version__}: {' with '.join(names)}; "
        "/help lists the commands, Ctrl-D leaves"
    )
    goes_on = True
    while goes_on:
        try:
            line = _read(chat, line_editor)
            goes_on = line is not None and _turn(chat, line)
        except KeyboardInterrupt:  # between the two, or while another one was dealt with
            chat.conversation.settle()


def _read(chat: Chat, line_editor: LineEditor) -> str | None:
    """The next line, None at the end of input; two Ctrl-C at an empty prompt leave with 130."""
    try:
        return line_editor.read()
    except EOFError:
        return None
    except KeyboardInterrupt:
        chat.screen.aside("Ctrl-C again leaves, and so does Ctrl-D")
    try:
        return line_editor.read()
    except EOFError:
        return None
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


def _turn(chat: Chat, line: str) -> bool:
    """Take a line; whether the chat goes on, which neither an error nor Ctrl-C ends."""
    from specllama.commands import take

    before = chat.conversation.last
    try:
        return take(chat, line)
    except SpecllamaError as error:
        chat.screen.say(f"Error: {error}")
    except KeyboardInterrupt:
        chat.conversation.settle()
        if chat.conversation.last is before:
            chat.screen.aside("stopped before there was an answer; the conversation is as it was")
        else:
            chat.screen.aside("stopped; what was answered stays in the conversation")
    return True
