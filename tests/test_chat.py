"""The chat without a terminal: lines in, answers and notes out, over a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tiny import tiny

import specllama
from specllama import answers, provenance, settings
from specllama.chat import Chat
from specllama.commands import COMMANDS, take
from specllama.conversation import Conversation
from specllama.errors import UsageError
from specllama.generation import Chunk, Pair, Stats, Token
from specllama.markers import ChatTokenizer
from specllama.options import sampling_options
from specllama.presentation import Screen, stream, stream_without_thinking
from specllama.prompts import ChatFormat
from specllama.sampling import SamplingParams
from specllama.terminal import harmless

GREEDY = SamplingParams(temperature=0)
SWITCH = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)


class Page:
    """A screen that remembers: the text of the answers, the notes, and what was repainted."""

    def __init__(self) -> None:
        self.answers = ""
        self.notes: list[str] = []
        self.painted: list[tuple[str, str]] = []

    def answer(self, text: str) -> None:
        self.answers += text

    def say(self, message: str) -> None:
        self.notes.append(message)

    def aside(self, message: str) -> None:
        self.notes.append(message)

    def show_provenance(self, answer: provenance.Pieces) -> None:
        self.painted += answer

    def read_notes(self) -> str:
        """The notes since the last reading."""
        notes, self.notes = self.notes, []
        return "\n".join(notes)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with specllama.load(
        model=tiny("attention"), draft=tiny("attention", noise=0.1), draft_tokens=3
    ) as loaded:
        yield loaded


def opened(pair: Pair, page: Page, template: str | None = None, **options: Any) -> Chat:
    """A new chat; options are those of Conversation, and `present` and `kv`."""
    tokenizer = cast(ChatTokenizer, pair.tokenizer)
    chat_format = ChatFormat.of(template or pair.chat_template, tokenizer, "tiny")
    present, kv = options.pop("present", stream), options.pop("kv", False)
    talk = Conversation(pair, chat_format, **{"params": GREEDY, "max_tokens": 6, **options})
    return Chat(talk, page, present=present, kv=kv)


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture
def chat(pair: Pair, page: Page) -> Iterator[Chat]:
    chat = opened(pair, page)
    yield chat
    chat.conversation.speculate(3)


def contents(chat: Chat) -> list[str]:
    return [message.content for message in chat.conversation.messages]


def refused(chat: Chat, line: str) -> str:
    """The one sentence with which a line is refused, changing no message."""
    before = list(chat.conversation.messages)
    with pytest.raises(UsageError) as caught:
        take(chat, line)
    assert chat.conversation.messages == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_message_is_answered_and_the_next_one_follows_it(chat: Chat, page: Page) -> None:
    assert take(chat, "hello")
    first = chat.conversation.messages[-1].content
    assert page.answers == first + "\n"
    assert take(chat, "and now?")
    assert contents(chat) == ["hello", first, "and now?", chat.conversation.messages[-1].content]


@pytest.mark.parametrize("line", ["", "   ", "\t", "\ufeff", "\n\n"])
def test_an_empty_line_is_no_message(chat: Chat, page: Page, line: str) -> None:
    assert take(chat, line)
    assert contents(chat) == []
    assert page.answers == ""


def test_two_slashes_send_one(chat: Chat) -> None:
    take(chat, "//help me")
    assert contents(chat)[0] == "/help me"


@pytest.mark.parametrize(
    ("line", "meant"),
    [("/hlep", "/help"), ("/re", "/retry"), ("/exit", "/quit"), ("/bye", "/quit"),
     ("/temprature 3", None), ("/usr/bin/env: no such file", None), ("/", None)],
)
def test_an_unknown_command_suggests_the_nearest(
    chat: Chat, line: str, meant: str | None
) -> None:
    sentence = refused(chat, line)
    assert f"there is no command {line.split()[0]}" in sentence
    if meant:
        assert f"did you mean {meant}?" in sentence
    else:
        assert "did you mean" not in sentence


def test_a_command_may_be_written_large(chat: Chat, page: Page) -> None:
    take(chat, "/Set Temp 0.5")
    assert page.read_notes() == "temp 0.5"
    assert "did you mean /help?" in refused(chat, "/HLEP")


def test_help_lists_every_command(chat: Chat, page: Page) -> None:
    take(chat, "/help")
    lines = page.read_notes().splitlines()
    assert [line.split()[0] for line in lines] == [*(f"/{name}" for name in COMMANDS), "//TEXT"]
    assert max(map(len, lines)) <= 80


def test_the_system_prompt_can_be_seen_changed_and_taken_away(chat: Chat, page: Page) -> None:
    take(chat, "hi")
    without = chat.conversation.last
    take(chat, "/clear")
    page.read_notes()
    take(chat, "/system You are terse.\nAnd polite.")
    take(chat, "/system")
    assert page.read_notes() == "\n".join(["system prompt: You are terse.\nAnd polite."] * 2)
    take(chat, "hi")
    given = chat.conversation.last
    assert given is not None and without is not None
    assert given.prompt_n > without.prompt_n
    take(chat, "/system none")
    assert chat.conversation.system is None


def test_clear_keeps_the_system_prompt_and_the_parameters(chat: Chat) -> None:
    for line in ("/system Be kind.", "/set top-k 7", "hi", "/clear"):
        take(chat, line)
    assert contents(chat) == []
    assert chat.conversation.system == "Be kind."
    assert chat.conversation.params.top_k == 7


def test_undo_takes_turns_back_one_by_one(chat: Chat, page: Page) -> None:
    for line in ("one", "two", "/undo"):
        take(chat, line)
    assert page.read_notes() == "taken back: two"
    assert contents(chat)[0] == "one" and len(contents(chat)) == 2
    take(chat, "/undo")
    assert "say something first" in refused(chat, "/undo")


def test_retry_answers_the_same_message_again(chat: Chat) -> None:
    take(chat, "/set temp 1.5")
    take(chat, "hi")
    first = contents(chat)
    take(chat, "/retry")
    second = contents(chat)
    assert len(second) == 2 and second[0] == "hi"
    assert second[1] != first[1]
    take(chat, "/clear")
    assert "say something first" in refused(chat, "/retry")


def test_edit_replaces_the_last_message(chat: Chat, page: Page) -> None:
    chat.editor = lambda text: f"{text} twice\n"
    take(chat, "one")
    take(chat, "say it")
    take(chat, "/edit")
    assert contents(chat)[::2] == ["one", "say it twice"]
    assert page.answers.splitlines()[-1] == contents(chat)[-1].splitlines()[-1]


@pytest.mark.parametrize("saved", [None, "", "  \n", "say it\n", "say it"])
def test_an_edit_that_changes_nothing_sends_nothing(chat: Chat, page: Page, saved: Any) -> None:
    chat.editor = lambda text: saved
    take(chat, "say it")
    before, shown = contents(chat), page.answers
    take(chat, "/edit")
    assert page.read_notes() == "nothing was changed"
    assert (contents(chat), page.answers) == (before, shown)


def test_edit_begins_a_conversation_too(chat: Chat) -> None:
    chat.editor = lambda text: f"{text}two\nlines\n"
    take(chat, "/edit")
    assert contents(chat)[0] == "two\nlines"


def test_without_a_terminal_there_is_no_editor(chat: Chat) -> None:
    assert "needs a terminal" in refused(chat, "/edit")


def test_a_saved_conversation_is_gone_on_with(
    chat: Chat, page: Page, pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "my talk.json"
    for line in ("/system Be kind.", "/set temp 0", "hi", f"/save {path}"):
        take(chat, line)
    assert page.read_notes().splitlines()[-1] == f"saved 2 messages to {path}"
    other = opened(pair, page)
    take(other, f"/load {path}")
    assert page.read_notes().splitlines()[-1] == f"loaded 2 messages from {path}"
    assert other.conversation.messages == chat.conversation.messages
    assert other.conversation.system == "Be kind."
    take(chat, "go on")
    take(other, "go on")
    assert contents(other) == contents(chat)


def test_a_file_that_cannot_be_loaded_changes_nothing(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "nonsense"
    path.write_text("{")
    take(chat, "hi")
    assert str(path) in refused(chat, f"/load {path}")
    refused(chat, f"/load {tmp_path / 'absent'}")
    refused(chat, f"/save {tmp_path}")
    for line in ("/load", "/save", "/read"):
        assert "no file named" in refused(chat, line)


def test_an_answer_that_is_stopped_before_it_begins_has_no_status(chat: Chat, pair: Pair) -> None:
    def stopped(chunks: Iterator[Chunk], screen: Screen) -> None:
        raise KeyboardInterrupt

    take(chat, "hi")
    again = Chat(chat.conversation, Page(), present=stopped)
    told: list[str] = []
    again.status = told.append
    with pytest.raises(KeyboardInterrupt):
        take(again, "and now?")
    assert told == []


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_path_may_stand_in_quotes(
    chat: Chat, page: Page, tmp_path: Path, quote: str
) -> None:
    path = tmp_path / "my talk's.json"
    take(chat, f"/save {quote}{path}{quote}")
    assert page.read_notes() == f"saved 0 messages to {path}"
    assert path.is_file()


def test_a_conversation_is_kept_after_each_answer(chat: Chat, tmp_path: Path) -> None:
    chat.session = tmp_path / "kept.json"
    take(chat, "hi")
    assert '"hi"' in chat.session.read_text()
    take(chat, "more")
    kept = json.loads(chat.session.read_text())
    assert [message["content"] for message in kept["messages"]] == contents(chat)


def test_caches_that_cannot_be_saved_are_told_of(pair: Pair, page: Page, tmp_path: Path) -> None:
    chat = opened(pair, page, kv=True)
    path = tmp_path / "talk.json"
    (tmp_path / "talk.json.kv").mkdir()
    take(chat, "hi")
    page.read_notes()
    take(chat, f"/save {path}")
    first, last = page.read_notes().splitlines()
    assert first.startswith("Note: the KV state is not saved: ")
    assert last == f"saved 2 messages to {path}"


def test_a_file_goes_before_the_next_message(chat: Chat, page: Page, tmp_path: Path) -> None:
    path = tmp_path / "a b.txt"
    path.write_bytes("\ufeffline one\nline two\n".encode())
    take(chat, f"/read {path}")
    assert page.read_notes() == f"{path}: 18 characters, sent with your next message"
    assert contents(chat) == []
    take(chat, "what is it?")
    assert contents(chat)[0] == "line one\nline two\n\n\nwhat is it?"
    take(chat, "and?")
    assert contents(chat)[2] == "and?"


def test_a_file_can_be_sent_alone_and_forgotten(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_text("alone")
    take(chat, f"/read {path}")
    take(chat, "")
    assert contents(chat)[0] == "alone"
    take(chat, f"/read {path}")
    take(chat, "/clear")
    take(chat, "hi")
    assert contents(chat)[0] == "hi"


def test_a_file_that_is_no_text_is_refused(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"caf\xe9")
    assert "not UTF-8 at byte 3" in refused(chat, f"/read {path}")
    assert "no ordinary file" in refused(chat, f"/read {tmp_path}")
    assert "cannot be read" in refused(chat, f"/read {tmp_path / 'absent'}")
    assert "cannot be read" in refused(chat, "/read a\0b")


def test_a_message_that_is_refused_keeps_its_file_for_the_next(
    chat: Chat, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "note"
    path.write_text("short")
    take(chat, f"/read {path}")
    assert "context" in refused(chat, "the " * 600)
    assert page.answers == ""
    take(chat, "hi")
    assert contents(chat)[0] == "short\n\nhi"


@pytest.mark.parametrize(("n_chunks", "second"), [(0, "short\n\nagain"), (1, "again")])
def test_a_file_goes_once_though_the_answer_is_stopped(
    pair: Pair, page: Page, tmp_path: Path, n_chunks: int, second: str
) -> None:
    def stopped(chunks: Iterator[Chunk], screen: Screen) -> None:
        for _ in range(n_chunks):
            next(chunks)
        raise KeyboardInterrupt

    chat = opened(pair, page, present=stopped)
    path = tmp_path / "note"
    path.write_text("short")
    take(chat, f"/read {path}")
    for line in ("hi", "again"):
        with pytest.raises(KeyboardInterrupt):
            take(chat, line)
        n_chunks = 1
    assert contents(chat)[-2] == second


@pytest.mark.parametrize(
    ("typed", "shown", "field", "value"),
    [
        ("temp 0.7", "temp 0.7", "temperature", 0.7),
        ("--temperature 2", "temp 2", "temperature", 2),
        ("temp 0.1234567", "temp 0.1234567", "temperature", 0.1234567),
        ("top_k 5", "top-k 5", "top_k", 5),
        ("top-k 1234567", "top-k 1234567", "top_k", 1234567),
        ("top-p 0.5", "top-p 0.5", "top_p", 0.5),
        ("min-p 0.25", "min-p 0.25", "min_p", 0.25),
        ("repeat-penalty 1.1", "repeat-penalty 1.1", "repeat_penalty", 1.1),
        ("presence-penalty 1", "presence-penalty 1", "presence_penalty", 1),
        ("frequency-penalty -1", "frequency-penalty -1", "frequency_penalty", -1),
        ("repeat-last-n -1", "repeat-last-n -1", "penalty_last_n", -1),
        ("logit-bias 7-inf", "logit-bias 7-inf", "logit_bias", {7: float("-inf")}),
    ],
)
def test_a_sampling_parameter_can_be_set(
    chat: Chat, page: Page, typed: str, shown: str, field: str, value: Any
) -> None:
    take(chat, f"/set {typed}")
    assert page.read_notes() == shown
    assert getattr(chat.conversation.params, field) == value


@pytest.mark.parametrize(
    ("typed", "field", "value", "back"),
    [
        ("seed 3", "seed", 3, None), ("n 12", "max_tokens", 12, None),
        ("predict none", "max_tokens", None, None), ("stop ### end", "stop", ("### end",), ()),
        ("ignore-eos on", "ignore_eos", True, False),
    ],
)
def test_what_else_a_turn_depends_on_can_be_set(
    chat: Chat, typed: str, field: str, value: Any, back: Any
) -> None:
    take(chat, f"/set {typed}")
    assert getattr(chat.conversation, field) == value
    name = typed.split()[0]
    take(chat, f"/set {name} { {'stop': 'none', 'ignore-eos': 'off'}.get(name, '-1') }")
    assert getattr(chat.conversation, field) == back


@pytest.mark.parametrize(
    "typed",
    ["temp hot", "temp -1", "temp nan", "temp inf", "top-k 1.5", "top-k -1", "top-p 2", "min-p x",
     "repeat-penalty 0", "repeat-last-n -2", "logit-bias 5", "logit-bias 5+x", "seed x", "n -2",
     "predict many", "ignore-eos 1", "tmp 1", "verifier block", "top-k 1 2"],
)
def test_a_wrong_value_is_one_sentence_and_changes_nothing(chat: Chat, typed: str) -> None:
    before = [settings.show(chat.conversation, name) for name in settings.names()]
    refused(chat, f"/set {typed}")
    assert [settings.show(chat.conversation, name) for name in settings.names()] == before


def test_a_text_that_was_read_can_be_taken_back_unsent(
    chat: Chat, page: Page, tmp_path: Path
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("never " * 2000)
    take(chat, f"/read {path}")
    assert "context" in refused(chat, "hi")
    take(chat, "/undo")
    take(chat, "hi")
    assert contents(chat)[0] == "hi"
    assert "not sent yet" in page.read_notes()


def test_save_replaces_a_saved_conversation_and_nothing_else(
    chat: Chat, page: Page, tmp_path: Path
) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    assert "is no saved conversation" in refused(chat, f"/save {precious}")
    assert precious.read_text() == "precious"
    take(chat, f"/save {tmp_path / 'talk.json'}")
    take(chat, "hi")
    take(chat, f"/save {tmp_path / 'talk.json'}")
    assert page.read_notes().endswith(f"saved 2 messages to {tmp_path / 'talk.json'}")


def test_a_mistyped_parameter_suggests_the_nearest(chat: Chat) -> None:
    assert "did you mean temp?" in refused(chat, "/set tmp 0.5")
    assert "did you mean" not in refused(chat, "/set nonsense 1")


def test_set_alone_lists_what_the_command_line_has(chat: Chat, page: Page) -> None:
    take(chat, "/set")
    listed = {line.split()[0] for line in page.read_notes().splitlines()}

    @sampling_options
    def command() -> None: ...

    options = {name for each in command.__click_params__ for name in each.opts}  # type: ignore[attr-defined]
    long = {name.removeprefix("--") for name in options if name.startswith("--")}
    assert listed == long


def test_who_drafts_can_be_changed(chat: Chat, page: Page) -> None:
    def drafted(choice: str) -> int:
        take(chat, f"/draft {choice}")
        take(chat, "/clear")
        take(chat, "hi")
        assert chat.conversation.last is not None and chat.conversation.last.stats is not None
        return chat.conversation.last.stats.draft_n

    assert drafted("off") == 0
    assert drafted("2") > 0
    text = contents(chat)
    assert drafted("only") == 0
    assert drafted("3") > 0
    assert contents(chat) == text
    take(chat, "/draft")
    assert page.read_notes().splitlines()[-1].startswith("drafting: 3")


@pytest.mark.parametrize("choice", ["many", "-1", "99", "2.5"])
def test_a_draft_that_cannot_be_changes_nothing(chat: Chat, page: Page, choice: str) -> None:
    refused(chat, f"/draft {choice}")
    take(chat, "/draft")
    assert page.read_notes().startswith("drafting: 3")


def test_show_paints_the_whole_answer(chat: Chat, page: Page) -> None:
    assert "ask something first" in refused(chat, "/show")
    take(chat, "/set n 40")
    take(chat, "hi")
    take(chat, "/show")
    assert "".join(text for _, text in page.painted) == contents(chat)[-1]
    assert {kind for kind, _ in page.painted} <= set(provenance.MEANING)
    assert len(page.painted) > 1


def test_stats_and_context_tell_of_the_last_answer(chat: Chat, page: Page) -> None:
    refused(chat, "/stats")
    take(chat, "/context")
    assert page.read_notes() == "context: 0 of 512 tokens used, 512 left; 0 messages"
    take(chat, "hi")
    take(chat, "/stats")
    stats = page.read_notes()
    assert stats.startswith("6 tokens in ")
    assert "kept by position" in stats
    take(chat, "/context")
    used, n_ctx = chat.conversation.context
    assert n_ctx == 512
    assert used > 6
    assert page.read_notes().startswith(f"context: {used} of 512 tokens used, {512 - used} left; 2")


def test_thinking_can_be_switched_where_the_template_has_a_switch(
    chat: Chat, page: Page, pair: Pair
) -> None:
    assert "no switch for thinking" in refused(chat, "/think on")
    other = opened(pair, page, SWITCH)
    take(other, "/think")
    assert page.read_notes() == "thinking: as the template has it"
    take(other, "/think on")
    take(other, "hi")
    assert contents(other)[-1].startswith("<think>")
    take(other, "/think off")
    take(other, "hi")
    assert not contents(other)[-1].startswith("<think>")
    assert "on or off" in refused(other, "/think maybe")


def test_quit_leaves_and_nothing_else_does(chat: Chat) -> None:
    assert not take(chat, "/quit")
    chat.editor = lambda text: None
    for name in set(COMMANDS) - {"quit", "undo", "retry", "save", "load", "read", "show", "stats",
                                 "think"}:
        assert take(chat, f"/{name}"), name


def test_a_line_of_status_follows_each_answer(chat: Chat) -> None:
    told: list[str] = []
    chat.status = told.append
    take(chat, "hi")
    used, _ = chat.conversation.context
    assert len(told) == 1
    assert told[0].startswith("[6 tokens, ")
    assert f"; context {used} of 512]" in told[0]
    assert "drafted kept" in told[0]
    take(chat, "/draft off")
    take(chat, "hi")
    assert "nothing drafted" in told[1]


def test_the_status_says_what_speculation_is_worth() -> None:
    stats = Stats(predicted_n=30, predicted_ms=1000, rounds=10, draft_n=40, draft_n_accepted=20)
    line = answers.status_line(stats, (50, 512), 50.0)
    assert line == (
        "[30 tokens, 30.0 tokens/s, 3.00 a round, 50 % of 40 drafted kept, "
        "about 1.5 times plain decoding; context 50 of 512]"
    )
    assert "plain" not in answers.status_line(stats, (50, 512), None)


def test_an_answer_at_the_end_of_the_context_says_so(chat: Chat, page: Page) -> None:
    take(chat, "/set predict none")
    take(chat, "/set ignore-eos on")
    take(chat, "/set logit-bias none")
    take(chat, "hi")
    assert "because the context is full" in page.read_notes()
    take(chat, "/set n 4")
    take(chat, "go on")
    assert contents(chat)[-1]


def test_a_stopped_answer_is_kept_and_the_chat_goes_on(chat: Chat, pair: Pair) -> None:
    def stopped(chunks: Iterator[Chunk], screen: Screen) -> None:
        next(chunks)
        raise KeyboardInterrupt

    interrupted = opened(pair, Page(), max_tokens=40, present=stopped)
    told: list[str] = []
    interrupted.status = told.append
    with pytest.raises(KeyboardInterrupt):
        take(interrupted, "hi")
    n_tokens = len(interrupted.conversation.messages[-1].tokens)
    assert [line.split(",")[0] for line in told] == [f"[{n_tokens} tokens"]
    take(interrupted, "/stats")
    kept = list(interrupted.conversation.messages)
    assert [message.role for message in kept] == ["user", "assistant"]
    fresh = opened(pair, Page())
    fresh.conversation.resume(kept, ())
    going_on = Chat(interrupted.conversation, Page())
    going_on.conversation.max_tokens = 6
    take(going_on, "go on")
    take(fresh, "go on")
    assert contents(going_on) == contents(fresh)
    assert contents(fresh)[-1]


def test_thinking_is_hidden_also_when_its_tags_come_in_pieces() -> None:
    text = "<think>\nLet me see.\n</think>\n\nIt is </think> four."
    for size in (1, 3, 7, len(text)):
        page = Page()
        chunks = (Chunk(text[i : i + size]) for i in range(0, len(text), size))
        stream_without_thinking(chunks, page)
        assert page.answers == "It is </think> four.\n"


def test_thinking_that_does_not_end_is_hidden_to_the_end() -> None:
    page = Page()
    stream_without_thinking(iter([Chunk("<think>on and "), Chunk("on")]), page)
    assert page.answers == "\n"


def test_control_characters_are_shown_and_not_obeyed() -> None:
    text = "\x1b[31mred\x07\x9b2J\x7f\r\ttab\nline é 🙂"
    assert harmless(text) == "␛[31mred␇<9B>2J␡␍\ttab\nline é 🙂"


def test_pieces_of_an_answer_are_joined_by_provenance_and_never_split_a_character() -> None:
    data = {0: b"a", 1: b"b", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"\xff"}
    kinds = ["accepted", "accepted", "corrected", "bonus", "bonus"]
    tokens = [Token(i, "", kind) for i, kind in enumerate(kinds)]
    pieces = provenance.pieces(tokens, data.__getitem__)
    assert pieces == [("accepted", "ab"), ("bonus", "é\ufffd")]


def test_provenance_without_colours_has_brackets_and_a_legend() -> None:
    answer = [("accepted", "a b"), ("corrected", " c"), ("bonus", "d")]
    shown, _, *legend = provenance.bracketed(answer).split("\n")
    assert shown == "[a b]{ c}<d>"
    assert [line.split()[0] for line in legend] == ["[accepted]", "{corrected}", "<bonus>"]
    assert provenance.coloured(answer).startswith("\x1b[32ma b\x1b[0m\x1b[1;31m c\x1b[0m")
