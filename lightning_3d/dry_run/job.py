"""The dry run of a whole job: which ranks are run, how many micro-batches of them, and what follows for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import lightning.pytorch as pl
import torch

from lightning_3d.config import ParallelConfig, Sizes, micro_batch_count
from lightning_3d.dry_run.extension import MARGIN, ShortStep, extended, with_batch
from lightning_3d.dry_run.forks import in_forks
from lightning_3d.dry_run.rank import Batch, Rank
from lightning_3d.dry_run.record import Record, UnlikeError, between, bytes_sent, record_of, turns
from lightning_3d.dry_run.report import DryRun, StageReport
from lightning_3d.dry_run.survey import Survey, survey
from lightning_3d.dry_run.verdicts import Verdicts, compare_blocks
from lightning_3d.dry_run.world import standing_in
from lightning_3d.errors import ConfigError
from lightning_3d.initialization import materialise
from lightning_3d.mesh import coordinates
from lightning_3d.pipeline.micro_batches import piece_sizes
from lightning_3d.pipeline.wrappers import unwrap
from lightning_3d.schedules import in_flight
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.trainer.setup.assembly import describe
from lightning_3d.trainer.setup.blueprint import Blueprint, draw
from lightning_3d.trainer.setup.preflight import bubble_warning, check_steps

AT_ONCE = 2
"""Ranks that are run at the same time."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be run."""

    trainer: pl.Trainer
    """With a :class:`~lightning_3d.ThreeDStrategy`."""
    module: pl.LightningModule
    """The whole module; built under :func:`~lightning_3d.initialization.deferring` where it is large."""
    sizes: Sizes
    batch: Batch
    on_gpus: bool = False
    """Whether the run's messages go by NCCL, which knows when one has arrived (gloo does not, so that the engine holds
    on to as many gradients under way as there are stages), and operations keep what CUDA keeps."""

    @property
    def config(self) -> ParallelConfig:
        """The options of the strategy."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, ThreeDStrategy):
            raise ConfigError(
                f"The Trainer has {type(strategy).__name__}, but a dry run is of the 3D strategy. Use strategy='3d'."
            )
        return strategy.config


@dataclass(frozen=True)
class _Pieces:
    """How many micro-batches a replica's batch has, of how many samples."""

    count: int
    size: int
    even: bool

    @classmethod
    def of(cls, job: Job) -> _Pieces:
        config, samples = job.config, job.batch.samples
        count = micro_batch_count(config, job.sizes.pp, samples)
        sizes = piece_sizes(samples, count, config.micro_batch_size)
        return cls(count, max(sizes), len(set(sizes)) == 1)


def dry_run(job: Job, stages: Sequence[int] | None = None, rank: int | None = None, limit_s: float = 600.0) -> DryRun:
    """Run the ranks of ``job`` without memory, one process each, and tell what they hold, send and compute.

    Args:
        job: What is to be run; its module is freed of wrappers, and its buffers get values.
        stages: Pipeline stages to report; all by default. Of a stage its rank with dp 0 and tp 0 is run.
        rank: This rank alone, instead.
        limit_s: Seconds after which the dry run ends with an error.

    Raises:
        ConfigError, PlanError, StageError: what the real run would say of this job.
    """
    config, sizes, pieces = job.config, job.sizes, _Pieces.of(job)
    check_steps(job.module, config, sizes.pp)
    if rank is not None and not 0 <= rank < sizes.world:
        raise ConfigError(f"rank={rank} is none of the {sizes.world} ranks of this job. Use 0 to {sizes.world - 1}.")
    if pieces.even:
        config = config.replace(micro_batch_size=pieces.size, num_micro_batches=None)
    config = config.replace(sanity_checks=0, compile=False)
    wanted = [coordinates(rank, sizes)[0]] if rank is not None else list(stages or range(sizes.pp))
    # Drawn once, and inherited by all forks: for a hundred layers it takes longer than what follows.
    wishes = unwrap(job.module)
    materialise(job.module, torch.device("cpu"), parameters=False)
    blueprint = draw(job.module, config, sizes, wishes)
    described = job.config.replace(num_micro_batches=pieces.count, micro_batch_size=None)
    layout = describe(job.module, blueprint.chunks, described, sizes)
    verdicts = compare_blocks(job.module, blueprint.plan, limit_s)
    surveying = partial(survey, job.trainer, job.module, config, sizes, job.batch, blueprint)
    [found] = in_forks([lambda: surveying(verdicts.check(), job.on_gpus)], 1, limit_s)
    place = {stage: stage * sizes.dp * sizes.tp for stage in range(sizes.pp)}
    if rank is not None:
        place[wanted[0]] = rank

    def run(numbers: Sequence[int]) -> list[tuple[Record, StageReport]]:
        works: list[Callable[[], tuple[Record, StageReport]]] = [
            partial(_run, job, config, blueprint, verdicts, found, pieces, place[stage]) for stage in numbers
        ]
        return in_forks(works, AT_ONCE, limit_s)

    plan = _choose(wanted, found.kinds)
    first = dict(zip(plan.run, run(plan.run), strict=True))
    records = {stage: record for stage, (record, _) in first.items()}
    alike = _complete(records, plan, config, sizes.pp, pieces.count)
    missing = [stage for stage in wanted if stage not in records]
    first |= dict(zip(missing, run(missing), strict=True))
    records |= {stage: first[stage][0] for stage in missing}
    names = layout.blocks
    reports = []
    for stage in wanted:
        source = first.get(stage) or first[alike[stage][0]]
        report = replace(
            source[1], stage=stage, rank=place[stage], blocks=names[stage], record=records[stage],
            alike=alike.get(stage, ()),
        )  # fmt: skip
        reports.append(report)
    return DryRun(
        layout=layout,
        sizes=sizes,
        stages=tuple(reports),
        samples=job.batch.samples,
        micro_batch=pieces.size,
        warning=bubble_warning(config, sizes.pp, pieces.count) or "",
        note=verdicts.note,
    )


def _run(
    job: Job,
    config: ParallelConfig,
    blueprint: Blueprint,
    verdicts: Verdicts,
    found: Survey,
    pieces: _Pieces,
    rank: int,
) -> tuple[Record, StageReport]:
    """In a fork: lay out one rank and run steps of it, the first of which makes the optimizer's state."""
    with standing_in(job.sizes, rank) as mesh:
        here = Rank(job.trainer, job.module, config, mesh, blueprint, verdicts.check(), job.on_gpus)
        here.make_optimizers()
        here.assembly.engine.know(found.links)

        def step(count: int) -> Record:
            here.step(job.batch.of(min(count * pieces.size, job.batch.samples), here.memoryless))
            return record_of(here.recorder, pieces.count, count)

        if job.sizes.pp > 1 and pieces.even:
            here.step(job.batch.of(pieces.size, here.memoryless))
        else:
            here.step(job.batch.of(job.batch.samples, here.memoryless))
        try:
            record = _whole(here, config, pieces, step, 0 if job.on_gpus else job.sizes.pp)
        except UnlikeError:
            here.run_as_it_is()
            record = step(pieces.count)
        record = replace(record, reads=dict(here.memoryless.reads))
        return record, StageReport.of(here, record)


def _whole(here: Rank, config: ParallelConfig, pieces: _Pieces, step: Callable[[int], Record], bound: int) -> Record:
    """The record of a step, of which no more is run than tells the rest; ``bound`` messages are held at most."""
    pp = here.mesh.pp
    ahead = pp.size - 1 - pp.rank
    if config.schedule == "1f1b" and pp.size > 1 and pieces.even and pieces.count > ahead + MARGIN:

        def short(ahead: int) -> ShortStep:
            here.run_ahead(ahead)
            run, recorder = ahead + MARGIN, here.recorder
            record, tail = step(run), turns(recorder, ahead, (MARGIN - 1, MARGIN - 2, MARGIN - 3))
            sent = (bytes_sent(recorder, "SF"), bytes_sent(recorder, "SB"))
            return ShortStep(ahead, record, tail, recorder.batch_bytes // run, *sent)

        low = short(min(ahead, 1))
        return extended(low, short(2) if ahead > 1 else None, ahead, bound)
    run = _enough(config, here.mesh.sizes, pieces)
    record = step(run)
    batch = here.recorder.batch_bytes * (pieces.count - run) // run
    return replace(record, pipeline=with_batch(record.pipeline, batch), outside=with_batch(record.outside, batch))


def _enough(config: ParallelConfig, sizes: Sizes, pieces: _Pieces) -> int:
    """Micro-batches after which the rest of a step is more of the same."""
    if not pieces.even:
        return pieces.count
    if sizes.pp == 1:
        return min(pieces.count, MARGIN)
    if config.schedule == "interleaved_1f1b" and pieces.count % sizes.pp == 0:
        return min(pieces.count, 3 * sizes.pp)
    return pieces.count


@dataclass
class _Choice:
    run: list[int]
    groups: list[list[int]]
    """Stages of one kind of which only some are run: the first and the last two."""


def _choose(wanted: Sequence[int], kinds: Sequence[object]) -> _Choice:
    by_kind: defaultdict[object, list[int]] = defaultdict(list)
    for stage, kind in enumerate(kinds):
        by_kind[kind].append(stage)
    run, groups = set(wanted), []
    for members in by_kind.values():
        asked = [stage for stage in members if stage in run]
        if len(asked) > 3:
            run -= set(asked[1:-2])
            groups.append(asked)
    return _Choice(sorted(run), groups)


def _complete(
    records: dict[int, Record], choice: _Choice, config: ParallelConfig, stages: int, micro_batches: int
) -> dict[int, tuple[int, int]]:
    """Add the records of stages that were not run; gives for each the two that it lies between.

    A line through the last two of a kind has to meet the first of the kind to the byte. Where it does not, nothing is
    added.
    """
    alike: dict[int, tuple[int, int]] = {}
    held = in_flight(config.schedule, stages, config.virtual_stages, micro_batches)
    for members in choice.groups:
        first, low, high = members[0], members[-1], members[-2]
        step = held[high] - held[low]
        if step == 0 and held[first] != held[low]:
            continue
        expected = between(records[low], records[high], (held[first] - held[low]) / (step or 1))
        same = (
            expected.pipeline.total == records[first].pipeline.total
            and expected.outside.total == records[first].outside.total
            and expected.work == records[first].work
        )
        if not same:
            continue
        for stage in members[1:-2]:
            records[stage] = between(records[low], records[high], (held[stage] - held[low]) / (step or 1))
            alike[stage] = (first, low)
    return alike
