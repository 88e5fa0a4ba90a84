"""A number for the bits of a tensor, to compare what several ranks hold without sending it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.collectives import as_bytes

_PIECE = 1 << 20


def fingerprint(tensor: Tensor) -> Tensor:
    """An int64 scalar that is the same for equal bits, and other for others but for freak coincidence.

    Computed on the tensor's own device, piece by piece: no copy of a large tensor is made, unless it is not contiguous
    or begins within a word of eight bytes.
    """
    raw = as_bytes(tensor.detach().contiguous())
    if raw.storage_offset() % 8:  # a part of something larger; words begin at multiples of their size
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # A sum weighted by place: two numbers that were exchanged, or a sign that flipped in two of them, show.
    for start, words in enumerate(raw[:whole].view(torch.int64).split(_PIECE)):
        places = torch.arange(start * _PIECE, start * _PIECE + words.numel(), dtype=torch.int64, device=tensor.device)
        total += (words * (2 * places + 1)).sum()
    if whole < raw.numel():
        rest = raw[whole:].to(torch.int64)
        total += (rest * torch.arange(3, 3 + rest.numel(), dtype=torch.int64, device=tensor.device)).sum() * 0x9E3779B1
    return total + raw.numel()


def fingerprints(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The fingerprints of several tensors in one int64 vector on ``device``.

    Where they are elsewhere, that waits for their device once.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device=device)
    found = [fingerprint(tensor) for tensor in tensors]
    return torch.stack([each.to(found[0].device) for each in found]).to(device)
