"""What a loaded pair takes: its files, its caches and little more, and no more with every call.

Peaks are read in a process of their own, since a process never shrinks what it has needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import environment
from tiny import tiny

from specllama.errors import ModelError
from specllama.loading import Files, find_files
from specllama.memory import available_bytes, physical_bytes

MB, MIB = 1_000_000, 1_048_576

COMMON = """
import gc, json, re, resource, sys
from pathlib import Path
import specllama
from specllama.llama import Context

unit = 1 if sys.platform == "darwin" else 1024

def peak():
    # On Linux ru_maxrss begins with what the process had that started this one, the tests' own.
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def answer(pair, prompt, n, seed):
    return list(pair.generate(prompt, max_tokens=n, seed=seed, ignore_eos=True))

def caches():
    contexts = [c for c in gc.get_objects() if isinstance(c, Context)]
    assert len(contexts) == 2
    return sum(mib for c in contexts for _, kind, mib in c.buffers if kind == "KV")

target, draft, ctx_size = sys.argv[1], sys.argv[2], int(sys.argv[3])

def load():
    return specllama.load(model=target, draft=draft, ctx_size=ctx_size, threads=2,
                          draft_tokens=3)
"""


def measure(code: str, files: Files, ctx_size: int) -> Any:
    """What the child process prints as JSON, after the common lines and this code."""
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code, *map(str, (files.target, files.draft, ctx_size))],
        capture_output=True,
        text=True,
        timeout=300,
        # Which of malloc's arenas a thread happens to get would move the peaks by megabytes.
        env=environment() | {"MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def file_bytes(files: Files) -> int:
    return sum(path.stat().st_size for path in (files.target, files.draft) if path)


PEAK = """
pair = load()
last = answer(pair, "The sea is wide and the ships are small. " * repeats, 32, 1)[-1]
print(json.dumps({"peak": peak(), "kv_mib": caches(), "prompt_n": last.stats.prompt_n,
                  "draft_n": last.stats.draft_n}))
"""


def test_the_default_pair_needs_its_files_its_caches_and_150_megabytes() -> None:
    try:
        files = find_files()
    except ModelError as error:
        pytest.fail(f"the default pair is needed here, and scripts/check installs it: {error}")
    found = measure("repeats = 150" + PEAK, files, 8192)
    assert found["kv_mib"] == pytest.approx(360, rel=0.01)  # 30 layers of 3 x 64, k and v, twice
    # Prompts of more than one batch, since every page of the buffers counts once it is used.
    assert found["prompt_n"] > 1400 and found["draft_n"] > 0
    overhead = found["peak"] - file_bytes(files) - found["kv_mib"] * MIB
    assert overhead < 150 * MB, f"{overhead / MB:.0f} MB"


def test_a_large_vocabulary_and_a_long_context_cost_less_than_a_gigabyte() -> None:
    options: dict[str, Any] = {"vocab": "bpe", "context": 32768}
    options |= {"extra": 151_936 - 500, "extra_type": "normal"}  # as many tokens as Qwen 2 has
    files = Files(tiny(**options), tiny(noise=0.05, **options))
    found = measure("repeats = 20" + PEAK, files, 32768)
    assert found["kv_mib"] == 32
    overhead = found["peak"] - file_bytes(files) - found["kv_mib"] * MIB
    assert overhead < 1000 * MB, f"{overhead / MB:.0f} MB"


MANY_ANSWERS = """
pair = load()
peaks = []
for seed in range(60):
    answer(pair, f"hello the world {seed}" * (1 + seed % 5), 30, seed)
    peaks.append(peak())
print(json.dumps(peaks))
"""
MANY_LOADS = """
peaks = []
for seed in range(25):
    with load() as pair:
        answer(pair, "hello the world", 5, seed)
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.parametrize(("code", "settled"), [(MANY_ANSWERS, 10), (MANY_LOADS, 5)])
def test_memory_does_not_grow_with_use(code: str, settled: int) -> None:
    peaks = measure(code, Files(tiny(), tiny(noise=0.05)), 512)
    assert len(peaks) - settled in (20, 50)
    assert peaks[-1] <= 1.05 * peaks[settled - 1]


# --- what there is --------------------------------------------------------------


MEMINFO = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\nSwapFree: 500 kB\n"


@pytest.mark.parametrize(
    ("limit", "available"), [(None, 4_608_000), ("max\n", 4_608_000), ("3000000\n", 3_000_000)]
)
def test_available_memory_knows_swap_and_limits(
    limit: str | None, available: int, tmp_path: Path
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    if limit is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
    assert available_bytes(tmp_path) == available
    own = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert physical_bytes(tmp_path) == (3_000_000 if limit == "3000000\n" else own)


def test_available_memory_without_linux_is_what_the_machine_has(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_bytes(tmp_path) == total
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\n")
    assert available_bytes(tmp_path) == total
