"""Many answers at once: a finished one's slot takes the next question at once.

One decode of the target carries the rows of all answers, and one of the draft model each of their
draft steps. What an answer says depends on its question, seed and id, and on the others only as far
as the shape of a decode changes the last bits of its logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specllama.acceptance import Round
from specllama.drafting import SequenceState
from specllama.errors import SpecllamaError
from specllama.generation import Chunk, Ending, Pair, Question, Stats, Token

Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Job(Generic[Source]):
    """A question to be answered.

    id, seed: the key of its randomness, so that it has the same answer wherever it stands. source:
    what whoever asked wants to have back with the answer.
    """

    id: str
    question: Question
    seed: int
    source: Source


@dataclass(frozen=True, slots=True)
class Answer(Generic[Source]):
    """What became of a job: the answer, or the error that ended it.

    Tokens and text of an answer that failed are those before the failure. Times of the statistics
    are shared with the answers beside it.
    """

    job: Job[Source]
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None
    finish_detail: str | None
    stats: Stats
    error: SpecllamaError | None = None


@dataclass(slots=True)
class _Row(Generic[Source]):
    """An answer in the making."""

    job: Job[Source]
    state: SequenceState
    ending: Ending
    stats: Stats
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.tokens.extend(chunk.tokens)

    def answer(self, error: SpecllamaError | None = None) -> Answer[Source]:
        stats, ending = self.stats, self.ending
        stats.predicted_n = len(self.tokens)
        stats.discarded = stats.draft_n_accepted + stats.rounds - stats.predicted_n
        return Answer(
            self.job,
            "".join(self.texts),
            tuple(self.tokens),
            ending.reason,
            ending.detail,
            stats,
            error,
        )


class Parallel:
    """A pair whose contexts hold several sequences, all of them at work.

    on_round: told the outcome of every round. A row whose logits are no numbers, or that cannot be
    decoded, ends with that error, and the others go on.
    """

    def __init__(self, pair: Pair, verifier: str = "coupled") -> None:
        self.on_round: Callable[[Sequence[Round]], None] = lambda _: None
        self._pair = pair
        self._verifier = verifier
        self._speculator = pair.speculator(verifier)
        self._n_slots = pair.target.n_slots
        if pair.speculation.budget is not None:
            pair.speculation.budget.start(self._n_slots)

    def run(self, jobs: Iterator[Job[Source]]) -> Iterator[Answer[Source]]:
        """Answers as they are finished; jobs are taken one by one, when a slot is free.

        It may be abandoned, and jobs that were begun are then dropped.
        """
        rows: list[_Row[Source]] = []
        are_left = True
        while True:
            new: list[_Row[Source]] = []
            while are_left and len(rows) + len(new) < self._n_slots:
                job = next(jobs, None)
                are_left = job is not None
                if job is not None:
                    new.append(self._row(job, {row.state.slot for row in (*rows, *new)}))
            answers = self._begin(new)
            rows = _without(answers, [*rows, *new])
            yield from answers
            if rows:
                answers = self._round(rows)
                rows = _without(answers, rows)
                yield from answers
            elif not are_left:
                return

    def _row(self, job: Job[Source], taken: set[int]) -> _Row[Source]:
        """A row in the free slot that still holds most of its prompt."""
        target, prompt = self._pair.target, list(job.question.tokens)
        free = (slot for slot in range(self._n_slots) if slot not in taken)
        slot = min(free, key=lambda slot: target.missing(slot, prompt))
        state = self._pair.sequence(job.question, slot, self._verifier, job.seed, job.id)
        stats = Stats(
            job.seed, self._verifier, self._pair.speculation.name, prompt_n=len(prompt)
        )
        return _Row(job, state, self._pair.ending(job.question), stats)

    def _begin(self, rows: Sequence[_Row[Source]]) -> list[Answer[Source]]:
        """Read the prompts; the answers of those to which there is none to be had."""
        full = [row for row in rows if row.state.n_left <= 0]
        for row in full:
            row.take(row.ending.exhausted())
        open_rows = [row for row in rows if row.state.n_left > 0]
        return [*(row.answer() for row in full), *self._read(open_rows)]

    def _read(self, rows: Sequence[_Row[Source]]) -> list[Answer[Source]]:
        """Decode the prompts together; the answers of those that cannot be."""
        if not rows:
            return []
        begun = time.perf_counter()
        try:
            decoded = self._speculator.prefill_together([row.state for row in rows])
        except SpecllamaError as error:
            # One by one they show whose error it is.
            if len(rows) == 1:
                return [rows[0].answer(error)]
            return [answer for row in rows for answer in self._read([row])]
        ms = 1000 * (time.perf_counter() - begun)
        for row, n_rows in zip(rows, decoded, strict=True):
            row.stats.prompt_cached_n = len(row.state.tokens) - 1 - n_rows
            row.stats.prompt_ms = ms
        return []

    def _round(self, rows: Sequence[_Row[Source]]) -> list[Answer[Source]]:
        """One round of these rows; the answers that ended with it."""
        begun = time.perf_counter()
        try:
            outcomes = self._speculator.round([row.state for row in rows])
        except SpecllamaError as error:
            # Nothing was added to any of them. One by one they show whose error it is.
            if len(rows) == 1:
                return [rows[0].answer(error)]
            return [answer for row in rows for answer in self._round([row])]
        ms = 1000 * (time.perf_counter() - begun)
        self.on_round(outcomes)
        ended = []
        for row, outcome in zip(rows, outcomes, strict=True):
            row.stats.add(outcome)
            row.stats.predicted_ms += ms
            row.take(row.ending.take(outcome))
            if row.ending.reason is None and row.state.n_left <= 0:
                row.take(row.ending.exhausted())
            if row.ending.reason is not None:
                ended.append(row.answer())
        return ended


def _without(
    answers: Sequence[Answer[Source]], rows: Sequence[_Row[Source]]
) -> list[_Row[Source]]:
    """The rows that are not among the answers."""
    return [row for row in rows if all(row.job is not answer.job for answer in answers)]
