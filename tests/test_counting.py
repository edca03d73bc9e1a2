"""Verification with real random numbers: the ends of the unit interval, and counted sequences.

Enumeration sees smaller biases; counting sees what enumeration cannot, the random streams.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from chance import chi_square, frequency_error
from rounds import (
    BOTH,
    EACH_PAIR,
    JUST_BELOW_ONE,
    Model,
    at_each,
    at_uniform,
    law,
    probs,
    table,
)

from specllama.acceptance import (
    Draft,
    Round,
    TargetLaws,
    Verifier,
    acceptance_probability,
    excess,
    overlap,
    residual,
)
from specllama.sampling import Law, NumpyRng, Streams


@BOTH
@EACH_PAIR
@pytest.mark.parametrize("uniform", [0.0, 0.5, JUST_BELOW_ONE])
def test_extreme_uniforms_give_only_possible_tokens(
    verify: Verifier, p: Law, q: Law, uniform: float
) -> None:
    for token in np.flatnonzero(probs(q)).tolist():
        played = verify(Draft((token,), (q,)), at_each(p), at_uniform(uniform))
        assert all(p.prob(t) > 0 for t in played.tokens)
        if p.prob(token) >= q.prob(token):
            assert played.accepted == 1


@BOTH
def test_a_rejection_by_rounding_alone_is_corrected_from_the_target(verify: Verifier) -> None:
    # q is p with one entry a float32 step higher: nothing of max(0, p - q) is left.
    p = law(0.2, 0.3, 0.1, 0.4)
    q = law(0.2, float(np.nextafter(np.float32(0.3), np.float32(1))), 0.1, 0.4)
    assert excess(p, q).sum() == 0
    assert acceptance_probability(p, q, 1) < 1
    assert probs(residual(p, q)) == probs(p)
    first = law(0.5, 0.5)
    draft = Draft((0, 1), (first, q))
    played = verify(draft, lambda i: [first, p][i], at_uniform(JUST_BELOW_ONE))
    assert played.provenance == ("accepted", "corrected")
    assert played.tokens == (0, 3)  # the last of p; an argmax of zeros would be token 0


def test_impossible_tokens_stay_impossible_in_a_million_draws() -> None:
    p = law(0, 0.4, 0, 1e-9, 0.6 - 1e-9, 0)
    rng = NumpyRng(np.random.default_rng(8))
    assert {rng.categorical(p) for _ in range(500_000)} <= {1, 3, 4}
    assert not any(rng.bernoulli(0.0) for _ in range(500_000))
    assert all(rng.bernoulli(1.0) for _ in range(100_000))


def steady(seed: int) -> Model:
    """A model whose rows depend on the history and have no rare tokens, for counting."""
    rows = table(seed)
    return lambda tokens: Law(0.45 * rows(tokens).probs + 0.55 / 3)


TARGET, DRAFT = steady(1), steady(2)
# A law of three tokens that is off by 0.1 in total variation passes with a chance below 1e-4.
N_SEQUENCES = 5_000


def one_round(streams: Streams, verify: Verifier, history: tuple[int, ...], n_draft: int) -> Round:
    drafted: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()
    for _ in range(n_draft):
        laws += (DRAFT(history + drafted),)
        drafted += (streams.draft.categorical(laws[-1]),)
    return verify(Draft(drafted, laws), lambda i: TARGET(history + drafted[:i]), streams)


def counted(
    streams: Streams, verify: Verifier, n_draft: int
) -> tuple[Counter[tuple[int, ...]], int]:
    """Sequences of three tokens, and how often the very first draft token was kept."""
    sequences: Counter[tuple[int, ...]] = Counter()
    n_kept = 0
    for _ in range(N_SEQUENCES):
        played = one_round(streams, verify, (), n_draft)
        n_kept += played.accepted > 0
        tokens = played.tokens
        while len(tokens) < 3:
            tokens += one_round(streams, verify, tokens, n_draft).tokens
        sequences[tokens[:3]] += 1
    return sequences, n_kept


def joint_law(n: int) -> dict[tuple[int, ...], float]:
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        exact = {
            (*tokens, t): weight * TARGET(tokens).prob(t)
            for tokens, weight in exact.items()
            for t in range(3)
        }
    return exact


def beyond_limit(sequences: Counter[tuple[int, ...]]) -> float:
    """By how much chi-square passes its limit, over first tokens, pairs and triples together."""
    worst = -math.inf
    for n in (1, 2, 3):
        counts: Counter[tuple[int, ...]] = Counter()
        for tokens, count in sequences.items():
            counts[tokens[:n]] += count
        statistic, limit = chi_square(counts, joint_law(n))
        worst = max(worst, statistic - limit)
    return worst


@BOTH
@pytest.mark.parametrize("n_draft", [1, 2, 3, 4])
def test_counted_sequences_follow_the_target(verify: Verifier, n_draft: int) -> None:
    sequences, _ = counted(Streams.seeded(20, n_draft), verify, n_draft)
    assert beyond_limit(sequences) < 0


@BOTH
def test_the_first_token_is_kept_as_often_as_the_laws_overlap(verify: Verifier) -> None:
    _, n_kept = counted(Streams.seeded(23), verify, 1)
    expected = overlap(TARGET(()), DRAFT(()))
    assert n_kept / N_SEQUENCES == pytest.approx(expected, abs=frequency_error(N_SEQUENCES))
    # Matching would keep less than that by more than the error.
    match = sum(TARGET(()).prob(t) * DRAFT(()).prob(t) for t in range(3))
    assert expected - match > 2 * frequency_error(N_SEQUENCES)


def correct_from_the_target(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    token, q, p = draft.tokens[0], draft.laws[0], target(0)
    if streams.acceptance.bernoulli(acceptance_probability(p, q, token)):
        return Round((token, streams.correction.categorical(target(1))), draft, ())
    return Round((streams.correction.categorical(p),), draft, ())


def test_counting_catches_a_wrong_correction() -> None:
    sequences, _ = counted(Streams.seeded(21), correct_from_the_target, 1)
    assert beyond_limit(sequences) > 0


@BOTH
def test_counting_catches_numbers_shared_by_draft_and_acceptance(verify: Verifier) -> None:
    streams, twin = Streams.seeded(22), Streams.seeded(22)
    shared = Streams(streams.draft, twin.draft, streams.correction)
    sequences, _ = counted(shared, verify, 1)
    assert beyond_limit(sequences) > 0
