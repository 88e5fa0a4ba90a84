"""How layers are shared out over the chunks of a pipeline where nobody says it."""

from __future__ import annotations

from functools import lru_cache

from lightning_3d.partition import balance_ranks
from lightning_3d.planner.flops import attention_flops, layer_weights
from lightning_3d.planner.shape import ModelShape


@lru_cache(maxsize=512)
def balanced_split(shape: ModelShape, stages: int, virtual_stages: int) -> tuple[int, ...] | None:
    """Layers of every chunk as the strategy's ``pipeline_split="flops"`` has them; ``None`` if all are equal.

    The head is work like layers are; the last stage gets fewer of them where it is worth one.
    """
    dense, core = layer_weights(shape), attention_flops(shape, shape.causal) / 2
    costs = [
        int(core + (layer_weights(shape, moe=True) if shape.experts and layer >= shape.dense_layers else dense))
        for layer in range(shape.layers)
    ]
    costs[-1] += shape.vocab * shape.hidden
    split = tuple(balance_ranks(costs, stages, virtual_stages))
    return split if len(set(split)) > 1 else None
