"""``nn.MultiheadAttention`` with its heads cut over the tensor-parallel axis."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.tensor_parallel.collectives import gather_from_tp, reduce_from_tp
from lightning_3d.tensor_parallel.linear import column_linear, is_fusible, row_linear
from lightning_3d.tensor_parallel.parameters import local_view
from lightning_3d.tensor_parallel.region import Regions


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """How a parallel attention meets its surroundings."""

    regions: Regions
    scatter_dim: int | None = None
    """Sequence dim of query and output when they are pieces of the sequence."""


class ParallelMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` that computes ``num_heads / tp`` heads.

    Inputs and outputs have the shapes of ``nn.MultiheadAttention``. With sequence parallelism the query and the output
    are pieces of the sequence; so are key and value if they are the query itself.
    """

    _attention: AttentionSettings

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``; see ``nn.MultiheadAttention`` for shapes."""
        settings = self._attention
        regions = settings.regions
        batched = query.dim() == 3
        cut = "copy" if settings.scatter_dim is None else "gather"
        entered = regions.enter(query, cut, settings.scatter_dim)  # type: ignore[arg-type]
        context = "copy" if key is not query else cut
        entered_key = entered if key is query else regions.enter(key, context)  # type: ignore[arg-type]
        entered_value = entered_key if value is key else regions.enter(value, context)  # type: ignore[arg-type]
        q, k, v = (self._heads(part) for part in self._project(entered, entered_key, entered_value))
        if self.training and self.dropout > 0.0:
            regions.open_stream()
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True is a hint about attn_mask; pass the mask with it.")
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
            attn_mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
            if attn_mask is not None:
                scores = scores + attn_mask
            weights = F.dropout(scores.softmax(-1), dropout) if dropout else scores.softmax(-1)
            attended = torch.matmul(weights, v)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal)
        attended = attended.transpose(1, 2).flatten(2)
        regions.leave()
        attended = attended if self.batch_first and batched else attended.transpose(0, 1)
        attended = attended if batched else attended.squeeze(1)
        out = row_linear(attended, self.out_proj.weight, regions.axis, settings.scatter_dim)
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to(out.dtype)
        return out, None if weights is None else self._report(weights, average_attn_weights, batched)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        packed = query is key and key is value and self._qkv_same_embed_dim
        if packed and is_fusible(query, self.in_proj_weight, self.in_proj_bias):
            piece = self._attention.regions.piece_of(query)
            axis = None if piece is None else self._attention.regions.axis
            return column_linear(query, self.in_proj_weight, self.in_proj_bias, axis, piece).chunk(3, -1)  # type: ignore[arg-type]
        bias = local_view(self.in_proj_bias)
        if self._qkv_same_embed_dim:
            weight = local_view(self.in_proj_weight)
            if packed:
                return F.linear(query, weight, bias).chunk(3, -1)
            weights = weight.chunk(3)
        else:
            weights = tuple(local_view(w) for w in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight))
        biases = (None, None, None) if bias is None else bias.chunk(3)
        inputs = (query, key, value)
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _heads(self, x: Tensor) -> Tensor:
        """Any layout of ``[batch, sequence, features]`` to ``[batch, local heads, sequence, head_dim]``."""
        if x.dim() == 2:
            x = x.unsqueeze(0)
        elif not self.batch_first:
            x = x.transpose(0, 1)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
        """Both masks as one that is added to the scores of the local heads ``[batch, heads, target, source]``."""
        batch, heads = query.shape[:2]
        mask = None if attn_mask is None else _additive(attn_mask, query.dtype)
        if mask is not None and mask.dim() == 3:
            rank = self._attention.regions.axis.rank
            mask = mask.view(batch, self.num_heads, *mask.shape[1:]).narrow(1, rank * heads, heads)
        if key_padding_mask is not None:
            padding = _additive(key_padding_mask, query.dtype).view(batch, 1, 1, -1)
            mask = padding if mask is None else mask + padding
        return mask

    def _report(self, weights: Tensor, average: bool, batched: bool) -> Tensor:
        axis = self._attention.regions.axis
        if average:
            weights = reduce_from_tp(weights.sum(1), axis) / self.num_heads
        else:
            weights = gather_from_tp(weights, axis, 1)
        return weights if batched else weights.squeeze(0)


def is_parallelizable(module: nn.MultiheadAttention) -> bool:
    """Whether the heads of ``module`` can be cut: no extra keys (``add_bias_kv``, ``add_zero_attn``)."""
    plain = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
    return plain and module.bias_k is None and not module.add_zero_attn


def to_parallel_attention(module: nn.Module, settings: AttentionSettings) -> None:
    """Make ``module`` compute its share of the heads; its parameters are cut elsewhere."""
    module._attention = settings  # type: ignore[assignment]
    cls: Any = type(module)
    module.__class__ = _converted(cls)


@functools.cache
def _converted(cls: Any) -> type[nn.Module]:
    if cls is nn.MultiheadAttention:
        return ParallelMultiheadAttention
    bases = (ParallelMultiheadAttention, cls)
    return type(f"Parallel{cls.__name__}", bases, {"__module__": cls.__module__})


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)
