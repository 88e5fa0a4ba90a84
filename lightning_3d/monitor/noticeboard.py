"""How the ranks of a host show their figures to one process without waiting for it: a small mapped file for each.

Posting is a copy into memory. Nothing queues up, as datagrams would while nobody reads; the last word stays where it is
when its rank hangs or dies; and a reader looks only when it wants to know.
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HEAD = struct.Struct("<II")
"""Check sum and length of the text."""
_SIZE = 1 << 16
_MEMORY = Path("/dev/shm")
_TRIES = 3


class Notice:
    """What one rank posts; its rank writes it, another process reads it.

    Args:
        path: An existing file, :data:`_SIZE` bytes of zeros or more.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._last: Mapping[str, Any] | None = None

    def post(self, values: Mapping[str, Any]) -> bool:
        """Replace what was posted before; ``False`` if there is no room for it, and that stays."""
        text = json.dumps(values, separators=(",", ":")).encode()
        if _HEAD.size + len(text) > _SIZE:
            return False
        self._memory[: _HEAD.size + len(text)] = _HEAD.pack(zlib.crc32(text), len(text)) + text
        return True

    def read(self) -> Mapping[str, Any] | None:
        """What was posted last; ``None`` before anything was.

        There is no lock that the writer could wait for: a text that is caught half-written does not have its check sum,
        and then the one before counts.
        """
        for _ in range(_TRIES):
            copy = self._memory[:]
            checksum, length = _HEAD.unpack_from(copy)
            text = copy[_HEAD.size : _HEAD.size + length]
            if length and zlib.crc32(text) == checksum:
                self._last = json.loads(text)
                break
        return self._last

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


class Noticeboard:
    """The notices of a host's ranks, made by the process that reads them.

    Args:
        ranks: Global ranks of the host.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lightning_3d-", dir=_MEMORY if _MEMORY.is_dir() else None))
        for rank in ranks:
            self.path(self.folder, rank).write_bytes(bytes(_SIZE))
        self.notices = {rank: Notice(self.path(self.folder, rank)) for rank in ranks}

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where the notice of a rank lies."""
        return folder / f"rank_{rank}"

    def unlink(self) -> None:
        """Remove the files, once all have mapped them: nothing is left behind then, however the run ends."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        self.unlink()
        for notice in self.notices.values():
            notice.close()
