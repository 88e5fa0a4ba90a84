"""``parameter.data = values`` for parameters that are sharded: slow copies of a model are often updated this way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import ConfigError
from lightning_3d.placeholder import refuse_write


class DataAssignment:
    """While installed, setting ``data`` of a ``DTensor`` changes its values.

    torch sets the data of the wrapper and leaves the values as they are, and FSDP2 gathers from memory of its own. So
    the values are copied to where they lie. Setting the data of any parameter to a placeholder is refused: torch would
    take it for memory.
    """

    def __init__(self) -> None:
        self._installed = False

    def install(self) -> None:
        """Begin."""
        if not self._installed and "data" not in vars(DTensor):
            DTensor.data = property(_get, _set)  # type: ignore[assignment]
            nn.Parameter.data = property(_get, _set_plain)  # type: ignore[assignment]
            self._installed = True

    def remove(self) -> None:
        """End, and leave torch as it was."""
        if self._installed:
            del DTensor.data, nn.Parameter.data
            self._installed = False


def _get(tensor: Tensor) -> Any:
    return Tensor.data.__get__(tensor)  # type: ignore[attr-defined]


def _set(tensor: DTensor, values: Any) -> None:
    alike = isinstance(values, DTensor) and values.placements == tensor.placements and values.shape == tensor.shape
    if not alike:
        found = f"a {type(values).__name__} of shape {tuple(values.shape)}"
        raise ConfigError(
            f"The data of a sharded parameter of shape {tuple(tensor.shape)} was set to {found}, which is not laid out"
            " as the parameter is. Compute the values from parameters that are, or use load_state_dict with whole"
            " tensors."
        )
    with torch.no_grad():
        tensor._local_tensor.copy_(values._local_tensor)


def _set_plain(parameter: Tensor, values: Any) -> None:
    refuse_write(values)
    Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]
