"""The tokens that steer a model, and text to ids in which only a template's own text becomes one.

What somebody typed may hold "<|im_end|>", whole, or in halves that come together where a template
cuts something out or puts its own text beside it. So `Cover` replaces, in that text, what is or
could become part of a marker by characters that occur nowhere else. The template passes them on,
the markers that are in its text then are its own, they cut it, and the covers come off.

Between two markers, what was typed and the template's own text are read as one text, because a
model was trained on prompts cut that way. Of 13 ways to begin and end a message, reading it apart
changes the ids of 2 with Qwen2's tokens, of 4 with Phi-3's, and of all 13 with Llama 2's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specllama import lm

# llama.cpp's llama_token_attr
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP, _RSTRIP = 1, 8, 16, 128, 256
_SPACES = " \t\n\v\f\r"  # of C's isspace
_PRIVATE = range(0xF0000, 0x10FFFE)
_WORD = re.compile(r"\s*[^\w\s].*[^\w\s]\s*", re.DOTALL)
_HTML = re.compile(
    r"</?(a|b|blockquote|caption|code|em|h[1-6]|i|li|ol|p|strong|sub|sup|table|tbody|td|tfoot|th"
    r"|thead|tr|u|ul)>"
)
Part = str | Sequence[int]


class ChatTokenizer(lm.Tokenizer, Protocol):
    """A tokenizer that also tells what kind each of its tokens is."""

    eos: int | None
    add_bos: bool

    def token_texts(self) -> list[bytes]:
        """The text of each id as the file has it."""
        ...

    def token_attributes(self) -> NDArray[np.integer[Any]]:
        """llama.cpp's `llama_token_attr` flags of each id, `[n_vocab]`."""
        ...


@dataclass(frozen=True, slots=True)
class Marker:
    """A token that a text must not become by accident."""

    text: str
    id: int
    attributes: int

    @property
    def is_control(self) -> bool:
        """Whether it prints nothing."""
        return bool(self.attributes & _CONTROL)


class Markers:
    """The markers of a vocabulary.

    These are its control tokens and unknown token, and of those that its file calls user-defined
    the ones in brackets or the like, such as <think>. The others, which llama.cpp matches in any
    text, are ordinary words of it: runs of spaces, letters, and tags of HTML.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        found = sorted(_markers(tokenizer), key=lambda marker: -len(marker.text))
        # Of two ids with one text llama.cpp takes the first that it comes to.
        self._by_text = {marker.text: marker for marker in reversed(found)}
        self._by_id = {marker.id: marker for marker in found}
        self._lengths = sorted({len(text) for text in self._by_text}, reverse=True)
        starts = {text[0] for text in self._by_text}
        self._starts = re.compile(_any_of(starts))
        self._edges = _edges(self._by_text)
        first = tokenizer.encode("a", special=False, add_special=False)
        self._adds_space = b"".join(map(tokenizer.piece, first)) == b" a"

    def text(self, token: int | None) -> str:
        """The text of a marker; empty for no token and for one that is none."""
        marker = None if token is None else self._by_id.get(token)
        return marker.text if marker else ""

    def has_control(self, text: str) -> bool:
        """Whether a control token occurs in a text."""
        return any(marker.is_control for marker in self.occurring(text))

    def cover(self, texts: Sequence[str]) -> Cover:
        """Covers of characters that occur in none of the texts."""
        used = set().union(*texts)
        return Cover(self, self._edges, (chr(c) for c in _PRIVATE if chr(c) not in used))

    def occurring(self, text: str) -> list[Marker]:
        """The markers whose text occurs in a text, longest first."""
        found = {
            piece
            for start in self._starts.finditer(text)
            for length in self._lengths
            if (piece := text[start.start() : start.start() + length]) in self._by_text
        }
        return [self._by_text[piece] for piece in sorted(found, key=lambda p: (-len(p), p))]

    def encode(self, parts: Sequence[Part], covered: Mapping[int, str]) -> list[int]:
        """Token ids of texts in which markers count, with ids between them that stay as they are.

        covered: what the private characters in the texts stand for (`Cover.covered`).
        """
        ids: list[int] = []
        is_inside = False  # a text that continues another gets no space before it
        for part in parts:
            if not isinstance(part, str):
                ids.extend(part)
                is_inside = is_inside or bool(part)
                continue
            for piece in self._partition(part):
                if isinstance(piece, int):
                    ids.append(piece)
                    is_inside = False
                elif piece:
                    ids.extend(self._encode_words(piece.translate(covered), is_inside))
                    is_inside = True
        return ids

    def _partition(self, text: str) -> list[str | int]:
        """Cut at the markers as llama.cpp does: the longest first, then those of the rest."""
        pieces: list[str | int] = [text]
        for marker in self.occurring(text):
            pieces = [cut for piece in pieces for cut in _cut(piece, marker)]
        return pieces

    def _encode_words(self, text: str, is_inside: bool) -> list[int]:
        """Token ids of ordinary text, whatever it holds."""
        ids = self._encode(text, is_inside)
        came = [self._by_id[token].text for token in set(ids) if token in self._by_id]
        pieces = _cut_inside(text, came)
        if len(pieces) == 1:  # nothing came, or the unknown token for an unknown character
            return ids
        return [
            token
            for at, piece in enumerate(pieces)
            for token in self._encode_words(piece, is_inside or at > 0)
        ]

    def _encode(self, text: str, is_inside: bool) -> list[int]:
        encode = self._tokenizer.encode
        if is_inside and self._adds_space:
            # SentencePiece puts a space before every text. Behind a newline, which joins nothing,
            # the text is read without one.
            newline = encode("\n", special=False, add_special=False)
            ids = encode("\n" + text, special=False, add_special=False)
            if ids[: len(newline)] == newline:
                return ids[len(newline) :]
        return encode(text, special=False, add_special=False)


class Cover:
    """Puts private characters in the place of those that could make a marker.

    edges: matches a character with which a marker may begin or end.
    """

    def __init__(self, markers: Markers, edges: re.Pattern[str], free: Iterator[str]) -> None:
        self._markers, self._edges, self._free = markers, edges, free
        self._covers: dict[str, str] = {}

    @property
    def covered(self) -> dict[int, str]:
        """What each cover stands for, as `str.translate` wants it."""
        return {ord(cover): char for char, cover in self._covers.items()}

    def new(self) -> str:
        """A character that occurs nowhere."""
        return next(self._free)

    def hide(self, text: str) -> str:
        """The text as a template may see it: of the same length, and without a marker.

        A marker is covered as a whole, so that a template does not find a word in it either, and
        elsewhere the edges, so that none comes about beside other text.
        """
        for marker in self._markers.occurring(text):
            text = text.replace(marker.text, "".join(map(self._cover, marker.text)))
        return self._edges.sub(lambda found: self._cover(found[0]), text)

    def _cover(self, character: str) -> str:
        if character not in self._covers:
            self._covers[character] = self.new()
        return self._covers[character]


def _markers(tokenizer: ChatTokenizer) -> Iterator[Marker]:
    attributes, texts = tokenizer.token_attributes(), tokenizer.token_texts()
    for token in np.flatnonzero(attributes & (_UNKNOWN | _CONTROL | _USER_DEFINED)).tolist():
        text = texts[token].decode("utf-8", "replace")
        is_word = not attributes[token] & (_UNKNOWN | _CONTROL) and (
            _WORD.fullmatch(text) is None or _HTML.fullmatch(text) is not None
        )
        if len(text) > 1 and not is_word:
            yield Marker(text, token, int(attributes[token]))


def _edges(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the brackets of all markers, but no letter or space: templates trim those."""
    ends = {character for text in texts for character in (text[0], text[-1])}
    return re.compile(_any_of({c for c in ends if not (c.isalnum() or c.isspace())}))


def _any_of(characters: set[str]) -> str:
    inside = "".join(map(re.escape, sorted(characters)))
    return f"[{inside}]" if inside else "(?!)"


def _cut(piece: str | int, marker: Marker) -> Iterator[str | int]:
    """The pieces around each occurrence, stripped where the marker takes spaces with it."""
    if isinstance(piece, int):
        yield piece
        return
    pieces = piece.split(marker.text)
    for at, part in enumerate(pieces):
        if at > 0:
            yield marker.id
            part = part.lstrip(_SPACES) if marker.attributes & _RSTRIP else part
        if at < len(pieces) - 1:
            part = part.rstrip(_SPACES) if marker.attributes & _LSTRIP else part
        yield part


def _cut_inside(text: str, words: Sequence[str]) -> list[str]:
    """The text in pieces that hold none of the words, each cut behind its first character."""
    found = (re.finditer(f"(?={re.escape(word)})", text) for word in words)
    cuts = sorted({match.start() + 1 for matches in found for match in matches})
    return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
