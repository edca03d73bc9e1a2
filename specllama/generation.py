"""A loaded pair, and what it generates: chunks of text with their tokens, and statistics."""

from __future__ import annotations

import math
import operator
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specllama.acceptance import VERIFIERS, Round
from specllama.coupling import KeyedStreams
from specllama.drafting import SequenceState
from specllama.errors import PromptTooLong, UsageError
from specllama.lm import CachedLM, Tokenizer
from specllama.sampling import SamplingParams, Streams
from specllama.speculation import Speculator
from specllama.text import TextStream
from specllama.tuning import Speculation


@dataclass(frozen=True, slots=True)
class Token:
    """A delivered token. provenance: "accepted", "corrected" or "bonus" (see acceptance.Round)."""

    id: int
    text: str
    provenance: str


@dataclass(slots=True)
class Stats:
    """What one answer took; the names are those of llama.cpp's server where it has them.

    predicted_n = draft_n_accepted + rounds - discarded: every round adds its accepted drafts and
    one token more, and tokens behind the end of the answer are discarded. Times are milliseconds.
    prompt_cached_n: prompt tokens that were still in the cache. draft_failures: rounds in which the
    draft model gave no usable logits. by_position: per drafted position, how often it was reached
    by a draft, and how often its token was kept. lengths: how many rounds drafted so many tokens.
    verdict: what the draft model is worth, where that is measured.
    """

    seed: int = 0
    verifier: str = ""
    drafter: str = ""
    prompt_n: int = 0
    prompt_cached_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    corrected_n: int = 0
    bonus_n: int = 0
    discarded: int = 0
    draft_failures: int = 0
    by_position: list[tuple[int, int]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    verdict: str | None = None

    def add(self, outcome: Round) -> None:
        """Count one round."""
        self.rounds += 1
        self.draft_n += outcome.proposed
        self.draft_n_accepted += outcome.accepted
        self.draft_failures += outcome.draft.failed
        self.lengths[outcome.proposed] = self.lengths.get(outcome.proposed, 0) + 1
        if outcome.accepted == outcome.proposed:
            self.bonus_n += 1
        else:
            self.corrected_n += 1
        self.by_position += [(0, 0)] * (outcome.proposed - len(self.by_position))
        for i in range(outcome.proposed):
            reached, kept = self.by_position[i]
            self.by_position[i] = (reached + 1, kept + (i < outcome.accepted))

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that was kept; NaN when nothing was drafted."""
        return self.draft_n_accepted / self.draft_n if self.draft_n else math.nan

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round added on average, 1 for plain decoding; NaN without a round."""
        return (self.draft_n_accepted + self.rounds) / self.rounds if self.rounds else math.nan

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens over the time after the prompt was read; NaN without a token."""
        if not self.predicted_ms:
            return math.nan
        return 1000 * self.predicted_n / self.predicted_ms


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the answer. The last one carries why the answer ended.

    stats: of the answer so far, one object that grows; when the answer is broken off they lack
    `discarded` and `verdict`. finish_reason: "stop" or "length". finish_detail: "end token", "stop
    string", "token limit" or "context full".
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None
    finish_detail: str | None = None
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that was checked, with how its answer is drawn and where that ends.

    limit: most tokens of the answer. limit_detail: what a limit that is reached was.
    """

    tokens: tuple[int, ...]
    params: SamplingParams
    limit: int
    limit_detail: str
    stops: tuple[str, ...]


# Characters, more than any marker has.
_HEAD = 256


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text to be continued, in which markers count as the model's own.

    BOS is put before it if the vocabulary says so and the text does not begin with it.
    """
    tokens = tokenizer.encode(text, special=True, add_special=True)
    return tokens[1:] if _is_begun_twice(tokenizer, tokens) else tokens


def begins_itself(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text begins with the BOS that the vocabulary would put before it."""
    head = tokenizer.encode(text[:_HEAD], special=True, add_special=True)
    return _is_begun_twice(tokenizer, head)


def _is_begun_twice(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    bos = tokenizer.bos
    if bos is None or list(tokens[:2]) != [bos, bos]:
        return False
    return tokenizer.encode("", special=True, add_special=True)[:1] == [bos]


class Pair:
    """A target with its drafter, ready to generate. Close it, or use it in a with statement.

    verifier: "block", "token" or "coupled"; None is coupled where an answer's seed is named, so
    that the text is a function of the seed, and block elsewhere. n_tokens: ids from here on are
    padding and never emitted. draft, draft_tokenizer: the draft model that is loaded, whether the
    drafter uses it or not. n_tokens_draft: as n_tokens, of the draft. chat_template: the target's
    own, where its file has one. files: of the target and, if it was asked for, of the draft. auto:
    makes the speculation that decides by measurement, for a pair that was loaded with another.
    notices: what the user should know of how this pair runs. layout: where its models lie, a
    sentence each. close: frees it all.
    """

    def __init__(
        self,
        target: CachedLM,
        tokenizer: Tokenizer,
        speculation: Speculation,
        verifier: str | None = None,
        *,
        n_tokens: int,
        draft: CachedLM | None = None,
        draft_tokenizer: Tokenizer | None = None,
        n_tokens_draft: int | None = None,
        chat_template: str | None = None,
        files: Sequence[Path] = (),
        auto: Callable[[], Speculation] | None = None,
        notices: Sequence[str] = (),
        layout: Sequence[str] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.draft = draft
        self.draft_tokenizer = draft_tokenizer
        self.n_tokens_draft = n_tokens_draft
        self.chat_template = chat_template
        self.files = tuple(files)
        self.auto = auto
        self.notices = tuple(notices)
        self.layout = tuple(layout)
        self.verifier = verifier
        self.n_tokens = n_tokens
        self._close = close

    def close(self) -> None:
        """Free both models; more than once does nothing."""
        self._close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> Iterator[Chunk]:
        """Continue a prompt, text or token ids, chunk by chunk as rounds complete.

        max_tokens: None or -1 go on until the model ends the answer or the context is full.
        stop: texts at which the answer ends; they and what follows are not delivered. seed: None
        draws one, told in the statistics; a named one gives its text again (see `verifier`).
        ignore_eos: the model cannot end the answer.
        The iterator may be abandoned at any step. Raises UsageError at once for a prompt that is
        empty or leaves no room, and while iterating InvalidLogits, DecodeError, RollbackError.
        """
        question = self.question(
            prompt, params, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos
        )
        verifier = self.verifier or ("block" if seed is None else "coupled")
        seed = secrets.randbits(32) if seed is None else seed
        state = self.sequence(question, 0, verifier, seed)
        stats = Stats(seed, verifier, self.speculation.name, prompt_n=len(question.tokens))
        return self._run(state, stats, self.ending(question))

    def question(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Question:
        """What is to be answered; see `generate`. Raises UsageError."""
        tokens = self._prompt_tokens(prompt)
        params = params or SamplingParams()
        self._require_known(params.logit_bias, "the logit bias names")
        if ignore_eos:
            banned = dict.fromkeys(self.tokenizer.end_tokens, -math.inf)
            params = replace(params, logit_bias={**params.logit_bias, **banned})
        if max_tokens is not None and operator.index(max_tokens) < -1:
            raise UsageError(f"max_tokens must be -1 (no limit) or more, not {max_tokens}")
        room = self.target.n_ctx - len(tokens)
        limit, limit_detail = room, "context full"
        if max_tokens is not None and 0 <= max_tokens <= room:
            limit, limit_detail = max_tokens, "token limit"
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Question(tuple(tokens), params, limit, limit_detail, stops)

    def sequence(
        self, question: Question, slot: int, verifier: str, seed: int, row: int | str = 0
    ) -> SequenceState:
        """A question in a slot of the contexts, its randomness keyed by seed and row."""
        kind = KeyedStreams.keyed if verifier == "coupled" else Streams.seeded
        streams: Streams = kind(seed, row)
        return SequenceState(
            slot,
            list(question.tokens),
            question.params,
            streams,
            question.limit,
            self.tokenizer.end_tokens,
        )

    def ending(self, question: Question) -> Ending:
        """What turns the rounds of an answer into text. Raises UsageError for an empty stop."""
        return Ending(self.tokenizer, question.stops, question.limit_detail)

    def speculator(self, verifier: str) -> Speculator:
        """The loop over this pair's models."""
        return Speculator(
            self.target,
            self.speculation.drafter,
            VERIFIERS[verifier],
            self.n_tokens,
            self.speculation.budget,
        )

    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, bytes):
            raise TypeError("a prompt is text or token ids, not bytes; decode it first")
        if isinstance(prompt, str):
            tokens = encode_prompt(self.tokenizer, prompt)
        else:
            tokens = [operator.index(t) for t in prompt]
        if not tokens and self.tokenizer.bos is not None:
            tokens = [self.tokenizer.bos]
        if not tokens:
            raise UsageError(
                f"the prompt is empty and {self.tokenizer.name} has no token to begin a text with; "
                "give it some text"
            )
        self._require_known(tokens, "the prompt holds")
        if len(tokens) >= self.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens and the context holds {self.target.n_ctx}, "
                "which leaves no room for an answer; shorten it or raise --ctx-size"
            )
        return tokens

    def _require_known(self, tokens: Iterable[int], who: str) -> None:
        for token in tokens:
            if not 0 <= token < self.tokenizer.n_vocab:
                raise UsageError(
                    f"{who} token id {token}, but {self.tokenizer.name} has only ids "
                    f"0 to {self.tokenizer.n_vocab - 1}; use this model's own tokens"
                )

    def _run(self, state: SequenceState, stats: Stats, ending: Ending) -> Iterator[Chunk]:
        speculator = self.speculator(stats.verifier)
        clock = time.perf_counter
        begun = clock()
        if state.n_left > 0:
            decoded = speculator.prefill(state)
            stats.prompt_cached_n = len(state.tokens) - 1 - decoded
        stats.prompt_ms = 1000 * (clock() - begun)
        chunk = Chunk("")
        while ending.reason is None:
            begun = clock()
            if state.n_left > 0:
                [outcome] = speculator.round([state])
                stats.add(outcome)
                chunk = ending.take(outcome)
            else:
                chunk = ending.exhausted()
            stats.predicted_n += len(chunk.tokens)
            # Only our own time: the reader of the chunks may take as long as it likes.
            stats.predicted_ms += 1000 * (clock() - begun)
            if ending.reason is None and (chunk.text or chunk.tokens):
                yield replace(chunk, stats=stats)
        stats.discarded = stats.draft_n_accepted + stats.rounds - stats.predicted_n
        stats.verdict = self.speculation.verdict()
        yield replace(chunk, finish_reason=ending.reason, finish_detail=ending.detail, stats=stats)


class Ending:
    """Turns rounds into chunks, and knows when and why the answer is over."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], limit_detail: str) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(_control_tokens(tokenizer, stops))
        self._stream = TextStream(stops)
        self._held: list[Token] = []
        self._released = 0
        self._limit_detail = limit_detail
        self.reason: str | None = None
        self.detail: str | None = None

    def take(self, outcome: Round) -> Chunk:
        """The deliverable part of a round."""
        text = ""
        for token, provenance in zip(outcome.tokens, outcome.provenance, strict=True):
            if token in self._tokenizer.end_tokens or token in self._stops:
                self.reason = "stop"
                ended = token in self._tokenizer.end_tokens
                self.detail = "end token" if ended else "stop string"
                text += self._stream.flush()
                break
            piece = self._tokenizer.piece(token)
            text += self._stream.feed(piece)
            self._held.append(Token(token, piece.decode("utf-8", "replace"), provenance))
            if self._stream.stopped is not None:
                self.reason, self.detail = "stop", "stop string"
                break
        return Chunk(text, self._release())

    def exhausted(self) -> Chunk:
        """What was held back when the answer reaches its limit."""
        self.reason, self.detail = "length", self._limit_detail
        return Chunk(self._stream.flush(), self._release())

    def _release(self) -> tuple[Token, ...]:
        """Tokens whose text has been let out since the last call."""
        count = self._stream.delivered_pieces - self._released
        self._released += count
        released, self._held = self._held[:count], self._held[count:]
        return tuple(released)


def _control_tokens(tokenizer: Tokenizer, stops: Sequence[str]) -> Iterator[int]:
    """Control tokens among the stop strings: they print nothing, so their text never appears."""
    for stop in stops:
        ids = tokenizer.encode(stop, special=True, add_special=False)
        if len(ids) == 1 and not tokenizer.piece(ids[0]):
            yield ids[0]
