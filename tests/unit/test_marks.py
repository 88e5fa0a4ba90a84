"""Attributes and ids of parameters reach ranks that start as functions; hooks are refused."""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.trainer.module.marks import Marks


def sent(value: Any) -> Any:
    return pickle.load(io.BytesIO(ForkingPickler.dumps(value)))


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.layer.weight.lr_scale = 0.5
        self.layer.bias.mask = torch.ones(3)
        self.slow = frozenset({id(self.layer.weight), 7})
        self.rates = {id(self.layer.bias): 0.1, "nested": ([id(self.layer.weight)],)}
        self.count = 3


def test_attributes_and_ids_arrive() -> None:
    module = Marked()
    module.layer.bias.function = lambda: None
    with pytest.warns(UserWarning, match=r"'function' of the parameter layer.bias"):
        marks = Marks.of(module, "spawn")
    copied, marks = sent((module, marks))
    assert not vars(copied.layer.weight)
    marks.put_on(copied)
    weight, bias = copied.layer.weight, copied.layer.bias
    assert weight.lr_scale == 0.5 and torch.equal(bias.mask, torch.ones(3)) and not hasattr(bias, "function")
    assert copied.slow == {id(weight), 7}
    assert copied.rates == {id(bias): 0.1, "nested": ([id(weight)],)}


def test_hooks_are_refused() -> None:
    module = Marked()
    module.layer.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"layer\.weight.*'forkserver'.*setup\(\)"):
        Marks.of(module, "forkserver")
