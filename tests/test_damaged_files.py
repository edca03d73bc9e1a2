"""Files that end, or turn into zeros, at random bytes: a sentence each, and never an abort.

The loading is tried in processes of its own, since llama.cpp ends one at what it does not expect.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import tiny, vocab_file

KINDS = ["attention", "swa", "recurrent", "hybrid"]

# Arguments: pairs of a path and whether it must be refused.
PROGRAM = """
import sys
from specllama import SpecllamaError, load
for path, what in zip(sys.argv[1::2], sys.argv[2::2]):
    print(path, end=" ", flush=True)
    try:
        with load(model=path, draft=path, ctx_size=64, threads=1, draft_tokens=2) as pair:
            list(pair.generate([20, 21, 22], max_tokens=3))
        print("loaded", flush=True)
    except SpecllamaError as error:
        assert "\\n" not in str(error) and 20 < len(str(error)) < 600, error
        print("refused", flush=True)
"""


def tried(files: list[Path], must_be_refused: bool) -> None:
    arguments = [argument for path in files for argument in (str(path), "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (lines[-1:], done.stderr[-600:])
    assert len(lines) == len(files)
    if must_be_refused:
        assert all(line.endswith(" refused") for line in lines), lines


def cuts(data: bytes, rng: random.Random, n: int) -> list[int]:
    """Places to cut at: in the header, which is small, as often as in the tensors."""
    start = data.find(b"token_embd.weight") + 200
    return [rng.randrange(start) for _ in range(n // 2)] + [
        rng.randrange(start, len(data)) for _ in range(n - n // 2)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_ends_early_is_refused_with_a_sentence(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    data = tiny(kind).read_bytes()
    files = []
    for i, cut in enumerate(cuts(data, rng, 60)):
        files.append(tmp_path / f"{i}-{cut}.gguf")
        files[-1].write_bytes(data[:cut])
    tried(files, must_be_refused=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_the_right_length_with_zeros_at_its_end_ends_no_process(
    kind: str, tmp_path: Path
) -> None:
    """As a download leaves it that claimed its room first."""
    rng = random.Random(kind)
    data = tiny(kind).read_bytes()
    files = []
    for i, cut in enumerate(cuts(data, rng, 40)):
        files.append(tmp_path / f"{i}-{cut}.gguf")
        files[-1].write_bytes(data[:cut] + bytes(len(data) - cut))
    tried(files, must_be_refused=False)


def test_a_vocabulary_that_ends_early_is_refused_with_a_sentence(tmp_path: Path) -> None:
    rng = random.Random(1)
    data = vocab_file("gpt-2").read_bytes()
    files = []
    for i in range(12):
        files.append(tmp_path / f"{i}.gguf")
        files[-1].write_bytes(data[: rng.randrange(len(data))])
    tried(files, must_be_refused=True)
