"""From any layout to any other: a run that was stopped and went on elsewhere is the run that was never stopped.

Every layout trains three steps and saves; then every layout resumes from the checkpoints of the others and makes three
more. What comes out is compared with six steps of the stock Trainer in one process: weights, moments, step counts,
schedulers, loops, callbacks, losses and learning rates. Key sets are those of the plain module (C40, C43), and the
stock Trainer is one of the layouts, with files that it wrote and files that were converted for it (C42). Layouts of one
world size share their processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from lightning_3d.checkpoint import to_lightning, write_lightning
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.sharding.loss_scale import LossScaler
from tests.dist.lightning_modules import VOCAB, WIDTH, Mesh, Tokens, make_trainer, rows, seeded
from tests.harness import run_trainer

STEPS, STOP, BATCH = 6, 3, 12
STOCK = "stock"

LAYOUTS: dict[str, tuple[Mesh | None, dict[str, Any]]] = {
    STOCK: (None, {}),
    "one": ((1, 1, 1), {}),
    "tp2": ((1, 1, 2), {}),
    "tp4": ((1, 1, 4), {}),
    "pp2": ((2, 1, 1), {}),
    "pp4": ((4, 1, 1), {"num_micro_batches": 4}),
    "pp2-interleaved": ((2, 1, 1), {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "dp3": ((1, 3, 1), {}),
    "dp2-zero0": ((1, 2, 1), {"zero_stage": 0}),
    "dp2-zero3": ((1, 2, 1), {"zero_stage": 3}),
    "2x2x2-zero1": ((2, 2, 2), {"zero_stage": 1}),
    "2x2x2-zero2": ((2, 2, 2), {"zero_stage": 2}),
    "2x2x2-zero3": ((2, 2, 2), {"zero_stage": 3}),
}

ALWAYS = [
    (STOCK, "2x2x2-zero3"),
    ("2x2x2-zero3", STOCK),
    ("2x2x2-zero3", "dp3"),
    ("2x2x2-zero3", "tp4"),
    ("tp4", "pp2-interleaved"),
    ("dp3", "2x2x2-zero3"),
    ("dp3", "pp4"),
    ("dp3", "one"),
    ("pp2-interleaved", STOCK),
    ("pp2-interleaved", "dp2-zero0"),
]


class Shuffled(Sampler[int]):
    """An order that depends on nothing but the number of the epoch."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.num, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return self.num


class Learns(Tokens):
    """Nested containers, a tied, a frozen and a shared entry, buffers of both kinds, two groups and two schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.parts = nn.ModuleDict({"in": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.LayerNorm(WIDTH)]))})
        self.norm.bias.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, WIDTH))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.double()  # the stock Trainer fills the module before it converts it: values would lose their digits

    def forward(self, tokens: Tensor) -> Tensor:
        first, (norm,) = self.parts["in"]
        x = norm(first(self.embed(tokens))) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["mine"] == STOP

    def configure_optimizers(self) -> Any:
        plain = [p for name, p in self.named_parameters() if "norm" in name and p.requires_grad]
        decayed = [p for name, p in self.named_parameters() if "norm" not in name]
        groups = [
            {"params": decayed, "weight_decay": 0.1, "name": "decayed"},
            {"params": plain, "weight_decay": 0.0, "eps": 1e-7, "name": "plain"},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=20)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]


class History(Callback):
    """Losses and rates of the whole run, also of the part before it was stopped."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.seen.append([float(trainer.global_step), float(trainer.callback_metrics["loss"]), *rates])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def train(layout: str, steps: int, saves: str, resume: str | None = None) -> Any:
    """Train epochs of ``STOP`` steps and save; what the callback has seen, and the state of the schedulers."""
    mesh, options = LAYOUTS[layout]
    history = History()
    trainer = make_trainer(mesh, options, callbacks=[history], max_epochs=steps // STOP)
    data = rows(STOP * BATCH)
    train_loader = DataLoader(data, batch_size=BATCH // (mesh[1] if mesh else 1), sampler=Shuffled(len(data)))
    val_loader = DataLoader(data[:BATCH], batch_size=BATCH // (mesh[1] if mesh else 1))
    trainer.fit(seeded(Learns), train_loader, val_loader, ckpt_path=resume)
    # Not in a hook: Lightning updates schedulers that watch a metric after the last hook in which it saves, and leaves
    # that out when it resumes from there.
    trainer.save_checkpoint(saves)
    return history.seen, [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]


def train_each(rank: int, world: int, runs: Sequence[tuple[str, int, str, str | None]]) -> Any:
    return [train(*run) for run in runs]


def by_world(runs: Sequence[tuple[str, int, str, str | None]]) -> dict[str, list[Any]]:
    """The runs on their layouts, with as few starts of processes as there are world sizes: per target, by rank."""
    results: dict[str, list[Any]] = {}
    for world, group in itertools.groupby(sorted(runs, key=world_of), key=world_of):
        together = list(group)
        if world <= 1:
            per_rank = [train_each(0, 1, together)]
        else:
            per_rank = run_trainer(world, train_each, together, timeout=40 + 25 * len(together))
        for place, run in enumerate(together):
            results[run[2]] = [result[place] for result in per_rank]
    return results


def world_of(run: tuple[str, int, str, str | None]) -> int:
    mesh = LAYOUTS[run[0]][0]
    return mesh[0] * mesh[1] * mesh[2] if mesh else 0


def loaded(path: str, layout: str) -> dict[str, Any]:
    """What the stock Trainer would find in a checkpoint."""
    return torch.load(path, weights_only=False) if layout == STOCK else to_lightning(path)


def comparable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The parts that do not depend on where and with what it was written."""
    kept = {key: checkpoint[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers")}
    kept["loops"] = checkpoint["loops"]["fit_loop"]
    kept["loops"]["state_dict"] = {}
    kept["loops"]["epoch_loop.state_dict"] = {}
    kept["callbacks"] = checkpoint["callbacks"]
    return kept


def assert_alike(got: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert list(map(str, got)) == list(map(str, expected)), where
        for key, value in expected.items():
            assert_alike(got[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for place, value in enumerate(expected):
            assert_alike(got[place], value, f"{where}.{place}")
    elif isinstance(expected, Tensor):
        assert got.dtype == expected.dtype, where
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=1e-10, abs=1e-10), where
    else:
        assert got == expected, where


def check(pairs: Sequence[tuple[str, str]], folder: Path) -> None:
    """Resume every second layout of ``pairs`` from a checkpoint of the first."""
    straight, schedulers = train(STOCK, STEPS, str(folder / "straight"))
    expected = comparable(loaded(str(folder / "straight"), STOCK))
    sources = sorted({source for source, _ in pairs})
    by_world([(source, STOP, str(folder / source), None) for source in sources])
    keys = list(expected["state_dict"])
    for source in sources:
        content = loaded(str(folder / source), source)
        assert list(content["state_dict"]) == keys, f"keys saved at {source}"
        assert content["global_step"] == STOP
        if source != STOCK:
            file = folder / f"{source}.ckpt"
            write_lightning(folder / source, file)
            restored = Learns.load_from_checkpoint(file).state_dict()
            assert_alike(restored, content["state_dict"], f"load_from_checkpoint of {source}")
    runs = []
    for source, target in pairs:
        path = folder / (source if target != STOCK or source == STOCK else f"{source}.ckpt")
        runs.append((target, STEPS, str(folder / f"{source} to {target}"), str(path)))
    results = by_world(runs)
    for source, target in pairs:
        path = str(folder / f"{source} to {target}")
        for rank, (seen, states) in enumerate(results[path]):
            assert_alike(seen, straight, f"{source} to {target}, rank {rank}: losses and rates")
            assert_alike(states, schedulers, f"{source} to {target}, rank {rank}: schedulers")
        assert_alike(comparable(loaded(path, target)), expected, f"{source} to {target}")


class Mixed(Tokens):
    """Float32 parameters that are computed with in half the bits."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.parameters(), "lr": 0.01}])


class SaveAtStart(Callback):
    """Saves what was loaded, before any step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def mixed(rank: int, world: int, layouts: Sequence[str], folder: str, precision: str) -> None:
    """Three steps at the first layout; then each of the others loads what the one before has saved, and saves it."""
    before: str | None = None
    for layout in layouts:
        mesh, options = LAYOUTS[layout]
        assert mesh is not None
        plugin = {"plugins": [ThreeDPrecision("16-mixed", LossScaler(64.0, growth_interval=2))], "precision": None}
        callbacks = [SaveAtStart(f"{folder}/{layout}")] if before else []
        arguments = plugin if precision == "16-mixed" else {"precision": precision}
        trainer = make_trainer(mesh, options, callbacks=callbacks, max_epochs=2 if before else 1, **arguments)
        loader = DataLoader(rows(STOP * BATCH), batch_size=BATCH // mesh[1])
        trainer.fit(seeded(Mixed), loader, ckpt_path=before)
        if before is None:
            trainer.save_checkpoint(f"{folder}/{layout}")
        before = f"{folder}/{layout}"


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_c01_masters_moments_and_loss_scaler_are_kept_bit_by_bit(tmp_path: Path, precision: str) -> None:
    layouts = ["pp2", "tp2", "dp2-zero3", "pp2-interleaved"]
    run_trainer(2, mixed, layouts, str(tmp_path), precision)
    first, *others = (to_lightning(tmp_path / layout) for layout in layouts)
    assert all(value.dtype == torch.float32 for value in first["state_dict"].values())
    scaler = next((value for key, value in first.items() if "Precision" in key), None)
    assert precision != "16-mixed" or scaler["scale"] == 128.0
    for layout, other in zip(layouts[1:], others, strict=True):
        for key in ("state_dict", "optimizer_states", *(key for key in first if "Precision" in key)):
            torch.testing.assert_close(other[key], first[key], rtol=0, atol=0, msg=f"{key} at {layout}")


@pytest.mark.timeout(300)
def test_c01_a_run_goes_on_at_another_layout_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    check(ALWAYS, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_c01_all_pairs_of_layouts(tmp_path: Path) -> None:
    check([pair for pair in itertools.product(LAYOUTS, LAYOUTS) if pair != (STOCK, STOCK)], tmp_path)
