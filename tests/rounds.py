"""Single rounds of verification on given laws, enumerated. (toys.py has the whole loop.)"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import numpy as np
import pytest
from toys import Oracle, distance, enumerate_runs, one_stream

from specllama.acceptance import (
    Draft,
    Round,
    TargetLaws,
    Verifier,
    verify_block,
    verify_tokens,
)
from specllama.sampling import Law, NumpyRng, SamplingParams, Streams, next_law

# What enumeration may be off by: rounding, nothing else.
EXACT = 1e-12
# Every token of the laws given here is below.
SIZE = 12

# A model: the tokens so far -> the law of the next.
Model = Callable[[tuple[int, ...]], Law]
# All that happens before verification: what is proposed, and the laws it is said to come from.
Proposer = Callable[[Oracle], Draft]


def law(*probs: float) -> Law:
    return Law(np.array(probs))


def sparse(probs: dict[int, float]) -> Law:
    return Law(np.array(list(probs.values())), np.array(list(probs), dtype=np.int64))


def normalised(weights: Sequence[float]) -> Law:
    return Law(np.array(weights) / math.fsum(weights))


def probs(given: Law) -> list[float]:
    return [given.prob(token) for token in range(SIZE)]


def always(given: Law) -> Model:
    """A model that ignores its history."""
    return lambda _: given


def table(seed: int) -> Model:
    """A model of three tokens with a row of its own for every history."""

    @cache
    def row(tokens: tuple[int, ...]) -> Law:
        rng = np.random.default_rng([seed, len(tokens), *tokens])
        return Law(rng.dirichlet(np.full(3, 0.5)))

    return row


def noisy(model: Model, seed: int) -> Model:
    """Half of a model, half of another: a draft worth having."""
    noise = table(seed)
    return lambda tokens: Law((model(tokens).probs + noise(tokens).probs) / 2)


def sampled(model: Model, n_draft: int) -> Proposer:
    """The honest proposer: each token from the model's law, which it reports."""

    def propose(oracle: Oracle) -> Draft:
        tokens: tuple[int, ...] = ()
        laws: tuple[Law, ...] = ()
        for _ in range(n_draft):
            laws += (model(tokens),)
            tokens += (oracle.categorical(laws[-1]),)
        return Draft(tokens, laws)

    return propose


def play(oracle: Oracle, verify: Verifier, target: Model, propose: Proposer) -> Round:
    """One round after an empty history, all of its randomness from the oracle."""
    draft = propose(oracle)
    return verify(draft, lambda i: target(draft.tokens[:i]), one_stream(oracle))


def finish(oracle: Oracle, target: Model, tokens: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The first n of the tokens continued by the target."""
    while len(tokens) < n:
        tokens += (oracle.categorical(target(tokens)),)
    return tokens[:n]


def error(verify: Verifier, target: Model, propose: Proposer, n_tokens: int) -> float:
    """Total variation distance of a round, continued by the target, from the target."""
    emitted = enumerate_runs(
        lambda o: finish(o, target, play(o, verify, target, propose).tokens, n_tokens)
    )
    return distance(emitted, enumerate_runs(lambda o: finish(o, target, (), n_tokens)))


def accepted(verify: Verifier, target: Model, propose: Proposer) -> float:
    """Mean number of accepted tokens."""
    counts = enumerate_runs(lambda o: play(o, verify, target, propose).accepted)
    return sum(weight * cast(int, n) for n, weight in counts.items())


def first_token(verify: Verifier, p: Law, propose: Proposer) -> list[float]:
    """The law of the first token, for a target that ignores its history."""
    counts = enumerate_runs(lambda o: play(o, verify, always(p), propose).tokens[0])
    return [counts.get(token, 0.0) for token in range(SIZE)]


def random_law(rng: np.random.Generator, size: int, n_kept: int | None = None) -> Law:
    weights = rng.dirichlet(np.full(n_kept or size, 0.5))
    if n_kept is None:
        return Law(weights)
    return Law(weights, np.sort(rng.choice(size, n_kept, replace=False)).astype(np.int64))


def one_step_apart(rng: np.random.Generator, size: int) -> tuple[Law, Law]:
    """The laws of two rows of logits, one of which is one float32 step higher in one place."""
    row = rng.normal(size=size).astype(np.float32)
    above = row.copy()
    above[3] = np.nextafter(above[3], np.float32(np.inf))
    whole = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    return next_law(row, whole), next_law(above, whole)


def pairs() -> dict[str, tuple[Law, Law]]:
    rng = np.random.default_rng(5)
    dense, other = random_law(rng, 9), random_law(rng, 9)
    few, some = random_law(rng, 9, 4), random_law(rng, 9, 5)
    low, high = one_step_apart(rng, 9)
    return {
        "random": (dense, other),
        "sparse": (few, some),
        "dense target, sparse draft": (dense, few),
        "sparse target, dense draft": (few, dense),
        "disjoint": (law(0.3, 0.7, 0, 0), law(0, 0, 0.6, 0.4)),
        "disjoint and sparse": (sparse({1: 0.5, 6: 0.5}), sparse({0: 0.2, 2: 0.3, 8: 0.5})),
        "equal": (dense, Law(dense.probs.copy())),
        "equal and sparse": (few, few),
        "uniform": (law(*[0.1] * 10), law(*[0.1] * 10)),
        "one-hot, another one-hot": (Law.one_hot(2), Law.one_hot(5)),
        "the same one-hot": (Law.one_hot(2), Law.one_hot(2)),
        "one-hot draft inside the target": (dense, Law.one_hot(4)),
        "one-hot draft outside the target": (law(0.5, 0, 0.5), Law.one_hot(1)),
        "one-hot target inside the draft": (Law.one_hot(4), dense),
        "one float32 step apart": (low, high),
        "one float32 step apart, the other way": (high, low),
        "exact zeros": (law(0, 0.5, 0, 0.5, 0), law(0.25, 0.25, 0.25, 0.25, 0)),
        "padded target": (random_law(rng, 12), dense),
        "padded draft": (dense, random_law(rng, 12)),
        "padded draft, sparse": (dense, sparse({1: 0.4, 10: 0.6})),
        "the example": (law(0.2, 0.5, 0.3), law(0.6, 0.3, 0.1)),
    }


PAIRS = pairs()
EACH_PAIR = pytest.mark.parametrize(("p", "q"), PAIRS.values(), ids=PAIRS.keys())
# The rules that accept by the ratio of two laws. (Coupled verification has tests of its own.)
RATIO_RULES: dict[str, Verifier] = {"block": verify_block, "token": verify_tokens}
BOTH = pytest.mark.parametrize("verify", RATIO_RULES.values(), ids=RATIO_RULES.keys())


def at_each(given: Law) -> TargetLaws:
    return lambda _: given


JUST_BELOW_ONE = 1 - 2.0**-53


class Fixed:
    """In place of a NumPy generator: one uniform, again and again."""

    def __init__(self, uniform: float) -> None:
        self._uniform = uniform

    def random(self) -> float:
        return self._uniform


def at_uniform(uniform: float) -> Streams:
    rng = NumpyRng(cast(np.random.Generator, Fixed(uniform)))
    return Streams(rng, rng, rng)
