"""Adapters of PEFT at layouts: the base is frozen, the optimizer knows adapters only, checkpoints have their keys."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config

from lightning_3d.checkpoint import consolidate, export_hugging_face, to_lightning
from lightning_3d.trainer.setup.assembly import Assembly
from tests.dist.hugging_face_modules import Case, CausalLM, adapted, agree, fit, lora, silence, tiny_llama, train
from tests.dist.lightning_modules import Mesh, numbers, on_ranks, seeded, whole_weights

GPT2 = GPT2Config(
    n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
CASES = {
    "lora": Case({"returns": "own", "prepare": lora}),
    "lora, recomputed": Case({"returns": "own", "prepare": lora}, options={"activation_checkpointing": "full"}),
    # Stage 0 has nothing to train.
    "last layers": Case({"returns": "own", "prepare": partial(lora, layers_to_transform=[2, 3])}),
    "head and adapters": Case({"returns": "own", "prepare": partial(lora, modules_to_save=["lm_head"])}),
    "tied, recomputed": Case(
        {"returns": "own", "prepare": lora, "checkpointing": True}, tiny_llama(tie_word_embeddings=True)
    ),
    "prompt": Case({"prepare": partial(adapted, method="prompt")}),
    "prefix": Case({"prepare": partial(adapted, method="prefix")}),
    "factors": Case({"returns": "own", "prepare": partial(adapted, method="ia3")}),
    "magnitudes": Case({"returns": "own", "prepare": partial(lora, use_dora=True)}),
    "packed": Case(
        {"returns": "own", "prepare": partial(lora, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)},
        GPT2,
    ),
}
PLACES: dict[Mesh, list[str]] = {
    (2, 1, 1): ["last layers", "tied, recomputed", "prefix"],
    (1, 1, 2): ["lora, recomputed", "head and adapters", "magnitudes", "packed", "prompt", "factors"],
    (1, 2, 1): ["head and adapters", "last layers"],
}


@pytest.mark.parametrize("mesh", PLACES, ids=str)
def test_adapters_train_as_in_one_process(mesh: Mesh) -> None:
    cases = [CASES[name] for name in PLACES[mesh]]
    if mesh[1] > 1:
        cases = [case._replace(options={**case.options, "zero_stage": 3}) for case in cases]
    agree(on_ranks(train, mesh, cases), train(None, cases), cases)


def dropped(mesh: Mesh) -> Any:
    case = Case({"prepare": partial(lora, lora_dropout=0.5)}, tiny_llama(attention_dropout=0.1))
    module = fit(mesh, case).lightning_module
    own = {name: value.detach() for name, value in module.named_parameters() if "lora" in name}
    return {name: value for name, value in own.items() if not isinstance(value, DTensor)}


def test_adapters_of_layers_that_are_cut_drop_out_alike() -> None:
    first, second = on_ranks(dropped, (1, 1, 2))
    assert len(first) == 4 * 5  # the first of three column layers, the second of two row layers
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def saved(mesh: Mesh | None, path: str) -> Any:
    trainer = fit(mesh, CASES["lora"])
    trainer.save_checkpoint(path)
    held = Assembly.of(trainer.lightning_module)
    cut = {layer.name.split("layers.0.")[-1]: layer.kind for layer in held.plan.layers} if held else {}
    return numbers(trainer.callback_metrics), whole_weights(trainer), cut


def test_adapters_are_cut_saved_exported_and_merged(tmp_path: Path) -> None:
    single, path = tmp_path / "one.ckpt", tmp_path / "cut.ckpt"
    right = saved(None, str(single))
    found = on_ranks(saved, (2, 1, 2), str(path))
    agree([[rank[:2]] for rank in found], [right[:2]], [CASES["lora"]])
    layers = {name: kind for name, kind in found[0][2].items() if name.startswith(("self_attn", "mlp"))}
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
        assert layers.pop(f"{name}.base_layer") == layers.pop(f"{name}.lora_B.default") == "colwise"
        assert layers.pop(f"{name}.lora_A.default") == "replicated"
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert layers.pop(f"{name}.base_layer") == layers.pop(f"{name}.lora_A.default") == "rowwise"
        assert layers.pop(f"{name}.lora_B.default") == "replicated"
    assert layers == {"self_attn.k_proj": "colwise", "mlp.gate_proj": "colwise"}

    stock = torch.load(single, weights_only=True)["state_dict"]
    state = consolidate(path)
    assert state.keys() == stock.keys()
    (optimizer,) = to_lightning(path)["optimizer_states"]
    assert len(optimizer["state"]) == len(optimizer["param_groups"][0]["params"]) == sum("lora" in key for key in stock)
    trained = seeded(CausalLM, tiny_llama(), **CASES["lora"].module).double()
    trained.load_state_dict(state)
    ids = torch.arange(1, 13).view(2, 6)

    done = export_hugging_face(path, tmp_path / "hf")
    assert done.left_out == ()
    with silence():
        base, loading = AutoModelForCausalLM.from_pretrained(done.folder, output_loading_info=True)
        model = PeftModel.from_pretrained(base, done.folder / "default")
    assert not any(loading.values())
    with torch.no_grad():
        logits = trained.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, logits, rtol=0, atol=1e-12)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=0, atol=1e-12)
    assert not [name for name in merged.state_dict() if "lora" in name]
    mask = torch.ones_like(ids)
    words = trained.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6)
    assert torch.equal(merged.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6), words)

    # What PEFT itself writes has the same names.
    trained.model.save_pretrained(tmp_path / "peft")
    from safetensors.torch import load_file

    theirs, ours = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("peft", "hf/default"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    only = export_hugging_face(path, tmp_path / "only", adapters_only=True)
    assert sorted(only.files) == ["default/adapter_config.json", "default/adapter_model.safetensors"]
