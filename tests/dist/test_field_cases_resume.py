"""Field cases about going on after a stop: the data that follow, rates, keys, and files for the stock Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tests.dist.lightning_modules import Mesh, Tokens, make_trainer, on_ranks, rows, seeded

# --- C19 ------------------------------------------------------------------------------------------------------------

NUM, BATCH = 16, 4


class Counted(Dataset[tuple[int, Tensor]]):
    """Rows with their numbers; counts what is read in this process."""

    def __init__(self) -> None:
        self.rows = rows(NUM)
        self.reads = 0

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.reads += 1
        return index, self.rows[index]


class ByEpoch(Sampler[int]):
    """An order that depends on the number of the epoch, as a DistributedSampler's."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return NUM


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[tuple[int, int, list[int]]] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch_idx, batch[0].tolist()))


class Sees(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[1]))


class SaveAt(Callback):
    """Saves in a hook of the Trainer, once."""

    def __init__(self, hook: str, path: str, epoch: int, batch: int) -> None:
        self.path, self.saved = path, False
        self.place = (epoch, batch)
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        place = (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        if place == self.place and not self.saved and not trainer.sanity_checking:
            self.saved = True
            trainer.save_checkpoint(self.path)


FORK = {"multiprocessing_context": "fork"}  # ranks come from a forkserver, whose workers import everything anew
BATCH_END, VAL_END, EPOCH_END = "on_train_batch_end", "on_validation_end", "on_train_epoch_end"
MOMENTS: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    # hook, epoch and number of batches read when it saves; options of the loader; options of the Trainer
    "shuffled": (BATCH_END, 0, 3, {"shuffle": True}, {}),
    "by epoch": (BATCH_END, 1, 2, {"sampler": True}, {}),
    "workers": (BATCH_END, 1, 2, {"shuffle": True, "num_workers": 2, **FORK}, {}),
    "workers by epoch": (BATCH_END, 1, 2, {"sampler": True, "num_workers": 1, **FORK}, {}),
    "accumulated": (BATCH_END, 0, 3, {"shuffle": True}, {"accumulate_grad_batches": 3}),
    "validated": (VAL_END, 0, 2, {"shuffle": True}, {"val_check_interval": 2}),
    "last batch": (BATCH_END, 0, 4, {"shuffle": True}, {}),
    "last batch by epoch": (BATCH_END, 0, 4, {"sampler": True}, {}),
    "limited": (BATCH_END, 0, 2, {"shuffle": True}, {"limit_train_batches": 2}),
    "validated at the end": (VAL_END, 0, 4, {"shuffle": True}, {}),
    "epoch": (EPOCH_END, 0, 4, {"shuffle": True}, {}),
    "epoch by epoch": (EPOCH_END, 0, 4, {"sampler": True}, {}),
}


def see(mesh: Mesh | None, case: str, path: str, resume: bool) -> tuple[list[Any], int, bool]:
    """The batches of this rank's replica, the samples that this process read, and whether it was to read."""
    hook, epoch, batch, loading, options = MOMENTS[case]
    seen, data = Seen(), Counted()
    callbacks: list[Callback] = [seen] if resume else [seen, SaveAt(hook, path, epoch, batch)]
    # The 3D strategy sets the batch size itself: per optimizer step, whatever the number of replicas.
    sizes = {"global_batch_size": BATCH * options.get("accumulate_grad_batches", 1)} if mesh else {}
    trainer = make_trainer(mesh, sizes, callbacks=callbacks, max_epochs=2 + epoch, **options)
    loading = {**loading, "sampler": ByEpoch() if "sampler" in loading else None}
    train_loader = DataLoader(data, batch_size=BATCH if mesh is None else 1, **loading)
    val_loader = DataLoader(Counted(), batch_size=BATCH // (mesh[1] if mesh else 1))
    trainer.fit(seeded(Sees), train_loader, val_loader, ckpt_path=path if resume else None)
    reads = mesh is not None and trainer.strategy.topology.is_replica_reader
    return seen.batches, data.reads, reads


def stop_and_go_on(mesh: Mesh, folder: str, cases: list[str]) -> Any:
    """Per case what was seen without a stop, and what after it."""
    return [(see(mesh, case, f"{folder}/{case}", False), see(mesh, case, f"{folder}/{case}", True)) for case in cases]


def go_on(mesh: Mesh, folder: str, cases: list[str]) -> Any:
    return [see(mesh, case, f"{folder}/{case}", True) for case in cases]


def whole(results: list[Any], mesh: Mesh) -> list[Any]:
    """The batches over all replicas, in the order of one process; all ranks of a replica saw the same."""
    pp, dp, tp = mesh
    replicas = []
    for replica in range(dp):
        ranks = [results[(stage * dp + replica) * tp + t][0] for stage in range(pp) for t in range(tp)]
        assert all(rank == ranks[0] for rank in ranks)
        replicas.append(ranks[0])
    joined = []
    for parts in zip(*replicas, strict=True):
        ((epoch, batch),) = {part[:2] for part in parts}
        groups = zip(*(part[2] for part in parts), strict=True)
        joined.append((epoch, batch, [index for group in groups for index in group]))
    return joined


def check(case: str, straight: list[Any], mesh: Mesh, results: list[Any]) -> None:
    """Resumed at ``mesh``, the rest of ``straight`` follows, and nothing else has been read."""
    _, epoch, batch, loading, options = MOMENTS[case]
    rest = straight[epoch * options.get("limit_train_batches", NUM // BATCH) + batch :]
    assert rest, case
    assert whole(results, mesh) == rest, (case, mesh)
    for _, reads, is_reader in results:
        if not loading.get("num_workers"):
            assert reads == (len(rest) * BATCH // mesh[1] if is_reader else 0), (case, mesh)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("first", "other", "cases"),
    [
        pytest.param((1, 2, 1), (2, 1, 1), list(MOMENTS), marks=(pytest.mark.slow, pytest.mark.long)),
        ((2, 2, 1), (1, 1, 2), ["shuffled", "workers", "accumulated"]),
    ],
    ids=["dp2 to pp2", "pp2 dp2 to tp2"],
)
def test_c19_what_follows_a_resumption_is_what_would_have_followed(
    tmp_path: Path, first: Mesh, other: Mesh, cases: list[str]
) -> None:
    """At the same layout and at another: no sample twice, none left out, and those before are not even read."""
    same = on_ranks(stop_and_go_on, first, str(tmp_path), cases, timeout=120)
    elsewhere = on_ranks(go_on, other, str(tmp_path), cases, timeout=120)
    for place, case in enumerate(cases):
        straight = see(None, case, str(tmp_path / "stock"), False)[0]
        assert whole([rank[place][0] for rank in same], first) == straight, case
        check(case, straight, first, [rank[place][1] for rank in same])
        check(case, straight, other, [rank[place] for rank in elsewhere])


def other_batches(mesh: Mesh, path: str) -> list[str]:
    messages = []
    for resume, options in ((None, {"global_batch_size": 4}), (path, {"global_batch_size": 2})):
        trainer = make_trainer(mesh, options, max_steps=3 if resume is None else 4, max_epochs=-1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(seeded(Tokens), DataLoader(rows(NUM)), ckpt_path=resume)
        messages += [str(warning.message) for warning in caught if "in mid-epoch" in str(warning.message)]
        trainer.save_checkpoint(path)
    return messages


def test_c19_batches_of_another_size_in_mid_epoch_are_told(tmp_path: Path) -> None:
    (message,) = other_batches((1, 1, 1), str(tmp_path / "c"))
    assert "4 samples per batch over all replicas; now there are 2" in message and "global_batch_size" in message


# --- C46 ------------------------------------------------------------------------------------------------------------


class Rates(Tokens):
    """A rate that changes with every optimizer step and one that follows a metric, with one optimizer each way."""

    def __init__(self, watch: bool) -> None:
        super().__init__()
        self.watch = watch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.watch:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return [optimizer], [{"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"}]
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=12)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class RateHistory(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates(mesh: Mesh | None, folder: str, epochs: int, resume: bool) -> list[list[float]]:
    """By kind of schedule: the rate after every batch, six of which make an epoch of three optimizer steps."""
    results = []
    for watch in (False, True):
        history, path = RateHistory(), f"{folder}/{watch}"
        options = {"num_micro_batches": 4} if mesh and mesh[0] > 1 else {}
        trainer = make_trainer(mesh, options, callbacks=[history], max_epochs=epochs, accumulate_grad_batches=2)
        data = rows(48)
        size = 8 // (mesh[1] if mesh else 1)
        loaders = (DataLoader(data, batch_size=size), DataLoader(data[:8], batch_size=size))
        trainer.fit(seeded(Rates, watch), *loaders, ckpt_path=path if resume else None)
        if not resume:
            trainer.save_checkpoint(path)
        results.append(history.seen)
    return results


def test_c46_rates_are_those_of_one_process_also_after_a_resumption_elsewhere(tmp_path: Path) -> None:
    expected = rates(None, str(tmp_path), 4, False)
    assert len(set(expected[0])) == 13 and len(set(expected[1])) > 1
    for mesh, epochs, resume, part in (((2, 1, 1), 2, False, slice(12)), ((1, 2, 1), 4, True, slice(12, None))):
        for result in on_ranks(rates, mesh, str(tmp_path), epochs, resume):
            for got, wanted in zip(result, expected, strict=True):
                assert got == [pytest.approx(rate, rel=1e-12) for rate in wanted[part]], mesh


# --- C47 ------------------------------------------------------------------------------------------------------------


class Writes(BasePredictionWriter):
    """One file per call: which samples, and what was predicted for them."""

    def __init__(self, folder: str, interval: Any) -> None:
        super().__init__(interval)
        self.folder, self.calls = Path(folder), 0

    def _write(self, trainer: Trainer, kind: str, predictions: Any, indices: Any) -> None:
        torch.save((predictions, indices), self.folder / f"{kind}_{trainer.global_rank}_{self.calls}.pt")
        self.calls += 1

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Any, batch_indices: Any, *args: Any
    ) -> None:
        self._write(trainer, "batch", [prediction], [list(batch_indices)])

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        self._write(trainer, "epoch", predictions, [list(indices) for indices in batch_indices[0]])  # per loader


class Predicts(Tokens):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch[:, :-1]).argmax(-1)


def predict(mesh: Mesh | None, folder: str) -> None:
    for kept in (True, False):
        place = Path(folder) / str(kept)
        place.mkdir(parents=True, exist_ok=True)
        # Lightning gives a writer at the end of the epoch what it has kept, so without that there is only the other.
        trainer = make_trainer(mesh, callbacks=[Writes(str(place), "batch_and_epoch" if kept else "batch")])
        loader = DataLoader(rows(13), batch_size=4 // (mesh[1] if mesh else 1))
        trainer.predict(seeded(Predicts), loader, return_predictions=kept)


def test_c47_every_prediction_is_written_once_and_by_one_rank_of_a_replica(tmp_path: Path) -> None:
    mesh = (2, 2, 2)
    on_ranks(predict, mesh, str(tmp_path), timeout=100)
    expected = seeded(Predicts).double()(torch.stack(rows(13))[:, :-1]).argmax(-1)
    for kept, kinds in ((True, ("batch", "epoch")), (False, ("batch",))):
        for kind in kinds:
            found: dict[int, Tensor] = {}
            files = sorted((tmp_path / str(kept)).glob(f"{kind}_*"))
            writers = {int(file.name.split("_")[1]) for file in files}
            # Batches are written by a rank of each replica, as they come; at the end one rank has all of them.
            assert writers == ({0, mesh[2]} if kind == "batch" else {0})
            for file in files:
                for prediction, indices in zip(*torch.load(file, weights_only=False), strict=True):
                    for index, row in zip(indices, prediction, strict=True):
                        assert index not in found, (kind, index)
                        found[index] = row
            assert sorted(found) == list(range(13))
            assert all(torch.equal(found[index], expected[index]) for index in found)
