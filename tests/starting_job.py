"""A job of two ranks that never comes to train: ``starting_job.py START_METHOD WHERE FOLDER``.

``WHERE`` is "import" (rank 1 is still importing) or "meet" (rank 1 waits for rank 0 to make a process group). Each
process that has come so far leaves its number in FOLDER as ``pid<rank>``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

LONG_S = 200.0


def mark(folder: str, rank: int) -> None:
    """Leave the number of this process, in one piece."""
    file = Path(folder, f"unfinished{rank}")
    file.write_text(str(os.getpid()))
    file.rename(Path(folder, f"pid{rank}"))


if __name__ == "__main__" and sys.argv[2] == "import" and os.environ.get("LOCAL_RANK"):
    mark(sys.argv[3], 1)
    time.sleep(LONG_S)

# ruff: noqa: E402
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from typing_extensions import override

from lightning_3d import ThreeDStrategy


class Late(ThreeDStrategy):
    """Of which rank 0 does not come to the meeting."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    @override
    def setup_environment(self) -> None:
        mark(self.folder, self.local_rank)
        if self.local_rank == 0:
            time.sleep(LONG_S)
        super().setup_environment()


def main(start_method: str, folder: str) -> None:
    """Run the job."""
    torch.manual_seed(0)
    strategy = Late(folder, data_parallel=2, start_method=start_method)
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(BoringModel())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3])
