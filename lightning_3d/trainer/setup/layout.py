"""The layout of a run: what was asked for, resolved, as a person reads it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.config import ParallelConfig, Sizes, default_micro_batches, micro_batch_count
from lightning_3d.schedules import bubble_fraction


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the mesh, the schedule, and which blocks every stage runs."""

    pipeline_parallel: int
    data_parallel: int
    tensor_parallel: int
    zero_stage: int
    schedule: str
    virtual_stages: int
    num_micro_batches: int | None
    """Micro-batches per replica and step; ``None`` where they depend on the loader's batches."""
    chunks: tuple[tuple[str, ...], ...]
    """Names of the blocks of every chunk, in forward order; chunk c runs on stage ``c % pipeline_parallel``."""
    outside: tuple[tuple[str, ...], ...]
    """Names of the modules with parameters outside of the blocks that every chunk holds."""
    parameters: tuple[int, ...]
    """Parameters of every chunk, before tensor parallelism and sharding cut them."""
    costs: tuple[float, ...] = ()
    """Cost of every chunk, in any unit; empty without a pipeline."""
    cost_source: str = ""
    """How the costs were found."""
    sequence_parallel: bool = False
    activation_checkpointing: str | int | None = None
    micro_batch_size: int | None = None
    """Samples of a micro-batch, where an option fixes it."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline_parallel * self.data_parallel * self.tensor_parallel

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """Names of the blocks of every stage."""
        return tuple(
            tuple(
                name for chunk in range(stage, len(self.chunks), self.pipeline_parallel) for name in self.chunks[chunk]
            )
            for stage in range(self.pipeline_parallel)
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of every stage in the cost of the model, the sum of its chunks; empty without a pipeline."""
        total = sum(self.costs) or 1.0
        stages = range(self.pipeline_parallel) if self.costs else ()
        return tuple(sum(self.costs[stage :: self.pipeline_parallel]) / total for stage in stages)

    @property
    def bubble(self) -> float | None:
        """Share of a step in which a stage waits, if all micro-batches and stages take the same time.

        ``None`` where the number of micro-batches is not known.
        """
        if self.pipeline_parallel == 1:
            return 0.0
        if self.num_micro_batches is None:
            return None
        return bubble_fraction(self.schedule, self.pipeline_parallel, self.virtual_stages, self.num_micro_batches)

    def __str__(self) -> str:
        sizes = f"pp{self.pipeline_parallel} x dp{self.data_parallel} x tp{self.tensor_parallel}"
        head = f"{sizes} = {self.world_size} ranks, ZeRO-{self.zero_stage}"
        if self.pipeline_parallel > 1:
            chunks = f", {self.virtual_stages} chunks per stage" if self.virtual_stages > 1 else ""
            head += f", {self.schedule}{chunks}"
            if self.bubble is None:
                head += f", micro-batches of {self.micro_batch_size}"
            else:
                head += f", {self.num_micro_batches} micro-batches, bubble {self.bubble:.1%} of the step"
        options = [
            text
            for text, on in (
                ("sequence parallel", self.sequence_parallel),
                (f"recompute {self.activation_checkpointing}", self.activation_checkpointing is not None),
            )
            if on
        ]
        head += "".join(f", {text}" for text in options)
        return "\n".join([head, *(self._stage_lines() if self.pipeline_parallel > 1 else ())])

    def _stage_lines(self) -> list[str]:
        total, cost = sum(self.parameters) or 1, sum(self.costs) or 1.0
        lines = []
        for chunk, names in enumerate(self.chunks):
            held = [*self.outside[chunk][:4], _span(names)]
            label = f"  stage {chunk % self.pipeline_parallel}" + (f" chunk {chunk}" if self.virtual_stages > 1 else "")
            count = self.parameters[chunk]
            share = f", {self.costs[chunk] / cost:.1%} of the cost" if self.costs else ""
            lines.append(f"{label}: {', '.join(held)} ({count:,} parameters, {count / total:.0%}{share})")
        if self.costs:
            even = 1 / self.pipeline_parallel
            lines.append(
                f"  cost {self.cost_source}: the most loaded stage has {max(self.shares):.1%}, even is {even:.1%}"
            )
        return lines


def expected_micro_batches(config: ParallelConfig, sizes: Sizes, accumulated: int) -> int | None:
    """Micro-batches of a replica's full batch, as far as options tell.

    Args:
        config: The options.
        sizes: Of the mesh.
        accumulated: Batches per optimizer step.
    """
    if config.global_batch_size is not None:
        return micro_batch_count(config, sizes.pp, max(1, config.global_batch_size // (sizes.dp * accumulated)))
    if config.micro_batch_size is not None:
        return None
    return config.num_micro_batches or default_micro_batches(sizes.pp)


def _span(names: tuple[str, ...]) -> str:
    if len(names) == 1:
        return f"1 block {names[0]}"
    first, last = names[0], names[-1]
    return f"{len(names)} blocks {first} .. {last}"
