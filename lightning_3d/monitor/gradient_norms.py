"""Norms of gradients on their way from the device to the host; nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor


class GradientNorms:
    """Takes norms of the whole model's gradient, and tells them once they have arrived."""

    def __init__(self) -> None:
        self._underway: deque[tuple[int, Tensor, Any]] = deque()
        """For which step, where, and an event after it."""

    def take(self, trainer: Trainer, step: int) -> None:
        """Ask for the norm as it is now. Collective."""
        norm: Tensor = trainer.strategy.gradient_norm()  # type: ignore[attr-defined]
        arrives = torch.cuda.Event() if norm.is_cuda else None
        self._underway.append((step, norm.to("cpu", non_blocking=True), arrives))
        if arrives is not None:
            arrives.record()

    def arrived(self) -> Iterator[tuple[int, float]]:
        """Steps and norms that are known by now; each is told once."""
        while self._underway and (self._underway[0][2] is None or self._underway[0][2].query()):
            step, norm, _ = self._underway.popleft()
            yield step, float(norm)

    def clear(self) -> None:
        """Forget those that have not arrived."""
        self._underway.clear()
