"""Cut parameters: which rows of a parameter a tensor-parallel rank holds, and its local view in a forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_3d.attributes import OF_MODULES, carry_attributes
from lightning_3d.collectives import chunk_sizes
from lightning_3d.initialization import following


@dataclass(frozen=True)
class ParameterCut:
    """How a parameter is cut over the tensor-parallel axis.

    Its DTensor says ``Shard(dim)``; with several sections (packed q/k/v, gate/up) each rank holds a piece of every
    section, which :meth:`intervals` tells and the placement does not.
    """

    dim: int
    """Tensor dim that is cut."""
    global_shape: tuple[int, ...]
    sections: tuple[int, ...]
    """Lengths of the packed parts along ``dim``; one for a plain layer."""
    size: int
    """Ranks along the tensor-parallel axis."""

    @property
    def parts(self) -> int:
        """Number of packed parts."""
        return len(self.sections)

    def intervals(self, rank: int) -> tuple[tuple[int, int], ...]:
        """``(start, length)`` along ``dim`` of the pieces that ``rank`` holds one after the other."""
        found = []
        offset = 0
        for section in self.sections:
            sizes = chunk_sizes(section, self.size)
            found.append((offset + sum(sizes[:rank]), sizes[rank]))
            offset += section
        return tuple(found)

    def local_size(self, rank: int) -> int:
        """Length along ``dim`` of what ``rank`` holds."""
        return sum(length for _, length in self.intervals(rank))

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """A contiguous copy of the pieces of ``rank``."""
        pieces = [whole.narrow(self.dim, start, length) for start, length in self.intervals(rank)]
        return (
            torch.cat(pieces, self.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, locals_: Sequence[Tensor]) -> Tensor:
        """The whole parameter from every rank's local tensor; the inverse of :meth:`take`."""
        whole = locals_[0].new_empty(self.global_shape)
        for rank, local in enumerate(locals_):
            done = 0
            for start, length in self.intervals(rank):
                whole.narrow(self.dim, start, length).copy_(local.narrow(self.dim, done, length))
                done += length
        return whole


def cut_parameter(parameter: nn.Parameter, cut: ParameterCut, tp_mesh: DeviceMesh, rank: int) -> nn.Parameter:
    """A DTensor parameter that holds the pieces of ``parameter`` that belong to ``rank``."""
    with following():  # the pieces of a parameter without memory are a recipe too
        local = cut.take(parameter.detach(), rank)
    sharded = DTensor.from_local(
        local,
        tp_mesh,
        [Shard(cut.dim)],
        run_check=False,
        shape=torch.Size(cut.global_shape),
        stride=_contiguous_stride(cut.global_shape),
    )
    new = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    carry_attributes(parameter, new)
    return new


def replace_parameters(module: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in the place of some, wherever a part of ``module`` refers to them.

    That is under their names, shared or not, and in lists, tuples and dicts that modules keep as plain attributes.

    Args:
        module: Changed in place.
        new: The new parameters by ``id`` of the old ones.
    """

    def renewed(value: Any, depth: int = 0) -> Any:
        if isinstance(value, nn.Parameter):
            return new.get(id(value), value)
        if depth > 3:
            return value
        if type(value) is list:
            value[:] = [renewed(item, depth + 1) for item in value]
        elif type(value) is dict:
            value.update({key: renewed(item, depth + 1) for key, item in value.items()})
        elif type(value) is tuple and any(isinstance(item, (nn.Parameter, list, dict, tuple)) for item in value):
            return tuple(renewed(item, depth + 1) for item in value)
        return value

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in new:
                part._parameters[name] = new[id(parameter)]
        for name, value in vars(part).items():
            if name not in OF_MODULES and isinstance(value, (list, dict, tuple)):
                vars(part)[name] = renewed(value)


def local_view(parameter: Tensor | None) -> Any:
    """The local tensor of a cut parameter as autograd sees it; any other tensor as it is.

    Does what ``DTensor.to_local`` does without its dispatch: the gradient is wrapped with the parameter's own layout.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter.requires_grad and torch.is_grad_enabled():
        return _LocalView.apply(parameter)
    return parameter._local_tensor


def local_views(weight: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
    """:func:`local_view` of a weight and its bias, by one step of autograd where both are cut."""
    both = isinstance(weight, DTensor) and isinstance(bias, DTensor)
    if both and torch.is_grad_enabled() and weight.requires_grad and bias.requires_grad:  # type: ignore[union-attr]
        return _LocalViews.apply(weight, bias)
    return local_view(weight), local_view(bias)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(1, length)
    return tuple(reversed(stride))


class _LocalView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.parameters = (parameter,)
        local = parameter._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor | None:
        return hand_over(ctx.parameters[0], gradient, ctx.next_functions[0][0])


class _LocalViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: DTensor, bias: DTensor) -> tuple[Tensor, Tensor]:
        ctx.parameters = weight, bias
        ctx.set_materialize_grads(False)
        return weight._local_tensor.view_as(weight._local_tensor), bias._local_tensor.view_as(bias._local_tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        return tuple(
            None if gradient is None else hand_over(parameter, gradient, node)
            for parameter, gradient, (node, _) in zip(ctx.parameters, gradients, ctx.next_functions, strict=True)
        )


def hand_over(parameter: DTensor, gradient: Tensor, accumulate: Any) -> DTensor | None:
    """Give autograd the gradient of a parameter, or put it into ``grad`` where autograd would do no more than that.

    Autograd detaches, and adds up, gradients that are DTensors through their dispatch, which takes as long as a small
    layer; here the local tensors are added. Where anybody listens, or the gradient is the answer of
    ``torch.autograd.grad``, autograd gets it.

    Args:
        parameter: The parameter.
        gradient: Of what this rank holds of it; in the type that was computed in.
        accumulate: The node of the graph that would add it up.
    """
    if not _only_accumulates(parameter, accumulate):
        return _like(gradient, parameter)
    if parameter.grad is None:
        parameter.grad = _like(gradient, parameter)
    else:
        parameter.grad._local_tensor.add_(gradient)  # type: ignore[attr-defined]
    return None


def _like(gradient: Tensor, parameter: DTensor) -> DTensor:
    # Without `__init__`, which does nothing but ask torch.compile to look away: as long as an addition takes.
    local = gradient.to(parameter.dtype).contiguous()
    return DTensor.__new__(DTensor, local, parameter._spec, requires_grad=False)


def _only_accumulates(parameter: DTensor, accumulate: Any) -> bool:
    if not parameter.is_leaf or torch.is_grad_enabled():  # a graph of the backward is wanted
        return False
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    if parameter.grad is not None and type(parameter.grad) is not DTensor:
        return False
    try:
        return torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # `torch.autograd.grad` takes the gradient for itself
        return False
