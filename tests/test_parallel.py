"""Many answers at once: each is the answer that the row would have had alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from tiny import tiny
from toys import Noisy, Table, ToyContext

from specllama import llama
from specllama.drafting import Drafter, ModelDrafter, NullDrafter
from specllama.errors import DecodeError, InvalidLogits
from specllama.generation import Pair
from specllama.lm import CachedLM, LogitRows, Request, Rows, passes
from specllama.lookahead import FixedLength
from specllama.parallel import Answer, Job, Parallel
from specllama.sampling import SamplingParams
from specllama.tuning import Speculation

WARM = SamplingParams(temperature=1)


class Letters:
    """A tokenizer over ids that prints each as a letter; id 1 ends an answer."""

    name = "letters"
    bos: int | None = None
    end_tokens = frozenset({1})

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        return [ord(letter) % self.n_vocab for letter in text]

    def piece(self, token: int) -> bytes:
        return b"" if token == 1 else bytes([97 + token % 26])


def jobs(pair: Pair, prompts: Sequence[Sequence[int]], max_tokens: int = 40) -> list[Job[int]]:
    return [
        Job(f"row {i}", pair.question(prompt, WARM, max_tokens=max_tokens + i % 5), 7, i)
        for i, prompt in enumerate(prompts)
    ]


def texts(answers: Iterator[Answer[int]]) -> dict[int, str]:
    return {answer.job.source: answer.text for answer in answers}


def toy_pair(
    n_slots: int,
    make: Callable[[CachedLM], Drafter] = lambda _: NullDrafter(),
    context: type[ToyContext] = ToyContext,
) -> tuple[Pair, ToyContext]:
    model = Table(6, seed=1)
    toy = context(model, 6, n_slots=n_slots, n_ctx=100, is_split=n_slots > 1)
    draft = CachedLM(ToyContext(Noisy(model, 2), 6, n_slots=n_slots, n_ctx=100, is_split=True))
    speculation = Speculation(make(draft), "toy")
    return Pair(CachedLM(toy), Letters(6), speculation, n_tokens=6), toy


def drafting(draft: CachedLM) -> Drafter:
    return ModelDrafter(draft, FixedLength(3), 6)


PROMPTS = [[2 + i % 4, 3, 2 + i % 3] for i in range(23)]


@pytest.mark.parametrize("make", [lambda _: NullDrafter(), drafting], ids=["plain", "drafting"])
@pytest.mark.parametrize("n_slots", [1, 2, 5])
def test_a_row_has_the_answer_that_it_has_alone(
    make: Callable[[CachedLM], Drafter], n_slots: int
) -> None:
    alone, _ = toy_pair(1)
    wanted: dict[int, str] = {}
    for job in jobs(alone, PROMPTS):
        wanted |= texts(Parallel(alone).run(iter([job])))
    pair, _ = toy_pair(n_slots, make)
    assert texts(Parallel(pair).run(iter(jobs(pair, PROMPTS)))) == wanted
    assert len(set(wanted.values())) > 15


def test_the_id_and_the_seed_are_the_key_of_the_randomness() -> None:
    pair, _ = toy_pair(2)
    question = pair.question([2, 3], WARM, max_tokens=30, ignore_eos=True)
    keys = [("a", 1), ("b", 1), ("a", 2), ("a", 1)]
    answers = texts(
        Parallel(pair).run(Job(name, question, seed, i) for i, (name, seed) in enumerate(keys))
    )
    assert answers[0] == answers[3]
    assert len({answers[0], answers[1], answers[2]}) == 3


def test_a_finished_slot_takes_the_next_row_at_once() -> None:
    pair, toy = toy_pair(3)
    lengths = [2, 30, 2, 2, 2, 2, 2, 2]
    found = [
        Job(str(i), pair.question([2, 3], WARM, max_tokens=n, ignore_eos=True), 1, i)
        for i, n in enumerate(lengths)
    ]
    order = [answer.job.source for answer in Parallel(pair).run(iter(found))]
    assert order[-1] == 1 and sorted(order) == list(range(8))
    rounds = [decode for decode in toy.decodes if any(logits for _, logits in decode)]
    assert len(rounds) == 30  # the other seven are done beside the long one


def test_jobs_are_taken_one_by_one() -> None:
    pair, _ = toy_pair(2)
    taken = []

    def asked() -> Iterator[Job[int]]:
        for job in jobs(pair, PROMPTS):
            taken.append(job.source)
            yield job

    for n_done, _ in enumerate(Parallel(pair).run(asked()), 1):
        assert len(taken) <= n_done + 2


class Bad(ToyContext):
    """Some tokens make the model fail: 5 after 5 gives NaN, 4 after 4 does not decode."""

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        for rows in batch:
            held = [*self.slots.get(rows.slot, []), *rows.tokens]
            if held[:2] == [4, 4]:
                raise DecodeError("toy: 4 4")
        given = super().decode(batch)
        for rows, logits in zip(batch, given, strict=True):
            if self.slots[rows.slot][:2] == [5, 5]:
                logits.flags.writeable = True
                logits[:] = np.nan
                logits.flags.writeable = False
        return given


@pytest.mark.parametrize("make", [lambda _: NullDrafter(), drafting], ids=["plain", "drafting"])
def test_a_row_that_fails_leaves_the_others_alone(make: Callable[[CachedLM], Drafter]) -> None:
    prompts = [[2, 3, 2], [5, 5, 2], [3, 3, 3], [4, 4, 2], [2, 2, 2], [5, 5, 5], [3, 2, 3]]
    alone, _ = toy_pair(1)
    wanted = texts(Parallel(alone).run(iter(jobs(alone, prompts))))
    pair, _ = toy_pair(3, make, Bad)
    answers = list(Parallel(pair).run(iter(jobs(pair, prompts))))
    errors = {a.job.source: type(a.error) for a in answers if a.error is not None}
    assert errors == {1: InvalidLogits, 3: DecodeError, 5: InvalidLogits}
    good = {a.job.source: a.text for a in answers if a.error is None}
    assert good == {i: wanted[i] for i in (0, 2, 4, 6)}


def test_an_answer_without_tokens_needs_no_slot() -> None:
    pair, toy = toy_pair(2)
    question = pair.question([2, 3], WARM, max_tokens=0)
    [answer] = Parallel(pair).run(iter([Job("a", question, 1, 0)]))
    assert (answer.text, answer.finish_detail) == ("", "token limit")
    assert toy.decodes == []


def test_statistics_add_up() -> None:
    pair, _ = toy_pair(4, drafting)
    for answer in Parallel(pair).run(iter(jobs(pair, PROMPTS))):
        stats = answer.stats
        assert stats.predicted_n == len(answer.tokens)
        assert stats.predicted_n == stats.draft_n_accepted + stats.rounds - stats.discarded
        assert 0 < stats.draft_n_accepted <= stats.draft_n or stats.predicted_n < 3
        assert stats.seed == 7 and stats.verifier == "coupled"


def test_a_shared_beginning_is_decoded_once() -> None:
    pair, toy = toy_pair(4)
    beginning = [2, 3, 4] * 10
    prompts = [[*beginning, 2 + i % 4, 3, 4] for i in range(12)]
    answers = list(Parallel(pair).run(iter(jobs(pair, prompts, max_tokens=4))))
    assert sum(a.stats.prompt_n - a.stats.prompt_cached_n for a in answers) < 30 + 12 * 5
    prefills = [decode for decode in toy.decodes if all(logits == 0 for _, logits in decode)]
    assert max(rows for decode in prefills[1:] for rows, _ in decode) < 5


# --- even passes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "counts, wanted",
    [
        ({0: 1, 1: 1, 2: 1}, 1),
        ({0: 3, 1: 3}, 1),
        ({0: 1, 2: 1}, 2),
        ({0: 2, 1: 1}, 2),
        ({0: 3, 1: 1, 2: 2}, 3),
        ({0: 1, 1: 3, 2: 1}, 2),
    ],
)
def test_passes_of_a_decode(counts: dict[int, int], wanted: int) -> None:
    assert passes([Rows(slot, 0, [0] * n, n) for slot, n in counts.items()]) == wanted


def test_a_decode_is_made_even_with_rows_that_are_held() -> None:
    toy = ToyContext(Table(6, seed=1), 6, n_slots=4, is_split=True)
    other = CachedLM(ToyContext(Table(6, seed=1), 6, n_slots=4))
    lm = CachedLM(toy)
    tokens = {slot: [2, 3, 4, 2, 3, slot] for slot in range(4)}
    for slot, each in tokens.items():
        lm.prefill(slot, each[:-1])
    requests = [Request(3, [*tokens[3], 5, 4], 3), Request(0, tokens[0]), Request(1, tokens[1])]
    found, wanted = lm.logits(requests), other.logits(requests)
    assert toy.decodes[-1] == [(3, 1), (3, 1), (3, 0), (3, 3)]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(list(lm.held(slot)) == toy.slots[slot] for slot in range(4))


def test_a_decode_that_would_need_many_rows_more_stays_uneven() -> None:
    toy = ToyContext(Table(6, seed=1), 6, n_slots=2, is_split=True)
    lm = CachedLM(toy)
    lm.prefill(0, [2] * 30)
    lm.prefill(1, [3] * 10)
    lm.logits([Request(0, [2] * 31), Request(1, [3] * 30)])
    assert toy.decodes[-1] == [(1, 1), (20, 1)]


# --- real contexts --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["attention", "swa", "hybrid", "recurrent"])
def test_real_contexts_at_any_parallelism(kind: str) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(llama.Model(tiny(kind)))
        small = stack.enter_context(llama.Model(tiny("attention", noise=0.1)))

        def opened(n_slots: int) -> Pair:
            def context(of: llama.Model) -> CachedLM:
                made = llama.Context(
                    of, n_ctx=200, n_slots=n_slots, n_outputs=32, kv_type="f32"
                )
                return CachedLM(stack.enter_context(made))

            target, drafter = context(model), NullDrafter()
            speculation = Speculation(drafter, "none")
            if kind == "attention":
                model_drafter = ModelDrafter(context(small), FixedLength(3), 397)
                speculation = Speculation(model_drafter, "model")
            return Pair(target, model.tokenizer, speculation, n_tokens=397)

        beginning = [20 + i % 50 for i in range(40)]
        prompts = [[*beginning, 30 + i, 31] for i in range(9)] + [[i, 21] for i in range(30, 36)]
        found = []
        for n_slots in (1, 3, 8):
            pair = opened(n_slots)
            answers = Parallel(pair).run(iter(jobs(pair, prompts, max_tokens=20)))
            found.append({a.job.source: (a.text, a.error) for a in answers})
        assert found[0] == found[1] == found[2]
        assert len(set(found[0].values())) == len(prompts)
