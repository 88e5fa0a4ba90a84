"""Scalars on their way from the device to the host; nobody waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

Name = tuple[str, ...]
"""What a scalar is, and which of several."""


class DeviceScalars:
    """Asks for scalars as they are now, and tells their values once they have arrived."""

    def __init__(self) -> None:
        self._underway: deque[tuple[Name, int, Tensor, Any]] = deque()
        """Name, step, where it will be, and an event after it."""

    def ask(self, name: Name, step: int, value: Tensor) -> None:
        """Start a copy to the host; on a GPU behind all that the current stream has been asked for."""
        copy = value.detach().to("cpu", non_blocking=True, copy=True)  # from a GPU: into pinned memory
        arrives = torch.cuda.Event() if value.is_cuda else None
        if arrives is not None:
            arrives.record()
        self._underway.append((name, step, copy, arrives))

    def arrived(self) -> Iterator[tuple[Name, int, float]]:
        """Names, steps and values that are known by now; each is told once."""
        while self._underway and (self._underway[0][3] is None or self._underway[0][3].query()):
            name, step, value, _ = self._underway.popleft()
            yield name, step, float(value)

    def clear(self) -> None:
        """Forget those that have not arrived."""
        self._underway.clear()
