"""CachedLM: the cache is a memo of a function, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from toys import Table, ToyContext

from specllama.checkpoints import Checkpoints
from specllama.errors import DecodeError, RollbackError
from specllama.lm import CachedLM, LogitRows, Request, Rows, common_prefix

MODEL = Table(5, seed=3)


def context(n_batch: int = 64, **options: Any) -> ToyContext:
    return ToyContext(MODEL, 5, n_batch=n_batch, **options)


def expected(tokens: Sequence[int], n_last: int) -> LogitRows:
    ends = range(len(tokens) - n_last + 1, len(tokens) + 1)
    return np.log([MODEL(tuple(tokens[:end])) for end in ends]).astype(np.float32)


def test_logits_after_each_of_the_last_prefixes() -> None:
    lm = CachedLM(context())
    [rows] = lm.logits([Request(0, [1, 2, 3, 4], 3)])
    assert np.array_equal(rows, expected([1, 2, 3, 4], 3))


def test_only_new_tokens_are_decoded() -> None:
    toy = context()
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    lm.logits([Request(0, [1, 2, 3, 4, 0], 2)])
    assert toy.decodes == [[(3, 1)], [(2, 2)]]


def test_rejected_tokens_are_forgotten_and_asking_again_decodes_the_last_row_only() -> None:
    toy = context()
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3, 4], 3)])
    [rows] = lm.logits([Request(0, [1, 2, 0])])
    assert np.array_equal(rows, expected([1, 2, 0], 1))
    [rows] = lm.logits([Request(0, [1, 2, 0])])
    assert np.array_equal(rows, expected([1, 2, 0], 1))
    assert toy.decodes[1:] == [[(1, 1)], [(1, 1)]]


def test_all_sequences_share_one_decode() -> None:
    toy = context()
    lm = CachedLM(toy)
    first, second = lm.logits([Request(0, [1, 2], 2), Request(1, [3, 4, 0], 1)])
    assert np.array_equal(first, expected([1, 2], 2))
    assert np.array_equal(second, expected([3, 4, 0], 1))
    assert toy.decodes == [[(2, 2), (3, 1)]]


@pytest.mark.parametrize("n_batch", [4, 5, 7, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 13, 16, 21])
def test_prompts_longer_than_the_batch(n_batch: int, length: int) -> None:
    toy = context(n_batch=n_batch)
    tokens = [i % 5 for i in range(length)]
    n_last = min(length, 3)
    [rows] = CachedLM(toy).logits([Request(0, tokens, n_last)])
    assert np.array_equal(rows, expected(tokens, n_last))
    assert len(toy.decodes) == -(-length // n_batch) or length - n_last < n_batch
    assert sum(entry[1] for batch in toy.decodes for entry in batch) == n_last


def test_two_long_prompts_and_their_last_rows_in_one_decode() -> None:
    toy = context(n_batch=8)
    a, b = [i % 5 for i in range(20)], [i % 3 for i in range(15)]
    rows = CachedLM(toy).logits([Request(0, a, 2), Request(1, b, 3)])
    assert np.array_equal(rows[0], expected(a, 2))
    assert np.array_equal(rows[1], expected(b, 3))
    assert [n for _, n in toy.decodes[-1]] == [2, 3]


def test_prefill_gives_no_logits_and_counts_what_it_decoded() -> None:
    toy = context(n_batch=4)
    lm = CachedLM(toy)
    assert lm.prefill(0, [1, 2, 3, 4, 0]) == 5
    assert lm.prefill(0, [1, 2, 3, 4, 0]) == 0
    assert lm.prefill(0, [1, 2, 2]) == 1
    assert lm.prefill(0, []) == 0
    assert all(n == 0 for batch in toy.decodes for _, n in batch)
    assert lm.held(0) == ()
    assert toy.slots[0] == []


def test_a_failed_decode_forgets_the_sequence_and_the_next_request_starts_clean() -> None:
    toy = context()
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    toy.fail_decode = True
    with pytest.raises(DecodeError):
        lm.logits([Request(0, [1, 2, 3, 4])])
    toy.fail_decode = False
    assert lm.held(0) == ()
    [rows] = lm.logits([Request(0, [1, 2, 3, 4])])
    assert np.array_equal(rows, expected([1, 2, 3, 4], 1))


def test_a_failed_decode_of_several_sequences_forgets_them_all_even_if_clearing_fails() -> None:
    class Stuck(ToyContext):
        def clear(self, slot: int) -> None:
            if self.fail_decode:
                raise RollbackError("toy: cannot clear")
            super().clear(slot)

    toy = Stuck(MODEL, 5)
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2]), Request(1, [3])])
    toy.fail_decode = True
    with pytest.raises(RollbackError):
        lm.logits([Request(0, [1, 2, 3]), Request(1, [3, 4])])
    assert (lm.held(0), lm.held(1)) == ((), ())


def test_a_refused_rollback_raises_and_is_not_believed_to_have_happened() -> None:
    toy = context()
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    toy.refuse_rollback = True
    with pytest.raises(RollbackError):
        lm.logits([Request(0, [1, 4])])
    toy.refuse_rollback = False
    [rows] = lm.logits([Request(0, [1, 4])])
    assert np.array_equal(rows, expected([1, 4], 1))


def test_a_rollback_that_lies_is_noticed() -> None:
    class Liar(ToyContext):
        def truncate(self, slot: int, length: int) -> None:
            pass

    lm = CachedLM(Liar(MODEL, 5))
    lm.logits([Request(0, [1, 2, 3])])
    with pytest.raises(RollbackError, match="holds 3 tokens after it was cut to 1"):
        lm.logits([Request(0, [1, 4])])


def test_a_cache_that_cannot_roll_back_is_cleared_and_read_again() -> None:
    toy = context(can_rollback=False)
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    lm.logits([Request(0, [1, 2, 3, 4])])
    [rows] = lm.logits([Request(0, [1, 2, 0])])
    assert np.array_equal(rows, expected([1, 2, 0], 1))
    assert toy.decodes == [[(3, 1)], [(1, 1)], [(3, 1)]]


def test_snapshots_take_back_the_tentative_tokens_of_one_decode() -> None:
    toy = context(can_rollback=False, n_snapshots=3)
    lm = CachedLM(toy)
    lm.prefill(0, [1, 2])
    lm.logits([Request(0, [1, 2, 3, 4, 0], 3, 2)])
    [rows] = lm.logits([Request(0, [1, 2, 3, 1])])
    assert np.array_equal(rows, expected([1, 2, 3, 1], 1))
    assert toy.decodes == [[(2, 0)], [(3, 3)], [(1, 1)]]


def test_without_snapshots_a_checkpoint_is_gone_back_to() -> None:
    toy = context(can_rollback=False)
    lm = CachedLM(toy)
    lm.prefill(0, [1, 2])
    lm.logits([Request(0, [1, 2, 3, 4, 0], 3, 2)])
    assert lm.missing(0, [1, 2, 3, 4, 1]) == 3
    rows = lm.logits([Request(0, [1, 2, 3, 4, 1, 2], 2, 1)])[0]
    assert np.array_equal(rows, expected([1, 2, 3, 4, 1, 2], 2))
    # The rows of 3 and 4 are decoded again, together with what comes next.
    assert toy.decodes == [[(2, 0)], [(3, 3)], [(4, 2)]]


def test_a_draft_goes_back_to_where_its_proposal_began() -> None:
    toy = context(can_rollback=False)
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    for n, tokens in enumerate(([1, 2, 3, 4], [1, 2, 3, 4, 0]), 1):
        lm.logits([Request(0, tokens, 1, n)])
    [rows] = lm.logits([Request(0, [1, 2, 3, 4, 2])])
    assert np.array_equal(rows, expected([1, 2, 3, 4, 2], 1))
    assert toy.decodes == [[(3, 1)], [(1, 1)], [(1, 1)], [(2, 1)]]


def test_what_is_decoded_again_does_not_grow_without_end() -> None:
    toy = context(can_rollback=False, n_ctx=400, n_batch=64)
    lm = CachedLM(toy)
    text = [i * i % 5 for i in range(300)]
    lm.prefill(0, text[:3])
    n = 4
    while n < 290:
        wrong = [*text[:n], text[n], (text[n + 1] + 1) % 5, 0]
        lm.logits([Request(0, wrong, 4, 3)])
        n += 2
    rows = [sum(rows for rows, _ in decode) for decode in toy.decodes]
    assert max(rows) <= 8 + 2 + 4
    assert sum(rows) < 300 * 6


def test_an_earlier_prompt_is_gone_back_to() -> None:
    toy = context(can_rollback=False)
    lm = CachedLM(toy)
    prompt = [1, 2, 3, 4, 0, 1]
    lm.prefill(0, prompt)
    for n in range(3):
        lm.logits([Request(0, [*prompt, 2, *[3] * n], 1, n)])
    assert lm.prefill(0, [*prompt, 0, 0]) == 2


def test_a_draft_with_snapshots_goes_back_to_there_too() -> None:
    """They reach back within one decode, and a draft takes one for each token."""
    toy = context(can_rollback=False, n_snapshots=3)
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    for n, tokens in enumerate(([1, 2, 3, 4], [1, 2, 3, 4, 0]), 1):
        lm.logits([Request(0, tokens, 1, n)])
    lm.logits([Request(0, [1, 2, 3, 4, 2])])
    assert toy.decodes == [[(3, 1)], [(1, 1)], [(1, 1)], [(2, 1)]]


def fail(lm: CachedLM, toy: ToyContext) -> None:
    toy.fail_decode = True
    with pytest.raises(DecodeError):
        lm.logits([Request(0, [1, 2, 3, 4])])
    toy.fail_decode = False


@pytest.mark.parametrize(
    "leave",
    [
        lambda lm, toy: lm.forget(0),
        lambda lm, toy: lm.wipe(),
        lambda lm, toy: lm.restore(0, (4,), bytes([4])),
        fail,
    ],
    ids=["forgotten", "wiped", "restored", "failed"],
)
def test_no_checkpoint_outlives_its_text(leave: Callable[[CachedLM, ToyContext], None]) -> None:
    toy = context(can_rollback=False)
    lm = CachedLM(toy)
    lm.prefill(0, [1, 2, 3])
    leave(lm, toy)
    other = [4, 4, 4, 4, 0]
    lm.logits([Request(0, other)])
    [rows] = lm.logits([Request(0, [*other[:4], 1])])
    assert np.array_equal(rows, expected([*other[:4], 1], 1))
    assert toy.slots[0] == [*other[:4], 1]


def test_two_ends_of_prompts_are_kept_and_one_place_in_an_answer() -> None:
    kept = Checkpoints()
    for length in range(1, 9):
        kept.add(0, length, length % 2 == 1, lambda: b"state")
    lengths = [kept.latest(0, length) for length in range(1, 9)]
    assert [c and c.length for c in lengths] == [None, None, None, None, 5, 5, 7, 8]


@pytest.mark.parametrize(("n_slots", "n_snapshots", "most"), [(1, 0, 64), (2, 0, 0), (1, 3, 3)])
def test_how_much_of_a_state_can_be_taken_back(n_slots: int, n_snapshots: int, most: int) -> None:
    lm = CachedLM(context(can_rollback=False, n_slots=n_slots, n_snapshots=n_snapshots))
    assert (lm.max_draft, lm.redoes) == (most, n_snapshots == 0)


def test_prompts_that_begin_together_share_decodes_and_those_that_begin_alike_are_copied() -> None:
    toy = context(n_batch=40)
    lm = CachedLM(toy)
    begin = [1, 2, 3, 4] * 5
    wanted = {
        2: [*begin, 0], 0: [0, 1, 2], 1: [*begin, 4, 4], 3: [2] * 12,
    }  # fmt: skip
    assert lm.prefill_together(wanted) == {0: 3, 1: 2, 2: 21, 3: 12}
    assert toy.decodes == [[(3, 0), (21, 0), (12, 0)], [(2, 0)]]
    assert {slot: toy.slots[slot] for slot in wanted} == wanted
    assert {slot: list(lm.held(slot)) for slot in wanted} == wanted


def test_prompts_longer_than_a_batch_are_read_in_parts() -> None:
    toy = context(n_batch=5)
    lm = CachedLM(toy)
    wanted = {0: [1] * 7, 1: [2] * 4, 2: [], 3: [3]}
    assert lm.prefill_together(wanted) == {0: 7, 1: 4, 2: 0, 3: 1}
    assert [sum(n for n, _ in decode) for decode in toy.decodes] == [5, 5, 2]
    assert {slot: list(lm.held(slot)) for slot in wanted} == wanted


class Interrupting(ToyContext):
    """Raises KeyboardInterrupt at a given call, before or after its effect."""

    def __init__(self, when: int) -> None:
        super().__init__(MODEL, 5, n_batch=4)
        self._left = when

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        self._tick()
        logits = super().decode(batch)
        self._tick()
        return logits

    def truncate(self, slot: int, length: int) -> None:
        self._tick()
        super().truncate(slot, length)
        self._tick()

    def clear(self, slot: int) -> None:
        self._tick()
        super().clear(slot)
        self._tick()


def test_an_interrupt_at_any_moment_leaves_the_function_right() -> None:
    walks = [[1, 2, 3, 4, 0, 1], [1, 2, 3, 0], [1, 2, 3, 0, 4, 4], [2], [2, 1, 1]]
    when = 0
    interrupted = True
    while interrupted:
        when += 1
        lm = CachedLM(Interrupting(when))
        interrupted = False
        for tokens in walks:
            try:
                [rows] = lm.logits([Request(0, tokens)])
            except KeyboardInterrupt:
                interrupted = True
                [rows] = lm.logits([Request(0, tokens)])
            assert np.array_equal(rows, expected(tokens, 1)), (when, tokens)
    assert when > 15


class Overwriting(ToyContext):
    """A state without positions, which an interrupted decode leaves as something else."""

    interrupt = False

    def __init__(self) -> None:
        super().__init__(MODEL, 5, can_rollback=False)

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        if not self.interrupt:
            return super().decode(batch)
        for rows in batch:
            self.slots[rows.slot] = [0] * len(self.slots[rows.slot])
        raise KeyboardInterrupt


def test_an_interrupted_state_is_not_trusted_though_its_length_is_right() -> None:
    toy = Overwriting()
    lm = CachedLM(toy)
    lm.logits([Request(0, [1, 2, 3])])
    toy.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        lm.logits([Request(0, [1, 2, 3, 4])])
    toy.interrupt = False
    [rows] = lm.logits([Request(0, [1, 2, 3, 4])])
    assert np.array_equal(rows, expected([1, 2, 3, 4], 1))


@pytest.mark.parametrize(
    "kind", [{}, {"can_rollback": False}, {"can_rollback": False, "n_snapshots": 2}]
)
def test_what_is_held_is_what_the_context_holds_after_random_requests(
    kind: dict[str, Any],
) -> None:
    rng = random.Random(7)
    toy = context(n_batch=6, **kind)
    lm = CachedLM(toy)
    histories = [[0], [1]]
    for _ in range(500):
        slot = rng.randrange(2)
        tokens = histories[slot][: rng.randint(1, len(histories[slot]))]
        tokens = (tokens + [rng.randrange(5) for _ in range(rng.randint(0, 4))])[:40]
        n_last = rng.randint(1, min(3, len(tokens)))
        tentative = rng.randint(0, min(3, len(tokens)))
        missing = lm.missing(slot, tokens) if n_last == 1 else None
        before = lm.rows_decoded
        [rows] = lm.logits([Request(slot, tokens, n_last, tentative)])
        assert missing in (None, lm.rows_decoded - before)
        assert np.array_equal(rows, expected(tokens, n_last))
        assert list(lm.held(slot)) == toy.slots[slot] == tokens
        histories[slot] = tokens


def test_common_prefix_against_a_plain_loop() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        a = [rng.randrange(2) for _ in range(rng.randint(0, 9))]
        b = [rng.randrange(2) for _ in range(rng.randint(0, 9))]
        n = 0
        while n < min(len(a), len(b)) and a[n] == b[n]:
            n += 1
        assert common_prefix(a, b) == n
