"""Shapes, GPU types, clusters and layouts as data: published counts, names as people write them, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_3d.errors import ConfigError
from lightning_3d.planner import PRESETS, Cluster, Layout, ModelShape, gpu, preset

PUBLISHED = {
    "gpt2": 124.44e6,
    "gpt2-xl": 1.5576e9,
    "gpt3-175b": 174.6e9,  # SC21 table 2
    "gpt-530b": 529.6e9,
    "gpt-1t": 1008.0e9,
    "mt-nlg-530b": 529.6e9,
    "bloom-176b": 176_247_271_424,  # model card
    "gpt-neox-20b": 20_554_567_680,
    "llama-65b": 65.2e9,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405.85e9,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140.6e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters(name: str) -> None:
    exact = isinstance(PUBLISHED[name], int)
    assert PRESETS[name].parameters == pytest.approx(PUBLISHED[name], rel=0 if exact else 2e-3)


def test_a_layer_of_gpt3_has_12_h_squared_and_13_h() -> None:
    shape = preset("gpt3-175b")
    assert shape.layer_parameters == 12 * shape.hidden**2 + 13 * shape.hidden == 1_812_099_072


def test_the_whole_gpt_is_equation_2_of_the_sc21_paper() -> None:
    shape = preset("gpt3-175b")
    layers, h, v, s = shape.layers, shape.hidden, shape.vocab, shape.seq_len
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert shape.parameters - shape.norm_size == pytest.approx(formula, rel=1e-12)  # the last norm is not in it


def test_a_token_passes_two_of_eight_experts() -> None:
    assert preset("mixtral-8x7b").active_parameters == pytest.approx(12.9e9, rel=5e-3)
    assert preset("llama3-8b").active_parameters == preset("llama3-8b").parameters


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_name_of_the_table_is_known(name: str) -> None:
    assert preset(name) == PRESETS[name]  # "llama-33b" is no Llama 3


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "llama3.1-8b", "LLAMA_3_8B", "llama3-8b"])
def test_models_are_found_as_people_write_them(name: str) -> None:
    assert preset(name) == PRESETS["llama3-8b"]


def test_an_unknown_model_is_refused_with_near_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean gpt3-175b"):
        preset("gpt3-176b")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100-80GB-SXM", "a100-80g"),
        ("A100", "a100-80g"),
        ("A100-40GB-SXM", "a100-40g"),
        ("A100 (paper: NVIDIA Ampere)", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("V100-32GB-SXM", "v100-32g"),
        ("H100-80GB-SXM", "h100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("H100-96GB-HBM2e (500W)", "h100-96g-hbm2e"),
        ("H100 PCIe", "h100-80g-pcie"),
        ("H200-141GB-SXM", "h200-141g"),
        ("H800-80GB", "h800-80g"),
        ("B200", "b200-180g"),
        ("GB200", "gb200-186g"),
        ("GB300", "gb300-288g"),
    ],
)
def test_gpus_are_found_as_people_write_them(name: str, found: str) -> None:
    assert gpu(name).name == found


def test_peaks_are_dense() -> None:
    assert [gpu(name).tflops for name in ("v100", "a100", "h100", "h200", "b200")] == [125, 312, 989, 989, 2250]


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use one of v100-16g"):
        Cluster(gpu="tpu-v4")


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("a100-80g:128x8", 128, 8),
        ("a100-80g:1024", 128, 8),
        ("gb200:2x4", 2, 4),
        ("h100", 1, 8),
        ("h100:2", 1, 2),
    ],
)
def test_clusters_are_written_in_one_word(text: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.parse(text)
    assert (cluster.num_nodes, cluster.ranks_per_node, cluster.world_size) == (nodes, per_node, nodes * per_node)


@pytest.mark.parametrize("text", ["a100-80g:8x", "a100-80g:12", "a100-80g:0"])
def test_clusters_that_are_not_whole_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Cluster.parse(text)


def test_links_are_those_of_the_gpu_unless_given() -> None:
    usual, given = Cluster(gpu="a100-80g"), Cluster(gpu="a100-80g", intra_node_GBps=200, inter_node_Gbps=100)
    assert (usual.nvlink_bandwidth, usual.network_bandwidth) == (300e9, 25e9)
    assert (given.nvlink_bandwidth, given.network_bandwidth) == (200e9, 12.5e9)
    assert Cluster(gpu="gb200", num_nodes=18).domain == 72


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpu: h100-80g\nnum_nodes: 4\ninter_node_Gbps: 200\nmeasured: {gemm: 0.5}\n")
    cluster = Cluster.parse(str(file))
    assert (cluster.world_size, cluster.network_bandwidth, cluster.measured) == (32, 25e9, (("gemm", 0.5),))
    file.write_text("gpu: h100-80g\nnodes: 4\n")
    with pytest.raises(ConfigError, match="it has nodes"):
        Cluster.from_file(file)


def test_sizes_of_the_batch() -> None:
    layout = Layout(
        tensor_parallel=8, pipeline_parallel=16, data_parallel=8, micro_batch_size=4, global_batch_size=2048
    )
    assert (layout.world_size, layout.micro_batches, layout.samples) == (1024, 64, 2048)  # pp adds no samples


def test_the_schedule_follows_from_the_chunks() -> None:
    assert Layout().schedule == "1f1b"
    assert Layout(pipeline_parallel=2, virtual_stages=2).schedule == "interleaved_1f1b"
    with pytest.raises(ConfigError, match="virtual_stages=2"):
        Layout(pipeline_parallel=2, virtual_stages=2, schedule="1f1b")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fp16 mixed", "16-mixed"),
        ("bf16", "bf16-mixed"),
        ("fp8 current scaling", "fp8"),
        ("float8", "fp8"),
        ("32", "32-true"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_precisions_are_found_as_people_write_them(text: str, found: str) -> None:
    assert Layout(precision=text).precision == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"tensor_parallel": 0},
        {"zero_stage": 4},
        {"schedule": "2f2b"},
        {"precision": "int4"},
        {"activation_checkpointing": "some"},
        {"data_parallel": 2, "global_batch_size": 3},
        {"data_parallel": 2, "expert_parallel": 4},
        {"offload": "disk"},
        {"reduce_dtype": "int8"},
    ],
)
def test_impossible_layouts_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Layout(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"layers": 0}, {"heads": 7}, {"kv_heads": 3}, {"norm": "batchnorm"}, {"experts": 4, "experts_per_token": 5}],
)
def test_impossible_shapes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ModelShape(**{"layers": 2, "hidden": 64, "heads": 4, **wrong})  # type: ignore[arg-type]
