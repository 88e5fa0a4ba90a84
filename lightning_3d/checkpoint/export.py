"""From a checkpoint to a folder that Hugging Face's ``from_pretrained`` loads, tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.directory import TRAINER, local_path, read_manifest, verify_files, write_file
from lightning_3d.checkpoint.hugging_face import Adapter, Description, describe, read_descriptions
from lightning_3d.checkpoint.load import stored_state_dict, torch_load
from lightning_3d.checkpoint.names import by_original_name, listed
from lightning_3d.checkpoint.reader import StoredTensor, read_index
from lightning_3d.checkpoint.safetensors_file import NAMES, stored_bytes, stored_type, write_safetensors
from lightning_3d.checkpoint.save import EXTRA_STATE
from lightning_3d.errors import CheckpointError, ConfigError

Source = Tensor | StoredTensor

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})
_WRAPPING = frozenset({"base_layer", "original_module"})
"""What PEFT puts into the names of the layers that it wraps."""


@dataclass(frozen=True)
class Exported:
    """What :func:`export_hugging_face` has written."""

    folder: Path
    model: str
    """Class of the model."""
    files: Sequence[str]
    """Relative to ``folder``."""
    num_values: int
    """Numbers in the weights of the model, and of its adapters."""
    left_out: Sequence[str]
    """Keys of the checkpoint that are no part of the model: other parts of the LightningModule."""


def export_hugging_face(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    name: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    adapters_only: bool = False,
    weights_only: bool | None = None,
) -> Exported:
    """Write the Hugging Face model of a checkpoint so that ``from_pretrained(folder)`` gives it.

    One process, no process group, never more than one tensor in memory. Tied weights are written once, as
    ``save_pretrained`` does. Of a model with adapters (PEFT) the base model lies in ``folder`` under its own names and
    each adapter in a folder of its own below: ``PeftModel.from_pretrained(base, folder / "default")``.

    Args:
        checkpoint: A directory of this package, of any layout, or a ``.ckpt`` file of the stock Trainer.
        folder: Made if need be; weights of an earlier export there are replaced.
        model: The LightningModule, or the model in it, if the checkpoint does not say what it is (a ``.ckpt`` file).
            It may be on the meta device: only names and settings are read.
        name: Which submodule, if the LightningModule has several Hugging Face models: ``"student"``.
        dtype: Type of the floating-point weights, such as ``"bfloat16"``; by default that of the checkpoint.
        max_shard_size: Bytes per file at most, as a number or like ``"5GB"``; one larger tensor gets its own file.
        adapters_only: Leave out the base model.
        weights_only: As in :func:`~lightning_3d.checkpoint.read`.

    Raises:
        CheckpointError: The checkpoint is damaged, lacks weights of the model, or holds no Hugging Face model.
        ConfigError: An argument does not fit.
    """
    limit, kind = _bytes(max_shard_size), _dtype(dtype)
    tensors, described = _read(checkpoint, model, weights_only)
    chosen = _choose(described, name, tensors, local_path(checkpoint))
    if adapters_only and not chosen.adapters:
        raise ConfigError(f"{chosen.kind} has no adapters, so adapters_only=True would write nothing. Leave it out.")
    computed = [adapter for adapter, content in chosen.adapters.items() if not content.keys]
    if computed:
        raise ConfigError(
            f"PEFT computes what it saves of {listed(computed)} from several weights. Load the checkpoint into the"
            " module in one process (load_state_dict(consolidate(...))) and let PEFT's save_pretrained write it."
        )
    target = local_path(folder)
    target.mkdir(parents=True, exist_ok=True)
    own, left_out = _model_keys(chosen, tensors)
    files: list[str] = []
    count = 0
    for adapter, content in chosen.adapters.items():
        values = {key: _present(tensors, full) for key, full in content.keys.items()}
        files += _write_adapter(target / adapter, content, values, kind)
        count += sum(value.shape.numel() for value in values.values())
    if not adapters_only:
        files += _write_model(target, chosen, own, kind, limit)
        count += sum(value.shape.numel() for value in own.values())
    return Exported(target, chosen.kind, tuple(files), count, tuple(left_out))


def _read(
    path: str | os.PathLike[str], model: nn.Module | None, weights_only: bool | None
) -> tuple[dict[str, Source], list[Description]]:
    given = describe(model) if model is not None else []
    if model is not None and not given:
        raise ConfigError(f"{type(model).__name__} has no Hugging Face model in it: nothing to export.")
    if local_path(path).is_file():
        content = torch_load(local_path(path), weights_only)
        state = content.get("state_dict") if isinstance(content, dict) else None
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path} is not a checkpoint of the Lightning Trainer: it has no 'state_dict'.")
        described = given
        values: Mapping[str, Any] = by_original_name(state, "entries of the state dict")
    else:
        folder, manifest = read_manifest(path)
        verify_files(folder, manifest)
        extra = torch_load(folder / TRAINER, weights_only).get(EXTRA_STATE, {})
        values = stored_state_dict(folder, manifest, read_index(folder), extra)
        described = given or read_descriptions(folder)
    return {key: value for key, value in values.items() if isinstance(value, Tensor | StoredTensor)}, described


def _choose(
    described: Sequence[Description], name: str | None, tensors: Mapping[str, Source], path: Path
) -> Description:
    if not described:
        raise CheckpointError(
            f"{path} does not say of a Hugging Face model what it is: the module had none when it was saved, or it is a"
            " file of the stock Trainer. Hand the module over: export_hugging_face(..., model=module)."
        )
    names = [each.name for each in described]
    if name is None and len(described) > 1:
        raise ConfigError(f"There are several Hugging Face models: {listed(names)}. Say which with name=...")
    if name is not None and name not in names:
        raise ConfigError(f"There is no Hugging Face model {name!r}; there is {listed(names)}.")
    chosen = described[names.index(name) if name is not None else 0]
    if not any(key.startswith(_dotted(chosen.name)) for key in tensors):
        # The model alone was handed over, and the checkpoint is that of a module around it.
        raise ConfigError(
            f"No key of {path} begins with {_dotted(chosen.name)!r}. Hand over the LightningModule that was saved."
        )
    return chosen


def _model_keys(chosen: Description, tensors: Mapping[str, Source]) -> tuple[dict[str, Source], list[str]]:
    """The weights of the base model under its own keys, and the keys that are neither these nor an adapter's."""
    inner = _dotted(chosen.base)
    of_adapters = {full for adapter in chosen.adapters.values() for full in adapter.keys.values()}
    ignored = [re.compile(pattern) for pattern in chosen.ignored]
    own: dict[str, Source] = {}
    for key, value in tensors.items():
        if key in of_adapters or not key.startswith(inner):
            continue
        plain = ".".join(part for part in key[len(inner) :].split(".") if part not in _WRAPPING or not chosen.adapters)
        if not any(pattern.fullmatch(plain) for pattern in ignored):
            own[plain] = value
    # Weights that the configuration ties but that were trained apart are both written: transformers then unties them.
    kept = {_identity(value) for key, value in own.items() if key not in chosen.tied}
    own = {key: value for key, value in own.items() if key not in chosen.tied or _identity(value) not in kept}
    # PEFT keeps some layers of the model under a second name beside it.
    left_out = [
        key
        for key, value in tensors.items()
        if key not in of_adapters and not key.startswith(inner) and _identity(value) not in kept
    ]
    return own, left_out


def _identity(value: Source) -> object:
    """The same for two names of one tensor."""
    return value.key if isinstance(value, StoredTensor) else (value.data_ptr(), value.shape, value.stride())


def _write_model(
    folder: Path, chosen: Description, tensors: Mapping[str, Source], dtype: torch.dtype | None, limit: int
) -> list[str]:
    for stale in folder.iterdir():
        if _OURS.fullmatch(stale.name):
            stale.unlink()
    shards: list[dict[str, Source]] = [{}]
    size = total = 0
    for key, value in tensors.items():
        length = stored_bytes(key, value, dtype)
        if shards[-1] and size + length > limit:
            shards.append({})
            size = 0
        shards[-1][key] = value
        size += length
        total += length
    files = [WEIGHTS] if len(shards) == 1 else [_shard_name(place, len(shards)) for place in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, shard, dtype)
    if len(shards) > 1:
        weight_map = {key: file for file, shard in zip(files, shards, strict=True) for key in shard}
        count = sum(value.shape.numel() for value in tensors.values())
        files.append(
            _write_json(
                folder / WEIGHTS_INDEX,
                {"metadata": {"total_parameters": count, "total_size": total}, "weight_map": weight_map},
            )
        )
    floating = next((value for value in tensors.values() if value.dtype.is_floating_point), None)
    config = dict(chosen.config)
    if floating is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(stored_type(floating, dtype)).split(".")[1]
    files.append(_write_json(folder / "config.json", config))
    if chosen.generation_config is not None:
        files.append(_write_json(folder / "generation_config.json", chosen.generation_config))
    return files


def _write_adapter(
    folder: Path, adapter: Adapter, tensors: Mapping[str, Source], dtype: torch.dtype | None
) -> list[str]:
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / ADAPTER_WEIGHTS, tensors, dtype)
    config = _write_json(folder / "adapter_config.json", adapter.config)
    return [f"{folder.name}/{file}" for file in (ADAPTER_WEIGHTS, config)]


def _write_json(file: Path, content: Mapping[str, Any]) -> str:
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_file(file, lambda path: path.write_text(text, encoding="utf-8"))
    return file.name


def _present(tensors: Mapping[str, Source], key: str) -> Source:
    if key not in tensors:
        raise CheckpointError(f"The checkpoint has no {key!r}, which the adapters of its model need.")
    return tensors[key]


def _shard_name(place: int, count: int) -> str:
    return WEIGHTS.replace(".", f"-{place + 1:05d}-of-{count:05d}.")


def _dotted(name: str) -> str:
    return name + "." if name else ""


def _bytes(size: int | str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|)\s*", str(size).upper())
    value = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if value <= 0:
        raise ConfigError(f"max_shard_size={size!r} is no size: give bytes, or a number with KB, MB, GB, KiB, ...")
    return value


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and (found not in NAMES or not found.is_floating_point):
        raise ConfigError(f"dtype={dtype!r} is no type of weights; choose float32, bfloat16, float16 or float64.")
    return found
