"""Saved conversations: what comes back, what is refused, and that no file is ever half written."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chatml import fresh_answer, loaded, say, talk
from tiny import tiny

from specllama import loading, storage
from specllama.conversation import Conversation
from specllama.errors import SpecllamaError, UsageError
from specllama.generation import Pair
from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.sessions import load, save

HELLO = "Tell me of the sea, and of those who sail on it"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with loaded() as ready:
        yield ready


@pytest.fixture(scope="module")
def other() -> Iterator[Pair]:
    """The same files, loaded once more."""
    with loaded() as ready:
        yield ready


@pytest.fixture(autouse=True)
def emptied(pair: Pair, other: Pair) -> Iterator[None]:
    for lm in (pair.target, pair.draft, other.target, other.draft):
        assert lm is not None
        lm.forget(0)
    own = [each.speculation for each in (pair, other)]
    yield
    pair.speculation, other.speculation = own


def held(pair: Pair) -> Conversation:
    """A conversation of two turns, with every setting other than it is by default."""
    conversation = talk(
        pair,
        system="You are brief.\n«Ja»",
        params=SamplingParams(temperature=0, top_k=7, logit_bias={5: -math.inf, 6: 0.5}),
        seed=11,
        stop=["\n\n", "User:"],
        thinking=False,
        ignore_eos=True,
        context_full="stop",
    )
    conversation.speculate(2)
    say(conversation, HELLO)
    say(conversation, "And then?\n🙂")
    list(conversation.retry())
    return conversation


def state(conversation: Conversation) -> dict[str, Any]:
    names = "messages dropped attempt system params seed max_tokens stop thinking context_full"
    names += " ignore_eos"
    names += " speculation"
    return {name: getattr(conversation, name) for name in names.split()}


# --- what comes back ----------------------------------------------------------------------------


def test_a_conversation_comes_back_with_its_settings(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    conversation = held(pair)
    conversation.dropped.append(Message("user", "long ago"))
    assert save(tmp_path / "a.json", conversation) == []
    again = talk(other)
    assert load(tmp_path / "a.json", again) == []
    assert state(again) == state(conversation)
    assert again.messages[1].tokens
    asked = [*conversation.messages, Message("user", "Go on")]
    settings = {"system": conversation.system, "params": conversation.params}
    answer = say(again, "Go on")
    assert answer == say(conversation, "Go on")
    assert answer == fresh_answer(other, asked, **settings, stop=conversation.stop)


def test_defaults_come_back_as_defaults(pair: Pair, tmp_path: Path) -> None:
    conversation = talk(pair, params=SamplingParams(), max_tokens=None)
    save(tmp_path / "a.json", conversation)
    again = held(pair)
    assert load(tmp_path / "a.json", again) == []
    assert state(again) == state(conversation)


def test_the_file_is_readable_json_with_a_message_on_a_line(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    conversation = held(pair)
    conversation.messages.append(Message("user", "lone \udc80 half"))
    save(path, conversation)
    text = path.read_text("utf-8")
    document = json.loads(text)
    assert [m["content"] for m in document["messages"]] == [
        message.content for message in conversation.messages
    ]
    assert "And then?\\n🙂" in text and "«Ja»" in text
    assert sum('"role"' in line for line in text.splitlines()) == 5
    assert document["format"] == 1 and document["params"]["top_k"] == 7
    target = document["pair"]["target"]
    assert target["name"] == pair.files[0].name
    assert target["size"] == pair.files[0].stat().st_size
    again = talk(pair)
    load(path, again)
    assert again.messages == conversation.messages


def test_unknown_keys_are_ignored(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    conversation = held(pair)
    save(path, conversation)
    document = json.loads(path.read_text("utf-8"))
    document["mood"] = {"good": True}
    document["params"]["magic"] = 3
    document["messages"][0]["when"] = "today"
    path.write_text(json.dumps(document), "utf-8")
    again = talk(pair)
    assert load(path, again) == []
    assert state(again) == state(conversation)


def test_a_file_that_does_not_tell_who_drafts_changes_nothing_of_it(
    pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, talk(pair))
    document = json.loads(path.read_text("utf-8"))
    del document["draft"], document["context_full"]
    path.write_text(json.dumps(document), "utf-8")
    again = talk(pair, context_full="stop")
    again.speculate("off")
    assert load(path, again) == []
    assert (again.speculation, again.context_full) == ("off", "stop")


def test_settings_that_are_to_be_kept_are_not_those_of_the_file(
    pair: Pair, tmp_path: Path
) -> None:
    save(tmp_path / "a.json", held(pair))
    again = talk(pair, system="You are long.", params=SamplingParams(temperature=0.5))
    again.speculate("off")
    keep = ["system", "temperature", "draft", "no such thing"]
    assert load(tmp_path / "a.json", again, keep) == []
    assert (again.system, again.speculation) == ("You are long.", "off")
    assert (again.params.temperature, again.params.top_k, again.seed) == (0.5, 7, 11)


def test_with_another_model_the_text_goes_on_without_ids(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    conversation = held(pair)
    save(path, conversation, kv=True)
    with loading.load(model=tiny(seed=5), draft_tokens=0) as stranger:
        again = talk(stranger)
        notices = load(path, again)
        assert pair.files[0].name in notices[0] and "is not used" in notices[2]
        assert "drafting stays at off, and was at 2: no draft model" in notices[1]
        assert len(notices) == 3
        assert all(message.tokens == () for message in again.messages)
        assert [m.content for m in again.messages] == [m.content for m in conversation.messages]
        assert stranger.target.n_held(0) == 0
        say(again, "Go on")


# --- KV state -----------------------------------------------------------------------------------


def test_with_its_kv_state_the_next_turn_decodes_only_what_is_new(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    conversation = held(pair)
    assert save(tmp_path / "a.json", conversation, kv=True) == []
    used = conversation.context[0]
    again = talk(other)
    assert load(tmp_path / "a.json", again) == []
    for lm, restored in ((pair.target, other.target), (pair.draft, other.draft)):
        assert lm is not None and restored is not None
        assert restored.held(0) == lm.held(0) != ()
    assert other.draft is not None
    rows = other.draft.rows_decoded
    assert say(again, "Go on") == say(conversation, "Go on")
    assert again.last is not None and again.last.stats is not None
    stats = again.last.stats
    n_new = stats.prompt_n - used
    assert 0 < n_new < used
    assert stats.prompt_n - stats.prompt_cached_n <= n_new + 1
    assert other.draft.rows_decoded - rows <= n_new + 2 + stats.draft_n + stats.rounds


def break_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def break_head(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"role": "target"', b'"role": "tarjet"'))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "middle": break_middle,
    "head": break_head,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_text("{}"),
    "gone": Path.unlink,
    "folder": replace_by_folder,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_kv_state_that_is_damaged_is_skipped_with_one_notice(
    pair: Pair, other: Pair, tmp_path: Path, damage: str
) -> None:
    conversation = held(pair)
    save(tmp_path / "a.json", conversation, kv=True)
    DAMAGES[damage](tmp_path / "a.json.kv")
    again = talk(other)
    [notice] = load(tmp_path / "a.json", again)
    assert "a.json.kv is not used" in notice
    assert state(again) == state(conversation)
    assert say(again, "Go on") == say(conversation, "Go on")


def test_a_kv_state_of_another_conversation_is_not_taken(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    """As an interruption between the two files would leave it."""
    save(tmp_path / "a.json", held(pair), kv=True)
    conversation = talk(pair)
    say(conversation, "Hi")
    save(tmp_path / "b.json", conversation, kv=True)
    (tmp_path / "b.json.kv").replace(tmp_path / "a.json.kv")
    [notice] = load(tmp_path / "a.json", talk(other))
    assert "another conversation" in notice


def test_a_kv_state_for_a_larger_context_is_skipped(pair: Pair, tmp_path: Path) -> None:
    conversation = talk(pair)
    for _ in range(3):
        say(conversation, HELLO)
    save(tmp_path / "a.json", conversation, kv=True)
    with loaded(ctx_size=128) as short:
        [notice] = load(tmp_path / "a.json", talk(short))
    assert "whose context has" in notice


def test_a_kv_state_with_another_draft_helps_the_target_alone(pair: Pair, tmp_path: Path) -> None:
    conversation = held(pair)
    save(tmp_path / "a.json", conversation, kv=True)
    with loaded(tiny(noise=0.2)) as changed:
        again = talk(changed)
        [notice] = load(tmp_path / "a.json", again)
        assert "of the draft" in notice
        assert changed.draft is not None and changed.draft.n_held(0) == 0
        assert changed.target.held(0) == pair.target.held(0)
        assert say(again, "Go on") == say(conversation, "Go on")


def test_saved_without_kv_an_older_state_beside_it_is_left_alone(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    conversation = held(pair)
    save(tmp_path / "a.json", conversation, kv=True)
    save(tmp_path / "a.json", conversation)
    assert load(tmp_path / "a.json", talk(other)) == []
    assert other.target.n_held(0) == 0


def test_nothing_said_is_saved_with_kv_too(pair: Pair, other: Pair, tmp_path: Path) -> None:
    save(tmp_path / "a.json", talk(pair), kv=True)
    again = talk(other)
    assert load(tmp_path / "a.json", again) == []
    say(again, "Hi")


# --- files that are refused ---------------------------------------------------------------------


def changed(document: dict[str, Any], name: str, value: Any) -> bytes:
    return json.dumps({**document, name: value}).encode()


def bad_files(good: bytes) -> dict[str, bytes]:
    document = json.loads(good)
    answer = document["messages"][1]
    deep = b"[" * 100_000
    return {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "not text": b"\xff\xfe\x00GGUF",
        "list": b"[]",
        "number": b"1" * 5000,
        "deep": deep,
        "other json": b'{"messages": []}',
        "newer": changed(document, "format", 2),
        "format of text": changed(document, "format", "1"),
        "no messages": json.dumps({k: v for k, v in document.items() if k != "messages"}).encode(),
        "messages of text": changed(document, "messages", "hi"),
        "a message of text": changed(document, "messages", ["hi"]),
        "unknown role": changed(document, "messages", [{"role": "tool", "content": "x"}]),
        "content null": changed(document, "messages", [{"role": "user", "content": None}]),
        "tokens of text": changed(document, "messages", [{**answer, "tokens": ["1"]}]),
        "negative token": changed(document, "messages", [{**answer, "tokens": [-1]}]),
        "no such token": changed(document, "messages", [{**answer, "tokens": [10**6]}]),
        "huge token": changed(document, "messages", [{**answer, "tokens": [10**400]}]),
        "temperature": changed(document, "params", {"temperature": -1}),
        "huge temperature": changed(document, "params", {"temperature": 10**400}),
        "huge bias": changed(document, "params", {"logit_bias": {"5": 10**400}}),
        "temperature true": changed(document, "params", {"temperature": True}),
        "top_k of text": changed(document, "params", {"top_k": "40"}),
        "bias": changed(document, "params", {"logit_bias": {"x": 1}}),
        "bias nan": good.replace(b'"6": 0.5', b'"6": NaN'),
        "stop": changed(document, "stop", [""]),
        "seed": changed(document, "seed", 1.5),
        "max_tokens": changed(document, "max_tokens", -2),
        "context_full": changed(document, "context_full", "ask"),
        "draft of text": changed(document, "draft", "many"),
        "draft true": changed(document, "draft", True),
        "no draft tokens": changed(document, "draft", 0),
        "kv": changed(document, "kv", {"sha256": 3}),
        "pair": changed(document, "pair", {"target": {"name": "x"}}),
    }


def test_a_file_that_is_none_is_one_sentence_and_changes_nothing(
    pair: Pair, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, held(pair))
    conversation = talk(pair)
    say(conversation, "Hi")
    before = state(conversation)
    messages = list(conversation.messages)
    last = conversation.last
    good = path.read_bytes()
    for what, data in bad_files(good).items():
        assert data != good, what
        path.write_bytes(data)
        with pytest.raises(UsageError) as refusal:
            load(path, conversation)
        sentence = str(refusal.value)
        assert str(path) in sentence and "\n" not in sentence and len(sentence) < 400, what
        assert state(conversation) == before, what
        assert conversation.messages == messages and conversation.last is last, what
    path.write_bytes(good)
    load(path, conversation)


def test_a_newer_format_is_named(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"program": "specllama", "format": 2}')
    with pytest.raises(UsageError, match="newer version"):
        load(tmp_path / "a.json", talk(pair))


def test_what_is_no_ordinary_file_is_not_read(pair: Pair, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**33)
    inside = [tmp_path / name for name in ("none", "pipe", "large")]
    for path in (tmp_path, Path("/dev/zero"), *inside):
        with pytest.raises(UsageError) as refusal:
            load(path, talk(pair))
        assert str(path) in str(refusal.value)


# --- writing ------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["", "none/a.json", "pipe", "a\0b", "x" * 300])
def test_a_path_that_cannot_be_written_is_one_sentence(
    pair: Pair, tmp_path: Path, name: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecllamaError) as refusal:
        save(tmp_path / name, held(pair))
    assert "\n" not in str(refusal.value) and "name a" in str(refusal.value)
    assert files(tmp_path) == ["pipe"]


def test_a_device_is_never_replaced(pair: Pair) -> None:
    with pytest.raises(UsageError, match="device"):
        save("/dev/full", held(pair))
    assert Path("/dev/full").is_char_device()


def test_when_writing_fails_the_old_file_is_intact(tmp_path: Path) -> None:
    """The disk is full after 1,000 bytes, as far as a process can tell."""
    path = tmp_path / "a.json"
    path.write_text("old")
    code = """
import sys
from pathlib import Path
from specllama.errors import SpecllamaError
from specllama.storage import write
try:
    write(Path(sys.argv[1]), [b"x" * 900, b"y" * 900])
except SpecllamaError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, path],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot be written: file too large" in run.stdout
    assert files(tmp_path) == ["a.json"] and path.read_text() == "old"


def test_an_interrupt_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        storage.write(path, parts())
    assert files(tmp_path) == ["a.json"] and path.read_text() == "old"


def test_a_link_and_the_permissions_of_a_file_stay(pair: Pair, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    save(link, held(pair))
    assert link.is_symlink() and real.read_text().startswith("{")
    assert real.stat().st_mode & 0o777 == 0o640


def test_when_only_the_kv_state_cannot_be_saved_the_conversation_is(
    pair: Pair, other: Pair, tmp_path: Path
) -> None:
    (tmp_path / "a.json.kv").mkdir()
    conversation = held(pair)
    [notice] = save(tmp_path / "a.json", conversation, kv=True)
    assert "KV state is not saved" in notice and "folder" in notice
    again = talk(other)
    assert load(tmp_path / "a.json", again) == []
    assert state(again) == state(conversation)
