"""Element-wise optimizers step on this rank's plain tensors, while everyone else sees DTensors."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.attributes import share_attributes
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding import adafactor
from lightning_3d.sharding.reducer import like_parameter, local_of
from lightning_3d.sharding.user_step import UserStep

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
"""Optimizers of torch that treat every element of a parameter alone, so that a shard steps as the whole would."""


def is_element_wise(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of :data:`ELEMENT_WISE`, or a subclass that changes no more than its constructor."""
    return _is_one_of(ELEMENT_WISE, optimizer)


def steps_on_parts(optimizer: Optimizer) -> bool:
    """Whether :func:`local_step` lets ``optimizer`` step on parts of parameters as it would on whole ones."""
    return _is_one_of((*ELEMENT_WISE, optim.Adafactor), optimizer)


def _is_one_of(kinds: tuple[type[Optimizer], ...], optimizer: Optimizer) -> bool:
    mro = type(optimizer).__mro__
    known = next((cls for cls in mro if cls in kinds), None)
    if known is None:
        return False
    names = {name for cls in mro[: mro.index(known)] for name in vars(cls)}
    return all(
        name.startswith("__") or inspect.unwrap(getattr(type(optimizer), name)) is inspect.unwrap(getattr(known, name))
        for name in names
        if callable(getattr(type(optimizer), name, None)) and hasattr(known, name)
    )


@dataclass(eq=False)
class _Twin:
    """A DTensor parameter and the plain parameter on the same memory that steps for it."""

    local: nn.Parameter
    seen: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """By name of a state: its public form and its local form, which share memory."""


_TWINS: WeakKeyDictionary[Optimizer, dict[nn.Parameter, _Twin]] = WeakKeyDictionary()


@contextmanager
def local_step(optimizer: Optimizer) -> Iterator[None]:
    """Within, an element-wise ``optimizer`` holds plain tensors: this rank's parts of parameters, gradients, states.

    Outside it holds the model's parameters and states placed as they are, the same objects at every step, for LR
    schedulers, checkpoints and user code. Placeholder parameters are left out. Adafactor steps with the means and
    norms of whole parameters. Other optimizers work on DTensors, of which they read whole numbers.
    """
    if not steps_on_parts(optimizer):
        with UserStep(optimizer).running():
            yield
        return
    if not _needs_help(optimizer):
        yield
        return
    if isinstance(optimizer, optim.Adafactor):
        with _adafactor_step(optimizer):
            yield
        return
    twins = _TWINS.setdefault(optimizer, {})
    public_state = optimizer.state
    public_params = [group["params"] for group in optimizer.param_groups]
    local_state: defaultdict[Any, Any] = defaultdict(dict)
    originals: dict[nn.Parameter, nn.Parameter] = {}
    for group, params in zip(optimizer.param_groups, public_params, strict=True):
        group["params"] = [
            _enter(parameter, twins, public_state, local_state, originals)
            for parameter in params
            if not is_placeholder(parameter)
        ]
    optimizer.state = local_state
    try:
        yield
    finally:
        optimizer.state = public_state
        for group, params in zip(optimizer.param_groups, public_params, strict=True):
            group["params"] = params
        for local, states in local_state.items():
            original = originals.get(local, local)
            if original is local:
                public_state[local] = states
            else:
                local.grad = None
                _leave(original, twins[original], states, public_state)


@contextmanager
def _adafactor_step(optimizer: optim.Adafactor) -> Iterator[None]:
    """Within, torch's step hands each group to ours, at the place where it would collect the group's parameters.

    It then has nothing left to do for the group, and everything around the step (hooks, counts of schedulers) stays.
    """

    def collect(group: dict[str, Any], *lists: list[Any]) -> bool:
        adafactor.step_group(optimizer, group)
        return False

    vars(optimizer)["_init_group"] = collect
    try:
        yield
    finally:
        del vars(optimizer)["_init_group"]


def _needs_help(optimizer: Optimizer) -> bool:
    return any(
        isinstance(parameter, DTensor) or is_placeholder(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _enter(
    parameter: nn.Parameter,
    twins: dict[nn.Parameter, _Twin],
    public_state: Any,
    local_state: Any,
    originals: dict[nn.Parameter, nn.Parameter],
) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        if parameter in public_state:
            local_state[parameter] = public_state[parameter]
        return parameter
    values = local_of(parameter.detach())
    twin = twins.get(parameter)
    if twin is None or not _same_memory(twin.local, values):
        twin = twins[parameter] = _Twin(nn.Parameter(values, requires_grad=parameter.requires_grad))
        share_attributes(parameter, twin.local)
    local = twin.local
    originals[local] = parameter
    local.grad = None if parameter.grad is None else local_of(parameter.grad)
    if parameter in public_state:
        states = {}
        for key, value in public_state[parameter].items():
            if isinstance(value, DTensor):
                known = twin.seen.get(key)
                if known is None or known[0] is not value:
                    known = twin.seen[key] = (value, local_of(value))
                value = known[1]
            states[key] = value
        local_state[local] = states
    return local


def _leave(parameter: nn.Parameter, twin: _Twin, states: dict[str, Any], public_state: Any) -> None:
    public = public_state[parameter]
    for key, value in states.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == twin.local.shape:
            known = twin.seen.get(key)
            if known is None or known[1] is not value:
                known = twin.seen[key] = (like_parameter(value, parameter), value)
            value = known[0]
        public[key] = value
    for key in public.keys() - states.keys():
        del public[key]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype
