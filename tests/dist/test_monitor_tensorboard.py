"""ThreeDMonitor on four ranks of a model whose layers take a known time: what it logs, draws, and leaves as it is."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from lightning_3d import ThreeDMonitor
from lightning_3d.monitor.figures import SHARES
from lightning_3d.monitor.tags import DESCRIPTIONS
from tests.dist.lightning_modules import Block, Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

PIECES, STEPS, NAP_S = 4, 8, 0.03


class _Sleeps(Block):
    """Sleeps forward; in the backward too, through a hook of its output."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP_S)
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(NAP_S))
        return out


class Slow(Tokens):
    """One sleeping block per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Sleeps() for _ in range(2))


def _fit(mesh: Mesh, folder: str, watched: bool) -> dict[str, Any]:
    monitor = ThreeDMonitor(every_n_steps=3, peak_tflops=1.0, picture_every_n_steps=100, skip_steps=1)
    trainer = make_trainer(
        mesh,
        {"num_micro_batches": PIECES},
        max_steps=STEPS,
        logger=[TensorBoardLogger(folder, "board"), CSVLogger(folder, "csv")] if watched else False,
        callbacks=[monitor] if watched else [],
        gradient_clip_val=0.5,
        default_root_dir=folder,
    )
    trainer.fit(seeded(Slow), loader(rows(8 * STEPS), 8, mesh))
    found = monitor.figures
    return {
        "loss": trainer.callback_metrics["train_loss"].item(),
        "shares": None if found is None else [dict(share) for share in found.shares],
        "bubble": None if found is None else found.bubble,
    }


@pytest.mark.slow
def test_a_run_is_logged_and_drawn_and_trains_as_without(tmp_path: Path) -> None:
    plain = on_ranks(_fit, (2, 1, 2), str(tmp_path), False)
    told = on_ranks(_fit, (2, 1, 2), str(tmp_path), True)
    assert [rank["loss"] for rank in told] == [rank["loss"] for rank in plain]
    assert not any(rank["shares"] for rank in told[1:])  # only rank 0 is told of all
    for shares in told[0]["shares"]:
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= -1e-9
    # (p - 1) / (m + p - 1) of the time; sleeping makes it long enough that a busy machine blurs it little.
    for bubble in told[0]["bubble"]:
        assert bubble == pytest.approx(1 / (PIECES + 1), abs=0.12)

    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        points = [row for row in csv.DictReader(file) if row["speed/batch_s"]]
    assert [int(row["step"]) for row in points] == [2, 5]
    last = {name: float(value) for name, value in points[-1].items() if value}
    assert sum(last[f"time/{name}"] for name in SHARES) == pytest.approx(1.0)
    assert last["speed/samples_per_s"] == pytest.approx(8 / last["speed/batch_s"])
    assert last["speed/tokens_per_s"] == pytest.approx(8 * 7 / last["speed/batch_s"])
    assert last["pipeline/bubble_predicted"] == pytest.approx(1 / (PIECES + 1))
    assert last["training/learning_rate"] == 0.05
    assert last["training/gradient_norm"] > 0  # on the row of the others
    assert 0 < last["memory/now_gb_mean"] <= last["memory/peak_gb_max"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board" / "version_0"
    board = EventAccumulator(str(folder)).Reload()
    tags = set(board.Tags()["scalars"])
    assert {name for name in last if "/" in name} <= tags
    assert "training/gradient_norm" in tags
    for tag in tags & DESCRIPTIONS.keys():
        assert board.SummaryMetadata(tag).summary_description == DESCRIPTIONS[tag]
    assert len(board.Scalars("time/compute")) == 2
    assert board.Images("step/timeline")[0].encoded_image_string.startswith(b"\x89PNG")
    assert any("custom_scalars" in name for name in board.Tags()["tensors"])
    (trace,) = (folder / "monitor").glob("step_*.trace.json")
    names = {entry["name"] for entry in json.loads(trace.read_text())["traceEvents"]}
    kinds, pieces = ("forward", "backward"), range(PIECES)  # the names of ranges in a profiler's trace
    assert {f"{kind} s{stage} c{stage} m{i}" for kind in kinds for stage in range(2) for i in pieces} <= names
    assert list((folder / "monitor").glob("step_*.svg"))
