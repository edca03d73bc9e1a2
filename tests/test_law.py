"""The law test: what the shipped loop emits has exactly the target's law.

Everything is enumerated, nothing is sampled: all outcomes of all draws over one or more rounds,
on models whose rows depend on the whole history. A bias of one part in a thousand, which sampling
would need millions of tokens to see, shows here at once; the mutations at the end prove it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from toys import (
    PLAIN,
    Iid,
    Loop,
    Noisy,
    Oracle,
    Table,
    ToyContext,
    distance,
    enumerate_runs,
    target_law,
    toy_lm,
)

from specllama.acceptance import (
    Draft,
    Round,
    TargetLaws,
    Verifier,
    excess,
    verify_block,
    verify_tokens,
)
from specllama.costs import Budget, CostTable
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.lm import CachedLM, LogitRows, Rows
from specllama.lookahead import FixedLength, LengthPolicy, MeasuredLength
from specllama.lookup import BestDrafter, LookupDrafter
from specllama.sampling import Law, SamplingParams, Streams
from specllama.speculation import Speculator
from specllama.vocabulary_map import PairedIds, SharedIds, VocabularyMap

EXACT = 1e-12
BOTH = pytest.mark.parametrize("verify", [verify_tokens, verify_block])

TARGET = Table(3, seed=1)
DRAFT = Noisy(TARGET, seed=2)
# Rows of three tokens with all of them likely enough to survive most truncations.
FLAT_TARGET = Table(3, seed=5, concentration=3)
FLAT_DRAFT = Noisy(FLAT_TARGET, seed=6)


def model_drafter(
    model: Table | Noisy | Iid,
    policy: Callable[[Oracle], LengthPolicy],
    vocabulary: int | VocabularyMap | None = None,
    temperature: float | None = None,
) -> Callable[[Oracle], Drafter]:
    return lambda oracle: ModelDrafter(
        toy_lm(model), policy(oracle), vocabulary or model.n_vocab, temperature
    )


def fixed(n: int) -> Callable[[Oracle], LengthPolicy]:
    return lambda _: FixedLength(n)


def error(loop: Loop, n_tokens: int, n_sequences: int = 1) -> float:
    """Distance between what the loop emits and the target's own law."""
    emitted = enumerate_runs(lambda oracle: loop.emit(oracle, n_tokens, n_sequences))
    wanted = target_law(loop.target, n_tokens, loop.params, loop.prompt, n_sequences)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-9)
    return distance(emitted, wanted)


@BOTH
@pytest.mark.parametrize("n_draft", [0, 1, 2])
def test_every_draft_length_over_several_rounds(verify: Verifier, n_draft: int) -> None:
    assert error(Loop(TARGET, model_drafter(DRAFT, fixed(n_draft)), verify), 4) < EXACT


@BOTH
def test_a_long_draft_within_one_round(verify: Verifier) -> None:
    target = Table(2, seed=3)
    loop = Loop(target, model_drafter(Noisy(target, seed=4), fixed(4)), verify)
    assert error(loop, 5) < EXACT


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_many_models(verify: Verifier, seed: int) -> None:
    target = Table(3, seed=100 + seed)
    loop = Loop(target, model_drafter(Noisy(target, seed=200 + seed), fixed(2)), verify)
    assert error(loop, 3) < EXACT


def test_plain_decoding_through_the_same_loop() -> None:
    assert error(Loop(TARGET, lambda _: NullDrafter()), 4) < EXACT


@BOTH
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(TARGET, id="the target itself"),
        pytest.param(Table(3, seed=77), id="unrelated"),
        pytest.param(Iid(0, 0, 1), id="sure of one token"),
        pytest.param(Iid(0.5, 0.5, 0), id="blind to a token"),
    ],
)
def test_any_draft_model(verify: Verifier, draft: Table | Iid) -> None:
    assert error(Loop(TARGET, model_drafter(draft, fixed(2)), verify), 3) < EXACT


@BOTH
@pytest.mark.parametrize("end", [0, 1, 2])
def test_nothing_is_drafted_behind_an_end_token(verify: Verifier, end: int) -> None:
    loop = Loop(TARGET, model_drafter(DRAFT, fixed(2)), verify, end_tokens=frozenset({end}))
    assert error(loop, 4) < EXACT
    assert error(loop, 2, n_sequences=2) < EXACT


@BOTH
def test_a_target_with_impossible_tokens(verify: Verifier) -> None:
    # Rows behind an impossible draft token are undefined; they must not be looked at.
    target = Iid(0, 0.6, 0.4)
    loop = Loop(target, model_drafter(Iid(0.7, 0.2, 0.1), fixed(2)), verify, prompt=(1,))
    assert error(loop, 3) < EXACT


@BOTH
@pytest.mark.parametrize("n_shared", [1, 2])
def test_a_draft_with_fewer_tokens(verify: Verifier, n_shared: int) -> None:
    loop = Loop(TARGET, model_drafter(DRAFT, fixed(2), n_shared), verify)
    assert error(loop, 3) < EXACT


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.4, 2.0])
def test_the_drafts_own_temperature(verify: Verifier, temperature: float) -> None:
    loop = Loop(TARGET, model_drafter(DRAFT, fixed(2), temperature=temperature), verify)
    assert error(loop, 3) < EXACT


TRANSFORMS = {
    "temperature 0": SamplingParams(temperature=0),
    "temperature 0.6": replace(PLAIN, temperature=0.6),
    "temperature 1.7": replace(PLAIN, temperature=1.7),
    "top-k": replace(PLAIN, top_k=2),
    "top-p": replace(PLAIN, top_p=0.7),
    "min-p": replace(PLAIN, min_p=0.4),
    "defaults": SamplingParams(),
    "repeat penalty": replace(PLAIN, repeat_penalty=1.5),
    "presence penalty": replace(PLAIN, presence_penalty=0.8),
    "frequency penalty": replace(PLAIN, frequency_penalty=0.6),
    "penalties over a window of two": replace(PLAIN, repeat_penalty=1.4, penalty_last_n=2),
    "logit bias": replace(PLAIN, logit_bias={0: 1.0, 2: -0.7}),
    "a banned token": replace(PLAIN, logit_bias={1: -np.inf}),
    "everything": SamplingParams(
        0.9, 2, 0.9, 0.1, 1.3, 0.2, 0.3, penalty_last_n=3, logit_bias={0: 0.5}
    ),
}


@BOTH
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_sampling_transform(verify: Verifier, name: str) -> None:
    drafter = model_drafter(FLAT_DRAFT, fixed(2))
    assert error(Loop(FLAT_TARGET, drafter, verify, TRANSFORMS[name]), 3) < EXACT


@pytest.mark.parametrize("name", ["repeat penalty", "frequency penalty", "logit bias", "top-k"])
def test_the_transforms_of_this_file_change_the_law(name: str) -> None:
    changed = target_law(FLAT_TARGET, 3, TRANSFORMS[name])
    assert distance(changed, target_law(FLAT_TARGET, 3)) > 0.01


class Scripted:
    """A policy around two questions, each asked with the depth and what was submitted before."""

    def __init__(
        self,
        go: Callable[[int], bool] = lambda depth: depth < 2,
        submit: Callable[[Law], bool] = lambda law: True,
    ) -> None:
        self._go, self._submit = go, submit
        self.depths: list[int] = []

    def start(self, behind: Sequence[int]) -> None:
        self.depths = [0] * len(behind)

    def expects(self, i: int) -> bool:
        return self._go(0)

    def go(self, i: int) -> bool:
        return self._go(self.depths[i])

    def submit(self, i: int, shape: Callable[[], Law]) -> bool:
        self.depths[i] += 1
        return self._submit(shape())

    def miss(self, i: int) -> None:
        pass

    def observe(self, rounds: Sequence[Round]) -> None:
        pass


class PlusMinus(Scripted):
    """Longer after full acceptance, shorter after a rejection: past rounds only."""

    def __init__(self) -> None:
        super().__init__(go=lambda depth: depth < self.length)
        self.length = 1

    def observe(self, rounds: Sequence[Round]) -> None:
        full = all(r.accepted == r.proposed for r in rounds)
        self.length = min(2, self.length + 1) if full else max(0, self.length - 1)


POLICIES: dict[str, Callable[[Oracle], LengthPolicy]] = {
    "by past rounds": lambda _: PlusMinus(),
    "by the clock": lambda oracle: Scripted(go=lambda d: d < 2 and oracle.bernoulli(0.5)),
    "by the law about to be drawn from": lambda _: Scripted(
        submit=lambda law: float(law.probs.max()) > 0.55
    ),
    "by both": lambda oracle: Scripted(
        go=lambda d: d < 2 and oracle.bernoulli(0.7),
        submit=lambda law: float(law.probs.max()) > 0.45,
    ),
}


@BOTH
@pytest.mark.parametrize("name", POLICIES)
def test_every_legal_length_policy(verify: Verifier, name: str) -> None:
    assert error(Loop(TARGET, model_drafter(DRAFT, POLICIES[name]), verify), 3) < EXACT


def ticking() -> Callable[[], float]:
    """A clock that passes 10, 20, 30, 10, 20, ... ms: rounds of different length."""
    ticks = itertools.cycle((0.010, 0.020, 0.030))
    now = [0.0]

    def clock() -> float:
        now[0] += next(ticks)
        return now[0]

    return clock


def measured_drafter(kind: str, draft: Table | Noisy, chance: float) -> Callable[[Oracle], Drafter]:
    """The drafters that choose by measured costs, over costs in which choices differ."""

    def make(_: Oracle) -> Drafter:
        budget = Budget(CostTable({1: [20], 2: [26], 3: [26], 5: [30]}), ticking())
        policy = MeasuredLength(budget, CostTable({1: [1.5], 2: [2]}), forecast=chance, limit=3)
        model = ModelDrafter(toy_lm(draft), policy, draft.n_vocab)
        lookup = LookupDrafter(budget, limit=2)
        # Histories are short here.
        lookup.shortest, budget._REST_AFTER = 1, 2
        lookup._EXPECTED = (0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9)
        model._WINDOW = 1 if kind == "model that sees little" else 2
        made: dict[str, Drafter] = {
            "model": model,
            "model that sees little": model,
            "lookup": lookup,
            "both": BestDrafter(lookup, model, policy),
        }
        drafter = made[kind]
        drafter.budget = budget  # type: ignore[attr-defined]
        return drafter

    return make


@BOTH
@pytest.mark.parametrize("kind", ["model", "model that sees little", "lookup", "both"])
@pytest.mark.parametrize("chance", [0.4, 0.8])
def test_lengths_and_sources_by_measured_worth(verify: Verifier, kind: str, chance: float) -> None:
    target = Table(2, seed=8)
    drafter = measured_drafter(kind, Noisy(target, seed=9), chance)
    loop = Loop(target, drafter, verify, prompt=(0, 1, 0))
    assert error(loop, 5) < EXACT


def test_the_measured_choices_of_this_file_differ_from_each_other() -> None:
    """Otherwise the test above would test one length of one source only."""
    target = Table(2, seed=8)
    seen = set()

    def run(oracle: Oracle, chance: float) -> int:
        drafter = measured_drafter("both", Noisy(target, seed=9), chance)(oracle)
        budget: Budget = drafter.budget  # type: ignore[attr-defined]
        speculator = Speculator(toy_lm(target), drafter, verify_block, 2, budget)
        state = SequenceState(0, [0, 1, 0], PLAIN, Streams(oracle, oracle, oracle), 5)
        while state.n_left > 0:
            [outcome] = speculator.round([state])
            sources = {"lookup" if law.probs.size == 1 else "model" for law in outcome.draft.laws}
            seen.add((outcome.proposed, *sources))
        return 0

    for chance in (0.4, 0.8):
        enumerate_runs(lambda oracle: run(oracle, chance))  # noqa: B023
    assert {(0,), (1, "lookup"), (2, "lookup"), (1, "model"), (2, "model")} <= seen


@BOTH
def test_two_sequences_in_one_batch_are_exact_and_independent(verify: Verifier) -> None:
    target = Table(2, seed=8)
    loop = Loop(target, model_drafter(Noisy(target, seed=9), fixed(1)), verify)
    assert error(loop, 2, n_sequences=2) < EXACT


def each_as(*ids: int) -> Callable[[Sequence[int]], list[int]]:
    """Spells each of the tokens that the draft lacks as the same ids."""
    return lambda run: [*ids] * len(run)


# What each id of the draft is in the target, -1 for nothing; and how other tokens are spelt.
VOCABULARIES: dict[str, PairedIds] = {
    "permuted": PairedIds([2, 0, 1], 3, each_as()),
    "more tokens": PairedIds([0, -1, 1, 2, -1], 3, each_as()),
    "fewer tokens": PairedIds([1, 0], 3, each_as(1, 0)),
    "partly the same": PairedIds([-1, 1, 0, -1], 3, each_as(3)),
    "one token the same": PairedIds([-1, 2, -1, -1], 3, each_as(0, 3)),
    "one token twice": PairedIds([0, 1, 2, 1], 3, each_as()),
    "padding": PairedIds([1, -1, 0, 2], 3, each_as(1), n_real=3),
    "its own beginning": PairedIds([1, 2, -1], 3, each_as(), first=2),
    "some that cannot be read": PairedIds([1, 2, -1], 3, each_as()),
}


@BOTH
@pytest.mark.parametrize("name", VOCABULARIES)
def test_drafts_with_other_vocabularies(verify: Verifier, name: str) -> None:
    ids, proposed = VOCABULARIES[name], 0

    def run(oracle: Oracle, draft: Table) -> tuple[int, ...]:
        nonlocal proposed
        drafter = Counting(ModelDrafter(toy_lm(draft), FixedLength(2), ids))
        emitted = Loop(TARGET, lambda _: drafter, verify, prompt=(0, 1)).emit(oracle, 3)
        proposed += drafter.proposed
        return emitted

    wanted = target_law(TARGET, 3, prompt=(0, 1))
    for seed in (41, 42, 43):
        draft = Table(len(ids.to_target), seed, concentration=2)
        emitted = enumerate_runs(lambda oracle: run(oracle, draft))  # noqa: B023
        assert distance(emitted, wanted) < EXACT
    assert proposed > 0


@BOTH
@pytest.mark.parametrize("params", ["defaults", "frequency penalty", "logit bias", "top-k"])
def test_transforms_with_other_vocabularies(verify: Verifier, params: str) -> None:
    ids = PairedIds([-1, 1, 0, 1], 3, each_as(3))
    drafter = model_drafter(Table(4, 43, concentration=3), fixed(2), ids)
    assert error(Loop(FLAT_TARGET, drafter, verify, TRANSFORMS[params]), 3) < EXACT


@dataclass
class Counting:
    """A drafter that counts what it proposes."""

    inner: ModelDrafter
    proposed: int = 0

    def prepare(self, state: SequenceState) -> None:
        self.inner.prepare(state)

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        drafts = self.inner.propose(sequences, limits)
        self.proposed += sum(len(draft.tokens) for draft in drafts)
        return drafts

    def observe(self, rounds: Sequence[Round]) -> None:
        self.inner.observe(rounds)


class Unhealthy(ToyContext):
    """A draft whose logits are NaN after some histories."""

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        logits = super().decode(batch)
        for rows, row in zip(batch, logits, strict=True):
            if sum(rows.tokens) % 2:
                row.flags.writeable = True
                row[:] = np.nan
        return logits


@BOTH
def test_a_draft_that_fails_now_and_then(verify: Verifier) -> None:
    def drafter(_: Oracle) -> Drafter:
        return ModelDrafter(CachedLM(Unhealthy(DRAFT, 3)), FixedLength(2), 3)

    assert error(Loop(TARGET, drafter, verify), 3) < EXACT


DrafterOver = Callable[[Table | Noisy | Iid], Callable[[Oracle], Drafter]]


# Mutations: each is a mistake that was made in a real project. The law test must see every one.


def correct_from_p(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """After a rejection, draw from p instead of the residual."""
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(i)
        if not streams.acceptance.bernoulli(min(1.0, p.prob(token) / q.prob(token))):
            return Round((*draft.tokens[:i], streams.correction.categorical(p)), draft, ())
    bonus = streams.correction.categorical(target(len(draft.tokens)))
    return Round((*draft.tokens, bonus), draft, ())


def block(cap: bool, token_residual: bool) -> Verifier:
    """Block verification with the cap left out, or with the correction of token verification."""

    def verify(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
        survival, kept, correction = 1.0, 0, None
        for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
            p = target(i)
            weights = excess(p, q, survival)
            mass = float(weights.sum())
            whole = mass + (1 - survival)
            passes = min(1.0, mass / whole) if whole > 0 else 1.0
            if i == 0 or streams.acceptance.bernoulli(passes):
                used = excess(p, q) if token_residual else weights
                kept = i
                correction = Law(used / used.sum(), p.ids) if used.sum() > 0 else p
            ratio = survival * p.prob(token) / q.prob(token)
            survival = min(1.0, ratio) if cap else ratio
        if not draft.tokens or streams.acceptance.bernoulli(min(1.0, survival)):
            bonus = streams.correction.categorical(target(len(draft.tokens)))
            return Round((*draft.tokens, bonus), draft, ())
        assert correction is not None
        corrected = streams.correction.categorical(correction)
        return Round((*draft.tokens[:kept], corrected), draft, ())

    return verify


@dataclass
class Liar:
    """A drafter that reports other laws than it drew from, or drops what it has drawn."""

    inner: ModelDrafter
    change: Callable[[Draft], Draft]

    def prepare(self, state: SequenceState) -> None:
        self.inner.prepare(state)

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        return [self.change(draft) for draft in self.inner.propose(sequences, limits)]

    def observe(self, rounds: Sequence[Round]) -> None:
        self.inner.observe(rounds)


def lying(change: Callable[[Draft], Draft]) -> DrafterOver:
    return lambda draft: lambda _: Liar(ModelDrafter(toy_lm(draft), FixedLength(2), 3), change)


def drop_unlikely(draft: Draft) -> Draft:
    """Throw a drawn token away when its own q is small."""
    weak = [i for i, t in enumerate(draft.tokens) if draft.laws[i].prob(t) < 0.4]
    end = weak[0] if weak else len(draft.tokens)
    return Draft(draft.tokens[:end], draft.laws[:end])


def drop_an_end(draft: Draft) -> Draft:
    """Throw a drawn token away because it would end the answer."""
    at = draft.tokens.index(1) if 1 in draft.tokens else len(draft.tokens)
    return Draft(draft.tokens[:at], draft.laws[:at])


def claim_uniform(draft: Draft) -> Draft:
    """Report another law than the one drawn from."""
    return Draft(draft.tokens, tuple(Law(np.full(3, 1 / 3)) for _ in draft.laws))


def argmax_with_soft_laws(draft: Table | Noisy | Iid) -> Callable[[Oracle], Drafter]:
    """Draft greedily, but report the soft law: p/q is then tested with a q that was not drawn."""

    class Greedy:
        def categorical(self, law: Law) -> int:
            at = int(law.probs.argmax())
            return at if law.ids is None else int(law.ids[at])

        def bernoulli(self, prob: float) -> bool:
            raise AssertionError("a drafter tosses no coins")

    class GreedyDrafter(ModelDrafter):
        def propose(
            self, sequences: Sequence[SequenceState], limits: Sequence[int]
        ) -> list[Draft]:
            greedy = [replace_streams(s) for s in sequences]
            return super().propose(greedy, limits)

    def replace_streams(state: SequenceState) -> SequenceState:
        streams = Streams(Greedy(), state.streams.acceptance, state.streams.correction)
        return SequenceState(state.slot, state.tokens, state.params, streams, state.n_left)

    return lambda _: GreedyDrafter(toy_lm(draft), FixedLength(2), 3)


def honest(draft: Table | Noisy | Iid) -> Callable[[Oracle], Drafter]:
    return model_drafter(draft, fixed(2))


# The second pair is one in which the token residual after block acceptance shows: two tokens must
# be left to correct to.
PAIRS: list[tuple[Table | Iid, Noisy | Iid]] = [
    (TARGET, DRAFT),
    (Iid(0.4, 0.2, 0.4), Iid(0.1, 0.1, 0.8)),
]
MUTATIONS: dict[str, tuple[DrafterOver, Verifier]] = {
    "correction from p": (honest, correct_from_p),
    "block product not capped": (honest, block(cap=False, token_residual=False)),
    "block acceptance with the token residual": (honest, block(cap=True, token_residual=True)),
    "dropping by the token's own q, token rule": (lying(drop_unlikely), verify_tokens),
    "dropping by the token's own q, block rule": (lying(drop_unlikely), verify_block),
    "dropping an end token, token rule": (lying(drop_an_end), verify_tokens),
    "dropping an end token, block rule": (lying(drop_an_end), verify_block),
    "argmax draft tested with p/q, token rule": (argmax_with_soft_laws, verify_tokens),
    "argmax draft tested with p/q, block rule": (argmax_with_soft_laws, verify_block),
    "another law reported, token rule": (lying(claim_uniform), verify_tokens),
    "another law reported, block rule": (lying(claim_uniform), verify_block),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_law_test_catches(name: str) -> None:
    over, verify = MUTATIONS[name]
    errors = [error(Loop(target, over(draft), verify), 3) for target, draft in PAIRS]
    assert max(errors) > 1e-3


def test_the_unmutated_copy_of_block_verification_is_exact() -> None:
    # So that a mutation fails for its mutation, not for a slip in the copy.
    right = block(cap=True, token_residual=False)
    for target, draft in PAIRS:
        assert error(Loop(target, honest(draft), right), 3) < EXACT


def scaled(factors: Sequence[float]) -> Callable[[Draft], Draft]:
    """Report each token's probability times its factor."""

    def change(draft: Draft) -> Draft:
        laws = tuple(Law(law.probs * np.array(factors), law.ids) for law in draft.laws)
        return Draft(draft.tokens, laws)

    return change


def drop_the_third(draft: Draft) -> Draft:
    """Throw away what was drawn from the first token on that the target lacks."""
    end = draft.tokens.index(2) if 2 in draft.tokens else len(draft.tokens)
    return Draft(draft.tokens[:end], draft.laws[:end])


# Of a draft with the law (.4, .3, .3): what its ids are in the target, and what is done to what it
# proposes.
VOCABULARY_MUTATIONS: dict[str, tuple[VocabularyMap, Callable[[Draft], Draft]]] = {
    "masked, but tested with the unmasked law": (
        PairedIds([0, 1, -1], 3, each_as(0)), scaled([0.7, 0.7, 1]),
    ),
    "two ids of one token, tested with the law of one": (
        PairedIds([0, 1, 1], 3, each_as(0)), scaled([1, 0.5, 1]),
    ),
    "drawn unmasked, and dropped when the target lacks it": (
        SharedIds(3), drop_the_third,
    ),
}


@BOTH
@pytest.mark.parametrize("name", VOCABULARY_MUTATIONS)
def test_the_law_test_catches_wrong_maps(verify: Verifier, name: str) -> None:
    ids, change = VOCABULARY_MUTATIONS[name]

    def drafter(change: Callable[[Draft], Draft]) -> Callable[[Oracle], Drafter]:
        draft = Iid(0.4, 0.3, 0.3)
        return lambda _: Liar(ModelDrafter(toy_lm(draft), FixedLength(2), ids), change)

    target = Iid(0.5, 0.3, 0.2)
    assert error(Loop(target, drafter(change), verify), 3) > 1e-3
    assert error(Loop(target, drafter(lambda draft: draft), verify), 3) < EXACT


def test_penalties_that_do_not_see_the_drafted_tokens_are_caught() -> None:
    params = TRANSFORMS["frequency penalty"]
    loop = Loop(FLAT_TARGET, model_drafter(FLAT_DRAFT, fixed(2)), forget_drafts, params)
    assert error(loop, 3) > 1e-3


def forget_drafts(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """Take back the penalties of the drafted prefix, as a loop does that counts once a round."""

    def stale(i: int) -> Law:
        law = target(i)
        weights = law.probs.copy()
        for token in draft.tokens[:i]:
            weights[token] *= np.exp(TRANSFORMS["frequency penalty"].frequency_penalty)
        return Law(weights / weights.sum(), law.ids)

    return verify_tokens(draft, stale, streams)


def test_two_sequences_that_stop_by_each_others_dropped_token_are_dependent() -> None:
    """Each alone is exact, both together are not; only the joint law shows it."""

    class Crossed:
        def __init__(self, oracle: Oracle) -> None:
            self._oracle = oracle

        def prepare(self, state: SequenceState) -> None:
            pass

        def propose(
            self, sequences: Sequence[SequenceState], limits: Sequence[int]
        ) -> list[Draft]:
            law = Law(np.array([0.8, 0.2]))
            tokens = [self._oracle.categorical(law) for _ in sequences]
            if len(tokens) < 2 or min(limits) < 1:
                return [Draft() for _ in sequences]
            kept = [tokens[1 - i] == 0 for i in range(2)]
            return [
                Draft((t,), (law,)) if keep else Draft()
                for t, keep in zip(tokens, kept, strict=True)
            ]

        def observe(self, rounds: Sequence[Round]) -> None:
            pass

    loop = Loop(Iid(0.5, 0.5), Crossed, verify_tokens)
    emitted = enumerate_runs(lambda oracle: loop.emit(oracle, 2, 2))
    first: dict[tuple[int, int], float] = {}
    for tokens, weight in emitted.items():
        assert isinstance(tokens, tuple)
        first[tokens[0], tokens[2]] = first.get((tokens[0], tokens[2]), 0.0) + weight
    assert first[0, 0] == pytest.approx(0.26)
    assert first[0, 0] + first[0, 1] == pytest.approx(0.5)
