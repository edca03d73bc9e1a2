"""The chat as a person has it, through a pseudo-terminal. About half a minute."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
from screens import Terminal, terminal
from tiny import tiny

import specllama
from specllama.conversation import Conversation
from specllama.generation import Pair
from specllama.markers import ChatTokenizer
from specllama.prompts import ChatFormat, Message
from specllama.provenance import MEANING
from specllama.sampling import SamplingParams

if sys.platform == "win32":
    pytest.skip("there are no pseudo-terminals", allow_module_level=True)

# Never at its end by itself, and for more than a second.
LONG = ("-n", "-1", "-c", "8192", "--ignore-eos")
ESCAPE = 3 + 0x1B  # the tiny models' token for this byte

SIGNAL_AFTER_ENTER = """
import os, signal
from prompt_toolkit.input import vt100

leave = vt100.raw_mode.__exit__

def leave_and_interrupt(*args):
    leave(*args)
    vt100.raw_mode.__exit__ = leave
    os.kill(os.getpid(), signal.SIGINT)

vt100.raw_mode.__exit__ = leave_and_interrupt
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def chat(
    home: Path, *options: str, columns: int = 80, **env: str
) -> AbstractContextManager[Terminal]:
    models = ("-m", tiny("attention"), "-md", tiny("attention", noise=0.1), "--draft-tokens", "3")
    state = {"XDG_STATE_HOME": str(home / "state"), **env}
    return terminal(
        "chat", *models, "--temp", "0", "-n", "8", *options, columns=columns, env=state
    )


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specllama.load(
        model=tiny("attention"),
        draft=tiny("attention", noise=0.1),
        draft_tokens=3,
        ctx_size=8192,
    ) as loaded:
        yield loaded


def fresh_answer(pair: Pair, messages: list[Message], text: str) -> str:
    """What is answered to a text at temperature 0 after these messages, in a new conversation."""
    chat_format = ChatFormat.of(pair.chat_template, cast(ChatTokenizer, pair.tokenizer), "tiny")
    params = SamplingParams(temperature=0)
    conversation = Conversation(pair, chat_format, params=params, max_tokens=8)
    conversation.resume(messages, ())
    pair.target.forget(0)
    return "".join(chunk.text for chunk in conversation.ask(text))


def saved(terminal: Terminal, path: Path) -> list[Message]:
    """The messages of the conversation as the command saves them."""
    terminal.say(f"/save {path}")
    kept: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["messages"]
    return [Message(m["role"], m["content"], tuple(m.get("tokens") or ())) for m in kept]


def test_a_transcript_of_every_command(home: Path) -> None:
    note = home / "note.txt"
    note.write_text("read me")
    editor = script(home, "printf ' twice' >> \"$1\"")
    with chat(home, columns=200, NO_COLOR="1", VISUAL=editor) as t:
        t.wait_for_prompt()
        assert t.lines[0].startswith(f"specllama {specllama.__version__}: ")
        assert "/help lists the commands" in t.text.replace("\n", " ")
        assert t.say("/help").startswith("/help")
        assert t.say("/system Be kind.") == "system prompt: Be kind."
        answer, status = t.say("hello").split("\n", 1)
        assert len(answer) > 2
        assert status.startswith("[8 tokens, ")
        assert t.say("/show").split("\n")[0].strip("[]{}<>")[:1] == answer[0]
        assert t.say("/stats").startswith("8 tokens in ")
        assert t.say("/context").startswith("context: ")
        assert t.say("/set temp 0.5") == "temp 0.5"
        assert t.say("/set temp hot") == "Error: temp cannot be 'hot': it is no number"
        assert t.say("/set temp 0") == "temp 0"
        assert t.say("/draft off").startswith("drafting: off")
        assert "nothing drafted" in t.say("/retry")
        assert t.say("/draft only").startswith("drafting: only")
        assert t.say("/draft 2").startswith("drafting: 2")
        edited = t.say("/edit")
        assert edited.startswith("asked instead: hello twice\n") and "[8 tokens, " in edited
        assert t.say("/undo") == "taken back: hello twice"
        assert t.say(f"/read {note}").endswith("7 characters, sent with your next message")
        t.say("what is it?")
        assert saved(t, home / "talk.json")[0].content == "read me\n\nwhat is it?"
        assert t.say("/clear") == "the conversation begins anew"
        assert t.say(f"/load {home / 'talk.json'}").startswith("loaded 2 messages from")
        assert "no switch for thinking" in t.say("/think on").replace("\n", " ")
        assert t.say("/hlep").startswith("Error: there is no command /hlep; did you mean /help?")
        assert "[8 tokens, " in t.say("//slash")
        assert saved(t, home / "talk.json")[2].content == "/slash"
        t.keys("/quit\r")
        assert t.end() == 0
        assert b"\x1b[31m" not in t.raw and b"\x1b[2m" not in t.raw


def script(home: Path, body: str) -> str:
    """An editor that runs these lines of shell."""
    path = home / "editor"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("printf 'caf\\351' > \"$1\"", "Error: what the editor saved is not UTF-8 at byte 3"),
        ("printf '\\377\\376a\\000' > \"$1\"", "Error: what the editor saved is not UTF-8"),
        ("rm \"$1\"", "Error: the editor's file is gone"),
        ("exit 3", "Error: "),
        ("exit 0", "nothing was changed"),
    ],
)
def test_an_editor_that_saves_nothing_of_use_changes_nothing(
    home: Path, body: str, told: str
) -> None:
    with chat(home, columns=200, NO_COLOR="1", VISUAL=script(home, body)) as t:
        t.wait_for_prompt()
        t.say("hello")
        before = saved(t, home / "talk.json")
        assert " ".join(t.say("/edit").split()).startswith(told)
        prompts = t.n_prompts
        t.keys("a draft\x18\x05")
        t.wait_for("> a draft")
        t.wait(lambda: t.lines[-1] == "> a draft")
        t.keys("\x03")
        t.wait_for_prompt(prompts + 1)
        assert saved(t, home / "talk.json") == before
        assert "Traceback" not in t.text and "ENTER" not in t.text


def test_the_editor_opens_on_what_is_being_typed(home: Path) -> None:
    with chat(home, NO_COLOR="1", VISUAL=script(home, "printf 'twice' >> \"$1\"")) as t:
        t.wait_for_prompt()
        t.keys("hello\x18\x05")
        t.wait_for("  twice")
        t.say("")
        assert saved(t, home / "talk.json")[0].content == "hello\ntwice"


def test_ctrl_c_in_the_editor_is_the_editors(home: Path) -> None:
    started = home / "started"
    body = f"trap '' INT\ntouch {started}\nsleep 1\nprintf 'more' >> \"$1\""
    with chat(home, NO_COLOR="1", VISUAL=script(home, body)) as t:
        t.wait_for_prompt()
        t.say("hello")
        prompts = t.n_prompts
        t.keys("/edit\r")
        while not started.exists():
            time.sleep(0.01)
        t.keys("\x03")
        t.wait_for_prompt(prompts + 1)
        assert saved(t, home / "talk.json")[0].content == "hello\nmore"


def test_an_answer_is_repainted_in_colours_with_a_legend(home: Path) -> None:
    with chat(home, "-n", "40") as t:
        t.wait_for_prompt()
        t.say("hello")
        at = len(t.raw)
        legend = t.say("/show").split("\n")[-len(MEANING):]
        assert [line.split()[0] for line in legend] == list(MEANING)
        for colour in (b"\x1b[32m", b"\x1b[1;31m", b"\x1b[36m"):
            assert t.raw.count(colour, at) >= 1


def test_ctrl_c_stops_an_answer_at_any_moment_and_the_next_one_is_right(
    home: Path, pair: Pair
) -> None:
    """Twenty moments; what follows equals a new conversation with the same history."""
    moments = random.Random(5)
    with chat(home, *LONG, NO_COLOR="1") as t:
        t.wait_for_prompt()
        n_kept = 0
        for _ in range(20):
            t.say("/clear")
            t.say("/set n -1")
            prompts = t.n_prompts
            t.keys("tell me of the sea\r")
            time.sleep(moments.uniform(0, 0.3))
            t.keys("\x03")
            t.wait_for_prompt(prompts + 1)
            messages = saved(t, home / "talk.json")
            assert len(messages) in (0, 2)
            n_kept += len(messages) == 2
            t.say("/set n 8")
            t.say("go on")
            after = saved(t, home / "talk.json")
            assert after[: len(messages)] == messages
            assert after[-1].content == fresh_answer(pair, messages, "go on")
        assert n_kept > 5
        t.keys("\x04")
        assert t.end() == 0


def test_a_signal_just_after_enter_takes_the_message_back(home: Path) -> None:
    """When the terminal has left the mode of the prompt and nothing else handles signals yet."""
    (home / "sitecustomize.py").write_text(SIGNAL_AFTER_ENTER)
    with chat(home, *LONG, NO_COLOR="1", PYTHONPATH=str(home)) as t:
        t.wait_for_prompt()
        t.say("hello")
        assert saved(t, home / "talk.json") == []
        t.say("/set n 8")
        assert "[8 tokens, " in t.say("hello")


def test_ctrl_c_ends_the_reading_of_a_long_message(home: Path) -> None:
    long = home / "long.txt"
    long.write_text("the sea and that " * 1500)
    with chat(home, "-c", "16384", NO_COLOR="1") as t:
        t.wait_for_prompt()
        t.say(f"/read {long}")
        prompts = t.n_prompts
        t.keys("\r")
        time.sleep(0.3)
        t.keys("\x03")
        t.wait_for_prompt(prompts + 1)
        assert saved(t, home / "talk.json") == []
        t.say("/clear")
        assert "[8 tokens, " in t.say("hello")


def test_ctrl_c_twice_at_an_empty_prompt_leaves(home: Path) -> None:
    with chat(home) as t:
        before = t.modes
        t.wait_for_prompt()
        t.keys("never sent\x03")
        t.wait_for_prompt(2)
        t.keys("\x03")
        t.wait_for("Ctrl-C again leaves")
        t.wait_for_prompt(3)
        t.say("hello")
        t.keys("\x03")
        t.wait(lambda: t.text.count("Ctrl-C again leaves") == 2)
        t.wait_for_prompt()
        t.keys("\x03")
        assert t.end() == 130
        assert "Traceback" not in t.text
        assert t.modes == before
        assert t.raw.rfind(b"\x1b[?2004l") > t.raw.rfind(b"\x1b[?2004h")


def test_ctrl_d_leaves_without_a_word(home: Path) -> None:
    with chat(home) as t:
        before = t.modes
        t.wait_for_prompt()
        n_lines = len(t.lines)
        t.keys("\x04")
        assert t.end() == 0
        assert len(t.lines) == n_lines
        assert t.modes == before


def test_a_termination_gives_the_terminal_back(home: Path) -> None:
    with chat(home) as t:
        before = t.modes
        t.wait_for_prompt()
        t.child.kill(signal.SIGTERM)
        assert t.end() == 143
        assert "Traceback" not in t.text
        assert t.modes == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_chat_leaves_its_session_whole(home: Path, number: signal.Signals) -> None:
    path = home / "talk.json"
    with chat(home, *LONG, "--session", str(path), "--kv", NO_COLOR="1") as t:
        t.wait_for_prompt()
        n_lines = len(t.lines)
        t.keys("tell me of the sea\r")
        t.wait(lambda: len(t.lines) > n_lines + 1)
        t.child.kill(number)
        assert t.end() == 128 + number
    kept = json.loads(path.read_text("utf-8"))["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant"]
    assert len(kept[1]["content"]) > 40
    with chat(home, "--session", str(path), "--kv", NO_COLOR="1") as t:
        t.wait_for_prompt()
        assert "Note" not in t.text
        assert "[8 tokens, " in t.say("go on")


def test_a_paste_of_many_lines_is_one_message(home: Path) -> None:
    lines = [f"line {i}: the\tsea" for i in range(40)]
    with chat(home, "-c", "4096") as t:
        t.wait_for_prompt()
        t.paste("\r\n".join(lines))
        t.say("")
        assert saved(t, home / "talk.json")[0].content == "\n".join(lines)


@pytest.mark.parametrize("columns", [80, 40])
def test_a_long_line_is_not_cut(home: Path, columns: int) -> None:
    line = "".join(random.Random(1).choices("abcdefgh ij", k=9_990)) + "x end of it"
    with chat(home, "-c", "16384", columns=columns) as t:
        t.wait_for_prompt()
        t.paste(line)
        t.keys("\r")
        t.wait(lambda: b"8 tokens, " in t.raw)
        t.wait_for_prompt()
        [asked, _] = saved(t, home / "talk.json")
        assert asked.content == line


def test_what_is_pasted_during_an_answer_arrives_whole_at_the_next_prompt(home: Path) -> None:
    lines = [f"{i} the sea and that" for i in range(40)]
    with chat(home, *LONG, NO_COLOR="1") as t:
        t.wait_for_prompt()
        n_lines = len(t.lines)
        t.keys("hello\r")
        t.wait(lambda: len(t.lines) > n_lines + 1)
        t.paste("\r".join(lines))
        t.keys("\x03")
        t.wait_for("stopped;")
        t.wait_for("  39 the sea and that")
        t.keys("\r")
        t.wait(lambda: t.lines[-1] != "  39 the sea and that")
        t.keys("\x03")
        t.wait_for_prompt()
        messages = saved(t, home / "talk.json")
        assert [message.content for message in messages[::2]] == ["hello", "\n".join(lines)]


def test_a_new_line_comes_with_alt_enter_or_after_a_backslash(home: Path) -> None:
    with chat(home) as t:
        t.wait_for_prompt()
        t.keys("one\x1b\rtwo\\\r")
        t.say("three\\\\")
        assert saved(t, home / "talk.json")[0].content == "one\ntwo\nthree\\\\"


def test_wide_characters_in_a_narrow_window_that_changes_its_size(home: Path) -> None:
    message = "海の話をしてください🙂" * 6 + " é"
    with chat(home, "-c", "2048", columns=40) as t:
        t.wait_for_prompt()
        t.keys(message[:30])
        t.resize(60)
        t.keys(message[30:])
        t.resize(33)
        t.keys("\r")
        t.wait(lambda: b"8 tokens, " in t.raw)
        t.wait_for_prompt()
        t.say("/help")
        assert saved(t, home / "t.json")[0].content == message
        assert all(len(line) <= 33 for line in t.say("/context").split("\n"))


def test_a_console_of_ascii_takes_what_it_cannot_show(home: Path) -> None:
    with chat(home, PYTHONIOENCODING="ascii", NO_COLOR="1") as t:
        t.wait_for_prompt()
        assert "[8 tokens, " in t.say("é 水 🙂")
        assert saved(t, home / "talk.json")[0].content == "é 水 🙂"
        t.keys("\x04")
        assert t.end() == 0


def test_an_answer_that_is_stopped_tells_what_it_took(home: Path) -> None:
    with chat(home, *LONG, NO_COLOR="1") as t:
        t.wait_for_prompt()
        n_lines = len(t.lines)
        t.keys("hello\r")
        t.wait(lambda: len(t.lines) > n_lines + 1)
        t.keys("\x03")
        t.wait_for("stopped;")
        t.wait_for_prompt()
        assert " tokens/s, " in t.text
        assert " tokens in " in t.say("/stats")


def test_earlier_messages_come_back_with_the_up_key(home: Path) -> None:
    with chat(home) as t:
        t.wait_for_prompt()
        t.say("remember this")
        t.keys("\x04")
        assert t.end() == 0
    history = home / "state" / "specllama" / "history"
    assert history.stat().st_mode & 0o077 == 0
    with chat(home) as t:
        t.wait_for_prompt()
        t.keys("\x1b[A")
        t.wait_for("> remember this")
        t.say("")
        assert saved(t, home / "talk.json")[0].content == "remember this"


@pytest.mark.parametrize(("option", "state"), [("--no-history", None), ("--stats", "/dev/null")])
def test_without_a_place_for_the_history_there_is_none(
    home: Path, option: str, state: str | None
) -> None:
    with chat(home, option, XDG_STATE_HOME=state or str(home / "state")) as t:
        t.wait_for_prompt()
        assert "[8 tokens, " in t.say("hello")
        t.keys("\x1b[A")
        t.wait_for("> hello")
        t.keys("\x03\x04")
        assert t.end() == 0
    assert not (home / "state").exists()


def test_tab_completes_commands_and_paths(home: Path) -> None:
    (home / "unmistakable.txt").write_text("read me")
    with chat(home, columns=200) as t:
        t.wait_for_prompt()
        t.keys("/cont\t")
        t.wait_for("> /context")
        assert t.say("").startswith("context: 0 of 512")
        t.keys(f"/read {home}/unmis\t")
        t.wait_for("takable.txt")
        assert "7 characters" in t.say("")


def test_escape_sequences_of_a_model_are_shown_and_not_obeyed(home: Path) -> None:
    with chat(home, "-n", "3", "--logit-bias", f"{ESCAPE}+1000") as t:
        t.wait_for_prompt()
        assert t.say("hello").startswith("␛␛␛\n")
        assert t.say("/show").startswith("␛␛␛\n")
        assert b"\x1b\x1b" not in t.raw


def test_no_stats_leaves_the_answer_alone(home: Path) -> None:
    with chat(home, "--no-stats") as t:
        t.wait_for_prompt()
        assert "tokens" not in t.say("hello")


def test_a_terminal_that_can_do_nothing_works_too(home: Path) -> None:
    with chat(home, TERM="dumb") as t:
        t.wait_for_prompt()
        t.keys("hello\r")
        t.wait_for("[8 tokens, ")
        t.wait_for_prompt()
        t.keys("\x04")
        assert t.end() == 0
        assert b"\x1b[2m" not in t.raw
