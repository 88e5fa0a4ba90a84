"""Modules that hold the matrices of many experts as parameters of three dims, cut along the features inside an expert.

Every rank runs every expert on all tokens with its share of the inner features; what it gives is partial and summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.tensor_parallel.collectives import copy_to_tp, reduce_from_tp
from lightning_3d.tensor_parallel.layout import Division, RegionLayout, WeightCut
from lightning_3d.tensor_parallel.parameters import local_view
from lightning_3d.tensor_parallel.region import Regions


def convert_weights(module: nn.Module, region: RegionLayout, regions: Regions, random: bool) -> None:
    """Let ``module`` compute with its pieces of ``region.weights``; the parameters are cut elsewhere.

    Its code finds plain local tensors under the names of its parameters while it runs.

    Args:
        module: ``region.row``.
        region: Which of its parameters are cut, and which biases are added once.
        regions: State shared by the layers of the model.
        random: Whether the module draws random numbers when it trains.
    """
    axis = regions.axis
    running: list[dict[str, Any]] = []

    def enter(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        table: dict[str, Any] = called._parameters
        names = [weight.name for weight in region.weights]
        running.append({name: table[name] for name in (*names, *region.added)})
        for name in names:
            table[name] = own(table[name])
        for name in region.added:
            table[name] = table[name] / axis.size
        entered: dict[int, Tensor] = {}

        def copy(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            if id(x) not in entered:
                entered[id(x)] = copy_to_tp(x, axis)
            return entered[id(x)]

        args, kwargs = pytree.tree_map_only(Tensor, copy, (args, kwargs))
        if random and called.training:
            regions.open_stream()
        return args, kwargs

    def leave(called: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        regions.leave()
        if running:
            called._parameters.update(running.pop())
        leaves, spec = pytree.tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                # A copy, since the sum overwrites, and the module may have returned a view.
                leaves[index] = reduce_from_tp(leaf.clone(memory_format=torch.contiguous_format), axis)
                return pytree.tree_unflatten(leaves, spec)
        return None

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def own(parameter: Tensor) -> Tensor:
    """This rank's piece, for code that may hand the gradient of one parameter to another too (``up + more``)."""
    local: Tensor = local_view(parameter)
    if local is not parameter and local.requires_grad:
        # Later gradients are added to the first, which therefore must not be anybody else's.
        local.register_hook(lambda gradient: gradient.clone() if parameter.grad is None else None)
    return local


def weight_regions(
    name: str, module: nn.Module, width: int, tp: int, sizes: Mapping[str, int]
) -> tuple[list[RegionLayout], str]:
    """Ways to cut the parameters of a module that holds two or more stacks of matrices; none if it does not.

    Args:
        name: The module's name.
        module: Only its own parameters are looked at: ``[experts, in, out]`` or ``[experts, out, in]``.
        width: Features of the hidden states, which one of those two dims has.
        tp: Ranks to cut over.
        sizes: Whole numbers that its code read.

    Returns:
        The ways, likeliest first, and why there are none.
    """
    own = {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None}
    stacks = {key: shape for key, shape in own.items() if len(shape) == 3}
    if len(stacks) < 2 or len({shape[0] for shape in stacks.values()}) > 1:
        return [], ""
    found = []
    for dims in _inner_dims(stacks, width):
        inner = min(stacks[key][dim] for key, dim in dims.items())
        lengths = {key: stacks[key][dim] for key, dim in dims.items()}
        if inner % tp or any(length % inner for length in lengths.values()):
            return [], f"{inner} features inside an expert do not divide by tensor_parallel={tp}"
        biases = {key: shape[1] for key, shape in own.items() if len(shape) == 2}
        added = tuple(key for key, length in biases.items() if length == width and length not in lengths.values())
        inside = {key: length for key, length in biases.items() if key not in added}
        if any(length not in lengths.values() for length in inside.values()):
            continue
        divided = tuple(
            Division(name, key, value // tp)
            for key, value in sizes.items()
            if value in lengths.values() and value != width
        )
        for packed in (True, False) if any(length > inner for length in lengths.values()) else (True,):
            cuts = [
                *(WeightCut(key, dim, _sections(lengths[key], inner, packed)) for key, dim in dims.items()),
                *(WeightCut(key, 1, _sections(length, inner, packed)) for key, length in inside.items()),
            ]
            for divisions in dict.fromkeys((divided, ())):
                found.append(RegionLayout((), name, divisions, weights=tuple(cuts), added=added))
    return found, "" if found else "it is not known which dims of its parameters are the inner features"


def _sections(length: int, inner: int, packed: bool) -> tuple[int, ...]:
    return (inner,) * (length // inner) if packed else (length,)


def _inner_dims(stacks: Mapping[str, tuple[int, ...]], width: int) -> list[dict[str, int]]:
    """By parameter the dim of the inner features, in every way that is possible."""
    sure, square = {}, []
    for key, (_, rows, columns) in stacks.items():
        if rows == width and columns == width:
            square.append(key)
        elif width not in (rows, columns):
            return []
        else:
            sure[key] = 1 if columns == width else 2
    if not square:
        return [sure]
    if sure:  # the others give what these read
        other = {key: 3 - dim for key, dim in sure.items()}
        dim = next(iter(other.values()))
        return [{**sure, **dict.fromkeys(square, dim)}]
    *first, last = square
    return [{**dict.fromkeys(first, dim), last: 3 - dim} for dim in (1, 2)]
