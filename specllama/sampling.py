"""Logits and history -> next-token law -> token.

A `Law` is the one object used for drawing a token, for the acceptance ratio and for the residual,
so that all three always see the same probabilities.

The transforms run in llama.cpp's order: logit bias, penalties, top-k, top-p, min-p, and temperature
last. Temperature 0 is the limit of a small temperature, a one-hot law; there is no greedy branch
anywhere else. Where logits tie, the lowest token id counts as the larger.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specllama.errors import InvalidLogits, UsageError

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

# Beyond these float32 loses the temperature; the law is one-hot, or flat, long before.
_SMALLEST_TEMPERATURE, _LARGEST_TEMPERATURE = 1e-30, 1e30
# Columns of the strided view in which `_largest` looks for the top k (about one pass over the row).
_STRIDE = 64


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the defaults are llama.cpp's, and this is their only home.

    temperature: 0 takes the most likely token; 1 leaves the model's own law.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the most likely tokens up to this mass; 1 keeps all.
    min_p: keep tokens at least this likely relative to the most likely one; 0 keeps all.
    repeat_penalty, presence_penalty, frequency_penalty: over the last `penalty_last_n` tokens of
        prompt and answer together (-1: over all of them, 0: off).
    logit_bias: token id -> number added to its logit; -inf bans the token.

    Raises UsageError for a value out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        finite = ("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty")
        for name in finite:
            if not math.isfinite(getattr(self, name)):
                raise UsageError(f"{name} must be a finite number, not {getattr(self, name)}")
        rules = (
            (self.temperature >= 0, "temperature", "0 or more (0 takes the most likely token)"),
            (self.top_k >= 0, "top_k", "0 or more (0 keeps every token)"),
            (0 <= self.top_p <= 1, "top_p", "between 0 and 1 (1 keeps every token)"),
            (0 <= self.min_p <= 1, "min_p", "between 0 and 1 (0 keeps every token)"),
            (self.repeat_penalty > 0, "repeat_penalty", "above 0 (1 switches it off)"),
            (self.penalty_last_n >= -1, "penalty_last_n", "-1 or more (-1 counts every token)"),
        )
        for ok, name, wanted in rules:
            if not ok:
                raise UsageError(f"{name} must be {wanted}, not {getattr(self, name)}")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"logit bias {token}:{bias} is not usable; give a token id of 0 or more "
                    "and a finite number, or -inf to ban the token"
                )

    @property
    def uses_history(self) -> bool:
        """Whether the law depends on earlier tokens other than through the model."""
        penalties = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty)
        return self.penalty_last_n != 0 and penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """A next-token distribution.

    probs: [n] float64, non-negative, summing to one up to rounding.
    ids: [n] ascending token ids, or None for a dense law, whose ids are 0 .. n-1.
    """

    probs: Floats
    ids: Ids | None = None

    @classmethod
    def one_hot(cls, token: int) -> Law:
        """All mass on one token."""
        return cls(np.ones(1), np.array([token], dtype=np.int64))

    def prob(self, token: int) -> float:
        """The probability of one token, 0.0 outside the support."""
        if self.ids is None:
            return float(self.probs[token]) if token < self.probs.size else 0.0
        at = int(self.ids.searchsorted(token))
        if at < self.ids.size and self.ids[at] == token:
            return float(self.probs[at])
        return 0.0

    def on(self, other: Law) -> Floats:
        """This law's probabilities at `other`'s ids, in their order: [len(other.probs)] float64."""
        if other.ids is None:
            return self._dense(other.probs.size)
        if self.ids is None:
            known = other.ids < self.probs.size
            values = self.probs[np.where(known, other.ids, 0)]
            return values if known.all() else values * known
        at = self.ids.searchsorted(other.ids)
        at[at == self.ids.size] = 0
        result: Floats = np.where(self.ids[at] == other.ids, self.probs[at], 0.0)
        return result

    def _dense(self, size: int) -> Floats:
        """Probabilities of ids 0 .. size-1: [size] float64."""
        if self.ids is None and self.probs.size >= size:
            return self.probs[:size]
        out = np.zeros(size)
        if self.ids is None:
            out[: self.probs.size] = self.probs
        else:
            inside = self.ids < size
            out[self.ids[inside]] = self.probs[inside]
        return out


def next_law(
    logits: Logits, params: SamplingParams, history: Sequence[int] = (), position: int = 0
) -> Law:
    """The law of the next token.

    logits: [n_vocab] float32, not modified. history: the tokens before it, drafted ones included
    (read only when `params.uses_history`). position: index of the token, for the error message.
    Raises InvalidLogits for NaN, +inf, or nothing but -inf, and UsageError when it is the bias and
    the penalties that leave no usable logit.
    """
    row = _adjusted(logits, params, history)
    if params.temperature == 0 or params.top_k == 1:
        best = int(row.argmax())
        _require_finite(float(row[best]), logits, position)
        return Law.one_hot(best)
    if 0 < params.top_k < row.size:
        ids = _largest(row, params.top_k)
        _require_finite(float(row[ids[0]]), logits, position)
        ids = _min_p(row, _top_p(row, ids, params.top_p), params.min_p)
        ids.sort()
        return Law(_softmax(row[ids], params.temperature), ids)
    top = row.max()
    _require_finite(float(top), logits, position)
    if params.top_p < 1:
        ids = _min_p(row, _nucleus(row, params.top_p), params.min_p)
    elif params.min_p > 0:
        ids = np.flatnonzero(row >= top + math.log(params.min_p))
    else:
        return Law(_softmax(row, params.temperature))
    return Law(_softmax(row[ids], params.temperature), ids)


def _require_finite(top: float, logits: Logits, position: int) -> None:
    """Raise unless `top`, the largest logit, is finite; a NaN anywhere makes the maximum NaN."""
    if math.isfinite(top):
        return
    if math.isfinite(logits.max()):
        raise UsageError(
            "the logit bias and the penalties leave no token to choose; "
            "ban fewer tokens and use smaller numbers"
        )
    raise InvalidLogits(position)


def _adjusted(logits: Logits, params: SamplingParams, history: Sequence[int]) -> Logits:
    """Logits after bias and penalties; the input itself when neither is in use."""
    if not (params.logit_bias or params.uses_history):
        return logits
    row = logits.copy()
    # What overflows here, and inf - inf, is found and reported with the largest logit.
    with np.errstate(all="ignore"):
        for token, bias in params.logit_bias.items():
            if token < row.size:
                row[token] += np.float32(bias)
        if params.uses_history:
            _penalise(row, params, history)
    return row


def _penalise(row: Logits, params: SamplingParams, history: Sequence[int]) -> None:
    """Repeat, presence and frequency penalties, in place, as llama.cpp defines them."""
    window = history if params.penalty_last_n < 0 else history[-params.penalty_last_n :]
    counts = Counter(window)
    seen = np.array([t for t in counts if t < row.size], dtype=np.int64)
    times = np.array([counts[t] for t in seen.tolist()], dtype=np.float32)
    values = row[seen]
    repeat = np.float32(params.repeat_penalty)
    values = np.where(values <= 0, values * repeat, values / repeat)
    penalty = times * np.float32(params.frequency_penalty) + np.float32(params.presence_penalty)
    row[seen] = values - penalty


def _largest(row: Logits, k: int) -> Ids:
    """Ids of the k largest logits, largest first, ties by lowest id.

    One pass takes the maximum of each column of a strided view. The k-th largest column maximum
    bounds the k-th largest logit from below, so only columns that reach it can hold one. A NaN is
    its column's maximum and, as NumPy sorts NaN last, comes out first.
    """
    n_columns = row.size // _STRIDE
    if n_columns <= 2 * k:
        candidates = np.arange(row.size)
    else:
        whole = n_columns * _STRIDE
        grid = row[:whole].reshape(_STRIDE, n_columns)
        maxima = grid.max(axis=0)
        bound = np.partition(maxima, n_columns - k)[n_columns - k]
        columns = np.flatnonzero(~(maxima < bound))
        # Row by row, so candidates come in ascending order.
        found = (np.arange(_STRIDE)[:, None] * n_columns + columns).ravel()
        candidates = np.concatenate((found, np.arange(whole, row.size)))
        candidates = candidates[~(row[candidates] < bound)]
    values = row[candidates]
    # -NaN sorts last, so NaN is put first by hand: the caller must see it.
    order = np.argsort(-values, kind="stable")
    if np.isnan(values[order[-1]]):
        order = order[::-1]
    largest: Ids = candidates[order[:k]]
    return largest


def _top_p(row: Logits, ids: Ids, top_p: float) -> Ids:
    """The shortest prefix of `ids` (largest first) whose mass, among `ids`, reaches top_p."""
    if top_p >= 1:
        return ids
    mass = np.cumsum(_softmax(row[ids], 1.0))
    kept: Ids = ids[: int(mass.searchsorted(top_p)) + 1]
    return kept


def _nucleus(row: Logits, top_p: float) -> Ids:
    """Top-p over the whole vocabulary: the same set as `_top_p` of all ids, in ascending order."""
    probs = _softmax(row, 1.0)
    # All tokens below this together have half of the mass that top-p may leave out, at most.
    within = np.flatnonzero(probs >= (1 - top_p) / (2 * row.size))
    logits = row[within]
    # Values alone sort several times faster than ids by value.
    falling = np.sort(logits)[::-1]
    mass = np.cumsum(_softmax(falling, 1.0)) * probs[within].sum()
    n_kept = min(int(mass.searchsorted(top_p)) + 1, falling.size)
    bound = falling[n_kept - 1]
    kept = logits > bound
    ties = np.flatnonzero(logits == bound)
    kept[ties[: n_kept - np.count_nonzero(kept)]] = True
    nucleus: Ids = within[kept]
    return nucleus


def _min_p(row: Logits, ids: Ids, min_p: float) -> Ids:
    """Those of `ids` at least min_p times as likely as the likeliest of them."""
    if min_p <= 0:
        return ids
    values = row[ids]
    kept: Ids = ids[values >= values.max() + math.log(min_p)]
    return kept


def _softmax(values: Logits, temperature: float) -> Floats:
    """exp((values - max) / temperature), normalised: float32 exponentials, float64 sum."""
    with np.errstate(over="ignore"):
        scaled = values - values.max()
        if temperature != 1.0:
            scaled /= np.float32(min(max(temperature, _SMALLEST_TEMPERATURE), _LARGEST_TEMPERATURE))
    # In place: at 262,144 tokens the time goes into fresh memory, not into the exponential.
    weights: Floats = np.exp(scaled, out=scaled).astype(np.float64)
    weights /= weights.sum()
    return weights


class Rng(Protocol):
    """All randomness passes through these two methods, so that a test can walk every branch."""

    def categorical(self, law: Law) -> int:
        """A token drawn from the law."""
        ...

    def bernoulli(self, prob: float) -> bool:
        """True with probability `prob`."""
        ...


class NumpyRng:
    """Rng over a NumPy generator."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._random = generator.random

    def categorical(self, law: Law) -> int:
        """Inverse-CDF draw on a float64 running sum; a token of probability 0 is never drawn."""
        mass = np.cumsum(law.probs)
        # Strictly above: a token's cell is [mass before it, mass with it), empty when p = 0.
        at = int(mass.searchsorted(self._random() * mass[-1], side="right"))
        if at >= mass.size:  # the product rounded up to the total
            at = int(np.flatnonzero(law.probs)[-1])
        return at if law.ids is None else int(law.ids[at])

    def bernoulli(self, prob: float) -> bool:
        """Uniforms lie in [0, 1), so probability 0 never and probability 1 always succeeds."""
        return bool(self._random() < prob)


@dataclass(frozen=True, slots=True)
class Streams:
    """The three independent sources of randomness of one sequence.

    Sharing one between drafting, acceptance and correction correlates draws that the proof needs
    independent.
    """

    draft: Rng
    acceptance: Rng
    correction: Rng

    @classmethod
    def seeded(cls, seed: int, row: int | str = 0) -> Streams:
        """Streams that depend on the seed and the row's number or name, and on nothing else."""
        base = np.random.SeedSequence([abs(seed), int(seed < 0), row_key(row)])
        return cls(*(NumpyRng(np.random.Generator(np.random.PCG64(s))) for s in base.spawn(3)))

    def at(self, position: int) -> Streams:
        """The streams for draws at a position of the sequence, counted from where these stand.

        The same for every position, unless the randomness is keyed by it (see coupling.py).
        """
        return self


def row_key(row: int | str) -> int:
    """A number of 64 bits for a row's number or name."""
    digest = hashlib.blake2b(str(row).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
