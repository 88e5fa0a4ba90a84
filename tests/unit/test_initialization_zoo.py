"""Every model of the zoo, recorded instead of made, and from its own checkpoint: the same weights, the same draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.initialization import deferring, is_deferred, materialise, missing_values, reading_late
from tests.zoo.models import MODELS

LEAST = 64  # the models are tiny


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def finished(module: nn.Module) -> dict[str, Tensor]:
    assert sum(map(is_deferred, module.parameters())) > 0.2 * len(list(module.parameters()))
    assert not missing_values(module)
    materialise(module, torch.device("cpu"))
    return tensors(module)


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(got[name], value)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_weights_that_they_would_have_had(name: str, tmp_path: Path) -> None:
    def build(device: str) -> nn.Module:
        torch.manual_seed(3)
        with torch.device(device):
            return MODELS[name][0]()

    made = build("cpu")
    drawn = torch.get_rng_state()
    for device in ("cpu", "meta"):
        with deferring(LEAST):
            recorded = build(device)
        assert torch.equal(torch.get_rng_state(), drawn)
        same(finished(recorded), tensors(made))
    if hasattr(made, "save_pretrained"):
        made.save_pretrained(tmp_path, max_shard_size="30KB")
        loaded = type(made).from_pretrained(tmp_path)
        with deferring(LEAST), reading_late(LEAST):
            recorded = type(made).from_pretrained(tmp_path)
        same(finished(recorded), tensors(loaded))
