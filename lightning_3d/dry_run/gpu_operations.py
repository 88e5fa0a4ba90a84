"""Operations that CUDA computes in other types or with other kernels, so that a run on GPUs keeps other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_IN_FLOAT32 = frozenset(
    (
        F.layer_norm, F.rms_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus, torch.layer_norm, torch.rms_norm,
        torch.group_norm, torch.softmax, torch.log_softmax, torch.pow, torch.rsqrt, torch.exp, torch.log, torch.sum,
        torch.cumsum, Tensor.softmax, Tensor.log_softmax, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.exp,
        Tensor.log, Tensor.sum, Tensor.cumsum,
    )
)  # fmt: skip
"""That autocast runs in float32 on GPUs and as they come on CPUs (``ATen/autocast_mode.h``), as far as models of today
keep what these make."""


class GpuOperations(TorchFunctionMode):
    """Within, tensors of a CPU are computed with as CUDA would, where that changes what is kept for the backward.

    Autocast runs norms, softmax and powers in float32; dropout keeps a mask of a byte an element; and attention keeps
    no scores, with dropout either.
    """

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and "dropout_p" in kwargs:
            return func(*args, **{**kwargs, "dropout_p": 0.0})
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not p or inplace:
        return F.dropout(input, p, training, inplace)
    kept: Tensor = torch.native_dropout(input, p, True)[0]
    return kept
