"""The default pair, SmolLM2-135M and its Q2_K copy: what is promised, on real weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from chance import chi_square

import specllama
from specllama.acceptance import VERIFIERS, overlap, verify_tokens
from specllama.drafting import ModelDrafter, NullDrafter, SequenceState
from specllama.errors import SpecllamaError
from specllama.generation import Chunk, Pair
from specllama.lm import CachedLM, LogitRows, Request
from specllama.loading import find_files
from specllama.lookahead import FixedLength
from specllama.sampling import SamplingParams, Streams, next_law
from specllama.speculation import Speculator

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
GREEDY = SamplingParams(temperature=0)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, a small robot",
]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    try:
        loaded = specllama.load("smollm2", ctx_size=1024, draft_tokens=3)
    except SpecllamaError as error:
        pytest.fail(f"the default pair is needed here, and scripts/check installs it: {error}")
    with loaded:
        yield loaded


def lms(pair: Pair) -> tuple[CachedLM, CachedLM]:
    assert isinstance(pair.speculation.drafter, ModelDrafter)
    return pair.target, pair.speculation.drafter.lm


def prompt_tokens(pair: Pair, prompt: str) -> list[int]:
    return pair.tokenizer.encode(prompt, special=True, add_special=True)


def state(pair: Pair, prompt: str, params: SamplingParams, seed: int, n: int) -> SequenceState:
    return SequenceState(0, prompt_tokens(pair, prompt), params, Streams.seeded(seed), n)


def test_it_writes_english(pair: Pair) -> None:
    chunks = list(pair.generate(PROMPTS[0], GREEDY, max_tokens=8))
    assert "Paris" in "".join(chunk.text for chunk in chunks)
    stats = chunks[-1].stats
    assert stats is not None
    assert stats.draft_n_accepted > 0


@pytest.mark.parametrize("params", [PLAIN, SamplingParams()], ids=["plain", "defaults"])
def test_measured_acceptance_is_the_mean_overlap(pair: Pair, params: SamplingParams) -> None:
    """Token rule, over all tested positions: kept or not against sum min(p, q)."""
    target, draft = lms(pair)
    speculator = Speculator(
        target, ModelDrafter(draft, FixedLength(3), 49152), verify_tokens, 49152
    )
    kept, expected = [], []
    for seed, prompt in enumerate(PROMPTS * 2):
        s = state(pair, prompt, params, seed, 60)
        while s.n_left > 0:
            [outcome] = speculator.round([s])
            for i, p in enumerate(outcome.target_laws):
                kept.append(i < outcome.accepted)
                expected.append(overlap(p, outcome.draft.laws[i]))
    difference = np.array(kept, float) - np.array(expected)
    standard_error = difference.std() / np.sqrt(len(difference))
    assert len(difference) > 200
    assert abs(difference.mean()) < 4 * standard_error
    assert 0.5 < np.mean(expected) < 0.95


def width_noise(lm: CachedLM, tokens: list[int], width: int) -> float:
    """Largest difference between logits decoded `width` rows at a time and one at a time."""
    largest = 0.0
    lm.forget(0)
    for end in range(len(tokens) - 4 * width, len(tokens) - width, width):
        [wide] = lm.logits([Request(0, tokens[:end], width)])
        rows = wide.copy()
        for i in range(width):
            [narrow] = lm.logits([Request(0, tokens[: end - width + i + 1])])
            largest = max(largest, float(np.abs(narrow[0] - rows[i]).max()))
    return largest


@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_target_as_its_own_draft_at_temperature_zero(
    pair: Pair, verifier: str, prompt: str
) -> None:
    """All is accepted and the text is plain decoding's, except at ties below the width noise."""
    target, _ = lms(pair)
    files = find_files("smollm2")
    n_tokens = 60
    with specllama.load(
        model=files.target, draft=files.target, draft_tokens=4, verifier=verifier, ctx_size=512
    ) as twins:
        chunks = list(twins.generate(prompt, GREEDY, max_tokens=n_tokens))
    stats = chunks[-1].stats
    assert stats is not None
    tokens = [token.id for chunk in chunks for token in chunk.tokens]
    plain = Speculator(target, NullDrafter(), verify_tokens, 49152)
    s = state(pair, prompt, GREEDY, 1, n_tokens)
    begin = len(s.tokens)
    while s.n_left > 0:
        plain.round([s])
    margins = fork_margins(target, s.tokens[:begin], tokens, s.tokens[begin:])
    noise = width_noise(target, s.tokens, 5)
    assert all(margin <= 2 * noise for margin in margins), (margins, noise)
    # A rejection is such a tie too: where there is none, every drafted token was kept.
    if not margins:
        assert stats.draft_n_accepted == stats.draft_n > 0


def fork_margins(
    lm: CachedLM, prompt: Sequence[int], ours: Sequence[int], plain: Sequence[int]
) -> list[float]:
    """Plain decoding's margin between its two best logits where the texts part, if they do."""
    for i, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            [row] = lm.logits([Request(0, [*prompt, *plain[:i]])])
            best, second = np.sort(row[0])[::-1][:2]
            return [float(best - second)]
    return []


class Memo(CachedLM):
    """Remembers the rows of every request, so that many rounds after one prompt cost few decodes.

    A row depends on its prefix and, in the last bits, on the number of rows decoded with it; both
    are in the key, so what is remembered is what would be decoded again.
    """

    def __init__(self, inner: CachedLM) -> None:
        super().__init__(inner._context)
        self._rows: dict[tuple[tuple[int, ...], int], LogitRows] = {}

    def logits(self, requests: Sequence[Request]) -> list[LogitRows]:
        [request] = requests
        key = (tuple(request.tokens), request.n_last)
        if key not in self._rows:
            [rows] = super().logits(requests)
            self._rows[key] = rows.copy()
        return [self._rows[key]]


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_the_first_two_tokens_follow_the_targets_law(pair: Pair, verifier: str) -> None:
    """Chi-square at temperature 1 after a fixed prompt; both sides use rows of one width.

    4,000 answers and at most 16 cells: a law that is off by a total variation distance of 0.09
    adds 130 to the statistic, which is beyond the limit.
    """
    params = SamplingParams(temperature=1, top_k=4, top_p=1, min_p=0)
    for lm in lms(pair):
        lm.forget(0)  # its context is lent to another mirror
    target, draft = (Memo(lm) for lm in lms(pair))
    prompt = prompt_tokens(pair, "My favourite animal is")
    speculator = Speculator(
        target, ModelDrafter(draft, FixedLength(2), 49152), VERIFIERS[verifier], 49152
    )
    n, counts, accepted = 4000, Counter[tuple[int, ...]](), 0
    for seed in range(n):
        s = SequenceState(0, list(prompt), params, Streams.seeded(seed), 3)
        while len(s.tokens) < len(prompt) + 2:
            accepted += speculator.round([s])[0].accepted
        counts[tuple(s.tokens[len(prompt) : len(prompt) + 2])] += 1
    for lm in (target, draft):
        lm.forget(0)
    statistic, limit = chi_square(*pooled(counts, first_two_law(target, prompt, params), n))
    assert statistic < limit
    assert 0.1 * n < accepted < 1.9 * n


def first_two_law(
    lm: CachedLM, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The target's law of two tokens, from rows decoded three at a time as in the rounds."""

    def law_after(tokens: list[int], row: int) -> dict[int, float]:
        padded = [*tokens, *[prompt[-1]] * (2 - row)]
        [rows] = lm.logits([Request(0, padded, 3)])
        law = next_law(rows[row], params)
        assert law.ids is not None
        return dict(zip(law.ids.tolist(), law.probs.tolist(), strict=True))

    return {
        (a, b): first * second
        for a, first in law_after(prompt, 0).items()
        for b, second in law_after([*prompt, a], 1).items()
    }


def pooled(
    counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], n: int
) -> tuple[dict[str, int], dict[str, float]]:
    """Counts and law with all cells that expect fewer than 25 draws in one."""
    name: Callable[[tuple[int, ...]], str] = lambda c: str(c) if law[c] * n >= 25 else "rest"  # noqa: E731
    assert set(counts) <= set(law)
    seen, expected = Counter[str](), Counter[str]()
    for cell, prob in law.items():
        expected[name(cell)] += prob  # type: ignore[assignment]
        seen[name(cell)] += counts[cell]
    if 0 < expected["rest"] * n < 25:
        smallest = min((c for c in expected if c != "rest"), key=lambda c: expected[c])
        expected[smallest] += expected.pop("rest")
        seen[smallest] += seen.pop("rest")
    return dict(seen), {cell: float(prob) for cell, prob in expected.items() if prob > 0}


def test_a_seed_gives_its_text_again(pair: Pair) -> None:
    def text(seed: int) -> str:
        return "".join(c.text for c in pair.generate(PROMPTS[2], max_tokens=24, seed=seed))

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(4)}) > 1


def test_after_an_abandoned_answer_and_an_interrupt_the_next_is_a_fresh_ones(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer() -> str:
        return "".join(c.text for c in pair.generate(PROMPTS[1], GREEDY, max_tokens=24))

    lms(pair)[0].forget(0)
    lms(pair)[1].forget(0)
    fresh = answer()
    chunks: Iterator[Chunk] = pair.generate(PROMPTS[0], max_tokens=50, seed=1)
    next(chunks)
    next(chunks)
    assert answer() == fresh
    real, calls = next_law, []

    def interrupted(*args: object) -> object:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("specllama.speculation.next_law", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(pair.generate(PROMPTS[2], max_tokens=50, seed=1))
    assert answer() == fresh
