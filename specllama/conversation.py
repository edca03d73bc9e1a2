"""A conversation with a pair of models, without a terminal.

Each turn renders the whole conversation; what the caches hold of it already is not decoded again,
for target and draft separately. The state changes with every chunk, so a turn may end anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from specllama.errors import UsageError
from specllama.generation import Chunk, Pair
from specllama.prompts import Message
from specllama.sampling import SamplingParams
from specllama.speakers import Speakers
from specllama.turns import Answer, by_turn, opening_of, printing, turn_seed

log = logging.getLogger(__name__)

# A turn that leaves the answer less room is refused, in tokens.
LEAST_ROOM = 16


class MessageFormat(Protocol):
    """How messages become a prompt; `prompts.ChatFormat` is one."""

    @property
    def notices(self) -> Sequence[str]:
        """What the user should know of how prompts were made, which may grow with each."""
        ...

    @property
    def supports_thinking(self) -> bool:
        """Whether `thinking` makes a difference."""
        ...

    def tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
        """Token ids that end where the assistant begins to speak."""
        ...


@dataclass(frozen=True)
class _State:
    """What a turn changes, to be put back when nothing came of it."""

    messages: tuple[Message, ...]
    dropped: tuple[Message, ...]
    attempt: int
    last: Answer | None


@dataclass(frozen=True)
class _Open:
    """A turn that is under way. n_asked: messages up to the user's. speaker: who answers."""

    before: _State
    n_asked: int
    answer: Answer
    speaker: Pair


class Conversation:
    """Turns of a user and the models of a pair.

    messages: those of user and assistant that the model sees; the system prompt is apart.
    dropped: earlier ones that the context had no room for. params, system, max_tokens, stop, seed,
    ignore_eos, context_full, thinking: may be set between turns. last: the last answer of
    `messages`. notify: told in a sentence when turns are dropped. on_reading: told how many tokens
    will be read before an answer begins.

    seed: None draws one for every answer. With a named seed the first answer has this seed itself,
    so it is what `generate` gives for the same prompt; others have one that is derived from the
    seed, the number of the turn and the number of the retry (see `turn_seed`).

    context_full: "drop" forgets the oldest turns, whole, when an answer of max_tokens or a quarter
    of the context, whichever is less, has no room any more; then as many as leave half of the
    context free, so that the next turns find room without reading everything again. "stop" drops
    nothing and refuses a turn that leaves the answer less than LEAST_ROOM, or max_tokens if that is
    less.
    """

    def __init__(
        self,
        pair: Pair,
        chat_format: MessageFormat,
        *,
        params: SamplingParams | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        context_full: Literal["drop", "stop"] = "drop",
        thinking: bool | None = None,
        notify: Callable[[str], None] = log.warning,
    ) -> None:
        self.pair = pair
        self.chat_format = chat_format
        self.params = params or SamplingParams()
        self.system = system
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.seed = seed
        self.ignore_eos = ignore_eos
        self.on_reading: Callable[[int], None] = lambda n_tokens: None
        self.context_full = context_full
        self.thinking = thinking
        self.messages: list[Message] = []
        self.dropped: list[Message] = []
        self.last: Answer | None = None
        self.attempt = 0  # retries of the last turn
        self._notify = notify
        self._speakers = Speakers(pair)
        self._running: Generator[Chunk, None, None] | None = None
        self._open: _Open | None = None

    def ask(self, text: str) -> Iterator[Chunk]:
        """Say something; the answer, chunk by chunk, whose texts together are its content.

        The iterator may be abandoned or interrupted at any step: what was answered until then is
        kept as the whole answer, and before anything was answered the user's turn is taken back.
        Every other method ends an iterator that is not at its end. Raises, at the first step and
        leaving the conversation as it was, UsageError for a message that has no room and what the
        chat format refuses; then whatever `Pair.generate` raises.
        """
        self.settle()
        return self._start(self.messages, text, 0)

    def retry(self, seed: int | None = None) -> Iterator[Chunk]:
        """Answer the last message of the user once more, with other random numbers.

        seed: for this answer alone; that of the last answer's statistics gives its text again where
        the verifier is coupled. When nothing is answered, the earlier answer stays.
        """
        base, text = self._before_last_turn("there is nothing to answer again")
        return self._start(base, text, self.attempt + 1, seed)

    def edit(self, text: str) -> Iterator[Chunk]:
        """Replace the user's last message and answer it; if nothing comes the old one stays."""
        base, _ = self._before_last_turn("there is no message to edit")
        return self._start(base, text, 0)

    def undo(self) -> Message | None:
        """Take the last message of the user back, with its answer; the message, or None."""
        self.settle()
        turns = by_turn(self.messages)
        if not turns:
            return None
        self.resume(self.messages[: -len(turns[-1])], self.dropped)
        return turns[-1][0]

    def clear(self) -> None:
        """Forget every message; the system prompt and the parameters stay."""
        self.resume((), ())

    def resume(
        self, messages: Sequence[Message], dropped: Sequence[Message] = (), attempt: int = 0
    ) -> None:
        """Go on from other messages. attempt: retries that the last of them has had."""
        self.settle()
        self._put(_State(tuple(messages), tuple(dropped), attempt, None))

    def settle(self) -> None:
        """End an answer whose iterator was left before its end; what interrupts it, it may redo."""
        if self._running is not None:
            self._running.close()
        self._finish()
        self._running = None

    def speculate(self, choice: str | int) -> None:
        """Choose who drafts from the next answer on: "auto", a number, "off" or "only".

        See `Speakers.choose`. Raises UsageError when it cannot be had; then nothing changes.
        """
        self.settle()
        self._speakers.choose(choice)

    @property
    def speculation(self) -> str | int:
        """Who drafts: "auto", a number of tokens, "off" or "only"."""
        return self._speakers.choice

    @property
    def knows_what_pays(self) -> bool:
        """Whether "auto" can be chosen without measuring first."""
        return self._speakers.knows_what_pays

    @property
    def context(self) -> tuple[int, int]:
        """Tokens that the conversation takes, of how many that the context holds."""
        n_ctx = self._speakers.now.target.n_ctx
        if self.last is not None:
            return self.last.prompt_n + len(self.last.tokens), n_ctx
        turns = by_turn(self.messages)
        if not turns:
            return 0, n_ctx
        answers = turns[-1][1:]
        asked = self.messages[: len(self.messages) - len(answers)]
        if asked[-1].role != "user":  # from a file that somebody wrote
            return sum(map(self._n_tokens, self.messages)), n_ctx
        return len(self._prompt(asked)) + sum(map(self._n_tokens, answers)), n_ctx

    def _n_tokens(self, message: Message) -> int:
        encode = self.pair.tokenizer.encode
        return len(message.tokens or encode(message.content, special=False, add_special=False))

    def _before_last_turn(self, refusal: str) -> tuple[list[Message], str]:
        """The messages before the user's last one, and what that says."""
        self.settle()
        turns = by_turn(self.messages)
        if not turns or turns[-1][0].role != "user":
            raise UsageError(f"{refusal}; say something first")
        return self.messages[: -len(turns[-1])], turns[-1][0].content

    def _start(
        self, base: Sequence[Message], text: str, attempt: int, seed: int | None = None
    ) -> Iterator[Chunk]:
        if seed is None and self.seed is not None:
            earlier = sum(message.role == "user" for message in (*self.dropped, *base))
            seed = turn_seed(self.seed, earlier, attempt)
        self._running = self._turn([*base, Message("user", text)], attempt, seed)
        return self._running

    def _turn(
        self, asked: list[Message], attempt: int, seed: int | None
    ) -> Generator[Chunk, None, None]:
        """A turn, given the messages up to the user's; the state fits at every step."""
        before = _State(tuple(self.messages), tuple(self.dropped), self.attempt, self.last)
        speaker = self._speakers.now
        gone, prompt = self._fitting(asked)
        answer = Answer(len(prompt), *opening_of(prompt, speaker.tokenizer))
        self.on_reading(speaker.target.missing(0, list(prompt)))
        chunks = speaker.generate(
            prompt,
            self.params,
            max_tokens=self.max_tokens,
            stop=self.stop,
            seed=seed,
            ignore_eos=self.ignore_eos,
        )
        asked = asked[len(gone) :]
        self._open = _Open(before, len(asked), answer, speaker)
        try:
            self._put(_State(tuple(asked), (*before.dropped, *gone), attempt, answer))
            if gone:
                self._notify(_drop_notice(gone))
            for chunk in chunks:
                shown = answer.add(chunk)
                self.messages[len(asked) :] = [answer.message()]
                yield shown
        finally:
            self._finish()

    def _finish(self) -> None:
        """Let the messages be what has become of the turn under way.

        An interrupt may fall in here, too, and then this is done once more.
        """
        turn = self._open
        if turn is None:
            return
        if turn.answer.is_begun:
            message = printing(turn.answer.message(), turn.speaker.tokenizer)
            self.messages[turn.n_asked :] = [message]
        else:
            self._put(turn.before)
        self._open = None

    def _put(self, state: _State) -> None:
        self.messages[:] = state.messages
        self.dropped[:] = state.dropped
        self.attempt, self.last = state.attempt, state.last

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        system = [Message("system", self.system)] if self.system else []
        return self.chat_format.tokens([*system, *messages], thinking=self.thinking)

    def _fitting(self, asked: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages that have to go, and the prompt of the others. Raises UsageError."""
        n_ctx = self._speakers.now.target.n_ctx
        limit = -1 if self.max_tokens is None else self.max_tokens
        room = max(1, min(limit if limit >= 0 else n_ctx, n_ctx // 4))
        least = min(room, LEAST_ROOM)
        prompt = self._prompt(asked)
        if len(prompt) + (least if self.context_full == "stop" else room) <= n_ctx:
            return [], prompt
        older = by_turn(asked)[:-1]
        if self.context_full == "stop" and older:
            raise UsageError(
                f"the conversation has {len(prompt)} tokens with this message and the context "
                f"holds {n_ctx}, which leaves no room for an answer; take turns back, begin a new "
                "conversation, or raise --ctx-size"
            )
        options: list[tuple[list[Message], list[int]]] = [([], prompt)]
        for turn in older:
            gone = [*options[-1][0], *turn]
            options.append((gone, self._prompt(asked[len(gone) :])))
        for free in (n_ctx // 2, room):
            for option in options:
                if len(option[1]) + free <= n_ctx:
                    return option
        if len(options[-1][1]) + least <= n_ctx:
            return options[-1]
        raise UsageError(
            f"this message makes a prompt of {len(options[-1][1])} tokens and the context holds "
            f"{n_ctx}, which leaves no room for an answer; shorten it or raise --ctx-size"
        )


def _drop_notice(gone: Sequence[Message]) -> str:
    n_turns = len(by_turn(gone))
    what = "oldest turn is" if n_turns == 1 else f"{n_turns} oldest turns are"
    return f"the context is full, so the {what} no longer shown to the model"
