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

from lightning_3d.placeholder import placeholder_parameter


def call_order(module: nn.Module) -> list[str] | None:
    """Names of the modules of ``module`` in the order of their calls, or ``None`` if no input is known.

    A module that is called several times stands there as often, under each of its names.

    Tried in turn: the LightningModule's ``example_input_array``; the ``dummy_inputs`` that Hugging Face models carry;
    a row of token numbers. Nothing is computed: parameters and buffers are replaced by placeholders for the time of
    the run, and any failure of it means only that the order stays unknown.
    """
    for target, prefix, args, kwargs in _inputs(module):
        order = _record(target, prefix, args, kwargs)
        if order is not None:
            return order
    return None


def _inputs(module: nn.Module) -> Iterator[tuple[nn.Module, str, tuple[Any, ...], dict[str, Any]]]:
    example = getattr(module, "example_input_array", None)
    if example is not None:
        if isinstance(example, dict):
            yield module, "", (), example
        else:
            yield module, "", example if isinstance(example, tuple) else (example,), {}
    # What trains first: a frozen teacher beside it would tell the order of its own calls.
    named = sorted(module.named_modules(), key=lambda item: not any(p.requires_grad for p in item[1].parameters()))
    for name, child in named:
        dummy = getattr(child, "dummy_inputs", None)
        if isinstance(dummy, dict):
            yield child, name, (), dummy
            break
    ids = torch.zeros(1, 8, dtype=torch.long)
    yield module, "", (ids,), {}
    for name, child in named[1:]:
        if any(isinstance(part, nn.Embedding) for part in child.children()):
            yield child, name, (ids,), {}
            break


def _record(target: nn.Module, prefix: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
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
    args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), (args, kwargs))
    rng = torch.get_rng_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.no_grad())
            # Buffers as copies: some modules count their calls in them.
            buffers = {name: buffer.clone() for name, buffer in target.named_buffers()}
            stack.enter_context(stateless._reparametrize_module(target, {**stand_ins, **buffers}))
            target(*args, **kwargs)
    except Exception:
        return None
    finally:
        torch.set_rng_state(rng)
        for handle in handles:
            handle.remove()
    return order or None
