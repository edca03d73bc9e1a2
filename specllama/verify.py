"""Is what comes out really the target's, on this machine, with this pair?

Four questions: does a greedy answer survive being decoded again; do the tokens of many short
answers follow the target's law; is as much of the proposals kept as the two laws say; and does the
test of the law see a rule that is known to be wrong.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from specllama import replay as replaying
from specllama.acceptance import VERIFIERS, Draft, Round, TargetLaws
from specllama.coupling import KeyedStreams
from specllama.drafting import Drafter, NullDrafter, SequenceState
from specllama.errors import UsageError
from specllama.generation import Pair, encode_prompt
from specllama.sampled_law import Fit, Memo, Setting, fit, remembered
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator
from specllama.tally import FEWEST_ROUNDS, Acceptance, Tally
from specllama.workloads import Workload

DRAFT_TOKENS = 3
# Parts of the time for the greedy answers, for the acceptance, and for each answer in turn with the
# rule and with the control.
_GREEDY_SHARE, _ACCEPTANCE_SHARE, _CONTROL_SHARE = 0.35, 0.15, 0.3
_FEWEST_ANSWERS = 200
# In the test of the law, so that few rows serve thousands of answers: the likeliest tokens of each
# position, and drafted tokens of each round.
_FEW_TOKENS, _FEW_DRAFTS = 4, 3
# A draft that is nearly the target leaves nothing to correct, so that no test of the law could see
# a wrong correction. From this share of kept tokens on, it is sampled colder there.
_NEARLY, _COLD = 0.9, 0.25
_ROOM = 80  # tokens of the context that a text leaves free
_OFFSETS = (0, 5, 17, 29, 41, 53)  # tokens into an answer


@dataclass(frozen=True)
class Text:
    """A prompt in the target's tokens, with a name for it."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What is verified.

    params: how tokens are drawn in the tests of the law. verifier: the acceptance rule.
    draft_tokens: drafted each round. seconds: about how long it may take. greedy_tokens: of each
    greedy answer. rounds: the most for the acceptance. positions: texts after which the law is
    tested, fewer when the time is up. answers: the most for each of them.
    """

    texts: tuple[Text, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    verifier: str = "block"
    draft_tokens: int = DRAFT_TOKENS
    seconds: float = 60.0
    seed: int = 0
    greedy_tokens: int = 64
    rounds: int = 5000
    positions: int = 6
    answers: int = 6000

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer in the test of the law."""
        return min(self.draft_tokens, _FEW_DRAFTS) + 1


@dataclass(frozen=True)
class Position:
    """The test of the law after one text."""

    name: str
    fit: Fit
    control: Fit


@dataclass(frozen=True)
class Report:
    """All answers.

    greedy: with the names of their texts and drafters. draft_temperature: of the draft in the test
    of the law, where it is not the target's.
    """

    plan: Plan
    greedy: tuple[tuple[str, replaying.Replay], ...]
    acceptance: Acceptance
    positions: tuple[Position, ...]
    draft_temperature: float | None = None

    @property
    def fit(self) -> Fit:
        """The test of the law over all positions."""
        return sum((position.fit for position in self.positions), Fit())

    @property
    def control(self) -> Fit:
        """The same of the rule that is known to be wrong."""
        return sum((position.control for position in self.positions), Fit())

    @property
    def greedy_ok(self) -> bool:
        """Whether there were drafts, and every answer is the target's own up to near ties."""
        drafted = sum(one.trace.drafted for _, one in self.greedy)
        return drafted > 0 and all(one.ok for _, one in self.greedy)

    @property
    def law_ok(self) -> bool:
        """Whether the answers fit the law as a whole, and at each position."""
        fits = [position.fit for position in self.positions]
        return bool(fits) and all(fit.fits for fit in (*fits, self.fit))

    @property
    def control_ok(self) -> bool:
        """Whether the test saw the wrong rule."""
        return not self.control.fits

    @property
    def ok(self) -> bool:
        """Whether all is as it should be."""
        return self.greedy_ok and self.law_ok and self.acceptance.ok and self.control_ok


def texts(pair: Pair, loads: Sequence[Workload]) -> tuple[Text, ...]:
    """Workloads in the pair's tokens, cut where the context would leave no room for an answer."""
    most = pair.target.n_ctx - _ROOM
    found = []
    for load in loads:
        for number, prompt in enumerate(load.prompts, 1):
            tokens = encode_prompt(pair.tokenizer, prompt)
            name = load.name if len(load.prompts) == 1 else f"{load.name} {number}"
            if tokens and most > 0:
                found.append(Text(name, tuple(tokens[:most])))
    return tuple(found)


def correct_from_target(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """The negative control: token verification that corrects from p instead of the residual.

    It leaves the draft's preferences in the text. It is no rule of this package; it is here to show
    that the test of the law would see such a mistake.
    """
    for i, (token, q) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        p = target(i)
        if not streams.acceptance.bernoulli(min(1.0, p.prob(token) / q.prob(token))):
            return Round((*draft.tokens[:i], streams.correction.categorical(p)), draft, ())
    bonus = streams.correction.categorical(target(len(draft.tokens)))
    return Round((*draft.tokens, bonus), draft, ())


def verify(
    pair: Pair,
    plan: Plan,
    tell: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Answer the four questions for a loaded pair. tell: what is being done, for the user.

    Raises UsageError when there is nothing to verify, and what decoding raises.
    """
    if isinstance(pair.speculation.drafter, NullDrafter):
        raise UsageError("nothing would be drafted; choose another --drafter or --draft-tokens")
    if not plan.texts:
        raise UsageError("there is no text to verify with; give a prompt of some tokens")
    begun = clock()
    tell("greedy answers")
    greedy = list(_greedy(pair, plan, lambda: clock() - begun < plan.seconds * _GREEDY_SHARE))
    until = plan.seconds * (_GREEDY_SHARE + _ACCEPTANCE_SHARE)
    tell("how much is accepted")
    acceptance = _acceptance(pair, plan, lambda: clock() - begun < until)
    cold, drafter = _for_the_law(pair, plan, acceptance)
    positions = []
    for number, (name, prefix) in enumerate(_positions(plan, greedy)):
        if number and clock() - begun > plan.seconds:
            break
        tell(f"the law of the tokens, {number + 1} of {plan.positions}")
        share = max(0.0, begun + plan.seconds - clock()) / (plan.positions - number)
        positions.append(_position(pair, plan, drafter, name, prefix, share, clock))
    return Report(plan, tuple(greedy), acceptance, tuple(positions), cold)


def _fixed(pair: Pair, n_tokens: int) -> Drafter:
    """The draft model with so many tokens a round, or what a pair without one drafts with."""
    at_length = pair.speculation.at_length
    return pair.speculation.drafter if at_length is None else at_length(n_tokens).drafter


def _for_the_law(
    pair: Pair, plan: Plan, acceptance: Acceptance
) -> tuple[float | None, Drafter]:
    """The drafter of the test of the law, and the temperature it is given if it needs another."""
    n_drafts, at_length = plan.answer_tokens - 1, pair.speculation.at_length
    if at_length is None or acceptance.high < _NEARLY * plan.draft_tokens:
        return None, _fixed(pair, n_drafts)
    cold = _COLD * plan.params.temperature
    return cold, at_length(n_drafts, temperature=cold).drafter


def _greedy(
    pair: Pair, plan: Plan, has_time: Callable[[], bool]
) -> Iterator[tuple[str, replaying.Replay]]:
    """Text by text, with the pair's own drafter and with a fixed number of tokens in turn."""
    drafters = {"as loaded": pair.speculation.drafter}
    if pair.speculation.at_length is not None:
        name = f"{plan.draft_tokens} draft tokens"
        drafters = {name: _fixed(pair, plan.draft_tokens), **drafters}
    verify_rule = VERIFIERS[plan.verifier]
    for number, (text, kind) in enumerate(itertools.product(plan.texts, drafters)):
        if number >= len(drafters) and not has_time():
            return
        n_emitted = min(plan.greedy_tokens, pair.target.n_ctx - len(text.tokens))
        trace = replaying.answer(
            pair.target, drafters[kind], verify_rule, text.tokens, n_emitted, pair.n_tokens
        )
        found = replaying.replay(pair.target, trace, pair.n_tokens)
        yield f"{text.name}, {kind}", found


def _acceptance(pair: Pair, plan: Plan, has_time: Callable[[], bool]) -> Acceptance:
    """Sampled answers through the loop with its own caches, as long as there is time."""
    tally = Tally(plan.verifier)
    speculator = Speculator(pair.target, _fixed(pair, plan.draft_tokens), tally, pair.n_tokens)
    for row, text in enumerate(itertools.cycle(plan.texts)):
        room = pair.target.n_ctx - len(text.tokens)
        streams = _streams(plan, -1 - row)
        state = SequenceState(
            0, list(text.tokens), plan.params, streams, min(2 * plan.greedy_tokens, room)
        )
        speculator.prefill(state)
        while state.n_left > 0 and len(tally.kept) < plan.rounds:
            speculator.round([state])
        if len(tally.kept) == plan.rounds:
            return tally.summary()
        if not has_time() and (len(tally.kept) >= FEWEST_ROUNDS or row > len(plan.texts)):
            return tally.summary()
    raise AssertionError("there is always a next text")


def _positions(
    plan: Plan, greedy: Sequence[tuple[str, replaying.Replay]]
) -> Iterator[tuple[str, list[int]]]:
    """Ends of texts, and places in what the target says after them."""
    answers = {one.trace.prompt: one.trace.answer for _, one in greedy}
    places = ((text, offset) for offset in _OFFSETS for text in plan.texts)
    for text, offset in itertools.islice(places, plan.positions):
        said = answers.get(text.tokens, [])[:offset]
        where = f", token {offset}" if offset else ""
        yield f"{text.name}{where}", [*text.tokens, *said]


def _position(
    pair: Pair,
    plan: Plan,
    drafter: Drafter,
    name: str,
    prefix: Sequence[int],
    seconds: float,
    clock: Callable[[], float],
) -> Position:
    """The test of the law after one text, with the rule and with the control on the same rows."""
    setting = Setting(
        Memo(pair.target),
        remembered(drafter),
        replace(plan.params, top_k=min(plan.params.top_k or _FEW_TOKENS, _FEW_TOKENS)),
        pair.n_tokens,
        plan.answer_tokens,
        plan.seed,
        plan.verifier == "coupled",
    )
    independent = replace(setting, is_coupled=False)  # the control tosses coins
    fits = []
    for rule, share, chosen in (
        (VERIFIERS[plan.verifier], 1 - _CONTROL_SHARE, setting),
        (correct_from_target, _CONTROL_SHARE, independent),
    ):
        end = clock() + share * seconds
        counts: Counter[tuple[int, ...]] = Counter()
        for number, tokens in enumerate(chosen.answers(rule, prefix), 1):
            counts[tokens] += 1
            if number >= share * plan.answers or (number >= _FEWEST_ANSWERS and clock() > end):
                break
        fits.append(fit(chosen, prefix, counts))
    return Position(name, *fits)


def _streams(plan: Plan, row: int) -> Streams:
    kind = KeyedStreams.keyed if plan.verifier == "coupled" else Streams.seeded
    return kind(plan.seed, row)
