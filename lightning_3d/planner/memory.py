"""Memory of a rank by kind: model states, activations, logits, buffers (docs/planner.md has the formulas)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_3d.planner.activations import DROPOUT, NORMS, eager_activations, layer_activations, residual
from lightning_3d.planner.layout import Layout
from lightning_3d.planner.pipeline import chunk_ranks, in_flight_chunks
from lightning_3d.planner.shape import ModelShape

GB = 1e9
_RESERVED, _CONTEXT = 1.06, 4.5e9
"""What the allocator holds beyond the tensors, and bytes of CUDA's context, libraries and NCCL's channels."""

_BUCKET = 25 * 2**20
"""Bytes that are gathered or reduced at once at least."""


def on_device(num_bytes: float) -> float:
    """Bytes that ``nvidia-smi`` would show for so many of tensors: with the allocator's fragments, CUDA and NCCL."""
    return num_bytes * _RESERVED + _CONTEXT


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of a rank of one pipeline stage at its peak, in bytes."""

    parameters: float
    """Weights as they are kept and as they are gathered for computing."""
    gradients: float
    """Gradients between micro-batches and while they are reduced."""
    optimizer: float
    """States of Adam, and the float32 weights if the parameters are kept in 16 bits."""
    activations: float
    """What the forward keeps for the backward, over all micro-batches in flight."""
    logits: float
    """Output of the head and what the loss keeps; last stage only."""
    buffers: float
    """Gathered layers, communication buckets, and what a layer needs while it runs."""

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def on_device(self) -> float:
        """Bytes that ``nvidia-smi`` would show; see :func:`on_device`."""
        return on_device(self.total)

    def in_gb(self) -> dict[str, float]:
        """By kind, in 1e9 bytes."""
        return {field.name: getattr(self, field.name) / GB for field in fields(self)}


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of the model states: whole on every replica, and shared out over them."""

    parameters: float
    parameters_shared: float
    gradients: float
    gradients_shared: float
    optimizer: float
    optimizer_shared: float

    def total(self, replicas: int) -> float:
        """Bytes per parameter with ``replicas``."""
        whole = self.parameters + self.gradients + self.optimizer
        return whole + (self.parameters_shared + self.gradients_shared + self.optimizer_shared) / replicas


def state_bytes(precision: str, zero_stage: int, reduce_bytes: int) -> StateBytes:
    """Model states of Adam under a ZeRO stage (Rajbhandari et al. 2020): ``2 + 2 + 12`` bytes in mixed precision.

    Gradients have ``reduce_bytes``: float32 ones make it 18 (Megatron, and ours), and ``6 + 12/d`` with a sharded
    optimizer. A true precision keeps weights and both moments in its own type.
    """
    true = {"32-true": 4, "64-true": 8, "bf16-true": 2, "16-true": 2}.get(precision)
    weights, gradients, states = (2, reduce_bytes, 12) if true is None else (true, reduce_bytes, 2 * true)
    return StateBytes(
        parameters=0 if zero_stage == 3 else weights,
        # The float32 shard of the optimizer is all that FSDP keeps; with 16-bit gradients (DeepSpeed) there is a
        # 16-bit shard beside it. In a true precision the shard is what the optimizer steps on, beside the whole copy
        # that ZeRO-1 and ZeRO-2 compute with.
        parameters_shared=weights if (true and zero_stage) or (zero_stage == 3 and reduce_bytes == 2) else 0,
        gradients=0 if zero_stage >= 2 else gradients,
        gradients_shared=gradients if zero_stage >= 2 else 0,
        optimizer=0 if zero_stage else states,
        optimizer_shared=states if zero_stage else 0,
    )


def expert_parameters(shape: ModelShape, layers: int, layout: Layout) -> float:
    """Parameters of experts among those of a chunk that one tensor-parallel rank holds."""
    if not shape.experts:
        return 0.0
    moe = layers * shape.moe_layers / shape.layers
    whole = shape.experts * shape.mlp_parameters(shape.expert_width)
    return moe * whole / (layout.tensor_parallel * layout.expert_parallel)


def chunk_parameters(shape: ModelShape, layers: int, is_first: bool, is_last: bool, layout: Layout) -> float:
    """Parameters of a chunk that one tensor-parallel rank holds."""
    t = layout.tensor_parallel
    moe = layers * shape.moe_layers / shape.layers
    total = (layers - moe) * shape.layer_parameters / t + moe * shape.moe_layer_parameters / t
    experts = expert_parameters(shape, layers, layout)
    total -= experts * (layout.expert_parallel - 1)
    if is_first:
        total += shape.vocab * shape.hidden / t + shape.position_parameters + shape.embedding_norm * shape.norm_size
    if is_last:
        total += shape.norm_size
        if not shape.tied_embeddings:
            total += shape.head_parameters / t
        elif not is_first:
            total += shape.vocab * shape.hidden / t  # a copy of the embedding
    return total


@dataclass(frozen=True)
class _Stage:
    """A rank of one pipeline stage."""

    shape: ModelShape
    layout: Layout
    rank: int
    chunks: tuple[int, ...]
    layers: int
    parameters: float
    """That it computes with: its tensor-parallel part."""

    @property
    def is_first(self) -> bool:
        return 0 in self.chunks

    @property
    def is_last(self) -> bool:
        return self.layout.num_chunks - 1 in self.chunks

    @property
    def replicas(self) -> int:
        return self.layout.data_parallel * self.layout.context_parallel

    @property
    def tokens(self) -> float:
        """Of a micro-batch."""
        return self.shape.seq_len / self.layout.context_parallel * self.layout.micro_batch_size

    @property
    def hidden_states(self) -> float:
        """Elements of those of a micro-batch, between tensor-parallel regions."""
        layout = self.layout
        return self.tokens * self.shape.hidden / (layout.tensor_parallel if layout.sequence_parallel else 1)

    @property
    def layer(self) -> float:
        """Parameters of a layer."""
        if self.shape.experts:
            return chunk_parameters(self.shape, 1, False, False, self.layout)
        return self.shape.layer_parameters / self.layout.tensor_parallel

    def memory(self, states: StateBytes, kept: float, whole: float) -> StageMemory:
        """All of it.

        Args:
            states: Bytes per parameter.
            kept: Bytes that a layer keeps of a micro-batch.
            whole: The same if nothing is recomputed.
        """
        layout, d = self.layout, self.replicas
        held = self.parameters
        # Experts that are shared out have fewer replicas to share their states with.
        more = expert_parameters(self.shape, self.layers, layout) * (layout.expert_parallel - 1)
        shared = (held + more) / d
        logits = self._logits()
        parameters = held * states.parameters + shared * states.parameters_shared
        gradients = held * (states.gradients + 2 * layout.keeps_16bit_gradients) + shared * states.gradients_shared
        optimizer = held * states.optimizer + shared * states.optimizer_shared
        buffers = self._buffers(states)
        if not layout.fused_loss:
            buffers += 2 * logits  # copies that a plain cross entropy keeps
        if layout.activation_checkpointing not in (None, "selective", "operators"):
            buffers += whole
        return StageMemory(
            parameters=0.0 if layout.offload == "parameters" else parameters,
            gradients=gradients,
            optimizer=0.0 if layout.offload is not None else optimizer,
            activations=self._activations(kept),
            logits=logits,
            buffers=buffers,
        )

    def _activations(self, kept: float) -> float:
        layout, p, v = self.layout, self.layout.pipeline_parallel, self.layout.virtual_stages
        live = 1.0
        if p > 1:
            live = in_flight_chunks(layout.schedule_name, self.rank, p, v, layout.micro_batches) / v
        return live * self.layers * kept + self._activations_at_the_ends(live)

    def _activations_at_the_ends(self, live: float) -> float:
        """Of what stands before the first layer, of ``live`` micro-batches, and behind the last."""
        layout, shape, ends = self.layout, self.shape, 0.0
        if layout.fuses_elementwise:
            if self.is_first:
                ends += live * 2 * self.hidden_states * shape.has_dropout
            if self.is_last:
                ends += 2 * layout.element_bytes * self.hidden_states  # of the last norm and the head
            return ends
        if self.is_first:
            input_of_norm = residual(shape).num_bytes(layout) if shape.embedding_norm else 0
            mask = DROPOUT.num_bytes(layout) if shape.has_dropout else 0
            ends += live * (input_of_norm + mask) * self.tokens * shape.hidden
        if self.is_last:  # the sequence is whole again
            ends += sum(kept.num_bytes(layout) for kept in NORMS[shape.norm_kind]) * self.tokens * shape.hidden
        return ends

    def _logits(self) -> float:
        cut = self.layout.tensor_parallel if self.layout.loss_parallel else 1
        return 4 * self.tokens * self.shape.vocab / cut if self.is_last else 0.0

    def _buffers(self, states: StateBytes) -> float:
        """Gathered parameters, buckets, and messages."""
        layout, d, layer = self.layout, self.replicas, self.layer
        buffers = 0.0
        if layout.pipeline_parallel > 1:
            # Activations and gradients that arrive ahead of their use, and gradients on their way out.
            several = layout.virtual_stages > 1
            messages = 2 * (self.rank > 0 or several) + (self.rank < layout.pipeline_parallel - 1 or several)
            buffers += messages * layout.element_bytes * self.tokens * self.shape.hidden / layout.message_cut
        if layout.zero_stage == 3 and d > 1:
            # Two layers are gathered, one's gradients are whole; and so is the root: the embedding and the head.
            root = self.shape.embedding_parameters * self.is_first + self.shape.head_parameters * self.is_last
            buffers += 2 * layer * layout.element_bytes + layer * layout.reduce_bytes
            buffers += root / layout.tensor_parallel * (layout.element_bytes + layout.reduce_bytes)
        elif d > 1:
            buffers += min(self.parameters * layout.reduce_bytes, max(_BUCKET, layer * layout.reduce_bytes))
        if layout.reduce_bytes == 2 and states.optimizer + states.optimizer_shared > 8:
            # Adam reads gradients in float32: a copy of the shard's.
            buffers += self.parameters * 4 / (d if layout.zero_stage else 1)
        return buffers


def stage_memory(shape: ModelShape, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory of a rank of every stage at its peak."""
    chunk_layers, last = layout.chunk_layers(shape), layout.num_chunks - 1
    owners = chunk_ranks(layout.schedule_name, layout.pipeline_parallel, layout.virtual_stages)
    replicas = layout.data_parallel * layout.context_parallel
    # A pipeline that reduces once a step keeps whole gradients and parameters meanwhile.
    zero_stage = layout.zero_stage if layout.communicates_each_micro_batch else min(layout.zero_stage, 1)
    states = state_bytes(layout.precision, zero_stage if replicas > 1 else 0, layout.reduce_bytes)
    kept, whole = _kept_per_layer(shape, layout), _of_layer(shape, layout, None)
    result = []
    for rank in range(layout.pipeline_parallel):
        chunks = tuple(chunk for chunk, owner in enumerate(owners) if owner == rank)
        parameters = sum(chunk_parameters(shape, chunk_layers[c], c == 0, c == last, layout) for c in chunks)
        stage = _Stage(shape, layout, rank, chunks, sum(chunk_layers[c] for c in chunks), parameters)
        result.append(stage.memory(states, kept, whole))
    return tuple(result)


def _of_layer(shape: ModelShape, layout: Layout, checkpointing: str | None) -> float:
    if not layout.fuses_elementwise and checkpointing in (None, "full"):
        return eager_activations(shape, layout, recomputed=checkpointing == "full")
    in_16_bits = layer_activations(
        shape, layout.micro_batch_size, layout.tensor_parallel, layout.sequence_parallel, checkpointing,
        layout.flash_attention, layout.context_parallel,
    )  # fmt: skip
    return layout.element_bytes / 2 * in_16_bits


def _kept_per_layer(shape: ModelShape, layout: Layout) -> float:
    value = layout.activation_checkpointing
    if isinstance(value, int):
        return _of_layer(shape, layout, "full") / value + _of_layer(shape, layout, None) * (1 - 1 / value)
    return _of_layer(shape, layout, value)
