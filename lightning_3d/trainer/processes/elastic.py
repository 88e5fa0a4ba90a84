"""Another number of ranks than was planned for: which layout to take, so that the job goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_3d.config import ParallelConfig, Sizes, default_micro_batches
from lightning_3d.errors import ConfigError


@dataclass(frozen=True)
class Fit:
    """A layout for the ranks that there are."""

    config: ParallelConfig
    """The options, with sizes that fit."""
    sizes: Sizes
    changes: str = ""
    """What differs from the wishes, and why; empty if nothing does."""
    replanned: bool = False
    """Whether more than the number of replicas differs."""


@dataclass(frozen=True)
class World:
    """The ranks that torchrun has started this time."""

    nodes: int
    ranks_per_node: int

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def of_torchrun(cls, environment: Mapping[str, str] = os.environ) -> World | None:
        """From what torchrun has put into the environment; ``None`` elsewhere.

        Raises:
            ConfigError: The nodes have different numbers of ranks.
        """
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        nodes, ranks = int(environment["GROUP_WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
        world = int(environment["WORLD_SIZE"])
        if nodes * ranks != world:
            raise ConfigError(
                f"{nodes} nodes have {world} ranks, and this one has {ranks}: they differ. Start torchrun with the same"
                " --nproc-per-node everywhere."
            )
        return cls(nodes, ranks)


def fit_layout(config: ParallelConfig, world: int, ranks_per_node: int) -> Fit:
    """Sizes for ``world`` ranks that are as near as possible to those that ``config`` wishes for.

    Tensor and pipeline sizes stay and the number of replicas follows the world. Where that does not come out even, the
    pipeline gets fewer stages (a divisor of those wished for, so never more chunks than there are blocks), then layers
    are shared by fewer ranks. Micro-batches keep their size if the number of replicas wished for is known.

    Args:
        config: With ``elastic=True``: its sizes are wishes for the full world.
        world: Ranks that there are.
        ranks_per_node: Ranks on every node.

    Raises:
        ConfigError: Not even one rank per replica works: there are more ranks than samples in a global batch.
    """
    wished_tp = 1 if config.tensor_parallel == "auto" else config.tensor_parallel
    wished_pp = 1 if config.pipeline_parallel == "auto" else config.pipeline_parallel
    tp, pp = _nearest(config, wished_tp, wished_pp, world, ranks_per_node)
    dp = world // (tp * pp)
    fitted = _with_stages(config, wished_pp, pp).replace(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        num_micro_batches=_micro_batches(config, pp, dp),
    )
    replanned = (tp, pp) != (wished_tp, wished_pp)
    changes = ""
    if replanned or config.data_parallel not in ("auto", dp):
        wished = f"tensor_parallel={wished_tp}, pipeline_parallel={wished_pp}, data_parallel={config.data_parallel}"
        changes = (
            f"There are {world} ranks, {ranks_per_node} on each node. Wished for: {wished}. Taken:"
            f" tensor_parallel={tp}, pipeline_parallel={pp}, data_parallel={dp}"
        )
        if replanned:
            changes += (
                f", because {wished_tp} x {wished_pp} ranks per replica do not divide {world} ranks"
                f"{_of_nodes(config, wished_tp, ranks_per_node)}."
                f" A rank now holds {wished_tp * wished_pp / (tp * pp):g} times as much of the model"
            )
        if config.global_batch_size is not None:
            changes += f"; the global batch stays {config.global_batch_size} samples"
        if fitted.num_micro_batches != config.num_micro_batches:
            changes += f", in {fitted.num_micro_batches} micro-batches per replica"
        changes += "."
    return Fit(fitted, Sizes(pp=pp, dp=dp, tp=tp), changes, replanned)


def fit_to_world(strategy: Any) -> None:
    """With ``elastic=True``, give the strategy sizes, nodes and devices that fit the ranks which torchrun has started.

    Args:
        strategy: With ``config``, ``num_nodes`` and ``parallel_devices``. Without torchrun the number of ranks is what
            the Trainer says.

    Raises:
        ConfigError: There are fewer devices than ranks, or no layout fits.
    """
    if not strategy.config.elastic:
        return
    found = World.of_torchrun()
    if found is not None:
        devices: Sequence[torch.device] = strategy.parallel_devices
        if found.ranks_per_node > len(devices) and devices[0].type != "cpu":
            raise ConfigError(
                f"torchrun has started {found.ranks_per_node} ranks on this node, but the Trainer has {len(devices)}"
                " devices. Use devices='auto', or start fewer."
            )
        more = [devices[0]] * max(0, found.ranks_per_node - len(devices))
        strategy.parallel_devices = [*devices[: found.ranks_per_node], *more]
        strategy.num_nodes = found.nodes
    world = found or World(strategy.num_nodes, strategy.num_processes)
    fit = fit_layout(strategy.config, world.size, world.ranks_per_node)
    strategy.config = fit.config
    if fit.changes:
        (rank_zero_warn if fit.replanned else rank_zero_info)(fit.changes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank_zero_warn(
            "torchrun keeps one store for all restarts, so nodes can neither leave nor join this job: torch would wait"
            " for addresses of an earlier start. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started."
        )


def _nearest(config: ParallelConfig, tp: int, pp: int, world: int, ranks_per_node: int) -> tuple[int, int]:
    """The first pair that fits, going down in pipeline stages first."""
    samples = config.global_batch_size
    for fewer_tp in _divisors(tp):
        if ranks_per_node % fewer_tp and not config.allow_tp_across_nodes:
            continue
        for fewer_pp in _divisors(pp):
            replicas, rest = divmod(world, fewer_tp * fewer_pp)
            if replicas and not rest and (samples is None or replicas <= samples):
                return fewer_tp, fewer_pp
    raise ConfigError(
        f"{world} ranks cannot share global_batch_size={samples}: at tensor_parallel={tp},"
        f" pipeline_parallel={pp} or less some replica would have no sample. Use a larger global batch or fewer ranks."
    )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(number, 0, -1) if number % divisor == 0]


def _of_nodes(config: ParallelConfig, tp: int, ranks_per_node: int) -> str:
    crosses = ranks_per_node % tp and not config.allow_tp_across_nodes
    return f" without tensor parallelism across nodes of {ranks_per_node}" if crosses else ""


def _with_stages(config: ParallelConfig, wished: int, pp: int) -> ParallelConfig:
    """Schedule and split for fewer stages."""
    if pp == wished:
        return config
    virtual = config.virtual_stages if pp > 1 else 1
    split = config.pipeline_split
    if not isinstance(split, str):
        split = _merged(split, len(split) // (pp * virtual))
    schedule = config.schedule if virtual == config.virtual_stages else "1f1b"
    return config.replace(pipeline_parallel=pp, virtual_stages=virtual, schedule=schedule, pipeline_split=split)


def _merged(split: Sequence[int], together: int) -> list[int]:
    return [sum(split[start : start + together]) for start in range(0, len(split), together)]


def _micro_batches(config: ParallelConfig, pp: int, dp: int) -> int | None:
    """As many as keep a micro-batch the size it had, or None to leave it to the default."""
    wished = config.data_parallel
    if config.micro_batch_size is not None or wished == "auto" or wished <= dp:
        return config.num_micro_batches
    count = config.num_micro_batches or default_micro_batches(pp)
    return -(-count * wished // dp)
