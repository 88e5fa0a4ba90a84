"""What a transformer layer keeps for its backward: by fused kernels, and by modules operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_3d.planner.layout import Layout
from lightning_3d.planner.shape import ModelShape


def layer_activations(
    shape: ModelShape,
    micro_batch: int,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    activation_checkpointing: str | None = None,
    flash_attention: bool = False,
    context_parallel: int = 1,
) -> float:
    """Bytes that one layer of fused kernels keeps of a micro-batch in 16 bits: table 2 of Korthikanti et al. (2022).

    ``sbh (34 + 5as/h)`` for a GPT with dropout and nothing cut, made general. Without dropout its masks (1 byte an
    element) are not there; fewer heads of keys and values, a gated MLP and experts change their terms; context
    parallelism divides s.
    """
    tokens = shape.seq_len / context_parallel * micro_batch
    t = tensor_parallel
    t_outside = t if sequence_parallel else 1
    mask = 1 if shape.has_dropout else 0
    if activation_checkpointing == "full":
        return 2 * tokens * shape.hidden / t_outside
    if activation_checkpointing == "operators":
        # Of the products of a layer every second is kept, and what attention gives back; the rest is made again.
        products = shape.query_width + shape.kv_width * 2 + (2 if shape.gated_mlp else 1) * shape.ffn_width
        return tokens * (4 * shape.hidden / t_outside + (products + 2 * shape.query_width) / t)
    # Kept whole by every tensor-parallel rank, unless the sequence is cut: inputs of norms, attention and MLP, masks.
    outside = (8 + 2 * mask) * tokens * shape.hidden
    # Cut over the ranks: queries, keys and values, attention's output, inner activations of the MLP.
    attention = tokens * (4 * shape.query_width + 4 * shape.kv_width)
    mlp = tokens * _inner(shape) * (6 if shape.gated_mlp else 4)
    if shape.experts:
        mlp += tokens * shape.hidden * 2 * _passed(shape)  # every token stands once for each of its experts
    scores = 0.0
    if activation_checkpointing != "selective" and not flash_attention:
        scores = (
            (5 if shape.has_dropout else 2)
            * shape.heads
            * micro_batch
            * (shape.seq_len / context_parallel)
            * shape.seq_len
        )
    return outside / t_outside + (attention + mlp + scores) / t


def _passed(shape: ModelShape) -> int:
    """Experts that a token passes; 1 for a dense MLP."""
    return shape.experts_per_token + shape.shared_experts if shape.experts else 1


def _inner(shape: ModelShape) -> int:
    """Inner widths of all MLPs that a token passes."""
    return _passed(shape) * (shape.expert_width if shape.experts else shape.ffn_width)


@dataclass(frozen=True)
class Kept:
    """Tensors that the backward of an operation reads."""

    what: str
    type: str
    """``"value"``: that of the computation; ``"wide"``: float32 if autocast is on; ``"float32"``; or ``"mask"``: a byte
    an element."""
    elements: Callable[[ModelShape], float]
    """Per token."""
    is_cut: bool = False
    """Whether tensor-parallel ranks hold a part each; without sequence parallelism the others are whole on all."""

    def num_bytes(self, layout: Layout) -> int:
        """Bytes of an element."""
        if self.type == "wide":
            return max(4, layout.element_bytes) if layout.precision.endswith("mixed") else layout.element_bytes
        return {"value": layout.element_bytes, "float32": max(4, layout.element_bytes), "mask": 1}[self.type]


NORMS = {
    # Autocast runs layer_norm in float32 on GPUs: its input is cast for it, its output for the product that reads it.
    "layernorm": (
        Kept("input of the norm", "wide", lambda shape: shape.hidden),
        Kept("its output, which a product reads", "value", lambda shape: shape.hidden),
    ),
    # That of transformers: x.to(float32), then x * rsqrt(mean(x * x)), cast back, times the weight.
    "rmsnorm": (
        Kept("input of the norm in float32", "float32", lambda shape: shape.hidden),
        Kept("what the weight is multiplied with", "value", lambda shape: shape.hidden),
        Kept("the output, which a product reads", "value", lambda shape: shape.hidden),
    ),
}
"""By kind of norm. The sum of a residual keeps nothing itself."""

DROPOUT = Kept("mask of a dropout before a residual", "mask", lambda shape: shape.hidden)

ATTENTION = (
    Kept("queries", "value", lambda shape: shape.query_width, True),
    Kept("keys and values", "value", lambda shape: 2 * shape.kv_width, True),
    Kept("output, which the attention and a product read", "value", lambda shape: shape.query_width, True),
    Kept("logarithms of the sums of exponentials", "float32", lambda shape: shape.heads, True),
)
"""A fused kernel (``F.scaled_dot_product_attention``)."""

TURNED = (
    Kept("one projection's queries, of which the values are a view", "value", lambda shape: shape.query_width, True),
    Kept("its keys", "value", lambda shape: shape.kv_width, True),
    Kept("output with heads behind each other, for the product", "value", lambda shape: shape.query_width, True),
)
"""Besides, where one projection gives queries, keys and values, and the first two are turned (rotary positions) into
tensors of their own: values keep all of it, and what is turned has the tokens of a head together, as has the output."""

SCORES = (
    Kept("queries", "value", lambda shape: shape.query_width, True),
    Kept("keys and values, for every head of the queries", "value", lambda shape: 2 * shape.query_width, True),
    Kept("softmax in float32", "float32", lambda shape: shape.heads * shape.seq_len, True),
    Kept("what multiplies the values", "value", lambda shape: shape.heads * shape.seq_len, True),
    Kept("output with heads beside each other", "value", lambda shape: shape.query_width, True),
)
"""Attention with its scores, as ``attn_implementation="eager"`` of transformers has it."""
SCORE_DROPOUT = Kept("mask of the scores", "mask", lambda shape: shape.heads * shape.seq_len, True)

MLPS = {
    "gelu": (Kept("input and output of the activation", "value", lambda shape: 2 * _inner(shape), True),),
    "relu": (Kept("output of the activation", "value", lambda shape: _inner(shape), True),),
    # 0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3))), written out; autocast runs the power in float32 on GPUs.
    "gelu_new": (
        Kept("input of the power, tanh, and 1 + tanh", "wide", lambda shape: 3 * _inner(shape), True),
        Kept("half of the input, and the output", "value", lambda shape: 2 * _inner(shape), True),
    ),
    "gated": (
        Kept("gate before and after its activation, up, their product", "value", lambda shape: 4 * _inner(shape), True),
    ),
}
"""By activation; a gated MLP has one of a single kernel."""


def kept_by(shape: ModelShape, fuses_attention: bool) -> Iterator[Kept]:
    """What the operations of one layer keep."""
    for _ in range(2):
        yield from NORMS[shape.norm_kind]
        if shape.has_dropout:
            yield DROPOUT
    if fuses_attention:
        yield from ATTENTION
        if shape.turns_packed:
            yield from TURNED
    else:
        yield from SCORES
        if shape.has_dropout:
            yield SCORE_DROPOUT
    yield from MLPS["gated" if shape.gated_mlp else shape.activation]
    if shape.experts:  # every token stands once for each of its experts
        yield Kept("inputs of the experts", "value", lambda shape: shape.hidden * _passed(shape), True)


def eager_activations(shape: ModelShape, layout: Layout, recomputed: bool = False) -> float:
    """Bytes that one layer keeps of a micro-batch where every operation of a module keeps what its backward reads.

    Args:
        shape: The model.
        layout: The layout; its ``activation_checkpointing`` is not read.
        recomputed: Whether only the layer's input is kept.
    """
    tokens = shape.seq_len / layout.context_parallel * layout.micro_batch_size
    outside = layout.tensor_parallel if layout.sequence_parallel else 1
    if recomputed:
        return tokens * residual(shape).num_bytes(layout) * shape.hidden / outside
    each = (
        kept.elements(shape) * kept.num_bytes(layout) / (layout.tensor_parallel if kept.is_cut else outside)
        for kept in kept_by(shape, layout.fuses_attention(shape))
    )
    return tokens * sum(each)


def residual(shape: ModelShape) -> Kept:
    """The hidden states between layers: a norm behind the embedding leaves them in the type of its output."""
    return Kept("hidden states", "wide" if shape.embedding_norm else "value", lambda shape: shape.hidden)
