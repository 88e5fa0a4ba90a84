"""The cases: what is compared with what, and how much slower or faster it may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from benchmarks import by_hand, layers
from benchmarks.contest import Contender, Fit, Loop, Turns, alternate
from benchmarks.memory import Peak, measure
from benchmarks.workload import Shape, trainer_fit
from lightning_3d import ThreeDStrategy

OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    name: str
    """What the command line calls it; the letter is that of the group."""
    what: str
    """What is measured."""
    peer: str
    """What it is measured against."""
    target: float
    """The ratio of step times, ours to the peer's, that is to be met."""
    ranks: int
    rounds: int
    """Turns of each."""
    steps: int
    """Steps in a turn."""
    shape: Shape = field(default_factory=Shape)
    layout: dict[str, Any] = field(default_factory=dict)
    """Options of :class:`ThreeDStrategy`."""
    hidden: int = 0
    """Width of the MLPs, in the cases that measure layers alone."""

    @property
    def contenders(self) -> tuple[str, str]:
        """Ours and the peer."""
        return OURS, self.peer


def _sizes(case: Case) -> tuple[int, int]:
    """Replicas and tensor-parallel ranks."""
    tensor = case.layout.get("tensor_parallel", 1)
    return case.ranks // (tensor * case.layout.get("pipeline_parallel", 1)), tensor


def _fit_of(case: Case, name: str, max_steps: int = 1_000_000) -> Callable[..., None]:
    """``Trainer.fit`` of the contender."""
    replicas, _ = _sizes(case)
    batch = case.shape.batch // replicas
    if name == OURS:

        def strategy() -> ThreeDStrategy:
            return ThreeDStrategy(**case.layout)

        return trainer_fit(case.shape, strategy, devices=case.ranks, batch=batch, max_steps=max_steps)
    if name == "stock Trainer":
        return trainer_fit(case.shape, lambda: "auto", batch=batch, max_steps=max_steps)
    return trainer_fit(
        case.shape,
        lambda: DDPStrategy(process_group_backend="gloo"),
        devices=case.ranks,
        batch=batch,
        replica=int(os.environ["RANK"]),
        replicas=replicas,
        max_steps=max_steps,
        use_distributed_sampler=False,
    )


def _by_hand(case: Case) -> Callable[[], float | None]:
    replicas, tensor = _sizes(case)
    if "pipeline_parallel" not in case.layout:
        return by_hand.tensor_parallel(case.shape)
    return by_hand.pipeline(case.shape, case.layout["num_micro_batches"], replicas, tensor)


def _is_fit(name: str) -> bool:
    return name in (OURS, "stock Trainer", "Lightning DDP")


def race(rank: int, world_size: int, case: Case) -> list[Turns]:
    """On every rank: time ours and the peer in turns."""
    _join()
    if case.hidden:
        return layers.race(tuple(_LAYER_NAMES[name] for name in case.contenders), case.hidden, case.rounds, case.steps)
    contenders: list[Contender] = [
        Fit(_fit_of(case, name)) if _is_fit(name) else Loop(_by_hand(case)) for name in case.contenders
    ]
    return alternate(contenders, case.rounds, case.steps)


def memory(rank: int, world_size: int, case: Case, name: str) -> int:
    """On every rank: the peak memory of one contender."""
    _join()
    if _is_fit(name) and not case.hidden:
        return measure(lambda peak: _fit_of(case, name, max_steps=1 + _WATCHED)(_Watch(peak)))

    def run(peak: Peak) -> None:
        if case.hidden:
            loop = layers.loop(layers.CONTENDERS[_LAYER_NAMES[name]](case.hidden), case.hidden)
        else:
            loop = Loop(_by_hand(case))
        loop.run(1)
        peak.watch()
        loop.run(_WATCHED)
        peak.done()

    return measure(run)


_WATCHED = 2  # steps, after one that sets up what the others find


class _Watch(Callback):
    def __init__(self, peak: Peak) -> None:
        self._peak = peak

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._peak.watch()

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == _WATCHED:
            self._peak.done()


_LAYER_NAMES = {OURS: "ours", "bare tensors": "bare", "parallelize_module": "dtensor"}


def _join() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")


def _layers(hidden: int, peer: str, target: float) -> Case:
    letter = {"bare tensors": "bare", "parallelize_module": "dtensor"}[peer]
    steps = max(4, 800 // hidden)
    return Case(
        name=f"b-{hidden}-{letter}",
        what=f"column/row layers, 4 MLPs of width {hidden}, tp2",
        peer=peer,
        target=target,
        ranks=2,
        rounds=15,
        steps=steps,
        hidden=hidden,
    )


_PIPELINE = {"schedule": "1f1b", "pipeline_split": "uniform"}

CASES: tuple[Case, ...] = (
    Case(
        name="a", what="one process, all sizes 1", peer="stock Trainer", target=1.05, ranks=1, rounds=15, steps=8,
        shape=Shape(length=64, batch=8),
    ),
    *(_layers(hidden, "bare tensors", 1.10) for hidden in (32, 128, 512)),
    *(_layers(hidden, "parallelize_module", 1.00) for hidden in (32, 128, 512)),
    Case(
        name="c-pp2", what="pp2, 1f1b, 4 micro-batches", peer="pipelining by hand", target=1.00, ranks=2, rounds=15,
        steps=4, layout=dict(pipeline_parallel=2, num_micro_batches=4, **_PIPELINE),
    ),
    Case(
        name="c-pp4", what="pp4, 1f1b, 8 micro-batches", peer="pipelining by hand", target=1.00, ranks=4, rounds=15,
        steps=4, layout=dict(pipeline_parallel=4, num_micro_batches=8, **_PIPELINE),
    ),
    Case(
        name="d-222", what="pp2 dp2 tp2, ZeRO 1, 4 micro-batches", peer="3D by hand", target=0.75, ranks=8, rounds=12,
        steps=3, layout=dict(pipeline_parallel=2, tensor_parallel=2, num_micro_batches=4, zero_stage=1, **_PIPELINE),
    ),
    Case(
        name="d-tp2", what="tp2 alone", peer="parallelize_module", target=0.75, ranks=2, rounds=15, steps=5,
        layout=dict(tensor_parallel=2),
    ),
    Case(
        name="e", what="dp2, ZeRO 0", peer="Lightning DDP", target=1.05, ranks=2, rounds=15, steps=5,
        layout=dict(zero_stage=0),
    ),
)  # fmt: skip
