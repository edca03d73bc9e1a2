"""The records of a batch: what a line of its output says of a row.

In the format in which the row was asked: our own, or a response of OpenAI's Batch API. Beside that
all of them have the row's number, its line in the input, and the fingerprint of what they were made
from.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from specllama.answers import stats_object
from specllama.batch_input import Entry
from specllama.batch_ledger import PARTS, Fingerprint
from specllama.batch_rows import Row
from specllama.batch_values import CHAT, COMPLETION, PLAIN, RowError
from specllama.parallel import Answer


def answered(
    entry: Entry, row: Row, answer: Answer[Any], fingerprint: Fingerprint, model: str
) -> dict[str, Any]:
    """The record of an answer. model: the target's name."""
    usage = {
        "prompt_tokens": answer.stats.prompt_n,
        "completion_tokens": answer.stats.predicted_n,
        "total_tokens": answer.stats.prompt_n + answer.stats.predicted_n,
    }
    told = {
        **_place(entry, fingerprint),
        "seed": answer.stats.seed,
        "finish_detail": answer.finish_detail,
        "stats": stats_object(answer.stats),
    }
    if row.style == PLAIN:
        reason = {"finish_reason": answer.finish_reason}
        return {"id": row.id, "text": answer.text, **reason, "usage": usage, **told}
    body = _body(row, answer, row.model or model)
    response = {"status_code": 200, "request_id": _number(row.id), "body": {**body, "usage": usage}}
    return {**_named(row.style, row.id), "response": response, "error": None, **told}


def failed(entry: Entry, error: RowError, fingerprint: Fingerprint) -> dict[str, Any]:
    """The record of a row that could not be answered."""
    told = {"code": error.code, "message": f"line {entry.line}: {error.message}"}
    response = {}
    if error.style != PLAIN:
        body = {"error": {**told, "type": "invalid_request_error", "param": None}}
        number = _number(error.id or f"line {entry.line}")
        response = {"response": {"status_code": 400, "request_id": number, "body": body}}
    return {
        **_named(error.style, error.id, f"line {entry.line}"),
        **response,
        "error": told,
        **_place(entry, fingerprint),
    }


def _place(entry: Entry, fingerprint: Fingerprint) -> dict[str, Any]:
    parts = dict(zip(PARTS, fingerprint, strict=True))
    return {"index": entry.index, "line": entry.line, "fingerprint": parts}


def _named(style: str, name: str | None, instead: str = "") -> dict[str, Any]:
    if style == PLAIN:
        return {"id": name}
    return {"id": f"batch_{_number(name or instead)}", "custom_id": name}


def _number(name: str) -> str:
    """A number of a request, which this format wants and nobody here gave it."""
    return f"req_{hashlib.sha256(name.encode()).hexdigest()[:24]}"


def _body(row: Row, answer: Answer[Any], model: str) -> dict[str, Any]:
    """A completion as OpenAI's service writes it."""
    kinds = {CHAT: ("chatcmpl", "chat.completion"), COMPLETION: ("cmpl", "text_completion")}
    prefix, kind = kinds[row.style]
    said: dict[str, Any] = {"text": answer.text}
    if row.style == CHAT:
        said = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish_reason}
    return {
        "id": f"{prefix}-{_number(row.id)[4:]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }
