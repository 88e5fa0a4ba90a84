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
