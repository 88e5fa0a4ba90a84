"""The order in which a model calls its modules, seen in a run on meta tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from lightning_3d.example_inputs import example_inputs
from lightning_3d.pipeline.block_state import attributes_kept
from lightning_3d.pipeline.teachers import teacher_parts
from lightning_3d.placeholder import lost_writes, placeholder_parameter


class CallOrder(list[str]):
    """Names of modules in the order of their calls, seen in a run of the part ``within`` of a model."""

    within: str = ""


def call_order(module: nn.Module) -> CallOrder | None:
    """Names of the modules of ``module`` in the order of their calls, or ``None`` if no input is known.

    A module that is called several times stands there as often, under each of its names.

    Tried in turn, on the module and then on the part of it that holds most parameters: its ``example_input_array``,
    and inputs made up for it (see :mod:`lightning_3d.example_inputs`). Nothing is computed: parameters and buffers are
    replaced by placeholders for the time of the run, and any failure of it means only that the order stays unknown. A
    run that fails after all modules with parameters were called, in a loss that wants other targets, has told enough.
    """
    for prefix, target in _targets(module):
        for args, kwargs in example_inputs(target):
            order, error = _record(target, prefix, args, kwargs)
            if order and (error is None or _all_called(target, prefix, order)):
                seen = CallOrder(order)
                seen.within = prefix
                return seen
            if isinstance(error, NotImplementedError) and not order:
                break
    return None


def _targets(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and the parts of parts that hold most of its parameters, teachers left out, with their names."""
    teachers = teacher_parts(module)
    prefix, whole = "", _num_parameters(module) - sum(_num_parameters(module.get_submodule(name)) for name in teachers)
    while not prefix or not isinstance(module, nn.ModuleList | nn.Sequential):
        yield prefix, module
        sizes = {
            name: _num_parameters(child) for name, child in module.named_children() if prefix or name not in teachers
        }
        largest = max(sizes, key=lambda name: sizes[name], default="")
        if not largest or 2 * sizes[largest] < whole:
            return
        prefix, module = f"{prefix}.{largest}".lstrip("."), module.get_submodule(largest)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _all_called(target: nn.Module, prefix: str, order: list[str]) -> bool:
    called = set(order)
    return all(
        f"{prefix}.{name}".lstrip(".") in called
        for name, part in target.named_modules()
        if name and any(True for _ in part.parameters(recurse=False))
    )


def _record(
    target: nn.Module, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], Exception | None]:
    order: list[str] = []

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, given: order.append(name)

    handles = [
        child.register_forward_pre_hook(note(".".join(part for part in (prefix, name) if part)))
        for name, child in target.named_modules(remove_duplicate=False)
        if name
    ]
    device = torch.device("cpu")
    new: dict[int, Tensor] = {}
    stand_ins: dict[str, Tensor] = {}
    for path, child in target.named_modules():  # a module under two names once: exchanged twice, it is not restored
        for key, parameter in child._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}".lstrip(".")
                new.setdefault(id(parameter), placeholder_parameter(parameter, device, name))
                stand_ins[name] = new[id(parameter)]
    args, kwargs = pytree.tree_map_only(Tensor, _on_cpu, (args, kwargs))
    rng = torch.get_rng_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.no_grad())
            stack.enter_context(lost_writes())
            stack.enter_context(attributes_kept(target))
            # Buffers as copies: some modules count their calls in them.
            buffers = {name: buffer.clone() for name, buffer in target.named_buffers()}
            stack.enter_context(stateless._reparametrize_module(target, {**stand_ins, **buffers}))
            target(*args, **kwargs)
    except Exception as error:
        return order, error
    finally:
        torch.set_rng_state(rng)
        for handle in handles:
            handle.remove()
    return order, None


def _on_cpu(tensor: Tensor) -> Tensor:
    """An input with its values; one that was made by a model without memory has none."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu()
