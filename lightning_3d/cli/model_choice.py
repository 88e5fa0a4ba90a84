"""Building the model that a command is asked about: a class, a file with a class, or a type of Hugging Face model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_3d.cli.did_you_mean import suggest
from lightning_3d.errors import ConfigError


@dataclass(frozen=True)
class BuiltModel:
    """A model and how it came about."""

    module: nn.Module
    title: str
    """Name of its class, and what it was built from, for people."""


def import_file_class(choice: str) -> str:
    """Import ``folder/file.py:Class`` or ``:function``; the path under which it can be imported from now on.

    Raises:
        ConfigError: if there is no such file or class, or importing it fails.
    """
    name, _, class_name = choice.rpartition(":")
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--model {choice}: there is no file {name}. Give package.module.Class or file.py:Class.")
    module_name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_doctor"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # its neighbours, as when it is run as a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--model {choice}: importing {name} failed with {type(error).__name__}: {error}") from error
    if class_name not in vars(module):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) or inspect.isfunction(value)]
        raise ConfigError(f"--model {choice}: {name} has no class {class_name!r}.{suggest(class_name, classes, '')}")
    return f"{module_name}.{class_name}"


def find_function(class_path: str) -> Callable[..., Any] | None:
    """The function at ``package.module.name``; ``None`` for a class of modules and for what cannot be imported.

    Raises:
        ConfigError: if something else stands there, or there is no such module at all.
    """
    module_name, _, name = class_path.rpartition(".")
    try:
        found = getattr(sys.modules.get(module_name) or importlib.import_module(module_name), name)
    except Exception:  # else whoever parses the arguments says why, and which names are near
        top = module_name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            raise ConfigError(
                f"--model {class_path}: there is no package or module {top!r} on the path. Give file.py:Class for a"
                " file, or add its folder to PYTHONPATH."
            ) from None
        return None
    if isinstance(found, type):
        if issubclass(found, nn.Module):
            return None
        raise ConfigError(f"{class_path} is a class, but not of an nn.Module or LightningModule, so it is no model.")
    if inspect.isfunction(found) or inspect.isbuiltin(found):
        return found
    raise ConfigError(
        f"{class_path} is an instance of {type(found).__name__}. Give a class of models or a function that returns one."
    )


def check_required(class_path: str, given: Collection[str]) -> None:
    """Refuse a class or function that takes arguments which are not given; what cannot be imported is for others.

    Raises:
        ConfigError: naming them.
    """
    module_name, _, name = class_path.rpartition(".")
    try:
        found = inspect.signature(getattr(sys.modules.get(module_name) or importlib.import_module(module_name), name))
    except Exception:
        return
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [
        item.name
        for item in found.parameters.values()
        if item.kind in named and item.default is inspect.Parameter.empty and item.name not in given
    ]
    if lacking:
        raise ConfigError(
            f"{class_path} takes {', '.join(lacking)}, which {'is' if len(lacking) == 1 else 'are'} not given. Add"
            f" {' '.join(f'--model.{item}=VALUE' for item in lacking)}."
        )


def build_class(class_path: str, build: Any) -> BuiltModel:
    """Build a model of the user's, as one process would before training.

    Args:
        class_path: For messages.
        build: Makes the instance.

    Raises:
        ConfigError: if building it fails, or gives no module.
    """
    try:
        module = build()
        configure = getattr(module, "configure_model", None)
        if callable(configure):
            configure()
    except Exception as error:
        raise ConfigError(f"{class_path} could not be built: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{class_path} gives a {type(module).__name__}, not an nn.Module or LightningModule.")
    return BuiltModel(module, f"{class_path}")


def build_hugging_face(model_type: str, given: str | None) -> BuiltModel:
    """Build a Hugging Face model of a type such as ``"llama"``, without values.

    Args:
        model_type: As in its configuration.
        given: A folder or JSON file with a configuration, or JSON with what differs from the small one used by default.

    Raises:
        ConfigError: if transformers is missing or does not know the type, or the configuration does not fit.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model {model_type} is not a class path, so it is taken as a type of Hugging Face model, for which"
            " transformers is needed: pip install 'lightning-3d[hf]'. Give package.module.Class for a class."
        ) from error
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        raise ConfigError(
            f"--model {model_type!r} is neither package.module.Class, file.py:Class nor a type of Hugging Face model."
            f"{suggest(model_type, known, '')}"
        )
    changes, is_whole = _given_config(given)
    try:
        base = transformers.AutoConfig.for_model(model_type)
        small = {} if is_whole else _small(base)
        try:
            module = _instantiate(transformers.AutoConfig.for_model(model_type, **{**small, **changes}))
        except Exception:
            if not small:
                raise
            is_whole = True  # sizes that this type does not take together: its own ones then
            module = _instantiate(transformers.AutoConfig.for_model(model_type, **changes))
    except Exception as error:
        source = given or "a small configuration"
        raise ConfigError(
            f"A {model_type} could not be built from {source}: {type(error).__name__}: {error}"
        ) from error
    whole = "the given configuration" if given else "its default configuration"
    size = whole if is_whole else "a small configuration" + (" with changes" if changes else "")
    return BuiltModel(module, f"{type(module).__name__} (Hugging Face {model_type}, {size})")


def _given_config(given: str | None) -> tuple[dict[str, Any], bool]:
    """What ``--hf-config`` says, and whether it is a whole configuration."""
    if given is None:
        return {}, False
    path = Path(given)
    text = given
    if not given.lstrip().startswith("{"):
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(
                f"--hf-config {given}: no such file. Give a JSON file, its folder, or JSON like '{{...}}'."
            )
        text = path.read_text()
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--hf-config {given} is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--hf-config {given} must be a JSON object with the options of a configuration.")
    is_whole = "model_type" in found
    return {key: value for key, value in found.items() if key != "model_type"}, is_whole


_SMALL: dict[str, object] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "projection_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("embedding_size", "moe_intermediate_size"), 32),
    "num_experts_per_tok": 2,
    "image_size": 112,
    "vocab_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "initializer_range": 0.02,
}
"""What makes a configuration small, by the names that Hugging Face has for it."""


def _small(config: Any) -> dict[str, Any]:
    """Options that make ``config`` small: those of the table that it has with a whole number."""
    plain = config.to_dict()
    small: dict[str, Any] = {
        key: value for key, value in _SMALL.items() if type(plain.get(key)) is type(value) and key in plain
    }
    if isinstance(plain.get("num_heads"), list) and isinstance(plain.get("embed_dim"), int):
        small["embed_dim"] = 8 * plain["num_heads"][0]  # widths and heads that double from stage to stage
        small.pop("image_size", None)  # windows have to fit the stages
    if isinstance(plain.get("hidden_sizes"), list):
        small["hidden_sizes"] = [16 * 2**index for index in range(len(plain["hidden_sizes"]))]
    for key in plain:
        part: Any = getattr(config, key, None)
        if hasattr(part, "to_dict") and hasattr(part, "model_type"):
            # What follows from the number of layers is left for the configuration to work out again.
            whole = {name: value for name, value in part.to_dict().items() if name != "layer_types"}
            small[key] = {**whole, **_small(part)}
    return small


_TASKS = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForZeroShotImageClassification",
    "AutoModelForImageClassification",
    "AutoModel",
)


def _instantiate(config: Any) -> nn.Module:
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    tasks = [getattr(transformers, name) for name in _TASKS if hasattr(transformers, name)]
    tasks = [task for task in tasks if type(config) in task._model_mapping]

    def make() -> nn.Module:
        return named[0](config) if named and named[0] is not None else tasks[0].from_config(config)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                return make()
        except Exception:  # some read values while they are built
            return make()
