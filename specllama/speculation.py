"""One round of speculative decoding over a list of sequences.

Draft, score every drafted position of every sequence with one decode of the target, verify. A round
adds between one token and one more than was drafted to each sequence. With `NullDrafter` the same
code is plain decoding, so a comparison of the two is a comparison of the drafter alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.acceptance import Draft, Round, TargetLaws, Verifier
from specllama.costs import Budget
from specllama.drafting import Drafter, SequenceState
from specllama.errors import InvalidLogits
from specllama.lm import CachedLM, LogitRows, Request
from specllama.sampling import Law, next_law


class Speculator:
    """A target, a drafter and a verification rule.

    n_tokens: ids from here on are padding of the target's vocabulary and are never emitted.
    budget: told when rounds begin and end, where draft lengths are measured.
    """

    def __init__(
        self,
        target: CachedLM,
        drafter: Drafter,
        verify: Verifier,
        n_tokens: int,
        budget: Budget | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self._verify = verify
        self._n_tokens = n_tokens
        self._budget = budget

    def prefill(self, state: SequenceState) -> int:
        """Read a new sequence's prompt, all but its last token; rows the target decoded for it."""
        return self.prefill_together([state])[0]

    def prefill_together(self, sequences: Sequence[SequenceState]) -> list[int]:
        """`prefill` for several new sequences, which share the target's decodes."""
        decoded = self.target.prefill_together({s.slot: s.tokens[:-1] for s in sequences})
        for state in sequences:
            self.drafter.prepare(state)
        return [decoded[s.slot] for s in sequences]

    def round(self, sequences: Sequence[SequenceState]) -> list[Round]:
        """Extend each sequence's tokens by one round; what was added, in the same order.

        Raises InvalidLogits when the target produces none that are usable; nothing is added then.
        """
        if self._budget is not None:
            n_rows = sum(self.target.missing(s.slot, s.tokens) for s in sequences)
            self._budget.start(len(sequences), n_rows)
        drafts = self.drafter.propose(sequences, self._limits(sequences))
        rows = self.target.logits(
            [
                Request(s.slot, [*s.tokens, *d.tokens], len(d.tokens) + 1, len(d.tokens))
                for s, d in zip(sequences, drafts, strict=True)
            ]
        )
        try:
            rounds = [
                self._verify(draft, self._laws(s, draft, logits), s.streams.at(len(s.tokens)))
                for s, draft, logits in zip(sequences, drafts, rows, strict=True)
            ]
        except InvalidLogits:
            self.target.wipe()  # so that it stays with this sequence
            raise
        for s, outcome in zip(sequences, rounds, strict=True):
            s.extend(outcome.tokens)
        if self._budget is not None:
            self._budget.finish(sum(len(outcome.tokens) for outcome in rounds))
        self.drafter.observe(rounds)
        return rounds

    def _limits(self, sequences: Sequence[SequenceState]) -> list[int]:
        """Most tokens that may be drafted: for the answer, the context and the decode."""
        rows_each = self.target.max_rows // len(sequences)
        most = min(rows_each, self.target.max_draft + 1)
        return [
            max(0, min(s.n_left, self.target.n_ctx - len(s.tokens) + 1, most) - 1)
            for s in sequences
        ]

    def _laws(self, state: SequenceState, draft: Draft, logits: LogitRows) -> TargetLaws:
        """The target's law at each drafted position, computed when it is asked for."""

        def law(i: int) -> Law:
            # The drafted tokens before a position are part of its history: penalties see them.
            history = state.tokens
            if state.params.uses_history:
                history = [*state.tokens, *draft.tokens[:i]]
            position = len(state.tokens) + i
            return next_law(logits[i][: self._n_tokens], state.params, history, position)

        return law
