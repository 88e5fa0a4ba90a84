"""The parity table's language: a line of words for a layout and its options, and how to run it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.amp import GradScaler

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer
from tests.parity.models import MODELS
from tests.parity.record import GLOBAL_BATCH, Numbers, run

STRATEGY: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "lossp": {"loss_parallel": True},
    "recompute": {"activation_checkpointing": "full"},
    "recompute2": {"activation_checkpointing": 2},
    "sum": {"loss_reduction": "sum"},
    "patience": {"timeout_s": 8.0},
    "size2": {"micro_batch_size": 2},
    "size1": {"micro_batch_size": 1},
    "split1-3": {"pipeline_split": [1, 3]},
    "chain": {"pipeline_blocks": ["model.transformer.encoder.layers", "model.transformer.decoder.layers"]},
    "layers": {"pipeline_blocks": "network"},
}
MODEL: dict[str, dict[str, Any]] = {
    "tied": {"tie_weights": True},
    "dropout": {"dropout": 0.2},
    "oddvocab": {"vocab_size": 29},  # no multiple of the tensor-parallel size
    "postnorm": {"norm_first": False},
}
TRAINER: dict[str, dict[str, Any]] = {
    "acc2": {"accumulate_grad_batches": 2},
    "acc3": {"accumulate_grad_batches": 3},
    "clip": {"gradient_clip_val": 0.1},
    "clipvalue": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}
SAMPLES = {
    "ragged": 2 * GLOBAL_BATCH + 7,  # the last batch has 7 samples: uneven replicas and micro-batches
    "lone": 2 * GLOBAL_BATCH + 1,  # the last batch has 1 sample: less than there are replicas and micro-batches
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "-": {},
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "inter2": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    model: str
    layout: str
    schedule: str = "-"
    micro_batches: str = "-"
    zero: str = "-"
    precision: str = "64-true"
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, line: str) -> Row:
        model, layout, schedule, micro_batches, zero, precision, *options = line.split()
        known = {*STRATEGY, *MODEL, *TRAINER, *SAMPLES}
        assert set(options) <= known, f"unknown options in {line!r}: {set(options) - known}"
        return cls(model, layout, schedule, micro_batches, zero, precision, tuple(options))

    def __str__(self) -> str:
        zero = f"zero{self.zero}" if self.zero != "-" else "-"
        cells = (self.model, self.layout, self.schedule, f"m{self.micro_batches}", zero, self.precision, *self.options)
        return " ".join(cell for cell in cells if cell not in ("-", "m-", "64-true"))

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return next((int(part[2:]) for part in self.layout.split(".") if part.startswith(axis)), 1)

    @property
    def world(self) -> int:
        return self.size("pp") * self.size("dp") * self.size("tp")

    def strategy(self) -> ThreeDStrategy:
        """The strategy that the row asks for."""
        options: dict[str, Any] = dict(SCHEDULES[self.schedule])
        if self.micro_batches != "-":
            options["num_micro_batches"] = int(self.micro_batches)
        if self.zero != "-":
            options["zero_stage"] = int(self.zero)
        for word in self.options:
            options.update(STRATEGY.get(word, {}))
        return ThreeDStrategy(
            tensor_parallel=self.size("tp"), pipeline_parallel=self.size("pp"), **{"timeout_s": 60.0, **options}
        )

    def reference(self) -> Row:
        """The row that one process runs to compare with."""
        kept = tuple(word for word in self.options if word not in STRATEGY)
        return Row(self.model, "-", precision=self.precision, options=kept)


def run_row(row: Row, is_reference: bool = False, callbacks: Sequence[Callback] = ()) -> Numbers:
    """Run a row in this process: this rank's part of it, or the whole of it under the stock Trainer."""
    model = MODELS[row.model]
    num_samples, made, trainer = 3 * GLOBAL_BATCH, {}, {}
    for word in row.options:
        num_samples = SAMPLES.get(word, num_samples)
        made.update(MODEL.get(word, {}))
        trainer.update(TRAINER.get(word, {}))
    precision: str | None = row.precision
    if precision == "16-mixed":  # the Trainer's own string would become bf16-mixed on a CPU
        precision, trainer["plugins"] = None, MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))
    return run(
        functools.partial(model.make, **made),
        model.data(num_samples),
        replicas=row.size("dp"),
        strategy=None if is_reference else row.strategy(),
        devices=row.world,
        precision=precision,
        callbacks=callbacks,
        **trainer,
    )


def rank_of_row(rank: int, world: int, row: Row) -> Numbers:
    return run_row(row)


def run_parallel(row: Row, timeout: float = 90.0) -> Numbers:
    """The numbers of the row, as rank 0 has them; the other ranks' logs, norms and validation must be the same."""
    first, *others = run_trainer(row.world, rank_of_row, row, timeout=timeout)
    for other in others:
        for seen in ("logged", "norms", "rates", "validation"):
            assert getattr(other, seen) == getattr(first, seen), f"ranks see other {seen}"
        first.drift.update(other.drift)
    return first


@functools.cache
def reference(row: Row) -> Numbers:
    """The numbers of the stock Trainer in one process; rows that differ only in layout share them."""
    return run_row(row, is_reference=True)
