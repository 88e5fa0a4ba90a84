"""Timings on a device that answers late, figures from many ranks, and pictures of a step, all without a run."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_3d import events as events_module
from lightning_3d.config import Sizes
from lightning_3d.events import DeviceClock, Event, EventSource, Phase, StepEvents
from lightning_3d.models import GPT
from lightning_3d.monitor.figures import Figures, Slowest, figures, utilisation
from lightning_3d.monitor.model_flops import count_model
from lightning_3d.monitor.own_time import pipeline_seconds, summarize, times_of
from lightning_3d.monitor.record import RankWindow, Spread
from lightning_3d.monitor.step_picture import RankStep, draw_step, step_trace
from lightning_3d.monitor.tags import CHARTS, DESCRIPTIONS, scalars
from lightning_3d.planner.flops import model_flops_per_token
from lightning_3d.planner.reading import shape_of_module


class Device:
    """A GPU as events see it: work is queued now and done later."""

    def __init__(self) -> None:
        self.queued = 0.0
        """Milliseconds of work given to it."""
        self.done = 0.0
        self.made = 0

    def event(self) -> Any:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self, idle_stream: object = None) -> None:
        self.at = self.device.queued if idle_stream is None else self.device.done

    def query(self) -> bool:
        return self.at <= self.device.done

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.at)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query(), "asked before it happened"
        return later.at - self.at


def test_a_device_is_asked_when_it_is_done_and_its_events_come_again() -> None:
    device = Device()
    events = EventSource(DeviceClock(device.event, object))
    told: list[StepEvents] = []
    events.listen(told.append)
    for step in range(6):
        events.begin_step(step)
        events.count(1, 2, 3)
        with events.span(Phase.FORWARD, 0, 0):
            device.queued += 10
            with events.span(Phase.TP, label="all_reduce", bytes=8):
                device.queued += 5
        device.done = device.queued - 15  # always a step behind
        assert len(told) == max(0, step - 1)
    made = device.made
    assert made <= 3 * 6 + 1  # events of three steps at most are on their way, and one look at the host's clock
    events.flush()
    assert [step.step for step in told] == list(range(6))
    for before, after in itertools.pairwise(told):
        assert before.end == pytest.approx(after.begin)
    forward, tp = told[-1].events
    assert (forward.phase, tp.phase) == (Phase.FORWARD, Phase.TP)
    assert forward.seconds == pytest.approx(0.015)
    assert tp.seconds == pytest.approx(0.005)
    assert told[-1].begin - told[0].begin == pytest.approx(0.075)


def test_steps_stay_on_the_hosts_clock_though_that_of_the_device_runs_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, passed, late_s = itertools.count(0.0, 1e-6), 0.0, 0.4
    host = SimpleNamespace(perf_counter=lambda: 10.0 + passed + next(looks), time=lambda: 5e4 + passed)
    monkeypatch.setattr(events_module, "time", host)
    device = Device()
    device.done = -1e3 * late_s
    clock = DeviceClock(device.event, object)
    events = EventSource(clock)
    told: list[StepEvents] = []
    events.listen(told.append)
    for step in range(100):
        events.begin_step(step)
        events.count(1, 1, 1)
        passed += 1.0
        device.queued += 1001.0
        device.done = device.queued - 1e3 * late_s
    events.flush()
    for step, one in enumerate(told):
        begun = step + late_s  # when the device comes to it
        assert one.wall - 5e4 == pytest.approx(begun, abs=0.015)  # up to 0.1 if nobody looked again
        assert one.begin - 10.0 == pytest.approx(begun, abs=0.015)
    assert len(told) == 100

    monkeypatch.setattr(FakeEvent, "query", lambda event: False)  # all streams share one queue
    assert clock.now() is None


def test_validation_lies_in_the_training_step_and_its_batches_go_to_those_who_ask() -> None:
    events = EventSource()
    training: list[StepEvents] = []
    both: list[StepEvents] = []
    events.listen(training.append)
    events.listen(both.append, modes=("train", "validation"))
    events.begin_step(0)
    events.count(1, 1, 1)
    events.begin_evaluation()
    for _ in range(2):
        events.begin_step(1, "validation")
        events.count(1, 1, 1)
        with events.span(Phase.FORWARD, 0, 0):
            pass
    events.end_evaluation()
    with events.span(Phase.CHECKPOINT):
        pass
    events.flush()
    assert [step.mode for step in both] == ["validation", "validation", "train"]
    assert [[event.phase for event in step.events] for step in training] == [[Phase.EVALUATION, Phase.CHECKPOINT]]
    events.unlisten(training.append)
    events.unlisten(both.append)
    events.begin_step(2)
    assert not events.is_recording


def test_a_loader_that_has_run_out_begins_no_step() -> None:
    events = EventSource()
    told: list[StepEvents] = []
    events.listen(told.append)
    events.begin_step(0)
    events.begin_step(0)  # a second loader of the same batch
    with events.span(Phase.LOADER) as span:
        assert span is not None
        span.only_last = 0.0
    events.count(1, 1, 1)
    events.begin_step(1)
    events.flush()
    assert len(told) == 1
    assert next(event.phase for event in told[0].events) is Phase.SYNC


def test_a_run_that_failed_leaves_no_step_to_the_next() -> None:
    events = EventSource()
    told: list[StepEvents] = []
    events.listen(told.append)
    events.begin_step(7)
    events.count(1, 1, 1)
    with pytest.raises(ValueError), events.span(Phase.FORWARD):
        raise ValueError
    events.abandon()
    events.begin_step(0)
    events.count(1, 1, 1)
    events.flush()
    assert [step.step for step in told] == [0]


def step(*events: tuple[Phase, float, float]) -> StepEvents:
    made = tuple(Event(phase, 0, 0, start, end, "", 0) for phase, start, end in events)
    return StepEvents(step=3, begin=0.0, end=10.0, wall=100.0, events=made, samples=4, tokens=40, micro_batches=1)


FIRST = step(
    (Phase.LOADER, 0.0, 1.0),
    (Phase.PIPELINE, 1.0, 9.0),
    (Phase.FORWARD, 1.0, 3.0),
    (Phase.TP, 2.0, 3.0),
    (Phase.BACKWARD, 3.0, 9.0),
    (Phase.PP_WAIT, 3.0, 5.0),
)
SECOND = step(
    (Phase.PIPELINE, 1.0, 7.0),
    (Phase.FORWARD, 1.0, 5.0),
    (Phase.PP_WAIT, 1.0, 3.0),
    (Phase.BACKWARD, 5.0, 7.0),
    (Phase.SYNC, 7.0, 9.5),
)


def two_stages() -> Figures:
    ranks = [summarize(0, [times_of(FIRST)]), summarize(1, [times_of(SECOND)])]
    found = figures(ranks, Sizes(pp=2, dp=1, tp=1))
    assert found is not None
    return found


def test_the_bubble_is_idle_over_the_time_of_the_longest_stage() -> None:
    assert pipeline_seconds(FIRST) == pytest.approx((8.0, 6.0))
    assert pipeline_seconds(SECOND) == pytest.approx((6.0, 4.0))
    # The second stage works 4 of 8 seconds: it waits 2 before its first forward, and 2 after its last backward.
    assert two_stages().bubble == pytest.approx((1 - 6 / 8, 1 - 4 / 8))


def test_shares_sum_to_one_and_what_waits_for_the_pipeline_is_the_pipelines() -> None:
    first, second = two_stages().shares
    assert sum(first.values()) == pytest.approx(1.0)
    assert first == pytest.approx({"compute": 0.5, "tp": 0.1, "pp": 0.2, "dp": 0.0, "loader": 0.1, "other": 0.1})
    # 2 s before the first forward and, of what it waits for all, the 2 s that the first stage still runs.
    assert second == pytest.approx({"compute": 0.4, "tp": 0.0, "pp": 0.4, "dp": 0.0, "loader": 0.0, "other": 0.2})


def test_rates_count_every_replica_once() -> None:
    ranks = [RankWindow(rank=i, steps=2, step_s=2.0, samples=4.0, tokens=40.0) for i in range(8)]
    found = figures(ranks, Sizes(pp=2, dp=2, tp=2))
    assert found is not None
    assert (found.samples_per_s, found.tokens_per_s, found.tokens_per_s_per_rank) == (4.0, 40.0, 5.0)
    assert utilisation(found, flops_per_sample=1e12, peak_flops=1e12) == pytest.approx(0.5)
    fixed = figures(ranks, Sizes(pp=2, dp=2, tp=2), tokens_per_sample=100)
    assert fixed is not None
    assert fixed.tokens_per_s == 400.0
    assert figures([*ranks[:7], RankWindow(rank=7, steps=0)], Sizes(pp=2, dp=2, tp=2)) is None


def test_the_slowest_loader_is_the_one_that_others_wait_for() -> None:
    # Every rank of both replicas waits as long as the loader of rank 2 takes.
    waits = [Spread(3.0 + (rank == 1) * 1e-9, 3.0, 0.0) for rank in range(8)]
    readings = {0: 1.0, 2: 3.0}
    ranks = [
        RankWindow(
            rank=rank,
            steps=2,
            step_s=5.0,
            seconds={"loader": waits[rank], "forward": Spread(1.0, 1.0, 0.0)},
            reading=Spread(readings.get(rank, 0.0), 0.0, 0.0),
        )
        for rank in range(8)
    ]
    found = figures(ranks, Sizes(pp=2, dp=2, tp=2))
    assert found is not None
    assert found.slowest["loader"] == Slowest(2, 1.0) and "compute" not in found.slowest


def test_what_is_not_known_is_not_logged() -> None:
    known = scalars(two_stages(), 0.25, None)
    assert "speed/mfu" not in known
    assert known["pipeline/bubble_worst"] == pytest.approx(0.5)
    assert known.keys() <= DESCRIPTIONS.keys()
    assert set(CHARTS) == {"Where the time goes", "Speed", "Health"}


def test_flops_of_a_transformer_are_those_of_the_formula_at_every_length() -> None:
    model = GPT(num_layers=2, width=32, num_heads=2, sequence_length=64)
    counted = count_model(model)
    assert counted is not None
    for length in (16, 40, 64):
        expected = model_flops_per_token(shape_of_module(model, length)) * length
        assert counted.per_sample(torch.zeros(3, length, dtype=torch.int64)) == pytest.approx(expected)
    assert counted.per_sample(torch.zeros(3, 2, 5)) is None


def test_a_step_is_drawn_with_every_rank_and_traced_with_every_event() -> None:
    ranks = [
        RankStep(name="pp0", stage=0, rank=0, step=FIRST),
        RankStep(name="pp1", stage=1, rank=2, step=SECOND, clock_offset_s=0.5),
    ]
    drawing = draw_step(ranks, 0.25)
    assert "predicted bubble 25.0%" in drawing.description
    trace = json.loads(json.dumps(step_trace(ranks)))["traceEvents"]
    boxes = [entry for entry in trace if entry["ph"] == "X"]
    assert len(boxes) == len(FIRST.events) + len(SECOND.events)
    assert min(entry["ts"] for entry in boxes if entry["pid"] == 2) == pytest.approx(1.5e6)
    # A device tells the same time for the end of a message and of the forward it lies in: neither may end later.
    for convert in (int, round):
        first = [entry for entry in boxes if entry["pid"] == 0 and entry["cat"] in ("forward", "tp")]
        assert len({convert(entry["ts"] * 1e3) + convert(entry["dur"] * 1e3) for entry in first}) == 1
