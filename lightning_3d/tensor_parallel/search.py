"""Which parts of a model are planned as blocks, and how they are called."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from lightning_3d.tensor_parallel.clone import Ground
from lightning_3d.tensor_parallel.layers import features, is_linear
from lightning_3d.tensor_parallel.observe import Observation, observe
from lightning_3d.tensor_parallel.probe import BlockCall, probe

_REAL_UP_TO = 50_000_000
"""Parameters of a block up to which it is run with values where it cannot run without."""


def repeated(module: nn.Module, known: Sequence[str]) -> list[str]:
    """Layers with something to cut in lists outside the ``known`` blocks, not looking for lists inside of lists.

    A pipeline runs one chain of blocks, but layers of every list can be shared by tensor-parallel ranks.
    """
    found: list[str] = []
    taken = tuple(f"{name}." for name in known)
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        around = any(prefix.startswith(f"{name}.") for prefix in taken)
        if not isinstance(part, nn.ModuleList) or inside or around or name.startswith(taken):
            continue
        found += [f"{name}.{key}".lstrip(".") for key, child in part.named_children() if _cuttable(child)]
    return found


def _cuttable(block: nn.Module) -> bool:
    parts = list(block.modules())
    return sum(is_linear(part) for part in parts) > 1 or any(isinstance(p, nn.MultiheadAttention) for p in parts)


def bodies(module: nn.Module, batch: int, length: int) -> list[str]:
    """Parts of a model without repeated layers that can be treated like a block: they hold several linear layers.

    Of a part that nothing made up runs through (one that computes a loss from labels, say), the parts of it.
    """
    found: list[str] = []
    queue = _holding_layers(module, "")
    while queue:
        name = queue.pop(0)
        call = probe(module, [name], batch, length).blocks.get(name)
        inner = _holding_layers(module.get_submodule(name), f"{name}.")
        if inner and observed(module.get_submodule(name), call, batch, length)[1] is None:
            queue = inner + queue
        else:
            found.append(name)
    return found


def _holding_layers(module: nn.Module, prefix: str) -> list[str]:
    parts = module.named_children()
    return [prefix + name for name, part in parts if sum(is_linear(inner) for inner in part.modules()) > 1]


def observed(
    block: nn.Module, call: BlockCall | None, batch: int, length: int
) -> tuple[BlockCall | None, Observation | None, Ground, str]:
    """A call of the block and what it showed where; a made-up call if the model showed none; or what went wrong.

    Args:
        block: The block.
        call: How the model called it, if that is known.
        batch: Samples of made-up calls.
        length: Sequence length of made-up calls.
    """
    fault = ""
    small = sum(parameter.numel() for parameter in block.parameters()) <= _REAL_UP_TO
    grounds = [Ground(), *([Ground("cpu")] if small else []), Ground(narrow=True)]
    grounds += [Ground("cpu", narrow=True)] if small else []
    known = [] if call is None else [call]
    for candidate in [*known, *_guesses(block, batch, length)]:
        for ground in grounds:
            try:
                return candidate, observe(block, candidate, ground), ground, ""
            except Exception as error:
                fault = fault or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None, None, Ground(), fault or "no linear layer tells the size of its hidden states"


def _guesses(block: nn.Module, batch: int, length: int) -> list[BlockCall]:
    """Hidden states as wide as the block's first layers say, as long as one of its layers needs them to be."""
    inputs = [features(part)[0] for part in block.modules() if is_linear(part)]
    if not inputs:
        return []
    shapes = (getattr(part, "normalized_shape", None) or (0,) for part in block.modules())
    norms = [shape[-1] for shape in shapes if isinstance(shape, tuple)]
    dtype = next(block.parameters()).dtype
    widths = dict.fromkeys(width for width in (inputs[0], *norms) if width)
    calls = []
    for width in widths:
        state = torch.zeros(batch, length, width, device="meta", dtype=dtype)
        calls += [BlockCall((state,), {}), BlockCall((state[:, 0],), {}), BlockCall((state, state), {})]
    for width, other in itertools.product(widths, dict.fromkeys(inputs)):
        calls.append(BlockCall((torch.zeros(batch, other, width, device="meta", dtype=dtype),), {}))
    return calls
