"""What a model thinks and what it says, over every way to cut the text."""

from __future__ import annotations

import pytest

from specllama.thinking import TAGS, Piece, ThinkingStream, final, left_open, split

WHOLE = "\n<think>\nWhat is <b>it</b>? </thin no\n</think>\n\nIt is 4.<think> no </think>"


def fed(parts: list[str]) -> list[Piece]:
    """The pieces of a text that arrives in parts, neighbours of one kind joined."""
    stream = ThinkingStream()
    pieces = [piece for part in parts for piece in stream.feed(part)] + stream.flush()
    joined: list[Piece] = []
    for piece in pieces:
        assert piece.text
        if joined and joined[-1].kind == piece.kind:
            piece = Piece(piece.kind, joined.pop().text + piece.text)
        joined.append(piece)
    return joined


def test_thinking_and_answer_are_told_apart_with_the_space_around_the_tags() -> None:
    assert split(WHOLE) == [
        ("tag", "\n<think>\n"),
        ("thinking", "What is <b>it</b>? </thin no\n"),
        ("tag", "</think>\n\n"),
        ("answer", "It is 4.<think> no </think>"),
    ]


def test_it_does_not_matter_how_the_text_is_cut() -> None:
    for first in range(len(WHOLE) + 1):
        for second in range(first, len(WHOLE) + 1):
            parts = [WHOLE[:first], WHOLE[first:second], WHOLE[second:]]
            assert fed(parts) == split(WHOLE), parts
    assert fed(list(WHOLE)) == split(WHOLE)


@pytest.mark.parametrize(("opening", "close"), TAGS)
def test_every_tag_is_known_character_by_character(opening: str, close: str) -> None:
    text = f"{opening}so{close}hi"
    wanted = [("tag", opening), ("thinking", "so"), ("tag", close), ("answer", "hi")]
    assert fed(list(text)) == wanted == split(text)
    assert left_open(f"user: x\nassistant: {opening}\n") == f"{opening}\n"


def test_an_answer_in_a_channel_of_its_own_has_no_thinking() -> None:
    text = "<|channel|>final<|message|>It is 4.<|channel|>"
    wanted = [("tag", "<|channel|>final<|message|>"), ("answer", "It is 4.<|channel|>")]
    assert fed(list(text)) == wanted == split(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|channel|>analysis<|message|>So?<|start|>assistant<|channel|>final<|message|>4.", "4."),
        ("<|channel|>final<|message|>4.", "4."),
        ("<|channel|>analysis<|message|>So?<|start|>assis", ""),
        ("<|channel|>elsewhere<|message|>4.", "<|channel|>elsewhere<|message|>4."),
        ("It is <|channel|>final<|message|>", "It is <|channel|>final<|message|>"),
        ("<think>So?</think>4.", "<think>So?</think>4."),
    ],
)
def test_only_what_an_answer_with_channels_says_is_told_to_the_next_turn(
    text: str, said: str
) -> None:
    assert final(text) == said


@pytest.mark.parametrize(
    "text",
    ["", " ", "Hi", "Write <think> to begin.", "x</think>y", "<", "<thin", "<thinx>", "\n <b>"],
)
def test_text_that_does_not_begin_with_a_tag_is_the_answer(text: str) -> None:
    assert fed(list(text)) == ([Piece("answer", text)] if text else [])


@pytest.mark.parametrize("end", ["", " a", " a </", " a </think", "\n"])
def test_thinking_that_is_never_ended_is_thinking(end: str) -> None:
    pieces = fed(list("<think>" + end))
    assert "".join(piece.text for piece in pieces) == "<think>" + end
    assert {piece.kind for piece in pieces[1:]} <= {"thinking"}


def test_thinking_about_nothing_leaves_only_tags() -> None:
    assert split("<think>\n\n</think>\n\nHi") == [
        ("tag", "<think>\n\n</think>\n\n"),
        ("answer", "Hi"),
    ]


def test_text_leaves_as_soon_as_it_is_no_tag() -> None:
    stream = ThinkingStream()
    assert stream.feed("<thi") == []
    assert stream.feed("rd") == [("answer", "<third")]
    assert stream.feed("<think>") == [("answer", "<think>")]
    stream = ThinkingStream()
    assert stream.feed("<think>ab</th") == [("tag", "<think>"), ("thinking", "ab")]
    assert stream.is_thinking
    assert stream.feed("e</think") == [("thinking", "</the")]
    assert stream.feed("> x") == [("tag", "</think> "), ("answer", "x")]
    assert not stream.is_thinking


@pytest.mark.parametrize(
    "prompt", ["", "say <think>\nassistant\n", "<think>\n\n</think>\n\n", "<think>a", "<think"]
)
def test_a_prompt_that_does_not_end_with_a_tag_opens_nothing(prompt: str) -> None:
    assert left_open(prompt) == ""
