"""The theorem: which drafted tokens are kept, and what replaces the first one that is not.

p is the target's law of the next token, q the law the draft really drew from, both after every
sampling transform. Keep x ~ q with probability min(1, p(x)/q(x)), else draw from the residual
max(0, p - q), normalised. What comes out has law p, whatever q is:

    min(p, q)  +  (1 - sum min(p, q)) * max(0, p - q) / sum max(0, p - q)  =  p

A token y comes out by being drafted and kept, with q(y) * min(1, p(y)/q(y)) = min(p(y), q(y)), or
as a correction; and 1 - sum min(p, q) = sum (p - min(p, q)) = sum max(0, p - q), so the correction
pays out exactly p - min(p, q). Two conditions: q is the law of x given everything that decided that
a token is drawn here, and the coin of the test is independent of x. For several tokens the argument
holds at each position given the tokens before it, up to the first that is not kept; behind that one
the next round begins with a longer history. Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding" (arXiv 2211.17192), Algorithm 1 and appendix A.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specllama.sampling import Floats, Law, Streams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, and the laws they were really drawn from, one each.

    failed: the draft model produced no usable logits, so the proposal ends early.
    """

    tokens: tuple[int, ...] = ()
    laws: tuple[Law, ...] = ()
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What one round adds to a sequence: the accepted drafts, then exactly one token more.

    target_laws: the target's laws that verification looked at, from the first drafted position on.
    is_coupled: whether draft and target drew with the same noise.
    """

    tokens: tuple[int, ...]
    draft: Draft
    target_laws: tuple[Law, ...]
    is_coupled: bool = False

    @property
    def proposed(self) -> int:
        """How many tokens were drafted."""
        return len(self.draft.tokens)

    @property
    def accepted(self) -> int:
        """How many of them were kept."""
        return len(self.tokens) - 1

    @property
    def provenance(self) -> tuple[str, ...]:
        """Where each token comes from: "accepted", then "corrected" or, after them all, "bonus".

        The tokens of plain decoding are bonus tokens: nothing was drafted, and all of it was kept.
        """
        last = "bonus" if self.accepted == self.proposed else "corrected"
        return ("accepted",) * self.accepted + (last,)

    @property
    def acceptances(self) -> list[float]:
        """What each position that was looked at tells of how much is accepted there.

        That is sum min(p, q), which is known without the noise of a coin. The coupled rule accepts
        less, down to (1 - TV) / (1 + TV): there it is what happened, 1 or 0.
        """
        if self.is_coupled:
            return [float(i < self.accepted) for i in range(len(self.target_laws))]
        return [overlap(p, q) for p, q in zip(self.target_laws, self.draft.laws, strict=False)]


# The target's law at the i-th drafted position (i = number of drafts before it), asked for in order
# and only as far as needed: rows behind a token that the target calls impossible are undefined.
TargetLaws = Callable[[int], Law]
# Verification of a draft, with streams that stand at its first token.
Verifier = Callable[[Draft, TargetLaws, Streams], Round]


def acceptance_probability(p: Law, q: Law, token: int) -> float:
    """min(1, p(token) / q(token)), the chance that a token drawn from q is kept."""
    return min(1.0, _ratio(p, q, token))


def accepted_mass(p: Law, q: Law) -> Floats:
    """min(p, q) at p's ids: the unconditional mass of accepted proposals. [len(p.probs)]"""
    return np.minimum(p.probs, q.on(p))


def overlap(p: Law, q: Law) -> float:
    """sum min(p, q) = 1 - TV(p, q): the acceptance of one position before its token is drawn."""
    return float(accepted_mass(p, q).sum())


def excess(p: Law, q: Law, scale: float = 1.0) -> Floats:
    """max(0, scale * p - q) at p's ids, not normalised. [len(p.probs)]"""
    return np.maximum(scale * p.probs - q.on(p), 0.0)


def residual(p: Law, q: Law) -> Law:
    """max(0, p - q), normalised: the law of the correction after a rejection.

    Laws that agree up to the last bit can leave nothing to normalise although a rejection happened
    by rounding; then p itself is the limit.
    """
    return _normalised(excess(p, q), p)


def _normalised(weights: Floats, p: Law) -> Law:
    """The law on p's ids proportional to `weights`, or p itself where they sum to nothing."""
    total = weights.sum()
    if not (np.isfinite(total) and total > 0):
        return p
    return Law(weights / total, p.ids)


def verify_tokens(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """Token verification (Leviathan et al., Algorithm 1): one test a token, up to the first no."""
    seen: list[Law] = []
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(i)
        seen.append(p)
        if not streams.acceptance.bernoulli(acceptance_probability(p, q, token)):
            corrected = streams.correction.categorical(residual(p, q))
            return Round((*draft.tokens[:i], corrected), draft, tuple(seen))
    bonus = streams.correction.categorical(target(len(draft.tokens)))
    return Round((*draft.tokens, bonus), draft, tuple(seen))


def verify_block(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """Block verification: the longest prefix that passes is kept, on average no less than above.

    Sun et al., "Block Verification Accelerates Speculative Decoding" (arXiv 2403.10444). Let b be
    the survival of the block so far, capped at 1 at every step, m = sum max(0, b p - q) at the next
    position, and h = m / (m + 1 - b) the chance that the block may end here. The next token stands
    with b' = min(1, b p/q), so it is kept with q b' = min(q, b p), of total mass b - m. The block
    ends here if nothing longer stands, of probability 1 - (b - m), and h says so: in all with
    (1 - b + m) h = m, which the correction pays out as max(0, b p - q). Together that is b p.
    """
    survival, kept = 1.0, 0
    correction: Law | None = None
    seen: list[Law] = []
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(i)
        seen.append(p)
        weights = excess(p, q, survival)
        mass = float(weights.sum())
        # mass + (1 - survival), in this order: (mass + 1) - survival would lose a tiny mass.
        whole = mass + (1.0 - survival)
        passes = mass / whole if whole > 0 else 1.0
        if i == 0 or streams.acceptance.bernoulli(passes):
            kept, correction = i, _normalised(weights, p)
        survival = min(1.0, survival * _ratio(p, q, token))
        if survival == 0:
            break
    else:
        if not draft.tokens or streams.acceptance.bernoulli(survival):
            bonus = streams.correction.categorical(target(len(draft.tokens)))
            return Round((*draft.tokens, bonus), draft, tuple(seen))
    assert correction is not None  # set at i == 0
    corrected = streams.correction.categorical(correction)
    return Round((*draft.tokens[:kept], corrected), draft, tuple(seen))


def _ratio(p: Law, q: Law, token: int) -> float:
    """p(token) / q(token), not capped; 0 for a token that q cannot have drawn."""
    drafted = q.prob(token)
    if drafted <= 0:
        log.error("token %d was drafted with probability 0: its law is not the one drawn", token)
        return 0.0
    return p.prob(token) / drafted


def verify_coupled(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """Coupled verification: the target draws every token itself, and keeps a draft that equals it.

    With streams whose noise is keyed by the position (coupling.py) draft and target make the same
    draw from similar laws, so they often agree, and what is emitted depends on the noise and the
    target alone: the same text for any drafter, any draft length, or none. Daliri et al.,
    "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).
    With independent streams it is exact too, but keeps fewer tokens than token verification.
    """
    seen: list[Law] = []
    for i, token in enumerate(draft.tokens):
        p = target(i)
        seen.append(p)
        drawn = streams.at(i).correction.categorical(p)
        if drawn != token:
            return Round((*draft.tokens[:i], drawn), draft, tuple(seen), is_coupled=True)
    n = len(draft.tokens)
    bonus = streams.at(n).correction.categorical(target(n))
    return Round((*draft.tokens, bonus), draft, tuple(seen), is_coupled=True)


VERIFIERS: dict[str, Verifier] = {
    "block": verify_block,
    "token": verify_tokens,
    "coupled": verify_coupled,
}
