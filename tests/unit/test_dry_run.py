"""The dry run's nouns: worlds without ranks, tensors without memory, what is counted, and errors before the cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d import ThreeDStrategy, tensor_parallel
from lightning_3d.cli import main
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.dry_run import Batch, Job, Record, dry_run, job
from lightning_3d.dry_run.allocations import Allocations, Moment
from lightning_3d.dry_run.gpu_operations import as_on_gpus
from lightning_3d.dry_run.memoryless import Memoryless
from lightning_3d.dry_run.traffic import Message
from lightning_3d.dry_run.verdicts import compare_blocks
from lightning_3d.dry_run.watch import Watch
from lightning_3d.dry_run.world import group_names, standing_in
from lightning_3d.errors import ConfigError
from lightning_3d.initialization import deferring
from lightning_3d.models import GPT
from lightning_3d.sharding import ZERO_RULES
from lightning_3d.tensor_parallel.collectives import scatter_to_sequence
from lightning_3d.trainer.setup.choice import Choice, Circumstances


def recipe(folder: Path, trainer: str = "", model: str = "", strategy: str = "") -> str:
    """A recipe of a small GPT at pp2 dp2 tp2; further options by part."""
    path = folder / "recipe.yaml"
    path.write_text(f"""
trainer:
  devices: 8
  max_steps: 10
  {trainer}
  strategy:
    class_path: lightning_3d.ThreeDStrategy
    init_args: {{tensor_parallel: 2, pipeline_parallel: 2, num_micro_batches: 8, {strategy}}}
model:
  class_path: lightning_3d.models.GPT
  init_args: {{num_layers: 4, width: 32, num_heads: 4, sequence_length: 16, vocab_size: 64, {model}}}
""")
    return str(path)


BATCH = ["--batch-shape", "17:int64", "--batch-size", "8"]


def test_a_rank_of_eight_thousand_is_stood_in_for_at_once() -> None:
    with standing_in(Sizes(pp=64, dp=16, tp=8), 8 * 16 * 5 + 8 * 3 + 2) as mesh:
        assert mesh.coordinates == {"pp": 5, "dp": 3, "tp": 2}
        assert mesh.pp.ranks[:2] == (26, 154)
        assert mesh.device_mesh is not None and mesh.device_mesh["dp"].size() == 16
        assert mesh.control_world.group is None
        assert set(group_names(mesh).values()) == {"pp", "dp", "tp", "model", "world"}


def test_a_piece_of_a_sequence_does_not_keep_the_whole_in_memory() -> None:
    with standing_in(Sizes(pp=1, dp=1, tp=2), 0) as mesh:
        piece = scatter_to_sequence(torch.zeros(1, 8, 4, requires_grad=True), mesh.tp, 1)
    assert piece.shape == (1, 4, 4) and piece.untyped_storage().nbytes() == 4 * 4 * 4


def test_large_tensors_have_no_memory_and_small_ones_have_values() -> None:
    memoryless = Memoryless()
    with memoryless:
        large = torch.ones(10**6, 10**6)  # 4 TB
        small = torch.tensor([3])
        assert (large @ large.t()).shape == (10**6, 10**6)
        assert int(small + 1) == 4
        assert float(large.sum()) == 0.0
    assert sum(memoryless.reads.values()) == 1 and "test_dry_run.py" in next(iter(memoryless.reads))


def test_a_shape_that_depends_on_values_is_refused_with_its_line() -> None:
    with Memoryless(), pytest.raises(ConfigError, match=r"test_dry_run.py:\d+ makes a tensor whose shape depends"):
        torch.ones(100).nonzero()


def test_positions_have_values_and_masks_made_of_them_none() -> None:
    """Transformers looks whether positions count up by ones, and leaves the causal mask to the kernel if they do."""
    with Memoryless():
        positions = torch.arange(2048)[None]
        assert not isinstance(positions, FakeTensor) and bool((positions.diff() == 1).all())
        assert isinstance(positions[0, :, None] >= positions, FakeTensor)  # 4M elements
        assert isinstance(torch.arange(2**21), FakeTensor)


def kept(run: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[torch.dtype, int]]:
    """Types and bytes of storages that the backward of ``run`` holds, without its input's."""
    found: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(id(t.untyped_storage()), t), lambda t: t):
        result = run(x)
    del result
    return sorted(
        (
            (t.dtype, t.untyped_storage().nbytes())
            for t in found.values()
            if t.untyped_storage() is not x.untyped_storage()
        ),
        key=str,
    )


def test_on_gpus_norms_keep_float32_dropout_keeps_masks_and_attention_no_scores() -> None:
    x = torch.randn(2, 4, 32, 8, dtype=torch.bfloat16, requires_grad=True)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "norm": lambda x: F.layer_norm(x, (8,)),
        "dropout": lambda x: F.dropout(x, 0.5),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
    }
    found = {}
    for on_gpus in (False, True):
        with as_on_gpus() if on_gpus else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            found[on_gpus] = {name: sum(size for _, size in kept(run, x)) for name, run in runs.items()}
    elements, rows = x.numel(), x.numel() // 8
    assert found[True]["norm"] == 4 * elements + 2 * 4 * rows
    assert found[True]["dropout"] == elements and found[False]["dropout"] == 2 * elements
    assert found[True]["attention"] == 2 * elements + 4 * rows < found[False]["attention"]


def test_allocations_follow_what_is_freed_and_resized() -> None:
    allocations = Allocations()
    with allocations.watching():
        kept, gone = torch.zeros(100), torch.zeros(1000)
        allocations.see(kept, "parameters")
        allocations.begin(Moment("F", 0, 0))
        allocations.see(gone)
        assert allocations.now == 4400
        gone.untyped_storage().resize_(0)
        assert allocations.now == 400
        allocations.begin(Moment("B", 0, 0))
        gone.untyped_storage().resize_(40)
        del gone
        assert allocations.now == 400
    peak = allocations.peak(0)
    assert peak.total == 4400 and peak.when == "F0.0"
    assert peak.by_kind["parameters"] == 400 and peak.by_kind["activations"] == 4000
    assert [held for _, held in allocations.timeline()] == [400, 4400, 440]


def test_a_ring_sends_what_the_formulas_say() -> None:
    """2 (n-1)/n of an all-reduce, (n-1)/n of an all-gather or a reduce-scatter, all of a message."""
    sent = {name: Message("dp", name, 800, 8).sent_bytes for name in ("all_reduce", "all_gather", "reduce_scatter")}
    assert sent == {"all_reduce": 1400, "all_gather": 700, "reduce_scatter": 700}
    assert Message("pp", "send", 800, 8).sent_bytes == 800


def test_operations_and_collectives_are_counted_once() -> None:
    with standing_in(Sizes(pp=1, dp=2, tp=4), 0) as mesh:
        watch = Watch(group_names(mesh))
        with Memoryless(), watch.watching():
            x = torch.empty(64, 32, requires_grad=True)
            y = x @ torch.empty(32, 16)
            torch.distributed.all_reduce(y.detach(), group=mesh.tp.group)
            y.sum().backward()
    assert sum(watch.flops.values()) == 2 * 2 * 64 * 32 * 16
    assert list(watch.traffic.values()) == [{Message("tp", "all_reduce", 64 * 16 * 4, 4): 1}]


def counted(found: dict[str, Any], stage: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Times and bytes by axis and operation."""
    messages = found["stages"][stage]["messages"]
    return {(item["axis"], item["operation"]): (item["count"], item["bytes"]) for item in messages}


@pytest.mark.parametrize("zero_stage", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_messages_and_arithmetic_are_those_of_the_formulas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], zero_stage: int
) -> None:
    """tp: 4 sums of bsh per block and micro-batch (Narayanan et al. 2021, 3.2); pp: bsh per cut, micro-batch and
    direction; dp: ZERO_RULES; FLOPs: 6 per weight and token, and 12 L s h per token of attention."""
    layers, width, length, vocab, count = 4, 32, 16, 64, 8
    path = recipe(tmp_path, strategy=f"zero_stage: {zero_stage}, schedule: 1f1b")
    assert main(["dry-run", "--config", path, "--cluster", "a100-80g:1x8", "--json", *BATCH]) == 0
    found = json.loads(capsys.readouterr().out)
    hidden = length * width * 4
    first, last = counted(found, 0), counted(found, 1)
    blocks = layers // 2
    assert first["tp", "all_reduce"][1] == count * hidden * (4 * blocks + 1)  # and what the embedding gives
    assert first["pp", "send"] == first["pp", "receive"] == (count, count * hidden)
    assert last["pp", "send"] == last["pp", "receive"] == (count, count * hidden)
    assert last["tp", "all_gather"] == (count, count * length * vocab * 4)  # of the logits
    weights = 4 * found["stages"][0]["parameters"]
    expected = ZERO_RULES[zero_stage].collectives(units=1, micro_batches=count)
    assert first["dp", "all_gather"] == (expected["all_gather"], expected["all_gather"] * weights)
    assert first["dp", "reduce_scatter"] == (expected["reduce_scatter"], expected["reduce_scatter"] * weights)
    tokens, matrices = count * length, 12 * width * width
    block = 6 * matrices * tokens + 12 * length * width * tokens
    # FLOPs of the attention of a CPU: its backward computes the scores once more.
    block += 2 * length * width * tokens
    flops = [stage["flops"] for stage in found["stages"]]
    assert flops == [blocks * block // 2, (blocks * block + 6 * width * vocab * tokens) // 2]
    stage = found["stages"][0]
    assert stage["micro_batches"] == 8 and stage["micro_batches_run"] == 5
    assert stage["peak_bytes"] == sum(stage["memory"].values())
    assert found["comparison"]["fits"] is True and len(found["comparison"]["estimated"]) == 2


def records(
    pp: int, options: dict[str, Any], stages: list[int], on_gpus: bool = False, precision: Any = "bf16-mixed"
) -> list[Record]:
    """Steps of ten micro-batches on ``pp`` stages and two replicas."""
    with deferring(1, draws=False):
        module = GPT(num_layers=4, width=32, num_heads=2, sequence_length=16, vocab_size=64)
    strategy = ThreeDStrategy(pipeline_parallel=pp, data_parallel=2, micro_batch_size=1, **options)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2 * pp, strategy=strategy, precision=precision, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batch = Batch(torch.zeros(1, 17, dtype=torch.long), 10)
    made = Job(trainer=trainer, module=module, sizes=Sizes(pp=pp, dp=2, tp=1), batch=batch, on_gpus=on_gpus)
    return [stage.record for stage in dry_run(made, stages=stages).stages]


RECOMPUTED = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("pp", "options", "on_gpus", "stages", "runs"),
    [
        pytest.param(4, RECOMPUTED, False, [0, 3], 5, marks=pytest.mark.long),
        (4, RECOMPUTED, True, [0, 3], 5),
        (2, {"schedule": "interleaved_1f1b", "virtual_stages": 2}, False, [0, 1], 6),
        pytest.param(4, {"zero_stage": 3}, False, [0, 1, 3], 5, marks=pytest.mark.long),
    ],
    ids=["recomputed", "on gpus", "interleaved", "zero 3"],
)
def test_short_steps_tell_whole_ones_to_the_byte(
    monkeypatch: pytest.MonkeyPatch, pp: int, options: dict[str, Any], on_gpus: bool, stages: list[int], runs: int
) -> None:
    """Ten micro-batches. Of four stages the first runs steps of five and six, with one and two ahead, not three."""
    short = records(pp, options, stages, on_gpus)
    monkeypatch.setattr(job, "_whole", lambda here, config, pieces, step, bound: step(pieces.count))
    whole = records(pp, options, stages, on_gpus)
    assert short[0].micro_batches_run == runs
    assert all(record.micro_batches_run == 10 for record in whole)
    losses = 8 * (10 - runs) if "schedule" in options else 0  # of interleaved steps those left out are not added
    for some, every in zip(short, whole, strict=True):
        assert 0 <= every.pipeline.total - some.pipeline.total <= losses
        assert some.outside.total == every.outside.total
        assert some.work == every.work


def test_nccl_knows_when_a_message_has_arrived_and_gloo_does_not() -> None:
    """Hidden states of 16 tokens in 16 bits; of the gradients that gloo sends one for each stage is held."""
    [by_gloo], [by_nccl] = (records(4, RECOMPUTED, [3], on_gpus, "bf16-true") for on_gpus in (False, True))
    assert by_gloo.pipeline.total - by_nccl.pipeline.total == 4 * 16 * 32 * 2
    assert by_gloo.work == by_nccl.work


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "zero_stage: 1, virtual_stages: 2"}, "virtual_stages=2 needs a schedule"),
        ({"model": "", "strategy": "data_parallel: 3"}, "the world has 8 ranks"),
        ({"strategy": "pipeline_split: [1, 2]"}, "pipeline_split"),
        ({"strategy": "tp_plan: {'*.nowhere': colwise}"}, "nowhere"),
        ({"strategy": "tp_plan: {'*.qkv': 'colwise:2', '*.proj': rowwise}"}, "changes its numbers"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str], said: str
) -> None:
    assert main(["dry-run", "--config", recipe(tmp_path, **options), *BATCH]) == 2
    assert said in capsys.readouterr().err


def test_blocks_too_large_to_be_compared_here_are_told() -> None:
    with deferring(1, draws=False):
        module = GPT(num_layers=2, width=1024, num_heads=8, sequence_length=16, vocab_size=64)
    config = ParallelConfig(tensor_parallel=8)
    plan = tensor_parallel.plan(module, [["blocks.0", "blocks.1"]], config, 8)
    found = compare_blocks(module, plan, 10.0)
    assert found.found is None and "blocks of 12,592,128 parameters" in found.note and "doctor" in found.note


def test_sizes_left_to_the_planner_are_those_that_it_chooses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(recipe(tmp_path))
    path.write_text(path.read_text().replace("tensor_parallel: 2, pipeline_parallel: 2, ", ""))
    assert main(["dry-run", "--config", str(path), "--world-size", "4", *BATCH, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["sizes"] == {"pp": 1, "dp": 4, "tp": 1}
    assert "left 'auto' and taken to be 1: tensor_parallel, pipeline_parallel" in told.err

    def chosen(module: pl.LightningModule, config: ParallelConfig, given: Circumstances) -> Choice:
        assert given.trains and given.is_known and given.cluster.world_size == 4
        return Choice(Sizes(pp=2, dp=1, tp=2), "for a reason")

    monkeypatch.setattr("lightning_3d.cli.dry_run.choose", chosen)
    assert main(["dry-run", "--config", str(path), "--cluster", "a100-80g:1x4", *BATCH, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["sizes"] == {"pp": 2, "dp": 1, "tp": 2}
    assert "note: for a reason" in told.err


def test_a_batch_is_described_by_name() -> None:
    from lightning_3d.cli.dry_run import _described

    batch = _described("input_ids=7:int64,image=3x4x4:float32")
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == {
        "input_ids": ((1, 7), torch.int64),
        "image": ((1, 3, 4, 4), torch.float32),
    }
    assert isinstance(_described("5:int64"), Tensor)
    with pytest.raises(ConfigError, match="must be the shape of a sample"):
        _described("5:strings")
