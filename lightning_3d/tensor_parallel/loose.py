"""Parameters that a step computes with outside of their layers: terms of the loss such as a penalty on all weights."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from typing_extensions import override

from lightning_3d.collectives import all_gather
from lightning_3d.errors import PlanError
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.parameters import ParameterCut, hand_over

_ABOUT = frozenset(
    [
        "__get__",
        "__set__",
        "__hash__",
        "__repr__",
        "__format__",
        "__len__",
        "numel",
        "nelement",
        "size",
        "dim",
        "ndimension",
        "stride",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "data_ptr",
        "storage",
        "untyped_storage",
    ]
)
"""What is asked of a tensor without computing with its values."""
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that compute."""
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = str(Path(torch.__file__).parent)


class LooseParameters(TorchFunctionMode):
    """Within, code outside of the blocks that computes with a parameter gets it whole, with a right gradient.

    Of a cut parameter that is the whole one, gathered, whose gradient is cut again. Of a parameter whose gradient is
    summed over the ranks once per step, since each makes a part of it in its block, it is one that adds a rank's share.

    Args:
        module: The LightningModule, cut.
        cuts: How parameters are cut, by full name.
        partial: Names of parameters whose gradients are summed over ``axis``.
        blocks: Names of the blocks, in which parameters are computed with as they are.
        axis: The tensor-parallel axis.
    """

    def __init__(
        self,
        module: nn.Module,
        cuts: Mapping[str, ParameterCut],
        partial: frozenset[str],
        blocks: Sequence[str],
        axis: Axis,
    ) -> None:
        super().__init__()
        self._module = module
        self._cuts, self._partial = cuts, partial
        self._axis = axis
        self._depth = 0
        self._names: dict[int, tuple[nn.Parameter, str]] = {}
        self._is_open = False
        self._is_aside = False
        for block in blocks:
            module.get_submodule(block).register_forward_pre_hook(self._enter)
            module.get_submodule(block).register_forward_hook(self._leave, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> LooseParameters:
        """Copies of blocks, for trials, keep their hooks on it."""
        return self

    @override
    def __enter__(self) -> Any:
        self._depth, self._is_open = 0, True
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._put_back()  # a block that was left by an exception may not have done so
        self._is_open = False
        super().__exit__(*error)

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        # In blocks it has nothing to do, and a mode costs every operation about as long as a small one takes.
        if self._is_open and not self._is_aside and _get_current_function_mode() is self:
            _pop_mode()
            self._is_aside = True

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._put_back()

    def _put_back(self) -> None:
        if self._is_aside:
            _push_mode(self)
            self._is_aside = False

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth or not torch.is_grad_enabled() or _asks(func):
            return func(*args, **kwargs)
        if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):  # a step by hand runs optimizers and the like
            return func(*args, **kwargs)
        return func(*map(self._seen, args), **{key: self._seen(value) for key, value in kwargs.items()})

    def _seen(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._seen, value))
        if not isinstance(value, nn.Parameter):
            return value
        name = self._name(value)
        if isinstance(value, DTensor):
            if name not in self._cuts or value.device_mesh.mesh_dim_names != ("tp",):
                raise PlanError(
                    f"{_place()}: the step computes with {name or 'a parameter'} outside of its layer, and of this"
                    " parameter the rank holds a shard at this point. Use tensor_parallel=1 or zero_stage=2 or lower,"
                    " or leave this term of the loss to the optimizer (weight_decay)."
                )
            return _Whole.apply(value, self._cuts[name], self._axis)
        if name in self._partial and value.requires_grad:
            return _Share.apply(value, self._axis.size)
        return value

    def _name(self, parameter: nn.Parameter) -> str:
        known = self._names.get(id(parameter))
        if known is None or known[0] is not parameter:
            # Sharding puts others into their places, and those again.
            self._names |= {id(each): (each, name) for name, each in self._module.named_parameters()}
            known = self._names.get(id(parameter))
        return "" if known is None or known[0] is not parameter else known[1]


def _asks(func: Callable[..., Any]) -> bool:
    """Whether ``func`` asks something of a tensor without computing with its values."""
    name = getattr(func, "__name__", "")
    return name in _ABOUT and not (name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEWS)  # type: ignore[attr-defined]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor, cut: ParameterCut, axis: Axis) -> Tensor:
        ctx.parameters, ctx.cut, ctx.rank = (parameter,), cut, axis.rank
        sizes = [cut.local_size(rank) for rank in range(axis.size)]
        joined = all_gather(parameter._local_tensor, axis, cut.dim, sizes)
        return cut.join(joined.split(sizes, cut.dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor | None, None, None]:
        piece = ctx.cut.take(gradient, ctx.rank)
        return hand_over(ctx.parameters[0], piece, ctx.next_functions[0][0]), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, size: int) -> Tensor:
        ctx.size = size
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None


@contextmanager
def mixing_refused(step: Callable[..., Any]) -> Iterator[Callable[[Any], None]]:
    """Around ``step``: refuse terms of cut parameters where nothing makes these whole (beside compiled blocks).

    Yields a function for what the step gave.

    Raises:
        PlanError: naming file and line.
    """

    def check(output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, DTensor):
            code = getattr(getattr(step, "__func__", step), "__code__", None)
            raise PlanError(_complaint("the step" if code is None else f"{code.co_filename}:{code.co_firstlineno}"))

    try:
        yield check
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith((_PACKAGE, _TORCH, "<"))]
        raise PlanError(_complaint(f"{own[-1].filename}:{own[-1].lineno}" if own else "the step")) from error


def _complaint(place: str) -> str:
    return (
        f"{place}: the step computes with parameters outside of their layers, of which each tensor-parallel rank holds"
        " a part. Such terms of a loss work without compile, and with the parameters as their modules give them (not"
        " parameter.data). Use compile=False, or leave the term to the optimizer (weight_decay)."
    )


def _place() -> str:
    """File and line of the user's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, _TORCH, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
