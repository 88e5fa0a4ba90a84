"""What the layers of a tensor-parallel model share while they run."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_3d.mesh import Axis
from lightning_3d.random import LocalStream
from lightning_3d.tensor_parallel.collectives import copy_to_tp, gather_from_sequence

Entry = Literal["copy", "gather", "none"]
"""How a column layer's input enters its region.

``"copy"``: replicated, its gradient is summed. ``"gather"``: a piece of the sequence, gathered. ``"none"``: the module
around the layer has seen to it.
"""


class Regions:
    """State of the regions between column and row layers on this rank.

    A region is entered once per input tensor, however many column layers read it, so that the gradient of the shared
    input is summed once. Row layers close the region. One object serves all layers of a model.
    """

    def __init__(self, axis: Axis, device: torch.device, sequence_dim: int = 1) -> None:
        self.axis = axis
        self.sequence_dim = sequence_dim
        self._stream = LocalStream(axis, device)
        self._source: Tensor | None = None
        self._version = 0
        self._mode: Entry = "none"
        self._entered: Tensor | None = None
        self._stand_ins: list[tuple[Tensor, Tensor]] = []

    def enter(self, x: Tensor, mode: Entry, dim: int | None = None) -> Tensor:
        """``x`` as column layers read it: the same tensor for all that read the same ``x``."""
        x = self.whole(x)
        if mode == "none" or self.axis.size == 1:
            return x
        if x is self._source and x._version == self._version and mode == self._mode and self._entered is not None:
            return self._entered
        if mode == "copy":
            entered = copy_to_tp(x, self.axis)
            if entered is x:
                return x
        else:
            entered = gather_from_sequence(x, self.axis, self.sequence_dim if dim is None else dim, True)
        self._source, self._version, self._mode, self._entered = x, x._version, mode, entered
        return entered

    def whole(self, x: Tensor) -> Tensor:
        """What ``x`` stands in for, if it does."""
        return next((whole for stand_in, whole in self._stand_ins if stand_in is x), x) if self._stand_ins else x

    def leave(self) -> None:
        """Forget the input of the region, so that nothing outlives its use, and go back to the common stream."""
        self._source = self._entered = None
        self._stream.close()

    def stand_in(self, whole: Tensor) -> Tensor:
        """A tensor that looks like one rank's share of the features of ``whole``, for code that reads its shape.

        Column layers which are handed the stand-in read ``whole``.
        """
        share = whole.detach().narrow(-1, 0, whole.shape[-1] // self.axis.size)
        self._stand_ins.append((share, whole))
        return share

    def drop_stand_ins(self) -> None:
        """Forget all stand-ins."""
        self._stand_ins.clear()

    def open_stream(self) -> None:
        """Draw random numbers that differ over the axis until :meth:`leave`."""
        self._stream.open()

    def close_stream(self) -> None:
        """Go back to the common stream before the region ends."""
        self._stream.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
