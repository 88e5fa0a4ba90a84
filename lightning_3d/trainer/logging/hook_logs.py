"""``self.log`` in hooks of the LightningModule and of callbacks: one value for all replicas there too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_3d.collectives import all_gather_object
from lightning_3d.mesh import Mesh
from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger
from lightning_3d.trainer.logging.logs import LogRelay
from lightning_3d.trainer.module.mirror import StateMirror

_LOGGING_HOOKS = tuple(
    name for name, allowed in _FxValidator.functions.items() if allowed is not None and name.startswith("on_")
)


class HookLogs:
    """Wraps the hooks in which a module or a callback may log, while a Trainer runs it over several replicas.

    Lightning's own callbacks log nothing and are left alone, and so are those that only some ranks have.

    What a hook logs is combined over the replicas when it returns, with or without ``sync_dist``: replicas that held
    different values would make different checkpoints, stop at different epochs and part in their learning rates. In
    hooks around batches replicas weigh as many samples as they have, elsewhere one each, and sums are there taken for
    those of all replicas unless ``sync_dist`` is given. A replica that has run out of batches and only repeats one
    leaves no trace of the hooks around it.

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
        self._wrapped: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """At set-up. With one replica there is nothing to do."""
        if self._mesh.dp.size == 1:
            return
        for name in _LOGGING_HOOKS:
            if is_overridden(name, self._module):
                self._put(self._module, name)
        for callback in self._callbacks():
            for name in _LOGGING_HOOKS:
                if is_overridden(name, callback, pl.Callback):
                    self._put(callback, name)

    def remove(self) -> None:
        """When the run is over."""
        for owner, name, before in self._wrapped:
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before
        self._wrapped.clear()

    def _callbacks(self) -> list[pl.Callback]:
        """Those of the user's that all ranks have: what they log is combined by all."""
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        own = [item for item in callbacks if not type(item).__module__.startswith(("lightning.", "lightning_3d."))]
        names = [f"{type(item).__module__}.{type(item).__qualname__}" for item in own]
        everyone = all_gather_object(names, self._mesh.control_world)
        return [
            item
            for item, name in zip(own, names, strict=True)
            if all(theirs.count(name) == names.count(name) for theirs in everyone)
        ]

    def _put(self, owner: Any, name: str) -> None:
        # On the object, where Lightning looks hooks up: the class may be in use elsewhere.
        self._wrapped.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = self._wrap(name, getattr(owner, name))

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
            with self._relay.recording(0 if facts.filler else facts.size, float(facts.size), of_all=not of_batch):
                output = hook(*args, **kwargs)
            if before is not None:
                self._mirror.restore(before)
            self._relay.replay(self._relay.collect())
            return output

        return call
