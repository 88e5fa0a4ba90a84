"""How the models here are trained: AdamW that leaves norms, biases and embeddings alone, warm-up, then a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn


def adamw_with_cosine(
    module: LightningModule,
    decays: Callable[[str, nn.Parameter], bool],
    learning_rate: float,
    weight_decay: float,
    warmup_steps: int,
    min_lr_ratio: float,
) -> Any:
    """Return AdamW with two groups (decayed and not) and a schedule moved once per optimizer step.

    Args:
        module: Whose parameters are trained; its Trainer knows the number of steps.
        decays: Whether the parameter of a name has weight decay.
        learning_rate: Peak.
        weight_decay: Of the first group.
        warmup_steps: Optimizer steps over which the learning rate grows to its peak.
        min_lr_ratio: Learning rate at the last step, as a share of the peak.
    """
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (decayed if decays(name, parameter) else others).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    max_steps = module.trainer.max_steps
    total = max_steps if max_steps > 0 else int(module.trainer.estimated_stepping_batches)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total, warmup_steps, min_lr_ratio)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def lr_factor(step: int, total: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return the learning rate at ``step`` of ``total`` as a share of the peak: linear warm-up, then a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(total - warmup_steps, 1), 1.0)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
