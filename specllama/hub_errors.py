"""What goes wrong with the hub, each in a sentence of its own with the next step."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specllama.errors import HubError, SpecllamaError
from specllama.sources import HubFile, describe

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CREDENTIALS = re.compile(r"://[^\s/]*@")
_LOGIN = "`hf auth login`, or HF_TOKEN"


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids every connection."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def endpoint() -> str:
    """The hub's address for messages: without a user name and a password in it."""
    from huggingface_hub import constants

    scheme, colon, rest = constants.ENDPOINT.rpartition("://")
    return f"{scheme}{colon}{rest.rpartition('@')[2]}"


@contextlib.contextmanager
def told(source: HubFile, folder: Path | None = None) -> Iterator[None]:
    """Turn whatever huggingface-hub raises into a HubError.

    folder: where files are written, once the hub has answered. The original error is left out of
    the chain: it can hold a token, in the value of a header that was refused.
    """
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_redact)
    try:
        yield
    except SpecllamaError:
        raise
    except Exception as error:
        raise HubError(_redacted(_sentence(source, error, folder))) from None


def _sentence(source: HubFile, error: Exception, folder: Path | None) -> str:
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, OfflineModeIsEnabled):
        return f"offline (HF_HUB_OFFLINE is set), so {describe(source)} cannot be fetched; unset it"
    if isinstance(error, HFValidationError):
        return f'the hub has no repository called "{source.repo}"; correct the name'
    if isinstance(error, UnicodeError):
        return f"the token has characters that no token has; give it again ({_LOGIN})"
    response = getattr(error, "response", None)
    if isinstance(error, HfHubHTTPError) and response is not None:
        if folder is not None and response.status_code < 429 and not _is_hub(response.url):
            return (
                f"the server to which the hub sends for {describe(source)} refuses it (HTTP "
                f"{response.status_code}); pull it again, and if it stays so, check the proxy"
            )
        return _refused(source, error, response.status_code, response.headers)
    if folder is not None and isinstance(error, OSError) and error.errno is not None:
        return _not_written(source, error, folder)
    reason = f"{type(error).__name__}: {error}".strip().rstrip(".: ").splitlines()[0]
    if "InvalidURL" in reason:  # which quotes a part of it, that may be of a password
        reason = "that is no address"
    if folder is None and isinstance(error, json.JSONDecodeError):
        return no_hub(source)
    if folder is None:
        hub = endpoint() or "the empty HF_ENDPOINT"
        return (
            f"cannot reach {hub} for {describe(source)} ({reason}); check the network, the proxy "
            "and HF_ENDPOINT"
        )
    return (
        f"the download of {describe(source)} broke off ({reason}); nothing of it is kept, check "
        "the network and pull it again"
    )


def _is_hub(url: Any) -> bool:
    """Whether an address is on the hub itself."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return (url.host, url.port) == (parts.hostname, parts.port)


def no_hub(source: HubFile) -> str:
    """Somebody else answers in the hub's place."""
    return (
        f"{endpoint()} does not answer like a Hugging Face hub for {describe(source)}; "
        "check HF_ENDPOINT, and whether a proxy or a login page is in the way"
    )


def _refused(source: HubFile, error: Exception, status: int, headers: object) -> str:
    """What an HTTP status means for a person."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RevisionNotFoundError

    page = f"{endpoint()}/{source.repo}"
    if isinstance(error, GatedRepoError):
        return (
            f"{source.repo} is gated: accept its terms on {page}, give a token of that account "
            f"({_LOGIN}), and pull again"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{source.repo} has no revision {source.revision}; see {page}/commits, correct it"
    if isinstance(error, EntryNotFoundError):
        where = f"{page}/tree/{source.revision}"
        return f"{source.repo} has no file {source.file}; see {where} and correct the name"
    if status == 401:
        return _unauthorised(source, page)
    if status == 403:
        return (
            f"the hub forbids {describe(source)} to this token (HTTP 403); give one that may read "
            f"it ({_LOGIN})"
        )
    if status == 404:
        return f"there is no repository {source.repo} on {endpoint()}; correct the name"
    if status == 429:
        after = getattr(headers, "get", lambda _: None)("Retry-After")
        wait = f"{after} seconds" if after else "some minutes"
        return f"the hub has had too many requests (HTTP 429); wait {wait} and pull again"
    if status >= 500:
        return f"the hub has trouble of its own (HTTP {status}); pull again later"
    return f"the hub answers HTTP {status} for {describe(source)}; check the name and HF_ENDPOINT"


def _unauthorised(source: HubFile, page: str) -> str:
    if _token():
        return (
            f"the hub does not take this token for {source.repo} (HTTP 401); check the name on "
            f"{page}, or give another token ({_LOGIN})"
        )
    return (
        f"there is no repository {source.repo}, or it is private (HTTP 401); check the name, or "
        f"give a token ({_LOGIN})"
    )


def _not_written(source: HubFile, error: OSError, folder: Path) -> str:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return (
            f"the disk of {folder} is full ({reason}), so nothing of {describe(source)} is kept; "
            "make room, or set HF_HOME to a folder on another disk, and pull again"
        )
    name = error.filename or folder
    return f"{describe(source)} cannot be written to {name} ({reason}); check the folder or HF_HOME"


def _redacted(text: str) -> str:
    """A text without the token, and without the user and password in any address."""
    from huggingface_hub import constants

    for secret in (os.environ.get("HF_TOKEN"), _token()):
        if secret and secret.strip():
            text = text.replace(secret, "***").replace(secret.strip(), "***")
    if constants.ENDPOINT:
        text = text.replace(constants.ENDPOINT, endpoint())
    return _CREDENTIALS.sub("://", text)


def _token() -> str | None:
    from huggingface_hub import get_token

    try:
        return get_token()
    except Exception:  # one that has to be asked for, and is not given
        return None


def _redact(record: logging.LogRecord) -> bool:
    """Let huggingface-hub's own warnings pass, without what nobody should read."""
    record.msg, record.args = _redacted(record.getMessage()), None
    return True
