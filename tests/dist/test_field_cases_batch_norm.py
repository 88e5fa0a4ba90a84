"""C57: batch normalisation with shards and half precision, and behind a layer that tensor parallelism cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from lightning_3d.checkpoint import consolidate
from lightning_3d.errors import PlanError
from tests.dist.lightning_modules import Mesh, loader, make_trainer, on_ranks, seeded, whole_weights


class Convolutions(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Normed(nn.Module):
    """Normalises the features between a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Features(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Normed() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.example_input_array = torch.zeros(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def images(times: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Every sample ``times`` times, so that each of as many replicas has all of them."""
    generator = torch.Generator().manual_seed(5)
    samples = [(torch.randn(1, 5, 5, generator=generator).to(dtype), torch.tensor(i % 3)) for i in range(8)]
    return [sample for sample in samples for _ in range(times)]


def features() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(6, generator=generator).double(), torch.tensor(i % 3)) for i in range(16)]


def train_images(mesh: Mesh | None, cases: list[tuple[str, int]], folder: str) -> list[Any]:
    results = []
    for precision, zero in cases:
        dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
        data = images(mesh[1] if mesh else 1, dtype)
        trainer = make_trainer(mesh, {"zero_stage": zero}, precision=precision)
        trainer.fit(seeded(Convolutions), loader(data, 4 * (mesh[1] if mesh else 1), mesh))
        trainer.save_checkpoint(f"{folder}/{precision}-{zero}.ckpt")
        results.append(whole_weights(trainer))
    return results


def test_c57_convolutions_with_batch_norm_train_in_half_precision(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    cases = [("64-true", 1), ("64-true", 3), ("bf16-mixed", 1), ("bf16-mixed", 3), ("bf16-true", 1)]
    expected = train_images(None, cases, str(tmp_path / "one"))
    got = on_ranks(train_images, (1, 2, 1), cases, str(tmp_path))[0]
    for (precision, zero), weights, wanted in zip(cases, got, expected, strict=True):
        saved = consolidate(tmp_path / f"{precision}-{zero}.ckpt")
        exact = precision == "64-true"
        for name, value in wanted.items():
            assert saved[name].shape == value.shape and saved[name].dtype == weights[name].dtype == value.dtype, name
            assert torch.equal(saved[name], weights[name])
            tolerance = 1e-10 if exact else 0.05
            assert torch.allclose(weights[name].double(), value.double(), rtol=tolerance, atol=tolerance), (zero, name)


def train_features(mesh: Mesh | None, folder: str) -> Any:
    options = {"num_micro_batches": 1} if mesh is not None and mesh[0] > 1 else {}
    trainer = make_trainer(mesh, options)
    trainer.fit(seeded(Features), loader(features(), 8, mesh))
    trainer.save_checkpoint(f"{folder}/saved.ckpt")
    weights = whole_weights(trainer)
    if mesh is not None and mesh[2] > 1:
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        with pytest.raises(PlanError, match=r"blocks\.0\.up.*running_mean should contain 8 elements"):
            make_trainer(mesh, {"tp_plan": plan}).fit(seeded(Features), loader(features(), 8, mesh))
    return weights


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1)])
def test_c57_batch_norm_between_layers_that_could_be_cut(mesh: Mesh, tmp_path: Path) -> None:
    """They stay whole, since its statistics are; a plan that cuts them all the same is refused with the reason."""
    (tmp_path / "one").mkdir()
    wanted = train_features(None, str(tmp_path / "one"))
    weights = on_ranks(train_features, mesh, str(tmp_path))[0]
    saved = consolidate(tmp_path / "saved.ckpt")
    for name, value in wanted.items():
        assert torch.allclose(weights[name], value, rtol=1e-10, atol=1e-10), name
        assert torch.equal(saved[name], weights[name]), name
    assert saved["blocks.0.norm.running_mean"].shape == (16,)


def average(mesh: Mesh | None) -> Any:
    options = {"num_micro_batches": 1} if mesh is not None and mesh[0] > 1 else {}
    swa = StochasticWeightAveraging(0.02, swa_epoch_start=1)
    trainer = make_trainer(mesh, options, max_epochs=3, callbacks=[swa])
    trainer.fit(seeded(Features), loader(features(), 8, mesh))
    return whole_weights(trainer)


def test_c57_statistics_are_taken_anew_for_averaged_weights() -> None:
    """``StochasticWeightAveraging`` goes once more through the data, without backward."""
    wanted = average(None)
    for name, value in on_ranks(average, (2, 1, 1))[0].items():
        assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-10), name
