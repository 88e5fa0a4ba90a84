"""What lies in a checkpoint directory, for people and programs; nothing is unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_3d.checkpoint.directory import Manifest, read_manifest, verify_files
from lightning_3d.checkpoint.load import stored_state_dict
from lightning_3d.checkpoint.options import decode_options
from lightning_3d.checkpoint.reader import StoredTensor, read_index, verify_tensors
from lightning_3d.checkpoint.state import MODEL, OPTIMIZER


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Facts about a checkpoint directory."""

    path: str
    layout: Mapping[str, Any]
    """Sizes ``pp``, ``dp``, ``tp`` of the run that wrote it, and what else describes it."""
    epoch: int
    global_step: int
    keys: Sequence[str]
    """Keys of the module's state dict, in order."""
    ties: Mapping[str, str]
    """Second names of tied parameters, each with the first."""
    tensors: Mapping[str, Mapping[str, Any]]
    """``shape``, ``dtype`` and ``bytes`` of every tensor of the module, tied ones once."""
    num_values: int
    """Numbers in these tensors."""
    optimizers: Sequence[Mapping[str, Any]]
    """Per optimizer ``class``, ``groups`` (``num_parameters``, ``lr``) and ``bytes`` of its state."""
    files: Mapping[str, int]
    """Bytes of every file."""
    written_by: Mapping[str, str]
    verified: bool
    """Whether every byte was compared with its checksum."""

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def contents_of(path: str | os.PathLike[str], verify: bool = False) -> Contents:
    """Read the manifest and the index of a checkpoint directory.

    Args:
        path: A directory that :func:`~lightning_3d.checkpoint.save` wrote, at any layout.
        verify: Also read everything else, and compare it with its checksums.

    Raises:
        CheckpointError: It is no checkpoint of this package, of a newer version, or damaged.
    """
    folder, manifest = read_manifest(path)
    # The index is small, and everything shown comes from it.
    verify_files(folder, manifest)
    index = read_index(folder)
    if verify:
        verify_tensors(index)
    extra = {key: None for key in manifest.keys if MODEL + manifest.ties.get(key, key) not in index}
    stored = stored_state_dict(folder, manifest, index, extra)
    tensors = {key: value for key, value in stored.items() if isinstance(value, StoredTensor)}
    distinct = {value.key: (key, value) for key, value in reversed(tensors.items())}
    order = {key: place for place, key in enumerate(manifest.keys)}
    shown = dict(sorted(distinct.values(), key=lambda pair: order[pair[0]]))
    return Contents(
        path=str(folder),
        layout=manifest.layout,
        epoch=manifest.epoch,
        global_step=manifest.global_step,
        keys=manifest.keys,
        ties=manifest.ties,
        tensors={key: _facts(value) for key, value in shown.items()},
        num_values=sum(value.numel() for value in shown.values()),
        optimizers=[_optimizer(number, manifest, index) for number in range(len(manifest.optimizers))],
        files=manifest.files,
        written_by=manifest.written_by,
        verified=verify,
    )


def _facts(tensor: StoredTensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "bytes": tensor.numel() * tensor.dtype.itemsize}


def _optimizer(number: int, manifest: Manifest, index: Mapping[str, StoredTensor]) -> dict[str, Any]:
    saved = manifest.optimizers[number]
    own = [tensor for key, tensor in index.items() if key.startswith(f"{OPTIMIZER}{number}.")]
    groups = []
    for group in saved["groups"]:
        rate = decode_options(group["options"]).get("lr")
        groups.append({"num_parameters": len(group["names"]), "lr": None if rate is None else float(rate)})
    num_bytes = sum(tensor.numel() * tensor.dtype.itemsize for tensor in own)
    return {"class": saved["class"], "groups": groups, "bytes": num_bytes}
