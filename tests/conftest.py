"""What the tests share: folders of their own, so that they leave the user's alone."""

from __future__ import annotations

import os

import pytest
from tiny import CHECKOUT

OWN = CHECKOUT / ".cache" / "specllama"

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
