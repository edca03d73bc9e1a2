"""The chat without its terminal: messages in, answers and notes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from specllama import answers, sessions
from specllama.errors import SpecllamaError, UsageError
from specllama.presentation import Presentation, Screen, stream

if TYPE_CHECKING:
    from specllama.conversation import Conversation
    from specllama.generation import Chunk


def no_editor(text: str) -> str | None:
    """Where there is no terminal. Raises UsageError."""
    raise UsageError("an editor needs a terminal; send the changed message instead")


class Chat:
    """A conversation on a screen, which can be kept in a file from turn to turn.

    present: how an answer is shown. kv: whether the caches are
    saved too. To be set: status, told after each answer what it took; editor, which lets the user
    change a text and gives None when it was not saved; session, the file that the conversation is
    kept in.
    """

    def __init__(
        self,
        conversation: Conversation,
        screen: Screen,
        *,
        present: Presentation = stream,
        kv: bool = False,
    ) -> None:
        self.conversation = conversation
        self.screen = screen
        self.status: Callable[[str], None] = lambda line: None
        self.editor: Callable[[str], str | None] = no_editor
        self.session: Path | None = None
        self._present = present
        self._kv = kv
        self._attached: list[str] = []
        self._n_notices = 0

    def send(self, text: str) -> None:
        """Say something, after the texts that were attached, and show the answer.

        White space alone is no message. Raises SpecllamaError for what cannot be answered, and
        KeyboardInterrupt when the user stops the answer; the chat can go on after both.
        """
        spoken = [text] if text.strip("\ufeff \t\r\n") else []
        message = "\n\n".join([*self._attached, *spoken])
        if not message:
            return
        before = self.conversation.last
        try:
            self.show(self.conversation.ask(message))
        finally:
            # An answer that was stopped has been asked for all the same.
            if self.conversation.last is not before:
                self._attached.clear()

    def attach(self, text: str) -> None:
        """Put a text before the next message."""
        self._attached.append(text)

    def detach(self) -> bool:
        """Take the last of these texts back, if there is one."""
        if self._attached:
            self._attached.pop()
            return True
        return False

    def forget(self) -> None:
        """Begin anew."""
        self.conversation.clear()
        self._attached.clear()

    def show(self, chunks: Iterator[Chunk]) -> None:
        """Show an answer of the conversation to its end, and what there is to say of it."""
        before = self.conversation.last
        try:
            self._present(chunks, self.screen)
        except BaseException as error:
            self.conversation.settle()
            if isinstance(error, KeyboardInterrupt) and self.conversation.last is not before:
                self._tell_ending()
            with contextlib.suppress(SpecllamaError):  # the other one is told
                self._keep_messages()
            raise
        finally:
            self.tell_notices()
        self._tell_ending()
        self._keep_messages()

    def tell_notices(self) -> None:
        """Tell what the chat format does with the messages that the user may not expect, once."""
        notices = self.conversation.chat_format.notices
        for notice in notices[self._n_notices :]:
            self.screen.say(f"Note: {notice}")
        self._n_notices = len(notices)

    def keep(self) -> None:
        """Save the conversation where it is kept, if anywhere. Raises SpecllamaError."""
        if self.session is not None:
            self.save(self.session)

    def _keep_messages(self) -> None:
        """Save without the caches: they are large, change with every turn, and can wait."""
        if self.session is not None:
            sessions.save(self.session, self.conversation)

    def save(self, path: Path) -> None:
        """Save the conversation. Raises SpecllamaError, with the file that was there as it was."""
        for notice in sessions.save(path, self.conversation, kv=self._kv):
            self.screen.say(f"Note: {notice}")

    def load(self, path: Path, keep: Collection[str] = ()) -> None:
        """Go on with a saved conversation. Raises UsageError, and then nothing changes.

        keep: settings that stay as they are, see `sessions.load`.
        """
        for notice in sessions.load(path, self.conversation, keep):
            self.screen.say(f"Note: {notice}")
        self._attached.clear()

    def _tell_ending(self) -> None:
        answer = self.conversation.last
        if answer is None or answer.stats is None:
            return
        if answer.finish_detail == "context full":
            self.screen.say("Note: the answer ends here because the context is full")
        budget = self.conversation.pair.speculation.budget
        measured = budget is not None and budget.costs.is_measured
        plain_ms = budget.costs.ms(1) if budget is not None and measured else None
        line = answers.status_line(answer.stats, self.conversation.context, plain_ms)
        self.status(f"{line}\n{answer.stats.verdict}" if answer.stats.verdict else line)
