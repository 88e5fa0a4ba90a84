"""A small model cut by hand at any layout, with known values everywhere: what checkpoint tests save and load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_3d.checkpoint import ModelState, group_names, state_dict_keys
from lightning_3d.config import Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.placeholder import is_placeholder, placeholder_parameter
from lightning_3d.tensor_parallel.parameters import ParameterCut

VOCAB, WIDTH, BLOCKS = 1001, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Model(nn.Module):
    """Vocabulary that does not divide, packed rows, row-cut layers, odd norms, buffers, and a tied head."""

    def __init__(self, tied: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.to(dtype)
        if tied:
            self.head.weight = self.embed.weight


def value(name: str, like: Tensor, seed: int = 0) -> Tensor:
    """The full tensor that belongs to ``name``."""
    generator = torch.Generator().manual_seed(seed * 1000003 + sum(map(ord, name)) * 7919 + len(name))
    if not like.is_floating_point():
        return torch.randint(0, 1000, like.shape, generator=generator, dtype=like.dtype)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def cut_of(name: str, shape: tuple[int, ...], size: int) -> ParameterCut | None:
    """How ``size`` tensor-parallel ranks cut it."""
    if name in ("embed.weight", "head.weight"):
        return ParameterCut(0, shape, (shape[0],), size)
    if ".qkv." in name:
        return ParameterCut(0, shape, (2 * WIDTH, WIDTH // 2, WIDTH // 2), size)
    if name.endswith("proj.weight"):
        return ParameterCut(1, shape, (shape[1],), size)
    return None


@dataclass
class Built:
    """One rank's model, and the whole one's full values."""

    model: nn.Module
    state: ModelState
    mesh: Mesh
    full: dict[str, Tensor]


def build(
    sizes: Sizes,
    seed: int = 0,
    shard: bool = True,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    steps: int = 1,
    optimizer=torch.optim.AdamW,
) -> Built:
    """The model at a layout; its values are those of ``seed``, its optimizer has made ``steps`` steps."""
    mesh = build_mesh(sizes, torch.device("cpu"))
    model = Model(tied, dtype)
    keys, ties = state_dict_keys(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    groups = group_names([_optimizer(model, optimizer)], dict(model.named_parameters()))
    full = {name: value(name, tensor, seed) for name, tensor in model.state_dict().items() if name not in ties}
    full.update({alias: full[first] for alias, first in ties.items()})
    cuts = {name: cut for name, shape in shapes.items() if (cut := cut_of(name, shape, sizes.tp)) is not None}
    for module_name, module in model.named_modules():
        owned = owned_by(module_name, mesh)
        for own, parameter in list(module.named_parameters(recurse=False)):
            name = f"{module_name}.{own}"
            if not owned:
                setattr(module, own, placeholder_parameter(parameter, mesh.device, name))
                continue
            cut = cuts.get(ties.get(name, name))
            setattr(module, own, nn.Parameter(_local(full[name], cut, mesh)))
        for own, buffer in list(module.named_buffers(recurse=False)):
            if owned:
                buffer.copy_(full.get(f"{module_name}.{own}", buffer))
    ends = [end for end, owned in ((model.embed, mesh.pp.is_first), (model.head, mesh.pp.is_last)) if owned]
    if tied and len(ends) == 2:
        model.head.weight = model.embed.weight
    if shard and mesh.dp.size > 1 and mesh.device_mesh is not None:
        for units in [ends] if tied else [[end] for end in ends]:
            if units:
                fully_shard(units, mesh=mesh.device_mesh["dp"])
        for name, block in model.blocks.named_children():
            if owned_by(f"blocks.{name}", mesh):
                fully_shard(block, mesh=mesh.device_mesh["dp"])
    made = _optimizer(model, optimizer)
    for step in range(steps):
        for parameter in model.parameters():
            if not is_placeholder(parameter):
                parameter.grad = torch.full_like(parameter, 0.25 + step)
        made.step()
    state = ModelState(
        parameters=dict(model.named_parameters(remove_duplicate=False)),
        buffers={
            name: buffer
            for name, buffer in model.named_buffers()
            if name in keys and owned_by(name.rpartition(".")[0], mesh)
        },
        keys=keys,
        ties=ties,
        cuts=cuts,
        optimizers=[made],
        groups=groups,
        layout={"zero_stage": 3 if shard else 0},
    )
    return Built(model, state, mesh, full)


def owned_by(module_name: str, mesh: Mesh) -> bool:
    """Whether this stage holds the module."""
    if module_name.startswith("embed"):
        return mesh.pp.is_first
    if module_name.startswith("head"):
        return mesh.pp.is_last
    if module_name.startswith("blocks."):
        index = int(module_name.split(".")[1])
        return index * mesh.pp.size // BLOCKS == mesh.pp.rank
    return False


def _optimizer(model: nn.Module, kind) -> torch.optim.Optimizer:
    parameters = list(model.named_parameters())
    decay = [parameter for name, parameter in parameters if name.endswith("weight") and "norm" not in name]
    rest = [parameter for name, parameter in parameters if not name.endswith("weight") or "norm" in name]
    return kind([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def _local(full: Tensor, cut: ParameterCut | None, mesh: Mesh) -> Tensor:
    if cut is None or mesh.tp.size == 1:
        return full.clone()
    local = cut.take(full, mesh.tp.rank)
    assert mesh.device_mesh is not None
    return DTensor.from_local(
        local, mesh.device_mesh["tp"], [Shard(cut.dim)], run_check=False, shape=full.shape, stride=full.stride()
    )
