"""Loading the state of optimizers: by parameter name, into whatever groups and layout there are now."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.directory import Manifest
from lightning_3d.checkpoint.names import listed, original_name
from lightning_3d.checkpoint.options import NOT_OPTIONS, decode_options, merge_options
from lightning_3d.checkpoint.reader import StoredTensor, fill
from lightning_3d.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    Entry,
    ModelState,
    numbered_parameters,
    reduced_dims,
    reduced_entry,
    shard_of,
)
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.adafactor import reduced_like


@dataclass(frozen=True)
class OptimizerRecord:
    """The saved state of one optimizer by parameter name, whatever file it comes from."""

    groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
    """Names and options of every parameter group."""
    state: Mapping[str, Mapping[str, Any]]
    """By parameter name and key: full tensors (read or still stored) and plain values."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Types of the parameters when the state was saved, where known."""
    opaque: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """This rank's state without known layout."""


def load_optimizers(records: Sequence[Any], state: ModelState, mesh: Mesh, strict: bool = True) -> None:
    """Fill the optimizers: state by parameter name, options by the names in each group; collective.

    Args:
        records: ``optimizer_states`` of :func:`read`.
        state: The rank's view of the model.
        mesh: This rank's place.
        strict: Whether a parameter without saved state is an error if the optimizer had state for others.

    Raises:
        CheckpointError: Numbers of optimizers, names or shapes do not fit.
    """
    together(mesh, "Loading the optimizers", lambda: _load_optimizers(records, state, mesh, strict))


def stored_record(
    number: int, manifest: Manifest, index: Mapping[str, StoredTensor], other_options: Any, own: Mapping[str, Any]
) -> OptimizerRecord:
    """What a checkpoint directory holds of optimizer ``number``; nothing is read yet."""
    saved = manifest.optimizers[number]
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["scalars"].items()}
    prefix = f"{OPTIMIZER}{number}."
    for key, tensor in index.items():
        if key.startswith(prefix):
            name, _, state_key = key.removeprefix(prefix).rpartition(".")
            state.setdefault(name, {})[state_key] = tensor
    groups = [
        (group["names"], {**decode_options(group["options"]), **(other_options[place] if other_options else {})})
        for place, group in enumerate(saved["groups"])
    ]
    dtypes = {key.removeprefix(MODEL): tensor.dtype for key, tensor in index.items() if key.startswith(MODEL)}
    opaque = own.get("optimizers") or []
    return OptimizerRecord(groups, state, dtypes, opaque[number] if number < len(opaque) else {})


def _load_optimizers(records: Sequence[Any], state: ModelState, mesh: Mesh, strict: bool) -> None:
    if not records and state.optimizers:
        warnings.warn("The checkpoint holds weights and no optimizers: they start from zero.")
        return
    if len(records) != len(state.optimizers):
        raise CheckpointError(
            f"The checkpoint holds {len(records)} optimizers, configure_optimizers made {len(state.optimizers)}."
        )
    for index, saved in enumerate(records):
        record = saved if isinstance(saved, OptimizerRecord) else _from_stock(index, saved, state)
        _load_optimizer(index, record, state, mesh, strict)


def _from_stock(index: int, packed: Mapping[str, Any], state: ModelState) -> OptimizerRecord:
    """A state dict whose parameters are numbered, as one process saves it."""
    groups = state.group_of(index)
    saved = packed["param_groups"]
    if [len(group["params"]) for group in saved] != [len(names) for names in groups]:
        raise CheckpointError(
            f"Optimizer {index} has groups of {[len(names) for names in groups]} parameters, the checkpoint's has"
            f" {[len(group['params']) for group in saved]}: its state is numbered, so the groups must be the same."
        )
    names = {
        number: name
        for group, own in zip(saved, groups, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    by_name = {names[number]: values for number, values in packed["state"].items()}
    return OptimizerRecord([(own, group) for own, group in zip(groups, saved, strict=True)], by_name)


def _load_optimizer(index: int, record: OptimizerRecord, state: ModelState, mesh: Mesh, strict: bool) -> None:
    optimizer = state.optimizers[index]
    saved = {original_name(name): values for name, values in record.state.items()}
    for alias, first in state.ties.items():
        if alias in saved:
            saved.setdefault(first, saved[alias])
    groups = [
        {**merge_options(_options_for(index, place, record, state), current), "params": current["params"]}
        for place, current in enumerate(optimizer.state_dict()["param_groups"])
    ]
    trained = {original_name(name) for names, _ in record.groups for name in names}
    added = sorted({name for names in state.group_of(index) for name in names} - trained - set(saved))
    if added and saved and strict:
        raise CheckpointError(
            f"The checkpoint has no state of optimizer {index} for {listed(added)}. Set strict_loading = False on the"
            " LightningModule to start these from zero."
        )
    if record.groups and not trained and not saved and any(state.group_of(index)):
        warnings.warn(
            f"The checkpoint does not hold the state of optimizer {index} (converting to it could not tell which"
            " parameter each part belongs to): it starts from zero, with the saved options of its groups."
        )
    filled = {}
    for number, (name, parameter) in numbered_parameters(state, index).items():
        if is_placeholder(parameter):
            continue
        own = shard_of(name, parameter, state.cut_of(name), mesh)
        values = {key: _state_value(key, value, parameter, own) for key, value in saved.get(name, {}).items()}
        values.update(record.opaque.get(name, {}))
        if values:
            filled[number] = values
    optimizer.load_state_dict({"state": filled, "param_groups": groups})
    _keep_types(optimizer, filled, state, index, record)


def _state_value(key: str, value: Any, parameter: Tensor, own: Entry) -> Any:
    """This rank's part of one value of the state of ``parameter``."""
    if not isinstance(value, (Tensor, StoredTensor)):
        return value
    dims = reduced_dims(tuple(value.shape), own.shape)
    if dims and isinstance(parameter, DTensor):
        shape = [1 if dim in dims else size for dim, size in enumerate(own.tensor.shape)]
        local = own.tensor.new_zeros(shape, dtype=value.dtype)
        fill(reduced_entry(f"{own.key} ({key})", own, dims, local), value)
        return reduced_like(local, parameter, dims)
    if tuple(value.shape) != own.shape or not own.shape:
        if not own.whole and len(value.shape) > 0:
            raise CheckpointError(
                f"The optimizer's {key!r} of {own.key!r} has shape {tuple(value.shape)}, unlike the parameter's"
                f" {own.shape}, so it cannot be shared out with the parameter."
            )
        return value.read() if isinstance(value, StoredTensor) else value.clone()
    local = torch.empty_like(own.tensor, dtype=value.dtype)
    fill(Entry(f"{own.key} ({key})", own.shape, own.chunks, local), value)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _keep_types(
    optimizer: torch.optim.Optimizer, filled: Mapping[int, Any], state: ModelState, index: int, record: OptimizerRecord
) -> None:
    """Undo the cast of ``Optimizer.load_state_dict`` to the parameter's type where the saved type was meant.

    An optimizer that keeps float32 moments of bfloat16 parameters would lose their digits.
    """
    for number, (name, parameter) in numbered_parameters(state, index).items():
        if number not in filled or record.dtypes.get(name) != parameter.dtype:
            continue
        held = optimizer.state.get(parameter, {})
        for key, value in filled[number].items():
            now = held.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)


def _options_for(index: int, place: int, record: OptimizerRecord, state: ModelState) -> Mapping[str, Any]:
    """Options of the saved group that held the parameters which the current group ``place`` holds."""
    names = set(state.group_of(index)[place])
    matches = [
        options for own, options in record.groups if names & {original_name(name) for name in own} or (not names)
    ]
    if not names or not any(own for own, _ in record.groups):
        return record.groups[place][1] if place < len(record.groups) else {}
    if not matches:
        return {}
    if any(_comparable(options) != _comparable(matches[0]) for options in matches[1:]):
        raise CheckpointError(
            f"Group {place} of optimizer {index} holds parameters of {len(matches)} groups of the checkpoint whose"
            " options (learning rate, weight decay, ...) differ. Group the parameters as they were when it was saved."
        )
    return matches[0]


def _comparable(options: Mapping[str, Any]) -> dict[str, str]:
    return {key: repr(value) for key, value in options.items() if key not in NOT_OPTIONS}
