"""What decides the shapes that a module answers with, told from its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.pipeline.caches import is_cache
from lightning_3d.placeholder import Placeholder

_ATOMS = bool | int | float | str | torch.dtype | torch.device | type


def signature(tree: Any, given: list[Any], caches: list[Any]) -> Any:
    """What decides the shapes that a module answers with; ``None`` if that cannot be told.

    Of a store of keys and values it has all but what the layers hold, of which a block reads its own only.

    Args:
        tree: Arguments.
        given: Gets the tensors and the stores among them, in an order that the signature fixes.
        caches: Gets the stores.
    """
    kind = type(tree)
    if isinstance(tree, Tensor):
        if isinstance(tree, Placeholder) and tree.bound is not None:
            tree = tree.bound
        given.append(tree)
        return isinstance(tree, Placeholder), tree.shape, tree.dtype, tree.requires_grad
    if tree is None or isinstance(tree, _ATOMS):
        return kind, tree
    layout: Any = kind
    if kind is dict:
        layout, tree = tuple(tree), tree.values()
    elif is_cache(tree):
        given.append(tree)
        caches.append(tree)
        layout, tree = (kind, len(vars(tree).get("layers", ()))), [outside_layers(tree)]
    elif kind is not tuple and kind is not list:
        if pytree.tree_is_leaf(tree):
            return None
        tree, spec = pytree.tree_flatten(tree)
        layout = str(spec)
    parts = [signature(item, given, caches) for item in tree]
    return None if any(part is None for part in parts) else (layout, *parts)


def outside_layers(cache: Any) -> dict[str, Any]:
    """The attributes of a store of keys and values but for its layers."""
    return {name: value for name, value in vars(cache).items() if name != "layers"}
