"""Copies of tensors in host memory, taken while training goes on: what a save in the background writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_3d.checkpoint.state import Entry


class HostCopies:
    """Memory for the copies of one save, kept for the next one: pinned where the tensors live on a GPU.

    Args:
        device: Where the tensors of training live.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, entries: Sequence[Entry]) -> tuple[list[Entry], Callable[[], None]]:
        """Copy the tensors of ``entries``; the copies of an earlier call are overwritten.

        On a GPU the host waits for nothing: the copies run on a stream of their own, and what training launches from
        now on comes after them.

        Returns:
            The entries with copies in the place of their tensors, and a function that waits until these are complete.
        """
        buffers = {entry.key: self._buffer(entry) for entry in entries}
        self._buffers = buffers
        copied = [replace(entry, tensor=buffers[entry.key]) for entry in entries]
        if self._stream is None:
            for entry in entries:
                buffers[entry.key].copy_(entry.tensor)
            return copied, lambda: None
        training = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for entry in entries:
                buffers[entry.key].copy_(entry.tensor, non_blocking=True)
            done = self._stream.record_event()
        training.wait_event(done)
        return copied, done.synchronize

    def _buffer(self, entry: Entry) -> Tensor:
        source, held = entry.tensor, self._buffers.get(entry.key)
        pinned = source.is_cuda
        if held is None or (held.shape, held.dtype, held.is_pinned()) != (source.shape, source.dtype, pinned):
            held = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        return held
