"""Activation checkpointing of blocks: their activations are computed again in the backward instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.pipeline.block_state import BlockState
from lightning_3d.pipeline.caches import without_caches
from lightning_3d.placeholder import is_placeholder


def recompute_blocks(blocks: Sequence[nn.Module], every: str | int | None) -> int:
    """Recompute some of ``blocks``; names in the state dict stay as they are.

    Args:
        blocks: Blocks in the order of the model. Those that are recomputed already count, and stay as they are.
        every: ``None`` for none, ``"full"`` for all, k for every k-th.

    Returns:
        How many blocks are recomputed.
    """
    if every is None:
        return 0
    step = 1 if every == "full" else int(every)
    chosen = blocks[::step]
    for block in chosen:
        if not isinstance(block.forward, _Recompute):
            block.forward = _Recompute(block, partial(checkpoint, use_reentrant=False))
    return len(chosen)


def recompute_wrapped(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Recompute the named parts of ``module`` that are on this stage, each with the function of the user's wrapper."""
    for name, function in functions.items():
        part = module.get_submodule(name)
        if not any(map(is_placeholder, part.parameters())):
            part.forward = _Recompute(part, function)


class _Recompute:
    """A block's forward under non-reentrant checkpointing, which keeps autocast, the random state and its own."""

    def __init__(self, block: nn.Module, function: Callable[..., Any]) -> None:
        self._block = block
        self._forward = block.forward
        self._function = function
        self._state = BlockState(block)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        forward = partial(self._forward, **without_caches(self._block, kwargs))
        return self._function(self._state.runs(forward), *args)
