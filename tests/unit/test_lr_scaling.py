"""Learning rates that follow the global batch: rules, warm-up, decay, resuming, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from lightning_3d import BatchScaledLR, ConfigError
from lightning_3d.lr_scaling import scale


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=0.1)


def rates(scheduler: BatchScaledLR, steps: int) -> list[float]:
    """The rate of the first group at every step."""
    used = []
    for _ in range(steps):
        used.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        scheduler.optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize(("rule", "k"), [("linear", 32.0), ("sqrt", math.sqrt(32.0))])
def test_rules_scale_by_the_batch(rule: str, k: float) -> None:
    """Goyal et al.: 0.1 at 256 images is 3.2 at 8192."""
    assert scale(rule, 8192, 256) == pytest.approx(k)
    opt = optimizer(0.1, 0.01)
    BatchScaledLR(opt, 256, 8192, rule)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.1 * k, 0.01 * k])


def test_warm_up_grows_from_the_reference_rate_or_a_fraction() -> None:
    assert rates(BatchScaledLR(optimizer(), 8, 32, warmup_steps=3), 5) == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4])
    grown = rates(BatchScaledLR(optimizer(), 8, 32, warmup_steps=4, warmup_start=0.0), 5)
    assert grown == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert rates(BatchScaledLR(optimizer(), 32, 8, warmup_steps=3), 4) == pytest.approx([0.025] * 4)


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_decay_ends_at_the_last_step_and_stays(decay: str, middle: float) -> None:
    scheduler = BatchScaledLR(optimizer(), 8, 16, warmup_steps=2, decay=decay, total_steps=10, final_fraction=0.1)
    used = rates(scheduler, 12)
    assert used[2] == pytest.approx(0.2)
    assert used[6] == pytest.approx(0.2 * (0.1 + 0.9 * middle))
    assert used[10:] == pytest.approx([0.02, 0.02])


def test_it_goes_on_from_a_checkpoint_exactly() -> None:
    options: dict[str, Any] = {"warmup_steps": 3, "decay": "cosine", "total_steps": 9}
    whole = rates(BatchScaledLR(optimizer(), 8, 24, **options), 9)
    first = BatchScaledLR(optimizer(), 8, 24, **options)
    rates(first, 4)
    opt = optimizer()
    second = BatchScaledLR(opt, 8, 24, **options)
    opt.load_state_dict(first.optimizer.state_dict())
    second.load_state_dict(first.state_dict())
    assert rates(second, 5) == whole[4:]


def test_another_batch_on_resuming_holds_from_the_next_step_and_is_told() -> None:
    first = BatchScaledLR(optimizer(), 8, 16)
    rates(first, 2)
    second = BatchScaledLR(optimizer(), 8, 32)
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    with pytest.warns(UserWarning, match="global_batch_size was 16 and is 32"):
        second.load_state_dict(first.state_dict())
    assert rates(second, 2) == pytest.approx([0.4, 0.4])
    assert second.last_epoch == 4


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    rate = torch.tensor(0.1)
    scheduler = BatchScaledLR(optimizer(rate), 8, warmup_steps=0)
    scheduler.set_global_batch_size(32)
    held = scheduler.optimizer.param_groups[0]["lr"]
    assert isinstance(held, torch.Tensor)
    assert rates(scheduler, 3) == pytest.approx([0.4] * 3)


def test_without_the_batch_nothing_is_guessed() -> None:
    scheduler = BatchScaledLR(optimizer(), 8)
    assert scheduler.get_last_lr() == [0.1]
    scheduler.optimizer.step()
    with pytest.raises(ConfigError, match="Pass global_batch_size, or train with strategy='3d'"):
        scheduler.step()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reference_batch_size": 0}, "reference_batch_size=0 must be a positive whole number"),
        ({"reference_batch_size": 2.5}, "reference_batch_size=2.5"),
        ({"global_batch_size": -1}, "global_batch_size=-1"),
        ({"rule": "cubic"}, "rule='cubic' is not known. Choose from 'linear', 'sqrt'"),
        ({"decay": "exponential"}, "decay='exponential'"),
        ({"warmup_steps": -3}, "warmup_steps=-3 must be a whole number, 0 or more"),
        ({"warmup_start": 1.5}, "warmup_start=1.5 must be a fraction"),
        ({"warmup_start": "zero"}, "or 'reference'"),
        ({"decay": "cosine"}, "needs total_steps"),
        ({"total_steps": 10}, "decay='constant' does not end"),
        ({"decay": "linear", "total_steps": 5, "warmup_steps": 5}, "leaves nothing after warmup_steps=5"),
        ({"decay": "linear", "total_steps": 5, "final_fraction": 2}, "final_fraction=2 must be a fraction"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BatchScaledLR(optimizer(), **{"reference_batch_size": 8, **options})
    assert said in str(refused.value)


@pytest.mark.parametrize(("given", "start"), [("0.5", 0.5), ("0.0", 0.0), ("reference", "reference")])
def test_a_warm_up_can_start_from_a_fraction_given_on_the_command_line(given: str, start: Any) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(BatchScaledLR, "it", skip={"optimizer"})
    assert parser.parse_args(["--it.reference_batch_size=8", f"--it.warmup_start={given}"]).it.warmup_start == start
