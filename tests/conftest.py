"""What the tests share: a cache folder of their own, so that they leave the user's alone."""

from __future__ import annotations

import os

from tiny import CHECKOUT

os.environ["SPECLLAMA_CACHE"] = str(CHECKOUT / ".cache" / "specllama")
