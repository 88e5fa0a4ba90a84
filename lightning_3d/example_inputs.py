"""Inputs made up for a module, to run it once without data: shapes and types are right, values are not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


def example_inputs(module: nn.Module, batch: int = 1, length: int = 8) -> Iterator[Call]:
    """Arguments to call ``module`` with, the most telling first; none need fit.

    Tried in turn: the ``example_input_array`` of a LightningModule; inputs made up from the ``config`` of a Hugging
    Face model; its ``dummy_inputs``; token numbers or an input of the width of the first layer. A module without a
    ``forward`` has no inputs.

    Args:
        module: Any module, with or without memory.
        batch: Samples of made-up inputs.
        length: Length of made-up sequences.

    Yields:
        ``(args, kwargs)`` with tensors of zeros on the CPU.
    """
    if not has_forward(module):
        return
    example = _read(module, "example_input_array")
    if isinstance(example, Mapping):
        yield (), dict(example)
    elif example is not None:
        yield tuple(example) if isinstance(example, tuple | list) else (example,), {}
    made_up = hugging_face_inputs(module, batch, length)
    if made_up is not None:
        yield (), {**made_up, "use_cache": False} if _takes(module, "use_cache") else made_up
        yield (), made_up
    dummies = _read(module, "dummy_inputs")
    if isinstance(dummies, Mapping) and dummies:
        yield (), dict(dummies)
    yield from _guesses(module, batch, length)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: many LightningModules have steps and no ``forward``."""
    missing = (nn.Module.forward, LightningModule.forward)
    return "forward" in vars(module) or type(module).forward not in missing


def hugging_face_inputs(module: nn.Module, batch: int = 1, length: int = 8) -> dict[str, Tensor] | None:
    """Inputs for a Hugging Face model from its ``config`` and the signature of its forward; ``None`` for others."""
    config, main = _read(module, "config"), _read(module, "main_input_name")
    if config is None or not isinstance(main, str):
        return None
    sizes = [config, *(part for name in _PARTS if (part := getattr(config, name, None)) is not None)]

    def size(*names: str, default: int) -> Any:
        found = (getattr(part, name, None) for name in names for part in sizes)
        return next((value for value in found if value is not None), default)

    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    ids = torch.zeros(batch, length, dtype=torch.long)
    image = size("image_size", default=224)
    height, width = (image, image) if isinstance(image, int) else tuple(image)
    frames = 2 * size("max_source_positions", default=length)
    known = {
        "input_ids": lambda: ids,
        "pixel_values": lambda: torch.zeros(batch, size("num_channels", default=3), height, width, dtype=dtype),
        "input_features": lambda: torch.zeros(batch, size("num_mel_bins", default=80), frames, dtype=dtype),
        "input_values": lambda: torch.zeros(batch, 16000, dtype=dtype),
        "inputs_embeds": lambda: torch.zeros(batch, length, size("hidden_size", "d_model", default=1), dtype=dtype),
    }
    if main not in known:
        return None
    given = {main: known[main]()}
    # Models of several inputs (text beside images) need each of them that has no default of its own but None.
    if main in ("input_ids", "pixel_values") and hasattr(config, "text_config") and hasattr(config, "vision_config"):
        given.update({name: known[name]() for name in ("input_ids", "pixel_values") if _takes(module, name)})
    if getattr(config, "is_encoder_decoder", False) and _takes(module, "decoder_input_ids"):
        given["decoder_input_ids"] = ids
    return given


_PARTS = ("text_config", "vision_config", "encoder", "decoder", "audio_config")
"""Where a configuration of several parts keeps them."""


_SIDES = (32, 64, 224, 16, 28, 128, 256)
"""Sides of pictures that are tried."""


def _guesses(module: nn.Module, batch: int, length: int) -> Iterator[Call]:
    """Inputs by the first layer that has parameters, then token numbers, each once and twice."""
    inputs: list[Tensor] = []
    for layer in module.modules():
        dtype = next((p.dtype for p in layer.parameters(recurse=False) if p.is_floating_point()), torch.float32)
        if isinstance(layer, nn.Embedding):
            inputs.append(torch.zeros(batch, length, dtype=torch.long))
        elif isinstance(layer, nn.Linear):
            inputs.append(torch.zeros(batch, length, layer.in_features, dtype=dtype))
            inputs.append(torch.zeros(batch, layer.in_features, dtype=dtype))
        elif isinstance(layer, nn.LSTM | nn.GRU | nn.RNN):
            inputs.append(torch.zeros(batch, length, layer.input_size, dtype=dtype))
        elif isinstance(layer, nn.MultiheadAttention):
            inputs.append(torch.zeros(batch, length, layer.embed_dim, dtype=dtype))
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            dims = len(layer.kernel_size)
            inputs.extend(torch.zeros(batch, layer.in_channels, *[side] * dims, dtype=dtype) for side in _SIDES)
        if inputs:
            break
    if not any(not tensor.is_floating_point() for tensor in inputs):
        inputs.append(torch.zeros(batch, length, dtype=torch.long))
    for tensor in inputs:
        yield (tensor,), {}
    for tensor in inputs:
        yield (tensor, tensor), {}


def _takes(module: nn.Module, name: str) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(item.name == name or item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)


def _read(module: nn.Module, name: str) -> Any:
    try:
        return getattr(module, name, None)
    except Exception:  # a property of the user's that cannot be computed now
        return None
