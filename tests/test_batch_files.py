"""The files of a batch: the input as a stream of rows, the output as lines that survive."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command import environment

from specllama import batch_input, batch_ledger, batch_output
from specllama.batch_input import LONGEST, entries
from specllama.batch_ledger import Done, Ledger, line_key, row_key
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


def read(path: Path, names: Sequence[str | int]) -> list[Done | None]:
    """What an output holds of rows: by id, or by line where they have none."""
    with Output(path) as output:
        ledger = batch_ledger.read(output)
        keys = [row_key(each) if isinstance(each, str) else line_key(each) for each in names]
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
    done = read(path, ["a", "é", 3, 4, "b"])
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
@pytest.mark.parametrize(
    "data",
    [
        *(b"dear diary\n", b"dear diary", b"dear diary\n{", b'{"id": "a", "prompt": "x"}\n'),
        *(b'{"id": "a", "prompt": "x"}', b"GGUF" + bytes(200)),
        *(gzip.compress(b"dear diary", mtime=mtime)[:-9] for mtime in (0, 1)),
        b"\x1f\x8b\x08\x00" + bytes(4) + b"\xff" * 99,
    ],
)
def test_something_else_is_not_taken_for_an_output(
    tmp_path: Path, name: str, data: bytes
) -> None:
    path = written(tmp_path / name, data)
    with pytest.raises(UsageError, match="no output of specllama batch"):
        read(path, [])
    assert path.read_bytes() == data


@NAMES
def test_a_large_file_of_another_kind_is_not_read_whole(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_output, "_LONGEST", 100)
    kept = []

    def add(ledger: Ledger, key: str, *_: object) -> None:
        kept.append(key)

    monkeypatch.setattr(Ledger, "add", add)
    long = b'{"id": "' + b"x" * 5000
    lines = [b"dear diary\n"] * 2000 + [json.dumps(record("a")).encode() + b"\n"]
    packed = name.endswith(".gz")
    for data in ([long], lines):
        whole = b"".join(gzip.compress(each, mtime=0) if packed else each for each in data)
        path = written(tmp_path / name, whole)
        with pytest.raises(UsageError, match="no output of specllama batch"):
            read(path, [])
        assert path.read_bytes() == whole and not kept


@NAMES
def test_records_are_dropped_and_the_rest_stays(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    append(path, record("a", 1), record("b", 2), record("c", 3), record("a", 4))
    with Output(path) as output:
        ledger = batch_ledger.read(output)
        ledger.drop(row_key("c"))
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


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with Output(tmp_path / "out") as output:
        assert not output.is_locked
    monkeypatch.undo()
    with Output(tmp_path / "out") as output:
        assert output.is_locked


@pytest.mark.parametrize("name", ["x" * 255, "ö" * 127, "模" * 85])
def test_a_name_of_the_greatest_length(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / (name[:-1] + "y")
    with Output(path) as output, Output(other):  # each has a lock of its own
        with pytest.raises(UsageError, match="another process"):
            Output(path)
        output.append(record("a", 1))
        ledger = batch_ledger.read(output)
        ledger.drop(row_key("a"))
        output.drop(ledger.stale())
        ledger.close()
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, other.name])
    assert path.read_bytes() == b""


@pytest.mark.skipif(os.name == "nt", reason="there are no such devices")
def test_what_cannot_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("loop", tmp_path / "loop")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="or - for standard output"):
            Output(path)
    for name in ("none/out", "x" * 300, "loop", "a\0b"):
        with pytest.raises(UsageError, match="cannot be written"):
            Output(tmp_path / name)


def test_an_interrupt_while_a_line_is_written_writes_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    write = os.write

    def interrupted(fd: int, data: bytes) -> int:
        monkeypatch.undo()
        write(fd, data[: len(data) * share // 2])
        raise KeyboardInterrupt  # before the caller knows how much was written

    for share in (0, 1, 2):
        with pytest.raises(KeyboardInterrupt), Output(path) as output:
            monkeypatch.setattr(os, "write", interrupted)
            output.append(record("a", share))
    assert [json.loads(each)["line"] for each in path.read_bytes().splitlines()] == [0, 1, 2]


def test_records_are_on_the_disk_a_second_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    synchronised: list[float] = []
    monkeypatch.setattr(os, "fsync", lambda _: synchronised.append(now[0]))
    with Output(tmp_path / "out", lambda: now[0]) as output:
        for now[0] in (0.1, 0.9, 1.0, 1.1):
            output.append(record("a"))
        for now[0] in (1.9, 2.0, 5.0):
            output.settle()
        assert synchronised == [1.0, 2.0]  # and nothing where nothing was written
        output.append(record("a"))
        assert synchronised == [1.0, 2.0, 5.0]
        now[0] = 5.5
        output.append(record("a"))
    assert synchronised == [1.0, 2.0, 5.0, 5.5]


def test_a_disk_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EIO, errno.EINVAL):
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
        if number == errno.EINVAL:  # a file system without it
            append(tmp_path / "out", record("a", 2))
        else:
            with pytest.raises(SpecllamaError, match="on its disk: Input/output error"):
                append(tmp_path / "out", record("a", 1))
    assert len((tmp_path / "out").read_bytes().splitlines()) == 2


def test_half_a_character_is_written_as_its_escape(tmp_path: Path) -> None:
    path = tmp_path / "out"
    append(path, {**record("a"), "model": "x\udce4y"})
    assert b"x\\udce4y" in path.read_bytes()
    assert json.loads(path.read_text("utf-8"))["model"] == "x\udce4y"


def test_a_record_is_one_line_for_every_reader(tmp_path: Path) -> None:
    path, text = tmp_path / "out", "a\u2028b\u2029c\x85d\ne\x1cf\r\x0b"
    append(path, {**record("a"), "text": text})
    [line] = path.read_text("utf-8").splitlines()
    assert json.loads(line)["text"] == text


FULL = """
import json, resource, sys
from pathlib import Path
from specllama.batch_ledger import Done, Ledger, row_key
from specllama.batch_output import Line, Output
from specllama.errors import SpecllamaError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    with Output(Path(sys.argv[1])) as output:
        for number in range(10**6):
            output.append(json.loads(sys.argv[2]))
except SpecllamaError as error:
    print(number, error)
ledger = Ledger()
try:
    for number in range(10**6):
        key = row_key(f"{number:0500}")
        ledger.add(key, Done(("p", "s", "m"), False), Line(number, number + 1, b""))
except SpecllamaError as error:
    print(error)
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no such limits")
@NAMES
def test_a_disk_that_is_full(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    line = json.dumps({**record("a"), "text": os.urandom(5000).hex()})
    done = subprocess.run(
        [sys.executable, "-c", FULL, path, line], env=environment(), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert "takes no more: File too large; make room" in first
    assert "cannot be kept in a temporary file" in second
    data = path.read_bytes()
    lines = (gzip.decompress(data) if name.endswith("gz") else data).splitlines()
    assert len(lines) == int(first.split()[0]) > 50
    assert all(json.loads(each) == json.loads(line) for each in lines)


@pytest.mark.parametrize("name", ["\x003", "#3", "=a", "a", "é", "e\u0301", "A", "1", " 1", "\0"])
def test_an_id_is_found_under_itself_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out"
    append(path, record(name, 1), record(None, 3, "invalid_json"))
    names: list[str | int] = ["\x003", "#3", "=a", "a", "é", "e\u0301", "A", "1", " 1", "\0", 1, 3]
    found = [key for key, done in zip(names, read(path, names), strict=True) if done]
    assert found == [name, 3]


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
