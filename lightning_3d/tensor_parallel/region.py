"""What the layers of a tensor-parallel model share while they run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_3d.mesh import Axis
from lightning_3d.random import LocalStream
from lightning_3d.tensor_parallel.collectives import copy_to_tp, gather_from_sequence, is_shape_only
from lightning_3d.tensor_parallel.linear import Piece, Regathering, computed_type

Entry = Literal["copy", "gather", "none"]
"""How a column layer's input enters its region.

``"copy"``: replicated, its gradient is summed. ``"gather"``: a piece of the sequence, gathered. ``"none"``: the module
around the layer has seen to it.
"""

_How = tuple[Entry, torch.dtype, bool]
"""In what way an input was entered: mode, type, and whether with a graph."""


class _Gathered(NamedTuple):
    """A whole sequence that stands for its pieces as long as nobody writes into it."""

    whole: Tensor
    version: int
    piece: Piece


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
        self._how: _How | None = None
        self._entered: Tensor | None = None
        self._gathered: list[_Gathered] = []
        self._stand_ins: list[tuple[Tensor, Tensor]] = []

    def enter(self, x: Tensor, mode: Entry, dim: int | None = None) -> Tensor:
        """``x`` as column layers read it, in the type they compute in: the same tensor for all that read this ``x``."""
        x = self.whole(x)
        if self.axis.size == 1:
            return x
        dtype = x.dtype if is_shape_only(x, self.axis) else computed_type(x)
        how = (mode, dtype, torch.is_grad_enabled())
        if x is self._source and x._version == self._version and how == self._how and self._entered is not None:
            return self._entered
        # In that type before it travels: half the bytes under autocast, here and in the backward.
        cast = x if dtype == x.dtype else x.to(dtype)
        if mode == "copy":
            entered = copy_to_tp(cast, self.axis)
        elif mode == "gather":
            self._gathered.clear()
            entered = self.gather(cast, self.sequence_dim if dim is None else dim)
        else:
            entered = cast
            piece = self.piece_of(x)
            if piece is not None and entered is not x:
                self._note(entered, Piece(piece.tensor.to(dtype), Regathering(self.axis, piece.again.dim)))
        if entered is not x:
            self._source, self._version, self._how, self._entered = x, x._version, how, entered
        return entered

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence of which ``x`` is this rank's piece, for column layers to read."""
        entered = gather_from_sequence(x, self.axis, dim, reduce_gradient=True)
        if entered is not x and torch.is_grad_enabled() and not is_shape_only(x, self.axis):
            self._note(entered, Piece(x, Regathering(self.axis, dim)))
        return entered

    def piece_of(self, x: Tensor) -> Piece | None:
        """What ``x`` was gathered from, if it was and is as it was then."""
        if not self._gathered:
            return None
        return next((piece for whole, version, piece in self._gathered if whole is x and x._version == version), None)

    def _note(self, whole: Tensor, piece: Piece) -> None:
        self._gathered.append(_Gathered(whole, whole._version, piece))

    def whole(self, x: Tensor) -> Tensor:
        """What ``x`` stands in for, if it does."""
        return next((whole for stand_in, whole in self._stand_ins if stand_in is x), x) if self._stand_ins else x

    def leave(self) -> None:
        """Forget the input of the region, so that nothing outlives its use, and go back to the common stream."""
        self._source = self._entered = None
        self._gathered.clear()
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
