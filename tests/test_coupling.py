"""Coupled verification: one text for a seed, whoever drafts, and the target's law over seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from chance import chi_square, frequency_error
from toys import PLAIN, Iid, Noisy, Oracle, Table, ToyContext, enumerate_runs, toy_lm

from specllama.acceptance import Draft, Round, verify_coupled, verify_tokens
from specllama.coupling import KeyedRng, KeyedStreams
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.lm import CachedLM
from specllama.lookahead import FixedLength
from specllama.sampling import Law, SamplingParams, Streams
from specllama.speculation import Speculator

TARGET = Table(5, seed=21, concentration=2)
PARAMS = [PLAIN, SamplingParams(), SamplingParams(temperature=0)]


class Guessing:
    """Proposes tokens by a rule of its own, with laws to match."""

    def prepare(self, state: SequenceState) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for state, limit in zip(sequences, limits, strict=True):
            tokens = tuple((sum(state.tokens) + i) % 5 for i in range(min(limit, 3)))
            drafts.append(Draft(tokens, tuple(map(Law.one_hot, tokens))))
        return drafts

    def observe(self, rounds: Sequence[Round]) -> None:
        pass


def drafters() -> list[Drafter]:
    """None, useless, middling, perfect, a guesser, and one with a temperature of its own."""
    models: list[Table | Noisy] = [Table(5, seed=99), Noisy(TARGET, 22), TARGET]
    made: list[Drafter] = [NullDrafter(), Guessing()]
    made += [ModelDrafter(toy_lm(m), FixedLength(n), 5) for m in models for n in (1, 2, 5, 8)]
    return [*made, ModelDrafter(toy_lm(TARGET), FixedLength(3), 5, temperature=0.5)]


def text(drafter: Drafter, seed: int, params: SamplingParams, row: int = 0) -> list[int]:
    speculator = Speculator(toy_lm(TARGET), drafter, verify_coupled, 5)
    state = SequenceState(0, [0, 1], params, KeyedStreams.keyed(seed, row), 20)
    while state.n_left > 0:
        speculator.round([state])
    return state.tokens[2:]


@pytest.mark.parametrize("params", PARAMS, ids=["plain", "defaults", "greedy"])
@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_one_text_under_every_drafter_and_length(
    seed: int, params: SamplingParams
) -> None:
    texts = [text(drafter, seed, params) for drafter in drafters()]
    assert all(t == texts[0] for t in texts)


def test_other_seeds_and_other_rows_give_other_texts() -> None:
    texts = {tuple(text(NullDrafter(), seed, PLAIN, row)) for seed in range(5) for row in range(5)}
    assert len(texts) == 25


def test_rows_of_a_batch_have_the_texts_that_each_has_alone() -> None:
    lm = CachedLM(ToyContext(TARGET, 5, n_outputs=12))
    drafter = ModelDrafter(toy_lm(Noisy(TARGET, 22)), FixedLength(4), 5)
    speculator = Speculator(lm, drafter, verify_coupled, 5)
    states = [
        SequenceState(row, [0, 1], PLAIN, KeyedStreams.keyed(7, row), 20) for row in range(4)
    ]
    while active := [s for s in states if s.n_left > 0]:
        speculator.round(active)
    assert [s.tokens[2:] for s in states] == [
        text(NullDrafter(), 7, PLAIN, row) for row in range(4)
    ]


@pytest.mark.parametrize("n_draft", [0, 2])
def test_over_the_seeds_the_text_has_the_targets_law(n_draft: int) -> None:
    """Three tokens of a two-token model with full history: chi-square over 8 cells."""
    target = Table(2, seed=31, concentration=4)
    law: dict[tuple[int, ...], float] = {}
    for a in range(2):
        for b in range(2):
            for c in range(2):
                p, q, r = target((0,)), target((0, a)), target((0, a, b))
                law[a, b, c] = float(p[a] * q[b] * r[c])
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(3000):
        drafter = ModelDrafter(toy_lm(Noisy(target, 32)), FixedLength(n_draft), 2)
        speculator = Speculator(toy_lm(target), drafter, verify_coupled, 2)
        state = SequenceState(0, [0], PLAIN, KeyedStreams.keyed(seed), 3)
        while state.n_left > 0:
            speculator.round([state])
        counts[tuple(state.tokens[1:])] += 1
    statistic, limit = chi_square(counts, law)
    assert statistic < limit


@pytest.mark.parametrize(
    ("p", "q"),
    [
        pytest.param([0.2, 0.5, 0.3], [0.6, 0.3, 0.1], id="the seed's example, 26/45"),
        pytest.param([0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], id="against uniform"),
        pytest.param([0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], id="half disjoint"),
        pytest.param([0.7, 0.3], [0.7, 0.3], id="equal"),
    ],
)
def test_acceptance_is_the_formula_of_the_coupling(p: list[float], q: list[float]) -> None:
    """sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x))."""
    both = [x for x in range(len(p)) if p[x] > 0 and q[x] > 0]
    formula = sum(
        1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both
    )
    target, draft = Law(np.array(p)), Law(np.array(q))
    streams, n = KeyedStreams.keyed(3), 20_000
    equal = sum(
        streams.at(i).draft.categorical(draft) == streams.at(i).correction.categorical(target)
        for i in range(n)
    )
    assert abs(equal / n - formula) < frequency_error(n)


def test_what_is_learnt_of_a_round_is_the_couplings_own_acceptance() -> None:
    """Less than the overlap of the laws, which is what the other rules accept."""
    p, q = Law(np.array([0.2, 0.5, 0.3])), Law(np.array([0.6, 0.3, 0.1]))
    learnt = []
    for seed in range(4000):
        streams = KeyedStreams.keyed(seed)
        draft = Draft(
            tuple(streams.at(i).draft.categorical(q) for i in range(3)), (q,) * 3
        )
        coupled = verify_coupled(draft, lambda _: p, streams)
        assert coupled.acceptances == [1.0] * coupled.accepted + [0.0] * (coupled.accepted < 3)
        learnt += coupled.acceptances
    assert abs(np.mean(learnt) - 26 / 45) < frequency_error(len(learnt))
    tokens = verify_tokens(draft, lambda _: p, Streams.seeded(1))
    assert tokens.acceptances[0] == pytest.approx(0.6)


def slow_draw(law: Law, rng: KeyedRng) -> int:
    """The definition: the largest log p + Gumbel noise."""
    ids = np.arange(law.probs.size) if law.ids is None else law.ids
    with np.errstate(divide="ignore"):
        scores = np.log(law.probs) - np.log(-np.log1p(-rng.uniforms(ids)))
    return int(ids[scores.argmax()])


def laws() -> list[Law]:
    rng = np.random.default_rng(5)
    dense = [Law(rng.dirichlet(np.full(n, c))) for n in (2, 40, 5000) for c in (0.01, 1, 50)]
    ids = np.sort(rng.choice(100_000, 40, replace=False))
    return [*dense, Law(rng.dirichlet(np.ones(40)), ids), Law.one_hot(7), Law(np.array([0, 1.0]))]


@pytest.mark.parametrize("law", laws())
def test_the_fast_draw_is_the_definition(law: Law) -> None:
    for position in range(200):
        rng = KeyedRng(12345, position)
        assert rng.categorical(law) == slow_draw(law, rng)
        assert law.prob(rng.categorical(law)) > 0


def test_a_tokens_noise_does_not_depend_on_the_support() -> None:
    rng = KeyedRng(9, 4)
    everything = rng.uniforms(np.arange(1000))
    assert np.array_equal(rng.uniforms(np.array([3, 500, 999])), everything[[3, 500, 999]])


def test_the_noise_is_uniform_and_uncorrelated_between_neighbours() -> None:
    grid = np.array([KeyedRng(77, t).uniforms(np.arange(2000)) for t in range(50)])
    assert 0 < grid.min() < 1e-4
    assert 1 - 1e-4 < grid.max() < 1
    assert abs(grid.mean() - 0.5) < frequency_error(grid.size)
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    cells = np.histogram(grid, 64, (0, 1))[0]
    statistic, limit = chi_square(
        {i: int(n) for i, n in enumerate(cells)}, dict.fromkeys(range(64), 1 / 64)
    )
    assert statistic < limit


def test_coupled_verification_with_independent_streams_is_exact_too() -> None:
    target, draft = Table(3, seed=1), Noisy(Table(3, seed=1), seed=2)

    def run(make: Callable[[Oracle], Drafter]) -> Callable[[Oracle], tuple[int, ...]]:
        def once(oracle: Oracle) -> tuple[int, ...]:
            streams = Streams(oracle, oracle, oracle)
            state = SequenceState(0, [0], PLAIN, streams, 3)
            speculator = Speculator(toy_lm(target), make(oracle), verify_coupled, 3)
            while state.n_left > 0:
                speculator.round([state])
            return tuple(state.tokens[1:])

        return once

    emitted = enumerate_runs(run(lambda _: ModelDrafter(toy_lm(draft), FixedLength(2), 3)))
    plain = enumerate_runs(run(lambda _: NullDrafter()))
    assert sum(abs(emitted[k] - plain[k]) for k in plain) < 1e-12


def test_a_token_rule_on_keyed_noise_fails_loudly() -> None:
    with pytest.raises(AssertionError, match="coupled verification only"):
        KeyedStreams.keyed(1).acceptance.bernoulli(0.5)


def test_a_model_that_ignores_its_history_draws_anew_at_every_position() -> None:
    target = Iid(0.25, 0.25, 0.25, 0.25)
    speculator = Speculator(toy_lm(target), NullDrafter(), verify_coupled, 4)
    state = SequenceState(0, [0], PLAIN, KeyedStreams.keyed(1), 40)
    while state.n_left > 0:
        speculator.round([state])
    assert set(state.tokens[1:]) == {0, 1, 2, 3}
