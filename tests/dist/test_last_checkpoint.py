"""``OnExceptionCheckpoint`` where one rank fails: nothing hangs, and it is said why nothing is saved.

Where all ranks raise the same, it saves: see tests/conformance/test_callbacks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_3d.trainer.callbacks import last_checkpoint
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded
from tests.harness import RankFailure


class RaisesOnOne(Tokens):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 1 and self.global_step == 2:
            raise ValueError("on rank 1 alone")


def fit(mesh: Mesh, folder: str) -> None:
    last_checkpoint._PATIENCE_S = 1.0
    saves = OnExceptionCheckpoint(folder, "exception")
    trainer = make_trainer(mesh, callbacks=[saves], enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(seeded(RaisesOnOne), loader(rows(16), 4, mesh))


def test_a_failure_of_one_rank_ends_the_job_and_says_why_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="on rank 1 alone") as failure:
        on_ranks(fit, (2, 1, 1), str(tmp_path))
    assert "OnExceptionCheckpoint saves nothing" in str(failure.value)
    assert not (tmp_path / "exception.ckpt").exists()
