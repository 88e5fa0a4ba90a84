"""Parameters that several modules share, found by identity before the model is cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_3d.pipeline.blocks import ChunkMap


@dataclass(frozen=True)
class SharedParameter:
    """One parameter under several names or in several stages."""

    names: tuple[str, ...]
    """All its names, in the order of registration."""
    stages: tuple[int, ...]
    """The pipeline ranks that keep a copy, ascending; the first counts it in norms and writes it."""


def find_shared(module: nn.Module, chunks: ChunkMap, num_stages: int) -> list[SharedParameter]:
    """The parameters that have several names or that several stages keep."""
    names: dict[int, list[str]] = {}
    stages: dict[int, set[int]] = {}
    for holder, child in module.named_modules(remove_duplicate=False):
        for key, parameter in child._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{holder}.{key}" if holder else key)
                owners = {chunk % num_stages for chunk in chunks.chunks_of(holder)}
                stages.setdefault(id(parameter), set()).update(owners)
    return [
        SharedParameter(tuple(names[key]), tuple(sorted(stages[key])))
        for key in names
        if len(names[key]) > 1 or len(stages[key]) > 1
    ]
