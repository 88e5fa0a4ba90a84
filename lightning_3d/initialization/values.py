"""Giving a module's tensors their memory and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.attributes import OF_MODULES, renew_hooks
from lightning_3d.initialization.recipes import Memory, Ref, compute, forget, history, memory_of, plainly

Give = Callable[[Ref], Tensor]
"""Gives a tensor of that shape, stride and type in the place of one that has no memory."""

_givers: list[Give] = []


@contextlib.contextmanager
def parameters_from(give: Give) -> Iterator[None]:
    """Within, :func:`materialise` takes parameters from ``give``, which knows no values, instead of computing them."""
    _givers.append(give)
    try:
        yield
    finally:
        _givers.pop()


def is_deferred(tensor: object) -> bool:
    """Whether ``tensor`` (or what a DTensor holds of it here) has a recipe instead of memory."""
    return memory_of(_local(tensor)) is not None


def materialise(module: nn.Module, device: torch.device, parameters: bool = True) -> None:
    """Compute what ``module`` still holds as recipes, one tensor after another, and keep it on ``device``.

    Tensors stay the objects that they are, so whoever holds one sees its values; those that shared memory share it.
    What is needed on the way to a value, such as the whole of a matrix of which this rank holds a part, is freed
    before the next.

    Args:
        module: Changed in place.
        device: Where the values are kept.
        parameters: Whether parameters get values too, or buffers and plain attributes only.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for _, tensor in named_tensors(module):
        memory = memory_of(_local(tensor))
        if memory is None or (isinstance(tensor, nn.Parameter) and not parameters):
            continue
        if _givers and isinstance(tensor, nn.Parameter):
            _become(tensor, _givers[-1](Ref.of(_local(tensor), memory.number)))
            continue
        if memory.number not in storages:
            storages[memory.number] = _on_device(compute([memory])[memory.number], device)
        _fill(tensor, storages[memory.number], memory)
    storages.clear()
    forget()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a part of ``module`` refers to, once: parameters, buffers and plain attributes."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        held = {**part._parameters, **part._buffers}
        held.update({name: value for name, value in vars(part).items() if name not in OF_MODULES})
        for name, value in held.items():
            for tensor in _tensors(value):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{prefix}.{name}".lstrip("."), tensor


def missing_values(module: nn.Module) -> str:
    """What is wrong unless a checkpoint is loaded: names of large parameters that nothing has filled; or empty."""
    unset = [name for name, parameter in module.named_parameters() if never_written(parameter)]
    if not unset:
        return ""
    return (
        f"These parameters were made by torch.empty and never given values: {some(unset)}. Their values would be"
        " whatever was in memory. Fill them where they are made (nn.init), or load a checkpoint with ckpt_path."
    )


def some(names: list[str]) -> str:
    """The first of them, for a message."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def never_written(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a recipe that gives it memory and no values."""
    memory = memory_of(_local(tensor))
    return memory is not None and all(step.is_empty for step in history([memory]))


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth <= 3 and type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif depth <= 3 and type(value) is dict:
        for item in value.values():
            yield from _tensors(item, depth + 1)


def _local(tensor: Any) -> Any:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _on_device(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if storage.device.type == device.type:
        return storage
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat.to(device).untyped_storage()


def _become(tensor: Tensor, given: Tensor) -> None:
    """Let ``tensor`` be the same object, as a tensor of the class of ``given`` (for a DTensor: with it inside)."""
    if isinstance(tensor, DTensor):
        placed = DTensor.__new__(DTensor, given, tensor._spec, requires_grad=tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, placed)
        tensor._local_tensor = given
        return
    real: Tensor = nn.Parameter(given, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    tensor.__class__, real.__class__ = type(real), type(tensor)
    vars(tensor).update(vars(real))
    torch._C._swap_tensor_impl(tensor, real)
    renew_hooks(tensor)


def _fill(tensor: Tensor, storage: torch.UntypedStorage, memory: Memory) -> None:
    """Let ``tensor`` be the same object with values.

    What ``torch.utils.swap_tensors`` does, which refuses tensors that somebody holds a weak reference to (``nn.LSTM``
    does); the references stay right, since the object stays.
    """
    with plainly():
        real = local = Ref.of(_local(tensor), memory.number).on(storage)
        if isinstance(tensor, DTensor):
            real = DTensor.__new__(DTensor, local, tensor._spec, requires_grad=False)
        real.requires_grad_(tensor.requires_grad)
        torch._C._swap_tensor_impl(tensor, real)
        renew_hooks(tensor)
        if isinstance(tensor, DTensor):
            tensor._local_tensor = local
