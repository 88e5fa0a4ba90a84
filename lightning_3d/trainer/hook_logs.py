"""``self.log`` in hooks of the LightningModule: one value for all replicas there too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_3d.mesh import Mesh
from lightning_3d.trainer.batches import BatchFacts, BatchLedger
from lightning_3d.trainer.logs import LogRelay
from lightning_3d.trainer.mirror import StateMirror

_LOGGING_HOOKS = tuple(
    name for name, allowed in _FxValidator.functions.items() if allowed is not None and name.startswith("on_")
)


class HookLogs:
    """Wraps the hooks in which a module may log, while a Trainer runs it over several replicas.

    What a hook logs is combined over the replicas when it returns, with or without ``sync_dist``: replicas that held
    different values would make different checkpoints, stop at different epochs and part in their learning rates. In
    hooks around batches replicas weigh as many samples as they have, elsewhere one each. A replica that has run out
    of batches and only repeats one leaves no trace of the hooks around it.

    Args:
        trainer: The Trainer.
        module: Its LightningModule.
        mesh: The mesh.
        ledger: Knows the batch that is run.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, mesh: Mesh, ledger: BatchLedger) -> None:
        self._trainer = trainer
        self._module = module
        self._mesh = mesh
        self._ledger = ledger
        self._relay = LogRelay(module, mesh)
        self._mirror = StateMirror(module)
        self._wrapped: dict[str, Any] = {}

    def install(self) -> None:
        """At set-up. With one replica there is nothing to do."""
        if self._mesh.dp.size == 1:
            return
        for name in _LOGGING_HOOKS:
            if is_overridden(name, self._module):
                # On the object, where Lightning looks hooks up: the class may be in use elsewhere.
                self._wrapped[name] = vars(self._module).get(name)
                vars(self._module)[name] = self._wrap(name, getattr(self._module, name))

    def remove(self) -> None:
        """When the run is over."""
        for name, before in self._wrapped.items():
            del vars(self._module)[name]
            if before is not None:
                vars(self._module)[name] = before
        self._wrapped.clear()

    def _wrap(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        of_batch = "batch" in name or name == "on_after_backward" or name.startswith("on_before")

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            results = self._trainer._results
            if results is None or "log" in vars(results):  # within a step that optimizes by hand, which is recorded
                return hook(*args, **kwargs)
            facts = self._ledger.current if of_batch else BatchFacts(1, self._mesh.dp.size)
            before = self._mirror.snapshot(copy=True) if facts.filler else None
            self._relay.begin(facts, 1)
            with self._relay.recording(0 if facts.filler else facts.size, float(facts.size)):
                output = hook(*args, **kwargs)
            if before is not None:
                self._mirror.restore(before)
            self._relay.replay(self._relay.collect())
            return output

        return call
