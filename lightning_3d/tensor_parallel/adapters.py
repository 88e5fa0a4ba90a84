"""Adapters (LoRA) around layers that are cut: what PEFT adds beside a layer runs whole up to its second matrix."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_3d.tensor_parallel.layout import RegionLayout
from lightning_3d.tensor_parallel.region import Regions

_SECOND = "lora_B"


def share_adapter_dropout(block: nn.Module, region: RegionLayout, regions: Regions) -> None:
    """Let adapters of column layers drop out alike on all ranks.

    What drops out there is the whole input, on its way to a first matrix that every rank holds whole; with masks of
    their own the ranks would compute different gradients for it. The second matrix opens the region's stream again.
    """

    def common(_: nn.Module, args: Any) -> None:
        regions.close_stream()

    for column in region.columns:
        around, found, _ = column.name.partition(f".{_SECOND}.")
        dropouts = getattr(block.get_submodule(around), "lora_dropout", None) if found else None
        if isinstance(dropouts, nn.Module):
            for part in dropouts.modules():
                if isinstance(part, nn.modules.dropout._DropoutNd):
                    part.register_forward_pre_hook(common)
