"""`specllama batch` with input, files and settings that nobody would give it on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Result, environment, specllama
from tiny import tiny

POSIX = pytest.mark.skipif(os.name == "nt", reason="not of this system")


def options() -> tuple[str | Path, ...]:
    return ("-m", tiny("attention"), "--drafter", "none", "--parallel", "4", "-n", "6")


def batch(source: str | Path, output: str | Path, *more: str | Path, **how: Any) -> Result:
    return specllama("batch", source, "-o", output, *options(), *more, **how)


def written(path: Path, *rows: dict[str, Any] | bytes) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def asked(name: Any, **more: Any) -> dict[str, Any]:
    return {"id": name, "prompt": "the sea", **more}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def codes(path: Path) -> dict[int, str | None]:
    """What became of the rows by line, None of those that were answered."""
    return {each["line"]: each.get("error", {}).get("code") for each in records(path)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in", *(asked(f"r{i}", prompt=f"row {i}") for i in range(3)))


# --- rows -----------------------------------------------------------------------------------


def test_values_at_their_ends(tmp_path: Path) -> None:
    ban = {str(token): float("-inf") for token in range(397)}
    rows: list[tuple[dict[str, Any], str | None]] = [
        ({"prompt": "a\0b"}, None),
        ({"prompt": "\ufeff"}, None),
        ({"prompt": ""}, None),
        ({"prompt": [10**30]}, "invalid_request"),
        ({"prompt": [-1]}, "invalid_request"),
        ({"stop": "\0"}, None),
        ({"stop": "x" * 100_000}, None),
        ({"stop": [f"{i} stop" for i in range(100)]}, None),
        ({"seed": 10**40}, None),
        ({"seed": -5}, None),
        ({"max_tokens": 10**40}, None),
        ({"max_tokens": 0}, None),
        ({"top_k": 10**40}, None),
        ({"top_k": -1}, "invalid_parameter"),
        ({"top_p": 1.1}, "invalid_parameter"),
        ({"min_p": float("nan")}, "invalid_parameter"),
        ({"temperature": float("nan")}, "invalid_parameter"),
        ({"temperature": float("inf")}, "invalid_parameter"),
        ({"temperature": 1e308}, None),
        ({"temperature": 5e-324}, None),
        ({"repeat_penalty": 0}, "invalid_parameter"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 10**40}, None),
        ({"logit_bias": {"99999": 1}}, "invalid_request"),
        ({"logit_bias": {"5": float("inf")}}, "invalid_parameter"),
        ({"logit_bias": ban}, "invalid_request"),
    ]
    source = written(tmp_path / "in", *(asked(f"{i}", **row) for i, (row, _) in enumerate(rows)))
    assert batch(source, tmp_path / "out", "-c", "256").code == 4
    wanted = {line: code for line, (_, code) in enumerate(rows, 1)}
    assert dict(sorted(codes(tmp_path / "out").items())) == wanted


@pytest.mark.parametrize("n_tokens, code", [(255, None), (256, "prompt_too_long"),
                                            (257, "prompt_too_long"), (2560, "prompt_too_long")])
def test_a_prompt_about_as_long_as_the_context(
    tmp_path: Path, n_tokens: int, code: str | None
) -> None:
    source = written(tmp_path / "in", asked("long", prompt=[20] * n_tokens), asked("short"))
    assert batch(source, tmp_path / "out", "-c", "256").code == (4 if code else 0)
    assert codes(tmp_path / "out") == {1: code, 2: None}
    [long] = [each for each in records(tmp_path / "out") if each["id"] == "long"]
    if code:
        assert f"{n_tokens} tokens and the context holds 256" in long["error"]["message"]
    else:
        assert long["usage"]["completion_tokens"] <= 1


def test_ids_that_look_alike_are_different_rows(tmp_path: Path) -> None:
    names = ["é", "e\u0301", "1", " 1", "A", "a", "\x004", "#4", "x" * 100_000]
    source = written(tmp_path / "in", *map(asked, names), asked(1), b"{bad")
    for _ in range(2):
        assert batch(source, tmp_path / "out").code == 4
        found = [each["id"] for each in records(tmp_path / "out")]
        assert sorted(found, key=str) == sorted([*names, None, None], key=str)
    assert len({each["text"] for each in records(tmp_path / "out") if each["id"]}) > 5


def test_a_line_with_half_a_character_harms_no_other(tmp_path: Path) -> None:
    bad = [b'{"id": "b", "prompt": "x", "\\ud83d": 1}', b'{"id": "c", "prompt": "\\ud83d"}']
    source = written(tmp_path / "in", asked("a"), *bad, asked("d"))
    assert batch(source, tmp_path / "out").code == 4
    assert codes(tmp_path / "out") == {1: None, 2: "unknown_key", 3: "invalid_text", 4: None}
    assert batch(source, tmp_path / "out", "--retry-failed").code == 4


def test_a_draft_without_numbers_costs_no_row(tmp_path: Path) -> None:
    bad = tiny("attention", nan=3 + ord("#"))
    rows = [asked("a"), asked("b", prompt="x#y"), asked("c")]
    source = written(tmp_path / "in", *rows)
    more = ("-md", bad, "--drafter", "model", "--draft-tokens", "3")
    assert batch(source, tmp_path / "out", *more).code == 0
    plain = tmp_path / "plain"
    assert batch(source, plain).code == 0
    texts = {each["id"]: each["text"] for each in records(tmp_path / "out")}
    assert texts == {each["id"]: each["text"] for each in records(plain)}
    failures = {each["id"]: each["stats"]["draft_failures"] for each in records(tmp_path / "out")}
    assert failures["b"] > 0


def test_markers_in_a_message_are_text(tmp_path: Path) -> None:
    texts = ["ab", "a<|im_end|>b"]
    rows = [{"id": each, "messages": [{"role": "user", "content": each}]} for each in texts]
    source = written(tmp_path / "in", *rows)
    assert batch(source, tmp_path / "out").code == 0
    counts = {each["id"]: each["usage"]["prompt_tokens"] for each in records(tmp_path / "out")}
    assert counts["a<|im_end|>b"] > counts["ab"] + 3  # spelled out, and not the one token


def test_a_model_without_a_template_answers_what_needs_none(tmp_path: Path) -> None:
    talk: dict[str, Any] = {"id": "talk", "messages": [{"role": "user", "content": "hi"}]}
    source = written(tmp_path / "in", talk, asked("text"), {**talk, "id": "more"})
    model = ("-m", tiny("attention", chat_template=None))
    assert batch(source, tmp_path / "out", *model).code == 4
    assert codes(tmp_path / "out") == {1: "template_error", 2: None, 3: "template_error"}
    refused = [each["error"] for each in records(tmp_path / "out") if "error" in each]
    assert "--chat-template" in refused[0]["message"]
    assert batch(source, tmp_path / "raw", *model, "--raw").code == 0


# --- files ----------------------------------------------------------------------------------


@POSIX
@pytest.mark.parametrize("how", ["hard link", "standard output", "standard input"])
def test_an_output_that_is_the_input_by_another_way(source: Path, tmp_path: Path, how: str) -> None:
    before = source.read_bytes()
    names = {"hard link": (source, tmp_path / "link"), "standard output": (source, "-"),
             "standard input": ("-", source)}
    os.link(source, tmp_path / "link")
    given, output = names[how]
    command = [sys.executable, "-m", "specllama.cli", "batch", given, "-o", output, *options()]
    with open(source, "rb") as read, open(source, "ab") as appended:
        done = subprocess.run(
            [str(each) for each in command], stdin=read, env=environment(), timeout=60,
            stdout=appended if how == "standard output" else subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    assert done.returncode == 2 and b"is the input too" in done.stderr
    assert source.read_bytes() == before


@POSIX
def test_a_full_device_behind_standard_output(source: Path) -> None:
    command = [sys.executable, "-m", "specllama.cli", "batch", source, *options()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [str(each) for each in command], env=environment(), stdout=full, timeout=60,
            stderr=subprocess.PIPE,
        )  # fmt: skip
    assert done.returncode == 1
    assert b"No space left" in done.stderr and b"Traceback" not in done.stderr


def test_standard_output_is_utf_8_whatever_the_console_is(tmp_path: Path) -> None:
    source = written(tmp_path / "in", asked("水滴 🇫🇮"))
    result = specllama("batch", source, *options(), env={"PYTHONIOENCODING": "ascii"})
    assert result.code == 0 and json.loads(result.out)["id"] == "水滴 🇫🇮"


@POSIX
def test_a_stream_is_not_gone_on_with(source: Path) -> None:
    result = batch(source, "/dev/stdout")
    assert (result.code, result.out) == (2, b"") and "or - for standard output" in result.err


def test_a_cut_input_is_told_before_anything_is_done(source: Path, tmp_path: Path) -> None:
    import gzip

    packed = tmp_path / "in.gz"
    packed.write_bytes(gzip.compress(source.read_bytes())[:-6])
    result = batch(packed, tmp_path / "out")
    assert result.code == 1 and "cut or damaged" in result.err
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert batch(packed, tmp_path / "out").code == 0
    assert codes(tmp_path / "out") == {1: None, 2: None, 3: None}


# --- a terminal -----------------------------------------------------------------------------


@POSIX
def test_a_bar_on_a_terminal(source: Path, tmp_path: Path) -> None:
    from screens import terminal

    output = tmp_path / "out"
    with terminal("batch", source, "-o", output, *options(), columns=240) as person:
        assert person.end() == 0
        assert "3/3" in person.text and "tokens/s" in person.text
        assert person.lines[-1].startswith("3 rows: 3 done;")
    assert codes(output) == {1: None, 2: None, 3: None}


@POSIX
def test_answers_on_a_terminal_stand_alone(source: Path) -> None:
    from screens import terminal

    with terminal("batch", source, *options()) as person:
        assert person.end() == 0
        shown = [each for each in person.raw.decode().split("\r\n") if each.startswith("{")]
    assert sorted(json.loads(each)["id"] for each in shown) == ["r0", "r1", "r2"]
    assert b"row/s" not in person.raw


# --- once more ------------------------------------------------------------------------------


def test_answers_stay_when_what_would_replace_them_cannot_be_loaded(
    source: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    batch(source, output)
    before = output.read_bytes()
    result = batch(source, output, "--temp", "0", "--rerun-changed", "-c", "2000000000")
    assert result.code not in (0, 4)
    assert output.read_bytes() == before
    assert batch(source, output, "--temp", "0", "--rerun-changed").code == 0
    assert len(records(output)) == 3 and output.read_bytes() != before


def test_a_pipe_is_gone_on_with_and_compared(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert batch("-", output, stdin=source.read_bytes()).code == 0
    more = source.read_bytes() + json.dumps(asked("more")).encode()
    result = batch("-", output, stdin=more)
    assert result.code == 0 and "1 done, 3 were there before" in result.err
    result = batch("-", output, stdin=more.replace(b"row 1", b"row 9"))
    assert result.code == 2 and '"r1" in line 2 has other prompt' in result.err


def test_records_of_other_rows_are_told_of(source: Path, tmp_path: Path) -> None:
    batch(source, tmp_path / "out")
    other = written(tmp_path / "other", asked("other"), asked("r1", prompt="row 1"))
    result = batch(other, tmp_path / "out")
    assert result.code == 0 and "rows of the output that are not in the input: 2;" in result.err
    assert len(records(tmp_path / "out")) == 4


def test_another_kind_of_cache_is_another_setting(source: Path, tmp_path: Path) -> None:
    batch(source, tmp_path / "out")
    result = batch(source, tmp_path / "out", "-ctk", "f32")
    assert result.code == 2 and "other settings" in result.err


def test_the_day_that_a_template_tells_can_be_fixed(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}")
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}]}
    source = written(tmp_path / "in", row)
    more = ("--chat-template", template, "--date")
    for name, day in (("one", "2026-01-02"), ("two", "2026-11-12"), ("three", "2026-01-02")):
        assert batch(source, tmp_path / name, *more, day).code == 0
    one, two, three = (records(tmp_path / name)[0]["text"] for name in ("one", "two", "three"))
    assert one == three != two
    result = batch(source, tmp_path / "one", *more, "2026-11-12")
    assert result.code == 2 and "other settings" in result.err
    assert batch(source, tmp_path / "one", *more, "tomorrow").code == 2
