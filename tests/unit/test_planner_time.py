"""Time: operations, the pipeline against the simulation, collectives, and what every estimate obeys."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lightning_3d.errors import ConfigError
from lightning_3d.planner import PRESETS, Cluster, Layout, ModelShape, estimate, preset
from lightning_3d.planner.communication import Group, Links
from lightning_3d.planner.constants import Constants, constants
from lightning_3d.planner.flops import hardware_flops_per_token, model_flops_per_token, training_days
from lightning_3d.planner.kernels import filling
from lightning_3d.planner.pipeline import pipeline_time
from lightning_3d.schedules import build, simulate

GPT3 = PRESETS["gpt3-175b"]
A100 = Cluster.parse("a100-80g:128x8")
TYPICAL = Layout(
    tensor_parallel=8, pipeline_parallel=16, data_parallel=8, global_batch_size=1536, activation_checkpointing="full"
)


def changed(**changes: object) -> Layout:
    return dataclasses.replace(TYPICAL, **changes)  # type: ignore[arg-type]


# Operations.


def test_hardware_flops_are_equation_3_of_the_sc21_paper() -> None:
    layers, h, s, v = GPT3.layers, GPT3.hidden, GPT3.seq_len, GPT3.vocab
    formula = 96 * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert hardware_flops_per_token(GPT3, "full") == pytest.approx(formula, rel=1e-12)


def test_model_flops_are_equation_7_of_korthikanti() -> None:
    layers, h, s, v = GPT3.layers, GPT3.hidden, GPT3.seq_len, GPT3.vocab
    formula = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model_flops_per_token(GPT3) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize(("name", "extra"), [("gpt3-175b", 0.027), ("mt-nlg-530b", 0.016)])
def test_selective_recomputation_costs_a_few_percent(name: str, extra: float) -> None:
    shape = PRESETS[name]
    assert hardware_flops_per_token(shape, "selective") / model_flops_per_token(shape) - 1 == pytest.approx(
        extra, abs=1e-3
    )


def test_llama_with_full_and_with_causal_attention() -> None:
    assert model_flops_per_token(PRESETS["llama3-405b"]) == pytest.approx(2.64e12, rel=1e-2)
    assert model_flops_per_token(PRESETS["llama3-405b"], causal=True) == pytest.approx(2.52e12, rel=5e-3)
    assert model_flops_per_token(PRESETS["llama3-70b"]) == pytest.approx(4.82e11, rel=5e-3)


def test_every_second_layer_recomputed_is_half_of_all() -> None:
    none, full, half = (hardware_flops_per_token(GPT3, value) for value in (None, "full", 2))
    assert half - none == pytest.approx((full - none) / 2)


def test_training_times_of_the_papers() -> None:
    assert training_days(174.6e9, 300e9, 1024, 140e12) == pytest.approx(34, abs=0.5)  # SC21, with recomputation
    assert training_days(174.6e9, 300e9, 1, 35e12, recompute=False) / 365 == pytest.approx(288, rel=0.02)
    assert pytest.approx(3.14e23, rel=2e-3) == 6 * 174.6e9 * 300e9  # GPT-3, table D.1


# Pipelines.


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 4), (4, 9)])
def test_a_pipeline_takes_as_long_as_in_the_simulation(name: str, stages: int, micro_batches: int) -> None:
    chunks = {"interleaved_1f1b": 3, "zbv": 2}.get(name, 1)
    numbers = random.Random(stages * micro_batches)
    forward = [numbers.uniform(1, 2) for _ in range(stages * chunks)]
    weight = [numbers.uniform(1, 2) for _ in forward]
    backward = [w + numbers.uniform(1, 2) for w in weight]
    schedule = build(name, stages, chunks, micro_batches)
    splits = name.startswith("zb")
    for send in (0.0, 0.5):
        timeline = simulate(
            schedule,
            forward,
            [b - w for b, w in zip(backward, weight, strict=True)] if splits else backward,
            send,
            weight_time=weight,
        )
        found = pipeline_time(name, stages, chunks, micro_batches, forward, backward, weight, send)
        assert found.total == pytest.approx(timeline.total, rel=1e-12)
        assert found.busy == pytest.approx(timeline.busy)
        assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_many_micro_batches_are_extrapolated_exactly_for_equal_chunks(name: str, chunks: int) -> None:
    p, m = 4, 43
    forward, weight, backward = [1.0] * p * chunks, [1.0] * p * chunks, [2.0] * p * chunks
    splits = name.startswith("zb")
    timeline = simulate(build(name, p, chunks, m), 1.0, 1.0 if splits else 2.0, weight_time=1.0)
    assert pipeline_time(name, p, chunks, m, forward, backward, weight).total == pytest.approx(timeline.total)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("gpipe", 1)])
def test_many_micro_batches_are_extrapolated_closely_for_unequal_chunks(name: str, chunks: int) -> None:
    p, m = 4, 62
    forward = [1.2, *[1.0] * (p * chunks - 2), 1.5]
    weight, backward = forward, [2 * f for f in forward]
    splits = name.startswith("zb")
    timeline = simulate(build(name, p, chunks, m), forward, forward if splits else backward, 0.1, weight_time=weight)
    found = pipeline_time(name, p, chunks, m, forward, backward, weight, 0.1)
    assert found.total == pytest.approx(timeline.total, rel=0.01)


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "bubble"),
    [
        ("gpipe", 8, 1, 24, 7 / 31),
        ("1f1b", 8, 1, 24, 7 / 31),
        ("1f1b", 24, 1, 8, 23 / 31),
        ("1f1b", 16, 1, 64, 15 / 79),
        ("interleaved_1f1b", 8, 4, 24, 7 / (4 * 24 + 7)),
        ("zb_h1", 8, 1, 24, 7 / (3 * 24 + 7)),
        ("zb_h2", 8, 1, 24, 0.0),
    ],
)
def test_bubbles_are_fractions_of_the_total(name: str, p: int, v: int, m: int, bubble: float) -> None:
    ones, twos = [1.0] * p * v, [2.0] * p * v
    found = pipeline_time(name, p, v, m, ones, twos, ones)
    assert found.bubble_fraction == pytest.approx(bubble, abs=1e-12)
    if name == "1f1b":
        assert found.total / (3 * m) == pytest.approx(1 + (p - 1) / m)  # (p - 1)/m is the slowdown over ideal


# Collectives.


def test_rings() -> None:
    known = Constants(nvlink=1.0, network=1.0, latency_us=10, network_latency_us=20)
    links = Links(Cluster(gpu="a100-80g", num_nodes=4), known)
    inside, across, apart = Group(8), Group(32), Group(4, 8)
    n = 1e9
    assert links.gather(n, inside) == pytest.approx(7 * 10e-6 + 7 / 8 * n / 300e9)
    assert links.all_reduce(n, inside) == pytest.approx(2 * links.gather(n, inside))
    assert links.gather(n, apart) == pytest.approx(3 * 20e-6 + 3 / 4 * n / 25e9)
    # eight network cards carry a ring of whole nodes
    assert links.bandwidth(across) == pytest.approx(8 * 25e9)
    assert links.send(n, 8) == pytest.approx(20e-6 + n / 25e9)
    assert links.send(n, 1) == pytest.approx(10e-6 + n / 300e9)
    assert links.gather(n, Group(1)) == 0.0
    # every rank sends its own parts to other nodes by its own card
    assert links.all_to_all(n, across) == pytest.approx(20e-6 + 24 / 32 * n / 25e9)
    assert links.all_to_all(n, inside) == pytest.approx(10e-6 + 7 / 8 * n / 300e9)


def test_the_whole_all_reduce_of_zero_0_hides_behind_the_last_backward() -> None:
    shape, cluster = PRESETS["llama2-7b"], Cluster.parse("h100-80g:4x8")
    options = {"tensor_parallel": 2, "data_parallel": 16, "micro_batch_size": 8, "global_batch_size": 512}
    found = [estimate(shape, cluster, Layout(zero_stage=stage, **options)) for stage in (0, 1)]
    cost = constants("hopper").overlap_cost
    assert found[0].exposed_dp_s == pytest.approx(cost * found[0].dp_s)
    assert found[0].dp_s > found[1].dp_s  # sums go to all replicas, in float32


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_collectives_of_every_micro_batch_are_among_all_of_them(zero_stage: int) -> None:
    """ZeRO-3 gathers twice and reduces once, ZeRO-2 reduces, and gathers once a step."""
    shape, cluster = PRESETS["llama2-7b"], Cluster.parse("h100-80g:2x8")
    one, two = (
        estimate(shape, cluster, Layout(data_parallel=16, global_batch_size=16 * m, zero_stage=zero_stage))
        for m in (1, 2)
    )
    assert 0 < one.exposed_dp_s < one.dp_s
    once = two.dp_s - 2 * (two.dp_s - one.dp_s)
    assert once == pytest.approx(0.0 if zero_stage == 3 else one.dp_s / 3, rel=0.05, abs=1e-6)


def test_latencies_of_a_cluster_go_before_those_of_its_gpus() -> None:
    shape, layout = PRESETS["gpt2"], Layout(tensor_parallel=4, data_parallel=4, global_batch_size=16)
    given = Cluster(gpu="a100-80g", num_nodes=2, intra_node_latency_us=100, inter_node_latency_us=1000)
    assert dict(given.own_constants) == {"latency_us": 100, "network_latency_us": 1000}
    slow, usual = (estimate(shape, one, layout) for one in (given, Cluster(gpu="a100-80g", num_nodes=2)))
    assert slow.tp_s > 5 * usual.tp_s and slow.dp_s > usual.dp_s


def test_tensor_parallel_bytes_are_those_of_activations() -> None:
    # Two all-reduces of b s h elements forward and two backward: twice the batch doubles them, a wider FFN does not.
    base = changed(activation_checkpointing=None)
    one = estimate(GPT3, A100, base)
    two = estimate(GPT3, A100, dataclasses.replace(base, micro_batch_size=2))
    wide = estimate(dataclasses.replace(GPT3, ffn_hidden=8 * GPT3.hidden), A100, base)
    assert two.tp_s == pytest.approx(one.tp_s, rel=0.05)  # half as many messages of twice the bytes: less latency
    assert wide.tp_s == pytest.approx(one.tp_s)
    recomputed = estimate(GPT3, A100, TYPICAL)
    # The two forward ones once more; those of the embedding and the head are not recomputed.
    assert 1.45 < recomputed.tp_s / one.tp_s < 1.5


# Kernels.


def test_tiles_that_do_not_fill_the_last_wave_are_lost() -> None:
    assert filling(256 * 108, 128, 108) == pytest.approx(1.0)
    assert filling(256 * 108 + 1, 128, 108) < 0.99
    assert filling(16, 16, 108) < 0.01


# Estimates.


def test_an_estimate_of_gpt3_is_what_clusters_show() -> None:
    found = estimate(GPT3, A100, TYPICAL)
    assert 0.40 < found.hfu < 0.56  # SC21: 44 to 52 % of the peak, with recomputation
    assert found.hfu / found.mfu == pytest.approx(4 / 3, abs=0.01)
    assert sum(found.time_share.values()) == pytest.approx(1.0)
    assert found.tokens_per_s_per_gpu == pytest.approx(1536 * 2048 / found.step_time_s / 1024)
    assert found.memory_gb == pytest.approx(max(stage.total for stage in found.memory) / 1e9)
    assert found.fits and len(found.memory) == 16
    samples_per_s = found.tokens_per_s_per_gpu / 2048
    assert samples_per_s < 0.145  # 312 TFLOP/s can do no more, whatever is claimed


def test_recomputation_costs_a_third_at_most() -> None:
    plain, full = estimate(GPT3, A100, changed(activation_checkpointing=None)), estimate(GPT3, A100, TYPICAL)
    assert 1.2 < full.step_time_s / plain.step_time_s < 1.4
    assert full.memory_gb < plain.memory_gb


def test_gpipe_has_the_bubble_of_1f1b_and_more_memory() -> None:
    one, other = estimate(GPT3, A100, TYPICAL), estimate(GPT3, A100, changed(schedule="gpipe"))
    # But for messages, which 1F1B waits for also between its warm-up and its end.
    assert other.bubble_fraction == pytest.approx(one.bubble_fraction, abs=0.02)
    assert other.memory_gb > 2 * one.memory_gb


def test_interleaving_divides_the_bubble_and_keeps_more() -> None:
    one, three = estimate(GPT3, A100, TYPICAL), estimate(GPT3, A100, changed(virtual_stages=3, schedule=None))
    assert three.bubble_fraction < 0.7 * one.bubble_fraction  # not 1/3: the head's chunk is longer than the others
    assert three.memory[0].activations > one.memory[0].activations


def test_zero_3_in_a_pipeline_gathers_in_every_micro_batch() -> None:
    one, three = estimate(GPT3, A100, TYPICAL), estimate(GPT3, A100, changed(zero_stage=3))
    assert three.exposed_dp_s > 3 * one.exposed_dp_s
    assert three.memory[0].parameters + three.memory[0].gradients < one.memory[0].parameters + one.memory[0].gradients


def test_unequal_stages_wait_for_the_slowest() -> None:
    even = estimate(GPT3, A100, TYPICAL)
    split = (9, 3, *[6] * 14)
    assert estimate(GPT3, A100, changed(pipeline_split=split)).step_time_s > 1.3 * even.step_time_s


def test_constants_of_the_users_own_devices_go_first() -> None:
    slow = dataclasses.replace(A100, measured=(("gemm", constants("ampere").gemm / 2),))
    assert estimate(GPT3, slow, TYPICAL).compute_s > 1.7 * estimate(GPT3, A100, TYPICAL).compute_s
    with pytest.raises(ConfigError, match="is not a constant"):
        estimate(GPT3, dataclasses.replace(A100, measured=(("warp", 9.0),)), TYPICAL)


@pytest.mark.parametrize(
    ("shape", "layout", "words"),
    [
        (GPT3, changed(data_parallel=4), "the cluster a100-80g:128x8 has 1024"),
        (dataclasses.replace(GPT3, heads=12, head_dim=1024), TYPICAL, "does not divide heads"),
        (dataclasses.replace(GPT3, layers=8), TYPICAL, "More stages than blocks"),
        (GPT3, changed(pipeline_split=(1, 95)), "sizes"),
    ],
)
def test_layouts_that_cannot_run_are_refused(shape: ModelShape, layout: Layout, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        estimate(shape, A100, layout)


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "bloom-176b", "gpt2"])
@pytest.mark.parametrize("gpu", ["v100-32g", "a100", "h100", "b200"])
def test_any_model_on_any_gpu_has_an_estimate(name: str, gpu: str) -> None:
    found = estimate(preset(name), Cluster(gpu=gpu), Layout(data_parallel=8, zero_stage=3))
    assert 0 < found.mfu < 0.9
    assert found.step_time_s > 0 and found.memory_gb > 0
