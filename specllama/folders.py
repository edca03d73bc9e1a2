"""The user's own folders: for what may be deleted, for settings, and for what is remembered."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specllama import storage

CACHE_VARIABLE = "SPECLLAMA_CACHE"
CONFIG_VARIABLE = "SPECLLAMA_CONFIG"


def cache_folder() -> Path:
    """The user's cache folder for specllama, which may not exist yet.

    SPECLLAMA_CACHE when set; else `specllama` under XDG_CACHE_HOME or the platform's own folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
        return Path(local) / "specllama" / "Cache"
    # The XDG specification tells a reader to ignore a relative path.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "specllama"
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.path.expanduser(home)) / "specllama"


def config_folder() -> Path:
    """The user's configuration folder for specllama, which may not exist yet.

    SPECLLAMA_CONFIG when set; else the folder that click names for the platform.
    """
    chosen = os.environ.get(CONFIG_VARIABLE)
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    import click

    return Path(os.path.abspath(click.get_app_dir("specllama", roaming=False)))


def state_folder() -> Path:
    """The user's folder for what specllama remembers of its use, which may not exist yet."""
    # The XDG specification tells a reader to ignore a relative path.
    xdg = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(xdg):
        return Path(xdg) / "specllama"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
        return Path(local) / "specllama"
    home = "~/Library/Application Support" if sys.platform == "darwin" else "~/.local/state"
    return Path(os.path.expanduser(home)) / "specllama"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file as `storage.replace` does, and make its folder. Raises OSError."""
    real = Path(os.path.realpath(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    storage.replace(real, [data])
