"""Models cut over tensor-parallel ranks against the same models whole: loss, output and every gradient, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.collectives import all_gather_object, all_reduce
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.tensor_parallel import AppliedPlan, apply, plan
from tests.dist.tensor_parallel_models import MODELS, blocks_of, build
from tests.harness import run_ranks

TOLERANCE = 1e-10
LOOSE = {"llama": 1e-6, "qwen3": 1e-6, "phi3": 1e-6}  # their norms compute in float32 whatever the model's type


def mesh_of(world_size: int) -> Mesh:
    return build_mesh(Sizes(pp=1, dp=1, tp=world_size), torch.device("cpu"))


def cut(name: str, model: nn.Module, mesh: Mesh, **options: Any) -> AppliedPlan:
    config = ParallelConfig(tensor_parallel=mesh.tp.size, **options)
    made = plan(model, blocks_of(name, model), config, mesh.tp.size)
    return apply(model, made, mesh, lambda _: True)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    vocab = logits.shape[-1]
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab), ids[:, 1:].flatten())


def whole_gradient(name: str, parameter: nn.Parameter, applied: AppliedPlan, mesh: Mesh) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    if isinstance(gradient, DTensor):
        pieces = all_gather_object(gradient.to_local(), mesh.tp)
        return applied.cuts[name].join(pieces)
    assert not isinstance(parameter, DTensor)
    return all_reduce(gradient.clone(), mesh.tp) if name in applied.partial else gradient


def close(value: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = (value - expected).abs().max().item()
    scale = max(1e-3, expected.abs().max().item())
    assert error <= tolerance * scale, f"{what}: {error:g} of {scale:g}"


def compare(name: str, model: nn.Module, reference: nn.Module, applied: AppliedPlan, mesh: Mesh) -> None:
    tolerance = LOOSE.get(name.split("_")[0], TOLERANCE)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):  # gradients add up
        ids = torch.randint(0, 60, (2, 8), generator=generator)
        loss, expected = loss_of(model, ids), loss_of(reference, ids)
        close(loss.detach(), expected.detach(), tolerance, "loss")
        loss.backward()
        expected.backward()
    parameters = dict(model.named_parameters())
    assert list(parameters) == [name for name, _ in reference.named_parameters()]
    for key, parameter in reference.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        assert parameters[key].shape == parameter.shape
        close(whole_gradient(key, parameters[key], applied, mesh), gradient, tolerance, f"gradient of {key}")
    close(torch.as_tensor(model(ids)), reference(ids), tolerance, "logits")


def _equal(rank: int, world_size: int, name: str, options: dict[str, Any]) -> str:
    mesh = mesh_of(world_size)
    model = build(name)
    reference = copy.deepcopy(model)
    applied = cut(name, model, mesh, **options)
    for key, parameter in reference.named_parameters():
        mine = dict(model.named_parameters())[key]
        if isinstance(mine, DTensor):
            pieces = all_gather_object(mine.to_local().detach(), mesh.tp)
            assert torch.equal(applied.cuts[key].join(pieces), parameter), key
    compare(name, model, reference, applied, mesh)
    return str(applied)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "three_kv_heads"])
def test_two_ranks_compute_what_one_computes(name: str) -> None:
    tables = run_ranks(_equal, 2, name, {})
    assert len(set(tables)) == 1
    print(tables[0])


@pytest.mark.parametrize("name", ["nanogpt_1001_tied", "grouped", "grouped_one", "torch"])
def test_four_ranks_compute_what_one_computes(name: str) -> None:
    run_ranks(_equal, 4, name, {})


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(
            (name, 2)
            for name in ("nanogpt", "fused", "grouped", "torch", "torch_sequence_first", "llama", "gpt2", "bert")
        ),
        *((name, 4) for name in ("nanogpt", "grouped_one")),
    ],
)
def test_sequence_parallel_computes_the_same(name: str, world_size: int) -> None:
    run_ranks(_equal, world_size, name, {"sequence_parallel": True})


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, 2) for name in ("nanogpt", "nanogpt_1001", "nanogpt_1001_tied", "llama", "llama_tied", "gpt2")),
        ("nanogpt_1001_tied", 4),
    ],
)
def test_loss_parallel_computes_the_same(name: str, world_size: int) -> None:
    run_ranks(_equal, world_size, name, {"loss_parallel": True})
