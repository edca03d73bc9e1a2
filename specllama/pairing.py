"""Which tokens of two models are the same, whatever their ids, and what the others cost.

Tokens are the same when they print the same bytes: their texts in the files are written in as many
ways as there are tokenizers. Tokens that print nothing are the same when they have the same name,
such as <|im_end|>, and else when they have the same role: the end of a turn, of a text, or its
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specllama import workloads
from specllama.errors import ModelError
from specllama.lm import Tokenizer
from specllama.vocabulary import BYTE, TokenSet, compare, real_tokens
from specllama.vocabulary_map import PairedIds, SharedIds, VocabularyMap

_ROLES = ("eot", "eos", "bos")
# Of a text in the target's tokens, how much a draft must be able to propose.
_LEAST_COVERAGE = PairedIds.LEAST_MASS
_LONGEST = 48  # bytes of a token that is looked for when a text is cut by hand


class Vocabulary(TokenSet, Tokenizer, Protocol):
    """A tokenizer that also says what its tokens are."""


@dataclass(frozen=True)
class Joint:
    """How a draft works with a target.

    n_paired: tokens of the draft that it may propose. n_draft: all of its tokens. coverage: the
    share of the target's tokens of ordinary texts that they are. is_same: whether the ids mean the
    same in both models.
    """

    map: VocabularyMap
    n_paired: int
    n_draft: int
    coverage: float
    is_same: bool

    @property
    def detail(self) -> str:
        """What is shared and what the rest costs, in a few words."""
        if self.is_same:
            return f"all {self.n_draft}, with equal ids"
        return (
            f"{self.n_paired} of the draft's {self.n_draft}, which make up "
            f"{100 * self.coverage:.1f} % of ordinary text in the target's tokens; expect at least "
            f"{100 * (1 - self.coverage):.1f} % of the acceptance to be lost"
        )


def join(target: Vocabulary, draft: Vocabulary) -> Joint:
    """The map between two vocabularies, the cheapest that serves.

    Raises ModelError when a file has no tokenizer, or when too few tokens are shared for the draft
    to be of use.
    """
    comparison = compare(target, draft)
    if comparison.compatible:
        return Joint(SharedIds(comparison.shared), comparison.shared, comparison.shared, 1.0, True)
    if "none" in (target.kind, draft.kind):
        raise ModelError(comparison.reason)
    n_target, n_draft = real_tokens(target), real_tokens(draft)
    if comparison.shared == n_target:
        # The draft has some tokens more, which it does not propose.
        return Joint(SharedIds(n_target), n_target, n_draft, 1.0, False)
    pairs = pair_tokens(target, draft)
    paired = {their for their in pairs.tolist() if their >= 0}
    coverage = _coverage(target, paired)
    n_paired = int(np.count_nonzero(pairs >= 0))
    if coverage < _LEAST_COVERAGE:
        raise ModelError(
            f"the draft {draft.name} has {n_paired} of its {n_draft} tokens in common with the "
            f"target {target.name}, and could propose {100 * coverage:.0f} % of ordinary text; "
            "choose a draft with a more similar tokenizer, or run without one (--drafter none)"
        )
    spell = Speller(target, draft)
    first = draft.bos if draft.add_bos else None
    ids = PairedIds(pairs, target.n_vocab, spell, n_real=n_draft, first=first)
    return Joint(ids, n_paired, n_draft, coverage, False)


def pair_tokens(target: Vocabulary, draft: Vocabulary) -> NDArray[np.int64]:
    """For each real token of the draft the target's token that is the same, -1 for none.

    Several of the draft may have one partner. Of several of the target that print the same, the one
    that the file calls the same is taken, else a word before a byte: texts are made of those.
    """
    ours, theirs = _Printed(target), _Printed(draft)
    pairs = np.full(len(theirs.bytes), -1, dtype=np.int64)
    for token, printed in enumerate(theirs.bytes):
        namesake = ours.namesake(token, theirs.names[token])
        if namesake >= 0 and ours.bytes[namesake] == printed:
            pairs[token] = namesake
        elif printed:
            pairs[token] = ours.first.get(printed, -1)
    _pair_roles(pairs, target, draft, ours, theirs)
    return pairs


def _pair_roles(
    pairs: NDArray[np.int64],
    target: Vocabulary,
    draft: Vocabulary,
    ours: _Printed,
    theirs: _Printed,
) -> None:
    """Pair what ends and begins texts where the names differ; a mere namesake gives way."""
    special = [getattr(draft, role) for role in _ROLES]
    for role in _ROLES:
        our, their = getattr(target, role), getattr(draft, role)
        if our is None or their is None or ours.prints(our) or theirs.prints(their):
            continue
        if pairs[their] < 0:
            namesakes = [t for t in np.flatnonzero(pairs == our).tolist() if t not in special]
            pairs[namesakes] = -1
            pairs[their] = our


class _Printed:
    """What the real tokens print, and how the file calls them."""

    def __init__(self, tokens: Vocabulary) -> None:
        self.bytes = [tokens.piece(token) for token in range(real_tokens(tokens))]
        self.names = tokens.token_texts()[: len(self.bytes)]
        self._by_name = {name: token for token, name in reversed(list(enumerate(self.names)))}
        is_byte = (tokens.token_attributes()[: len(self.bytes)] & BYTE) > 0
        self.first: dict[bytes, int] = {}
        for token in np.argsort(is_byte, kind="stable").tolist():
            self.first.setdefault(self.bytes[token], token)

    def namesake(self, token: int, name: bytes) -> int:
        """The token of that name, the very id if it has it, or -1."""
        if token < len(self.names) and self.names[token] == name:
            return token
        return self._by_name.get(name, -1)

    def prints(self, token: int) -> bool:
        """Whether it prints anything, or is no real token."""
        return token >= len(self.bytes) or bool(self.bytes[token])


class Speller:
    """Texts of the target's tokens in tokens of the draft: as its tokenizer cuts them, if that
    prints the same bytes; else the longest token that fits, again and again."""

    def __init__(self, target: Tokenizer, draft: Vocabulary) -> None:
        self._target, self._draft = target, draft
        self._ids: dict[bytes, int] | None = None

    def __call__(self, run: Sequence[int]) -> list[int]:
        data = b"".join(self._target.piece(token) for token in run)
        try:
            ids = self._draft.encode(data.decode("utf-8"), special=False, add_special=False)
        except UnicodeDecodeError:  # a part of a character
            ids = []
        if b"".join(map(self._draft.piece, ids)) == data:
            return ids
        return self._by_hand(data)

    def _by_hand(self, data: bytes) -> list[int]:
        """Bytes that the draft has no token for are left out."""
        known = self._ids = self._ids or _Printed(self._draft).first
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + _LONGEST), at, -1)
            end = next((end for end in ends if data[at:end] in known), 0)
            if end:
                ids.append(known[data[at:end]])
            at = end or at + 1
        return ids


def _coverage(target: Tokenizer, paired: set[int]) -> float:
    """The share of the tokens of ordinary texts that are among `paired`."""
    texts = [text for load in workloads.built_in(target) for text in load.prompts]
    tokens = [t for text in texts for t in target.encode(text, special=True, add_special=False)]
    return sum(token in paired for token in tokens) / max(1, len(tokens))
