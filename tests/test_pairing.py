"""Vocabularies of real files side by side: what is shared, and pairs of models that use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import specllama
from tiny import tiny, vocab_file
from toy_tokenizer import CONTROL, ToyTokenizer

import specllama as package
from specllama.errors import ModelError
from specllama.llama import Model, Tokenizer
from specllama.pairing import Speller, join, pair_tokens
from specllama.sampling import SamplingParams
from specllama.vocabulary import real_tokens
from specllama.vocabulary_map import PairedIds, SharedIds

Read = Callable[[Path], Tokenizer]
GREEDY = SamplingParams(temperature=0)
TEXT = "The old railway, 1889:\n\tdef f(x): return x  # 水滴 👩\u200d👧 \u00e9 e\u0301\n"
FAMILIES = ("qwen2", "llama-bpe", "llama-spm", "gpt-2", "phi-3")


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """Tokenizers of files, each loaded once."""
    with ExitStack() as models:

        @cache
        def tokenizer(path: Path) -> Tokenizer:
            return models.enter_context(Model(path, vocab_only=True)).tokenizer  # type: ignore[no-any-return]

        yield tokenizer


def printed(tokens: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokens.piece(token) for token in ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_vocabulary_and_itself_need_no_map(name: str, read: Read) -> None:
    tokens = read(vocab_file(name))
    joint = join(tokens, tokens)
    assert joint.is_same and joint.coverage == 1
    assert isinstance(joint.map, SharedIds)
    assert joint.map.n_shared == real_tokens(tokens)


@pytest.mark.parametrize(
    ("target", "draft", "coverage"),
    [
        # Byte-level vocabularies of the same style share most words, in whatever order.
        ("qwen2", "llama-bpe", 0.97),
        ("llama-bpe", "qwen2", 0.97),
        ("llama-bpe", "gpt-2", 0.8),
        ("gpt-2", "llama-spm", 0.7),
        ("llama-spm", "qwen2", 0.7),
        ("phi-3", "llama-spm", 0.98),
    ],
)
def test_different_families_share_what_prints_the_same(
    target: str, draft: str, coverage: float, read: Read
) -> None:
    ours, theirs = read(vocab_file(target)), read(vocab_file(draft))
    joint = join(ours, theirs)
    assert not joint.is_same
    assert coverage < joint.coverage <= 1
    assert isinstance(joint.map, PairedIds)
    pairs = joint.map.to_target
    assert pairs.size == real_tokens(theirs)
    rng = np.random.default_rng(1)
    for their in rng.choice(np.flatnonzero(pairs >= 0), 500, replace=False).tolist():
        if theirs.piece(their):
            assert ours.piece(int(pairs[their])) == theirs.piece(their)
    for their in rng.permutation(np.flatnonzero(pairs < 0))[:100].tolist():
        text = theirs.piece(their)
        assert not text or all(ours.piece(token) != text for token in near(ours, text))


def near(tokens: Tokenizer, text: bytes) -> list[int]:
    """What the tokenizer makes of a text, if it is one: an equal token would be among it."""
    try:
        return tokens.encode(text.decode(), special=False, add_special=False)
    except UnicodeDecodeError:
        return []


@pytest.mark.parametrize("target", FAMILIES)
@pytest.mark.parametrize("draft", FAMILIES)
def test_the_draft_reads_the_same_bytes(target: str, draft: str, read: Read) -> None:
    ours, theirs = read(vocab_file(target)), read(vocab_file(draft))
    ids = join(ours, theirs).map
    tokens = ours.encode(TEXT, special=False, add_special=False)
    shown = ids.read(0, tokens)
    assert printed(theirs, shown) == printed(ours, tokens)
    # Cut anywhere, also inside a character.
    for end in range(1, len(tokens)):
        assert printed(theirs, ids.read(1, tokens[:end])) == printed(ours, tokens[:end])


def test_markers_are_paired_by_name_and_by_role(read: Read) -> None:
    ours, theirs = read(vocab_file("llama-spm")), read(vocab_file("qwen2"))
    pairs = pair_tokens(ours, theirs)
    assert theirs.eos is not None and ours.eos is not None
    ends = {int(pairs[token]) for token in (theirs.eos, theirs.eot) if token is not None}
    assert ours.eos in ends
    same = pair_tokens(theirs, theirs)
    assert same.tolist() == list(range(real_tokens(theirs)))


def toys() -> tuple[ToyTokenizer, ToyTokenizer]:
    ours = ToyTokenizer({"<s>": CONTROL, "<end>": CONTROL, "<q>": CONTROL}, bos="<s>", eos="<end>")
    theirs = ToyTokenizer({"<q>": CONTROL, "</s>": CONTROL, "<s>": CONTROL}, bos="<s>", eos="</s>")
    for toy in (ours, theirs):
        toy.kind, toy.eot, toy.add_eos = "toy", None, False  # type: ignore[attr-defined]
    return ours, theirs


def test_a_marker_with_another_name_is_paired_by_its_role() -> None:
    ours, theirs = toys()
    pairs = pair_tokens(ours, theirs)  # type: ignore[arg-type]
    for their, our in (("<q>", "<q>"), ("</s>", "<end>"), ("<s>", "<s>")):
        assert pairs[theirs.id[their]] == ours.id[our]
    assert pairs[:257].tolist() == list(range(257))


def test_what_its_tokenizer_would_change_is_spelt_by_hand(read: Read) -> None:
    """It puts a space before every text."""
    ours, spm = read(vocab_file("qwen2")), read(vocab_file("llama-spm"))
    spell = Speller(ours, spm)
    for text in ("llo", " hello", "\n", "  x", "水"):
        tokens = ours.encode(text, special=False, add_special=False)
        assert printed(spm, spell(tokens)) == text.encode()
    parts = ours.encode("𓀀", special=False, add_special=False)
    assert len(parts) > 1
    assert printed(spm, spell(parts[:1])) == ours.piece(parts[0])


def test_a_file_without_tokenizer_and_one_without_common_tokens_are_refused() -> None:
    ours, theirs = toys()
    theirs._bytes[:257] = [b"\x00" + bytes([byte % 256]) for byte in range(257)]
    with pytest.raises(ModelError, match="could propose 0 % of ordinary text"):
        join(ours, theirs)  # type: ignore[arg-type]
    theirs.kind = "none"  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match="no tokenizer"):
        join(ours, theirs)  # type: ignore[arg-type]


# Pairs of tiny models: the target's options, the draft's, and whether the ids need no gathering.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "permuted": ({}, {"permute": 3}, False),
    "target permuted": ({"permute": 5}, {}, False),
    "two tokens swapped": ({}, {"swap": (300, 301)}, False),
    "more tokens in the draft": ({}, {"extra": 6, "extra_type": "normal"}, True),
    "more tokens in the target": ({"extra": 6}, {}, False),
    "both": ({"extra": 6, "pad": 64}, {"permute": 2, "pad": 128}, False),
    "another tokenizer": ({}, {"vocab": "bpe"}, False),
    "the other way round": ({"vocab": "bpe"}, {}, False),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_with_other_vocabularies_say_so_and_speak_as_the_target(name: str) -> None:
    big, small, is_shared = PAIRS[name]
    target, draft = tiny(**big), tiny(**small, noise=0.05)
    prompt = "the <extra_2> old and of that it was\n ✓ 字"
    with (
        package.load(
            model=target, draft=draft, draft_tokens=3, ctx_size=256, verifier="block"
        ) as pair,
        package.load(model=target, drafter="none", ctx_size=256) as alone,
    ):
        assert any("other tokens than the target" in notice for notice in pair.notices)
        drafter = pair.speculation.drafter
        assert isinstance(drafter.vocabulary, SharedIds) == is_shared  # type: ignore[attr-defined]
        chunks = [list(one.generate(prompt, GREEDY, max_tokens=80)) for one in (pair, alone)]
    spoken, plain = ([t.id for chunk in one for t in chunk.tokens] for one in chunks)
    assert spoken == plain and len(plain) > 0
    stats = chunks[0][-1].stats
    assert stats is not None and stats.draft_n > 0 and stats.draft_failures == 0
    if "permuted" in name or name == "more tokens in the draft":
        # The same model under other ids is as good a draft as ever.
        assert stats.acceptance > 0.5


def test_a_permuted_copy_of_the_target_guesses_all_right() -> None:
    with package.load(
        model=tiny(), draft=tiny(permute=3), draft_tokens=4, ctx_size=256, verifier="block"
    ) as pair:
        params = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
        for seed in range(3):
            *_, last = pair.generate("the old", params, max_tokens=100, seed=seed)
            assert last.stats is not None
            assert last.stats.acceptance > 0.97


def test_check_says_what_is_shared_and_what_it_costs() -> None:
    result = specllama("check", str(tiny()), str(tiny(vocab="bpe")))
    assert (result.code, result.err) == (0, "")
    [line] = [line for line in result.text.splitlines() if "shared tokens" in line]
    assert line.startswith("note ")
    assert "% of ordinary text" in line and "of the acceptance to be lost" in line
    assert "NO " not in result.text
    same = specllama("check", str(tiny()), str(tiny(noise=0.1)))
    [line] = [line for line in same.text.splitlines() if "shared tokens" in line]
    assert line.startswith("ok ") and line.endswith("with equal ids")
