"""A tokenizer of bytes with markers, harsher than the real ones.

It adds BOS and EOS when told to add special tokens, it finds user-defined tokens in any text, and
it joins newlines, so that a text read in two parts can give other ids than in one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTROL, USER_DEFINED, LSTRIP, RSTRIP = 8, 16, 128, 256
NEWLINES = 256  # the id of two of them


class ToyTokenizer:
    """Ids 0 to 255 are bytes, 256 is a pair of newlines, then come the markers in their order.

    markers: text and attributes. bos, eos: texts of markers.
    """

    name = "toy.gguf"

    def __init__(
        self,
        markers: Mapping[str, int],
        *,
        bos: str | None = None,
        eos: str | None = None,
        add_bos: bool = False,
    ) -> None:
        self._bytes = [bytes([byte]) for byte in range(256)]
        self._bytes += [b"\n\n", *(text.encode() for text in markers)]
        self.id = {text: 257 + i for i, text in enumerate(markers)}
        self._attributes = markers
        self.n_vocab = 257 + len(markers)
        self.bos = None if bos is None else self.id[bos]
        self.eos = None if eos is None else self.id[eos]
        self.add_bos = add_bos
        self.end_tokens = frozenset(() if self.eos is None else (self.eos,))

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        matched = [
            t for t, attributes in self._attributes.items() if special or attributes & USER_DEFINED
        ]
        longest_first = sorted(matched, key=len, reverse=True)
        cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        ids: list[int] = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        for at, piece in enumerate(cut.split(text)):
            words = piece.encode().split(b"\n\n")
            if at % 2:
                ids.append(self.id[piece])
                continue
            for number, word in enumerate(words):
                ids += [NEWLINES] * (number > 0) + list(word)
        return ids + ([self.eos] if add_special and self.eos is not None else [])

    def piece(self, token: int) -> bytes:
        text = self._bytes[token]
        is_control = token > NEWLINES and self._attributes[text.decode()] & CONTROL
        return b"" if is_control else text

    def token_texts(self) -> list[bytes]:
        return [*(f"<0x{byte:02X}>".encode() for byte in range(256)), *self._bytes[256:]]

    def token_attributes(self) -> NDArray[np.integer[Any]]:
        return np.array([32] * 256 + [4, *self._attributes.values()], np.int32)

    def show(self, ids: list[int]) -> str:
        """The text of ids, markers included."""
        return b"".join(self._bytes[i] for i in ids).decode()

    def markers_in(self, ids: list[int]) -> list[str]:
        """The markers among ids, in order."""
        return [self._bytes[i].decode() for i in ids if i > NEWLINES]
