"""May the tokens of a draft be taken for the tokens of a target?

A draft's ids are only useful if they mean the same in the target. Verification keeps the output
exact for any draft, so nothing here protects the output; it protects from a draft whose guesses
are noise, which would cost time and say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specllama.errors import ModelError

UNUSED = 2
"""llama.cpp's attribute of an id that no text becomes."""
BYTE = 32
"""llama.cpp's attribute of an id that stands for one byte of what has no other token."""

# The attributes that say what an id is. The others say how text around it is cut, and only the
# target cuts text.
_KINDS = {
    1: "unknown",
    UNUSED: "unused",
    4: "normal",
    8: "control",
    16: "user-defined",
    BYTE: "byte",
}
_KIND_MASK = sum(_KINDS)
# What fills a vocabulary up to the rows of its matrices: "[PAD7]" is written by the converters,
# "[EMPTY_7]" is llama.cpp's name for an empty text.
_FILLER = re.compile(rb"\[PAD\d+\]|\[EMPTY_\d+\]|<\|?pad_?\d+\|?>|", re.IGNORECASE)
_LISTED = 5
_NEXT_STEP = "choose a draft of the target's own family, or run without one (--drafter none)"


class TokenSet(Protocol):
    """What a model file says about its tokens; ids count from 0 to n_vocab - 1."""

    name: str
    """File name, for messages."""
    kind: str
    """Tokenizer type: "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2", or "none" without one."""
    n_vocab: int
    """Rows of logits, padding included."""
    bos: int | None
    eos: int | None
    eot: int | None
    add_bos: bool
    add_eos: bool
    end_tokens: frozenset[int]
    """Every id that ends a generation."""

    def token_texts(self) -> list[bytes]:
        """The text of each id as the file has it."""
        ...

    def token_attributes(self) -> NDArray[np.integer[Any]]:
        """llama.cpp's `llama_token_attr` flags of each id, `[n_vocab]`."""
        ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One question about a pair and its answer; a rule that is not required only warns."""

    name: str
    ok: bool
    detail: str
    required: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every rule with its result, and what follows from them.

    shared: ids below it mean the same in both models. In a compatible pair these are all real
    tokens; a draft's law must have no mass from there on.
    reason: one sentence, for a refused pair with the first differing id and the next step.
    """

    rules: tuple[Rule, ...]
    shared: int
    reason: str

    @property
    def compatible(self) -> bool:
        """Whether every required rule holds."""
        return all(rule.ok for rule in self.rules if rule.required)


def real_tokens(tokens: TokenSet) -> int:
    """How many leading ids are tokens of the vocabulary; padding of the matrices follows.

    Padding is recognised only at the end: "[PAD<id>]" with its own id, as converters to GGUF name
    it whatever its attributes, or an UNUSED id whose text is empty or a numbered pad. Where the
    file has no tokenizer, every row counts.
    """
    if tokens.kind == "none":
        return tokens.n_vocab
    return _count_real(tokens.token_texts(), tokens.token_attributes())


def require_compatible(target: TokenSet, draft: TokenSet) -> int:
    """The number of shared ids of a pair, see `compare`.

    Raises ModelError with the first differing id when the pair is not compatible.
    """
    comparison = compare(target, draft)
    if not comparison.compatible:
        raise ModelError(comparison.reason)
    return comparison.shared


def compare(target: TokenSet, draft: TokenSet) -> Comparison:
    """Every rule of a pair with its result.

    Required for the ids to mean the same as they stand: both have a tokenizer, the same number of
    real tokens, and the same text for each of these ids, control and unused ones included. Extra
    real tokens count, because a prompt may contain them and the draft has no id to read them by.
    Padding may differ: the draft proposes none. What fails here may still be paired token by token,
    see pairing.py.

    Warnings, because the target alone cuts text into ids, begins, ends and prints it, and the
    draft only ever reads the target's ids:
    - the tokenizer type: with equal texts it names two ways to cut text into the same tokens (the
      same family is written as "spm" by one converter and as "bpe" by another);
    - what kind an id is (control, normal, byte), which decides how it is printed;
    - BOS, EOS, EOT, whether they are added, and the ids that end a generation. Files of one family
      differ in them (Qwen3 has BOS 151643 or 11). At worst a draft that misses its own BOS
      guesses less well, or never proposes the target's end.
    """
    if "none" in (target.kind, draft.kind):
        detail = f"target: {target.kind}; draft: {draft.kind}"
        rule = Rule("tokenizer type", False, detail, required=True)
        return Comparison((rule,), 0, _no_tokenizer(target, draft))
    ours, theirs = _Real.of(target), _Real.of(draft)
    common = min(len(ours.texts), len(theirs.texts))
    differing = _differing(ours.texts, theirs.texts)
    rules = (
        _same("tokenizer type", target.kind, draft.kind),
        _count_rule(ours, theirs),
        _text_rule(ours, theirs, differing),
        _kind_rule(ours, theirs, common),
        _same("beginning of text", _beginning(target), _beginning(draft)),
        _same("end of text", _end(target), _end(draft)),
        _same("end of generation", _ids(target.end_tokens), _ids(draft.end_tokens)),
    )
    shared = differing[0] if differing else common
    return Comparison(rules, shared, _reason(ours, theirs, differing))


@dataclass(frozen=True, slots=True)
class _Real:
    """A token set read once, with its texts and attributes cut to the real tokens."""

    source: TokenSet
    texts: list[bytes]
    attributes: NDArray[np.integer[Any]]
    all_texts: list[bytes]

    @classmethod
    def of(cls, tokens: TokenSet) -> _Real:
        texts, attributes = tokens.token_texts(), tokens.token_attributes()
        n_real = _count_real(texts, attributes)
        return cls(tokens, texts[:n_real], attributes[:n_real], texts)

    def text(self, token: int) -> str:
        """What an id is, for a message; it may be padding, or beyond the vocabulary."""
        if token >= len(self.all_texts):
            return "no token"
        return _shown(self.all_texts[token])


def _count_real(texts: Sequence[bytes], attributes: NDArray[np.integer[Any]]) -> int:
    n_real = len(texts)
    while n_real and _is_padding(n_real - 1, texts[n_real - 1], int(attributes[n_real - 1])):
        n_real -= 1
    return n_real


def _is_padding(token: int, text: bytes, attributes: int) -> bool:
    if text == b"[PAD%d]" % token:
        return True
    return bool(attributes & UNUSED) and _FILLER.fullmatch(text) is not None


def _differing(ours: list[bytes], theirs: list[bytes]) -> list[int]:
    """The ids, of those that both have, whose texts differ."""
    if ours == theirs:
        return []
    pairs = zip(ours, theirs, strict=False)
    return [token for token, (our, their) in enumerate(pairs) if our != their]


def _count_rule(ours: _Real, theirs: _Real) -> Rule:
    our, their = (f"{len(real.texts)} of {real.source.n_vocab} rows" for real in (ours, theirs))
    detail = f"target: {our}; draft: {their}"
    if len(ours.texts) == len(theirs.texts):
        return Rule("number of tokens", True, detail, True)
    role, longer, shorter = _longer(ours, theirs)
    listed = _listing(range(len(shorter.texts), len(longer.texts)), longer.text)
    return Rule("number of tokens", False, f"{detail}; only the {role} has {listed}", True)


def _text_rule(ours: _Real, theirs: _Real, differing: list[int]) -> Rule:
    if not differing:
        return Rule("token texts", True, "equal", True)
    listed = _listing(differing, lambda token: f"{ours.text(token)} / {theirs.text(token)}")
    detail = f"differing: {len(differing)} (target / draft): {listed}"
    return Rule("token texts", False, detail, True)


def _kind_rule(ours: _Real, theirs: _Real, common: int) -> Rule:
    our, their = (real.attributes[:common] & _KIND_MASK for real in (ours, theirs))
    differing = np.flatnonzero(our != their).tolist()
    if not differing:
        return Rule("token kinds", True, "equal", False)
    listed = _listing(differing, lambda token: f"{_kind(our[token])} / {_kind(their[token])}")
    detail = f"differing: {len(differing)} (target / draft): {listed}"
    return Rule("token kinds", False, detail, False)


def _same(name: str, target: str, draft: str) -> Rule:
    same = target == draft
    detail = f"{target} in both" if same else f"target: {target}; draft: {draft}"
    return Rule(name, same, detail, required=False)


def _reason(ours: _Real, theirs: _Real, differing: list[int]) -> str:
    target, draft = ours.source, theirs.source
    names = f"the target {target.name} and the draft {draft.name}"
    if differing:
        first = differing[0]
        types = "" if target.kind == draft.kind else f" ({target.kind} against {draft.kind})"
        found = f"{names} have different tokens{types}, {len(differing)} in all"
    elif len(ours.texts) != len(theirs.texts):
        role, longer, shorter = _longer(ours, theirs)
        first = len(shorter.texts)
        count = len(longer.texts) - first
        extra = "1 token" if count == 1 else f"{count} tokens"
        found = f"{names} differ in {extra} that only the {role} has"
    else:
        return f"{names} share all {len(ours.texts)} tokens"
    return (
        f"{found}: id {first} is {ours.text(first)} in the target and {theirs.text(first)} in the "
        f"draft; {_NEXT_STEP}"
    )


def _no_tokenizer(target: TokenSet, draft: TokenSet) -> str:
    role, tokens = ("target", target) if target.kind == "none" else ("draft", draft)
    other = draft if role == "target" else target
    return (
        f"the {role} {tokens.name} has no tokenizer in its file, so its tokens cannot be compared "
        f"with those of {other.name}; {_NEXT_STEP}"
    )


def _longer(ours: _Real, theirs: _Real) -> tuple[str, _Real, _Real]:
    if len(ours.texts) > len(theirs.texts):
        return "target", ours, theirs
    return "draft", theirs, ours


def _listing(ids: Sequence[int], describe: Callable[[int], str]) -> str:
    """The first few ids with a description each."""
    listed = ", ".join(f"{token} {describe(token)}" for token in ids[:_LISTED])
    return listed + (", ..." if len(ids) > _LISTED else "")


def _shown(text: bytes) -> str:
    """A token's text on one line; byte-level texts stay as the file writes them."""
    try:
        return repr(text.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(text)


def _kind(attributes: int) -> str:
    names = [name for bit, name in _KINDS.items() if attributes & bit]
    return " and ".join(names) or "undefined"


def _beginning(tokens: TokenSet) -> str:
    return f"{_id(tokens.bos)}, {_added(tokens.add_bos)}"


def _end(tokens: TokenSet) -> str:
    eot = "" if tokens.eot is None else f", end of turn {_id(tokens.eot)}"
    return f"{_id(tokens.eos)}, {_added(tokens.add_eos)}{eot}"


def _id(token: int | None) -> str:
    return "none" if token is None else f"id {token}"


def _ids(tokens: frozenset[int]) -> str:
    return "ids " + ", ".join(map(str, sorted(tokens))) if tokens else "none"


def _added(added: bool) -> str:
    return "added" if added else "not added"
