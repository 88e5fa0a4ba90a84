"""Floating-point operations of a step, by the formulas of the literature and by what a device really does."""

from __future__ import annotations

from lightning_3d.planner.shape import ModelShape


def layer_weights(shape: ModelShape, moe: bool = False) -> int:
    """Elements of the matrices that one token is multiplied with in a layer."""
    attention = 2 * shape.hidden * (shape.query_width + shape.kv_width)
    matrices = 3 if shape.gated_mlp else 2
    if not moe:
        return attention + matrices * shape.hidden * shape.ffn_width
    passed = shape.experts_per_token + shape.shared_experts
    return attention + shape.router_parameters + matrices * passed * shape.hidden * shape.expert_width


def attention_flops(shape: ModelShape, causal: bool = False) -> float:
    """Forward operations of one layer's attention core per token: scores and their product with the values.

    ``4 s w`` for queries of width w over a whole sequence; half of it where only the causal half counts.
    """
    return (2.0 if causal else 4.0) * shape.seq_len * shape.query_width


def model_flops_per_token(shape: ModelShape, causal: bool = False) -> float:
    """Operations that training needs per token, three times the forward; nothing that is computed twice.

    ``6 (N_layers + V h) + 12 L h s``: equation 7 of Korthikanti et al. (2022) divided by the tokens. The embedding
    is looked up, not multiplied, and counts nothing. ``causal`` counts half of the attention, as Megatron does since
    2025.
    """
    dense, moe = shape.layers - shape.moe_layers, shape.moe_layers
    weights = dense * layer_weights(shape) + moe * layer_weights(shape, moe=True) + shape.vocab * shape.hidden
    return 6.0 * weights + 3.0 * shape.layers * attention_flops(shape, causal)


def hardware_flops_per_token(
    shape: ModelShape, activation_checkpointing: str | int | None, causal: bool = False
) -> float:
    """Operations that a device does per token: those of the model and what is recomputed.

    Full recomputation is one more forward of all layers, not of the head: equation 3 of Narayanan et al. (2021).
    Selective recomputation counts the attention core twice over, backward included, as equation 8 of Korthikanti et
    al. (2022) does (``s / 6h`` more; only its forward, a third of that, is really repeated). A number k is every k-th
    layer.
    """
    dense, moe = shape.layers - shape.moe_layers, shape.moe_layers
    core = shape.layers * attention_flops(shape, causal)
    forward = 2.0 * (dense * layer_weights(shape) + moe * layer_weights(shape, moe=True)) + core
    again = {None: 0.0, "full": forward, "selective": 3 * core, "operators": (forward - core) / 2}
    if isinstance(activation_checkpointing, int):
        repeated = forward * len(range(0, shape.layers, activation_checkpointing)) / shape.layers
    else:
        repeated = again[activation_checkpointing]
    return model_flops_per_token(shape, causal) + repeated


def training_days(parameters: float, tokens: float, gpus: int, flops_per_s: float, recompute: bool = True) -> float:
    """Days of training: ``8 T N / (n X)`` with X hardware FLOP/s under full recomputation, else ``6 T N / (n X)``.

    Equation 4 of Narayanan et al. (2021); X must be of the same convention.
    """
    return (8 if recompute else 6) * tokens * parameters / (gpus * flops_per_s) / 86400
