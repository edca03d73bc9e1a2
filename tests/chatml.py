"""Conversations with tiny models, for tests: a prompt format, and what a fresh process says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tiny import tiny

from specllama import llama, tuning, vocabulary
from specllama.conversation import Conversation
from specllama.generation import Pair
from specllama.lm import CachedLM, Tokenizer
from specllama.prompts import Message
from specllama.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)


class ChatML:
    """The ids of answers as they are, where they are known. opening: what an answer begins with."""

    notices = ()
    supports_thinking = False

    def __init__(self, tokenizer: Tokenizer, opening: str = "") -> None:
        self._tokenizer = tokenizer
        self._opening = opening

    def tokens(self, messages: Sequence[Message], *, thinking: bool | None = None) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += self._encode(f"<|im_start|>{message.role}\n")
            ids += message.tokens or self._encode(message.content, special=False)
            ids += self._encode("<|im_end|>\n")
        return ids + self._encode("<|im_start|>assistant\n" + self._opening)

    def _encode(self, text: str, special: bool = True) -> list[int]:
        return self._tokenizer.encode(text, special=special, add_special=False)


@contextmanager
def loaded(draft: Path | None = None, draft_tokens: int = 3, ctx_size: int = 512) -> Iterator[Pair]:
    """A tiny pair that drafts three tokens a round and has about half of them accepted.

    The caches are float32 and flash attention is off, so that it makes nearly no difference how
    many rows are decoded together.
    """
    files = [tiny(), draft or tiny(noise=0.05)][: 2 if draft_tokens else 1]
    with ExitStack() as stack:
        models = [stack.enter_context(llama.Model(path)) for path in files]
        lms = [
            CachedLM(
                stack.enter_context(
                    llama.Context(
                        model, n_ctx=ctx_size, n_batch=128, kv_type="f32", flash_attention=False
                    )
                )
            )
            for model in models
        ]
        speculation = tuning.plain()
        if draft_tokens:
            shared = vocabulary.require_compatible(models[0].tokenizer, models[1].tokenizer)
            speculation = tuning.fixed(lms[1], shared, draft_tokens)
        yield Pair(
            lms[0],
            models[0].tokenizer,
            speculation,
            n_tokens=vocabulary.real_tokens(models[0].tokenizer),
            draft=lms[1] if draft_tokens else None,
            draft_tokenizer=models[1].tokenizer if draft_tokens else None,
            files=files,
        )


def talk(pair: Pair, opening: str = "", **options: Any) -> Conversation:
    """A conversation at temperature 0 with answers of 24 tokens."""
    chat_format = ChatML(pair.tokenizer, opening)
    return Conversation(pair, chat_format, **{"params": GREEDY, "max_tokens": 24, **options})


def fresh_answer(pair: Pair, messages: Sequence[Message], **options: Any) -> Message:
    """What a process that has just begun answers to the last of the messages."""
    pair.target.forget(0)
    if pair.draft is not None:
        pair.draft.forget(0)
    conversation = talk(pair, **options)
    conversation.resume(messages[:-1])
    for _ in conversation.ask(messages[-1].content):
        pass
    return conversation.messages[-1]


def say(conversation: Conversation, text: str) -> Message:
    """A whole turn; the answer."""
    streamed = "".join(chunk.text for chunk in conversation.ask(text))
    answer = conversation.messages[-1]
    assert answer.role == "assistant" and answer.content == streamed
    return answer
