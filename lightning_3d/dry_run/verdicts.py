"""Whether cut blocks keep their numbers: found on simulated ranks where blocks are small, and told to ranks without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.dry_run.simulated_ranks import on_tensor_parallel_ranks
from lightning_3d.dry_run.unchecked import unchecked
from lightning_3d.mesh import Mesh
from lightning_3d.tensor_parallel import BlockCheck, Plan, Verdict, apply, check_block
from lightning_3d.tensor_parallel.probe import BlockCall

_MOST_PARAMETERS = 2**26
"""Of the largest block times the ranks, which run beside each other: two gigabytes."""
_MOST_FLOPS = 2e11
"""Of all comparisons together: some seconds of one core."""


@dataclass(frozen=True)
class Verdicts:
    """What the comparison of cut blocks with whole ones says, call by call."""

    found: tuple[Verdict | None, ...] | None
    """``None`` where nothing was compared."""
    note: str = ""
    """Why nothing was."""

    def check(self) -> BlockCheck:
        """For one rank: what answers as the comparison did."""
        if self.found is None:
            return unchecked
        left = list(self.found)

        def told(*_: Any, **__: Any) -> Verdict | None:
            return left.pop(0)

        return told


def compare_blocks(module: nn.Module, plan: Plan, limit_s: float) -> Verdicts:
    """Compare one block of every kind that ``plan`` cuts with the whole one, as the run does before it starts.

    Args:
        module: The whole module; parameters may have no memory.
        plan: How it is cut.
        limit_s: Seconds after which to give up.

    Raises:
        PlanError: if a plan of the user's changes the numbers.
    """
    if plan.tp == 1:
        return Verdicts(None)
    blocks = [(module.get_submodule(block.names[0]), block.call) for block in plan.blocks if block.call is not None]
    sizes = [(sum(p.numel() for p in block.parameters()), _tokens(call)) for block, call in blocks]
    largest = max((size for size, _ in sizes), default=0)
    flops = sum(12.0 * size * tokens for size, tokens in sizes)  # forward and backward, of the whole and of the cut one
    if largest * plan.tp > _MOST_PARAMETERS or flops * plan.tp > _MOST_FLOPS:
        return Verdicts(
            None,
            f"the plan was not checked with numbers, as blocks of {largest:,} parameters are too large for that here:"
            " `lightning-3d doctor` does it, with a small model of the same class in seconds",
        )

    def compare(mesh: Mesh) -> tuple[Verdict | None, ...]:
        found: list[Verdict | None] = []

        def noted(*args: Any, **kwargs: Any) -> Verdict | None:
            found.append(check_block(*args, **kwargs))
            return found[-1]

        apply(module, plan, mesh, lambda name: False, check=noted)
        return tuple(found)

    return Verdicts(on_tensor_parallel_ranks(plan.tp, compare, limit_s))


def _tokens(call: BlockCall) -> int:
    """Rows of the hidden states that a block is called with."""
    tensors = [leaf for leaf in call.leaves()[0] if isinstance(leaf, Tensor) and leaf.dim()]
    return max((tensor.shape[:-1].numel() for tensor in tensors), default=1)
