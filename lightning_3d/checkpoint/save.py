"""Saving: every rank writes its part beside the old checkpoint, then the whole takes its place at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lightning_3d.checkpoint import directory
from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.copies import copy_entries, copy_key, find_copies, without_tensors
from lightning_3d.checkpoint.directory import HYPER_PARAMETERS, TRAINER, Manifest, rank_file, write_file
from lightning_3d.checkpoint.hugging_face import described_in_file
from lightning_3d.checkpoint.integrity import Facts, facts_of
from lightning_3d.checkpoint.names import by_original_name, listed
from lightning_3d.checkpoint.options import encode_options
from lightning_3d.checkpoint.state import (
    MODEL,
    Entry,
    ModelState,
    OptimizerParts,
    extra_state,
    model_entries,
    optimizer_parts,
)
from lightning_3d.checkpoint.writer import write_tensors
from lightning_3d.collectives import broadcast_object, gather_object
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh

HYPER_PARAMETER_KEYS = tuple(
    prefix + key for prefix in ("", "datamodule_") for key in ("hyper_parameters", "hparams_name", "hparams_type")
)
OTHER_OPTIONS = "lightning_3d.optimizer_options"
EXTRA_STATE = "lightning_3d.extra_state"
RANK_STATE = "lightning_3d.rank_state"


def save(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    state: ModelState,
    mesh: Mesh,
    rank_state: Any = None,
) -> None:
    """Write a checkpoint directory; collective.

    Args:
        path: The directory that appears when all is written; an older checkpoint (or file) there is replaced.
        checkpoint: Lightning's checkpoint dict. ``state_dict`` may be absent (the live values are saved) or a mapping
            by name with this rank's local tensors; what a hook removed from it is not saved. Optimizers are saved if
            ``optimizer_states`` is there: per optimizer what its ``state_dict()`` gives, or an empty list for the live
            ones. Further dicts of weights by the same names, such as averages, are saved in parts too
            (:mod:`~lightning_3d.checkpoint.copies`). Everything else goes into one file, from rank 0.
        state: This rank's view of the model.
        mesh: This rank's place.
        rank_state: What only this rank can use, such as states of random generators: numbers, strings, tensors and
            containers of them.

    Raises:
        CheckpointError: On every rank, if any rank could not write its part; the old checkpoint is then untouched.
    """
    write(agreed_path(path, mesh), gather(checkpoint, state, mesh, rank_state), mesh)


@dataclass(frozen=True)
class Content:
    """What this rank puts into a checkpoint."""

    entries: Sequence[Entry]
    """Its tensors, still those that training changes."""
    files: Mapping[str, Any]
    """What else it writes, by file name: bytes, or what ``torch.save`` takes."""
    finish: Callable[[Path, Mapping[str, Facts]], None]
    """On rank 0, once all is written into a directory: write the manifest, which has the facts of all files."""


def agreed_path(path: str | os.PathLike[str], mesh: Mesh) -> Path:
    """Rank 0's absolute path, because a file name made of a metric or the time may differ between ranks; collective.

    Raises:
        CheckpointError: It is a URL.
    """
    return together(mesh, "Saving", lambda: directory.local_path(broadcast_object(os.fspath(path), mesh.control_world)))


def write(target: Path, content: Content, mesh: Mesh) -> None:
    """Write the contents of all ranks beside ``target`` and put them in its place; collective.

    Raises:
        CheckpointError: On every rank, if any rank could not write its part; the old checkpoint is then untouched.
    """
    folder = directory.staging(target)
    together(mesh, f"Saving to {target}", lambda: directory.begin(target) if mesh.rank == 0 else None)
    try:
        together(mesh, f"Saving to {target}", lambda: _check_shared(folder, mesh))
        write_tensors(folder, content.entries, mesh)
        written = together(mesh, f"Saving to {target}", lambda: _write_files(folder, content.files))
        # From those who wrote them: asking a file system that many nodes share for thousands of files takes minutes.
        everyone = gather_object(written, mesh.control_world) or []

        def publish() -> None:
            if mesh.rank == 0:
                content.finish(folder, {name: facts for rank in everyone for name, facts in rank.items()})
                directory.publish(target)

        together(mesh, f"Saving to {target}", publish)
    except CheckpointError:
        # Raised on every rank or none, so nobody still writes; a full disk needs the room back.
        if mesh.rank == 0:
            directory.discard(target)
        raise


def gather(checkpoint: Mapping[str, Any], state: ModelState, mesh: Mesh, rank_state: Any = None) -> Content:
    """What this rank puts into a checkpoint, and how rank 0 describes the whole; collective.

    Args:
        checkpoint: As for :func:`save`.
        state: As for :func:`save`.
        mesh: This rank's place.
        rank_state: As for :func:`save`.
    """
    values = together(
        mesh,
        "Saving the model",
        lambda: by_original_name(checkpoint.get("state_dict") or state.owned, "entries of the state dict"),
    )
    entries = together(mesh, "Saving the model", lambda: model_entries(state, values, mesh))
    parts = together(mesh, "Saving the optimizers", lambda: _all_optimizer_parts(checkpoint, state, mesh))
    copies = find_copies(checkpoint, state, mesh)
    entries += together(mesh, "Saving copies of the model", lambda: copy_entries(copies, state, mesh))
    entries += [entry for part in parts for entry in part.entries]
    notes = gather_object(_notes(checkpoint, values, parts, state), mesh.control_world) or []
    extra = {key: value for note in reversed(notes) for key, value in note.extra.items()}
    files = _rank_file(parts, mesh, rank_state)

    def of_rank_zero() -> list[list[dict[str, Any]]]:
        if mesh.rank:
            return []
        groups, other_options = _groups(checkpoint, state)
        files.update(_trainer_files(without_tensors(checkpoint, copies), extra, other_options))
        files.update(described_in_file(state.module))
        return groups

    groups = together(mesh, "Saving", of_rank_zero)
    optimizers = [
        {
            "class": type(state.optimizers[index]).__name__,
            "groups": of_optimizer,
            "scalars": {name: values for note in notes for name, values in note.scalars[index].items()},
        }
        for index, of_optimizer in enumerate(groups)
    ]
    epoch, global_step = int(checkpoint.get("epoch", 0)), int(checkpoint.get("global_step", 0))
    described = [(copy.path, copy.names) for copy in copies]

    def finish(folder: Path, written: Mapping[str, Facts]) -> None:
        tensors = directory.read_json(folder / directory.INDEX)["tensors"]
        sizes = _tensor_files(tensors)
        rest = {
            name: facts_of(folder / name) for name in os.listdir(folder) if name not in sizes and name not in written
        }
        others = {**rest, **written}
        sizes.update({name: size for name, (size, _) in others.items()})
        Manifest(
            layout={"pp": mesh.pp.size, "dp": mesh.dp.size, "tp": mesh.tp.size, **state.layout},
            epoch=epoch,
            global_step=global_step,
            keys=_keys(notes, state, {*extra, *_model_names(tensors)}),
            ties=dict(state.ties),
            optimizers=optimizers,
            copies=[
                {
                    "path": list(path),
                    "keys": [name for name in names if copy_key(number, state.first_name(name)) in tensors],
                }
                for number, (path, names) in enumerate(described)
            ],
            files=dict(sorted(sizes.items())),
            checksums={name: crc for name, (_, crc) in sorted(others.items())},
            written_by={"lightning_3d": _version(), "torch": str(torch.__version__)},
        ).write(folder)

    return Content(entries, files, finish)


@dataclass(frozen=True)
class _Notes:
    """What rank 0 must know of every rank to write the manifest."""

    extra: dict[str, Any]
    """Extra state of modules."""
    dropped: set[str]
    """Names that a hook took out of the state dict."""
    added: list[str]
    """Names that a hook put into it."""
    scalars: list[dict[str, dict[str, Any]]]
    """Per optimizer the numbers of its state, by parameter name and key."""


def _notes(
    checkpoint: Mapping[str, Any], values: Mapping[str, Any], parts: Sequence[OptimizerParts], state: ModelState
) -> _Notes:
    given = {state.first_name(key) for key in values} if checkpoint.get("state_dict") else set(state.owned)
    known = set(state.keys)
    return _Notes(
        extra=extra_state(state, values),
        dropped=set(state.owned) - given,
        added=[key for key in values if key not in known],
        scalars=[part.scalars for part in parts],
    )


def _keys(notes: Sequence[_Notes], state: ModelState, written: set[str]) -> list[str]:
    """The keys that the state dict in the checkpoint has, in order."""
    dropped = {name for note in notes for name in note.dropped}
    keys = [key for key in state.keys if state.first_name(key) not in dropped]
    missing = [key for key in keys if state.first_name(key) not in written]
    if missing:
        raise CheckpointError(f"No rank holds {listed(missing)}, so the checkpoint would be incomplete.")
    return list(dict.fromkeys([*keys, *(key for note in notes for key in note.added)]))


def _tensor_files(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of every file that the index knows."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        for _, _, file, start, length, _ in tensor["chunks"]:
            sizes[file] = max(sizes.get(file, 0), start + length)
    return sizes


def _model_names(keys: Iterable[str]) -> set[str]:
    return {key.removeprefix(MODEL) for key in keys if key.startswith(MODEL)}


def _version() -> str:
    try:
        return metadata.version("lightning-3d")
    except metadata.PackageNotFoundError:
        return "unknown"


def _check_shared(folder: Path, mesh: Mesh) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 made, cannot be seen from {mesh.where}. All ranks must write to one file system:"
            " give a path that all nodes share."
        )


def _packed(checkpoint: Mapping[str, Any], state: ModelState) -> Sequence[Mapping[str, Any]]:
    """What the optimizers' ``state_dict()`` gives, if they are to be saved."""
    if "optimizer_states" not in checkpoint:
        return []
    return checkpoint["optimizer_states"] or [optimizer.state_dict() for optimizer in state.optimizers]


def _all_optimizer_parts(checkpoint: Mapping[str, Any], state: ModelState, mesh: Mesh) -> list[OptimizerParts]:
    packed = _packed(checkpoint, state)
    if packed and len(packed) != len(state.optimizers):
        raise CheckpointError(f"{len(packed)} optimizer states were given for {len(state.optimizers)} optimizers.")
    return [optimizer_parts(index, values, state, mesh) for index, values in enumerate(packed)]


def _groups(checkpoint: Mapping[str, Any], state: ModelState) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    """Per optimizer and group: names and options for JSON, and the options that JSON cannot hold."""
    groups, others = [], []
    for index, packed in enumerate(_packed(checkpoint, state)):
        names = state.group_of(index)
        if len(names) != len(packed["param_groups"]):
            raise CheckpointError(
                f"Optimizer {index} has {len(packed['param_groups'])} parameter groups, {len(names)} were described."
            )
        pairs = [encode_options(group) for group in packed["param_groups"]]
        groups.append(
            [{"names": list(own), "options": options} for own, (options, _) in zip(names, pairs, strict=True)]
        )
        others.append([other for _, other in pairs])
    return groups, others


def _rank_file(parts: Sequence[OptimizerParts], mesh: Mesh, rank_state: Any) -> dict[str, Any]:
    opaque = [part.opaque for part in parts]
    if rank_state is None and not any(opaque):
        return {}
    return {rank_file(mesh.rank): {"rank_state": rank_state, "optimizers": opaque}}


def _trainer_files(
    checkpoint: Mapping[str, Any], extra: Mapping[str, Any], other_options: Sequence[Any]
) -> dict[str, Any]:
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    if extra:
        rest[EXTRA_STATE] = dict(extra)
    if any(other for groups in other_options for other in groups):
        rest[OTHER_OPTIONS] = other_options
    # Apart, because resuming does not need them and objects of the user's classes must not keep it from loading safely.
    hyper_parameters = {key: rest.pop(key) for key in HYPER_PARAMETER_KEYS if key in rest}
    return {**({HYPER_PARAMETERS: hyper_parameters} if hyper_parameters else {}), TRAINER: rest}


def _write_files(folder: Path, files: Mapping[str, Any]) -> dict[str, Facts]:
    written = {}
    for name, content in files.items():

        def put(file: Path, content: Any = content) -> None:
            if isinstance(content, bytes):
                file.write_bytes(content)
            else:
                torch.save(content, file)

        write_file(folder / name, put)
        written[name] = facts_of(folder / name)
    return written
