"""Types, loss scaling and clipping, decided for all ranks alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d import sharding
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.precision import PRECISION_RULES, ThreeDPrecision
from lightning_3d.sharding import OwnedParameter
from lightning_3d.sharding.loss_scale import LossScaler
from lightning_3d.sharding.optimizer import local_step
from lightning_3d.sharding.reducer import local_of
from tests.dist.test_sharding import Net, Stage, batch, loss_of
from tests.harness import run_ranks


def _mesh(pp: int = 1, dp: int = 1, tp: int = 1) -> Mesh:
    return build_mesh(Sizes(pp=pp, dp=dp, tp=tp), torch.device("cpu"))


def _plugin(name: str, mesh: Mesh, nonfinite: str = "continue", scaler: LossScaler | None = None) -> ThreeDPrecision:
    plugin = ThreeDPrecision(name, scaler)
    plugin.attach(mesh, ParallelConfig(nonfinite=nonfinite))
    plugin._after_closure = lambda model, optimizer: None  # type: ignore[method-assign, assignment]
    return plugin


_MODEL: Any = SimpleNamespace(automatic_optimization=True)


def _types(rank: int, world: int, name: str, zero: int, tp: int) -> dict[str, Any]:
    mesh = _mesh(dp=world // tp, tp=tp)
    plugin = _plugin(name, mesh, scaler=LossScaler(128.0) if name == "16-mixed" else None)
    net = Net()
    net.norm = nn.BatchNorm1d(5)
    net = plugin.convert_module(net)  # type: ignore[assignment]
    if tp > 1:
        for block in net.blocks:
            block.split(mesh)
    stage = Stage(net)
    shards = sharding.build_sharding(
        stage, {0: list(net.blocks)}, mesh, ParallelConfig(zero_stage=zero), plugin.compute_dtype, unit_bytes=0
    )
    plugin.owned = shards.owned
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)  # 1e-8 is zero in float16
    computed: set[torch.dtype] = set()
    handle = net.blocks[0].up.register_forward_hook(lambda module, args, out: computed.add(out.dtype))
    if tp > 1:
        handle = net.head.register_forward_hook(lambda module, args, out: computed.add(out.dtype))
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        x, y = plugin.convert_input(tuple(part.float().chunk(mesh.dp.size)[mesh.dp.rank] for part in batch(0, 2)))
        shards.prepare_forward()
        for index in range(2):
            with plugin.forward_context():
                loss = stage(lambda: nn.functional.mse_loss(net.norm(net(x)), y))
            losses.append(loss)
            shards.prepare_backward(0, index == 1, index == 1)
            plugin.scale_loss(loss).backward()
        shards.finish()
        return loss

    for _ in range(2):
        plugin.optimizer_step(optimizer, _MODEL, closure)
    handle.remove()
    with torch.no_grad(), plugin.forward_context():
        net.eval()
        shards.prepare_forward()
        stage(lambda: net(plugin.convert_input(torch.ones(4, 3))))
        shards.release()
    owned = [item.param for item in shards.owned]
    return {
        "kept": {p.dtype for p in owned},
        "local": {local_of(p).dtype for p in owned},
        "grads": {p.grad.dtype for p in owned if p.grad is not None},
        "states": {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"},
        "computed": computed,
        "finite": all(bool(torch.isfinite(loss)) for loss in losses),
        "moved": losses[0].item() != losses[-1].item(),
        "buffers": net.norm.running_mean.dtype,
    }


@pytest.mark.parametrize("name", list(PRECISION_RULES))
@pytest.mark.parametrize(("zero", "tp"), [(0, 1), (1, 1), (2, 2), (3, 1)])
def test_types_are_those_of_the_table(name: str, zero: int, tp: int) -> None:
    rule = PRECISION_RULES[name]
    for found in run_ranks(_types, 2 * tp, name, zero, tp):
        assert found["kept"] == found["local"] == found["grads"] == found["states"] == {rule.kept}
        assert found["computed"] == {rule.computed}
        assert found["finite"] and found["moved"]
        assert found["buffers"] == rule.kept


def _low_sum(rank: int, world: int, zero: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mesh = _mesh(dp=world)
    stage = Stage(nn.Linear(64, 64, bias=False).bfloat16())
    shards = sharding.build_sharding(stage, {0: []}, mesh, ParallelConfig(zero_stage=zero))
    exact = torch.zeros(64, 64)
    for replica in range(world):
        torch.manual_seed(replica)
        x = torch.randn(8, 64).bfloat16()
        exact += (torch.ones(8, 64).t().bfloat16() @ x).float() / world
        if replica == rank:
            mine = x
    shards.prepare_forward()
    loss = stage(lambda: stage.module(mine).sum())
    shards.prepare_backward(0, True, True)
    loss.backward()
    shards.finish()
    grad = next(stage.module.parameters()).grad
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone(), exact.bfloat16()


@pytest.mark.parametrize("zero", [0, 1])
def test_bfloat16_gradients_are_summed_in_float32(zero: int) -> None:
    for found, exact in run_ranks(_low_sum, 4, zero):
        assert torch.equal(found, exact)


def _owned(rank: int, mesh: Mesh) -> tuple[list[OwnedParameter], list[Tensor]]:
    """Two stages; the first owns nothing. Parameters cut over tp, over dp and tp, whole, and a tied copy."""
    torch.manual_seed(3)
    parts = [torch.randn(8, 6, dtype=torch.float64) for _ in range(4)]
    if mesh.pp.rank == 0:
        return [], parts[:3]
    assert mesh.device_mesh is not None
    tp_mesh, both = mesh.device_mesh["tp"], mesh.device_mesh["dp", "tp"]
    owned = []
    for index, part in enumerate(parts):
        if index == 0:
            local = part.chunk(mesh.tp.size, 1)[mesh.tp.rank]
            grad: Tensor = DTensor.from_local(local.contiguous(), tp_mesh, [Shard(1)])
        elif index == 1:
            local = part.chunk(mesh.dp.size, 0)[mesh.dp.rank]
            grad = DTensor.from_local(local.contiguous(), both, [Shard(0), Replicate()])
        else:
            grad = part.clone()
        param = nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        owned.append(OwnedParameter(f"p{index}", param, counted=index != 3))
    return owned, parts[:3]


def _norms(rank: int, world: int) -> dict[str, Any]:
    mesh = _mesh(2, 2, 2)
    owned, parts = _owned(rank, mesh)
    whole = torch.cat([part.flatten() for part in parts])
    result = {
        kind: (sharding.global_norm(owned, mesh, kind).item(), whole.norm(kind).item())
        for kind in (2.0, float("inf"), 1.0, 3.0)
    }
    sharding.clip_by_norm(owned, mesh, 0.5)
    clipped = sharding.global_norm(owned, mesh, 2.0).item()
    sharding.clip_by_value(owned, 0.01)
    largest = sharding.global_norm(owned, mesh, float("inf")).item()
    copies = [local_of(item.param.grad).abs().max().item() for item in owned]
    bad = sharding.has_nonfinite(owned, mesh).item()
    if rank == 6:
        local_of(owned[2].param.grad)[0, 0] = float("nan")
    worse = sharding.has_nonfinite(owned, mesh).item()
    # The first holder of p2 is rank 4, which holds no NaN; p0's values are on rank 5 alone.
    if rank == 5:
        local_of(owned[0].param.grad)[0, 0] = float("nan")
    return {
        "norms": result,
        "clipped": clipped,
        "largest": largest,
        "copies": copies,
        "bad": (bad, worse),
        "nan": sharding.global_norm(owned, mesh, float("inf")).isnan().item(),
    }


def test_norm_counts_everything_once_and_is_the_same_on_all_ranks() -> None:
    found = run_ranks(_norms, 8)
    for result in found:
        assert result["norms"] == found[0]["norms"]
        for norm, expected in result["norms"].values():
            assert norm == pytest.approx(expected, rel=1e-12)
        assert result["clipped"] == pytest.approx(0.5, rel=1e-5)
        assert result["largest"] == 0.01
        assert all(copy <= 0.01 for copy in result["copies"])
        assert result["bad"] == (0.0, 1.0)
        assert result["nan"]


def _overflow(rank: int, world: int, name: str, nonfinite: str, bad_rank: int) -> dict[str, Any]:
    """Rank 0 owns no parameter at all."""
    mesh = _mesh(2, 1, 2)
    plugin = _plugin(name, mesh, nonfinite, LossScaler(8.0, growth_interval=2) if name == "16-mixed" else None)
    parameter = nn.Parameter(torch.ones(4))
    idle = nn.Parameter(torch.ones(1))
    has_own = rank != 0
    optimizer = torch.optim.AdamW([parameter if has_own else idle], lr=0.1)
    plugin.owned = [OwnedParameter("p", parameter)] if has_own else []
    history = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            parameter.grad = torch.full((4,), 2.0) * (plugin.scaler.factor if plugin.scaler else 1.0)
            if rank == bad_rank and step == 1:
                parameter.grad[2] = float("inf")
            return torch.tensor(1.0)

        before = (parameter.detach().clone(), {k: v.clone() for k, v in optimizer.state[parameter].items()})
        plugin.optimizer_step(optimizer, _MODEL, closure)
        same = torch.equal(before[0], parameter) and all(
            torch.equal(v, optimizer.state[parameter][k]) for k, v in before[1].items()
        )
        history.append((plugin.step_skipped, same, plugin.state_dict().get("scale")))
    return {"history": history, "values": parameter.tolist() if has_own else None, "state": plugin.state_dict()}


@pytest.mark.parametrize("bad_rank", [1, 2])
def test_overflow_on_one_rank_skips_the_step_on_all(bad_rank: int) -> None:
    found = run_ranks(_overflow, 4, "16-mixed", "continue", bad_rank)
    for rank, result in enumerate(found):
        assert [skipped for skipped, _, _ in result["history"]] == [False, True, False, False]
        assert [scale for _, _, scale in result["history"]] == [8.0, 4.0, 4.0, 8.0]
        assert result["state"] == found[0]["state"]
        if rank:
            assert [same for _, same, _ in result["history"]] == [False, True, False, False]
            assert result["values"] == found[1]["values"]


def test_nonfinite_skip_leaves_weights_and_state_untouched_on_all_ranks() -> None:
    for rank, result in enumerate(run_ranks(_overflow, 4, "32-true", "skip", 3)):
        assert [skipped for skipped, _, _ in result["history"]] == [False, True, False, False]
        if rank:
            assert [same for _, same, _ in result["history"]] == [False, True, False, False]


def _raises(rank: int, world: int) -> str:
    try:
        _overflow(rank, world, "32-true", "raise", 2)
    except FloatingPointError as error:
        return str(error)
    return ""


def test_nonfinite_raise_raises_on_all_ranks() -> None:
    for message in run_ranks(_raises, 4):
        assert "nonfinite='raise'" in message


class _Own(torch.optim.Optimizer):
    """A user's optimizer: works on what it is given."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_plain": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.1, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "own": lambda p: _Own(p),
}


def _optimizer(rank: int, world: int, name: str) -> dict[str, Any]:
    mesh = _mesh(dp=2, tp=2)
    net = Net().double()
    for block in net.blocks:
        block.split(mesh)
    stage = Stage(net)
    shards = sharding.build_sharding(stage, {0: list(net.blocks)}, mesh, ParallelConfig(zero_stage=1), unit_bytes=0)
    return _run_optimizer(net, stage, shards, mesh, name)


def _run_optimizer(net: Net, stage: Any, shards: Any, mesh: Mesh | None, name: str) -> dict[str, Any]:
    parameters = dict(net.named_parameters())
    late = parameters.pop("head.weight")
    decay = [p for n, p in parameters.items() if n.endswith("weight")]
    rest = [p for n, p in parameters.items() if not n.endswith("weight")]
    optimizer = OPTIMIZERS[name]([{"params": decay}, {"params": rest, "lr": 5e-3}])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": [late]})
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 2))
        if step == 2:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        x, y = batch(step, 2)
        if mesh is None:
            loss_of(net, x, y).backward()
        else:
            x, y = (part.chunk(2)[mesh.dp.rank] for part in (x, y))
            shards.prepare_forward()
            loss = stage(lambda x=x, y=y: loss_of(net, x, y))
            shards.prepare_backward(0, True, True)
            loss.backward()
            shards.finish()
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        with local_step(optimizer):
            optimizer.step()
        assert ids == [id(p) for group in optimizer.param_groups for p in group["params"]]
        scheduler.step()
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    names = dict(net.named_parameters())
    return {
        "weights": {n: full(p) for n, p in names.items()},
        "states": {
            n: {k: full(v) for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} for n, p in names.items()
        },
        "placed": all(
            isinstance(v, DTensor) and v.placements == p.placements and v.device_mesh == p.device_mesh
            for p in names.values()
            for k, v in optimizer.state[p].items()
            if isinstance(p, DTensor) and isinstance(v, Tensor) and v.dim()
        ),
    }


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_steps_on_shards_as_on_the_whole(name: str) -> None:
    expected = _run_optimizer(Net().double(), None, None, None, name)
    for found in run_ranks(_optimizer, 4, name):
        assert found["placed"]
        for key in ("weights", "states"):
            assert found[key].keys() == expected[key].keys()
            torch.testing.assert_close(found[key], expected[key], rtol=1e-10, atol=1e-12)
