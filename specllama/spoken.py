"""The ids of answers inside a rendered conversation.

Text that a model generated does not always come back as the same ids when it is read again. What
the cache holds of an answer is only of use if the prompt has the ids that were generated, so the
conversation is rendered a second time with a private character standing for each answer, and what
the template does to the text of an answer is seen by comparing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence

from specllama.lm import Tokenizer
from specllama.markers import Part


def spoken_ids(content: str, tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that say a message: without the tokens that end it, and none if they say another.

    Spaces around the text make no difference. Control tokens, which print nothing, belong to a form
    of answer that the template writes itself, so ids with such are not used.
    """
    tokens = tuple(tokens)
    while tokens and tokens[-1] in tokenizer.end_tokens:
        tokens = tokens[:-1]
    if not all(map(tokenizer.piece, tokens)):
        return ()
    return tokens if said(tokens, tokenizer).strip() == content.strip() else ()


def said(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """What the tokens print, without a character that is incomplete at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(b"".join(map(tokenizer.piece, tokens)))


def changed(
    text: str, held: str, stands: Mapping[int, str], contents: Mapping[int, str]
) -> set[int]:
    """Which of the answers a template changes, other than by trimming.

    text: the conversation rendered with all its contents. held: the same with a character of
    `stands` in the place of some. Where the two cannot be compared, all of them count as changed.
    """
    lost = {i for i, stand in stands.items() if held.count(stand) != 1}
    if lost:
        return lost
    pieces = split(held, stands)
    if len(pieces) != len(stands) + 1 or not text.startswith(pieces[0]):
        return set(stands)
    found: set[int] = set()
    at = len(pieces[0])
    for i, piece in zip(stands, pieces[1:], strict=True):
        end = _end(text, at, contents[i], piece)
        if end < 0:
            found.add(i)
            again = text.find(piece, at) if piece else -1
            if again < 0:
                return set(stands)
            end = again + len(piece)
        at = end
    return found if found or at == len(text) else set(stands)


def split(held: str, stands: Mapping[int, str]) -> list[str]:
    """The text around the standing characters, in the order of the answers."""
    pieces, rest = [], held
    for stand in stands.values():
        before, found, rest = rest.partition(stand)
        if not found:
            return []
        pieces.append(before)
    return [*pieces, rest]


def insert(
    pieces: Sequence[str], answers: Sequence[Sequence[int]], opening: str, tokenizer: Tokenizer
) -> Iterator[Part]:
    """Texts with ids between them.

    opening: what the template writes to let the assistant speak. SentencePiece models begin an
    answer with a space, and templates write one before its text: it is in the first id already.
    """
    for piece, tokens in zip(pieces, answers, strict=False):
        text = said(tokens, tokenizer)
        space = text[: len(text) - len(text.lstrip())]
        yield piece.removesuffix(space) if piece.endswith(opening + space) else piece
        yield tokens
    yield pieces[-1]


def _end(text: str, at: int, content: str, piece: str) -> int:
    """Where the piece behind a content ends, if both stand there, or -1."""
    for shown in (content, content.strip(), content.lstrip(), content.rstrip()):
        if text.startswith(shown + piece, at):
            return at + len(shown) + len(piece)
    return -1
