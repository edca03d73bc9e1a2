"""The parts of a conversation: turns, and an answer that grows with its ids and how it began."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from specllama.generation import Chunk, Stats, Token
from specllama.lm import Tokenizer
from specllama.prompts import Message
from specllama.thinking import left_open

# Where the template's last words are looked for; a tag with white space is shorter.
_TAIL = 16


@dataclass
class Answer:
    """The last answer, as far as it came.

    opening: what the template let the answer begin with, such as "<think>"; it stands at the
    beginning of the text. tokens: the delivered ones, with their provenance. finish_reason,
    finish_detail: None while it is unfinished or when it was broken off. stats: so far, None before
    the first chunk.
    """

    prompt_n: int
    opening: str = ""
    opening_tokens: tuple[int, ...] = ()
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    finish_detail: str | None = None
    stats: Stats | None = None

    def add(self, chunk: Chunk) -> Chunk:
        """Count a chunk; the chunk to show, the first with the opening before it."""
        if not self.text and self.opening and (chunk.text or chunk.tokens):
            chunk = replace(chunk, text=self.opening + chunk.text)
        self.text += chunk.text
        self.tokens += chunk.tokens
        self.finish_reason, self.finish_detail = chunk.finish_reason, chunk.finish_detail
        self.stats = chunk.stats
        return chunk

    @property
    def is_begun(self) -> bool:
        """Whether there is anything of it to keep."""
        return bool(self.text or self.tokens or self.finish_reason)

    def message(self) -> Message:
        """The assistant's message so far."""
        ids = tuple(token.id for token in self.tokens)
        return Message("assistant", self.text, (*self.opening_tokens, *ids))


def turn_seed(seed: int, turn: int, attempt: int) -> int:
    """The seed of an answer: of the first one the seed itself, else 32 bits of a hash of all three.

    turn: how many messages of the user came before. attempt: how often it was retried.
    """
    if turn == attempt == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {turn} {attempt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def by_turn(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages by turns, each with what answered it."""
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return turns


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[str, bool]:
    """What tokens print, and whether that ends with a whole character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(b"".join(map(tokenizer.piece, tokens)))
    return text, not decoder.getstate()[0]


def opening_of(prompt: Sequence[int], tokenizer: Tokenizer) -> tuple[str, tuple[int, ...]]:
    """The tag that the template itself opens at the end of a prompt, with its ids; or nothing.

    Only what stands behind the last control token counts, which is a token that prints nothing:
    before it the user may have written a tag.
    """
    tail = takewhile(tokenizer.piece, reversed(prompt[-_TAIL:]))
    ids = tuple(reversed(list(tail)))
    opening = left_open(_text(ids, tokenizer)[0])
    while opening and _text(ids, tokenizer)[0] != opening:
        ids = ids[1:]
        if not ids:
            break
    return opening, ids if opening else ()


def printing(message: Message, tokenizer: Tokenizer) -> Message:
    """The message with its ids as far as they print its content, or else without ids.

    The end of an answer can lie inside a token: where a stop string began, or inside a character.
    """
    tokens = message.tokens
    for _ in range(4):  # a character has four bytes at most
        text, is_whole = _text(tokens, tokenizer)
        if is_whole:
            break
        tokens = tokens[:-1]
    return replace(message, tokens=tokens if text == message.content else ())
