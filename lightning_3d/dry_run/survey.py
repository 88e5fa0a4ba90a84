"""What a rank would be told by the others: what passes between the chunks, and which stages are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run.rank import Batch, Rank
from lightning_3d.dry_run.world import standing_in
from lightning_3d.pipeline.blocks import ChunkMap
from lightning_3d.pipeline.links import Link
from lightning_3d.tensor_parallel import BlockCheck
from lightning_3d.trainer.setup.blueprint import Blueprint


@dataclass(frozen=True)
class Survey:
    """What one look at the whole model tells."""

    links: Mapping[int, Link]
    """What passes into every chunk."""
    kinds: tuple[Any, ...]
    """Of every pipeline stage: stages of one kind hold layers of the same classes and sizes, and pass on the same."""


def survey(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    config: ParallelConfig,
    sizes: Sizes,
    batch: Batch,
    blueprint: Blueprint,
    check: BlockCheck,
    on_gpus: bool = False,
) -> Survey:
    """Run one micro-batch forward through all chunks, on a rank that owns them all.

    It is the run in which the ranks of a pipeline settle what they send (:mod:`lightning_3d.pipeline.settling`), with
    one process in all their places.
    """
    chunks = blueprint.chunks
    if chunks.num_chunks == 1:
        return Survey({}, (0,))
    kinds = [kind_of(module, chunks, stage, sizes.pp) for stage in range(sizes.pp)]
    alone = config.replace(
        pipeline_parallel=1,
        pipeline_split="uniform",  # not read: the blueprint has it
        schedule="interleaved_1f1b",
        virtual_stages=chunks.num_chunks,
    )
    with standing_in(Sizes(pp=1, dp=sizes.dp, tp=sizes.tp), 0) as mesh:
        rank = Rank(trainer, module, alone, mesh, blueprint, check, on_gpus)
        links = rank.forward(batch.of(config.micro_batch_size or 1, rank.memoryless))
    told = [
        (kind, tuple(_passes(links, chunk) for chunk in range(stage, chunks.num_chunks, sizes.pp)))
        for stage, kind in enumerate(kinds)
    ]
    return Survey(links, tuple(told))


def kind_of(module: nn.Module, chunks: ChunkMap, stage: int, stages: int) -> Any:
    """What the parameters of a stage are, chunk by chunk, but for their names."""
    modules = dict(module.named_modules(remove_duplicate=False))
    found = []
    for chunk in range(stage, chunks.num_chunks, stages):
        blocks = tuple(_kind(modules[name]) for name in chunks.blocks_of(chunk))
        outside = tuple(
            _kind(modules[name], recurse=False)
            for name, owners in chunks.outside.items()
            if chunk in owners and len(owners) < chunks.num_chunks
        )
        found.append((blocks, outside, chunk == 0, chunk == chunks.num_chunks - 1))
    return tuple(found)


def _kind(module: nn.Module, recurse: bool = True) -> Any:
    parameters = module.named_parameters() if recurse else module.named_parameters(recurse=False)
    return type(module).__qualname__, tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters)


def _passes(links: Mapping[int, Link], chunk: int) -> Any:
    return tuple(
        None if (link := links.get(number)) is None else (len(link.positions), len(link.carried), tuple(link.dtypes))
        for number in (chunk, chunk + 1)
    )
