"""Train a module for a few steps and write down all its numbers: under the stock Trainer, or under the 3D strategy."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import full_state_dict

GLOBAL_BATCH = 12
LENGTH, VOCAB = 8, 24


@dataclass
class Numbers:
    """What a run computed; tensors are whole and on the host (rank 0 only)."""

    logged: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)


class Recorder(Callback):
    """Writes down gradients before every optimizer step, and what was logged after every batch."""

    def __init__(self) -> None:
        self.numbers = Numbers()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = _whole(trainer, pl_module, lambda name, p: _or_zeros(p.grad, p))
        self.numbers.gradients.append(gradients)
        if isinstance(trainer.strategy, ThreeDStrategy):
            norm = trainer.strategy.gradient_norm()
        else:
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        self.numbers.norms.append(float(norm))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("train")}
        self.numbers.logged.append(logged)
        self.numbers.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val")}
        self.numbers.validation.update(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.numbers.weights = _whole(trainer, pl_module, lambda name, p: p)
        state = trainer.optimizers[0].state
        for key in ("exp_avg", "exp_avg_sq"):
            moments = _whole(trainer, pl_module, lambda name, p, key=key: _or_zeros(state.get(p, {}).get(key), p))
            self.numbers.optimizer.update({f"{name}.{key}": value for name, value in moments.items()})


def _or_zeros(value: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if value is None else value


def _whole(
    trainer: Trainer, module: LightningModule, pick: Callable[[str, nn.Parameter], Tensor]
) -> dict[str, Tensor]:
    """A tensor for every parameter, whole, on rank 0."""
    strategy = trainer.strategy
    if not isinstance(strategy, ThreeDStrategy):
        return {name: pick(name, p).detach().clone() for name, p in module.named_parameters()}
    state = strategy._model_state()
    from lightning_3d.placeholder import is_placeholder

    chosen = {name: p if is_placeholder(p) else pick(name, p) for name, p in module.named_parameters()}
    names = tuple(key for key in state.keys if key in chosen and key not in state.ties)
    whole = full_state_dict(dataclasses.replace(state, parameters=chosen, keys=names, ties={}, buffers={}), strategy.mesh)
    return {name: value.clone() for name, value in whole.items()}


def tokens(num: int) -> Sequence[Tensor]:
    """Token rows ``[num, LENGTH + 1]``."""
    generator = torch.Generator().manual_seed(7)
    return list(torch.randint(VOCAB, (num, LENGTH + 1), generator=generator))


def run(
    make_module: Callable[[], LightningModule],
    replicas: int = 1,
    strategy: ThreeDStrategy | None = None,
    num_samples: int = 3 * GLOBAL_BATCH,
    steps: int = 3,
    devices: int = 1,
    precision: str = "64-true",
    batch: int = GLOBAL_BATCH,
    dataset: Sequence[Any] | None = None,
    **trainer: Any,
) -> Numbers:
    """Train for ``steps`` optimizer steps and give the numbers of this rank."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    seed_everything(11, verbose=False)
    module = make_module()
    data = dataset if dataset is not None else tokens(num_samples)
    loader = DataLoader(data, batch_size=batch // replicas)
    recorder = Recorder()
    fit = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or "auto",
        precision=precision,  # type: ignore[arg-type]
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[recorder],
        num_sanity_val_steps=trainer.pop("num_sanity_val_steps", 0),
        **trainer,
    )
    fit.fit(module, loader, DataLoader(data, batch_size=batch // replicas))
    return recorder.numbers
