"""Steps, hooks and batches as people write them, each against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BatchEncoding

from tests.dist.lightning_modules import (
    Mesh,
    Tokens,
    loader,
    make_trainer,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)

BATCH = 4


class Busy(Tokens):
    """Everything at once that people do in and around a step."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.kept: list[float] = []
        self.steps_taken = 0

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @property
    def smoothing(self) -> float:
        return 0.1 / (1 + self.global_step)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        print("step", batch_idx, "of", self.trainer.num_training_batches)
        logits = self(batch[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=self.smoothing)
        penalty = logits.square().mean() * self.trainer.max_epochs / (1 + self.trainer.current_epoch)
        loss = losses + 1e-3 * penalty
        print("loss", loss.item(), "of a model of", self.size)
        if loss.item() > 1e6:
            return {"loss": loss}
        guesses = logits.argmax(-1).cpu().numpy()
        accuracy = float(np.mean(guesses == batch[:, 1:].cpu().numpy()))
        self.log_dict({"losses": losses, "penalty": penalty, "accuracy": accuracy}, on_epoch=True)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return {"loss": loss, "guesses": logits.argmax(-1).detach(), "names": ["a"] * len(batch)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 1:
            self(batch[:, :-1])
            return None
        logits = self(batch[:, :-1])
        self.outputs.append(logits.detach())
        self.log_dict({"val_loss": F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())})
        return None

    def on_validation_epoch_end(self) -> None:
        together = torch.cat(self.outputs)
        self.outputs.clear()
        self.kept.append(float(together.square().sum()))
        self.log("spread", together.std())

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:  # warm-up by hand
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 3)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.steps_taken += 1

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.global_step), gradient_clip_algorithm="norm")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def run(mesh: Mesh | None) -> Any:
    trainer = make_trainer(mesh, max_epochs=2)
    module = seeded(Busy)
    trainer.fit(module, loader(rows(3 * BATCH), BATCH, mesh), loader(rows(2 * BATCH, seed=2), BATCH, mesh))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return metrics, module.kept, module.steps_taken, module.size, rate, whole_weights(trainer)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1)])
def test_a_busy_step_is_that_of_one_process(mesh: Mesh, capfd: Any) -> None:
    wanted = run(None)
    for rank, got in enumerate(on_ranks(run, mesh)):
        assert got[0] == pytest.approx(wanted[0], rel=1e-9), rank
        assert got[1] == pytest.approx(wanted[1], rel=1e-9), rank
        assert got[2:3] + got[4:5] == wanted[2:3] + wanted[4:5], rank
        assert got[3] == wanted[3], rank
        if rank == 0:
            for name, value in got[5].items():
                assert torch.allclose(value, wanted[5][name], rtol=1e-9, atol=1e-10), name


# --- batches ----------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    tokens: Tensor
    names: list[str]
    scale: float
    nothing: None = None


class Pair(NamedTuple):
    tokens: Tensor
    extra: dict[str, Any]


def as_record(samples: list[Tensor]) -> Record:
    return Record(torch.stack(samples), [f"{int(row.sum())}" for row in samples], 0.5)


def as_pair(samples: list[Tensor]) -> Pair:
    extra = {"ids": [f"{int(row.sum())}" for row in samples], "epoch": 3, "none": None, "weights": torch.ones(3)}
    return Pair(torch.stack(samples), extra)


def as_encoding(samples: list[Tensor]) -> BatchEncoding:
    tokens = torch.stack(samples)
    return BatchEncoding({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


def as_list(samples: list[Tensor]) -> list[Any]:
    tokens = torch.stack(samples)
    return [tokens, {"deep": [tokens.flip(0), ("text", 7)]}, [f"{int(row.sum())}" for row in samples]]


class OnRecord(Tokens):
    """Moves and changes its batch itself, as for a class that nobody knows."""

    collate = staticmethod(as_record)

    def transfer_batch_to_device(self, batch: Record, device: torch.device, dataloader_idx: int) -> Record:
        batch.tokens = batch.tokens.to(device)
        return batch

    def on_before_batch_transfer(self, batch: Record, dataloader_idx: int) -> Record:
        batch.scale = 2 * batch.scale
        return batch

    def on_after_batch_transfer(self, batch: Record, dataloader_idx: int) -> Record:
        batch.tokens = batch.tokens.roll(1, dims=1)
        return batch

    def training_step(self, batch: Record, batch_idx: int) -> Tensor:
        assert batch.nothing is None and batch.scale == 1.0 and len(batch.names) == len(batch.tokens)
        assert [int(name) for name in batch.names] == batch.tokens.sum(1).tolist()
        return self.loss(batch.tokens)


class OnPair(Tokens):
    collate = staticmethod(as_pair)

    def training_step(self, batch: Pair, batch_idx: int) -> Tensor:
        assert type(batch).__name__ == "Pair" and batch.extra["epoch"] == 3 and batch.extra["none"] is None
        assert [int(name) for name in batch.extra["ids"]] == batch.tokens.sum(1).tolist()
        assert len(batch.extra["weights"]) == 3
        return self.loss(batch.tokens)


class OnEncoding(Tokens):
    collate = staticmethod(as_encoding)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        return self.loss(batch.input_ids * batch["attention_mask"])


class OnList(Tokens):
    collate = staticmethod(as_list)

    def training_step(self, batch: list[Any], batch_idx: int) -> Tensor:
        tokens, deep, names = batch
        assert deep["deep"][1] == ("text", 7) and len(names) == len(tokens) == len(deep["deep"][0])
        return self.loss(tokens)


KINDS = (OnRecord, OnPair, OnEncoding, OnList)


def run_batches(mesh: Mesh | None) -> list[dict[str, Tensor]]:
    results = []
    for kind in KINDS:
        trainer = make_trainer(mesh)
        trainer.fit(seeded(kind), loader(rows(2 * BATCH), BATCH, mesh, collate_fn=kind.collate))
        results.append(whole_weights(trainer))
    return results


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1)])
def test_batches_of_any_class(mesh: Mesh) -> None:
    wanted = run_batches(None)
    for kind, got, expected in zip(KINDS, on_ranks(run_batches, mesh)[0], wanted, strict=True):
        for name, value in got.items():
            assert torch.allclose(value, expected[name], rtol=1e-10, atol=1e-10), (kind.__name__, name)


# --- steps without a loss ---------------------------------------------------------------------------------------------


class LeavesOut(Tokens):
    """Returns None where it does not like a batch: all of the second, and the samples of replica 1 in the third."""

    halves = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows, flags = batch
        loss = self.loss(rows)
        if batch_idx == 1 or bool(flags.any() if not self.halves else False):
            return None
        if batch_idx == 2 and self.halves:
            return 0.5 * self.loss(rows[flags == 0])
        return {"loss": loss, "shape": tuple(rows.shape)}


class LeavesOutHalf(LeavesOut):
    halves = True


def run_left_out(mesh: Mesh | None) -> dict[str, Tensor]:
    flagged = mesh is None or mesh[1] > 1
    data = [(row, torch.tensor(int(flagged and i >= 2 * BATCH and i % 2))) for i, row in enumerate(rows(3 * BATCH))]
    return fit_left_out(mesh, data, LeavesOutHalf if mesh is None else LeavesOut)


def run_left_out_whole(mesh: Mesh | None) -> dict[str, Tensor]:
    return fit_left_out(mesh, [(row, torch.tensor(0)) for row in rows(3 * BATCH)], LeavesOut)


def fit_left_out(mesh: Mesh | None, data: Any, kind: Any) -> dict[str, Tensor]:
    trainer = make_trainer(mesh)
    trainer.fit(seeded(kind), loader(data, BATCH, mesh))
    assert trainer.global_step == 3
    return whole_weights(trainer)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1), (1, 2, 1)])
def test_a_step_may_return_none(mesh: Mesh) -> None:
    function = run_left_out if mesh[1] > 1 else run_left_out_whole
    wanted = function(None)
    for name, value in on_ranks(function, mesh)[0].items():
        assert torch.allclose(value, wanted[name], rtol=1e-10, atol=1e-10), name
