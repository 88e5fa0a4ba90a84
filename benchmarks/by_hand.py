"""The peers: the same GPT, split, sharded and stepped by hand with what ``torch.distributed`` offers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.workload import Shape
from lightning_3d.models import GPT
from lightning_3d.models.optimization import lr_factor


class StageOfGPT(nn.Module):
    """Some consecutive blocks of a GPT; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self, whole: GPT, stage: int, stages: int) -> None:
        super().__init__()
        per_stage = len(whole.blocks) // stages
        self.rotary = whole.rotary
        self.blocks = whole.blocks[stage * per_stage : (stage + 1) * per_stage]
        self.embedding = whole.token_embedding if stage == 0 else None
        self.norm = whole.norm if stage == stages - 1 else None
        self.head = whole.head if stage == stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        rotary = self.rotary(x.shape[1])
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, rotary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut_tensor_parallel(module: GPT, mesh: DeviceMesh) -> None:
    """``parallelize_module`` on every block, the embedding and the head."""
    block: Any
    for block in module.blocks:
        _interleave_heads(block.attention.qkv.weight, mesh.size())
        plan = {
            "attention.qkv": ColwiseParallel(),
            "attention.proj": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
        block.attention.num_heads //= mesh.size()
    outside = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh, outside)


def _interleave_heads(qkv: Tensor, ranks: int) -> None:
    """Order the rows so that the piece of each rank holds the queries, keys and values of its heads."""
    with torch.no_grad():
        parts = qkv.unflatten(0, (3, ranks, -1)).transpose(0, 1)
        qkv.copy_(parts.reshape(qkv.shape).clone())


def optimizer_of(module: nn.Module, shape: Shape) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW and the schedule of the GPT; a group holds tensors of one kind, which the fused loops of torch need."""
    whole = shape.module()
    groups: dict[tuple[bool, object], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        decays = "blocks." in name and name.endswith("weight") and "norm" not in name
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[decays, mesh].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": ps, "weight_decay": whole.weight_decay if decays else 0.0} for (decays, _), ps in groups.items()],
        lr=whole.learning_rate,
        betas=(0.9, 0.95),
    )
    total = 1_000_000
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, total, whole.warmup_steps, whole.min_lr_ratio)
    )


def pipeline(shape: Shape, micro_batches: int, data: int = 1, tensor: int = 1) -> Callable[[], float | None]:
    """One step of 1F1B over all ranks, under FSDP2 and tensor parallelism if ``data`` and ``tensor`` say so."""
    stages = dist.get_world_size() // (data * tensor)
    mesh = init_device_mesh("cpu", (stages, data, tensor), mesh_dim_names=("pp", "dp", "tp"))
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    whole = shape.module()
    if tensor > 1:
        cut_tensor_parallel(whole, mesh["tp"])
    part = StageOfGPT(whole, rank, stages)
    if data > 1:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(part, rank, stages, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=cross_entropy)
    optimizer, scheduler = optimizer_of(part, shape)
    batches = shape.batches(shape.batch // data, replica, data)

    def step() -> float | None:
        batch = next(batches)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch[:, :-1].contiguous())
        elif rank == stages - 1:
            schedule.step(target=batch[:, 1:].contiguous(), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def tensor_parallel(shape: Shape) -> Callable[[], float | None]:
    """One step of the whole GPT under ``parallelize_module``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    module = shape.module()
    cut_tensor_parallel(module, mesh)
    optimizer, scheduler = optimizer_of(module, shape)
    batches: Iterator[Tensor] = shape.batches(shape.batch)

    def step() -> float | None:
        batch = next(batches)
        loss = cross_entropy(module(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return float(loss.detach())

    return step
