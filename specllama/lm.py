"""A language model is a function from a sequence to next-token logits; the KV cache is its memo.

`CachedLM` is that function: callers name whole sequences and never speak of the cache. Which rows
really have to be decoded falls out of the longest common prefix with what the context still holds,
so a rejected draft, an abandoned answer or an interrupt needs no clean-up anywhere.

Not every cache can drop its newest tokens. A recurrent state has overwritten what it was before
them: then a checkpoint is kept from before tokens that may be taken back, and what was right of
them is decoded again, together with what comes next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specllama.checkpoints import Checkpoints
from specllama.errors import DecodeError, RollbackError, StateError

LogitRows = NDArray[np.float32]  # [n_rows, n_vocab]


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens to decode for one sequence of a context.

    start: position of the first of them. n_logits: how many of the last rows give logits.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    n_logits: int


class Context(Protocol):
    """A KV cache with a model behind it. `slot` numbers its independent sequences from 0."""

    name: str
    n_ctx: int  # tokens one sequence can hold
    n_batch: int  # rows one decode takes
    n_outputs: int  # rows of one decode that can give logits
    n_slots: int
    n_vocab: int  # width of a row of logits, padding included
    can_rollback: bool  # whether `truncate` can keep any part of a sequence
    has_state: bool  # whether `checkpoint` is what brings earlier tokens back
    n_tentative: int  # tokens of one decode that `truncate` can take back right after it
    is_split: bool  # whether one pass over the weights takes only neighbouring slots, evenly

    def decode(self, batch: Sequence[Rows]) -> list[LogitRows]:
        """Decode all rows in one call; logits per entry, read-only, valid until the next decode.

        Raises DecodeError.
        """
        ...

    def length(self, slot: int) -> int:
        """Number of tokens that the slot holds."""
        ...

    def reach(self, slot: int) -> int:
        """How many of its newest tokens `truncate` can take back now."""
        ...

    def truncate(self, slot: int, length: int) -> None:
        """Forget everything from position `length` on; raises RollbackError if refused."""
        ...

    def checkpoint(self, slot: int) -> bytes:
        """What `rewind` needs to come back to what the slot holds now; raises StateError."""
        ...

    def rewind(self, slot: int, length: int, data: bytes) -> None:
        """Hold the `length` tokens of a checkpoint again, which are the first of those held now;
        raises RollbackError."""
        ...

    def clear(self, slot: int) -> None:
        """Forget the whole sequence."""
        ...

    def wipe(self) -> None:
        """Forget all sequences without a trace."""
        ...

    def copy(self, source: int, slot: int) -> None:
        """Let a slot hold what another one does."""
        ...

    def save(self, slot: int) -> bytes:
        """What the slot holds, for `restore` of a context over the same model."""
        ...

    def restore(self, slot: int, data: bytes) -> None:
        """Let the slot hold what was saved instead; raises StateError, after which it is empty
        or as it was."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back, as the model's own vocabulary does it."""

    name: str
    n_vocab: int
    bos: int | None
    end_tokens: frozenset[int]

    def encode(self, text: str, *, special: bool, add_special: bool) -> list[int]:
        """Token ids of a text. special: markers such as <|im_end|> become their token;
        add_special: put BOS (and EOS) where the model says so."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token prints: none for a control token, part of a character for some."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """Logits wanted after each of the last `n_last` prefixes of `tokens`.

    n_tentative: how many of the last tokens the next request for the slot may take back.
    """

    slot: int
    tokens: list[int]
    n_last: int = 1
    n_tentative: int = 0


class CachedLM:
    """`logits(requests)` over a context, decoding only what the context does not hold already.

    The mirror of what each slot holds is only ever a prefix of the truth: it is cut before a decode
    and extended after it, so an exception at any moment leaves it valid.
    """

    # Rows that cost about as much as another pass over the weights.
    _PASS = 8
    # A copy moves all cells of a slot; one token decoded costs about as much as so many cells.
    _COPIED = 64
    _WORTH_COPYING = 16  # tokens, at least

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held: dict[int, list[int]] = {}
        self._checkpoints = Checkpoints()
        self.rows_decoded = 0
        # Told the rows of every decode, those of them that gave logits, and its milliseconds.
        self.on_decode: Callable[[int, int, float], None] | None = None

    @property
    def name(self) -> str:
        """The model's name, for messages."""
        return self._context.name

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self._context.n_ctx

    @property
    def n_vocab(self) -> int:
        """Width of a row of logits."""
        return self._context.n_vocab

    @property
    def n_slots(self) -> int:
        """How many independent sequences it can hold."""
        return self._context.n_slots

    @property
    def is_split(self) -> bool:
        """Whether a decode with unequal numbers of rows takes several passes over the weights."""
        return self._context.is_split

    @property
    def max_rows(self) -> int:
        """Rows with logits that one decode can give, over all sequences."""
        return min(self._context.n_batch, self._context.n_outputs)

    @property
    def max_draft(self) -> int:
        """Draft tokens of a round that can be taken back, if not by reading the sequence again."""
        context = self._context
        if self.redoes:
            return context.n_ctx if context.n_slots == 1 else 0
        return context.n_tentative

    @property
    def redoes(self) -> bool:
        """Whether taking tokens back means to decode those before them again."""
        return self._context.has_state and self._context.n_tentative == 0

    def n_held(self, slot: int) -> int:
        """How many tokens the slot is believed to hold."""
        return len(self._held.get(slot, ()))

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How many rows a request for this sequence would decode, at least its last."""
        return len(tokens) - self._kept(Request(slot, tokens))

    def held(self, slot: int) -> tuple[int, ...]:
        """What the slot is believed to hold, for tests of the cache."""
        return tuple(self._held.get(slot, ()))

    def prefill(self, slot: int, tokens: list[int]) -> int:
        """Make the slot hold these tokens; the number of rows that had to be decoded for it.

        A beginning that another slot holds is copied from there, if it is long enough for that.
        """
        return self.prefill_together({slot: tokens})[slot]

    def prefill_together(self, wanted: Mapping[int, list[int]]) -> dict[int, int]:
        """`prefill` for several slots, with the rows of as many as fit in each decode.

        Sequences that begin like one before them wait for it, to copy its beginning.
        """
        counts: dict[int, int] = {}
        while len(counts) < len(wanted):
            left = {slot: tokens for slot, tokens in wanted.items() if slot not in counts}
            slots = sorted(self._unlike(left))
            for slot in slots:
                self._borrow(slot, left[slot])
            pending = [self._sync(Request(slot, left[slot], 0)) for slot in slots]
            counts |= {rows.slot: len(rows.tokens) for rows in pending}
            self._decode_all(pending)
            for slot in slots:
                if self._context.has_state and left[slot]:
                    self._remember(slot, is_lasting=True)
        return counts

    def logits(self, requests: Sequence[Request]) -> list[LogitRows]:
        """Next-token logits, [n_last, n_vocab] float32 per request, valid until the next call.

        All rows that give logits go through one decode. Raises DecodeError, RollbackError.
        """
        begun = time.perf_counter()
        pending = [self._sync(request) for request in requests]
        spent = time.perf_counter() - begun
        self._prefill(pending)
        if self._context.has_state:
            pending = [self._advanced(*pair) for pair in zip(requests, pending, strict=True)]
        begun = time.perf_counter() - spent
        if self._context.has_state:
            for request, rows in zip(requests, pending, strict=True):
                self._secure(request, rows)
        if self._context.is_split and len(pending) > 1:
            return self._decode_evenly(pending)
        return self._decode(pending, begun)

    def _unlike(self, wanted: Mapping[int, list[int]]) -> list[int]:
        """Slots whose sequence begins like no earlier one's that it had better copy from."""
        chosen: list[int] = []
        for slot, tokens in wanted.items():
            held = (common_prefix(held, tokens) for held in self._held.values())
            known = max(held, default=0)
            shared = max((common_prefix(wanted[other], tokens) for other in chosen), default=0)
            if not self._context.can_rollback or shared - known < self._least_copied:
                chosen.append(slot)
        return chosen

    def _decode_all(self, pending: list[Rows]) -> None:
        """Decode rows that need no logits, as many at a time as a batch takes."""
        while any(rows.tokens for rows in pending):
            batch, room = [], self._context.n_batch
            for i, rows in enumerate(pending):
                part = rows.tokens[:room]
                if part:
                    batch.append(Rows(rows.slot, rows.start, part, 0))
                    rest = rows.tokens[len(part) :]
                    pending[i] = Rows(rows.slot, rows.start + len(part), rest, 0)
                    room -= len(part)
            self._decode(batch)

    @property
    def _least_copied(self) -> int:
        """Tokens from which on copying them is less than decoding them."""
        return max(self._WORTH_COPYING, self._context.n_ctx // self._COPIED)

    def _borrow(self, slot: int, tokens: list[int]) -> None:
        """Copy the beginning of a sequence from the slot that holds most of it, if that is more."""
        if not self._held or not self._context.can_rollback:
            return
        shared = {other: common_prefix(held, tokens) for other, held in self._held.items()}
        best = max(shared, key=shared.__getitem__)
        if best == slot or shared[best] - shared.get(slot, 0) < self._least_copied:
            return
        self._sync(Request(best, list(self._held[best]), 0))  # an interrupt may have left rows
        self._held[slot] = []
        self._context.copy(best, slot)
        self._held[slot] = list(self._held[best])

    def _decode_evenly(self, pending: list[Rows]) -> list[LogitRows]:
        """Decode with rows that are held already before others, where that saves passes.

        A context with a buffer for each sequence takes neighbouring slots with equally many rows
        in one pass over the weights, and needs more passes for anything else.
        """
        count = max(len(rows.tokens) for rows in pending)
        wanted = {rows.slot: rows for rows in pending}
        slots = range(min(wanted), max(wanted) + 1)
        filled = {slot: self._lengthened(slot, wanted.get(slot), count) for slot in slots}
        batch = [filled[slot] for slot in slots if filled[slot].tokens]
        before = sorted(pending, key=lambda rows: rows.slot)
        extra = sum(len(r.tokens) for r in batch) - sum(len(r.tokens) for r in before)
        saved = passes(before) - passes(batch)
        if extra > self._PASS * saved or sum(len(r.tokens) for r in batch) > self._context.n_batch:
            batch = before
        for rows in batch:
            self._sync(Request(rows.slot, [*self._held[rows.slot][: rows.start], *rows.tokens],
                               len(rows.tokens)))
        logits = dict(zip((rows.slot for rows in batch), self._decode(batch), strict=True))
        return [logits[rows.slot] for rows in pending]

    def _lengthened(self, slot: int, rows: Rows | None, count: int) -> Rows:
        """So many rows of a slot, if it holds enough, and its rows behind them."""
        held = self._held.get(slot, [])
        start = len(held)
        own: Sequence[int] = () if rows is None else rows.tokens
        back = min(start, count - len(own)) if self._context.can_rollback else 0
        if back == start:  # the first token stays, as in every rollback
            back = max(0, start - 1)
        tokens = [*held[start - back :], *own]
        return Rows(slot, start - back, tokens, 0 if rows is None else rows.n_logits)

    def _kept(self, request: Request) -> int:
        """How many of the first tokens of a request need not be decoded again."""
        context, slot, tokens = self._context, request.slot, request.tokens
        keep = common_prefix(self._held.get(slot, []), tokens)
        keep = min(keep, len(tokens) - request.n_last)
        length = context.length(slot)
        if length == keep or length - keep <= context.reach(slot):
            return keep
        before = self._checkpoints.latest(slot, keep)
        return 0 if before is None else before.length

    def _sync(self, request: Request) -> Rows:
        """Cut the slot down to what the request can reuse; the rows that are still to decode."""
        slot = request.slot
        keep = self._kept(request)
        if self._context.length(slot) != keep:
            self._cut(slot, keep)
        held = self._held.setdefault(slot, [])
        del held[keep:]
        return Rows(slot, keep, request.tokens[keep:], request.n_last)

    def _cut(self, slot: int, keep: int) -> None:
        """Let the slot hold only its first tokens, as many as `_kept` said."""
        context = self._context
        held = self._held.setdefault(slot, [])
        del held[keep:]
        self._checkpoints.cut(slot, keep)
        before = self._checkpoints.latest(slot, keep)
        if keep == 0:
            context.clear(slot)
        elif before is None or context.length(slot) - keep <= context.reach(slot):
            self._truncate(slot, keep)
        else:
            del self._held[slot]  # it holds something unknown until this is done
            try:
                context.rewind(slot, keep, before.data)
            except RollbackError:
                self.forget(slot)
                raise
            self._held[slot] = held

    def _advanced(self, request: Request, rows: Rows) -> Rows:
        """The rows that are left to decode, once there are few before those that give logits.

        What is decoded again and again because the checkpoint lies before it grows round by round:
        at some length it is cheaper to decode it alone, and go on from behind it.
        """
        sure = len(request.tokens) - request.n_tentative
        again = min(sure - rows.start, len(rows.tokens) - rows.n_logits)
        if again <= self._PASS or self._is_within_snapshots(request, rows):
            return rows
        self._decode([Rows(rows.slot, rows.start, rows.tokens[:again], 0)])
        return Rows(rows.slot, rows.start + again, rows.tokens[again:], rows.n_logits)

    def _secure(self, request: Request, rows: Rows) -> None:
        """Keep a checkpoint where the tentative ones among the rows need it to be taken back."""
        sure = len(request.tokens) - request.n_tentative
        if rows.start <= sure and not self._is_within_snapshots(request, rows):
            self._remember(rows.slot, is_lasting=False)

    def _is_within_snapshots(self, request: Request, rows: Rows) -> bool:
        """Whether the snapshots of one decode of these rows reach behind the tentative ones."""
        return request.n_tentative <= min(self._context.n_tentative, len(rows.tokens) - 1)

    def _remember(self, slot: int, is_lasting: bool) -> None:
        """Keep a checkpoint of what the slot holds now."""
        length = len(self._held[slot])
        self._checkpoints.add(slot, length, is_lasting, lambda: self._context.checkpoint(slot))

    def _truncate(self, slot: int, keep: int) -> None:
        try:
            self._context.truncate(slot, keep)
            left = self._context.length(slot)
            if left != keep:
                raise RollbackError(
                    f"{self.name}: the KV cache holds {left} tokens after it was cut to {keep}; "
                    "run without a draft (--drafter none) and report this model"
                )
        except RollbackError:
            self.forget(slot)
            raise

    def save(self, slot: int) -> tuple[tuple[int, ...], bytes]:
        """The tokens that the slot holds, and the context's state for them, to be restored later.

        Raises StateError, RollbackError.
        """
        held = list(self._held.get(slot, ()))
        self._sync(Request(slot, held, 0))  # an interrupt may have left rows behind them
        return tuple(self._held[slot]), self._context.save(slot)

    def restore(self, slot: int, tokens: Sequence[int], data: bytes) -> None:
        """Let the slot hold `tokens` without decoding them, from what `save` gave for them.

        The file that the state came from is the caller's to compare. Raises StateError for damaged
        or foreign data, after which the slot is read anew by the next request.
        """
        self._held.pop(slot, None)
        self._checkpoints.drop(slot)
        self._context.restore(slot, data)
        found = self._context.length(slot)
        if found != len(tokens):
            self._context.clear(slot)
            raise StateError(
                f"{self.name}: the saved state holds {found} tokens and not the {len(tokens)} "
                "that belong to it; read the text again instead"
            )
        self._held[slot] = list(tokens)

    def forget(self, slot: int) -> None:
        """Drop what the slot holds; the next request starts from nothing."""
        self._held.pop(slot, None)
        self._checkpoints.drop(slot)
        self._context.clear(slot)

    def wipe(self) -> None:
        """Drop what all slots hold, without a trace.

        Cells that are free again are masked, but a NaN times nothing is a NaN.
        """
        self._held.clear()
        self._checkpoints.clear()
        self._context.wipe()

    def _prefill(self, pending: list[Rows]) -> None:
        """Decode leading rows, which need no logits, until the rest fits into one batch."""
        n_batch = self._context.n_batch
        surplus = sum(len(rows.tokens) for rows in pending) - n_batch
        for i, rows in enumerate(pending):
            while surplus > 0 and len(rows.tokens) > rows.n_logits:
                count = min(n_batch, len(rows.tokens) - rows.n_logits)
                self._decode([Rows(rows.slot, rows.start, rows.tokens[:count], 0)])
                rows = Rows(rows.slot, rows.start + count, rows.tokens[count:], rows.n_logits)
                surplus -= count
            pending[i] = rows

    def _decode(self, batch: list[Rows], begun: float | None = None) -> list[LogitRows]:
        """Decode all rows in one call. begun: since when time is counted as this decode's."""
        begun = time.perf_counter() if begun is None else begun
        try:
            logits = self._context.decode(batch)
        except BaseException as error:
            # What a failed decode left behind is unknown. An interrupted one leaves the keys and
            # values of what was held, but a state was being overwritten.
            if isinstance(error, DecodeError) or not self._context.can_rollback:
                for rows in batch:
                    self._held.pop(rows.slot, None)
                    self._checkpoints.drop(rows.slot)
                for rows in batch:
                    self._context.clear(rows.slot)
            raise
        for rows in batch:
            self._held[rows.slot].extend(rows.tokens)
            self.rows_decoded += len(rows.tokens)
        if self.on_decode is not None:
            n_rows = sum(len(rows.tokens) for rows in batch)
            n_logits = sum(rows.n_logits for rows in batch)
            self.on_decode(n_rows, n_logits, 1000 * (time.perf_counter() - begun))
        return logits


def passes(batch: Sequence[Rows]) -> int:
    """How often a context with a buffer for each sequence reads its weights for these rows.

    They come in order of slots. As llama.cpp's split_equal: the first slot with rows left and those
    that follow it without a gap give as many rows each as the least of them has.
    """
    left = [(rows.slot, len(rows.tokens)) for rows in batch if rows.tokens]
    count = 0
    while left:
        run = next((i for i in range(1, len(left)) if left[i][0] != left[i - 1][0] + 1), len(left))
        taken = min(n for _, n in left[:run])
        left = [(slot, n - taken) for slot, n in left[:run] if n > taken] + left[run:]
        count += 1
    return count


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    # In a round nearly all of it agrees, so whole slices are compared (in C) before bisecting.
    if a[:high] == b[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
