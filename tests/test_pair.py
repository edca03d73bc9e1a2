"""The engine on real llama.cpp contexts with tiny models: rollback, edges of the context, endings.

The caches are float32 and flash attention is off, which makes the logits of a row nearly
independent of how many rows are decoded with it; the tiny models' margins are far larger.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from caches import check_caches
from rounding import assert_close, assert_plain
from tiny import tiny

from specllama import llama, vocabulary
from specllama.acceptance import VERIFIERS, overlap, verify_block
from specllama.drafting import Drafter, ModelDrafter, NullDrafter, SequenceState
from specllama.errors import InvalidLogits, RollbackError, UsageError
from specllama.generation import Chunk, Pair
from specllama.lm import CachedLM, Request
from specllama.loading import load
from specllama.lookahead import FixedLength
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator
from specllama.tuning import Speculation

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
PROMPT = "Once upon a time, in a land far away"
VERIFY = pytest.mark.parametrize("verifier", ["block", "token"])


@functools.cache
def model(path: Path) -> llama.Model:
    return llama.Model(path)


class Opened:
    """A pair over real contexts, with what a test wants to look at."""

    def __init__(self, pair: Pair, target: CachedLM, drafter: Drafter) -> None:
        self.pair, self.target, self.drafter = pair, target, drafter

    def answer(
        self,
        prompt: str | Sequence[int] = PROMPT,
        params: SamplingParams = GREEDY,
        max_tokens: int | None = 60,
        stop: Sequence[str] = (),
        seed: int = 1,
        ignore_eos: bool = False,
    ) -> tuple[list[int], str, Chunk]:
        chunks = list(
            self.pair.generate(
                prompt,
                params,
                max_tokens=max_tokens,
                stop=stop,
                seed=seed,
                ignore_eos=ignore_eos,
            )
        )
        tokens = [token.id for chunk in chunks for token in chunk.tokens]
        return tokens, "".join(chunk.text for chunk in chunks), chunks[-1]


@contextmanager
def opened(
    target: Path,
    draft: Path | None = None,
    n_draft: int = 3,
    *,
    verifier: str = "block",
    n_ctx: int = 512,
    n_ctx_draft: int | None = None,
    n_batch: int = 128,
    exact: bool = True,
) -> Iterator[Opened]:
    with ExitStack() as stack:

        def lm(of: llama.Model, size: int) -> CachedLM:
            context = llama.Context(
                of,
                n_ctx=size,
                n_batch=n_batch,
                kv_type="f32" if exact else "f16",
                flash_attention=False if exact else None,
            )
            return CachedLM(stack.enter_context(context))

        big = model(target)
        drafter: Drafter = NullDrafter()
        if draft is not None:
            small = model(draft)
            shared = vocabulary.require_compatible(big.tokenizer, small.tokenizer)
            drafter = ModelDrafter(lm(small, n_ctx_draft or n_ctx), FixedLength(n_draft), shared)
        target_lm = lm(big, n_ctx)
        n_tokens = vocabulary.real_tokens(big.tokenizer)
        speculation = Speculation(drafter, "test")
        pair = Pair(target_lm, big.tokenizer, speculation, verifier, n_tokens=n_tokens)
        yield Opened(pair, target_lm, drafter)


def check(
    tokens: Sequence[int],
    target: Path,
    prompt: str | Sequence[int] = PROMPT,
    params: SamplingParams = GREEDY,
    **options: object,
) -> None:
    """The tokens are those of plain decoding."""
    expected = plain(target, prompt, params=params, **options)
    if isinstance(prompt, str):
        prompt = model(target).tokenizer.encode(prompt, special=True, add_special=True)
    assert_plain(tokens, expected, target, prompt, params)


def plain(target: Path, prompt: str | Sequence[int] = PROMPT, **options: object) -> list[int]:
    sizes = {name: options.pop(name) for name in ("n_ctx", "n_batch") if name in options}
    with opened(target, **sizes) as ready:  # type: ignore[arg-type]
        return ready.answer(prompt, **options)[0]  # type: ignore[arg-type]


@VERIFY
@pytest.mark.parametrize("n_draft", [1, 2, 4, 8])
def test_the_target_as_its_own_draft(verifier: str, n_draft: int) -> None:
    target = tiny("attention")
    with opened(target, target, n_draft, verifier=verifier) as ready:
        tokens, _, last = ready.answer(max_tokens=300)
        check(tokens, target, max_tokens=300)
        assert last.stats is not None
        assert last.stats.draft_n_accepted == last.stats.draft_n > 0


@VERIFY
@pytest.mark.parametrize("kind", ["attention", "swa"])
@pytest.mark.parametrize("noise", [0.05, 0.2, 2.0])
def test_greedy_text_with_a_draft_is_greedy_text_without(
    verifier: str, kind: str, noise: float
) -> None:
    """Drafts from good to useless: rounds that keep all, some and none of them."""
    target, draft = tiny(kind), tiny(kind, noise=noise)
    with opened(target, draft, 4, verifier=verifier) as ready:
        tokens, _, last = ready.answer(max_tokens=200)
        check(tokens, target, max_tokens=200)
        assert last.stats is not None
        assert last.stats.draft_n_accepted < last.stats.draft_n


def test_a_window_that_is_long_full() -> None:
    """Sliding window of 32, prompt of three windows, 300 tokens, draft length 8."""
    target, draft = tiny("swa"), tiny("swa", noise=0.05)
    prompt = (PROMPT + ". ") * 8
    with opened(target, draft, 8) as ready:
        assert len(model(target).tokenizer.encode(prompt, special=True, add_special=True)) > 96
        tokens, _, _ = ready.answer(prompt, max_tokens=300)
    check(tokens, target, prompt, max_tokens=300)


def test_caches_hold_what_the_loop_believes_after_every_round() -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.1)
    with opened(target, draft, 4) as ready:
        speculator = Speculator(ready.target, ready.drafter, verify_block, 397)
        prompt = model(target).tokenizer.encode(PROMPT, special=True, add_special=True)
        state = SequenceState(0, prompt, PLAIN, Streams.seeded(3), 200)
        kept = []
        while state.n_left > 0:
            before = list(state.tokens)
            [outcome] = speculator.round([state])
            kept.append(outcome.accepted)
            check_caches(speculator, before, outcome)
    assert {0, 1, 2, 3, 4} <= set(kept)


@pytest.mark.parametrize("kind", ["attention", "swa"])
def test_three_turns_of_a_conversation(kind: str) -> None:
    target, draft = tiny(kind), tiny(kind, noise=0.1)
    tokenizer = model(target).tokenizer
    with opened(target, draft, 4) as ready:
        history = tokenizer.encode(PROMPT, special=True, add_special=True)
        known = 0
        for turn in range(3):
            tokens, _, last = ready.answer(history, max_tokens=40)
            check(tokens, target, history, max_tokens=40)
            assert last.stats is not None
            # Of the last answer, only its last token was not decoded yet.
            assert last.stats.prompt_cached_n >= known - 1
            known = len(history) + len(tokens)
            new = tokenizer.encode(f" and turn {turn}", special=False, add_special=False)
            history = [*history, *tokens, *new]


@pytest.mark.parametrize("room", range(1, 21))
def test_the_draft_fits_into_the_free_cells(room: int) -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.02)
    prompt = [10 + i % 50 for i in range(256 - room)]
    with opened(target, draft, 16, n_ctx=256) as ready:
        tokens, _, last = ready.answer(prompt, max_tokens=None, ignore_eos=True)
    assert len(tokens) == room
    assert (last.finish_reason, last.finish_detail) == ("length", "context full")
    check(tokens, target, prompt, n_ctx=256, max_tokens=None, ignore_eos=True)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with (
        opened(tiny("attention"), n_ctx=256) as ready,
        pytest.raises(UsageError, match="256 tokens and the context holds 256"),
    ):
        ready.answer([10] * 256)


@pytest.mark.parametrize("n_ctx", [200, 256])
@pytest.mark.parametrize("n_batch", [32, 512])
@pytest.mark.parametrize("n_draft", [0, 3, 16])
def test_generation_to_the_very_end_of_the_context(n_ctx: int, n_batch: int, n_draft: int) -> None:
    target = tiny("attention")
    draft = tiny("attention", noise=0.05) if n_draft else None
    with opened(target, draft, n_draft, n_ctx=n_ctx, n_batch=n_batch) as ready:
        tokens, _, last = ready.answer(max_tokens=None, ignore_eos=True)
        prompt = model(target).tokenizer.encode(PROMPT, special=True, add_special=True)
    assert len(prompt) + len(tokens) == n_ctx
    assert (last.finish_reason, last.finish_detail) == ("length", "context full")


@pytest.mark.parametrize("n_prompt", [32, 33, 3 * 32 + 1])
def test_a_prompt_longer_than_the_batch(n_prompt: int) -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.05)
    prompt = [10 + i % 60 for i in range(n_prompt)]
    with opened(target, draft, 4, n_batch=32) as ready:
        tokens, _, _ = ready.answer(prompt)
    check(tokens, target, prompt, n_batch=32)


def test_a_draft_context_smaller_than_the_targets() -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.02)
    with opened(target, draft, 4, n_ctx=400, n_ctx_draft=60) as ready:
        tokens, _, last = ready.answer(max_tokens=100)
    check(tokens, target, max_tokens=100)
    assert last.stats is not None
    assert last.stats.draft_n > 100  # it goes on when its context is full


@pytest.mark.parametrize(
    ("target_pad", "draft_pad"), [(64, 0), (0, 64), (0, 128), (0, 1024), (128, 0)]
)
def test_padded_vocabularies(target_pad: int, draft_pad: int) -> None:
    """Padding is likely in these files, so that it would be drawn at once if it could be."""
    target = tiny("attention", pad=target_pad, pad_bias=0.0)
    draft = tiny("attention", pad=draft_pad, pad_bias=0.0, noise=0.05)
    n_real = vocabulary.real_tokens(model(target).tokenizer)
    hot = SamplingParams(temperature=2, top_k=0, top_p=1, min_p=0)
    with opened(target, draft, 4) as ready:
        for seed in range(5):
            tokens, _, last = ready.answer(params=hot, max_tokens=200, seed=seed, ignore_eos=True)
            assert max(tokens) < n_real
            assert last.stats is not None
            assert last.stats.draft_n_accepted > 0


@pytest.mark.parametrize("n_draft", [0, 1, 8])
def test_an_end_token_inside_an_accepted_block(n_draft: int) -> None:
    base = tiny("attention")
    free = plain(base, max_tokens=60)
    # A token that the model really emits in the middle of its answer becomes its end token.
    end = next(t for i, t in enumerate(free) if i > 10 and t not in free[:i])
    target, draft = tiny("attention", eos=end), tiny("attention", eos=end, noise=0.01)
    with opened(target, draft if n_draft else None, n_draft) as ready:
        tokens, _, last = ready.answer()
        assert tokens == free[: free.index(end)]
        assert (last.finish_reason, last.finish_detail) == ("stop", "end token")
        tokens, _, last = ready.answer(ignore_eos=True)
        assert end not in tokens
        assert len(tokens) == 60


@pytest.mark.parametrize("n_draft", [0, 3])
def test_every_end_token_ends_an_answer(n_draft: int) -> None:
    target = tiny("attention", second_eot=True)
    draft = tiny("attention", second_eot=True, noise=0.05)
    ends = model(target).tokenizer.end_tokens
    assert len(ends) == 3
    with opened(target, draft if n_draft else None, n_draft) as ready:
        for end in ends:
            params = SamplingParams(temperature=0, logit_bias={end: 1000.0})
            tokens, _, last = ready.answer(params=params)
            assert (tokens, last.finish_detail) == ([], "end token")
            tokens, _, last = ready.answer(params=params, ignore_eos=True, max_tokens=20)
            assert (len(tokens), last.finish_detail) == (20, "token limit")
            assert ends.isdisjoint(tokens)


SURE = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, top_p=0.9),
    SamplingParams(temperature=1e-8),
    SamplingParams(temperature=1e-3),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=1, top_p=1e-9),
]


@VERIFY
@pytest.mark.parametrize("params", SURE)
@pytest.mark.filterwarnings("error")
def test_what_leaves_one_token_gives_one_text(verifier: str, params: SamplingParams) -> None:
    """And the target as its own draft is always right."""
    target = tiny("attention")
    with opened(target, target, 4, verifier=verifier) as ready:
        tokens, _, last = ready.answer(params=params, max_tokens=80)
        check(tokens, target, max_tokens=80)
        assert last.stats is not None
        assert last.stats.draft_n_accepted == last.stats.draft_n > 0
        check(ready.answer(params=params, max_tokens=80, seed=2)[0], target, max_tokens=80)


@pytest.mark.parametrize("n_draft", [0, 1, 8])
def test_a_stop_string_that_spans_an_accepted_block(n_draft: int) -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.01)
    with opened(target, draft if n_draft else None, n_draft) as ready:
        _, text, _ = ready.answer()
        stop = text[20:27]
        tokens, cut, last = ready.answer(stop=[stop])
        assert cut == text[: text.index(stop)]
        assert (last.finish_reason, last.finish_detail) == ("stop", "stop string")
        assert b"".join(map(model(target).tokenizer.piece, tokens)).decode().startswith(cut)


def test_a_draft_whose_logits_turn_nan_leaves_the_text_alone() -> None:
    target = tiny("attention")
    free = plain(target)
    # NaN once this token has been read, in the draft only.
    poison = free[len(free) // 2]
    with opened(target, tiny("attention", nan=poison), 3) as ready:
        tokens, _, last = ready.answer()
    assert tokens == free
    assert last.stats is not None
    assert last.stats.draft_failures > 0


@pytest.mark.parametrize("n_draft", [0, 3])
def test_a_target_whose_logits_are_nan_is_an_error(n_draft: int) -> None:
    target = tiny("attention", nan=-1)
    with (
        opened(target, tiny("attention") if n_draft else None, n_draft) as ready,
        pytest.raises(InvalidLogits, match="invalid logits at position"),
    ):
        ready.answer()


def test_penalties_at_temperature_zero() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=1.3, frequency_penalty=0.2)
    target, draft = tiny("attention"), tiny("attention", noise=0.02)
    with opened(target, draft, 4) as ready:
        tokens, _, last = ready.answer(params=params, max_tokens=120)
        check(tokens, target, params=params, max_tokens=120)
        assert tokens != plain(target, max_tokens=120)
        assert last.stats is not None
        assert last.stats.draft_n_accepted > 40


def test_a_rollback_that_fails_once_stops_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.2)
    with opened(target, draft, 4) as ready:
        real = llama.lib.llama_memory_seq_rm
        calls: list[int] = []

        def refuse_once(memory: object, slot: int, begin: int, end: int) -> bool:
            if begin > 0 and not calls:
                calls.append(begin)
                return False
            return bool(real(memory, slot, begin, end))

        monkeypatch.setattr(llama.lib, "llama_memory_seq_rm", refuse_once)
        with pytest.raises(RollbackError, match="cannot take back"):
            ready.answer()
        assert calls
        check(ready.answer()[0], target)


@VERIFY
def test_acceptance_is_the_overlap_of_the_two_laws(verifier: str) -> None:
    """Token rule: mean of sum min(p, q) at verified positions, within four standard errors."""
    target, draft = tiny("attention"), tiny("attention", noise=0.1)
    expected, accepted = [], []
    with opened(target, draft, 1, verifier=verifier) as ready:
        speculator = Speculator(ready.target, ready.drafter, VERIFIERS[verifier], 397)
        for seed in range(6):
            state = SequenceState(0, [10 + seed], PLAIN, Streams.seeded(seed), 150)
            while state.n_left > 1:
                [outcome] = speculator.round([state])
                [q], [p] = outcome.draft.laws, outcome.target_laws
                expected.append(overlap(p, q))
                accepted.append(outcome.accepted)
    difference = np.array(accepted) - np.array(expected)
    error = difference.std() / np.sqrt(len(difference))
    assert len(difference) > 400
    assert abs(difference.mean()) < 4 * error
    # A draft that fits this well but is not perfect, or the test would say nothing.
    assert 0.4 < np.mean(expected) < 0.9


def test_several_sequences_on_real_contexts() -> None:
    target, draft = tiny("attention"), tiny("attention", noise=0.1)
    prompts = [[20, 21], [30] * 9, [40, 41, 42]]
    with ExitStack() as stack:
        lms = [
            CachedLM(
                stack.enter_context(
                    llama.Context(
                        model(path), n_ctx=200, n_slots=3, kv_type="f32", flash_attention=False
                    )
                )
            )
            for path in (target, draft)
        ]
        drafter = ModelDrafter(lms[1], FixedLength(4), 397)
        speculator = Speculator(lms[0], drafter, verify_block, 397)
        states = [
            SequenceState(i, list(prompt), GREEDY, Streams.seeded(1, i), 40 + 5 * i)
            for i, prompt in enumerate(prompts)
        ]
        while active := [s for s in states if s.n_left > 0]:
            before = lms[0].rows_decoded
            rounds = speculator.round(active)
            if before:
                # At most as many rows for each as the longest draft needs, in one pass.
                rows = [r.proposed + 1 for r in rounds]
                assert sum(rows) <= lms[0].rows_decoded - before <= len(rows) * max(rows)
    for i, (state, prompt) in enumerate(zip(states, prompts, strict=True)):
        check(state.tokens[len(prompt) :], target, prompt, max_tokens=40 + 5 * i)


def test_asking_again_for_the_same_logits_is_bitwise_the_same() -> None:
    with opened(tiny("attention")) as ready:
        [first] = ready.target.logits([Request(0, [10, 11, 12])])
        kept = first.copy()
        [second] = ready.target.logits([Request(0, [10, 11, 12])])
        third = second.copy()
        [fourth] = ready.target.logits([Request(0, [10, 11, 12])])
        np.testing.assert_array_equal(third, fourth)
        assert_close(kept, third, atol=1e-4)


@pytest.mark.parametrize("drafter", ["model", "none"])
def test_a_loaded_pair_tells_its_draft_and_its_chat_template(drafter: str) -> None:
    target, draft = tiny(), tiny(seed=1)
    with load(model=target, draft=draft, drafter=drafter, draft_tokens=2) as pair:
        assert pair.chat_template is not None and "<|im_start|>" in pair.chat_template
        if drafter == "none":
            assert pair.draft is None and pair.draft_tokenizer is None
        else:
            assert pair.draft is not None and pair.draft.name == draft.name
            assert pair.draft_tokenizer is not None and pair.draft_tokenizer.name == draft.name


@pytest.mark.parametrize("option", ["gpu_layers", "gpu_layers_draft"])
def test_a_negative_number_of_layers_is_refused_but_for_all(option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} must be -1"):
        load(model=tiny(), **{option: -2})  # type: ignore[arg-type]
