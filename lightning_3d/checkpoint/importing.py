"""From files of others to a checkpoint directory, in one process: the stock Trainer's, and Hugging Face folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import __version__ as lightning_version
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.directory import TRAINER, inside, local_path, read_json
from lightning_3d.checkpoint.load import read_stock
from lightning_3d.checkpoint.names import by_original_name
from lightning_3d.checkpoint.save import Content, agreed_path, gather, write
from lightning_3d.checkpoint.state import ModelState
from lightning_3d.checkpoint.stock_optimizer import has_names, names_of_groups
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.mesh import Mesh, build_mesh

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Imported:
    """What :func:`import_lightning` or :func:`import_hugging_face` has written."""

    folder: Path
    num_values: int
    """Numbers in the weights; tied ones count once."""
    global_step: int
    optimizers: int
    """How many optimizers have their state in the directory."""
    by_order: int
    """How many of those were named by order and shape, which is right if the optimizer was given its parameters in the
    order of the module, as ``self.parameters()`` gives them."""
    left_out: Sequence[str]
    """What the source holds and the directory does not, and why."""


def import_lightning(
    file: str | os.PathLike[str], folder: str | os.PathLike[str], weights_only: bool | None = None
) -> Imported:
    """Write a ``.ckpt`` file of the stock Trainer as a checkpoint directory, for runs at any layout.

    One process, no process group; the file is mapped into memory and written tensor by tensor. The state of an
    optimizer is numbered there. It comes along if its parameters can be named: by the names in its groups, or because
    there is one way to find their shapes, in their order, in the state dict. Otherwise ``left_out`` says why not, and
    a run from the directory begins with an empty state and the saved options of the groups.

    Args:
        file: The file.
        folder: The directory; an older checkpoint there is replaced.
        weights_only: ``False`` unpickles whatever the file holds, which can run any code in it.

    Raises:
        CheckpointError: The file cannot be read or is another's, or ``folder`` cannot be written.
    """
    source, target, mesh = local_path(file), _target(folder), _alone()
    if not source.is_file():
        raise CheckpointError(
            f"{source} does not exist or is not a file, so it is not a checkpoint of the stock Trainer."
        )
    checkpoint = read_stock(source, weights_only)
    has_optimizers = "optimizer_states" in checkpoint
    packed = list(checkpoint.pop("optimizer_states", None) or ())
    state = _state(checkpoint["state_dict"])
    named: list[list[list[str]]] = []
    left_out: list[str] = []
    by_order = 0
    for number, saved in enumerate(packed):
        names = _names(saved, state, source)
        if isinstance(names, str):
            left_out.append(f"state of optimizer {number}: {names}")
            saved, names = _without_state(saved), [[] for _ in saved["param_groups"]]
        elif saved["state"] and not has_names(saved):
            by_order += 1
        packed[number] = saved
        named.append(names)
    # The file does not say of what class they were, and nothing is asked of them but their groups.
    optimizers = [
        Optimizer([{"params": [state.parameters[name] for name in own]} for own in names], {}) for names in named
    ]
    if packed:
        checkpoint["optimizer_states"] = packed
    content = gather(checkpoint, replace(state, optimizers=optimizers, groups=named), mesh)
    if has_optimizers and not packed:
        content = _fresh(content)
    write(agreed_path(target, mesh), content, mesh)
    step = int(checkpoint.get("global_step", 0))
    return Imported(target, _num_values(state), step, len(named) - len(left_out), by_order, tuple(left_out))


def import_hugging_face(source: str | os.PathLike[str], folder: str | os.PathLike[str], prefix: str = "") -> Imported:
    """Write the weights of a Hugging Face folder (safetensors) as a checkpoint directory, for runs at any layout.

    A run from it begins at step 0 with a new optimizer.

    Args:
        source: The folder, or one safetensors file.
        folder: The directory; an older checkpoint there is replaced.
        prefix: What the names of the weights begin with in the LightningModule: ``"model."`` if it keeps the model as
            ``self.model``.

    Raises:
        CheckpointError: The folder holds no safetensors, they are damaged, or ``folder`` cannot be written.
        ConfigError: The package safetensors is missing.
    """
    target, mesh = _target(folder), _alone()
    dotted = prefix if not prefix or prefix.endswith(".") else prefix + "."
    with ExitStack() as opened:
        values: dict[str, Tensor] = {}
        for file in _files(local_path(source)):
            for name, tensor in _tensors(file, opened):
                values[dotted + name] = tensor
        if not values:
            raise CheckpointError(f"{source} holds no weights.")
        state = _state(values)
        rest = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning_version, "lr_schedulers": []}
        write(agreed_path(target, mesh), _fresh(gather({**rest, "state_dict": values}, state, mesh)), mesh)
        return Imported(target, _num_values(state), 0, 0, 0, ())


def _alone() -> Mesh:
    return build_mesh(Sizes(pp=1, dp=1, tp=1), torch.device("cpu"))


def _target(folder: str | os.PathLike[str]) -> Path:
    target = local_path(folder)
    if target.is_file():
        raise CheckpointError(f"{target} is a file; a directory is to be written. Give another name, or remove it.")
    return target


def _state(values: Mapping[str, Any]) -> ModelState:
    """The model as its state dict shows it: tensors that share their memory are tied."""
    named = by_original_name(values, "entries of the state dict")
    parameters: dict[str, Tensor] = {}
    first: dict[object, str] = {}
    ties: dict[str, str] = {}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            continue
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else name
        known = first.setdefault(memory, name)
        if known != name:
            ties[name] = known
        parameters[name] = parameters.get(known, value)
    return ModelState(parameters=parameters, keys=tuple(named), ties=ties, groups=[])


def _num_values(state: ModelState) -> int:
    return sum(tensor.numel() for tensor in state.owned.values())


def _names(saved: Any, state: ModelState, file: Path) -> list[list[str]] | str:
    try:
        names = names_of_groups(saved, state.owned)
        if isinstance(names, str) or all(isinstance(values, Mapping) for values in saved["state"].values()):
            return names
    except (KeyError, TypeError, AttributeError):
        pass
    if not isinstance(saved, Mapping) or not isinstance(saved.get("param_groups"), list):
        raise CheckpointError(f"{file} is damaged: the state of an optimizer has no parameter groups.")
    return "it is not of the form that optimizers of torch have"


def _without_state(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {"state": {}, "param_groups": saved["param_groups"]}


def _fresh(content: Content) -> Content:
    """``content`` as of a run that can be resumed, although it has no optimizer."""
    files = {**content.files, TRAINER: {**content.files[TRAINER], "optimizer_states": []}}
    return replace(content, files=files)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise CheckpointError(f"{source} does not exist.")
    if (source / _INDEX).is_file():
        listed = read_json(source / _INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise CheckpointError(f"{source / _INDEX} is damaged: it has no 'weight_map'.")
        return [inside(source, name) for name in dict.fromkeys(listed.values())]
    if (source / _WEIGHTS).is_file():
        return [source / _WEIGHTS]
    raise CheckpointError(
        f"{source} holds neither {_WEIGHTS} nor {_INDEX}, so it is no Hugging Face model that can be converted. Give a"
        " folder that save_pretrained wrote with safe_serialization=True, or a .ckpt file of the stock Trainer."
    )


def _tensors(file: Path, opened: ExitStack) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, mapped into memory."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError("Reading Hugging Face weights needs safetensors: pip install safetensors.") from error
    try:
        stream = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
        for name in stream.keys():  # noqa: SIM118  it is no dict
            yield name, stream.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
