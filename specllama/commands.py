"""What a line of a chat does: a message is sent, and a command behind a slash is run.

A command that cannot be run raises UsageError, and then nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specllama import answers, provenance, sessions, settings
from specllama.chat import Chat
from specllama.errors import UsageError
from specllama.suggestions import nearest

# More than any context holds; a wrong file should not fill the memory first.
_MOST_READ = 16 << 20


@dataclass(frozen=True)
class Command:
    """argument: what may follow the name. has_path: whether that is a file."""

    run: Callable[[Chat, str], None]
    argument: str
    about: str
    has_path: bool = False


def take(chat: Chat, line: str) -> bool:
    """Send a message or run a command; whether the chat goes on after it.

    "//text" sends "/text". Raises what `Chat.send` raises, and UsageError.
    """
    if line.startswith("/") and not line.startswith("//"):
        return _run(chat, *_words(line[1:]))
    chat.send(line.removeprefix("/"))
    return True


def _run(chat: Chat, typed: str, argument: str) -> bool:
    name = typed.lower()
    if name not in COMMANDS:
        meant = nearest(_HABITS.get(name, name), COMMANDS)
        next_step = f"did you mean /{meant}?" if meant else "/help lists them"
        raise UsageError(f"there is no command /{typed}; {next_step} (//{typed} sends it as text)")
    COMMANDS[name].run(chat, argument)
    return name != "quit"


def _words(line: str) -> tuple[str, str]:
    """The first word of a line, and the rest of it."""
    words = line.split(None, 1)
    return words[0] if words else "", words[1].strip() if len(words) > 1 else ""


def _help(chat: Chat, _: str) -> None:
    usages = {f"/{name} {each.argument}": each.about for name, each in COMMANDS.items()}
    width = max(map(len, usages))
    lines = [f"{usage:{width}}  {about}" for usage, about in usages.items()]
    lines.append(f"{'//TEXT':{width}}  send TEXT with a slash before it")
    chat.screen.say("\n".join(lines))


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.conversation.system = None if text.lower() == settings.NONE else text
    chat.screen.say(f"system prompt: {chat.conversation.system or settings.NONE}")


def _clear(chat: Chat, _: str) -> None:
    chat.forget()
    chat.screen.say("the conversation begins anew")


def _undo(chat: Chat, _: str) -> None:
    if chat.detach():
        chat.screen.say("taken back: the text that was read last, and not sent yet")
        return
    message = chat.conversation.undo()
    if message is None:
        raise UsageError("there is no message to take back; say something first")
    chat.screen.say(f"taken back: {_line(message.content)}")


def _line(text: str) -> str:
    """A text in one short line."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _retry(chat: Chat, _: str) -> None:
    chat.show(chat.conversation.retry())


def _edit(chat: Chat, _: str) -> None:
    users = [message for message in chat.conversation.messages if message.role == "user"]
    before = users[-1].content if users else ""
    text = (chat.editor(before) or "").strip("\n")
    if not text.strip() or text == before.strip("\n"):
        chat.screen.say("nothing was changed")
    elif users:
        chat.screen.say(f"asked instead: {_line(text)}")
        chat.show(chat.conversation.edit(text))
    else:
        chat.send(text)


def _save(chat: Chat, name: str) -> None:
    path = chat.session if chat.session and not name else _path(name)
    if path.exists() and path != chat.session and not sessions.is_session(path):
        raise UsageError(f"{path} is there and is no saved conversation; choose another name")
    chat.save(path)
    chat.screen.say(f"saved {_count(chat)} to {path}")


def _load(chat: Chat, name: str) -> None:
    path = _path(name)
    chat.load(path)
    chat.screen.say(f"loaded {_count(chat)} from {path}")


def _count(chat: Chat) -> str:
    n_messages = len(chat.conversation.messages)
    return f"{n_messages} {'message' if n_messages == 1 else 'messages'}"


def _read(chat: Chat, name: str) -> None:
    path = _path(name)
    text = text_of(path)
    chat.attach(text)
    chat.screen.say(f"{path}: {len(text):,} characters, sent with your next message")


def _set(chat: Chat, argument: str) -> None:
    name, value = _words(argument)
    if value:
        settings.change(chat.conversation, name, value)
    shown = [name] if name else settings.names()
    chat.screen.say("\n".join(settings.show(chat.conversation, each) for each in shown))


def _draft(chat: Chat, choice: str) -> None:
    if choice:
        is_number = choice.isascii() and choice.isdecimal()
        wanted = int(choice) if is_number else choice.lower()
        if wanted == "auto" and not chat.conversation.knows_what_pays:
            chat.screen.aside("measuring what drafting costs here, for some seconds")
        chat.conversation.speculate(wanted)
    now = chat.conversation.speculation
    if now == "only":
        chat.screen.say("drafting: only; the draft answers alone, and auto brings the target back")
        return
    verdict = chat.conversation.pair.speculation.verdict()
    most = chat.conversation.pair.target.max_draft
    if isinstance(now, int) and now > most:
        verdict = f"no more than {most} can be taken back from the target's cache, so {most} it is"
    chat.screen.say(f"drafting: {now}; {verdict}" if verdict else f"drafting: {now}")


def _show(chat: Chat, _: str) -> None:
    answer = chat.conversation.last
    if answer is None or not answer.tokens:
        raise UsageError("there is no answer whose tokens are known; ask something first")
    piece = chat.conversation.pair.tokenizer.piece
    chat.screen.show_provenance(provenance.pieces(answer.tokens, piece))


def _stats(chat: Chat, _: str) -> None:
    answer = chat.conversation.last
    if answer is None or answer.stats is None:
        raise UsageError("there is no answer to tell of; ask something first")
    chat.screen.say(answers.details(answer.stats))


def _context(chat: Chat, _: str) -> None:
    used, n_ctx = chat.conversation.context
    text = f"context: {used} of {n_ctx} tokens used, {max(0, n_ctx - used)} left; {_count(chat)}"
    n_dropped = len(chat.conversation.dropped)
    chat.screen.say(f"{text}, and {n_dropped} earlier ones dropped" if n_dropped else text)


def _think(chat: Chat, choice: str) -> None:
    if not chat.conversation.chat_format.supports_thinking:
        raise UsageError("this model's chat template has no switch for thinking; leave it alone")
    if choice.lower() not in ("", "on", "off"):
        raise UsageError(f'thinking can be on or off, not "{choice}"')
    if choice:
        chat.conversation.thinking = choice.lower() == "on"
    states = {None: "as the template has it", True: "on", False: "off"}
    chat.screen.say(f"thinking: {states[chat.conversation.thinking]}")


def _quit(chat: Chat, _: str) -> None:
    """Only ends the chat, which `take` tells."""


COMMANDS = {
    "help": Command(_help, "", "this list"),
    "system": Command(_system, "[TEXT|none]", "show or change the system prompt"),
    "clear": Command(_clear, "", "begin anew, with the same system prompt"),
    "undo": Command(_undo, "", "take the last message back, with its answer"),
    "retry": Command(_retry, "", "answer the last message again"),
    "edit": Command(_edit, "", "change the last message in your editor"),
    "save": Command(_save, "FILE", "save the conversation", has_path=True),
    "load": Command(_load, "FILE", "go on with a saved conversation", has_path=True),
    "read": Command(_read, "FILE", "send a file's text with the next message", has_path=True),
    "set": Command(_set, "[NAME [VALUE]]", "show or change a sampling parameter"),
    "draft": Command(_draft, "[auto|N|off|only]", "who drafts; only: the draft model answers"),
    "show": Command(_show, "", "the last answer by where its tokens came from"),
    "stats": Command(_stats, "", "what the last answer took"),
    "context": Command(_context, "", "how much of the context is used"),
    "think": Command(_think, "[on|off]", "let the model think before it answers, or not"),
    "quit": Command(_quit, "", "leave"),
}
# What other chats call these.
_HABITS = {"exit": "quit", "bye": "quit", "q": "quit", "regen": "retry", "?": "help"}


def _path(name: str) -> Path:
    if not name:
        raise UsageError("there is no file named; put its path behind the command")
    # A shell's habit, and what some terminals type for a file that is dropped on them.
    if len(name) > 2 and name[0] == name[-1] and name[0] in "'\"":
        name = name[1:-1]
    return expanded(name)


def expanded(name: str) -> Path:
    """The path that a user named, with ~ for their folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:  # the folder of a user that does not exist
        return Path(name)


def text_of(path: Path) -> str:
    """The text of a file that the user wants to send. Raises UsageError."""
    try:
        status = path.stat()
        if not path.is_file():
            raise UsageError(f"{path} is no ordinary file; name one with text in it")
        if status.st_size > _MOST_READ:
            raise UsageError(f"{path} is larger than any context; read a part of it")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 at byte {error.start}; convert it, with iconv for example"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path} cannot be read: {reason}; check the path") from None
