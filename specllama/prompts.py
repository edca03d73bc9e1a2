"""Messages -> token ids, through the model's own chat template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    role: "system", "user" or "assistant". tokens: the ids that were generated, of an assistant's
    message where they are known.
    """

    role: str
    content: str
    tokens: tuple[int, ...] = ()
