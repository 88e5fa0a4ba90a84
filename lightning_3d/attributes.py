"""What user code hangs on modules and parameters: attributes, and hooks on gradients, which others may take over."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Module, Parameter

OF_MODULES = frozenset(vars(Module()))
"""Attributes in which torch keeps what is in a module; all others are the user's, whatever they are called."""


def carry_attributes(old: Tensor, new: Tensor) -> None:
    """Give ``new``, which stands in the place of ``old``, the attributes that ``old`` has and it has not."""
    for name, value in vars(old).items():
        vars(new).setdefault(name, value)


def share_attributes(holder: Tensor, other: Tensor) -> None:
    """Let both have the attributes of ``holder`` from now on: what is set on one is seen on the other."""
    if type(other) not in (Tensor, Parameter):  # such a class keeps in the dictionary what it is
        carry_attributes(holder, other)
    elif vars(other) is not vars(holder):
        other.__dict__ = holder.__dict__


def renew_hooks(tensor: Tensor) -> None:
    """Let the hooks of ``tensor`` count again: autograd forgets them when the object gets another inside."""
    if hooks := tensor._backward_hooks:
        tensor._backward_hooks = None
        tensor._backward_hooks = hooks
    if after := tensor._post_accumulate_grad_hooks:
        tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        tensor._post_accumulate_grad_hooks = after
