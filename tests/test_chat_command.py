"""`specllama chat` in pipes and scripts: a line is a message, and only answers are printed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import Result, environment, specllama, without_build_note
from tiny import tiny

from specllama.llama import Model

SWITCH = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
)
ESCAPE = 3 + 0x1B  # the tiny models' token for this byte


def chat(*options: str | Path, stdin: bytes | None = None) -> Result:
    models = ("-m", tiny("attention"), "-md", tiny("attention", noise=0.1), "--draft-tokens", "3")
    return specllama("chat", *models, "--temp", "0", "-n", "6", *options, stdin=stdin)


def answered(*messages: str) -> list[str]:
    """The answers to messages in turn, each found by a command of its own."""
    found = []
    for end in range(1, len(messages) + 1):
        lines = "\n".join(messages[:end]) + "\n"
        [*_, last] = chat("--json", stdin=lines.encode()).text.splitlines()
        found.append(json.loads(last)["text"])
    return found


@pytest.fixture(scope="module")
def two_answers() -> list[str]:
    return answered("hi", "and now?")


@pytest.mark.parametrize(
    "stdin",
    [
        b"hi\nand now?\n",
        b"hi\nand now?",
        b"hi\r\nand now?\r\n",
        b"\xef\xbb\xbfhi\n\n \nand now?\n",
    ],
)
def test_each_line_is_one_message_in_turn(stdin: bytes, two_answers: list[str]) -> None:
    result = chat(stdin=stdin)
    assert (result.code, result.err) == (0, "")
    assert result.text == "".join(f"{answer}\n" for answer in two_answers)


@pytest.mark.parametrize("stdin", [b"", b"\n", b"  \n\n", b"\xef\xbb\xbf"])
def test_nothing_to_answer_is_no_error(stdin: bytes) -> None:
    result = chat(stdin=stdin)
    assert (result.code, result.out, result.err) == (0, b"", "")


def test_a_prompt_is_answered_once(two_answers: list[str]) -> None:
    result = chat("--prompt", "hi", stdin=b"not read\n")
    assert (result.code, result.text, result.err) == (0, f"{two_answers[0]}\n", "")
    assert chat("--prompt", " ").code == 2


def test_an_object_a_turn(two_answers: list[str]) -> None:
    result = chat("--json", stdin=b"hi\n/draft off\nand now?\n")
    turns = [json.loads(line) for line in result.text.splitlines()]
    assert [turn["text"] for turn in turns] == two_answers
    assert turns[0]["stats"]["draft_n"] > 0
    assert turns[1]["stats"]["draft_n"] == 0
    assert {token["provenance"] for token in turns[1]["tokens"]} == {"bonus"}
    assert turns[0]["finish_detail"] == "token limit"


def test_commands_work_in_a_pipe_and_tell_on_standard_error(two_answers: list[str]) -> None:
    result = chat(stdin=b"hi\n/undo\n/context\n//undo\n/quit\nnever said\n")
    assert result.code == 0
    assert result.err.startswith("taken back: hi\ncontext: 0 of")
    assert len(result.text.splitlines()) >= 2
    assert result.text.startswith(f"{two_answers[0]}\n")


def test_a_line_that_fails_is_told_and_the_others_are_answered(two_answers: list[str]) -> None:
    result = chat("--no-stats", stdin=b"/tpyo\nhi\ncaf\xe9\n/set temp x\nand now?\n")
    assert result.code == 2
    assert result.text == "".join(f"{answer}\n" for answer in two_answers)
    errors = result.err.splitlines()
    assert [error.split(":")[1].strip() for error in errors] == ["line 1", "line 3", "line 4"]
    assert "not UTF-8 at byte 3" in errors[1]


def test_a_message_that_is_longer_than_the_context_is_told_with_both_numbers() -> None:
    result = chat("-c", "256", stdin=b"the " * 2000 + b"\nhi\n")
    assert result.code == 2
    assert "256" in result.err and "line 1" in result.err
    assert len(result.text.strip()) > 0


def test_when_the_context_is_full_turns_are_dropped_with_a_notice_or_refused() -> None:
    lines = b"".join(b"the sea and that %d\n" % i for i in range(10))
    dropping = chat("-c", "256", stdin=lines)
    assert dropping.code == 0
    assert dropping.err.count("Note: ") >= 1
    assert len(chat("-c", "256", "--json", stdin=lines).text.splitlines()) == 10
    stopping = chat("-c", "256", "--context-full", "stop", "--json", stdin=lines)
    assert stopping.code == 2
    assert 0 < len(stopping.text.splitlines()) < 10


def test_the_system_prompt_is_given_in_words_or_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    path.write_text("Be kind.")
    plain = json.loads(chat("--json", "-p", "hi").text)
    words = json.loads(chat("--json", "-p", "hi", "--system", "Be kind.").text)
    file = json.loads(chat("--json", "-p", "hi", "--system-file", path).text)
    assert words["stats"]["prompt_n"] == file["stats"]["prompt_n"] > plain["stats"]["prompt_n"]
    assert words["text"] == file["text"]
    assert chat("-p", "hi", "--system", "a", "--system-file", path).code == 2


def test_a_session_is_gone_on_with(tmp_path: Path, two_answers: list[str]) -> None:
    path = tmp_path / "talk.json"
    for kv in ((), ("--kv",)):
        path.unlink(missing_ok=True)
        first = chat("--session", path, *kv, stdin=b"hi\n")
        second = chat("--session", path, *kv, stdin=b"and now?\n")
        assert [first.text, second.text] == [f"{answer}\n" for answer in two_answers]
        assert (first.err, second.err) == ("", "")
        assert len(json.loads(path.read_text("utf-8"))["messages"]) == 4


def test_a_session_that_cannot_be_read_is_left_alone(
    tmp_path: Path, two_answers: list[str]
) -> None:
    path = tmp_path / "talk.json"
    path.write_text('{"half')
    result = chat("--session", path, stdin=b"hi\n")
    assert result.text == f"{two_answers[0]}\n"
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "the chat goes on without it" in result.err
    assert path.read_text() == '{"half'


def test_thinking_is_hidden_if_so_wanted(tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(SWITCH)
    shown = chat("--chat-template", template, "-p", "hi")
    hidden = chat("--chat-template", template, "-p", "hi", "--hide-thinking")
    assert shown.text.startswith("<think>\n")
    assert (hidden.code, hidden.text) == (0, "\n")
    off = chat("--chat-template", template, "--hide-thinking", stdin=b"/think off\nhi\n")
    assert len(off.text) > 1


def test_without_a_template_there_is_no_silent_one(tmp_path: Path) -> None:
    plain = tiny("attention", chat_template=None)
    result = specllama("chat", "-m", plain, "-p", "hi")
    assert result.code == 3
    assert "--chat-template FILE" in result.err and "--raw" in result.err
    raw = specllama("chat", "-m", plain, "--raw", "--temp", "0", "-n", "4", "--json", "-p", "hi")
    assert raw.code == 0
    assert json.loads(raw.text)["stats"]["predicted_n"] == 4
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    result = specllama("chat", "-m", plain, "--chat-template", broken, "-p", "hi")
    assert result.code == 3
    assert "line 1" in result.err
    assert chat("--raw", "--chat-template", broken, "-p", "hi").code == 2


def test_a_pipe_gets_the_bytes_of_the_model_as_they_are() -> None:
    result = chat("-n", "3", "--logit-bias", f"{ESCAPE}+1000", stdin=b"hi\n")
    assert result.out == b"\x1b\x1b\x1b\n"


def test_a_status_line_in_a_pipe_only_if_asked_for() -> None:
    result = chat("--stats", stdin=b"hi\n")
    assert result.err.startswith("[6 tokens, ")
    assert "\x1b" not in result.err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "specllama.cli", "chat", "-m", str(tiny("attention"))]
    line = f"{shlex.join(command)} -n 9 | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line],
        input=b"hi\n" * 20,
        capture_output=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert done.returncode in (0, 141)
    assert without_build_note(done.stderr) == ""


def test_what_the_command_line_says_goes_before_the_file_of_a_session(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    template = ("--session", path, "--system", "Be kind.", "--top-k", "7", "--seed", "3")
    assert chat(*template, "-p", "hi").code == 0
    result = chat(
        "--session", path, "--top-k", "9", "--context-full", "stop", "--draft-tokens", "2",
        stdin=b"/set top-k\n/set seed\n/system\n/draft\n",
    )  # fmt: skip
    assert result.err.splitlines()[:3] == ["top-k 9", "seed 3", "system prompt: Be kind."]
    assert "drafting: 2" in result.err
    kept = json.loads(path.read_text("utf-8"))
    assert (kept["context_full"], kept["draft"], kept["params"]["top_k"]) == ("stop", 2, 9)


def test_a_session_in_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    result = chat("--session", tmp_path / "absent" / "talk.json", "-p", "hi")
    assert (result.code, result.out) == (2, b"")
    assert result.err == (
        f"Error: there is no folder {tmp_path / 'absent'} for --session; make it first\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are no bytes there")
@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_an_argument_that_is_no_text_is_refused(option: str) -> None:
    result = chat(option, b"caf\xe9".decode("utf-8", "surrogateescape"), stdin=b"hi\n")
    assert (result.code, result.out) == (2, b"")
    assert "not UTF-8 at byte 3" in result.err


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_end|>", "</s>"])
def test_a_marker_ends_an_answer_as_a_stop_string_and_is_never_shown(stop: str) -> None:
    """Without the stop the marker would come over and over, and print nothing."""
    with Model(tiny("attention")) as model:
        [marker] = model.tokenizer.encode(stop, special=True, add_special=False)
        is_end = marker in model.tokenizer.end_tokens
    wanted = ("--json", "-p", "hi", "--logit-bias", f"{marker}+1000")
    stopped = json.loads(chat(*wanted, "--stop", stop).text)
    assert (stopped["text"], stopped["tokens"]) == ("", [])
    assert stopped["finish_detail"] == ("end token" if is_end else "stop string")
    if not is_end:
        going_on = json.loads(chat(*wanted).text)
        assert (going_on["text"], going_on["finish_detail"]) == ("", "token limit")


def test_more_drafts_than_snapshots_are_not_promised() -> None:
    models = ("-m", tiny("hybrid"), "-md", tiny("hybrid", noise=0.1), "-n", "6")
    result = specllama(
        "chat", *models, "--draft-tokens", "4", "--json", stdin=b"/draft 3\n/draft 9\nhi\n"
    )
    assert result.code == 0
    assert "drafting: 3\n" in result.err
    assert "drafting: 9; no more than 4 can be taken back" in result.err
    stats = json.loads(result.text)["stats"]
    assert 0 < stats["draft_n"] <= 4 * stats["rounds"]


def test_what_takes_long_is_told_first() -> None:
    result = chat(stdin=b"/draft auto\n/draft auto\n")
    assert result.code == 0
    assert result.err.count("measuring what drafting costs here") == 1
    assert result.err.index("measuring") < result.err.index("drafting: auto")


@pytest.mark.parametrize("kind", ["swa", "recurrent", "hybrid"])
def test_a_kept_state_of_every_cache_is_gone_on_with(tmp_path: Path, kind: str) -> None:
    """In another process, with drafts that are taken back, and asked for once more."""
    path = tmp_path / "talk.json"
    answers: dict[tuple[str, ...], str] = {}
    options = ("-m", tiny(kind), "-md", tiny(kind, noise=0.1), "--draft-tokens", "3",
               "--temp", "0", "-n", "30", "--session", path)  # fmt: skip
    for kv in ((), ("--kv",)):
        path.unlink(missing_ok=True)
        assert specllama("chat", *options, *kv, stdin=b"tell me of the sea and of more").code == 0
        result = specllama("chat", *options, *kv, stdin=b"go on\n/retry\n")
        assert (result.code, result.err) == (0, "")
        answers[kv] = result.text
    assert answers[()] == answers["--kv",]


def test_utf_16_is_refused_whole() -> None:
    result = chat(stdin="hi\nand now?\nmore\n".encode("utf-16"))
    assert (result.code, result.out) == (2, b"")
    assert result.err == "Error: standard input is UTF-16; convert it, with iconv for example\n"


@pytest.mark.parametrize(
    ("limit", "detail"),
    [("0", "token limit"), ("1", "token limit"), ("-1", "context full"), ("none", "context full"),
     ("100000000000000000000", "context full")],
)  # fmt: skip
def test_every_limit_means_what_it_means_elsewhere(limit: str, detail: str) -> None:
    [turn] = map(
        json.loads,
        chat("-n", limit, "-c", "96", "--ignore-eos", "--json", "-p", "hi").text.splitlines(),
    )
    assert (turn["finish_reason"], turn["finish_detail"]) == ("length", detail)
    if detail == "token limit":
        assert turn["stats"]["predicted_n"] == int(limit)


def test_a_model_whose_logits_are_nan_is_an_error() -> None:
    result = specllama("chat", "-m", tiny("attention", nan=-1), "-p", "hi")
    assert (result.code, result.out.strip()) == (1, b"")
    assert "invalid logits at position" in result.err and len(result.err.splitlines()) == 1


def test_a_broken_template_of_the_file_itself_is_named() -> None:
    broken = tiny("attention", chat_template="a\n{% for m in messages %}{{ m.content }\n")
    result = specllama("chat", "-m", broken, "-p", "hi")
    assert (result.code, result.out) == (3, b"")
    assert len(result.err.splitlines()) == 1
    assert "chat template" in result.err and "line 2" in result.err


@pytest.mark.parametrize(
    ("encoding", "printed"), [("ascii", "中中中\n".encode()), ("cp1252", b"???\n")]
)
def test_no_console_encoding_ends_a_chat(encoding: str, printed: bytes) -> None:
    with Model(tiny("attention")) as model:
        token = model.tokenizer.token_texts().index("中".encode())
    result = specllama(
        "chat", "-m", tiny("attention"), "-n", "3", "--logit-bias", f"{token}+100",
        stdin="é 水 🙂\n".encode(), env={"PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (result.code, result.err, result.out) == (0, "", printed)
