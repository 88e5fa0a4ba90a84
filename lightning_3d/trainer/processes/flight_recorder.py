"""What every rank has sent to whom, kept by torch in a ring, and put into the log folder when a run hangs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.errors import ConfigError

FOLDER = "flight_recorder"
"""In the log folder; files are ``rank_0``, ``rank_1`` ... as ``torchfrtrace`` wants them."""
_PREFIX = "rank_"
_ENTRIES = "2000"
_WRITES_S = 3.0
_OLDER = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
_LEVELS = (False, True, "detail")


class FlightRecorder:
    """The switches of torch that make a hang of collectives readable, behind one option.

    Before the process group is made, :meth:`prepare` sets what is not set already: the ring of the flight recorder
    (``TORCH_FR_BUFFER_SIZE``; torch warns of its older name ``TORCH_NCCL_TRACE_BUFFER_SIZE``), its dump when NCCL runs
    into a time-out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), where that goes (``TORCH_FR_DUMP_TEMP_FILE``), and
    ``TORCH_DISTRIBUTED_DEBUG``.

    Args:
        wanted: ``True``, or ``"detail"`` for ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, in which every collective is compared
            among its ranks first, which is slow.

    Raises:
        ConfigError: for anything else.
    """

    def __init__(self, wanted: bool | str) -> None:
        if wanted not in _LEVELS or isinstance(wanted, int) != isinstance(wanted, bool):
            raise ConfigError(f"debug_collectives={wanted!r} is not known. Choose from False, True, 'detail'.")
        self._wanted = wanted
        self.folder: Path | None = None
        """Where dumps go; ``None`` until it is known, and where nothing is wanted."""

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def prepare(self, root: str | Path) -> None:
        """Before the process group is made.

        Args:
            root: Folder for what NCCL itself writes: the log folder is not known yet.
        """
        if not self._wanted:
            return
        self.folder = Path(root, FOLDER)
        self.folder.mkdir(parents=True, exist_ok=True)
        prefix = str(self.folder / _PREFIX)
        for name, value in {
            "TORCH_FR_BUFFER_SIZE": _ENTRIES,
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_FR_DUMP_TEMP_FILE": prefix,
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if self._wanted == "detail" else "INFO",
        }.items():
            if _OLDER.get(name, name) not in os.environ:
                os.environ.setdefault(name, value)
        dist.set_debug_level_from_env()  # read once when torch is imported

    def use(self, log_folder: str | Path | None) -> None:
        """Once the log folder of the run is known."""
        if self._wanted and log_folder is not None:
            self.folder = Path(log_folder, FOLDER)

    def dump(self, rank: int, standing: str) -> None:
        """Write what this rank has done; from the thread of the watchdog.

        Args:
            rank: This rank.
            standing: Where it stands, for a file beside it.
        """
        if self.folder is None:
            return
        # It asks the device about collectives under way, which may be what hangs; and stacks take seconds to name,
        # so they come in a second writing, which the end of the job does not wait for.
        written = threading.Event()
        arguments = (self.folder, rank, standing, written)
        threading.Thread(target=self._write, args=arguments, name="lightning-3d-flight-recorder", daemon=True).start()
        written.wait(_WRITES_S)

    def _write(self, folder: Path, rank: int, standing: str, written: threading.Event) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"standing_{rank}.txt").write_text(standing)
        target = folder / f"{_PREFIX}{rank}"
        for with_stacks in (False, True):
            content = _trace(with_stacks)
            if content is not None:
                partial = folder / f".{target.name}.partial"
                partial.write_bytes(content)
                partial.replace(target)
            written.set()

    @property
    def hint(self) -> str:
        """What the message about a hang says of the dumps."""
        if self.folder is None:
            return ""
        return f"\nwhat every rank has sent: {self.folder} (torchfrtrace --prefix {_PREFIX} {self.folder})"


def _trace(with_stacks: bool) -> bytes | None:
    """The ring of this process, pickled as torch's own tools read it."""
    module: Any = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        if (dump := getattr(module, name, None)) is not None:
            return bytes(dump(includeStackTraces=with_stacks))
    return None
