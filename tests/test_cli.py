"""The commands as a person uses them: streams, options, encodings, signals, exit codes."""

from __future__ import annotations

import array
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from command import Result, environment, specllama, without_build_note
from tiny import tiny

import specllama as package
from specllama import llama
from specllama.cli import _run, command

TARGET, DRAFT = str(tiny("attention")), str(tiny("attention", noise=0.05))
# A fixed length and rule, so that a seed fixes every count and not the text alone.
FIXED = ["-t", "1", "--draft-tokens", "3", "--verifier", "block"]
PAIR = ["-m", TARGET, "-md", DRAFT, *FIXED]
PLAIN = ["-t", "1", "--drafter", "none", "--verifier", "block"]
HELLO = ["generate", *PAIR, "-s", "1", "-n", "24", "hello"]
LONG = ["generate", *PAIR, "-c", "20000", "--ignore-eos", "hello"]

Runner = Callable[..., Result]


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Runner:
    """Runs a command line in this process, for what cannot end it."""

    def run_here(*arguments: str) -> Result:
        capfdbinary.readouterr()
        code = _run(arguments)
        out, err = capfdbinary.readouterr()
        return Result(code, out, without_build_note(err))

    return run_here


@pytest.fixture
def answer(run: Runner) -> Callable[..., dict[str, Any]]:
    """The object that `generate --json` prints, for the prompt "hello" unless another is given."""

    def ask(*options: str, prompt: str = "hello", models: Sequence[str] = PAIR) -> dict[str, Any]:
        result = run("generate", *models, "-s", "1", "--json", *options, prompt)
        assert result.code == 0, result.err
        assert result.out.endswith(b"}\n") and result.out.count(b"\n") == 1
        found: dict[str, Any] = json.loads(result.out)
        return found

    return ask


Answer = Callable[..., dict[str, Any]]


def one_line(result: Result) -> str:
    """The only line of standard error."""
    [line] = result.err.splitlines()
    return line


# --- what generate prints -----------------------------------------------------------------------


def test_standard_output_holds_the_text_and_nothing_else() -> None:
    plain = specllama(*HELLO)
    assert (plain.code, plain.err) == (0, "")
    described = specllama(*HELLO, "--json")
    assert (described.code, described.err) == (0, "")
    text = json.loads(described.out)["text"]
    assert len(text) > 10 and plain.text == f"{text}\n"


STATS = {
    *("seed", "verifier", "drafter", "prompt_n", "prompt_cached_n", "prompt_ms", "predicted_n"),
    *("predicted_ms", "rounds", "draft_n", "draft_n_accepted", "corrected_n", "bonus_n"),
    *("discarded", "draft_failures", "by_position"),
    *("acceptance", "tokens_per_round", "tokens_per_second"),
}


@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("draft_tokens", ["1", "3", "16"])
@pytest.mark.parametrize("n", ["0", "1", "50"])
def test_the_object_has_its_fields_and_its_counts_add_up(
    answer: Answer, n: str, draft_tokens: str, verifier: str
) -> None:
    said = answer("-n", n, "--draft-tokens", draft_tokens, "--verifier", verifier)
    assert set(said) == {"text", "tokens", "finish_reason", "finish_detail", "seed", "stats"}
    assert all(set(token) == {"id", "text", "provenance"} for token in said["tokens"])
    assert said["text"] == "".join(token["text"] for token in said["tokens"])
    stats = said["stats"]
    assert set(stats) >= STATS
    assert (said["seed"], stats["seed"], stats["verifier"]) == (1, 1, verifier)
    assert stats["predicted_n"] == len(said["tokens"]) == int(n)
    assert int(n) == stats["draft_n_accepted"] + stats["rounds"] - stats["discarded"]
    assert stats["draft_n_accepted"] <= stats["draft_n"]
    assert stats["corrected_n"] + stats["bonus_n"] == stats["rounds"]
    if n == "50":
        assert stats["acceptance"] == stats["draft_n_accepted"] / stats["draft_n"] > 0.2
        kinds = [token["provenance"] for token in said["tokens"]]
        assert kinds.count("accepted") == stats["draft_n_accepted"]
        assert kinds.count("corrected") == stats["corrected_n"] > 0
        assert len(stats["by_position"]) == int(draft_tokens)
    assert (said["finish_reason"], said["finish_detail"]) == ("length", "token limit")


def test_a_seed_fixes_the_text_and_a_drawn_seed_is_told(run: Runner, answer: Answer) -> None:
    texts = {answer("-n", "20", "--seed", str(seed))["text"] for seed in (1, 1, 2, 3)}
    assert len(texts) == 3
    drawn = [json.loads(run("generate", *PAIR, "--json", "-n", "20", "hello").out) for _ in "ab"]
    assert drawn[0]["seed"] != drawn[1]["seed"]
    for said in drawn:
        assert answer("-n", "20", "--seed", str(said["seed"]))["text"] == said["text"]


def test_temperature_zero_says_what_plain_decoding_says(answer: Answer) -> None:
    said = [
        answer("-n", "60", "--temp", "0", *options, prompt="the word")
        for options in (["--drafter", "none"], [], ["--draft-tokens", "7"])
    ]
    assert len({s["text"] for s in said}) == 1
    assert said[2]["stats"]["draft_n_accepted"] > 10


@pytest.mark.parametrize("option", [["--drafter", "none"], ["--draft-tokens", "0"]])
def test_without_a_drafter_every_round_is_one_token(answer: Answer, option: list[str]) -> None:
    stats = answer("-n", "20", *option)["stats"]
    assert (stats["draft_n"], stats["acceptance"], stats["drafter"]) == (0, None, "none")
    assert stats["rounds"] == stats["predicted_n"] == 20


def test_the_statistics_go_to_standard_error(run: Runner) -> None:
    plain = run(*HELLO)
    told = run(*HELLO, "--stats")
    assert plain.err == "" and told.out == plain.out
    first, second = told.err.splitlines()
    assert first.startswith("24 tokens in ") and "seed" not in first
    named = run(*HELLO, "--stats", "--verifier", "coupled")
    assert named.err.splitlines()[0].endswith("; seed 1")  # with this rule it gives the text again
    assert "drafted tokens accepted" in second
    alone = run(*HELLO, "--stats", "--drafter", "none")
    for words in ("nothing was drafted", "24 rounds", "drafter none"):
        assert words in alone.err


# --- when an answer ends ------------------------------------------------------------------------


@pytest.mark.parametrize("n", ["-1", "none", "None", "100000000000000000000"])
def test_without_a_limit_an_answer_ends_with_the_context(answer: Answer, n: str) -> None:
    said = answer("-n", n, "-c", "64", "--ignore-eos")
    assert (said["finish_reason"], said["finish_detail"]) == ("length", "context full")
    assert said["stats"]["prompt_n"] + said["stats"]["predicted_n"] == 64


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(run: Runner, answer: Answer) -> None:
    whole = answer("-n", "40")
    stop = whole["text"][10:14]
    said = answer("-n", "40", "--stop", stop, "--stop", "never said")
    assert said["text"] == whole["text"][: whole["text"].index(stop)]
    assert (said["finish_reason"], said["finish_detail"]) == ("stop", "stop string")
    stats = said["stats"]
    assert stats["predicted_n"] == len(said["tokens"]) < 40
    assert (
        stats["predicted_n"] == stats["draft_n_accepted"] + stats["rounds"] - stats["discarded"]
    )
    printed = run("generate", *PAIR, "-s", "1", "-n", "40", "--stop", stop, "hello")
    assert printed.text == said["text"] + "\n"


def test_an_end_token_ends_the_answer_unless_it_is_ignored(answer: Answer) -> None:
    ids = [token["id"] for token in answer("-n", "40")["tokens"]]
    end = next(t for t in ids[10:] if t not in ids[:10])
    models = [str(tiny("attention", eos=end)), str(tiny("attention", noise=0.05, eos=end))]
    pair = ["-m", models[0], "-md", models[1], *FIXED]
    ended = answer("-n", "40", models=pair)
    assert (ended["finish_reason"], ended["finish_detail"]) == ("stop", "end token")
    assert [token["id"] for token in ended["tokens"]] == ids[: ids.index(end)]
    ignored = answer("-n", "300", "--ignore-eos", models=pair)
    assert ignored["finish_detail"] == "token limit"
    assert len(ignored["tokens"]) == 300
    assert not {token["id"] for token in ignored["tokens"]} & {end, 2, 396}


# --- the prompt ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "dash"),
    [
        (b"hello", []),
        (b"hello\n", ["-"]),
        (b"hello\r\n", []),
        (b"\xef\xbb\xbfhello", ["-"]),
    ],
)
def test_standard_input_is_a_prompt_like_any_other(data: bytes, dash: list[str]) -> None:
    piped = specllama(*HELLO[:-1], *dash, stdin=data)
    assert (piped.code, piped.err) == (0, "")
    assert piped.out == specllama(*HELLO).out


@pytest.mark.parametrize(
    ("data", "position"), [(b"ab\xffcd", 2), ("h\u00e9".encode("latin-1"), 1), (b"\xff\xfeh\0", 0)]
)
def test_bytes_that_are_no_utf8_are_refused_with_their_place(data: bytes, position: int) -> None:
    piped = specllama(*HELLO[:-1], stdin=data)
    assert (piped.code, piped.out) == (2, b"")
    assert one_line(piped).startswith(f"Error: standard input is not UTF-8 at byte {position};")
    given = specllama(*HELLO[:-1], os.fsdecode(data.replace(b"\0", b"")))
    assert (given.code, given.out) == (2, b"")
    assert one_line(given).startswith(f"Error: the prompt is not UTF-8 at byte {position};")


def test_nothing_behind_a_nul_is_lost() -> None:
    counts = []
    for data in (b"a", b"a\0", b"a\0bcd"):
        said = json.loads(specllama(*HELLO[:-1], "--json", stdin=data).out)
        counts.append(said["stats"]["prompt_n"])
    assert counts[1] == counts[0] + 1 and counts[2] >= counts[1] + 2


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(answer: Answer) -> None:
    for options in ([], ["--drafter", "none"]):
        said = answer("-n", "5", *options, prompt="")
        assert said["stats"]["prompt_n"] == 1 and len(said["tokens"]) == 5
    bare = str(tiny("attention", vocab="bpe", bos_token=False))
    assert answer("-n", "5", prompt=" ", models=["-m", bare, *PLAIN])["stats"]["prompt_n"] == 1


def test_an_empty_prompt_is_refused_by_a_model_that_cannot_begin_a_text(run: Runner) -> None:
    bare = str(tiny("attention", vocab="bpe", bos_token=False))
    result = run("generate", "-m", bare, *PLAIN, "-n", "5", "")
    assert (result.code, result.out) == (2, b"")
    assert "the prompt is empty" in one_line(result)


def text_of(n_tokens: int) -> str:
    """A text that the tiny models read as this many tokens, their BOS included."""
    with llama.Model(tiny("attention")) as model:
        surplus = len(model.tokenizer.encode("中", special=True, add_special=True)) - 1
        text = "中" * (n_tokens - surplus)
        assert len(model.tokenizer.encode(text, special=True, add_special=True)) == n_tokens
    return text


def test_a_prompt_that_leaves_room_for_one_token_gets_one(answer: Answer) -> None:
    said = answer("-c", "64", prompt=text_of(63))
    assert (said["stats"]["prompt_n"], len(said["tokens"])) == (63, 1)
    assert said["finish_detail"] == "context full"


@pytest.mark.parametrize("n_tokens", [64, 65, 640])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    run: Runner, n_tokens: int
) -> None:
    result = run("generate", *PAIR, "-c", "64", text_of(n_tokens))
    assert (result.code, result.out) == (2, b"")
    assert f"the prompt has {n_tokens} tokens and the context holds 64" in one_line(result)


def test_a_prompt_longer_than_the_batch_is_answered(answer: Answer) -> None:
    long = text_of(3 * 32 + 1)
    split, whole = (answer("-n", "9", "-b", b, "--temp", "0", prompt=long) for b in ("32", "512"))
    assert split["stats"]["prompt_n"] == 97
    assert len(split["tokens"]) == len(whole["tokens"]) == 9


# --- encodings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "letter", "printed"),
    [
        # Who asks for ASCII more likely has no locale than no fonts, so it is sent as it is.
        ({"PYTHONIOENCODING": "ascii"}, "é", "ééé\n".encode()),
        ({"PYTHONIOENCODING": "cp1252"}, "é", b"\xe9\xe9\xe9\n"),
        ({"PYTHONIOENCODING": "cp1252"}, "中", b"???\n"),
        ({"LC_ALL": "C", "LANG": "C"}, "中", "中中中\n".encode()),
        ({"PYTHONIOENCODING": "utf-8"}, "中", "中中中\n".encode()),
    ],
)
def test_no_console_encoding_ends_the_run(
    env: dict[str, str], letter: str, printed: bytes
) -> None:
    with llama.Model(tiny("attention")) as model:
        token = model.tokenizer.token_texts().index(letter.encode())
    arguments = ["generate", *PAIR, "-n", "3", "--logit-bias", f"{token}+100", "hello"]
    result = specllama(*arguments, env=env)
    assert (result.code, result.err, result.out) == (0, "", printed)
    described = specllama(*arguments, "--json", env=env)
    assert (described.code, described.err) == (0, "")
    assert json.loads(described.out.decode("utf-8"))["text"] == 3 * letter


# --- streams and signals ------------------------------------------------------------------------


def started(*arguments: str) -> subprocess.Popen[bytes]:
    """A running command that has printed its first byte."""
    child = subprocess.Popen(
        [sys.executable, "-m", "specllama.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert child.stdout is not None
    assert child.stdout.read(1)
    return child


def ended(child: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and standard error, without the notes that a long context brings."""
    assert child.stderr is not None
    err = without_build_note(child.stderr.read())
    code = child.wait(timeout=30)
    lines = [line for line in err.splitlines() if not line.startswith("Note: ")]
    return code, "\n".join(lines)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("name", [(), ("generate",), ("chat",), ("batch",), ("models", "pull")])
def test_help_on_any_console(name: tuple[str, ...], encoding: str) -> None:
    result = specllama(*name, "--help", env={"PYTHONIOENCODING": encoding})
    assert (result.code, result.err) == (0, "")
    assert result.out.decode(encoding).startswith("Usage: ")


def test_a_mark_alone_is_an_empty_prompt() -> None:
    alone, empty = (specllama(*HELLO[:-1], "-", stdin=data) for data in (b"\xef\xbb\xbf", b""))
    assert (alone.code, alone.out) == (0, empty.out)


def test_a_reader_that_goes_away_ends_the_run_quietly() -> None:
    with started(*LONG) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert ended(child) == (141, "")


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_a_signal_ends_the_run_without_a_traceback(
    number: signal.Signals, code: int, said: str
) -> None:
    with started(*LONG) as child:
        child.send_signal(number)
        assert ended(child) == (code, said)


def test_a_signal_while_models_are_loaded_is_not_lost() -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
        # The log's first line tells that loading has begun; the signal falls into native code.
        child = subprocess.Popen(
            [sys.executable, "-m", "specllama.cli", *LONG, "-v"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        with child:
            assert child.stderr is not None
            assert b"specllama.llama: " in child.stderr.readline()
            child.send_signal(number)
            rest = child.stderr.read().decode()
            assert child.wait(timeout=30) == code, rest
        assert "Exception ignored" not in rest
        assert "Traceback" not in rest


def test_ctrl_c_in_a_callback_that_drops_exceptions_is_not_lost() -> None:
    code = """
import signal, time, weakref
from specllama import cli

class Gone: pass

def run(arguments):
    gone = Gone()
    kept = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))
    del gone
    time.sleep(20)

cli._run = run
cli.main()
"""
    begun = time.monotonic()
    result = specllama(python=("-c", code))
    assert (result.code, result.err) == (130, "")
    assert time.monotonic() - begun < 15


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_full_disk_behind_standard_output_is_an_error(option: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specllama.cli", *HELLO, *option],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            env=environment(),
        )
    line = without_build_note(done.stderr)
    assert (done.returncode, line.count("\n")) == (1, 1)
    assert line.startswith("Error: No space left on device; ")


def test_an_interrupt_while_modules_are_loaded_shows_no_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "specllama", *HELLO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    with child:
        assert child.stderr is not None and child.stdout is not None
        while b"numpy" not in child.stderr.readline():
            pass
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read().decode()
        assert child.wait(timeout=30) == 130
        assert child.stdout.read() == b""
    assert rest.endswith("interrupted\n")
    assert "Traceback" not in rest and "numpy.random" not in rest


def test_an_interrupt_that_is_ignored_by_the_shell_stays_so() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import specllama.__main__"
    with_check = (
        f"{code} as m; from specllama import cli; "
        "cli._run = lambda _: int(signal.getsignal(signal.SIGINT) != signal.SIG_IGN); m.main()"
    )
    assert specllama(python=("-c", with_check)).code == 0


def test_a_running_decode_can_be_interrupted_from_the_command_line() -> None:
    code = (
        "from specllama import cli, interrupts; "
        "cli._run = lambda _: 5 if interrupts._watch is None else 7; cli.main()"
    )
    assert specllama(python=("-c", code)).code == 7


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("arguments", "code"), [([*HELLO, "-c", "1000", "--stats"], 0), (["check", "missing.gguf"], 3)]
)
def test_notes_that_cannot_be_written_cost_nothing(arguments: list[str], code: int) -> None:
    expected = specllama(*arguments)
    assert expected.err != "" and expected.code == code
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specllama.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=full,
            timeout=60,
            env=environment(),
        )
    assert (done.returncode, done.stdout) == (code, expected.out)


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe can be set on Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_standard_output_that_does_not_wait_loses_nothing(unbuffered: str) -> None:
    arguments = [*HELLO, "-n", "300", "--ignore-eos", "--json"]
    expected = specllama(*arguments)
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write_end, False)
    child = subprocess.Popen(
        [sys.executable, "-m", "specllama.cli", *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=environment({"PYTHONUNBUFFERED": unbuffered}),
    )
    os.close(write_end)
    with child, open(read_end, "rb") as reader:
        # It has to meet the full pipe before it is read.
        while child.poll() is None and waiting_bytes(read_end) < 4096:
            time.sleep(0.01)
        out = reader.read()
        code, err = ended(child)
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == json.loads(expected.out)["tokens"]


def waiting_bytes(pipe: int) -> int:
    buffer = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, buffer)
    return buffer[0]


def test_closed_streams_are_survived() -> None:
    shell = 'exec "$0" -m specllama.cli "$@" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable, *HELLO], env=environment())
    assert done.returncode == 0


def test_a_terminal_without_a_prompt_is_asked_for_one() -> None:
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "specllama.cli", *HELLO[:-1]],
            stdin=slave,
            capture_output=True,
            timeout=60,
            env=environment(),
        )
    finally:
        os.close(master)
        os.close(slave)
    assert (done.returncode, done.stdout) == (2, b"")
    assert "there is no prompt" in without_build_note(done.stderr)


def test_the_log_is_shown_only_on_request() -> None:
    quiet, loud = specllama(*HELLO), specllama(*HELLO, "-v")
    assert quiet.err == "" and loud.out == quiet.out
    assert "specllama.llama: llama_model_loader: " in loud.err
    failed = specllama("generate", "-m", "absent.gguf", "-v", "hi")
    assert failed.code == 3 and "Traceback" in failed.err
    assert failed.err.splitlines()[-1].startswith("Error: there is no file absent.gguf")


def test_a_typed_beginning_of_text_is_not_doubled(answer: Answer, run: Runner) -> None:
    with llama.Model(Path(TARGET)) as model:
        assert model.tokenizer.bos is not None
        bos = model.tokenizer.token_texts()[model.tokenizer.bos].decode()
    counts = [answer(prompt=f"{bos * n}hello", models=PAIR)["stats"]["prompt_n"] for n in (0, 1, 2)]
    assert counts == [counts[0], counts[0], counts[0] + 1]


def test_a_typed_beginning_of_text_is_told(run: Runner) -> None:
    plain = run(*HELLO)
    typed = run(*HELLO[:-1], "<s>hello")
    assert plain.text == typed.text
    assert plain.err == ""
    assert one_line(typed).startswith("Note: the prompt begins with the model's own")


# --- pairs --------------------------------------------------------------------------------------


def test_check_shows_every_rule_of_a_good_pair(run: Runner) -> None:
    result = run("check", TARGET, DRAFT)
    assert (result.code, result.err) == (0, "")
    lines = result.text.splitlines()
    assert lines[-1] == "This pair can be used."
    assert len(lines) > 10 and all(line.startswith("ok   ") for line in lines[:-1])
    for words in ("target file", "draft file", "token texts", "target cache", "draft memory"):
        assert any(words in line for line in lines)
    assert run("check", "-m", TARGET, "-md", DRAFT).out == result.out


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("attention", "rejected tokens can be taken back"),
        ("hybrid", "rejected tokens are taken back with snapshots of its state"),
        ("recurrent", "rejected tokens are taken back from a checkpoint of its state"),
    ],
)
def test_check_tells_how_tokens_are_taken_back(run: Runner, kind: str, way: str) -> None:
    assert way in run("check", str(tiny(kind))).text


def test_check_of_one_model_alone(run: Runner) -> None:
    result = run("check", TARGET)
    assert (result.code, result.err) == (0, "")
    assert result.text.endswith("This model can be used.\n") and "draft" not in result.text


def test_swapped_tokens_are_noted_with_id_and_texts_and_paired(
    run: Runner, answer: Answer
) -> None:
    swapped = tiny("attention", swap=(300, 301))
    with llama.Model(swapped) as model:
        here, there = (t.decode() for t in model.tokenizer.token_texts()[300:302])
    result = run("check", TARGET, str(swapped))
    assert (result.code, result.err) == (0, "")
    [line] = [line for line in result.text.splitlines() if "token texts" in line]
    assert line.startswith("note ") and f"300 {there!r} / {here!r}" in line
    told = one_line(run(*HELLO, "-n", "4", "-md", str(swapped)))
    assert swapped.name in told and "other tokens than the target" in told
    options = ["-n", "60", "--temp", "0"]
    plain = answer(*options, models=["-m", TARGET, "--drafter", "none"])
    guessed = answer(*options, models=["-m", TARGET, "-md", str(swapped), *FIXED])
    assert guessed["text"] == plain["text"]
    assert guessed["stats"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("pad", [64, 128, 1024])
def test_padding_of_either_vocabulary_is_accepted(run: Runner, answer: Answer, pad: int) -> None:
    padded = str(tiny("attention", pad=pad, pad_bias=0.0))
    for target, draft in ((TARGET, padded), (padded, DRAFT)):
        assert run("check", target, draft).code == 0
        models = ["-m", target, "-md", draft, *FIXED]
        said = answer("-n", "200", "--temp", "2", "--top-k", "0", "--min-p", "0", models=models)
        ids = [token["id"] for token in said["tokens"]]
        assert len(ids) == 200 and max(ids) < 397
        assert said["stats"]["draft_n_accepted"] > 0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "swa"])
def test_other_kinds_of_caches_are_paired_and_say_what_plain_decoding_says(
    run: Runner, answer: Answer, kind: str
) -> None:
    state, draft = str(tiny(kind)), str(tiny(kind, noise=0.1))
    checked = run("check", state, draft)
    assert (checked.code, checked.err) == (0, "")
    caches = [line for line in checked.text.splitlines() if "rejected tokens" in line]
    assert len(caches) == 2 and all(line.startswith("ok ") for line in caches)
    options = ["-n", "80", "--temp", "0", "-ctk", "f32", "-ctv", "f32", "--no-swa-full"]
    plain = answer(*options, models=["-m", state, "--drafter", "none"])
    guessed = answer(*options, models=["-m", state, "-md", draft, *FIXED])
    assert guessed["text"] == plain["text"]
    assert 0 < guessed["stats"]["draft_n_accepted"] < guessed["stats"]["draft_n"]


def test_a_broken_draft_costs_speed_and_nothing_else(answer: Answer) -> None:
    broken = ["-m", TARGET, "-md", str(tiny("attention", nan=-1)), *FIXED]
    said = answer("-n", "12", "--temp", "0", models=broken)
    assert said["text"] == answer("-n", "12", "--temp", "0", "--drafter", "none")["text"]
    stats = said["stats"]
    assert stats["draft_failures"] > 0 and stats["draft_n"] == 0


@pytest.mark.skipif(llama.supports_gpu(), reason="this build has a GPU")
def test_gpu_layers_without_a_gpu_are_worth_one_note(run: Runner) -> None:
    result = run(*HELLO, "-ngl", "99", "-ngld", "99")
    assert result.code == 0 and result.out == run(*HELLO).out
    assert one_line(result).startswith("Note: ") and "without GPU support" in one_line(result)


def test_a_context_beyond_the_training_is_worth_a_note(run: Runner) -> None:
    result = run(*HELLO, "-c", "1024")
    first, second = result.err.splitlines()
    assert "was trained for 512 tokens" in first and "1024" in first
    assert Path(DRAFT).name in second and "the last 256 to 512" in second
    assert run(*HELLO, "-c", "512").err == ""


# --- explain, help and the exit codes -----------------------------------------------------------


def test_explain_shows_the_balance_and_writes_its_files(run: Runner, tmp_path: Path) -> None:
    plain = run("explain")
    assert (plain.code, plain.err) == (0, "")
    for number in ("0.2800", "0.5000", "0.2200", "0.6000", "0.4000"):
        assert number in plain.text
    given = run("explain", "--p", "0.2,0.5,0.3", "--q", "0.6,0.3,0.1")
    assert given.out == plain.out
    html, picture = tmp_path / "page.html", tmp_path / "picture.png"
    both = run("explain", "--html", str(html), "--plot", str(picture))
    assert (both.code, both.err) == (0, "")
    assert "<html" in html.read_text("utf-8") and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["", *command.commands])
def test_every_command_explains_its_options(run: Runner, name: str) -> None:
    words = [name] if name else []
    result = run(*words, "-h")
    assert (result.code, result.err) == (0, "")
    assert result.out == run(*words, "--help").out
    params = (command.commands[name] if name else command).params
    for param in params:
        if isinstance(param, click.Option):
            assert all(option in result.text for option in param.opts)
            assert param.help, f"{name} {param.opts} has no help"


def test_no_command_shows_the_help_as_an_error() -> None:
    result = specllama()
    assert result.code == 2
    assert "Commands:" in result.err + result.text


def test_the_version_is_printed(run: Runner) -> None:
    result = run("--version")
    assert result.code == 0 and package.__version__ in result.text


# Kind of failure: its exit code, the command line, and words of the message.
FAILURES: dict[str, tuple[int, list[str], str]] = {
    "logits that are no numbers": (
        1,
        ["generate", "-m", str(tiny("attention", nan=-1)), *PLAIN, "hello"],
        "invalid logits at position",
    ),
    "an unknown command": (2, ["speculate"], "speculate"),
    "an unknown option": (2, ["check", "--fast"], "--fast"),
    "an option without its value": (2, ["generate", "hi", "--temp"], "--temp"),
    "an option of the wrong kind": (2, ["generate", "hi", "--top-k", "x"], "--top-k"),
    "an option out of range": (2, [*HELLO, "--top-p", "1.5"], "top_p"),
    "one argument too many": (2, ["check", "a", "b", "c"], "c"),
    "an unknown pair": (2, ["check", "--pair", "smoll"], "smoll"),
    "a page that cannot be written": (2, ["explain", "--html", "/absent/page.html"], "/absent"),
    "an absent registry": (2, ["check", "--models", "absent.toml"], "absent.toml"),
    "a law that sums to two": (2, ["explain", "--p", "1,1", "--q", "1,0"], "--p sums to 2"),
    "a token outside the vocabulary": (2, [*HELLO, "--logit-bias", "99999+1"], "99999"),
    "an absent target": (3, ["generate", "-m", "absent.gguf", "hi"], "absent.gguf"),
    "an absent draft": (3, ["check", TARGET, "absent.gguf"], "absent.gguf"),
    "a directory": (3, ["generate", "-m", str(Path(TARGET).parent), "hi"], "is a directory"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_kind_of_failure_has_its_exit_code(run: Runner, name: str) -> None:
    code, arguments, words = FAILURES[name]
    result = run(*arguments)
    assert result.code == code, result.err
    assert one_line(result).startswith("Error: ") and words in one_line(result)
    # Only the findings of `check` come before its verdict.
    assert result.out == b""


# --- the Python interface -----------------------------------------------------------------------


def test_ten_lines_of_python_generate() -> None:
    params = package.SamplingParams(temperature=0.5)
    with package.load(model=TARGET, draft=DRAFT, threads=1, draft_tokens=3) as pair:
        pieces = []
        for chunk in pair.generate("hello", params, max_tokens=20, seed=1):
            assert isinstance(chunk, package.Chunk)
            pieces.append(chunk.text)
        assert isinstance(pair, package.Pair)
        assert isinstance(chunk.stats, package.Stats) and chunk.stats.predicted_n == 20
    assert len("".join(pieces)) > 10
    pair.close()
    with pytest.raises(package.SpecllamaError, match="is closed"):
        pair.generate("hello")
    name = "unload"
    with pytest.raises(AttributeError, match="no attribute"):
        getattr(package, name)


def test_an_answer_under_way_ends_with_an_error_when_the_pair_is_closed() -> None:
    pair = package.load(model=TARGET, draft=DRAFT, threads=1, draft_tokens=3)
    chunks = pair.generate("hello", max_tokens=50, seed=1)
    next(chunks)
    pair.close()
    with pytest.raises(package.SpecllamaError, match="is closed"):
        list(chunks)


# --- what the model says goes out as it is ------------------------------------------------------


def test_escape_sequences_in_an_answer_arrive_whole_in_a_pipe() -> None:
    """Whatever the chunks: a stop that never comes holds text back and cuts them differently."""
    prompt = 'echo -e "\033[31mred\033[0m"; ' * 3 + "echo -e"
    options = ("--temp", "0", "-n", "24", "--draft-tokens", "0")
    said = specllama("generate", prompt, *options)
    held = specllama("generate", prompt, *options, "--stop", "\033[31mZ")
    whole = json.loads(specllama("generate", prompt, *options, "--json").text)["text"]
    assert said.code == held.code == 0, (said.err, held.err)
    assert "\033[" in whole
    assert said.text == held.text == whole + "\n"


# --- options that are refused or noted ----------------------------------------------------------


def test_more_threads_than_processors_bring_one_note(run: Runner) -> None:
    arguments = ["generate", "-m", TARGET, "--drafter", "none", "-n", "1", "-s", "1", "hello"]
    noted = run(*arguments, "-t", "300", "-tb", "400")
    assert noted.code == 0 and one_line(noted).startswith("Note: 400 threads share the ")
    assert run(*arguments, "-t", "1").err == ""


def test_a_stop_string_that_is_no_text_is_refused_by_its_option() -> None:
    result = specllama(*HELLO, "--stop", os.fsdecode(b"a\xff"))
    assert result.code == 2
    assert "--stop" in one_line(result) and "not UTF-8 at character 1" in one_line(result)
