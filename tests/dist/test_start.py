"""Ranks start alike, each in memory of its own, and looking at a model does not change it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ConfigError, ThreeDStrategy
from lightning_3d.pipeline.observe import call_order
from lightning_3d.trainer.setup.start import refuse_views
from tests.harness import run_trainer


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_parameters_that_are_views_of_each_other_are_refused() -> None:
    module = Small()
    module.part = nn.Parameter(module.layers[0][0].weight.detach()[2:])
    with pytest.raises(ConfigError, match=r"layers\.0\.0\.weight and part|part and layers\.0\.0\.weight"):
        refuse_views(module)
    module.part = nn.Parameter(module.layers[0][0].weight.detach()[2:].clone())
    module.tied = module.layers[0][0].weight
    refuse_views(module)
    refuse_views(nn.LSTM(4, 4, num_layers=2))


def shared_after_fit(rank: int, world: int) -> list[str]:
    module = Small()
    module.share_memory()  # as a module is that a parent process has sent
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ThreeDStrategy(tensor_parallel=2),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))
    return [name for name, parameter in module.named_parameters() if parameter.is_shared()]


def test_ranks_that_a_parent_sent_the_module_to_do_not_step_in_its_memory() -> None:
    assert run_trainer(2, shared_after_fit) == [[], []]


def test_looking_for_the_order_of_calls_leaves_buffers_alone() -> None:
    model = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(0, 1), nn.BatchNorm1d(3))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert call_order(model) is not None
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"process_group_backend": "mpi"}, "'mpi' is not known"),
        ({"cluster_environment": "slurm"}, "SLURMEnvironment"),
    ],
)
def test_options_that_cannot_connect_ranks_are_refused_when_given(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ThreeDStrategy(**options)  # type: ignore[arg-type]


def test_a_global_batch_that_replicas_cannot_share_is_refused_before_processes_start() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=7 is not .* data_parallel=2, .* Use 6 or 8"):
        strategy = ThreeDStrategy(tensor_parallel=1, pipeline_parallel=1, global_batch_size=7)
        Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)


def test_the_script_takes_over_what_was_trained_in_the_type_it_was_trained_in() -> None:
    module = Small()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="64-true",
        strategy=ThreeDStrategy(start_method="fork"),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randn(4, 4, dtype=torch.float64), batch_size=4))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}
    assert not torch.equal(module.layers[0][0].weight, module.layers[0][0].weight.float().double())


def test_what_does_not_pickle_is_said_before_ranks_start() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ThreeDStrategy(start_method="spawn"),
        callbacks=[LambdaCallback(on_train_start=lambda *args: None)],
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigError, match=r"does not pickle.*Use start_method='popen'"):
        trainer.fit(Small(), DataLoader(torch.randn(8, 4), batch_size=4))
