"""Every rank sees for every logged key what one process would have logged for the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics.classification import BinaryAccuracy

from lightning_3d.config import Sizes
from lightning_3d.mesh import Mesh, build_mesh
from lightning_3d.trainer.data.ledger import BatchFacts
from lightning_3d.trainer.logging.logs import LogRelay
from lightning_3d.trainer.logging.metrics import bind_metrics
from lightning_3d.trainer.module.mirror import StateMirror
from lightning_3d.trainer.data.outputs import combine
from lightning_3d.trainer.step.report import StepReport
from tests.harness import run_ranks

Step = Callable[[Any, torch.Tensor, int], Any]
LENGTHS = (8, 5, 1)


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.outputs: list[torch.Tensor] = []
        self.calls = 0


def _everything(self: Any, batch: torch.Tensor, batch_idx: int) -> Any:
    loss = batch.mean()
    self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
    self.log("loss64", batch.double().mean(), on_epoch=True, sync_dist=True)
    self.log_dict({"total": batch.sum(), "count": float(len(batch))}, reduce_fx="sum", on_epoch=True)
    self.log("largest", batch.max(), reduce_fx=max, on_step=True, on_epoch=True)
    self.log("smallest", batch.min(), reduce_fx="min", on_step=True, on_epoch=True)
    weight = int((batch > 3).sum())
    self.log("tokens", (batch * (batch > 3)).sum() / max(weight, 1), batch_size=weight, on_epoch=True)
    self.log("twice", loss, on_epoch=True)
    self.log("twice", loss + 1, on_epoch=True)
    if batch_idx % 2:
        self.log("odd", loss, on_epoch=True)
    self.accuracy(batch / 20, (batch.long() % 2))
    self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
    self.outputs.append(loss)
    return {"loss": loss, "rows": batch * 2}


def _nothing(self: Any, batch: torch.Tensor, batch_idx: int) -> Any:
    return batch.mean()


def _trainer(module: LightningModule) -> Trainer:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy._lightning_module = module  # type: ignore[assignment]
    module.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    return trainer


def _batches() -> list[torch.Tensor]:
    values = torch.arange(float(sum(LENGTHS))).roll(3)
    return list(values.split(LENGTHS))


def _run(
    module: _Module,
    stage: str,
    run_batch: Callable[[torch.Tensor, int], Any],
    batches: Sequence[torch.Tensor],
) -> tuple[list[Any], dict[str, Any], dict[str, Any], Any]:
    """What the loops do around steps, without the loops: metrics after each batch and at the end."""
    trainer = _trainer(module)
    setattr(trainer, stage, True)
    connector = trainer._logger_connector
    connector.reset_results()
    per_batch, outputs = [], []
    for index, batch in enumerate(batches):
        connector.on_batch_start(batch)
        module._current_fx_name = "training_step" if stage == "training" else "validation_step"
        outputs.append(run_batch(batch, index))
        module._current_fx_name = None
        connector.on_batch_end()
        per_batch.append({**connector.metrics["log"]})
    connector.epoch_end_reached()
    connector.on_epoch_end()
    numbers = {key: value.item() for key, value in connector.callback_metrics.items()}
    return [{k: v.item() for k, v in step.items()} for step in per_batch], numbers, connector.metrics["pbar"], outputs


def _one_process(step: Step, stage: str) -> Any:
    module = _Module()
    result = _run(module, stage, lambda batch, index: step(module, batch, index), _batches())
    return result, module


def _many(rank: int, world: int, sizes: tuple[int, int, int], step: Step, stage: str, pieces: int) -> Any:
    mesh = build_mesh(Sizes(*sizes), torch.device("cpu"))
    module = _Module()
    relay, mirror = LogRelay(module, mesh), StateMirror(module)
    report = StepReport(module, mesh, relay, mirror)
    bind_metrics(module, mesh)

    def run_batch(batch: torch.Tensor, index: int) -> Any:
        mine = batch[mesh.dp.rank :: mesh.dp.size]
        filler = not len(mine)
        mine = batch[:1] if filler else mine
        facts = BatchFacts(len(mine), len(batch), filler)
        parts = [part for part in mine.tensor_split(pieces) if len(part)]
        relay.begin(facts, len(parts))
        report.begin(filler)
        outputs = []
        for part in parts:
            try:
                with relay.recording(len(part), 0.0 if filler else len(part)):
                    module.calls += 1
                    outputs.append(step(module, part, index) if mesh.pp.is_last else _cut(module))
            except KeyboardInterrupt:
                pass
        lengths = [len(part) for part in parts]
        return report.publish(combine(outputs, lengths, lengths) if outputs else None)

    with torch.inference_mode(stage == "validating"):
        results = _run(module, stage, run_batch, _batches())
        accuracy = module.accuracy.compute().item()
    return mesh.coordinates, results, accuracy, module.calls, [value.item() for value in module.outputs]


def _cut(module: Any) -> Any:
    module.log("prologue", 1.0)
    raise KeyboardInterrupt  # as StageEnd leaves the step: not an Exception


@pytest.mark.parametrize("stage", ["training", "validating"])
@pytest.mark.parametrize(("sizes", "pieces"), [((2, 1, 1), 3), ((1, 2, 1), 1), ((2, 2, 1), 2), ((1, 1, 2), 2)])
def test_values_are_those_of_one_process(stage: str, sizes: tuple[int, int, int], pieces: int) -> None:
    (steps, epoch, bar, outputs), module = _one_process(_everything, stage)
    expected_accuracy = module.accuracy.compute().item()
    for _, result, accuracy, _, _ in run_ranks(
        _many, sizes[0] * sizes[1] * sizes[2], sizes, _everything, stage, pieces
    ):
        got_steps, got_epoch, got_bar, got_outputs = result
        for got, expected in zip(got_steps, steps, strict=True):
            _compare(got, expected)
        _compare(got_epoch, epoch)
        _compare(got_bar, bar)
        assert accuracy == pytest.approx(expected_accuracy)
        if sizes[1] == 1:
            assert [output["loss"].item() for output in got_outputs] == pytest.approx(
                [output["loss"].item() for output in outputs]
            )
            assert all(torch.equal(a["rows"], b["rows"]) for a, b in zip(got_outputs, outputs, strict=True))


def _compare(got: dict[str, Any], expected: dict[str, Any]) -> None:
    # A step that logs a name twice logs two values per micro-batch; Lightning shows the last one.
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-6), key


def _conditional(self: Any, batch: torch.Tensor, batch_idx: int) -> Any:
    if batch[0] % 2:
        self.log("odd", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)
    else:
        self.log("even", batch.mean(), sync_dist=True, on_step=True, on_epoch=True)
    self.log("both", batch.mean(), on_step=True, on_epoch=True)
    return None


def _owners(rank: int, world: int, sizes: tuple[int, int, int]) -> Any:
    mesh = build_mesh(Sizes(*sizes), torch.device("cpu"))
    module = _Module()
    relay = LogRelay(module, mesh)
    report = StepReport(module, mesh, relay, StateMirror(module))

    def run_batch(batch: torch.Tensor, index: int) -> Any:
        mine = batch[mesh.dp.rank :: mesh.dp.size]
        relay.begin(BatchFacts(len(mine), len(batch)), 1)
        report.begin(False)
        with relay.recording(len(mine), len(mine)):
            output = _conditional(module, mine, index) if mesh.pp.is_last else None
        return report.publish(output)

    return _run(module, "training", run_batch, [torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 6.0])])


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)])
def test_keys_that_only_some_replicas_log_are_reduced_over_those(sizes: tuple[int, int, int]) -> None:
    for steps, epoch, _, _ in run_ranks(_owners, sizes[0] * sizes[1], sizes):
        assert steps[0] == pytest.approx({"even_step": 2.0, "odd_step": 2.0, "both_step": 2.0})
        assert steps[1] == pytest.approx({"odd_step": 3.0, "even_step": 6.0, "both_step": 4.5})
        assert epoch["even_epoch"] == pytest.approx((2.0 * 3 + 6.0) / 4)
        assert epoch["odd_epoch"] == pytest.approx((2.0 * 2 + 3.0) / 3)
        assert epoch["both_epoch"] == pytest.approx((2.0 * 5 + 4.5 * 2) / 7)


def _counts(rank: int, world: int) -> Any:
    import torch.distributed as dist

    mesh: Mesh = build_mesh(Sizes(2, 1, 1), torch.device("cpu"))
    module = _Module()
    relay = LogRelay(module, mesh)
    report = StepReport(module, mesh, relay, StateMirror(module))
    calls: list[str] = []
    original = dist.broadcast

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append("broadcast")
        return original(*args, **kwargs)

    dist.broadcast = counting  # type: ignore[assignment]
    per_batch = []

    def run_batch(batch: torch.Tensor, index: int) -> Any:
        calls.clear()
        relay.begin(BatchFacts(len(batch), len(batch)), 1)
        report.begin(False)
        with relay.recording(len(batch), len(batch)):
            output = None
            if mesh.pp.is_last:
                output = batch.mean()
                if index > 1:
                    module.log("loss", output)
        report.publish(output)
        per_batch.append(len(calls))

    _run(module, "training", run_batch, [torch.ones(2)] * 5)
    return per_batch


def test_an_unchanged_structure_costs_one_header_and_one_message_of_tensors() -> None:
    for counts in run_ranks(_counts, 2):
        assert counts == [3, 2, 3, 2, 2]
