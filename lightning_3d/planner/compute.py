"""Time of one layer, and of what stands before and after the layers, for one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.planner.communication import Group, Links
from lightning_3d.planner.flops import attention_flops
from lightning_3d.planner.kernels import Kernels
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.shape import ModelShape


@dataclass(frozen=True)
class PartTime:
    """Seconds of a layer (or of the ends of the model) for one micro-batch."""

    forward: float = 0.0
    """Compute of the forward."""
    backward: float = 0.0
    """Compute of the backward, recomputation included."""
    weight: float = 0.0
    """The part of the backward that makes the gradients of weights."""
    forward_tp: float = 0.0
    """Collectives inside the layer that the forward waits for: tensor, context and expert parallel."""
    backward_tp: float = 0.0
    """The same in the backward."""


@dataclass(frozen=True)
class LayerModel:
    """Times of the parts of a model under a layout."""

    shape: ModelShape
    layout: Layout
    kernels: Kernels
    links: Links

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.shape.seq_len / self.layout.context_parallel * self.layout.micro_batch_size

    @property
    def _outside(self) -> int:
        """Over how many ranks the work between tensor-parallel regions is cut."""
        return self.layout.tensor_parallel if self.layout.sequence_parallel else 1

    def layer(self) -> PartTime:
        """A layer; in a mixture of experts the mean over dense and expert layers."""
        shape = self.shape
        dense = self._one(moe=False) if shape.moe_layers < shape.layers else None
        moe = self._one(moe=True) if shape.moe_layers else None
        if dense is None or moe is None:
            return (moe or dense) or PartTime()
        part = shape.moe_layers / shape.layers
        names = PartTime.__dataclass_fields__
        return PartTime(*(getattr(moe, n) * part + getattr(dense, n) * (1 - part) for n in names))

    def _matmuls(self, moe: bool) -> list[tuple[float, float, float, int]]:
        """Matrix products of a forward: rows, columns, inner size, count."""
        shape, t, tokens = self.shape, self.layout.tensor_parallel, self.tokens
        gate = 2 if shape.gated_mlp else 1
        products = [
            (tokens, (shape.query_width + 2 * shape.kv_width) / t, shape.hidden, 1),
            (tokens, shape.hidden, shape.query_width / t, 1),
        ]
        if not moe:
            products += [
                (tokens, gate * shape.ffn_width / t, shape.hidden, 1),
                (tokens, shape.hidden, shape.ffn_width / t, 1),
            ]
            return products
        e = self.layout.expert_parallel
        local = max(1, shape.experts // e)
        each = tokens * shape.experts_per_token / local  # balanced routing
        width = shape.expert_width / t
        products += [(each, gate * width, shape.hidden, local), (each, shape.hidden, width, local)]
        if shape.shared_experts:
            wide = shape.shared_experts * width
            products += [(tokens, gate * wide, shape.hidden, 1), (tokens, shape.hidden, wide, 1)]
        return products

    def _attention(self) -> tuple[float, float]:
        """Forward and backward of the attention core."""
        shape, layout = self.shape, self.layout
        t, c = layout.tensor_parallel, layout.context_parallel
        fused = layout.fuses_attention(shape)
        work = attention_flops(shape, shape.causal and fused) * self.tokens / t
        if fused:
            forward = self.kernels.attention(work, layout.native_attention)
            return forward, 2.5 * forward  # the backward makes the scores anew
        heads, s = shape.heads / t * layout.micro_batch_size, shape.seq_len
        product = self.kernels.matmul(heads * s / c, s, shape.head_width, batched=True)
        product += self.kernels.matmul(heads * s / c, shape.head_width, s, batched=True)
        scores = heads * s / c * s
        # Scores are written, scaled and masked, normalised, dropped out, and read by the second product.
        moved = self.kernels.moving(scores * (10 + 3 * shape.has_dropout), 3)
        return product + moved, 2 * product + moved

    def _one(self, moe: bool) -> PartTime:
        layout, kernels = self.layout, self.kernels
        products = self._matmuls(moe)
        forward = sum(kernels.matmul(m, n, k, count) for m, n, k, count in products)
        inputs = sum(kernels.matmul(m, k, n, count) for m, n, k, count in products)
        weight = sum(kernels.matmul(k, n, m, count) for m, n, k, count in products)
        core, core_backward = self._attention()
        moved = self._moved(moe)
        forward += core + moved
        backward = inputs + weight + core_backward + 1.5 * moved
        tp = self._collectives(moe)
        value = layout.activation_checkpointing
        again = 1.0 if value == "full" else 1.0 / value if isinstance(value, int) else 0.0
        backward += again * forward
        if value == "selective" and not layout.fuses_attention(self.shape):
            backward += core
        elif value == "operators":
            backward += (forward - core - moved) / 2 + moved
        return PartTime(forward, backward, weight, tp, tp * (1 + again))

    def _moved(self, moe: bool) -> float:
        """Norms, dropout, residuals, activation functions of a forward."""
        shape = self.shape
        element = self.kernels.bits / 8
        outside = (8 + 2 * shape.has_dropout) * self.tokens * shape.hidden * element / self._outside
        width, passed = shape.ffn_width, 1
        if moe:
            width, passed = shape.expert_width, shape.experts_per_token + shape.shared_experts
            outside += 4 * passed * self.tokens * shape.hidden * element / self._outside  # to the experts and back
        inside = (3 if shape.gated_mlp else 2) * self.tokens * width * passed * element / self.layout.tensor_parallel
        if self.kernels.fp8:
            # Inputs of the products are cast, and their transposes kept for the backward.
            inside += 3 * self.tokens * (2 * shape.hidden + width * passed / self.layout.tensor_parallel)
        known = self.kernels.constants
        traffic = known.elementwise if self.layout.fuses_elementwise else known.elementwise_eager
        return self.kernels.moving((outside + inside) * traffic, 8)

    def _collectives(self, moe: bool) -> float:
        """Collectives that a layer's forward waits for; its backward has as many."""
        shape, layout, links = self.shape, self.layout, self.links
        tp = Group(layout.tensor_parallel)
        activation = self.tokens * shape.hidden * self.kernels.bits / 8
        time = 2 * links.all_reduce(activation, tp)
        if layout.overlap_tensor_parallel:
            time *= links.constants.overlap_cost
        if layout.context_parallel > 1:
            cp = Group(layout.context_parallel, layout.tensor_parallel)
            keys = 2 * self.tokens * shape.kv_width / layout.tensor_parallel * self.kernels.bits / 8
            ring = links.gather(keys * layout.context_parallel, cp)
            core = self._attention()[0]
            time += max(ring - core, 0.0) + links.constants.overlap_cost * min(ring, core)
        if moe and layout.expert_parallel > 1:
            ep = Group(layout.expert_parallel, layout.tensor_parallel * layout.context_parallel)
            routed = activation / self._outside * shape.experts_per_token
            time += 2 * links.all_to_all(routed, ep)
        return time

    def head(self) -> PartTime:
        """The last norm, the head and the loss."""
        shape, t = self.shape, self.layout.tensor_parallel
        product = self.kernels.matmul(self.tokens, shape.vocab / t, shape.hidden)
        weight = self.kernels.matmul(shape.hidden, shape.vocab / t, self.tokens)
        inputs = self.kernels.matmul(self.tokens, shape.hidden, shape.vocab / t)
        logits = self.kernels.moving(self.tokens * shape.vocab / t * (8 if self.layout.fused_loss else 16), 4)
        tp = self.links.all_reduce(self.tokens * shape.hidden * self.kernels.bits / 8, Group(t))
        return PartTime(product + logits, inputs + weight + logits, weight, 0.0, tp)

    def embedding(self) -> PartTime:
        """The look-up of the embedding."""
        shape = self.shape
        moved = self.kernels.moving(self.tokens * shape.hidden * self.kernels.bits / 8 * 4, 3)
        tp = self.links.all_reduce(
            self.tokens * shape.hidden * self.kernels.bits / 8, Group(self.layout.tensor_parallel)
        )
        return PartTime(moved, 2 * moved, 0.0, tp, 0.0)
