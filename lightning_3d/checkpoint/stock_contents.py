"""What lies in a file of the stock Trainer, for people and programs; its values are not read."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_3d.checkpoint.directory import local_path
from lightning_3d.checkpoint.load import read_stock
from lightning_3d.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class StockContents:
    """Facts about a ``.ckpt`` file."""

    path: str
    kind: str = "file of the stock Trainer"
    epoch: int
    global_step: int
    keys: Sequence[str]
    """Keys of the module's state dict, in order."""
    tensors: Mapping[str, Mapping[str, Any]]
    """``shape``, ``dtype`` and ``bytes`` by key; tied ones under each of their keys."""
    optimizers: Sequence[Mapping[str, Any]]
    """Per optimizer its ``groups`` (``num_parameters``, ``lr``)."""
    entries: Sequence[str]
    """What else the file has."""
    num_bytes: int
    """Size of the file."""
    written_by: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def stock_contents_of(path: str | os.PathLike[str]) -> StockContents:
    """Look into a file of the stock Trainer.

    Args:
        path: The file; it is mapped into memory, and only plain types and tensors are unpickled.

    Raises:
        CheckpointError: It is another file, or holds objects that only full unpickling can read.
    """
    file = local_path(path)
    try:
        checkpoint = read_stock(file, True)
    except CheckpointError as error:
        if isinstance(error.__cause__, pickle.UnpicklingError) and file.suffix == ".ckpt":
            raise
        raise CheckpointError(
            f"{file} is a file, not a checkpoint directory, and not one of the stock Trainer either: {error}"
        ) from error
    state = checkpoint["state_dict"]
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    version = checkpoint.get("pytorch-lightning_version")
    try:
        return StockContents(
            path=str(file),
            epoch=int(checkpoint.get("epoch", 0)),
            global_step=int(checkpoint.get("global_step", 0)),
            keys=[str(key) for key in state],
            tensors={str(key): _facts(value) for key, value in tensors.items()},
            optimizers=[_optimizer(saved) for saved in checkpoint.get("optimizer_states") or ()],
            entries=[str(key) for key in checkpoint if key not in ("state_dict", "optimizer_states")],
            num_bytes=file.stat().st_size,
            written_by={"lightning": str(version)} if version else {},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}.") from error


def _facts(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "bytes": tensor.numel() * tensor.dtype.itemsize}


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    rates = [(len(group["params"]), group.get("lr")) for group in saved["param_groups"]]
    return {"groups": [{"num_parameters": size, "lr": None if lr is None else float(lr)} for size, lr in rates]}
