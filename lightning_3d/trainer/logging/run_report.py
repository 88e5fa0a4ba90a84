"""What a run was: layout, bubble, speed and memory of every rank, and what the model learned, as tables at its end."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from typing_extensions import override

from lightning_3d.events import DeviceClock, EventSource, Phase, StepEvents
from lightning_3d.monitor.own_time import pipeline_seconds
from lightning_3d.pipeline.micro_batches import batch_size_of, tokens_of

_ROWS = 64
"""Ranks that the table of ranks shows at most."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one rank knows about its own run."""

    rank: int = 0
    coordinates: dict[str, int]
    """Position on every axis of the mesh; empty without one."""
    peak_memory: int
    """Bytes: of the process (resident) on CPU, of the allocator on CUDA."""
    pipeline_s: float = 0.0
    """Mean per step from its first action of the pipeline to its last; 0 without a pipeline."""
    busy_s: float = 0.0
    """Of that, without waiting for other stages."""


@dataclass
class Totals:
    """Sums over the training steps of a rank, validation and the first steps left out, which settle shapes and memory.

    Listens to an :class:`~lightning_3d.events.EventSource`.
    """

    skip: int
    """Steps at the start that are not counted."""
    steps: int = 0
    seconds: float = 0.0
    pipeline_s: float = 0.0
    busy_s: float = 0.0
    samples: int = 0
    tokens: int = 0

    def add(self, step: StepEvents) -> None:
        """Count a step."""
        if self.skip > 0:
            self.skip -= 1
            return
        pipeline, busy = pipeline_seconds(step)
        self.steps += 1
        self.seconds += step.seconds - sum(e.seconds for e in step.events if e.phase is Phase.EVALUATION)
        self.pipeline_s += pipeline
        self.busy_s += busy
        self.samples += step.samples
        self.tokens += step.tokens

    @property
    def step_time(self) -> float | None:
        """Mean seconds per step; ``None`` when too few steps ran to measure."""
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
        self.skip_steps = skip_steps
        self.totals = Totals(skip_steps)
        self._own: EventSource | None = None
        """Under a strategy that has no source of timings: one that this callback tells of steps."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen."""
        self.totals = Totals(self.skip_steps)
        if not isinstance(getattr(trainer.strategy, "events", None), EventSource):
            on_gpu = trainer.strategy.root_device.type == "cuda"
            self._own = EventSource(DeviceClock() if on_gpu else None)
        self._events(trainer).listen(self.totals.add)

    def _events(self, trainer: Trainer) -> EventSource:
        events = self._own or trainer.strategy.events  # type: ignore[attr-defined]
        assert isinstance(events, EventSource)
        return events

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Under another strategy: a step begins."""
        if self._own is not None:
            self._own.begin_step(trainer.global_step)
            self._own.count(1, batch_size_of(batch), tokens_of(batch))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Under another strategy: what follows is no training."""
        if self._own is not None:
            self._own.begin_evaluation()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Under another strategy: training goes on."""
        if self._own is not None:
            self._own.end_evaluation()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Under another strategy: the last step is over."""
        if self._own is not None:
            self._own.flush()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Listen no more."""
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._own is not None or isinstance(getattr(trainer.strategy, "events", None), EventSource):
            self._events(trainer).unlisten(self.totals.add)
        self._own = None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather what the ranks know, and print it on rank 0; every rank must get here."""
        self._stop(trainer)
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
            pipeline_s=self.totals.pipeline_s / max(1, self.totals.steps),
            busy_s=self.totals.busy_s / max(1, self.totals.steps),
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
        measured = bubble_of_stages(facts)
        if measured:
            shares = ", ".join(f"stage {stage} {share:.1%}" for stage, share in measured.items())
            mean = sum(measured.values()) / len(measured)
            table.add_row("bubble, measured", f"{mean:.1%} of the pipeline's time; {shares}")
        totals = self.totals
        if (seconds := totals.step_time) is not None:
            table.add_row("step", f"{seconds:.3f} s, mean of {totals.steps} steps")
            what, count = ("tokens", totals.tokens) if totals.tokens else ("samples", totals.samples)
            table.add_row("speed", f"{count / totals.seconds * _num_replicas(trainer):,.0f} {what}/s")
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
    """A row for every rank; of thousands, for those that are fullest."""
    shown = facts
    title = "Ranks"
    if len(facts) > _ROWS:
        fullest = sorted(facts, key=lambda fact: fact.peak_memory, reverse=True)[:_ROWS]
        shown = sorted(fullest, key=lambda fact: fact.rank)
        title = f"Ranks: the {_ROWS} fullest of {len(facts):,}"
    table = Table(title=title, title_justify="left")
    axes = list(facts[0].coordinates)
    bubbles = _bubbles(facts)
    for name in ("rank", *axes, "bubble", "peak memory"):
        table.add_column(name, justify="right")
    for fact in shown:
        bubble = f"{bubbles[fact.rank]:.1%}" if fact.rank in bubbles else ""
        place = [str(fact.coordinates[axis]) for axis in axes]
        table.add_row(str(fact.rank), *place, bubble, _megabytes(fact.peak_memory))
    return table


def _bubbles(facts: list[RankFacts]) -> dict[int, float]:
    """By rank, the share of its pipeline's time, that of the stage that takes longest, in which it did not work."""
    longest: dict[tuple[int, int], float] = {}
    is_piped = len({fact.coordinates.get("pp") for fact in facts}) > 1
    piped = [fact for fact in facts if fact.pipeline_s and is_piped]
    for fact in piped:
        column = fact.coordinates["dp"], fact.coordinates["tp"]
        longest[column] = max(longest.get(column, 0.0), fact.pipeline_s)
    return {f.rank: 1 - f.busy_s / longest[f.coordinates["dp"], f.coordinates["tp"]] for f in piped}


def bubble_of_stages(facts: list[RankFacts]) -> dict[int, float]:
    """The measured bubble of every stage, mean over its ranks; empty without a pipeline."""
    shares: dict[int, list[float]] = {}
    bubbles = _bubbles(facts)
    for fact in facts:
        if fact.rank in bubbles:
            shares.setdefault(fact.coordinates["pp"], []).append(bubbles[fact.rank])
    return {stage: sum(values) / len(values) for stage, values in sorted(shares.items())}


def _num_replicas(trainer: Trainer) -> int:
    options = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(options["num_replicas"]) if options else 1


def _peak_memory() -> int:
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated() > 0:
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
