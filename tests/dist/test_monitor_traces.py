"""Lightning's profiler gives one trace per chosen rank, with the names of the spans, and they merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDMonitor, ThreeDProfiler, ThreeDStrategy
from lightning_3d.cli.command import main
from tests.harness import run_trainer


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _profiled(rank: int, world: int, folder: str) -> None:
    for version, profiler in (("all", "pytorch"), ("one", ThreeDProfiler(ranks=[1], record_module_names=False))):
        trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ThreeDStrategy(tensor_parallel=1, pipeline_parallel=2, num_micro_batches=2),
            max_steps=6,
            logger=CSVLogger(folder, name="", version=version),
            profiler=profiler,
            callbacks=[ThreeDMonitor(every_n_steps=3, picture_every_n_steps=1)] if version == "all" else [],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        torch.manual_seed(0)
        trainer.fit(Net(), DataLoader(torch.randn(24, 8), batch_size=4))
        assert trainer.strategy.events.opener is None  # nothing is left behind


def test_traces_of_chosen_ranks_carry_the_names_of_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_trainer(2, _profiled, str(tmp_path), timeout=100)
    assert len(list((tmp_path / "all").glob("*.pt.trace.json"))) == 2
    (only,) = (tmp_path / "one").glob("*.pt.trace.json")
    content = json.loads(only.read_text())
    assert content["distributedInfo"]["rank"] == 1
    assert content["lightning_3d"] == {"rank": 1, "pp": 1, "dp": 0, "tp": 0}
    names = {event.get("name") for event in content["traceEvents"]}
    assert {"forward s1 c1 m0", "backward s1 c1 m1", "optimizer s1"} <= names

    capsys.readouterr()
    assert main(["trace", "merge", str(tmp_path / "all"), "-o", str(tmp_path / "merged.json")]) == 0
    assert "of ranks 0, 1 over" in capsys.readouterr().out
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named[0].startswith("rank 0 (pp0 dp0 tp0) on ") and named[1].startswith("rank 1 (pp1 dp0 tp0) on ")
    # On one clock: stage 1 begins a backward after the forward of stage 0, which has gradients only after it.
    first: dict[tuple[int, str], tuple[float, float]] = {}
    for event in events:
        if event["ph"] == "X":
            first.setdefault((event["pid"], event["name"]), (event["ts"], event["ts"] + event["dur"]))
    begun, came = first[1, "backward s1 c1 m0"][0], first[0, "pp_wait gradients s0 c0 m0"][1]
    assert first[0, "forward s0 c0 m0"][1] < begun < came
    # The monitor's own timeline of a step lies beside it.
    assert "steps of ThreeDMonitor" in {event["args"]["name"] for event in events if event["name"] == "thread_name"}
