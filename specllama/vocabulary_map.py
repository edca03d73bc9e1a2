"""Between the ids of a target and those of its draft: what the draft reads, what its rows mean.

The draft's context may be any function of the committed text, and its proposal may have any law, so
nothing here can change what comes out, only how much of the proposal is kept. With different token
sets the draft proposes what both have, by its own law given that it is one of them: the token-level
intersection of Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding
Algorithms for Heterogeneous Vocabularies" (arXiv 2502.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class VocabularyMap(Protocol):
    """How a draft model reads the target's tokens, and what its logits say of them."""

    def can_read(self, highest: int) -> bool:
        """Whether it can be shown a text whose largest token id is `highest`."""
        ...

    def read(self, slot: int, tokens: list[int]) -> list[int]:
        """The draft's tokens for the target's tokens of a slot; not to be modified."""
        ...

    def drafted(self, token: int) -> int:
        """The draft's id of a token that it proposed."""
        ...

    def row(self, logits: Logits) -> Logits | None:
        """Logits by the target's ids, valid until the next call; None where they say too little.

        logits: [n_vocab of the draft] float32. What tokens the draft lacks get -inf, or lie beyond
        the end of the row.
        """
        ...


class SharedIds:
    """Ids below `n_shared` mean the same in both models; other texts are not shown to the draft."""

    def __init__(self, n_shared: int) -> None:
        self.n_shared = n_shared

    def can_read(self, highest: int) -> bool:
        """Only texts of shared ids."""
        return highest < self.n_shared

    def read(self, slot: int, tokens: list[int]) -> list[int]:
        """The very tokens."""
        return tokens

    def drafted(self, token: int) -> int:
        """The same id."""
        return token

    def row(self, logits: Logits) -> Logits | None:
        """The beginning of the row."""
        return logits[: self.n_shared]


class PairedIds:
    """Ids of the draft paired with ids of the target, one by one.

    to_target: for each id of the draft that of the target, -1 for none; several may name the same,
    and their probabilities add up. n_target: ids of the target. spell: the draft's tokens for some
    of the target's tokens that have no partner, read together. n_real: ids of the draft from here
    on are padding. first: what the draft's context begins with, where the text does not.
    """

    # Of the draft's law at temperature 1, how much must lie on paired tokens to propose one of
    # them: where the draft wants to say something else, its second choices are seldom right.
    LEAST_MASS = 0.3

    def __init__(
        self,
        to_target: Sequence[int] | NDArray[np.integer],
        n_target: int,
        spell: Callable[[Sequence[int]], list[int]],
        *,
        n_real: int | None = None,
        first: int | None = None,
    ) -> None:
        pairs = np.array(to_target, dtype=np.int64)
        self._n_real = pairs.size if n_real is None else n_real
        pairs[self._n_real :] = -1
        self.to_target = pairs
        self._own = np.flatnonzero(pairs >= 0)
        self._theirs, place = np.unique(pairs[self._own], return_index=True)
        again = np.ones(self._own.size, dtype=bool)
        again[place] = False
        # The first of each, and those that name what another names already.
        self._more = self._own[again], pairs[self._own[again]]
        self._first_own = self._own[place]
        self._row = np.full(n_target, -np.inf, dtype=np.float32)
        self._to_draft = [-1] * n_target
        for own, their in zip(self._first_own.tolist(), self._theirs.tolist(), strict=True):
            self._to_draft[their] = own
        self._spell = spell
        self._first = first
        self._texts: dict[int, _Read] = {}

    def can_read(self, highest: int) -> bool:
        """Every text."""
        return True

    def read(self, slot: int, tokens: list[int]) -> list[int]:
        """Partner by partner; runs of tokens without one are spelt in the draft's own tokens.

        Only what follows the last run that may still grow is read again.
        """
        text = self._texts.get(slot)
        if text is None or tokens[: text.settled] != text.tokens[: text.settled]:
            text = self._texts[slot] = _Read()
            if self._first is not None and self._to_draft[tokens[0]] != self._first:
                text.ids.append(self._first)
                text.n_ids = 1
        del text.ids[text.n_ids :]
        at = text.settled
        while at < len(tokens):
            begin = at
            while at < len(tokens) and self._to_draft[tokens[at]] < 0:
                at += 1
            if at > begin:
                if at == len(tokens):
                    text.settled, text.n_ids = begin, len(text.ids)
                    text.ids += self._spell(tokens[begin:])
                    break
                text.ids += self._spell(tokens[begin:at])
            text.ids.append(self._to_draft[tokens[at]])
            at += 1
            text.settled, text.n_ids = at, len(text.ids)
        text.tokens = list(tokens)
        return text.ids

    def drafted(self, token: int) -> int:
        """The first of the ids that stand for it."""
        return self._to_draft[token]

    def row(self, logits: Logits) -> Logits | None:
        """Paired ids moved to their places; None where they hold less than LEAST_MASS."""
        if self._own.size < self._n_real and self._mass(logits) < self.LEAST_MASS:
            return None
        # One array for all: what stands elsewhere is -inf for good.
        self._row[self._theirs] = logits[self._first_own]
        own, theirs = self._more
        if own.size:
            np.logaddexp.at(self._row, theirs, logits[own])
        return self._row

    def _mass(self, logits: Logits) -> float:
        """The share of the draft's law that lies on paired tokens; NaN for broken logits."""
        real = logits[: self._n_real]
        with np.errstate(invalid="ignore"):
            weights = np.exp(real - real.max())
        total = weights.sum(dtype=np.float64)
        return float(weights[self._own].sum(dtype=np.float64) / total)


class _Read:
    """A text that was read: what of it is settled, in the target's tokens and in the draft's."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ids: list[int] = []
        self.settled = self.n_ids = 0
