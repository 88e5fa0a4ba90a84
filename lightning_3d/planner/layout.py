"""How a model is laid out over a cluster, and how a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError
from lightning_3d.partition import explicit, uniform
from lightning_3d.planner import checks, systems
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.pipeline import SCHEDULE_NAMES
from lightning_3d.planner.shape import ModelShape
from lightning_3d.planner.split import balanced_split
from lightning_3d.schedules import SCHEDULES

PRECISIONS = ("bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true", "fp8")
CHECKPOINTINGS = ("full", "selective", "operators")
SPLITS = ("flops", "uniform")
OFFLOADS = (None, "optimizer", "parameters")
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def _precision(text: str) -> str:
    """One of `PRECISIONS` for it, or for what people call it: ``"fp16"``, ``"bf16"``, ``"float8"``, ``"32"``."""
    if text in PRECISIONS or not isinstance(text, str):
        checks.one_of("precision", text, PRECISIONS)
        return text
    lower, true = text.lower(), "true" in text.lower()
    if "fp8" in lower or "float8" in lower or "transformer-engine" in lower:
        return "fp8"
    for bits, kinds in (("bf16", ("bf16", "bfloat16")), ("16", ("16",)), ("32", ("32",)), ("64", ("64",))):
        if any(kind in lower for kind in kinds):
            return f"{bits}-{'mixed' if '16' in bits and not true else 'true'}"
    checks.one_of("precision", text, PRECISIONS)
    return text


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes, the schedule, and the physical settings of a run; the defaults are those of the strategy."""

    tensor_parallel: int = 1
    """Ranks that share one layer."""
    pipeline_parallel: int = 1
    """Pipeline stages."""
    data_parallel: int = 1
    """Replicas, which also share the optimizer's states from ``zero_stage`` 1 on."""
    context_parallel: int = 1
    """Ranks that share the sequence of one sample."""
    expert_parallel: int = 1
    """Ranks, among those of ``data_parallel``, that share the experts."""
    zero_stage: int = 1
    """What the replicas share out: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters."""
    schedule: str | None = None
    """Name of the pipeline schedule; ``None``: ``"1f1b"``, with several chunks per rank ``"interleaved_1f1b"``."""
    virtual_stages: int = 1
    """Chunks of the model per pipeline rank."""
    micro_batch_size: int = 1
    """Samples of a micro-batch."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; ``None``: four micro-batches per stage and replica, one without a pipeline."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel regions are cut along the sequence."""
    activation_checkpointing: str | int | None = None
    """``None``, ``"full"`` (recompute every layer), k (every k-th), ``"selective"`` (the attention core only; nothing
    under a fused kernel), or ``"operators"`` (every second matrix product and all elementwise work, as torchtitan)."""
    offload: str | None = None
    """What lies in host memory: ``None``, ``"optimizer"`` states, or ``"parameters"`` too."""
    precision: str = "bf16-mixed"
    """A precision of Lightning, or ``"fp8"`` for matrix products in 8 bits."""
    pipeline_split: tuple[int, ...] | str | None = None
    """Layers of every chunk; ``None`` or ``"flops"``: as the strategy's default balances them, the head being work too;
    ``"uniform"``: the same number in each, as Megatron has it."""
    reduce_dtype: str = "float32"
    """Type in which gradients are kept and summed."""
    keeps_16bit_gradients: bool = False
    """Whether 16-bit gradients stay beside the float32 ones (DeepSpeed's BF16Optimizer)."""
    flash_attention: bool = True
    """Whether attention is one fused kernel, which keeps no scores."""
    native_attention: bool = False
    """Whether that kernel is written for the GPU's generation (cuDNN, FlashAttention-3), not FlashAttention-2."""
    fused_elementwise: bool | None = None
    """Whether norms, activations and residuals are fused (``torch.compile``, Megatron), not a kernel each; ``None``:
    under fp8 only, whose libraries bring such kernels."""
    fused_loss: bool = False
    """Whether the loss works in place on its logits, instead of keeping float32 copies of them."""
    overlap_grad_reduce: bool = True
    """Whether gradients are reduced while the last micro-batch's backward runs."""
    overlap_tensor_parallel: bool = False
    """Whether tensor-parallel collectives run beside the matrix products (async TP, user buffers)."""
    overlap_pipeline: bool = True
    """Whether messages between stages travel while the stages compute."""
    scatter_gather: bool = False
    """Whether a message between stages is cut over the tensor-parallel ranks, each sending a part (Megatron)."""
    reduce_each_micro_batch: bool | None = None
    """Whether ZeRO-2 and 3 gather and reduce in every micro-batch; ``None``: yes, as the strategy does. Megatron and
    torchtitan do it once a step in a pipeline, and keep whole gradients meanwhile."""
    loss_parallel: bool = True
    """Whether logits stay cut over the vocabulary under tensor parallelism."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel",
            "virtual_stages", "micro_batch_size",
        ):  # fmt: skip
            checks.positive(name, getattr(self, name))
        checks.one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        object.__setattr__(self, "precision", _precision(self.precision))
        checks.one_of("offload", self.offload, OFFLOADS)
        checks.one_of("reduce_dtype", self.reduce_dtype, tuple(_DTYPE_BYTES))
        if self.schedule is None:
            object.__setattr__(self, "schedule", "1f1b" if self.virtual_stages == 1 else "interleaved_1f1b")
        checks.one_of("schedule", self.schedule, SCHEDULE_NAMES)
        chunks = SCHEDULES[self.schedule_name].virtual_stages if self.schedule_name in SCHEDULES else 1
        if chunks not in (None, self.virtual_stages):
            raise ConfigError(
                f"schedule={self.schedule!r} runs {chunks} chunk(s) per pipeline rank, but virtual_stages="
                f"{self.virtual_stages}. Use virtual_stages={chunks} or schedule='interleaved_1f1b'."
            )
        if chunks is None and self.virtual_stages == 1:
            raise ConfigError(
                f"schedule={self.schedule!r} gives every pipeline rank several chunks, but virtual_stages=1. Use"
                " virtual_stages=2 or more, or schedule='1f1b'."
            )
        value = self.activation_checkpointing
        if isinstance(value, str):
            checks.one_of("activation_checkpointing", value, (None, *CHECKPOINTINGS))
        elif value is not None:
            checks.positive(
                "activation_checkpointing", value, also=", one of 'full', 'selective', 'operators', or None"
            )
        if isinstance(self.pipeline_split, str):
            checks.one_of("pipeline_split", self.pipeline_split, SPLITS)
        if self.pipeline_split is not None and self.pipeline_split != "uniform":
            split = None if self.pipeline_split == "flops" else tuple(self.pipeline_split)
            object.__setattr__(self, "pipeline_split", split)
        if self.data_parallel % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel={self.expert_parallel} must divide data_parallel={self.data_parallel}: experts are"
                " shared out among the replicas."
            )
        if self.global_batch_size is not None:
            checks.positive("global_batch_size", self.global_batch_size)
            unit = self.data_parallel * self.micro_batch_size
            if self.global_batch_size % unit:
                lower = self.global_batch_size // unit * unit
                raise ConfigError(
                    f"global_batch_size={self.global_batch_size} is not a multiple of data_parallel x"
                    f" micro_batch_size = {self.data_parallel} x {self.micro_batch_size} = {unit}. Use"
                    f" {lower or unit} or {lower + unit}, or another micro_batch_size."
                )

    @classmethod
    def megatron(cls, shape: ModelShape, cluster: Cluster, **given: Any) -> Layout:
        """A run of Megatron-LM, Megatron-DeepSpeed, NeMo or another of their kin, for comparing with published figures.

        What is not given is as these have it: equal stages, fused kernels and loss, messages cut over tensor-parallel
        ranks, reduction once a step; from Hopper on fused attention and overlapped collectives. Before it nothing
        overlaps, and where ``activation_checkpointing`` is given (``None`` included) sequences of up to 2,048 have no
        fused attention, and are cut only under ``"selective"``. One chunk per stage unless said.

        Args:
            shape: The model.
            cluster: The GPUs, whose generation decides what overlapped.
            **given: Fields of this class that are known.
        """
        return cls(**{**systems.megatron(shape, cluster, given), **given})

    @classmethod
    def fsdp(cls, shape: ModelShape, cluster: Cluster, **given: Any) -> Layout:
        """A run of PyTorch's FSDP (torchtitan, LLM-Foundry), for comparing with published figures.

        What is not given is as these have it: ZeRO-3, modules and loss of plain PyTorch, FlashAttention-2, equal
        stages; gathers in every micro-batch without a pipeline, once a step with one. Their ``"selective"``
        recomputation saves every second matrix product, so it is read as ``"operators"``.

        Args:
            shape: The model.
            cluster: The GPUs, whose generation decides what overlapped.
            **given: Fields of this class that are known.
        """
        if given.get("activation_checkpointing") == "selective":
            given["activation_checkpointing"] = "operators"
        return cls(**{**systems.fsdp(shape, cluster, given), **given})

    @property
    def schedule_name(self) -> str:
        """The schedule, never ``None``."""
        return self.schedule or "1f1b"

    @property
    def fuses_elementwise(self) -> bool:
        """Whether elementwise work is fused."""
        return self.precision == "fp8" if self.fused_elementwise is None else self.fused_elementwise

    def fuses_attention(self, shape: ModelShape) -> bool:
        """Whether attention is one kernel; where nothing is fused, modules may compute its scores themselves."""
        return self.flash_attention and (self.fuses_elementwise or not shape.scores)

    @property
    def communicates_each_micro_batch(self) -> bool:
        """Whether the replicas gather parameters or reduce gradients in every micro-batch."""
        return self.zero_stage >= 2 and self.reduce_each_micro_batch is not False

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.context_parallel

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a replica in a step."""
        if self.global_batch_size is None:
            return 4 * self.pipeline_parallel if self.pipeline_parallel > 1 else 1
        return self.global_batch_size // (self.data_parallel * self.micro_batch_size)

    @property
    def samples(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batches * self.micro_batch_size * self.data_parallel

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole pipeline."""
        return self.pipeline_parallel * self.virtual_stages

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient element as it is kept and summed."""
        return _DTYPE_BYTES[self.reduce_dtype]

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter that is computed with, and of an element of the hidden states."""
        return {"32-true": 4, "64-true": 8}.get(self.precision, 2)

    @property
    def message_cut(self) -> int:
        """Ranks that share a message between two stages."""
        return self.tensor_parallel if self.sequence_parallel or self.scatter_gather else 1

    def chunk_layers(self, shape: ModelShape) -> Sequence[int]:
        """Layers of every chunk of a model.

        Raises:
            ConfigError: If there are more chunks than layers, or ``pipeline_split`` does not fit.
        """
        layers = shape.layers
        if isinstance(self.pipeline_split, tuple):
            if min(self.pipeline_split[0], self.pipeline_split[-1]) == 0:
                self._check_empty_ends(layers)
                return self.pipeline_split
            return explicit(self.pipeline_split, layers, self.num_chunks)
        even = uniform(layers, self.num_chunks)  # refuses more chunks than layers
        if self.pipeline_split == "uniform" or self.pipeline_parallel == 1:
            return even
        return balanced_split(shape, self.pipeline_parallel, self.virtual_stages) or even

    def _check_empty_ends(self, layers: int) -> None:
        """Published runs gave the embedding or the head a chunk of its own; the strategy cannot."""
        split = tuple(size for size in self.pipeline_split or () if isinstance(size, int))
        if len(split) != self.num_chunks or sum(split) != layers or min(split[1:-1], default=1) < 1:
            raise ConfigError(
                f"pipeline_split={list(split)} must have {self.num_chunks} sizes that add up to {layers} layers; only"
                " the first and the last may be 0, for a chunk of the embedding or the head alone."
            )

    def __str__(self) -> str:
        sizes = f"tp{self.tensor_parallel} pp{self.pipeline_parallel} dp{self.data_parallel}"
        if self.context_parallel > 1:
            sizes += f" cp{self.context_parallel}"
        if self.expert_parallel > 1:
            sizes += f" ep{self.expert_parallel}"
        chunks = f" v{self.virtual_stages}" if self.virtual_stages > 1 else ""
        return (
            f"{sizes} zero{self.zero_stage} {self.schedule_name}{chunks}"
            f" {self.micro_batches}x{self.micro_batch_size} samples"
        )
