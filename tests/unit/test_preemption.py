"""Where a run that is asked to stop saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_3d.trainer.preemption import _path


def test_a_checkpoint_callback_of_lightning_2_5_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: False)
    keeper = ModelCheckpoint("folder")
    vars(keeper).pop("save_on_exception", None)  # which came with 2.6
    trainer: Any = SimpleNamespace(callbacks=[keeper], global_step=3)
    assert str(_path(trainer)).endswith("folder/last-preempted.ckpt")
