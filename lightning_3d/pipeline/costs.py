"""What the blocks of a model cost, in the unit that the split of the pipeline asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_3d.pipeline.flops import count_flops

Positions = Mapping[str, frozenset[int] | None]
"""Module outside the blocks -> the blocks it runs with; ``None`` for one that every chunk keeps."""


@dataclass(frozen=True)
class Costs:
    """What every block costs, with what runs around it."""

    blocks: tuple[float, ...]
    """In the order of their calls; what runs before the first block, after the last, and the loss is in theirs."""
    unit: str
    """``"flops"``, ``"parameters"`` or ``"seconds"``."""
    source: str
    """How they were found, for people."""

    def of_chunks(self, starts: Sequence[int]) -> tuple[float, ...]:
        """Cost of every chunk, from the index of its first block; the last of ``starts`` is the number of blocks."""
        return tuple(sum(self.blocks[first:end]) for first, end in pairwise(starts))


Costing = Callable[[Sequence[str], Positions], Costs]
"""What gives the costs of the named blocks, from the positions of what is outside of them."""


def recomputed_share(activation_checkpointing: str | int | None) -> float:
    """Share of the blocks that this option recomputes."""
    if activation_checkpointing is None:
        return 0.0
    return 1.0 if activation_checkpointing == "full" else 1.0 / int(activation_checkpointing)


def flop_costs(module: nn.Module, blocks: Sequence[str], outside: Positions, recomputed: float = 0.0) -> Costs:
    """Costs by operations of forward and backward, counted on made-up inputs; estimated where none run.

    Args:
        module: The whole model.
        blocks: Names of its blocks, in the order of their calls.
        outside: Modules outside the blocks.
        recomputed: Share of the blocks whose forward is run again in the backward.
    """
    counted = count_flops(module, blocks, recomputed)
    if counted is None:
        return matrix_costs(module, blocks, outside, "no made-up inputs run through it: set example_input_array")
    return Costs(counted.blocks, "flops", f"by flops, counted on inputs of {counted.inputs}")


def parameter_costs(module: nn.Module, blocks: Sequence[str], outside: Positions) -> Costs:
    """Costs by number of parameters."""
    return Costs(_sums(module, blocks, outside, matrices=False), "parameters", "by parameters")


def matrix_costs(module: nn.Module, blocks: Sequence[str], outside: Positions, why: str = "") -> Costs:
    """Costs by multiply-adds per token: one for every weight of a matrix; looking up an embedding costs none.

    For where nothing can be run: it knows no shapes, and neither attention nor loss.
    """
    source = "by flops, estimated from the sizes of matrices" + (f" ({why})" if why else "")
    return Costs(_sums(module, blocks, outside, matrices=True), "flops", source)


def _sums(module: nn.Module, blocks: Sequence[str], outside: Positions, matrices: bool) -> tuple[float, ...]:
    modules = dict(module.named_modules(remove_duplicate=False))
    cost = _matrices if matrices else _parameters
    costs = [cost(modules[name], True) for name in blocks]
    for name, where in outside.items():
        for position in where or ():
            costs[position] += cost(modules[name], False)
    return tuple(costs)


def _parameters(module: nn.Module, recurse: bool) -> float:
    return float(sum(parameter.numel() for parameter in module.parameters(recurse=recurse)))


def _matrices(module: nn.Module, recurse: bool) -> float:
    parts = module.modules() if recurse else [module]
    weights = (p for part in parts if not isinstance(part, nn.Embedding) for p in part.parameters(recurse=False))
    return float(sum(weight.numel() for weight in weights if weight.dim() > 1))
