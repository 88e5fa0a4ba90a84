"""What a 3D run is: the options of the strategy, checked, and the sizes that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_3d.errors import ConfigError
from lightning_3d.schedules import ENGINE_SCHEDULES, SCHEDULES

Size = int | Literal["auto"]

NONFINITE = ("continue", "skip", "raise")
START_METHODS = ("popen", "fork", "forkserver", "spawn")
SPLITS = ("uniform", "parameters", "flops", "profile")
CHECKPOINTING = ("full",)
PLAN_VALUES = ("colwise", "rowwise", "vocab", "replicate")
REDUCE_DTYPES = ("float32", "bfloat16", "float16", "float64")
MICRO_BATCHES_PER_STAGE = 4
"""With fewer of them the bubble is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The options of :class:`~lightning_3d.ThreeDStrategy`, checked as far as they can be without a model."""

    tensor_parallel: Size = "auto"
    """Ranks that share one layer; ``"auto"`` is chosen for the module, and 1 where :meth:`sizes` is asked before."""
    pipeline_parallel: Size = "auto"
    """Pipeline stages; ``"auto"`` is chosen for the module, and 1 where :meth:`sizes` is asked before."""
    data_parallel: Size = "auto"
    """Replicas of the model; ``"auto"`` is what tensor and pipeline parallelism leave of the world."""
    zero_stage: int = 1
    """What the replicas share out: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters."""
    schedule: str = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    virtual_stages: int = 1
    """Chunks of the model per pipeline rank; more than one needs ``schedule="interleaved_1f1b"``."""
    num_micro_batches: int | None = None
    """Pieces each replica's batch is cut into; excludes ``micro_batch_size``."""
    micro_batch_size: int | None = None
    """Samples in a piece; excludes ``num_micro_batches``."""
    pipeline_blocks: str | Sequence[str] = "auto"
    """Name of the list of repeated layers, or names of several that form one chain."""
    pipeline_split: str | Sequence[int] = "flops"
    """How blocks are shared out over chunks: a rule, or the number of blocks of every chunk."""
    tp_plan: str | Mapping[str, str] = "auto"
    """``"auto"``, or patterns of layer names and how each is cut."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel regions are cut along the sequence."""
    loss_parallel: bool = False
    """Whether the logits stay cut over the vocabulary, and the cross entropy is computed on the pieces."""
    activation_checkpointing: str | int | None = None
    """``None``, ``"full"`` (recompute every block) or k (recompute every k-th block)."""
    compile: bool | str = False
    """Whether blocks are compiled, one by one; a string names the backend of ``torch.compile``."""
    reduce_dtype: str | None = None
    """Type in which gradients are summed over replicas; ``None`` is float32 (float64 under ``64-true``)."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all replicas and accumulated batches; sets the batch size of the loaders."""
    nonfinite: str = "continue"
    """What a NaN or infinite gradient does: ``"continue"``, ``"skip"`` the step, or ``"raise"``."""
    sanity_checks: int | None = None
    """Optimizer steps between checks that ranks hold the same; ``None``: at the start only; 0: never."""
    hang_timeout_s: float | None = None
    """Seconds without progress after which a rank counts as hanging, is named, and ends the job; ``None``: never."""
    async_save: bool = False
    """Whether checkpoints are written by a thread, from copies in host memory, while training goes on."""
    elastic: bool = False
    """Whether the sizes are wishes for the full world, fitted to the ranks that torchrun has started."""
    preemption_grace_s: float | None = None
    """Seconds that a signal to stop leaves for the running step and a save; ``None``: as long as they go on."""
    loss_reduction: str = "mean"
    """What the user's loss is over the samples of its batch: their ``"mean"`` or their ``"sum"``."""
    allow_tp_across_nodes: bool = False
    """Accept tensor parallelism wider than a node, whose every layer then waits for the network."""
    start_method: str | None = None
    """How local processes start; ``None`` is ``"popen"``."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            _check_size(name, getattr(self, name))
        _check_known("zero_stage", self.zero_stage, (0, 1, 2, 3))
        _check_schedule(self.schedule)
        _check_known("nonfinite", self.nonfinite, NONFINITE)
        _check_known("loss_reduction", self.loss_reduction, ("mean", "sum"))
        _check_known("start_method", self.start_method, (None, *START_METHODS))
        if not isinstance(self.tp_plan, Mapping):
            _check_known("tp_plan", self.tp_plan, ("auto",), also="a mapping of layer names to how each is cut")
        else:
            for pattern, value in self.tp_plan.items():
                parse_plan_value(pattern, value)
        _check_known("reduce_dtype", self.reduce_dtype, (None, *REDUCE_DTYPES))
        _check_positive("virtual_stages", self.virtual_stages)
        for name in ("num_micro_batches", "micro_batch_size", "global_batch_size"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.num_micro_batches is not None and self.micro_batch_size is not None:
            raise ConfigError(
                f"num_micro_batches={self.num_micro_batches} and micro_batch_size={self.micro_batch_size} were both"
                " given, and each fixes the other. Leave one of them out."
            )
        if self.sanity_checks is not None and self.sanity_checks != 0:
            _check_positive("sanity_checks", self.sanity_checks)
        _check_seconds("hang_timeout_s", self.hang_timeout_s)
        _check_seconds("preemption_grace_s", self.preemption_grace_s)
        if self.elastic and self.global_batch_size is None:
            raise ConfigError(
                "elastic=True needs global_batch_size: the number of replicas changes with the ranks that are left, and"
                " with it the samples per optimizer step, unless they are given for all replicas together."
            )
        self._check_virtual_stages()
        self._check_split()
        self._check_checkpointing()
        if not isinstance(self.compile, bool | str) or self.compile == "":
            raise ConfigError(
                f"compile={self.compile!r} is not known. Choose from True, False, or the name of a backend of"
                " torch.compile such as 'inductor' or 'aot_eager'."
            )

    def _check_virtual_stages(self) -> None:
        interleaved = self.schedule.startswith("interleaved")
        if self.virtual_stages > 1 and not interleaved:
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} needs a schedule that interleaves chunks, but"
                f" schedule={self.schedule!r} runs one chunk per rank. Use schedule='interleaved_1f1b' or"
                " virtual_stages=1."
            )
        if interleaved and self.virtual_stages == 1:
            raise ConfigError(
                f"schedule={self.schedule!r} with virtual_stages=1 has nothing to interleave. Use virtual_stages=2 or"
                " more, or schedule='1f1b'."
            )

    def _check_split(self) -> None:
        split = self.pipeline_split
        if isinstance(split, str):
            _check_known("pipeline_split", split, SPLITS, also="a list with the number of blocks of every chunk")
        elif not _is_list_of(split, int) or any(isinstance(size, bool) or size < 1 for size in split):
            raise ConfigError(
                f"pipeline_split={split!r} must list a positive number of blocks for every chunk, such as [3, 4]."
            )
        blocks = self.pipeline_blocks
        if not isinstance(blocks, str) and not _is_list_of(blocks, str):
            raise ConfigError(
                f"pipeline_blocks={blocks!r} must be 'auto', the name of a list of layers such as 'model.layers', or"
                " a list of such names."
            )

    def _check_checkpointing(self) -> None:
        value = self.activation_checkpointing
        if isinstance(value, str):
            also = "None or a number k (every k-th block)"
            _check_known("activation_checkpointing", value, CHECKPOINTING, also=also)
        elif value is not None:
            _check_positive("activation_checkpointing", value)

    def sizes(self, world_size: int, ranks_per_node: int) -> Sizes:
        """The size of every axis in a world of ``world_size`` ranks, ``ranks_per_node`` on each node.

        Raises:
            ConfigError: if the sizes do not multiply to the world, or tensor parallelism would cross nodes.
        """
        tp = 1 if self.tensor_parallel == "auto" else self.tensor_parallel
        pp = 1 if self.pipeline_parallel == "auto" else self.pipeline_parallel
        dp = max(1, world_size // (tp * pp)) if self.data_parallel == "auto" else self.data_parallel
        if tp * pp * dp != world_size:
            raise ConfigError(_misfit(self, tp, pp, dp, world_size))
        if tp > 1 and ranks_per_node % tp and not self.allow_tp_across_nodes:
            fitting = [size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0]
            raise ConfigError(
                f"tensor_parallel={tp} does not divide the {ranks_per_node} devices of a node, so some layers would be"
                " shared across nodes, where every layer waits for the network. Use one of"
                f" {fitting}, or pass allow_tp_across_nodes=True if that is what you want."
            )
        if pp == 1 and self.virtual_stages > 1:
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} with pipeline_parallel=1 has no pipeline to interleave. Use"
                " pipeline_parallel=2 or more, or virtual_stages=1."
            )
        split, chunks = self.pipeline_split, pp * self.virtual_stages
        if not isinstance(split, str) and len(split) != chunks:
            raise ConfigError(
                f"pipeline_split={list(split)} has {len(split)} sizes, but there are {chunks} pipeline chunks"
                f" (pipeline_parallel={pp} x virtual_stages={self.virtual_stages}). Give one number of blocks for every"
                " chunk."
            )
        if self.global_batch_size is not None and self.global_batch_size % dp and not self.elastic:
            lower = self.global_batch_size // dp * dp
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} is not a multiple of data_parallel={dp}, so replicas would"
                f" read different amounts. Use {lower or dp} or {lower + dp}."
            )
        return Sizes(pp=pp, dp=dp, tp=tp)

    def replace(self, **changes: Any) -> ParallelConfig:
        """A copy with some options changed, checked again."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Sizes:
    """Ranks along every axis of the mesh."""

    pp: int
    dp: int
    tp: int

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.dp * self.tp


def default_micro_batches(stages: int) -> int:
    """Micro-batches of a replica's batch where no option says how many, and samples suffice.

    A pipeline takes as many per stage as leave a bubble of about a fifth.
    """
    return MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1


def micro_batch_count(config: ParallelConfig, stages: int, batch_size: int) -> int:
    """How many micro-batches a replica's batch of ``batch_size`` samples is cut into: 1 up to one per sample."""
    if config.micro_batch_size is not None:
        count = -(-batch_size // config.micro_batch_size)
    elif config.num_micro_batches is not None:
        count = config.num_micro_batches
    else:
        count = default_micro_batches(stages)
    return max(1, min(count, batch_size))


def parse_plan_value(pattern: str, value: object) -> tuple[str, int]:
    """How ``tp_plan[pattern]`` cuts a layer (``"replicate"`` if it does not), and in how many packed parts.

    Raises:
        ConfigError: if the value is not known.
    """
    if isinstance(value, str):
        if value in PLAN_VALUES:
            return value, 1
        style, _, parts = value.partition(":")
        if style == "colwise" and parts.isdigit() and int(parts) >= 1:
            return style, int(parts)
    known = ", ".join(repr(name) for name in PLAN_VALUES)
    raise ConfigError(
        f"tp_plan[{pattern!r}]={value!r} is not known. Choose from {known}, 'colwise:N' (a matrix packed in N parts)."
    )


def _check_schedule(name: object) -> None:
    if isinstance(name, str) and name in SCHEDULES and name not in ENGINE_SCHEDULES:
        known = ", ".join(repr(item) for item in ENGINE_SCHEDULES)
        raise ConfigError(
            f"schedule={name!r} can be simulated and planned with, but not trained with: its backward comes in two"
            f" parts, inputs and weights, and the engine runs it as one. Choose from {known}."
        )
    _check_known("schedule", name, ENGINE_SCHEDULES)


def _check_size(name: str, value: object) -> None:
    if value != "auto":
        _check_positive(name, value, also=" or 'auto'")


def _check_positive(name: str, value: object, also: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a positive whole number{also}.")


def _check_seconds(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ConfigError(f"{name}={value!r} must be a positive number of seconds, or None.")


def _is_list_of(value: object, kind: type) -> bool:
    """Whether it is a sequence of such things, and of one at least."""
    return isinstance(value, Sequence) and len(value) > 0 and all(isinstance(item, kind) for item in value)


def _check_known(name: str, value: object, known: Sequence[object], also: str = "") -> None:
    if value not in known or isinstance(value, bool):
        choices = ", ".join(repr(item) for item in known) + (f", or {also}" if also else "")
        raise ConfigError(f"{name}={value!r} is not known. Choose from {choices}.")


def _misfit(config: ParallelConfig, tp: int, pp: int, dp: int, world_size: int) -> str:
    if world_size % (tp * pp) == 0:
        fit = f"data_parallel={world_size // (tp * pp)} (or 'auto')"
    else:
        pairs = [
            (t, p) for t in range(1, world_size + 1) for p in range(1, world_size // t + 1) if world_size % (t * p) == 0
        ]
        pairs = [(t, p) for t, p in pairs if t == tp or p == pp] or pairs
        nearest = sorted(pairs, key=lambda pair: (abs(pair[0] - tp) + abs(pair[1] - pp), pair))[:4]
        fit = "one of " + ", ".join(
            f"tensor_parallel={t} with pipeline_parallel={p} (data_parallel={world_size // (t * p)})"
            for t, p in nearest
        )
    derived = " (derived)" if config.data_parallel == "auto" else ""
    return (
        f"tensor_parallel={tp} x pipeline_parallel={pp} x data_parallel={dp}{derived} = {tp * pp * dp}, but the world"
        f" has {world_size} ranks (devices x num_nodes). Use {fit}, or start {tp * pp * dp} ranks."
    )
