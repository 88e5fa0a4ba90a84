"""Which optimizers step on local tensors, and what a rank without parameters does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.errors import ConfigError
from lightning_3d.placeholder import placeholder_parameter
from lightning_3d.sharding import adafactor
from lightning_3d.sharding.optimizer import ELEMENT_WISE, is_element_wise, local_step
from lightning_3d.sharding.user_step import UserStep


class Renamed(optim.AdamW):
    """A subclass that only fixes its defaults."""

    def __init__(self, params: object) -> None:
        super().__init__(params, lr=0.1, betas=(0.8, 0.9))  # type: ignore[arg-type]


class WithOwnStep(optim.AdamW):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


class WithOwnInit(optim.SGD):
    def _init_group(self, *args: object) -> bool:
        return super()._init_group(*args)  # type: ignore[arg-type]


def _parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("kind", [*ELEMENT_WISE, Renamed])
def test_known_optimizers_and_plain_subclasses_are_element_wise(kind: type[optim.Optimizer]) -> None:
    for _ in range(2):  # torch wraps the step of a class when its first instance is made
        assert is_element_wise(kind([_parameter()]))  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [WithOwnStep, WithOwnInit, optim.LBFGS, optim.Adafactor, optim.SparseAdam])
def test_optimizers_that_may_need_whole_parameters_are_not(kind: type[optim.Optimizer]) -> None:
    for _ in range(2):
        assert not is_element_wise(kind([_parameter()]))  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_placeholders_are_left_out_and_put_back(options: dict[str, bool]) -> None:
    mine = _parameter()
    theirs = [placeholder_parameter(_parameter(), torch.device("cpu"), "theirs") for _ in range(2)]
    optimizer = optim.AdamW([{"params": [theirs[0], mine]}, {"params": [theirs[1]], "lr": 1.0}], lr=0.1, **options)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = optimizer.state
    mine.grad = torch.ones(3)
    with local_step(optimizer):
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
        optimizer.step()
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in group] for group in groups
    ]
    assert optimizer.state is state and list(state) == [mine]
    assert not torch.equal(mine, torch.ones(3))


def test_an_error_in_the_step_puts_everything_back() -> None:
    theirs = placeholder_parameter(_parameter(), torch.device("cpu"), "theirs")
    optimizer = optim.SGD([_parameter(), theirs], lr=0.1)
    with pytest.raises(RuntimeError, match="stop"), local_step(optimizer):
        raise RuntimeError("stop")
    assert len(optimizer.param_groups[0]["params"]) == 2


def test_a_step_that_mixes_parts_with_plain_tensors_is_told_from_an_error_in_its_closure() -> None:
    optimizer = WithOwnStep([_parameter()])

    def mix() -> None:
        raise RuntimeError("aten.add_.Tensor got mixed torch.Tensor and DTensor, need to convert")

    step = UserStep(optimizer)
    with pytest.raises(ConfigError, match="The step of WithOwnStep computes with parameters"), step.running():
        mix()
    with pytest.raises(RuntimeError, match=r"^aten.add_"), step.running():
        step.closure(mix)()


def test_ranks_sum_over_the_axes_of_the_mesh_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # Names of groups differ from rank to rank, and sort as text: "10" before "9". Sums over two axes would cross.
    summed: list[object] = []
    monkeypatch.setattr(adafactor.dist, "all_reduce", lambda flat, group: summed.append(group))
    for dp, tp in (("9", "10"), ("8", "9"), ("10", "11")):
        adafactor._summed([(torch.ones(2), {"tp": tp}), (torch.ones(1), {"tp": tp, "dp": dp})])
        assert summed == [dp, tp]
        summed.clear()


def test_adafactor_rounds_a_parameter_of_16_bits_once() -> None:
    before, gradient = torch.randn(2, 400, generator=torch.Generator().manual_seed(0)).bfloat16()
    parameter = nn.Parameter(before.clone())
    parameter.grad = gradient
    optimizer = optim.Adafactor([parameter], lr=0.013, weight_decay=0.0)
    with torch.no_grad():
        adafactor.step_group(optimizer, optimizer.param_groups[0])
    eps = torch.finfo(torch.bfloat16).eps
    update = gradient.square().clamp(min=eps**2).rsqrt().mul(gradient).double()
    alpha = 0.013 * before.double().square().mean().sqrt() / update.square().mean().sqrt().clamp(min=1.0)
    assert torch.equal(parameter, (before.double() - update * alpha).bfloat16())


class _Doubles(TorchDispatchMode):
    """The sizes of tensors in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            self.sizes.add(result.numel())
        return result


def test_adafactor_copies_no_parameter_to_float64_for_its_norms() -> None:
    parameters = [nn.Parameter(torch.ones(6, 5)), nn.Parameter(torch.ones(7))]
    optimizer = optim.Adafactor(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad(), _Doubles() as doubles:
        adafactor.step_group(optimizer, optimizer.param_groups[0])
    assert max(doubles.sizes) <= len(parameters)
