"""A conversation with the default pair through its own chat template, against a fresh process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

import specllama
from specllama import sessions
from specllama.conversation import Conversation
from specllama.errors import SpecllamaError
from specllama.generation import Pair
from specllama.lm import Request
from specllama.markers import ChatTokenizer
from specllama.prompts import ChatFormat, Message
from specllama.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
TURNS = [
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is larger?",
    "Write one sentence about it.",
]


def load(draft_tokens: int) -> Pair:
    try:
        return specllama.load("smollm2", ctx_size=1024, draft_tokens=draft_tokens)
    except SpecllamaError as error:
        pytest.fail(f"the default pair is needed here, and scripts/check installs it: {error}")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with load(3) as ready:
        yield ready


@pytest.fixture(scope="module")
def fresh() -> Iterator[Pair]:
    with load(0) as ready:
        yield ready


def talk(pair: Pair) -> Conversation:
    tokenizer = cast(ChatTokenizer, pair.tokenizer)
    chat_format = ChatFormat.of(pair.chat_template, tokenizer, pair.target.name)
    system = "You are a helpful assistant."
    return Conversation(pair, chat_format, system=system, params=GREEDY, max_tokens=40)


def say(conversation: Conversation, text: str) -> Message:
    for _ in conversation.ask(text):
        pass
    return conversation.messages[-1]


def fresh_answer(pair: Pair, messages: Sequence[Message]) -> Message:
    pair.target.forget(0)
    conversation = talk(pair)
    conversation.resume(messages[:-1])
    return say(conversation, messages[-1].content)


def check_same(pair: Pair, asked: Sequence[Message], answer: Message, fresh: Message) -> None:
    """The same answers, but for what a fresh process itself finds about as likely.

    Kernels round differently for other numbers of rows, which moves the logits of these quantised
    weights by some tenths.
    """
    if answer == fresh:
        return
    both = list(zip(answer.tokens, fresh.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(both) if a != b), None)
    assert at is not None, "one answer is the beginning of the other"
    system = [Message("system", "You are a helpful assistant.")]
    prompt = talk(pair).chat_format.tokens([*system, *asked])
    [logits] = pair.target.logits([Request(0, [*prompt, *fresh.tokens[:at]])])
    ours, theirs = (float(logits[0][token]) for token in both[at])
    assert abs(ours - theirs) < 1


@pytest.mark.parametrize("choice", [3, "off"])
def test_four_turns_equal_fresh_processes_and_cost_their_new_tokens(
    pair: Pair, fresh: Pair, choice: str | int
) -> None:
    conversation = talk(pair)
    conversation.speculate(choice)
    pair.target.forget(0)
    used = 0
    for text in TURNS:
        asked = [*conversation.messages, Message("user", text)]
        answer = say(conversation, text)
        check_same(fresh, asked, answer, fresh_answer(fresh, asked))
        assert conversation.last is not None and conversation.last.stats is not None
        stats = conversation.last.stats
        assert stats.prompt_n - stats.prompt_cached_n <= stats.prompt_n - used + 1
        used = stats.prompt_n + stats.predicted_n
    assert "Paris" in conversation.messages[1].content
    conversation.speculate(3)


def test_a_conversation_goes_on_in_another_process(
    pair: Pair, fresh: Pair, tmp_path: Path
) -> None:
    conversation = talk(pair)
    for text in TURNS[:2]:
        say(conversation, text)
    assert sessions.save(tmp_path / "talk.json", conversation, kv=True) == []
    used = conversation.context[0]
    fresh.target.forget(0)
    again = talk(fresh)
    [drafting, notice] = sessions.load(tmp_path / "talk.json", again)
    assert "no draft model" in drafting
    assert "of the draft" in notice  # which is not loaded there
    asked = [*conversation.messages, Message("user", TURNS[2])]
    ours, theirs = say(conversation, TURNS[2]), say(again, TURNS[2])
    check_same(fresh, asked, ours, theirs)
    assert again.last is not None and again.last.stats is not None
    stats = again.last.stats
    assert stats.prompt_n - stats.prompt_cached_n <= stats.prompt_n - used + 1
