"""What the code of a block can see of its state when it runs without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.attributes import OF_MODULES
from lightning_3d.tensor_parallel.clone import without_hooks
from lightning_3d.tensor_parallel.probe import BlockCall

_KEPT_APART = OF_MODULES - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def visible_state(block: nn.Module, call: BlockCall) -> tuple[object, ...]:
    """Equal for two blocks only if copies of them that are called without values do the same.

    Classes, attributes, shapes and types of tensors, which of them are one object under several names, and what the
    call hands over. Objects of classes that are not known are the same only if they are one object: blocks that each
    hold their own differ here, though they may compute the same.

    Args:
        block: The block.
        call: How it is called.
    """
    numbers: dict[int, int] = {}

    def number(value: object) -> int:
        return numbers.setdefault(id(value), len(numbers))

    facts: list[object] = []
    for path, part in block.named_modules(remove_duplicate=False):
        attributes = ((name, value) for name, value in vars(part).items() if name not in _KEPT_APART)
        tensors = (*part._parameters.items(), *part._buffers.items())
        facts.append((path, number(part), type(part)))
        facts.extend((name, _of_tensor(value, number)) for name, value in tensors if value is not None)
        facts.extend((name, _plain(value, number)) for name, value in attributes)
        facts.extend(id(hook) for hooks in without_hooks(part).values() for hook in hooks.values())
    leaves, structure = call.leaves()
    return (*facts, *(_plain(leaf, number) for leaf in leaves), str(structure), call.trained)


def _of_tensor(tensor: Tensor, number: Callable[[object], int]) -> tuple[object, ...]:
    attributes = tuple((name, id(value)) for name, value in vars(tensor).items())
    form = (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.is_meta, tensor.requires_grad)
    return number(tensor), *form, *attributes


def _plain(value: Any, number: Callable[[object], int], depth: int = 0) -> object:
    if isinstance(value, Tensor) and depth == 0:  # within containers copies keep their values
        return _of_tensor(value, number)
    if type(value) in _PLAIN:
        return type(value), repr(value)
    if type(value) in (list, tuple):
        return type(value), tuple(_plain(item, number, depth + 1) for item in value)
    if type(value) is dict:
        items = ((_plain(key, number, 1), _plain(item, number, depth + 1)) for key, item in value.items())
        return type(value), tuple(items)
    return id(value)
