from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specllama.errors import ModelError
from specllama.vocabulary import Rule, compare, real_tokens, require_compatible

UNKNOWN, UNUSED, NORMAL, CONTROL, USER_DEFINED, BYTE, RSTRIP = 1, 2, 4, 8, 16, 32, 256
WORDS = [b"<s>", b"</s>", b"Hello", "\u0120the".encode(), b"<0x0A>", b"\xe6\xb0", b"end"]
KINDS = [CONTROL, CONTROL, NORMAL, NORMAL, BYTE, NORMAL, NORMAL]


@dataclass
class Tokens:
    """The token set of a file that is not there."""

    texts: list[bytes] = field(default_factory=lambda: list(WORDS))
    attributes: list[int] = field(default_factory=lambda: list(KINDS))
    name: str = "target.gguf"
    kind: str = "bpe"
    bos: int | None = 0
    eos: int | None = 1
    eot: int | None = None
    add_bos: bool = True
    add_eos: bool = False
    end_tokens: frozenset[int] = frozenset({1})

    @property
    def n_vocab(self) -> int:
        return len(self.texts)

    @n_vocab.setter
    def n_vocab(self, value: int) -> None:
        raise AttributeError("the number of texts")

    def token_texts(self) -> list[bytes]:
        return list(self.texts)

    def token_attributes(self) -> NDArray[np.integer[Any]]:
        return np.array(self.attributes, dtype=np.int32)


def draft(**changes: Any) -> Tokens:
    return replace(Tokens(name="draft.gguf"), **changes)


def with_ids(tokens: Tokens, texts: Sequence[bytes], attribute: int) -> Tokens:
    return replace(
        tokens,
        texts=[*tokens.texts, *texts],
        attributes=[*tokens.attributes, *[attribute] * len(texts)],
    )


def padded(tokens: Tokens, count: int, attribute: int = UNUSED) -> Tokens:
    first = tokens.n_vocab
    return with_ids(tokens, [b"[PAD%d]" % (first + i) for i in range(count)], attribute)


def rule(name: str, target: Tokens, other: Tokens) -> Rule:
    (found,) = [rule for rule in compare(target, other).rules if rule.name == name]
    return found


def test_equal_token_sets_share_every_id() -> None:
    comparison = compare(Tokens(), draft())
    assert comparison.compatible
    assert comparison.shared == len(WORDS)
    assert all(rule.ok for rule in comparison.rules)
    assert "target.gguf" in comparison.reason and "draft.gguf" in comparison.reason
    assert require_compatible(Tokens(), draft()) == len(WORDS)


def test_every_rule_is_reported() -> None:
    assert [(rule.name, rule.required) for rule in compare(Tokens(), draft()).rules] == [
        ("tokenizer type", False),
        ("number of tokens", True),
        ("token texts", True),
        ("token kinds", False),
        ("beginning of text", False),
        ("end of text", False),
        ("end of generation", False),
    ]


def test_two_swapped_texts_are_refused_with_both_models_the_id_and_both_texts() -> None:
    texts = list(WORDS)
    texts[2], texts[3] = texts[3], texts[2]
    with pytest.raises(ModelError) as refused:
        require_compatible(Tokens(), draft(texts=texts))
    for part in ("target.gguf", "draft.gguf", "id 2 ", "'Hello'", "'\u0120the'", "--drafter none"):
        assert part in str(refused.value)
    assert refused.value.exit_code == 3
    comparison = compare(Tokens(), draft(texts=texts))
    assert comparison.shared == 2
    found = rule("token texts", Tokens(), draft(texts=texts))
    assert not found.ok
    assert found.detail.startswith("differing: 2 ")


def test_the_first_five_differing_texts_are_listed() -> None:
    texts = [WORDS[0], *[b"other%d" % i for i in range(1, len(WORDS))]]
    detail = rule("token texts", Tokens(), draft(texts=texts)).detail
    assert detail.startswith("differing: 6 ")
    assert "1 '</s>' / 'other1'" in detail
    assert detail.endswith("5 b'\\xe6\\xb0' / 'other5', ...")


def test_texts_are_shown_on_one_line() -> None:
    texts = [*WORDS[:2], b"a\n\x1b[31m", *WORDS[3:]]
    reason = compare(Tokens(), draft(texts=texts)).reason
    assert r"'a\n\x1b[31m'" in reason
    assert reason.isprintable()


@pytest.mark.parametrize("id", [0, 4])
def test_a_differing_control_or_byte_token_is_refused_like_any_other(id: int) -> None:
    texts = list(WORDS)
    texts[id] = b"<other>"
    comparison = compare(Tokens(), draft(texts=texts))
    assert not comparison.compatible
    assert f"id {id} " in comparison.reason


def test_a_differing_unused_token_inside_the_vocabulary_is_refused() -> None:
    target = with_ids(with_ids(Tokens(), [b"<unused0>"], UNUSED), [b"last"], NORMAL)
    other = with_ids(with_ids(draft(), [b"<unused1>"], UNUSED), [b"last"], NORMAL)
    assert not compare(target, other).compatible


def test_differing_tokenizer_types_are_named_when_the_texts_differ() -> None:
    texts = [b"!", *WORDS[1:]]
    assert "(bpe against spm)" in compare(Tokens(), draft(kind="spm", texts=texts)).reason


@pytest.mark.parametrize("difference", [0, 64, 128, 1024, -64, -128])
def test_a_difference_of_padding_is_accepted(difference: int) -> None:
    target, other = padded(Tokens(), 128), padded(draft(), 128 + difference)
    assert target.n_vocab + difference == other.n_vocab
    comparison = compare(target, other)
    assert comparison.compatible
    assert comparison.shared == len(WORDS)
    assert all(rule.ok for rule in comparison.rules)
    detail = rule("number of tokens", target, other).detail
    assert detail == f"target: 7 of 135 rows; draft: 7 of {135 + difference} rows"


def test_padding_of_one_model_only_is_accepted() -> None:
    assert require_compatible(Tokens(), padded(draft(), 3)) == len(WORDS)
    assert require_compatible(padded(Tokens(), 3), draft()) == len(WORDS)


@pytest.mark.parametrize("attribute", [UNUSED, USER_DEFINED, UNKNOWN | RSTRIP, NORMAL])
def test_pads_with_their_own_id_are_padding_whatever_their_attributes(attribute: int) -> None:
    assert real_tokens(padded(Tokens(), 5, attribute)) == len(WORDS)


@pytest.mark.parametrize("text", [b"", b"[EMPTY_7]", b"[PAD1]", b"<|PAD7|>", b"<pad_3>"])
def test_unused_ids_without_a_text_or_with_a_numbered_pad_are_padding(text: bytes) -> None:
    assert real_tokens(with_ids(Tokens(), [text], UNUSED)) == len(WORDS)
    assert real_tokens(with_ids(Tokens(), [text], NORMAL)) == len(WORDS) + 1


@pytest.mark.parametrize("text", [b"<unused7>", b"[PAD]", b"<pad>", b"<|reserved_7|>"])
def test_other_unused_ids_are_tokens(text: bytes) -> None:
    assert real_tokens(with_ids(Tokens(), [text], UNUSED)) == len(WORDS) + 1


def test_padding_counts_only_at_the_end() -> None:
    assert real_tokens(with_ids(padded(Tokens(), 4), [b"<|im_end|>"], CONTROL)) == len(WORDS) + 5
    assert real_tokens(Tokens(texts=[], attributes=[])) == 0


@pytest.mark.parametrize(
    ("extend", "role"),
    [
        (lambda target, other, texts: (with_ids(target, texts, CONTROL), other), "target"),
        (lambda target, other, texts: (target, with_ids(other, texts, CONTROL)), "draft"),
    ],
    ids=["target", "draft"],
)
def test_extra_real_tokens_are_refused_and_named(
    extend: Callable[[Tokens, Tokens, list[bytes]], tuple[Tokens, Tokens]], role: str
) -> None:
    markers = [b"<|m%d|>" % i for i in range(6)]
    target, other = extend(Tokens(), draft(), markers)
    comparison = compare(target, other)
    assert not comparison.compatible
    assert comparison.shared == len(WORDS)
    assert f"6 tokens that only the {role} has" in comparison.reason
    assert "id 7 is" in comparison.reason
    assert "'<|m0|>'" in comparison.reason and "no token" in comparison.reason
    detail = rule("number of tokens", target, other).detail
    assert "'<|m4|>', ..." in detail and "'<|m5|>'" not in detail


def test_an_extra_token_is_shown_against_the_padding_in_its_place() -> None:
    target = with_ids(Tokens(), [b"<|im_start|>"], CONTROL)
    reason = compare(target, padded(draft(), 2)).reason
    assert "differ in 1 token that only the target has" in reason
    assert "id 7 is '<|im_start|>' in the target and '[PAD7]' in the draft" in reason


@pytest.mark.parametrize(
    ("changes", "name", "detail"),
    [
        ({"kind": "spm"}, "tokenizer type", "target: bpe; draft: spm"),
        (
            {"attributes": [NORMAL, *KINDS[1:]]},
            "token kinds",
            "differing: 1 (target / draft): 0 control / normal",
        ),
        ({"bos": 2}, "beginning of text", "target: id 0, added; draft: id 2, added"),
        ({"bos": None}, "beginning of text", "target: id 0, added; draft: none, added"),
        ({"add_bos": False}, "beginning of text", "target: id 0, added; draft: id 0, not added"),
        ({"eos": 6}, "end of text", "target: id 1, not added; draft: id 6, not added"),
        (
            {"eot": 6},
            "end of text",
            "target: id 1, not added; draft: id 1, not added, end of turn id 6",
        ),
        ({"add_eos": True}, "end of text", "target: id 1, not added; draft: id 1, added"),
        (
            {"end_tokens": frozenset({6, 1})},
            "end of generation",
            "target: ids 1; draft: ids 1, 6",
        ),
    ],
)
def test_what_the_draft_never_decides_is_only_a_warning(
    changes: dict[str, Any], name: str, detail: str
) -> None:
    comparison = compare(Tokens(), draft(**changes))
    assert comparison.compatible
    assert comparison.shared == len(WORDS)
    assert [rule.name for rule in comparison.rules if not rule.ok] == [name]
    assert rule(name, Tokens(), draft(**changes)).detail == detail


def test_attributes_of_padding_and_of_trimming_do_not_matter() -> None:
    target = padded(Tokens(), 4, UNUSED)
    other = padded(draft(attributes=[KINDS[0] | RSTRIP, *KINDS[1:]]), 4, USER_DEFINED)
    assert rule("token kinds", target, other).ok


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_file_without_a_tokenizer_is_refused(role: str) -> None:
    class Bare(Tokens):
        def token_texts(self) -> list[bytes]:
            raise AssertionError("llama.cpp aborts when asked for the text of a missing tokenizer")

    bare = Bare(name="bare.gguf", kind="none")
    assert real_tokens(bare) == len(WORDS)
    comparison = compare(bare, draft()) if role == "target" else compare(Tokens(), bare)
    assert not comparison.compatible
    assert comparison.shared == 0
    assert f"the {role} bare.gguf has no tokenizer" in comparison.reason
