"""A conversation over real contexts with tiny models; every answer against a fresh process."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from chatml import GREEDY, fresh_answer, loaded, say, talk
from tiny import tiny

from specllama import conversation as conversation_module
from specllama import llama, tuning
from specllama.conversation import Conversation
from specllama.errors import DecodeError, InvalidLogits, UsageError
from specllama.generation import Chunk, Pair, Token
from specllama.lm import CachedLM
from specllama.loading import load
from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.turns import Answer, opening_of, printing, turn_seed

WARM = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
TURNS = ["Tell me of the sea, and of those who sail on it", "And then?", "Why is that?", "Go on"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with loaded() as ready:
        yield ready


@pytest.fixture(scope="module")
def other() -> Iterator[Pair]:
    """A second process, so to speak, that decodes plainly."""
    with loaded(draft_tokens=0) as ready:
        yield ready


@pytest.fixture(autouse=True)
def emptied(pair: Pair) -> Iterator[None]:
    own = pair.speculation
    for lm in models(pair):
        lm.forget(0)
    yield
    pair.speculation = own
    for lm in models(pair):
        lm.on_decode = None


def models(pair: Pair) -> list[CachedLM]:
    assert pair.draft is not None
    return [pair.target, pair.draft]


def contents(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def printed(pair: Pair, message: Message) -> str:
    """What the ids of a message print."""
    return b"".join(map(pair.tokenizer.piece, message.tokens)).decode("utf-8", "replace")


# --- turns cost their new tokens ----------------------------------------------------------------


@pytest.mark.parametrize("choice", [3, "off"])
def test_a_turn_decodes_its_new_tokens_only(pair: Pair, choice: str | int) -> None:
    conversation = talk(pair, system="You are brief.")
    conversation.speculate(choice)
    target, draft = models(pair)
    used = 0
    told: list[int] = []
    conversation.on_reading = told.append
    for turn, text in enumerate(TURNS):
        before = [lm.rows_decoded for lm in (target, draft)]
        say(conversation, text)
        assert conversation.last is not None and conversation.last.stats is not None
        stats = conversation.last.stats
        n_new = stats.prompt_n - used
        # The last token of an answer is not read before the next turn.
        assert stats.prompt_n - stats.prompt_cached_n <= n_new + 1
        assert told.pop() == stats.prompt_n - stats.prompt_cached_n and not told
        rows = [lm.rows_decoded - n for lm, n in zip((target, draft), before, strict=True)]
        assert rows[0] <= n_new + 1 + stats.draft_n + stats.rounds
        # A draft token is read once; after full acceptance the last one comes with the next.
        assert rows[1] <= (n_new + 2 + stats.draft_n + stats.rounds if choice == 3 else 0)
        if turn > 0:  # or else the bounds would hold without a cache
            assert used > n_new + 2
        used = stats.prompt_n + stats.predicted_n
        assert conversation.context == (used, pair.target.n_ctx)
    assert (stats.draft_n > 0) == (choice == 3)


@pytest.mark.parametrize("choice", [3, "off"])
def test_every_answer_is_that_of_a_fresh_process(
    pair: Pair, other: Pair, choice: str | int
) -> None:
    conversation = talk(pair, system="You are brief.")
    conversation.speculate(choice)
    for text in TURNS:
        asked = [*conversation.messages, Message("user", text)]
        answer = say(conversation, text)
        assert answer == fresh_answer(other, asked, system="You are brief.")
        assert len(answer.tokens) == 24


def test_answers_differ_with_the_system_prompt_and_the_history(pair: Pair) -> None:
    """Or else the comparisons with a fresh process would show little."""
    answers = [
        fresh_answer(pair, [Message("user", "And then?")], system=system) for system in ("A", "B")
    ]
    history = [Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "And then?")]
    answers.append(fresh_answer(pair, history, system="A"))
    assert len({answer.content for answer in answers}) == 3


# --- turns that are broken off ------------------------------------------------------------------


class Interruption:
    """Raises once, with the n-th decode of a model from now."""

    def __init__(self, lm: CachedLM, error: BaseException, n_decodes: int) -> None:
        self._lm, self._error, self._left = lm, error, n_decodes
        lm.on_decode = self

    def __call__(self, n_rows: int, n_logits: int, ms: float) -> None:
        self._left -= 1
        if self._left == 0:
            self._lm.on_decode = None
            raise self._error


@pytest.mark.parametrize(
    ("which", "error"),
    [
        *((0, error) for error in (KeyboardInterrupt(), DecodeError("x"), InvalidLogits(3))),
        (1, KeyboardInterrupt()),  # where a draft fails, the target goes on alone
    ],
)
def test_a_turn_after_a_broken_one_is_that_of_a_fresh_process(
    pair: Pair, other: Pair, which: int, error: BaseException
) -> None:
    """Broken at any decode of target or draft: in the prompt, or in a round of the answer."""
    kept = set()
    for n_decodes in range(1, 16):
        conversation = talk(pair, max_tokens=60)
        say(conversation, TURNS[0])
        Interruption(models(pair)[which], error, n_decodes)
        text = ""
        with pytest.raises(type(error)):
            for chunk in conversation.ask("And then?"):
                text += chunk.text
        kept.add(len(conversation.messages))
        assert len(conversation.messages) == (4 if text else 2)
        if text:
            assert conversation.messages[-1].content == text
        conversation.max_tokens = 24
        asked = [*conversation.messages, Message("user", "Go on")]
        assert say(conversation, "Go on") == fresh_answer(other, asked)
    assert kept == {2, 4}


def test_an_answer_that_is_left_is_closed_where_it_was(pair: Pair, other: Pair) -> None:
    for n_chunks in range(1, 6):
        conversation = talk(pair)
        shown = "".join(
            chunk.text for chunk in itertools.islice(conversation.ask(TURNS[0]), n_chunks)
        )
        assert contents(conversation) == [("user", TURNS[0]), ("assistant", shown)]
        partial = conversation.messages[-1]
        assert printed(pair, partial) == shown
        asked = [*conversation.messages, Message("user", "Go on")]
        assert say(conversation, "Go on") == fresh_answer(other, asked)


def test_an_iterator_that_is_kept_ends_with_the_next_turn(pair: Pair, other: Pair) -> None:
    conversation = talk(pair)
    held = conversation.ask(TURNS[0])
    next(held)
    state = list(conversation.messages)
    assert len(state) == 2
    answer = say(conversation, "Go on")
    assert list(held) == []
    assert conversation.messages[:2] == state
    assert answer == fresh_answer(other, [*state, Message("user", "Go on")])


def test_a_turn_of_which_nothing_was_asked_for_never_was(pair: Pair) -> None:
    conversation = talk(pair)
    conversation.ask("never iterated")
    assert conversation.messages == []
    say(conversation, "Hi")
    assert len(conversation.messages) == 2


def test_an_old_answer_stays_when_no_new_one_begins(pair: Pair) -> None:
    conversation = talk(pair, params=WARM, seed=1)
    say(conversation, TURNS[0])
    state, last, attempt = list(conversation.messages), conversation.last, conversation.attempt
    actions: list[Callable[[], Iterator[Chunk]]] = [
        conversation.retry,
        lambda: conversation.edit("Something else, not that"),
    ]
    for again in actions:
        pair.target.forget(0)
        Interruption(pair.target, KeyboardInterrupt(), 1)
        with pytest.raises(KeyboardInterrupt):
            list(again())
        assert conversation.messages == state
        assert (conversation.last, conversation.attempt) == (last, attempt)


# --- undo, edit, clear --------------------------------------------------------------------------


def test_undo_takes_a_message_back_with_its_answer(pair: Pair) -> None:
    conversation = talk(pair)
    assert conversation.undo() is None
    first = say(conversation, TURNS[0])
    second = say(conversation, TURNS[1])
    assert conversation.undo() == Message("user", TURNS[1])
    assert conversation.last is None
    assert conversation.messages[1:] == [first]
    assert say(conversation, TURNS[1]) == second


def test_edit_replaces_the_last_message(pair: Pair, other: Pair) -> None:
    conversation = talk(pair)
    say(conversation, TURNS[0])
    say(conversation, "And thn?")
    list(conversation.edit("And then?"))
    asked = conversation.messages[:-1]
    assert [message.content for message in asked if message.role == "user"][1:] == ["And then?"]
    assert conversation.messages[-1] == fresh_answer(other, asked)


def test_clear_leaves_the_system_prompt(pair: Pair, other: Pair) -> None:
    conversation = talk(pair, system="You are brief.")
    say(conversation, TURNS[0])
    conversation.clear()
    assert conversation.context == (0, pair.target.n_ctx)
    answer = say(conversation, "Hi")
    assert answer == fresh_answer(other, [Message("user", "Hi")], system="You are brief.")


@pytest.mark.parametrize("method", [Conversation.retry, lambda c: c.edit("x")])
def test_there_must_be_something_to_answer_again(
    pair: Pair, method: Callable[[Conversation], object]
) -> None:
    with pytest.raises(UsageError, match="say something first"):
        method(talk(pair))


def test_context_counts_an_answer_without_a_question(pair: Pair) -> None:
    conversation = talk(pair)
    conversation.resume([Message("assistant", "Of what?")])
    used, n_ctx = conversation.context
    assert 0 < used < 12 < n_ctx


def test_context_counts_what_was_resumed(pair: Pair) -> None:
    conversation = talk(pair)
    for text in TURNS[:2]:
        say(conversation, text)
    used = conversation.context
    conversation.resume(list(conversation.messages))
    assert conversation.context == used


# --- seeds --------------------------------------------------------------------------------------


def test_a_seed_gives_the_conversation_again_and_each_turn_its_own_numbers(pair: Pair) -> None:
    talks = [talk(pair, params=WARM, seed=seed) for seed in (7, 7, 8)]
    for conversation in talks:
        for _ in range(3):
            say(conversation, "Hi")
    assert contents(talks[0]) == contents(talks[1]) != contents(talks[2])
    prompt = talks[0].chat_format.tokens([Message("user", "Hi")])
    alone = "".join(c.text for c in pair.generate(prompt, WARM, max_tokens=24, seed=7))
    assert talks[0].messages[1].content == alone


def test_a_retry_gives_another_answer_unless_its_seed_is_asked_for(pair: Pair) -> None:
    conversation = talk(pair, params=WARM, seed=7)
    answers = [say(conversation, "Hi")]
    for _ in range(2):
        list(conversation.retry())
        answers.append(conversation.messages[-1])
    assert len(set(answers)) == 3 and len(conversation.messages) == 2
    assert conversation.last is not None and conversation.last.stats is not None
    list(conversation.retry(conversation.last.stats.seed))
    assert conversation.messages[-1] == answers[-1]
    list(conversation.retry(7))
    assert conversation.messages[-1] == answers[0]


def test_seeds_of_turns_differ() -> None:
    seeds = [turn_seed(3, turn, attempt) for turn in range(50) for attempt in range(20)]
    assert seeds[0] == 3
    assert len(set(seeds)) == len(seeds)
    assert turn_seed(3, 1, 0) != turn_seed(4, 1, 0)


# --- a context that is full ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> Iterator[Pair]:
    with loaded(ctx_size=256) as ready:
        assert ready.target.n_ctx == 256
        yield ready


def test_the_oldest_turns_go_whole_and_with_one_notice(small: Pair, other: Pair) -> None:
    notices: list[str] = []
    conversation = talk(small, system="You are brief.", notify=notices.append)
    everything: list[Message] = []
    drops = 0
    for turn in range(14):
        before, told = len(conversation.dropped), len(notices)
        answer = say(conversation, f"{turn}: tell me of the sea")
        everything += [Message("user", f"{turn}: tell me of the sea"), answer]
        dropped = len(conversation.dropped) - before
        assert dropped % 2 == 0
        assert len(notices) - told == (dropped > 0)
        drops += dropped > 0
        assert [*conversation.dropped, *conversation.messages] == everything
        assert answer == fresh_answer(
            other, conversation.messages[:-1], system="You are brief."
        )
        assert small.draft is not None
        assert small.draft.n_held(0) <= small.target.n_held(0) <= small.target.n_ctx
    # Each drop makes room for more than the turn that needed it.
    assert 2 <= drops <= 7
    assert "no longer shown" in notices[0]


def test_an_interrupted_turn_takes_no_others_with_it(small: Pair) -> None:
    conversation = talk(small, notify=lambda _: None)
    while not conversation.dropped:
        state = list(conversation.messages)
        say(conversation, "Tell me of the sea")
    conversation.resume(state)
    small.target.forget(0)
    Interruption(small.target, KeyboardInterrupt(), 1)
    with pytest.raises(KeyboardInterrupt):
        list(conversation.ask("Tell me of the sea"))
    assert (conversation.messages, conversation.dropped) == (state, [])


@contextmanager
def interrupted_at(line: int) -> Iterator[Callable[[], bool]]:
    """Raise KeyboardInterrupt at the n-th line of conversation.py that runs; whether it did."""
    left = line

    def each_line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return each_line

    def each_call(frame: FrameType, _event: str, _argument: object) -> Any:
        return each_line if frame.f_code.co_filename == conversation_module.__file__ else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield lambda: left < 0
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_another_one_is_dealt_with_leaves_whole_turns(
    pair: Pair, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line that runs then, one after the other."""

    def stopped(*_: object, **__: object) -> Iterator[Chunk]:
        raise KeyboardInterrupt
        yield

    conversation = talk(pair)
    say(conversation, TURNS[0])
    first = list(conversation.messages)
    was_hit, line = True, 0
    while was_hit:
        line += 1
        conversation.resume(first)
        chunks = conversation.ask(TURNS[1])
        if is_begun:
            next(chunks)
        else:
            monkeypatch.setattr(pair, "generate", stopped)
        with interrupted_at(line) as hit, contextlib.suppress(KeyboardInterrupt):
            if is_begun:
                conversation.settle()
            else:
                next(chunks)
        was_hit = hit()
        conversation.settle()
        assert conversation.messages[:2] == first
        roles = [message.role for message in conversation.messages[2:]]
        assert roles == (["user", "assistant"] if is_begun else [])
    assert line > 5


def test_stop_refuses_a_turn_that_has_no_room_and_loses_nothing(small: Pair) -> None:
    conversation = talk(small, context_full="stop")
    said: list[Message] = []
    with pytest.raises(UsageError, match=r"has \d+ tokens .* holds 256, .*--ctx-size"):
        while True:
            said = list(conversation.messages)
            say(conversation, "Tell me of the sea")
    assert conversation.messages == said and conversation.dropped == []
    assert conversation.context[0] > 256 * 3 / 4
    conversation.undo()
    say(conversation, "Hi")


@pytest.mark.parametrize("context_full", ["drop", "stop"])
@pytest.mark.parametrize("times", [1, 10])
def test_a_message_that_cannot_fit_is_refused_with_both_numbers(
    small: Pair, context_full: str, times: int
) -> None:
    conversation = talk(small, system="Brief.", context_full=context_full)
    say(conversation, "Hi")
    state = list(conversation.messages)
    with pytest.raises(UsageError, match=r"\d{3,4} tokens .* 256"):
        list(conversation.ask("sea " * 256 * times))
    assert conversation.messages == state and conversation.dropped == []
    say(conversation, "And then?")


def test_every_size_of_a_message_is_answered_or_refused(small: Pair) -> None:
    """Around the size at which nothing is left of the context for an answer."""
    answered = []
    for size in range(200, 260, 3):
        conversation = talk(small)
        try:
            say(conversation, "a" * size)
        except UsageError:
            assert conversation.messages == []
        else:
            answered.append(size)
            assert conversation.last is not None
            assert len(conversation.last.tokens) >= 16
    assert answered and answered[-1] < 257


def test_an_answer_ends_with_the_context_and_the_next_turn_works(
    small: Pair, other: Pair
) -> None:
    notices: list[str] = []
    conversation = talk(small, max_tokens=None, notify=notices.append)
    say(conversation, TURNS[0])
    assert conversation.last is not None
    assert conversation.last.finish_detail == "context full"
    assert conversation.context == (256, 256)
    conversation.max_tokens = 24
    answer = say(conversation, "Go on")
    assert len(notices) == 1 and len(conversation.messages) == 2
    assert answer == fresh_answer(other, [Message("user", "Go on")])


# --- who drafts ---------------------------------------------------------------------------------


def test_the_draft_can_be_switched_while_a_conversation_goes_on(pair: Pair, other: Pair) -> None:
    conversation = talk(pair)
    assert conversation.speculation == 3
    for choice, drafts in ((5, True), ("off", False), (1, True), (0, False)):
        conversation.speculate(choice)
        assert conversation.speculation == (choice or "off")
        asked = [*conversation.messages, Message("user", "And then?")]
        assert say(conversation, "And then?") == fresh_answer(other, asked)
        assert conversation.last is not None and conversation.last.stats is not None
        stats = conversation.last.stats
        assert (stats.draft_n > 0) == drafts
        assert max(stats.lengths) == choice if drafts else stats.lengths.keys() == {0}


@pytest.mark.parametrize(
    ("options", "first", "drafter"),
    [
        ({"draft_tokens": 2}, 2, "model and lookup"),
        ({"drafter": "model", "draft_tokens": 2}, 2, "model"),
        ({"drafter": "none"}, "off", "lookup"),
        ({}, "auto", "model and lookup"),
    ],
)
def test_auto_measures_whatever_the_pair_was_loaded_with(
    options: dict[str, Any], first: str | int, drafter: str
) -> None:
    with load(model=tiny(), draft=tiny(noise=0.05), **options) as pair:
        conversation = talk(pair)
        assert conversation.speculation == first
        for choice in ("auto", "off", "auto"):
            conversation.speculate(choice)
            say(conversation, "Hi")
            assert conversation.last is not None and conversation.last.stats is not None
            assert conversation.last.stats.drafter == (drafter if choice == "auto" else "none")
        if pair.draft is not None:
            conversation.speculate(3)
            say(conversation, "Hi")


def test_the_draft_alone_answers_without_the_target(pair: Pair) -> None:
    conversation = talk(pair)
    say(conversation, TURNS[0])
    conversation.speculate("only")
    asked = [*conversation.messages, Message("user", "And then?")]
    before = pair.target.rows_decoded
    answer = say(conversation, "And then?")
    assert pair.target.rows_decoded == before
    with loaded(draft_tokens=0) as plain:
        assert answer != fresh_answer(plain, asked)
    assert pair.draft is not None
    with loaded() as alone:
        assert alone.draft is not None and alone.draft_tokenizer is not None
        small = Pair(alone.draft, alone.draft_tokenizer, tuning.plain(), n_tokens=397)
        assert answer == fresh_answer(small, asked)
    conversation.speculate(3)
    say(conversation, "Go on")
    assert pair.target.rows_decoded > before


def test_a_draft_with_other_tokens_does_not_speak(pair: Pair) -> None:
    with llama.Model(tiny(permute=3)) as small:
        foreign = Pair(
            pair.target,
            pair.tokenizer,
            pair.speculation,
            n_tokens=397,
            draft=pair.draft,
            draft_tokenizer=small.tokenizer,
        )
        conversation = talk(foreign)
        before = conversation.speculation
        with pytest.raises(UsageError, match="has other tokens than"):
            conversation.speculate("only")
        assert conversation.speculation == before


@pytest.mark.parametrize("choice", ["fast", "", -1, 99])
def test_a_choice_that_is_none_changes_nothing(pair: Pair, choice: str | int) -> None:
    conversation = talk(pair)
    conversation.speculate(2)
    own = pair.speculation
    with pytest.raises(UsageError):
        conversation.speculate(choice)
    assert (pair.speculation, conversation.speculation) == (own, 2)


@pytest.mark.parametrize("choice", ["only", 4])
def test_without_a_draft_model_nobody_else_can_speak(other: Pair, choice: str | int) -> None:
    conversation = talk(other)
    assert conversation.speculation == "off"
    with pytest.raises(UsageError, match="no draft model is loaded"):
        conversation.speculate(choice)


# --- thinking, and the ids of an answer ---------------------------------------------------------


def test_a_tag_that_the_template_opens_begins_the_answer(pair: Pair, other: Pair) -> None:
    conversation = talk(pair, opening="<think>\n")
    answer = say(conversation, "Do not say <think>")
    assert answer.content.startswith("<think>\n")
    assert len(answer.content) > len("<think>\n")
    assert printed(pair, answer) == answer.content
    say(conversation, "Go on")
    assert conversation.last is not None and conversation.last.stats is not None
    stats = conversation.last.stats
    # The answer stands in the second prompt as it was given, tag and all.
    assert stats.prompt_cached_n >= len(answer.tokens) + stats.prompt_n // 3


def test_a_tag_that_the_user_typed_opens_nothing(pair: Pair) -> None:
    encode = pair.tokenizer.encode
    typed = encode("<think>", special=False, add_special=False)
    marker = encode("<|im_end|>", special=True, add_special=False)
    assert opening_of([5, *typed], pair.tokenizer)[0] == "<think>"
    assert opening_of([5, *typed, *marker], pair.tokenizer) == ("", ())


class Bytes:
    """A tokenizer of bytes; id 256 is an "é" and what follows it."""

    name, n_vocab = "bytes", 257
    bos: int | None = None
    end_tokens: frozenset[int] = frozenset()

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return "é!".encode() if token == 256 else bytes([token])


@pytest.mark.parametrize(
    ("tokens", "content", "kept"),
    [
        (b"ab", "ab", 2),
        ("aé".encode(), "aé", 3),
        ("aé".encode()[:-1], "a", 1),  # the limit came inside a character
        ("🙂".encode()[:3], "", 0),
        (b"ab", "a", 0),  # a stop string began inside the last token
        ([256], "é", 0),
    ],
)
def test_ids_are_kept_as_far_as_they_print_the_content(
    tokens: Sequence[int], content: str, kept: int
) -> None:
    message = Message("assistant", content, tuple(tokens))
    assert printing(message, Bytes()).tokens == tuple(tokens)[:kept]


def test_an_answer_begins_with_its_opening_only_once() -> None:
    answer = Answer(3, "<think>", (9,))
    first = answer.add(Chunk("", (Token(1, "", "bonus"),)))
    second = answer.add(Chunk("a", (Token(2, "a", "bonus"),)))
    assert (first.text, second.text) == ("<think>", "a")
    assert answer.message() == Message("assistant", "<think>a", (9, 1, 2))


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(pair: Pair, other: Pair) -> None:
    whole = fresh_answer(other, [Message("user", "Hi")]).content
    stop = whole[7:10]
    conversation = talk(pair, stop=[stop])
    answer = say(conversation, "Hi")
    assert answer.content == whole[: whole.index(stop)]
    assert printed(pair, answer) in ("", answer.content)
    asked = [*conversation.messages, Message("user", "Go on")]
    assert say(conversation, "Go on") == fresh_answer(other, asked, stop=[stop])


def test_parameters_may_change_between_turns(pair: Pair) -> None:
    conversation = talk(pair)
    greedy = say(conversation, "Hi")
    conversation.params = replace(GREEDY, logit_bias={greedy.tokens[0]: -100.0})
    list(conversation.retry())
    assert conversation.messages[-1].tokens[0] != greedy.tokens[0]
