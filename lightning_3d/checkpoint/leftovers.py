"""What a save that was killed has left beside the checkpoints: told from a save under way, and cleared away."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from pathlib import Path

SAVING = ".saving"
"""Suffix of the hidden directory in which a checkpoint is written."""
REMOVING = ".removing"
"""Suffix of a checkpoint on its way out."""
LINK = ".link"
"""Suffix of a link on its way to its place."""
OLD = ".old"
"""Suffix of a checkpoint that is being replaced, where two paths cannot be swapped."""
_OWNER = ".owner"
_LONGEST_S = 24 * 3600.0
"""No save takes longer: of one that began earlier on another machine, nobody is at work any more."""
_OURS = (".distcp", ".pt", ".json", ".metadata")


def hidden(path: Path, suffix: str) -> Path:
    """The hidden neighbour of ``path`` with that suffix."""
    return path.parent / f".{path.name}{suffix}"


def claim(path: Path) -> None:
    """Note that this process saves to ``path``; before anything is written for it."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
    hidden(path, _OWNER).write_text(json.dumps(owner), encoding="utf-8")


def release(path: Path) -> None:
    """The save to ``path`` has ended, and nothing is left of it."""
    hidden(path, _OWNER).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Delete what killed saves and removals have left in ``folder``; what cannot be deleted stays.

    A save under way is left alone: its process is alive, or runs on another machine, where nobody here can tell, and
    began less than a day ago.
    """
    for entry in list(folder.iterdir()):
        name, suffix = os.path.splitext(entry.name)
        if not name.startswith(".") or len(name) == 1:
            continue
        path = folder / name[1:]
        with contextlib.suppress(OSError):
            if suffix == SAVING and not _under_way(path) and _is_ours(entry):
                shutil.rmtree(entry, ignore_errors=True)
                release(path)
            elif suffix == _OWNER and not hidden(path, SAVING).exists() and not _under_way(path):
                release(path)
            elif suffix == REMOVING and _is_ours(entry):
                shutil.rmtree(entry, ignore_errors=True)
            elif suffix == LINK and entry.is_symlink():
                entry.unlink()
            elif suffix in (LINK, OLD) and (path.exists() or path.is_symlink()) and _is_ours(entry):
                shutil.rmtree(entry, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    """Whether it is a directory that holds no files but those of a checkpoint."""
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and all(entry.is_file() and entry.name.endswith(_OURS) for entry in folder.iterdir())
    )


def _under_way(path: Path) -> bool:
    note = hidden(path, _OWNER)
    try:
        owner = json.loads(note.read_text(encoding="utf-8"))
        host, pid, started = owner["host"], owner["pid"], owner["started"]
        age_s = time.time() - note.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return age_s < _LONGEST_S
    return started is not None and _started(pid) == started


def _started(pid: int) -> str | None:
    """When a process of this machine started, to tell it from a later one with its number; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return "alive"
