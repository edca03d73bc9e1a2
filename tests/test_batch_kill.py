"""A batch that is ended at any moment: finished lines stay as they are, and the rest is done."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import environment
from tiny import tiny

N_ROWS = 200
# As many as are wanted: SPECLLAMA_KILLS=50 for a longer look.
KILLS = int(os.environ.get("SPECLLAMA_KILLS", "12"))

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no such signals there")


def start(folder: Path, n_tokens: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "specllama.cli", "batch", folder / "in", "-o", folder / "out"),
            *("-m", tiny("attention"), "--drafter", "none", "--parallel", "4"),
            *("-n", str(n_tokens), "--ignore-eos", "-t", "1"),
        ],
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def prompts(folder: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": f"row {i} " * (1 + i % 5)} for i in range(N_ROWS)]
    (folder / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines(folder: Path) -> list[bytes]:
    """Whole lines of the output, each of which must be a record."""
    path = folder / "out"
    whole = path.read_bytes().splitlines(True) if path.exists() else []
    if whole and not whole[-1].endswith(b"\n"):
        whole.pop()
    names = [json.loads(each)["id"] for each in whole]
    assert len(set(names)) == len(names)
    return whole


def grown(process: subprocess.Popen[bytes], folder: Path, n_lines: int) -> None:
    """Wait until the output has so many lines more, or the process is done."""
    path = folder / "out"
    wanted = len(lines(folder)) + n_lines
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= wanted:
            return
        time.sleep(0.005)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def texts(folder: Path) -> dict[str, str]:
    found = map(json.loads, lines(folder))
    return {each["id"]: each["text"] for each in found}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the rows say when nothing happens."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    prompts(folder)
    code, errors = ended(start(folder, 60))
    assert code == 0, errors
    return texts(folder)


def finish(folder: Path, wanted: dict[str, str]) -> None:
    code, errors = ended(start(folder, 60))
    assert code == 0, errors
    found = texts(folder)
    assert set(found) == set(wanted) == {f"r{i}" for i in range(N_ROWS)}
    # Other rows beside a row may change the last bits of its logits, and a token with them.
    assert sum(found[name] != wanted[name] for name in found) < N_ROWS / 50


def test_killed_again_and_again(tmp_path: Path, uninterrupted: dict[str, str]) -> None:
    prompts(tmp_path)
    chance = random.Random(1)
    before: list[bytes] = []
    n_killed = 0
    for _ in range(KILLS):
        process = start(tmp_path, 60)
        if chance.random() < 0.2:
            time.sleep(chance.random())
        else:
            grown(process, tmp_path, chance.randint(0, 2 * N_ROWS // (3 * KILLS)))
            time.sleep(0.02 * chance.random())
        process.kill()
        code, _ = ended(process)
        n_killed += code == -signal.SIGKILL
        after = lines(tmp_path)
        assert after[: len(before)] == before
        before = after
    assert n_killed > KILLS / 2 and 0 < len(before) < N_ROWS
    finish(tmp_path, uninterrupted)
    assert lines(tmp_path)[: len(before)] == before


@pytest.mark.parametrize("name, wanted", [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_interrupted_and_gone_on_with(
    tmp_path: Path, uninterrupted: dict[str, str], name: str, wanted: int
) -> None:
    number = getattr(signal, name)
    prompts(tmp_path)
    chance = random.Random(number)
    before: list[bytes] = []
    for n_lines in (0, 5):
        process = start(tmp_path, 60)
        grown(process, tmp_path, 1 + n_lines)
        time.sleep(0.02 * chance.random())
        process.send_signal(number)
        code, errors = ended(process)
        assert code == wanted, errors
        assert b"Traceback" not in errors and b"Exception" not in errors
        assert sorted(os.listdir(tmp_path)) == ["in", "out"]  # no lock is left behind
        data = (tmp_path / "out").read_bytes()
        assert data.endswith(b"\n")  # nothing is halfway
        after = lines(tmp_path)
        assert len(before) < len(after) < N_ROWS and after[: len(before)] == before
        before = after
    finish(tmp_path, uninterrupted)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    prompts(tmp_path)
    process = start(tmp_path, 60)
    grown(process, tmp_path, 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, errors = ended(process)
    assert code in (130, -signal.SIGINT)
    assert b"Traceback" not in errors
    assert lines(tmp_path)
