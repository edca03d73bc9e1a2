"""What is measured on: the built-in texts of four kinds, or the user's own prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specllama.errors import UsageError
from specllama.lm import Tokenizer


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind, as texts to be continued."""

    name: str
    prompts: tuple[str, ...]


_PROSE = """\
The old railway across the mountains was built between 1889 and 1904, and for most of those years
nobody believed that it would ever be finished. Snow closed the upper valley from November to April,
and the engineers who planned the long tunnel
""".replace("\n", " ").strip()

_CODE = '''\
"""A small library catalogue: books are added, lent to readers, and returned."""

from dataclasses import dataclass, field
from datetime import date, timedelta


@dataclass
class Book:
    title: str
    author: str
    year: int
    borrower: str | None = None
    due: date | None = None


class Catalogue:
    """All books of the library, by title."""

    def __init__(self, days_lent: int = 28) -> None:
        self.days_lent = days_lent
        self.books: dict[str, Book] = {}

    def add(self, book: Book) -> None:
        if book.title in self.books:
            raise'''

_ORIGINAL = """\
The harbour office opens at seven in the morning and closes at six in the evening, except on
Sundays, when it stays shut. Captain Morris signs the list of arrivals and hands it to the clerk,
who enters every ship in the long blue book: her name, her port, her cargo and the hour at which she
passed the lighthouse. On Monday the Albatross brought coffee and timber. On Tuesday the Marigold
brought oranges, and two of her crates were found broken on the quay. Captain Morris wrote a short
letter to the owners about it, and the clerk copied it twice. On Wednesday no ship came in, because
a storm stood over the bay from dawn until night. On Thursday the Albatross left again with a load
of glass, and Captain Morris closed the long blue book for the week.
""".replace("\n", " ").strip()

# The answer is begun, since small models tend to talk about the task instead.
_BEGUN = "The Harbour\n\nThe harbour office opens at seven in the"

_QUESTION = (
    "I would like to grow vegetables on a small balcony that gets the sun only in the morning. "
    "What should I plant, and what do I have to look after in the first weeks?"
)

NAMES = ("prose", "code", "copy", "chat")


def built_in(tokenizer: Tokenizer, names: Sequence[str] = NAMES) -> list[Workload]:
    """The built-in workloads of these names.

    "copy" asks for a text again under a title, and is as it were a rewriting task; "chat" is a
    question. Both are put in ChatML where the model has its markers, and plainly elsewhere.
    """
    markers = ("<|im_start|>", "<|im_end|>")
    if all(len(tokenizer.encode(m, special=True, add_special=False)) == 1 for m in markers):
        copy = _chat(
            f'Put the title "The Harbour" above this text and copy the text exactly:\n\n{_ORIGINAL}'
        )
        chat = _chat(_QUESTION)
    else:
        copy = (
            f"The text without its title:\n\n{_ORIGINAL}\n\n"
            "The same text, word for word, with its title:\n\n"
        )
        chat = f"Question: {_QUESTION}\n\nAnswer:"
    prompts = {"prose": _PROSE, "code": _CODE, "copy": copy + _BEGUN, "chat": chat}
    return [Workload(name, (prompts[name],)) for name in names]


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def read(path: Path) -> list[Workload]:
    """The prompts of a file: one a line, or in a .jsonl file the "prompt" of each object.

    Objects may name a "workload"; what has none belongs to the one that is named as the file.
    Empty lines count for nothing. Raises UsageError for a file that cannot be read or used.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror or error}); check the path"
        ) from None
    prompts: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, prompt = path.name, line
            if path.suffix == ".jsonl":
                name, prompt = _parse(line, path.name, f"line {number} of {path}")
            prompts.setdefault(name, []).append(prompt)
    if not prompts:
        raise UsageError(f"{path} has no prompts; write one on each line")
    return [Workload(name, tuple(texts)) for name, texts in prompts.items()]


def _parse(line: str, name: str, where: str) -> tuple[str, str]:
    """(workload, prompt) of one line of JSON."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is no JSON ({error.msg}); correct it") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UsageError(f'{where} is no object with a "prompt"; write {{"prompt": "a text"}}')
    if not isinstance(name := row.get("workload", name), str):
        raise UsageError(f'the "workload" in {where} is no text; write a name')
    return name, row["prompt"]
