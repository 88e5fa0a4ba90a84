"""Modules that come while the Trainer runs are noticed, others are not looked for."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric, MetricTracker

from lightning_3d.trainer.module.late_modules import LateModules


def test_what_comes_or_is_replaced_next_to_the_parameters_is_noticed_once() -> None:
    module = LightningModule()
    module.layers = nn.ModuleList([nn.Linear(2, 2)])
    module.tracker = MetricTracker(MeanMetric(), maximize=False)
    module.named = nn.ModuleDict()
    late = LateModules(module)
    assert not late.changed()
    module.tracker.increment()
    assert late.changed() and not late.changed()
    module.named["mean"] = MeanMetric()
    assert late.changed() and not late.changed()
    module.named["mean"] = MeanMetric()
    assert late.changed()
    module.own = MeanMetric()
    assert late.changed() and not late.changed()
