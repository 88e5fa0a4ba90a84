"""Dropout: reproducible, the same on ranks that hold the same activations, different on all others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from tests.harness import run_trainer
from tests.parity.record import assert_parity, compare
from tests.parity.table import Row, run_parallel

SAMPLES, TOKENS, WIDTH, INNER = 4, 8, 16, 32


def test_the_same_seed_and_layout_give_the_same_bits_and_recomputation_repeats_them() -> None:
    first = run_parallel(Row.parse("gpt pp2.tp2 1f1b 2 - 64-true dropout sp"))
    again = run_parallel(Row.parse("gpt pp2.tp2 1f1b 2 - 64-true dropout sp"))
    assert_parity(compare(first, again), again, tolerance=0.0)
    recomputed = run_parallel(Row.parse("gpt pp2.tp2 1f1b 2 - 64-true dropout sp recompute"))
    assert_parity(compare(first, recomputed), recomputed, tolerance=0.0)


def test_dropout_does_not_depend_on_where_the_pipeline_is_cut_nor_on_the_schedule_nor_on_zero() -> None:
    whole = run_parallel(Row.parse("gpt dp2 - 3 0 64-true dropout"))
    for line in ("gpt pp2.dp2 gpipe 3 1 64-true dropout", "gpt pp2.dp2 inter2 3 3 64-true dropout recompute"):
        cut = run_parallel(Row.parse(line))
        assert_parity(compare(whole, cut), cut, tolerance=1e-10)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_are_equal_where_activations_are_and_differ_elsewhere(sequence_parallel: bool) -> None:
    check_masks(run_trainer(4, masks_of_rank, sequence_parallel, None), sequence_parallel)


# --- which elements a step drops ------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.inside = nn.Dropout(0.5)
        self.down = nn.Linear(INNER, WIDTH)
        self.after = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.down(self.inside(torch.nn.functional.gelu(self.up(self.norm(x))))))


class _Probe(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, WIDTH)
        self.before = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.before(self.embedding(batch))
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Masks(Callback):
    """By layer, what its dropout kept in every micro-batch of a run."""

    def __init__(self, damage: Callable[[Trainer], None] | None) -> None:
        self.found: dict[str, list[Tensor]] = {}
        self._damage = damage

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._damage is not None:
            self._damage(trainer)
        for name, layer in pl_module.named_modules():
            if isinstance(layer, nn.Dropout):

                def keep(_: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                    self.found.setdefault(name, []).append(output.detach() != 0)

                layer.register_forward_hook(keep)


def masks_of_rank(
    rank: int, world: int, sequence_parallel: bool, damage: Callable[[Trainer], None] | None
) -> tuple[dict[str, int], dict[str, list[Tensor]]]:
    """Where the rank stands at dp2·tp2, and the masks of two batches of two micro-batches, all of the same sample."""
    seed_everything(5, verbose=False)
    masks = _Masks(damage)
    strategy = ThreeDStrategy(tensor_parallel=2, num_micro_batches=2, sequence_parallel=sequence_parallel)
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[masks],
    )
    trainer.fit(_Probe(), DataLoader([torch.arange(TOKENS) % 4] * 2 * SAMPLES, batch_size=SAMPLES // 2))
    return strategy.topology.coordinates, masks.found


def check_masks(ranks: list[tuple[dict[str, int], dict[str, list[Tensor]]]], sequence_parallel: bool) -> None:
    """Assert which masks are equal: those of activations that tensor-parallel ranks both hold whole."""
    layers = ["before", *(f"blocks.{i}.{name}" for i in range(2) for name in ("inside", "after"))]
    drawn: dict[tuple[Any, ...], Tensor] = {}
    for where, masks in ranks:
        assert list(masks) == layers
        for layer, found in masks.items():
            assert len(found) == 4  # two batches of two micro-batches
            for index, mask in enumerate(found):
                assert 0.3 < float(mask.float().mean()) < 0.7
                drawn[layer, where["dp"], index, where["tp"]] = mask
    whole = ["before"] if sequence_parallel else ["before", "blocks.0.after", "blocks.1.after"]
    for layer in whole:
        for key in [key for key in drawn if key[0] == layer and key[3] == 0]:
            assert torch.equal(drawn[key], drawn[(*key[:3], 1)]), f"{layer} drops other elements on the ranks of tp"
    streams = {key: mask for key, mask in drawn.items() if key[0] not in whole or key[3] == 0}
    for one, other in combinations(streams, 2):
        if streams[one].shape == streams[other].shape:
            assert not torch.equal(streams[one], streams[other]), f"{one} and {other} drop the same elements"
