"""What is logged, shown and written is what one process would log, show and write; once, and the same on all ranks."""

from __future__ import annotations

import csv
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

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
)


class Watch(Callback):
    """Notes down all metrics after every batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, float], dict[str, float], dict[str, float]]] = []

    def _note(self, when: str, trainer: Trainer) -> None:
        self.seen.append(
            (
                when,
                numbers(trainer.callback_metrics),
                numbers(trainer.logged_metrics),
                numbers(trainer.progress_bar_metrics),
            )
        )

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("batch", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("validation batch", trainer)

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("validation", trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("train", trainer)

    def on_test_end(self, trainer: Trainer, *args: Any) -> None:
        self._note("test", trainer)


class LogsEverything(Tokens):
    """Every form of ``self.log``, and state that steps leave for hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")
        self.mean = MeanMetric()
        self.val_accuracy = torch.nn.ModuleList(MulticlassAccuracy(VOCAB, average="micro") for _ in range(2))
        self.losses: list[Tensor] = []
        self.val_outputs: list[Tensor] = []
        self.facts: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        logits, wanted = self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        self.log("loss", loss)
        self.log("forked", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("synced", loss.detach(), on_step=False, on_epoch=True, sync_dist=True)
        self.log("bar", loss, prog_bar=True, logger=False)
        self.log_dict({"first": batch.float().mean(), "second": loss * 2}, on_epoch=True, sync_dist=True)
        self.log("number", 2.5, on_epoch=True)
        self.log("most", batch.float().max(), reduce_fx="max", on_epoch=True)
        self.log("total", loss.detach() * len(batch), reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", loss)
        self.accuracy(logits, wanted)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.mean.update(loss.detach(), len(batch))
        self.log("mean", self.mean, on_epoch=True)
        self.losses.append(loss.detach() * len(batch))
        return {"loss": loss, "rows": logits.detach().view(len(batch), -1), "note": "kept"}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.facts.append((float(outputs["loss"]), sorted(outputs), len(outputs["rows"]), outputs["note"]))
        self.log("from_hook", outputs["loss"], on_step=True, on_epoch=True)
        self.log("synced_hook", outputs["loss"], on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        gathered = self.all_gather(torch.stack(self.losses).sum())
        self.facts.append(("gathered", gathered.shape))
        self.log("of_losses", gathered.sum(), sync_dist=True)
        self.losses.clear()

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, wanted = self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        self.log("val", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("val_one_name", loss, add_dataloader_idx=False) if dataloader_idx == 0 else None
        self.val_accuracy[dataloader_idx](logits, wanted)
        self.log("val_accuracy", self.val_accuracy[dataloader_idx], sync_dist=True)
        self.val_outputs.append(loss * len(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_sum", self.all_gather(torch.stack(self.val_outputs).sum()).sum(), prog_bar=True)
        self.val_outputs.clear()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test", self.loss(batch), on_step=True, on_epoch=True)


def log_everything(mesh: Mesh | None) -> Any:
    module = seeded(LogsEverything)
    watch = Watch()
    options = {"limit_train_batches": 3, "val_check_interval": 2, "max_epochs": 2, "log_every_n_steps": 1}
    trainer = make_trainer(mesh, callbacks=[watch], num_sanity_val_steps=1, **options)
    train, first, second = (loader(rows(num, seed=num), 6, mesh) for num in (13, 13, 3))
    trainer.fit(module, train, [first, second])
    validated = trainer.validate(module, [first, second], verbose=False)
    tested = trainer.test(module, first, verbose=False)
    return watch.seen, module.facts, validated, tested


@pytest.fixture(scope="module")
def one_process() -> Any:
    return log_everything(None)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (2, 2, 1), (1, 3, 1)], ids=str)
def test_c31_every_form_of_log_gives_the_values_of_one_process(mesh: Mesh, one_process: Any) -> None:
    seen, facts, validated, tested = one_process
    for rank, (got_seen, got_facts, got_validated, got_tested) in enumerate(on_ranks(log_everything, mesh)):
        assert len(got_seen) == len(seen)
        for number, (got, expected) in enumerate(zip(got_seen, seen, strict=True)):
            assert got[0] == expected[0]
            for kind, mine, theirs in zip(("callback", "logged", "bar"), got[1:], expected[1:], strict=True):
                assert not differences(mine, theirs), f"{kind} metrics of rank {rank}, {number}: {got[0]}"
        assert got_validated == [pytest.approx(item, rel=1e-6) for item in validated]
        assert got_tested == [pytest.approx(item, rel=1e-6) for item in tested]
        if mesh[1] == 1:
            assert got_facts == [(pytest.approx(fact[0]), *fact[1:]) if len(fact) > 2 else fact for fact in facts]
        else:
            # The loss that a hook is given is that of its replica. One that has run out of batches has fewer facts.
            assert [fact for fact in got_facts if fact[0] == "gathered"] == [("gathered", (mesh[1],))] * 2


class Counting(Logger):
    """A logger that knows what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, list[str]]] = []

    @property
    def name(self) -> str:
        return "counting"

    @property
    def version(self) -> int:
        return 0

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, sorted(metrics)))


def write_logs(mesh: Mesh | None, folder: str) -> Any:
    module = seeded(Tokens)
    counting = Counting()
    loggers = [CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard"), counting]
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer = make_trainer(
            mesh,
            logger=loggers,
            enable_progress_bar=True,
            callbacks=[TQDMProgressBar(refresh_rate=1), LearningRateMonitor()],
            log_every_n_steps=1,
            max_epochs=2,
        )
        trainer.fit(module, loader(rows(8), 4, mesh), loader(rows(8), 4, mesh))
    return counting.calls, trainer.log_dir, printed.getvalue().count("Validation"), printed.getvalue().count("Epoch")


@pytest.mark.parametrize("mesh", [(2, 2, 2)], ids=str)
def test_c66_a_run_has_one_log_and_one_progress_bar(mesh: Mesh, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    calls, log_dir, *bars = write_logs(None, str(one))
    results = on_ranks(write_logs, mesh, str(many))
    assert results[0][0] == calls
    steps = [step for step, _ in calls]
    assert steps == sorted(steps)
    assert results[0][2:] == tuple(bars)
    assert min(bars) > 0
    for got_calls, got_dir, *got_bars in results[1:]:
        assert (got_calls, got_bars) == ([], [0, 0])
        assert got_dir == results[0][1]
    assert Path(results[0][1]).relative_to(many) == Path(log_dir).relative_to(one)

    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (one, many)]
    events = [[name for name in found if "tfevents" in name] for found in names]
    assert [len(found) for found in events] == [1, 1]
    assert [sorted(set(found) - set(event)) for found, event in zip(names, events, strict=True)] == [
        sorted(set(names[0]) - set(events[0]))
    ] * 2
    expected, got = (_table(root / "csv" / "version_0" / "metrics.csv") for root in (one, many))
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == value or float(mine[key]) == pytest.approx(float(value), rel=1e-6)


def _table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class LogsByReplica(Tokens):
    """Every replica logs another key, as conditional logging does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("even" if batch[0, 0] % 2 == 0 else "odd", batch[0, 0].float(), sync_dist=True)
        self.log("both", batch[:, 0].float().mean(), sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.loss(batch)
        self.log("val_even" if batch[0, 0] % 2 == 0 else "val_odd", batch[0, 0].float(), sync_dist=True)


def log_by_replica(mesh: Mesh) -> Any:
    data = rows(4)
    for index, row in enumerate(data):
        row[0] = index
    trainer = make_trainer(mesh, max_steps=1, val_check_interval=1)
    trainer.fit(seeded(LogsByReplica), loader(data, 4, mesh), loader(data, 4, mesh))
    return numbers(trainer.callback_metrics)


def test_c08_keys_that_one_replica_logs_are_never_mixed_with_others() -> None:
    for mesh in ((1, 2, 1), (2, 2, 1)):
        for got in on_ranks(log_by_replica, mesh):
            if mesh[0] == 1:  # replica 0 has rows 0 and 2, replica 1 has 1 and 3
                assert got == {"even": 0.0, "odd": 1.0, "both": 1.5, "val_even": 0.0, "val_odd": 1.0}
            else:  # micro-batches of one row each
                assert got == {"even": 1.0, "odd": 2.0, "both": 1.5, "val_even": 1.0, "val_odd": 2.0}
