"""What the tests share: folders of their own, so that they leave the user's alone."""

from __future__ import annotations

import os

from tiny import CHECKOUT

OWN = CHECKOUT / ".cache" / "specllama"

os.environ["SPECLLAMA_CACHE"] = str(OWN)
os.environ["SPECLLAMA_CONFIG"] = str(OWN / "config")
os.environ["HF_HOME"] = str(OWN / "huggingface")
