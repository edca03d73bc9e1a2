"""The maps between the ids of a target and of its draft, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from toys import Iid, Oracle, toy_lm

from specllama.costs import Budget, CostTable
from specllama.drafting import ModelDrafter, SequenceState
from specllama.lookahead import FixedLength, MeasuredLength
from specllama.sampling import SamplingParams, Streams, next_law
from specllama.vocabulary_map import PairedIds, SharedIds

WHOLE = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


def nothing(run: Sequence[int]) -> list[int]:
    return []


class Spelling:
    """Spells a run as its tokens and 100, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, run: Sequence[int]) -> list[int]:
        self.asked.append(list(run))
        return [100 + token for token in run]


def row(*probs: float) -> NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        logits: NDArray[np.float32] = np.log(np.array(probs)).astype(np.float32)
    return logits


def test_shared_ids_move_and_copy_nothing() -> None:
    ids, tokens, logits = SharedIds(3), [0, 2, 1], row(0.1, 0.2, 0.3, 0.4)
    assert ids.read(0, tokens) is tokens
    shown = ids.row(logits)
    assert shown is not None and shown.base is not None
    assert np.shares_memory(shown, logits) and shown.size == 3
    assert ids.can_read(2) and not ids.can_read(3)
    assert ids.drafted(2) == 2


def test_a_row_is_moved_masked_and_normalised_by_the_law() -> None:
    ids = PairedIds([-1, 3, 0, -1], 5, nothing)
    moved = ids.row(row(0.2, 0.1, 0.4, 0.3))
    assert moved is not None
    law = next_law(moved, WHOLE)
    assert law.probs == pytest.approx([0.8, 0, 0, 0.2, 0])


def test_ids_of_one_token_add_up() -> None:
    ids = PairedIds([1, 0, 1, 1], 2, nothing)
    moved = ids.row(row(0.1, 0.4, 0.2, 0.3))
    assert moved is not None
    assert next_law(moved, WHOLE).probs == pytest.approx([0.4, 0.6])
    assert ids.drafted(1) == 0


def test_a_row_does_not_remember_the_one_before() -> None:
    ids = PairedIds([0, 1, 1, -1], 3, nothing)
    for probs in ((0.1, 0.2, 0.3, 0.4), (0.5, 0.1, 0.1, 0.3)):
        moved = ids.row(row(*probs))
        assert moved is not None
        total = 1 - probs[3]
        expected = [probs[0] / total, (probs[1] + probs[2]) / total, 0]
        assert next_law(moved, WHOLE).probs == pytest.approx(expected)


def test_too_little_mass_on_shared_tokens_gives_no_row() -> None:
    ids = PairedIds([0, -1], 1, nothing)
    assert ids.row(row(0.31, 0.69)) is not None
    assert ids.row(row(0.29, 0.71)) is None


def test_padding_counts_for_no_mass_and_is_never_proposed() -> None:
    ids = PairedIds([0, -1, 1], 2, nothing, n_real=2)
    assert ids.row(row(0.02, 0.03, 0.95)) is not None
    assert ids.row(row(0.02, 0.08, 0.9)) is None
    moved = ids.row(row(0.3, 0.2, 0.5))
    assert moved is not None and np.isneginf(moved[1])


def test_broken_logits_stay_broken() -> None:
    ids = PairedIds([0, -1], 1, nothing)
    moved = ids.row(np.array([np.nan, 0], np.float32))
    assert moved is not None and np.isnan(moved[0])


def test_tokens_without_a_partner_are_spelt_run_by_run() -> None:
    spelling = Spelling()
    ids = PairedIds([2, 0], 6, spelling)
    assert ids.can_read(5)
    assert ids.read(0, [0, 3, 4, 2, 5]) == [1, 103, 104, 0, 105]
    assert spelling.asked == [[3, 4], [5]]


def test_a_text_that_grows_is_read_on_and_its_last_run_again() -> None:
    spelling = Spelling()
    ids = PairedIds([2, 0], 6, spelling)
    assert ids.read(0, [3, 0, 4]) == [103, 1, 104]
    assert ids.read(0, [3, 0, 4, 5]) == [103, 1, 104, 105]
    assert spelling.asked[2:] == [[4, 5]]
    assert ids.read(0, [3, 0, 4, 5, 2, 0]) == [103, 1, 104, 105, 0, 1]
    before = len(spelling.asked)
    assert ids.read(0, [3, 0, 4, 5, 2, 0, 0]) == [103, 1, 104, 105, 0, 1, 1]
    assert len(spelling.asked) == before


def test_another_text_of_the_slot_is_read_from_its_beginning() -> None:
    ids = PairedIds([2, 0], 6, Spelling())
    ids.read(0, [3, 0, 4, 2, 2, 2])
    assert ids.read(0, [3, 0, 5]) == [103, 1, 105]
    assert ids.read(0, [2]) == [0]
    assert ids.read(1, [0, 0]) == [1, 1]
    assert ids.read(0, [2, 4]) == [0, 104]


def test_the_draft_begins_as_it_is_used_to() -> None:
    ids = PairedIds([2, 0, -1], 6, Spelling(), first=2)
    assert ids.read(0, [0, 2]) == [2, 1, 0]
    assert ids.read(0, [0, 2, 0]) == [2, 1, 0, 1]
    # Not twice.
    same = PairedIds([2, 0], 6, Spelling(), first=0)
    assert same.read(0, [2, 0]) == [0, 1]


def test_random_texts_are_read_as_if_each_were_the_first() -> None:
    rng = np.random.default_rng(7)
    ids = PairedIds([2, 0, 4, 4], 7, Spelling(), first=1)
    text: list[int] = [0]
    for _ in range(300):
        text = text[: rng.integers(1, len(text) + 1)] + rng.integers(0, 7, 3).tolist()
        fresh = PairedIds([2, 0, 4, 4], 7, Spelling(), first=1)
        assert ids.read(0, text) == fresh.read(0, text)


class Missing(FixedLength):
    """Counts the looks that gave nothing."""

    misses = 0

    def miss(self, i: int) -> None:
        self.misses += 1


def test_a_draft_that_wants_to_say_something_else_proposes_nothing() -> None:
    policy = Missing(3)
    draft = toy_lm(Iid(0.2, 0.8))
    drafter = ModelDrafter(draft, policy, PairedIds([0, -1], 2, nothing))
    oracle = Oracle([])
    state = SequenceState(0, [0, 0], WHOLE, Streams(oracle, oracle, oracle), 9)
    [proposal] = drafter.propose([state], [5])
    assert (proposal.tokens, proposal.failed, policy.misses) == ((), False, 1)


def test_looks_that_give_nothing_make_drafting_worth_less() -> None:
    budget = Budget(CostTable({1: [20.0], 2: [26.0], 3: [26.0]}))
    policy = MeasuredLength(budget, CostTable({1: [1.5], 2: [2.0]}), forecast=0.8)
    worths = []
    for _ in range(40):
        budget.start(1)
        policy.start([1])
        policy.miss(0)
        worths.append(policy.worth)
    assert worths[0] is not None and worths[-1] is not None
    assert worths[-1] < 0
    policy.start([1])
    assert not policy.expects(0)
