"""The files of a batch: the input as a stream of rows, the output as lines that survive."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import environment

from specllama import batch_input, batch_ledger
from specllama.batch_input import LONGEST, entries
from specllama.batch_ledger import Done, Ledger, line_key
from specllama.batch_output import Line, Output
from specllama.errors import SpecllamaError, UsageError

BOM = b"\xef\xbb\xbf"


def line(name: str, **more: Any) -> bytes:
    return json.dumps({"id": name, "prompt": "x", **more}).encode()


def found(path: Path) -> list[tuple[int, int, str]]:
    """(index, line, id or code) of each row."""
    return [
        (e.index, e.line, e.row.id if e.row else e.error.code if e.error else "")
        for e in entries(path)
    ]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_marks_and_blanks(tmp_path: Path, end: bytes) -> None:
    lines = [BOM + line("a"), b"", b"  \t", BOM + line("b"), BOM, b" " + line("c")]
    path = written(tmp_path / "in", end.join(lines))
    assert found(path) == [(0, 1, "a"), (1, 4, "b"), (2, 6, "c")]


@pytest.mark.parametrize("data", [b"", b"\n", BOM, BOM + b"\r\n\n"])
def test_an_input_without_rows(tmp_path: Path, data: bytes) -> None:
    assert found(written(tmp_path / "in", data)) == []


def test_bad_lines_have_their_number(tmp_path: Path) -> None:
    path = written(tmp_path / "in", b"\n".join([line("a"), b"", b"{", b"7", line("b"), b"\xff\0"]))
    assert found(path) == [
        (0, 1, "a"), (1, 3, "invalid_json"), (2, 4, "not_an_object"), (3, 5, "b"),
        (4, 6, "invalid_utf8"),
    ]  # fmt: skip


def test_a_line_of_50_mb_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with open(path, "wb") as file:
        file.write(line("a") + b"\n")
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + line("b"))
    assert found(path) == [(0, 1, "a"), (1, 2, "line_too_long"), (2, 3, "b")]


def test_a_line_of_just_the_longest_length(tmp_path: Path) -> None:
    empty = len(line("a", prompt=""))
    for extra, wanted in ((0, "a"), (1, "line_too_long")):
        data = line("a", prompt="x" * (LONGEST - empty + extra))
        assert found(written(tmp_path / "in", data + b"\n" + line("b")))[0][2] == wanted


def test_a_compressed_input(tmp_path: Path) -> None:
    whole = gzip.compress(line("a") + b"\n") + gzip.compress(line("b"))
    assert found(written(tmp_path / "in.gz", whole)) == [(0, 1, "a"), (1, 2, "b")]
    assert found(written(tmp_path / "in", whole)) == [(0, 1, "a"), (1, 2, "b")]
    with pytest.raises(SpecllamaError, match="cut or damaged"):
        found(written(tmp_path / "in.gz", whole[:-5]))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused(tmp_path: Path, encoding: str) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    path = written(tmp_path / "in", mark + line("a").decode().encode(encoding))
    with pytest.raises(UsageError, match="UTF-16"):
        found(path)


def test_an_input_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        found(tmp_path / "none")
    with pytest.raises(UsageError, match="folder"):
        found(tmp_path)
    assert batch_input.can_be_read_twice(written(tmp_path / "in", b""))
    assert not batch_input.can_be_read_twice(Path("-"))


# --- the output -----------------------------------------------------------------------------


def record(name: str | None, number: int = 0, code: str | None = None) -> dict[str, Any]:
    parts = {"prompt": f"p{number}", "settings": "s", "models": "m"}
    error = {} if code is None else {"error": {"code": code, "message": "no"}}
    return {"id": name, **error, "line": number, "fingerprint": parts}


def read(path: Path, keys: list[str]) -> list[Done | None]:
    with Output(path) as output:
        ledger = batch_ledger.read(output)
        done = [ledger.find(key) for key in keys]
        ledger.close()
    return done


NAMES = pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])


def append(path: Path, *records: dict[str, Any]) -> None:
    with Output(path) as output:
        for each in records:
            output.append(each)


@NAMES
def test_records_are_found_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, record("a", 1), record("é", 2, "invalid_logits"))
    append(path, record(None, 3, "invalid_json"), record("a", 4, "duplicate_id"))
    done = read(path, ["a", "é", line_key(3), line_key(4), "b"])
    assert done == [
        Done(("p1", "s", "m"), False), Done(("p2", "s", "m"), True), Done(("p3", "s", "m"), True),
        Done(("p4", "s", "m"), True), None,
    ]  # fmt: skip
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
    assert [json.loads(each)["line"] for each in lines] == [1, 2, 3, 4]


@NAMES
def test_a_torn_end_is_taken_away_at_any_byte(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, record("a", 1))
    one = path.read_bytes()
    append(path, record("b", 2))
    two = path.read_bytes()
    for end in range(len(two) + 1):
        path.write_bytes(two[:end])
        done = [each is not None for each in read(path, ["a", "b"])]
        # A plain line that lacks only its end is whole.
        slack = 0 if name.endswith("gz") else 1
        assert done == [end >= len(one) - slack, end >= len(two) - slack], end
        assert path.read_bytes() == (two if done[1] else one if done[0] else b"")


@NAMES
def test_damage_in_the_middle_costs_its_row_only(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, record("a", 1))
    begin = path.stat().st_size
    append(path, record("b", 2))
    end = path.stat().st_size
    append(path, record("c", 3))
    data = bytearray(path.read_bytes())
    data[begin + 12 : end - 1] = b"#" * (end - begin - 13)
    path.write_bytes(data)
    assert [each is not None for each in read(path, ["a", "b", "c"])] == [True, False, True]
    assert path.read_bytes() == data


@NAMES
@pytest.mark.parametrize("data", [b"dear diary\n", b"dear diary", b'{"id": "a", "prompt": "x"}\n'])
def test_something_else_is_not_taken_for_an_output(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(UsageError, match="no output of specllama batch"):
        read(path, [])
    assert path.read_bytes() == data


@NAMES
def test_records_are_dropped_and_the_rest_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, record("a", 1), record("b", 2), record("c", 3), record("a", 4))
    with Output(path) as output:
        ledger = batch_ledger.read(output)
        ledger.drop("c")
        assert ledger.has_stale
        output.drop(ledger.stale())
        output.append(record("d", 5))
        ledger.close()
    done = read(path, ["a", "b", "c", "d"])
    assert [each and each.fingerprint[0] for each in done] == ["p4", "p2", None, "p5"]
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
    assert [json.loads(each)["line"] for each in lines] == [2, 4, 5]


def test_a_second_process_is_refused_and_a_dead_one_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "out"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom specllama.batch_output import Output\n"
        "with Output(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.readline()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, path], env=environment(), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="another process"):
        Output(path)
    other.kill()
    other.wait()
    other.stdout.close()
    assert other.stdin is not None
    other.stdin.close()
    append(path, record("a", 1))
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is full")
def test_what_cannot_be_written_to(tmp_path: Path) -> None:
    for path in (Path("/dev/full"), tmp_path, tmp_path / "none" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError):
            Output(path)


def test_memory_of_the_ledger_is_on_the_disk() -> None:
    ledger = Ledger()
    for i in range(2000):
        ledger.add(f"row {i}", Done(("p", "s", "m"), False), Line(i, i + 1, b""))
        assert ledger.first_line(f"row {i}", i) == i
    assert ledger.n_done == 2000
    assert ledger.first_line("row 7", 5000) == 7
    ledger.begin_again()
    assert ledger.first_line("row 7", 5000) == 5000
    ledger.close()
