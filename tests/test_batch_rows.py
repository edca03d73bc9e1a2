"""Lines of a batch's input: what is a row, what is not, and how that is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specllama.batch_rows import Row, parse
from specllama.batch_values import CHAT, COMPLETION, PLAIN, RowError
from specllama.prompts import Message
from specllama.sampling import SamplingParams


def row(**values: Any) -> Row:
    return parse(json.dumps({"id": "a", "prompt": "hello", **values}).encode())


def refused(data: bytes | dict[str, Any]) -> RowError:
    with pytest.raises(RowError) as error:
        parse(data if isinstance(data, bytes) else json.dumps(data).encode())
    return error.value


def test_a_row_with_a_prompt() -> None:
    found = row(prompt="täglich")
    assert (found.id, found.prompt, found.messages, found.style) == ("a", "täglich", (), PLAIN)
    assert found.params(SamplingParams()) == SamplingParams()


def test_a_row_with_messages() -> None:
    found = row(prompt=None, messages=[{"role": "user", "content": "hi"}])
    assert found.prompt is None
    assert found.messages == (Message("user", "hi"),)


def test_a_prompt_of_token_ids() -> None:
    assert row(prompt=[1, 2, 3]).prompt == (1, 2, 3)


def test_what_a_row_says_goes_before_the_defaults() -> None:
    found = row(
        temperature=0, top_k=3, top_p=0.5, min_p=0, repeat_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.2, repeat_last_n=7, logit_bias={"5": -1.5}, max_tokens=9, seed=4,
        stop=["x", "y"], ignore_eos=True,
    )  # fmt: skip
    assert found.params(SamplingParams(temperature=2)) == SamplingParams(
        0.0, 3, 0.5, 0.0, 1.1, 0.1, 0.2, 7, {5: -1.5}
    )
    assert (found.max_tokens, found.seed, found.stop, found.ignore_eos) == (9, 4, ("x", "y"), True)
    assert row(stop="x").stop == ("x",)
    assert row(stop=[]).stop == ()


def test_null_is_not_given() -> None:
    found = row(temperature=None, stop=None, seed=None)
    assert (found.overrides, found.stop, found.seed) == ({}, None, None)


@pytest.mark.parametrize(
    "data, code",
    [
        (b"{", "invalid_json"),
        (b'{"id": "a", "prompt": "x"} {}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"id": "a", "prompt": "x", "seed": ' + b"1" * 5000 + b"}", "invalid_json"),
        (b"\0", "invalid_json"),
        (b"3", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"[]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"id": "a", "prompt": "x", "prompt": "y"}', "invalid_json"),
        (b'{"id": "a", "prompt": "\xff"}', "invalid_utf8"),
        (b'{"id": "a", "prompt": "\\ud83d"}', "invalid_text"),
        (b'{"id": "\\ud83d", "prompt": "x"}', "invalid_text"),
        (b'{"id": "a", "messages": [{"role": "user", "content": "\\udc00"}]}', "invalid_text"),
    ],
)
def test_a_line_that_is_no_row(data: bytes, code: str) -> None:
    assert refused(data).code == code


@pytest.mark.parametrize(
    "values, code, word",
    [
        ({"id": None}, "missing_id", "no"),
        ({"id": 7}, "invalid_id", "number"),
        ({"id": ""}, "invalid_id", "empty"),
        ({"id": ["a"]}, "invalid_id", "list"),
        ({"prompt": None}, "invalid_request", "no prompt"),
        ({"prompt": 3}, "invalid_request", "number"),
        ({"prompt": [1, "x"]}, "invalid_request", "list"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid_request", "both"),
        ({"temperatur": 1}, "unknown_key", "temperature"),
        ({"zzz": 1}, "unknown_key", "zzz"),
        ({"temperature": "1"}, "invalid_parameter", "text"),
        ({"temperature": True}, "invalid_parameter", "truth"),
        ({"top_k": 1.5}, "invalid_parameter", "whole"),
        ({"max_tokens": -2}, "invalid_parameter", "-1"),
        ({"max_tokens": 1, "n_predict": 2}, "invalid_parameter", "twice"),
        ({"seed": 1.0}, "invalid_parameter", "whole"),
        ({"stop": [1]}, "invalid_parameter", "text"),
        ({"stop": ""}, "invalid_parameter", "empty"),
        ({"ignore_eos": 1}, "invalid_parameter", "true"),
        ({"logit_bias": {"x": 1}}, "invalid_parameter", "token"),
        ({"logit_bias": [1]}, "invalid_parameter", "list"),
        ({"top_p": 10**400}, "invalid_parameter", "large"),
        ({"logit_bias": {" 5": 1}}, "invalid_parameter", '" 5"'),
        ({"logit_bias": {"5": True}}, "invalid_parameter", "truth"),
        ({"logit_bias": {"5": 1, "05": 2}}, "invalid_parameter", "twice"),
        ({"prompt": []}, "invalid_request", "empty"),
        ({"prompt": ["a", "b"]}, "invalid_request", "several"),
        ({"prompt": [True]}, "invalid_request", "list"),
    ],
)
def test_a_row_that_is_not_right(values: dict[str, Any], code: str, word: str) -> None:
    error = refused({"id": "a", "prompt": "hello", **values})
    assert error.code == code
    assert word in error.message
    assert error.id == (None if code.endswith("_id") else "a")


@pytest.mark.parametrize(
    "messages, code",
    [
        ([], "invalid_request"),
        ("hi", "invalid_request"),
        (["hi"], "invalid_messages"),
        ([{"content": "hi"}], "invalid_messages"),
        ([{"role": "user", "content": None}], "invalid_messages"),
        ([{"role": "user", "content": 3}], "invalid_messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "invalid_messages"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "unsupported_parameter"),
        ([{"role": "user", "content": "hi", "images": ["aGk="]}], "unsupported_parameter"),
    ],
)
def test_messages_that_are_not_right(messages: Any, code: str) -> None:
    assert refused({"id": "a", "messages": messages}).code == code


def test_what_a_message_has_besides_its_text_is_left_out_if_it_is_nothing() -> None:
    nothing: dict[str, Any] = {"refusal": None, "tool_calls": [], "audio": None}
    said = {"role": "assistant", "content": "hi", "name": "Ann", **nothing}
    found = row(prompt=None, messages=[said])
    assert found.messages == (Message("assistant", "hi"),)


@pytest.mark.parametrize("key", ["\ud83d", "x" * 1_000_000, "a\x1b[2Jb"])
def test_what_is_told_of_a_key_can_be_shown(key: str) -> None:
    message = refused({"id": "a", "prompt": "x", key: 1}).message
    assert len(message.encode("utf-8")) < 200
    assert message.isprintable()


def test_a_content_in_parts_is_their_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
    found = row(prompt=None, messages=[{"role": "user", "content": parts}])
    assert found.messages == (Message("user", "one two"),)


def openai(url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {
        "custom_id": "a", "method": "POST", "url": url, "body": {"model": "gpt", **given, **body}
    }  # fmt: skip


def test_rows_of_openai() -> None:
    found = parse(json.dumps(openai(temperature=0, max_completion_tokens=5, n=1)).encode())
    assert (found.id, found.style, found.model, found.max_tokens) == ("a", CHAT, "gpt", 5)
    assert found.messages == (Message("user", "hi"),)
    assert found.overrides == {"temperature": 0}
    found = parse(json.dumps(openai(COMPLETION, stop="x", stream=False)).encode())
    assert (found.style, found.prompt, found.stop) == (COMPLETION, "hi", ("x",))
    idle: dict[str, Any] = {"parallel_tool_calls": True, "modalities": ["text"], "functions": []}
    assert parse(json.dumps(openai(**idle)).encode()).overrides == {}
    body = openai(messages=[{"role": "developer", "content": "be"}], user="me", tools=[])
    assert parse(json.dumps(body).encode()).messages == (Message("system", "be"),)


@pytest.mark.parametrize(
    "change, code",
    [
        ({"custom_id": None}, "missing_id"),
        ({"custom_id": 3}, "invalid_id"),
        ({"method": "GET"}, "invalid_request"),
        ({"url": "/v1/embeddings"}, "invalid_request"),
        ({"body": None}, "invalid_request"),
        ({"body": {}}, "invalid_request"),
        ({"other": 1}, "unknown_key"),
        ({"body": {"prompt": "hi"}}, "invalid_request"),
        (openai(n=2), "unsupported_parameter"),
        (openai(stream=True), "unsupported_parameter"),
        (openai(tools=[{"type": "function"}]), "unsupported_parameter"),
        (openai(response_format={"type": "json_object"}), "unsupported_parameter"),
        (openai(nonsense=1), "unknown_key"),
        ({"method": None}, "invalid_request"),
        ({"url": None}, "invalid_request"),
        ({"url": ["/v1/completions"]}, "invalid_request"),
        (openai(reasoning_effort="high"), "unsupported_parameter"),
        (openai(audio={"voice": "x"}), "unsupported_parameter"),
    ],
)
def test_rows_of_openai_that_are_not_right(change: dict[str, Any], code: str) -> None:
    error = refused({**openai(), **change})
    assert (error.code, error.style) == (code, CHAT)


def test_the_digest_is_that_of_what_the_row_says() -> None:
    assert row().digest == row(id="b").digest
    texts = [b'{"id":"a","prompt":"x","seed":1}', b'{"seed":1, "prompt":"x", "id":"a"}']
    assert parse(texts[0]).digest == parse(texts[1]).digest
    different = [row(), row(prompt="x"), row(seed=1), row(seed=2), row(temperature=1)]
    assert len({found.digest for found in different}) == len(different)


def test_a_row_in_another_format_is_another_row() -> None:
    own = parse(b'{"id": "a", "prompt": "hi"}')
    other = parse(json.dumps(openai(COMPLETION)).encode().replace(b'"model": "gpt", ', b""))
    assert (own.prompt, own.id) == (other.prompt, other.id)
    assert own.digest != other.digest
