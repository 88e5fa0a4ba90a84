"""Several ranks: what Lightning says is said once, and it gives no advice that changes nothing."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_3d.trainer.logging.notices import Notices


def mesh(rank: int, replicas: int) -> Any:
    return SimpleNamespace(world=SimpleNamespace(rank=rank), dp=SimpleNamespace(size=replicas))


def advice(monkeypatch: pytest.MonkeyPatch, key: str) -> int:
    """How many warnings come of logging at the end of an epoch without ``sync_dist``, in a group of processes."""
    monkeypatch.setattr(result, "_distributed_is_initialized", lambda: True)
    results = _ResultCollection(training=True)
    results.log("on_train_epoch_end", key, torch.tensor(1.0), on_step=False, on_epoch=True, batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        results.metrics(on_step=False)
    return sum("sync_dist" in str(it.message) for it in caught)


def test_sync_dist_is_recommended_where_it_changes_something(monkeypatch: pytest.MonkeyPatch) -> None:
    notices = Notices()
    before = list(warnings.filters)
    notices.install(mesh(0, 1))
    assert advice(monkeypatch, "notices/one") == 0
    notices.remove()
    assert warnings.filters == before
    notices.install(mesh(0, 2))
    assert advice(monkeypatch, "notices/two") == 1
    notices.remove()


def test_early_stopping_speaks_on_rank_zero(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()
    trainer: Any = SimpleNamespace(global_rank=0, world_size=2)
    for rank, said in ((0, 1), (1, 0)):
        caplog.clear()
        notices.install(mesh(rank, 2))
        with caplog.at_level("INFO", logger="lightning.pytorch"):
            EarlyStopping._log_info(trainer, "Signaling Trainer to stop.", False)
        assert len(caplog.records) == said
        notices.remove()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        EarlyStopping._log_info(trainer, "Signaling Trainer to stop.", False)
    assert len(caplog.records) == 1
