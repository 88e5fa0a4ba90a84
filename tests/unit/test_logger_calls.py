"""What steps call on loggers: recorded per micro-batch, put together, sent, and carried out on rank 0."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment

from lightning_3d.errors import ConfigError, StageError
from lightning_3d.placeholder import Placeholder
from lightning_3d.trainer.data.messages import decode, encode
from lightning_3d.trainer.logging.logger_calls import LoggerCalls
from lightning_3d.trainer.replicas import ReplicaStrategy


class Experiment:
    """A client of some tracking service."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.config: dict[str, Any] = {}
        self.asked = 0

    @property
    def started(self) -> str:
        self.asked += 1
        return "run 5"

    def add(self, tag: str, value: Any, step: int | None = None) -> int:
        self.calls.append((tag, value, step))
        return len(self.calls)

    def __getitem__(self, key: str) -> Experiment:
        self.calls.append(key)
        return self


class Tracking(Logger):
    name, version = "tracking", 3

    def __init__(self) -> None:
        super().__init__()
        self._client = Experiment()
        self.metrics: list[Any] = []
        self.folder = "logs"

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        return self._client

    @property
    def run_id(self) -> str | None:
        """As MLflow's: known where the run was started."""
        return self.experiment.started if rank_zero_only.rank == 0 else None

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.metrics.append((metrics, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


class Ranks(ReplicaStrategy):
    """As much of a strategy as loggers ask for."""

    cluster_environment = None

    def __init__(self) -> None: ...

    def model_to_device(self) -> None: ...

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


class Process:
    """One rank of a mesh of two stages, or the only one."""

    def __init__(self, pp: int, rank: int) -> None:
        axis = SimpleNamespace(size=1, rank=0)
        stages = SimpleNamespace(size=pp, rank=rank, is_last=rank == pp - 1)
        self.logger = Tracking()
        self.module = LightningModule()
        self.strategy = Ranks()
        trainer: Any = SimpleNamespace(
            loggers=[self.logger], strategy=self.strategy, is_global_zero=rank == 0, progress_bar_callback=None
        )
        self.module._trainer = trainer
        mesh: Any = SimpleNamespace(rank=rank, pp=stages, dp=axis, tp=axis)
        self.calls = LoggerCalls(self.module, mesh)


@pytest.fixture(params=[1, 2], ids=["one stage", "two stages"])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Process, Process]:
    """Rank 0, and the rank whose step has a loss."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    if request.param == 1:
        only = Process(1, 0)
        return only, only
    return Process(2, 0), Process(2, 1)


def run(ranks: tuple[Process, Process], step: Any, sizes: tuple[int, ...] = (3, 1), filler: bool = False) -> Process:
    """A batch: the step on every micro-batch, and what follows on rank 0, which is returned."""
    zero, last = ranks
    last.calls.begin(filler, len(sizes))
    for index, size in enumerate(sizes):
        with last.calls.recording(size, float(size)):
            step(last, index)
    structure, tensors = encode(last.calls.collect())
    zero.calls.replay(decode(structure, tensors))
    return zero


def test_numbers_are_averaged_and_what_is_equal_is_called_once(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        logger = rank.logger
        assert isinstance(logger, Tracking)
        logger.experiment.add("loss", torch.tensor([2.0, 6.0][index]), 7)
        logger.experiment.add("rate", 0.5, step=7)
        logger.log_metrics({"a": [1.0, 2.0][index], "b": 3}, 7)

    zero = run(ranks, step)
    assert zero.logger._client.calls == [("loss", torch.tensor(3.0), 7), ("rate", 0.5, 7)]
    assert zero.logger.metrics == [({"a": 1.25, "b": 3}, 7)]
    assert type(zero.logger) is type(ranks[1].logger) is Tracking


def test_what_differs_is_called_for_every_micro_batch(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        image = torch.full((2, 2), float(index))
        rank.logger.experiment.add("image", image, 1)
        image.zero_()  # what was logged stays
        rank.logger.experiment.add("text", "same")

    calls = run(ranks, step).logger._client.calls
    assert [call[0] for call in calls] == ["image", "image", "text"]
    assert [float(call[1].mean()) for call in calls[:2]] == [0.0, 1.0]


def test_other_calls_in_other_micro_batches_are_kept_in_their_order(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        if index:
            rank.logger.experiment.add("second", 1.0)
        else:
            rank.logger.experiment.add("first", 1.0)
            rank.logger.experiment.add("first again", 2.0)

    assert [call[0] for call in run(ranks, step).logger._client.calls] == ["first", "first again", "second"]


def test_results_and_parts_of_an_experiment_can_be_called_and_handed_on(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        run = rank.logger.experiment
        run["train/loss"].add("x", 1.0)
        number = run.add("table", float(index) if index else "other")
        run.add("row of", number)
        run.config["seen"] = 4

    client = run(ranks, step).logger._client
    assert client.calls == ["train/loss", ("x", 1.0, None), ("table", "other", None), ("table", 1.0, None),
                            ("row of", 3, None)]  # fmt: skip
    assert client.config == {"seen": 4}


def test_plain_facts_are_there_at_once_and_answers_are_not(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        assert (rank.logger.name, rank.logger.version, rank.logger.folder) == ("tracking", 3, "logs")
        assert rank.logger.experiment
        with pytest.raises(AttributeError):
            _ = rank.logger.nothing  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"test_logger_calls.py:\d+ .*reads result within a step"):
            float(rank.logger.experiment.add("x", 1.0))

    run(ranks, step)


def test_what_only_rank_zero_knows_is_filled_in_there(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        rank.logger.experiment.add("of", rank.logger.run_id)

    zero = run(ranks, step)
    assert zero.logger._client.calls == [("of", "run 5", None)]
    assert zero is ranks[1] or not ranks[1].logger._client.asked, "the last stage must not start a run of its own"


def test_prints_are_made_once_by_rank_zero(ranks: tuple[Process, Process], capsys: pytest.CaptureFixture[str]) -> None:
    def step(rank: Process, index: int) -> None:
        rank.module.print("loss", [1.0, 5.0][index])

    run(ranks, step)
    assert capsys.readouterr().out == "loss 2.0\n"
    assert "print" not in vars(ranks[1].module)


def test_fillers_empty_micro_batches_and_steps_that_end_at_a_cut_leave_nothing(ranks: tuple[Process, Process]) -> None:
    def step(rank: Process, index: int) -> None:
        rank.logger.experiment.add("loss", 1.0)

    def cut(rank: Process, index: int) -> None:
        step(rank, index)
        raise KeyboardInterrupt

    assert run(ranks, step, filler=True).logger._client.calls == []
    assert run(ranks, step, sizes=(2, 0)).logger._client.calls == [("loss", 1.0, None)]
    last = ranks[1]
    last.calls.begin(False, 2)
    with pytest.raises(KeyboardInterrupt), last.calls.recording(1, 1.0):
        cut(last, 0)
    assert last.calls.collect() == ()
    assert type(last.logger) is Tracking
    assert rank_zero_only.rank == 0


def test_what_cannot_be_sent_or_is_not_there_is_refused_at_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    zero, last = Process(2, 0), Process(2, 1)

    def step(rank: Process, index: int) -> None:
        with pytest.raises(ConfigError, match=r"test_logger_calls.py:\d+ .*cannot be sent to rank 0"):
            rank.logger.experiment.add("hook", lambda: 1)
        foreign = Placeholder.of((), torch.float32, torch.device("cpu"), origin="embed")
        with pytest.raises(StageError, match=r"self.logger.experiment.add\(...\) needs values .*'embed'"):
            rank.logger.experiment.add("early", foreign)

    run((zero, last), step)


def test_the_stage_with_the_loss_passes_for_rank_zero_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)
    zero, last = Process(2, 0), Process(2, 1)
    seen = []
    for process in (zero, last):
        process.calls.begin(False, 2)
        with process.calls.recording(1, 1.0):
            seen.append((process.strategy.global_rank, process.strategy.is_global_zero, rank_zero_only.rank))
            process.logger.experiment.add("x", 1.0)
    assert seen == [(1, False, 1), (0, True, 0)]
    assert rank_zero_only.rank == 1
    assert [len(process.calls.collect()) for process in (zero, last)] == [0, 1]


def test_a_call_that_fails_on_rank_zero_says_where_it_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    only = Process(1, 0)
    with pytest.raises(TypeError):
        run((only, only), lambda rank, index: rank.logger.experiment.add())
    assert "test_logger_calls.py" in capsys.readouterr().err


def test_one_micro_batch_without_a_pipeline_calls_the_logger_itself() -> None:
    only = Process(1, 0)
    only.calls.begin(False, 1)
    with only.calls.recording(1, 1.0):
        assert only.logger.experiment is only.logger._client
    assert pickle.loads(pickle.dumps(only.calls.collect())) == ()
