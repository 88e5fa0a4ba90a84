"""Growth of memory, and what grew."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_3d.monitor import leaks
from lightning_3d.monitor.leaks import LeakWatch, growth, take_census
from lightning_3d.monitor.record import Place

CPU = torch.device("cpu")
PLACE = Place(rank=0, host="here", pp=0, dp=0, tp=0, memory_bytes=1 << 33)


def test_steady_growth_is_found_with_its_slope() -> None:
    dice = random.Random(1)
    sizes = [1e9 + 1e6 * step + 5e5 * dice.random() for step in range(30)]
    assert growth(sizes, 8e6) == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize(
    "sizes",
    [
        [1e9] * 30,
        [1e9 + 1e7 * random.Random(2).random() for _ in range(30)],  # breathes
        [1e9] * 12 + [1.2e9] * 18,  # grows once
        [1e9 + min(step, 8) * 1e7 for step in range(30)],  # comes to an end
        [1e9 + 1e5 * step for step in range(30)],  # too little
        [1e9, 2e9],
    ],
)
def test_what_settles_is_no_leak(sizes: list[float]) -> None:
    assert growth(sizes, 8e6) is None


class Holder:
    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


def test_a_census_names_what_grew_and_who_holds_it() -> None:
    holder = Holder()
    before = take_census(CPU)
    holder.kept += [torch.zeros(123, 45) for _ in range(6)]
    views = [holder.kept[0][1:] for _ in range(3)]
    unshaped = torch.nn.LazyLinear(3)  # its weight refuses to tell a shape
    grown = take_census(CPU, before).grown_since(before, expected=6 * 123 * 45 * 4)
    assert grown[0].what == "Tensor float32 [123, 45] on cpu"
    assert (grown[0].more, grown[0].bytes) == (6, 6 * 123 * 45 * 4)
    assert grown[0].where == "list of 6 in Holder.kept"
    assert (
        unshaped.weight is not None and len(views) == 3 and not any(entry.bytes for entry in grown[1:])
    )  # views have no memory of their own


def test_holders_are_looked_for_only_of_what_will_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(leaks, "held_by", lambda thing, ours: asked.append(thing) or "here")
    before = take_census(CPU)
    kept = [torch.zeros(17, 1 + index) for index in range(40)]
    census = take_census(CPU, before)
    assert len(asked) == 5  # each is a look at all objects of the process
    assert [grown.where for grown in census.grown_since(before, 1.0)] == ["here"] * 5 and len(kept) == 40


def test_a_leak_is_told_after_two_windows_and_only_at_constant_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter(range(10**9, 10**10, 3 << 20))
    monkeypatch.setattr(leaks, "memory_in_use", lambda device: next(memory))
    watch = LeakWatch(PLACE, CPU, window=6, skip=2)
    kept = []
    told = []
    for step in range(14):
        kept.append(torch.ones(31, 7))
        told.append(watch.step(step, "a shape"))
    assert [step for step, leak in enumerate(told) if leak is not None] == [13]
    leak = told[13]
    assert leak is not None and leak.bytes_per_step == pytest.approx(3 << 20) and leak.grown[0].more == 6
    text = leaks.message(leak)
    assert "rank 0 (pp0 dp0 tp0) on here" in text and "6 more of Tensor float32 [31, 7] on cpu" in text

    watch = LeakWatch(PLACE, CPU, window=6, skip=0)
    assert not any(watch.step(step, step % 5) for step in range(40))
    watch = LeakWatch(PLACE, CPU, window=6, skip=0)  # a smaller batch at the end of every epoch hides nothing
    assert any(watch.step(step, "last" if step % 5 == 4 else "whole") for step in range(20))


def test_a_device_with_its_history_on_names_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"filename": "/home/me/train.py", "line": 12, "name": "training_step"}
    torchs = {"filename": "/usr/lib/python3/site-packages/torch/nn/functional.py", "line": 3, "name": "relu"}
    blocks = [{"state": "active_allocated", "size": 512, "requested_size": 500, "frames": [torchs, mine]}]
    blocks.append({"state": "inactive", "size": 4096, "frames": [mine]})

    def census() -> leaks.Census:
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": [{"blocks": list(blocks)}]})
        return take_census(torch.device("cuda"))

    before = census()
    blocks.extend([blocks[0]] * 3)
    blocks.append({"state": "active_allocated", "size": 9})  # without history
    (grown,) = [one for one in census().grown_since(before, 1500.0) if "train.py" in one.what]
    assert grown.what == "allocations at /home/me/train.py:12 (training_step)"
    assert (grown.more, grown.bytes) == (3, 1500)
