"""Which sizes ``"auto"`` stands for: the simplest layout that fits and is as fast as predictions can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import lightning.pytorch as pl

from lightning_3d.config import ParallelConfig, Sizes, micro_batch_count
from lightning_3d.errors import ConfigError, ThreeDError
from lightning_3d.pipeline.observe import call_order
from lightning_3d.planner import Cluster, Layout, ModelShape, StageMemory, estimate
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.legality import divisors
from lightning_3d.planner.memory import GB, stage_memory
from lightning_3d.planner.reading import shape_of_module
from lightning_3d.planner.search import RESERVE
from lightning_3d.planner.split import balanced_split
from lightning_3d.trainer.setup.holdings import fullest_rank
from lightning_3d.trainer.setup.preflight import check_layers

SAME = 0.10
"""Difference of step times that a prediction does not tell: about its median error (docs/planner.md)."""
SAMPLES = 8
"""Samples per device and step where the global batch is not known."""
TOKENS = 4096
"""Tokens of a sample at most where the data do not say how many: models have room for far more than they are given."""
ROOM = 0.7
"""Part of the memory that weights, gradients and optimizer may take where activations are not known."""
_MISREAD = 0.03
"""Part of the parameters that a shape may miss and still stand for the module."""
_NAMED = 3
"""Layouts that a reason names besides the one taken."""


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What the choice depends on besides the module and the options."""

    cluster: Cluster
    """Devices and nodes, with the memory there is."""
    is_known: bool = True
    """Whether speeds of this type of device are known; never on CPUs."""
    precision: str = "32-true"
    """Precision of the Trainer."""
    accumulated: int = 1
    """Batches per optimizer step."""
    trains: bool = True
    """Whether gradients and optimizer states are needed."""
    seq_len: int | None = None
    """Tokens of a sample, as far as the data say so."""


@dataclass(frozen=True)
class Choice:
    """Sizes, and why."""

    sizes: Sizes
    reason: str
    """For rank 0 to print."""
    warning: str = ""
    """What may go wrong."""


@dataclass(frozen=True)
class _Option:
    """One layout, and what it costs."""

    sizes: Sizes
    needed_gb: float
    """Of the fullest rank."""
    states_gb: float
    """The part of it that is known exactly: weights, gradients and optimizer."""
    seconds: float | None = None
    """Per sample, where it can be predicted."""

    def __str__(self) -> str:
        return _name(self.sizes)


def has_choice(config: ParallelConfig, world: int) -> bool:
    """Whether a size is ``"auto"`` that does not simply follow from the others."""
    return world > 1 and "auto" in (config.tensor_parallel, config.pipeline_parallel)


def possible(config: ParallelConfig, world: int, ranks_per_node: int) -> list[Sizes]:
    """All sizes that agree with those that are given, simplest first: fewest ranks per replica, then fewest stages."""
    widest = world if config.allow_tp_across_nodes else ranks_per_node
    tensor = divisors(widest) if config.tensor_parallel == "auto" else [config.tensor_parallel]
    found = []
    for tp in tensor:
        stages = divisors(world // tp) if config.pipeline_parallel == "auto" else [config.pipeline_parallel]
        for pp in stages:
            if world % (tp * pp) or config.data_parallel not in ("auto", world // (tp * pp)):
                continue
            try:
                fixed = config.replace(tensor_parallel=tp, pipeline_parallel=pp)
                found.append(fixed.sizes(world, ranks_per_node))
            except ConfigError:
                continue
    return sorted(found, key=lambda sizes: (sizes.tp * sizes.pp, sizes.pp))


def choose(module: pl.LightningModule, config: ParallelConfig, given: Circumstances) -> Choice:
    """Choose the sizes that are ``"auto"``.

    Memory decides first. Of plain transformers the planner predicts memory with activations and, on GPUs that it
    knows, the time of a step; then the simplest layout within ``SAME`` of the fastest is taken. Of other modules
    weights, gradients and Adam's states are counted, and the first layout is taken where they leave room: replicas,
    then ranks of a node that share layers, then stages.

    Args:
        module: The whole module, with all layers; parameters may have no memory. It is not changed.
        config: The options; sizes that are given stay.
        given: Devices and settings of the Trainer.

    Raises:
        ConfigError: If weights, gradients and optimizer states alone fit nowhere; says what comes nearest.
        PlanError, StageError: If the module can be cut in no way that the given sizes allow.
    """
    return _Search(module, config, given).run()


class _Search:
    def __init__(self, module: pl.LightningModule, config: ParallelConfig, given: Circumstances) -> None:
        self.module, self.config, self.given = module, config, given
        self.usable = given.cluster.gpu_memory_gb * (1 - RESERVE)
        self.refused: dict[Sizes, ThreeDError] = {}
        """What cannot be laid out, simplest first."""
        self.too_large: list[_Option] = []

    def run(self) -> Choice:
        cluster = self.given.cluster
        sizes = possible(self.config, cluster.world_size, cluster.ranks_per_node)
        if self.shape is not None:
            most = self.shape.layers // self.config.virtual_stages
            sizes = [one for one in sizes if one.pp <= most] or sizes
        fitting = self._fitting(sizes)
        others = list(fitting) if self.is_timed else []
        for option in _in_order(others) if self.is_timed else fitting:
            if self._is_legal(option.sizes):
                return Choice(option.sizes, self._reason(option, others))
        return self._nearest()

    @cached_property
    def shape(self) -> ModelShape | None:
        """The module as the planner sees it; ``None`` where that would be another module."""
        if not self.given.trains:
            return None
        try:
            shape = shape_of_module(self.module)
        except ConfigError:
            try:
                shape = shape_of_module(self.module, self.given.seq_len)
            except ConfigError:
                return None
        held = sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)
        if abs(shape.parameters - held) > _MISREAD * held:
            return None
        return dataclasses.replace(shape, seq_len=self.given.seq_len or min(shape.seq_len, TOKENS))

    @property
    def is_timed(self) -> bool:
        return self.given.is_known and self.shape is not None

    @property
    def limit(self) -> float:
        return self.usable if self.shape is not None else ROOM * self.usable

    @cached_property
    def order(self) -> Sequence[str]:
        """Names of modules in the order of their calls, which every layout with stages asks for; empty if unknown."""
        return call_order(self.module) or ()

    def _order_for(self, sizes: Sizes) -> Sequence[str]:
        return self.order if sizes.pp > 1 else ()

    def _fitting(self, sizes: list[Sizes]) -> Iterator[_Option]:
        """One after another: without predicted times the first is taken, and the others need not be looked at."""
        for one in sizes:
            option = self._option(one)
            if option is not None and option.needed_gb <= self.limit:
                yield option
            elif option is not None:
                self.too_large.append(option)

    def _option(self, sizes: Sizes) -> _Option | None:
        try:
            return self._planned(self.shape, sizes) if self.shape is not None else self._counted(sizes)
        except ThreeDError as error:
            if self._is_legal(sizes):
                self.refused[sizes] = error
            return None

    def _planned(self, shape: ModelShape, sizes: Sizes) -> _Option:
        layout = self._layout(shape, sizes)
        fullest = max(stage_memory(shape, layout), key=lambda stage: stage.total)
        seconds = None
        if self.given.is_known:
            seconds = estimate(shape, self.given.cluster, layout).step_time_s / layout.samples
        return self._weighed(sizes, fullest, seconds)

    def _counted(self, sizes: Sizes) -> _Option:
        order = self._order_for(sizes)
        fullest = fullest_rank(self.module, self.config, sizes, self.given.precision, self.given.trains, order)
        return self._weighed(sizes, fullest)

    def _weighed(self, sizes: Sizes, memory: StageMemory, seconds: float | None = None) -> _Option:
        states = StageMemory(
            parameters=memory.parameters, gradients=memory.gradients, optimizer=memory.optimizer,
            activations=0.0, logits=0.0, buffers=0.0,
        )  # fmt: skip
        is_cpu = self.given.cluster.device.generation == CPU
        needed, exact = ((one.total if is_cpu else one.on_device) / GB for one in (memory, states))
        return _Option(sizes, needed, exact, seconds)

    def _layout(self, shape: ModelShape, sizes: Sizes) -> Layout:
        """What the engine will run."""
        config, batch = self.config, self.config.global_batch_size
        if batch is None:
            size = config.micro_batch_size or 1
            count = config.num_micro_batches or max(1, SAMPLES * sizes.tp * sizes.pp // size)
        else:
            replica = max(1, batch // sizes.dp // self.given.accumulated)
            count = micro_batch_count(config, sizes.pp, replica)
            size = -(-replica // count)
            count = -(-replica // size) * self.given.accumulated
        split = config.pipeline_split
        chunks = balanced_split(shape, sizes.pp, config.virtual_stages) if isinstance(split, str) else tuple(split)
        return planner_layout(config, sizes, self.given.precision, size, size * count * sizes.dp, chunks)

    def _is_legal(self, sizes: Sizes) -> bool:
        if sizes.tp == sizes.pp == 1:
            return True
        try:
            check_layers(self.module, self.config, sizes, self._order_for(sizes))
        except ThreeDError as error:
            self.refused[sizes] = error
            return False
        return True

    def _nearest(self) -> Choice:
        """Where nothing fits: what lacks least, if its exact part fits.

        Raises:
            ConfigError: If not even that does.
        """
        known = "weights, gradients and Adam's states" if self.given.trains else "weights"
        for option in sorted(self.too_large, key=lambda one: (one.states_gb > self.usable, one.needed_gb)):
            if not self._is_legal(option.sizes):
                continue
            if option.states_gb <= self.usable or not self.given.trains:
                return Choice(
                    option.sizes,
                    f"{self._head(option.sizes)}, the layout of least memory.",
                    f"No layout is sure to fit: {option} needs {option.states_gb:.3g} GB for {known} alone, and about"
                    f" {option.needed_gb:.3g} GB in all, of {self.usable:.3g} GB usable. If it runs out of memory, use"
                    " activation_checkpointing='full', a smaller micro_batch_size, or more devices.",
                )
            count = sum(parameter.numel() for parameter in self.module.parameters())
            raise ConfigError(
                f"{type(self.module).__name__} ({count:,} parameters) fits on no layout of {self._devices()}."
                f" {option} comes nearest: {known} alone need {option.states_gb:.3g} GB per device of"
                f" {self.usable:.3g} GB usable{self._refusals()}. Use more or larger devices, zero_stage=3, or"
                " parameters of fewer bits. Give tensor_parallel and pipeline_parallel if your optimizer needs less"
                " than Adam: sizes that are given are not compared with the memory."
            )
        raise min(self.refused.items(), key=lambda entry: (entry[0].tp * entry[0].pp, entry[0].pp))[1]

    def _head(self, sizes: Sizes) -> str:
        given = [
            name
            for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")
            if getattr(self.config, name) != "auto"
        ]
        kept = f" ({', '.join(given)} given)" if given else ""
        return f"Sizes chosen for {self._devices()}: {_name(sizes)}{kept}"

    def _reason(self, option: _Option, others: list[_Option]) -> str:
        parts = "all" if self.shape is not None else "weights, gradients and Adam's states"
        if not self.given.trains:
            parts = "weights"
        memory = f"{_gb(option.needed_gb)} of {_gb(self.usable)} GB usable per device"
        if self.is_timed:
            why = f"the simplest within {SAME:.0%} of the fastest ({memory})"
        elif self.shape is not None:
            why = f"the fewest ranks per replica that fit ({memory})"
        else:
            why = f"by rule, the fewest ranks per replica whose {parts} leave {1 - ROOM:.0%} of the memory ({memory})"
        text = [f"{self._head(option.sizes)}, {why}."]
        smaller = [one for one in self.too_large if _width(one) <= _width(option)]
        if smaller:
            near = sorted(smaller, key=lambda one: one.needed_gb)[:_NAMED]
            text.append("Too large: " + ", ".join(f"{one} ({_gb(one.needed_gb)} GB)" for one in near) + ".")
        if option.seconds is not None:
            slower = [(one, (one.seconds or 0) / option.seconds - 1) for one in others if one is not option]
            slower = sorted(slower, key=lambda entry: entry[1])[:_NAMED]
            if slower:
                text.append(
                    "Predicted steps of others: " + ", ".join(f"{one} {lost:+.0%}" for one, lost in slower) + "."
                )
        if refusals := self._refusals(_width(option)):
            text.append(f"Not possible{refusals}.")
        return " ".join([*text, *self._assumptions()])

    def _assumptions(self) -> Iterator[str]:
        if self.shape is None:
            return
        if self.config.global_batch_size is None:
            yield (
                f"Assumed: {SAMPLES} samples per device and step, in micro-batches of"
                f" {self.config.micro_batch_size or 1}, as global_batch_size is not given."
            )
        if self.given.seq_len is None:
            yield f"Assumed: samples of {self.shape.seq_len:,} tokens."

    def _refusals(self, width: int | None = None) -> str:
        """Why sizes were refused that are not more than ``width`` ranks to a replica."""
        named = [(one, why) for one, why in self.refused.items() if width is None or one.tp * one.pp <= width]
        return ": " + "; ".join(f"{_name(one)}: {_first_sentence(why)}" for one, why in named[:_NAMED]) if named else ""

    def _devices(self) -> str:
        cluster = self.given.cluster
        nodes = f"{cluster.num_nodes} x " if cluster.num_nodes > 1 else ""
        kind = "CPU processes" if cluster.device.generation == CPU else cluster.device.name
        return f"{nodes}{cluster.ranks_per_node} {kind} of {_gb(cluster.gpu_memory_gb)} GB"


def planner_layout(
    config: ParallelConfig,
    sizes: Sizes,
    precision: str,
    micro_batch_size: int,
    global_batch_size: int,
    chunks: tuple[int, ...] | None,
) -> Layout:
    """What the planner calls a run of these options.

    Args:
        config: The options.
        sizes: Ranks along every axis.
        precision: Of the Trainer.
        micro_batch_size: Samples of a micro-batch.
        global_batch_size: Samples of an optimizer step.
        chunks: Blocks of every chunk; ``None`` if they are equal.
    """
    return Layout(
        tensor_parallel=sizes.tp,
        pipeline_parallel=sizes.pp,
        data_parallel=sizes.dp,
        zero_stage=config.zero_stage,
        schedule=config.schedule,
        virtual_stages=config.virtual_stages,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        sequence_parallel=config.sequence_parallel and sizes.tp > 1,
        activation_checkpointing=config.activation_checkpointing,
        precision=precision,
        pipeline_split=chunks if sizes.pp > 1 else None,
        reduce_dtype=config.reduce_dtype or ("float64" if precision == "64-true" else "float32"),
        loss_parallel=config.loss_parallel,
    )


def _in_order(options: list[_Option]) -> list[_Option]:
    """The simplest of those that are as fast as the fastest, then the others by time."""
    if not options:
        return []
    fastest = min(option.seconds or 0.0 for option in options)
    same = [option for option in options if (option.seconds or 0.0) <= (1 + SAME) * fastest]
    return [*same, *sorted((one for one in options if one not in same), key=lambda one: one.seconds or 0.0)]


def _width(option: _Option) -> int:
    return option.sizes.tp * option.sizes.pp


def _name(sizes: Sizes) -> str:
    return f"tp{sizes.tp} pp{sizes.pp} dp{sizes.dp}"


def _gb(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0].rstrip(".")
