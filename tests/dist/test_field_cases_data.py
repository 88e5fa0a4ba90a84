"""Field cases about data: ragged batches, changing lengths, evaluation loops, and who sees which sample."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
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


def assert_same_weights(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


# --- C05 ------------------------------------------------------------------------------------------------------------


class Scores(Tokens):
    """Predicts one number per sample, next to its first token."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none").mean(1)
        return {"loss": losses, "first": batch[:, 0]}


def all_loops(mesh: Mesh | None, cases: list[tuple[int, int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """For every (samples, batch size, options): train and validate, test and predict."""
    results = []
    for num, batch_size, options in cases:
        module = seeded(Scores)
        trainer = make_trainer(mesh, options if mesh else None, max_epochs=2, limit_predict_batches=1.0)
        data = loader(rows(num), batch_size, mesh)
        trainer.fit(module, data, data)
        metrics = numbers(trainer.callback_metrics)
        weights = whole_weights(trainer)
        tested = trainer.test(module, data, verbose=False)
        predicted = trainer.predict(module, data)
        results.append({"metrics": metrics, "weights": weights, "tested": tested, "predicted": predicted})
    return results


RAGGED = [
    (10, 4, {"num_micro_batches": 4}),  # the last batch has fewer samples than micro-batches
    (6, 3, {"num_micro_batches": 2}),
    (7, 3, {"micro_batch_size": 2, "num_micro_batches": None}),
    (3, 1, {"num_micro_batches": 4}),
    (5, 5, {"num_micro_batches": None}),  # the default asks for 8 micro-batches
]


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 1, 2)])
def test_c05_every_sample_of_a_ragged_batch_counts_in_every_loop(mesh: Mesh) -> None:
    expected = all_loops(None, RAGGED)
    for rank, result in enumerate(on_ranks(all_loops, mesh, RAGGED)):
        for case, got, wanted in zip(RAGGED, result, expected, strict=True):
            assert not differences(got["metrics"], wanted["metrics"], 1e-10), case
            assert not differences(got["tested"][0], wanted["tested"][0], 1e-10), case
            assert len(got["predicted"]) == len(wanted["predicted"])
            for part, whole in zip(got["predicted"], wanted["predicted"], strict=True):
                torch.testing.assert_close(part, whole)
            if rank == 0:
                assert_same_weights(got["weights"], wanted["weights"])


UNEVEN = [
    (10, 4, {"num_micro_batches": 2}),
    (9, 4, {"num_micro_batches": 2}),
    (5, 4, {"micro_batch_size": 1, "num_micro_batches": None}),
]


def train_only(mesh: Mesh | None, cases: list[tuple[int, int, dict[str, Any]]]) -> list[Any]:
    results = []
    for num, batch_size, options in cases:
        module = seeded(Scores)
        trainer = make_trainer(mesh, options if mesh else None, max_epochs=2)
        data = loader(rows(num), batch_size, mesh)
        trainer.fit(module, data, data)
        results.append((numbers(trainer.callback_metrics), whole_weights(trainer)))
    return results


def test_c05_replicas_with_unequal_last_batches_train_as_one_process() -> None:
    expected = train_only(None, UNEVEN)
    for rank, result in enumerate(on_ranks(train_only, (2, 2, 1), UNEVEN)):
        for case, (metrics, weights), (wanted, whole) in zip(UNEVEN, result, expected, strict=True):
            assert not differences(metrics, wanted, 1e-10), case
            if rank == 0:
                assert_same_weights(weights, whole)


# --- C06 ------------------------------------------------------------------------------------------------------------


class Logs(Tokens):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss


class Metrics(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.bars: list[dict[str, float]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.seen.append(numbers(trainer.callback_metrics))
        self.bars.append(numbers(trainer.progress_bar_metrics))
        self.losses.append(float(outputs["loss"]))


def logged(mesh: Mesh | None, folder: str, options: dict[str, Any]) -> Any:
    metrics = Metrics()
    logger = CSVLogger(folder, name="", version="run")
    trainer = make_trainer(
        mesh, options if mesh else None, logger=logger, callbacks=[metrics], max_epochs=2, log_every_n_steps=1
    )
    trainer.fit(seeded(Logs), loader(rows(8), 4, mesh))
    return metrics.seen, metrics.bars, metrics.losses


@pytest.mark.parametrize("options", [{}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}])
def test_c06_the_true_loss_of_a_pipeline_is_on_every_rank_and_once_in_the_log(
    options: dict[str, Any], tmp_path: Path
) -> None:
    seen, bars, losses = logged(None, str(tmp_path / "one"), {})
    for result in on_ranks(logged, (2, 1, 1), str(tmp_path / "many"), options):
        assert result == (
            [pytest.approx(item) for item in seen],
            [pytest.approx(item) for item in bars],
            pytest.approx(losses),
        )
    assert [path.name for path in (tmp_path / "many").rglob("*.csv")] == ["metrics.csv"]
    one, many = (list(csv.DictReader((tmp_path / name / "run" / "metrics.csv").open())) for name in ("one", "many"))
    assert len(one) == len(many) == 4
    for wanted, got in zip(one, many, strict=True):
        assert float(got["train_loss"]) == pytest.approx(float(wanted["train_loss"]))
        assert got["step"] == wanted["step"]


# --- C12 ------------------------------------------------------------------------------------------------------------


class Validates(Tokens):
    """Two validation loaders, and a part that the user keeps in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) if not self.dropout.training else self.dropout(super().forward(tokens))

    def on_train_start(self) -> None:
        self.dropout.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.modes.append((self.training and self.blocks[0].training, self.dropout.training))

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert not self.training and not self.blocks[-1].training
        loss = self.loss(batch)
        self.log("val", loss)
        if dataloader_idx == 1:
            self.log("second", 2 * loss, add_dataloader_idx=False)


class History(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append(numbers(trainer.callback_metrics))


def validated(mesh: Mesh | None, folder: str) -> Any:
    data = rows(16)
    val = lambda: [loader(data[:14], 4, mesh), loader(data[3:8], 4, mesh)]  # noqa: E731
    results = []
    path = f"{folder}/saved.ckpt"
    for resume, epochs in ((None, 1), (path, 2)):
        history, module = History(), seeded(Validates)
        trainer = make_trainer(
            mesh,
            max_epochs=epochs,
            val_check_interval=2,
            limit_val_batches=3,
            callbacks=[history],
            num_sanity_val_steps=2,
        )
        trainer.fit(module, loader(data, 4, mesh), val(), ckpt_path=resume)
        trainer.save_checkpoint(path)
        results.append((history.seen, module.modes))
    return results


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 1, 2)])
def test_c12_validation_within_an_epoch_gives_the_metrics_of_one_process_also_after_a_resume(
    mesh: Mesh, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    expected = validated(None, str(tmp_path / "one"))
    for result in on_ranks(validated, mesh, str(tmp_path / "many")):
        for (seen, modes), (wanted, own_modes) in zip(result, expected, strict=True):
            assert len(seen) == len(wanted) > 1
            for got, whole in zip(seen, wanted, strict=True):
                assert not differences(got, whole, 1e-9)
            assert modes == own_modes == [(True, False)] * 4


# --- C14 ------------------------------------------------------------------------------------------------------------


class Padded(Tokens):
    """Masks what the collate function has padded."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).unsqueeze(-1)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) * mask
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, batch[:, 1:], ignore_index=0, reduction="none").mean()


def of_length(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB, (length + 1,), generator=generator) for length in lengths]


def collate(batch: list[Tensor]) -> Tensor:
    return pad_sequence(batch, batch_first=True)


class Messages(Callback):
    """Counts what neighbours tell each other about shapes and positions, batch by batch."""

    def __init__(self) -> None:
        self.count = 0
        self.per_batch: list[int] = []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not isinstance(trainer.strategy, ThreeDStrategy):
            return
        transport = trainer.strategy._assembled.engine._transport
        for way in ("send_object", "announce", "announced"):
            self._count(transport, way)

    def _count(self, transport: Any, way: str) -> None:
        call = getattr(transport, way)

        def counted(*args: Any) -> Any:
            self.count += 1
            return call(*args)

        setattr(transport, way, counted)

    def on_train_batch_start(self, *args: Any) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.per_batch.append(self.count)


def of_changing_length(mesh: Mesh | None, options: dict[str, Any]) -> Any:
    data = of_length([5, 4, 2, 5, 9, 1, 3, 9, 3, 1, 2, 3, 9, 9, 5, 1, 5, 4, 2, 5])
    module, messages = seeded(Padded), Messages()
    trainer = make_trainer(mesh, options if mesh else None, callbacks=[messages], max_epochs=2)
    trainer.fit(
        module,
        DataLoader(data, batch_size=4, collate_fn=collate),
        DataLoader(data[2:], batch_size=4, collate_fn=collate),
    )
    return numbers(trainer.callback_metrics), whole_weights(trainer), messages.per_batch


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 1, 1), {"num_micro_batches": 2}),
        ((4, 1, 1), {"num_micro_batches": 4}),
        ((2, 1, 1), {"num_micro_batches": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ],
)
def test_c14_sequences_may_change_their_length_from_batch_to_batch(mesh: Mesh, options: dict[str, Any]) -> None:
    wanted, weights, _ = of_changing_length(None, {})
    for rank, (metrics, whole, messages) in enumerate(on_ranks(of_changing_length, mesh, options)):
        assert not differences(metrics, wanted, 1e-10)
        assert messages[0] > 0 and not any(messages[1:]), "only the first batch may need an exchange of shapes"
        if rank == 0:
            assert_same_weights(whole, weights)


# --- C15 ------------------------------------------------------------------------------------------------------------


class Indexed(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Gives each sample with its own index."""

    def __init__(self, num: int) -> None:
        self.rows = rows(num)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], torch.tensor(index)


class Sees(Tokens):
    """Checks within the step, on the last stage, that targets belong to the inputs of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: dict[str, list[list[int]]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.indices["train"].append(batch[1].tolist())

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.indices["val"].append(batch[1].tolist())


def indices_seen(mesh: Mesh, shuffle: bool) -> Any:
    module = seeded(Sees)
    trainer = make_trainer(mesh, max_epochs=2)
    data = Indexed(12)
    trainer.fit(module, loader(data, 4, mesh, shuffle=shuffle), loader(data, 4, mesh))
    where = trainer.strategy.topology.coordinates
    return where, module.indices


@pytest.mark.parametrize("shuffle", [False, True])
def test_c15_ranks_of_a_replica_see_the_same_samples_and_replicas_share_the_dataset_out(shuffle: bool) -> None:
    replicas: dict[int, dict[str, list[list[int]]]] = {}
    for where, seen in on_ranks(indices_seen, (2, 2, 2), shuffle):
        assert replicas.setdefault(where["dp"], seen) == seen, where
    assert len(replicas) == 2
    for loop in ("train", "val"):
        epochs = [
            sorted(index for seen in replicas.values() for batch in seen[loop][start : start + 3] for index in batch)
            for start in (0, 3)
        ]
        assert epochs == [list(range(12))] * 2, "every sample once in every epoch"
    first, second = (
        [replicas[0]["train"][step] + replicas[1]["train"][step] for step in range(start, start + 3)]
        for start in (0, 3)
    )
    assert (first != second) == shuffle
    if not shuffle:
        assert [sorted(step) for step in first] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
