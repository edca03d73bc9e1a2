"""How many tokens to draft, from what drafting costs and earns here.

A policy decides before each token is drawn. It may look at past rounds, the clock, tokens that were
submitted earlier in this round, and the draft's law at the position; never at the token that its
answer would drop, which biases the output (drop a drawn token when q(x) is small, and tokens that q
likes are kept too often).

`MeasuredLength` maximises tokens over time. At the optimal rate R*, a round is best stopped so as
to maximise tokens - R* x time (renewal reward; Dinkelbach, "On Nonlinear Fractional Programming",
1967), and R* is estimated by the rate of recent rounds. One more row of a decode may cost nothing
and the next one half a decode, so costs are looked up in a table of measured times and several rows
are considered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specllama.acceptance import Round
from specllama.costs import Budget, CostTable
from specllama.errors import UsageError
from specllama.sampling import Floats, Law

MAX_DRAFT_TOKENS = 16


class LengthPolicy(Protocol):
    """Decides, for each sequence of a round and each draft token in turn, whether to go on.

    `i` numbers the sequences of the round, as in the last call of `start`.
    """

    def start(self, behind: Sequence[int]) -> None:
        """Drafting begins; per sequence, how many tokens the draft model has not read yet."""
        ...

    def expects(self, i: int) -> bool:
        """Whether drafting is expected to pay, asked before a prompt is read for it."""
        ...

    def go(self, i: int) -> bool:
        """Whether the draft model is run for the next token; its law is not known yet."""
        ...

    def submit(self, i: int, shape: Callable[[], Law]) -> bool:
        """Whether a token is drawn; a token once drawn is always submitted.

        shape: computes the draft's law at the position, at temperature 1 where it is one-hot.
        """
        ...

    def miss(self, i: int) -> None:
        """The draft model was run, and there is nothing that it could propose."""
        ...

    def observe(self, rounds: Sequence[Round]) -> None:
        """The outcome of the round, one entry per sequence."""
        ...


class FixedLength:
    """Always the same number of draft tokens.

    Raises UsageError outside 0 .. MAX_DRAFT_TOKENS.
    """

    def __init__(self, n_tokens: int) -> None:
        if not 0 <= n_tokens <= MAX_DRAFT_TOKENS:
            raise UsageError(
                f"the number of draft tokens must be between 0 and {MAX_DRAFT_TOKENS}, "
                f"not {n_tokens}"
            )
        self.n_tokens = n_tokens
        self._drafted: list[int] = []

    def start(self, behind: Sequence[int]) -> None:
        """Nothing is drafted yet."""
        self._drafted = [0] * len(behind)

    def expects(self, i: int) -> bool:
        """Unless nothing is drafted at all."""
        return self.n_tokens > 0

    def go(self, i: int) -> bool:
        """Until the fixed number is reached."""
        return self._drafted[i] < self.n_tokens

    def submit(self, i: int, shape: Callable[[], Law]) -> bool:
        """Always; the law does not matter to a fixed length."""
        self._drafted[i] += 1
        return True

    def miss(self, i: int) -> None:
        """The next round has the same number all the same."""

    def observe(self, rounds: Sequence[Round]) -> None:
        """Nothing is learnt."""


class AcceptancePredictor:
    """The acceptance of a token before it is drawn, from the draft's law at its position.

    Logistic regression on the law's shape, trained online by a Newton step per label: what a
    verified position tells (`Round.acceptances`). state: as `state` gave it; ValueError for
    anything else.
    """

    _FORGET = 0.997

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._weights = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
        self._covariance = np.diag([1.0, 1.0, 0.5, 0.5, 0.1])
        if state:
            weights = np.array(state["weights"], dtype=np.float64)
            covariance = np.array(state["covariance"], dtype=np.float64)
            shapes = (weights.shape, covariance.shape)
            finite = np.isfinite(weights).all() and np.isfinite(covariance).all()
            if shapes != (self._weights.shape, self._covariance.shape) or not finite:
                raise ValueError("this is no state of a predictor")
            self._weights, self._covariance = weights, covariance

    @staticmethod
    def features(law: Law, depth: int) -> Floats:
        """[5] float64: bias, log of the largest probability, entropy and its root, depth."""
        probs = law.probs[law.probs > 0]
        entropy = float(-(probs * np.log(probs)).sum())
        return np.array(
            [1.0, float(np.log(probs.max())), entropy, max(entropy, 0.0) ** 0.5, depth / 8]
        )

    def predict(self, features: Floats) -> float:
        """The expected acceptance, within (0, 1)."""
        return float(1 / (1 + np.exp(-np.clip(self._weights @ features, -30, 30))))

    def learn(self, features: Floats, label: float) -> None:
        """One verified position: its features and its sum min(p, q)."""
        predicted = self.predict(features)
        slope = predicted * (1 - predicted) + 1e-3
        spread = self._covariance @ features
        gain = spread / (1 / slope + features @ spread)
        self._weights = self._weights + gain * ((label - predicted) / slope)
        np.clip(self._weights, -20, 20, out=self._weights)
        self._covariance = (self._covariance - np.outer(gain, spread)) / self._FORGET
        # Forgetting must not let a direction that is never seen grow without bound.
        excess = self._covariance.trace() / 20
        if excess > 1:
            self._covariance /= excess

    def state(self) -> dict[str, Any]:
        """For storing; the constructor takes it back."""
        return {"weights": self._weights.tolist(), "covariance": self._covariance.tolist()}


class MeasuredLength:
    """Drafts while the expected gain in tokens exceeds what its time is worth.

    draft: times of the draft model's decode by rows. worth: tokens that a look at the draft gained
    lately, None before the first. limit: most draft tokens of a round.

    A look is one step of the draft model, whose law then tells whether its token is worth a row. It
    is worth more than the acceptance alone says, since a doubtful token is not submitted. While
    looks do not pay they are taken as seldom as keeps what they are expected to lose at about a
    hundredth of the time: often when they nearly pay, hardly ever when the draft is useless, and
    not at all when even perfect drafts could not pay.
    """

    _PROBE_SHARE = 0.012
    _AHEAD = 16  # tokens considered at once: two steps of the widest kernels
    # The weight of a label in the forecast and of a look in the worth: the mean of the last
    # hundred labels or thirty looks, and more while there are fewer.
    _LABEL_WEIGHT, _LOOK_WEIGHT = 0.01, 0.03
    _PRIOR = 4
    # Tokens that the draft missed are read once and then serve many rounds.
    _AMORTISED = 64
    _UNMEASURED = 3  # draft tokens until there are times to go by
    # Looks in a row that submit nothing, after which a probe submits all the same: the predictor
    # learns only from what is verified.
    _UNHEARD = 4
    _MOST_SAVED_MS = 2000.0

    def __init__(
        self,
        budget: Budget,
        draft: CostTable,
        predictor: AcceptancePredictor | None = None,
        forecast: float = 0.7,
        worth: float | None = None,
        limit: int = MAX_DRAFT_TOKENS,
    ) -> None:
        self.budget, self.draft = budget, draft
        self.predictor = predictor or AcceptancePredictor()
        self.forecast = forecast  # acceptance of a token whose law is not known yet
        self.worth = worth
        self.is_on = True  # whether drafting paid when it was last asked
        self._n_labels = self._n_looks = self._unheard = 0
        self._limit = limit
        self._saved_ms = 0.0  # for probing
        self._probing = self._forced = False
        self._behind: list[int] = []
        self._survival: list[float] = []
        self._features: list[list[Floats]] = []

    @property
    def is_measured(self) -> bool:
        """Whether there are times to go by."""
        return self.budget.costs.is_measured and self.draft.is_measured

    @property
    def _step_ms(self) -> float:
        """A sequence's share of a draft step, which is one decode for all of them."""
        n = self.budget.n_sequences
        return self.draft.ms(n) / n

    def start(self, behind: Sequence[int]) -> None:
        """Nothing is drafted yet."""
        self._behind = list(behind)
        self._survival = [1.0] * len(behind)
        self._features = [[] for _ in behind]
        self._probing = self._forced = False

    def expected(self, i: int) -> float:
        """Tokens that drafting is expected to gain for a sequence, net of its time."""
        step = self._step_ms
        gain, _ = self.budget.best(self._chances(i, None), lambda m: m * step)
        if not self._features[i]:
            if self.worth is not None:
                gain = max(gain, self.worth)
            gain -= self.budget.rate * self._catching_up_ms(i) / self._AMORTISED
        return gain

    def expects(self, i: int) -> bool:
        """Whether drafting is expected to pay, the reading included; so without measured times."""
        return not self.is_measured or self.expected(i) > 0

    def go(self, i: int) -> bool:
        """Whether some number of further draft tokens is expected to pay, or to teach."""
        depth = len(self._features[i])
        if depth >= self._limit or self._forced:
            return False
        if not self.is_measured:
            return depth < self._UNMEASURED
        if depth == 0 and self.budget.is_resting:
            return False
        gain = self.expected(i)
        if depth == 0:
            self.is_on = gain > 0
        return gain > 0 or (depth == 0 and i == 0 and self._may_probe(gain))

    def submit(self, i: int, shape: Callable[[], Law]) -> bool:
        """Whether the token pays for its row, now that the law at its position is known."""
        features = self.predictor.features(shape(), len(self._features[i]))
        chance = self.predictor.predict(features)
        if self.is_measured:
            step = self._step_ms
            gain, _ = self.budget.best(self._chances(i, chance), lambda m: (m - 1) * step)
            if not self._features[i]:
                self._looked(max(0.0, gain) - self.budget.rate * step)
            if gain <= 0 and not self._insists(gain):
                return False
        self._features[i].append(features)
        self._survival[i] *= chance
        self._unheard = 0
        self.budget.take(1)
        return True

    def miss(self, i: int) -> None:
        """A look that cost its time and gave nothing; what is not proposed is not accepted."""
        self._expect(0.0)
        if self.is_measured and not self._features[i]:
            self._looked(-self.budget.rate * self._step_ms)

    def _looked(self, gain: float) -> None:
        """Remember what a look was worth in tokens, net of its time."""
        self._n_looks += 1
        self._unheard += 1
        # The first looks were judged by a predictor that knew little: they are forgotten sooner.
        weight = max(self._LOOK_WEIGHT, 2.5 / (self._n_looks + 2 * self._PRIOR))
        self.worth = gain if self.worth is None else self.worth + weight * (gain - self.worth)

    def _insists(self, gain: float) -> bool:
        """Whether a token that does not seem to pay is submitted, to learn whether that is so."""
        if not self._probing or self._unheard <= self._UNHEARD:
            return False
        # It may overdraw: further probes wait until it is paid back.
        self._saved_ms += gain / self.budget.rate
        self._forced = True
        return True

    def _chances(self, i: int, first: float | None) -> list[float]:
        """That 1, 2, ... further tokens survive; the first with a chance that may be known."""
        chances, survival = [], self._survival[i]
        for m in range(min(self._AHEAD, self._limit - len(self._features[i]))):
            survival *= self.forecast if first is None or m > 0 else first
            chances.append(survival)
        return chances

    def _catching_up_ms(self, i: int) -> float:
        """Time that the first step takes longer, because it reads what the draft missed."""
        return max(0.0, self.draft.ms(self._behind[i]) - self.draft.ms(1))

    def _may_probe(self, gain: float) -> bool:
        """Whether a perfect draft would pay, and what the look will lose has been saved up."""
        step = self._step_ms
        perfect = [1.0] * min(self._AHEAD, self._limit)
        if self.budget.best(perfect, lambda m: m * step)[0] <= 0:
            return False
        # A look that says no loses its own step; submitting is decided after it.
        loss = min(-gain / self.budget.rate, step) + self._catching_up_ms(0)
        if loss > self._saved_ms:
            return False
        self._saved_ms -= loss
        self._probing = True
        return True

    def observe(self, rounds: Sequence[Round]) -> None:
        """Learn from the verified positions. Rounds are those of the last `start`, in its order."""
        if not self._probing:
            saved = self._saved_ms + self._PROBE_SHARE * self.budget.last_ms
            self._saved_ms = min(saved, self._MOST_SAVED_MS)
        for outcome, features in zip(rounds, self._features, strict=True):
            for label, x in zip(outcome.acceptances, features, strict=False):
                self.predictor.learn(x, label)
                self._expect(label)

    def _expect(self, label: float) -> None:
        """Move the forecast by one position's acceptance."""
        self._n_labels += 1
        weight = max(self._LABEL_WEIGHT, 1 / (self._n_labels + self._PRIOR))
        self.forecast += weight * (label - self.forecast)

    def break_even(self) -> float:
        """The acceptance from which on drafting pays, by the measured times; inf if none does."""
        step, costs = self.draft.ms(1), self.budget.costs
        plain = costs.ms(1)

        def pays(acceptance: float) -> bool:
            tokens, survival = 1.0, 1.0
            for m in range(1, self._limit + 1):
                survival *= acceptance
                tokens += survival
                if tokens * plain > m * step + costs.ms(1 + m):
                    return True
            return False

        if not pays(1.0):
            return float("inf")
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high
