"""Files that are no usable model, and wrong requests: one sentence, an exit code, no abort.

A bad file may end the process in native code, so each is tried by a process of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Result, specllama, without_build_note
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFWriter, TokenType
from tiny import tiny, vocab_file

from specllama import header
from specllama.cli import _run

GOOD = tiny("attention").read_bytes()
HEADER = int(GGUFReader(tiny("attention")).data_offset)

Maker = Callable[[Path], object]


def content(data: bytes) -> Maker:
    """Writes a file of these bytes."""
    return lambda path: path.write_bytes(data)


def nothing(path: Path) -> None:
    """Leaves the file missing."""


def unknown_architecture(path: Path) -> None:
    """A complete file whose architecture llama.cpp has never heard of."""
    key = b"general.architecture" + (8).to_bytes(4, "little") + (5).to_bytes(8, "little")
    assert GOOD.count(key + b"llama") == 1
    path.write_bytes(GOOD.replace(key + b"llama", key + b"zorro"))


def tensors_gone(path: Path) -> None:
    """A complete file of a known architecture without what that architecture needs."""
    path.write_bytes(GOOD.replace(b"output_norm.weight", b"output_gnome.weigh"))


def write_encoder(path: Path, architecture: str) -> None:
    """One layer of zeros, 64 wide: "bert" as embedding models are, or "t5"."""
    n, n_ff, n_ctx = 64, 96, 64
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), n)}
    if architecture == "bert":
        vectors = ["token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"]
        shapes |= {f"{name}.{kind}": (n,) for name in vectors for kind in ("weight", "bias")}
        squares = [f"blk.0.attn_{name}" for name in ("q", "k", "v", "output")]
        blocks = ["blk.0"]
        shapes["position_embd.weight"] = (n_ctx, n)
    else:
        blocks = ["enc.blk.0", "dec.blk.0"]
        vectors = [f"{b}.{name}" for b in blocks for name in ("attn_norm", "ffn_norm")]
        vectors += ["enc.output_norm", "dec.output_norm", "dec.blk.0.cross_attn_norm"]
        shapes |= {f"{name}.weight": (n,) for name in vectors}
        layers = [f"{b}.attn" for b in blocks] + ["dec.blk.0.cross_attn"]
        squares = [f"{layer}_{name}" for layer in layers for name in "qkvo"]
        shapes |= {f"{b}.attn_rel_b.weight": (8, 2) for b in blocks}
    shapes |= {f"{name}.weight": (n, n) for name in squares}
    shapes |= {f"{b}.ffn_up.weight": (n_ff, n) for b in blocks}
    shapes |= {f"{b}.ffn_down.weight": (n, n_ff) for b in blocks}
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n)
    writer.add_block_count(1)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_relative_attn_buckets_count(8)
    writer.add_token_type_count(1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types(kinds + [TokenType.BYTE] * 256)
    writer.add_token_scores([0.0] * len(tokens))
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SIZE = f"{len(GOOD):,}"
# For each file: how it comes about, and what the sentence about it must say besides its path.
BAD_FILES: dict[str, tuple[Maker, str]] = {
    "missing": (nothing, "there is no file"),
    "a directory": (lambda path: path.mkdir(), "is a directory"),
    "a pipe": (os.mkfifo, "is a pipe or a device"),
    "empty": (content(b""), "is empty"),
    "three bytes": (content(GOOD[:3]), "is not a GGUF file"),
    "a web page": (content(b"\n<!DOCTYPE html>\n<html>Sign in</html>"), "is a web page"),
    "an LFS pointer": (
        content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "Git LFS pointer",
    ),
    "an archive": (content(b"PK\x03\x04" + GOOD[4:]), "is not a GGUF file"),
    "four bytes": (content(GOOD[:4]), "incomplete: at 4 bytes it ends within its header"),
    "1 KB": (content(GOOD[:1024]), "incomplete: at 1,024 bytes it ends within its header"),
    "header only": (content(GOOD[:HEADER]), f"incomplete: it has {HEADER:,} of {SIZE} bytes"),
    "half": (content(GOOD[: len(GOOD) // 2]), f"has {len(GOOD) // 2:,} of {SIZE} bytes"),
    "a byte short": (content(GOOD[:-1]), f"incomplete: it has {len(GOOD) - 1:,} of {SIZE} bytes"),
    "an unknown architecture": (unknown_architecture, "unknown model architecture: 'zorro'"),
    "a missing tensor": (tensors_gone, "(tensor 'output_norm.weight' not found)"),
    "a vocabulary alone": (
        lambda path: path.write_bytes(vocab_file("gpt-2").read_bytes()),
        "(tensor 'token_embd.weight' not found)",
    ),
    "zeros": (content(GOOD[:4] + bytes(5000)), "llama.cpp cannot load"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_usable_model_is_refused(name: str, role: str, tmp_path: Path) -> None:
    make, words = BAD_FILES[name]
    bad = tmp_path / "mod el é.gguf"
    make(bad)
    good = tiny("attention")
    pair: list[str | Path] = ["-m", bad] if role == "target" else ["-m", good, "-md", bad]
    result = specllama("generate", *pair, "-t", "1", "-n", "2", "hello")
    expect_refusal(result, 3, words)
    assert bad.name in result.err


@pytest.mark.parametrize("command", [["check"], ["generate", "-t", "1"]])
@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_a_model_that_does_not_continue_texts_is_refused(
    architecture: str, command: list[str], tmp_path: Path
) -> None:
    bad = tmp_path / "encoder.gguf"
    write_encoder(bad, architecture)
    result = specllama(*command, "-m", bad)
    expect_refusal(result, 3, "encoder.gguf", architecture, "does not continue a text")


def expect_refusal(result: Result, code: int, *words: str) -> None:
    """One sentence of cause and next step on standard error, nothing on standard output."""
    assert result.code == code, result.err
    assert result.out == b""
    [line] = result.err.splitlines()
    assert line.startswith("Error: ")
    assert all(word in line for word in words), line
    assert "; " in line  # the cause; the next step


AS_NOBODY = """
import os, sys
import specllama.check, specllama.cli, specllama.loading  # while they can still be read
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
specllama.cli.main()
"""


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="this system has no users to try")
@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_unreadable_file_is_refused(role: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        good, bad = folder / "good.gguf", folder / "private.gguf"
        for path, mode in ((good, 0o644), (bad, 0)):
            path.write_bytes(GOOD)
            path.chmod(mode)
        pair: list[str | Path] = ["-m", bad] if role == "target" else ["-m", good, "-md", bad]
        arguments: list[str | Path] = ["generate", *pair, "-t", "1", "-n", "2", "hello"]
        arguments += ["--draft-tokens", "1"]
        result = specllama(*arguments, python=("-c", AS_NOBODY))
        expect_refusal(result, 3, str(bad), "Permission denied", "permissions")
        # The same person may use the same bytes under another mode.
        bad.chmod(0o644)
        assert specllama(*arguments, python=("-c", AS_NOBODY)).code == 0


def write_split_model(folder: Path) -> list[Path]:
    """The tiny model in three files."""
    reader = GGUFReader(tiny("attention"))
    writer = GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=8)
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


def test_a_split_model_is_whole_or_names_the_part_that_is_not(tmp_path: Path) -> None:
    first, second, third = write_split_model(tmp_path)
    assert second.name == "model-00002-of-00003.gguf"
    arguments = ["-t", "1", "-n", "2", "--drafter", "none", "hello"]
    by_first = specllama("generate", "-m", first, *arguments, "--temp", "0")
    by_second = specllama("generate", "-m", second, *arguments, "--temp", "0")
    assert by_first.code == by_second.code == 0 and by_first.text == by_second.text != "\n"
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in (first, second, third)))
    told = "under names like model-00001-of-00003.gguf"
    expect_refusal(specllama("check", "-m", joined), 3, "joined.gguf", told, "--merge")
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    cut = specllama("generate", "-m", first, *arguments)
    expect_refusal(cut, 3, second.name, f"{len(content) - 1:,} of {len(content):,} bytes")
    second.unlink()
    expect_refusal(specllama("generate", "-m", first, *arguments), 3, second.name, "is missing")
    first.rename(first.with_name("first.gguf"))
    expect_refusal(specllama("generate", "-m", third, *arguments), 3, first.name, "is missing")
    third.rename(first.with_name("renamed.gguf"))
    expect_refusal(specllama("check", "-m", third.parent / "renamed.gguf"), 3, told)


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.gguf-split-a", "m.gguf.part-00"])
def test_a_piece_of_a_file_is_to_be_joined_with_the_others(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / name, tmp_path / "m.gguf.part2of2"
    for path, data in ((first, GOOD[:-9]), (first, GOOD[:1024]), (second, GOOD[-9:])):
        path.write_bytes(data)
        expect_refusal(specllama("check", "-m", path), 3, "a piece of m.gguf", "in their order")


@pytest.mark.parametrize("command", [["check"], ["generate", "-t", "1"]])
def test_both_commands_refuse_a_bad_draft_alike(command: list[str], tmp_path: Path) -> None:
    bad = tmp_path / "draft.gguf"
    bad.write_bytes(GOOD[:-1])
    result = specllama(*command, "-m", tiny("attention"), "-md", bad)
    expect_refusal(result, 3, str(bad), "incomplete")


def test_the_sizes_of_tensors_are_those_of_the_format() -> None:
    assert {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()} == header._TENSOR_SIZES


@pytest.mark.parametrize("options", [{}, {"vocab": "bpe", "pad": 64}])
def test_a_whole_file_is_as_long_as_its_header_says(options: dict[str, Any]) -> None:
    for kind in ("attention", "swa", "recurrent", "hybrid"):
        path = tiny(kind, **options)
        assert header.expected_size(path) == path.stat().st_size


def test_a_file_of_an_unknown_version_has_no_expected_size(tmp_path: Path) -> None:
    path = tmp_path / "future.gguf"
    path.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + GOOD[8:])
    assert header.expected_size(path) is None
    path.write_bytes(GOOD.replace(b"general.architecture\x08", b"general.architecture\x63"))
    assert header.expected_size(path) is None


# --- wrong requests -----------------------------------------------------------------------------

WRONG_REQUESTS: dict[str, tuple[list[str], str]] = {
    "a negative temperature": (["--temp", "-1"], "temperature must be 0 or more"),
    "a temperature of nan": (["--temp", "nan"], "temperature must be a finite number, not nan"),
    "an infinite temperature": (["--temp", "inf"], "temperature must be a finite number, not inf"),
    "a temperature that is a word": (["--temp", "hot"], "'hot' is not a valid float"),
    "a top-p of 2": (["--top-p", "2"], "top_p"),
    "a min-p of nan": (["--min-p", "nan"], "min_p"),
    "a negative top-k": (["--top-k", "-3"], "top_k"),
    "17 draft tokens": (["--draft-tokens", "17"], "between 0 and 16, not 17"),
    "minus one draft token": (["--draft-tokens", "-1"], "between 0 and 16, not -1"),
    "draft tokens that are a word": (["--draft-tokens", "many"], "'many' is no whole number"),
    "a batch of none": (["--batch-size", "0"], "batch size must be more than 16"),
    "a negative batch": (["--batch-size", "-1"], "batch size must be more than 16"),
    "a negative context": (["--ctx-size", "-5"], "context size must be 0"),
    "a context beyond counting": (["--ctx-size", "99999999999"], "out of range"),
    "no threads": (["--threads", "0"], "threads must be between 1 and 512"),
    "too many threads": (["--threads-batch", "100000"], "threads_batch must be between 1 and 512"),
    "fewer than no layers": (["-ngl", "-5"], "--gpu-layers': -5 is not in the range"),
    "fewer than no draft layers": (["-ngld", "-2"], "--gpu-layers-draft': -2 is not in the range"),
    "fewer than no tokens": (["--predict", "-2"], "-2 is below -1"),
    "tokens that are a fraction": (["--predict", "1.5"], "'1.5' is no whole number"),
    "an empty stop string": (["--stop", ""], "a stop string is empty"),
    "a bias without a number": (["--logit-bias", "12"], "not like 15043+1"),
    "a negative draft temperature": (["--draft-temp", "-1"], "draft temperature"),
    "an unknown drafter": (["--drafter", "oracle"], "'oracle' is not one of"),
    "an unknown verifier": (["--verifier", "hope"], "'hope' is not one of"),
    "an unknown option": (["--no-such-option"], "--no-such-option"),
    "a pair beside the model": (["--pair", "smollm2"], "either a pair or a model file"),
}


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_a_wrong_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, words = WRONG_REQUESTS[name]
    models = ["-m", str(tiny("attention")), "-md", str(tiny("attention", noise=0.05))]
    fixed = ["-t", "1", "--draft-tokens", "3"]
    expect_usage_error(capsys, ["generate", *models, *fixed, "hello", *options], words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--pair", "smolm2", "hi"], 'did you mean "smollm2"?'),
        (["generate", "--models", "absent.toml", "hi"], "absent.toml"),
        (["generate", "-m", "absent.gguf", "--drafter", "model", "hi"], "needs a draft model"),
        (["chatter"], "chatter"),
        (["check", "absent.gguf", "-b", "-1"], "batch size must be more than 16"),
        (["check", "absent.gguf", "-c", "-1"], "context size must be 0"),
        (["explain", "--p", "0.2,0.5", "--q", "0.5,0.5"], "--p sums to 0.7"),
        (["explain", "--p", "0.5,0.5", "--q", "0.5,nan"], "--q"),
        (["explain", "--p", "0.5,0.5", "--q", "1.5,-0.5"], "--q"),
        (["explain", "--p", "0.5,0.5", "--q", "1"], "--q"),
        (["explain", "--p", "", "--q", ""], "--p"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expect_usage_error(capsys, arguments, words)


def expect_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code = _run(arguments)
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    line = without_build_note(captured.err.encode())
    assert line.startswith("Error: ") and line.count("\n") == 1, line
    assert words in line
