"""Options of parameter groups as JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

NOT_OPTIONS = frozenset({"params", "param_names"})
"""Keys of a parameter group that say which parameters it holds."""


def encode_options(group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a parameter group that JSON can hold, and the others as they are."""
    encoded: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for key, value in group.items():
        if key in NOT_OPTIONS:
            continue
        try:
            encoded[key] = _encode(value)
        except TypeError:
            other[key] = value
    return encoded, other


def decode_options(encoded: Mapping[str, Any]) -> dict[str, Any]:
    """The options that :func:`encode_options` encoded."""
    return {key: _decode(value) for key, value in encoded.items()}


def merge_options(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Saved options over the current ones, tensors on the device of the current."""
    options = {key: value for key, value in current.items() if key not in NOT_OPTIONS}
    for key, value in saved.items():
        if isinstance(value, Tensor) and isinstance(current.get(key), Tensor):
            value = value.to(current[key].device)
        if key not in NOT_OPTIONS:
            options[key] = value
    return options


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if type(value) is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if type(value) is list:
        return [_encode(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{type(value).__name__} is not for JSON")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, Mapping):
        if "tuple" in value:
            return tuple(_decode(item) for item in value["tuple"])
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return value
