"""Recurrent states from before tokens that may be taken back, to come back to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state after the first `length` tokens of a slot.

    is_lasting: it marks the end of a prompt, where a later one may go on from; others give way to
    the next.
    """

    length: int
    data: bytes
    is_lasting: bool


class Checkpoints:
    """By slot, the states after prefixes of what it holds, the shortest first."""

    _LASTING = 2  # kept of a slot

    def __init__(self) -> None:
        self._kept: dict[int, list[Checkpoint]] = {}

    def latest(self, slot: int, length: int) -> Checkpoint | None:
        """The longest of them that is not longer than `length`."""
        fitting = [c for c in self._kept.get(slot, ()) if c.length <= length]
        return fitting[-1] if fitting else None

    def add(self, slot: int, length: int, is_lasting: bool, take: Callable[[], bytes]) -> None:
        """Keep one of the whole slot, of `length` tokens; `take` gives it, if it is not there."""
        known = self._kept.get(slot, [])
        same = next((c for c in known if c.length == length), None)
        if length == 0 or (same is not None and same.is_lasting >= is_lasting):
            return
        data = take() if same is None else same.data
        others = [c for c in known if c.is_lasting]
        if is_lasting:
            others = others[1 - self._LASTING :]
        self._kept[slot] = [*others, Checkpoint(length, data, is_lasting)]

    def cut(self, slot: int, length: int) -> None:
        """The slot holds only its first `length` tokens from now on."""
        self._kept[slot] = [c for c in self._kept.get(slot, ()) if c.length <= length]

    def drop(self, slot: int) -> None:
        """The slot holds something else."""
        self._kept.pop(slot, None)

    def clear(self) -> None:
        """All slots do."""
        self._kept.clear()
