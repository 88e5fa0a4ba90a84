"""Checkpoints as Hugging Face folders: every kind of model loads without a warning and has the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn

from lightning_3d.checkpoint import export_hugging_face, save
from lightning_3d.checkpoint.hugging_face import FILE, describe, described_in_file, read_descriptions
from lightning_3d.checkpoint.safetensors_file import NAMES, write_safetensors
from lightning_3d.cli import main
from lightning_3d.errors import CheckpointError, ConfigError
from tests.dist.hugging_face_modules import adapted, lora, silence, tiny_llama
from tests.unit.test_checkpoint import MESH, state_of

SMALL: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=8, num_key_value_heads=2, num_local_experts=2, bos_token_id=1, eos_token_id=2
    )
    return transformers.MixtralForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=16))


def bart() -> Any:
    size = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=60, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **size)
    return transformers.BartForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def tied_llama() -> Any:
    return transformers.LlamaForCausalLM(tiny_llama(tie_word_embeddings=True))


class Wrapper(nn.Module):
    """A module with a model and more in it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})
        self.head = nn.Linear(3, 3)


def saved(module: nn.Module, path: Path) -> Path:
    torch.save({"state_dict": module.state_dict()}, path)
    return path


@pytest.mark.parametrize("make", [mixtral, t5, bert, bart, vit, tied_llama], ids=lambda make: make.__name__)
def test_every_kind_loads_without_a_word(make: Callable[[], Any], tmp_path: Path) -> None:
    module = Wrapper(make())
    model = module.inner["model"]
    done = export_hugging_face(saved(module, tmp_path / "x.ckpt"), tmp_path / "hf", model=module, max_shard_size="3KiB")
    assert done.left_out == ("head.weight", "head.bias")
    with silence():
        loaded, loading = type(model).from_pretrained(done.folder, output_loading_info=True)
    assert not any(loading.values())
    again = loaded.state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    # As `save_pretrained` would have it, apart from the names under which a library stores what it then joins.
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("hf", "theirs"))
    assert ours == theirs


def test_weights_that_were_untied_by_hand_are_both_kept(tmp_path: Path) -> None:
    model = tied_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    done = export_hugging_face(saved(model, tmp_path / "x.ckpt"), tmp_path / "hf", model=model)
    loaded = transformers.LlamaForCausalLM.from_pretrained(done.folder)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


def test_values_pass_through_the_file_as_they_are(tmp_path: Path) -> None:
    tensors = {str(dtype): (torch.arange(12) % 2).reshape(3, 4).to(dtype).t() for dtype in NAMES}
    tensors |= {"empty": torch.empty(0, 3), "number": torch.tensor(2.5)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, value in tensors.items():
            read = file.get_tensor(name)
            assert read.dtype == value.dtype
            assert read.shape == value.shape
            assert torch.equal(read.to(torch.complex128), value.to(torch.complex128))
    write_safetensors(
        tmp_path / "x.safetensors", {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.int64)}, torch.half
    )
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert (file.get_tensor("a").dtype, file.get_tensor("b").dtype) == (torch.half, torch.int64)
    with pytest.raises(CheckpointError, match="complex128"):
        write_safetensors(tmp_path / "x.safetensors", {"a": torch.ones(2, dtype=torch.complex128)})


def test_an_export_replaces_the_shards_of_an_earlier_one(tmp_path: Path) -> None:
    model = tied_llama()
    source = saved(model, tmp_path / "x.ckpt")
    export_hugging_face(source, tmp_path / "hf", model=model, max_shard_size=2000)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    export_hugging_face(source, tmp_path / "hf", model=model)
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    }


def test_what_a_checkpoint_says_of_its_models(tmp_path: Path) -> None:
    adapted = Wrapper(lora(tied_llama()))
    (tmp_path / FILE).write_bytes(described_in_file(adapted)[FILE])
    (found,) = read_descriptions(tmp_path)
    assert [found] == describe(adapted)
    assert (found.name, found.base) == ("inner.model", "inner.model.base_model.model")
    assert set(found.adapters) == {"default"}
    assert not described_in_file(nn.Linear(2, 2))
    (tmp_path / "hugging_face.json").write_text('{"models": [{}]}')
    with pytest.raises(CheckpointError, match="damaged"):
        read_descriptions(tmp_path)


def test_adapters_that_the_model_has_loaded_itself(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, inject_adapter_in_model

    model = tied_llama()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    inject_adapter_in_model(config, model, adapter_name="extra")  # which is what model.add_adapter does
    model.peft_config = {"extra": config}
    done = export_hugging_face(saved(model, tmp_path / "x.ckpt"), tmp_path / "hf", model=model)
    base = transformers.AutoModelForCausalLM.from_pretrained(done.folder)
    again = PeftModel.from_pretrained(base, done.folder / "extra")
    ids = torch.arange(6)[None]
    assert torch.allclose(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-6)


@pytest.mark.parametrize("method", ["prompt", "prefix", "ia3"])
def test_other_methods_of_peft(method: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model = adapted(tied_llama(), method)
    done = export_hugging_face(saved(model, tmp_path / "x.ckpt"), tmp_path / "hf", model=model)
    assert done.left_out == ()
    base = transformers.AutoModelForCausalLM.from_pretrained(done.folder)
    again = PeftModel.from_pretrained(base, done.folder / "default")
    ids = torch.arange(6)[None]
    assert torch.allclose(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-6)


def test_what_peft_computes_is_refused(tmp_path: Path) -> None:
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True)
    model = get_peft_model(tied_llama(), config)
    with pytest.raises(ConfigError, match="save_pretrained"):
        export_hugging_face(saved(model, tmp_path / "x.ckpt"), tmp_path / "hf", model=model)


def test_an_index_that_has_changed_since_it_was_written_is_not_followed(tmp_path: Path) -> None:
    """Two weights of one shape that are exchanged in it have bytes that fit their checksums."""
    model = tied_llama()
    save(tmp_path / "c", {}, state_of(model), MESH)
    file = tmp_path / "c" / "tensors.json"
    one, other = (f'"model.model.layers.0.self_attn.{which}_proj.weight"' for which in "kv")
    text = file.read_text()
    file.write_text(text.replace(one, "$").replace(other, one).replace("$", other))
    assert len(file.read_text()) == len(text) and file.read_text() != text
    with pytest.raises(CheckpointError, match=r"tensors\.json is damaged"):
        export_hugging_face(tmp_path / "c", tmp_path / "hf", model=model)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tied_llama()
    source, target = saved(model, tmp_path / "x.ckpt"), tmp_path / "hf"
    with pytest.raises(CheckpointError, match="model=module"):
        export_hugging_face(source, target)
    with pytest.raises(ConfigError, match="no Hugging Face model in it"):
        export_hugging_face(source, target, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Hand over the LightningModule"):
        export_hugging_face(source, target, model=Wrapper(model))
    two = nn.ModuleDict({"teacher": model, "student": tied_llama()})
    with pytest.raises(ConfigError, match="'teacher', 'student'"):
        export_hugging_face(saved(two, tmp_path / "two.ckpt"), target, model=two)
    assert export_hugging_face(tmp_path / "two.ckpt", target, model=two, name="student").left_out
    with pytest.raises(ConfigError, match="'pupil'"):
        export_hugging_face(tmp_path / "two.ckpt", target, model=two, name="pupil")
    with pytest.raises(ConfigError, match="5 apples"):
        export_hugging_face(source, target, model=model, max_shard_size="5 apples")
    with pytest.raises(ConfigError, match="int8"):
        export_hugging_face(source, target, model=model, dtype="int8")
    with pytest.raises(ConfigError, match="adapters_only"):
        export_hugging_face(source, target, model=model, adapters_only=True)
    for words in (
        ["convert", str(source), str(target), "--to", "hf"],
        ["convert", str(tmp_path / "nowhere"), str(target), "--to", "hf"],
        ["convert", str(source), str(target), "--to", "ckpt", "--dtype", "half"],
    ):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source)])
    assert ended.value.code == 2
