"""Train a module for a few steps and write down all its numbers: under the stock Trainer, or under the 3D strategy."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint import full_state_dict
from lightning_3d.collectives import all_gather
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.gradients import sharded_axes
from lightning_3d.sharding.reducer import local_of

GLOBAL_BATCH = 12
STEPS = 3
_MOMENTS: dict[type[Optimizer], tuple[str, ...]] = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.SGD: ()}


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
    drift: dict[str, float] = field(default_factory=dict)
    """By name: by how much ranks that hold the same parameter differ in it; no name where they agree to the bit."""
    cut: dict[str, float] = field(default_factory=dict)
    """By axis: the share of this rank's parameters that are cut over it, by size."""

    def flat(self) -> dict[str, dict[str, Tensor]]:
        """Kind of number -> what it is exactly -> value."""
        return {
            "logged": {
                f"{key} of batch {i}": _number(v) for i, row in enumerate(self.logged) for key, v in row.items()
            },
            "norm": {f"norm of step {i}": _number(norm) for i, norm in enumerate(self.norms)},
            "gradient": {f"{name} of step {i}": g for i, row in enumerate(self.gradients) for name, g in row.items()},
            "weight": self.weights,
            "optimizer": self.optimizer,
            "rate": {f"rate of batch {i}": _number(rate) for i, rate in enumerate(self.rates)},
            "validation": {key: _number(value) for key, value in self.validation.items()},
        }


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Difference:
    """The largest difference among numbers of one kind, relative to 1 + their size, and where it is."""

    value: float
    where: str


def compare(expected: Numbers, got: Numbers) -> dict[str, Difference]:
    """By kind of number, where two runs differ most. Other names or another count of anything count as infinite."""
    worst: dict[str, Difference] = {}
    for kind, wanted in expected.flat().items():
        found = got.flat()[kind]
        worst[kind] = Difference(0.0, "")
        if wanted.keys() != found.keys():
            worst[kind] = Difference(math.inf, f"only in one of them: {sorted(wanted.keys() ^ found.keys())}")
            continue
        for name, value in wanted.items():
            excess = ((value - found[name]).abs() / (1 + value.abs())).double()
            size = float(excess.nan_to_num(nan=math.inf).max()) if excess.numel() else 0.0
            if size > worst[kind].value:
                worst[kind] = Difference(size, name)
    return worst


def compare_rounded(expected: Numbers, got: Numbers) -> dict[str, Difference]:
    """The same for types that round: relative, tensor by tensor, and without what amplifies rounding.

    Adam divides a gradient by its own size, so from the first step on weights differ by more than a rounding; left are
    losses, norms, and the gradients of the first step, each relative to its norm (and a hundredth of the whole norm).
    """
    differences: dict[str, Difference] = {}
    for kind in ("logged", "norm", "validation"):
        wanted, found = expected.flat()[kind], got.flat()[kind]
        assert wanted.keys() == found.keys()
        sizes = {name: float((value - found[name]).abs() / value.abs()) for name, value in wanted.items()}
        differences[kind] = _largest(sizes)
    wanted, found = expected.gradients[0], got.gradients[0]
    assert wanted.keys() == found.keys()
    floor = 0.01 * expected.norms[0]
    sizes = {
        name: float((value.double() - found[name].double()).norm() / (value.double().norm() + floor))
        for name, value in wanted.items()
    }
    return {**differences, "gradient": _largest(sizes)}


def _largest(sizes: Mapping[str, float]) -> Difference:
    where = max(sizes, key=lambda name: math.inf if math.isnan(sizes[name]) else sizes[name], default="")
    size = sizes.get(where, 0.0)
    return Difference(math.inf if math.isnan(size) else size, where)


def assert_parity(differences: Mapping[str, Difference], got: Numbers, tolerance: float, steps: int = STEPS) -> None:
    """Assert that a run agrees with another, and that ranks which hold the same parameter hold the same bits."""
    assert got.drift == {}, f"ranks that hold the same parameters differ in them: {got.drift}"
    assert len(got.norms) == steps and got.weights
    wrong = [f"{kind}: {d.value:.1e} ({d.where})" for kind, d in differences.items() if not d.value <= tolerance]
    assert not wrong, f"more than {tolerance:.0e} apart: " + "; ".join(wrong)


class Recorder(Callback):
    """Writes down gradients before every optimizer step, and what was logged after every batch."""

    def __init__(self) -> None:
        self.numbers = Numbers()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = _whole(trainer, pl_module, lambda p: _or_zeros(p.grad, p))
        self.numbers.gradients.append(gradients)
        if isinstance(trainer.strategy, ThreeDStrategy):
            norm = trainer.strategy.gradient_norm()
        else:
            norm = torch.linalg.vector_norm(torch.stack([g.double().norm() for g in gradients.values()]))
        self.numbers.norms.append(float(norm))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        logged = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("train")}
        self.numbers.logged.append(logged)
        self.numbers.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("val")}
        self.numbers.validation.update(metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.numbers.weights = _whole(trainer, pl_module, lambda p: p)
        optimizer = trainer.optimizers[0]
        state = optimizer.state
        for key in _MOMENTS[type(optimizer)]:
            moments = _whole(trainer, pl_module, lambda p, key=key: _or_zeros(state.get(p, {}).get(key), p))
            self.numbers.optimizer.update({f"{name}.{key}": value for name, value in moments.items()})
        if isinstance(trainer.strategy, ThreeDStrategy):
            self.numbers.drift = _drift(trainer.strategy, pl_module)
            self.numbers.cut = _cut_shares(pl_module)


def _cut_shares(module: LightningModule) -> dict[str, float]:
    held = [parameter for parameter in module.parameters() if not is_placeholder(parameter)]
    total = sum(parameter.numel() for parameter in held)
    return {axis: sum(p.numel() for p in held if axis in sharded_axes(p)) / total for axis in ("dp", "tp")}


def _or_zeros(value: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if value is None else value


def _whole(trainer: Trainer, module: LightningModule, pick: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """A tensor for every parameter, whole, on rank 0."""
    strategy = trainer.strategy
    if not isinstance(strategy, ThreeDStrategy):
        return {name: pick(p).detach().clone() for name, p in module.named_parameters()}
    state = strategy._model_state()
    chosen = {name: p if is_placeholder(p) else pick(p) for name, p in module.named_parameters()}
    names = tuple(key for key in state.keys if key in chosen and key not in state.ties)
    part = dataclasses.replace(state, parameters=chosen, keys=names, ties={}, buffers={})
    return {name: value.clone() for name, value in full_state_dict(part, strategy.topology).items()}


def _drift(strategy: ThreeDStrategy, module: LightningModule) -> dict[str, float]:
    """Compare the parameters that several ranks of an axis hold whole, tied copies on other stages included."""
    mesh, found = strategy.topology, {}
    held = {name: p for name, p in module.named_parameters() if not is_placeholder(p)}
    for axis in (mesh.dp, mesh.tp):
        for name, parameter in held.items():
            if axis.size > 1 and axis.name not in sharded_axes(parameter):
                local = local_of(parameter).detach()
                copies = all_gather(local.reshape(1, -1), axis, 0)
                if not torch.equal(copies, copies[:1].expand_as(copies)):
                    found[f"{name} over {axis.name}"] = float((copies - copies[:1]).abs().max())
    for tie in strategy._assembled.sharding.ties:
        copies = all_gather(local_of(tie.param).detach().reshape(1, -1), tie.axis, 0)
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            found[f"{tie.name} over stages"] = float((copies - copies[:1]).abs().max())
    return found


def run(
    make_module: Callable[[], LightningModule],
    data: Sequence[Any],
    replicas: int = 1,
    strategy: ThreeDStrategy | None = None,
    devices: int = 1,
    precision: str | None = "64-true",
    callbacks: Sequence[Callback] = (),
    steps: int = STEPS,
    global_batch: int = GLOBAL_BATCH,
    **trainer: Any,
) -> Numbers:
    """Train for a few optimizer steps, and give the numbers of this rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(11, verbose=False)
    module = make_module()
    batch = global_batch // replicas
    recorder = Recorder()
    options: Mapping[str, Any] = {"num_sanity_val_steps": 0, **trainer}
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
        callbacks=[recorder, *callbacks],
        **options,
    )
    fit.fit(module, DataLoader(data, batch_size=batch), DataLoader(data, batch_size=batch))
    return recorder.numbers
