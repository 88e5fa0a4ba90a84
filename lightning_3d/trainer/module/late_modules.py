"""Modules that user code adds while the Trainer runs: a new metric for every epoch, say."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import nn


class LateModules:
    """Notices modules that come or go next to the parameters: in the LightningModule itself, or where it has none.

    Args:
        module: The LightningModule.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._families = _families(module)

    def changed(self) -> bool:
        """Whether that has happened since it was asked last."""
        if all(tuple(map(id, parent._modules.values())) == children for parent, children in self._families):
            return False
        self._families = _families(self._module)
        return True


def _families(module: LightningModule) -> list[tuple[nn.Module, tuple[int, ...]]]:
    parents = [inner for inner in module.modules() if inner is module or not any(True for _ in inner.parameters())]
    return [(parent, tuple(map(id, parent._modules.values()))) for parent in parents]
