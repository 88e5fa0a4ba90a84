"""Choosing sizes in a run: by the process that starts the others, or by rank 0 for all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.planner.gpus import CPU
from lightning_3d.trainer.data.global_batch import accumulated_batches
from lightning_3d.trainer.setup.choice import Choice, Circumstances, choose
from lightning_3d.trainer.setup.machine import UNKNOWN, cluster_here
from lightning_3d.trainer.setup.outline import NotYetKnown, outline

_LENGTHS = ("sequence_length", "seq_length", "seq_len", "block_size", "max_length", "max_seq_len")


def choose_here(
    strategy: Any, module: pl.LightningModule, trainer: pl.Trainer | None, data: Sequence[object] = ()
) -> ParallelConfig:
    """The options of ``strategy`` with sizes in the place of ``"auto"``; rank 0 prints them and why.

    Args:
        strategy: A :class:`~lightning_3d.ThreeDStrategy` that knows its devices.
        module: The user's module.
        trainer: The Trainer.
        data: What it was given; a data module among it may say how long samples are.

    Raises:
        ConfigError: If no sizes suit the module and the devices.
    """
    config: ParallelConfig = strategy.config
    given = _circumstances(strategy, trainer, data)
    try:
        choice = choose(outline(module, trainer), config, given)
    except NotYetKnown as error:
        sizes = config.sizes(given.cluster.world_size, given.cluster.ranks_per_node)
        sentence = f"tp{sizes.tp} pp{sizes.pp} dp{sizes.dp}: sizes that are 'auto' are as simple as they can be."
        choice = Choice(sizes, sentence, f"{error}. Give sizes if it does not fit.")
    rank_zero_info(choice.reason)
    if choice.warning:
        rank_zero_warn(choice.warning)
    sizes = choice.sizes
    return config.replace(tensor_parallel=sizes.tp, pipeline_parallel=sizes.pp, data_parallel=sizes.dp)


def agree(config: ParallelConfig, choose: Callable[[], ParallelConfig]) -> ParallelConfig:
    """The options with the sizes of rank 0, on all ranks. Collective, over the default process group.

    Args:
        config: The options of this rank.
        choose: Gives those with sizes; called on rank 0 only, as memory may differ from node to node.

    Raises:
        ConfigError: On all ranks, if rank 0 finds no sizes.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            chosen = choose()
            box[0] = (chosen.tensor_parallel, chosen.pipeline_parallel, chosen.data_parallel)
        except Exception as error:
            box[0] = str(error)
            dist.broadcast_object_list(box, 0)
            raise
    dist.broadcast_object_list(box, 0)
    if isinstance(box[0], str):
        raise ConfigError(box[0])
    tp, pp, dp = box[0]
    return config.replace(tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp)


def _circumstances(strategy: Any, trainer: pl.Trainer | None, data: Sequence[object]) -> Circumstances:
    method = strategy.config.start_method or ("fork" if hasattr(sys, "ps1") else "popen")
    forks = method == "fork" and not dist.is_initialized()
    cluster = cluster_here(strategy.parallel_devices[0], strategy.num_nodes, strategy.num_processes, forks)
    return Circumstances(
        cluster=cluster,
        is_known=cluster.device.generation not in (CPU, UNKNOWN),
        precision=strategy.precision_plugin.precision,
        accumulated=accumulated_batches(trainer) or 1,
        trains=trainer is None or trainer.state.fn == TrainerFn.FITTING,
        seq_len=sample_length(data),
    )


def sample_length(data: Sequence[object]) -> int | None:
    """Tokens of a sample, by the names that data modules have for it."""
    for module in data:
        for name in _LENGTHS if isinstance(module, pl.LightningDataModule) else ():
            value = getattr(module, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
