"""Activation checkpointing of blocks: their activations are computed again in the backward instead of being kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_blocks(blocks: Sequence[nn.Module], every: str | int | None) -> int:
    """Recompute some of ``blocks``; names in the state dict stay as they are.

    Args:
        blocks: Blocks in the order of the model.
        every: ``None`` for none, ``"full"`` for all, k for every k-th.

    Returns:
        How many blocks are recomputed.
    """
    if every is None:
        return 0
    step = 1 if every == "full" else int(every)
    chosen = blocks[::step]
    for block in chosen:
        block.forward = _Recompute(block)
    return len(chosen)


class _Recompute:
    """A block's forward under non-reentrant checkpointing, which keeps autocast and the random state."""

    def __init__(self, block: nn.Module) -> None:
        self._forward = block.forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(partial(self._forward, **kwargs), *args, use_reentrant=False)
