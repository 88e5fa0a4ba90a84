"""Embedding whose vocabulary is cut over the tensor-parallel axis."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.tensor_parallel.collectives import reduce_from_tp
from lightning_3d.tensor_parallel.parameters import local_view
from lightning_3d.tensor_parallel.region import Regions
from lightning_3d.tensor_parallel.vocabulary import is_own


@dataclass(frozen=True, kw_only=True)
class VocabSettings:
    """Which rows of the table this rank holds."""

    regions: Regions
    start: int
    length: int


class VocabParallelEmbedding(nn.Embedding):
    """``nn.Embedding`` of which each rank holds some rows; the parts are summed.

    Input: indices ``[...]``, the same on every rank; output ``[..., embedding_dim]``.
    """

    _vocab: VocabSettings

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``; rows of other ranks come through the sum.

        Raises:
            IndexError: on CPU, for an index outside the table; on a GPU the kernel of the look-up asserts.
        """
        settings = self._vocab
        if input.device.type == "cpu" and bool(((input < 0) | (input >= self.num_embeddings)).any()):
            raise IndexError(f"An index is out of range: the embedding has {self.num_embeddings} rows.")
        weight: Tensor = local_view(self.weight)
        index = input - settings.start
        outside = ~is_own(input, settings.start, settings.length, self.num_embeddings)
        if settings.length:
            padding = None if self.padding_idx is None else self.padding_idx - settings.start
            if padding is not None and not 0 <= padding < settings.length:
                padding = None
            found = F.embedding(index.masked_fill(outside, 0), weight, padding)
            found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        else:
            found = weight.new_zeros(*input.shape, weight.shape[1])
        return reduce_from_tp(found, settings.regions.axis)


def is_embedding(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding that can be converted: one whose look-up is that of ``nn.Embedding``."""
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or hasattr(module, "parametrizations"):
        return False
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return False
    forward = type(module).forward
    # An override that calls super() goes on from the look-up, which is exact; one that does not reads the weight.
    return forward is nn.Embedding.forward or "super" in forward.__code__.co_names


def to_vocab_parallel(module: nn.Module, settings: VocabSettings) -> None:
    """Make ``module`` a vocab-parallel embedding; its weight is cut elsewhere."""
    module._vocab = settings  # type: ignore[assignment]
    cls: Any = type(module)
    module.__class__ = _converted(cls)


@functools.cache
def _converted(cls: Any) -> type[nn.Module]:
    if cls is nn.Embedding:
        return VocabParallelEmbedding
    # Behind cls, so that what its own forward adds around super().forward() stays.
    return type(f"VocabParallel{cls.__name__}", (cls, VocabParallelEmbedding), {"__module__": cls.__module__})
