"""What steps log, combined over micro-batches without waiting for the device."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_3d.trainer.data.ledger import BatchFacts
from lightning_3d.trainer.logging.logs import Logged, LogRelay


class Results:
    """Stands for Lightning's own collection."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Replaced while a step runs."""


def relay_on(device: str) -> tuple[LogRelay, Any]:
    """The relay of the last of two stages, and where its module logs to."""
    results = Results()
    module = LightningModule()
    module._trainer = SimpleNamespace(should_stop=False, _results=results)  # type: ignore[assignment]
    alone = SimpleNamespace(size=1, group=None)
    mesh: Any = SimpleNamespace(
        device=torch.device(device), world=alone, dp=alone, control_dp=alone, pp=SimpleNamespace(size=2, is_last=True)
    )
    return LogRelay(module, mesh), results


def batch(relay: LogRelay, results: Any, values: list[Any], weights: list[Any], sizes: list[int]) -> Logged:
    """A batch whose steps log the values in each way that there is, the last of them also under a name of its own."""
    relay.begin(BatchFacts(sum(sizes), sum(sizes)), len(sizes))
    for index, (value, weight, size) in enumerate(zip(values, weights, sizes, strict=True)):
        with relay.recording(size, weight):
            results.log("training_step", "mean", value)
            for op in ("sum", "min", "max"):
                results.log("training_step", op, value, reduce_fx=op)
            results.log("training_step", "of tokens", value, batch_size=index)
            if index == len(sizes) - 1:
                results.log("training_step", "last", value.double())
    return relay.collect()


def test_values_of_micro_batches_are_combined_by_what_they_are() -> None:
    values = [torch.tensor(3.0), torch.tensor(-1.0), torch.tensor(7.0)]
    logged = batch(*relay_on("cpu"), values, [2.0, 2.0, 1.0], [2, 2, 1])
    assert logged.values is not None
    got = {key.name: row for key, row in zip(logged.keys, logged.values.t().tolist(), strict=True)}
    assert got["mean"] == [(3 * 2 - 1 * 2 + 7) / 5, 5]
    assert (got["sum"], got["min"], got["max"]) == ([9, 5], [-1, 5], [7, 5])
    assert got["of tokens"] == [(-1 + 2 * 7) / 3, 3]
    assert got["last"] == [7, 1]


def test_what_weighs_nothing_may_be_nan() -> None:
    values = [torch.tensor(math.nan), torch.tensor(2.0)]
    logged = batch(*relay_on("cpu"), values, [torch.tensor(0.0), torch.tensor(5.0)], [1, 1])
    assert logged.values is not None and logged.values[0, 0] == 2


class NoWaiting(TorchFunctionMode):
    """Refuses what makes the host wait for a GPU; on the meta device there are no values to wait for either."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            from_host = not isinstance(args[0], Tensor) or args[0].device.type == "cpu"
            assert not from_host or torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is Tensor.to and args[0].device.type == "cpu" and (args[1:2] and args[1] == torch.device("meta")):
            assert kwargs.get("non_blocking")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type == "meta":
            assert not isinstance(args[1], list), "a list of positions is brought to the device first"
        return func(*args, **kwargs)


def test_no_step_waits_for_the_device() -> None:
    relay, results = relay_on("meta")
    values = [torch.zeros((), device="meta")] * 2
    with NoWaiting():
        assert batch(relay, results, values, [2.0, 1.0], [2, 1]).values is not None
        assert batch(relay, results, values, [torch.ones((), device="meta"), 1.0], [2, 1]).values is not None
