"""Messages -> token ids, through the model's own chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from specllama import spoken
from specllama.errors import ModelError, SpecllamaError, UsageError
from specllama.markers import ChatTokenizer, Cover, Markers, Part
from specllama.thinking import TAGS, final

if TYPE_CHECKING:  # it brings Jinja with it
    from specllama.templates import Template

# Also the variants of a few templates, such as <think:opensource>.
_TAGS = sorted({tag for pair in TAGS for tag in pair}, key=len, reverse=True)
_TAG = re.compile(rf"({'|'.join(map(re.escape, _TAGS))}|</?[\w:]*think[\w:]*>)")
_ROLES = ("system", "user", "assistant")
# There are no tools; some templates take a list of them for granted.
_NO_TOOLS: tuple[dict[str, Any], ...] = ({"tools": None}, {"tools": []})
# Words for trying a template out; no template says them itself.
_HELLO, _ANSWER, _RULE = "kwartz hello", "kwartz answer", "kwartz rule"


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    role: "system", "user" or "assistant". tokens: the ids that were generated, of an assistant's
    message where they are known.
    """

    role: str
    content: str
    tokens: tuple[int, ...] = ()


class ChatFormat:
    """How a model is spoken to: its chat template.

    supports_system: whether a system message is more than text before the first user's.
    supports_thinking: whether `thinking` makes a difference. notices: what the user should know of
    how prompts were made, each sentence once; it grows as `tokens` is called.

    What was typed never becomes a marker (see `markers`), in any role; only the think tags of an
    assistant's message keep their meaning, as long as they are no control tokens. An assistant's
    message whose ids are known stands in the prompt as these ids where the template leaves its text
    as it is, or only trims it, so that what the cache holds of it stays good.

    BOS: a template's own is kept; where it writes none, there is one if the vocabulary says that
    BOS is added. Nothing else is added, and nothing that the template writes is removed.

    Policies, as templates differ in what they take:
    - A byte-order mark at the beginning of a message is dropped. A user's message without text is
      refused; a system message or an answer without text is left out.
    - Messages of one role in a row are joined by a blank line, with a notice.
    - A system message must be among the first; a later one is refused. Where the template has no
      system role, its text goes before the first user's message, with a notice.
    - Of an answer with channels, such as <|channel|>analysis, only what it says is kept.
    - The last message must be the user's. The first may be the assistant's if the template takes
      that, otherwise the conversation is refused.
    """

    @classmethod
    def of(
        cls,
        template: str | None,
        tokenizer: ChatTokenizer,
        name: str,
        *,
        now: datetime | None = None,
    ) -> ChatFormat:
        """The format of a model with this chat template.

        name: the model's, for messages. now: the date that the template tells; None is today.
        Raises ModelError without a template, and for one that cannot be used.
        """
        if template is None or not template.strip():
            raise ModelError(
                f"{name} has no chat template, so how it wants to be spoken to is unknown; "
                "give one with --chat-template FILE, or use --raw to send the text as it is"
            )
        from specllama.templates import Template

        return cls(Template(template, name, now or datetime.now()), tokenizer, name)

    def __init__(self, template: Template, tokenizer: ChatTokenizer, name: str) -> None:
        self.notices: list[str] = []
        self._template, self._tokenizer, self._name = template, tokenizer, name
        self._markers = Markers(tokenizer)
        self._variables = {
            "bos_token": self._markers.text(tokenizer.bos),
            "eos_token": self._markers.text(tokenizer.eos),
        }
        self._try_out()
        rule, hello = Message("system", _RULE), Message("user", _HELLO)
        self.supports_system = self._says([rule, hello])
        self.supports_thinking = self._try([hello], thinking=True) != self._try(
            [hello], thinking=False
        )
        self._takes_answer_first = self._says([Message("assistant", _ANSWER), hello])

    def tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
        """Token ids of a conversation, ending where the assistant begins to speak.

        thinking: None leaves it to the template. Raises UsageError for a conversation that is
        refused, by a policy of the class or by the template, ModelError for a template that fails.
        """
        turns = self._arrange(messages)
        cover = self._markers.cover([self._template.source, *(turn.content for turn in turns)])
        parts = self._parts(turns, cover, thinking)
        return _with_bos(self._markers.encode(parts, cover.covered), self._tokenizer)

    # --- which messages ---------------------------------------------------------------------

    def _arrange(self, messages: Sequence[Message]) -> list[Message]:
        turns = self._join([_without_channels(turn) for turn in _checked(messages)])
        system = [turn for turn in turns if turn.role == "system"]
        if system and not self.supports_system:
            self._notice(
                f"{self._name} has no system role, so the system prompt is put before the first "
                "message"
            )
            turns = [turn for turn in turns if turn.role != "system"]
            at = next(i for i, turn in enumerate(turns) if turn.role == "user")
            turns[at] = replace(turns[at], content=f"{system[0].content}\n\n{turns[at].content}")
        speakers = [turn.role for turn in turns if turn.role != "system"]
        if speakers[0] == "assistant" and not self._takes_answer_first:
            raise UsageError(
                f"the conversation begins with the assistant, which the chat template of "
                f"{self._name} does not take; begin it with a user's message"
            )
        return turns

    def _join(self, messages: Sequence[Message]) -> list[Message]:
        turns: list[Message] = []
        for message in messages:
            if turns and turns[-1].role == message.role:
                self._notice(f"{message.role} messages in a row are joined by a blank line")
                content = f"{turns[-1].content}\n\n{message.content}"
                turns[-1] = Message(message.role, content)
            else:
                turns.append(message)
        return turns

    def _notice(self, sentence: str) -> None:
        if sentence not in self.notices:
            self.notices.append(sentence)

    # --- what the template makes of them ----------------------------------------------------

    def _parts(self, turns: Sequence[Message], cover: Cover, thinking: bool | None) -> list[Part]:
        """The rendered text, with the ids of answers in their places."""
        shown = [replace(turn, content=self._hide(turn, cover)) for turn in turns]
        text = self._render(shown, thinking)
        ids = {i: self._spoken(turn) for i, turn in enumerate(turns)}
        stands = {i: cover.new() for i in ids if ids[i]}
        while stands:
            held = [replace(m, content=stands.get(i, m.content)) for i, m in enumerate(shown)]
            rendered = self._render(held, thinking)
            contents = {i: shown[i].content for i in stands}
            others = spoken.changed(text, rendered, stands, contents)
            if not others:
                pieces, answers = spoken.split(rendered, stands), [ids[i] for i in stands]
                opening = self._opening(shown, text, thinking)
                return list(spoken.insert(pieces, answers, opening, self._tokenizer))
            stands = {i: stand for i, stand in stands.items() if i not in others}
        return [text]

    def _spoken(self, turn: Message) -> tuple[int, ...]:
        return spoken.spoken_ids(turn.content, turn.tokens, self._tokenizer)

    def _opening(self, shown: Sequence[Message], text: str, thinking: bool | None) -> str:
        """What the template writes to let the assistant speak."""
        asked = self._render(shown, thinking, opening=False)
        return text[len(asked) :] if text.startswith(asked) else text

    def _render(
        self, messages: Sequence[Message], thinking: bool | None = None, *, opening: bool = True
    ) -> str:
        thought = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        contents = [{"role": m.role, "content": m.content} for m in messages]
        return self._template.render(
            contents, add_generation_prompt=opening, **self._variables, **thought
        )

    def _hide(self, turn: Message, cover: Cover) -> str:
        """The content as the template may see it: an answer keeps its think tags."""
        if turn.role != "assistant":
            return cover.hide(turn.content)
        pieces = _TAG.split(turn.content)
        return "".join(
            piece if at % 2 and not self._markers.has_control(piece) else cover.hide(piece)
            for at, piece in enumerate(pieces)
        )

    # --- what the template takes ------------------------------------------------------------

    def _try_out(self) -> None:
        """Find the variables with which it renders. Raises ModelError if there are none."""
        failures: list[SpecllamaError] = []
        plain = dict(self._variables)
        for tools in _NO_TOOLS:
            self._variables = plain | tools
            try:
                text = self._render([Message("user", _HELLO)])
            except SpecllamaError as error:
                failures.append(error)
                continue
            if _HELLO in text:
                return
            failures.append(
                ModelError(
                    f"the chat template of {self._name} leaves out what the user says; "
                    "give another with --chat-template FILE, or use --raw"
                )
            )
        raise failures[0]

    def _try(self, messages: Sequence[Message], thinking: bool | None = None) -> str | None:
        try:
            return self._render(messages, thinking)
        except SpecllamaError:
            return None

    def _says(self, messages: Sequence[Message]) -> bool:
        text = self._try(messages)
        return text is not None and all(message.content in text for message in messages)


class RawFormat:
    """No template: the messages as they are, for models that only continue a text.

    It has what ChatFormat has. Messages follow each other, with a new line behind an answer or a
    system message that has none. Whoever uses it writes the template: a marker in what was typed is
    that token. BOS is added if the vocabulary says so and the text does not begin with it.
    """

    supports_system = True
    supports_thinking = False

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.notices: list[str] = []
        self._tokenizer = tokenizer
        self._markers = Markers(tokenizer)

    def tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
        """Token ids of the messages, one after the other. Raises UsageError."""
        turns = _checked(messages)
        self._notice_bos(turns)
        parts: list[Part] = []
        text = ""
        for turn in turns:
            if ids := spoken.spoken_ids(turn.content, turn.tokens, self._tokenizer):
                parts += [text, ids]
                text = ""
            else:
                text += turn.content
            if turn.role != "user" and not turn.content.endswith("\n"):
                text += "\n"
        return _with_bos(self._markers.encode([*parts, text], {}), self._tokenizer)

    def _notice_bos(self, turns: Sequence[Message]) -> None:
        bos = self._markers.text(self._tokenizer.bos)
        if self.notices or not bos or all(bos not in turn.content for turn in turns):
            return
        added = "puts it there itself" if self._tokenizer.add_bos else "does not want it"
        self.notices.append(f"the text holds {bos}, which begins a text; this model's file {added}")


def _checked(messages: Sequence[Message]) -> list[Message]:
    """The messages that say something. Raises UsageError, with the number of the one at fault."""
    turns: list[Message] = []
    for number, message in enumerate(messages, 1):
        content = _content(message, number)
        if message.role == "system" and any(turn.role != "system" for turn in turns):
            raise UsageError(
                f"message {number} is a system message, which must come before all others; "
                "put its text first, or into a user's message"
            )
        if content.strip():
            turns.append(replace(message, content=content))
        elif message.role == "user":
            raise UsageError(f"message {number} is empty; give it some text")
    if not turns or turns[-1].role != "user":
        raise UsageError("there is nothing to answer; end with a user's message")
    return turns


def _without_channels(message: Message) -> Message:
    said = final(message.content) if message.role == "assistant" else message.content
    return message if said == message.content else Message("assistant", said)


def _content(message: Message, number: int) -> str:
    if message.role not in _ROLES:
        raise UsageError(
            f'message {number} has the role "{message.role}"; use system, user or assistant'
        )
    if not isinstance(message.content, str):
        kind = "null" if message.content is None else f"a {type(message.content).__name__}"
        raise UsageError(f"the content of message {number} is {kind}; give it as one text")
    return message.content.removeprefix("\ufeff")


def _with_bos(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    """With the BOS that the vocabulary asks for, unless one is there already."""
    bos = tokenizer.bos
    if bos is None or not tokenizer.add_bos or ids[:1] == [bos]:
        return ids
    return [bos, *ids]
