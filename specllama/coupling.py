"""Noise for coupled verification: a function of seed, row, position and token, and of nothing else.

Every token gets a Gumbel variate; the token with the largest log p + noise is a draw from p (the
Gumbel-max trick). Draft and target look the same noise up, so laws that are close draw the same
token, and the text depends neither on who drafts nor on how many tokens at a time. In float64 the
noise reaches 36; float32 uniforms would end at 16.6 and cut the tails of the law.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specllama.sampling import Floats, Law, Streams, row_key

_Words = NDArray[np.uint64]

# Odd constants that spread consecutive numbers over all 64 bits (golden ratio, and a prime).
_STEP = 0x9E3779B97F4A7C15
_TOKEN_STEP = np.uint64(0xD1B54A32D192ED03)


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): every bit depends on every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class KeyedRng:
    """An Rng for one position of one row."""

    key: int
    position: int

    def uniforms(self, ids: NDArray[np.int64]) -> Floats:
        """A number of 52 bits for each token, strictly between 0 and 1: [len(ids)] float64."""
        base = np.array([(self.key + self.position * _STEP) % 2**64], dtype=np.uint64)
        words = _mix(_mix(base) + ids.astype(np.uint64) * _TOKEN_STEP)
        # With 53 bits the largest, plus a half, would round up to 1.
        words >>= np.uint64(12)
        result: Floats = (words.astype(np.float64) + 0.5) * 2.0**-52
        return result

    def categorical(self, law: Law) -> int:
        """The token with the largest log p + Gumbel noise; never one of probability 0.

        That is the token with the smallest E / p, where E = -log(1 - u) is a standard exponential
        variate. Since E >= u, most tokens are out of the race before their logarithm is taken.
        """
        ids = np.arange(law.probs.size) if law.ids is None else law.ids
        uniforms = self.uniforms(ids)
        with np.errstate(divide="ignore", over="ignore"):
            bounds = uniforms / law.probs
        first = int(bounds.argmin())
        limit = max(bounds[first], -np.log1p(-uniforms[first]) / law.probs[first])
        near = np.flatnonzero(bounds <= limit)
        times = -np.log1p(-uniforms[near]) / law.probs[near]
        return int(ids[near[times.argmin()]])

    def bernoulli(self, prob: float) -> bool:
        """The coupled rule tosses no coins; a rule that does needs independent streams."""
        raise AssertionError("keyed noise is for coupled verification only")


@dataclass(frozen=True, slots=True)
class KeyedStreams(Streams):
    """Streams whose draws are keyed by their position in the sequence."""

    key: int
    position: int

    @classmethod
    def keyed(cls, seed: int, row: int | str = 0) -> KeyedStreams:
        """Streams for the first position of a row."""
        words = np.random.SeedSequence([abs(seed), int(seed < 0), row_key(row)]).generate_state(
            1, np.uint64
        )
        return cls._standing_at(int(words[0]), 0)

    @classmethod
    def _standing_at(cls, key: int, position: int) -> KeyedStreams:
        rng = KeyedRng(key, position)
        return cls(rng, rng, rng, key, position)

    def at(self, position: int) -> KeyedStreams:
        """The streams that many positions further on."""
        return self._standing_at(self.key, self.position + position)
