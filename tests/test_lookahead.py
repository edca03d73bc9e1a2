"""Draft lengths: costs are looked up, acceptance is learnt, and drafting stands aside."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specllama.acceptance import Draft, Round
from specllama.costs import Budget, CostTable
from specllama.errors import UsageError
from specllama.lookahead import AcceptancePredictor, FixedLength, MeasuredLength
from specllama.sampling import Law
from specllama.tuning import verdict

# Two rows cost as much as four: the measured steps of a CPU's kernels.
STAIRS = {1: [49.0], 2: [66.0], 4: [66.0], 8: [102.0], 16: [144.0]}
CHEAP = {1: [5.5], 2: [6.0], 8: [9.0]}
# Measured on two cores: a deep target, and a draft that takes a twelfth of its time.
DEAR_DRAFT = {1: [10.0], 2: [14.0], 4: [18.0], 8: [31.0], 16: [45.0], 64: [120.0]}
BUMPY = {1: [120.0], 2: [180.0], 3: [230.0], 4: [190.0], 5: [260.0], 8: [320.0], 16: [570.0]}


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_costs_are_a_staircase_and_not_a_line() -> None:
    costs = CostTable({1: [49], 4: [66], 8: [102]})
    assert [costs.ms(n) for n in range(10)] == pytest.approx(
        [0, 49, 66, 66, 66, 102, 102, 102, 102, 102 * 9 / 8]
    )


def test_costs_are_quartiles_since_other_work_only_adds_to_a_time() -> None:
    assert CostTable({1: [10, 900, 11]}).ms(1) == 10
    assert CostTable({1: [9, 900, 12, 10, 11, 700, 800, 600]}).ms(1) == 11


def test_three_rows_may_cost_more_than_four() -> None:
    """Kernels that take four rows at a time are slower with three."""
    costs = CostTable({1: [120], 2: [180], 3: [230], 4: [190]})
    assert [costs.ms(n) for n in (1, 2, 3, 4)] == [120, 180, 230, 190]


def test_new_times_replace_old_ones() -> None:
    costs = CostTable({1: [10.0] * 15, 2: [30.0]})
    for _ in range(40):
        costs.record(1, 20.0)
    assert costs.ms(1) == 20


def test_costs_survive_storing() -> None:
    costs = CostTable(STAIRS)
    assert CostTable(costs.timings()).timings() == costs.timings()
    assert costs.is_measured
    assert not CostTable({1: [3.0]}).is_measured
    assert not CostTable().is_measured


def test_what_is_stored_are_the_shortest_times_of_both_runs() -> None:
    """A long text, or a busy machine, is not what the next run is like."""
    before = {1: [11.0, 12.0, 45.0], 2: [20.0]}
    after = CostTable({1: [51.0, 52.0, 10.0], 4: [9.0] * 9})
    least = after.least(before)
    assert least == {1: [10.0, 11.0, 12.0, 45.0], 2: [20.0], 4: [9.0] * 4}
    # Storing again what was recalled makes no time weigh more.
    assert CostTable(least).least(least) == least


@pytest.mark.parametrize("n", [-1, 17])
def test_a_fixed_length_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match="between 0 and 16"):
        FixedLength(n)


def test_the_budget_looks_over_a_step() -> None:
    """One more row costs 17 ms and so do three: worth it only for the three."""
    budget = Budget(CostTable(STAIRS))
    budget.start(1)
    chances = [0.7**m for m in range(1, 9)]
    assert budget.best(chances[:1], lambda m: 5.5 * m + 15)[0] < 0
    gain, count = budget.best(chances, lambda m: 5.5 * m)
    assert gain > 0
    assert count == 3


def test_the_budget_prices_time_at_the_pace_of_recent_rounds() -> None:
    clock = Clock()
    budget = Budget(CostTable(STAIRS), clock)
    assert budget.rate == pytest.approx(1 / 49)
    for _ in range(200):
        budget.start(1)
        clock.now += 0.070
        budget.finish(3)
    assert budget.last_ms == pytest.approx(70)
    assert 0.9 * 3 / 70 < budget.rate < 3 / 70
    for _ in range(600):  # slower than plain decoding could be: that is the rate to beat
        budget.start(1)
        clock.now += 0.2
        budget.finish(1)
    assert budget.rate == pytest.approx(1 / 49)


def test_rows_of_other_sequences_use_up_the_flat_part_of_a_step() -> None:
    budget = Budget(CostTable(STAIRS))
    budget.start(2)
    assert budget.extra_ms(2) == 0
    budget.take(2)
    assert budget.extra_ms(1) == 36


def test_between_rounds_a_row_costs_what_it_will_in_a_new_one() -> None:
    budget = Budget(CostTable(STAIRS), Clock())
    budget.start(2)
    assert budget.extra_ms(1) == 0
    budget.take(2)
    assert budget.extra_ms(1) == 36
    budget.finish(4)
    assert budget.extra_ms(1) == 0


def test_where_a_rejection_redoes_rows_a_draft_must_earn_them() -> None:
    """By enumeration: every outcome's rows, the last token's and those of the accepted ones."""
    chances = [0.9, 0.6, 0.5]
    line = CostTable({n: [10.0 * n] for n in range(1, 40)})
    plain, redoing = (Budget(line, redoes=redoes) for redoes in (False, True))
    for budget in (plain, redoing):
        budget.start(1)
    outcomes = [(1 - 0.9, 1), (0.9 - 0.6, 2), (0.6 - 0.5, 3), (0.5, 0)]
    rows = sum(prob * n for prob, n in outcomes)
    all_three = lambda m: 0.0 if m == 3 else 1e9  # noqa: E731
    lost = plain.best(chances, all_three)[0] - redoing.best(chances, all_three)[0]
    assert lost == pytest.approx(rows)  # tokens, which take 10 ms as a row does
    free = lambda m: 0.0  # noqa: E731
    assert redoing.best([1.0], free)[0] == plain.best([1.0], free)[0]


def test_rows_that_are_decoded_anyway_use_up_the_flat_part_of_a_step() -> None:
    budget = Budget(CostTable(STAIRS))
    budget.start(1, 3)
    assert (budget.extra_ms(1), budget.extra_ms(2)) == (0, 102 - 66)


def test_the_predictor_learns_which_laws_are_accepted() -> None:
    rng = random.Random(1)
    predictor = AcceptancePredictor()

    def law(sure: float) -> Law:
        return Law(np.array([sure, (1 - sure) / 2, (1 - sure) / 2]))

    def truth(sure: float) -> float:
        return 1 / (1 + math.exp(-(8 * sure - 5)))

    for _ in range(400):
        sure = rng.uniform(0.34, 0.999)
        predictor.learn(predictor.features(law(sure), 0), truth(sure))
    for sure in (0.4, 0.6, 0.8, 0.95):
        assert predictor.predict(predictor.features(law(sure), 0)) == pytest.approx(
            truth(sure), abs=0.06
        )
    restored = AcceptancePredictor(predictor.state())
    x = predictor.features(law(0.7), 2)
    assert restored.predict(x) == predictor.predict(x)


def test_the_predictor_stays_finite_whatever_it_is_told() -> None:
    rng = random.Random(2)
    predictor = AcceptancePredictor()
    one_hot, flat = Law.one_hot(3), Law(np.full(1000, 1e-3))
    for _ in range(5000):
        law = rng.choice((one_hot, flat))
        x = predictor.features(law, rng.randrange(16))
        predictor.learn(x, float(rng.random() < 0.5))
        assert 0 < predictor.predict(x) < 1


def simulate(
    accept: Callable[[random.Random], float],
    target: dict[int, list[float]],
    draft: dict[int, list[float]],
    n_tokens: int,
    length: int | None = None,
    blur: float = 0.0,
) -> tuple[float, list[int]]:
    """Run rounds of a made-up pair: (tokens per ms, lengths). length: fixed, or measured if None.

    Each position has an acceptance of its own, which the draft's law shows; with a blur only about,
    and what is learnt then is that a token was kept or not, as at temperature 0.
    """
    rng, clock = random.Random(3), Clock()
    costs, steps = CostTable(target), CostTable(draft)
    budget = Budget(costs, clock)
    policy = MeasuredLength(budget, steps)
    emitted, lengths, behind = 0, [], 1
    while emitted < n_tokens:
        budget.start(1)
        policy.start([min(behind, 64)])
        chances: list[float] = []
        while len(chances) < 16 and (policy.go(0) if length is None else len(chances) < length):
            chance = accept(rng)
            clock.now += steps.ms(min(behind, 64) if not chances else 1) / 1000
            behind = 0
            sure = min(0.999, max(0.2, chance + rng.gauss(0, blur)))
            shape = Law(np.array([sure, 1 - sure]))
            if length is None and not policy.submit(0, lambda: shape):  # noqa: B023
                break
            chances.append(float(rng.random() < chance) if blur else chance)
        clock.now += costs.ms(1 + len(chances)) / 1000
        kept = 0
        while kept < len(chances) and rng.random() < chances[kept]:
            kept += 1
        behind = behind + kept + 1 if not chances else 1 + (kept == len(chances))
        budget.finish(kept + 1)
        policy.observe([_round(chances, kept)])
        emitted += kept + 1
        lengths.append(len(chances))
    return emitted / (1000 * clock.now), lengths


def _round(chances: Sequence[float], kept: int) -> Round:
    """A round whose laws overlap by the given chances."""
    laws = tuple(Law(np.array([1.0, 0.0])) for _ in chances)
    targets = tuple(Law(np.array([c, 1 - c])) for c in chances)
    return Round((0,) * (kept + 1), Draft((0,) * len(chances), laws), targets)


def test_a_perfect_draft_is_used_to_the_limit() -> None:
    _, lengths = simulate(lambda _: 1.0, STAIRS, CHEAP, 800)
    assert np.mean(lengths[10:]) > 14


def test_a_useless_draft_is_off_within_twenty_rounds_and_costs_less_than_two_percent() -> None:
    rate, lengths = simulate(lambda _: 0.02, STAIRS, CHEAP, 3000)
    assert max(lengths[20:]) <= 1
    assert rate > 0.98 / 49


def test_a_draft_as_dear_as_the_target_is_never_run() -> None:
    _, lengths = simulate(lambda _: 1.0, STAIRS, {1: [49.0], 2: [66.0]}, 300)
    assert set(lengths) == {0}


def test_a_draft_that_turns_good_is_found_by_probing() -> None:
    """Useless at first, and good from token 2,000 on."""
    seen = [0]

    def accept(_: random.Random) -> float:
        seen[0] += 1
        return 0.02 if seen[0] < 40 else 0.95

    # Reading what it missed costs this draft 0.3 ms a token; dearer ones are asked more seldom.
    _, lengths = simulate(accept, STAIRS, {1: [5.5], 2: [5.6], 64: [19.0]}, 20_000)
    assert np.mean(lengths[-200:]) > 3
    assert 0 in lengths


def easy_and_hard(mean: float) -> Callable[[random.Random], float]:
    """Easy and hard positions in turn, as in text."""
    return lambda rng: min(0.99, mean * 1.3) if rng.random() < 0.6 else mean * 0.5


@pytest.mark.parametrize("mean", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(STAIRS, id="stairs"),
        pytest.param({n: [49 * (1 + 0.12 * (n - 1))] for n in range(1, 18)}, id="CPU slope"),
        pytest.param({n: [49 * (1 + 0.02 * (n - 1))] for n in range(1, 18)}, id="GPU"),
        pytest.param({n: [49.0 * n] for n in range(1, 18)}, id="no gain from batching"),
    ],
)
def test_the_rule_is_near_the_best_fixed_length_and_never_below_plain(
    mean: float, target: dict[int, list[float]]
) -> None:
    accept = easy_and_hard(mean)
    measured, _ = simulate(accept, target, CHEAP, 4000)
    fixed = [simulate(accept, target, CHEAP, 3000, n)[0] for n in (0, 1, 2, 3, 4, 5, 7, 9, 12)]
    assert measured > 0.95 * max(fixed)
    assert measured > 0.98 * fixed[0]


@pytest.mark.parametrize("mean", [0.02, 0.45, 0.6, 0.85])
def test_the_rule_on_a_bumpy_staircase_with_a_dear_draft_and_coins_to_learn_from(
    mean: float,
) -> None:
    accept = easy_and_hard(mean)
    measured, _ = simulate(accept, BUMPY, DEAR_DRAFT, 4000, blur=0.15)
    fixed = [simulate(accept, BUMPY, DEAR_DRAFT, 3000, n)[0] for n in (0, 1, 2, 3, 4, 5, 7)]
    assert measured > 0.95 * max(fixed)
    assert measured > 0.98 * fixed[0]


def test_now_and_then_a_round_rests_so_that_plain_decoding_stays_measured() -> None:
    _, lengths = simulate(lambda _: 0.9, STAIRS, CHEAP, 2000)
    resting = [i for i, length in enumerate(lengths) if length == 0]
    assert len(resting) >= 2
    assert max(b - a for a, b in itertools.pairwise(resting)) == 65


def test_the_break_even_acceptance() -> None:
    def policy(target: dict[int, list[float]], draft: dict[int, list[float]]) -> MeasuredLength:
        return MeasuredLength(Budget(CostTable(target)), CostTable(draft))

    # With one draft token at most: it pays from (draft + second row - first) / first on.
    one = MeasuredLength(Budget(CostTable(STAIRS)), CostTable(CHEAP), limit=1)
    assert one.break_even() == pytest.approx((5.5 + 66 - 49) / 49)
    assert policy(STAIRS, CHEAP).break_even() < one.break_even()
    assert policy(STAIRS, {1: [49.0], 2: [66.0]}).break_even() == math.inf


def test_a_draft_as_dear_as_the_target_is_said_to_be_off_and_why() -> None:
    policy = MeasuredLength(Budget(CostTable(STAIRS)), CostTable({1: [49.0], 2: [66.0]}))
    told = verdict(policy)
    assert told is not None and told.startswith("the draft model is off: a draft token takes 49.0")
    assert told.endswith("even perfect drafts would not pay")


def test_without_measured_times_a_few_tokens_are_drafted() -> None:
    policy = MeasuredLength(Budget(CostTable()), CostTable())
    policy.start([1])
    drafted = 0
    while policy.go(0):
        assert policy.submit(0, lambda: Law.one_hot(1))
        drafted += 1
    assert drafted == 3
