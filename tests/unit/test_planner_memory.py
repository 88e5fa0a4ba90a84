"""Memory against the printed numbers of the literature, and against what runs have measured."""

from __future__ import annotations

import pytest

from lightning_3d.planner import Layout, ModelShape, preset
from lightning_3d.planner.activations import layer_activations
from lightning_3d.planner.memory import stage_memory, state_bytes
from lightning_3d.planner.pipeline import in_flight_chunks

GIB = 2**30


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(layers=layers, hidden=hidden, heads=heads)


@pytest.mark.parametrize("replicas", [64])
def test_zero_paper_figure_1(replicas: int) -> None:
    found = [7.5 * state_bytes("16-mixed", stage, 2).total(replicas) for stage in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
    assert [16 / state_bytes("16-mixed", stage, 2).total(10**9) for stage in (1, 2)] == pytest.approx([4, 8])


def test_states_with_float32_gradients() -> None:
    assert state_bytes("bf16-mixed", 0, 4).total(8) == 18  # Megatron
    assert state_bytes("bf16-mixed", 1, 4).total(8) == 6 + 12 / 8  # its distributed optimizer
    assert state_bytes("32-true", 0, 4).total(8) == 16  # weights, gradients and two moments: 4x, not 3x
    assert state_bytes("bf16-mixed", 3, 4).total(8) == 16 / 8  # FSDP2: float32 shards and no 16-bit ones


S, B, H, A, T = 2048, 1, 12288, 96, 8
SBH = S * B * H


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, 34 + 5 * A * S / H),
        ({"tensor_parallel": T}, 10 + 24 / T + 5 * A * S / (H * T)),
        ({"tensor_parallel": T, "sequence_parallel": True}, (34 + 5 * A * S / H) / T),
        ({"tensor_parallel": T, "activation_checkpointing": "selective"}, 10 + 24 / T),
        ({"tensor_parallel": T, "flash_attention": True}, 10 + 24 / T),
        ({"tensor_parallel": T, "sequence_parallel": True, "activation_checkpointing": "selective"}, 34 / T),
        ({"tensor_parallel": T, "sequence_parallel": True, "flash_attention": True}, 34 / T),
        ({"tensor_parallel": T, "activation_checkpointing": "full"}, 2),
        ({"tensor_parallel": T, "sequence_parallel": True, "activation_checkpointing": "full"}, 2 / T),
    ],
)
def test_korthikanti_table_2(options: dict[str, object], formula: float) -> None:
    assert layer_activations(gpt(96, H, A), B, **options) == pytest.approx(SBH * formula)  # type: ignore[arg-type]


def test_activations_of_other_models() -> None:
    shape = preset("llama3-8b")
    h, kv, f = shape.hidden, shape.kv_width, shape.ffn_width
    tokens = shape.seq_len
    # inputs of two norms, attention and MLP; q, k, v and attention's output; gate, up and their product
    assert layer_activations(shape, 1, flash_attention=True) == tokens * (8 * h + 4 * h + 4 * kv + 6 * f)
    assert layer_activations(shape, 1, flash_attention=True, context_parallel=4) * 4 == layer_activations(
        shape, 1, flash_attention=True
    )


@pytest.mark.parametrize(
    ("shape", "batch", "p", "v", "states", "tp", "selective"),
    [
        (gpt(48, 6144, 64), 4, 1, 1, 45.56, 59.25, 9.56),
        (gpt(96, 12288, 96), 1, 8, 3, 45.56, 66.84, 12.35),
        (gpt(105, 20480, 128), 1, 35, 3, 31.64, 114.02, 23.08),
        (gpt(128, 25600, 160), 1, 64, 1, 32.96, 131.25, 26.56),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_korthikanti_figure_1(
    shape: ModelShape, batch: int, p: int, v: int, states: float, tp: float, selective: float
) -> None:
    weights = shape.layers * shape.layer_parameters / (8 * p)
    assert weights * state_bytes("bf16-mixed", 0, 4).total(1) / GIB == pytest.approx(
        states, abs=0.02
    )  # printed without 13 h
    in_flight = in_flight_chunks("interleaved_1f1b" if v > 1 else "1f1b", 0, p, v, 8 * p) / v * shape.layers / p
    assert in_flight == pytest.approx(shape.layers * (1 + (p - 1) / (p * v) * (v > 1)))
    plain = layer_activations(shape, batch, 8)
    cut = layer_activations(shape, batch, 8, sequence_parallel=True, activation_checkpointing="selective")
    assert in_flight * plain / GIB == pytest.approx(tp, abs=0.01)
    assert in_flight * cut / GIB == pytest.approx(selective, abs=0.01)


@pytest.mark.parametrize("micro_batches", [16, 64])
def test_the_first_stage_keeps_as_much_as_a_model_without_pipeline(micro_batches: int) -> None:
    p = 8
    in_flight = [in_flight_chunks("1f1b", rank, p, 1, micro_batches) for rank in range(p)]
    assert in_flight == [min(micro_batches, p - rank) for rank in range(p)]
    assert in_flight_chunks("gpipe", 3, p, 1, micro_batches) == micro_batches
    assert in_flight_chunks("zb_h1", 3, p, 1, micro_batches) == p
    assert max(in_flight_chunks("zb_h2", rank, p, 1, micro_batches) for rank in range(p)) == 2 * p - 1


CI = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=16384, vocab=131584, seq_len=8192, tied_embeddings=False
)
"""Megatron-LM's functional tests, whose golden values are exact peaks of torch."""


@pytest.mark.parametrize(
    ("layout", "measured"),
    [
        (
            Layout(
                tensor_parallel=4,
                data_parallel=2,
                micro_batch_size=2,
                global_batch_size=8,
                fused_loss=True,
                fused_elementwise=True,
            ),
            58.19,
        ),
        (
            Layout(
                pipeline_parallel=4,
                virtual_stages=8,
                data_parallel=2,
                global_batch_size=8,
                fused_loss=True,
                fused_elementwise=True,
            ),
            60.72,
        ),
    ],
    ids=["tp4", "pp4"],
)
def test_measured_peaks_of_the_last_rank(layout: Layout, measured: float) -> None:
    assert stage_memory(CI, layout)[-1].total / 1e9 == pytest.approx(measured, rel=0.05)


def test_measured_states_at_tp4() -> None:
    layout = Layout(tensor_parallel=4, data_parallel=2, micro_batch_size=2, global_batch_size=8)
    found = stage_memory(CI, layout)[0]
    assert (found.parameters + found.gradients + found.optimizer) / 1e9 == pytest.approx(20.66, rel=0.01)


def test_full_recomputation_keeps_a_tenth() -> None:
    shape = gpt(96, H, A)
    full = layer_activations(shape, B, T, activation_checkpointing="full")
    assert full == 2 * SBH
    assert full / layer_activations(shape, B, T) == pytest.approx(2 / 23)


def test_kinds_add_up_and_logits_are_on_the_last_stage_only() -> None:
    layout = Layout(pipeline_parallel=4, data_parallel=2, global_batch_size=32, tensor_parallel=2)
    found = stage_memory(preset("llama3-8b"), layout)
    assert len(found) == 4
    assert [stage.logits > 0 for stage in found] == [False, False, False, True]
    for stage in found:
        assert sum(stage.in_gb().values()) * 1e9 == pytest.approx(stage.total)
        assert stage.on_device > stage.total


def test_offloaded_states_are_not_on_the_device() -> None:
    shape, layout = preset("llama3-8b"), Layout(global_batch_size=1)
    assert stage_memory(shape, layout)[0].optimizer > 0
    assert stage_memory(shape, Layout(global_batch_size=1, offload="optimizer"))[0].optimizer == 0


def test_messages_between_stages_are_few() -> None:
    """From both neighbours ahead of their use, and back to the one before; hidden states cut along the sequence."""
    shape = preset("llama3-8b")
    layout = Layout(pipeline_parallel=4, tensor_parallel=2, sequence_parallel=True, global_batch_size=16)
    hidden = 2 * shape.seq_len * shape.hidden / 2
    assert [stage.buffers for stage in stage_memory(shape, layout)[:3]] == [hidden, 3 * hidden, 3 * hidden]


def test_one_replica_gathers_nothing_and_float32_is_gathered_in_float32() -> None:
    shape = preset("llama2-7b")
    alone, two = (
        stage_memory(shape, Layout(zero_stage=3, data_parallel=d, global_batch_size=d, fused_loss=True))[0].buffers
        for d in (1, 2)
    )
    assert alone == 0 < two
    wide = Layout(zero_stage=3, data_parallel=2, global_batch_size=2, fused_loss=True, precision="32-true")
    root = shape.embedding_parameters + shape.head_parameters
    assert stage_memory(shape, wide)[0].buffers == 12 * shape.layer_parameters + 8 * root


@pytest.mark.parametrize("expert_parallel", [2, 8])
def test_experts_that_are_shared_out_have_fewer_replicas_for_their_states(expert_parallel: int) -> None:
    shape = preset("mixtral-8x7b")
    whole, cut = (
        stage_memory(shape, Layout(data_parallel=8, global_batch_size=8, expert_parallel=size))[0]
        for size in (1, expert_parallel)
    )
    assert cut.optimizer == pytest.approx(whole.optimizer)
    experts = 32 * 8 * shape.mlp_parameters(shape.expert_width)
    assert whole.parameters - cut.parameters == pytest.approx(2 * experts * (1 - 1 / expert_parallel))
