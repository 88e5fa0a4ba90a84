"""The dry run against real ranks: the same memory, arithmetic and messages, layout by layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.config import Sizes
from lightning_3d.dry_run import Batch, Job, Record, dry_run
from lightning_3d.dry_run.record import record_of
from lightning_3d.dry_run.recorder import Recorder
from lightning_3d.initialization import deferring
from lightning_3d.models import GPT
from tests.harness import run_trainer

# A work of gloo holds its tensors until a thread of its own lets them go, which is a matter of luck: the messages, of
# 16 KB, are small beside the rest.
MODEL: dict[str, Any] = {"num_layers": 4, "width": 128, "num_heads": 4, "sequence_length": 16, "vocab_size": 128}
SAMPLES = 8
SIZES: dict[str, int] = {"pipeline_parallel": 2, "data_parallel": 2, "tensor_parallel": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {},
    "zero 3, recomputed": {"zero_stage": 3, "activation_checkpointing": "full"},
    "interleaved, mixed": {"schedule": "interleaved_1f1b", "virtual_stages": 2, "precision": "bf16-mixed"},
    "zero 2, pieces of the sequence": {"zero_stage": 2, "sequence_parallel": True, "schedule": "gpipe"},
    "zero 0, logits cut": {"zero_stage": 0, "loss_parallel": True, "precision": "bf16-mixed", "dropout": 0.1},
}


def trainer_of(options: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
    options = {key: value for key, value in options.items() if key != "dropout"}
    precision = options.pop("precision", "32-true")
    strategy = ThreeDStrategy(micro_batch_size=2, sanity_checks=0, **SIZES, **options)
    return pl.Trainer(
        accelerator="cpu", devices=8, strategy=strategy, precision=precision, callbacks=callbacks, max_steps=2,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip


class Recording(pl.Callback):
    """Records the second step."""

    record: Record

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            strategy = trainer.strategy
            assert isinstance(strategy, ThreeDStrategy)
            self._recorder = Recorder(trainer, strategy._assembled, strategy.topology)
            self._open: AbstractContextManager[None] = self._recorder.recording(batch)
            self._open.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._open.__exit__(None, None, None)
            self.record = record_of(self._recorder, 4, 4)


def real_steps(rank: int, world_size: int, names: list[str]) -> list[Record]:
    found = []
    for name in names:
        options = LAYOUTS[name]
        recording = Recording()
        data = torch.randint(128, (4 * SAMPLES, 17), generator=torch.Generator().manual_seed(1))
        trainer = trainer_of(options, [recording])
        trainer.fit(GPT(**MODEL, dropout=options.get("dropout", 0.0)), DataLoader(list(data), batch_size=SAMPLES))
        found.append(recording.record)
    return found


def dry_steps(name: str, **options: Any) -> Iterator[Record]:
    options = {**LAYOUTS[name], **options}
    with deferring(1, draws=False):
        module = GPT(**MODEL, dropout=options.get("dropout", 0.0))
    batch = Batch(torch.zeros(1, 17, dtype=torch.long), SAMPLES)
    found = dry_run(Job(trainer=trainer_of(options, []), module=module, sizes=Sizes(pp=2, dp=2, tp=2), batch=batch))
    return (stage.record for stage in found.stages)


def _at_the_peak(by_kind: Mapping[str, int]) -> dict[str, int]:
    """What passes in one sum: several moments of a stage are as full, with logits, gathered layers or temporary."""
    kinds = dict(by_kind)
    kinds["passing"] = sum(kinds.pop(kind, 0) for kind in ("logits", "temporary", "communication"))
    return kinds


def differences(name: str, stage: int, dry: Record, real: Record) -> list[str]:
    """What a dry run says otherwise than the real one."""
    found = []
    where = f"{name}, stage {stage}: "
    for part in ("pipeline", "outside"):
        here, there = getattr(dry, part), getattr(real, part)
        if abs(here.total - there.total) > 0.03 * there.total:
            found.append(f"{where}{part} {here} is not {there}")
        kinds, expected = _at_the_peak(here.by_kind), _at_the_peak(there.by_kind)
        for kind, size in expected.items():
            if abs(kinds[kind] - size) > 0.03 * there.total:
                found.append(f"{where}{part} {kind} {kinds[kind]} is not {size}")
    if dry.work.flops != real.work.flops:
        found.append(f"{where}{dry.work.flops} FLOPs are not {real.work.flops}")
    for message in {*dry.work.traffic, *real.work.traffic}:
        # On a CPU the messages of hosts share the groups: flags, names, what was logged.
        if message.num_bytes >= 2048 or message in dry.work.traffic:
            counts = dry.work.traffic.get(message, 0), real.work.traffic.get(message, 0)
            if counts[0] != counts[1]:
                found.append(f"{where}{message} {counts[0]} times, not {counts[1]}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_memory_arithmetic_and_messages_are_those_of_real_ranks() -> None:
    names = list(LAYOUTS)
    ranks = run_trainer(8, real_steps, names, timeout=240)
    wrong = []
    for index, name in enumerate(names):
        for stage, dry in enumerate(dry_steps(name)):
            wrong += differences(name, stage, dry, ranks[4 * stage][index])
    assert not wrong, "\n".join(wrong)
