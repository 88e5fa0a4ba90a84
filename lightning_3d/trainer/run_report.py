"""What a run was: layout, waiting, speed and memory of every rank, and what the model learned, as tables at its end."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank knows about its own run."""

    rank: int = 0
    coordinates: dict[str, int]
    """Position on every axis of the mesh; empty without one."""
    peak_memory: int
    """Bytes: of the process (resident) on CPU, of the allocator on CUDA."""
    waiting: float | None
    """Mean share of a step spent waiting for other stages; None without a pipeline."""


class Stopwatch:
    """Time spent on training steps, without validation, set-up and the first steps, which settle shapes and memory.

    The device is synchronised only where a measured stretch begins or ends, never between steps.

    Args:
        skip: Number of steps that are not measured.
    """

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.steps = 0
        self.seconds = 0.0
        self._seen = 0
        self._started: float | None = None
        self._pending = 0

    def begin_step(self) -> None:
        """A training step begins."""
        if self._started is None and self._seen >= self.skip:
            self._started = _now()

    def end_step(self) -> None:
        """A training step has ended."""
        self._seen += 1
        if self._started is not None:
            self._pending += 1

    def pause(self) -> None:
        """Something else than training begins; the next step starts the clock again."""
        if self._started is None:
            return
        self.seconds += _now() - self._started
        self.steps += self._pending
        self._started, self._pending = None, 0

    @property
    def step_time(self) -> float | None:
        """Mean seconds per step; None when too few steps ran to measure."""
        return self.seconds / self.steps if self.steps else None


class RunReport(Callback):
    """Prints, at the end of ``fit`` and on rank 0: layout, blocks per stage, bubble, speed, memory per rank, losses.

    Args:
        prompt: If given, and the model has ``generate(prompt, length) -> str`` and saves its hyperparameters, the
            weights of all ranks are put into one fresh model in one process, which continues this text.
        length: How much it writes.
        skip_steps: Steps at the start that are not timed.
    """

    def __init__(self, prompt: str | None = None, length: int = 400, skip_steps: int = 5) -> None:
        self.prompt = prompt
        self.length = length
        self.watch = Stopwatch(skip_steps)
        self.tokens_per_step = 0
        self._waiting: list[float] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock and count the tokens of all replicas."""
        self.tokens_per_step = _count(batch) * _num_replicas(trainer)
        self.watch.begin_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the step and its waiting."""
        self.watch.end_step()
        idle = getattr(trainer.strategy, "idle_fraction", None)
        if self.watch.steps + self.watch._pending > 0 and idle is not None:
            self._waiting.append(idle)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.watch.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self.watch.pause()

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather what the ranks know, and print it on rank 0; every rank must get here."""
        facts = self._gather(trainer)
        state = self._whole_state(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(self._run_table(trainer, facts))
        if len(facts) > 1:
            console.print(_rank_table(facts))
        if state is not None:
            self._print_sample(console, pl_module, state)

    def _gather(self, trainer: Trainer) -> list[RankFacts]:
        coordinates = getattr(getattr(trainer.strategy, "topology", None), "coordinates", {})
        mine = RankFacts(
            rank=trainer.global_rank,
            coordinates=dict(coordinates),
            peak_memory=_peak_memory(),
            waiting=sum(self._waiting) / len(self._waiting) if self._waiting else None,
        )
        if trainer.world_size == 1 or not dist.is_initialized():
            return [replace(mine, rank=0)]
        facts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(facts, mine)
        return facts

    def _whole_state(self, trainer: Trainer, module: LightningModule) -> dict[str, Tensor] | None:
        if self.prompt is None or not hasattr(module, "generate"):
            return None
        whole = getattr(trainer.strategy, "full_state_dict", trainer.strategy.lightning_module_state_dict)
        return whole()

    def _run_table(self, trainer: Trainer, facts: list[RankFacts]) -> Table:
        table = Table(title="Run", show_header=False, title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        layout = getattr(trainer.strategy, "layout", None)
        if layout is None:
            table.add_row("layout", f"{type(trainer.strategy).__name__}, {trainer.world_size} ranks")
        else:
            head, *stages = str(layout).splitlines()
            table.add_row("layout", head)
            for stage in stages:
                name, _, held = stage.strip().partition(": ")
                table.add_row(name, held)
            if layout.bubble is not None:
                table.add_row("bubble, predicted", f"{layout.bubble:.1%} of a step")
        measured = _waiting_by_stage(facts)
        if measured:
            shares = ", ".join(f"stage {stage} {share:.1%}" for stage, share in measured.items())
            table.add_row("bubble, measured", f"{shares} of a step spent waiting for other stages")
        if (seconds := self.watch.step_time) is not None:
            table.add_row("step", f"{seconds:.3f} s, mean of {self.watch.steps} steps")
            table.add_row("speed", f"{self.tokens_per_step / seconds:,.0f} tokens/s")
        peak = max(fact.peak_memory for fact in facts)
        table.add_row("peak memory", f"{_megabytes(peak)} on the fullest rank")
        for name, value in trainer.callback_metrics.items():
            if name.startswith("val"):
                table.add_row(name, f"{float(value):.3f}")
        entropy = getattr(getattr(trainer, "datamodule", None), "unigram_entropy", None)
        if entropy is not None:
            table.add_row("unigram entropy", f"{entropy:.3f} nats per byte of the text: the loss of knowing no context")
        return table

    def _print_sample(self, console: Console, module: LightningModule, state: dict[str, Tensor]) -> None:
        # names with an underscore are notes that LightningCLI leaves there
        model: Any = type(module)(**{name: value for name, value in module.hparams.items() if not name.startswith("_")})
        model.load_state_dict(state)
        text = model.generate(self.prompt, self.length)
        console.print(Text("Sample, generated by one process from the weights of all ranks:", style="italic"))
        console.print(Text(text))


def _rank_table(facts: list[RankFacts]) -> Table:
    table = Table(title="Ranks", title_justify="left")
    axes = list(facts[0].coordinates)
    for name in ("rank", *axes, "waiting", "peak memory"):
        table.add_column(name, justify="right")
    for fact in facts:
        waiting = "" if fact.waiting is None else f"{fact.waiting:.1%}"
        place = [str(fact.coordinates[axis]) for axis in axes]
        table.add_row(str(fact.rank), *place, waiting, _megabytes(fact.peak_memory))
    return table


def _waiting_by_stage(facts: list[RankFacts]) -> dict[int, float]:
    shares: dict[int, list[float]] = {}
    for fact in facts:
        if fact.waiting is not None and "pp" in fact.coordinates:
            shares.setdefault(fact.coordinates["pp"], []).append(fact.waiting)
    return {stage: sum(values) / len(values) for stage, values in sorted(shares.items())} if len(shares) > 1 else {}


def _num_replicas(trainer: Trainer) -> int:
    options = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(options["num_replicas"]) if options else 1


def _count(batch: Any) -> int:
    return next((leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), 0)


def _peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
