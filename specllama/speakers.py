"""Who speaks and who drafts, chosen while a conversation goes on and nothing is loaded again."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from specllama import tuning
from specllama.drafting import ModelDrafter
from specllama.errors import UsageError
from specllama.generation import Pair
from specllama.lm import CachedLM, Tokenizer
from specllama.lookahead import FixedLength
from specllama.tuning import Speculation
from specllama.vocabulary import TokenSet, compare


class Speakers:
    """The ways to use a pair. now: the pair to generate with. choice: what was chosen last."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._own = pair.speculation
        self.now = pair
        self.choice = _choice(pair.speculation)

    def choose(self, choice: str | int) -> None:
        """Choose who drafts.

        "auto": what pays, by draft model or lookup; a number: the draft model with so many tokens
        every round; "off" or 0: nobody; "only": the draft model speaks and the target is not asked.
        But for "only", every answer has the target's law. Raises UsageError for what cannot be had;
        then nothing changes.
        """
        if choice == "only":
            self.now, self.choice = self._draft_alone(), choice
            return
        speculation = self._speculation(choice)
        self._pair.speculation = speculation
        self.now, self.choice = self._pair, choice or "off"

    @property
    def knows_what_pays(self) -> bool:
        """Whether what the pair was loaded with decides itself, or nothing else can."""
        return self._own.budget is not None or self._pair.auto is None

    def _speculation(self, choice: str | int) -> Speculation:
        if choice == "off" or choice == 0:
            return tuning.plain()
        if choice == "auto":
            return self._auto()
        if not isinstance(choice, int):
            raise UsageError(f'cannot draft "{choice}"; use auto, a number of tokens, off or only')
        if self._own.at_length is None:
            self._require_draft()
            raise UsageError("the draft model cannot draft for this target; use off or only")
        return self._own.at_length(choice)

    def _auto(self) -> Speculation:
        """What the pair was loaded with, if that decides itself, or else what pays."""
        if not self.knows_what_pays and self._pair.auto is not None:
            measured = self._pair.auto()
            self._own = replace(measured, at_length=measured.at_length or self._own.at_length)
        return self._own

    def _draft_alone(self) -> Pair:
        draft, tokenizer = self._require_draft()
        # The prompt has the target's ids, and the target reads the ids of earlier answers.
        own = cast(TokenSet, self._pair.tokenizer)
        if not compare(own, cast(TokenSet, tokenizer)).compatible:
            raise UsageError(
                f"{draft.name} has other tokens than {self._pair.target.name}, so it cannot go on "
                "with this conversation; begin one with it as --model"
            )
        n_tokens = self._pair.n_tokens_draft or tokenizer.n_vocab
        return Pair(draft, tokenizer, tuning.plain(), n_tokens=n_tokens)

    def _require_draft(self) -> tuple[CachedLM, Tokenizer]:
        if self._pair.draft is None or self._pair.draft_tokenizer is None:
            raise UsageError(
                "no draft model is loaded; start again with one, by --pair or --model-draft and "
                "without --drafter lookup or none"
            )
        return self._pair.draft, self._pair.draft_tokenizer


def _choice(speculation: Speculation) -> str | int:
    """How a pair's own way to speculate would be chosen."""
    drafter = speculation.drafter
    if isinstance(drafter, ModelDrafter) and isinstance(drafter.policy, FixedLength):
        return drafter.policy.n_tokens
    return "off" if speculation.name == "none" else "auto"
