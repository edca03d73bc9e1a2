"""What the tests share: folders of their own, so that they leave the user's alone."""

from __future__ import annotations

import os
import signal

import pytest
from tiny import CHECKOUT

OWN = CHECKOUT / ".cache" / "specllama"

# A job in the background may ignore these, and so would every command that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["SPECLLAMA_CACHE"] = str(OWN)
os.environ["SPECLLAMA_CONFIG"] = str(OWN / "config")
os.environ["HF_HOME"] = str(OWN / "huggingface")


def pytest_sessionstart() -> None:
    """With SPECLLAMA_TEST_GPU=1 the tests are to run on a GPU, so without one they do not run.

    A build that can use a GPU puts every layer on it unless a test asks for less.
    """
    if os.environ.get("SPECLLAMA_TEST_GPU") != "1":
        return
    from specllama import native

    if not native.supports_gpu():
        pytest.exit("SPECLLAMA_TEST_GPU is set, and this build finds no GPU", returncode=2)
