"""The benchmark: what runs in which order, what is made of the times, and what is said of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Result, environment, specllama, without_build_note
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from tiny import CHECKOUT, tiny, vocab_file

from specllama import bench, bench_plot, bench_report, comparison, llama, workloads
from specllama.bench import Answer, Cell, Decodes, Plan, Setting, Step, Variant
from specllama.bench_stand import Stand
from specllama.cli import _run
from specllama.comparison import Comparison, Figures, Spread
from specllama.costs import CostTable
from specllama.errors import SpecllamaError, UsageError
from specllama.generation import Pair, Stats
from specllama.loading import load
from specllama.sampling import SamplingParams
from specllama.workloads import Workload

TARGET, GOOD = str(tiny(context=1024)), str(tiny(context=1024, noise=0.05))
POOR = str(tiny(context=1024, seed=7))
SHORT = ["bench", "-m", TARGET, "-t", "1", "-n", "24", "--repetitions", "2"]
GREEDY = Setting("0", SamplingParams(temperature=0))
SAMPLED = Setting("0.8", SamplingParams(temperature=0.8))
TALK = Workload("talk", ("hello there", "the end of it"))
LIST = Workload("list", ("one, two, three",))


@pytest.fixture
def pair() -> Iterator[Pair]:
    with load(model=TARGET, draft=GOOD, threads=1, verifier="block") as pair:
        yield pair


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Result]:
    """Runs a command line in this process."""

    def run_here(*arguments: str | Path) -> Result:
        capfdbinary.readouterr()
        code = _run([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return Result(code, out, without_build_note(err))

    return run_here


Runner = Callable[..., Result]

# --- what is run --------------------------------------------------------------------------------


def test_variants_take_turns_and_who_begins_moves_on() -> None:
    plan = Plan([TALK, LIST], [GREEDY], repetitions=2)
    steps = [
        (step.workload.name, step.repetition, step.prompt, step.variant)
        for step in bench.schedule(plan, ["plain", "auto", "3"])
    ]
    first, second = TALK.prompts
    [third] = LIST.prompts
    assert steps == [
        ("talk", 0, first, "plain"), ("talk", 0, first, "auto"), ("talk", 0, first, "3"),
        ("talk", 1, first, "plain"), ("talk", 1, first, "auto"), ("talk", 1, first, "3"),
        ("talk", 1, second, "auto"), ("talk", 1, second, "3"), ("talk", 1, second, "plain"),
        ("talk", 2, first, "3"), ("talk", 2, first, "plain"), ("talk", 2, first, "auto"),
        ("talk", 2, second, "plain"), ("talk", 2, second, "auto"), ("talk", 2, second, "3"),
        ("list", 0, third, "plain"), ("list", 0, third, "auto"), ("list", 0, third, "3"),
        ("list", 1, third, "plain"), ("list", 1, third, "auto"), ("list", 1, third, "3"),
        ("list", 2, third, "auto"), ("list", 2, third, "3"), ("list", 2, third, "plain"),
    ]  # fmt: skip


def test_every_setting_of_a_workload_is_run_before_the_next_workload() -> None:
    steps = bench.schedule(Plan([TALK, LIST], [GREEDY, SAMPLED], repetitions=1), ["plain"])
    cells = [(step.workload.name, step.setting.name) for step in steps if step.repetition == 0]
    assert cells == [("talk", "0"), ("talk", "0.8"), ("list", "0"), ("list", "0.8")]


class Recording:
    """Notes how variants are called, and lets them do their work."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int, int]] = []

    def watch(self, variant: Variant) -> Variant:
        def answer(prompt: str, params: SamplingParams, n_tokens: int, seed: int) -> Answer:
            self.calls.append((variant.name, prompt, n_tokens, seed))
            return variant.answer(prompt, params, n_tokens, seed)

        return replace(variant, answer=answer)


def test_real_runs_follow_the_schedule_with_one_seed_a_repetition(pair: Pair) -> None:
    recording, steps = Recording(), list[Step]()
    variants = [recording.watch(v) for v in Stand(pair).variants(None, False)]
    plan = Plan([TALK, LIST], [SAMPLED], n_tokens=40, repetitions=3, seed=100)
    cells = list(bench.run(plan, variants, steps.append))
    assert steps == list(bench.schedule(plan, ["plain", "auto"]))
    expected = [
        (s.variant, s.prompt, 40 if s.repetition else 32, 100 + s.repetition) for s in steps
    ]
    assert recording.calls == expected
    assert [(cell.workload, cell.setting) for cell in cells] == [
        ("talk", SAMPLED), ("list", SAMPLED)
    ]
    for cell, n_prompts in zip(cells, (2, 1), strict=True):
        for runs in cell.answers.values():
            assert [len(answers) for answers in runs] == [n_prompts] * 3


def test_every_answer_does_the_whole_work_again(pair: Pair) -> None:
    stand = Stand(pair)
    plan = Plan([LIST], [GREEDY], n_tokens=24, repetitions=2)
    [cell] = bench.run(plan, [*stand.variants(None, False), stand.fixed(3)])
    texts = set()
    for name, runs in cell.answers.items():
        for [answer] in runs:
            stats = answer.stats
            assert (stats.prompt_cached_n, stats.predicted_n, stats.verifier) == (0, 24, "block")
            assert sum(answer.target.by_rows.values()) == stats.rounds
            assert answer.target.ms + answer.draft.ms < stats.predicted_ms
            texts.add((name, stats.rounds, stats.draft_n))
    assert ("plain", 24, 0) in texts
    fixed = [(rounds, drafted) for name, rounds, drafted in texts if name == "fixed 3"]
    assert len(fixed) == 1 and fixed[0][0] < 24 and fixed[0][1] > 0


def test_a_fixed_length_is_what_is_decoded(pair: Pair) -> None:
    stand = Stand(pair)
    answer = stand.fixed(5).answer("hello", GREEDY.params, 60, 1)
    assert max(answer.stats.lengths) == 5
    assert answer.target.by_rows[6] == answer.stats.lengths[5] > 3
    drafted = sum(answer.draft.by_rows.values())
    assert drafted == answer.stats.draft_n


def test_only_its_own_answers_teach_what_decides_the_length(pair: Pair) -> None:
    before = pair.target.on_decode
    stand, own = Stand(pair), pair.speculation
    assert own.budget is not None and pair.target.on_decode is before is not None
    known = own.budget.costs.timings()
    for variant in (stand.plain(), stand.fixed(9)):
        variant.answer("hello", GREEDY.params, 30, 1)
    assert own.budget.costs.timings() == known
    stand.own(None).answer("hello", GREEDY.params, 30, 1)
    assert own.budget.costs.timings() != known
    assert pair.speculation is own and pair.target.on_decode is before


def test_an_interrupted_answer_leaves_the_pair_as_it_was(pair: Pair) -> None:
    stand, own, told = Stand(pair), pair.speculation, pair.target.on_decode
    with pytest.raises(UsageError):
        stand.fixed(3).answer("hello " * 3000, GREEDY.params, 4, 1)
    assert pair.speculation is own and pair.target.on_decode is told


def test_a_draft_that_cannot_draft_ends_the_run_at_the_warm_up() -> None:
    broken = str(tiny("attention", nan=-1))
    with load(model=TARGET, draft=broken, draft_tokens=4, threads=1) as pair:
        plan = Plan([Workload("long", ("hello " * 80,))], [GREEDY], n_tokens=16, repetitions=1)
        variants = Stand(pair).variants(4, False)
        with pytest.raises(SpecllamaError, match='nothing for the workload long, .*"fixed 4"'):
            list(bench.run(plan, variants))


def test_all_lengths_are_one_to_fifteen_and_plain_decoding_is_none(pair: Pair) -> None:
    variants = Stand(pair).variants(None, True)
    assert [variant.length for variant in variants] == [0, None, *range(1, 16)]
    variants = Stand(pair).variants(3, True)
    assert sorted(v.length for v in variants if v.length is not None) == list(range(16))


def test_lookup_alone_has_its_lengths_too() -> None:
    with load(model=TARGET, drafter="lookup", threads=1, verifier="block") as pair:
        stand = Stand(pair)
        assert stand.draft is None and stand.break_even() is None
        text = "of all that he was told by them, the end is what he had to be at"
        longest = [
            max(stand.fixed(n).answer(text + text[:40], GREEDY.params, 40, 1).stats.lengths)
            for n in (1, 4, 15)
        ]
    assert longest == [1, 4, 15]


# --- prompts and settings -----------------------------------------------------------------------


def test_temperatures_make_settings_and_one_means_without_truncation() -> None:
    found = bench.settings("0, 0.8,1", SamplingParams(top_k=7), truncated=False)
    assert [setting.name for setting in found] == ["0", "0.8", "1, untruncated"]
    assert found[1].params == SamplingParams(temperature=0.8, top_k=7)
    assert found[2].params == SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
    [chosen] = bench.settings("1", SamplingParams(top_k=7), truncated=True)
    assert chosen == Setting("1", SamplingParams(temperature=1, top_k=7))
    assert len(bench.settings("0.8,0.80", SamplingParams(), False)) == 1


def test_built_in_prompts_are_chatml_only_where_the_model_has_its_markers() -> None:
    marked = llama.Model(vocab_file("qwen2"), vocab_only=True).tokenizer
    plain = llama.Model(vocab_file("gpt-2"), vocab_only=True).tokenizer
    for tokenizer, chatml in ((marked, True), (plain, False)):
        found = {each.name: each.prompts for each in workloads.built_in(tokenizer)}
        assert tuple(found) == workloads.NAMES
        for name in ("copy", "chat"):
            assert ("<|im_start|>assistant" in found[name][0]) is chatml
        assert not any("<|" in prompt for name in ("prose", "code") for prompt in found[name])
    assert [w.name for w in workloads.built_in(plain, ["chat", "code"])] == ["chat", "code"]


def test_prompts_come_from_lines_or_from_objects(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_bytes("\ufefferst\r\n\r\n  zwei \n".encode())
    assert workloads.read(lines) == [Workload("mine.txt", ("erst", "  zwei "))]
    objects = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "a\nb"}, {"prompt": "c", "workload": "x"}, {"prompt": "d", "id": 4}
    ]
    objects.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert workloads.read(objects) == [
        Workload("mine.jsonl", ("a\nb", "d")), Workload("x", ("c",))
    ]


# --- statistics against numbers worked out by hand ----------------------------------------------


def test_a_spread_is_the_median_with_both_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


def test_totals_add_counts_and_take_names_from_the_last() -> None:
    one = Stats(
        seed=1, verifier="block", drafter="model", prompt_n=5, prompt_ms=2.0, predicted_n=8,
        predicted_ms=100.0, rounds=4, draft_n=6, draft_n_accepted=4, corrected_n=2, bonus_n=2,
        by_position=[(4, 3), (2, 1)], lengths={1: 2, 2: 2}, verdict="early",
    )
    two = Stats(
        seed=2, verifier="block", drafter="model", prompt_n=5, prompt_ms=3.0, predicted_n=2,
        predicted_ms=60.0, rounds=2, draft_n=1, discarded=1, draft_failures=1, corrected_n=1,
        bonus_n=1, by_position=[(1, 0)], lengths={0: 1, 1: 1}, verdict="late",
    )
    whole = comparison.total([one, two])
    assert whole == Stats(
        seed=2, verifier="block", drafter="model", prompt_n=10, prompt_ms=5.0, predicted_n=10,
        predicted_ms=160.0, rounds=6, draft_n=7, draft_n_accepted=4, corrected_n=3, bonus_n=3,
        discarded=1, draft_failures=1, by_position=[(5, 3), (2, 1)], lengths={0: 1, 1: 3, 2: 2},
        verdict="late",
    )
    assert whole.tokens_per_second == 62.5
    assert one.by_position == [(4, 3), (2, 1)] and one.lengths == {1: 2, 2: 2}


def test_the_predicted_speed_up_prices_the_decodes_that_were_made() -> None:
    target = CostTable({1: [50.0], 4: [75.0, 80.0, 85.0]})
    draft = CostTable({1: [5.0], 2: [6.0]})
    answers = [
        Answer(Stats(predicted_n=24), Decodes(999.0, {4: 6, 1: 2}), Decodes(9.0, {1: 10, 2: 5})),
        Answer(Stats(predicted_n=6), Decodes(999.0, {1: 1}), Decodes()),
    ]
    taken = 6 * 75 + 2 * 50 + 10 * 5 + 5 * 6 + 50
    assert comparison.predict(answers, [target, draft]) == pytest.approx(30 * 50 / taken)
    assert comparison.predict(answers, [target, CostTable()]) is None


def answered(ms: float, **counts: Any) -> Answer:
    """An answer of ten tokens."""
    return Answer(Stats(predicted_n=10, predicted_ms=ms, rounds=10, lengths={0: 10}, **counts))


def test_ratios_are_taken_in_pairs_and_rates_over_all_prompts(pair: Pair) -> None:
    stand = Stand(pair)
    cell = Cell("talk", GREEDY, {
        "plain": [[answered(100), answered(300)], [answered(200), answered(200)],
                  [answered(100), answered(100)]],
        "auto": [[answered(100), answered(100)], [answered(250), answered(250)],
                 [answered(200), answered(200)]],
    })  # fmt: skip
    variants = [stand.plain(), stand.own(None)]
    found = comparison.compare(cell, variants, stand)
    assert found.plain.rates == (50.0, 50.0, 100.0)
    assert found.own.rates == (100.0, 40.0, 50.0)
    assert found.own.ratios == (2.0, 0.8, 0.5)
    assert found.own.ratio == Spread(0.8, 0.5, 2.0)  # the ratio of the medians would be 1
    assert found.own.rate == Spread(50.0, 40.0, 100.0)
    assert found.plain.ratio == Spread(1.0, 1.0, 1.0)
    assert found.own.target is None and found.own.predicted is None
    assert found.best_fixed() is None


def test_shares_are_of_the_generation_phase(pair: Pair) -> None:
    answer = Answer(
        Stats(predicted_n=4, predicted_ms=200.0, rounds=2), Decodes(150.0, {2: 2}),
        Decodes(30.0, {1: 2}),
    )
    stand = Stand(pair)
    cell = Cell("talk", GREEDY, {"plain": [[answer]], "auto": [[answer]]})
    own = comparison.compare(cell, [stand.plain(), stand.own(None)], stand).own
    assert (own.target, own.draft) == (0.75, 0.15)
    assert own.python == pytest.approx(0.10)


def figures(name: str, rates: tuple[float, ...], length: int | None, stats: Stats) -> Figures:
    ratios = tuple(rate / 20 for rate in rates)
    return Figures(
        name, length, rates, ratios, Spread(9, 9, 9), stats, None, None, None, None
    )


PLAIN = figures("plain", (20.0, 20.0, 20.0), 0, Stats(predicted_n=60, predicted_ms=3000, rounds=60))
DRAFTED = Stats(
    predicted_n=60, predicted_ms=2000, rounds=20, draft_n=60, draft_n_accepted=40, lengths={3: 20}
)


def test_the_best_fixed_length_may_be_none_at_all() -> None:
    own = figures("auto", (29.0, 30.0, 33.0), None, DRAFTED)
    two = figures("fixed 2", (30.0, 24.0, 40.0), 2, DRAFTED)
    five = figures("fixed 5", (20.0, 10.0, 90.0), 5, DRAFTED)
    found = Comparison("talk", "0", (PLAIN, own, two, five), "")
    assert found.best_fixed() is two
    assert found.against(two) == Spread(29 / 30, 33 / 40, 30 / 24)
    slow = [replace(each, rates=(1.0, 2.0, 3.0)) for each in (two, five)]
    assert Comparison("talk", "0", (PLAIN, own, *slow), "").best_fixed() is PLAIN


def test_the_verdict_says_faster_slower_or_neither() -> None:
    faster = comparison.verdict(PLAIN, figures("auto", (30.0, 28.0, 32.0), None, DRAFTED))
    assert faster == (
        "speculation is 1.50 times as fast as plain decoding (1.40 to 1.60); "
        "a round gives 3.00 tokens and takes as long as 2.00 plain ones"
    )
    slower = comparison.verdict(PLAIN, figures("auto", (10.0, 9.0, 30.0), None, DRAFTED))
    assert slower.startswith(
        "speculation is slower than plain decoding, the speed-up is below 1: "
        "0.50 of plain decoding's speed (0.45 to 1.50); a round gives 3.00 tokens"
    )
    neither = comparison.verdict(PLAIN, figures("auto", (20.2, 19.8, 20.0), None, DRAFTED))
    assert neither.startswith("speculation makes no difference: 1.00 of plain decoding's speed")


@pytest.mark.parametrize(
    ("stats", "notices", "said"),
    [
        (Stats(rounds=60, lengths={0: 60}, verdict="it is dear"), [], "aside, at 1.00 .*: it is"),
        (Stats(rounds=60, lengths={0: 60}, drafter="lookup"), [], "repeats itself too seldom"),
        (Stats(rounds=60, lengths={0: 60}), ["no rollback"], "speed \\(.*\\): no rollback$"),
        (Stats(rounds=60, lengths={0: 60}), [], "nothing was there to draft with"),
        (
            Stats(rounds=60, draft_n=2, lengths={0: 58, 1: 2}, verdict="it is dear"), [],
            "stood aside but for 2 of 60 rounds, at 1.00 .*: it is dear",
        ),
    ],
)
def test_the_verdict_says_when_and_why_speculation_stood_aside(
    stats: Stats, notices: list[str], said: str
) -> None:
    own = figures("auto", (20.0, 20.0, 20.0), None, stats)
    result = Comparison("talk", "0", (PLAIN, own), comparison.verdict(PLAIN, own, notices))
    assert re.search(said, result.verdict), result.verdict


# --- the command --------------------------------------------------------------------------------


def test_the_table_holds_every_cell_and_the_verdicts(run: Runner) -> None:
    done = run(*SHORT, "-md", GOOD, "--workload", "prose", "--workload", "chat", "--temps", "0,1")
    assert done.code == 0, done.err
    lines = done.text.splitlines()
    assert lines[0] == f"target   {Path(TARGET).name}" and lines[1] == f"draft    {Path(GOOD).name}"
    assert lines[3].endswith("24 tokens an answer, 2 repetitions, verifier block")
    plain = [line.split() for line in lines if " plain " in line and "1.00-1.00" in line]
    assert [row[:2] for row in plain] == [
        ["prose", "0"], ["prose", "1,"], ["chat", "0"], ["chat", "1,"]
    ]
    assert sum(line.split()[:1] == ["auto"] for line in lines) == 4
    cells = ("prose at temperature 0", "prose at temperature 1, untruncated",
             "chat at temperature 0", "chat at temperature 1, untruncated")  # fmt: skip
    for cell in cells:
        assert f"{cell}, auto:" in lines
        assert sum(line.startswith(f"{cell}: speculation ") for line in lines) == 1
    assert sum(line.startswith("  rounds by drafted tokens  ") for line in lines) == 4
    assert sum("Python" in line for line in lines) == 4
    assert [line.split()[0] for line in lines if line.startswith(("  target ", "  draft "))] == [
        "target", "draft"
    ]
    assert [line for line in done.err.splitlines() if "/4 " in line] == [
        f"{i}/4 {cell}" for i, cell in enumerate(cells, 1)
    ]


def test_a_poor_draft_at_sixteen_is_told_to_be_slower(run: Runner) -> None:
    done = run(*SHORT, "-md", POOR, "--draft-tokens", "16", "--workload", "chat", "--temps", "0.8")
    assert done.code == 0, done.err
    last = done.text.splitlines()[-1]
    assert "speculation is slower than plain decoding, the speed-up is below 1: 0." in last


def test_the_object_has_the_numbers_behind_the_table(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    options = ["-md", GOOD, "--workload", "chat", "--temps", "0.8", "--draft-tokens", "3"]
    done = run(*SHORT, *options, "--seed", "5", "--json", path, "--note", "a remark")
    assert done.code == 0 and "note     a remark" in done.text
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {
        *("format", "command", "machine", "target", "draft", "threads", "verifier", "note"),
        *("n_tokens", "repetitions", "seed", "settings", "costs_ms", "break_even"),
        *("draft_can_pay", "results", "layout"),
    }
    assert (found["verifier"], found["seed"], found["threads"]) == ("coupled", 5, 1)
    assert found["settings"]["0.8"]["top_k"] == 40
    assert set(found["costs_ms"]) == {"target", "draft"} and "1" in found["costs_ms"]["target"]
    [cell] = found["results"]
    assert (cell["workload"], cell["setting"]) == ("chat", "0.8")
    plain, fixed = cell["variants"]
    assert (plain["variant"], plain["length"], plain["draft_n"]) == ("plain", 0, 0)
    assert (plain["acceptance"], plain["tokens_per_round"]) == (None, 1.0)
    assert (fixed["variant"], fixed["length"], fixed["drafter"]) == ("fixed 3", 3, "model")
    assert plain["predicted_n"] == fixed["predicted_n"] == 48
    assert fixed["draft_n"] == sum(int(k) * n for k, n in fixed["lengths"].items()) > 0
    assert fixed["acceptance"] == fixed["draft_n_accepted"] / fixed["draft_n"]
    assert fixed["by_position"][0][0] >= fixed["by_position"][2][0] > 0
    pairs = zip(
        fixed["ratio"]["all"], fixed["tokens_per_second"]["all"],
        plain["tokens_per_second"]["all"], strict=True,
    )
    assert all(ratio == pytest.approx(a / b) for ratio, a, b in pairs)
    assert sum(fixed["shares"].values()) == pytest.approx(1)
    assert fixed["predicted_ratio"] > 0


def test_the_object_alone_goes_to_standard_output_and_grows_in_a_file(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["-md", GOOD, "--workload", "prose", "--workload", "chat", "--temps", "0"]
    printed = run(*SHORT, *options, "--json", "-")
    assert printed.out.count(b"\n") == 1
    assert [cell["workload"] for cell in json.loads(printed.out)["results"]] == ["prose", "chat"]
    path, sizes = tmp_path / "result.json", list[int]()
    write = bench_report.write_object

    def noted(path: Path, content: dict[str, Any]) -> None:
        write(path, content)
        sizes.append(len(json.loads(path.read_text(encoding="utf-8"))["results"]))

    monkeypatch.setattr(bench_report, "write_object", noted)
    assert run(*SHORT, *options, "--json", path).code == 0
    assert sizes == [1, 2] and list(tmp_path.iterdir()) == [path]


def test_all_lengths_are_reported_with_the_best_of_them(run: Runner) -> None:
    options = ["-md", GOOD, "--workload", "chat", "--temps", "0", "--all-lengths"]
    done = run(*SHORT[:-1], "1", *options)
    assert done.code == 0, done.err
    names = [line.split()[1] for line in done.text.splitlines() if line.split()[:1] == ["fixed"]]
    assert names == [str(n) for n in range(1, 16)]
    assert done.text.count("  best of the fixed numbers ") == 1


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(run: Runner, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"result.{ending}"
    options = ["--workload", "chat", "--temps", "0,1", "--draft-tokens", "2", "--plot", path]
    assert run(*SHORT, "-md", GOOD, *options).code == 0
    data = path.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending]) and len(data) > 5000


def test_bars_stand_for_the_medians_and_their_spread() -> None:
    own = figures("auto", (29.0, 30.0, 33.0), None, DRAFTED)
    found = Comparison("talk", "0", (PLAIN, own), "")
    axes: Any = Figure().subplots()
    bench_plot._draw_ratios(axes, [found, found])
    assert [patch.get_height() for patch in axes.patches] == [1.5, 1.5]
    [whiskers] = [found for found in axes.containers if isinstance(found, ErrorbarContainer)]
    segments = whiskers.lines[2][0].get_segments()
    assert [[y for _, y in segment] for segment in segments] == [[1.45, 1.65]] * 2


BAD = {
    "a temperature that is no number": (["--temps", "0,warm"], '"warm" is no temperature'),
    "no temperature at all": (["--temps", ""], '"" is no temperature'),
    "a temperature below zero": (["--temps", "-1"], "temperature"),
    "no repetitions": (["--repetitions", "0"], "repetitions"),
    "one token": (["-n", "1"], "-n"),
    "no limit": (["-n", "none"], "-n"),
    "no drafter": (["--drafter", "none"], "nothing would be drafted"),
    "nothing to draft": (["--draft-tokens", "0"], "nothing would be drafted"),
    "too much to draft": (["--draft-tokens", "17"], "between 0 and 16"),
    "an unknown workload": (["--workload", "poetry"], "poetry"),
    "two kinds of prompts": (["--workload", "chat", "--prompts", "x.txt"], "not both"),
    "a file that is not there": (["--prompts", "nowhere.txt"], "nowhere.txt cannot be read"),
    "a folder that is not there": (["--json", "nowhere/x.json"], "cannot write"),
    "a folder instead of a file": (["--json", "."], "cannot write"),
    "a picture of an unknown kind": (["--plot", "x.doc"], "no ending that names a picture"),
    "an answer that does not fit": (["-n", "1000", "--workload", "chat"], "does not fit"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_request_ends_with_one_line_before_anything_is_measured(
    run: Runner, case: str
) -> None:
    arguments, said = BAD[case]
    done = run(*SHORT, "-md", GOOD, *arguments)
    [line] = done.err.splitlines()
    assert (done.code, done.out) == (2, b"") and line.startswith("Error: ") and said in line


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\n \n", "has no prompts"),
        ("a.txt", b"ok\n\xff\n", "is not UTF-8 at byte 3"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2 of .* is no JSON"),
        ("a.jsonl", b"[1]\n", 'line 1 of .* is no object with a "prompt"'),
        ("a.jsonl", b'{"prompt": 3}\n', 'line 1 of .* is no object with a "prompt"'),
        ("a.jsonl", b'{"prompt": "x", "workload": 3}\n', '"workload" in line 1'),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        workloads.read(path)


def test_prompts_of_a_file_are_measured_as_one_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("hello\nthe end\n", encoding="utf-8")
    done = specllama(*SHORT, "-md", GOOD, "--prompts", path, "--temps", "0", "--json", "-")
    assert done.code == 0, done.err
    [cell] = json.loads(done.out)["results"]
    assert cell["workload"] == "mine.txt"
    assert cell["variants"][0]["predicted_n"] == 2 * 2 * 24


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_state_is_drafted_for_and_measured(run: Runner, kind: str) -> None:
    """It is its own draft, so that all is kept; whether that pays is the machine's to say."""
    state = str(tiny(kind))
    done = run(
        "bench", "-m", state, "-md", state, "-t", "1", "-n", "8", "--repetitions", "1",
        "--workload", "prose", "--temps", "0", "--draft-tokens", "2", "--json", "-",
    )
    assert done.code == 0, done.err
    [cell] = json.loads(done.text)["results"]
    _, own, *_ = cell["variants"]
    assert own["draft_n"] == own["draft_n_accepted"] > 0


# --- beside llama.cpp's server ------------------------------------------------------------------

# A server with the addresses and fields of llama.cpp's, and made-up times.
SERVER = '''
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("version: 7 (made up)")
    sys.exit()
def option(name, default=None):
    return arguments[arguments.index(name) + 1] if name in arguments else default
drafted = int(option("--spec-draft-n-max", "0"))
assert (drafted > 0) == (option("--spec-type") == "draft-simple") == (option("-md") is not None)
class Handler(BaseHTTPRequestHandler):
    def reply(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.reply({"status": "ok"})
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(LOG, "a") as log:
            print(json.dumps([drafted, self.path, request]), file=log)
        n = request["n_predict"]
        timings = {"prompt_n": len(request["prompt"]), "prompt_ms": 1.0, "predicted_n": n}
        timings["predicted_ms"] = (n - 1) * 1000 / (10 + drafted)
        if drafted:
            timings |= {"draft_n": 3 * n // 4, "draft_n_accepted": n // 2}
        self.reply({"timings": timings})
    def log_message(self, *arguments):
        pass
HTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()
'''


def test_the_peer_gets_the_same_work_and_its_best_length_is_compared(tmp_path: Path) -> None:
    binary, log, result = (tmp_path / name for name in ("server", "log", "result.json"))
    script = tmp_path / "server.py"
    script.write_text(f"LOG = {str(log)!r}\n{SERVER}", encoding="utf-8")
    # Not Python's path behind the #!, which may hold a space.
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8")
    binary.chmod(0o755)
    done = subprocess.run(
        [
            *(sys.executable, CHECKOUT / "scripts" / "peers", "--server", binary),
            *("-m", TARGET, "-md", GOOD, "-n", "16", "--repetitions", "2", "--temps", "0,1"),
            *("--workload", "chat", "--draft-tokens", "3,7", "-t", "1", "--json", result),
        ],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    requests = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    # A warm-up and two repetitions of two settings, by three servers.
    assert sorted(drafted for drafted, _, _ in requests) == [0] * 6 + [3] * 6 + [7] * 6
    with load(model=TARGET, drafter="none", threads=1) as pair:
        [chat] = workloads.built_in(pair.tokenizer, ["chat"])
        tokens = pair.tokenizer.encode(chat.prompts[0], special=True, add_special=True)
    for _, path, request in requests:
        assert (path, request["prompt"], request["n_predict"]) == ("/completion", tokens, 16)
        assert request["ignore_eos"] is True and request["cache_prompt"] is False
    laws = {tuple(request[name] for name in ("temperature", "top_k", "top_p", "min_p"))
            for _, _, request in requests}  # fmt: skip
    assert laws == {(0.0, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0)}
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["server"] == "version: 7 (made up)"
    assert found["command"][:5] == ["scripts/peers", "--server", "server", "-m", Path(TARGET).name]
    rates = {v["variant"]: v["tokens_per_second"] for v in found["results"][0]["variants"]}
    assert [rates[f"server {n}"]["median"] for n in ("plain", "3", "7")] == pytest.approx(
        [10, 13, 17]
    )
    peer = found["peers"][0]
    assert (peer["best"], peer["best_over_its_plain"]) == ("server 7", pytest.approx(1.7))
    assert peer["ours_over_best"]["median"] == pytest.approx(
        sum(rate / 17 for rate in rates["auto"]["all"]) / 2
    )
    assert 'the best of llama.cpp\'s server, which is "server 7" at 1.70 of' in done.stdout
