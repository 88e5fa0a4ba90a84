"""Column- and row-parallel linear layers.

A column layer holds rows of the weight and gives a piece of the features; a row layer reads such a piece, holds columns
of the weight and sums over the ranks. An existing module is converted in place by a change of class: its name, its
attributes, its hooks and ``isinstance`` checks stay.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.tensor_parallel.clone import without_hooks
from lightning_3d.tensor_parallel.collectives import gather_from_tp, split_to_tp
from lightning_3d.tensor_parallel.linear import column_linear, is_fusible, row_linear
from lightning_3d.tensor_parallel.loss import ShardedLogits
from lightning_3d.tensor_parallel.parameters import local_views
from lightning_3d.tensor_parallel.region import Entry, Regions


@dataclass(frozen=True, kw_only=True)
class ColumnSettings:
    """How a column layer meets its surroundings."""

    regions: Regions
    entry: Entry = "copy"
    gather: tuple[int, ...] | None = None
    """Lengths of all ranks' outputs, when the output is gathered."""
    sharded_logits: bool = False
    """Give :class:`ShardedLogits` instead of gathering."""
    share: tuple[tuple[int, int], ...] = ()
    """``(start, length)`` of the output features this rank uses of a weight that every rank holds whole."""
    random: bool = False
    """Whether random numbers are drawn before the row layer."""
    alone: bool = False
    """Whether no other column layer reads the same input, so that this one sums its gradient itself."""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How a row layer meets its surroundings."""

    regions: Regions
    split: bool = False
    """Whether the input is whole and each rank takes its piece."""
    scatter_dim: int | None = None
    """Sequence dim along which the output is scattered; ``None`` gives every rank all of it."""


class Column(nn.Module):
    """Forward of a column layer, mixed into the class of the module it converts.

    Input ``[..., in]``, the same on every rank (or pieces of the sequence, see ``ColumnSettings.entry``); output
    ``[..., out / tp]``.
    """

    weight: Any
    bias: Any
    _column: ColumnSettings
    _transposed = False
    """Whether the weight is kept as ``[in, out]``, as Hugging Face's Conv1D does."""

    def forward(self, x: Tensor) -> Any:
        """Map ``[..., in]`` to this rank's output features."""
        settings = self._column
        regions = settings.regions
        weight, bias = self.weight, self.bias
        fused = not settings.share and is_fusible(x, weight, bias)
        sums = fused and settings.alone and settings.entry == "copy"
        x = regions.whole(x) if sums else regions.enter(x, settings.entry)
        if settings.share:
            weight = _pieces(weight, int(self._transposed), settings.share)
            bias = None if bias is None else _pieces(bias, 0, settings.share)
        if fused:
            piece = regions.piece_of(x)
            axis = regions.axis if sums or (settings.alone and piece is not None) else None
            y = column_linear(x, weight, bias, axis, piece, self._transposed)
        else:
            weight, bias = local_views(weight, bias)
            y = F.linear(x, weight.t() if self._transposed else weight, bias)
        if settings.random and self.training:
            regions.open_stream()
        if settings.gather is None:
            return y
        if settings.sharded_logits:
            return ShardedLogits.of(y, regions.axis, settings.gather)
        return gather_from_tp(y, regions.axis, -1, settings.gather)


class Row(nn.Module):
    """Forward of a row layer, mixed into the class of the module it converts.

    Input ``[..., in / tp]``, output ``[..., out]``, summed over the axis; the bias is added once, after the sum.
    """

    weight: Any
    bias: Any
    _row: RowSettings
    _transposed = False
    """As in :class:`Column`."""

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's input features to the whole output."""
        settings = self._row
        regions = settings.regions
        regions.leave()
        if settings.split:
            x = split_to_tp(x, regions.axis, -1)
        y = row_linear(x, self.weight, regions.axis, settings.scatter_dim, self._transposed)
        bias = self.bias
        return y if bias is None else y + bias.to(y.dtype)


class ColumnParallelLinear(Column, nn.Linear):
    """``nn.Linear`` whose output features are cut over the tensor-parallel axis."""


class RowParallelLinear(Row, nn.Linear):
    """``nn.Linear`` whose input features are cut over the tensor-parallel axis."""


def _pieces(whole: Tensor, dim: int, share: tuple[tuple[int, int], ...]) -> Tensor:
    pieces = [whole.narrow(dim, start, length) for start, length in share]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is Hugging Face's Conv1D, a linear layer with weight ``[in, out]``."""
    return any(
        base.__name__ == "Conv1D" and base.__module__.startswith("transformers") for base in _class(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer that can be converted: one which computes what its class says."""
    if isinstance(module, nn.Linear):
        plain = type(module).forward is nn.Linear.forward or _computes_linear(module)
    else:
        plain = is_conv1d(module)
    if not plain or "forward" in vars(module) or not isinstance(module._parameters.get("weight"), Tensor):
        return False
    return not hasattr(module, "parametrizations")


_LINEAR: dict[type, bool] = {}


def _computes_linear(module: nn.Linear) -> bool:
    """Whether a subclass with a forward of its own computes what ``nn.Linear`` does, tried on small numbers."""
    cls = type(module)
    if module._modules or not set(module._parameters) <= {"weight", "bias"}:
        return False
    if cls not in _LINEAR:
        twin = cls.__new__(cls)
        generator = torch.Generator().manual_seed(0)
        weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((3, 5), (3,), (2, 4, 5)))
        parameters = {"weight": nn.Parameter(weight), "bias": None if module.bias is None else nn.Parameter(bias)}
        vars(twin).update({**vars(module), **without_hooks(module), "_parameters": parameters})
        vars(twin).update({"in_features": 5, "out_features": 3})
        expected = F.linear(x, weight, None if module.bias is None else bias)
        try:
            with torch.no_grad():
                found = twin(x)
            _LINEAR[cls] = found.shape == expected.shape and bool(torch.allclose(found, expected, atol=1e-5))
        except Exception:
            _LINEAR[cls] = False
    return _LINEAR[cls]


def features(module: nn.Module) -> tuple[int, int]:
    """``(in, out)`` of a linear layer, of the whole weight."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_conv1d(module) else (columns, rows)


def weight_dims(module: nn.Module) -> tuple[int, int]:
    """Dims of the weight that hold the input and the output features."""
    return (0, 1) if is_conv1d(module) else (1, 0)


def to_column(module: nn.Module, settings: ColumnSettings) -> None:
    """Make ``module`` a column layer; its parameters are cut elsewhere."""
    module._column = settings  # type: ignore[assignment]
    module.__class__ = _converted(_class(module), Column)


def to_row(module: nn.Module, settings: RowSettings) -> None:
    """Make ``module`` a row layer; its parameters are cut elsewhere."""
    module._row = settings  # type: ignore[assignment]
    module.__class__ = _converted(_class(module), Row)


def _class(module: nn.Module) -> Any:
    return type(module)


@functools.cache
def _converted(cls: Any, mixin: Any) -> type[nn.Module]:
    known: dict[Any, type[nn.Module]] = {
        (nn.Linear, Column): ColumnParallelLinear,
        (nn.Linear, Row): RowParallelLinear,
    }
    if (cls, mixin) in known:
        return known[cls, mixin]
    own = {"_transposed": not issubclass(cls, nn.Linear), "__module__": cls.__module__}
    return type(f"{mixin.__name__}Parallel{cls.__name__}", (mixin, cls), own)
