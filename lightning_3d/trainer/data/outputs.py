"""What the steps of the micro-batches returned, put together to what one step on the whole batch would return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def combine(outputs: Sequence[Any], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> Any:
    """One output for the whole batch.

    Scalars that are numbers with a fraction (floats, 0-dim floating tensors) become their weighted mean. Tensors as
    long along dim 0 as their micro-batch are joined along it, and so are lists of that length. Dictionaries, tuples,
    lists and dataclasses are combined part by part. Values that are equal everywhere stay. What is left becomes a
    list with one entry per micro-batch.

    Args:
        outputs: What every micro-batch's step returned, in order.
        weights: Weight of every micro-batch in the loss; need not sum to 1.
        sizes: Samples of every micro-batch.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, Tensor) for output in outputs):
        return _combine_tensors(outputs, weights, sizes)
    if all(type(output) is float for output in outputs):
        if all(output == first for output in outputs):
            return first  # to the last bit, and without asking weights on a device
        return float(_mean([torch.tensor(output, dtype=torch.float64) for output in outputs], weights))
    if any(type(output) is not type(first) for output in outputs):
        return list(outputs)
    if isinstance(first, Mapping):
        return _combine_mappings(outputs, weights, sizes)
    if isinstance(first, (list, tuple)) and not isinstance(first, torch.Size):  # which holds numbers only
        return _combine_sequences(outputs, weights, sizes)
    if dataclasses.is_dataclass(first):
        whole = copy.copy(first)
        for field in dataclasses.fields(first):
            parts = [getattr(output, field.name) for output in outputs]
            object.__setattr__(whole, field.name, combine(parts, weights, sizes))
        return whole
    return first if _all_equal(outputs) else list(outputs)


def _combine_tensors(outputs: Sequence[Tensor], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> Any:
    if all(output.dim() == 0 for output in outputs):
        if outputs[0].is_floating_point():
            return _mean(outputs, weights)
        # Whether whole numbers are equal is not asked: the answer would have to wait for the device.
        return list(outputs)
    rows = {tuple(output.shape[1:]) for output in outputs}
    if len(rows) == 1 and all(
        output.dim() and len(output) == size for output, size in zip(outputs, sizes, strict=True)
    ):
        return torch.cat(list(outputs))
    return list(outputs)


def _combine_mappings(outputs: Sequence[Any], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> Any:
    keys = list(outputs[0])
    if any(list(output) != keys for output in outputs):
        return list(outputs)
    parts = {key: combine([output[key] for output in outputs], weights, sizes) for key in keys}
    if type(outputs[0]) is dict:
        return parts
    whole = copy.copy(outputs[0])
    for key, part in parts.items():
        whole[key] = part
    return whole


def _combine_sequences(outputs: Sequence[Any], weights: Sequence[float | Tensor], sizes: Sequence[int]) -> Any:
    first = outputs[0]
    per_sample = all(len(output) == size for output, size in zip(outputs, sizes, strict=True))
    if type(first) is list and per_sample and not all(isinstance(part, Tensor) and part.dim() for part in first):
        return [part for output in outputs for part in output]
    if any(len(output) != len(first) for output in outputs):
        return list(outputs)
    parts = [combine(list(column), weights, sizes) for column in zip(*outputs, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def _mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    # What weighs nothing may be NaN: the mean over no tokens, say.
    mean = sum(_weighted(value, weight) for value, weight in zip(values, weights, strict=True)) / sum(weights)
    return torch.as_tensor(mean, dtype=values[0].dtype)


def _weighted(value: Tensor, weight: float | Tensor) -> Tensor | float:
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, value * weight, 0.0)
    return value * weight if weight else 0.0


def _all_equal(outputs: Sequence[Any]) -> bool:
    try:
        return all(bool(output == outputs[0]) for output in outputs)
    except Exception:  # an object may refuse to be compared, or answer with an array
        return False
