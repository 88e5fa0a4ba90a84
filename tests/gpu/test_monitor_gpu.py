"""Timings on a GPU: events that are read when they have happened, and time of the device instead of the host's."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d.events import DeviceClock, EventSource, Phase, StepEvents
from lightning_3d.models import GPT
from lightning_3d.strategy import ThreeDStrategy

STEPS = 6


def test_a_span_takes_what_the_device_takes_and_nothing_waits_for_it() -> None:
    clock = DeviceClock()
    events = EventSource(clock)
    told: list[StepEvents] = []
    begun: list[float] = []
    events.listen(told.append)
    x = torch.randn(4096, 4096, device="cuda")
    for step in range(STEPS):
        begun.append(time.time())
        events.begin_step(step)
        events.count(1, 1, 1)
        with events.span(Phase.FORWARD, 0, 0):
            for _ in range(20):
                x = (x @ x).clamp(-1, 1)
    moment = clock.now()
    assert moment is not None and not torch.cuda.current_stream().query()  # though the device is at work
    events.flush()
    ended = time.time()
    assert [step.step for step in told] == list(range(STEPS))
    for step, at in zip(told, begun, strict=True):  # the device comes to a step after the host
        assert at - 1e-3 < step.wall < ended + 1e-3
    for step in told[1:]:  # the host has queued all of it long before the device is through
        assert step.events[0].seconds == pytest.approx(step.seconds, rel=0.2)


def test_steps_of_a_trainer_are_told_in_order(tmp_path: Any) -> None:
    told: list[StepEvents] = []

    class Listens(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            trainer.strategy.events.listen(told.append)  # type: ignore[attr-defined]

    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=ThreeDStrategy(1, 1, 1, num_micro_batches=2),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Listens()],
        default_root_dir=tmp_path,
    )
    rows = torch.randint(256, (4 * STEPS, 65))
    trainer.fit(GPT(num_layers=2, width=64, num_heads=2, sequence_length=64), torch.utils.data.DataLoader(rows, 4))
    assert [step.step for step in told] == list(range(STEPS))
    for step in told:
        assert sum(event.phase is Phase.FORWARD for event in step.events) == 2
        assert all(step.begin <= event.start <= event.end <= step.end + 1e-6 for event in step.events)
