"""What people type at the planner's commands: zeros, sizes that cannot be, names that are nearly right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lightning_3d.cli import main
from lightning_3d.errors import ConfigError
from lightning_3d.planner import Cluster, Layout, ModelShape, estimate, plan, preset

PLAN = ("plan", "--model", "gpt2-large", "--cluster", "a100-80g:2x8", "--global-batch", "64")
SIMULATE = ("simulate", "--stages", "4", "--micro-batches", "4")
RECIPE = """
model: {class_path: lightning_3d.models.GPT, init_args: {vocab_size: 64, width: 32, num_layers: 2, num_heads: 2}}
data: {class_path: lightning_3d.models.TokenFiles, init_args: {train: none-*.bin, sequence_length: 16}}
trainer: {max_steps: 1, strategy: {class_path: lightning_3d.ThreeDStrategy, init_args: {pipeline_parallel: 2}}}
"""


@pytest.fixture(autouse=True)
def as_from_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-3d"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((*PLAN, "--seq-len", "0"), "0 must be at least 1"),
        ((*PLAN, "--global-batch", "0"), "0 must be at least 1"),
        ((*PLAN, "--top", "0"), "0 must be at least 1"),
        ((*PLAN, "--top", "-3"), "-3 must be at least 1"),
        ((*PLAN, "--reserve-gb", "-100"), "-100 must not be negative"),
        ((*PLAN, "--reserve-gb", "100"), "between 0 and the 80 GB"),
        ((*PLAN, "--model.layer=3"), "Did you mean 'model.layers'"),
        ((*PLAN, "--model.layers=true"), "must be a whole number"),
        ((*PLAN, "--model.gated_mlp=3"), "must be true or false"),
        ((*PLAN, "--seq-len", "512", "--model.seq_len=256"), "differ"),
        ((*PLAN, "left-over"), "left-over belongs to no option"),
        ((*PLAN, "--micro-batch", "3"), "micro-batches of 3 do not divide the"),
        ((*PLAN, "--virtual-stages", "100"), "36 layers make at most 18"),
        ((*PLAN, "--virtual-stages", "2", "--schedule", "1f1b"), "1f1b cannot have 2 chunks per stage"),
        ((*PLAN, "--tp", "2", "--pp", "2", "--dp", "3"), "data_parallel=1 or 2 or 4"),
        ((*PLAN, "--write", "/tmp"), "this is a folder"),
        ((*PLAN, "--html", f"{__file__}/x.html"), "is a file, so nothing can lie below it"),
        (("plan", "--model", "torch.nn.Linear", *PLAN[3:]), "takes in_features, out_features, which are not given"),
        ((*SIMULATE, "--virtual-stages", "0"), "0 must be at least 1"),
        ((*SIMULATE, "--stages", "0"), "0 must be at least 1"),
        ((*SIMULATE, "--width", "0", "-o", "a.svg"), "0 must be above 0"),
        ((*SIMULATE, "-o", f"{__file__}/x.svg"), "is a file"),
        ((*SIMULATE, "--schedule", "zb_h2"), "by the formula of its bubble only"),
        (("dry-run", "--config", "r.yaml", "--world-size", "0"), "0 must be at least 1"),
        (("dry-run", "--config", "r.yaml", "--devices-per-node", "0"), "0 must be at least 1"),
        (("dry-run", "--config", "r.yaml", "--batch-size", "0"), "0 must be at least 1"),
        (("dryrun", "--config", "r.yaml"), "Did you mean 'dry-run'"),
    ],
)
def test_what_cannot_work_ends_with_2_and_the_reason(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(list(args))
    except SystemExit as ended:
        code = int(ended.code or 0)
    told = " ".join(capsys.readouterr().err.split())
    assert code == 2 and words in told, told


def test_a_model_of_a_name_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--model.layers=4", "--model.vocab", "50304", "--write", "r.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["model"]
    assert (found["layers"], found["vocab"]) == (4, 50304)
    text = Path("r.yaml").read_text()
    assert "#   lightning-3d dry-run --config r.yaml --cluster a100-80g:2x8" in text.splitlines()
    assert yaml.safe_load(text)["model"]["init_args"]["config"]["n_layer"] == 4


def test_a_recipe_runs_dry_before_its_data_is_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text(RECIPE)
    assert main(["dry-run", "--config", "r.yaml", "--world-size", "2", "--stages", "0", "--json"]) == 0
    told = capfd.readouterr()
    assert "--batch-shape 17:int64" in told.err
    assert json.loads(told.out)["layout"]["micro_batch_size"] == 1
    Path("none-1.bin").write_bytes(b"ab")  # there, but no sample long
    assert main(["dry-run", "--config", "r.yaml", "--world-size", "2"]) == 2
    told = capfd.readouterr()
    assert "--batch-shape" in told.err and "less than one sample" in told.err


def test_an_estimate_splits_layers_as_the_strategy_does() -> None:
    shape, cluster = preset("llama3-8b"), Cluster.parse("h100-80g:1x4")
    layout = Layout(pipeline_parallel=4, global_batch_size=32)
    assert tuple(layout.chunk_layers(shape)) == (8, 9, 9, 6)
    best = plan(shape, cluster, 32, fixed={"pipeline_parallel": 4, "tensor_parallel": 1}).best
    plain = Layout(pipeline_parallel=4, virtual_stages=best.layout.virtual_stages)
    assert tuple(best.layout.chunk_layers(shape)) == tuple(plain.chunk_layers(shape))
    even = Layout(pipeline_parallel=4, global_batch_size=32, pipeline_split="uniform")
    assert tuple(even.chunk_layers(shape)) == (8, 8, 8, 8)
    assert estimate(shape, cluster, even).step_time_s > 1.05 * estimate(shape, cluster, layout).step_time_s
    with pytest.raises(ConfigError, match="pipeline_split='even' is not known"):
        Layout(pipeline_split="even")


def test_interleaving_needs_chunks() -> None:
    with pytest.raises(ConfigError, match="Use virtual_stages=2 or more"):
        Layout(pipeline_parallel=2, schedule="interleaved_1f1b")


def test_the_first_is_not_on_the_edge_of_the_memory_for_nothing() -> None:
    shape = ModelShape(layers=32, hidden=4096, heads=32, vocab=51200, seq_len=2048)
    for name in ("a100-40g:2x8", "a100-80g:1x8", "h100-80g:1x8"):
        found = plan(shape, Cluster.parse(name), 128)
        everything = (*found.ranking, *found.variants)
        limit = 1.05 * min(one.estimate.step_time_s for one in everything)
        room = [one for one in everything if one.estimate.device_memory_gb <= 0.96 * found.usable_gb]
        if found.best not in room:
            assert not [one for one in room if one.estimate.step_time_s <= limit]
        passed = [one for one in found.ranking if one.estimate.step_time_s < 0.995 * found.best.estimate.step_time_s]
        assert all("less than the error of its prediction" in one.why for one in passed)
        assert not passed or "on paper" in found.reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_nodes: 2\n", "'gpu' is missing"),
        ("gpu: h100-80g\ninter_node_gbps: 200\n", "did you mean 'inter_node_Gbps'"),
    ],
)
def test_a_file_of_a_cluster(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Cluster.from_file(path)


def test_a_cluster_in_capitals() -> None:
    assert str(Cluster.parse("A100-80GB:2X8")) == "a100-80g:2x8"


def test_runs_of_other_systems_are_described_by_their_name() -> None:
    shape, old, new = preset("gpt3-175b"), Cluster.parse("a100-80g:128x8"), Cluster.parse("h100-80g:128x8")
    sizes = {"tensor_parallel": 8, "pipeline_parallel": 8, "data_parallel": 16, "global_batch_size": 1536}
    first = Layout.megatron(shape, old, **sizes, activation_checkpointing="full")
    assert not (first.flash_attention or first.sequence_parallel or first.overlap_grad_reduce or first.overlap_pipeline)
    assert first.pipeline_split == "uniform" and first.fused_loss and first.scatter_gather
    later = Layout.megatron(shape, new, **sizes, overlap_pipeline=False)
    assert later.flash_attention and later.sequence_parallel and later.overlap_tensor_parallel
    assert not later.overlap_pipeline and later.virtual_stages == 1
    sharded = Layout.fsdp(shape, new, data_parallel=1024, activation_checkpointing="selective")
    assert (sharded.zero_stage, sharded.activation_checkpointing) == (3, "operators")
    assert not (sharded.fused_loss or sharded.native_attention) and sharded.communicates_each_micro_batch
    with pytest.raises(TypeError, match="tensor_paralel"):
        Layout.megatron(shape, new, tensor_paralel=8)
