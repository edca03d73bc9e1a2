"""Toy models and a branch-walking Rng: the shipped loop, enumerated instead of sampled.

`enumerate_runs` plays a random experiment once for every combination of outcomes of its draws, and
adds up the probabilities. What the loop emits then has an exact law that can be compared with the
target's own, to the last bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specllama.acceptance import Verifier, verify_block
from specllama.drafting import Drafter, SequenceState
from specllama.errors import DecodeError, RollbackError
from specllama.lm import CachedLM, Rows
from specllama.sampling import Law, SamplingParams, Streams, next_law
from specllama.speculation import Speculator

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)

Model = Callable[[tuple[int, ...]], NDArray[np.float64]]


class Table:
    """A language model with a row of its own for every history, made up from a seed."""

    def __init__(self, n_vocab: int, seed: int, concentration: float = 0.5) -> None:
        self.n_vocab = n_vocab
        self._seed = seed
        self._concentration = concentration

    def __call__(self, prefix: tuple[int, ...]) -> NDArray[np.float64]:
        rng = np.random.default_rng([self._seed, len(prefix), *prefix])
        return rng.dirichlet(np.full(self.n_vocab, self._concentration))


class Noisy:
    """Half of another model, half of one that is made up: a draft worth having."""

    def __init__(self, model: Table, seed: int) -> None:
        self.n_vocab = model.n_vocab
        self._model, self._noise = model, Table(model.n_vocab, seed)

    def __call__(self, prefix: tuple[int, ...]) -> NDArray[np.float64]:
        return (self._model(prefix) + self._noise(prefix)) / 2


class Iid:
    """A model that ignores its history."""

    def __init__(self, *row: float) -> None:
        self.n_vocab = len(row)
        self._row = np.array(row)

    def __call__(self, prefix: tuple[int, ...]) -> NDArray[np.float64]:
        return self._row


class ToyContext:
    """A context over a toy model, harsher than the real one.

    Logits of an earlier decode turn into NaN with the next, rows are read-only, positions must be
    consecutive, nothing may be decoded twice, and a rollback can be refused on demand.

    can_rollback: whether any part can be dropped. Otherwise it is a state with `n_snapshots` of
    them, which reach back within the last decode, once, and with checkpoints.
    """

    name = "toy"

    def __init__(
        self,
        model: Model,
        n_vocab: int,
        *,
        n_ctx: int = 64,
        n_batch: int = 64,
        n_outputs: int = 64,
        n_slots: int = 4,
        can_rollback: bool = True,
        n_snapshots: int = 0,
        is_split: bool = False,
    ) -> None:
        self.is_split = is_split
        self._model = model
        self.n_vocab = n_vocab
        self.n_ctx, self.n_batch, self.n_outputs = n_ctx, n_batch, n_outputs
        self.n_slots, self.can_rollback = n_slots, can_rollback
        self.has_state = not can_rollback
        self.n_tentative = n_ctx if can_rollback else n_snapshots
        self._reach: dict[int, int] = {}
        self.slots: dict[int, list[int]] = {}
        self.decodes: list[list[tuple[int, int]]] = []  # per decode: (rows, logits) per entry
        self.refuse_rollback = False
        self.fail_decode = False
        self._given: list[NDArray[np.float32]] = []

    def decode(self, batch: Sequence[Rows]) -> list[NDArray[np.float32]]:
        for old in self._given:
            old.flags.writeable = True
            old[:] = np.nan
            old.flags.writeable = False
        self._given = []
        if self.fail_decode:
            raise DecodeError("toy: told to fail")
        assert 0 < sum(len(rows.tokens) for rows in batch) <= self.n_batch
        assert sum(rows.n_logits for rows in batch) <= self.n_outputs
        self.decodes.append([(len(rows.tokens), rows.n_logits) for rows in batch])
        self._reach = {r.slot: min(self.n_tentative, len(r.tokens) - 1) for r in batch}
        return [self._decode_one(rows) for rows in batch]

    def _decode_one(self, rows: Rows) -> NDArray[np.float32]:
        held = self.slots.setdefault(rows.slot, [])
        assert 0 <= rows.slot < self.n_slots
        assert rows.start == len(held), "rows do not continue what the slot holds"
        assert len(held) + len(rows.tokens) <= self.n_ctx, "more tokens than the context holds"
        assert all(0 <= t < self.n_vocab for t in rows.tokens), "a token the model does not have"
        logits = np.empty((rows.n_logits, self.n_vocab), np.float32)
        for i, token in enumerate(rows.tokens):
            held.append(token)
            at = i - (len(rows.tokens) - rows.n_logits)
            if at >= 0:
                with np.errstate(divide="ignore"):
                    logits[at] = np.log(self._model(tuple(held)))
        logits.flags.writeable = False
        self._given.append(logits)
        return logits

    def length(self, slot: int) -> int:
        return len(self.slots.get(slot, []))

    def reach(self, slot: int) -> int:
        return self.length(slot) if self.can_rollback else self._reach.get(slot, 0)

    def truncate(self, slot: int, length: int) -> None:
        if self.refuse_rollback or self.length(slot) - length > self.reach(slot):
            raise RollbackError("toy: told to refuse")
        self._reach = {}
        del self.slots[slot][length:]

    def checkpoint(self, slot: int) -> bytes:
        assert self.has_state
        return bytes(self.slots[slot])

    def rewind(self, slot: int, length: int, data: bytes) -> None:
        if self.refuse_rollback:
            raise RollbackError("toy: told to refuse")
        assert list(data) == self.slots[slot][:length], "a checkpoint of another text"
        self._reach = {}
        self.slots[slot] = list(data)

    def clear(self, slot: int) -> None:
        self._reach = {}
        self.slots[slot] = []

    def wipe(self) -> None:
        self._reach = {}
        self.slots.clear()

    def copy(self, source: int, slot: int) -> None:
        self.slots[slot] = list(self.slots[source])

    def save(self, slot: int) -> bytes:
        return bytes(self.slots.get(slot, []))

    def restore(self, slot: int, data: bytes) -> None:
        self.slots[slot] = list(data)


def toy_lm(model: Table | Noisy | Iid) -> CachedLM:
    return CachedLM(ToyContext(model, model.n_vocab))


class Oracle:
    """An Rng that takes the branches of a given path, and then the first of each."""

    def __init__(self, path: Sequence[int]) -> None:
        self._path = path
        self.taken: list[tuple[int, int]] = []  # (branch, number of branches)
        self.weight = 1.0

    def _choose(self, weights: Sequence[float]) -> int:
        depth = len(self.taken)
        branch = self._path[depth] if depth < len(self._path) else 0
        self.taken.append((branch, len(weights)))
        self.weight *= weights[branch]
        return branch

    def categorical(self, law: Law) -> int:
        support = np.flatnonzero(law.probs)
        total = float(law.probs.sum())
        at = support[self._choose([float(law.probs[i]) / total for i in support])]
        return int(at if law.ids is None else law.ids[at])

    def bernoulli(self, prob: float) -> bool:
        assert 0 <= prob <= 1
        if prob in (0, 1):
            return prob == 1
        return self._choose([prob, 1 - prob]) == 0


def enumerate_runs(run: Callable[[Oracle], Hashable]) -> dict[Hashable, float]:
    """The law of what `run` returns, over all outcomes of the draws it makes."""
    law: dict[Hashable, float] = defaultdict(float)
    path: list[int] = []
    while True:
        oracle = Oracle(path)
        law[run(oracle)] += oracle.weight
        path = _next_path(oracle.taken)
        if not path:
            return dict(law)


def _next_path(taken: Sequence[tuple[int, int]]) -> list[int]:
    """The next branch of the deepest choice that has one left; empty after the last path."""
    branches = list(taken)
    while branches and branches[-1][0] + 1 == branches[-1][1]:
        branches.pop()
    if not branches:
        return []
    path = [branch for branch, _ in branches]
    path[-1] += 1
    return path


def one_stream(oracle: Oracle) -> Streams:
    """All three streams from one oracle: the walk needs no independence, it visits everything."""
    return Streams(oracle, oracle, oracle)


@dataclass
class Loop:
    """The shipped loop over toy models; a new one for every run of an enumeration."""

    target: Table | Noisy | Iid
    make_drafter: Callable[[Oracle], Drafter]
    verify: Verifier = verify_block
    params: SamplingParams = PLAIN
    prompt: tuple[int, ...] = (0,)
    end_tokens: frozenset[int] = frozenset()

    def emit(self, oracle: Oracle, n_tokens: int, n_sequences: int = 1) -> tuple[int, ...]:
        """Run rounds until every sequence has emitted n_tokens; all their tokens in a row."""
        lm = toy_lm(self.target)
        drafter = self.make_drafter(oracle)
        budget = getattr(drafter, "budget", None)  # of the drafters that measure
        speculator = Speculator(lm, drafter, self.verify, self.target.n_vocab, budget)
        states = [
            SequenceState(
                slot, list(self.prompt), self.params, one_stream(oracle), n_tokens, self.end_tokens
            )
            for slot in range(n_sequences)
        ]
        while active := [state for state in states if state.n_left > 0]:
            speculator.round(active)
        return tuple(token for state in states for token in state.tokens[len(self.prompt) :])


def target_law(
    model: Table | Noisy | Iid,
    n_tokens: int,
    params: SamplingParams = PLAIN,
    prompt: tuple[int, ...] = (0,),
    n_sequences: int = 1,
) -> dict[Hashable, float]:
    """What plain decoding emits: the product of the target's own next-token laws."""

    def run(oracle: Oracle) -> tuple[int, ...]:
        return tuple(
            token for _ in range(n_sequences) for token in _continue(oracle, prompt)
        )

    def _continue(oracle: Oracle, prompt: tuple[int, ...]) -> Iterator[int]:
        tokens = list(prompt)
        for _ in range(n_tokens):
            with np.errstate(divide="ignore"):
                logits = np.log(model(tuple(tokens))).astype(np.float32)
            tokens.append(oracle.categorical(next_law(logits, params, tokens)))
            yield tokens[-1]

    return enumerate_runs(run)


def distance(a: dict[Hashable, float], b: dict[Hashable, float]) -> float:
    """Total variation distance."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2
