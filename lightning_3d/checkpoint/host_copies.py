"""Copies of tensors in host memory, taken while training goes on: what a save in the background writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_3d.checkpoint.state import Entry


class HostCopies:
    """Memory for the copies of one save, kept for the next one: pinned where the tensors live on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, entries: Sequence[Entry]) -> tuple[list[Entry], Callable[[], object]]:
        """Copy the tensors of ``entries``; the copies of an earlier call are overwritten.

        On a GPU the host waits for nothing: the copies are queued behind what training has launched, and what it
        launches from now on, which may change any of these tensors, comes after them.

        Returns:
            The entries with copies in the place of their tensors, and a function that waits until these are complete.
        """
        self._buffers = {entry.key: self._buffer(entry) for entry in entries}
        for entry in entries:
            self._buffers[entry.key].copy_(entry.tensor, non_blocking=True)
        copied = [replace(entry, tensor=self._buffers[entry.key]) for entry in entries]
        gpu = next((entry.tensor.device for entry in entries if entry.tensor.is_cuda), None)
        if gpu is None:
            return copied, lambda: None
        done = torch.cuda.Event(blocking=True)  # who waits sleeps: the cores are training's
        done.record(torch.cuda.current_stream(gpu))
        return copied, done.synchronize

    def _buffer(self, entry: Entry) -> Tensor:
        source, held = entry.tensor, self._buffers.get(entry.key)
        pinned = source.is_cuda
        if held is None or (held.shape, held.dtype, held.is_pinned()) != (source.shape, source.dtype, pinned):
            held = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        return held
