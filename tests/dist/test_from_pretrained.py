"""``from_pretrained`` in ``configure_model``: as in one process, and a rank reads only what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_3d.initialization import LARGE, pretrained
from tests.dist.lightning_modules import Mesh, loader, make_trainer, on_ranks, rows, seeded, whole_weights

transformers = pytest.importorskip("transformers")

VOCAB, WIDTH = 150, 128


class Pretrained(LightningModule):
    """What users write."""

    def __init__(self, folder: str, head: bool = False) -> None:
        super().__init__()
        self.folder, self.head = folder, head
        self.first: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        kind = transformers.AutoModelForSequenceClassification if self.head else transformers.AutoModelForCausalLM
        options = {"num_labels": VOCAB, "pad_token_id": 0} if self.head else {}
        self.model = kind.from_pretrained(self.folder, **options)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = batch[:, 0] if self.head else batch
        loss: Tensor = self.model(input_ids=batch, labels=labels).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.first = whole_weights(self.trainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint in several files."""
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("checkpoint")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.temperature = 0.25
    model.generation_config.do_sample = True
    model.save_pretrained(path, max_shard_size="600KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return str(path)


def train(mesh: Mesh | None, folder: str, head: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str], str]:
    """Weights before and after two steps, the keys that were read late, and how the model would generate."""
    read: list[str] = []
    original = pretrained._read

    def reading(path: Path, key: str) -> Tensor:
        read.append(key)
        return original(path, key)

    pretrained._read = reading
    try:
        trainer = make_trainer(mesh, {}, max_steps=2)
        module = seeded(Pretrained, folder, head)
        trainer.fit(module, loader(rows(8, VOCAB), 4, mesh))
    finally:
        pretrained._read = original
    return module.first, whole_weights(trainer), read, str(getattr(module.model, "generation_config", ""))


@pytest.mark.parametrize(("mesh", "head"), [((2, 1, 1), False), ((1, 1, 2), True)], ids=str)
def test_weights_are_those_of_one_process_and_each_stage_reads_its_own(mesh: Mesh, head: bool, folder: str) -> None:
    first, last, _, generation = train(None, folder, head)
    results = on_ranks(train, mesh, folder, head)
    for got, expected, tolerance in ((results[0][0], first, 0.0), (results[0][1], last, 1e-10)):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    large = {name.removeprefix("model.") for name, value in first.items() if value.numel() >= LARGE}
    if head:
        large.discard("score.weight")  # new, so it is drawn and not read
    for rank, (*_, read, config) in enumerate(results):
        assert len(read) == len(set(read))
        layers = {int(key.split(".layers.")[1][0]) for key in read if ".layers." in key}
        assert layers == ({0, 1} if rank == 0 else {2, 3}) if mesh[0] == 2 else layers == {0, 1, 2, 3}
        assert config == generation
    assert {key for *_, read, _ in results for key in read} == large
