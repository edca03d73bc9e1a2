"""Run a large GGUF model faster with a small one, without changing what it says.

    import specllama

    with specllama.load("smollm2") as pair:
        for chunk in pair.generate("The sea is", max_tokens=40, seed=1):
            print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specllama.errors import SpecllamaError

if TYPE_CHECKING:
    from specllama.generation import Chunk, Pair, Stats
    from specllama.loading import load
    from specllama.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Chunk", "Pair", "SamplingParams", "SpecllamaError", "Stats", "load"]


def __getattr__(name: str) -> Any:
    # The native library is loaded by the first use of `load`, not by the import, and NumPy too
    # comes late: until the command line has begun, an interrupt would show a traceback.
    if name == "load":
        from specllama.loading import load

        return load
    if name == "SamplingParams":
        from specllama.sampling import SamplingParams

        return SamplingParams
    if name in ("Chunk", "Pair", "Stats"):
        from specllama import generation

        return getattr(generation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
