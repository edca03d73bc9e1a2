"""Facts about the tiny models that the other tests lean on, checked on the real llama.cpp."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
import pytest
import tiny as tiny_module
from numpy.typing import NDArray
from tiny import CHECKOUT, tiny, vocab_file

KINDS = ["attention", "swa", "recurrent", "hybrid"]
ROLLBACK = [("attention", {}), ("swa", {"swa_full": True}), ("hybrid", {"n_rs_seq": 8})]
TEXT = "hello the world"
UNICODE = "Zoë wrote 日本語 and 🙂🙃,\tthen\n\u0000left."

Logits = NDArray[np.float32]
Laws = NDArray[np.float64]
Opener = Callable[..., "Raw"]


class Raw:
    """A model and a context over llama.cpp's C functions, one sequence, every row with logits."""

    def __init__(self, path: Path, **context: Any) -> None:
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model is not None, f"llama.cpp cannot load {path}"
        params = lib.llama_context_default_params()
        # The most reproducible arithmetic: a float32 cache, and no float16 flash attention.
        exact = {"flash_attn_type": 0, "type_k": 0, "type_v": 0, "n_threads": 1}
        for name, value in (exact | {"n_ctx": 256, "n_threads_batch": 1} | context).items():
            setattr(params, name, value)
        self.context = lib.llama_init_from_model(self.model, params)
        assert self.context is not None, f"llama.cpp makes no context for {path}"
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        self.length = 0

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        data = text.encode()
        ids = (lib.llama_token * (len(data) + 2))()
        n = lib.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, special)
        return list(ids[:n])

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = lib.llama_token_to_piece(self.vocab, token, buffer, 64, 0, True)
        return buffer.raw[:n]

    def texts(self) -> list[bytes]:
        return [self.piece(token) for token in range(self.n_vocab)]

    def decode(self, tokens: Sequence[int]) -> Logits:
        """Logits `[len(tokens), n_vocab]` after each of the tokens, appended to the sequence."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, self.length + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
        code = lib.llama_decode(self.context, batch)
        lib.llama_batch_free(batch)
        assert code == 0
        self.length += len(tokens)
        return np.stack([self._row(row) for row in range(len(tokens))])

    def _row(self, row: int) -> Logits:
        pointer = lib.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def truncate(self, length: int) -> bool:
        done = bool(lib.llama_memory_seq_rm(self.memory, 0, length, -1))
        self.length = length if done else self.length
        return done

    def end_ids(self) -> list[int]:
        return [id for id in range(self.n_vocab) if lib.llama_vocab_is_eog(self.vocab, id)]

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        out = [int(self.decode(prompt)[-1].argmax())]
        while len(out) < n:
            out.append(int(self.decode(out[-1:])[0].argmax()))
        return out


# llama.cpp's log belongs in no test's output.
IGNORE_LOG = lib.llama_log_callback(lambda level, text, data: None)


@pytest.fixture(scope="module", autouse=True)
def _silent_llama() -> None:
    lib.llama_log_set(IGNORE_LOG, ctypes.c_void_p(0))
    lib.llama_backend_init()


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens models that close with the test."""
    with ExitStack() as stack:

        def open_model(kind: str, runtime: dict[str, Any] | None = None, **options: Any) -> Raw:
            raw = Raw(tiny(kind, **options), **(runtime or {}))
            stack.callback(raw.close)
            return raw

        yield open_model


def laws(logits: Logits) -> Laws:
    """Softmax of each row, in float64."""
    weights: Laws = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


# --- every kind decodes -------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_five_tokens_to_finite_and_different_logits(
    opened: Opener, kind: str, vocab: str
) -> None:
    logits = opened(kind, vocab=vocab).decode([97, 98, 99, 100, 101])
    assert np.isfinite(logits).all()
    assert len({row.tobytes() for row in logits}) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_logits_depend_on_the_whole_history(opened: Opener, kind: str) -> None:
    one = opened(kind).decode([97, 98, 99, 100, 101, 102])[-1]
    other = opened(kind).decode([105, 98, 99, 100, 101, 102])[-1]
    assert np.abs(one - other).max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_visits_many_tokens_and_never_ends_by_itself(opened: Opener, kind: str) -> None:
    model = opened(kind)
    text = model.greedy(model.tokenize(TEXT), 100)
    assert len(set(text)) >= 30
    assert not set(text) & set(model.end_ids())


@pytest.mark.parametrize("kind", KINDS)
def test_noise_makes_a_draft_that_is_similar_but_not_equal(opened: Opener, kind: str) -> None:
    target = opened(kind)
    prompt = target.tokenize(TEXT)
    text = prompt + target.greedy(prompt, 60)
    target_laws = laws(opened(kind).decode(text))
    acceptance = [
        np.minimum(target_laws, laws(opened(kind, noise=noise).decode(text))).sum(axis=1).mean()
        for noise in (0.2, 0.05, 0.01)
    ]
    assert acceptance == sorted(acceptance)
    assert 0.1 < acceptance[0] < 0.6
    assert 0.6 < acceptance[1] < 0.9
    assert 0.9 < acceptance[2] < 0.99


# --- what each cache can take back --------------------------------------------------------------


@pytest.mark.parametrize("n_removed", [1, 4])
@pytest.mark.parametrize(("kind", "context"), ROLLBACK)
def test_rollback_within_the_last_decode_leaves_what_a_fresh_context_holds(
    opened: Opener, kind: str, context: dict[str, Any], n_removed: int
) -> None:
    prompt = list(range(260, 310))  # longer than the sliding window
    drafted, kept = [311, 312, 313, 314, 315], [320, 321, 322]
    model = opened(kind, context)
    model.decode(prompt)
    model.decode(drafted)
    assert model.truncate(len(prompt) + 5 - n_removed)
    after = model.decode(kept)
    fresh = opened(kind, context)
    fresh.decode(prompt)
    fresh.decode(drafted[: 5 - n_removed])
    # Not bitwise: a decode of one row and one of five round differently.
    np.testing.assert_allclose(after, fresh.decode(kept), atol=1e-3)


def test_snapshots_reach_no_further_back_than_inside_the_last_decode(opened: Opener) -> None:
    """llama.cpp says yes to more and restores a wrong state: nothing but counting rows shows it."""
    model, fresh = opened("hybrid", {"n_rs_seq": 8}), opened("hybrid", {"n_rs_seq": 8})
    for each in (model, fresh):
        each.decode(list(range(260, 280)))
    model.decode([311, 312])
    assert model.truncate(20)
    assert np.abs(model.decode([320]) - fresh.decode([320])).max() > 1


def test_a_second_rollback_without_a_decode_between_is_refused(opened: Opener) -> None:
    model = opened("hybrid", {"n_rs_seq": 8})
    model.decode(list(range(260, 280)))
    assert model.truncate(18)
    assert not model.truncate(17)


@pytest.mark.parametrize(
    ("kind", "context", "n_removed"),
    [
        ("recurrent", {}, 1),
        ("recurrent", {"n_rs_seq": 8}, 1),
        ("hybrid", {}, 1),
        ("hybrid", {"n_rs_seq": 3}, 4),
    ],
)
def test_state_without_enough_snapshots_refuses_a_partial_removal(
    opened: Opener, kind: str, context: dict[str, Any], n_removed: int
) -> None:
    model = opened(kind, context)
    model.decode(list(range(260, 280)))
    assert not model.truncate(20 - n_removed)
    assert model.truncate(0)


def test_snapshots_are_clamped_to_none_where_the_architecture_has_none(opened: Opener) -> None:
    assert lib.llama_n_rs_seq(opened("recurrent", {"n_rs_seq": 8}).context) == 0
    assert lib.llama_n_rs_seq(opened("hybrid", {"n_rs_seq": 8}).context) == 8


@pytest.mark.parametrize(
    ("swa_full", "n_removed", "right"), [(False, 100, True), (False, 250, False), (True, 250, True)]
)
def test_window_cache_takes_back_only_what_it_still_holds(
    opened: Opener, swa_full: bool, n_removed: int, right: bool
) -> None:
    """llama.cpp says yes in every case; the smallest position left tells the wrong one."""
    context = {"swa_full": swa_full, "n_ctx": 1024, "n_batch": 64, "n_ubatch": 64}
    text = np.random.default_rng(0).integers(260, 390, 560).tolist()
    model, fresh = opened("swa", context), opened("swa", context | {"swa_full": True})
    for start in range(0, 560, 20):
        model.decode(text[start : start + 20])
    length = 560 - n_removed
    assert model.truncate(length)
    first_held = lib.llama_memory_seq_pos_min(model.memory, 0)
    for start in range(0, length, 20):
        fresh.decode(text[start : min(start + 20, length)])
    error = np.abs(model.decode([300]) - fresh.decode([300])).max()
    assert (first_held <= length - 32, error < 0.02) == (right, right)


# --- the vocabularies ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
def test_any_text_survives_the_tokenizer(opened: Opener, vocab: str) -> None:
    model = opened("attention", vocab=vocab, add_bos=False)
    tokens = model.tokenize(UNICODE)
    text = b"".join(map(model.piece, tokens))
    assert text.removeprefix(b" " if vocab == "spm" else b"") == UNICODE.encode()
    assert len(tokens) < len(UNICODE.encode())
    torn = [token for token in tokens if not is_utf8(model.piece(token))]
    assert len(torn) >= 8


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
def test_chat_markers_are_single_tokens_and_the_second_ends_a_turn(
    opened: Opener, vocab: str
) -> None:
    model = opened("attention", vocab=vocab, add_bos=False)
    start, end = model.tokenize("<|im_start|><|im_end|>", special=True)
    assert end in model.end_ids() and start not in model.end_ids()
    assert len(model.end_ids()) == 2
    assert len(model.tokenize("<|im_end|>")) > 1


@pytest.mark.parametrize("vocab", ["spm", "bpe"])
def test_padding_changes_no_other_logit_and_is_all_but_impossible(
    opened: Opener, vocab: str
) -> None:
    plain, padded = opened("attention", vocab=vocab), opened("attention", vocab=vocab, pad=64)
    tokens = plain.tokenize(TEXT)
    assert padded.tokenize(TEXT) == tokens
    assert padded.n_vocab == plain.n_vocab + 64
    logits = padded.decode(tokens)
    np.testing.assert_allclose(logits[:, :-64], plain.decode(tokens), atol=1e-4)
    assert laws(logits)[:, -64:].sum() < 1e-6
    # Padding has no text: llama.cpp renders an unused token as nothing.
    assert padded.texts()[-64:] == [b""] * 64


def test_padding_can_be_made_likely(opened: Opener) -> None:
    model = opened("attention", pad=64, pad_bias=0.0)
    assert laws(model.decode(model.tokenize(TEXT)))[:, -64:].sum(axis=1).mean() > 0.05


def test_noise_does_not_depend_on_padding(opened: Opener) -> None:
    plain, padded = opened("attention", noise=0.1), opened("attention", noise=0.1, pad=64)
    tokens = plain.tokenize(TEXT)
    np.testing.assert_allclose(padded.decode(tokens)[:, :-64], plain.decode(tokens), atol=1e-4)


def test_permuted_model_says_the_same_under_other_ids(opened: Opener) -> None:
    plain, permuted = opened("attention"), opened("attention", permute=5)
    new_id = {text: id for id, text in enumerate(permuted.texts())}
    # Unknown and control tokens keep their ids, as do byte tokens, whose texts letters share.
    ids = np.array([id if id < 259 else new_id[text] for id, text in enumerate(plain.texts())])
    assert sorted(ids) == list(range(plain.n_vocab)) and (ids != np.arange(ids.size)).sum() > 100
    tokens = plain.tokenize(TEXT)
    assert permuted.tokenize(TEXT) == [int(ids[token]) for token in tokens]
    logits = permuted.decode([int(ids[token]) for token in tokens])
    np.testing.assert_allclose(logits[:, ids], plain.decode(tokens), atol=1e-4)


def test_swap_exchanges_two_texts_and_no_weight(opened: Opener) -> None:
    plain, swapped = opened("attention"), opened("attention", swap=(300, 301))
    texts = plain.texts()
    texts[300], texts[301] = texts[301], texts[300]
    assert swapped.texts() == texts and texts != plain.texts()
    np.testing.assert_array_equal(swapped.decode([300, 97]), plain.decode([300, 97]))


@pytest.mark.parametrize("extra_type", ["user", "normal"])
def test_extra_tokens_have_texts_of_their_own(opened: Opener, extra_type: str) -> None:
    plain = opened("attention", vocab="bpe")
    model = opened("attention", vocab="bpe", extra=2, extra_type=extra_type)
    assert model.texts() == [*plain.texts(), b"<extra_0>", b"<extra_1>"]
    assert (model.tokenize("<extra_1>") == [plain.n_vocab + 1]) == (extra_type == "user")


def test_begin_and_end_tokens_follow_the_options(opened: Opener) -> None:
    default = opened("attention")
    assert default.tokenize("a")[0] == lib.llama_vocab_bos(default.vocab) == 1
    assert 1 not in opened("attention", add_bos=False).tokenize("a")
    without = opened("attention", vocab="bpe", bos_token=False)
    assert lib.llama_vocab_bos(without.vocab) == lib.LLAMA_TOKEN_NULL
    assert opened("attention", eos=300).end_ids() == sorted([300, *default.end_ids()])
    second = opened("attention", second_eot=True)
    assert second.end_ids() == [*default.end_ids(), default.n_vocab]


def test_context_template_and_nan_follow_the_options(opened: Opener) -> None:
    model = opened("attention", context=64, chat_template="{{ messages }}")
    assert lib.llama_model_n_ctx_train(model.model) == 64
    assert lib.llama_model_chat_template(model.model, None) == b"{{ messages }}"
    bare = opened("attention", chat_template=None)
    assert lib.llama_model_chat_template(bare.model, None) is None
    assert np.isnan(opened("attention", nan=-1).decode([97])).all()
    late = opened("attention", nan=300)
    assert np.isfinite(late.decode([97, 98])).all()
    assert np.isnan(late.decode([300])).all() and np.isnan(late.decode([97])).all()


def test_sharper_models_have_wider_margins(opened: Opener) -> None:
    def median_margin(sharp: float) -> float:
        top = np.sort(opened("attention", sharp=sharp).decode(list(range(260, 300))), axis=1)
        return float(np.median(top[:, -1] - top[:, -2]))

    assert median_margin(6.0) == pytest.approx(2 * median_margin(3.0), rel=1e-3)


# --- the files and the command ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_command_writes_the_same_bytes_as_the_helper(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    result = run_script(kind, str(path), "--seed", "3", "--no-bos", "--pad", "8")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert path.read_bytes() == tiny(kind, seed=3, add_bos=False, pad=8).read_bytes()
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--swap", "1", "9999"], "there is no token 9999"),
        (["--no-bos-token"], "use a bpe vocabulary"),
        (["--chat-template", "absent.jinja"], "absent.jinja"),
    ],
)
def test_command_refuses_in_one_sentence(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    result = run_script("attention", str(tmp_path / "model.gguf"), *arguments)
    assert result.returncode == 1
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHECKOUT / "scripts" / "make_tiny_gguf"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_helper_writes_each_set_of_options_once() -> None:
    assert tiny("attention", seed=1) == tiny("attention", seed=1)
    assert tiny("attention", seed=1) != tiny("attention", seed=2)
    assert tiny("attention", seed=1).read_bytes() != tiny("attention", seed=2).read_bytes()


def test_absent_vocabulary_file_names_the_script_that_fetches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny_module, "CHECKOUT", tmp_path)
    with pytest.raises(FileNotFoundError, match="run scripts/check"):
        vocab_file("qwen2")
