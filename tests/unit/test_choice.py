"""``"auto"`` sizes: what is chosen for which module on which devices, and what is said of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_3d import ThreeDStrategy
from lightning_3d.config import ParallelConfig, Sizes
from lightning_3d.errors import ConfigError
from lightning_3d.models import GPT
from lightning_3d.pipeline import block_lists
from lightning_3d.pipeline.observe import call_order
from lightning_3d.planner import Cluster
from lightning_3d.trainer.setup import choice, holdings
from lightning_3d.trainer.setup.choice import Choice, Circumstances, choose, has_choice, possible
from lightning_3d.trainer.setup.holdings import cut_parameters, fullest_rank
from lightning_3d.trainer.setup.machine import UNKNOWN, cluster_here
from lightning_3d.trainer.setup.outline import NotYetKnown, outline

ONE_GB = 1e9


def chosen(module: LightningModule, memory_gb: float, ranks: int = 4, **options: Any) -> Choice:
    """What is chosen on a CPU whose ranks have so much memory each."""
    cluster = Cluster(gpu="cpu", gpus_per_node=ranks, memory_gb=memory_gb)
    return choose(outline(module), ParallelConfig(**options), Circumstances(cluster=cluster, is_known=False))


def on_gpus(module: LightningModule, cluster: str, **options: Any) -> Choice:
    given = Circumstances(cluster=Cluster.parse(cluster), precision="bf16-mixed")
    return choose(outline(module), ParallelConfig(**options), given)


class Columns(LightningModule):
    """Layers without attention or vocabulary: nothing that the planner knows."""

    def __init__(self, layers: int = 4, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_only_sizes_that_are_auto_and_do_not_follow_are_chosen() -> None:
    assert has_choice(ParallelConfig(), 8)
    assert has_choice(ParallelConfig(tensor_parallel=2), 8)
    assert not has_choice(ParallelConfig(), 1)
    assert not has_choice(ParallelConfig(tensor_parallel=2, pipeline_parallel=2), 8)
    found = possible(ParallelConfig(), 8, 4)
    assert [(sizes.tp, sizes.pp) for sizes in found[:5]] == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)]
    assert all(sizes.world == 8 for sizes in found)
    assert max(sizes.tp for sizes in found) == 4, "inside a node"
    assert max(sizes.tp for sizes in possible(ParallelConfig(allow_tp_across_nodes=True), 8, 4)) == 8
    assert possible(ParallelConfig(tensor_parallel=2, data_parallel=2), 8, 8) == [Sizes(pp=2, dp=2, tp=2)]
    assert possible(ParallelConfig(tensor_parallel=2, data_parallel=3), 8, 8) == []


@pytest.mark.parametrize(
    ("memory_gb", "options", "expected"),
    [
        (4, {}, Sizes(pp=1, dp=4, tp=1)),
        (0.012, {}, Sizes(pp=1, dp=2, tp=2)),
        (0.007, {}, Sizes(pp=1, dp=1, tp=4)),
        (0.014, {"tensor_parallel": 1}, Sizes(pp=2, dp=2, tp=1)),
        (4, {"pipeline_parallel": 2}, Sizes(pp=2, dp=2, tp=1)),
        (4, {"data_parallel": 1}, Sizes(pp=1, dp=1, tp=4)),
    ],
)
def test_a_small_gpt_is_replicated_where_it_fits_and_cut_where_it_does_not(
    memory_gb: float, options: dict[str, Any], expected: Sizes
) -> None:
    found = chosen(GPT(), memory_gb, **options)
    assert found.sizes == expected
    assert f"tp{expected.tp} pp{expected.pp} dp{expected.dp}" in found.reason
    assert all(f"{name} given" in found.reason for name in options)
    assert "GB usable per device" in found.reason
    assert not found.warning


def test_the_reason_says_what_was_too_large_and_what_was_assumed() -> None:
    found = chosen(GPT(), 0.012)
    assert "Too large: tp1 pp1 dp4 (0.018 GB)." in found.reason
    assert "8 samples per device and step" in found.reason
    assert "samples of 128 tokens" in found.reason
    assert "Assumed" not in chosen_with_data().reason


def chosen_with_data() -> Choice:
    cluster = Cluster(gpu="cpu", gpus_per_node=4, memory_gb=4)
    given = Circumstances(cluster=cluster, is_known=False, seq_len=64)
    return choose(GPT(), ParallelConfig(global_batch_size=8), given)


def test_a_module_that_is_no_transformer_is_counted_and_told_so() -> None:
    module = Columns()
    needed = 16 * sum(parameter.numel() for parameter in module.parameters()) / ONE_GB
    replicated = chosen(module, needed * 2, zero_stage=0)
    assert replicated.sizes == Sizes(pp=1, dp=4, tp=1)
    assert "by rule" in replicated.reason
    cut = chosen(module, needed * 0.95, zero_stage=0)
    assert cut.sizes.tp * cut.sizes.pp > 1
    assert "Too large: tp1 pp1 dp4" in cut.reason
    assert chosen(BoringModel(), 1.0).sizes == Sizes(pp=1, dp=4, tp=1)


def test_what_a_rank_holds_is_counted_to_the_parameter() -> None:
    module, config = GPT(num_layers=4), ParallelConfig(zero_stage=0)
    count = sum(parameter.numel() for parameter in module.parameters())
    whole = fullest_rank(module, config, Sizes(pp=1, dp=4, tp=1), "32-true")
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * count, 4 * count, 8 * count)
    matrices = cut_parameters(module, config, 2)
    assert {"token_embedding.weight", "head.weight", "blocks.3.attention.qkv.weight"} <= matrices
    assert not any("norm" in name for name in matrices)
    cut = fullest_rank(module, config, Sizes(pp=1, dp=2, tp=2), "32-true")
    inside = sum(module.get_parameter(name).numel() for name in matrices)
    assert cut.parameters == 4 * (count - inside / 2)
    staged = fullest_rank(module, config, Sizes(pp=2, dp=2, tp=1), "32-true")
    assert count / 2 <= staged.parameters / 4 < 0.6 * count
    module.requires_grad_(False)
    frozen = fullest_rank(module, config, Sizes(pp=1, dp=4, tp=1), "bf16-mixed")
    assert (frozen.parameters, frozen.gradients, frozen.optimizer) == (2 * count, 0, 0)


def test_a_module_that_fits_nowhere_is_refused_with_what_comes_nearest() -> None:
    with pytest.raises(ConfigError, match=r"fits on no layout of 4 CPU processes .* comes nearest: .* of 0.00194 GB"):
        chosen(GPT(), 0.002)
    with pytest.raises(ConfigError, match="zero_stage=3"):
        on_gpus(GPT(24, 12288, 96, 2048, 51200, build_late=True), "a100-80g:1x8", pipeline_parallel=1)


def test_what_is_predicted_warns_and_does_not_refuse() -> None:
    found = chosen(GPT(), 0.0075, tensor_parallel=1, global_batch_size=4000)
    assert found.sizes.tp == 1
    assert "No layout is sure to fit" in found.warning
    assert "activation_checkpointing='full'" in found.warning


def test_a_huge_module_is_cut_before_it_is_built() -> None:
    module = GPT(40, 5120, 40, 2048, 32000, build_late=True)
    before = torch.get_rng_state()
    found = on_gpus(module, "h100-80g:1x8", global_batch_size=64, micro_batch_size=1)
    assert found.sizes.tp * found.sizes.pp >= 2
    assert "within 10% of the fastest" in found.reason
    assert "tp1 pp1 dp8 (" in found.reason.partition("Too large: ")[2]
    assert "Predicted steps of others" in found.reason
    assert not list(module.parameters()), "the module itself is as it was"
    assert torch.equal(before, torch.get_rng_state())
    small = on_gpus(GPT(12, 768, 12, 1024, 50304, build_late=True), "h100-80g:1x8", global_batch_size=64)
    assert small.sizes == Sizes(pp=1, dp=8, tp=1)


class Late(LightningModule):
    def configure_model(self) -> None:
        self.layer = nn.Linear(self.trainer.datamodule.width, 1)  # type: ignore[attr-defined]


def test_layers_that_depend_on_the_data_are_not_guessed() -> None:
    with pytest.raises(NotYetKnown, match=r"Late\.configure_model cannot be tried"):
        outline(Late())


def test_devices_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA H100 80GB HBM3"
        total_memory = 85_000_000_000

    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Properties)
    cluster = cluster_here(torch.device("cuda", 0), 2, 8)
    assert (cluster.device.name, cluster.world_size, cluster.gpu_memory_gb) == ("h100-80g", 16, 85.0)
    Properties.name = "Graphics of tomorrow"
    unknown = cluster_here(torch.device("cuda", 0), 1, 8)
    assert (unknown.device.generation, unknown.gpu_memory_gb) == (UNKNOWN, 85.0)
    found = choose(GPT(), ParallelConfig(), Circumstances(cluster=unknown, is_known=False))
    assert found.sizes == Sizes(pp=1, dp=8, tp=1)
    host = cluster_here(torch.device("cpu"), 1, 4)
    assert host.device.name == "cpu"
    assert 0 < host.gpu_memory_gb < 1e5


def test_small_modules_do_not_wait() -> None:
    began = time.perf_counter()
    for _ in range(5):
        chosen(GPT(), 4)
    assert (time.perf_counter() - began) / 5 < 0.2


def test_sizes_that_leave_no_choice_are_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(ConfigError, match="the world has 8 ranks"):
        Trainer(accelerator="cpu", devices=8, strategy=ThreeDStrategy(data_parallel=3), logger=False)
    strategy = ThreeDStrategy(data_parallel=2)
    Trainer(accelerator="cpu", devices=8, strategy=strategy, logger=False)
    assert strategy._chooses


def test_the_order_of_calls_is_looked_for_once_for_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def noted(module: nn.Module) -> Any:
        seen.append(module)
        return call_order(module)

    for place in (choice, holdings, block_lists):
        monkeypatch.setattr(place, "call_order", noted)
    module = Columns(layers=8, width=512)
    held = 16 * sum(parameter.numel() for parameter in module.parameters()) / ONE_GB
    assert chosen(module, held / 2, ranks=8, zero_stage=0, tensor_parallel=1).sizes.pp > 2
    assert len(seen) == 1
