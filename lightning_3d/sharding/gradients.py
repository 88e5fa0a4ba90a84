"""Gradients of the whole model: sums over tensor-parallel ranks and tied copies, the global norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.collectives import all_gather_object, timed
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis, Mesh, where
from lightning_3d.sharding.reducer import local_of


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter of which this rank holds values."""

    name: str
    """Its name in the LightningModule."""
    param: nn.Parameter
    counted: bool = True
    """Whether it counts in the norm; false for copies of a tied weight that another stage counts."""


def sum_over_tensor_parallel(partial: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Sum the gradients of parameters that every tensor-parallel rank holds but uses on its own part of the data.

    Args:
        partial: The same parameters, in the same order, on all tensor-parallel ranks.
        mesh: The mesh.
    """
    if mesh.tp.size > 1:
        sum_together([parameter for parameter in partial if parameter.requires_grad], mesh.tp, fill=False)


def sum_together(parameters: Sequence[nn.Parameter], axis: Axis, fill: bool) -> None:
    """Sum gradients over ``axis`` in one all-reduce for each type.

    Args:
        parameters: The same parameters, in the same order, on all ranks of the axis.
        axis: The ranks that hold them.
        fill: Whether a parameter without a gradient here gets one; it counts as zero in any case.
    """
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.dtype, []).append(parameter)
    for dtype, members in kinds.items():
        if fill:
            for parameter in members:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        wide = torch.promote_types(dtype, torch.float32)
        locals_ = [local_of(p.grad if p.grad is not None else torch.zeros_like(p)) for p in members]
        flat = torch.cat([local.detach().reshape(-1).to(wide) for local in locals_])
        with timed(axis, "all_reduce", flat):
            dist.all_reduce(flat, group=axis.group)
        pieces = flat.split([local.numel() for local in locals_])
        with torch.no_grad():
            torch._foreach_copy_(locals_, [p.view(loc.shape) for p, loc in zip(pieces, locals_, strict=True)])


def global_norm(owned: Iterable[OwnedParameter], mesh: Mesh, norm_type: float = 2.0) -> Tensor:
    """Norm of the gradient of the whole model.

    Shards are summed over the axes that cut them; what several ranks hold alike (replicas, tied copies) counts once.

    Args:
        owned: This rank's parameters; may be none.
        mesh: The mesh.
        norm_type: p of the p-norm, positive; ``inf`` for the largest element.

    Returns:
        A float64 scalar on ``mesh.device``, the same bits on all ranks, without waiting for the device.

    Raises:
        ConfigError: if ``norm_type`` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} is not the p of a norm. Use a positive number, such as 2 or inf.")
    gradients = [
        local_of(item.param.grad)
        for item in owned
        if item.counted and item.param.grad is not None and _is_first_holder(item.param, mesh)
    ]
    norms = [
        norm.double()
        for same in _by_dtype(g for g in gradients if g.numel())
        for norm in torch._foreach_norm(same, norm_type, dtype=torch.promote_types(same[0].dtype, torch.float32))
    ]
    stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if math.isinf(norm_type):
        return _largest(stacked.max(), mesh)
    total = stacked.pow(norm_type).sum()
    if mesh.world.size > 1:
        with timed(mesh.world, "norm", total):
            dist.all_reduce(total, group=mesh.world.group)
    return total.pow(1.0 / norm_type)


def clip_by_norm(
    owned: Iterable[OwnedParameter], mesh: Mesh, max_norm: float, norm_type: float = 2.0, norm: Tensor | None = None
) -> Tensor:
    """Scale gradients so that the norm of the whole model's gradient is at most ``max_norm``.

    The same formula as :func:`torch.nn.utils.clip_grad_norm_`: the factor is ``max_norm / (norm + 1e-6)``, at most 1.

    Returns:
        The norm before clipping, as :func:`global_norm`.
    """
    owned = list(owned)
    if norm is None:
        norm = global_norm(owned, mesh, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for same in _by_dtype(_local_gradients(owned)):
        if same[0].dtype in (torch.float32, torch.float64):
            torch._foreach_mul_(same, factor.to(same[0].dtype))
        else:  # the factor itself must not be rounded to 16 bits
            for gradient in same:  # a GPU computes 16 bits times a scalar tensor in 16 bits
                gradient.copy_(gradient.float().mul_(factor.float()))
    return norm


def clip_by_value(owned: Iterable[OwnedParameter], clip_value: float) -> None:
    """Limit every element of every gradient to ``[-clip_value, clip_value]``."""
    for same in _by_dtype(_local_gradients(owned)):
        torch._foreach_clamp_min_(same, -clip_value)
        torch._foreach_clamp_max_(same, clip_value)


def has_nonfinite(owned: Iterable[OwnedParameter], mesh: Mesh, local: Tensor | None = None) -> Tensor:
    """Whether any rank has a gradient that is not finite: 1.0 or 0.0, the same on all ranks.

    Args:
        owned: This rank's parameters; may be none.
        mesh: The mesh.
        local: A scalar of this rank that is positive if it has found something already.
    """
    found = torch.zeros((), dtype=torch.float32, device=mesh.device)
    if local is not None:
        found = found + local.detach().float()
    for same in _by_dtype(g for g in _local_gradients(owned) if g.numel()):
        peaks = torch.stack(torch._foreach_norm(same, math.inf))
        found = torch.maximum(found, (~torch.isfinite(peaks)).any().to(found))
    return agree_on_max(found, mesh)


def nonfinite_gradients(owned: Iterable[OwnedParameter], mesh: Mesh, limit: int = 8) -> str:
    """The parameters whose gradients are not finite, each with the ranks that found it so, for a message.

    Collective, and it waits for the device: for use once something is known to be wrong.
    """
    mine = [
        item.name
        for item in owned
        if item.param.grad is not None and not bool(torch.isfinite(local_of(item.param.grad)).all())
    ]
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_object(mine, mesh.control_world)):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    listed = [
        f"{name} ({', '.join(where(rank, mesh.sizes) for rank in found)})"
        for name, found in list(ranks.items())[:limit]
    ]
    return ", ".join(listed) + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")


def agree_on_max(found: Tensor, mesh: Mesh) -> Tensor:
    """``found``, a finite scalar, as its largest value over all ranks."""
    if mesh.world.size > 1:
        with timed(mesh.world, "nonfinite", found):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.world.group)
    return found


def _largest(value: Tensor, mesh: Mesh) -> Tensor:
    if mesh.world.size == 1:
        return value
    # Backends differ in what the maximum of NaN and a number is, so NaN travels beside the value.
    is_nan = torch.isnan(value)
    pair = torch.stack([torch.where(is_nan, torch.zeros_like(value), value), is_nan.to(value)])
    with timed(mesh.world, "norm", pair):
        dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=mesh.world.group)
    return torch.where(pair[1] > 0, torch.full_like(value, math.nan), pair[0])


def sharded_axes(parameter: Tensor) -> frozenset[str]:
    """Names of the mesh axes along which ``parameter`` is cut."""
    if not isinstance(parameter, DTensor):
        return frozenset()
    names = parameter.device_mesh.mesh_dim_names or ()
    return frozenset(
        name for name, placement in zip(names, parameter.placements, strict=True) if not placement.is_replicate()
    )


def _is_first_holder(parameter: Tensor, mesh: Mesh) -> bool:
    """Whether this rank is the first, along the axes that hold the same values, to hold these."""
    cut = sharded_axes(parameter)
    return all(axis.rank == 0 or axis.name in cut for axis in (mesh.dp, mesh.tp))


def _local_gradients(owned: Iterable[OwnedParameter]) -> Iterable[Tensor]:
    return (local_of(item.param.grad) for item in owned if item.param.grad is not None)


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    return list(kinds.values())
