"""This rank's part of a whole tensor, for whoever hands whole tensors to a module that is laid out."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.reader import Source, fill
from lightning_3d.checkpoint.state import ModelState, plain, shard_of
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import Placeholder, is_placeholder
from lightning_3d.sharding.reducer import like_parameter


def part_of(name: str, value: Source, live: Tensor, state: ModelState, mesh: Mesh) -> Tensor:
    """This rank's part of ``value``, as a plain tensor on the device of ``live``.

    Args:
        name: Any name of the parameter or buffer.
        value: A whole tensor, in memory or in a file; or what is a part already: placed like ``live``, or of its
            local shape.
        live: What this rank holds of the parameter.
        state: The rank's view of the model.
        mesh: This rank's place.

    Raises:
        CheckpointError: It has neither the whole shape nor that of the part.
    """
    entry = shard_of(state.first_name(name), live, state.cut_of(name), mesh)
    if isinstance(value, DTensor):
        return plain(value)
    if isinstance(value, Tensor) and value.shape == entry.tensor.shape:
        return value.detach()
    part = torch.empty_like(entry.tensor, dtype=value.dtype)
    fill(replace(entry, tensor=part), value)
    return part


def placed(name: str, value: Source, live: Tensor, state: ModelState, mesh: Mesh) -> Tensor:
    """``value`` in the form of ``live``, the parameter or buffer ``name`` of a module that is laid out.

    A ``DTensor`` where that is one, a placeholder where another stage holds it.
    """
    if is_placeholder(live):
        return Placeholder.like(live.detach(), origin=name)
    return like_parameter(part_of(name, value, live, state, mesh), live)


class WholeValues:
    """Lets ``load_state_dict`` of a module that is laid out, and of its parts, take the state dict of a plain one."""

    def __init__(self, module: nn.Module, state: Callable[[], ModelState], mesh: Mesh) -> None:
        self._module, self._state, self._mesh = module, state, mesh

    def install(self) -> None:
        """Hook every module that holds parameters or buffers of its own."""
        for name, child in self._module.named_modules():
            if child._parameters or child._buffers:
                child._register_load_state_dict_pre_hook(_Take(self, name))

    def take(self, name: str, values: MutableMapping[str, Any], prefix: str) -> None:
        """Replace the whole tensors of the module ``name`` among ``values`` by what stands in their place here."""
        child = self._module.get_submodule(name)
        state: ModelState | None = None
        for key, live in (*child._parameters.items(), *child._buffers.items()):
            value = values.get(prefix + key)
            if live is None or not isinstance(value, Source) or isinstance(value, DTensor | Placeholder):
                continue
            state = state or self._state()
            values[prefix + key] = placed(f"{name}.{key}" if name else key, value, live, state, self._mesh)


class _Take:
    """The hook of one module; a copy of the module is laid out by nobody, and keeps it without effect."""

    def __init__(self, values: WholeValues, name: str) -> None:
        self._values, self._name = values, name

    def __call__(self, values: MutableMapping[str, Any], prefix: str, *rest: Any) -> None:
        self._values.take(self._name, values, prefix)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing


def _nothing(*args: Any) -> None:
    return
