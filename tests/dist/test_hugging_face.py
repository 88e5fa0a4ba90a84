"""Hugging Face models as users use them, at layouts, against one process under the stock Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_3d.checkpoint import consolidate, export_hugging_face
from lightning_3d.cli import main
from lightning_3d.errors import ConfigError
from tests.dist.hugging_face_modules import (
    VOCAB,
    Case,
    CausalLM,
    agree,
    encoded,
    padded,
    samples,
    silence,
    tiny_llama,
    train,
)
from tests.dist.lightning_modules import Mesh, differences, loader, make_trainer, numbers, on_ranks, seeded

RECOMPUTE = {"activation_checkpointing": "full"}
CASES = {
    "dataclass": Case({"returns": "output"}),
    "eager, from a tokenizer": Case({"returns": "own", "attention": "eager"}, collate=encoded),
    "recomputed by the model": Case({"returns": "own", "checkpointing": True}),
    "recomputed by the model the old way": Case({"returns": "own", "checkpointing": "reentrant"}),
    "recomputed by the strategy": Case({"returns": "own"}, options=RECOMPUTE),
    "recomputed by both": Case({"returns": "own", "checkpointing": True}, options=RECOMPUTE),
}
PLACES: dict[Mesh, list[str]] = {
    (2, 1, 1): list(CASES),
    (1, 1, 2): ["dataclass", "recomputed by the model", "recomputed by both"],
    (1, 2, 1): ["dataclass", "recomputed by the model", "recomputed by the strategy"],
}


@pytest.mark.parametrize("mesh", PLACES, ids=str)
def test_masks_positions_labels_and_dataclasses_at_any_layout(mesh: Mesh) -> None:
    cases = [CASES[name] for name in PLACES[mesh]]
    if mesh[1] > 1:
        cases = [case._replace(options={**case.options, "zero_stage": 3}) for case in cases]
    agree(on_ranks(train, mesh, cases), train(None, cases), cases)


def grow(model: Any) -> Any:
    """Four more tokens, as for a tokenizer that got some."""
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    return model


class Curious(CausalLM):
    """Asks its model what users ask, in hooks and steps."""

    def on_train_start(self) -> None:
        model = self.model
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == VOCAB + 4
        assert model.device == self.device
        self.counts = (model.num_parameters(), model.num_parameters(only_trainable=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.model.config.num_hidden_layers == 4
        assert batch["input_ids"].device == self.model.device
        return super().training_step(batch, batch_idx)


def everything(mesh: Mesh | None, path: str, tied: bool) -> Any:
    module = seeded(Curious, tiny_llama(tie_word_embeddings=tied), returns="own", prepare=grow)
    trainer = make_trainer(mesh)
    data = loader(samples(), 4, mesh, collate_fn=padded)
    trainer.fit(module, data, data)
    logged = numbers(trainer.callback_metrics)
    trainer.save_checkpoint(path)
    tested = trainer.test(module, data, verbose=False)
    validated = trainer.validate(module, data, verbose=False)
    return logged, tested, validated, trainer.predict(module, data), module.counts


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_fit_test_predict_and_generate_from_what_was_exported(
    tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """C44: the folder lists no key without data, and loads without a word."""
    mesh, single, cut = (2, 1, 2), tmp_path / "one.ckpt", tmp_path / "cut.ckpt"
    right = everything(None, str(single), tied)
    for found in on_ranks(everything, mesh, str(cut), tied):
        assert not differences(found[0], right[0])
        assert found[1] == [pytest.approx(row, rel=1e-6) for row in right[1]]
        assert found[2] == [pytest.approx(row, rel=1e-6) for row in right[2]]
        assert all(torch.equal(mine, other) for mine, other in zip(found[3], right[3], strict=True))
        assert found[4] == right[4]

    trained = seeded(Curious, tiny_llama(tie_word_embeddings=tied), prepare=grow).double()
    trained.load_state_dict(torch.load(single, weights_only=True)["state_dict"])
    ids = torch.arange(1, 13).view(2, 6)
    words = trained.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)

    folder = tmp_path / "hf"
    capsys.readouterr()
    assert main(["convert", str(cut), str(folder), "--to", "hf", "--max-shard-size", "4KB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["model"] == "LlamaForCausalLM"
    assert said["left_out"] == []
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 5
    assert ("lm_head.weight" in weight_map) is not tied
    assert sorted(said["files"]) == sorted(path.name for path in folder.iterdir())
    with silence():
        model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    assert model.dtype == torch.float64
    assert model.config.vocab_size == VOCAB + 4
    for name, value in trained.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-10, atol=1e-10)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6), words)

    # And the other way: a file of the stock Trainer needs the module, and gives the same folder.
    export_hugging_face(single, tmp_path / "again", model=trained, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").dtype == torch.bfloat16
    assert main(["convert", str(cut), str(tmp_path / "stock.ckpt"), "--to", "ckpt"]) == 0
    stock = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    assert stock["state_dict"].keys() == consolidate(cut).keys()
    assert len(stock["optimizer_states"]) == 1


def refused(mesh: Mesh) -> str:
    """A block that is given keys and values of earlier tokens cannot append to them twice."""
    from transformers import DynamicCache

    class Prefixed(CausalLM):
        def forward(self, batch: Any) -> Any:
            ids = batch["input_ids"]
            cache = DynamicCache(config=self.model.config)
            for layer in range(4):
                values = torch.zeros(len(ids), 2, 3, 4, dtype=torch.float64)
                cache.update(values, values, layer)
            return self.model(input_ids=ids, labels=batch["labels"], past_key_values=cache)

    with pytest.raises(ConfigError) as error:
        module = seeded(Prefixed, tiny_llama())
        make_trainer(mesh, dict(RECOMPUTE)).fit(module, loader(samples(), 4, mesh, collate_fn=padded))
    return str(error.value)


def test_recomputing_with_a_filled_cache_is_refused() -> None:
    for message in on_ranks(refused, (1, 2, 1)):
        assert "past_key_values" in message
        assert "activation_checkpointing=None" in message
