"""What a model computes for one sample, counted before the model is cut, for samples of any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.errors import ThreeDError
from lightning_3d.pipeline.block_lists import find_block_lists
from lightning_3d.pipeline.flops import count_flops


@dataclass(frozen=True)
class ModelFlops:
    """Operations (matrix products, convolutions, attention) of a forward and backward of one sample."""

    counts: tuple[tuple[int, float], ...]
    """Lengths of sequences, ascending, and what a sample of that length takes. One entry: samples have no length."""
    inputs: str
    """Shape of a sample as it was counted."""

    def per_sample(self, batch: Any) -> float | None:
        """Operations for a sample of ``batch``, or ``None`` where its samples are not of the kind that was counted.

        Between the lengths that were counted, and beyond them, a parabola: linear layers take operations in proportion
        to the length, attention to its square.
        """
        first = next((leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1), None)
        if first is None:
            return None
        if len(self.counts) == 1:
            return self.counts[0][1] if " x ".join(map(str, first.shape[1:])) == self.inputs else None
        if first.dim() != 2 or first.is_floating_point():
            return None
        length, total = first.shape[1], 0.0
        for one, count in self.counts:
            weight = 1.0
            for other, _ in self.counts:
                weight *= (length - other) / (one - other) if other != one else 1.0
            total += weight * count
        return total


def count_model(module: nn.Module) -> ModelFlops | None:
    """Count the operations of a whole model at three lengths; ``None`` where no made-up inputs run through it.

    Args:
        module: The model; it is not run, but traced on meta tensors.
    """
    lists = find_block_lists(module)
    blocks = list(lists[0].blocks) if lists else [""]
    try:
        whole = count_flops(module, blocks)
        if whole is None or not whole.products:
            return None
        inputs = whole.inputs.split(" and ")[0].partition(" x ")[2]
        longest = int(inputs.partition(" x ")[0] or 0)
        shorter = [(length, count_flops(module, blocks, length=length)) for length in (longest // 4, longest // 2)]
    except (ThreeDError, RuntimeError, ValueError):
        return None
    counts = [(length, count.products) for length, count in shorter if length > 1 and count is not None]
    if not all(count < whole.products for _, count in counts):
        counts = []  # these samples have no length
    return ModelFlops((*counts, (longest, whole.products)), inputs)
