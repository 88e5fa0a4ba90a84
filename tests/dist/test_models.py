"""The models and data that recipes name, as the recipes use them: built late, fed from files, at a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_3d import ThreeDStrategy
from lightning_3d.models import GPT, CausalLM, TokenFiles
from tests.harness import run_trainer

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"num_layers": 2, "width": 16, "num_heads": 4, "sequence_length": 8, "vocab_size": 64, "build_late": True},
    "llama": {"model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2, **TINY},
    "bloom": {"model_type": "bloom", "n_head": 4, "n_layer": 2, "hidden_size": 16, "vocab_size": 64},
}


def make(name: str) -> LightningModule:
    torch.manual_seed(5)
    if name == "gpt":
        return GPT(**MODELS[name], warmup_steps=1)
    return CausalLM(MODELS[name], warmup_steps=1, learning_rate=1e-2)


def train(rank: int, world: int, names: list[str], folder: str) -> dict[str, list[float]]:
    """Losses of two steps and one validation of every model."""
    found = {}
    for name in names:
        module = make(name)
        strategy: Any = ThreeDStrategy(pipeline_parallel=2, tensor_parallel=2) if world > 1 else "auto"
        trainer = Trainer(
            accelerator="cpu",
            devices=world,
            strategy=strategy,
            precision="64-true",
            max_epochs=1,
            limit_train_batches=2,
            limit_val_batches=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        losses: list[float] = []
        tokens = TokenFiles(f"{folder}/*.bin", f"{folder}/*.bin", sequence_length=8, batch_size=4, num_workers=0)
        step = module.on_train_batch_end
        module.on_train_batch_end = lambda out, *_, kept=losses, step=step: (  # type: ignore[method-assign]
            kept.append(float(out["loss"])),
            step(out, *_),
        )
        trainer.fit(module, tokens)
        found[name] = [*losses, float(trainer.callback_metrics["val_loss"])]
    return found


def test_models_of_recipes_train_at_a_layout_as_in_one_process(tmp_path: Path) -> None:
    np.random.default_rng(0).integers(64, size=400).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    names = list(MODELS)
    expected = train(0, 1, names, str(tmp_path))
    for found in run_trainer(4, train, names, str(tmp_path)):
        for name in names:
            tolerance = 1e-10 if name == "gpt" else 1e-6  # the others compute norms and losses in float32
            assert found[name] == pytest.approx(expected[name], abs=tolerance), name
            assert len(found[name]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Give one of config and pretrained"),
        ({"config": {"hidden_size": 8}}, "add model_type, such as 'llama'"),
    ],
)
def test_a_model_that_is_not_described_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(**options)
