"""What becomes of training, read without waiting for a device: gradient norm, loss scale, learning rates, skips."""

from __future__ import annotations

from collections.abc import Iterator

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_3d.monitor.device_scalars import DeviceScalars, Name


class Gauges:
    """The state of one run's optimizers, by names such as ``("gradient_norm",)`` and ``("learning_rate", "0", "1")``.

    What a device holds is asked for, and told by :meth:`arrived` once it is on the host.
    """

    def __init__(self) -> None:
        self.seen = 0
        """Batches that have ended."""
        self.skipped = 0
        """Optimizer steps left out because a gradient was not finite."""
        self._scalars = DeviceScalars()

    def clear(self) -> None:
        """A run begins."""
        self.seen = self.skipped = 0
        self._scalars.clear()

    def before_step(self, trainer: Trainer, every: int, step: int) -> None:
        """Count a step that is left out; in the last of every so many batches ask for the norm. Collective there.

        Args:
            trainer: Its hook ``on_before_optimizer_step`` runs.
            every: Batches; 0 is never.
            step: Under which the norm is told.
        """
        self.skipped += bool(getattr(trainer.precision_plugin, "step_skipped", False))  # decided before the hook
        if every and self.seen % every >= every - trainer.accumulate_grad_batches:
            self._scalars.ask(("gradient_norm",), step, trainer.strategy.gradient_norm())  # type: ignore[attr-defined]

    def after_batch(self) -> None:
        """Count a batch."""
        self.seen += 1

    def read(self, trainer: Trainer, step: int) -> dict[Name, float]:
        """Learning rates that the host knows; for others, and for the scale of the loss, ask.

        Args:
            trainer: Of the run.
            step: Under which those that are asked for are told.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            self._scalars.ask(("loss_scale",), step, scaler.factor)
        known: dict[Name, float] = {}
        for which, optimizer in enumerate(trainer.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                name, rate = ("learning_rate", str(which), str(index)), group["lr"]
                if isinstance(rate, Tensor) and rate.device.type != "cpu":
                    self._scalars.ask(name, step, rate)
                else:
                    known[name] = float(rate)
        return known

    def arrived(self) -> Iterator[tuple[Name, int, float]]:
        """Names, steps and values of what was asked for and is known by now; each is told once."""
        return self._scalars.arrived()
