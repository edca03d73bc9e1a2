"""Devices, cache types, threads and draft contexts: what the options do, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from command import Result, specllama
from tiny import tiny
from toys import Noisy, Table, ToyContext

from specllama import devices, llama, native, notes, processor
from specllama.acceptance import verify_block, verify_tokens
from specllama.drafting import ModelDrafter, NullDrafter, SequenceState
from specllama.errors import UsageError
from specllama.lm import CachedLM
from specllama.loading import load
from specllama.lookahead import FixedLength
from specllama.placement import CACHE_TYPES, Cache, Placement
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator

TARGET, DRAFT = str(tiny("attention")), str(tiny("attention", noise=0.05))
ASK = ["generate", "-m", TARGET, "-md", DRAFT, "-t", "1", "--draft-tokens", "3",
       "--temp", "0", "-n", "24", "hello"]  # fmt: skip
GREEDY = SamplingParams(temperature=0)
without_gpu = pytest.mark.skipif(llama.supports_gpu(), reason="this build has a GPU")
with_gpu = pytest.mark.skipif(not llama.supports_gpu(), reason="this build has no GPU")


def ask(*options: str) -> Result:
    return specllama(*ASK, *options)


def said(*options: str) -> str:
    """The text, of a command that has nothing to remark."""
    result = ask(*options)
    assert (result.code, result.err) == (0, "")
    return result.text


def refused(result: Result, code: int = 2) -> str:
    """The only line of standard error, of a command that printed nothing else."""
    assert (result.code, result.out) == (code, b"")
    [line] = result.err.splitlines()
    assert line.startswith("Error: ")
    return line


PLAIN_TEXT = said()


# --- devices ------------------------------------------------------------------------------------


def test_llama_cpp_names_its_processor_and_backend() -> None:
    cpu = [device for device in devices.every() if device.kind == "cpu"]
    assert [device.name for device in cpu] == ["CPU"]
    assert cpu[0].total > 2**28 and cpu[0].backend == "CPU"
    assert "CPU" in devices.backends()
    assert devices.cpu_features()
    assert bool(devices.gpus()) == native.supports_gpu()


def test_the_devices_are_listed_without_any_model() -> None:
    result = specllama("generate", "--list-devices")
    assert result.code == 0
    assert result.text.splitlines() == devices.listing()
    assert result.text.startswith("Available devices:\n")


@without_gpu
def test_a_build_without_devices_says_where_to_get_one() -> None:
    result = specllama("generate", "--list-devices")
    assert "without GPU support" in result.err and "-DGGML_" in result.err


@pytest.mark.parametrize("option", ["--device", "--device-draft"])
@pytest.mark.parametrize("name", ["cuda", "CPU", "CUDA99", "none,CUDA0"])
def test_a_device_that_is_not_there_is_refused(option: str, name: str) -> None:
    line = refused(ask(option, name))
    assert name.split(",")[0] in line
    assert "--list-devices" in line or "leave the others out" in line


def test_an_empty_name_is_refused() -> None:
    assert "--list-devices" in refused(ask("--device", "CUDA0,"))


def test_no_device_means_the_processor() -> None:
    assert said("--device", "none", "--device-draft", "none") == PLAIN_TEXT
    with llama.Model(tiny(), placement=Placement(devices=("none",))) as model:
        assert set(model.layers.values()) == {"CPU"}


@with_gpu
def test_everything_lies_on_the_gpu_unless_less_is_asked_for() -> None:
    first = devices.gpus()[0].name
    for n_layers, on_gpu in ((-1, 3), (1, 1), (0, 0)):
        placement = Placement(gpu_layers=n_layers, devices=(first,))
        with llama.Model(tiny(), placement=placement) as model:
            assert list(model.layers.values()).count(first) == on_gpu


@without_gpu
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-ngl", "99"], ["--gpu-layers"]),
        (["-ngld", "3"], ["--gpu-layers-draft"]),
        (["-sm", "row", "-ts", "3,1"], ["--split-mode", "--tensor-split"]),
        (["-sm", "none", "-mg", "2"], ["--split-mode", "--main-gpu"]),
    ],
)
def test_what_this_build_ignores_is_said_once_with_how_to_change_it(
    options: list[str], named: list[str]
) -> None:
    result = ask(*options)
    assert (result.code, result.text) == (0, PLAIN_TEXT)
    [note] = result.err.splitlines()
    assert note.startswith("Note: ") and "without GPU support" in note
    assert all(name in note for name in named)
    assert re.search(r'CMAKE_ARGS="-DGGML_(CUDA|METAL)=on" pip install --force-reinstall', note)


@without_gpu
def test_what_asks_for_nothing_special_is_no_reason_for_a_note() -> None:
    assert said("-ngl", "0", "-ngld", "-1", "-sm", "layer", "-mg", "0") == PLAIN_TEXT


def test_the_install_line_is_the_platforms_own() -> None:
    assert "GGML_METAL=on" in devices.install_line("Darwin")
    for system in ("Linux", "Windows"):
        assert "GGML_CUDA=on" in devices.install_line(system)


@pytest.mark.parametrize(
    "options",
    [
        ["-ts", "x"], ["-ts", "0,0"], ["-ts", "-1,2"], ["-ts", "nan"], ["-ts", ",".join("1" * 99)],
        ["-sm", "tensor"], ["-mg", "-1"], ["-mg", "4294967296"], ["-ngl", "2147483648"],
        ["-ngld", "-5"], ["-ts", "1e39"], ["-ngl", "-2"], ["-fa", "maybe"], ["-ctk", "q9_0"],
        ["-cd", "-1"], ["-td", "0"], ["-td", "100000"],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(options: list[str]) -> None:
    refused(ask(*options))


@pytest.mark.parametrize(
    "wrong",
    [
        {"split_mode": "rows"}, {"tensor_split": (float("inf"),)}, {"main_gpu": -1},
        {"gpu_layers": -2}, {"devices": ("CUDA0", "none")},
    ],
)  # fmt: skip
def test_a_wrong_placement_is_refused_on_construction(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Placement(**wrong)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--no-mmap"], ["--no-mmap", "--mlock"], ["--mlock"]])
def test_however_the_file_is_read_the_text_is_the_same(options: list[str]) -> None:
    result = ask(*options)
    assert (result.code, result.text) == (0, PLAIN_TEXT)
    # Locking may be beyond this user's limit, which is then said.
    assert all("could not be locked" in line for line in result.err.splitlines())


LOCK = """
import ctypes, resource, sys
from pathlib import Path
from specllama import llama
from specllama.placement import Placement
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
# A superuser locks what it likes; CAP_IPC_LOCK is what allows it, and this gives it up.
header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(header, none) == 0
with llama.Model(Path(sys.argv[1]), placement=Placement(mlock=True)) as model:
    print(model.is_unlocked)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="rights are Linux's here")
def test_weights_that_cannot_be_locked_are_noticed() -> None:
    result = specllama(tiny(), python=("-c", LOCK))
    assert (result.code, result.text) == (0, "True\n"), result.err


def test_a_model_opened_without_locking_is_not_called_unlocked() -> None:
    with llama.Model(tiny()) as model:
        assert not model.is_unlocked


@pytest.mark.parametrize("type_k", ["q8_0", "q4_0"])
def test_text_with_a_quantised_cache_is_the_plain_text_with_it(type_k: str) -> None:
    types = ["-ctk", type_k, "-ctv", type_k]
    drafted = ask(*types, "--json")
    plain = ask(*types, "--json", "--drafter", "none")
    assert drafted.code == plain.code == 0
    assert json.loads(drafted.text)["text"] == json.loads(plain.text)["text"]
    assert "flash attention" in drafted.err and "flash attention" in plain.err


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_the_target_as_its_own_draft_is_accepted_with_a_quantised_cache(cache_type: str) -> None:
    cache = Cache(cache_type, cache_type)
    with load(model=TARGET, draft=TARGET, threads=1, draft_tokens=3, cache=cache,
              cache_draft=cache) as pair:  # fmt: skip
        stats = [c.stats for c in pair.generate("hello", GREEDY, max_tokens=100, seed=1,
                                                ignore_eos=True)][-1]  # fmt: skip
    assert stats is not None and stats.draft_n > 50 and stats.acceptance >= 0.9


def test_each_model_has_the_cache_types_that_were_asked_for_and_the_log_tells_them() -> None:
    result = ask("-ctk", "q8_0", "-ctkd", "f32", "-ctvd", "bf16", "-v")
    assert result.code == 0
    caches = re.findall(r"K \((\w+)\): +[\d.]+ MiB, V \((\w+)\)", result.err)
    assert {("q8_0", "f16"), ("f32", "bf16")} <= set(caches)


def test_the_draft_takes_the_targets_cache_types_unless_it_has_its_own() -> None:
    result = ask("-ctk", "q8_0", "-v")
    caches = re.findall(r"K \((\w+)\): +[\d.]+ MiB, V \((\w+)\)", result.err)
    assert set(caches) == {("q8_0", "f16")}


def test_a_quantised_v_cache_without_flash_attention_is_refused() -> None:
    assert "q8_0" in refused(ask("-ctv", "q8_0", "-fa", "off"))
    assert refused(ask("-ctvd", "q4_0", "-fa", "off"))


@pytest.mark.parametrize("flash", ["on", "off", "auto"])
def test_flash_attention_is_as_it_was_chosen(flash: str) -> None:
    with llama.Model(tiny()) as model:
        cache = Cache(flash_attention=flash)
        with llama.Context(model, n_ctx=64, threads=1, flash_attention=cache.flash) as context:
            assert context.has_flash_attention == (
                flash == "on" or (flash == "auto" and llama.supports_gpu())
            )


@pytest.mark.skipif(llama.supports_gpu(), reason="the choice is llama.cpp's there")
@pytest.mark.parametrize(
    ("n_ctx", "n_slots", "flash"), [(64, 4, True), (65, 4, False), (64, 1, False)]
)
def test_many_short_sequences_are_read_with_flash_attention(
    n_ctx: int, n_slots: int, flash: bool
) -> None:
    with llama.Model(tiny()) as model:
        context = llama.Context(model, n_ctx=n_ctx, n_slots=n_slots, threads=1)
        assert context.has_flash_attention is flash


def test_cache_types_have_the_numbers_that_the_bindings_give_them() -> None:
    theirs = {name: getattr(native.lib, f"GGML_TYPE_{name.upper()}", None) for name in CACHE_TYPES}
    known = {name: number for name, number in theirs.items() if number is not None}
    assert len(known) > 5
    assert {name: CACHE_TYPES[name] for name in known} == known


# --- threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_draft_has_threads_of_its_own_and_the_text_is_the_same(threads: str) -> None:
    assert ask("-td", threads).text == PLAIN_TEXT


def test_a_benchmark_tells_where_each_model_lies_and_with_how_many_threads() -> None:
    with load(model=TARGET, draft=DRAFT, threads=1, threads_draft=2, draft_tokens=3,
              gpu_layers=0, gpu_layers_draft=0, cache_draft=Cache("q8_0")) as pair:  # fmt: skip
        assert pair.layout == (
            "target: 3/3 layers on CPU, 1 threads, KV cache f16/f16",
            "draft: 3/3 layers on CPU, 2 threads, KV cache q8_0/f16",
        )
    long, small = tiny(context=2048), tiny(context=2048, noise=0.05)
    result = specllama("bench", "-m", long, "-md", small, "-t", "1", "-td", "2", "-n", "4",
                       "--draft-tokens", "2", "--repetitions", "1", "--workload", "copy",
                       "--temps", "0", "-ngl", "0", "-ngld", "0")  # fmt: skip
    assert result.code == 0, result.err
    assert "target: 3/3 layers on CPU, 1 threads" in result.text
    assert "draft: 3/3 layers on CPU, 2 threads" in result.text


def test_more_threads_than_cores_are_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ask("-td", "200")
    assert (result.code, result.text) == (0, PLAIN_TEXT)
    [note] = result.err.splitlines()
    assert "200 threads share" in note and f"--threads {processor.cores()}" in note
    monkeypatch.setattr(processor, "cores", lambda: 4)
    assert notes.of_threads(4) == []
    [note] = notes.of_threads(5)  # also where two processors are one core
    assert "5 threads share the 4 cores" in note


# --- a draft context smaller than the target's --------------------------------------------------

MODEL = Table(7, seed=11)


class Watching(ToyContext):
    """A context that remembers how many tokens it held at most."""

    most = 0

    def decode(self, batch: Sequence[Any]) -> list[Any]:
        self.most = max(self.most, *(rows.start + len(rows.tokens) for rows in batch))
        return super().decode(batch)


@pytest.mark.parametrize("verify", [verify_tokens, verify_block])
@pytest.mark.parametrize("n_ctx", [1, 2, 3, 5, 8, 16, 24])
@pytest.mark.parametrize("n_prompt", [1, 7, 8, 9, 30])
def test_a_small_draft_context_slides_and_changes_nothing(
    verify: Any, n_ctx: int, n_prompt: int
) -> None:
    def answer(drafter: ModelDrafter | None) -> list[int]:
        target = CachedLM(ToyContext(MODEL, 7, n_ctx=128, n_batch=128))
        loop = Speculator(target, drafter or NullDrafter(), verify, 7)
        state = SequenceState(
            0, [i % 7 for i in range(n_prompt)], GREEDY, Streams.seeded(1, 0), 60
        )
        if drafter is not None:
            drafter.prepare(state)
        while state.n_left > 0:
            loop.round([state])
        return state.tokens

    small = Watching(Noisy(MODEL, 12), 7, n_ctx=n_ctx)
    assert answer(ModelDrafter(CachedLM(small), FixedLength(3), 7)) == answer(None)
    assert 0 < small.most <= n_ctx


def test_it_goes_on_proposing_when_its_context_is_long_full() -> None:
    small = Watching(MODEL, 7, n_ctx=24)
    drafter = ModelDrafter(CachedLM(small), FixedLength(3), 7)
    loop = Speculator(CachedLM(ToyContext(MODEL, 7, n_ctx=400)), drafter, verify_block, 7)
    state = SequenceState(0, [0], GREEDY, Streams.seeded(1, 0), 300)
    late = []
    while state.n_left > 0:
        [outcome] = loop.round([state])
        if len(state.tokens) > 100:
            late.append(outcome.proposed)
    assert sum(late) > 2 * len(late)


def test_a_full_draft_context_is_read_again_by_halves_and_not_every_round() -> None:
    small = CachedLM(ToyContext(MODEL, 7, n_ctx=32))
    drafter = ModelDrafter(small, FixedLength(2), 7)
    loop = Speculator(CachedLM(ToyContext(MODEL, 7, n_ctx=400)), drafter, verify_block, 7)
    state = SequenceState(0, [0], GREEDY, Streams.seeded(1, 0), 320)
    while state.n_left > 0:
        loop.round([state])
    # Each token once, and every 8 tokens, half the context less the margin, another 16.
    assert small.rows_decoded < 321 * 4


def test_contexts_of_one_size_never_slide() -> None:
    small = CachedLM(ToyContext(MODEL, 7, n_ctx=40))
    drafter = ModelDrafter(small, FixedLength(3), 7)
    loop = Speculator(CachedLM(ToyContext(MODEL, 7, n_ctx=40)), drafter, verify_block, 7)
    state = SequenceState(0, [0], GREEDY, Streams.seeded(1, 0), 39)
    while state.n_left > 0:
        loop.round([state])
    assert small.held(0)[0] == state.tokens[0]
    assert small.rows_decoded <= 40


def test_the_draft_context_is_an_option_and_what_it_sees_is_said() -> None:
    result = ask("-cd", "64", "-c", "512", "-n", "200", "--ignore-eos", "--json")
    plain = ask("-n", "200", "-c", "512", "--ignore-eos", "--drafter", "none", "--json")
    assert result.code == 0
    [note] = result.err.splitlines()
    assert "context of 64 tokens" in note and "the last 32 to 64" in note
    found = json.loads(result.text)
    assert found["text"] == json.loads(plain.text)["text"]
    assert found["stats"]["draft_n"] > 100


def test_a_draft_that_was_trained_for_less_sees_the_end_and_goes_on_proposing() -> None:
    with load(model=tiny(context=512), draft=tiny(context=64, noise=0.02), threads=1,
              draft_tokens=3) as pair:  # fmt: skip
        assert any("trained for 64 tokens" in notice for notice in pair.notices)
        stats = [c.stats for c in pair.generate("hello", GREEDY, max_tokens=300, seed=1,
                                                ignore_eos=True)][-1]  # fmt: skip
    assert stats is not None and stats.draft_n > 200


def test_a_draft_context_beyond_its_training_is_worth_a_note() -> None:
    with load(model=tiny(context=512), draft=tiny(context=64, noise=0.02), threads=1,
              ctx_size_draft=200, draft_tokens=3) as pair:  # fmt: skip
        assert pair.draft is not None and pair.draft.n_ctx == 200
        [note, _] = pair.notices
    assert "was trained for 64 tokens" in note and "a context of 200" in note


def test_a_draft_context_larger_than_the_targets_is_not_made() -> None:
    with load(model=TARGET, draft=DRAFT, threads=1, draft_tokens=3, ctx_size=128,
              ctx_size_draft=4096) as pair:  # fmt: skip
        assert pair.draft is not None and pair.draft.n_ctx == 128
        assert not any("draft" in notice for notice in pair.notices)
