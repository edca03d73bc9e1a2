"""A report without what tells who made it: the home folder, the names of the user and the host."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path
from typing import Any


def personal_names() -> dict[str, str]:
    """What may stand in a path or a message and is nobody's business, and what to say instead."""
    names = {}
    for find, instead in ((getpass.getuser, "USER"), (socket.gethostname, "HOST")):
        try:
            names[find()] = instead
        except (OSError, KeyError, ImportError):
            continue
    return {name: instead for name, instead in names.items() if name and name != "localhost"}


def anonymous(value: Any, names: dict[str, str], home: Path | None = None) -> Any:
    """The same value with the home folder as ~, and names only as what stands for them."""
    if isinstance(value, dict):
        return {key: anonymous(each, names, home) for key, each in value.items()}
    if isinstance(value, list):
        return [anonymous(each, names, home) for each in value]
    if not isinstance(value, str):
        return value
    folder = str(home or os.path.expanduser("~")).rstrip("/\\")
    if os.path.isabs(folder):  # not in a container without users
        value = re.sub(rf"{re.escape(folder)}(?![^/\\\s\"':;,])", "~", value)
    for name, instead in names.items():
        value = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", instead, value)
    return value
