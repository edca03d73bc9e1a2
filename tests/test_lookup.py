"""Proposals by repetition: the automaton against a slow search, and the drafters over it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import FrameType

import pytest
from toys import PLAIN, Table, ToyContext, toy_lm

from specllama.acceptance import Round, verify_block
from specllama.costs import Budget, CostTable
from specllama.drafting import ModelDrafter, SequenceState
from specllama.lm import CachedLM
from specllama.lookahead import MeasuredLength
from specllama.lookup import BestDrafter, LookupDrafter, SuffixAutomaton
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator

FLAT = {1: [50.0], 17: [60.0]}
GREEDY = SamplingParams(temperature=0)


def stopped() -> float:
    """A clock by which rounds take no time, so that the pace stays that of plain decoding."""
    return 0.0


def slow_match(tokens: Sequence[int]) -> int:
    """Length of the longest end of the text that also ends earlier."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        end = tuple(tokens[n - length :])
        if any(tuple(tokens[i - length : i]) == end for i in range(length, n)):
            return length
    return 0


@pytest.mark.parametrize("n_letters", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_the_match_is_the_longest_repeated_end(n_letters: int, seed: int) -> None:
    rng = random.Random(seed)
    text = SuffixAutomaton()
    for _ in range(60):
        text.append(rng.randrange(n_letters))
        length, end = text.match()
        assert length == slow_match(text.tokens)
        if length:
            assert end < len(text.tokens)
            assert text.tokens[end - length : end] == text.tokens[-length:]


def test_the_newest_of_several_places_is_followed() -> None:
    text = SuffixAutomaton()
    for token in [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]:
        text.append(token)
    length, end = text.match()
    assert (length, text.tokens[end]) == (3, 8)


def test_a_long_text_is_read_in_linear_time_and_space() -> None:
    rng = random.Random(1)
    text = SuffixAutomaton()
    for _ in range(20_000):
        text.append(rng.randrange(3))
    assert len(text._length) <= 2 * 20_000


def state(tokens: Sequence[int], n_left: int = 40) -> SequenceState:
    return SequenceState(0, list(tokens), GREEDY, Streams.seeded(1), n_left)


def budget() -> Budget:
    made = Budget(CostTable(FLAT), stopped)
    made.start(1)
    return made


def test_what_followed_before_is_proposed() -> None:
    drafter = LookupDrafter(budget())
    [draft] = drafter.propose([state([5, 6, 7, 8, 9, 4, 5, 6, 7])], [4])
    assert draft.tokens == (8, 9, 4, 5)
    assert all(law.prob(token) == 1 for law, token in zip(draft.laws, draft.tokens, strict=True))


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3, 4], [1, 2, 9, 1, 2]])
def test_nothing_is_proposed_without_a_repetition_of_three(tokens: list[int]) -> None:
    drafter = LookupDrafter(budget())
    [draft] = drafter.propose([state(tokens)], [4])
    assert draft.tokens == ()


def test_the_limit_and_the_end_of_the_text_are_kept() -> None:
    drafter = LookupDrafter(budget(), limit=3)
    [draft] = drafter.propose([state([1, 2, 3, 4, 5, 6, 1, 2, 3])], [16])
    assert draft.tokens == (4, 5, 6)
    [draft] = drafter.propose([state([1, 2, 3, 4, 5, 6, 1, 2, 3])], [0])
    assert draft.tokens == ()


class Copying:
    """A model that says [1..9] over and over, or never what came before."""

    n_vocab = 12

    def __init__(self, honest: bool) -> None:
        self._honest = honest
        self._noise = Table(12, seed=4)

    def __call__(self, prefix: tuple[int, ...]):  # type: ignore[no-untyped-def]
        row = self._noise(prefix) * 1e-3
        row[(prefix[-1] + 1) % 10 if self._honest else (prefix[-1] * 7 + len(prefix)) % 12] = 1
        return row / row.sum()


def run(honest: bool) -> list[Round]:
    costs = Budget(CostTable(FLAT), stopped)
    drafter = LookupDrafter(costs)
    lm = CachedLM(ToyContext(Copying(honest), 12, n_ctx=400))
    speculator = Speculator(lm, drafter, verify_block, 12, costs)
    s = state([*range(10), *range(10)], 200)
    drafter.prepare(s)
    rounds = []
    while s.n_left > 0:
        rounds += speculator.round([s])
    return rounds


def test_a_copied_text_is_taken_over_in_long_drafts() -> None:
    rounds = run(honest=True)
    assert len(rounds) < 40
    assert all(r.accepted == r.proposed for r in rounds)


def test_guesses_that_fail_are_given_up() -> None:
    """Rows cost 10 ms for sixteen here: what fails always is not worth even that."""
    rounds = run(honest=False)
    assert sum(r.proposed for r in rounds[50:]) <= 5


def test_another_text_in_the_same_slot_is_read_anew() -> None:
    drafter = LookupDrafter(budget())
    drafter.propose([state([5, 6, 7, 8, 9, 4, 5, 6, 7])], [4])
    [draft] = drafter.propose([state([1, 2, 3, 9, 1, 2, 3])], [4])
    assert draft.tokens == (9, 1, 2, 3)


def best(acceptance: float) -> tuple[BestDrafter, Budget]:
    costs = Budget(CostTable(FLAT), stopped)
    policy = MeasuredLength(costs, CostTable({1: [5.0], 2: [5.0]}), forecast=acceptance)
    model = ModelDrafter(toy_lm(Table(12, seed=5)), policy, 12)
    return BestDrafter(LookupDrafter(costs), model, policy), costs


@pytest.mark.parametrize(("acceptance", "by_lookup"), [(0.95, False), (0.05, True)])
def test_the_source_that_is_worth_more_is_chosen(acceptance: float, by_lookup: bool) -> None:
    drafter, costs = best(acceptance)
    costs.start(1)
    [draft] = drafter.propose([state([5, 6, 7, 8, 9, 4, 5, 6, 7])], [8])
    assert (draft.tokens[:3] == (8, 9, 4)) == by_lookup
    assert draft.tokens


def test_each_source_learns_from_its_own_rounds_only() -> None:
    drafter, costs = best(0.05)
    target = CachedLM(ToyContext(Copying(True), 12, n_ctx=400))
    speculator = Speculator(target, drafter, verify_block, 12, costs)
    s = SequenceState(0, [*range(10), *range(10)], PLAIN, Streams.seeded(3), 150)
    forecast = drafter._policy.forecast
    drafter.prepare(s)
    while s.n_left > 0:
        speculator.round([s])
    # The guesses were right all the time, and the model's forecast has not heard of it.
    assert drafter._policy.forecast <= forecast + 0.01
    assert drafter.lookup._counts[-1][0] > 20


def test_an_interrupt_while_a_text_is_read_leaves_nothing_broken() -> None:
    """Ctrl-C at every line of the automaton's growth, then the same text again."""
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    fresh = LookupDrafter(budget()).propose([state(tokens)], [4])
    lines = 0
    finished = False
    while not finished:
        lines += 5
        drafter, left = LookupDrafter(budget()), [lines]

        def trace(frame: FrameType, event: str, _: object) -> object:
            if "lookup.py" in frame.f_code.co_filename and event == "line":
                left[0] -= 1  # noqa: B023
                if left[0] == 0:  # noqa: B023
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            drafter.prepare(state(tokens))
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        assert drafter.propose([state(tokens)], [4])[0].tokens == fresh[0].tokens
    assert lines > 100


def test_nothing_is_offered_while_costs_are_unknown() -> None:
    unmeasured = Budget(CostTable(), stopped)
    unmeasured.start(1)
    drafter = LookupDrafter(unmeasured)
    assert drafter.propose([state([1, 2, 3, 4, 1, 2, 3])], [4])[0].tokens == ()


def test_a_draft_model_that_cannot_read_on_loses_to_lookup() -> None:
    costs = budget()
    policy = MeasuredLength(costs, CostTable({1: [5.0], 2: [5.0]}), forecast=0.95)
    lm = CachedLM(ToyContext(Table(12, seed=5), 12))
    drafter = BestDrafter(LookupDrafter(costs), ModelDrafter(lm, policy, 9), policy)
    [draft] = drafter.propose([state([5, 6, 7, 8, 9, 4, 5, 6, 7])], [8])
    assert draft.tokens[:2] == (8, 9)


def test_a_kind_of_guess_that_failed_is_tried_again_some_day() -> None:
    drafter = LookupDrafter(budget())
    drafter._counts = [[1.0, 60.0] for _ in drafter._counts]
    repeated = [5, 6, 7, 8, 9, 4, 5, 6, 7]
    tried = [bool(drafter.propose([state(repeated)], [4])[0].tokens) for _ in range(300)]
    assert not tried[0]
    assert any(tried)


def test_longer_repetitions_are_trusted_as_much_as_shorter_ones_until_they_were_seen() -> None:
    drafter = LookupDrafter(budget())
    fresh = [drafter._chance(i) for i in range(len(drafter._counts))]
    assert fresh == sorted(fresh)
    drafter._counts[2] = [50.0, 1.0]
    assert all(drafter._chance(i) > 0.9 for i in range(2, len(drafter._counts)))
    drafter._counts[4] = [1.0, 50.0]  # evidence of its own counts for more
    assert drafter._chance(4) < 0.1
