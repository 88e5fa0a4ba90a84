"""``python -m benchmarks.saving``: how long training stands still for a save, with and without ``async_save``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer

_WIDTH, _BATCH = 1024, 8
_BYTES = 12
"""Of weight and two moments of AdamW in float32."""


@dataclass
class Stalls:
    """What one rank has measured, in seconds."""

    calls: list[float] = field(default_factory=list)
    """In ``trainer.save_checkpoint``."""
    with_save: list[float] = field(default_factory=list)
    """A save and the steps after it."""
    without: list[float] = field(default_factory=list)
    """As many steps alone."""


class _Layers(LightningModule):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(num)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class _Saves(Callback):
    """Saves before every other stretch of ``every`` steps; the first two stretches are not counted."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = folder, every
        self.stalls = Stalls()
        self.start = 0.0

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        stretch, rest = divmod(trainer.global_step, self.every)
        if rest:
            return
        now = time.perf_counter()
        if stretch > 3:
            (self.stalls.without if stretch % 2 else self.stalls.with_save).append(now - self.start)
        if stretch % 2:
            trainer.strategy.barrier()
            now = time.perf_counter()
            trainer.save_checkpoint(f"{self.folder}/last.ckpt")
            if stretch > 1:
                self.stalls.calls.append(time.perf_counter() - now)
        self.start = now


def train(rank: int, world: int, folder: str, layers: int, every: int, saves: int) -> dict[str, Stalls]:
    """Train with saves that are waited for, and with saves in the background."""
    warnings.filterwarnings("ignore")
    found = {}
    for name in ("waiting", "background"):
        seed_everything(0, verbose=False)
        callback = _Saves(folder, every)
        trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=ThreeDStrategy(pipeline_parallel=world, num_micro_batches=2, async_save=name == "background"),
            max_steps=every * 2 * (saves + 2),
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.randn(_BATCH * 16, _WIDTH, generator=torch.Generator().manual_seed(0))
        trainer.fit(_Layers(layers), DataLoader(list(data), batch_size=_BATCH))
        found[name] = callback.stalls
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=150, help="of weights and optimizer state")
    parser.add_argument("--every", type=int, default=20, help="steps between saves")
    parser.add_argument("--saves", type=int, default=7)
    options = parser.parse_args()
    layers = max(options.ranks, options.megabytes * 2**20 // (_WIDTH * (_WIDTH + 1) * _BYTES))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        ranks: list[dict[str, Stalls]] = run_trainer(
            options.ranks, train, folder, layers, options.every, options.saves, timeout=600.0
        )
    print(f"{options.megabytes} MB over {options.ranks} ranks, {options.every} steps between saves; medians:")
    calls = {}
    for name, found in ranks[0].items():
        calls[name], alone = statistics.median(found.calls), statistics.median(found.without)
        lost = statistics.median(found.with_save) - alone
        print(
            f"{name:>10}: a save holds training up for {calls[name] * 1e3:.0f} ms and costs {lost * 1e3:.0f} ms"
            f" in all, beside {alone * 1e3:.0f} ms of steps"
        )
    print(f"background / waiting: {calls['background'] / calls['waiting']:.2f} of the stall")


if __name__ == "__main__":
    main()
