"""Where each piece of an answer came from: drafted and kept, corrected, or the target's own."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.generation import Token

Pieces = Sequence[tuple[str, str]]  # provenance and text

MEANING = {
    "accepted": "drafted, and kept",
    "corrected": "drawn where a draft was rejected",
    "bonus": "drawn after every draft was kept",
}
_BRACKETS = {"accepted": "[]", "corrected": "{}", "bonus": "<>"}
_COLOURS = {"accepted": "32", "corrected": "1;31", "bonus": "36"}


def pieces(tokens: Sequence[Token], piece: Callable[[int], bytes]) -> list[tuple[str, str]]:
    """The text of tokens, joined as long as the provenance is the same.

    piece: the bytes of a token. A character whose bytes come in several tokens counts to the last.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    joined: list[tuple[str, str]] = []
    for token in tokens:
        text = decoder.decode(piece(token.id))
        if joined and joined[-1][0] == token.provenance:
            text = joined.pop()[1] + text
        joined.append((token.provenance, text))
    return [(provenance, text) for provenance, text in joined if text]


def coloured(answer: Pieces) -> str:
    """The answer in ANSI colours, over their legend."""
    return _with_legend(answer, lambda provenance: (f"\x1b[{_COLOURS[provenance]}m", "\x1b[0m"))


def bracketed(answer: Pieces) -> str:
    """The answer with a kind of brackets for each provenance, over their legend."""
    return _with_legend(answer, lambda provenance: (*_BRACKETS[provenance],))


def _with_legend(answer: Pieces, marks: Callable[[str], tuple[str, ...]]) -> str:
    def marked(provenance: str, text: str) -> str:
        begin, end = marks(provenance)
        return f"{begin}{text}{end}"

    shown = "".join(marked(provenance, text) for provenance, text in answer)
    legend = (f"{marked(name, name)} {meaning}" for name, meaning in MEANING.items())
    return "\n".join([shown, "", *legend])
