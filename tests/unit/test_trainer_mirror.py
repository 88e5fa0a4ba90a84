"""State of a module: what changed is found, sent and put back, and nothing else is touched."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from lightning_3d.placeholder import Placeholder
from lightning_3d.trainer.data.messages import decode, encode
from lightning_3d.trainer.module.mirror import StateMirror


class _Average:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.accuracy = BinaryAccuracy()
        self.counter = _Counter()
        self.seen = 0
        self.outputs: list[Any] = []
        self.table: dict[str, Any] = {"a": [1]}
        self.average = _Average()
        self.recent: deque[int] = deque(maxlen=2)
        self.function = lambda: None
        self.register_buffer("mean", torch.zeros(2))


def _sent(source: StateMirror, before: Any) -> Any:
    delta = source.delta(before)
    structure, tensors = encode(delta, source.names)
    return delta, (structure, tensors)


def _pair() -> tuple[_Module, StateMirror, _Module, StateMirror]:
    first, second = _Module(), _Module()
    return first, StateMirror(first), second, StateMirror(second)


def test_nothing_changed_is_nothing_to_send() -> None:
    module, mirror, *_ = _pair()
    before = mirror.snapshot()
    module.layer(torch.zeros(1, 2))
    module.layer.weight.data += 1
    module.train(False)
    assert not mirror.delta(before)


def test_all_kinds_of_state_arrive() -> None:
    module, mirror, other, others = _pair()
    before = mirror.snapshot()
    module.seen += 3
    module.outputs.append(torch.ones(2))
    module.table["a"].append(2)
    module.table["b"] = torch.zeros(1)
    module.average.total += 2.5
    module.recent.extend([1, 2, 3])
    module.mean += 1
    module.counter.calls += 1  # type: ignore[operator]
    module.accuracy.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
    module.fresh = "new"
    delta, message = _sent(mirror, before)
    held = other.outputs
    others.apply(decode(*message, named=others.named))
    assert other.seen == 3 and other.fresh == "new" and other.table["a"] == [1, 2]
    assert other.outputs is held and torch.equal(held[0], torch.ones(2))
    assert other.average.total == 2.5 and list(other.recent) == [2, 3]
    assert torch.equal(other.mean, torch.ones(2)) and other.counter.calls.item() == 1  # type: ignore[union-attr]
    assert other.accuracy.compute() == module.accuracy.compute()
    assert other.accuracy._update_count == 1
    assert delta.tails.keys() == {("", "attribute", "outputs")}


@pytest.mark.parametrize("length", [10, 10_000])
def test_only_the_new_end_of_a_list_is_sent(length: int) -> None:
    module, mirror, other, others = _pair()
    module.outputs.extend(range(length))
    other.outputs.extend(range(length))
    before = mirror.snapshot()
    assert not mirror.delta(before)
    module.outputs.append(-1)
    delta, message = _sent(mirror, before)
    assert not delta.values and delta.tails[("", "attribute", "outputs")] == [-1]
    others.apply(decode(*message, named=others.named))
    assert other.outputs == module.outputs
    before = mirror.snapshot()
    module.outputs.clear()
    delta, message = _sent(mirror, before)
    others.apply(decode(*message, named=others.named))
    assert other.outputs == []


def test_arrays_that_are_changed_in_place_are_followed() -> None:
    module, mirror, other, others = _pair()
    module.confusion = np.zeros((100, 100))
    other.confusion = module.confusion.copy()
    before = mirror.snapshot()
    assert not mirror.delta(before)
    module.confusion[3, 4] += 1
    _, message = _sent(mirror, before)
    others.apply(decode(*message, named=others.named))
    assert other.confusion[3, 4] == 1


def test_deleted_attributes_are_deleted() -> None:
    module, mirror, other, others = _pair()
    before = mirror.snapshot()
    del module.seen
    _, message = _sent(mirror, before)
    others.apply(decode(*message, named=others.named))
    assert not hasattr(other, "seen")


def test_modules_are_sent_by_name() -> None:
    module, mirror, other, others = _pair()
    before = mirror.snapshot()
    module.table["layer"] = module.layer
    _, message = _sent(mirror, before)
    others.apply(decode(*message, named=others.named))
    assert other.table["layer"] is other.layer


def test_what_belongs_to_a_stage_or_does_not_pickle_stays() -> None:
    module, mirror, *_ = _pair()
    before = mirror.snapshot()
    module.hidden = Placeholder(torch.empty(2, device="meta"), torch.device("cpu"))
    module.kept = [module.layer.weight]
    module.iterator = (index for index in range(3))
    module.graph = torch.ones(1 << 17, requires_grad=True) * 2
    module.small = torch.ones(2, requires_grad=True).sum()
    delta = mirror.delta(before)
    assert {path[2] for path in delta.values} == {"small"}
    assert not mirror.delta(mirror.snapshot())


def test_restore_undoes_what_a_step_did() -> None:
    module, mirror, *_ = _pair()
    module.outputs.append(1)
    module.accuracy.update(torch.tensor([0.9]), torch.tensor([1]))
    held, state = module.outputs, {name: value.clone() for name, value in module.accuracy.metric_state.items()}
    before = mirror.snapshot(copy=True)
    module.outputs.append(2)
    module.table["b"] = 1
    module.average.count = 5
    module.mean += 1
    module.seen = 9
    module.fresh = 1
    module.accuracy(torch.tensor([0.1]), torch.tensor([1]))
    mirror.restore(before)
    assert module.outputs is held and held == [1]
    assert module.table == {"a": [1]} and module.average.count == 0 and module.seen == 0
    assert not hasattr(module, "fresh") and torch.equal(module.mean, torch.zeros(2))
    assert module.accuracy._update_count == 1
    for name, value in module.accuracy.metric_state.items():
        assert torch.equal(value, state[name])


def test_restore_undoes_what_a_step_did_within_containers() -> None:
    module, mirror, *_ = _pair()
    inner, average = [1], _Average()
    module.table = {"losses": inner, "total": torch.zeros(2), "pair": ([1], torch.zeros(1)), "average": average}
    module.outputs = [[1], torch.zeros(1)]
    total = module.table["total"]
    before = mirror.snapshot(copy=True)
    module.table["losses"].append(2)
    module.table["total"] += 1
    module.table["pair"][0].append(2)
    module.table["pair"][1].add_(1)
    average.count += 1
    module.outputs[0].append(2)
    module.outputs[1].add_(1)
    assert torch.equal(total, torch.ones(2))
    mirror.restore(before)
    assert module.table["losses"] is inner and inner == [1]
    assert list(module.table) == ["losses", "total", "pair", "average"]
    assert torch.equal(module.table["total"], torch.zeros(2))
    assert module.table["pair"][0] == [1] and module.table["pair"][1].item() == 0
    assert module.table["average"] is average and average.count == 0
    assert module.outputs[0] == [1] and module.outputs[1].item() == 0
    assert not mirror.delta(mirror.snapshot())


def test_restore_undoes_what_a_step_did_to_arrays() -> None:
    module, mirror, *_ = _pair()
    module.counts, module.table = np.zeros(3), {"counts": np.zeros(2)}
    module.words = np.array(["a", None], dtype=object)  # its bytes are addresses: identity decides
    module.table["fixed"] = np.ones(2)
    module.table["fixed"].flags.writeable = False
    held = module.counts
    before = mirror.snapshot(copy=True)
    module.counts += 1
    module.table["counts"][0] = 5
    mirror.restore(before)
    assert module.counts is held and not held.any() and not module.table["counts"].any()
    assert not mirror.delta(mirror.snapshot())


def test_a_list_of_a_class_of_its_own_stays_one() -> None:
    class Mine(list[int]):
        pass

    module, mirror, *_ = _pair()
    module.outputs = Mine([1])
    before = mirror.snapshot(copy=True)
    module.outputs.append(2)
    mirror.restore(before)
    assert type(module.outputs) is Mine and module.outputs == [1]


def test_states_made_in_inference_mode_are_followed() -> None:
    module, mirror, other, others = _pair()
    with torch.inference_mode():
        module.accuracy.reset()
        before = mirror.snapshot()
        module.accuracy.update(torch.tensor([0.9]), torch.tensor([1]))
        _, message = _sent(mirror, before)
        others.apply(decode(*message, named=others.named))
        assert other.accuracy.compute() == 1


def test_large_dictionaries_are_followed_where_they_grow() -> None:
    module, mirror, other, others = _pair()
    module.table.update({str(index): [index] for index in range(2000)})
    before = mirror.snapshot()
    assert not mirror.delta(before)
    module.table["last"] = 1
    _, message = _sent(mirror, before)
    others.apply(decode(*message, named=others.named))
    assert other.table == module.table
    mirror.restore(before)
    assert "last" not in module.table and "1999" in module.table


def test_long_lists_cost_little_in_each_step() -> None:
    import time

    module, mirror, *_ = _pair()
    module.outputs.extend(float(index) for index in range(1_000_000))
    start = time.perf_counter()
    for _ in range(10):
        mirror.delta(mirror.snapshot())
    assert (time.perf_counter() - start) / 10 < 0.02
