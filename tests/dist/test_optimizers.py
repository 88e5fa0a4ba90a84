"""Every optimizer, scheduler and optimizer hook of ``optimizer_cases`` trains as in one process, to 1e-10."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_3d import BatchScaledLR, ConfigError
from tests.dist.lightning_modules import (
    Mesh,
    Tokens,
    differences,
    loader,
    make_trainer,
    numbers,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)
from tests.dist.optimizer_cases import HOOKS, OPTIMIZERS, RETURNS, SCHEDULERS, Optimized, ScaledAdafactor

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: (partial(Optimized, make), {"gradient_clip_val": 1.0})
        for name, make in {**OPTIMIZERS, **RETURNS, **SCHEDULERS}.items()
    },
    **HOOKS,
}


def train(name: str, mesh: Mesh | None, zero_stage: int = 1) -> tuple[dict[str, float], dict[str, Any], str]:
    """Metrics, weights, and the options of every parameter group at every step."""
    make, options = CASES[name]
    trainer = make_trainer(mesh, {"zero_stage": zero_stage}, max_epochs=1 if name in OPTIMIZERS else 2, **options)
    module = seeded(make)
    watched = loader(rows(4, seed=3), 4, mesh) if name == "plateau" else None
    trainer.fit(module, loader(rows(12), 4, mesh), watched)
    return numbers(trainer.callback_metrics), whole_weights(trainer), repr(module.used)


def train_all(mesh: Mesh, names: Sequence[str], first_stage: int) -> dict[str, Any]:
    """One run after the other, each at another ZeRO stage."""
    return {name: train(name, mesh, (first_stage + index) % 4) for index, name in enumerate(names)}


@functools.cache
def expected(name: str) -> tuple[dict[str, float], dict[str, Any], str]:
    return train(name, None)


def compare(mesh: Mesh, names: Sequence[str], first_stage: int) -> None:
    wrong: dict[str, Any] = {}
    for rank, results in enumerate(on_ranks(train_all, mesh, names, first_stage, timeout=200.0)):
        for name, (logged, weights, used) in results.items():
            reference = expected(name)
            if found := differences(logged, reference[0], 1e-10):
                wrong[f"{name} logged on rank {rank}"] = found
            if used != reference[2]:
                wrong[f"{name} options on rank {rank}"] = (used, reference[2])
            if rank == 0:
                wrong |= {
                    f"{name} {key}": float((weights[key] - value).abs().max())
                    for key, value in reference[1].items()
                    if not torch.allclose(weights[key], value, rtol=1e-10, atol=1e-10)
                }
    assert not wrong


ALONE = ("adamw_foreach", "sgd_fused", "lion", "normalized", "lookahead", "adafactor", "adafactor_foreach")
"""What does something that the other optimizers do not."""
RARE = ("list", "tuple", "bare_scheduler", "plateau_train", "chained", "restarts", "cyclic", "one_cycle_betas")


@pytest.mark.timeout(240)
def test_every_optimizer_steps_as_in_one_process_on_parts_of_layers() -> None:
    compare((1, 1, 2), list(OPTIMIZERS), first_stage=1)


@pytest.mark.timeout(240)
def test_optimizers_schedulers_groups_and_hooks_work_as_in_one_process() -> None:
    compare((2, 2, 1), [name for name in (*ALONE, *RETURNS, *SCHEDULERS, *HOOKS) if name not in RARE], first_stage=1)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", [(2, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("first_stage", [0, 3])
def test_all_of_them_at_other_zero_stages_and_on_eight_ranks(mesh: Mesh, first_stage: int) -> None:
    names = list(CASES)
    for part in (names[::2], names[1::2]):
        compare(mesh, part, first_stage)


def train_scaled(mesh: Mesh | None, epochs: int, folder: str = "", batch: int | None = None) -> Any:
    """One epoch of three steps that ends with a checkpoint, or two; the second begins with it, if there is one."""
    trainer = make_trainer(mesh, max_epochs=epochs)
    module = seeded(ScaledAdafactor, batch)
    path = f"{folder}/saved"
    trainer.fit(module, loader(rows(12, 13), 4, mesh), ckpt_path=path if folder and epochs == 2 else None)
    if epochs == 1:
        trainer.save_checkpoint(path)
    return whole_weights(trainer), module.used


def test_adafactor_and_scaled_rates_go_on_at_another_layout(tmp_path: Path) -> None:
    weights, rates = train_scaled(None, 2, batch=4)  # without a break: torch casts the step of Adafactor on resuming
    assert [used[0]["lr"] for used in rates[:3]] == pytest.approx([0.025, 0.03, 0.035])  # to twice the rate in 4 steps
    for _, used in on_ranks(train_scaled, (2, 2, 1), 1, str(tmp_path)):
        assert used == rates[:3]
    for rank, (got, used) in enumerate(on_ranks(train_scaled, (1, 2, 2), 2, str(tmp_path))):
        assert used == rates[3:]
        if rank == 0:
            for name, value in weights.items():
                torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, msg=name)


class Unscaled(Tokens):
    """Gives a schedule that the strategy refuses."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_blocks=2)
        self.options = options

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [BatchScaledLR(optimizer, reference_batch_size=2, **self.options)]


def test_a_schedule_that_would_scale_by_something_else_is_refused() -> None:
    one = (1, 1, 1)
    with pytest.raises(ConfigError, match="counts optimizer steps, but Lightning moves it every 1 epoch"):
        make_trainer(one).fit(Unscaled(warmup_steps=5), loader(rows(8), 4, one))
    with pytest.raises(ConfigError, match="there are 2 training loaders"):
        make_trainer(one).fit(Unscaled(), [loader(rows(8), 4, one)] * 2)
    accumulates = GradientAccumulationScheduler({2: 4})
    with pytest.raises(ConfigError, match="changes the number of accumulated batches"):
        make_trainer(one, callbacks=[accumulates]).fit(Unscaled(), loader(rows(8), 4, one))
    with pytest.raises(ConfigError, match="was given global_batch_size=8, the strategy global_batch_size=4"):
        make_trainer(one, {"global_batch_size": 4}).fit(Unscaled(global_batch_size=8), loader(rows(8), 4, one))
    module = Unscaled()
    trainer = make_trainer(one, accumulate_grad_batches=2)
    trainer.fit(module, loader(rows(8), 4, one))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 8 / 2)
