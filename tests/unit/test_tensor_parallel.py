"""Plans are pure, cuts are exact, conversions keep classes: what one process can show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel import ParameterCut, Plan, check_block, plan
from lightning_3d.tensor_parallel.kinds import trace
from lightning_3d.tensor_parallel.layout import BlockLayout
from lightning_3d.tensor_parallel.probe import BlockCall
from lightning_3d.tensor_parallel.sequence import scatter_before
from lightning_3d.tensor_parallel.vocabulary import is_own
from tests.dist.tensor_parallel_models import MODELS, blocks_of, build


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dim", "sections"), [(0, (12,)), (0, (4, 4, 4)), (1, (7,)), (0, (8, 2, 2)), (1, (3, 4))])
def test_pieces_join_to_the_whole(dim: int, sections: tuple[int, ...], size: int) -> None:
    whole = torch.arange(84.0).view(12, 7)
    cut = ParameterCut(dim, (12, 7), sections, size)
    pieces = [cut.take(whole, rank) for rank in range(size)]
    assert torch.equal(cut.join(pieces), whole)
    assert sum(cut.local_size(rank) for rank in range(size)) == sum(sections)
    for rank, piece in enumerate(pieces):
        assert piece.shape[dim] == cut.local_size(rank)
        parts = [whole.narrow(dim, start, length) for start, length in cut.intervals(rank)]
        assert torch.equal(torch.cat(parts, dim), piece)


def _plan(name: str, model: nn.Module, **options: object) -> Plan:
    config = ParallelConfig(tensor_parallel=2, **options)  # type: ignore[arg-type]
    return plan(model, blocks_of(name, model), config, 2)


@pytest.mark.parametrize("name", ["nanogpt", "llama", "torch"])
def test_planning_leaves_the_model_and_the_random_state_alone(name: str) -> None:
    model = build(name)
    calls: list[str] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append("after"))
        module.register_forward_pre_hook(lambda *_: calls.append("before"))
    values = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    _plan(name, model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not calls
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    for before, module in zip(attributes, model.modules(), strict=True):
        assert before.keys() == vars(module).keys()
        assert all(before[key] is value for key, value in vars(module).items())


def test_planning_needs_no_values() -> None:
    with torch.device("meta"):
        model = MODELS["nanogpt"]()
    assert not _plan("nanogpt", model).is_empty
    assert all(parameter.is_meta for parameter in model.parameters())


def test_one_rank_has_nothing_to_plan() -> None:
    model = build("nanogpt")
    assert plan(model, blocks_of("nanogpt", model), ParallelConfig(), 1).is_empty


def test_a_weight_read_outside_its_layer_stays_whole() -> None:
    made = _plan("loose_head", build("loose_head"))
    assert not made.outside
    assert [layer.note for layer in made.whole if layer.name == "embed"] == [
        "its weight is also read outside the layer itself"
    ]


class _Branching(nn.Module):
    """Goes on in one of two ways, by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x).relu()) if bool(x.sum() > 0) else x - self.fc2(self.fc1(x).relu())


def test_blocks_that_ask_for_values_are_planned() -> None:
    model = nn.Sequential(_Branching(), _Branching())
    made = plan(model, [["0", "1"]], ParallelConfig(tensor_parallel=2), 2)
    assert [ways.layouts[0].row for _, ways in made.blocks[0].regions] == ["fc2"]


def test_sequence_parallel_refuses_hidden_states_without_a_sequence() -> None:
    block = nn.Linear(16, 4)
    scatter_before(block, "layers.0", Axis("tp", 2, 0, (0, 1), None), dim=1, hidden=0, dims=3)
    with pytest.raises(ConfigError, match=r"layers\.0 received hidden states of shape \[4, 16\]"):
        block(torch.ones(4, 16))


class _Switching(nn.Module):
    """A layer that computes by what stands in its attribute."""

    def __init__(self, how: object = None) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.how(self.first(x)) if callable(self.how) else self.first(x)
        return x + self.second(torch.relu(h) if self.how == "relu" else h.tanh())


def test_blocks_that_differ_in_nothing_are_run_once_and_others_each(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[nn.Module] = []

    def counted(block: nn.Module, *others: Any) -> Any:
        ran.append(block)
        return trace(block, *others)

    monkeypatch.setattr("lightning_3d.tensor_parallel.kinds.trace", counted)

    def groups(*hows: object) -> list[tuple[str, ...]]:
        ran.clear()
        model = nn.Sequential(nn.Linear(8, 8), *(_Switching(how) for how in hows))
        names = [str(index) for index in range(1, len(model))]
        return [kind.names for kind in plan(model, [names], ParallelConfig(tensor_parallel=2), 2).blocks]

    assert groups(None, None, None, None) == [("1", "2", "3", "4")] and len(ran) == 1
    assert groups("relu", None, "relu", None) == [("1", "3"), ("2", "4")] and len(ran) == 2
    scales = [lambda x, by=by: x * by for by in (2.0, 2.0, 3.0)]
    assert groups(*scales) == [("1", "2"), ("3",)] and len(ran) == 3, "what functions do shows when they are run"


@pytest.mark.parametrize(("start", "length"), [(0, 4), (4, 4), (4, 3), (7, 1), (0, 8)])
def test_numbers_outside_of_the_vocabulary_reach_a_look_up_that_fails(start: int, length: int) -> None:
    index = torch.tensor([-2, -1, *range(8), 8, 9])
    own = is_own(index, start, length, 8)
    inside = (index >= 0) & (index < 8)
    assert torch.equal(own & inside, (index >= start) & (index < start + length) & inside)
    assert bool(own[:2].all()) == (start == 0)
    assert bool(own[-2:].all()) == (start + length == 8)


class _Large(nn.Module):
    """Fits into no memory."""

    def forward(self, x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_check_without_memory_is_no_verdict() -> None:
    call = BlockCall((torch.zeros(2, 4, 8),), {})
    with pytest.raises(torch.OutOfMemoryError):
        check_block(_Large(), call, BlockLayout(), Axis("tp", 1, 0, (0,), None), torch.device("cpu"), None)
