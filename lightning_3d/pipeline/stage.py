"""The part of the model that one rank runs: the root of its modules for sharding, and the unit the engine drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.pipeline.cut import Cut, StageEnd
from lightning_3d.pipeline.needs import Exchange


class Stage(nn.Module):
    """Holds the whole LightningModule and runs the user's step for one of this rank's chunks.

    ``StageEnd`` never leaves :meth:`forward`, so that hooks on the stage (FSDP2's root) always pair up.
    """

    def __init__(self, module: nn.Module, cut: Cut) -> None:
        super().__init__()
        self.module = module
        self.cut = cut

    @property
    def blocks(self) -> dict[int, list[nn.Module]]:
        """The blocks of every chunk of this rank."""
        modules = dict(self.module.named_modules(remove_duplicate=False))
        return {chunk: [modules[name] for name in self.cut.chunks.blocks_of(chunk)] for chunk in self.cut.owned}

    def forward(self, call: Callable[[], Any], chunk: int, exchange: Exchange) -> tuple[bool, Any]:
        """Run ``call`` as ``chunk``.

        Returns:
            ``(True, what call returned)`` on the last chunk, else ``(False, the flattened arguments of the first block
            of the next chunk)``.
        """
        with self.cut.running(chunk, exchange):
            try:
                return True, call()
            except StageEnd as end:
                return False, end.leaves
