"""The best layout: all legal ones are tried against the memory, what fits is timed, and the losers get a reason."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.planner import checks, rules
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.estimate import Estimate, estimate
from lightning_3d.planner.explain import SAME, TIME_ERROR, compare, is_tight, reason, setting
from lightning_3d.planner.gpus import CPU
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.legality import (
    SEARCHED,
    Sizes,
    all_sizes,
    divisors,
    layouts,
    micro_batch_sizes,
    pipeline_fault,
    pipelines,
)
from lightning_3d.planner.memory import GB, stage_memory
from lightning_3d.planner.shape import ModelShape

RESERVE = 0.03
"""Part of a GPU's memory that is kept free, beside what CUDA, NCCL and the allocator's fragments take."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, what it costs, and why it is not the first."""

    layout: Layout
    estimate: Estimate
    why: str = ""
    """What it loses against the first by, in a phrase; empty for the first."""


@dataclass(frozen=True)
class Refusal:
    """Sizes that cannot be used."""

    sizes: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An answer to "which layout?"."""

    shape: ModelShape
    cluster: Cluster
    global_batch: int
    usable_gb: float
    """Memory of a GPU less the reserve, in 1e9 bytes."""
    ranking: tuple[Candidate, ...]
    """The best layout for each combination of sizes, fastest first."""
    variants: tuple[Candidate, ...]
    """Other settings at the sizes of the first, fastest first."""
    refusals: tuple[Refusal, ...]
    """Sizes that do not fit or are not legal."""
    reason: str
    """Why the first is the first, in a sentence or two."""
    warnings: tuple[str, ...]
    """What to know about the first."""
    num_layouts: int
    """Layouts whose memory was compared with the GPU's."""
    num_timed: int
    """Those of them that were timed."""
    seconds: float
    """Processor time of the search, which does not depend on what else runs."""

    @property
    def best(self) -> Candidate:
        """The fastest layout that fits."""
        return self.ranking[0]


def plan(
    shape: ModelShape,
    cluster: Cluster,
    global_batch: int,
    *,
    fixed: Mapping[str, Any] | None = None,
    reserve_gb: float | None = None,
    all_schedules: bool = False,
    tp_across_nodes: bool = False,
) -> Plan:
    """Find the layout of the shortest step that fits into memory.

    Tried are all sizes that multiply to the cluster and divide the model and the batch, all numbers of chunks, sizes of
    micro-batches, ZeRO stages, and recomputation where memory asks for it. Sequence and loss parallelism are on under
    tensor parallelism: they take no time and save memory.

    Args:
        shape: The model.
        cluster: The GPUs.
        global_batch: Samples of an optimizer step.
        fixed: Fields of :class:`Layout` that are given: a value, or several to choose from for those that are searched.
        reserve_gb: Memory of a GPU that stays free, in 1e9 bytes; by default 3 %.
        all_schedules: Also schedules that can be simulated but not trained with.
        tp_across_nodes: Also tensor parallelism wider than a node.

    Raises:
        ConfigError: If no layout is legal, or none fits; the message says what comes nearest and what to change.
    """
    begin = time.process_time()
    fixed = dict(fixed or {})
    _check(fixed, cluster)
    checks.positive("global_batch", global_batch)
    usable = cluster.gpu_memory_gb - (RESERVE * cluster.gpu_memory_gb if reserve_gb is None else reserve_gb)
    if not 0 < usable <= cluster.gpu_memory_gb:
        raise ConfigError(
            f"reserve_gb={reserve_gb} must lie between 0 and the {cluster.gpu_memory_gb:g} GB of a GPU of {cluster}."
        )
    sizes, illegal = all_sizes(shape, cluster, global_batch, fixed, tp_across_nodes)
    search = _Search(shape, cluster, global_batch, fixed, usable, all_schedules)
    for one in sizes:
        search.run(one)
    refusals = [Refusal(what, why) for what, why in illegal.items()]
    refusals += [Refusal(str(one), search.fault(one)) for one in sizes if not search.fitting.get(one)]
    if not any(search.fitting.values()):
        raise ConfigError(_nothing(shape, cluster, global_batch, usable, refusals, search))
    fitting = [group for group in search.fitting.values() if group]
    best = first([one for group in fitting for one in group], usable)
    groups = sorted((_ranked(group, usable) for group in fitting if best not in group), key=lambda g: _rank(g[0]))
    own = sorted((one for group in fitting if best in group for one in group if one is not best), key=_rank)
    ranking = [best, *(replace(g[0], why=compare(best, g[0], usable)) for g in groups)]
    variants = [
        replace(other, why=f"{setting(best.layout, other.layout)}: {compare(best, other, usable)}") for other in own
    ]
    return Plan(
        shape=shape,
        cluster=cluster,
        global_batch=global_batch,
        usable_gb=usable,
        ranking=tuple(ranking),
        variants=tuple(variants),
        refusals=tuple(refusals),
        reason=reason(best, ranking[1:], search.least, usable),
        warnings=rules.warnings(shape, cluster, best.layout, best.estimate, usable),
        num_layouts=search.num_layouts,
        num_timed=sum(map(len, search.fitting.values())),
        seconds=time.process_time() - begin,
    )


class _Search:
    """Tries the layouts of one size after another."""

    def __init__(
        self, shape: ModelShape, cluster: Cluster, batch: int, fixed: Mapping[str, Any], usable: float, every: bool
    ) -> None:
        self.shape, self.cluster, self.batch, self.fixed = shape, cluster, batch, fixed
        self.usable, self.every = usable, every
        self.on_cpu = cluster.device.generation == CPU
        self.fitting: dict[Sizes, list[Candidate]] = {}
        self.least: dict[Sizes, tuple[float, Layout]] = {}
        """The layout of least memory for each size, with its GB."""
        self.num_layouts = 0

    def run(self, sizes: Sizes) -> None:
        """Time what fits. Of layouts that differ in recomputation only, the first that fits is the fastest."""
        found = self.fitting.setdefault(sizes, [])
        for micro_batch in micro_batch_sizes(self.batch // sizes.dp, self.fixed):
            fits = False
            count = self.batch // (sizes.dp * micro_batch)
            for pipeline in pipelines(self.shape, sizes.pp, count, self.fixed, self.every):
                least = None  # recomputation that the ZeRO stages before needed
                for ladder in layouts(self.shape, sizes, micro_batch, pipeline, self.batch, self.fixed):
                    step = next((i for i, layout in enumerate(ladder[:least]) if self._fits(sizes, layout)), None)
                    if step is None:
                        continue
                    fits, least = True, step  # a higher stage sends more, so it must save recomputation
                    found.append(Candidate(ladder[step], estimate(self.shape, self.cluster, ladder[step])))
            if not fits:
                break  # larger micro-batches need more still

    def _fits(self, sizes: Sizes, layout: Layout) -> bool:
        self.num_layouts += 1
        stages = stage_memory(self.shape, layout)
        needed = max(stage.total if self.on_cpu else stage.on_device for stage in stages) / GB
        if sizes not in self.least or needed < self.least[sizes][0]:
            self.least[sizes] = (needed, layout)
        return needed <= self.usable

    def fault(self, sizes: Sizes) -> str:
        """Why nothing of these sizes fits."""
        if sizes not in self.least:
            return pipeline_fault(self.shape, sizes, self.batch, self.fixed)
        needed, layout = self.least[sizes]
        return f"needs {needed:.0f} GB at least, of {self.usable:.0f} GB usable ({setting(None, layout)})"


def first(candidates: Sequence[Candidate], usable_gb: float) -> Candidate:
    """The one to take.

    Of those that no prediction can tell from the fastest, one whose memory has room for the error of the prediction if
    there is any, else all; of them the fastest; and before that one the simplest of those that are as fast: of fewest
    chunks, then of least memory.
    """
    order = sorted(candidates, key=_rank)
    if is_tight(order[0].estimate, usable_gb):
        limit = (1 + TIME_ERROR) * order[0].estimate.step_time_s
        roomy = [one for one in order if not is_tight(one.estimate, usable_gb)]
        order = [one for one in roomy if one.estimate.step_time_s <= limit] or order
    limit, tight = (1 + SAME) * order[0].estimate.step_time_s, is_tight(order[0].estimate, usable_gb)
    same = [
        one for one in order if one.estimate.step_time_s <= limit and (tight or not is_tight(one.estimate, usable_gb))
    ]
    return min(same, key=lambda one: (one.layout.virtual_stages, one.estimate.device_memory_gb))


def _ranked(group: list[Candidate], usable_gb: float) -> list[Candidate]:
    best = first(group, usable_gb)
    return [best, *(candidate for candidate in sorted(group, key=_rank) if candidate is not best)]


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.estimate.step_time_s, candidate.estimate.device_memory_gb


def _check(fixed: Mapping[str, Any], cluster: Cluster) -> None:
    names = {field.name for field in fields(Layout)} - {"global_batch_size"}
    for name, value in fixed.items():
        checks.one_of("fixed", name, tuple(sorted(names)))
        if name not in SEARCHED and isinstance(value, list | tuple | range) and name != "pipeline_split":
            raise ConfigError(
                f"fixed: {name}={value!r} must be one value; several may be given for {', '.join(SEARCHED)}."
            )
    product = 1
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
        if isinstance(size := fixed.get(name, 1), int):
            checks.positive(name, size)
            product *= size
    if cluster.world_size % product:
        raise ConfigError(
            f"The sizes that are fixed multiply to {product}, which does not divide the {cluster.world_size} GPUs of"
            f" {cluster}. {_other_sizes(fixed, cluster.world_size)}"
        )


def _other_sizes(fixed: Mapping[str, Any], world: int) -> str:
    """Which size could be changed to what."""
    given = {name: fixed[name] for name in SEARCHED[:4] if isinstance(fixed.get(name), int)}
    ways = []
    for name in given:
        others = math.prod(size for other, size in given.items() if other != name)
        if world % others == 0:
            ways.append(f"{name}={' or '.join(map(str, divisors(world // others)))}")
    return f"With the others kept, {'; or '.join(ways)} can work." if ways else "Change several, or the cluster."


def _nothing(
    shape: ModelShape, cluster: Cluster, batch: int, usable: float, refusals: list[Refusal], search: _Search
) -> str:
    if not search.least:
        known = "; ".join(f"{refusal.sizes} {refusal.why}" for refusal in refusals[:6])
        return (
            f"No layout of {cluster} can run this model with a global batch of {batch}: {known or 'no sizes fit'}."
            " Change the global batch, the number of GPUs, or what is fixed."
        )
    needed, layout = min(search.least.values(), key=lambda entry: entry[0])
    return (
        f"The model ({shape.parameters / 1e9:.1f}e9 parameters) does not fit on {cluster}: the layout that needs least,"
        f" {layout}, needs {needed:.0f} GB per GPU of {usable:.0f} GB usable. Use more or larger GPUs, or a shorter"
        " sequence."
    )
