"""Claims that are often repeated about parallel training, with the right value: one test each.

Two claims are not the planner's: that a column-parallel layer communicates in its forward (tests/dist of tensor
parallelism count collectives), and what compressed gradients save (there are none).
"""

from __future__ import annotations

import dataclasses

import pytest

from lightning_3d.planner import PRESETS, Cluster, Layout, estimate
from lightning_3d.planner.activations import layer_activations
from lightning_3d.planner.flops import hardware_flops_per_token, model_flops_per_token, training_days
from lightning_3d.planner.memory import state_bytes
from lightning_3d.planner.pipeline import in_flight_chunks, pipeline_time
from lightning_3d.schedules import build, simulate

GPT3 = PRESETS["gpt3-175b"]


def bubble(name: str, p: int, v: int, m: int) -> float:
    return pipeline_time(name, p, v, m, [1.0] * p * v, [2.0] * p * v, [1.0] * p * v).bubble_fraction


def test_a_layer_of_gpt3_has_1812_million_parameters_not_138() -> None:
    assert GPT3.layer_parameters == 1_812_099_072
    assert GPT3.parameters == pytest.approx(174.6e9, rel=1e-3)


def test_1f1b_has_the_bubble_of_gpipe_and_less_memory() -> None:
    p, m = 8, 32
    assert bubble("1f1b", p, 1, m) == pytest.approx(bubble("gpipe", p, 1, m))
    assert [in_flight_chunks(name, 0, p, 1, m) for name in ("gpipe", "1f1b")] == [m, p]


def test_the_bubble_is_told_of_the_total_and_the_slowdown_of_the_ideal() -> None:
    p, m = 8, 24
    assert bubble("1f1b", p, 1, m) == pytest.approx((p - 1) / (m + p - 1))
    time = pipeline_time("1f1b", p, 1, m, [1.0] * p, [2.0] * p, [1.0] * p).total
    assert time / (3 * m) == pytest.approx(1 + (p - 1) / m)


def test_24_stages_and_8_micro_batches_idle_for_three_quarters() -> None:
    assert bubble("1f1b", 24, 1, 8) == pytest.approx(23 / 31)


def test_zero_saves_4_8_and_d_fold_in_the_limit() -> None:
    saved = [16 / state_bytes("16-mixed", stage, 2).total(64) for stage in (1, 2, 3)]
    assert saved == pytest.approx([3.8, 7.2, 64], abs=0.06)


def test_adam_needs_four_times_the_weights_in_float32_and_eight_in_mixed_precision() -> None:
    assert state_bytes("32-true", 0, 4).total(1) == 4 * 4
    assert state_bytes("16-mixed", 0, 2).total(1) == 8 * 2
    assert state_bytes("bf16-mixed", 0, 4).total(1) == 18


def test_pipeline_stages_do_not_multiply_the_batch() -> None:
    layout = Layout(
        tensor_parallel=8, pipeline_parallel=16, data_parallel=8, micro_batch_size=4, global_batch_size=2048
    )
    assert (layout.world_size, layout.micro_batches) == (1024, 64)
    assert bubble("1f1b", 16, 1, 64) == pytest.approx(15 / 79)


def test_tensor_parallelism_sends_activations_and_zero_3_parameters() -> None:
    cluster = Cluster(gpu="a100", num_nodes=2)
    layout = Layout(tensor_parallel=8, data_parallel=2, global_batch_size=16)
    shape = PRESETS["llama2-13b"]
    wide = dataclasses.replace(shape, ffn_hidden=2 * shape.ffn_width)
    tp, wide_tp = (estimate(s, cluster, layout).tp_s for s in (shape, wide))
    assert wide_tp == pytest.approx(tp)
    sharded = Layout(zero_stage=3, data_parallel=16, global_batch_size=16)
    dp, wide_dp = (estimate(s, cluster, sharded).exposed_dp_s for s in (shape, wide))
    assert wide_dp > 1.2 * dp


def test_gpt3_takes_288_years_of_one_v100_and_34_days_of_1024_a100() -> None:
    assert training_days(174.6e9, 300e9, 1, 35e12, recompute=False) / 365.25 == pytest.approx(284, rel=0.02)
    assert training_days(174.6e9, 300e9, 1024, 140e12) == pytest.approx(34, abs=0.5)


def test_full_recomputation_costs_a_third_and_keeps_a_tenth() -> None:
    model = model_flops_per_token(GPT3)
    assert hardware_flops_per_token(GPT3, "full") / model == pytest.approx(4 / 3, abs=0.01)
    assert hardware_flops_per_token(GPT3, "selective") / model == pytest.approx(1.027, abs=1e-3)
    full, none = (layer_activations(GPT3, 1, 8, activation_checkpointing=value) for value in ("full", None))
    assert full / none == pytest.approx(2 / 23)
    left = layer_activations(GPT3, 1, 8, sequence_parallel=True, activation_checkpointing="selective")
    assert 0.16 < left / none < 0.20


def test_interleaving_divides_the_bubble_and_keeps_more_activations() -> None:
    p, v, m = 8, 4, 32
    assert bubble("interleaved_1f1b", p, v, m) == pytest.approx((p - 1) / (v * m + p - 1))
    assert in_flight_chunks("interleaved_1f1b", 0, p, v, m) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_no_gpu_trains_175b_at_120_samples_a_second() -> None:
    cluster = Cluster(gpu="a100", num_nodes=32)
    layout = Layout(tensor_parallel=8, pipeline_parallel=8, data_parallel=4, global_batch_size=768)
    found = estimate(GPT3, cluster, layout)
    assert 0.04 < found.tokens_per_s_per_gpu / 2048 < 0.145


def test_a_measured_bubble_is_idle_over_total() -> None:
    timeline = simulate(build("1f1b", 2, 1, 1))
    assert timeline.bubble_fraction == pytest.approx(0.5) == bubble("1f1b", 2, 1, 1)
