"""What can be known to be impossible, or slow, before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment, TorchCheckpointIO
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS, Adafactor, Optimizer

from lightning_3d import checkpoint, tensor_parallel
from lightning_3d.config import MICRO_BATCHES_PER_STAGE, ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.schedules import bubble_fraction
from lightning_3d.sharding.optimizer import steps_on_parts


def check_module(module: pl.LightningModule, config: ParallelConfig, sizes: Sizes) -> None:
    """Find what assembling ``module`` would refuse and one process can see; nothing is changed or sent.

    Raises:
        ConfigError, PlanError, StageError: if it cannot be laid out as asked.
    """
    check_steps(module, config, sizes.pp)
    if is_overridden("configure_model", module) or is_overridden("configure_sharded_model", module):
        return  # its layers do not exist yet
    check_layers(module, config, sizes)


def check_layers(
    module: pl.LightningModule, config: ParallelConfig, sizes: Sizes, order: Sequence[str] | None = None
) -> None:
    """The same of a module whose layers are all there.

    Args:
        module: The module.
        config: The options.
        sizes: Ranks along every axis.
        order: Names of modules in the order of their calls, empty if unknown; for a pipeline it is looked for.

    Raises:
        ConfigError, PlanError, StageError: if it cannot be laid out as asked.
    """
    check_steps(module, config, sizes.pp)
    num_chunks = sizes.pp * config.virtual_stages
    lists = find_block_lists(module, config.pipeline_blocks, num_chunks, order)
    share_out(module, lists, num_chunks, config.pipeline_split, virtual_stages=config.virtual_stages)
    lists = find_block_lists(module, config.pipeline_blocks)
    tensor_parallel.plan(module, [item.blocks for item in lists], config, sizes.tp)


def check_steps(module: pl.LightningModule, config: ParallelConfig, stages: int) -> None:
    """Refuse ways of training that cannot be cut into micro-batches.

    Raises:
        ConfigError: for manual optimization or ``dataloader_iter`` where batches are cut.
    """
    count = config.num_micro_batches or 1
    if not module.automatic_optimization and (stages > 1 or count > 1 or config.micro_batch_size):
        raise ConfigError(
            "This module optimizes manually (automatic_optimization=False), but its batches are cut into"
            f" micro-batches (pipeline_parallel={stages}, num_micro_batches={config.num_micro_batches},"
            f" micro_batch_size={config.micro_batch_size}), whose backward passes the pipeline interleaves. Use"
            " pipeline_parallel=1 without micro-batches, where tensor parallelism and ZeRO work with manual"
            " optimization, or let Lightning optimize."
        )
    if stages > 1 and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "training_step(dataloader_iter) fetches its own batches, so they cannot be cut into micro-batches for"
            f" pipeline_parallel={stages}. Take `batch` as argument instead, or use pipeline_parallel=1."
        )


def check_checkpoint(function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse to start processes for a checkpoint that is not there.

    Args:
        function: What the processes would run; its argument ``ckpt_path`` counts, if it has one. What Lightning looks
            up (``"best"``, ``"last"``, ``"hpc"``, ``"registry"``) is left to it.
        args: Its positional arguments.
        options: Its others.

    Raises:
        CheckpointError: if there is no checkpoint at the path, or parts of it are missing.
    """
    path = inspect.signature(function).bind_partial(*args, **options).arguments.get("ckpt_path")
    if path and path not in ("best", "last", "hpc") and not str(path).lower().startswith("registry"):
        checkpoint.check_exists(path)


def check_launch(backend: str | None, timeout_s: float, wait_timeout_s: float, cluster_environment: object) -> None:
    """Refuse what cannot connect ranks.

    Raises:
        ConfigError: naming the option.
    """
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"process_group_backend={backend!r} is not known. Choose from None, 'gloo', 'nccl'.")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError(
            "process_group_backend='nccl' needs NVIDIA GPUs, and this machine shows none. Leave it out: CPU ranks use"
            " gloo."
        )
    for name, limit in (("timeout_s", timeout_s), ("wait_timeout_s", wait_timeout_s)):
        if isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0:
            raise ConfigError(f"{name}={limit!r} must be a positive number of seconds.")
    if cluster_environment is not None and not isinstance(cluster_environment, ClusterEnvironment):
        raise ConfigError(
            f"cluster_environment={cluster_environment!r} must be a ClusterEnvironment, such as"
            " lightning.pytorch.plugins.environments.SLURMEnvironment(). Leave it out to have it detected."
        )


def check_plugins(layer_sync: object, checkpoint_io: object) -> None:
    """Refuse plugins of the Trainer that would have no effect.

    Raises:
        ConfigError: for ``sync_batchnorm=True`` and for a ``CheckpointIO``.
    """
    if layer_sync is not None:
        raise ConfigError(
            "sync_batchnorm=True was given, but the 3D strategy leaves batch normalisation to each replica, which uses"
            " the statistics of its own micro-batch. Leave it out, or use GroupNorm or LayerNorm, whose numbers do not"
            " depend on how the batch is cut."
        )
    if checkpoint_io is not None and type(checkpoint_io) is not TorchCheckpointIO:
        raise ConfigError(
            f"The Trainer was given {type(checkpoint_io).__name__}, but checkpoints of the 3D strategy are directories"
            " that every rank writes its part of, so no CheckpointIO is called. Leave it out."
        )


def check_optimizers(optimizers: Sequence[Optimizer], config: ParallelConfig, sizes: Sizes) -> None:
    """Refuse optimizers whose step needs more values at once than a rank holds.

    Raises:
        ConfigError: for LBFGS, which needs all parameters, and for an Adafactor with another step than torch's.
    """
    is_cut = sizes.pp > 1 or sizes.tp > 1 or (sizes.dp > 1 and config.zero_stage > 0)
    if is_cut and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ConfigError(
            "LBFGS chooses its step by products over all parameters, of which each rank holds a part here"
            f" (pipeline_parallel={sizes.pp}, tensor_parallel={sizes.tp}, zero_stage={config.zero_stage}). Use another"
            " optimizer, or pipeline_parallel=1, tensor_parallel=1 and zero_stage=0."
        )
    is_cut = sizes.tp > 1 or (sizes.dp > 1 and config.zero_stage > 0)
    changed = [o for o in optimizers if isinstance(o, Adafactor) and not steps_on_parts(o)]
    if is_cut and changed:
        raise ConfigError(
            f"{type(changed[0]).__name__} changes the step of torch.optim.Adafactor, which scales by norms of whole"
            f" rows, columns and parameters; each rank holds a part of them here (tensor_parallel={sizes.tp},"
            f" zero_stage={config.zero_stage}). Use Adafactor itself, or tensor_parallel=1 and zero_stage=0."
        )


def bubble_warning(config: ParallelConfig, stages: int, micro_batches: int) -> str | None:
    """What to tell a user whose ``micro_batches`` do not fill ``stages`` pipeline stages; ``None`` if they do."""
    enough = MICRO_BATCHES_PER_STAGE * stages
    if stages == 1 or micro_batches >= enough:
        return None
    here, there = (
        bubble_fraction(config.schedule, stages, config.virtual_stages, count) for count in (micro_batches, enough)
    )
    return (
        f"{micro_batches} micro-batches per step for {stages} pipeline stages: every stage waits {here:.0%} of each"
        f" step (the bubble of {config.schedule}); {enough} micro-batches, {MICRO_BATCHES_PER_STAGE} per stage, would"
        f" bring it to {there:.0%}. Use larger batches, smaller micro-batches, or fewer stages."
    )
