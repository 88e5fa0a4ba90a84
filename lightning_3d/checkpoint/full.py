"""Full tensors: of a running model onto one rank, and of a checkpoint directory in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.copies import put_stored
from lightning_3d.checkpoint.directory import HYPER_PARAMETERS, TRAINER, read_manifest, verify_files
from lightning_3d.checkpoint.layout import box
from lightning_3d.checkpoint.load import stored_state_dict, torch_load
from lightning_3d.checkpoint.optimizer_state import OptimizerRecord, stored_record
from lightning_3d.checkpoint.reader import StoredTensor, read_index
from lightning_3d.checkpoint.save import EXTRA_STATE, OTHER_OPTIONS
from lightning_3d.checkpoint.state import MODEL, Entry, ModelState, model_entries
from lightning_3d.checkpoint.writer import Description, Piece, described, pieces_of, refuse_collisions, share_out
from lightning_3d.collectives import all_gather_object, as_bytes
from lightning_3d.mesh import Mesh

_SHARED_LOADER = {"batches", "random", "readers"}
"""Keys of the state of :class:`~lightning_3d.trainer.data.batches.SharedLoader`."""


def full_state_dict(state: ModelState, mesh: Mesh) -> dict[str, Tensor]:
    """The whole model's state dict in rank 0's host memory, under the original keys; empty elsewhere. Collective."""
    full = {name: tensor for name, tensor in iterate_full(state, mesh) if tensor is not None}
    if mesh.rank:
        return {}
    return {key: full[state.ties.get(key, key)] for key in state.keys if state.ties.get(key, key) in full}


def iterate_full(state: ModelState, mesh: Mesh) -> Iterator[tuple[str, Tensor | None]]:
    """Every full parameter and buffer, one at a time; collective: all ranks must iterate to the end.

    Yields:
        The name (first names only of tied ones), and on rank 0 the full tensor in host memory, ``None`` elsewhere.
    """
    entries = together(mesh, "Gathering the model", lambda: model_entries(state, state.owned, mesh))
    refuse_collisions(entries, mesh)
    everyone: list[list[Description]] = all_gather_object(described(entries), mesh.control_world)
    chosen = share_out([pieces_of(rank) for rank in everyone], prefer=0)
    facts = {key: (shape, dtype) for rank in everyone for key, shape, dtype, _ in rank}
    sizes = {(key, offsets): size for rank in everyone for key, _, _, chunks in rank for offsets, size in chunks}
    pieces: dict[str, list[Piece]] = {}
    for piece in sorted(chosen):
        pieces.setdefault(piece[0], []).append(piece)
    own = {entry.key: entry for entry in entries}
    order = {MODEL + key: place for place, key in enumerate(state.keys)}
    for key in sorted(facts, key=lambda key: (order.get(key, len(order)), key)):
        shape, dtype = facts[key]
        full = torch.empty(shape, dtype=dtype) if mesh.rank == 0 else None
        for piece in pieces[key]:
            _move(own.get(key), piece, sizes[piece], chosen[piece], full, mesh)
        yield key.removeprefix(MODEL), full


def consolidate(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """The plain state dict in a checkpoint directory: full tensors under the original keys, tied ones shared.

    One process, no process group. Raises ``CheckpointError`` as :func:`~lightning_3d.checkpoint.read` does.
    """
    folder, manifest = read_manifest(path)
    verify_files(folder, manifest)
    extra = torch_load(folder / TRAINER, weights_only).get(EXTRA_STATE, {})
    return _read_all(stored_state_dict(folder, manifest, read_index(folder), extra), {})


def to_lightning(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """What the stock Trainer would have saved: ``torch.save`` of it is a ``.ckpt`` that it resumes from.

    All of it is in memory then; :func:`~lightning_3d.checkpoint.write_lightning` writes such a file tensor by tensor.

    Args:
        path: A checkpoint directory.
        weights_only: As in :func:`~lightning_3d.checkpoint.read`; here hyper-parameters are not left out.
    """
    return _read_all(stock_content(path, weights_only), {})


def stock_content(path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
    """What :func:`to_lightning` gives, with :class:`StoredTensor` objects for tensors that are not read yet.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds objects that ``weights_only`` does not allow.
    """
    folder, manifest = read_manifest(path)
    verify_files(folder, manifest)
    index = read_index(folder)
    checkpoint: dict[str, Any] = torch_load(folder / TRAINER, weights_only)
    if HYPER_PARAMETERS in manifest.files:
        checkpoint.update(torch_load(folder / HYPER_PARAMETERS, weights_only))
    other = checkpoint.pop(OTHER_OPTIONS, None)
    extra = checkpoint.pop(EXTRA_STATE, {})
    _forget_shared_loaders(checkpoint)
    checkpoint["state_dict"] = stored_state_dict(folder, manifest, index, extra)
    put_stored(checkpoint, manifest.copies, manifest.ties, index)
    if manifest.optimizers:
        checkpoint["optimizer_states"] = [
            _numbered(stored_record(number, manifest, index, other and other[number], {}))
            for number in range(len(manifest.optimizers))
        ]
    return checkpoint


def _forget_shared_loaders(checkpoint: Mapping[str, Any]) -> None:
    """Leave of the loaders' states those that loaders of the user keep themselves, for replica 0.

    The place in a pass of any other loader is kept by a loader of ours, which the stock Trainer does not have.
    """
    for loop in checkpoint.get("loops", {}).values():
        state = loop.get("state_dict", {})
        if loaders := state.get("combined_loader"):
            kept = [
                (loader["readers"] or [None])[0] if loader.keys() >= _SHARED_LOADER else loader for loader in loaders
            ]
            state["combined_loader"] = [loader for loader in kept if loader is not None]


def _read_all(content: Any, known: dict[int, Tensor]) -> Any:
    """``content`` with the stored tensors in its dicts and lists read, each once."""
    if isinstance(content, StoredTensor):
        if id(content) not in known:
            known[id(content)] = content.read()
        return known[id(content)]
    if type(content) is dict:
        return {key: _read_all(value, known) for key, value in content.items()}
    return [_read_all(value, known) for value in content] if type(content) is list else content


def _numbered(record: OptimizerRecord) -> dict[str, Any]:
    """The state dict of a torch optimizer, parameters numbered in the order of the groups."""
    numbers: dict[str, int] = {}
    groups = []
    for names, options in record.groups:
        params = [numbers.setdefault(name, len(numbers)) for name in names]
        groups.append({**options, "params": params})
    state = {}
    for name, values in record.state.items():
        state[numbers[name]] = dict(values)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def _move(
    entry: Entry | None, piece: Piece, sizes: tuple[int, ...], sender: int, full: Tensor | None, mesh: Mesh
) -> None:
    """Bring one chunk from ``sender`` into rank 0's full tensor."""
    if mesh.rank not in (0, sender):
        return
    group = mesh.control_world.group
    value = None
    if mesh.rank == sender:
        assert entry is not None
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == piece[1])
        value = entry.tensor[chunk.slices].cpu().contiguous()
        if sender != 0:
            # As bytes: not every type can be sent.
            dist.send(as_bytes(value), 0, group=group)
            return
    assert full is not None
    target = full[box(piece[1], sizes)]
    if value is None:
        value = torch.empty(sizes, dtype=full.dtype)
        dist.recv(as_bytes(value), sender, group=group)
    target.copy_(value)
