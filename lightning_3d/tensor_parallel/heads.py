"""Tensors with a dim of heads, shown to a module as the heads of this rank.

Between modules such tensors are whole (a relative position bias handed from block to block, alibi, a mask per head), so
that every rank and every pipeline stage knows their shape. A module whose heads are cut sees its own share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.collectives import copy_to_tp, gather_from_tp, split_to_tp
from lightning_3d.tensor_parallel.layout import HeadSlice, Position, RegionLayout


@dataclass
class _Shown:
    """What one call of a module was shown."""

    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pieces of arguments, with what they are pieces of."""
    replaced: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)
    """Tables of parameters or buffers, with the tensors that were in them."""


def show_own_heads(module: nn.Module, region: RegionLayout, axis: Axis) -> None:
    """Hook ``module`` so that it sees and gives what ``region`` says.

    Args:
        module: ``region.around``.
        region: Its ``slices``, ``copies``, ``views`` and ``exits``.
        axis: The tensor-parallel axis.
    """
    prefix = f"{region.around}."
    running: list[_Shown] = []

    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shown = _Shown()
        running.append(shown)
        for part in region.slices:

            def own(x: Tensor, part: HeadSlice = part) -> Tensor:
                piece = _own_heads(x, part, axis)
                if piece is not x:
                    shown.pieces.append((piece, x))
                return piece

            args, kwargs = changed(args, kwargs, (part.place,), own)
        args, kwargs = changed(args, kwargs, region.copies, lambda x: copy_to_tp(x, axis))
        for view in region.views:
            holder = called if view.module == region.around else called.get_submodule(view.module.removeprefix(prefix))
            table: dict[str, Any] = holder._parameters if view.name in holder._parameters else holder._buffers
            whole = table[view.name]
            length = whole.shape[view.dim] // axis.size
            shown.replaced.append((table, view.name, whole))
            table[view.name] = whole.narrow(view.dim, axis.rank * length, length)
        return args, kwargs

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not running:
            return None
        shown = running.pop()
        for table, name, whole in shown.replaced:
            table[name] = whole
        if not region.exits:
            return None
        leaves, spec = pytree.tree_flatten(output)
        for index, dim in region.exits:
            if index < len(leaves) and isinstance(leaves[index], Tensor):
                leaves[index] = _whole(leaves[index], dim, shown, axis)
        return pytree.tree_unflatten(leaves, spec)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _own_heads(x: Tensor, part: HeadSlice, axis: Axis) -> Tensor:
    if part.dim >= x.dim() or x.shape[part.dim] % part.heads:
        return x  # broadcast over the heads this time
    if x.shape[part.dim] == part.heads:
        return _split(x, axis, part.dim)
    return _split(x.unflatten(part.dim, (-1, part.heads)), axis, part.dim + 1).flatten(part.dim, part.dim + 1)


def _split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if x.requires_grad:
        return split_to_tp(x, axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


def _whole(x: Tensor, dim: int, shown: _Shown, axis: Axis) -> Tensor:
    """What a module returned, whole: without a collective if it is what the module was handed."""
    for piece, whole in shown.pieces:
        if piece is x:
            return whole
    return gather_from_tp(x, axis, dim)


def changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], places: Iterable[Position], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with ``change`` applied at ``places`` that hold tensors."""
    made = list(args)
    kwargs = dict(kwargs)
    for place in places:
        if isinstance(place, int):
            if place < len(made) and isinstance(made[place], Tensor):
                made[place] = change(made[place])
        elif isinstance(kwargs.get(place), Tensor):
            kwargs[place] = change(kwargs[place])
    return tuple(made), kwargs
