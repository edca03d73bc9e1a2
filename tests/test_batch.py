"""`specllama batch` as a whole: a command, its input, its output, and the same command again."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command import Result, environment, specllama
from tiny import tiny

LENGTH = ("-n", "8")


def models() -> tuple[str | Path, ...]:
    return ("-m", tiny("attention"), "-md", tiny("attention", noise=0.1), "--parallel", "4")


def batch(
    source: str | Path, output: str | Path, *options: str | Path, stdin: bytes | None = None
) -> Result:
    return specllama("batch", source, "-o", output, *models(), *LENGTH, *options, stdin=stdin)


def rows(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"row {i}", "prompt": f"prompt {i} says", **more} for i in range(n)]


def written(path: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def records(path: Path) -> dict[Any, dict[str, Any]]:
    """The records of an output by id, each id once; by line where there is none."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix == ".gz" else data
    assert not data or data.endswith(b"\n")
    found = [json.loads(line) for line in data.decode("utf-8").splitlines()]
    names = [_name(record) for record in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def _name(record: dict[str, Any]) -> Any:
    if (record.get("error") or {}).get("code") == "duplicate_id":
        return record["line"]
    return record.get("custom_id", record["id"]) or record["line"]


def texts(path: Path) -> dict[Any, str]:
    return {name: record["text"] for name, record in records(path).items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", rows(10))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_row_is_answered(source: Path, output: Path) -> None:
    result = batch(source, output)
    assert (result.code, result.out) == (0, b"")
    assert "10 rows: 10 done" in result.err
    found = records(output)
    assert set(found) == {f"row {i}" for i in range(10)}
    for i in range(10):
        record = found[f"row {i}"]
        assert (record["index"], record["line"], record["seed"]) == (i, i + 1, 0)
        assert record["finish_reason"] in ("stop", "length")
        stats, usage = record["stats"], record["usage"]
        assert usage["completion_tokens"] == stats["predicted_n"] <= 8
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert set(record["fingerprint"]) == {"prompt", "settings", "models"}
        assert stats["verifier"] == "coupled"
    assert len({record["text"] for record in found.values()}) > 5


def test_the_same_command_again_does_nothing(source: Path, output: Path) -> None:
    batch(source, output)
    before = output.read_bytes()
    result = batch(source, output)
    assert (result.code, output.read_bytes()) == (0, before)
    assert "10 were there before" in result.err


def test_what_is_missing_is_done_and_the_rest_is_left(source: Path, output: Path) -> None:
    batch(source, output)
    whole, lines = texts(output), output.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:3]) + lines[5]
    output.write_bytes(kept + lines[6][:40])
    assert batch(source, output).code == 0
    assert output.read_bytes().startswith(kept)
    assert texts(output) == whole


def test_a_row_alone_says_the_same(source: Path, output: Path, tmp_path: Path) -> None:
    batch(source, output)
    alone = written(tmp_path / "one.jsonl", [rows(10)[7]])
    assert batch(alone, tmp_path / "one.out").code == 0
    assert texts(tmp_path / "one.out")["row 7"] == texts(output)["row 7"]


def test_a_row_says_the_same_wherever_it_stands(tmp_path: Path) -> None:
    said = []
    for name, order in (("first", rows(50)), ("last", rows(50)[::-1])):
        source = written(tmp_path / f"{name}.jsonl", order)
        assert batch(source, tmp_path / name).code == 0
        said.append(texts(tmp_path / name))
    assert said[0] == said[1]
    assert len(set(said[0].values())) > 40


def test_what_a_row_says_itself(tmp_path: Path, output: Path) -> None:
    prompt = {"prompt": "prompt 1 says"}
    source = written(
        tmp_path / "in.jsonl",
        [
            {"id": "long", **prompt, "max_tokens": 20, "ignore_eos": True},
            {"id": "none", **prompt, "max_tokens": 0},
            {"id": "cold", **prompt, "temperature": 0, "seed": 3},
            {"id": "colder", **prompt, "temperature": 0, "seed": 4},
        ],
    )
    assert batch(source, output).code == 0
    found = records(output)
    assert found["long"]["usage"]["completion_tokens"] == 20
    assert (found["none"]["text"], found["none"]["finish_detail"]) == ("", "token limit")
    assert found["cold"]["text"] == found["colder"]["text"]
    assert (found["cold"]["seed"], found["colder"]["seed"]) == (3, 4)


def test_bad_rows_are_told_and_the_others_are_done(tmp_path: Path, output: Path) -> None:
    good = rows(3)
    source = written(
        tmp_path / "in.jsonl",
        [
            good[0], "", "{broken", "[1]", "17", {"prompt": "no id"}, {"id": 3, "prompt": "x"},
            {"id": None, "prompt": "x"}, good[0], {"id": "key", "prompt": "x", "key": 1},
            {"id": "long", "prompt": "x " * 400, "max_tokens": 3}, good[1],
            {"id": "hot", "prompt": "x", "temperature": -1},
            {"id": "ids", "prompt": [1, 99999]}, {"id": "empty", "messages": []}, good[2],
        ],
    )  # fmt: skip
    result = batch(source, output, "-c", "256")
    assert result.code == 4
    found = records(output)
    codes = {
        record["line"]: record["error"]["code"]
        for record in (json.loads(line) for line in output.read_text().splitlines())
        if "error" in record
    }
    assert codes == {
        3: "invalid_json", 4: "not_an_object", 5: "not_an_object", 6: "missing_id",
        7: "invalid_id", 8: "missing_id", 9: "duplicate_id", 10: "unknown_key",
        11: "prompt_too_long", 13: "invalid_parameter", 14: "invalid_request",
        15: "invalid_request",
    }  # fmt: skip
    assert all("text" in found[row["id"]] for row in good[1:])
    assert "line 11: the prompt has" in found["long"]["error"]["message"]
    assert "12 failed" in result.err and "missing_id 2" in result.err
    # Nothing more is to be done, and what failed is remembered.
    before = output.read_bytes()
    assert batch(source, output, "-c", "256").code == 4
    assert output.read_bytes() == before


def records_by_line(path: Path) -> dict[int, dict[str, Any]]:
    return {each["line"]: each for each in map(json.loads, path.read_text().splitlines())}


def test_failed_rows_are_done_again_when_asked_to_or_mended(tmp_path: Path, output: Path) -> None:
    long = {"id": "long", "prompt": "x " * 400, "max_tokens": 3}
    source = written(tmp_path / "in.jsonl", [*rows(2), long, "{broken"])
    assert batch(source, output, "-c", "256").code == 4
    assert batch(source, output, "-c", "2048", "--retry-failed").code == 4
    assert records(output)["long"]["usage"]["completion_tokens"] == 3
    assert records_by_line(output)[4]["error"]["code"] == "invalid_json"
    written(source, [*rows(2), long, rows(3)[2]])
    result = batch(source, output, "-c", "2048")
    assert result.code == 0
    assert set(records(output)) == {"row 0", "row 1", "row 2", "long"}


@pytest.mark.parametrize(
    "change, word",
    [
        (("--temp", "0.5"), "settings"),
        (("--seed", "1"), "settings"),
        (("--stop", "x"), "settings"),
        (("-n", "9"), "settings"),
        (("--verifier", "block"), "settings"),
        (("-md", "base"), "models"),
    ],
)
def test_a_change_of_what_made_a_finished_row_is_refused(
    source: Path, output: Path, change: tuple[str | Path, ...], word: str
) -> None:
    written(source, rows(3))
    batch(source, output)
    before = output.read_bytes()
    written(source, rows(5))
    if "base" in change:
        change = ("-md", tiny("attention", noise=0.2))
    result = batch(source, output, *change)
    assert (result.code, result.out) == (2, b"")
    assert f"3 finished rows are not what {output} was made from" in result.err
    assert f"other {word}" in result.err and "--rerun-changed" in result.err
    assert output.read_bytes() == before


def test_a_changed_row_is_refused_or_done_again(source: Path, output: Path) -> None:
    batch(source, output)
    before = records(output)
    changed = rows(10)
    changed[4]["prompt"] = "something else"
    written(source, changed)
    result = batch(source, output)
    assert result.code == 2
    assert "1 finished row is not" in result.err
    assert '"row 4" in line 5 has other prompt' in result.err
    assert batch(source, output, "--rerun-changed").code == 0
    after = records(output)
    assert {name for name in before if before[name] != after[name]} == {"row 4"}
    assert before["row 4"]["text"] != after["row 4"]["text"]


def test_a_setting_that_a_row_has_itself_may_change(source: Path, output: Path) -> None:
    written(source, rows(3, temperature=0, seed=5, max_tokens=4, stop=[]))
    batch(source, output)
    result = batch(source, output, "--temp", "0.3", "--seed", "9", "-n", "20", "--stop", "x")
    assert result.code == 0 and "3 were there before" in result.err


def test_threads_and_parallelism_are_no_settings(source: Path, output: Path) -> None:
    batch(source, output)
    result = batch(source, output, "--parallel", "2", "-t", "1", "-c", "300", "-b", "64")
    assert result.code == 0 and "10 were there before" in result.err


# --- messages -------------------------------------------------------------------------------


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_conversations_and_what_is_wrong_with_some(tmp_path: Path, output: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    source = written(
        tmp_path / "in.jsonl",
        [
            {"id": "good", "messages": user("hi")},
            {"id": "system", "messages": [system, *user("hi")]},
            {"id": "late system", "messages": [*user("hi"), system]},
            {"id": "null", "messages": user(None)},
            {"id": "empty", "messages": user("")},
            {"id": "two", "messages": [*user("hi"), *user("you")]},
            {"id": "role", "messages": [{"role": "robot", "content": "x"}]},
            {"id": "answer", "messages": [*user("hi"), {"role": "assistant", "content": "x"}]},
        ],
    )
    result = batch(source, output)
    assert result.code == 4
    assert "joined by a blank line" in result.err
    codes = {
        name: record["error"]["code"] if "error" in record else ""
        for name, record in records(output).items()
    }
    assert codes == {
        "good": "", "system": "", "two": "", "late system": "invalid_messages",
        "null": "invalid_messages", "empty": "invalid_messages", "role": "invalid_messages",
        "answer": "invalid_messages",
    }  # fmt: skip
    # As `chat` says it.
    raw = written(tmp_path / "raw.jsonl", [{"id": "good", "messages": user("hi")}])
    assert batch(raw, tmp_path / "raw.out", "--raw").code == 0
    assert texts(tmp_path / "raw.out") != {"good": records(output)["good"]["text"]}


def test_a_template_that_fails_fails_its_rows(tmp_path: Path, output: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    found = [{"id": text, "messages": user(text)} for text in ("good", "bad")]
    source = written(tmp_path / "in.jsonl", found)
    assert batch(source, output, "--chat-template", template).code == 4
    assert "text" in records(output)["good"]
    assert "no bad" in records(output)["bad"]["error"]["message"]
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    result = batch(source, output, "--chat-template", template)
    assert result.code == 2 and '"good" in line 1 has other settings' in result.err
    assert batch(source, output, "--chat-template", template, "--rerun-changed").code == 0


def test_rows_of_openai_are_answered_in_their_format(tmp_path: Path, output: Path) -> None:
    def asked(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", **body}}

    source = written(
        tmp_path / "in.jsonl",
        [
            asked("chat", "/v1/chat/completions", messages=user("hi"), max_tokens=4),
            asked("text", "/v1/completions", prompt="hi", max_tokens=4),
            asked("bad", "/v1/chat/completions", messages=user("hi"), n=3),
        ],
    )
    assert batch(source, output).code == 4
    found = records(output)
    body = found["chat"]["response"]["body"]
    assert found["chat"]["response"]["status_code"] == 200 and found["chat"]["error"] is None
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length")
    assert body["usage"]["completion_tokens"] <= 4
    [choice] = found["text"]["response"]["body"]["choices"]
    assert isinstance(choice["text"], str)
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["error"]["code"] == "unsupported_parameter"
    before = output.read_bytes()
    assert batch(source, output).code == 4
    assert output.read_bytes() == before


# --- streams --------------------------------------------------------------------------------


def test_pipes_and_compressed_files(source: Path, output: Path, tmp_path: Path) -> None:
    batch(source, output)
    data = source.read_bytes()
    piped = batch("-", "-", stdin=data)
    assert piped.code == 0
    found = {each["id"]: each["text"] for each in map(json.loads, piped.text.splitlines())}
    assert found == texts(output)
    packed = tmp_path / "out.jsonl.gz"
    assert batch("-", packed, stdin=gzip.compress(data)).code == 0
    assert texts(packed) == texts(output)
    packed.write_bytes(packed.read_bytes()[:-30])
    assert batch("-", packed, stdin=data).code == 0
    assert texts(packed) == texts(output)


@pytest.mark.skipif(os.name == "nt", reason="there is no such shell")
def test_a_reader_that_goes_away(source: Path) -> None:
    command = [sys.executable, "-m", "specllama.cli", "batch", source, *models(), *LENGTH]
    writer = subprocess.Popen(
        [str(each) for each in command], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert writer.stdout is not None and writer.stderr is not None
    assert json.loads(writer.stdout.readline())["id"].startswith("row")
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert writer.wait(60) in (0, 141)
    assert b"Traceback" not in errors and b"Exception" not in errors


def test_an_input_without_rows(tmp_path: Path, output: Path) -> None:
    result = batch(written(tmp_path / "in.jsonl", []), output)
    assert (result.code, output.read_bytes()) == (0, b"")
    assert "0 rows" in result.err


def test_the_input_is_no_output(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    link = tmp_path / "link"
    os.symlink(source, link)
    for path in (source, link, tmp_path / "." / "in.jsonl"):
        result = batch(source, path)
        assert result.code == 2 and "is the input too" in result.err
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, code, word",
    [
        (("none.jsonl", "out"), 2, "cannot be read"),
        ((".", "out"), 2, "folder"),
        (("in.jsonl", "."), 2, "folder"),
        (("in.jsonl", "none/out"), 2, "cannot be written"),
        (("in.jsonl", "out", "--parallel", "0"), 2, "parallel"),
        (("in.jsonl", "out", "--parallel", "many"), 2, "auto"),
        (("in.jsonl", "out", "--temp", "-1"), 2, "temperature"),
        (("in.jsonl", "out", "-b", "0"), 2, "batch size"),
        (("in.jsonl", "out", "-m", "none.gguf"), 3, "none.gguf"),
        (("in.jsonl", "diary"), 2, "no output of specllama batch"),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    word: str,
) -> None:
    written(tmp_path / "in.jsonl", rows(2))
    (tmp_path / "diary").write_text("dear diary\n")
    monkeypatch.chdir(tmp_path)
    result = batch(*arguments)
    assert result.code == code and word in result.err
    assert result.out == b"" and len(result.err.splitlines()) == 1


def test_names_of_all_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "mod els" / "Загрузки" / "模型 é'\""
    folder.mkdir(parents=True)
    source = written(folder / "in é.jsonl", [{"id": "水滴\u0000🇫🇮", "prompt": "水"}])
    output = folder / f"{'ö' * 120}.out"
    for _ in range(2):
        assert batch(source, output).code == 0
    assert set(records(output)) == {"水滴\u0000🇫🇮"}


# --- logits that are none -------------------------------------------------------------------


def test_logits_that_are_no_numbers_fail_their_row(tmp_path: Path, output: Path) -> None:
    bad = tiny("attention", nan=3 + ord("#"))
    found = [{"id": name, "prompt": name} for name in ("one", "tw#o", "three", "fo#ur", "five")]
    source = written(tmp_path / "in.jsonl", found)
    result = batch(source, output, "-m", bad, "--logit-bias", f"{3 + ord('#')}-inf")
    assert result.code == 4
    codes = {name: each.get("error", {}).get("code") for name, each in records(output).items()}
    assert codes == {
        "one": None, "tw#o": "invalid_logits", "three": None, "fo#ur": "invalid_logits",
        "five": None,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "swa"])
def test_other_kinds_of_models(source: Path, output: Path, kind: str) -> None:
    result = batch(source, output, "-m", tiny(kind), "-md", tiny(kind, noise=0.1))
    assert result.code == 0
    assert len(records(output)) == 10


@pytest.mark.parametrize("parallel", ["1", "auto"])
def test_any_parallelism(source: Path, output: Path, parallel: str) -> None:
    result = batch(source, output, "--parallel", parallel)
    assert result.code == 0 and len(records(output)) == 10


def test_a_prompt_of_several_batches(tmp_path: Path, output: Path) -> None:
    long = {"id": "long", "prompt": "abc " * 80}
    source = written(tmp_path / "in.jsonl", [long, *rows(3)])
    assert batch(source, output, "-b", "64").code == 0
    assert records(output)["long"]["usage"]["prompt_tokens"] > 3 * 64


@pytest.mark.skipif(os.name == "nt", reason="there are no such pipes")
def test_a_named_pipe_is_read_once(output: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    source = written(tmp_path / "in.jsonl", rows(3))
    for _ in range(2):
        with subprocess.Popen(["cp", source, pipe]) as writer:
            assert batch(pipe, output).code == 0
        assert writer.returncode == 0
    assert set(records(output)) == {"row 0", "row 1", "row 2"}


def test_the_context_is_as_large_as_the_longest_row(tmp_path: Path, output: Path) -> None:
    source = written(tmp_path / "in.jsonl", [*rows(3), {"id": "long", "prompt": "x" * 260}])
    assert "4 rows at once, 512 tokens each" in batch(source, output).err
    unlimited = written(tmp_path / "no.jsonl", rows(3, max_tokens=-1, ignore_eos=True))
    result = batch(unlimited, tmp_path / "no.out", "-c", "64")
    assert result.code == 0 and "64 tokens each" in result.err
    assert {each["finish_detail"] for each in records(tmp_path / "no.out").values()} == {
        "context full"
    }
