"""What `specllama verify` finds, on pairs that are right and on pairs that are not.

It takes about half a minute, a third of it for the one mistake that hardly shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from command import specllama
from test_law import MUTATIONS, TRANSFORMS, forget_drafts
from tiny import tiny
from toys import Iid, Noisy, Oracle, Table, ToyContext, toy_lm

import specllama as package
from specllama.acceptance import VERIFIERS, Draft, Round, TargetLaws, Verifier
from specllama.drafting import Drafter, ModelDrafter, NullDrafter
from specllama.errors import UsageError
from specllama.generation import Pair
from specllama.lm import CachedLM, LogitRows, Rows
from specllama.lookahead import FixedLength
from specllama.sampled_law import Fit
from specllama.sampling import SamplingParams, Streams
from specllama.tuning import Speculation
from specllama.verify import Plan, Report, Text, texts, verify
from specllama.verify_report import as_object, page
from specllama.workloads import Workload

PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
# The pair in which block acceptance with the token's residual shows.
TARGET, DRAFT = Iid(0.4, 0.2, 0.4), Iid(0.1, 0.1, 0.8)
PLAN = Plan(
    (Text("a", (0, 1)), Text("b", (2,))),
    PLAIN,
    draft_tokens=2,
    greedy_tokens=12,
    rounds=400,
    positions=2,
    answers=1000,
)


class Letters:
    """A tokenizer whose tokens are letters."""

    name = "letters.gguf"
    n_vocab = 26
    bos: int | None = None
    end_tokens: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def piece(self, token: int) -> bytes:
        return bytes([ord("a") + token])


def pair(
    target: CachedLM | Iid | Table = TARGET,
    drafter: Callable[[], Drafter] | None = None,
    n_vocab: int = 3,
) -> Pair:
    make = drafter or (lambda: ModelDrafter(toy_lm(DRAFT), FixedLength(2), n_vocab))
    lm = target if isinstance(target, CachedLM) else toy_lm(target)

    def at_length(_: int, temperature: float | None = None) -> Speculation:
        made = make()
        if isinstance(made, ModelDrafter):
            made._temperature = temperature
        return Speculation(made, "model")

    speculation = Speculation(make(), "model", at_length=at_length)
    return Pair(lm, Letters(), speculation, n_tokens=n_vocab)


def check(pair: Pair, plan: Plan = PLAN) -> Report:
    """The report, within any time."""
    return verify(pair, plan, clock=lambda: 0.0)


@pytest.mark.parametrize("verifier", ["block", "token", "coupled"])
def test_a_right_pair_is_found_to_be_right(verifier: str) -> None:
    for target in (TARGET, Table(3, seed=1)):
        report = check(pair(target), replace(PLAN, verifier=verifier))
        assert report.ok, page(pair(), report)
        assert report.acceptance.rounds == 400
        assert report.fit.freedom > 20
        assert len(report.greedy) == 4


def test_transforms_and_other_drafts_are_right_too() -> None:
    target = Table(3, seed=5, concentration=3)
    draft = Noisy(target, seed=6)

    def drafter() -> Drafter:
        return ModelDrafter(toy_lm(draft), FixedLength(2), 3)

    for params in (TRANSFORMS["frequency penalty"], replace(PLAIN, temperature=0.6, top_p=0.9)):
        report = check(pair(target, drafter), replace(PLAN, params=params))
        assert report.law_ok and report.acceptance.ok and report.greedy_ok


# Answers that a mistake needs to be seen, where a thousand are too few.
HARD_TO_SEE = {"block product not capped": 5000, "block acceptance with the token residual": 20_000}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_mutation_of_the_law_test_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, wrong = MUTATIONS[name]
    rule = "token" if "token rule" in name or name == "correction from p" else "block"
    monkeypatch.setitem(VERIFIERS, rule, wrong)
    plan = replace(PLAN, verifier=rule)
    if name in HARD_TO_SEE:
        plan = replace(plan, answers=HARD_TO_SEE[name], positions=1)
    report = check(pair(drafter=lambda: over(DRAFT)(Oracle([]))), plan)
    assert not report.ok
    assert not (report.law_ok and report.acceptance.ok)
    assert not report.law_ok or "dropping" in name


def test_penalties_that_do_not_see_the_drafted_tokens_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VERIFIERS, "token", forget_drafts)
    params = TRANSFORMS["frequency penalty"]
    report = check(pair(), replace(PLAN, verifier="token", params=params, answers=3000))
    assert not report.law_ok


def keep_all(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
    """The draft is believed."""
    bonus = streams.correction.categorical(target(len(draft.tokens)))
    return Round((*draft.tokens, bonus), draft, ())


def test_a_rule_that_keeps_every_draft_fails_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "block", keep_all)
    report = check(pair())
    assert not (report.greedy_ok or report.law_ok or report.acceptance.ok)
    assert report.greedy[0][1].wrong[0] == 0
    assert "Something is off" in page(pair(), report)


class Forgetful(ToyContext):
    """A context whose rollback keeps one token too many, in the place of the next one."""

    def truncate(self, slot: int, length: int) -> None:
        held = self.slots[slot]
        self.stale = held[length] if len(held) > length else None
        super().truncate(slot, length)

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        stale, self.stale = getattr(self, "stale", None), None
        if stale is not None:
            batch = [replace(r, tokens=[stale, *list(r.tokens)[1:]]) for r in batch]
        return super().decode(batch)


def test_a_rollback_that_keeps_a_rejected_token_is_caught_row_by_row() -> None:
    target = Table(3, seed=12)

    def drafter() -> Drafter:
        return ModelDrafter(toy_lm(Table(3, seed=13)), FixedLength(2), 3)

    assert check(pair(target, drafter)).greedy_ok
    report = check(pair(CachedLM(Forgetful(target, 3)), drafter))
    assert not report.greedy_ok
    far = [one for _, one in report.greedy if not one.ok]
    assert far and all(fork.margin > one.limit for one in far for fork in one.forks[:1])


class Wobbly(ToyContext):
    """A context whose wide decodes like the second token a little more."""

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        changed = []
        for rows, logits in zip(batch, super().decode(batch), strict=True):
            wide = logits.copy()
            wide[:, 1] += 0.02 * (len(rows.tokens) > 1)
            changed.append(wide)
        return changed


@pytest.mark.parametrize(("second", "forks"), [(0.4975, True), (0.3, False)])
def test_near_ties_may_fall_either_way_and_are_listed(second: float, forks: bool) -> None:
    target = Iid(0.5, second, 0.5 - second)
    near = pair(CachedLM(Wobbly(target, 3)))
    report = check(near)
    assert report.greedy_ok
    found = [fork for _, one in report.greedy for fork in one.forks]
    assert bool(found) == forks
    if forks:
        margin = np.log(0.5 / second)
        assert found[0].margin == pytest.approx(margin, rel=1e-3)
        assert report.greedy[0][1].noise == pytest.approx(0.02, rel=1e-3)
        assert "'b' for 'a', 0.005 below it (limit 0.04)" in page(near, report)


def test_a_draft_that_is_the_target_is_sampled_colder_so_that_the_control_is_seen() -> None:
    twins = pair(drafter=lambda: ModelDrafter(toy_lm(TARGET), FixedLength(2), 3))
    report = check(twins, PLAN)
    assert report.ok and report.draft_temperature == 0.25
    assert "draws at temperature 0.25 here" in page(twins, report)
    assert check(pair()).draft_temperature is None


def test_a_control_that_is_not_seen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.verify._NEARLY", 2)
    twins = pair(drafter=lambda: ModelDrafter(toy_lm(TARGET), FixedLength(2), 3))
    report = check(twins)
    assert report.greedy_ok and report.law_ok and report.acceptance.ok
    assert not report.control_ok and not report.ok
    assert "the tests saw too little" in page(twins, report)


def test_an_impossible_token_is_named_and_not_pooled_away() -> None:
    target = Iid(0, 0.5, 0.5)

    def emit_zero(draft: Draft, target: TargetLaws, streams: Streams) -> Round:
        first = 0 if streams.acceptance.bernoulli(0.01) else streams.correction.categorical(
            target(0)
        )
        return Round((first,), draft, ())

    VERIFIERS["careless"] = emit_zero
    try:
        report = check(pair(target), replace(PLAN, verifier="careless"))
    finally:
        del VERIFIERS["careless"]
    assert report.fit.impossible > 0 and not report.law_ok
    assert "answers hold a token to which the target gives no chance" in page(pair(), report)


def test_the_power_that_is_stated_shrinks_with_the_answers() -> None:
    few, many = (Fit(freedom=20, n=n).detectable for n in (1000, 100_000))
    assert many == pytest.approx(few / 10, rel=1e-6)
    assert 0.1 < few < 0.2


def test_time_ends_it_with_at_least_something_of_each() -> None:
    ticks = iter(range(10**6))
    report = verify(pair(), replace(PLAN, seconds=1), clock=lambda: float(next(ticks)))
    assert len(report.greedy) == 2
    assert report.acceptance.rounds >= 30
    assert [position.fit.n for position in report.positions] == [200]


def test_nothing_to_verify_is_refused() -> None:
    plain = Pair(toy_lm(TARGET), Letters(), Speculation(NullDrafter(), "none"), n_tokens=3)
    with pytest.raises(UsageError, match="nothing would be drafted"):
        check(plain)
    with pytest.raises(UsageError, match="no text"):
        check(pair(), replace(PLAN, texts=()))


def test_texts_are_cut_to_leave_room() -> None:
    wide = Pair(
        CachedLM(ToyContext(TARGET, 3, n_ctx=90)),
        Letters(),
        Speculation(NullDrafter(), "none"),
        n_tokens=3,
    )
    found = texts(wide, [Workload("x", ("abc" * 30, "a", ""))])
    assert [(text.name, len(text.tokens)) for text in found] == [("x 1", 10), ("x 2", 1)]


def test_the_object_is_the_report() -> None:
    one = pair()
    found = as_object(one, check(one))
    again = json.loads(json.dumps(found, allow_nan=False))
    assert again == found
    assert found["ok"] and found["law"]["ok"] and not found["law"]["impossible"]
    assert [p["name"] for p in found["law"]["positions"]] == ["a", "b"]
    assert found["control"]["p"] < 1e-6
    assert len(found["greedy"]["answers"]) == 4


@pytest.fixture(scope="module")
def real() -> Iterator[Pair]:
    with package.load(model=tiny(), draft=tiny(noise=0.2), draft_tokens=3, ctx_size=256) as loaded:
        yield loaded


SMALL = Plan(
    (Text("a", (1, 300, 301)),),
    SamplingParams(temperature=1, top_k=4, top_p=1, min_p=0),
    greedy_tokens=24,
    rounds=200,
    positions=1,
    answers=1500,
)


def test_real_files_pass(real: Pair) -> None:
    report = check(real, SMALL)
    assert report.greedy_ok and report.law_ok and report.acceptance.ok, page(real, report)
    # And again, after all that was done to its caches.
    chunks = list(real.generate([1, 300], SamplingParams(temperature=0), max_tokens=8))
    assert chunks[-1].finish_reason is not None


@pytest.mark.parametrize("wrong", [MUTATIONS["correction from p"][1], keep_all])
def test_wrong_rules_on_real_files_fail(
    wrong: Verifier, real: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "block", wrong)
    assert not check(real, SMALL).law_ok


def test_the_command_prints_one_page_and_one_object() -> None:
    files = ["-m", str(tiny()), "-md", str(tiny(noise=0.2)), "-c", "384", "--draft-tokens", "2"]
    options = ["--seconds", "2", "-n", "16", "--workload", "prose", "--temp", "1"]
    shown = specllama("verify", *files, *options)
    lines = shown.text.splitlines()
    assert shown.code == 0, shown
    assert lines[-1] == "What comes out is the target's own."
    marked = [line[5:24].strip() for line in lines if line.startswith("ok ")]
    assert marked == [
        "greedy, replayed", "greedy, row by row", "law of the tokens", "acceptance",
        "negative control",
    ]
    assert "greedy answers" in shown.err
    answered = specllama("verify", *files, *options, "--json")
    assert json.loads(answered.out)["ok"]


@pytest.mark.parametrize(
    "options",
    [("--drafter", "none"), ("--draft-tokens", "0"), ("--temp", "0"), ("--seconds", "0"),
     ("--workload", "prose", "--prompts", "x")],
)
def test_what_cannot_be_verified_is_a_usage_error(options: tuple[str, ...]) -> None:
    result = specllama("verify", "-m", str(tiny()), "-md", str(tiny(noise=0.2)), *options)
    assert (result.code, result.out) == (2, b"")
