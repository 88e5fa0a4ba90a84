"""What a checkpoint remembers of the Hugging Face models in the module: enough to write folders that they load from."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_3d.checkpoint.directory import read_json
from lightning_3d.checkpoint.names import original_name, state_dict_keys
from lightning_3d.errors import CheckpointError

FILE = "hugging_face.json"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter that PEFT added."""

    config: Mapping[str, Any]
    """What ``adapter_config.json`` says."""
    keys: Mapping[str, str]
    """Keys of ``adapter_model.safetensors`` -> keys of the module's state dict; empty where PEFT computes them."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A ``PreTrainedModel``, or a ``PeftModel`` around one, inside of the user's module."""

    name: str
    """Of the submodule: ``"model"``; empty if the module itself is one."""
    base: str
    """Of the ``PreTrainedModel``; another than ``name`` inside of a ``PeftModel``."""
    kind: str
    """Name of its class."""
    config: Mapping[str, Any]
    """What ``config.json`` says."""
    generation_config: Mapping[str, Any] | None = None
    """What ``generation_config.json`` says, if the model generates."""
    tied: Sequence[str] = ()
    """Keys of the model that it ties to others on loading."""
    ignored: Sequence[str] = ()
    """Patterns of keys that the model makes itself on loading."""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    """By name."""


def describe(module: nn.Module) -> list[Description]:
    """Every outermost Hugging Face model in ``module``; only names and settings are read, no values."""
    return [_describe(name, child) for name, child in _outermost(module)]


def described_in_file(module: nn.Module | None) -> dict[str, bytes]:
    """What :func:`describe` says, as the file of a checkpoint that keeps it; empty if there is nothing to say."""
    if module is None or "transformers" not in sys.modules:
        return {}
    try:
        text = json.dumps([asdict(each) for each in describe(module)], indent=1)
    except Exception as error:  # a checkpoint must not fail because of what only an export needs
        warnings.warn(
            f"The configuration of the Hugging Face model is not part of the checkpoint ({type(error).__name__}:"
            f" {error}). Training goes on from it all the same; to export it, hand the model to export_hugging_face."
        )
        return {}
    return {} if text == "[]" else {FILE: f'{{"models": {text}}}'.encode()}


def read_descriptions(folder: Path) -> list[Description]:
    """What the file of :func:`described_in_file` says; nothing where there is none.

    Raises:
        CheckpointError: The file is damaged.
    """
    if not (folder / FILE).is_file():
        return []
    try:
        return [_from_json(each) for each in read_json(folder / FILE)["models"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / FILE} is damaged: {type(error).__name__} {error}.") from error


def _from_json(content: Mapping[str, Any]) -> Description:
    adapters = {name: Adapter(**adapter) for name, adapter in content["adapters"].items()}
    return Description(**{**content, "adapters": adapters})


def _outermost(module: nn.Module) -> Iterator[tuple[str, Any]]:
    kinds = _classes()
    found: list[str] = []
    for name, child in module.named_modules():
        inside = any(name.startswith(outer + ".") or not outer for outer in found)
        if kinds and isinstance(child, kinds) and not inside:
            found.append(name)
            yield name, child


def _classes() -> tuple[type, ...]:
    """Of what is imported: whoever has such a model has imported its library."""
    places = (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))
    return tuple(getattr(sys.modules[library], kind) for library, kind in places if library in sys.modules)


def _describe(name: str, model: Any) -> Description:
    pretrained = sys.modules["transformers"].PreTrainedModel
    base_name, base = next((inner, child) for inner, child in model.named_modules() if isinstance(child, pretrained))
    config = json.loads(base.config.to_json_string())
    config["architectures"] = [type(base).__name__]
    generates = base.can_generate() and getattr(base, "generation_config", None) is not None
    return Description(
        name=original_name(name),
        base=original_name(".".join(filter(None, (name, base_name)))),
        kind=type(base).__name__,
        config=config,
        generation_config=json.loads(base.generation_config.to_json_string()) if generates else None,
        tied=sorted(_tied(base)),
        ignored=sorted(getattr(base, "_keys_to_ignore_on_save", None) or ()),
        adapters=_adapters(model, base, name),
    )


def _tied(model: Any) -> list[str]:
    """Keys that the model ties to another one whenever it is built from its configuration."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:  # before transformers 5
        tied = getattr(model, "_tied_weights_keys", None) or () if model.config.tie_word_embeddings else ()
    return list(tied)


def _adapters(model: Any, base: Any, name: str) -> dict[str, Adapter]:
    """PEFT's own function says which keys are an adapter's; it is asked with tensors that have no values."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return {}
    from peft import get_peft_model_state_dict

    # An adapter that the model itself has loaded (``model.add_adapter``) is not below a PeftModel.
    prefix = "base_model.model." if model is base else ""
    keys = state_dict_keys(model)[0]
    outer = original_name(name) + "." if name else ""
    adapters = {}
    for adapter, config in configs.items():
        if config.is_prompt_learning:
            encoder = [key for key in keys if key.startswith(f"prompt_encoder.{adapter}.")]
            found = {"prompt_embeddings": encoder[0]} if len(encoder) == 1 else {}
        else:
            markers = {key: torch.empty(0) for key in keys}
            origin = {id(marker): key for key, marker in markers.items()}
            kept = get_peft_model_state_dict(model, markers, adapter_name=adapter, save_embedding_layers=False)
            found = {prefix + key: origin[id(marker)] for key, marker in kept.items()}
        adapters[adapter] = Adapter(
            config=json.loads(json.dumps({**config.to_dict(), "inference_mode": True}, default=_plain)),
            keys={key: outer + own for key, own in found.items()},
        )
    return adapters


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", str(value))
