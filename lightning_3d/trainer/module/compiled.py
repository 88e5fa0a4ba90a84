"""``trainer.fit(torch.compile(module))``: the module is taken as it was, and what was to be compiled is remembered."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.compile import to_uncompiled

from lightning_3d.pipeline.wrappers import keep_compiler

_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step")


class TakesCompiled(ParallelStrategy):
    """A strategy that is handed compiled LightningModules and compiles their blocks.

    Lightning compiles whole steps, which a strategy that runs a part of each cannot use, and asks which strategies can
    right after it has set ``_lightning_module``. So that is where the module becomes plain.
    """

    _taken: pl.LightningModule | None = None

    @property
    def _lightning_module(self) -> pl.LightningModule | None:
        return self._taken

    @_lightning_module.setter
    def _lightning_module(self, module: pl.LightningModule | None) -> None:
        context = getattr(module, "_compiler_ctx", None)
        if module is not None and context is not None:
            keep_compiler(module, context["dynamo_ctx"])
            to_uncompiled(module)
            for name in _COMPILED:
                if getattr(vars(module).get(name), "__func__", None) is getattr(type(module), name):
                    delattr(module, name)
        self._taken = module
