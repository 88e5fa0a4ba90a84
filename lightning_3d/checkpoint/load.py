"""Loading: every rank reads its part, whatever the layout was that wrote it."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.copies import put_stored
from lightning_3d.checkpoint.directory import (
    HYPER_PARAMETERS,
    TRAINER,
    Manifest,
    local_path,
    rank_file,
    read_manifest,
    verify_files,
)
from lightning_3d.checkpoint.names import by_original_name, listed
from lightning_3d.checkpoint.optimizer_state import load_optimizers, stored_record
from lightning_3d.checkpoint.reader import Source, StoredTensor, check_shape, fill, read_index, verify_tensors
from lightning_3d.checkpoint.save import EXTRA_STATE, OTHER_OPTIONS, RANK_STATE
from lightning_3d.checkpoint.state import MODEL, ModelState, shard_of
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh


def read(path: str | os.PathLike[str], mesh: Mesh, weights_only: bool | None = None) -> dict[str, Any]:
    """Lightning's checkpoint dict from a checkpoint directory or a ``.ckpt`` file of the stock Trainer; collective.

    Args:
        path: A directory that :func:`~lightning_3d.checkpoint.save` wrote at any layout, or a file.
        mesh: This rank's place.
        weights_only: ``False`` unpickles whatever the files hold: for files you trust. Otherwise only plain types and
            tensors are loaded; hyper-parameters of other types are then left out, with a warning.

    Returns:
        The dict. ``state_dict`` maps names to :class:`StoredTensor` (not read yet) or memory-mapped tensors;
        ``optimizer_states`` holds :class:`OptimizerRecord` objects or dicts of the stock Trainer. Hand both, perhaps
        changed by hooks, to :func:`load_model` and :func:`load_optimizers`.

    Raises:
        CheckpointError: On every rank, with file and reason.
    """
    opened = together(mesh, f"Loading {path}", lambda: _open(path, mesh))
    return together(mesh, f"Loading {path}", lambda: _read(path, opened, mesh, weights_only))


def load_model(values: Mapping[str, Any], state: ModelState, mesh: Mesh, strict: bool = True) -> None:
    """Fill this rank's parameters and buffers, in place; collective.

    Args:
        values: By name, full tensors: of :func:`read`, or any others.
        state: The rank's view of the model.
        mesh: This rank's place.
        strict: Whether missing and unexpected names are errors; otherwise they are skipped.

    Raises:
        CheckpointError: Names or shapes do not fit.
    """
    together(mesh, "Loading the model", lambda: _load_model(values, state, mesh, strict))


def load(
    path: str | os.PathLike[str],
    state: ModelState,
    mesh: Mesh,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """:func:`read`, :func:`load_model` and, if both sides have any, :func:`load_optimizers`; collective.

    Returns:
        The rest of Lightning's checkpoint dict.
    """
    checkpoint = read(path, mesh, weights_only)
    load_model(checkpoint.pop("state_dict"), state, mesh, strict)
    records = checkpoint.pop("optimizer_states", [])
    if records and state.optimizers:
        load_optimizers(records, state, mesh, strict)
    return checkpoint


def torch_load(file: Path, weights_only: bool | None) -> Any:
    """``torch.load`` into host memory, mapped where possible, with errors that say what to do.

    Raises:
        CheckpointError: The file cannot be read, or holds objects that ``weights_only`` does not allow.
    """
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=weights_only is not False, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} holds objects that are more than tensors and plain values ({_unsafe(file)}), and loading those"
            " can run any code. If you trust the file, pass weights_only=False (Trainer.fit(..., ckpt_path=...,"
            " weights_only=False)) or allow the classes with torch.serialization.add_safe_globals."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error


_Opened = tuple[Path, Manifest, Mapping[str, StoredTensor]]


def _open(path: str | os.PathLike[str], mesh: Mesh) -> _Opened | None:
    """What describes a directory, this rank's share of its bytes checked; None for a file.

    After all ranks have done so, any of them may use any of the bytes.
    """
    if local_path(path).is_file():
        return None
    folder, manifest = read_manifest(path, mesh.rank, mesh.world.size)
    verify_files(folder, manifest, mesh.rank, mesh.world.size)
    index = read_index(folder)
    verify_tensors(index, mesh.rank, mesh.world.size)
    return folder, manifest, index


def _read(
    path: str | os.PathLike[str], opened: _Opened | None, mesh: Mesh, weights_only: bool | None
) -> dict[str, Any]:
    if opened is None:
        return read_stock(local_path(path), weights_only)
    folder, manifest, index = opened
    checkpoint: dict[str, Any] = torch_load(folder / TRAINER, weights_only)
    if HYPER_PARAMETERS in manifest.files:
        checkpoint.update(_hyper_parameters(folder / HYPER_PARAMETERS, weights_only))
    checkpoint["state_dict"] = stored_state_dict(folder, manifest, index, checkpoint.pop(EXTRA_STATE, {}))
    put_stored(checkpoint, manifest.copies, manifest.ties, index)
    own, same = _rank_content(folder, manifest, mesh)
    other_options = checkpoint.pop(OTHER_OPTIONS, None)
    if manifest.optimizers:
        checkpoint["optimizer_states"] = [
            stored_record(number, manifest, index, other_options and other_options[number], own if same else {})
            for number in range(len(manifest.optimizers))
        ]
    if own.get("rank_state") is not None:
        checkpoint[RANK_STATE] = {"state": own["rank_state"], "same_layout": same}
    return checkpoint


def _set_extra_state(key: str, value: Any, state: ModelState) -> None:
    if state.module is None:
        raise CheckpointError(f"{key!r} is extra state of a module, and no module was given to set it on.")
    prefix = key.rpartition(".")[0]
    modules = by_original_name(dict(state.module.named_modules()), "modules")
    modules[prefix].set_extra_state(value)


def stored_state_dict(
    folder: Path, manifest: Manifest, index: Mapping[str, StoredTensor], extra_state: Mapping[str, Any]
) -> dict[str, Any]:
    """The model's stored tensors, and the extra state of its modules, under all keys of its state dict, in order.

    Raises:
        CheckpointError: A listed tensor is not there.
    """
    stored: dict[str, Any] = {}
    for key in manifest.keys:
        if key in extra_state:
            stored[key] = extra_state[key]
            continue
        tensor = index.get(MODEL + key) or index.get(MODEL + manifest.ties.get(key, key))
        if tensor is None:
            raise CheckpointError(f"{folder} lists {key!r} but holds no tensor of that name: it is damaged.")
        stored[key] = tensor
    return stored


def read_stock(file: Path, weights_only: bool | None) -> dict[str, Any]:
    """What a ``.ckpt`` file of the stock Trainer holds, mapped into memory.

    Raises:
        CheckpointError: It cannot be read, or is another's.
    """
    checkpoint = torch_load(file, weights_only)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{file} is not a checkpoint of the Lightning Trainer: it has no 'state_dict'. For a bare state dict use"
            " the module's load_state_dict before training."
        )
    return checkpoint


def _hyper_parameters(file: Path, weights_only: bool | None) -> dict[str, Any]:
    try:
        return torch_load(file, weights_only)
    except CheckpointError as error:
        if not isinstance(error.__cause__, pickle.UnpicklingError):
            raise
        warnings.warn(f"Hyper-parameters are left out; training resumes without them. {error}")
        return {}


def _unsafe(file: Path) -> str:
    try:
        return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(file)) or "unknown"
    except Exception:  # only words for a message that is raised anyway
        return "unknown"


def _rank_content(folder: Path, manifest: Manifest, mesh: Mesh) -> tuple[dict[str, Any], bool]:
    """This rank's own file at the layout that wrote it, else that of rank 0; and which of the two."""
    same = all(manifest.layout.get(axis) == size for axis, size in mesh.sizes.__dict__.items())
    name = rank_file(mesh.rank if same else 0)
    return (torch_load(folder / name, True) if name in manifest.files else {}), same


def _load_model(values: Mapping[str, Any], state: ModelState, mesh: Mesh, strict: bool) -> None:
    values = by_original_name(values, "entries of the checkpoint's state dict")
    aliases: dict[str, list[str]] = {}
    for alias, first in state.ties.items():
        aliases.setdefault(first, []).append(alias)

    def source_of(name: str) -> Any:
        first = state.first_name(name)
        # Where names that are one parameter here have several entries, the last one counts, as it does in torch.
        return next((values[key] for key in (*reversed(aliases.get(first, [])), first) if key in values), None)

    known = set(state.keys)
    missing = [key for key in state.keys if source_of(key) is None]
    unexpected = [key for key in values if key not in known]
    if strict and (missing or unexpected):
        texts = [f"the checkpoint lacks {listed(missing)}"] if missing else []
        texts += [f"the model lacks {listed(unexpected)}"] if unexpected else []
        raise CheckpointError(
            f"The checkpoint does not fit the model: {' and '.join(texts)}. Load into the model that was saved, or set"
            " strict_loading = False on the LightningModule."
        )
    parts = []
    for name, tensor in state.held:
        source = source_of(name)
        if source is not None:
            parts.append((shard_of(name, tensor, state.cut_of(name), mesh), source))
            check_shape(*parts[-1])  # all of them before the first one is filled
    for entry, source in parts:
        fill(entry, source)
    for key, value in values.items():
        if key in known and not isinstance(value, Source):
            _set_extra_state(key, value, state)
