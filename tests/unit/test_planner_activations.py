"""What a layer keeps for its backward: the table of operations, and the dry run that counts tensors."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_3d import ThreeDStrategy
from lightning_3d.config import Sizes
from lightning_3d.dry_run import Batch, Job, dry_run
from lightning_3d.dry_run.comparison import compare
from lightning_3d.initialization import deferring
from lightning_3d.models import GPT, CausalLM
from lightning_3d.planner import Cluster, Layout, preset
from lightning_3d.planner.activations import eager_activations
from lightning_3d.planner.reading import shape_of_config, shape_of_module


def test_a_llama_of_transformers_keeps_norms_in_float32_and_four_inner_tensors() -> None:
    shape = preset("llama3-8b")
    h, q, kv, f = shape.hidden, shape.query_width, shape.kv_width, shape.ffn_width
    cut = 4 * q + 4 * kv + 8 * f + 4 * shape.heads
    norms = 2 * (4 + 2 + 2) * h  # its input in float32, normalised in 16 bits, times the weight
    for precision in ("bf16-mixed", "bf16-true"):
        layout = Layout(precision=precision, global_batch_size=1)
        assert eager_activations(shape, layout) == shape.seq_len * (norms + cut)
    whole = Layout(tensor_parallel=4, global_batch_size=1)
    assert eager_activations(shape, whole) == shape.seq_len * (norms + cut / 4)
    pieces = Layout(tensor_parallel=4, sequence_parallel=True, global_batch_size=1)
    assert eager_activations(shape, pieces) == shape.seq_len * (norms + cut) / 4
    assert eager_activations(shape, pieces, recomputed=True) == shape.seq_len * 2 * h / 4


def test_autocast_widens_layer_norms_and_bloom_keeps_its_scores() -> None:
    shape = preset("bloom-176b", dropout=False)
    h, f, a, s = shape.hidden, shape.ffn_width, shape.heads, shape.seq_len
    block = 2 * (3 * h + h) + 6 * a * s + 4 * f  # queries, keys, values and output; softmax twice; GELU
    mixed, true = (Layout(precision=precision, global_batch_size=1) for precision in ("bf16-mixed", "bf16-true"))
    assert eager_activations(shape, mixed) == s * (2 * (4 + 2) * h + block)
    assert eager_activations(shape, true) == s * (2 * (2 + 2) * h + block)
    with_dropout = preset("bloom-176b")
    assert eager_activations(with_dropout, true) - eager_activations(shape, true) == s * (2 * h + a * s)
    assert eager_activations(shape, mixed, recomputed=True) == s * 4 * h  # the norm behind the embedding is in float32


def test_gelu_written_out_keeps_four_times_as_much() -> None:
    shapes = [
        shape_of_config(
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 32,
             "resid_pdrop": 0.0, "activation_function": name}
        )
        for name in ("gelu_pytorch_tanh", "gelu_new")
    ]  # fmt: skip
    one, seven = (eager_activations(shape, Layout(global_batch_size=1)) for shape in shapes)
    assert seven - one == 32 * (16 - 4) * 256


LENGTH, WIDTH = 128, 128


def llama(**others: Any) -> CausalLM:
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": WIDTH, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 352, "vocab_size": 64, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return CausalLM({**config, **others})


def bloom() -> CausalLM:
    return CausalLM({"model_type": "bloom", "n_layer": 4, "hidden_size": WIDTH, "n_head": 8, "vocab_size": 64})


def gpt() -> GPT:
    return GPT(
        num_layers=4, width=WIDTH, num_heads=8, sequence_length=LENGTH, vocab_size=64, dropout=0.1, build_late=True
    )


@pytest.mark.parametrize(
    ("make", "tp", "precision", "sequence_parallel"),
    [
        (llama, 2, "bf16-mixed", True),
        (bloom, 2, "bf16-mixed", False),
        pytest.param(gpt, 2, "bf16-true", True, marks=pytest.mark.long),
        pytest.param(gpt, 1, "bf16-mixed", False, marks=pytest.mark.long),
        pytest.param(llama, 1, "bf16-true", False, marks=pytest.mark.long),
    ],
)
def test_the_planner_counts_the_tensors_of_the_dry_run(
    make: Any, tp: int, precision: Any, sequence_parallel: bool
) -> None:
    """Within 10 %, on the first stage: small tables of positions and means of norms are not in the planner's table."""
    strategy = ThreeDStrategy(
        tensor_parallel=tp, pipeline_parallel=2, data_parallel=2, num_micro_batches=4, schedule="1f1b",
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=4 * tp, strategy=strategy, precision=precision, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with deferring(1, draws=False):
        module = make()
        module.configure_model()
    batch = Batch(torch.zeros(1, LENGTH + 1, dtype=torch.long), 4)
    job = Job(trainer=trainer, module=module, sizes=Sizes(pp=2, dp=2, tp=tp), batch=batch, on_gpus=True)
    comparison = compare(job, dry_run(job, stages=[0]), Cluster.parse(f"a100-80g:1x{4 * tp}"))
    [counted], [found] = comparison.estimated, comparison.found
    assert counted["activations"] == pytest.approx(found["activations"], rel=0.1)


def test_attention_that_is_asked_to_compute_its_scores_is_read_off_the_module() -> None:
    module = llama(attn_implementation="eager")
    with torch.device("meta"):
        module.configure_model()
    assert shape_of_module(module).scores
