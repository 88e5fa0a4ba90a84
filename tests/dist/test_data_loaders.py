"""Loaders of every kind feed the run that one process would see; all kinds in one run of ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

from tests.dist.lightning_modules import (
    VOCAB,
    Mesh,
    Tokens,
    differences,
    loader,
    make_trainer,
    numbers,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)

Result = tuple[dict[str, float], dict[str, Tensor]]


class Several(Tokens):
    """Trains on the batches of all loaders, joined; what a loader has no more of is left out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else [batch]
        loss = self.loss(torch.cat([part for part in parts if part is not None]))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), on_step=True, on_epoch=True)
        self.log("one_name", float(len(batch)), reduce_fx="sum", add_dataloader_idx=False) if dataloader_idx else None


class Doubled(Several):
    """Has every sample twice."""

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return torch.cat([batch, (batch + 1) % VOCAB]) if self.trainer.training else batch


def fitted(mesh: Mesh | None, train: Any, val: Any = None, kind: type[Several] = Several, **options: Any) -> Result:
    trainer = make_trainer(mesh, max_epochs=2, **options)
    module = seeded(kind)
    trainer.fit(module, train, val)
    return numbers(trainer.callback_metrics), whole_weights(trainer)


def replica(mesh: Mesh | None) -> tuple[int, int]:
    """Which replica reads, and how many there are."""
    if mesh is None:
        return 0, 1
    _, dp, tp = mesh
    return int(os.environ["RANK"]) // tp % dp, dp


class Stream(IterableDataset[Tensor]):
    """Every replica reads its part, and one of them has more."""

    def __init__(self, num: int, mesh: Mesh | None) -> None:
        rank, size = replica(mesh)
        self.rows = rows(num)[rank::size]

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.rows


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.rows)


class OwnLoader:
    """No ``DataLoader``: makes its own batches, of which it does not know the number, and keeps its place."""

    def __init__(self, num: int, mesh: Mesh | None) -> None:
        self.rows, self.place, self.at, self.resumed = rows(num), replica(mesh), 0, False

    def __iter__(self) -> Iterator[Tensor]:
        self.at, self.resumed = (self.at, False) if self.resumed else (0, False)
        rank, size = self.place
        while self.at < len(self.rows):
            mine = self.rows[self.at : self.at + 4][rank::size]
            self.at += 4
            if mine:
                yield torch.stack(mine)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


def of_several(mesh: Mesh | None) -> list[Result]:
    """Combined in every way, also where one has fewer samples left than the other; and batches that a hook doubles."""

    def pair(first: int, second: int, batch: int = 4) -> tuple[Any, Any]:
        return loader(rows(first), batch, mesh), loader(rows(second, seed=3), batch, mesh)

    results = [fitted(mesh, CombinedLoader(dict(zip("ab", pair(8, 13), strict=True)), "min_size"))]
    results.append(fitted(mesh, CombinedLoader(list(pair(8, 13)), "max_size")))
    results.append(fitted(mesh, CombinedLoader(list(pair(8, 12)), "max_size_cycle")))
    results.append(fitted(mesh, CombinedLoader(list(pair(12, 11, 6)), "max_size_cycle")))
    results.append(fitted(mesh, pair(7, 1)[0], kind=Doubled))
    results.append(fitted(mesh, pair(8, 8)[0], list(pair(7, 5))))
    results.append(fitted(mesh, dict(zip("ab", pair(8, 8), strict=True)), dict(zip("cd", pair(5, 9), strict=True))))
    return results


def of_streams(mesh: Mesh | None) -> list[Result]:
    batch = 4 // (mesh[1] if mesh else 1)
    kinds = (Stream, SizedStream)
    results = [fitted(mesh, DataLoader(kind(9, mesh), batch), DataLoader(kind(7, mesh), batch)) for kind in kinds]
    results.append(fitted(mesh, DataLoader(Stream(6, mesh), batch)))
    results.append(fitted(mesh, OwnLoader(9, mesh), OwnLoader(5, mesh)))
    return results


def with_samplers(mesh: Mesh | None) -> list[Result]:
    batch, data = 4 // (mesh[1] if mesh else 1), rows(14)

    def seed() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    weights = [1.0 + index % 3 for index in range(14)]
    weighted = DataLoader(data, batch, sampler=WeightedRandomSampler(weights, 11, generator=seed()))
    subset = DataLoader(data, batch, sampler=SubsetRandomSampler([1, 3, 5, 7, 9, 11, 13], generator=seed()))
    whole_only = DataLoader(data, batch, shuffle=True, generator=seed(), drop_last=True)
    sampler = BatchSampler(WeightedRandomSampler(weights, 11, generator=seed()), batch, drop_last=False)
    return [
        fitted(mesh, weighted, subset),
        fitted(mesh, whole_only),
        fitted(mesh, DataLoader(data, batch_sampler=sampler)),
    ]


def _seed_worker(worker: int) -> None:
    random.seed(worker)


def with_workers(mesh: Mesh | None) -> list[Result]:
    batch = 4 // (mesh[1] if mesh else 1)
    order = torch.Generator().manual_seed(2)
    options = {"shuffle": True, "generator": order, "num_workers": 1, "persistent_workers": True, "pin_memory": True}
    train = DataLoader(rows(10), batch, prefetch_factor=3, worker_init_fn=_seed_worker, **options)  # type: ignore[arg-type]
    return [fitted(mesh, train, loader(rows(7), 4, mesh))]


class Module(LightningDataModule):
    """Changes batches on their way, which every rank does for itself."""

    def __init__(self, mesh: Mesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.data = rows(10)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train_dataloader")
        return loader(self.data, 4, self.mesh, shuffle=True)

    def val_dataloader(self) -> Any:
        self.calls.append("val_dataloader")
        return loader(self.data, 4, self.mesh)

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.calls.append("before")
        return batch.flip(0)

    def transfer_batch_to_device(self, batch: Tensor, device: torch.device, dataloader_idx: int) -> Tensor:
        self.calls.append("transfer")
        return batch.to(device)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.calls.append("after")
        return (batch + 1) % VOCAB


def of_a_module(mesh: Mesh | None) -> tuple[list[Result], list[str]]:
    module = Module(mesh)
    trainer = make_trainer(mesh, max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(seeded(Several), datamodule=module)
    return [(numbers(trainer.callback_metrics), whole_weights(trainer))], module.calls


class Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


def of_nothing(mesh: Mesh | None) -> list[Any]:
    """Loaders without a single batch."""
    results: list[Any] = []
    for train in (DataLoader([], 2), DataLoader(Nothing(), 2)):  # type: ignore[arg-type]
        trainer = make_trainer(mesh)
        trainer.fit(seeded(Several), train)
        results.append(trainer.global_step)
    trainer = make_trainer(mesh)
    results.append(trainer.validate(seeded(Several), DataLoader(Nothing(), 2), verbose=False))
    results.append(trainer.predict(seeded(Several), DataLoader(Nothing(), 2)))
    trainer = make_trainer(mesh)
    trainer.fit(seeded(Several), loader(rows(4), 4, mesh), DataLoader([], 2))  # type: ignore[arg-type]
    return [*results, trainer.global_step, sorted(trainer.callback_metrics)]


def resumed(mesh: Mesh | None, folder: str) -> list[Result]:
    """A run goes on from a checkpoint in mid-epoch; one process does not stop, since its checkpoints lose a batch."""
    if mesh is None:
        return [fitted(None, OwnLoader(20, None))]
    path = f"{folder}/saved.ckpt"
    make_trainer(mesh, max_epochs=1, callbacks=[Saves(path)]).fit(seeded(Several), OwnLoader(20, mesh))
    trainer = make_trainer(mesh, max_epochs=2)
    trainer.fit(seeded(Several), OwnLoader(20, mesh), ckpt_path=path)
    return [(numbers(trainer.callback_metrics), whole_weights(trainer))]


class Saves(Callback):
    """After the third batch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


def of_all_kinds(mesh: Mesh | None, kinds: tuple[str, ...], folder: str) -> dict[str, list[Result]]:
    found = {name: globals()[name](mesh) for name in kinds}
    return {**found, "resumed": resumed(mesh, folder)} if folder else found


KINDS = [("of_several",), ("of_streams", "with_samplers"), ("with_workers",)]


@pytest.mark.parametrize("kinds", KINDS, ids=" ".join)
def test_c32_loaders_of_every_kind_train_and_validate_as_one_process(kinds: tuple[str, ...], tmp_path: Any) -> None:
    folder = str(tmp_path) if "of_streams" in kinds else ""
    wanted = of_all_kinds(None, kinds, folder)
    for rank, found in enumerate(on_ranks(of_all_kinds, (2, 2, 1), kinds, folder)):
        for kind, results in wanted.items():
            for number, (got, one) in enumerate(zip(found[kind], results, strict=True)):
                assert_same_run(got, one, rank, f"{kind} {number}")


def assert_same_run(got: Result, wanted: Result, rank: int, where: str) -> None:
    assert not differences(got[0], wanted[0], 1e-10), f"{where} on rank {rank}"
    for name, value in wanted[1].items() if rank == 0 else ():
        torch.testing.assert_close(got[1][name], value, rtol=1e-10, atol=1e-12, msg=f"{where}, {name}")


def of_a_module_and_of_nothing(mesh: Mesh | None) -> Any:
    return of_a_module(mesh), of_nothing(mesh)


def test_hooks_of_a_data_module_run_on_every_rank_and_empty_loaders_end_at_once() -> None:
    ((wanted,), wanted_calls), nothing = of_a_module_and_of_nothing(None)
    for rank, (((found,), calls), got_nothing) in enumerate(on_ranks(of_a_module_and_of_nothing, (2, 2, 1))):
        assert_same_run(found, wanted, rank, "data module")
        assert calls.count("prepare_data") == (1 if rank == 0 else 0), "once per node"
        assert [call for call in calls if call != "prepare_data"] == [c for c in wanted_calls if c != "prepare_data"]
        assert got_nothing == nothing
