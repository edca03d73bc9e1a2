"""A greedy speculative answer, decoded again: at the widths that it was decoded at, and at one.

The same decodes must give the same tokens. With one row at a time the last bits of the logits
differ, as other kernels are used, so there the answer may part from plain decoding, but only where
the two best logits are closer than such differences are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specllama.acceptance import Verifier
from specllama.drafting import Drafter, SequenceState
from specllama.lm import CachedLM, LogitRows, Request, common_prefix
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator

_GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Step:
    """One round of an answer: what was drafted, and what was emitted."""

    draft: tuple[int, ...]
    emitted: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """A greedy answer, round by round."""

    prompt: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def answer(self) -> list[int]:
        """The emitted tokens."""
        return [token for step in self.steps for token in step.emitted]

    @property
    def drafted(self) -> int:
        """How many tokens were drafted."""
        return sum(len(step.draft) for step in self.steps)

    @property
    def widths(self) -> set[int]:
        """Rows of the widest decodes with drafts, and of the most frequent ones."""
        counts = Counter(len(step.draft) + 1 for step in self.steps if step.draft)
        return {max(counts), counts.most_common(1)[0][0]} if counts else set()


@dataclass(frozen=True)
class Fork:
    """A token that decoding one row at a time would not have chosen.

    position: its place in the answer. margin: by how much its logit is below the best one.
    """

    position: int
    emitted: int
    best: int
    margin: float


@dataclass(frozen=True)
class Replay:
    """What came of one answer.

    wrong: places in the answer whose token is not the best of its own row, decoded again at the
    same width. noise: the largest difference between logits at the answer's widths and at width
    one, over clean decodes of the same text.
    """

    trace: Trace
    wrong: tuple[int, ...]
    forks: tuple[Fork, ...]
    noise: float

    @property
    def limit(self) -> float:
        """The largest margin that noise explains: both logits may have moved."""
        return 2 * self.noise

    @property
    def ok(self) -> bool:
        """Whether the answer is the target's own, up to near ties."""
        return not self.wrong and all(fork.margin <= self.limit for fork in self.forks)


def answer(
    target: CachedLM,
    drafter: Drafter,
    verify: Verifier,
    prompt: Sequence[int],
    n_emitted: int,
    n_tokens: int,
) -> Trace:
    """A greedy answer of so many tokens through the loop, from a context that holds nothing.

    n_tokens: as in Speculator. Raises DecodeError, InvalidLogits, RollbackError.
    """
    target.forget(0)
    speculator = Speculator(target, drafter, verify, n_tokens)
    state = SequenceState(0, list(prompt), _GREEDY, Streams.seeded(0), n_emitted)
    speculator.prefill(state)
    steps = []
    while state.n_left > 0:
        [outcome] = speculator.round([state])
        steps.append(Step(outcome.draft.tokens, outcome.tokens))
    return Trace(tuple(prompt), tuple(steps))


def replay(target: CachedLM, trace: Trace, n_tokens: int) -> Replay:
    """Decode an answer again, both ways, without the loop."""
    wrong = _at_the_same_widths(target, trace, n_tokens)
    tokens = [*trace.prompt, *trace.answer]
    narrow = _rows(target, len(trace.prompt), tokens, 1)[:, :n_tokens]
    forks = []
    for position, (token, row) in enumerate(zip(trace.answer, narrow, strict=True)):
        best = int(row.argmax())
        if best != token:
            forks.append(Fork(position, token, best, float(row[best] - row[token])))
    noise = 0.0
    for width in trace.widths:
        wide = _rows(target, len(trace.prompt), tokens, width)[:, :n_tokens]
        finite = np.isfinite(narrow) & np.isfinite(wide)
        apart = np.abs(np.subtract(wide, narrow, where=finite, out=np.zeros_like(wide)))
        noise = max(noise, float(apart.max()))
    return Replay(trace, tuple(wrong), tuple(forks), noise)


def _at_the_same_widths(target: CachedLM, trace: Trace, n_tokens: int) -> list[int]:
    """The places whose token differs from what these very decodes say."""
    target.forget(0)
    target.prefill(0, list(trace.prompt[:-1]))
    tokens, wrong = list(trace.prompt), []
    for step in trace.steps:
        [rows] = target.logits([Request(0, [*tokens, *step.draft], len(step.draft) + 1)])
        best = rows[:, :n_tokens].argmax(axis=1).tolist()
        kept = 0
        while kept < len(step.draft) and step.draft[kept] == best[kept]:
            kept += 1
        begin, expected = len(tokens) - len(trace.prompt), best[: kept + 1]
        if list(step.emitted) != expected:
            wrong.append(begin + common_prefix(list(step.emitted), expected))
        tokens += step.emitted
    return wrong


def _rows(target: CachedLM, n_prompt: int, tokens: list[int], width: int) -> LogitRows:
    """The rows that every token after the prompt was chosen from, so many in each decode."""
    target.forget(0)
    target.prefill(0, tokens[: n_prompt - 1])
    parts = []
    for begin in range(n_prompt, len(tokens), width):
        end = min(begin + width, len(tokens))
        [rows] = target.logits([Request(0, tokens[: end - 1], end - begin)])
        parts.append(rows.copy())
    return np.concatenate(parts)
