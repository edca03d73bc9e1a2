"""Token bytes -> printable text: whole characters only, and nothing of a stop string.

A token's bytes may end inside a character, and a stop string may begin in one token and end
three tokens later. `TextStream` lets text out as early as that permits, so that text shown
piece by piece is always the text that the same bytes give at once.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence

from specllama.errors import UsageError


class TextStream:
    """The text of one answer, fed with the bytes of its tokens one after the other.

    Bytes are UTF-8. A character leaves with its last byte. Invalid bytes become U+FFFD exactly
    as Python's incremental decoder replaces them; a character that is still incomplete at the
    end of the answer is dropped without a mark.

    Stop strings are matched in the decoded text, wherever the pieces are cut. The stop that is
    completed first wins, and of several completed by one character the longest; the text before
    its start is delivered, nothing after. Until then the longest end of the text that a stop
    could begin with is held back, and no more than that.

    Raises UsageError for an empty stop string, which would stop everywhere.
    """

    stopped: str | None
    """The stop string that was completed, or None."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if "" in tuple(stops):
            raise UsageError("a stop string is empty; leave it out, or give the text to stop at")
        self.stopped = None
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._decoded = 0  # characters, held ones included
        self._begun: list[int] = []  # per piece: characters begun once its first byte is read
        self._delivered_pieces: int | None = None

    @property
    def delivered_pieces(self) -> int:
        """How many of the pieces fed so far surely belong to the delivered text, in order.

        A piece counts once its text has begun to be shown; a piece without text counts as soon
        as it is fed, unless it lies behind text that is held back. Without stop strings every
        piece counts at once. When a stop is completed, a piece that is only partly before the
        stop's start counts, and the pieces that make up the stop do not. `flush` settles the
        rest. The number never falls.
        """
        if self._delivered_pieces is not None:
            return self._delivered_pieces
        if not self._stops:
            return len(self._begun)
        return bisect_right(self._begun, self._decoded - len(self._held))

    def feed(self, piece: bytes) -> str:
        """Take the bytes of the next token; return the text that may be shown now.

        Returns "" for ever once `stopped` is set, and such pieces are not counted.
        """
        if self.stopped is not None:
            return ""
        text = self._held + self._decode(piece)
        found = self._first_stop(text)
        if found is not None:
            self.stopped, start = found
            self._held = ""
            stop_start = self._decoded - len(text) + start
            self._delivered_pieces = bisect_right(self._begun, stop_start)
            return text[:start]
        shown = len(text) - self._held_length(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """End the answer; return the text that was held back and turned out to be no stop."""
        held, self._held = self._held, ""
        self._decoder.reset()
        if self.stopped is None:
            self._delivered_pieces = len(self._begun)
        return held

    def _decode(self, piece: bytes) -> str:
        # The first byte alone tells whether the piece continues a character or begins one, also
        # when it shows that the bytes waiting before it were invalid.
        first = self._decoder.decode(piece[:1])
        incomplete = bool(self._decoder.getstate()[0])
        self._begun.append(self._decoded + len(first) + incomplete)
        text = first + self._decoder.decode(piece[1:])
        self._decoded += len(text)
        return text

    def _first_stop(self, text: str) -> tuple[str, int] | None:
        """The stop completed first in text and where it starts; the longest on a tie."""
        starts = ((stop, text.find(stop)) for stop in self._stops)
        found = [(stop, start) for stop, start in starts if start >= 0]
        return min(found, key=lambda at: (at[1] + len(at[0]), at[1]), default=None)

    def _held_length(self, text: str) -> int:
        """Length of the longest end of text that some stop, not yet complete, begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
