"""Optimizers, schedulers and optimizer hooks as users write them, each as a module that the Trainer fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler

from lightning_3d import BatchScaledLR
from tests.dist.lightning_modules import VOCAB, Tokens


class Lion(optim.Optimizer):
    """A user's optimizer that looks at one element at a time: the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                mean, (beta1, beta2) = state["mean"], group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                # tanh of a steep slope instead of the sign, whose jump at zero would turn rounding into a step
                p.add_(torch.tanh((mean * beta1 + p.grad * (1 - beta1)) * 1e3), alpha=-group["lr"])
                mean.mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class Normalized(Lion):
    """A user's optimizer that looks at whole parameters: the relative length of a step, read as a number (LARS)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and (p.grad.abs().max() > 0 and torch.isfinite(p.grad).all()):
                    trust = float(p.norm()) / (p.grad.norm().item() + 1e-6)
                    p.add_(p.grad, alpha=-group["lr"] * min(trust, 10.0))
        return loss


class Lookahead(optim.Optimizer):
    """An optimizer around another one: every ``k`` steps slow weights go half way, and fast ones restart."""

    def __init__(self, inner: optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            with torch.no_grad():
                for group, slows in zip(self.inner.param_groups, self.slow, strict=True):
                    for p, slow in zip(group["params"], slows, strict=True):
                        slow.add_(p.detach() - slow, alpha=self.alpha)
                        p.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class Optimized(Tokens):
    """``Tokens`` with what ``make`` returns from ``configure_optimizers``, and the rates that each step used."""

    def __init__(self, make: Callable[[Any], Any], vocab: int = VOCAB) -> None:
        super().__init__(num_blocks=2, vocab=vocab)
        self.make = make
        self.used: list[Any] = []

    def configure_optimizers(self) -> Any:
        return self.make(self)

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        keys = ("lr", "weight_decay", "momentum", "betas", "initial_lr")
        self.used.append([{key: group[key] for key in keys if key in group} for group in optimizer.param_groups])


def of_all(kind: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda module: kind(module.parameters(), **options)


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in module.named_parameters() if p.ndim == 2 and "blocks" in name]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": of_all(optim.AdamW, lr=0.02, weight_decay=0.1, foreach=False, fused=False),
    "adamw_foreach": of_all(optim.AdamW, lr=0.02, weight_decay=0.1, foreach=True),
    "adamw_fused": of_all(optim.AdamW, lr=0.02, weight_decay=0.1, fused=True, amsgrad=True),
    "adamw_tensor_lr": of_all(optim.AdamW, lr=torch.tensor(0.02, dtype=torch.float64), foreach=False),
    "adam": of_all(optim.Adam, lr=0.02, weight_decay=0.1, maximize=True),
    "sgd": of_all(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_fused": of_all(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "rmsprop": of_all(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": of_all(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "nadam": of_all(optim.NAdam, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": of_all(optim.RAdam, lr=0.02),
    "adadelta": of_all(optim.Adadelta, lr=1.0),
    "adamax": of_all(optim.Adamax, lr=0.02),
    "rprop": of_all(optim.Rprop, lr=0.001),
    "asgd": of_all(optim.ASGD, lr=0.1, t0=1.0),
    "lion": of_all(Lion),
    "normalized": of_all(Normalized),
    "lookahead": lambda module: Lookahead(optim.AdamW(module.parameters(), lr=0.02)),
    "lookahead_sgd": lambda module: Lookahead(optim.SGD(module.parameters(), lr=0.1, momentum=0.9)),
    "adafactor": of_all(optim.Adafactor, lr=0.02, weight_decay=0.1, d=1.0),
    "adafactor_foreach": of_all(optim.Adafactor, lr=0.02, foreach=True, maximize=True),
}


def _adamw(module: nn.Module, lr: float = 0.02) -> optim.Optimizer:
    return optim.AdamW(module.parameters(), lr=lr)


def _watching(module: nn.Module, **more: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **more}}


def _several(module: nn.Module) -> Any:
    optimizer = _adamw(module)
    return [optimizer], [
        {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 2, "name": "by_step"},
        {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "epoch", "name": "by_epoch"},
    ]


def _per_group(module: nn.Module) -> Any:
    optimizer = optim.AdamW([{"params": matrices(module)}, {"params": module.embed.parameters(), "lr": 0.1}], lr=0.02)
    return [optimizer], [lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5**epoch, lambda epoch: 1 / (1 + epoch)])]


def _stepping(kind: Any, **options: Any) -> Callable[[Any], Any]:
    def make(module: nn.Module) -> Any:
        optimizer = _adamw(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": kind(optimizer, **options), "interval": "step"}}

    return make


def _one_cycle(kind: Any, **options: Any) -> Callable[[Any], Any]:
    """Its length is read from the Trainer; it changes momentum or the first beta as well."""

    def make(module: Any) -> Any:
        optimizer = kind(module.parameters(), **options)
        steps = module.trainer.estimated_stepping_batches
        cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    return make


def _sequence(optimizer: optim.Optimizer) -> Any:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    down = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    return lr_scheduler.SequentialLR(optimizer, [warm, down], [2])


def _chained(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def _decay_by_name(module: nn.Module) -> Any:
    none = [p for name, p in module.named_parameters() if name.endswith("bias") or "norm" in name or p.ndim < 2]
    decay = [p for name, p in module.named_parameters() if not (name.endswith("bias") or "norm" in name or p.ndim < 2)]
    assert [tuple(p.shape) for p in decay] == [(12, 8), *[(16, 8), (8, 16)] * 2, (12, 8)]
    assert sum(p.numel() for p in none + decay) == sum(p.numel() for p in module.parameters())
    return optim.AdamW([{"params": decay, "weight_decay": 0.5}, {"params": none, "weight_decay": 0.0}], lr=0.02)


def _by_layer(module: Any) -> Any:
    """Deeper layers learn faster; what has no number belongs to the first or to the last."""
    groups = []
    for depth, layer in enumerate([module.embed, *module.blocks, nn.ModuleList([module.norm, module.head])]):
        groups.append({"params": list(layer.parameters()), "lr": 0.05 * 0.5 ** (3 - depth), "name": f"layer{depth}"})
    return optim.AdamW(groups, lr=0.05)


def _one_empty_group(module: Any) -> Any:
    return optim.AdamW([{"params": module.parameters()}, {"params": [], "lr": 0.5}], lr=0.02)


def _last_stage_only(module: Any) -> Any:
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith("head"))
    return optim.AdamW(filter(lambda p: p.requires_grad, module.parameters()), lr=0.05)


def _first_stage_only(module: Any) -> Any:
    return optim.SGD([{"params": module.embed.parameters(), "momentum": 0.9}], lr=0.1)


RETURNS: dict[str, Callable[[Any], Any]] = {
    "single": _adamw,
    "list": lambda module: [_adamw(module)],
    "tuple": lambda module: (_adamw(module),),
    "dict": lambda module: {"optimizer": _adamw(module)},
    "dict_with_scheduler": _stepping(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "bare_scheduler": lambda module: (lambda o: {"optimizer": o, "lr_scheduler": lr_scheduler.StepLR(o, 1, 0.5)})(
        _adamw(module)
    ),
    "lists": _several,
    "list_of_dicts": lambda module: [_stepping(lr_scheduler.StepLR, step_size=1, gamma=0.5)(module)],
    "none": lambda module: None,
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "plateau": partial(_watching, monitor="val_loss"),
    "plateau_step": partial(_watching, monitor="train_loss_step", interval="step", frequency=2),
    "plateau_train": partial(_watching, monitor="train_loss_epoch", strict=False, frequency=1),
    "one_cycle_momentum": _one_cycle(optim.SGD, lr=0.1, momentum=0.9),
    "one_cycle_betas": _one_cycle(optim.AdamW, lr=0.02),
    "lambda_per_group": _per_group,
    "sequential": _stepping(_sequence),
    "chained": _stepping(_chained),
    "restarts": _stepping(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2, T_mult=2),
    "cyclic": _stepping(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.05, step_size_up=2, cycle_momentum=True),
    "decay_by_name": _decay_by_name,
    "by_layer": _by_layer,
    "one_empty_group": _one_empty_group,
    "last_stage_only": _last_stage_only,
    "first_stage_only": _first_stage_only,
}


class StepsItsSchedule(Optimized):
    """``lr_scheduler_step`` by hand: a schedule that is told the number of the update."""

    def __init__(self) -> None:
        super().__init__(_stepping(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step / 2)


class StepsByHand(Optimized):
    """``optimizer_step`` with a warm-up, and every third step left out."""

    def __init__(self) -> None:
        super().__init__(of_all(optim.SGD, lr=0.1, momentum=0.9))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 4)
        if batch_idx % 3 == 2:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StepsDirectly(Optimized):
    """``optimizer_step`` that calls the optimizer itself."""

    def __init__(self) -> None:
        super().__init__(of_all(optim.AdamW, lr=0.02))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class ZeroesByHand(Optimized):
    """Gradients of every second step are kept for the next."""

    def __init__(self) -> None:
        super().__init__(of_all(optim.SGD, lr=0.05))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=batch_idx % 4 == 0)


class ClipsByHand(Optimized):
    """Clips by value in the first steps, by another norm later."""

    def __init__(self) -> None:
        super().__init__(of_all(optim.SGD, lr=0.1))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.global_step < 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


class Thaws(Optimized):
    """Trains the head; then thaws the blocks in the same groups; then adds the embedding as a group of its own."""

    def __init__(self, freeze_first: bool = True) -> None:
        super().__init__(self._make)
        self.freeze_first = freeze_first

    def _make(self, module: Any) -> Any:
        if self.freeze_first:
            for p in [*self.blocks.parameters(), *self.embed.parameters()]:
                p.requires_grad_(False)
        rest = [p for name, p in self.named_parameters() if not name.startswith("embed")]
        return optim.AdamW(rest, lr=0.02, weight_decay=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks.requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.embed.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": self.embed.parameters(), "lr": 0.05})

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.norm.requires_grad_(False)


class Refreezes(Optimized):
    """Freezes the first block after the first step, sets its rate to 0 before."""

    def __init__(self) -> None:
        super().__init__(of_all(optim.AdamW, lr=0.02, weight_decay=0.1))

    def on_train_batch_end(self, *args: Any) -> None:
        self.blocks[0].requires_grad_(self.global_step % 3 == 0)


class ScaledAdafactor(Optimized):
    """Adafactor, whose state is means of rows and columns, with rates that follow the batch; an odd vocabulary."""

    def __init__(self, global_batch_size: int | None) -> None:
        super().__init__(self._scaled, vocab=13)
        self.global_batch_size = global_batch_size

    def _scaled(self, module: Any) -> Any:
        optimizer = optim.Adafactor(module.parameters(), lr=0.02, weight_decay=0.1)
        return BatchScaledLR(
            optimizer,
            reference_batch_size=1,
            global_batch_size=self.global_batch_size,
            rule="sqrt",
            warmup_steps=4,
            decay="cosine",
            total_steps=8,
        ).configured()


HOOKS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "lr_scheduler_step": (StepsItsSchedule, {}),
    "optimizer_step": (StepsByHand, {}),
    "optimizer_step_direct": (StepsDirectly, {}),
    "optimizer_zero_grad": (ZeroesByHand, {}),
    "configure_gradient_clipping": (ClipsByHand, {}),
    "clip_by_value": (partial(Optimized, _adamw), {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"}),
    "clip_by_norm": (
        partial(Optimized, OPTIMIZERS["sgd"]),
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ),
    "thaws": (Thaws, {}),
    "adds_group": (partial(Thaws, False), {}),
    "refreezes": (Refreezes, {}),
}
