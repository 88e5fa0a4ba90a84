"""The shape of a model read off what a user has: a configuration of Hugging Face, or any module, also on meta."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from lightning_3d.errors import ConfigError
from lightning_3d.pipeline.block_lists import find_block_lists
from lightning_3d.planner.shape import ACTIVATIONS, ModelShape

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "seq_len": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token"),
    "expert_ffn_hidden": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
}
"""Fields of a shape, and what configurations call them."""
_LEARNED_POSITIONS = frozenset(
    ("gpt2", "gpt_neo", "opt", "gpt_bigcode", "bert", "roberta", "electra", "xlm-roberta"),
)
_SEES_ALL = frozenset(("bert", "roberta", "electra", "deberta", "deberta-v2", "xlm-roberta", "modernbert", "vit"))
_PLAIN_MLP = (_LEARNED_POSITIONS | _SEES_ALL | {"gpt_neox", "gptj", "bloom", "falcon", "mpt", "codegen"}) - {
    "modernbert"
}
_PLAIN_MLP |= {"phi", "starcoder2", "persimmon"}
"""Types without a gate in the MLP."""
_PACKED = frozenset(("gpt2", "gpt_neox", "bloom", "falcon", "mpt", "codegen", "gpt_bigcode", "phi3", "persimmon"))
"""Types with one projection for queries, keys and values."""
_SCORES = frozenset(("bloom", "mpt", "codegen"))
"""Types whose attention is its scores, whatever is asked for."""
_HEADS = ("num_heads", "n_head", "n_heads", "nhead", "num_attention_heads", "heads")


def shape_of_config(config: Mapping[str, Any], seq_len: int | None = None) -> ModelShape:
    """The shape that a configuration of Hugging Face describes, as a mapping of its ``config.json``.

    Args:
        config: The configuration; of models of several parts that of the text part is taken.
        seq_len: Tokens of a training sample; by default as many as the model has positions.

    Raises:
        ConfigError: If it is an encoder and decoder, or a size is missing.
    """
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"The configuration of {kind!r} has an encoder and a decoder; the planner knows one stack of equal layers."
            " Describe the larger stack with lightning_3d.planner.ModelShape."
        )
    found: dict[str, Any] = {}
    for field, names in _NAMES.items():
        value = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        if value is not None and not isinstance(value, bool):
            found[field] = value
    if seq_len is not None:
        found["seq_len"] = seq_len
    missing = [field for field in ("layers", "hidden", "heads", "vocab", "seq_len") if field not in found]
    if missing:
        looked = "; ".join(f"{field}: {', '.join(_NAMES[field])}" for field in missing)
        raise ConfigError(f"The configuration does not say {', '.join(missing)} (looked for {looked}).")
    gated = kind not in _PLAIN_MLP
    dropouts = [config[name] for name in ("resid_pdrop", "hidden_dropout", "hidden_dropout_prob") if name in config]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        found["kv_heads"] = 1
    tied = config.get("tie_word_embeddings", not gated)
    return ModelShape(
        **found,
        gated_mlp=gated,
        tied_embeddings=bool(tied),
        learned_positions=kind in _LEARNED_POSITIONS,
        embedding_norm=kind == "bloom",
        causal=kind not in _SEES_ALL,
        dropout=any(dropouts) if dropouts else None,
        norm="rmsnorm" if "rms_norm_eps" in config else None,
        activation=_activation(config),
        packed_attention=kind in _PACKED,
        scores=kind in _SCORES or "eager" in (config.get("_attn_implementation"), config.get("attn_implementation")),
    )


def _activation(config: Mapping[str, Any]) -> str:
    names = (config.get(name) for name in ("hidden_act", "activation_function", "hidden_activation"))
    name = next((name for name in names if isinstance(name, str)), "gelu")
    return name if name in ACTIVATIONS else "gelu"


def shape_of_module(module: nn.Module, seq_len: int | None = None) -> ModelShape:
    """The shape of a model, read off its configuration if it carries one, else off its repeated blocks.

    Args:
        module: The model; its parameters may be on the meta device.
        seq_len: Tokens of a training sample; by default what its configuration, or ``example_input_array``, has.

    Raises:
        ConfigError: If a size cannot be found; the message says which, and how to give it.
    """
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "to_dict") and hasattr(config, "model_type"):
            asked = getattr(config, "_attn_implementation", None)  # to_dict leaves it out
            return shape_of_config({**config.to_dict(), "_attn_implementation": asked}, seq_len)
    return _shape_of_blocks(module, seq_len)


def _shape_of_blocks(module: nn.Module, seq_len: int | None) -> ModelShape:
    blocks = [module.get_submodule(name) for found in find_block_lists(module) for name in found.blocks]
    if not blocks:
        raise ConfigError(f"{type(module).__name__} has no list of repeated layers. Give a ModelShape.")
    sizes = {id(block): sum(p.numel() for p in block.parameters()) for block in blocks}
    block = max(blocks, key=lambda one: sizes[id(one)])
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    if not linears:
        raise ConfigError(f"{type(block).__name__} has no nn.Linear, so its shape is not known. Give a ModelShape.")
    hidden = Counter(part.in_features for part in linears).most_common(1)[0][0]
    down = [part.in_features for part in linears if part.out_features == hidden and part.in_features > hidden]
    ffn = max(down, default=4 * hidden)
    up = [part.out_features for part in linears if part.in_features == hidden and part.out_features in (ffn, 2 * ffn)]
    gated = sum(up) >= 2 * ffn
    heads = next((int(value) for value in _attributes(block, _HEADS)), None) or max(1, hidden // 64)
    head_width = hidden // heads
    packed = next((part.out_features for part in linears if hidden < part.out_features <= 3 * hidden), 0)
    narrow = [part.out_features for part in linears if part.in_features == hidden and part.out_features < hidden]
    kv_width = (packed - hidden) // 2 if packed and packed != ffn else min(narrow, default=hidden)
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    heads_out = [
        part
        for part in module.modules()
        if isinstance(part, nn.Linear) and id(part) not in {id(own) for own in linears}
    ]
    vocab = max((part.num_embeddings for part in embeddings), default=0) or max(
        (part.out_features for part in heads_out), default=0
    )
    example: Any = getattr(module, "example_input_array", None)
    if seq_len is None and hasattr(example, "shape") and len(example.shape) > 1:
        seq_len = int(example.shape[1])
    if seq_len is None:
        seq_len = next(
            (int(value) for value in _attributes(module, ("sequence_length", "block_size", "max_length"))), None
        )
    if seq_len is None or not vocab:
        raise ConfigError(
            f"{type(module).__name__} does not say {'how long its samples are' if vocab else 'its vocabulary'}: give"
            " --seq-len, or example_input_array, or describe it with lightning_3d.planner.ModelShape."
        )
    weights = {id(part.weight) for part in embeddings}
    return ModelShape(
        layers=len(blocks),
        hidden=hidden,
        heads=heads,
        kv_heads=max(1, kv_width // head_width) if kv_width % head_width == 0 else None,
        ffn_hidden=ffn,
        vocab=vocab,
        seq_len=seq_len,
        gated_mlp=gated,
        biases=any(part.bias is not None for part in linears),
        norm="rmsnorm" if any("rms" in type(part).__name__.lower() for part in block.modules()) else "layernorm",
        tied_embeddings=not heads_out or any(id(part.weight) in weights for part in heads_out),
        learned_positions=any(part.num_embeddings == seq_len != vocab for part in embeddings),
        dropout=any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.modules()),
        packed_attention=bool(packed) and packed != ffn,
    )


def _attributes(module: nn.Module, names: Iterable[str]) -> Iterable[int]:
    for part in module.modules():
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                yield value
