"""The README's examples, run as they stand."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment, specllama
from tiny import CHECKOUT, tiny

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.startswith("specllama ")
]


def test_the_python_example_runs() -> None:
    [code] = [block for language, block in BLOCKS if language == "python"]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"(stop|length): [1-4]\.\d\d tokens a round\n$", done.stdout)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_run_with_any_two_models(line: str) -> None:
    files = {"big.gguf": tiny("attention"), "small.gguf": tiny("attention", noise=0.05)}
    _, *arguments = shlex.split(line)
    result = specllama(*[files.get(argument, argument) for argument in arguments])
    assert result.code == 0, result.err
    assert result.text.strip()


def test_the_example_answer_is_what_the_command_prints() -> None:
    [block] = [block for _, block in BLOCKS if block.startswith("$ specllama generate")]
    first, *shown = block.splitlines()
    _, *arguments = shlex.split(first.removeprefix("$ "))
    result = specllama(*arguments)
    assert result.code == 0, result.err
    assert result.text.rstrip("\n") == "\n".join(shown[:-2])
    # The times and the seed differ from run to run, the counts do not.
    counts = re.search(r"\d+ rounds.*", result.err)
    assert counts is not None
    assert counts[0] == shown[-1]


def test_the_conversation_is_what_the_chat_says() -> None:
    """The same messages through a pipe: the answers of the transcript, wrapped as it is there."""
    [block] = [block for _, block in BLOCKS if block.startswith("$ specllama chat")]
    first, *_ = block.splitlines()
    turns = re.findall(r"^> ([^/].*)\n((?:(?!\[).*\n)+)\[", block, re.MULTILINE)
    assert len(turns) == 2
    _, _, *arguments = shlex.split(first)
    messages = "".join(f"{message}\n" for message, _ in turns)
    result = specllama(*arguments, stdin=messages.encode())
    assert result.code == 0, result.err
    shown = [" ".join(answer.split()) for _, answer in turns]
    assert [line for line in result.text.splitlines() if line] == shown


def test_the_table_of_speeds_is_made_from_the_committed_results() -> None:
    script = CHECKOUT / "scripts" / "performance_table"
    made = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert f"<!-- performance: begin -->\n{made.stdout}<!-- performance: end -->\n" in README


def test_every_file_that_is_linked_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not Path(CHECKOUT, link).is_file()] == []


def test_every_script_that_is_named_exists() -> None:
    names = re.findall(r"`?(scripts/\w+)`?", README)
    assert names
    assert [name for name in names if not Path(CHECKOUT, name).is_file()] == []
