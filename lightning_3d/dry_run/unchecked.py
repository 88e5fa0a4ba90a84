"""The verdict on a cut block where there are no numbers: from its layout alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel import Verdict
from lightning_3d.tensor_parallel.clone import clone_block
from lightning_3d.tensor_parallel.convert import convert_block
from lightning_3d.tensor_parallel.layout import BlockLayout
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.probe import BlockCall
from lightning_3d.tensor_parallel.region import Regions


def unchecked(
    block: nn.Module, call: BlockCall, layout: BlockLayout, axis: Axis, device: torch.device, sequence_dim: int | None
) -> Verdict:
    """What :func:`~lightning_3d.tensor_parallel.check_block` says of a block whose numbers are right.

    Whole parameters have partial gradients where each rank uses them on its own part of the features (those between a
    column and a row layer) or, under sequence parallelism, of the tokens.
    """
    inner = frozenset(name for region in layout.regions for name in region.inner)
    if sequence_dim is None:
        return Verdict(partial=inner)
    copy = clone_block(block, _outline, _outline)
    names = {id(parameter): name for name, parameter in copy.named_parameters()}
    cut: set[str] = set()

    def note(_: str, parameter: nn.Parameter, how: ParameterCut) -> None:
        cut.add(names[id(parameter)])

    convert_block(copy, layout, Regions(axis, device, sequence_dim), note, sequence_dim)
    return Verdict(partial=frozenset(names.values()) - cut)


def _outline(_: str, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
