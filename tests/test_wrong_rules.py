"""The rules that other projects got wrong, each with the law it has instead of the right one.

A check that could not tell these from the shipped rules would prove nothing. (test_law.py does the
same with the whole loop.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from rounds import (
    BOTH,
    EXACT,
    SIZE,
    Proposer,
    accepted,
    always,
    error,
    first_token,
    law,
    noisy,
    normalised,
    sampled,
    table,
)
from toys import Oracle

from specllama.acceptance import Draft, Round, TargetLaws, Verifier, residual
from specllama.sampling import Law, Streams

EXAMPLE = law(0.2, 0.5, 0.3), law(0.6, 0.3, 0.1)
THIRDS = always(law(1 / 3, 2 / 3)), always(law(2 / 3, 1 / 3))
THREE = always(law(0.4, 0.2, 0.4)), always(law(0.1, 0.1, 0.8))
HALVES, BIASED = law(0.5, 0.5), law(0.8, 0.2)


def tokens_rule(correct: Callable[[Law, Law, int], Law]) -> Verifier:
    """Token verification with another correction than the residual."""

    def verify(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
        for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            p = target(i)
            if not streams.acceptance.bernoulli(min(1.0, p.prob(token) / q.prob(token))):
                corrected = streams.correction.categorical(correct(p, q, token))
                return Round((*draft.tokens[:i], corrected), draft, ())
        bonus = streams.correction.categorical(target(len(draft.tokens)))
        return Round((*draft.tokens, bonus), draft, ())

    return verify


def without(p: Law, token: int) -> Law:
    return normalised([0.0 if t == token else p.prob(t) for t in range(SIZE)])


def clamped(p: Law, q: Law) -> Law:
    return normalised([max(p.prob(t) - q.prob(t), 1e-3) for t in range(SIZE)])


right_tokens = tokens_rule(lambda p, q, _: residual(p, q))
plain_correction = tokens_rule(lambda p, q, _: p)
only_the_rejected_zeroed = tokens_rule(lambda p, q, token: without(p, token))
clamped_correction = tokens_rule(lambda p, q, _: clamped(p, q))


def block_rule(
    cap: bool = True, cap_last: bool = True, token_residual: bool = False, first_no: bool = False
) -> Verifier:
    """Block verification, written anew, with its published mistakes to choose from."""

    def verify(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
        b = product = 1.0
        kept, row = 0, target(0)
        for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            p = target(i)
            gain = [max(0.0, b * p.prob(t) - q.prob(t)) for t in range(SIZE)]
            whole = math.fsum(gain) + 1 - b
            passes = min(1.0, math.fsum(gain) / whole) if whole > 0 else 1.0
            if i == 0 or streams.acceptance.bernoulli(passes):
                if token_residual:
                    gain = [max(0.0, p.prob(t) - q.prob(t)) for t in range(SIZE)]
                kept, row = i, normalised(gain) if math.fsum(gain) > 0 else p
            elif first_no:
                break
            ratio = p.prob(token) / q.prob(token)
            product *= ratio
            b = min(1.0, b * ratio) if cap else b * ratio
        else:
            if streams.acceptance.bernoulli(min(1.0, b if cap_last else product)):
                kept, row = len(draft.tokens), target(len(draft.tokens))
        return Round((*draft.tokens[:kept], streams.correction.categorical(row)), draft, ())

    return verify


def match_rule(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """Keep a token only if the target's own sample equals it: exact, but keeps sum p * q."""
    for i, token in enumerate(draft.tokens):
        own = streams.correction.categorical(target(i))
        if own != token:
            return Round((*draft.tokens[:i], own), draft, ())
    bonus = streams.correction.categorical(target(len(draft.tokens)))
    return Round((*draft.tokens, bonus), draft, ())


@pytest.mark.parametrize("rule", [right_tokens, block_rule()])
def test_the_copies_without_a_mistake_are_exact(rule: Verifier) -> None:
    # So that a mistake below is caught for what it is, not for a slip in the copy.
    target = table(3)
    assert error(rule, target, sampled(noisy(target, 4), 3), 4) < EXACT
    for p, q in (THIRDS, THREE):
        assert error(rule, p, sampled(q, 2), 3) < EXACT


def test_correcting_from_the_target_is_caught() -> None:
    p, q = EXAMPLE
    got = first_token(plain_correction, p, sampled(always(q), 1))
    assert got[:3] == pytest.approx([0.28, 0.5, 0.22])
    got = first_token(plain_correction, HALVES, sampled(always(BIASED), 1))
    assert got[:2] == pytest.approx([0.65, 0.35])


def test_zeroing_only_the_rejected_token_is_caught() -> None:
    p, q = EXAMPLE
    got = first_token(only_the_rejected_zeroed, p, sampled(always(q), 1))
    assert got[:3] == pytest.approx([0.2, 0.55, 0.25])


def test_a_clamp_that_revives_impossible_tokens_is_caught() -> None:
    p, q = law(0, 0.5, 0, 0.5, 0), law(0.25, 0.25, 0.25, 0.25, 0)
    got = first_token(clamped_correction, p, sampled(always(q), 1))
    assert got[4] > 1e-4


def test_a_block_product_without_its_cap_is_caught() -> None:
    p, q = THIRDS
    for rule in (block_rule(cap=False), block_rule(cap_last=False)):
        assert accepted(rule, p, sampled(q, 2)) == pytest.approx(12 / 9)
        assert error(rule, p, sampled(q, 2), 3) == pytest.approx(1 / 9)
        # The first token alone does not show it.
        assert error(rule, p, sampled(q, 2), 1) < EXACT


def test_the_token_residual_after_block_acceptance_is_caught_with_three_tokens() -> None:
    rule = block_rule(token_residual=True)
    assert error(rule, THREE[0], sampled(THREE[1], 2), 3) == pytest.approx(0.02)
    assert error(rule, THIRDS[0], sampled(THIRDS[1], 2), 3) < EXACT


def test_a_block_that_ends_at_its_first_no_is_caught() -> None:
    target = table(3)
    assert error(block_rule(first_no=True), target, sampled(noisy(target, 4), 3), 4) > 1e-3


def test_matching_keeps_fewer_tokens() -> None:
    p, q = EXAMPLE
    assert accepted(match_rule, always(p), sampled(always(q), 1)) == pytest.approx(0.3)
    ten = always(law(*[0.1] * 10))
    assert accepted(match_rule, ten, sampled(ten, 1)) == pytest.approx(0.1)


@BOTH
def test_a_ratio_of_a_law_that_was_not_drawn_from_is_caught(verify: Verifier) -> None:
    squared = normalised([0.64, 0.04])
    claims = [
        (Law.one_hot(0), BIASED, 0.625),
        (Law.one_hot(0), law(0.6, 0.4), 5 / 6),
        (squared, BIASED, 10 / 17),
    ]
    for drawn_from, claimed, wrong in claims:
        assert first_token(verify, HALVES, lying(drawn_from, claimed))[0] == pytest.approx(wrong)


def lying(drawn_from: Law, claimed: Law) -> Proposer:
    return lambda oracle: Draft((oracle.categorical(drawn_from),), (claimed,))


@BOTH
def test_a_draft_length_that_depends_on_the_drafted_token_is_caught(verify: Verifier) -> None:
    def drop_the_unlikely(oracle: Oracle) -> Draft:
        token = oracle.categorical(BIASED)
        return Draft((token,), (BIASED,)) if BIASED.prob(token) >= 0.3 else Draft()

    def two_after_the_first(oracle: Oracle) -> Draft:
        tokens = oracle.categorical(BIASED), oracle.categorical(BIASED)
        return Draft(tokens, (BIASED, BIASED)) if tokens[0] == 0 else Draft()

    assert first_token(verify, HALVES, drop_the_unlikely)[0] == pytest.approx(0.6)
    assert first_token(verify, HALVES, two_after_the_first)[0] == pytest.approx(0.6)


@BOTH
def test_a_source_chosen_by_the_drafted_token_is_caught(verify: Verifier) -> None:
    p, q, guess = law(0.5, 0.3, 0.2), law(0.6, 0.3, 0.1), Law.one_hot(0)

    def choose(oracle: Oracle) -> Draft:
        token = oracle.categorical(q)
        return Draft((token,), (q,)) if q.prob(token) >= 0.5 else Draft((0,), (guess,))

    assert first_token(verify, p, choose)[:3] == pytest.approx([0.7, 0.12, 0.18])
    assert first_token(verify, p, sampled(always(guess), 1))[:3] == pytest.approx([0.5, 0.3, 0.2])
