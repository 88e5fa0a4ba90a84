"""What the source of timings tells of a run: everything once, in order, and nothing that nobody asks for."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_3d.events import Phase, StepEvents
from lightning_3d.monitor.own_time import seconds_by_phase
from lightning_3d.schedules import Kind, build
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

STEPS, PIECES = 4, 4
LATE_S = 0.3
_KINDS = {Kind.F: Phase.FORWARD, Kind.B: Phase.BACKWARD}


class Keeps(Callback):
    """Listens to every loop."""

    def __init__(self) -> None:
        self.steps: list[StepEvents] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.events.listen(self.steps.append, modes=("train", "validation"))  # type: ignore[attr-defined]


def _fit(mesh: Mesh, listens: bool, folder: str) -> dict[str, Any]:
    keeps = Keeps()
    trainer = make_trainer(
        mesh,
        {"num_micro_batches": PIECES} if mesh[0] > 1 else {},
        callbacks=[keeps] if listens else [],
        gradient_clip_val=0.5,
        max_steps=STEPS,
        val_check_interval=2,
        default_root_dir=folder,
    )
    module = seeded(Tokens)
    data = rows(8 * STEPS)
    trainer.fit(module, loader(data, 8, mesh), loader(data[:8], 8, mesh))
    trainer.save_checkpoint(f"{folder}/kept")
    events = trainer.strategy.events  # type: ignore[attr-defined]
    return {
        "steps": keeps.steps,
        "rank": trainer.strategy.topology.coordinates,  # type: ignore[attr-defined]
        "loss": trainer.callback_metrics["train_loss"].item(),
        "recorded": events._last is not None or bool(events._closed),
    }


def test_everything_once_and_in_order_within_its_step(tmp_path: Any) -> None:
    quiet = on_ranks(_fit, (2, 1, 2), False, str(tmp_path))
    told = on_ranks(_fit, (2, 1, 2), True, str(tmp_path))
    assert not any(rank["recorded"] for rank in quiet)
    assert [rank["loss"] for rank in told] == [rank["loss"] for rank in quiet]
    for rank in told:
        stage = rank["rank"]["pp"]
        training = [step for step in rank["steps"] if step.mode == "train"]
        validation = [step for step in rank["steps"] if step.mode == "validation"]
        assert [step.step for step in training] == list(range(STEPS))
        assert len(validation) == 2
        for before, after in itertools.pairwise(training):
            assert before.end <= after.begin
        for step in rank["steps"]:
            assert all(step.begin <= event.start <= event.end <= step.end for event in step.events)
            assert [event.start for event in step.events] == sorted(event.start for event in step.events)
            assert (step.samples, step.tokens) == (8, 8 * 7)
            assert step.micro_batches == PIECES
        for step in training[1:]:  # in the first the stages settle what passes between them, one after another
            actions = build("1f1b", 2, 1, PIECES, False).actions[stage]
            expected = [(_KINDS[a.kind], a.chunk, a.micro_batch) for a in actions if a.kind in _KINDS]
            found = [(e.phase, e.chunk, e.micro_batch) for e in step.events if e.phase in _KINDS.values()]
            assert found == expected
            count = Counter(event.phase for event in step.events)
            assert count[Phase.PIPELINE] == count[Phase.OPTIMIZER] == 1
            # Two blocks, one sum of the output forward and one of the input's gradient backward for each.
            assert count[Phase.TP] >= 4 * PIECES
            assert all(event.bytes and event.label for event in step.events if event.phase is Phase.TP)
            messages = [e.micro_batch for e in step.events if (e.phase, e.label) == (Phase.PP_WAIT, "activations")]
            assert messages == (list(range(PIECES)) if stage == 1 else [])
            assert {e.label for e in step.events if e.phase is Phase.LOADER} <= {"read", "others", "start"}
            assert count[Phase.LOADER] >= 1
        assert [sum(e.phase is Phase.EVALUATION for e in step.events) for step in training] == [0, 1, 0, 1]
        for step in validation:
            count = Counter(event.phase for event in step.events)
            assert count[Phase.FORWARD] == PIECES
            assert not count[Phase.BACKWARD]


class LateForward(Tokens):
    """One replica takes longer for its forward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.strategy.topology.dp.rank == 1:  # type: ignore[attr-defined]
            time.sleep(LATE_S)
        return super().training_step(batch, batch_idx)


def _fit_replicas(mesh: Mesh, zero_stage: int) -> list[StepEvents]:
    keeps = Keeps()
    trainer = make_trainer(mesh, {"zero_stage": zero_stage}, callbacks=[keeps], max_steps=3)
    trainer.fit(seeded(LateForward), loader(rows(24), 8, mesh))
    return keeps.steps


def test_waiting_for_replicas_is_told_at_every_stage_of_zero() -> None:
    for stage, labels in (
        (0, {"all_reduce"}),
        (1, {"all_gather", "reduce_scatter"}),
        (3, {"all_gather", "reduce_scatter"}),
    ):
        for rank, steps in enumerate(on_ranks(_fit_replicas, (1, 2, 1), stage)):
            assert len(steps) == 3
            found = Counter(event.label for event in steps[-1].events if event.phase is Phase.DP)
            assert labels <= found.keys()
            count = Counter(event.phase for event in steps[-1].events)
            assert count[Phase.FORWARD] == count[Phase.BACKWARD] == count[Phase.OPTIMIZER] == 1
            assert not count[Phase.TP] and not count[Phase.PP_WAIT]
            # Whoever waits for the late replica waits within an event: nothing of it is left for "other".
            waits = max(
                (event for event in steps[-1].events if event.phase is Phase.DP), key=lambda event: event.seconds
            )
            seconds = seconds_by_phase(steps[-1])
            assert seconds["forward" if rank else "dp"] > 0.8 * LATE_S
            assert rank or waits.label == "logged"
            assert seconds["other"] < steps[-1].seconds - LATE_S
