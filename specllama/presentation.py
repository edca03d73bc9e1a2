"""How an answer is shown: as it comes or as an object, with what the model thinks or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from specllama import answers, provenance
from specllama.thinking import ThinkingStream

if TYPE_CHECKING:
    from specllama.generation import Chunk


class Screen(Protocol):
    """Where a chat shows itself."""

    def answer(self, text: str) -> None:
        """A piece of an answer, as it comes."""
        ...

    def say(self, message: str) -> None:
        """A line for the user that is no part of an answer."""
        ...

    def aside(self, message: str) -> None:
        """A line of less interest."""
        ...

    def show_provenance(self, answer: provenance.Pieces) -> None:
        """The last answer by where its pieces came from, with a legend."""
        ...


# Shows an answer chunk by chunk and reads it to its end.
Presentation = Callable[[Iterator["Chunk"], Screen], None]


def stream(chunks: Iterator[Chunk], screen: Screen) -> None:
    """Show the text as it comes."""
    _stream_texts((chunk.text for chunk in chunks), screen)


def stream_without_thinking(chunks: Iterator[Chunk], screen: Screen) -> None:
    """Show the text as it comes, without what the model thinks before it."""
    _stream_texts(_spoken(chunks), screen)


def print_turn(chunks: Iterator[Chunk], screen: Screen) -> None:
    """Print the whole answer as an object when it is there."""
    answers.print_object(answers.answer_object(list(chunks)))


def print_turn_without_thinking(chunks: Iterator[Chunk], screen: Screen) -> None:
    """Print it as an object whose "text" leaves out what the model thinks."""
    answer = list(chunks)
    spoken = "".join(_spoken(iter(answer)))
    answers.print_object({**answers.answer_object(answer), "text": spoken})


def _stream_texts(texts: Iterator[str], screen: Screen) -> None:
    is_begun = False
    try:
        for text in texts:
            is_begun = True
            screen.answer(text)
    except BaseException:
        if is_begun:  # a message that is refused leaves no empty line
            screen.answer("\n")
        raise
    screen.answer("\n")


def _spoken(chunks: Iterator[Chunk]) -> Iterator[str]:
    thinking = ThinkingStream()
    for chunk in chunks:
        yield from (piece.text for piece in thinking.feed(chunk.text) if piece.kind == "answer")
    yield from (piece.text for piece in thinking.flush() if piece.kind == "answer")
