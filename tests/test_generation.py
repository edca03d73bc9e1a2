"""Pair.generate: chunks, endings, statistics and interruptions, over toy models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from toys import Noisy, Table, ToyContext

from specllama import tuning
from specllama.drafting import Drafter, ModelDrafter, NullDrafter
from specllama.errors import UsageError
from specllama.generation import Chunk, Pair, Stats
from specllama.lm import CachedLM, LogitRows, Rows
from specllama.lookahead import FixedLength
from specllama.sampling import SamplingParams
from specllama.tuning import Speculation

GREEDY = SamplingParams(temperature=0)
# é in two tokens, an end token, and a control token that prints nothing.
PIECES = [b"a", b"b", b"\n", b"User", b"\xc3", b"\xa9", b"", b""]
END, MARK = 6, 7


class Letters:
    """A tokenizer of eight tokens."""

    name = "letters.gguf"
    n_vocab = 8
    end_tokens = frozenset({END})

    def __init__(self, bos: int | None = 0) -> None:
        self.bos = bos

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        if special and text == "<mark>":
            return [MARK]
        return [0 for _ in text]

    def piece(self, token: int) -> bytes:
        return PIECES[token]


class Script:
    """A model that is sure of one text, after any prompt of one token."""

    n_vocab = 8

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        at = len(prefix) - 1
        row = np.full(8, 1e-6)
        row[self._tokens[at] if at < len(self._tokens) else 0] = 1
        return row


def pair(
    target: Callable[[tuple[int, ...]], np.ndarray[tuple[int], np.dtype[np.float64]]],
    n_draft: int = 0,
    *,
    draft: object = None,
    n_ctx: int = 64,
    bos: int | None = 0,
    context: ToyContext | None = None,
) -> Pair:
    drafter: Drafter = NullDrafter()
    if n_draft:
        small = ToyContext(draft or target, 8, n_ctx=n_ctx)  # type: ignore[arg-type]
        drafter = ModelDrafter(CachedLM(small), FixedLength(n_draft), 8)
    lm = CachedLM(context or ToyContext(target, 8, n_ctx=n_ctx))
    return Pair(lm, Letters(bos), Speculation(drafter, "toy"), "block", n_tokens=8)


def read(chunks: Iterator[Chunk]) -> tuple[str, list[int], Chunk]:
    seen = list(chunks)
    assert all(chunk.finish_reason is None for chunk in seen[:-1])
    assert all(chunk.stats is seen[-1].stats for chunk in seen)
    assert seen[-1].finish_reason is not None
    text = "".join(chunk.text for chunk in seen)
    return text, [token.id for chunk in seen for token in chunk.tokens], seen[-1]


def stats_of(last: Chunk) -> Stats:
    assert last.stats is not None
    return last.stats


DRAFTS = pytest.mark.parametrize("n_draft", [0, 1, 3, 8])


@DRAFTS
def test_the_end_token_ends_the_answer_and_nothing_follows_it(n_draft: int) -> None:
    text, tokens, last = read(pair(Script(0, 1, 0, END, 1, 1, 1, 1), n_draft).generate([0], GREEDY))
    assert (text, tokens) == ("aba", [0, 1, 0])
    assert (last.finish_reason, last.finish_detail) == ("stop", "end token")


@DRAFTS
def test_the_end_token_at_once_gives_an_empty_answer(n_draft: int) -> None:
    text, tokens, last = read(pair(Script(END, 1, 1), n_draft).generate([0], GREEDY))
    assert (text, tokens, last.finish_reason) == ("", [], "stop")
    assert stats_of(last).predicted_n == 0


@DRAFTS
def test_an_end_token_that_the_target_rejects_ends_nothing(n_draft: int) -> None:
    always_ending = Script(*[END] * 60)
    script = Script(0, 1, 0, 1, 1, END)
    text, _, last = read(pair(script, n_draft, draft=always_ending).generate([0], GREEDY))
    assert (text, last.finish_reason) == ("ababb", "stop")


@DRAFTS
def test_ignore_eos_never_emits_an_end_token(n_draft: int) -> None:
    generated = pair(Script(0, END, 1), n_draft).generate(
        [0], GREEDY, max_tokens=9, ignore_eos=True
    )
    _, tokens, last = read(generated)
    assert END not in tokens
    assert (len(tokens), last.finish_detail) == (9, "token limit")


@DRAFTS
@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        pytest.param(["\nUser"], "ab", [0, 1], id="over two tokens"),
        pytest.param(["b\nUserb"], "a", [0], id="over four tokens"),
        pytest.param(["\nU"], "ab", [0, 1], id="ends inside a token"),
        pytest.param(["ser"], "ab\nU", [0, 1, 2, 3], id="begins inside a token"),
        pytest.param(["\nUserX", "\nUser"], "ab", [0, 1], id="one begins with another"),
        pytest.param(["\nUsers", "zz"], "ab\nUserb", [0, 1, 2, 3, 1], id="a near miss"),
        pytest.param(["a"], "", [], id="at once"),
    ],
)
def test_stop_strings(n_draft: int, stops: list[str], text: str, tokens: list[int]) -> None:
    generated = pair(Script(0, 1, 2, 3, 1, END), n_draft).generate([0], GREEDY, stop=stops)
    got_text, got_tokens, last = read(generated)
    assert (got_text, got_tokens) == (text, tokens)
    assert last.finish_reason == "stop"
    assert stats_of(last).predicted_n == len(tokens)


@DRAFTS
def test_a_control_token_given_as_stop_text_stops(n_draft: int) -> None:
    generated = pair(Script(0, 1, MARK, 1, 1), n_draft).generate([0], GREEDY, stop=["<mark>"])
    text, tokens, last = read(generated)
    assert (text, tokens, last.finish_detail) == ("ab", [0, 1], "stop string")


@DRAFTS
def test_a_control_token_prints_nothing(n_draft: int) -> None:
    text, tokens, _ = read(pair(Script(0, MARK, 1, END), n_draft).generate([0], GREEDY))
    assert (text, tokens) == ("ab", [0, MARK, 1])


@DRAFTS
def test_a_character_in_two_tokens_arrives_whole(n_draft: int) -> None:
    chunks = list(pair(Script(0, 4, 5, 1, END), n_draft).generate([0], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == "aéb"
    assert all("\ufffd" not in chunk.text for chunk in chunks)


@DRAFTS
def test_a_character_cut_by_the_limit_is_dropped_and_its_token_counted(n_draft: int) -> None:
    text, tokens, last = read(pair(Script(0, 4, 5), n_draft).generate([0], GREEDY, max_tokens=2))
    assert (text, tokens, stats_of(last).predicted_n) == ("a", [0, 4], 2)


@DRAFTS
@pytest.mark.parametrize("limit", [0, 1, 2, 7])
def test_the_token_limit(n_draft: int, limit: int) -> None:
    text, tokens, last = read(pair(Script(), n_draft).generate([0], GREEDY, max_tokens=limit))
    assert (text, len(tokens)) == ("a" * limit, limit)
    assert (last.finish_reason, last.finish_detail) == ("length", "token limit")


@DRAFTS
@pytest.mark.parametrize("max_tokens", [None, -1, 10**9])
@pytest.mark.parametrize("n_prompt", [1, 5, 9, 10, 11])
def test_the_context_limit(n_draft: int, max_tokens: int | None, n_prompt: int) -> None:
    generated = pair(Script(), n_draft, n_ctx=12).generate(
        [0] * n_prompt, GREEDY, max_tokens=max_tokens
    )
    _, tokens, last = read(generated)
    assert len(tokens) == 12 - n_prompt
    assert (last.finish_reason, last.finish_detail) == ("length", "context full")


@pytest.mark.parametrize("n_prompt", [12, 13, 120])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(n_prompt: int) -> None:
    with pytest.raises(UsageError, match=rf"{n_prompt} tokens and the context holds 12"):
        pair(Script(), 3, n_ctx=12).generate([0] * n_prompt)


def test_an_empty_prompt_starts_from_bos_or_is_refused() -> None:
    _, tokens, last = read(pair(Script(1, END)).generate("", GREEDY))
    assert (tokens, stats_of(last).prompt_n) == ([1], 1)
    with pytest.raises(UsageError, match="the prompt is empty"):
        pair(Script(), bos=None).generate("")


@pytest.mark.parametrize("token", [-1, 8, 10**9])
def test_an_unknown_token_id_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=f"token id {token}"):
        pair(Script()).generate([0, token])


def test_wrong_requests_are_refused_before_the_first_token() -> None:
    ready = pair(Script())
    with pytest.raises(UsageError, match="max_tokens"):
        ready.generate([0], max_tokens=-2)
    with pytest.raises(TypeError, match="not bytes"):
        ready.generate(b"a")
    with pytest.raises(TypeError):
        ready.generate([0.5])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        ready.generate([0], max_tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the logit bias names token id 8"):
        ready.generate([0], SamplingParams(logit_bias={8: 1.0}))
    with pytest.raises(UsageError, match="stop string"):
        ready.generate([0], stop=[""])


def test_statistics_of_a_scripted_run() -> None:
    # Drafts of 3 over "aba" + end: the draft says "aab...", so the first round keeps one of three.
    target = Script(0, 1, 0, 1, 1, END)
    draft = Script(0, 0, 0, 1, 1, 0, 0, 0)
    _, tokens, last = read(pair(target, 3, draft=draft).generate([0], GREEDY, seed=5))
    stats = stats_of(last)
    assert tokens == [0, 1, 0, 1, 1]
    # Round 1: a kept, a replaced by b. Round 2: a, b, b kept, then the end token as bonus.
    assert (stats.rounds, stats.draft_n, stats.draft_n_accepted) == (2, 6, 4)
    assert (stats.corrected_n, stats.bonus_n, stats.discarded) == (1, 1, 1)
    assert stats.by_position == [(2, 2), (2, 1), (2, 1)]
    assert stats.predicted_n == stats.draft_n_accepted + stats.rounds - stats.discarded == 5
    assert stats.acceptance == pytest.approx(4 / 6)
    assert stats.tokens_per_round == 3
    assert (stats.seed, stats.drafter, stats.verifier) == (5, "toy", "block")
    assert stats.prompt_n == 1


@DRAFTS
@pytest.mark.parametrize("seed", range(5))
def test_the_counts_agree_with_each_other(n_draft: int, seed: int) -> None:
    target = Table(8, seed=seed)
    generated = pair(target, n_draft, draft=Noisy(target, 50 + seed)).generate(
        [0], SamplingParams(temperature=1), max_tokens=30, stop=["ab"], seed=seed
    )
    _, tokens, last = read(generated)
    stats = stats_of(last)
    assert stats.predicted_n == len(tokens)
    assert stats.predicted_n == stats.draft_n_accepted + stats.rounds - stats.discarded
    assert stats.draft_n_accepted <= stats.draft_n <= n_draft * stats.rounds
    assert stats.corrected_n + stats.bonus_n == stats.rounds
    assert sum(kept for _, kept in stats.by_position) == stats.draft_n_accepted
    assert math.isnan(stats.acceptance) == (stats.draft_n == 0)


def test_provenance() -> None:
    target, draft = Script(0, 1, 0, 1, END), Script(0, 0, 0, 1)
    chunks = list(pair(target, 3, draft=draft).generate([0], GREEDY))
    seen = [(t.id, t.provenance) for chunk in chunks for t in chunk.tokens]
    assert seen == [(0, "accepted"), (1, "corrected"), (0, "accepted"), (1, "accepted")]


def test_a_seed_gives_its_text_again_and_no_seed_another() -> None:
    target = Table(8, seed=3)
    ready = pair(target, 3, draft=Noisy(target, 4))
    params = SamplingParams(temperature=1)

    def text(seed: int | None) -> tuple[int, ...]:
        chunks = ready.generate([0], params, max_tokens=20, seed=seed, ignore_eos=True)
        return tuple(read(chunks)[1])

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(10)}) >= 9
    assert text(None) != text(None)


def test_a_conversation_decodes_only_what_is_new() -> None:
    toy = ToyContext(Script(), 8)
    ready = pair(Script(), context=toy)
    _, tokens, last = read(ready.generate([0, 1, 2], GREEDY, max_tokens=4))
    assert stats_of(last).prompt_cached_n == 0
    _, _, last = read(ready.generate([0, 1, 2, *tokens, 3, 3], GREEDY, max_tokens=1))
    # The last token of the answer was never decoded; with it come the new ones, less the last.
    assert stats_of(last).prompt_cached_n == 6
    assert toy.decodes[-2:] == [[(2, 0)], [(1, 1)]]


class Failing(ToyContext):
    """Raises at the n-th call of decode or truncate, before or after its effect."""

    def __init__(self, model: Table | Noisy, error: type[BaseException], when: int) -> None:
        super().__init__(model, 8)
        self._error, self._left = error, when

    def disarm(self) -> None:
        self._left = 0

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        self._tick()
        rows = super().decode(batch)
        self._tick()
        return rows

    def truncate(self, slot: int, length: int) -> None:
        self._tick()
        super().truncate(slot, length)
        self._tick()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_after_an_exception_at_any_step_the_next_answer_is_a_fresh_ones(
    error: type[BaseException], side: str
) -> None:
    target = Table(8, seed=5)
    params = SamplingParams(temperature=1)

    def build(when: int) -> tuple[Pair, Failing, Failing]:
        big = Failing(target, error, when if side == "target" else 0)
        small = Failing(Noisy(target, 6), error, when if side == "draft" else 0)
        drafter = ModelDrafter(CachedLM(small), FixedLength(2), 8)
        speculation = Speculation(drafter, "toy")
        return Pair(CachedLM(big), Letters(), speculation, "block", n_tokens=8), big, small

    def answer(ready: Pair, prompt: Sequence[int], seed: int) -> tuple[str, list[int]]:
        chunks = ready.generate(prompt, params, max_tokens=12, seed=seed, ignore_eos=True)
        return read(chunks)[:2]

    fresh = answer(build(0)[0], [0, 1], 2)
    when, failed = 0, True
    while failed:
        when += 1
        ready, big, small = build(when)
        failed = False
        try:
            answer(ready, [0, 2, 2], 1)
        except error:
            failed = True
        big.disarm()
        small.disarm()
        assert answer(ready, [0, 1], 2) == fresh
    assert when > 15


@pytest.mark.parametrize("steps", range(6))
def test_after_abandoning_the_iterator_the_next_answer_is_a_fresh_ones(steps: int) -> None:
    target = Table(8, seed=5)
    params = SamplingParams(temperature=1)
    fresh = read(
        pair(target, 2, draft=Noisy(target, 6)).generate([0, 1], params, max_tokens=12, seed=2)
    )[:2]
    ready = pair(target, 2, draft=Noisy(target, 6))
    chunks = ready.generate([0, 1, 1], params, max_tokens=12, seed=1)
    for _ in range(steps):
        next(chunks, None)
    assert read(ready.generate([0, 1], params, max_tokens=12, seed=2))[:2] == fresh


def test_two_answers_read_in_turns_do_not_disturb_each_other() -> None:
    target = Table(8, seed=5)
    params = SamplingParams(temperature=1)
    ready = pair(target, 2, draft=Noisy(target, 6))
    alone = [read(ready.generate([0, i], params, max_tokens=12, seed=i))[0] for i in range(2)]
    running = [ready.generate([0, i], params, max_tokens=12, seed=i) for i in range(2)]
    texts = ["", ""]
    for _ in range(30):
        for i, chunks in enumerate(running):
            texts[i] += next(chunks, Chunk("")).text
    assert texts == alone


def test_close_runs_once_even_in_a_with_block() -> None:
    closed = []
    lm = CachedLM(ToyContext(Script(), 8))
    ready = Pair(lm, Letters(), tuning.plain(), n_tokens=8, close=lambda: closed.append(1))
    with ready:
        pass
    assert closed == [1]
