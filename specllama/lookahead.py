"""How many tokens to draft.

A policy decides before each token is drawn. It may look at past rounds, the clock, tokens that were
submitted earlier in this round, and the draft's law at the position; never at the token that its
answer would drop, which biases the output (drop a drawn token when q(x) is small, and tokens that q
likes are kept too often).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specllama.acceptance import Round
from specllama.errors import UsageError
from specllama.sampling import Law

MAX_DRAFT_TOKENS = 16


class LengthPolicy(Protocol):
    """Decides, for each sequence of a round and each draft token in turn, whether to go on.

    `i` numbers the sequences of the round, as in the last call of `start`.
    """

    def start(self, n_sequences: int) -> None:
        """A round begins."""
        ...

    def go(self, i: int) -> bool:
        """Whether the draft model is run for the next token; its law is not known yet."""
        ...

    def submit(self, i: int, law: Law) -> bool:
        """Whether a token is drawn from this law; a token once drawn is always submitted."""
        ...

    def observe(self, rounds: Sequence[Round]) -> None:
        """The outcome of the round, one entry per sequence."""
        ...


class FixedLength:
    """Always the same number of draft tokens.

    Raises UsageError outside 0 .. MAX_DRAFT_TOKENS.
    """

    def __init__(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"the number of draft tokens must be between 0 and {MAX_DRAFT_TOKENS}, "
                f"not {n_tokens}"
            )
        self.n_tokens = n_tokens
        self._drafted: list[int] = []

    def start(self, n_sequences: int) -> None:
        """A round begins; nothing is drafted yet."""
        self._drafted = [0] * n_sequences

    def go(self, i: int) -> bool:
        """Until the fixed number is reached."""
        return self._drafted[i] < self.n_tokens

    def submit(self, i: int, law: Law) -> bool:
        """Always; the law does not matter to a fixed length."""
        self._drafted[i] += 1
        return True

    def observe(self, rounds: Sequence[Round]) -> None:
        """Nothing is learnt."""
