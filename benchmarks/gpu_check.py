"""One GPU: the quickstart's GPT and a Llama of 1.2 billion parameters, beside the stock Trainer.

``python benchmarks/gpu_check.py`` takes under five minutes on one H200. Every run trains a few steps in processes of
its own, in bf16-mixed: the stock Trainer, this package in one process, and this package with several ranks on the one
card, which talk over gloo (NCCL refuses to share a card). Their losses are compared with the stock Trainer's; step
time, model FLOPs utilisation and peak memory stand beside. Ranks that share a card also share its arithmetic, and their
messages pass through the host, so only the runs in one process say something about speed.

``--device cpu --tiny`` runs the same on a machine without a GPU, with models of a few kilobytes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: the repository is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.models import GPT
from tests.harness import RankFailure, run_trainer

PEAK_FLOPS = 989e12
"""Dense bfloat16 of an H100 or H200, in FLOP/s (NVIDIA's data sheet, without sparsity)."""
WARM_UP = 3
"""Steps that are not timed."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    name: str
    kind: str
    """``"gpt"`` or ``"llama"``."""
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    """Width of the MLP (of a Llama; a GPT's is four times its width)."""
    vocabulary: int
    length: int
    """Tokens of a sample."""
    batch: int
    """Samples per optimizer step."""

    def build(self) -> LightningModule:
        """The module, on the default device."""
        if self.kind == "gpt":
            return GPT(
                num_layers=self.layers,
                width=self.width,
                num_heads=self.heads,
                sequence_length=self.length,
                vocab_size=self.vocabulary,
                warmup_steps=2,
                learning_rate=1e-3,
            )
        return Llama(self)

    def flops(self, module: nn.Module) -> float:
        """FLOPs of a step, forward and backward: 6 per weight and token, and attention's 12 * layers * width * length.

        A weight that is only looked up counts for nothing; a causal mask saves nothing (the usual convention, that of
        the PaLM paper, appendix B).
        """
        weights = sum(parameter.numel() for parameter in module.parameters())
        if self.kind == "gpt":  # its head is a matrix of its own
            weights -= self.vocabulary * self.width
        per_token = 6 * weights + 12 * self.layers * self.width * self.length
        return float(per_token * self.batch * self.length)


class Llama(LightningModule):
    """Hugging Face's Llama with its own loss, and AdamW."""

    def __init__(self, sizes: Model) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=sizes.vocabulary,
                hidden_size=sizes.width,
                intermediate_size=sizes.inner,
                num_hidden_layers=sizes.layers,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.kv_heads,
                max_position_embeddings=sizes.length,
                tie_word_embeddings=True,
                use_cache=False,
                attn_implementation="sdpa",
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, betas=(0.9, 0.95))


MODELS = (
    Model(
        name="quickstart GPT", kind="gpt", layers=4, width=128, heads=4, kv_heads=4, inner=512, vocabulary=256,
        length=128, batch=16,
    ),
    Model(  # the shape of Llama 3.2 1B
        name="Llama 1B", kind="llama", layers=16, width=2048, heads=32, kv_heads=8, inner=8192, vocabulary=128_256,
        length=2048, batch=4,
    ),
)  # fmt: skip
TINY = (
    Model(
        name="tiny GPT", kind="gpt", layers=2, width=32, heads=4, kv_heads=4, inner=128, vocabulary=64, length=16,
        batch=8,
    ),
    Model(
        name="tiny Llama", kind="llama", layers=2, width=32, heads=4, kv_heads=2, inner=64, vocabulary=96, length=16,
        batch=4,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """How it is trained."""

    name: str
    ranks: int
    options: dict[str, Any] | None
    """Of :class:`ThreeDStrategy`; ``None``: the stock Trainer."""
    tolerance: float
    """By how much a loss may differ from the stock Trainer's, relative."""


RUNS = (
    Run(name="stock Trainer", ranks=1, options=None, tolerance=0.0),
    Run(name="3d, 1 rank", ranks=1, options={}, tolerance=1e-3),
    Run(name="tp2", ranks=2, options={"tensor_parallel": 2}, tolerance=2e-2),
    Run(name="dp2, ZeRO 0", ranks=2, options={"zero_stage": 0}, tolerance=2e-2),
    Run(name="pp2, 4 micro-batches", ranks=2, options={"pipeline_parallel": 2, "num_micro_batches": 4}, tolerance=2e-2),
    Run(
        name="pp2 tp2",
        ranks=4,
        options={"pipeline_parallel": 2, "tensor_parallel": 2, "num_micro_batches": 4},
        tolerance=2e-2,
    ),
)


@dataclass
class Result:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of every timed step."""
    peak_bytes: int = 0
    flops: float = 0.0


class _Meter(Callback):
    def __init__(self, device: str) -> None:
        self.result = Result()
        self._device = device
        self._start = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = self._now()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.result.seconds.append(self._now() - self._start)
        # What was logged is the loss of the whole batch; what the step returned, that of this replica's share.
        self.result.losses.append(float(trainer.callback_metrics["train_loss"]))

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(rank: int, world_size: int, model: Model, run: Run, device: str, steps: int) -> Result:
    """On a rank: train, and say what it took."""
    warnings.filterwarnings("ignore", ".*(does not have many workers|treespec, LeafSpec).*")
    if device == "cpu":
        torch.set_num_threads(1)
    seed_everything(3, verbose=False)
    with torch.device(device):
        module = model.build()
    flops = model.flops(module)
    generator = torch.Generator().manual_seed(5)
    samples = torch.randint(model.vocabulary, (2 * model.batch, model.length + 1), generator=generator)
    if model.kind == "llama":
        samples = samples[:, : model.length]
    data: Any = [samples[i % len(samples)] for i in range(model.batch * (steps + 1))]
    strategy: Any = "auto"
    if run.options is not None:
        strategy = ThreeDStrategy(
            global_batch_size=model.batch,
            # Ranks on one card are, for Lightning, nodes of one card each.
            allow_tp_across_nodes=True,
            process_group_backend="gloo",
            **run.options,
        )
    meter = _Meter(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        num_nodes=world_size,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[meter],
    ).fit(module, DataLoader(data, batch_size=model.batch))
    result = meter.result
    result.seconds = result.seconds[WARM_UP:]
    result.flops = flops
    result.peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return result


_COLUMNS = (
    ("model", 15), ("run", 21), ("ms/step", 9), ("/stock", 7), ("MFU", 6), ("peak GB per rank", 21), ("/stock", 7),
    ("first loss", 10), ("last loss", 10), ("differs by", 10), ("", 6),
)  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip()


def _row(model: Model, run: Run, results: list[Result], stock: list[Result] | None, device: str) -> tuple[str, bool]:
    """A line of the table, and whether the losses agree."""
    mine = results[0]
    seconds = statistics.median(mine.seconds)
    reference = mine if stock is None else stock[0]
    difference = max(abs(a - b) / abs(b) for a, b in zip(mine.losses, reference.losses, strict=True))
    agrees = difference <= run.tolerance
    peaks = [result.peak_bytes / 1e9 for result in results]
    cells = [
        model.name,
        run.name,
        f"{1e3 * seconds:.1f}",
        f"{seconds / statistics.median(reference.seconds):.2f}",
        f"{mine.flops / seconds / PEAK_FLOPS:.1%}" if device == "cuda" else "-",
        " ".join(f"{peak:.2f}" for peak in peaks) if device == "cuda" else "-",
        f"{max(peaks) / (reference.peak_bytes / 1e9):.2f}" if device == "cuda" else "-",
        f"{mine.losses[0]:.4f}",
        f"{mine.losses[-1]:.4f}",
        f"{difference:.1e}",
        "ok" if agrees else "WRONG",
    ]
    return _line(cells), agrees


def check(device: str, tiny: bool, steps: int, limit_s: float, only: Sequence[str] = ()) -> int:
    """Train everything and print the table.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        tiny: Take models of a few kilobytes.
        steps: Optimizer steps of every run.
        limit_s: Seconds for everything; runs that would start later are left out.
        only: Beginnings of the names of the runs to make, beside the stock Trainer's.

    Returns:
        The exit code: 0 if all runs were made and all losses agree.
    """
    deadline = time.monotonic() + limit_s
    where = "cpu"
    if device == "cuda":
        # In a process of its own: this one must not start CUDA, or no rank could be forked from its server.
        where = run_trainer(1, _device_name, timeout=60)[0]
    print(
        f"{datetime.date.today()}, {where}, torch {torch.__version__}, bf16-mixed, medians of {steps - WARM_UP} steps"
    )
    print(_line([name for name, _ in _COLUMNS]))
    failed = False
    for model in TINY if tiny else MODELS:
        stock: list[Result] | None = None
        for run in RUNS:
            if only and run.options is not None and not run.name.startswith(tuple(only)):
                continue
            left = deadline - time.monotonic()
            if left < 10:
                print(_line([model.name, run.name, "left out: out of time", *[""] * (len(_COLUMNS) - 3)]))
                failed = True
                continue
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    results: list[Result] = run_trainer(
                        run.ranks, train, model, run, device, steps, num_nodes=run.ranks, timeout=min(left, 90.0)
                    )
            except RankFailure as error:
                print(_line([model.name, run.name, "FAILED", *[""] * (len(_COLUMNS) - 3)]))
                print(f"{error}\n{printed.getvalue()[-2000:]}", file=sys.stderr)
                failed = True
                continue
            line, agrees = _row(model, run, results, stock, device)
            print(line, flush=True)
            failed |= not agrees
            stock = results if run.options is None else stock
    return int(failed)


def _device_name(rank: int, world_size: int) -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a few kilobytes")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of every run (10)")
    parser.add_argument("--limit", type=float, default=285.0, help="seconds for everything (285)")
    parser.add_argument("--runs", nargs="*", default=(), help="beginnings of the names of the runs to make")
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that are not timed")
    return check(options.device, options.tiny, options.steps, options.limit, options.runs)


if __name__ == "__main__":
    from benchmarks import gpu_check  # under its own name, so that the ranks find what they are to run

    sys.exit(gpu_check.main())
