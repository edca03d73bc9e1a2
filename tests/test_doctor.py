"""What specllama doctor tells, on this machine and on made-up ones, and that it tells no names."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from command import specllama
from tiny import CHECKOUT

from specllama import doctor, doctor_table, privacy, processor
from specllama.errors import ModelError

BARE = ("doctor", "--no-measurement")


def test_it_tells_of_this_machine_on_standard_output() -> None:
    result = specllama(*BARE)
    assert (result.code, result.err) == (0, "")
    for word in ("llama-cpp-python", "python", "threads", "memory", "backends", "cache folder"):
        assert word in result.text, word
    assert "Traceback" not in result.text and "\x1b" not in result.text


def test_json_is_one_object_with_the_same_facts() -> None:
    result = specllama(*BARE, "--json")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.text)
    assert report["problems"] == []
    assert report["versions"]["llama-cpp-python"]
    assert "CPU" in report["build"]["backends"]
    assert {"name", "kind", "free_mib", "total_mib"} <= set(report["build"]["devices"][0])
    assert report["processor"]["threads"] >= 1
    assert "measured" not in report


def test_a_bug_report_tells_no_name_and_no_folder_of_the_user(tmp_path: Path) -> None:
    home = tmp_path / "wonderland" / "alice"
    (home / ".cache").mkdir(parents=True)
    shared = tmp_path / "srv" / "alice" / "models"
    env = {
        "HOME": str(home), "LOGNAME": "alice", "USER": "alice",
        "SPECLLAMA_CACHE": str(home / ".cache" / "specllama"), "SPECLLAMA_CONFIG": str(shared),
    }  # fmt: skip
    for options in ([], ["--json"]):
        result = specllama(*BARE, *options, env=env)
        assert result.code == 0, result.err
        assert "~/.cache/specllama" in result.text
        assert "alice" not in result.text and "wonderland" not in result.text
        assert "srv/USER/models" in result.text
        assert socket.gethostname() not in result.text.split()


def test_variables_that_matter_are_told_and_secrets_are_not() -> None:
    env = {"OMP_NUM_THREADS": "7", "HF_TOKEN": "hf_secret", "SPECLLAMA_AMX": "0"}
    result = specllama(*BARE, "--json", env=env)
    told = json.loads(result.text)["environment"]
    assert told["OMP_NUM_THREADS"] == "7" and told["SPECLLAMA_AMX"] == "0"
    assert "hf_secret" not in result.text and "PATH" not in told


def test_the_default_pair_is_measured() -> None:
    result = specllama("doctor", "--json")
    assert (result.code, result.err) == (0, "")
    measured = json.loads(result.text)["measured"]
    assert {"1", "4", "8"} <= set(measured["rows_ms"])
    assert measured["plain"] > 0 and measured["speculative"] > 0
    assert 0 <= measured["acceptance"] <= 1
    assert specllama("doctor", "--threads", "0").code == 2


def test_a_measurement_is_shown_in_the_table() -> None:
    found = {"target": "t.gguf", "draft": "d.gguf", "threads": 2,
             "layout": ["target: 3/3 layers on CUDA0"], "rows_ms": {1: 10.0, 4: 12.5},
             "plain": 50.0, "speculative": 81.25, "n_draft": 3, "acceptance": 0.75}  # fmt: skip
    text = doctor_table.table(doctor.examine(lambda: found))
    assert "1: 10 ms  4: 12.5 ms" in text
    assert "target: 3/3 layers on CUDA0" in text
    assert "81.2 tokens/s with 3 drafted a round, 75 % kept" in text
    assert "1.2 times one token" in text


def test_without_weights_it_says_so_and_nothing_is_broken() -> None:
    def measure() -> dict[str, Any]:
        raise ModelError("there are no weights; install some")

    report = doctor.examine(measure)
    assert report["problems"] == [] and report["measured"] is None
    assert "nothing was measured: there are no weights; install some" in report["advice"]
    assert doctor_table.table(report)


def test_a_measurement_that_breaks_is_a_problem() -> None:
    def measure() -> dict[str, Any]:
        raise ZeroDivisionError("by zero")

    assert doctor.examine(measure)["problems"] == [
        "the measurement failed: ZeroDivisionError: by zero"
    ]


def test_a_cache_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = specllama(*BARE, env={"SPECLLAMA_CACHE": str(tmp_path / "file" / "cache")})
    assert result.code == 1
    assert "Broken:" in result.text and "SPECLLAMA_CACHE" in result.text


def test_a_library_that_cannot_be_loaded_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(
        'raise OSError("libllama.so: cannot open shared object file")\n'
    )
    result = specllama(*BARE, env={"PYTHONPATH": f"{tmp_path}:{CHECKOUT}"})
    assert result.code == 1 and result.err == ""
    assert "llama-cpp-python cannot be used" in result.text and "libllama.so" in result.text
    assert "Traceback" not in result.text


# --- advice -------------------------------------------------------------------------------------

MACHINE = {"name": "x", "features": [], "processors": 8, "quota": None, "load": 0.1, "threads": 4}
BUILD = {
    "features": ["AVX2", "FMA"], "amx": None, "gpu": True, "no_gpu": "", "gpu_line": "",
}  # fmt: skip


def test_an_idle_machine_with_all_it_has_needs_no_advice() -> None:
    assert list(doctor._load(MACHINE)) == []
    assert list(doctor._building(BUILD, ["AVX2", "FMA"])) == []


def test_a_busy_machine_is_told_that_it_is() -> None:
    [advice] = doctor._load({**MACHINE, "load": 6.0})
    assert "6.0 of 8" in advice


def test_instructions_that_are_not_used_are_named_with_how_to_build() -> None:
    [advice] = doctor._building(BUILD, ["AVX2", "FMA", "AVX512", "AVX512_VNNI"])
    assert "AVX512, AVX512_VNNI" in advice and "GGML_NATIVE=on" in advice
    assert "amx" not in advice
    [advice] = doctor._building(BUILD, ["AVX2", "FMA", "AVX512", "AMX_INT8"])
    assert "-mno-amx-int8" in advice


def test_a_draft_that_costs_as_much_as_its_target_is_explained() -> None:
    measured = {"rows_ms": {"1": 10, "4": 30}, "plain": 20.0, "speculative": 15.0}
    rows, pair = doctor._speed(measured)
    assert "3.0 times" in rows and "only good drafts" in rows
    assert "ten times" in pair


# --- facts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/bob/models/a.gguf", "~/models/a.gguf"),
        ("there is no file /home/bob; look", "there is no file ~; look"),
        ("/home/bobby/a", "/home/bobby/a"),
        ("/mnt/bob/a", "/mnt/USER/a"),
        ("bob@box", "USER@HOST"),
        ("bobsled box.local boxes", "bobsled HOST.local boxes"),
    ],
)
def test_names_are_replaced_and_words_that_hold_them_are_not(text: str, expected: str) -> None:
    names = {"bob": "USER", "box": "HOST"}
    found = privacy.anonymous({"a": [text, 1, None]}, names, Path("/home/bob"))
    assert found == {"a": [expected, 1, None]}


def test_a_user_without_a_home_has_nothing_to_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where there is none
    assert privacy.anonymous(["a ~ /b"], {}) == ["a ~ /b"]


def test_a_processor_is_read_as_the_kernel_tells_it(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx avx2 avx512f\n\n"
        "processor\t: 1\nmodel name\t: other\nflags\t: fma\n"
    )
    assert processor.name(tmp_path) == "Some CPU @ 2 GHz"
    assert processor.features(tmp_path) == ["AVX", "AVX2", "AVX512"]
    assert processor.features(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("content", "quota"),
    [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), (None, None), ("1 0", None)],
)
def test_a_limit_of_processor_time_is_that_of_the_control_group(
    content: str | None, quota: float | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(content)
    assert processor.quota(tmp_path) == quota


def test_no_more_cores_are_used_than_processors_are_usable() -> None:
    assert 1 <= processor.cores() <= processor.usable()


def test_two_processors_of_one_core_are_one_and_a_container_has_its_quota(tmp_path: Path) -> None:
    numbers = sorted(os.sched_getaffinity(0))
    for number in numbers:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number // 2}\n")
    cores = len({number // 2 for number in numbers})
    assert processor.cores(tmp_path) == cores
    limit = tmp_path / "sys/fs/cgroup/cpu.max"
    limit.parent.mkdir(parents=True)
    for quota, expected in (("50000", 1), ("150000", 1), (f"{cores}99999", cores)):
        limit.write_text(f"{quota} 100000\n")
        assert processor.cores(tmp_path) == expected
