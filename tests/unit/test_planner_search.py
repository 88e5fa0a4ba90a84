"""The search for a layout: what is legal, what fits, who wins and what the others are told."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_3d.errors import ConfigError
from lightning_3d.planner import GPU, Cluster, Layout, ModelShape, Plan, estimate, plan, preset
from lightning_3d.planner.explain import compare, recomputation, setting
from lightning_3d.planner.legality import (
    Sizes,
    all_sizes,
    micro_batch_sizes,
    pipelines,
    tensor_parallel_fault,
)
from lightning_3d.planner.memory import stage_memory
from lightning_3d.planner.pipeline import pipeline_time
from lightning_3d.planner.rules import warnings
from lightning_3d.planner.search import RESERVE, first
from lightning_3d.planner.split import balanced_split
from lightning_3d.schedules import ENGINE_SCHEDULES, build, simulate

SMALL = ModelShape(layers=24, hidden=2048, heads=16, kv_heads=4, ffn_hidden=8192, vocab=32000, gated_mlp=True)
NODE = Cluster(gpu="a100-80g", num_nodes=2, gpus_per_node=8)


def small_plan(**options: object) -> Plan:
    return plan(SMALL, NODE, 64, **options)  # type: ignore[arg-type]


# What is legal.


def test_sizes_multiply_to_the_cluster_and_divide_model_and_batch() -> None:
    found, refused = all_sizes(SMALL, NODE, 24, {}, False)
    assert all(s.tp * s.pp * s.dp == 16 and 24 % s.dp == 0 and s.tp <= 8 and s.pp <= 24 for s in found)
    assert len(set(found)) == len(found) == 13
    assert refused == {"dp16": "does not divide the global batch of 24"}
    assert {s.dp for s in found} == {1, 2, 4, 8}


def test_tensor_parallelism_is_held_to_nodes_heads_and_widths() -> None:
    def fault(size: int, shape: ModelShape = SMALL, across: bool = False, cluster: Cluster = NODE) -> str | None:
        return tensor_parallel_fault(shape, cluster, size, across)

    assert fault(8) is None, "heads of keys and values are shared by two ranks each"
    assert "8 GPUs of a node" in str(fault(16)) and fault(16, across=True) is None
    assert "8 GPUs of a node" in str(fault(3))
    six = ModelShape(layers=2, hidden=768, heads=12, kv_heads=6, vocab=1000)
    assert "neither divides the 6 heads of keys and values" in str(fault(4, six))
    assert "12 heads" in str(fault(8, six))
    assert "MLP's width of 2050" in str(fault(4, ModelShape(layers=2, hidden=512, heads=8, ffn_hidden=2050)))
    rack = Cluster(gpu="gb200-186g", num_nodes=18, gpus_per_node=4)
    assert fault(8, cluster=rack) is None, "NVLink of a rack connects 72 GPUs"


def test_pipelines_are_those_of_the_engine_unless_all_are_asked_for() -> None:
    assert list(pipelines(SMALL, 1, 8, {}, False)) == [("1f1b", 1)]
    assert list(pipelines(SMALL, 4, 8, {}, False)) == [
        ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("interleaved_1f1b", 6),
    ]  # fmt: skip
    assert list(pipelines(SMALL, 4, 7, {}, False)) == [("1f1b", 1)], "interleaving takes whole rounds of micro-batches"
    assert {name for name, _ in pipelines(SMALL, 4, 8, {}, True)} == {"1f1b", "interleaved_1f1b", "zb_h1", "zbv"}
    assert list(pipelines(SMALL, 4, 8, {"schedule": "gpipe"}, False)) == [("gpipe", 1)]
    assert list(pipelines(SMALL, 4, 8, {"virtual_stages": 2}, False)) == [("interleaved_1f1b", 2)]
    odd = ModelShape(layers=126, hidden=64, heads=2)
    assert [v for _, v in pipelines(odd, 16, 16, {}, False)] == [1, 2, 3, 4, 6], "126 layers make no equal chunks"
    assert [v for _, v in pipelines(odd, 7, 7, {}, False)] == [1, 2, 3, 6]


def test_micro_batches_divide_the_share_of_a_replica() -> None:
    assert micro_batch_sizes(12, {}) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_sizes(12, {"micro_batch_size": [2, 5]}) == [2]
    assert max(micro_batch_sizes(256, {})) == 32


def test_layers_are_split_as_the_strategy_splits_them() -> None:
    assert balanced_split(ModelShape(layers=8, hidden=1024, heads=8, vocab=128), 4, 1) is None
    split = balanced_split(ModelShape(layers=8, hidden=256, heads=8, vocab=64000, tied_embeddings=False), 4, 1)
    assert split is not None and sum(split) == 8 and split[-1] < split[0], "the head is work of the last stage"
    for candidate in small_plan().ranking:
        assert sum(candidate.layout.chunk_layers(SMALL)) == SMALL.layers


# The search.


def brute_force() -> list[tuple[float, Layout]]:
    """Every layout that the engine can run, without any short cut."""
    found = []
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        if 16 % (tp * pp) or (dp := 16 // (tp * pp)) > 64:
            continue
        for micro_batch, v, zero, recompute in itertools.product(
            (1, 2, 4, 8, 16, 32), (1, 2, 3, 4, 6, 8), (1, 2, 3), (None, 4, 2, "full")
        ):
            count = 64 // dp // micro_batch if 64 // dp % micro_batch == 0 else 0
            if not count or (v > 1 and (pp == 1 or count % pp or 24 % (pp * v))):
                continue
            layout = Layout(
                tensor_parallel=tp, pipeline_parallel=pp, data_parallel=dp, virtual_stages=v, zero_stage=zero,
                micro_batch_size=micro_batch, global_batch_size=64, sequence_parallel=tp > 1,
                activation_checkpointing=recompute, loss_parallel=tp > 1,
                pipeline_split=balanced_split(SMALL, pp, v) if pp > 1 else None,
            )  # fmt: skip
            if max(stage.on_device for stage in stage_memory(SMALL, layout)) / 1e9 <= 40 - 2:
                found.append((estimate(SMALL, Cluster(gpu="a100-40g", num_nodes=2), layout).step_time_s, layout))
    return found


def test_no_layout_is_faster_than_the_first_one() -> None:
    cluster = Cluster(gpu="a100-40g", num_nodes=2)
    found = plan(SMALL, cluster, 64, reserve_gb=2)
    least = min(seconds for seconds, _ in brute_force())
    assert found.best.estimate.step_time_s <= 1.005 * least, "as fast as the fastest, to what no prediction can tell"
    times = [candidate.estimate.step_time_s for candidate in found.ranking]
    assert times == sorted(times) and len(times) > 5
    sizes = [(c.layout.tensor_parallel, c.layout.pipeline_parallel) for c in found.ranking]
    assert len(set(sizes)) == len(sizes), "one row for each combination of sizes"


def test_all_that_is_ranked_fits_and_is_legal() -> None:
    found = small_plan()
    assert found.usable_gb == pytest.approx(80 * (1 - RESERVE))
    for candidate in (*found.ranking, *found.variants):
        layout = candidate.layout
        assert candidate.estimate.device_memory_gb <= found.usable_gb
        assert layout.world_size == 16 and layout.samples == 64 and layout.schedule_name in ENGINE_SCHEDULES
        assert layout.activation_checkpointing in (None, 4, 2, "full"), "what the engine can do"
    assert found.num_layouts >= found.num_timed >= len(found.ranking) + len(found.variants)
    only = {"tensor_parallel": [1, 8], "pipeline_parallel": 2, "zero_stage": 1, "activation_checkpointing": "full"}
    least = min(small_plan(fixed={**only, "tensor_parallel": 8}).ranking, key=lambda c: c.estimate.device_memory_gb)
    tight = small_plan(fixed=only, reserve_gb=80 - least.estimate.device_memory_gb - 0.1)
    assert [c.layout.tensor_parallel for c in tight.ranking] == [8]
    (refusal,) = tight.refusals
    assert refusal.sizes == "tp1 pp2 dp8" and "GB at least" in refusal.why
    assert "Less model parallelism does not fit: tp1 pp2 dp8 needs" in tight.reason


def test_memory_is_bought_by_recomputation_only_as_far_as_it_has_to_be() -> None:
    shape, cluster = preset("gpt3-175b"), Cluster.parse("a100-80g:128x8")
    one = {"tensor_parallel": 8, "pipeline_parallel": 16, "micro_batch_size": 2, "virtual_stages": 1, "zero_stage": 1}
    ladder, large = [None, 4, 2, "full"], dataclasses.replace(cluster, memory_gb=180.0)
    needs = [plan(shape, large, 1536, fixed={**one, "activation_checkpointing": how}).best for how in ladder]
    assert [c.estimate.step_time_s for c in needs] == sorted(c.estimate.step_time_s for c in needs)
    for step, candidate in enumerate(needs):
        left = candidate.estimate.device_memory_gb + 0.1
        chosen = plan(shape, cluster, 1536, fixed=one, reserve_gb=80 - left).best
        assert chosen.layout.activation_checkpointing == ladder[step]
    with pytest.raises(ConfigError, match="does not fit"):
        plan(shape, cluster, 1536, fixed=one, reserve_gb=80 - needs[-1].estimate.device_memory_gb + 0.1)


def test_what_is_fixed_stays_and_several_values_are_chosen_from() -> None:
    found = small_plan(fixed={"tensor_parallel": 2, "pipeline_parallel": [2, 4], "precision": "bf16-true"})
    assert {c.layout.tensor_parallel for c in found.ranking} == {2}
    assert sorted(c.layout.pipeline_parallel for c in found.ranking) == [2, 4]
    assert {c.layout.precision for c in found.ranking} == {"bf16-true"}
    assert {c.layout.data_parallel for c in small_plan(fixed={"data_parallel": 4}).ranking} == {4}


def test_sequences_are_cut_under_tensor_parallelism_where_the_strategy_can() -> None:
    options = {"fixed": {"tensor_parallel": 8, "pipeline_parallel": 16}}
    cluster = Cluster.parse("a100-80g:48x8")
    for name, cut in (("gpt3-175b", True), ("bloom-176b", False)):
        assert plan(preset(name), cluster, 2304, **options).best.layout.sequence_parallel is cut  # type: ignore[arg-type]
    assert not small_plan(fixed={"tensor_parallel": 1}).best.layout.sequence_parallel


def test_schedules_without_an_engine_are_recommended_only_if_asked_for() -> None:
    options = {"fixed": {"pipeline_parallel": 8, "tensor_parallel": 1, "micro_batch_size": 2}}
    assert small_plan(**options).best.layout.schedule_name in ENGINE_SCHEDULES
    best = small_plan(**options, all_schedules=True).best
    assert best.layout.schedule_name in ("zbv", "zb_h1")


def test_a_plan_takes_seconds_for_16384_gpus() -> None:
    begin = time.process_time()
    found = plan(preset("llama3-405b"), Cluster.parse("h100-80g:2048x8"), 2048)
    assert time.process_time() - begin < 20, "about 2 s on one core"
    best = found.best.layout
    assert best.tensor_parallel == 8 and best.pipeline_parallel in (8, 16), "what Meta trained it with: tp8 pp16"
    assert len(found.ranking) > 10


def test_a_plan_for_cpus_works() -> None:
    tiny = ModelShape(layers=4, hidden=128, heads=4, vocab=256, seq_len=128)
    cluster = Cluster(gpu="cpu", num_nodes=1, gpus_per_node=8)
    found = plan(tiny, cluster, 16, fixed={"precision": "32-true"})
    assert found.best.layout.world_size == 8 and math.isfinite(found.best.estimate.step_time_s)


# What people are told.


def test_losers_are_told_what_they_lose_by() -> None:
    found = plan(preset("llama3-70b"), Cluster.parse("h100-80g:64x8"), 1024)
    assert found.best.why == "" and all(candidate.why.startswith("+") for candidate in found.ranking[1:])
    text = " ".join(candidate.why for candidate in found.ranking)
    causes = ("tensor-parallel collectives", "waits for other stages", "recomputes every", "ZeRO-3", "kernels take")
    assert sum(cause in text for cause in causes) >= 3
    assert "It fits" in found.reason and "next sizes" in found.reason and "% slower" in found.reason
    assert f"{found.best.estimate.device_memory_gb:.0f} of {found.usable_gb:.0f} GB" in found.reason
    for candidate in found.variants:
        assert ":" in candidate.why


def test_the_cause_that_is_named_is_the_one_that_costs_most() -> None:
    found = small_plan(fixed={"tensor_parallel": 1, "pipeline_parallel": [1, 16], "micro_batch_size": 4})
    deep = next(c for c in found.ranking if c.layout.pipeline_parallel == 16)
    assert f"waits for other stages: {deep.layout.micro_batches} micro-batches for 16 stages" in deep.why
    assert compare(found.best, found.best, found.usable_gb).startswith("+0.0%: no difference")
    layout = Layout(pipeline_parallel=2, virtual_stages=3, activation_checkpointing=2, zero_stage=2)
    assert setting(None, layout) == "interleaved_1f1b v3, micro-batch 1, ZeRO-2, recompute 1/2"
    assert setting(layout, Layout(pipeline_parallel=2, zero_stage=2)) == "1f1b, recompute no"
    assert recomputation(Layout(activation_checkpointing="full")) == "all"
    assert str(Sizes(2, 4, 8)) == "tp2 pp4 dp8"


def test_a_model_that_fits_nowhere_is_refused_with_what_comes_nearest() -> None:
    with pytest.raises(ConfigError, match=r"175\.?\d*e9|174\.6e9") as error:
        plan(preset("gpt3-175b"), Cluster.parse("a100-80g:1x8"), 8)
    assert "does not fit on a100-80g:1x8" in str(error.value) and "GB per GPU" in str(error.value)
    with pytest.raises(ConfigError, match=r"global batch of 3.*tp\d|No layout"):
        plan(SMALL, NODE, 3, fixed={"tensor_parallel": 1, "pipeline_parallel": 1})
    with pytest.raises(ConfigError, match="multiply to 3, which does not divide the 16 GPUs"):
        small_plan(fixed={"tensor_parallel": 3})
    with pytest.raises(ConfigError, match="global_batch"):
        plan(SMALL, NODE, 0)
    with pytest.raises(ConfigError, match=r"precision=.*must be one value"):
        small_plan(fixed={"precision": ["bf16-mixed", "fp8"]})
    with pytest.raises(ConfigError, match="fixed"):
        small_plan(fixed={"tensor_paralel": 2})


def rules_of(shape: ModelShape = SMALL, cluster: Cluster = NODE, **layout: object) -> str:
    made = Layout(**layout)  # type: ignore[arg-type]
    return "\n".join(warnings(shape, cluster, made, estimate(shape, cluster, made), 77.6))


def test_rules_of_thumb_have_the_numbers_of_the_case() -> None:
    text = rules_of(tensor_parallel=16, global_batch_size=8)
    assert "tensor_parallel=16 is wider than the 8 GPUs" in text and "25 GB/s instead of 300 GB/s" in text
    text = rules_of(pipeline_parallel=8, data_parallel=2, global_batch_size=16)
    assert (
        "8 micro-batches for 8 stages: 1f1b leaves 47% of the step idle. With 32, 4 per stage, it would be 18%" in text
    )
    assert "a global batch of 64" in text
    assert "micro-batches for" not in rules_of(pipeline_parallel=2, data_parallel=8, global_batch_size=64)
    text = rules_of(pipeline_parallel=2, data_parallel=8, global_batch_size=64, zero_stage=3)
    assert "zero_stage=3 under a pipeline communicates in each of 8 micro-batches" in text
    slow = Cluster(gpu=GPU(name="x", generation="ampere", tflops=312, memory_gb=80, hbm_GBps=2000, nvlink_GBps=300,
                           nic_Gbps=10, sms=108), num_nodes=2, gpus_per_node=8)  # fmt: skip
    assert "data_parallel=16 leaves each replica 1 micro-batches" in rules_of(
        cluster=slow, data_parallel=16, global_batch_size=16
    )
    odd = ModelShape(layers=10, hidden=2048, heads=64, kv_heads=2, vocab=50257, ffn_hidden=8192, gated_mlp=True)
    text = rules_of(odd, tensor_parallel=4, pipeline_parallel=4, global_batch_size=16, pipeline_split="uniform")
    assert "vocabulary of 50,257 is no multiple of 256: ranks hold unequal parts" in text and "50,432" in text
    assert "tensor_parallel=4 exceeds kv_heads=2: each head of keys and values is kept and computed by 2 ranks" in text
    assert "10 layers over 4 chunks: the longest has 3, the shortest 2" in text
    narrow = ModelShape(layers=16, hidden=512, heads=16, vocab=1024)
    assert "width 32 are no multiple of 64" in rules_of(narrow, data_parallel=16, global_batch_size=16)


def test_precisions_that_a_gpu_does_not_run_at_the_speed_assumed_are_told() -> None:
    old = Cluster(gpu="v100-32g", num_nodes=2)
    assert "has no bfloat16" in rules_of(cluster=old, data_parallel=16, global_batch_size=16)
    assert "bfloat16" not in rules_of(cluster=old, data_parallel=16, global_batch_size=16, precision="16-mixed")
    text = rules_of(data_parallel=16, global_batch_size=16, precision="32-true")
    assert "set torch.set_float32_matmul_precision('high')" in text
    assert "quarter of the 16-bit peak" in rules_of(data_parallel=16, global_batch_size=16, precision="64-true")
    assert "tensor cores" not in rules_of(
        cluster=Cluster(gpu="cpu", gpus_per_node=4), data_parallel=4, global_batch_size=4, precision="32-true"
    )


def test_tight_memory_is_a_warning() -> None:
    layout = Layout(data_parallel=16, global_batch_size=16)
    found = estimate(SMALL, NODE, layout)
    text = " ".join(warnings(SMALL, NODE, layout, found, found.device_memory_gb + 0.1))
    assert "Memory is tight: 0.1 GB" in text and "dry-run" in text
    assert "tight" not in " ".join(warnings(SMALL, NODE, layout, found, 77.6))


@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 2, 16), (2, 5, 8), (4, 4, 16), (8, 1, 8), (3, 2, 6)])
def test_long_steps_are_extrapolated_without_loss(p: int, v: int, rounds: int) -> None:
    name = "interleaved_1f1b" if v > 1 else "1f1b"
    forward = [1.0 + 0.3 * math.sin(7 * chunk) for chunk in range(p * v)]
    forward[-1] *= 1.7
    backward = [2 * time for time in forward]
    found = pipeline_time(name, p, v, p * rounds, forward, backward, [0.0] * (p * v))
    assert found.total == pytest.approx(simulate(build(name, p, v, p * rounds), forward, backward).total, rel=3e-3)
    assert found.total >= max(found.busy)


def test_of_equals_with_fewer_chunks_none_is_taken_that_leaves_less_memory_than_the_error() -> None:
    def candidate(chunks: int, seconds: float, memory: float) -> Any:
        estimate = SimpleNamespace(step_time_s=seconds, device_memory_gb=memory)
        return SimpleNamespace(layout=SimpleNamespace(virtual_stages=chunks), estimate=estimate)

    roomy, tight = candidate(8, 1.0, 74.0), candidate(4, 1.001, 77.0)
    assert first([roomy, tight], 77.6) is roomy
    assert first([roomy, candidate(4, 1.001, 70.0)], 77.6).layout.virtual_stages == 4
