"""``trainer.predict`` returns on every rank what one process returns, and writers get it once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError
from lightning_3d.trainer.data import predictions
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded
from tests.dist.test_data_loaders import Stream
from tests.dist.test_metrics_values import assert_same


class Predicts(Tokens):
    """Various things per sample, and one that is none."""

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[:, :-1])
        first = batch[:, 0]
        return {"logits": logits, "view": logits[:, -1], "names": [f"row {int(i)}" for i in first], "first": first}

    def micro_batch_weight(self, batch: Any) -> Tensor:
        raise KeyError("labels, which what is predicted does not have")


class Batches:
    """Of the user's own making."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[3, 1], [0, 2, 4], [5], [6, 7, 8], [10, 9]])

    def __len__(self) -> int:
        return 5


class Whole(BasePredictionWriter):
    """Keeps what it is given at the end, under a name that does not tell the rank."""

    def __init__(self, folder: str) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(
        self, trainer: Trainer, module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        path = Path(self.folder, "all.pt")
        assert not path.exists(), "written twice"
        torch.save((predictions, [[list(batch) for batch in of_loader] for of_loader in batch_indices]), path)


def numbered(num: int) -> list[Tensor]:
    data = rows(num)
    for index, row in enumerate(data):
        row[0] = index
    return data


def predicted(mesh: Mesh | None, folder: str) -> Any:
    replicas = mesh[1] if mesh else 1
    data = numbered(11)
    results = []
    for data_loader in (
        loader(data, 4, mesh),
        [loader(data[:6], 4, mesh), loader(data[2:7], 4, mesh)],
        DataLoader(data, batch_sampler=Batches()),  # type: ignore[arg-type]
    ):
        trainer = make_trainer(mesh, limit_predict_batches=1.0)
        results.append(trainer.predict(seeded(Predicts), data_loader))
    results.append(make_trainer(mesh).predict(seeded(Predicts), loader(data, 4, mesh), return_predictions=False))
    everything = make_trainer(mesh, use_distributed_sampler=False)
    results.append(everything.predict(seeded(Predicts), DataLoader(data, 4)))
    Path(folder).mkdir(exist_ok=True)
    make_trainer(mesh, callbacks=[Whole(folder)]).predict(seeded(Predicts), loader(data, 4, mesh))
    # Rows of a stream come one replica after the other: here one row per batch, so the order is that of the rows.
    results.append(make_trainer(mesh).predict(seeded(Predicts), DataLoader(Stream(5, mesh), 1)))
    return results, refused(mesh) if replicas > 1 else ""


def refused(mesh: Mesh | None) -> str:
    """Predictions that do not fit into the node."""
    before, predictions._free_bytes = predictions._free_bytes, lambda: 1000.0
    try:
        make_trainer(mesh).predict(seeded(Predicts), loader(numbered(11), 4, mesh))
    except ConfigError as error:
        return str(error)
    finally:
        predictions._free_bytes = before
    return ""


@pytest.mark.parametrize("mesh", [(2, 2, 1), pytest.param((1, 4, 1), marks=pytest.mark.long)], ids=str)
def test_predictions_are_those_of_one_process_on_every_rank(mesh: Mesh, tmp_path: Path) -> None:
    one, many = str(tmp_path / "one"), str(tmp_path / "many")
    expected, _ = predicted(None, one)
    for rank, (results, message) in enumerate(on_ranks(predicted, mesh, many)):
        assert_same(results, expected, f"rank {rank}")
        assert "return_predictions=False" in message and "GB" in message
    written, indices = torch.load(Path(many, "all.pt"), weights_only=False)
    wanted, wanted_indices = torch.load(Path(one, "all.pt"), weights_only=False)
    assert_same(written, wanted, "written")
    assert indices == wanted_indices
