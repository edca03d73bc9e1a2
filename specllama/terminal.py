"""The person's end of a chat: a line editor, and what may be shown on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from specllama import provenance
from specllama.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

# A terminal obeys control characters, so a text that holds one shows its picture there instead.
_HARMLESS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"<{code:02X}>" for code in range(0x80, 0xA0)},
}


def harmless(text: str) -> str:
    """The text with control characters made visible: ESC becomes U+241B, and so on."""
    return text.translate(_HARMLESS)


class Screen:
    """Standard output for answers, standard error for everything else.

    On a terminal control characters of a text are made visible; a pipe gets them as they are.
    """

    def __init__(self) -> None:
        self._answer_terminal = sys.stdout.isatty()
        self._note_terminal = sys.stderr.isatty()

    def answer(self, text: str) -> None:
        """Show a piece of an answer at once."""
        # With color=True click leaves escape sequences in the text alone, wherever it goes.
        shown = harmless(text) if self._answer_terminal else text
        click.echo(shown, nl=False, color=True)

    def say(self, message: str) -> None:
        """Tell something that is no part of an answer."""
        self._note(self._fitted(message))

    def aside(self, message: str) -> None:
        """Tell something of less interest, dimmed where there are colours."""
        message = self._fitted(message)
        self._note(f"\x1b[2m{message}\x1b[0m" if has_colours() else message)

    def show_provenance(self, answer: provenance.Pieces) -> None:
        """Tell where the pieces of an answer came from, in colours or with brackets."""
        if self._note_terminal:
            answer = [(kind, harmless(text)) for kind, text in answer]
        mark = provenance.coloured if has_colours() else provenance.bracketed
        self._note(mark(answer))

    def _fitted(self, message: str) -> str:
        """A message as it may be shown, on a terminal in lines that are no longer than its own."""
        if not self._note_terminal:
            return message
        width = max(20, shutil.get_terminal_size().columns)
        wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        lines = (wrapper.wrap(line) or [""] for line in harmless(message).split("\n"))
        return "\n".join(part for wrapped in lines for part in wrapped)

    def _note(self, message: str) -> None:
        # What cannot be told is no reason to lose an answer.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            click.echo(message, err=True, color=True)


def has_colours() -> bool:
    """Whether standard error is a terminal with colours that the user wants."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return sys.stderr.isatty() and wanted


class LineEditor:
    """Reads messages from the terminal, several lines when the user wants or pastes them.

    Enter sends; Alt-Enter, or Enter after a backslash, begins a new line; a paste arrives whole.
    history: the file of earlier messages, None for none. commands: what Tab completes, each with
    whether a path follows. Use it in a with statement.
    """

    def __init__(self, history: Path | None, commands: Mapping[str, bool]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import create_output
        from prompt_toolkit.shortcuts import CompleteStyle

        self._modes = contextlib.ExitStack()
        self._output: Any = None  # a terminal that can do nothing has a prompt of its own
        if os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown"):
            self._output = create_output()
            # Where the cursor stands matters for menus only, and a terminal may never say it.
            self._output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            [("bold", "> ")],
            multiline=True,
            prompt_continuation="  ",
            history=_history(history),
            key_bindings=_bindings(self.edit),
            completer=_completer(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            output=self._output,
        )

    def read(self) -> str:
        """The next message; empty when the user discards a line with Ctrl-C, also just after Enter.

        Raises KeyboardInterrupt for Ctrl-C at an empty prompt and EOFError for Ctrl-D there.
        """
        try:
            text = self._prompt()
            if self._is_taken_back():
                return ""
        except KeyboardInterrupt:
            if not self._session.default_buffer.text:
                raise
            return ""
        finally:
            self._mark_pastes()
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _prompt(self) -> str:
        """What is typed. Raises KeyboardInterrupt, also for one that came just after Enter.

        What is raised within the work of asyncio leaves it half done, and prompt_toolkit's own
        handler loses a signal that comes after it has left raw mode. So this one only takes note,
        and ends the prompt if there is one.
        """
        app = self._session.app
        came = False

        def stop() -> None:
            if came and app.future is not None and not app.future.done():
                app.exit(exception=KeyboardInterrupt)

        def note(_number: int, _frame: FrameType | None) -> None:
            nonlocal came
            came = True
            if app.loop is not None:
                with contextlib.suppress(RuntimeError):  # closed by now
                    app.loop.call_soon_threadsafe(stop)

        with _interrupts_to(note):
            text = self._session.prompt(handle_sigint=False, pre_run=stop)
        if came:
            raise KeyboardInterrupt
        return text

    def _is_taken_back(self) -> bool:
        """Whether Ctrl-C came after Enter, but too early to be a signal.

        Until the terminal left the mode of the prompt it was one more key for the next prompt.
        """
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
        from prompt_toolkit.keys import Keys

        keys = get_typeahead(self._session.input) + self._session.input.read_keys()
        stops = [at for at, press in enumerate(keys) if press.key == Keys.ControlC]
        store_typeahead(self._session.input, keys[stops[-1] + 1 :] if stops else keys)
        return bool(stops)

    def _mark_pastes(self) -> None:
        """Let the terminal mark pastes during the answer too, for the prompt that follows."""
        if self._output is not None:
            self._output.enable_bracketed_paste()
            self._output.flush()

    def _unmark_pastes(self) -> None:
        if self._output is not None:
            self._output.disable_bracketed_paste()
            self._output.flush()

    def __enter__(self) -> LineEditor:
        """Keep what is typed during an answer, unseen and unbroken, for the next prompt."""
        self._modes.enter_context(_input_modes(_unechoed))
        self._modes.callback(self._unmark_pastes)
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    def edit(self, text: str) -> str | None:
        """Let the user change a text in their own editor; None when they did not save it.

        Raises UsageError when there is no such editor, or what it left cannot be read.
        """
        self._unmark_pastes()
        # Ctrl-C is for the program that has the terminal; SIG_IGN would be taken over by it.
        with _input_modes(_ordinary), _interrupts_to(lambda _number, _frame: None):
            try:
                ended = text if text.endswith("\n") else f"{text}\n"
                saved = click.edit(ended.encode("utf-8", "replace"), extension=".md")
                return None if saved is None else saved.decode("utf-8-sig").replace("\r\n", "\n")
            except click.ClickException as error:
                raise UsageError(
                    f"{error.format_message()}; name an editor in VISUAL or EDITOR"
                ) from None
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"what the editor saved is not UTF-8 at byte {error.start}; save it as UTF-8"
                ) from None
            except OSError as error:
                reason = error.strerror or str(error)
                raise UsageError(
                    f"the editor's file is gone or cannot be used ({reason}); save it in place"
                ) from None


@contextlib.contextmanager
def _interrupts_to(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let Ctrl-C call this for a while."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _bindings(edit: Callable[[str], str | None]) -> KeyBindings:
    """Keys of our own. edit: changes a text in the user's editor."""
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)  # and not searching in the history

    @keys.add("enter", filter=typing)
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        n_backslashes = len(before) - len(before.rstrip("\\"))
        if n_backslashes % 2 and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    def _discard(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.app.exit(result="")
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("c-x", "c-e", filter=typing)
    def _open_editor(event: KeyPressEvent) -> None:
        buffer = event.current_buffer

        def change() -> None:
            try:
                text = edit(buffer.text)
            except UsageError as error:
                click.echo(f"Error: {error}", err=True)
                return
            if text is not None:
                buffer.text = text.rstrip("\n")
                buffer.cursor_position = len(buffer.text)

        run_in_terminal(change)

    return keys


def _completer(commands: Mapping[str, bool]) -> Completer:
    """Completes the name of a command, and the path behind one that takes a file."""
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            typed, blank, path = document.text_before_cursor.partition(" ")
            if not blank:
                found = (name for name in commands if typed and name.startswith(typed))
                yield from (Completion(name, -len(typed)) for name in found)
            elif commands.get(typed):
                yield from paths.get_completions(Document(path), complete_event)

    return Commands()


def _history(path: Path | None) -> History:
    """Earlier messages from a file that only the user can read; from memory if it cannot be had."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # the disk may be full by now
                super().store_string(string)

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            return InMemoryHistory()
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return Kept(path)


@contextlib.contextmanager
def _input_modes(change: Callable[[Any, list[Any]], None]) -> Iterator[None]:
    """Change how the terminal treats input, for a while; nothing where there is no termios."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    modes = termios.tcgetattr(descriptor)
    change(termios, modes)
    termios.tcsetattr(descriptor, termios.TCSANOW, modes)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _unechoed(termios: Any, modes: list[Any]) -> None:
    """Neither echo input nor cut it into lines; the keyboard can still interrupt."""
    modes[0] &= ~termios.ICRNL
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    modes[3] |= termios.NOFLSH  # what was typed ahead survives Ctrl-C


def _ordinary(termios: Any, modes: list[Any]) -> None:
    modes[0] |= termios.ICRNL
    modes[3] |= termios.ECHO | termios.ICANON
