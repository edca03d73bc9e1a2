"""Tokens of real files: llama.cpp's vocabulary-only models, and tiny random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import tiny, vocab_file

from specllama.errors import ModelError
from specllama.llama import Model, Tokenizer
from specllama.text import TextStream
from specllama.vocabulary import compare, require_compatible

Read = Callable[[Path], Tokenizer]

FAMILIES = {
    # name: rows, real tokens, ids that end a generation
    "qwen2": (151936, 151646, {128247, 151643, 151645}),
    "llama-bpe": (128256, 128256, {128001, 128009}),
    "llama-spm": (32000, 32000, {2}),
    "gpt-2": (50257, 50257, {50256}),
    "phi-3": (32064, 32011, {2, 32000, 32007}),
}
TEXT = "水滴 👩\u200d👩\u200d👧 \u00e9 e\u0301 🇫🇮"


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """Tokenizers of files, each loaded once."""
    with ExitStack() as models:

        @cache
        def tokenizer(path: Path) -> Tokenizer:
            return models.enter_context(Model(path, vocab_only=True)).tokenizer  # type: ignore[no-any-return]

        yield tokenizer


class Padded:
    """A real token set with more rows, as another converter or size of model would have."""

    def __init__(self, tokens: Tokenizer, rows: int) -> None:
        self._tokens = tokens
        self._added = range(tokens.n_vocab, rows)
        self.name = f"padded-{tokens.name}"
        self.kind = tokens.kind
        self.n_vocab = rows
        self.bos, self.eos, self.eot = tokens.bos, tokens.eos, tokens.eot
        self.add_bos, self.add_eos = tokens.add_bos, tokens.add_eos
        self.end_tokens = tokens.end_tokens

    def token_texts(self) -> list[bytes]:
        return [*self._tokens.token_texts(), *[b"[PAD%d]" % id for id in self._added]]

    def token_attributes(self) -> NDArray[np.integer[Any]]:
        unused = np.full(len(self._added), 2, np.int32)
        return np.concatenate([self._tokens.token_attributes(), unused])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_real_file_is_compatible_with_itself(name: str, read: Read) -> None:
    tokens = read(vocab_file(name))
    rows, real, ends = FAMILIES[name]
    assert tokens.n_vocab == rows
    assert set(tokens.end_tokens) == ends
    comparison = compare(tokens, tokens)
    assert comparison.compatible
    assert comparison.shared == real
    assert all(rule.ok for rule in comparison.rules)


@pytest.mark.parametrize(("one", "two"), list(pairwise([*FAMILIES, "qwen2"])))
def test_different_families_are_refused(one: str, two: str, read: Read) -> None:
    target, draft = read(vocab_file(one)), read(vocab_file(two))
    with pytest.raises(ModelError) as refused:
        require_compatible(target, draft)
    first = compare(target, draft).shared
    assert target.token_texts()[:first] == draft.token_texts()[:first]
    for part in (target.name, draft.name, f"id {first} is "):
        assert part in str(refused.value)


def test_phi_3_names_its_first_id_that_llama_lacks(read: Read) -> None:
    comparison = compare(read(vocab_file("phi-3")), read(vocab_file("llama-spm")))
    assert comparison.shared == 32000
    assert "id 32000 is '<|endoftext|>' in the target and no token in the draft" in (
        comparison.reason
    )


def test_the_paddings_of_one_family_are_accepted(read: Read) -> None:
    tokens = read(vocab_file("qwen2"))
    for target, draft in (
        (tokens, Padded(tokens, 152064)),
        (Padded(tokens, 152064), tokens),
    ):
        assert require_compatible(target, draft) == 151646
        assert all(rule.ok for rule in compare(target, draft).rules)


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
@pytest.mark.parametrize("pad", [0, 64, 192, 256, 1152])
def test_tiny_models_differing_in_padding_are_accepted(vocab: str, pad: int, read: Read) -> None:
    target = read(tiny(vocab=vocab, pad=128))
    draft = read(tiny(vocab=vocab, pad=pad))
    assert draft.n_vocab - target.n_vocab == pad - 128
    assert require_compatible(target, draft) == target.n_vocab - 128
    assert require_compatible(draft, target) == target.n_vocab - 128


def test_tiny_models_with_two_tokens_swapped_are_refused(read: Read) -> None:
    target = read(tiny())
    first, second = 270, 280
    texts = [text.decode() for text in target.token_texts()]
    draft = read(tiny(swap=(first, second)))
    assert draft.n_vocab == target.n_vocab
    with pytest.raises(ModelError) as refused:
        require_compatible(target, draft)
    message = str(refused.value)
    assert target.name in message and draft.name in message
    assert f"id {first} is {texts[first]!r} in the target and {texts[second]!r}" in message
    [rule] = [rule for rule in compare(target, draft).rules if rule.name == "token texts"]
    assert rule.detail.startswith("differing: 2 ")


def test_tiny_models_with_permuted_tokens_are_refused(read: Read) -> None:
    assert not compare(read(tiny()), read(tiny(permute=3))).compatible


@pytest.mark.parametrize("extra_type", ["user", "normal"])
def test_tiny_models_with_extra_tokens_are_refused(extra_type: str, read: Read) -> None:
    plain = read(tiny(pad=64))
    more = read(tiny(extra=6, extra_type=extra_type, pad=64))
    comparison = compare(more, plain)
    assert not comparison.compatible
    assert comparison.shared == plain.n_vocab - 64
    assert "6 tokens that only the target has" in comparison.reason
    assert "'<extra_0>'" in comparison.reason


def test_tiny_models_differing_in_special_tokens_only_get_warnings(read: Read) -> None:
    target = read(tiny(add_bos=True))
    draft = read(tiny(add_bos=False, eos=5))
    comparison = compare(target, draft)
    assert comparison.compatible
    assert comparison.shared == target.n_vocab
    failed = [rule.name for rule in comparison.rules if not rule.ok]
    assert failed == ["beginning of text", "end of text", "end of generation"]


@pytest.mark.parametrize("name", ["qwen2", "llama-bpe"])
def test_streamed_tokens_give_whole_code_points_at_once(name: str, read: Read) -> None:
    tokens = read(vocab_file(name))
    pieces = [tokens.piece(id) for id in tokens.encode(TEXT, special=False, add_special=False)]
    assert len(pieces) > len(TEXT.split())
    assert any(not _is_text(piece) for piece in pieces), "no token ends inside a character"
    stream, sent, shown = TextStream(), b"", ""
    for piece in pieces:
        shown += stream.feed(piece)
        sent += piece
        assert shown == sent.decode("utf-8", "ignore")
    assert shown + stream.flush() == TEXT


def test_streamed_sentencepiece_tokens_are_the_decode_of_all(read: Read) -> None:
    tokens = read(vocab_file("llama-spm"))
    for prompt, answer in (("1, 2,", " 3,  4\n 水滴 👧"), ("Say", "hello"), ("a\n", " b")):
        before = tokens.encode(prompt, special=False, add_special=True)
        whole = b"".join(tokens.piece(id) for id in before).decode()
        ids = tokens.encode(prompt + answer, special=False, add_special=True)
        assert ids[: len(before)] == before
        stream = TextStream()
        shown = "".join([stream.feed(tokens.piece(id)) for id in ids[len(before) :]])
        assert shown + stream.flush() == answer
        assert whole == f" {prompt}"


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
