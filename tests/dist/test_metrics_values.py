"""Torchmetrics objects give the values of one process, after every step and at the end of every epoch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    ClasswiseWrapper,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    Metric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    MinMetric,
    PearsonCorrCoef,
    SumMetric,
)
from torchmetrics.classification import (
    BinaryROC,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassPrecisionRecallCurve,
    MulticlassRecall,
)

from tests.dist.lightning_modules import VOCAB, Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

Values = dict[str, Tensor]


class History(Callback):
    """What a logger would be given after every batch, and what callbacks see after every validation."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Values]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(("batch", {key: value.double() for key, value in trainer.logged_metrics.items()}))

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(("validation", {key: value.double() for key, value in trainer.callback_metrics.items()}))


class Measured(Tokens):
    """Gives its metrics rounded probabilities, so that ties are ties at every layout."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.build()
        for metric in self.modules():
            if isinstance(metric, Metric):
                metric.set_dtype(torch.float64)

    def build(self) -> None: ...

    def train_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None: ...

    def validate_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None: ...

    def _outputs(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self(batch[:, :-1]).flatten(0, 1)
        return logits, logits.detach().softmax(-1).round(decimals=6), batch[:, 1:].flatten()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits, p, y = self._outputs(batch)
        self.train_with(p, y, batch, batch_idx)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        _, p, y = self._outputs(batch)
        self.validate_with(p, y, batch, batch_idx)


class EveryStep(Measured):
    """No value of a part of the batch says what the value of the batch is."""

    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(VOCAB, average="macro")
        self.collection = MetricCollection(
            {"p": MulticlassPrecision(VOCAB), "r": MulticlassRecall(VOCAB)}, prefix="of_"
        )
        self.most, self.mean = MaxMetric(), MeanMetric()
        self.area, self.binned = MulticlassAUROC(VOCAB, thresholds=None), MulticlassAUROC(VOCAB, thresholds=5)
        self.error, self.correlation = MeanSquaredError(squared=False), PearsonCorrCoef()
        self.synced = MulticlassF1Score(VOCAB, dist_sync_on_step=True)
        self.some = MulticlassAccuracy(VOCAB)

    def train_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        options = {"on_step": True, "on_epoch": True}
        self.accuracy(p, y)
        self.log("accuracy", self.accuracy, prog_bar=True, **options)
        self.log_dict(self.collection_of(p, y), **options)
        self.most(batch.double().max())
        self.log("most", self.most, **options)
        self.mean(batch.double().mean(), weight=len(batch))
        self.log("mean", self.mean, **options)
        for name in ("area", "binned", "synced"):
            getattr(self, name)(p, y)
            self.log(name, getattr(self, name), **options)
        for name in ("error", "correlation"):
            getattr(self, name)(p[:, 0], y.double())
            self.log(name, getattr(self, name), **options)
        self.some(p, y)
        if batch_idx % 2:
            self.log("some", self.some)

    def collection_of(self, p: Tensor, y: Tensor) -> Any:
        self.collection(p, y)
        return self.collection

    def validate_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        self.accuracy(p, y)
        self.log("val_accuracy", self.accuracy, on_step=True, on_epoch=True)


class EpochEnd(Measured):
    """Curves, matrices and collections, in lists and dicts, computed and reset in hooks."""

    def build(self) -> None:
        self.matrix, self.roc = MulticlassConfusionMatrix(VOCAB), BinaryROC(thresholds=None)
        self.curve, self.all = MulticlassPrecisionRecallCurve(VOCAB, thresholds=None), CatMetric()
        self.listed = nn.ModuleList(MulticlassAccuracy(VOCAB) for _ in range(2))
        self.named = nn.ModuleDict({"total": SumMetric(), "least": MinMetric()})
        metrics = [MulticlassAccuracy(VOCAB), MulticlassF1Score(VOCAB), MulticlassConfusionMatrix(VOCAB)]
        self.group = MetricCollection(metrics, compute_groups=True)  # type: ignore[arg-type]
        self.extremes = MinMaxMetric(MulticlassAccuracy(VOCAB))
        self.by_class = ClasswiseWrapper(MulticlassAccuracy(VOCAB, average=None), prefix="class_")

    def train_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        for number, metric in enumerate(self.listed):
            metric.update(p, (y + number) % VOCAB)
        self.named["total"].update(batch.double().sum())
        self.named["least"].update(batch.double().min())
        self.log("total", self.named["total"], on_step=False, on_epoch=True)
        self.log("least", self.named["least"], on_step=False, on_epoch=True)
        self.log("second", self.listed[1], on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("first", self.listed[0].compute())
        self.listed[0].reset()
        self.log("given_sum", 2.0, reduce_fx="sum")
        self.log("most", 3.0, reduce_fx="max", sync_dist=True)

    def validate_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        for metric in (self.matrix, self.curve, self.group, self.extremes, self.by_class):
            metric.update(p, y)
        self.roc.update(p[:, 0], (y > 5).long())
        self.all.update(batch.double().sum(1))

    def on_validation_epoch_end(self) -> None:
        curve, roc = [list(part) for part in self.curve.compute()], list(self.roc.compute())
        self.found.append([self.matrix.compute(), curve, roc, self.all.compute().sort().values, self.group.compute()])
        self.log("trace", self.matrix.compute().trace().double())
        self.log_dict({**self.extremes.compute(), **self.by_class.compute()})
        for metric in (self.matrix, self.curve, self.group, self.by_class, self.roc, self.all):
            metric.reset()


class Items(Metric):
    """Keeps one item per sample, and states that are put together in ways of their own."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Tensor]
        self.count: Tensor
        self.add_state("items", default=[], dist_reduce_fx=None)
        self.add_state("count", default=torch.zeros(2), dist_reduce_fx=lambda counts: counts.sum(0))

    def update(self, batch: Tensor) -> None:
        self.items += [row.double() for row in batch]
        self.count = self.count + len(batch)

    def compute(self) -> Tensor:
        return torch.stack(self.items).sum() + self.count.sum()


class Unusual(Measured):
    """Metrics that come during the run, are copied, or have more items on one replica than on another."""

    def build(self) -> None:
        self.tracker = MetricTracker(MulticlassAccuracy(VOCAB))
        self.items, self.copied = Items(), MulticlassAccuracy(VOCAB)

    def on_fit_start(self) -> None:
        self.late = SumMetric().set_dtype(torch.float64)

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validate_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        self.tracker.update(p, y)
        self.copied.update(p, y)
        self.late.update(batch.double().sum())
        self.items(batch)
        self.log("items", self.items, on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        twins = [self.copied.clone(), copy.deepcopy(self.copied)]
        self.found.append([self.tracker.compute_all(), *(twin.compute() for twin in twins), self.late.compute()])
        self.log("best", self.tracker.best_metric())
        copy.deepcopy(self.copied).reset()
        self.copied.reset()
        self.late.reset()


CASES = (EveryStep, EpochEnd, Unusual)


def measured(mesh: Mesh | None, validated: int) -> dict[str, Any]:
    results = {}
    for kind in CASES:
        module, history = seeded(kind), History()
        trainer = make_trainer(mesh, callbacks=[history], max_epochs=2, log_every_n_steps=1)
        trainer.fit(module, loader(rows(13), 6, mesh), loader(rows(validated, seed=3), 6, mesh))
        results[kind.__name__] = {"seen": history.seen, "found": module.found}
    return results


@pytest.mark.parametrize(
    ("mesh", "validated"),
    [((2, 2, 1), 7), ((1, 3, 1), 1), pytest.param((2, 1, 2), 7, marks=pytest.mark.long)],
    ids=str,
)
def test_metrics_have_the_values_of_one_process(mesh: Mesh, validated: int) -> None:
    expected = measured(None, validated)
    for rank, results in enumerate(on_ranks(measured, mesh, validated, timeout=180)):
        for kind, wanted in expected.items():
            assert_same(results[kind], wanted, f"rank {rank}, {kind}")


def assert_same(got: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, Tensor):
        # Some metrics compute in float32 whatever they are told.
        options: Any = {"rtol": 2e-6, "atol": 2e-6, "equal_nan": True}
        torch.testing.assert_close(got.double(), wanted.double(), msg=lambda text: f"{where}: {text}", **options)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(got[key], value, f"{where}, {key}")
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted), where
        for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert_same(mine, theirs, f"{where}[{number}]")
    else:
        assert got == wanted, where


# --- in checkpoints -------------------------------------------------------------------------------------------------


class Kept(Measured):
    """Its metrics are part of the state dict."""

    def build(self) -> None:
        self.accuracy, self.total = MulticlassAccuracy(VOCAB), SumMetric()
        self.accuracy.persistent(True)
        self.total.persistent(True)

    def train_with(self, p: Tensor, y: Tensor, batch: Tensor, batch_idx: int) -> None:
        self.accuracy.update(p, y)
        self.total.update(batch.double().sum())

    def on_train_epoch_end(self) -> None:
        self.found.append((self.accuracy.compute(), self.total.compute()))


class SavesInBetween(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def kept(mesh: Mesh | None, path: str, resume: bool) -> Any:
    module = seeded(Kept)
    trainer = make_trainer(mesh, max_epochs=1, callbacks=[] if resume or not path else [SavesInBetween(path)])
    trainer.fit(module, loader(rows(13), 4, mesh), ckpt_path=path if resume else None)
    return module.found


def test_persistent_metrics_are_saved_over_all_replicas_and_go_on_at_another_layout(tmp_path: Any) -> None:
    wanted = kept(None, "", False)
    path = str(tmp_path / "saved.ckpt")
    for mesh, resume in (((2, 2, 1), False), ((1, 2, 1), True)):
        for found in on_ranks(kept, mesh, path, resume):
            assert_same(found, wanted, f"resumed: {resume}")


# --- C33 ------------------------------------------------------------------------------------------------------------


class Scored(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCAB, average="micro")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits, wanted = self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        self.accuracy(logits, wanted)
        self.log("accuracy", self.accuracy)
        self.log("right", (logits.argmax(-1) == wanted).double().mean())
        self.log("loss", F.cross_entropy(logits, wanted))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def scored(mesh: Mesh | None) -> Any:
    results = []
    for num in (7, 2):
        trainer = make_trainer(mesh)
        module = seeded(Scored)
        size = (mesh[1] if mesh else 1) * 2
        found = [run(module, loader(rows(num), size, mesh), verbose=False) for run in (trainer.validate, trainer.test)]
        predicted = trainer.predict(module, loader(rows(num), size, mesh))
        results.append((found, torch.cat(predicted)))
    return results


@pytest.mark.parametrize("mesh", [(1, 3, 1), (2, 2, 1), pytest.param((1, 4, 1), marks=pytest.mark.long)], ids=str)
def test_c33_scores_and_predictions_do_not_depend_on_the_number_of_processes(mesh: Mesh) -> None:
    expected = scored(None)
    for results in on_ranks(scored, mesh):
        for (found, predicted), (wanted, whole) in zip(results, expected, strict=True):
            for (got,), (one,) in zip(found, wanted, strict=True):
                assert got == pytest.approx(one, rel=1e-6)
                assert got["loss"] == pytest.approx(one["loss"], rel=1e-10)
            assert torch.equal(predicted, whole)
