"""A small job at pp2·tp2 that fails on purpose: ``failing_job.py START_METHOD FAULT FOLDER``.

What each process reached is left in FOLDER: ``pid<rank>`` when training runs, ``fault`` when it strikes, and
``exception``, ``finally`` and ``atexit`` files from what runs at the end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy


class _Data(Dataset[Tensor]):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        if self.job.fault == "worker" and index == 24:
            self.job.strike()
            raise ValueError("sample 24 is broken")
        return torch.full((4,), float(index))


class Job:
    """What to do and where to leave marks."""

    def __init__(self, start_method: str, fault: str, folder: str) -> None:
        self.start_method = start_method
        self.fault = fault
        self.folder = Path(folder)

    def mark(self, name: str) -> None:
        """Leave a file."""
        Path(self.folder, name).write_text(str(os.getpid()))

    def strike(self) -> None:
        """Note when the fault happens."""
        Path(self.folder, "fault").touch()


class Module(LightningModule):
    """Four blocks, and a fault in one of the hooks."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def on_train_start(self) -> None:
        if self.job.fault == "start" and self.global_rank == 1:
            self.job.strike()
            raise ValueError("rank 1 is broken")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.job.mark(f"pid{self.global_rank}")
        y = self(batch)
        if self.job.fault == "step" and batch_idx == 3:
            self.job.strike()
            raise ValueError("the step is broken")
        time.sleep(0.05)
        return y.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.job.fault in ("exit", "kill") and self.global_rank == 2 and self.global_step == 3:
            self.job.strike()
            if self.job.fault == "exit":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Marker(Callback):
    """Leaves a mark when Lightning tells callbacks of an error, as those that close a tracking run do."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        assert isinstance(pl_module, Module)
        pl_module.job.mark(f"exception{os.getpid()}")


def main() -> None:
    """Run the job."""
    job = Job(*sys.argv[1:4])
    atexit.register(lambda: job.mark(f"atexit{os.getpid()}"))
    torch.manual_seed(0)
    strategy = ThreeDStrategy(
        tensor_parallel=2,
        pipeline_parallel=2,
        num_micro_batches=2,
        start_method=None if job.start_method == "torchrun" else job.start_method,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Marker()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(_Data(job), batch_size=4, num_workers=1 if job.fault == "worker" else 0)
    try:
        trainer.fit(Module(job), loader)
    finally:
        job.mark(f"finally{os.getpid()}")


if __name__ == "__main__":
    main()
