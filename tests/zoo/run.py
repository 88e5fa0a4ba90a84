"""Training a zoo model at a layout, and what came of it against the stock Trainer in one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer
from tests.parity.record import Numbers, compare, run
from tests.zoo.models import BATCH, STEPS, data, make

LAYOUTS = ("tp2", "pp2", "pp2.tp2", "pp2.dp2.tp2")

# Over their batch as a whole, not sample by sample: there is one micro-batch, and one replica.
WHOLE_BATCH = {"clip"}
# Hugging Face computes these losses (and the norms of gemma) in float32 whatever the weights are: what differs is how
# single numbers round to it. Mixtral's experts have no kernel for float64.
ROUNDS = {
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gptj", "gpt_neox", "opt", "bloom",
    "falcon", "mamba", "modernbert",
}  # fmt: skip
SINGLE = {"mixtral"}


def tolerance(name: str) -> float:
    """By how much numbers of that model may differ, relative to one plus their size."""
    return 2e-5 if name in SINGLE else 1e-6 if name in ROUNDS else 1e-10


@dataclass(frozen=True)
class Outcome:
    """What a layout did with a model."""

    differences: dict[str, float]
    """Largest difference to one process by kind of number: logged, norm, gradient, weight, ..."""
    where: dict[str, str]
    """The number in which it is."""
    cut: float
    """Share of the parameters of rank 0 that tensor parallelism has cut, by size."""
    whole: tuple[str, ...] = ()
    """Linear layers, embeddings and attentions that every tensor-parallel rank holds whole, each with the reason."""
    blocks: tuple[int, ...] = ()
    """Blocks of every pipeline stage."""
    drift: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        return max(self.differences.values())


class _Witness(Callback):
    """Keeps what the strategy says of itself."""

    def __init__(self) -> None:
        self.whole: tuple[str, ...] = ()
        self.blocks: tuple[int, ...] = ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        self.whole = tuple(f"{layer.name}: {layer.note}" for layer in strategy._assembled.plan.replicated)
        self.blocks = tuple(len(chunk) for chunk in strategy.layout.chunks)


def sizes(layout: str) -> dict[str, int]:
    """Ranks along each axis that the layout names."""
    return {part[:2]: int(part[2:]) for part in layout.split(".")}


def world(layout: str) -> int:
    """Ranks of the layout."""
    size = 1
    for ranks in sizes(layout).values():
        size *= ranks
    return size


def _train(name: str, layout: str = "", callbacks: Sequence[Callback] = ()) -> Numbers:
    at, strategy = (sizes(layout) if layout else {}), None
    if layout:
        pp = at.get("pp", 1)
        strategy = ThreeDStrategy(
            tensor_parallel=at.get("tp", 1),
            pipeline_parallel=pp,
            num_micro_batches=1 if pp == 1 or name in WHOLE_BATCH else 2,
            timeout_s=60.0,
        )
    return run(
        functools.partial(make, name),
        data(name),
        replicas=at.get("dp", 1),
        strategy=strategy,
        devices=world(layout) if layout else 1,
        precision="32-true" if name in SINGLE else "64-true",
        callbacks=callbacks,
        steps=STEPS,
        global_batch=BATCH,
        limit_val_batches=1,
    )


def _rank(rank: int, size: int, name: str, layout: str) -> tuple[Numbers, Any]:
    witness = _Witness()
    return _train(name, layout, [witness]), (witness.whole, witness.blocks)


@functools.cache
def reference(name: str) -> Numbers:
    """The numbers of the stock Trainer in one process."""
    return _train(name)


def attempt(name: str, layout: str, timeout: float = 120.0) -> Outcome:
    """Train the model at the layout; whatever stops it is raised."""
    expected = reference(name)
    (first, (whole, blocks)), *others = run_trainer(world(layout), _rank, name, layout, timeout=timeout)
    drift = dict(first.drift)
    for other, _ in others:
        assert other.logged == first.logged, "ranks see other losses"
        drift.update(other.drift)
    found = compare(expected, first)
    return Outcome(
        {kind: difference.value for kind, difference in found.items()},
        {kind: difference.where for kind, difference in found.items()},
        first.cut["tp"],
        whole,
        blocks,
        drift,
    )
