"""C62 and its kind: sizes and options that cannot work end in a sentence that helps, before any process starts."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch.multiprocessing as mp
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.models import GPT
from tests.dist.lightning_modules import Tokens, rows
from tests.harness import run_trainer
from tests.told import told

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def trainer(devices: int = 8, nodes: int = 1, **options: Any) -> Trainer:
    return Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=ThreeDStrategy(**options), **QUIET)


def sizes(devices: int, **options: Any) -> tuple[int, int, int]:
    strategy = trainer(devices, **options).strategy
    found = strategy.config.sizes(strategy.num_processes, strategy.num_processes)
    return found.pp, found.dp, found.tp


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor_parallel": 2}, (1, 4, 2)),
        ({"pipeline_parallel": 4}, (4, 2, 1)),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, (2, 2, 2)),
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2}, (2, 2, 2)),
        ({}, (1, 8, 1)),
    ],
)
def test_c62_a_size_that_is_left_out_is_derived(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert sizes(8, **options) == expected


@pytest.mark.parametrize(
    ("devices", "nodes", "options", "words"),
    [
        # The arithmetic, and choices near to what was asked.
        (8, 1, {"tensor_parallel": 3}, ["3 x", "= 6", "8 ranks", "tensor_parallel=2", "tensor_parallel=4"]),
        (8, 1, {"tensor_parallel": 2, "pipeline_parallel": 3}, ["2 x", "= 6", "8 ranks", "pipeline_parallel=2"]),
        (8, 1, {"tensor_parallel": 2, "data_parallel": 3}, ["= 6", "8 ranks", "data_parallel=4"]),
        (8, 1, {"tensor_parallel": 16}, ["= 16", "8 ranks", "tensor_parallel=8"]),
        (2, 1, {"tensor_parallel": 2, "pipeline_parallel": 2}, ["= 4", "2 ranks", "start 4 ranks"]),
        # A layer shared by two machines.
        (4, 2, {"tensor_parallel": 8}, ["across nodes", "4 devices", "[1, 2, 4]", "allow_tp_across_nodes"]),
        (3, 2, {"tensor_parallel": 2}, ["across nodes", "3 devices", "[1, 3]"]),
        # The pipeline.
        (8, 1, {"schedule": "interleaved_1f1b", "virtual_stages": 2}, ["pipeline_parallel=1", "virtual_stages=1"]),
        (8, 1, {"pipeline_parallel": 2, "pipeline_split": [1, 2, 1]}, ["[1, 2, 1]", "3 sizes", "2 pipeline chunks"]),
        (8, 1, {"pipeline_parallel": 2, "virtual_stages": 2}, ["virtual_stages=2", "interleaved_1f1b"]),
        # Names: those that are known are told.
        (8, 1, {"schedule": "zero_bubble"}, ["'zero_bubble'", "'gpipe'", "'1f1b'", "'interleaved_1f1b'"]),
        (8, 1, {"zero_stage": 4}, ["zero_stage=4", "0, 1, 2, 3"]),
        (8, 1, {"zero_stage": True}, ["zero_stage=True", "0, 1, 2, 3"]),
        (8, 1, {"pipeline_split": "even"}, ["'even'", "'uniform'", "'flops'"]),
        (8, 1, {"tp_plan": "none"}, ["tp_plan='none'", "'auto'"]),
        (8, 1, {"tensor_parallel": 2, "tp_plan": {"*.up": "column"}}, ["'column'", "'colwise'", "'rowwise'"]),
        (8, 1, {"nonfinite": "ignore"}, ["'ignore'", "'skip'"]),
        (8, 1, {"activation_checkpointing": "some"}, ["'some'", "'full'"]),
        (8, 1, {"start_method": "thread"}, ["'thread'", "'popen'"]),
        # Numbers.
        (8, 1, {"num_micro_batches": 4, "micro_batch_size": 2}, ["num_micro_batches=4", "micro_batch_size=2"]),
        (8, 1, {"num_micro_batches": 0}, ["num_micro_batches=0", "positive"]),
        (8, 1, {"tensor_parallel": 0}, ["tensor_parallel=0", "positive"]),
        (8, 1, {"pipeline_parallel": "all"}, ["pipeline_parallel='all'", "'auto'"]),
        (8, 1, {"tensor_parallel": 2.0}, ["tensor_parallel=2.0", "whole number"]),
    ],
)
def test_c62_an_impossible_option_is_refused_when_the_trainer_is_made(
    devices: int, nodes: int, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(devices, nodes, **options)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


class ByHand(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def gpt(**options: Any) -> GPT:
    return GPT(**{"num_layers": 2, "width": 16, "num_heads": 4, "sequence_length": 8, "vocab_size": 12, **options})


@pytest.mark.parametrize("start_method", ["popen", "spawn"])
@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: Tokens(num_blocks=3), {"pipeline_parallel": 4}, ["4 chunks", "only 3 blocks", "blocks (3)", "most 3"]),
        (
            lambda: Tokens(num_blocks=3),
            {"pipeline_parallel": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
            ["4 chunks", "only 3 blocks"],
        ),
        (Tokens, {"pipeline_parallel": 2, "pipeline_split": [1, 2]}, ["[1, 2]", "3 blocks", "model of 4"]),
        (lambda: gpt(width=24, num_heads=6), {"tensor_parallel": 4}, ["attention", "6", "tensor_parallel=4", "[1, 2"]),
        (gpt, {"tensor_parallel": 2, "tp_plan": {"*.mlp.uq": "colwise"}}, ["'*.mlp.uq'", "blocks.*.mlp.up"]),
        (lambda: Tokens(vocab=9), {"tensor_parallel": 3}, ["up (16)", "tensor_parallel=3", "blocks.0"]),
        (
            lambda: gpt(width=18, num_heads=3),
            {"tensor_parallel": 4, "tp_plan": {"head": "rowwise"}},
            ["head", "18", "4 ranks"],
        ),
        (ByHand, {"pipeline_parallel": 2}, ["automatic_optimization=False", "pipeline_parallel=1"]),
    ],
)
def test_c62_a_module_that_does_not_fit_is_refused_before_a_process_starts(
    make: Any, options: dict[str, Any], words: list[str], start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(mp, "start_processes", started)
    fit = trainer(3 if options.get("tensor_parallel") == 3 else 4, start_method=start_method, **options)
    with pytest.raises(ValueError) as caught:
        fit.fit(make(), DataLoader(rows(4), batch_size=4))
    assert isinstance(caught.value, ConfigError)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


class BuiltLate(Tokens):
    """Its layers exist only in the processes that train."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = True


def refused(rank: int, world: int, make: Any, options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        fit = Trainer(accelerator="cpu", devices=world, strategy=ThreeDStrategy(**options), **QUIET)
        fit.fit(make(), DataLoader(rows(4), batch_size=4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"tensor_parallel": 3}, "= 3"), ({"pipeline_parallel": 2, "pipeline_split": [2, 3]}, "5 blocks")],
)
def test_c62_under_torchrun_every_rank_refuses_at_once(options: dict[str, Any], word: str) -> None:
    messages = run_trainer(2, refused, BuiltLate, options)
    assert len(set(messages)) == 1 and word in messages[0]


def told_of_micro_batches(make: Callable[[], Any]) -> list[str]:
    with told() as texts:
        make()
    return [text for text in texts if "micro-batches per step" in text]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel": 2, "num_micro_batches": 7}, ["7 micro-batches", "2 pipeline stages", "12%", "11%"]),
        ({"pipeline_parallel": 4, "num_micro_batches": 2}, ["2 micro-batches", "60%", "16 micro-batches", "16%"]),
        ({"pipeline_parallel": 2, "num_micro_batches": 8}, []),
        ({"pipeline_parallel": 1, "num_micro_batches": 1}, []),
        ({"pipeline_parallel": 2}, []),
    ],
)
def test_c62_too_few_micro_batches_are_told_of_with_the_bubble(options: dict[str, Any], words: list[str]) -> None:
    messages = told_of_micro_batches(lambda: trainer(**options))
    assert bool(messages) == bool(words)
    assert not [word for word in words if word not in messages[0]], messages


def told_in_training(rank: int, world: int) -> list[list[str]]:
    def fit(samples: int, **options: Any) -> None:
        strategy = ThreeDStrategy(pipeline_parallel=2, **options)
        run = Trainer(accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, **QUIET)
        run.fit(Tokens(), DataLoader(rows(6), batch_size=samples))

    return [told_of_micro_batches(lambda: fit(2)), told_of_micro_batches(lambda: fit(3, micro_batch_size=2))]


def test_c62_a_batch_that_could_be_cut_into_more_is_told_of_once() -> None:
    (small, first), other = run_trainer(2, told_in_training)
    assert len(first) == 1 and "2 micro-batches per step" in first[0] and "33%" in first[0]
    assert small == [] and other == [[], []]
