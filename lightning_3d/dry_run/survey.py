"""What a rank would be told by the others: what passes between the chunks, and which stages are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run.rank import Batch, Rank
from lightning_3d.dry_run.world import standing_in
from lightning_3d.initialization import materialise
from lightning_3d.pipeline.blocks import ChunkMap, find_block_lists
from lightning_3d.pipeline.links import Link
from lightning_3d.trainer.assembly import chunk_map, describe
from lightning_3d.trainer.layout import Layout


@dataclass(frozen=True)
class Survey:
    """What one look at the whole model tells."""

    links: Mapping[int, Link]
    """What passes into every chunk."""
    kinds: tuple[Any, ...]
    """Of every pipeline stage: stages of one kind hold layers of the same classes and sizes, and pass on the same."""
    layout: Layout
    split: tuple[int, ...] | None = None
    """Blocks of every chunk."""


def survey(
    trainer: pl.Trainer, module: pl.LightningModule, config: ParallelConfig, sizes: Sizes, batch: Batch
) -> Survey:
    """Run one micro-batch forward through all chunks, on a rank that owns them all.

    It is the run in which the ranks of a pipeline settle what they send (:mod:`lightning_3d.pipeline.settling`), with
    one process in all their places.
    """
    num_chunks = sizes.pp * config.virtual_stages
    materialise(module, torch.device("cpu"), parameters=False)
    lists = find_block_lists(module, config.pipeline_blocks, num_chunks)
    chunks = chunk_map(module, lists, config, sizes.pp)
    layout = describe(module, chunks, config, sizes)
    if num_chunks == 1:
        return Survey({}, (0,), layout)
    kinds = [kind_of(module, chunks, stage, sizes.pp) for stage in range(sizes.pp)]
    split = [end - start for start, end in zip(chunks.starts, chunks.starts[1:], strict=False)]
    alone = config.replace(
        pipeline_parallel=1, schedule="interleaved_1f1b", virtual_stages=num_chunks, pipeline_split=split
    )
    with standing_in(Sizes(pp=1, dp=sizes.dp, tp=sizes.tp), 0) as mesh:
        rank = Rank(trainer, module, alone, mesh)
        links = rank.forward(batch.of(config.micro_batch_size or 1, rank.memoryless))
    told = [
        (kind, tuple(_passes(links, chunk) for chunk in range(stage, num_chunks, sizes.pp)))
        for stage, kind in enumerate(kinds)
    ]
    return Survey(links, tuple(told), layout, tuple(split))


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
