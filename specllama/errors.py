"""The errors a user can meet, each with the exit code its command ends with.

A message is one sentence or two: the cause, then the next step.
"""

from __future__ import annotations


class SpecllamaError(Exception):
    """The run failed (exit code 1)."""

    exit_code = 1


class UsageError(SpecllamaError):
    """The request itself is wrong: an option, a prompt, a parameter (exit code 2)."""

    exit_code = 2


class PromptTooLong(UsageError):
    """A prompt leaves no room in the context for an answer."""


class ModelError(SpecllamaError):
    """A model file, or a pair of models, cannot be used (exit code 3)."""

    exit_code = 3


class HubError(SpecllamaError):
    """The Hugging Face hub gave no file: no network, no permission, no such name, damage."""


class RollbackError(SpecllamaError):
    """A context refused to forget tokens, so what it holds is unknown."""


class DecodeError(SpecllamaError):
    """llama.cpp could not evaluate a batch."""


class StateError(SpecllamaError):
    """A saved state of a context cannot be put back: damaged, cut, or another model's."""


class InvalidLogits(SpecllamaError):
    """A model produced logits that are no distribution: NaN, +inf, or nothing but -inf."""

    def __init__(self, position: int, model: str = "the model") -> None:
        super().__init__(
            f"{model} produced invalid logits at position {position}; "
            "check the file's checksum, and try it without GPU layers or with another quantisation"
        )
        self.position = position
