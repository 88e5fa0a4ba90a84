"""Operations that CUDA computes in other types or with other kernels, so that a run on GPUs keeps other tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

_IN_FLOAT32 = (
    *((F, name) for name in ("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "softplus")),
    *((torch, name) for name in ("layer_norm", "rms_norm", "group_norm")),
    *((owner, name) for owner in (torch, Tensor) for name in ("softmax", "log_softmax", "pow", "rsqrt", "exp", "log")),
    *((owner, name) for owner in (torch, Tensor) for name in ("sum", "cumsum", "prod")),
    (Tensor, "__pow__"),
)
"""What autocast runs in float32 on GPUs and as it comes on CPUs (``ATen/autocast_mode.h``), as far as models of today
keep what these make."""


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Within, tensors of a CPU are computed with as CUDA would, where that changes what is kept for the backward.

    Autocast runs norms, softmax and powers in float32; dropout keeps a mask of a byte an element; and attention keeps
    no scores, with dropout either. The functions themselves are exchanged: a mode of torch is left in the backward, in
    which blocks are recomputed.
    """
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention
    with ExitStack() as stack:
        for owner, name in _IN_FLOAT32:
            stack.enter_context(patch.object(owner, name, _in_float32(getattr(owner, name))))
        stack.enter_context(patch.object(F, "dropout", _dropout_with_mask(F.dropout)))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention_without_scores(attention)))
        yield


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return wide


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def _dropout_with_mask(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not p or inplace:
            return function(input, p, training, inplace)
        kept: Tensor = torch.native_dropout(input, p, True)[0]
        return kept

    return dropout


def _attention_without_scores(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *args: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return function(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention
