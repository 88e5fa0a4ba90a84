"""Paths as people type them."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_3d.checkpoint import local_path
from lightning_3d.errors import ConfigError


def given_path(text: str) -> Path:
    """The path that an argument names; ``~`` is the home folder even where no shell has seen it.

    Raises:
        CheckpointError: It is a URL.
        ConfigError: It is empty.
    """
    if not text.strip():
        raise ConfigError("An empty path was given (a variable that is not set?). Give the path of a checkpoint.")
    return local_path(os.path.expanduser(text))


def check_writable(option: str, path: Path | None) -> None:
    """Refuse, before any work is done, a path that no file can be written to.

    Raises:
        ConfigError: It is a folder, or lies below something that is none.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a folder. Give the name of a file in it.")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ConfigError(f"{option} {path}: {parent} is a file, so nothing can lie below it. Give another path.")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise ConfigError(f"{option} {path}: writing there is not permitted. Give another path.")


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write a file and the folders on the way to it.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}.") from error
