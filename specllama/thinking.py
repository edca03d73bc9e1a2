"""Splits an answer into what the model thinks and what it says, while it is streamed.

A model that thinks begins its answer with a tag such as <think> and ends the thinking with another.
A tag counts only there: one that is quoted later, or typed by the user, is ordinary text.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

# As the chat templates of common models write them.
TAGS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    # Its <|end|> before <|start|> is a control token, which prints nothing.
    ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
)
# How such a model begins an answer without thinking.
_SPEAKS = "<|channel|>final<|message|>"
_CHANNEL = "<|channel|>"

_OPENED = re.compile("(?:" + "|".join(re.escape(opening) for opening, _ in TAGS) + r")\s*\Z")

Kind = Literal["thinking", "answer", "tag"]


class Piece(NamedTuple):
    """A part of the answer. kind: "thinking", "answer" or "tag", a tag with the space around it."""

    kind: Kind
    text: str


class ThinkingStream:
    """The pieces of one answer, fed with its text bit by bit.

    The texts of all pieces together are the text that was fed, whatever it was cut into. Text is
    held back only while it may turn out to be part of a tag. Thinking that is not ended by the end
    of the answer is thinking.
    """

    def __init__(self) -> None:
        self._step = self._begin
        self._held = ""
        self._close = ""
        self._next: Kind = "answer"

    @property
    def is_thinking(self) -> bool:
        """Whether the thinking has begun and not ended."""
        return bool(self._close)

    def feed(self, text: str) -> list[Piece]:
        """Take the next text; the pieces that are certain now, none of them empty."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return _joined(pieces)

    def flush(self) -> list[Piece]:
        """End the answer; what was held back."""
        held, self._held = self._held, ""
        kind: Kind = "thinking" if self._close else "answer"
        return [Piece(kind, held)] if held else []

    # The steps take from `_held` and return whether there may be more to take at once.

    def _begin(self, pieces: list[Piece]) -> bool:
        """Is there a tag at the beginning?"""
        text = self._held.lstrip()
        for opening, close in TAGS:
            if text.startswith(opening):
                self._take(pieces, "tag", len(self._held) - len(text) + len(opening))
                self._close = close
                self._step = self._space
                self._next = "thinking"
                return True
        if text.startswith(_SPEAKS):
            self._take(pieces, "tag", len(self._held) - len(text) + len(_SPEAKS))
            self._step = self._space
            return True
        if any(opening.startswith(text) for opening in (*(tag for tag, _ in TAGS), _SPEAKS)):
            return False
        self._step = self._answer
        return True

    def _space(self, pieces: list[Piece]) -> bool:
        """The white space behind a tag belongs to it."""
        n_space = len(self._held) - len(self._held.lstrip())
        self._take(pieces, "tag", n_space)
        if not self._held:
            return False
        self._step = self._think if self._next == "thinking" else self._answer
        return True

    def _think(self, pieces: list[Piece]) -> bool:
        """Thinking goes on up to the closing tag."""
        end = self._held.find(self._close)
        if end < 0:
            self._take(pieces, "thinking", len(self._held) - self._n_begun())
            return False
        self._take(pieces, "thinking", end)
        self._take(pieces, "tag", len(self._close))
        self._close = ""
        self._next = "answer"
        self._step = self._space
        return True

    def _answer(self, pieces: list[Piece]) -> bool:
        self._take(pieces, "answer", len(self._held))
        return False

    def _n_begun(self) -> int:
        """Length of the longest end of the held text that the closing tag begins with."""
        for length in range(min(len(self._close) - 1, len(self._held)), 0, -1):
            if self._close.startswith(self._held[-length:]):
                return length
        return 0

    def _take(self, pieces: list[Piece], kind: Kind, length: int) -> None:
        if length:
            pieces.append(Piece(kind, self._held[:length]))
            self._held = self._held[length:]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].kind == piece.kind:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def split(text: str) -> list[Piece]:
    """The pieces of a whole answer; neighbours differ in kind."""
    stream = ThinkingStream()
    return _joined(stream.feed(text) + stream.flush())


def final(text: str) -> str:
    """What an answer says, without its channels if it has such; else the text as it is.

    Templates of models with channels refuse an answer that holds them and write them themselves.
    """
    if not text.lstrip().startswith(_CHANNEL):
        return text
    return "".join(piece.text for piece in split(text) if piece.kind == "answer")


def left_open(text: str) -> str:
    """The opening tag, with the white space behind it, that a prompt ends with; "" without one."""
    found = _OPENED.search(text)
    return found[0] if found else ""
