"""The edge to llama.cpp, on real tiny files: logits, rollback, limits, life cycle, vocabulary."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import environment
from rounding import assert_close
from tiny import tiny, vocab_file

from specllama.errors import DecodeError, ModelError, RollbackError, SpecllamaError, UsageError
from specllama.llama import Context, Model, Tokenizer, requantise
from specllama.lm import CachedLM, Request, Rows

TEXT = list(range(262, 330))

Opener = Callable[..., Context]


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with Model(tiny("attention")) as opened:
        yield opened


@pytest.fixture
def opened(model: Model) -> Iterator[Opener]:
    """Opens contexts that close with the test, of the plain model or of `tiny` options."""
    with ExitStack() as stack:

        def open_context(kind: str | None = None, **options: Any) -> Context:
            of = model if kind is None else stack.enter_context(Model(tiny(kind)))
            exact = {"n_ctx": 256, "threads": 1, "kv_type": "f32", "flash_attention": False}
            made = Context(of, **{**exact, **options})
            stack.callback(made.close)
            return made

        yield open_context


def logits_one_by_one(context: Context, tokens: list[int], slot: int = 0) -> Any:
    """Logits after each token, each from a decode of its own. [n, n_vocab]"""
    rows = [context.decode([Rows(slot, i, [t], 1)])[0].copy() for i, t in enumerate(tokens)]
    return np.concatenate(rows)


# --- decode -------------------------------------------------------------------------------------


def test_rows_of_one_decode_equal_single_decodes(opened: Opener) -> None:
    single = logits_one_by_one(opened(), TEXT[:20])
    [rows] = opened().decode([Rows(0, 0, TEXT[:20], 20)])
    assert rows.shape == (20, opened().n_vocab) and rows.dtype == np.float32
    assert_close(rows, single)
    # Rows that were exchanged or shifted would differ by far more than the tolerance.
    assert np.abs(np.diff(single, axis=0)).max(axis=1).min() > 0.5


def test_only_the_last_rows_that_are_asked_for_come_back(opened: Opener) -> None:
    [whole] = opened().decode([Rows(0, 0, TEXT[:8], 8)])
    context = opened()
    [last] = context.decode([Rows(0, 0, TEXT[:8], 3)])
    assert_close(last, whole[5:])
    [none] = context.decode([Rows(0, 8, TEXT[8:10], 0)])
    assert none.shape == (0, context.n_vocab)
    # What an earlier batch asked for is forgotten.
    [one] = context.decode([Rows(0, 10, TEXT[10:18], 1)])
    [longer] = opened().decode([Rows(0, 0, TEXT[:18], 1)])
    assert_close(one, longer)


def test_a_batch_over_several_slots_gives_each_sequence_its_own_rows(opened: Opener) -> None:
    context = opened(n_slots=3)
    context.decode([Rows(1, 0, TEXT[10:14], 0)])
    batch = [
        Rows(0, 0, TEXT[:5], 2),
        Rows(1, 4, TEXT[14:20], 1),
        Rows(2, 0, TEXT[30:33], 3),
    ]
    rows = [r.copy() for r in context.decode(batch)]
    assert [context.length(slot) for slot in range(3)] == [5, 10, 3]
    for got, tokens in zip(rows, (TEXT[:5], TEXT[10:20], TEXT[30:33]), strict=True):
        alone = logits_one_by_one(opened(), tokens)
        assert_close(got, alone[-len(got) :])


def test_logits_cannot_be_written(opened: Opener) -> None:
    [rows] = opened().decode([Rows(0, 0, TEXT[:2], 2)])
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1.0
    with pytest.raises(ValueError, match="WRITEABLE"):
        rows.flags.writeable = True


# --- rollback -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["attention", "swa"])
def test_after_a_cut_the_context_is_as_if_the_rest_had_never_been_there(
    opened: Opener, kind: str
) -> None:
    context = opened(kind)  # the text is longer than the sliding window
    context.decode([Rows(0, 0, TEXT, 0)])
    assert context.can_rollback
    context.truncate(0, 50)
    assert context.length(0) == 50
    context.truncate(0, 50)
    context.truncate(0, 60)
    assert context.length(0) == 50
    [after] = context.decode([Rows(0, 50, [300, 301], 2)])
    [fresh] = opened(kind).decode([Rows(0, 0, [*TEXT[:50], 300, 301], 2)])
    assert_close(after, fresh)


def test_clearing_one_slot_leaves_the_others(opened: Opener) -> None:
    context = opened(n_slots=2)
    context.decode([Rows(0, 0, TEXT[:6], 0), Rows(1, 0, TEXT[6:10], 0)])
    context.clear(0)
    assert (context.length(0), context.length(1)) == (0, 4)
    context.truncate(1, 0)
    assert context.length(1) == 0


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_state_refuses_a_cut_and_can_still_be_cleared(opened: Opener, kind: str) -> None:
    context = opened(kind)
    assert not context.can_rollback
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    with pytest.raises(RollbackError, match="--drafter none"):
        context.truncate(0, 10)
    context.clear(0)
    assert context.length(0) == 0
    [after] = context.decode([Rows(0, 0, TEXT[30:40], 1)])
    [fresh] = opened(kind).decode([Rows(0, 0, TEXT[30:40], 1)])
    assert_close(after, fresh)


def test_snapshots_are_counted_and_reach_back_within_one_decode(opened: Opener) -> None:
    context = opened("hybrid", n_snapshots=4)
    assert (context.n_tentative, opened("recurrent", n_snapshots=4).n_tentative) == (4, 0)
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    assert context.reach(0) == 4
    context.decode([Rows(0, 20, TEXT[20:23], 0)])
    assert context.reach(0) == 2
    with pytest.raises(RollbackError):
        context.truncate(0, 20)
    context.clear(0)
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    context.truncate(0, 17)
    assert (context.length(0), context.reach(0)) == (17, 0)
    [after] = context.decode([Rows(0, 17, [300, 301], 2)])
    [fresh] = opened("hybrid").decode([Rows(0, 0, [*TEXT[:17], 300, 301], 2)])
    assert_close(after, fresh)


def test_snapshots_are_of_the_last_decode_only(opened: Opener) -> None:
    context = opened("hybrid", n_snapshots=4)
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    saved = context.checkpoint(0)

    def rewind() -> None:
        context.rewind(0, 20, saved)

    leavings: list[Callable[[], None]] = [rewind, lambda: context.clear(0), context.wipe]
    for leave in leavings:
        context.clear(0)
        context.decode([Rows(0, 0, TEXT[:20], 0)])
        context.decode([Rows(0, 20, TEXT[20:25], 0)])
        assert context.reach(0) == 4
        leave()
        assert context.reach(0) == 0
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    context.decode([Rows(0, 20, TEXT[20:25], 0)])
    rewind()
    with pytest.raises(RollbackError):
        context.truncate(0, 18)


def test_a_checkpoint_and_a_saved_state_are_of_what_a_snapshot_left(opened: Opener) -> None:
    context = opened("hybrid", n_snapshots=4)
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    context.truncate(0, 17)
    checkpoint, saved = context.checkpoint(0), context.save(0)
    [fresh] = opened("hybrid").decode([Rows(0, 0, [*TEXT[:17], 300, 301], 2)])
    ways: list[Callable[[], None]] = [
        lambda: context.rewind(0, 17, checkpoint),
        lambda: context.restore(0, saved),
    ]
    for come_back in ways:
        context.decode([Rows(0, 17, TEXT[40:48], 0)])
        come_back()
        [after] = context.decode([Rows(0, 17, [300, 301], 2)])
        assert_close(after, fresh)
        context.truncate(0, 18)  # another cut is pending when the next one comes back
        context.rewind(0, 17, checkpoint)


@pytest.mark.parametrize(("size", "kept"), [(1, 0), (2, 0), (3, 1), (17, 15), (18, 16), (64, 16)])
def test_snapshots_are_no_more_than_a_small_batch_allows(
    opened: Opener, size: int, kept: int
) -> None:
    for sizes in ({"n_ctx": size}, {"n_batch": size}):
        context = opened("hybrid", n_snapshots=16, **sizes)
        assert context.n_tentative == kept
        context.decode([Rows(0, 0, TEXT[:size], 1)])


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_checkpoint_brings_a_state_back(opened: Opener, kind: str) -> None:
    context = opened(kind)
    context.decode([Rows(0, 0, TEXT[:20], 0)])
    saved = context.checkpoint(0)
    for _ in range(2):
        context.decode([Rows(0, 20, TEXT[20:31], 0)])
        context.rewind(0, 20, saved)
        assert context.length(0) == 20
    [after] = context.decode([Rows(0, 20, [300, 301], 2)])
    [fresh] = opened(kind).decode([Rows(0, 0, [*TEXT[:20], 300, 301], 2)])
    assert_close(after, fresh)


def test_a_small_window_reaches_back_as_far_as_it_still_looks(opened: Opener) -> None:
    context = opened("swa", n_ctx=1024, full_window=False)
    assert not context.can_rollback
    for start in range(0, 600, 50):
        context.decode([Rows(0, start, [20 + (i * i) % 300 for i in range(start, start + 50)], 0)])
    reach = context.reach(0)
    assert 16 < reach < 600 - 32
    with pytest.raises(RollbackError):
        context.truncate(0, 600 - reach - 1)
    context.truncate(0, 600 - reach)
    [after] = context.decode([Rows(0, 600 - reach, [300], 1)])
    fresh = opened("swa", n_ctx=1024)
    for start in range(0, 600 - reach, 50):
        end = min(start + 50, 600 - reach)
        fresh.decode([Rows(0, start, [20 + (i * i) % 300 for i in range(start, end)], 0)])
    [expected] = fresh.decode([Rows(0, 600 - reach, [300], 1)])
    assert_close(after, expected)


# --- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [Rows(0, 0, TEXT[:33], 1), Rows(0, 0, TEXT[:20], 9)])
def test_more_rows_or_outputs_than_the_context_was_made_for_are_an_error(
    opened: Opener, rows: Rows
) -> None:
    context = opened(n_batch=32, n_outputs=8)
    with pytest.raises(DecodeError, match="exceed the batch of 32 and 8"):
        context.decode([rows])
    assert context.length(0) == 0
    [logits] = context.decode([Rows(0, 0, TEXT[:32], 8)])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("token", [-1, -7, 397, 10**6, 2**31, -(2**40)])
def test_a_token_outside_the_vocabulary_is_an_error(opened: Opener, token: int) -> None:
    context = opened()
    assert context.n_vocab == 397
    with pytest.raises(DecodeError, match="attention-"):
        context.decode([Rows(0, 0, [300, token], 1)])
    context.clear(0)
    [logits] = context.decode([Rows(0, 0, [300, 396], 1)])
    assert np.isfinite(logits).all()


def test_an_empty_batch_and_a_wrong_position_are_errors(opened: Opener) -> None:
    context = opened()
    with pytest.raises(DecodeError):
        context.decode([])
    context.decode([Rows(0, 0, TEXT[:9], 0)])
    with pytest.raises(DecodeError):
        context.decode([Rows(0, 3, TEXT[:2], 1)])


@pytest.mark.parametrize("slot", [-1, 2, 300])
def test_an_unknown_slot_is_an_error(opened: Opener, slot: int) -> None:
    context = opened(n_slots=2)
    for use in (context.length, context.clear, lambda s: context.truncate(s, 0)):
        with pytest.raises(SpecllamaError, match="no slot"):
            use(slot)
    with pytest.raises(SpecllamaError):
        context.decode([Rows(slot, 0, TEXT[:2], 1)])


def test_a_context_holds_what_was_asked_for_though_llama_cpp_rounds_up(opened: Opener) -> None:
    context = opened(n_ctx=100)
    assert context.n_ctx == 100
    [logits] = context.decode([Rows(0, 0, (TEXT * 2)[:100], 1)])
    assert np.isfinite(logits).all() and context.length(0) == 100
    with pytest.raises(DecodeError, match="101 tokens exceeds the context of 100"):
        context.decode([Rows(0, 100, [300], 1)])


def test_each_slot_holds_the_whole_context(opened: Opener) -> None:
    context = opened(n_ctx=100, n_slots=3)
    for slot in range(3):
        context.decode([Rows(slot, 0, (TEXT * 2)[:100], 0)])
    assert [context.length(slot) for slot in range(3)] == [100, 100, 100]


@pytest.mark.parametrize("n_ctx", [0, -1, 2**32, 2**32 + 256])
def test_a_context_size_that_llama_cpp_cannot_count_is_refused(opened: Opener, n_ctx: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        opened(n_ctx=n_ctx)


def test_an_unknown_cache_type_is_refused(opened: Opener) -> None:
    with pytest.raises(UsageError, match="no KV cache type f7"):
        opened(kv_type="f7")
    with pytest.raises(ModelError, match="flash_attn"):
        opened(kv_type="q8_0", flash_attention=False)


def test_a_prompt_longer_than_the_batch_is_read_in_parts(opened: Opener) -> None:
    prompt = (TEXT * 2)[: 3 * 32 + 1]
    small = CachedLM(opened(n_batch=32))
    [rows] = small.logits([Request(0, prompt, 3)])
    [whole] = CachedLM(opened()).logits([Request(0, prompt, 3)])
    assert_close(rows, whole)
    assert small.held(0) == tuple(prompt)


# --- opening and closing ------------------------------------------------------------------------


def test_using_what_is_closed_is_an_error_and_closing_twice_is_none() -> None:
    with Model(tiny("attention")) as model:
        context = Context(model, n_ctx=64, threads=1)
        context.close()
        context.close()
        with pytest.raises(SpecllamaError, match="context of .* is closed"):
            context.decode([Rows(0, 0, TEXT[:2], 1)])
        for use in (context.length, context.clear, lambda s: context.truncate(s, 0)):
            with pytest.raises(SpecllamaError, match="is closed"):
                use(0)
    model.close()
    for wrong in (
        lambda: Context(model, n_ctx=64),
        lambda: model.description,
        lambda: encode(model.tokenizer, "a"),
        lambda: model.tokenizer.piece(300),
        model.tokenizer.token_texts,
        model.tokenizer.token_attributes,
    ):
        with pytest.raises(SpecllamaError, match="model .* is closed"):
            wrong()


def test_an_interrupt_while_weights_are_read_ends_the_loading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = _InterruptAt("model buffer size")  # logged just before the first weights are read
    logger = logging.getLogger("specllama.llama")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, logger.name), pytest.raises(KeyboardInterrupt):
            Model(tiny("attention"))
    finally:
        logger.removeHandler(handler)
    assert handler.pressed == 1
    with Model(tiny("attention")) as model:
        assert model.tokenizer.n_vocab == 397


def test_a_model_takes_its_contexts_with_it() -> None:
    model = Model(tiny("attention"))
    contexts = [Context(model, n_ctx=64, threads=1) for _ in range(2)]
    model.close()
    for context in contexts:
        with pytest.raises(SpecllamaError, match="is closed"):
            context.decode([Rows(0, 0, TEXT[:2], 1)])
        context.close()


def test_a_model_opened_for_its_vocabulary_makes_no_context() -> None:
    with Model(tiny("attention"), vocab_only=True) as model:
        assert model.tokenizer.n_vocab == 397
        with pytest.raises(SpecllamaError, match="vocabulary only"):
            Context(model, n_ctx=64)


@pytest.mark.parametrize(
    ("kind", "cache_kind"),
    [
        ("attention", "attention"),
        ("swa", "sliding window"),
        ("recurrent", "recurrent"),
        ("hybrid", "hybrid"),
    ],
)
def test_a_model_says_how_it_remembers(kind: str, cache_kind: str) -> None:
    with Model(tiny(kind)) as model:
        assert model.cache_kind == cache_kind


LEFT_OPEN = """
from specllama.llama import Context, Model
from specllama.lm import Rows
import logging, sys
if "verbose" in sys.argv:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
from pathlib import Path
model = Model(Path(sys.argv[1]))
context = Context(model, n_ctx=1024, threads=1)  # longer than the training, which is a warning
context.decode([Rows(0, 0, [97, 98], 1)])
context.itself = context
try:
    context.decode([Rows(0, 9, [10**6], 1)])  # an error in llama.cpp's log
except Exception as error:
    print(error)
"""


def run_python(
    code: str, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(env),
    )


def test_a_process_that_leaves_everything_open_ends_silently() -> None:
    result = run_python(LEFT_OPEN, str(tiny("attention")))
    assert (result.returncode, result.stderr) == (0, "")
    assert "invalid token" in result.stdout


def test_the_log_of_llama_cpp_goes_to_logging() -> None:
    result = run_python(LEFT_OPEN, str(tiny("attention")), "verbose")
    assert result.returncode == 0
    assert "DEBUG:specllama.llama:" in result.stderr or "INFO:specllama.llama:" in result.stderr
    assert "WARNING:specllama.llama:" in result.stderr and "n_ctx_train" in result.stderr
    assert "ERROR:specllama.llama:" in result.stderr and "invalid token" in result.stderr
    assert "Exception ignored" not in result.stderr and "Traceback" not in result.stderr


SPIN = "import os, specllama.llama; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("env", "spin"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_yield_early_unless_the_user_says_otherwise(
    env: dict[str, str], spin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert run_python(SPIN, env=env).stdout.strip() == spin


# --- requantising -------------------------------------------------------------------------------


def test_a_requantised_copy_is_a_model_and_nothing_else_is_left(tmp_path: Path) -> None:
    destination = tmp_path / "new folder" / "copy.gguf"
    requantise(tiny("attention"), destination, "Q8_0")
    assert list(destination.parent.iterdir()) == [destination]
    with Model(tiny("attention")) as original, Model(destination) as copy:
        assert "Q8_0" in copy.description
        assert copy.n_bytes < original.n_bytes / 2
        with Context(copy, n_ctx=64, threads=1) as context:
            [logits] = context.decode([Rows(0, 0, TEXT[:3], 1)])
            assert np.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["Q9_Z", "", "F32'"])
def test_an_unknown_quantisation_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no quantisation"):
        requantise(tiny("attention"), tmp_path / "copy.gguf", kind)
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, sys
from pathlib import Path
from specllama.errors import SpecllamaError
from specllama.llama import requantise
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
try:
    requantise(Path(sys.argv[1]), Path(sys.argv[2]), "Q8_0")
except SpecllamaError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_full_disk_leaves_the_old_copy_and_no_new_one(tmp_path: Path) -> None:
    destination = tmp_path / "copy.gguf"
    destination.write_bytes(b"the old one")
    result = run_python(FULL_DISK, str(tiny("attention")), str(destination))
    assert result.returncode == 3, result.stderr
    assert "could not be requantised to Q8_0" in result.stdout and "disk space" in result.stdout
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == [destination]
    assert destination.read_bytes() == b"the old one"


class _InterruptAt(logging.Handler):
    """Presses Ctrl-C while llama.cpp logs a line, so within a native call."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.pressed = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage() and not self.pressed:
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_inside_a_native_call_is_raised_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = _InterruptAt("blk.0.")
    logger = logging.getLogger("specllama.llama")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.DEBUG, logger.name), pytest.raises(KeyboardInterrupt):
            requantise(tiny("attention"), tmp_path / "copy.gguf", "Q8_0")
    finally:
        logger.removeHandler(handler)
    assert handler.pressed == 1
    assert not list(tmp_path.iterdir())
    requantise(tiny("attention"), tmp_path / "copy.gguf", "Q8_0")
    assert (tmp_path / "copy.gguf").is_file()


# --- vocabulary ---------------------------------------------------------------------------------


def encode(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    return tokenizer.encode(text, special=special, add_special=False)


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2"])
def vocabulary(request: pytest.FixtureRequest) -> Iterator[tuple[str, Tokenizer]]:
    with Model(vocab_file(request.param), vocab_only=True) as model:
        yield request.param, model.tokenizer


def test_every_kind_of_text_survives_the_tokenizer(vocabulary: tuple[str, Tokenizer]) -> None:
    _, tokenizer = vocabulary
    texts = ["plain ASCII", "水滴。漢字", "👩‍👩‍👧 🇫🇮", "\u00e9 e\u0301", "a\0b\0", " x  y\n\n", ""]
    for text in texts:
        pieces = [tokenizer.piece(t) for t in encode(tokenizer, text)]
        assert b"".join(pieces) == text.encode(), text
    torn = [tokenizer.piece(t) for t in encode(tokenizer, "👩‍👩‍👧")]
    assert any(len(piece) < 3 for piece in torn)  # a part of a character is a piece too


def test_half_a_surrogate_pair_is_refused_with_its_place(
    vocabulary: tuple[str, Tokenizer],
) -> None:
    with pytest.raises(UsageError, match="half a surrogate pair at character 3"):
        encode(vocabulary[1], "abc\ud83d!")


END_TEXTS = {
    "llama-bpe": {b"<|end_of_text|>", b"<|eot_id|>"},
    "qwen2": {b"<|endoftext|>", b"<|im_end|>", b"</s>"},
}


def test_every_token_that_ends_an_answer_is_known(vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    texts = tokenizer.token_texts()
    assert {texts[t] for t in tokenizer.end_tokens} == END_TEXTS[name]
    assert {tokenizer.eos, tokenizer.eot} <= tokenizer.end_tokens
    assert tokenizer.add_bos == (name == "llama-bpe")


MARKERS = {"llama-bpe": "<|eot_id|>", "qwen2": "<|im_end|>"}


def test_markers_are_tokens_only_where_they_are_meant(vocabulary: tuple[str, Tokenizer]) -> None:
    name, tokenizer = vocabulary
    marker = MARKERS[name]
    [token] = encode(tokenizer, marker, special=True)
    assert token in tokenizer.end_tokens
    assert tokenizer.piece(token) == b""
    plain = encode(tokenizer, marker)
    assert token not in plain
    assert b"".join(map(tokenizer.piece, plain)) == marker.encode()


@pytest.mark.parametrize("second", [False, True])
def test_a_second_end_of_turn_ends_too(second: bool) -> None:
    with Model(tiny("attention", second_eot=second)) as model:
        texts = model.tokenizer.token_texts()
        ends = {texts[t] for t in model.tokenizer.end_tokens}
        assert ends == {b"</s>", b"<|im_end|>", *([b"<|eot_id|>"] if second else [])}


def test_bos_is_put_where_the_model_says_so() -> None:
    with Model(tiny("attention")) as with_bos, Model(tiny("attention", add_bos=False)) as without:
        ids = [
            m.tokenizer.encode("a", special=True, add_special=True) for m in (with_bos, without)
        ]
    assert ids[0] == [1, *ids[1]] and 1 not in ids[1]


def test_the_chat_template_of_a_file_is_told_or_there_is_none() -> None:
    with Model(tiny("attention")) as model:
        assert model.chat_template is not None and "<|im_start|>" in model.chat_template
    with Model(tiny("attention", chat_template=None)) as model:
        assert model.chat_template is None


@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_that_is_no_token_prints_nothing_but_an_error(model: Model, token: int) -> None:
    """llama.cpp ends the process at it."""
    with pytest.raises(UsageError, match="own tokens"):
        model.tokenizer.piece(token)


def test_a_log_that_somebody_else_took_over_is_taken_back() -> None:
    """What was made is read from the log."""
    import llama_cpp

    ignore = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(ignore, None)
    with Model(tiny("attention")) as opened:
        assert sorted(opened.layers) == list(range(opened.n_layer + 1))
