"""Learning rates that follow the global batch: scaled by a rule, with warm-up and, if asked for, decay."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_3d.errors import ConfigError

RULES = ("linear", "sqrt")
DECAYS = ("constant", "linear", "cosine")
REFERENCE = "reference"


def scale(rule: str, global_batch_size: int, reference_batch_size: int) -> float:
    """By what the learning rate of the reference batch is multiplied.

    Args:
        rule: ``"linear"``: k, for SGD (Goyal et al. 2017, arXiv:1706.02677); ``"sqrt"``: the square root of k, for Adam
            and its kin (You et al. 2019, arXiv:1904.00962; Malladi et al. 2022, arXiv:2205.10287).
        global_batch_size: Samples per optimizer step, over all replicas and accumulated batches.
        reference_batch_size: The same of the run in which the learning rate was found; k is their quotient.
    """
    ratio = global_batch_size / reference_batch_size
    return ratio if rule == "linear" else math.sqrt(ratio)


class BatchScaledLR(LRScheduler):
    """The learning rates of ``optimizer``, found with one batch, for another: scaled, warmed up, and decayed.

    The rate at a step depends on the samples per optimizer step and on the number of the step, and on nothing else: not
    on the number of GPUs, and not on how they are laid out. Every parameter group keeps its own rate, scaled.

    Args:
        optimizer: With the learning rates of the reference batch.
        reference_batch_size: Samples per optimizer step with which these rates were found.
        global_batch_size: Samples per optimizer step of this run, over all replicas and accumulated batches. By default
            the 3D strategy fills it in: its own ``global_batch_size``, or the loader's ``batch_size`` times replicas
            times ``accumulate_grad_batches``.
        rule: ``"linear"`` (SGD) or ``"sqrt"`` (Adam and its kin); see :func:`scale`.
        warmup_steps: Optimizer steps in which the rate grows evenly to the scaled one.
        warmup_start: Where it grows from: ``"reference"``, the rate before scaling (Goyal et al.), or a fraction of the
            scaled rate, such as 0. From the reference nothing is to be warmed up where the scale is not above 1.
        decay: What follows, down to ``final_fraction`` at ``total_steps``: ``"constant"``, ``"linear"``, ``"cosine"``.
        total_steps: Optimizer steps of the whole run, warm-up included, where the rate decays.
        final_fraction: Of the scaled rate, that is left at ``total_steps`` and after.
        last_epoch: As with any scheduler of torch; leave it at -1, Lightning restores it from checkpoints.

    Raises:
        ConfigError: If the options make no sense, one by one or together.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reference_batch_size: int,
        global_batch_size: int | None = None,
        rule: str = "linear",
        warmup_steps: int = 0,
        warmup_start: float | str = REFERENCE,
        decay: str = "constant",
        total_steps: int | None = None,
        final_fraction: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        _check_whole("reference_batch_size", reference_batch_size, least=1)
        if global_batch_size is not None:
            _check_whole("global_batch_size", global_batch_size, least=1)
        _check_known("rule", rule, RULES)
        _check_known("decay", decay, DECAYS)
        _check_whole("warmup_steps", warmup_steps, least=0)
        if warmup_start != REFERENCE:
            _check_fraction("warmup_start", warmup_start, also=f", or {REFERENCE!r}")
        _check_fraction("final_fraction", final_fraction)
        _check_length(decay, total_steps, warmup_steps)
        self.reference_batch_size = reference_batch_size
        self.global_batch_size = global_batch_size
        self.rule = rule
        self.warmup_steps = warmup_steps
        self.warmup_start = warmup_start
        self.decay = decay
        self.total_steps = total_steps
        self.final_fraction = final_fraction
        super().__init__(optimizer, last_epoch)

    def configured(self, **more: Any) -> dict[str, Any]:
        """What ``configure_optimizers`` returns: optimizer and scheduler, which moves once per optimizer step.

        Args:
            **more: Further keys of Lightning's ``lr_scheduler`` dict, such as ``name``.
        """
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self, "interval": "step", **more}}

    @property
    def changes_with_steps(self) -> bool:
        """Whether the rate depends on the step at all."""
        return self.warmup_steps > 0 or self.decay != "constant"

    def set_global_batch_size(self, samples: int) -> None:
        """Fill in ``global_batch_size`` if it was left out, and set the rate of the first step; for the strategy."""
        if self.global_batch_size is None:
            _check_whole("global_batch_size", samples, least=1)
            self.global_batch_size = samples
            self._set_rates()

    def factor(self, step: int) -> float:
        """By what the rates of the optimizer are multiplied in optimizer step ``step``, counted from 0.

        Raises:
            ConfigError: if nobody has said what the global batch is.
        """
        if self.global_batch_size is None:
            raise ConfigError(
                "BatchScaledLR scales by the samples of an optimizer step, and was not told them. Pass"
                " global_batch_size, or train with strategy='3d', which fills it in."
            )
        peak = scale(self.rule, self.global_batch_size, self.reference_batch_size)
        if step < self.warmup_steps:
            start = min(1.0, peak) if self.warmup_start == REFERENCE else peak * float(self.warmup_start)
            return start + (peak - start) * (step + 1) / self.warmup_steps
        if self.total_steps is None or self.decay == "constant":
            return peak
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return peak * (self.final_fraction + (1 - self.final_fraction) * left)

    @override
    def get_lr(self) -> list[Any]:
        """The rate of every group in the step that comes next."""
        if self.global_batch_size is None and self.last_epoch <= 0:  # there is time until the first step has been made
            return list(self.base_lrs)
        factor = self.factor(self.last_epoch)
        return [rate * factor for rate in self.base_lrs]

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was saved, with the options of this run.

        The rate goes on as it was if they are the same. With another global batch the rates of this one hold from the
        next step on, and a warning says so.
        """
        options = {name: getattr(self, name) for name in _OPTIONS}
        changed = {
            name: (state_dict[name], value) for name, value in options.items() if _differs(state_dict, name, value)
        }
        super().load_state_dict({**state_dict, **options})
        if changed:
            said = ", ".join(f"{name} was {before!r} and is {now!r}" for name, (before, now) in changed.items())
            warnings.warn(
                f"BatchScaledLR goes on from step {self.last_epoch} of a run with other options: {said}. Those of this"
                " run hold from here on; steps are counted on, not samples.",
                stacklevel=2,
            )
            self._set_rates()

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, which compiled optimizers hold on to
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


_OPTIONS = (
    "reference_batch_size",
    "global_batch_size",
    "rule",
    "warmup_steps",
    "warmup_start",
    "decay",
    "total_steps",
    "final_fraction",
)


def _differs(saved: dict[str, Any], name: str, value: object) -> bool:
    return name in saved and saved[name] is not None and value is not None and saved[name] != value


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "positive whole number" if least else "whole number, 0 or more"
        unit = "optimizer steps" if name.endswith("steps") else "samples per optimizer step"
        raise ConfigError(f"{name}={value!r} must be a {kind}: {unit}.")


def _check_fraction(name: str, value: object, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}={value!r} must be a fraction of the scaled rate, from 0 to 1{also}.")


def _check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known. Choose from {', '.join(map(repr, known))}.")


def _check_length(decay: str, total_steps: object, warmup_steps: int) -> None:
    if decay == "constant":
        if total_steps is not None:
            raise ConfigError(
                f"total_steps={total_steps!r} was given, but decay='constant' does not end. Leave it out, or choose a"
                " decay: 'linear' or 'cosine'."
            )
        return
    if total_steps is None:
        raise ConfigError(f"decay={decay!r} needs total_steps: the optimizer steps of the whole run, warm-up included.")
    _check_whole("total_steps", total_steps, least=1)
    if isinstance(total_steps, int) and total_steps <= warmup_steps:
        raise ConfigError(
            f"total_steps={total_steps} leaves nothing after warmup_steps={warmup_steps}: warm-up is part of it."
        )
