"""What a stage cannot know, or an optimizer cannot do in parts, is refused at once: no rank waits, no wrong number."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ConfigError, StageError, ThreeDStrategy
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.trainer.setup.preflight import check_optimizers
from tests.harness import run_trainer

PP2 = {"pipeline_parallel": 2, "num_micro_batches": 2}


class Chain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithWeightsInLoss(Chain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class WithWeightsLogged(Chain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("weight", self.embed.weight.norm())
        return super().training_step(batch, batch_idx)


class WithValueWritten(Chain):
    """Writes what the first stage gives into a tensor of its own, before the blocks."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        kept = torch.zeros_like(batch)
        kept[:, :2] = x[:, :2].detach()
        for block in self.blocks:
            x = block(x)
        return (self.head(x).square() + kept).mean()


class WithRunningMean(Chain):
    """Keeps a mean of activations in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        self.mean.lerp_(x.mean(0).detach()[:6], 0.1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class WithValuesThatTrim(Chain):
    """Leaves out rows by their values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch[: 1 + self.global_step % 2], batch_idx)


class ReadsTooEarly(Chain):
    """Looks at an activation before the stage that computes it is reached."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        if x.sum() > 0:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Backwards(Chain):
    """Runs its blocks in another order in every step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for block in reversed(self.blocks) if self.global_step else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class WithLBFGS(Chain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


def fault(rank: int, world: int, kind: type[Chain], options: dict[str, int]) -> tuple[str, str]:
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ThreeDStrategy(timeout_s=30.0, **options),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(kind(), DataLoader(torch.randn(8, 6), batch_size=4))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    "kind, what", [(WithWeightsInLoss, "The loss"), (WithWeightsLogged, "self.log('weight', ...)")]
)
def test_values_of_another_stage_are_refused_where_a_number_is_needed(kind: type[Chain], what: str) -> None:
    _, (name, message) = run_trainer(2, fault, kind, PP2)
    assert name == StageError.__name__
    assert message.startswith(f"{what} needs values that another pipeline stage holds")
    assert "embed" in message and "test_refusals.py" in message


class Attends(nn.Module):
    """Keeps a term of the loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)[:, None]
        y = nn.functional.scaled_dot_product_attention(y, y, y)[:, 0]
        self.aux = y.square().mean()
        return x + y


class WithTermsKeptInBlocks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Attends() for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(block.aux for block in self.blocks)


def test_a_value_kept_on_a_block_of_another_stage_is_called_that() -> None:
    _, (name, message) = run_trainer(2, fault, WithTermsKeptInBlocks, PP2)
    assert name == StageError.__name__
    assert message.startswith("The loss needs values that another pipeline stage holds")
    assert "computed inside 'blocks." in message and "Return it from there" in message and "random" not in message


@pytest.mark.parametrize("kind", [WithValueWritten, WithRunningMean])
def test_a_value_of_another_stage_written_into_a_tensor_of_this_one_is_not_lost_in_silence(kind: type[Chain]) -> None:
    _, (name, message) = run_trainer(2, fault, kind, PP2)
    assert name == StageError.__name__
    assert "writes a value of 'embed'" in message and "test_refusals.py" in message


def test_reading_a_value_before_its_stage_names_the_line() -> None:
    _, (name, message) = run_trainer(2, fault, ReadsTooEarly, PP2)
    assert name == StageError.__name__
    assert "test_refusals.py" in message and "(if x.sum() > 0:)" in message and "reads the value" in message
    assert "it comes from 'embed'" in message and "pipeline_parallel=1" in message


def test_blocks_out_of_order_are_named() -> None:
    for name, message in run_trainer(2, fault, Backwards, PP2):
        assert name == StageError.__name__
        assert "was called out of order" in message and "'blocks.3'" in message and "test_refusals.py" in message


def test_shapes_that_depend_on_values_are_refused_before_anything_wrong_is_sent() -> None:
    (name, message), _ = run_trainer(2, fault, WithValuesThatTrim, PP2)
    assert name == StageError.__name__
    assert "[(1, 8)], but of [(2, 8)]" in message


@pytest.mark.parametrize("options", [PP2, {"tensor_parallel": 2}, {"zero_stage": 1}])
def test_lbfgs_is_refused_where_a_rank_holds_a_part_of_the_parameters(options: dict[str, int]) -> None:
    for name, message in run_trainer(2, fault, WithLBFGS, options):
        assert name == ConfigError.__name__
        assert message.startswith("LBFGS")


def test_lbfgs_trains_where_every_rank_holds_all_parameters() -> None:
    assert run_trainer(2, fault, WithLBFGS, {"zero_stage": 0}) == [("", "")] * 2


class OtherAdafactor(torch.optim.Adafactor):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 1), (2, 1, 1)], ids=str)
def test_only_an_adafactor_with_another_step_is_refused_on_parts(sizes: tuple[int, int, int]) -> None:
    for kind in (torch.optim.Adafactor, OtherAdafactor):
        optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))])
        refused = kind is OtherAdafactor and sizes != (2, 1, 1)
        with pytest.raises(ConfigError, match="OtherAdafactor changes the step") if refused else nullcontext():
            check_optimizers([optimizer], ParallelConfig(zero_stage=1), Sizes(*sizes))


def test_plugins_without_effect_are_refused_when_the_trainer_is_made() -> None:
    for given in ({"sync_batchnorm": True}, {"plugins": [AsyncCheckpointIO()]}):
        with pytest.raises(ConfigError, match=r"sync_batchnorm|AsyncCheckpointIO"):
            Trainer(accelerator="cpu", devices=2, strategy=ThreeDStrategy(), **given)


class Keeps:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight


class WithParametersInAnObject(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Keeps(self.head.weight)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.linear(self.blocks(self.embed(batch)), self.kept.weight).square().mean()


@pytest.mark.parametrize("options", [{"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 0}, {"tensor_parallel": 2}])
def test_parameters_kept_elsewhere_train_or_are_refused(options: dict[str, int]) -> None:
    refused = options.get("zero_stage", 0) > 0
    for name, message in run_trainer(2, fault, WithParametersInAnObject, options):
        assert name == (ConfigError.__name__ if refused else ""), message
        assert not refused or "head.weight" in message
