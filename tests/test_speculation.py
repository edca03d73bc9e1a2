"""One round: what is decoded, what is drafted, and what hostile drafters cannot do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from toys import PLAIN, Iid, Noisy, Table, ToyContext

from specllama.acceptance import Draft, Round, Verifier, verify_block, verify_tokens
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.errors import InvalidLogits, RollbackError
from specllama.lm import CachedLM, LogitRows, Rows
from specllama.lookahead import FixedLength
from specllama.sampling import Law, SamplingParams, Streams, next_law
from specllama.speculation import Speculator

BOTH = pytest.mark.parametrize("verify", [verify_tokens, verify_block])
GREEDY = SamplingParams(temperature=0)
TARGET = Table(7, seed=11)
DRAFT = Noisy(TARGET, seed=12)


def state(
    prompt: Sequence[int] = (0,), n_left: int = 20, slot: int = 0, params: SamplingParams = GREEDY
) -> SequenceState:
    return SequenceState(slot, list(prompt), params, Streams.seeded(1, slot), n_left)


def plain(
    n_tokens: int, params: SamplingParams = GREEDY, prompt: Sequence[int] = (0,)
) -> list[int]:
    """A plain loop that knows nothing of the package but its sampling."""
    tokens = list(prompt)
    streams = Streams.seeded(1, 0)
    for _ in range(n_tokens):
        logits = np.log(TARGET(tuple(tokens))).astype(np.float32)
        tokens.append(streams.correction.categorical(next_law(logits, params, tokens)))
    return tokens[len(prompt) :]


def run(
    drafter: Drafter,
    verify: Verifier = verify_block,
    params: SamplingParams = GREEDY,
    n_tokens: int = 20,
    context: ToyContext | None = None,
) -> tuple[list[int], list[Round]]:
    lm = CachedLM(context or ToyContext(TARGET, 7))
    speculator = Speculator(lm, drafter, verify, 7)
    s = state(n_left=n_tokens, params=params)
    rounds = []
    while s.n_left > 0:
        rounds += speculator.round([s])
        # What the target holds is all that is committed, but for the last token.
        assert list(lm.held(0))[: len(s.tokens) - 1] == s.tokens[:-1]
    return s.tokens[1:], rounds


class Proposing:
    """A drafter that proposes what it is told, with laws that fit: one-hot unless given."""

    def __init__(self, choose: Callable[[Sequence[int], int], Sequence[int]]) -> None:
        self._choose = choose

    def prepare(self, state: SequenceState) -> None:
        pass

    def propose(self, sequences: Sequence[SequenceState], limits: Sequence[int]) -> list[Draft]:
        drafts = []
        for s, limit in zip(sequences, limits, strict=True):
            tokens = tuple(self._choose(s.tokens, limit))[:limit]
            drafts.append(Draft(tokens, tuple(Law.one_hot(t) for t in tokens)))
        return drafts

    def observe(self, rounds: Sequence[Round]) -> None:
        pass


def greedy_model(n: int, model: Table | Noisy = DRAFT, n_ctx: int = 64) -> ModelDrafter:
    return ModelDrafter(CachedLM(ToyContext(model, 7, n_ctx=n_ctx)), FixedLength(n), 7)


@BOTH
@pytest.mark.parametrize("n_draft", [1, 2, 4, 8])
def test_greedy_output_is_plain_output(verify: Verifier, n_draft: int) -> None:
    tokens, _ = run(greedy_model(n_draft), verify)
    assert tokens == plain(20)


@BOTH
@pytest.mark.parametrize("n_draft", [1, 2, 4, 8])
def test_the_target_as_its_own_draft_is_always_accepted(verify: Verifier, n_draft: int) -> None:
    tokens, rounds = run(greedy_model(n_draft, TARGET), verify)
    assert tokens == plain(20)
    assert all(r.accepted == r.proposed for r in rounds)
    tokens, rounds = run(greedy_model(n_draft, TARGET), verify, PLAIN)
    assert all(r.accepted == r.proposed for r in rounds)


@BOTH
def test_a_drafter_of_impossible_tokens_is_always_rejected(verify: Verifier) -> None:
    """A loop that compares with the wrong row accepts the first of them."""

    def least_likely(tokens: Sequence[int], limit: int) -> list[int]:
        return [int(TARGET(tuple(tokens)).argmin())]

    tokens, rounds = run(Proposing(least_likely), verify)
    assert tokens == plain(20)
    assert sum(r.accepted for r in rounds) == 0
    assert sum(r.proposed for r in rounds) == 19


@BOTH
@pytest.mark.parametrize(
    "when",
    [
        pytest.param(lambda n: False, id="never"),
        pytest.param(lambda n: n % 2, id="every second round"),
        pytest.param(lambda n: n < 2, id="only at the start"),
    ],
)
def test_a_drafter_that_proposes_nothing(verify: Verifier, when: Callable[[int], bool]) -> None:
    calls = []

    def choose(tokens: Sequence[int], limit: int) -> list[int]:
        calls.append(1)
        return [int(TARGET(tuple(tokens)).argmax())] if when(len(calls)) else []

    tokens, rounds = run(Proposing(choose), verify)
    assert tokens == plain(20)
    silent = [r for r in rounds if r.proposed == 0]
    assert silent
    assert all((r.accepted, r.provenance) == (0, ("bonus",)) for r in silent)


def test_plain_decoding_draws_as_a_plain_loop_does() -> None:
    tokens, rounds = run(NullDrafter(), params=PLAIN)
    assert tokens == plain(20, PLAIN)
    assert [r.proposed for r in rounds] == [0] * 20


@BOTH
def test_penalties_see_the_drafted_tokens_of_the_round(verify: Verifier) -> None:
    params = replace(GREEDY, repeat_penalty=1.3, frequency_penalty=0.4)
    looping = run(NullDrafter(), params=GREEDY)[0]
    tokens, rounds = run(greedy_model(4, TARGET), verify, params)
    assert tokens == plain(20, params) != looping
    assert sum(r.accepted for r in rounds) > 10


def test_a_round_is_one_decode_of_one_row_more_than_was_drafted() -> None:
    toy = ToyContext(TARGET, 7)
    _, rounds = run(greedy_model(3), context=toy)
    assert [[(n, n)] for n in (r.proposed + 1 for r in rounds)] == toy.decodes


def test_a_draft_token_is_decoded_once_by_the_draft() -> None:
    toy = ToyContext(TARGET, 7)
    drafter = ModelDrafter(CachedLM(toy), FixedLength(3), 7)
    _, rounds = run(drafter, n_tokens=21)
    assert all(r.accepted == r.proposed for r in rounds)
    # After full acceptance the draft has not seen its own last token; it is fed with the next.
    assert [batch[0] for batch in toy.decodes[:7]] == [
        (1, 1), (1, 1), (1, 1), (2, 1), (1, 1), (1, 1), (2, 1),
    ]  # fmt: skip


def test_the_draft_never_runs_past_the_answers_limit() -> None:
    tokens, rounds = run(greedy_model(8, TARGET), n_tokens=5)
    assert len(tokens) == 5
    assert [r.proposed for r in rounds] == [4]


@pytest.mark.parametrize("n_left", range(1, 12))
def test_the_draft_length_is_clamped_to_the_free_cells_of_both_models(n_left: int) -> None:
    for target_cells, draft_cells in ((12, 64), (64, 12), (12, 12), (12, 9)):
        toy = ToyContext(TARGET, 7, n_ctx=target_cells)
        drafter = greedy_model(8, TARGET, n_ctx=draft_cells)
        n_tokens = min(n_left, target_cells - 1)
        tokens, _ = run(drafter, context=toy, n_tokens=n_tokens)
        assert tokens == plain(n_tokens)


def test_the_draft_length_is_clamped_to_the_rows_of_a_decode() -> None:
    _, rounds = run(greedy_model(8, TARGET), context=ToyContext(TARGET, 7, n_outputs=4))
    assert max(r.proposed for r in rounds) == 3


def test_sequences_of_different_lengths_in_one_batch_equal_each_alone() -> None:
    prompts = [[0], [3, 1], [2, 2, 2, 5]]
    speculator = Speculator(
        CachedLM(ToyContext(TARGET, 7)), greedy_model(3), verify_block, 7
    )
    states = [state(p, n_left=8 + i, slot=i) for i, p in enumerate(prompts)]
    while active := [s for s in states if s.n_left > 0]:
        speculator.round(active)
    for i, (s, prompt) in enumerate(zip(states, prompts, strict=True)):
        assert s.tokens[len(prompt) :] == plain(8 + i, prompt=prompt)


def test_rows_of_a_decode_are_shared_among_the_sequences() -> None:
    toy = ToyContext(TARGET, 7, n_outputs=6)
    speculator = Speculator(CachedLM(toy), greedy_model(8, TARGET), verify_block, 7)
    states = [state(slot=i) for i in range(3)]
    rounds = speculator.round(states)
    assert [r.proposed for r in rounds] == [1, 1, 1]


def test_a_target_that_cannot_roll_back_is_decoded_plainly() -> None:
    tokens, rounds = run(greedy_model(4), context=ToyContext(TARGET, 7, can_rollback=False))
    assert tokens == plain(20)
    assert sum(r.proposed for r in rounds) == 0


def test_a_rollback_that_fails_once_stops_the_generation() -> None:
    toy = ToyContext(TARGET, 7)
    speculator = Speculator(CachedLM(toy), greedy_model(4), verify_block, 7)
    s = state()
    toy.refuse_rollback = True
    with pytest.raises(RollbackError):
        for _ in range(20):
            speculator.round([s])


def test_a_sequence_with_a_token_that_the_draft_lacks_is_not_shown_to_it() -> None:
    small = Table(5, seed=1)
    toy = ToyContext(small, 5)
    drafter = ModelDrafter(CachedLM(toy), FixedLength(3), 5)
    lm = CachedLM(ToyContext(TARGET, 7))
    speculator = Speculator(lm, drafter, verify_block, 7)
    marked, unmarked = state([0, 6], slot=0), state([0], slot=1)
    rounds = speculator.round([marked, unmarked])
    assert [r.proposed for r in rounds] == [0, 3]
    assert 0 not in toy.slots
    assert rounds[0].tokens == tuple(plain(1, prompt=[0, 6]))


def test_ids_beyond_the_shared_ones_are_never_drafted() -> None:
    # The draft loves token 6, which is padding in the target's vocabulary.
    lover = Iid(0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.94)
    drafter = ModelDrafter(CachedLM(ToyContext(lover, 7)), FixedLength(3), 6)
    _, rounds = run(drafter, params=PLAIN)
    assert all(token < 6 for r in rounds for token in r.draft.tokens)
    assert all(law.probs.size == 6 for r in rounds for law in r.draft.laws)


def test_padding_of_the_target_is_never_emitted() -> None:
    lover = Iid(0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.94)
    for drafter in (NullDrafter(), greedy_model(3)):
        speculator = Speculator(CachedLM(ToyContext(lover, 7)), drafter, verify_block, 6)
        s = state(n_left=50, params=PLAIN)
        while s.n_left > 0:
            speculator.round([s])
        assert max(s.tokens) < 6


class Sick(ToyContext):
    """Gives unusable logits from a length on."""

    def __init__(self, model: Table | Noisy, bad: float, since: int) -> None:
        super().__init__(model, 7)
        self._bad, self._since = bad, since

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        logits = super().decode(batch)
        for rows, row in zip(batch, logits, strict=True):
            row.flags.writeable = True
            for i in range(rows.n_logits):
                length = rows.start + len(rows.tokens) - rows.n_logits + i + 1
                if length >= self._since:
                    row[i] = self._bad
            row.flags.writeable = False
        return logits


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_draft_with_invalid_logits_leaves_the_round_to_the_target(bad: float) -> None:
    drafter = ModelDrafter(CachedLM(Sick(DRAFT, bad, since=5)), FixedLength(3), 7)
    tokens, rounds = run(drafter)
    assert tokens == plain(20)
    assert rounds[0].proposed > 0
    assert not rounds[0].draft.failed
    assert rounds[-2].draft.failed
    assert rounds[-2].proposed == 0


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("n_draft", [0, 3])
def test_a_target_with_invalid_logits_is_an_error_with_the_position(
    bad: float, n_draft: int
) -> None:
    lm = CachedLM(Sick(TARGET, bad, since=6))
    speculator = Speculator(lm, greedy_model(n_draft), verify_block, 7)
    s = state()
    with pytest.raises(InvalidLogits, match="at position 6"):
        while True:
            speculator.round([s])
    assert s.tokens[1:] == plain(len(s.tokens) - 1)
    assert 1 < len(s.tokens) <= 6


def test_a_draft_that_cannot_decode_leaves_the_round_to_the_target() -> None:
    toy = ToyContext(DRAFT, 7)
    toy.fail_decode = True
    tokens, rounds = run(ModelDrafter(CachedLM(toy), FixedLength(3), 7))
    assert tokens == plain(20)
    assert all(r.draft.failed and r.proposed == 0 for r in rounds[:-1])


def test_a_draft_that_cannot_read_the_prompt_leaves_it_to_the_target() -> None:
    toy = ToyContext(DRAFT, 7)
    toy.fail_decode = True
    drafter = ModelDrafter(CachedLM(toy), FixedLength(3), 7)
    speculator = Speculator(CachedLM(ToyContext(TARGET, 7)), drafter, verify_block, 7)
    speculator.prefill(state(prompt=[1, 2, 3]))
    assert drafter.lm.rows_decoded == 0


def test_a_draft_with_nothing_left_to_draw_leaves_the_round_to_the_target() -> None:
    """The bans leave the target a token that the draft does not have."""
    params = replace(GREEDY, logit_bias=dict.fromkeys(range(5), -np.inf))
    drafter = ModelDrafter(CachedLM(ToyContext(DRAFT, 7)), FixedLength(3), 5)
    tokens, rounds = run(drafter, params=params, n_tokens=5)
    assert tokens == plain(5, params)
    assert rounds[0].draft.failed or max(tokens) >= 5
