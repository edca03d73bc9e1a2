"""The wrapped standard streams hold back what Python's own would, and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command import environment

WRITE = (
    "import os, sys; from specllama import console; console.prepare(); "
    "sys.{stream}.write({text!r}); os._exit(0)"
)


@pytest.mark.parametrize(
    ("python", "stream", "text", "shown"),
    [
        # What is not flushed is lost at _exit, which tells whether it was held back.
        ([], "stderr", "note\nmore", b"note\nmore"),
        ([], "stdout", "text\nmore", b""),
        (["-u"], "stderr", "a note", b"a note"),
        (["-u"], "stdout", "a text", b"a text"),
    ],
)
def test_streams_are_as_buffered_as_python_has_them(
    python: list[str], stream: str, text: str, shown: bytes
) -> None:
    outputs = []
    for prepare in ("console.prepare(); ", ""):
        code = WRITE.format(stream=stream, text=text).replace("console.prepare(); ", prepare)
        done = subprocess.run(
            [sys.executable, *python, "-c", code],
            capture_output=True,
            env=environment({"PYTHONUNBUFFERED": ""}),
            check=True,
        )
        outputs.append(done.stdout + done.stderr)
    assert outputs == [shown, shown]


def test_a_character_that_the_console_lacks_becomes_a_question_mark() -> None:
    code = "import sys; from specllama import console; console.prepare(); print('é中')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=environment({"PYTHONIOENCODING": "cp1252"}),
        check=True,
    )
    assert done.stdout == b"\xe9?\n"
