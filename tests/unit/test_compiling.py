"""What is compiled, how wrappers are taken out, and what never reaches the compiler; no processes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.pipeline.compiling import Compiler, choose_parts, compile_parts
from lightning_3d.pipeline.recompute import recompute_wrapped
from lightning_3d.pipeline.wrappers import unwrap
from lightning_3d.placeholder import Placeholder, placeholder_parameter
from tests.dist.lightning_modules import WIDTH, Block, Tokens

EAGER = Compiler("eager")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(2))
        self.head: Any = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ["blocks.0", "blocks.1"]


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def test_wrappers_are_taken_out_and_remembered_by_plain_names() -> None:
    net = Net()
    names, weights = list(net.state_dict()), list(net.parameters())
    net.blocks[0] = checkpoint_wrapper(torch.compile(net.blocks[0], backend="eager", dynamic=True))
    net.blocks[1] = torch.compile(checkpoint_wrapper(net.blocks[1]), backend="aot_eager", fullgraph=True)
    net.head.compile(backend="eager")
    outer = nn.Sequential(torch.compile(net))
    wishes = unwrap(outer)
    assert not any(isinstance(part, OptimizedModule) for part in outer.modules())
    assert list(outer.state_dict()) == [f"0.{name}" for name in names]
    assert all(now is was for now, was in zip(outer.parameters(), weights, strict=True))
    assert list(wishes.compiled) == ["0", "0.blocks.0", "0.blocks.1", "0.head"]
    assert wishes.compiled["0.blocks.0"].dynamic is True
    for name in ("0.blocks.0", "0.head"):
        backend: Any = wishes.compiled[name].backend
        assert backend.compiler_fn is lookup_backend("eager")
    assert list(wishes.recomputed) == ["0.blocks.0", "0.blocks.1"]
    assert net.head._compiled_call_impl is None
    assert not unwrap(outer).compiled


@pytest.mark.parametrize(
    ("option", "wishes", "parts"),
    [
        (True, {}, ["blocks.0", "blocks.1"]),
        (False, {"": EAGER}, ["blocks.0", "blocks.1"]),
        (False, {"blocks.1": EAGER, "blocks.1.up": EAGER}, ["blocks.1"]),
        (False, {"blocks.0.up": EAGER, "head": EAGER}, ["blocks.0.up", "head"]),
        ("eager", {"head": EAGER}, ["blocks.0", "blocks.1", "head"]),
        (False, {}, []),
    ],
)
def test_what_holds_blocks_is_compiled_block_by_block(option: bool | str, wishes: Any, parts: list[str]) -> None:
    assert list(choose_parts(Net(), BLOCKS, option, wishes)) == parts


def test_a_model_without_blocks_is_compiled_child_by_child() -> None:
    assert list(choose_parts(Net(), [], True, {})) == ["head"]
    assert list(choose_parts(nn.Sequential(Net(), nn.ReLU()), [], True, {})) == ["0"]


def test_compiled_blocks_keep_names_and_numbers_and_share_what_is_compiled() -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    expected, names = net(x), list(net.state_dict())
    assert compile_parts(net, dict.fromkeys(BLOCKS, EAGER)) == 2
    torch.testing.assert_close(net(x), expected)
    assert list(net.state_dict()) == names
    assert graphs() == 1


def test_a_copy_of_a_compiled_block_computes_with_its_own_weights() -> None:
    net = Net()
    compile_parts(net, dict.fromkeys(BLOCKS, EAGER))
    recompute_wrapped(net, {"blocks.0": partial(checkpoint, use_reentrant=False)})
    twin = copy.deepcopy(net)
    x = torch.randn(2, 3, WIDTH)
    torch.testing.assert_close(twin(x), net(x))
    for parameter in twin.blocks.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(twin(x), twin.head(x))


def test_what_another_stage_owns_or_computes_is_never_compiled() -> None:
    net = Net()
    block = net.blocks[0]
    for part in block.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[key] = placeholder_parameter(parameter, torch.device("cpu"), key)
    assert compile_parts(net, dict.fromkeys(BLOCKS, EAGER)) == 1
    absent = Placeholder.of((2, 3, WIDTH), torch.float32, torch.device("cpu"), origin="blocks.0")
    assert isinstance(net.blocks[1](absent), Placeholder)
    assert graphs() == 0
    arrived = torch.randn(2, 3, WIDTH)
    absent.bind(arrived)
    torch.testing.assert_close(net.blocks[1](absent), type(net.blocks[1]).forward(net.blocks[1], arrived))
    assert graphs() == 1


def test_blocks_that_read_a_number_of_their_own_are_all_compiled() -> None:
    class Numbered(Block):
        number = 0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * (1 + self.number))

    net = Net()
    net.blocks = nn.ModuleList(Numbered() for _ in range(12))
    for number, block in enumerate(net.blocks):
        block.number = number
    x = torch.randn(2, 3, WIDTH)
    expected = net(x)
    compile_parts(net, {f"blocks.{index}": EAGER for index in range(12)})
    torch.testing.assert_close(net(x), expected)
    assert graphs() == 12


@pytest.mark.parametrize("kind", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
def test_the_users_checkpoint_wrapper_still_recomputes(kind: CheckpointImpl) -> None:
    net = Net()
    net.blocks[0] = checkpoint_wrapper(net.blocks[0], checkpoint_impl=kind)
    recompute_wrapped(net, unwrap(net).recomputed)
    calls = []
    net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    net(torch.randn(2, 3, WIDTH, requires_grad=True)).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        net(torch.randn(2, 3, WIDTH))
    assert len(calls) == 3


def test_a_compiled_lightning_module_is_taken_as_it_was() -> None:
    module = Tokens(2)
    strategy = ThreeDStrategy(tensor_parallel=2)
    strategy._lightning_module = from_compiled(torch.compile(module, backend="eager"))
    assert strategy.lightning_module is module
    assert module._compiler_ctx is None
    assert not {"forward", "training_step"} & vars(module).keys()
    assert list(choose_parts(module, BLOCKS, False, unwrap(module).compiled)) == BLOCKS
    strategy.connect(module)
    assert strategy.lightning_module is module


@pytest.mark.parametrize(("given", "words"), [("indoctor", "aot_eager"), (3, "True, False"), ("", "inductor")])
def test_unknown_backends_are_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"compile={given!r}.*{words}"):
        ThreeDStrategy(compile=given)
