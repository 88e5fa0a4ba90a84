"""Tensor parallelism: layers cut over the ranks of an axis, with the numbers of the whole ones."""

from lightning_3d.tensor_parallel.applying import AppliedPlan, Check, apply
from lightning_3d.tensor_parallel.attention import ParallelMultiheadAttention
from lightning_3d.tensor_parallel.check import BlockCheck, Verdict, check_block
from lightning_3d.tensor_parallel.embedding import VocabParallelEmbedding
from lightning_3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from lightning_3d.tensor_parallel.layout import LayerPlan
from lightning_3d.tensor_parallel.loose import LooseParameters, mixing_refused
from lightning_3d.tensor_parallel.loss import ShardedLogits, vocab_parallel_cross_entropy
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.planning import Plan, plan

__all__ = [
    "AppliedPlan",
    "BlockCheck",
    "Check",
    "ColumnParallelLinear",
    "LayerPlan",
    "LooseParameters",
    "ParallelMultiheadAttention",
    "ParameterCut",
    "Plan",
    "RowParallelLinear",
    "ShardedLogits",
    "Verdict",
    "VocabParallelEmbedding",
    "apply",
    "check_block",
    "mixing_refused",
    "plan",
    "vocab_parallel_cross_entropy",
]
