"""Lists of layers of one class: what a model repeats."""

from __future__ import annotations

from torch import nn


def repeated_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The lists of repeated layers within ``module``, by name, in the order of registration."""
    return {name: child for name, child in module.named_modules() if name and is_block_list(child)}


def is_block_list(module: nn.Module) -> bool:
    """Whether ``module`` is a list of at least two layers of one class that hold parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    classes = {type(child) for child in module.children()}
    return len(classes) == 1 and any(True for _ in module.parameters())
