"""Adafactor on parameters of which each rank holds a part: its means and norms are those of whole rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Adafactor

from lightning_3d.sharding.reducer import local_of

_Groups: TypeAlias = dict[str, Any]
"""Process groups by the name of their mesh axis."""


@dataclass(frozen=True, eq=False)
class _Part:
    """One parameter with a gradient: what this rank holds of it, and along which mesh axes each of its dims is cut."""

    param: nn.Parameter
    values: Tensor
    grad: Tensor
    state: dict[str, Any]
    cuts: dict[int, _Groups]
    """By dim, the process groups whose ranks hold the other parts along it."""

    @property
    def groups(self) -> _Groups:
        return {axis: group for groups in self.cuts.values() for axis, group in groups.items()}

    def over(self, dim: int) -> _Groups:
        return self.cuts.get(dim % self.values.dim(), {})


def step_group(optimizer: Adafactor, group: dict[str, Any]) -> None:
    """What torch's Adafactor does with a parameter group, for parameters of which this rank may hold parts.

    The formulas are those of ``torch.optim.Adafactor``, whose paper is arXiv:1804.04235. Sums over a dim that is cut
    are completed over the ranks that hold the rest, for all parameters at once: four times in a step. Nothing waits for
    the device.

    Args:
        optimizer: Keeps the state; row and column means are placed as the parameter is.
        group: One of its parameter groups.
    """
    parts = [_part(optimizer, p, group["maximize"]) for p in group["params"] if p.grad is not None]
    wide = [part for part in parts if part.values.dim() > 1]
    lr, decay = float(group["lr"]), group["weight_decay"]
    sizes = _summed([(_sum_of_squares(part.values), part.groups) for part in parts])
    means = {id(part): pair for part, pair in zip(wide, zip(*_mean_squares(wide), strict=True), strict=True)}
    for part in parts:
        part.state["step"] += 1
        weight = float(part.state["step"]) ** group["beta2_decay"]
        if part.values.dim() > 1:
            for key, mean in zip(("row_var", "col_var"), means[id(part)], strict=True):
                local_of(part.state[key]).lerp_(mean, weight)
        else:
            local_of(part.state["variance"]).lerp_(part.grad.square(), weight)
    columns = _summed([(local_of(part.state["row_var"]).sum(dim=-2, keepdim=True), part.over(-2)) for part in wide])
    column_of = dict(zip(map(id, wide), columns, strict=True))
    updates = [_update(part, column_of.get(id(part)), group["eps"][0]) for part in parts]
    norms = _summed([(_sum_of_squares(update), part.groups) for update, part in zip(updates, parts, strict=True)])
    for part, size, update, norm in zip(parts, sizes, updates, norms, strict=True):
        root = max(1, part.param.numel()) ** 0.5
        alpha = (size.sqrt() / root).clamp(min=group["eps"][1]) * min(lr, float(part.state["step"]) ** -0.5)
        alpha = alpha / (norm.sqrt() / (root * group["d"])).clamp(min=1.0)
        if decay != 0:
            part.values.mul_(1 - lr * decay)
        exact = torch.promote_types(update.dtype, torch.float32)  # rounded once, as by torch's add_(alpha=...)
        part.values.copy_(part.values.to(exact).sub_(update.to(exact).mul_(alpha.to(exact))))


def _update(part: _Part, column_sum: Tensor | None, given_eps: float | None) -> Tensor:
    """The gradient over the root of its estimated variance."""
    eps = float(torch.finfo(part.values.dtype).eps if given_eps is None else given_eps)
    if column_sum is not None:
        estimate = local_of(part.state["row_var"]) @ local_of(part.state["col_var"])
        estimate.div_((column_sum / part.param.shape[-2]).clamp_(min=eps))
    else:
        estimate = local_of(part.state["variance"]).clone()
    return estimate.clamp_(min=eps * eps).rsqrt_().mul_(part.grad)


def _part(optimizer: Adafactor, parameter: nn.Parameter, maximize: bool) -> _Part:
    values = local_of(parameter.detach())
    grad = local_of(parameter.grad) if parameter.grad is not None else torch.zeros_like(values)
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32)
        if values.dim() > 1:
            state["row_var"] = _zeros(parameter, values, -1)
            state["col_var"] = _zeros(parameter, values, -2)
        else:
            state["variance"] = torch.zeros_like(parameter)
    return _Part(parameter, values, -grad if maximize else grad, state, _cuts(parameter))


def _cuts(parameter: nn.Parameter) -> dict[int, _Groups]:
    if not isinstance(parameter, DTensor):
        return {}
    cuts: dict[int, _Groups] = {}
    mesh = parameter.device_mesh
    for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if not placement.is_replicate():
            dim = placement.dim % parameter.dim()  # type: ignore[attr-defined]
            cuts.setdefault(dim, {})[axis] = mesh.get_group(axis)
    return cuts


def _zeros(parameter: nn.Parameter, values: Tensor, without: int) -> Tensor:
    """Zeros like ``parameter`` but for one dim, which is 1; placed as it is along the others."""
    dim = without % values.dim()
    local = values.new_zeros([1 if index == dim else size for index, size in enumerate(values.shape)])
    if not isinstance(parameter, DTensor):
        return local
    return reduced_like(local, parameter, (dim,))


def reduced_like(local: Tensor, parameter: DTensor, dims: Sequence[int]) -> DTensor:
    """``local`` as this rank's part of a tensor like ``parameter`` whose dims ``dims`` have the size 1."""
    shape = [1 if index in dims else size for index, size in enumerate(parameter.shape)]
    placements = [
        Replicate() if getattr(placement, "dim", None) in dims else placement for placement in parameter.placements
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _mean_squares(parts: Sequence[_Part]) -> tuple[list[Tensor], list[Tensor]]:
    """Means of squared gradients over rows and over columns."""
    sums: list[tuple[Tensor, _Groups]] = []
    for part in parts:
        squares = part.grad.square()
        sums += [(squares.sum(dim=dim, keepdim=True), part.over(dim)) for dim in (-1, -2)]
    totals = _summed(sums)
    rows = [total / part.param.shape[-1] for total, part in zip(totals[::2], parts, strict=True)]
    columns = [total / part.param.shape[-2] for total, part in zip(totals[1::2], parts, strict=True)]
    return rows, columns


def _sum_of_squares(values: Tensor) -> Tensor:
    """In float64, of which no copy of ``values`` is made."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(dtype=torch.float64)


def _summed(items: Sequence[tuple[Tensor, _Groups]]) -> list[Tensor]:
    """Each tensor summed over its process groups, all of one axis and type in one all-reduce."""
    totals = [tensor for tensor, _ in items]
    # By the names of axes, which all ranks take in one order. Those of groups differ from rank to rank.
    for axis in sorted({axis for _, groups in items for axis in groups}):
        for dtype in sorted({tensor.dtype for tensor in totals}, key=str):
            chosen = [i for i, (_, groups) in enumerate(items) if axis in groups and totals[i].dtype == dtype]
            if not chosen:
                continue
            flat = torch.cat([totals[index].reshape(-1) for index in chosen])
            dist.all_reduce(flat, group=items[chosen[0]][1][axis])
            for index, piece in zip(chosen, flat.split([totals[index].numel() for index in chosen]), strict=True):
                totals[index] = piece.view(totals[index].shape)
    return totals
