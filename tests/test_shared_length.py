"""One draft length for all sequences of a round: exact, and no more than pays for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
from toys import (
    PLAIN,
    Noisy,
    Oracle,
    Table,
    ToyContext,
    distance,
    enumerate_runs,
    one_stream,
    target_law,
)

from specllama.acceptance import Draft, Round, Verifier, verify_block, verify_tokens
from specllama.costs import Budget, CostTable
from specllama.drafting import ModelDrafter, SequenceState
from specllama.lm import CachedLM
from specllama.lookahead import LengthPolicy, MeasuredLength
from specllama.parallelism import choose
from specllama.sampling import Law
from specllama.shared_length import SharedLength
from specllama.speculation import Speculator

# Milliseconds of a large model's rows on two cores, and of a small one's.
STAIRS = {1: [49.0], 2: [66.0], 4: [66.0], 8: [102.0], 16: [144.0], 32: [288.0]}
SMALL = {1: [3.0], 2: [4.0], 4: [5.0], 8: [7.0], 16: [11.0], 64: [40.0]}


def policy(
    n: int,
    costs: dict[int, list[float]] | None = None,
    draft: dict[int, list[float]] | None = None,
    forecast: float = 0.8,
    clock: Callable[[], float] = lambda: 0.0,
) -> SharedLength:
    """The policy at the beginning of a round of n sequences."""
    budget = Budget(CostTable(STAIRS if costs is None else costs), clock)
    made = SharedLength(budget, CostTable(SMALL if draft is None else draft), forecast)
    budget.start(n)
    made.start([1] * n)
    return made


def test_fewer_drafts_with_more_sequences() -> None:
    lengths = [policy(n).length for n in (1, 2, 4, 8, 16, 32)]
    assert lengths[0] >= 3
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_all_sequences_draft_equally_many() -> None:
    made = policy(2)
    laws = [Law.one_hot(1), Law.one_hot(2)]
    while made.go(0):
        assert made.go(1)
        for i in (0, 1):
            assert made.submit(i, lambda: laws[0])
    assert not made.go(1)
    assert made.budget.rows == 2 + 2 * made.length


def test_a_dear_draft_and_a_bad_one_are_let_go() -> None:
    assert policy(2, draft={1: [60.0], 2: [60.0]}).length == 0
    assert policy(2, forecast=0.05).length == 0
    assert not policy(2, forecast=0.05).is_on


def test_where_rows_cost_nothing_drafts_are_long() -> None:
    flat = {1: [50.0], 2: [50.0], 64: [51.0], 512: [60.0]}
    assert policy(16, costs=flat, draft={1: [0.1], 2: [0.1], 64: [0.1]}).length > 6


def rounds(made: SharedLength, count: int, overlap: float, clock: list[float]) -> list[int]:
    """So many rounds of four sequences on a text of this acceptance; their draft lengths."""
    lengths = []
    q, p = Law.one_hot(1), Law.one_hot(1) if overlap == 1 else Law.one_hot(2)
    for _ in range(count):
        made.budget.start(4)
        made.start([1] * 4)
        lengths.append(made.length)
        n = made.length
        clock[0] += (made.budget.costs.ms(4 + 4 * n) + n * made.draft.ms(4)) / 1000
        made.budget.take(4 * n)
        draft = Draft((1,) * n, (q,) * n)
        kept = n if overlap == 1 else 0
        outcome = Round((1,) * (kept + 1), draft, (p,) * min(n, kept + 1))
        made.budget.finish(4 * (kept + 1))
        made.observe([outcome] * 4)
    return lengths


def test_it_learns_that_drafts_are_no_use_probes_rarely_and_comes_back() -> None:
    clock = [0.0]
    made = policy(4, clock=lambda: clock[0])
    assert rounds(made, 100, 0.0, clock)[:1] != [0]
    quiet = rounds(made, 400, 0.0, clock)
    assert 0 < sum(quiet) < 0.05 * len(quiet)
    again = rounds(made, 3000, 1.0, clock)
    assert min(again[-10:]) > 0


def test_now_and_then_a_round_is_left_without_drafts() -> None:
    clock = [0.0]
    made = policy(4, clock=lambda: clock[0])
    lengths = rounds(made, 200, 1.0, clock)
    assert 1 <= lengths[10:].count(0) <= 4


def test_nothing_is_known_yet() -> None:
    made = policy(4, costs={}, draft={})
    assert (made.length, made.is_measured, made.expects(0)) == (1, False, True)


# --- how many at once -----------------------------------------------------------------------


@pytest.mark.parametrize("most, wanted", [(32, 16), (16, 16), (15, 15), (11, 8), (5, 4), (1, 1)])
def test_as_many_at_once_as_are_nearly_fastest(most: int, wanted: int) -> None:
    assert choose(CostTable(STAIRS), most) == wanted


def test_a_machine_on_which_rows_cost_as_much_as_rounds_does_one_at_a_time() -> None:
    assert choose(CostTable({n: [10.0 * n] for n in (1, 2, 4, 8, 16, 32)}), 32) == 1


# --- the law --------------------------------------------------------------------------------


def ticking() -> Callable[[], float]:
    """A clock that passes 10, 20, 30, 10, 20, ... ms: rounds of different length."""
    now, count = 0.0, 0

    def clock() -> float:
        nonlocal now, count
        count += 1
        now += 0.010 * (1 + count % 3)
        return now

    return clock


def emit(
    oracle: Oracle, target: Table, verify: Verifier, make: Callable[[Budget], LengthPolicy]
) -> tuple[int, ...]:
    """Two sequences over contexts that are split, until both have three tokens."""

    def split(model: Table | Noisy) -> CachedLM:
        return CachedLM(ToyContext(model, model.n_vocab, n_slots=2, is_split=True))

    costs = CostTable({1: [20], 2: [22], 4: [26], 6: [30], 8: [60]})
    budget = Budget(costs, ticking())
    drafter = ModelDrafter(split(Noisy(target, seed=9)), make(budget), target.n_vocab)
    speculator = Speculator(split(target), drafter, verify, target.n_vocab, budget)
    states = [SequenceState(i, [0, 1], PLAIN, one_stream(oracle), 3 - i) for i in range(2)]
    while active := [state for state in states if state.n_left > 0]:
        speculator.round(active)
    return tuple(token for state in states for token in state.tokens[2:])


POLICIES: dict[str, Callable[[Budget], LengthPolicy]] = {
    "shared": lambda b: SharedLength(b, CostTable({1: [1], 2: [1.5]}), 0.5, limit=2),
    "own": lambda b: MeasuredLength(b, CostTable({1: [1], 2: [1.5]}), forecast=0.5, limit=2),
}


@pytest.mark.parametrize("verify", [verify_tokens, verify_block])
@pytest.mark.parametrize("name", POLICIES)
def test_two_sequences_are_exact_and_independent(name: str, verify: Verifier) -> None:
    target = Table(2, seed=8)
    emitted = enumerate_runs(lambda oracle: emit(oracle, target, verify, POLICIES[name]))
    long, short = (target_law(target, n, prompt=(0, 1)) for n in (3, 2))
    wanted: dict[Hashable, float] = {
        (*a, *b): p * q  # type: ignore[misc]
        for a, p in long.items()
        for b, q in short.items()
    }
    assert distance(emitted, wanted) < 1e-12


def test_the_choices_above_differ() -> None:
    lengths: set[tuple[int, int]] = set()

    class Noting(SharedLength):
        def start(self, behind: Sequence[int]) -> None:
            super().start(behind)
            lengths.add((len(behind), self.length))

    def make(budget: Budget) -> LengthPolicy:
        return Noting(budget, CostTable({1: [1], 2: [1.5]}), 0.5, limit=2)

    enumerate_runs(lambda oracle: emit(oracle, Table(2, seed=8), verify_block, make))
    assert len({length for n, length in lengths if n == 2}) > 1
