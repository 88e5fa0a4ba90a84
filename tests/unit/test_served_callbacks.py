"""Callbacks that take a rank for the whole job: what becomes of each, seen without ranks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    ThroughputMonitor,
)
from lightning.pytorch.utilities.model_summary import ModelSummary, summarize
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.trainer.callbacks.last_checkpoint import ExceptionCheckpoints
from lightning_3d.trainer.callbacks.measuring_callbacks import serve_throughput
from lightning_3d.trainer.callbacks.model_summary import WholeSummary, held_by_stage
from lightning_3d.trainer.callbacks.served import refuse
from lightning_3d.trainer.processes.failure import FailureGuard, SiblingFailure
from tests.dist.lightning_modules import WIDTH, Tokens


def test_callbacks_that_cannot_work_over_ranks_are_refused_with_another_way() -> None:
    refuse([EarlyStopping("loss"), LearningRateFinder(), OnExceptionCheckpoint(".")])
    with pytest.raises(ConfigError, match=r"BatchSizeFinder .*micro_batch_size"):
        refuse([BatchSizeFinder()])
    with pytest.raises(ConfigError, match=r"ModelPruning .*full_state_dict"):
        refuse([ModelPruning("l1_unstructured")])


def test_rates_of_a_device_add_up_to_those_of_the_job() -> None:
    monitor = ThroughputMonitor(len)
    throughput = monitor._throughputs[None] = Throughput(available_flops=100, world_size=8, window_size=2)  # type: ignore[index]
    mesh: Any = SimpleNamespace(dp=SimpleNamespace(size=2), world=SimpleNamespace(size=8))
    serve_throughput([monitor], mesh)
    serve_throughput([monitor], mesh)  # a second run with the same callback
    for number in (1, 2):  # each replica: a batch of 4 samples and 40 operations per second
        throughput.update(time=float(number), batches=number, samples=4 * number, flops=40)
    got = throughput.compute()
    assert (got["samples_per_sec"], got["batches_per_sec"]) == (8.0, 2.0)
    assert (got["device/samples_per_sec"], got["flops_per_sec"], got["device/flops_per_sec"]) == (1.0, 80.0, 10.0)
    assert got["device/mfu"] == 0.1
    assert got["samples"] == 8  # those that this rank has seen, as under DDP


class Attends(Tokens):
    """With a tie, a loose parameter, a buffer and a value made in forward."""

    def __init__(self) -> None:
        super().__init__(2)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))
        self.norm.requires_grad_(False)
        self.example_input_array = torch.zeros(4, 6, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.shift + torch.arange(6)[:, None]
        x = self.attention(x, src_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LooksAtValues(Tokens):
    def __init__(self) -> None:
        super().__init__(2)
        self.example_input_array = torch.zeros(4, 6, dtype=torch.long)

    def forward(self, tokens: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().forward(tokens[:, : int(tokens.max()) + 1])


@pytest.mark.parametrize("depth", [1, 2, -1])
def test_a_summary_without_values_is_lightnings(depth: int) -> None:
    module = Attends()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    got, expected = WholeSummary.of(module, depth), summarize(module, depth)
    assert torch.equal(torch.get_rng_state(), state)
    assert got.summary_data == expected._get_summary_data()
    for name in ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops"):
        assert getattr(got, name) == getattr(expected, name), name
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.training


def test_a_model_that_looks_at_values_is_summarised_without_sizes() -> None:
    module = LooksAtValues()
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="without input and output sizes"):
        got = WholeSummary.of(module, 1)
    assert module.training and torch.equal(torch.get_rng_state(), state)
    assert "In sizes" not in dict(got.summary_data)
    assert got.total_parameters == sum(p.numel() for p in module.parameters())
    assert module.example_input_array is not None


def test_a_summary_of_a_lightning_that_counts_no_flops_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelSummary, "total_flops")  # before 2.5.2
    got = WholeSummary.of(Tokens(2), 1)
    assert (got.total_flops, got.total_parameters) == (0, 812)


def test_what_the_ranks_of_each_stage_hold_is_told_in_a_line() -> None:
    stage = SimpleNamespace(rank=0)
    mesh: Any = SimpleNamespace(pp=stage, control_world=SimpleNamespace(group=None))
    assert held_by_stage(Tokens(2), mesh) == "Of these, each rank holds parameters: 812."


def guards(count: int) -> list[FailureGuard]:
    store = dist.HashStore()
    made = [FailureGuard() for _ in range(count)]
    for guard in made:
        guard._store, guard._sizes = store, SimpleNamespace(world=count)
    return made


def meet(words: list[str | None], patience: float = 1.0, late: float = 0.0) -> list[bool | None]:
    answers: list[bool | None] = [None] * len(words)

    def come(rank: int, guard: FailureGuard) -> None:
        if words[rank] is not None:
            time.sleep(late * rank)
            answers[rank] = guard.meet(str(words[rank]), patience)

    threads = [threading.Thread(target=come, args=item) for item in enumerate(guards(len(words)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_ranks_that_fail_meet_or_do_not_wait_for_each_other() -> None:
    assert meet(["here", "here", "here"], patience=20.0, late=0.2) == [True] * 3
    assert meet(["here", None]) == [False, None]
    assert meet(["here", "there"]) == [False, False]
    assert meet(["here", "here"], patience=0.2, late=0.6) == [False, False], "one answer for all"


def test_a_rank_that_only_hears_of_a_failure_saves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    saves = OnExceptionCheckpoint("folder")
    served = ExceptionCheckpoints()
    guard = guards(1)[0]
    served.install([saves], guard)
    guard._tripped = "another rank has failed"
    saves.on_exception(None, None, SiblingFailure())  # type: ignore[arg-type]
    assert not capsys.readouterr().err
    served.remove()
    assert "on_exception" not in vars(saves)
