"""Models start with a rank's share of memory and with the weights that one process would have given them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.initialization import LARGE
from lightning_3d.placeholder import is_placeholder
from tests.dist.lightning_modules import (
    Block,
    Mesh,
    Tokens,
    loader,
    make_trainer,
    on_ranks,
    rows,
    seeded,
    whole_weights,
)

WORDS, SIZE, SEEN, BLOCKS = 300, 64, 130, 48


class Scaled(nn.Module):
    """A block with what people write: a bare parameter, a table that is no state, initialisations of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up = nn.Linear(SIZE, 4 * SIZE)
        self.down = nn.Linear(4 * SIZE, SIZE)
        self.scale = nn.Parameter(torch.randn(4 * SIZE, SIZE) * 0.02)  # large, and no reset_parameters knows it
        self.register_buffer("decay", torch.tril(torch.ones(SEEN, SEEN)) / SEEN, persistent=False)
        nn.init.trunc_normal_(self.up.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.decay[: x.size(1), : x.size(1)] @ x
        return x + self.down(F.gelu(self.up(self.norm(mixed)))) + F.gelu(x @ self.scale.T) @ self.scale


class Large(Tokens):
    """Built where ``place`` says, with the meta device or without it."""

    def __init__(self, place: str = "configure", meta: bool = False, seed_by_rank: bool = False) -> None:
        super().__init__(1)
        del self.embed, self.blocks, self.norm, self.head
        self.meta, self.seed_by_rank = meta, seed_by_rank
        self.first: dict[str, Tensor] = {}
        if place == "init":
            self.build()

    def configure_model(self) -> None:
        if not hasattr(self, "embed"):
            if self.seed_by_rank:
                torch.manual_seed(100 + self.global_rank)
            with torch.device("meta" if self.meta else "cpu"):
                self.build()

    def build(self) -> None:
        self.embed = nn.Embedding(WORDS, SIZE, padding_idx=0)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        self.head.weight = self.embed.weight
        for block in self.blocks:
            nn.init.xavier_normal_(block.down.weight)

    def on_train_start(self) -> None:
        self.first = whole_weights(self.trainer)


def train(mesh: Mesh | None, options: dict[str, Any], *how: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Weights before and after two steps, and which parameters a rank holds, with their sizes."""
    trainer = make_trainer(mesh, options, max_steps=2)
    module = seeded(Large, *how)
    trainer.fit(module, loader(rows(8, 7, WORDS), 4, mesh))
    mine = [getattr(p, "_local_tensor", p) for p in module.parameters() if not is_placeholder(p)]
    held = sum(tensor.untyped_storage().nbytes() for tensor in mine)
    return module.first, whole_weights(trainer), held


def agree(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("mesh", "options", "how"),
    [
        ((2, 1, 1), {}, ("configure", True)),
        ((1, 1, 2), {}, ("configure", False)),
        ((1, 2, 1), {"zero_stage": 3}, ("configure", True)),
        ((1, 2, 2), {"zero_stage": 1}, ("configure", True, True)),
    ],
    ids=lambda value: str(value),
)
def test_c52_c24_weights_are_those_of_one_process(mesh: Mesh, options: dict[str, Any], how: Any) -> None:
    """C52, and in the last case C24: a module that seeds by rank begins as it does on rank 0."""
    first, last, whole = train(None, {}, how[0], False, *how[2:])
    results = on_ranks(train, mesh, options, *how)
    agree(results[0][0], first)
    agree(results[0][1], last, 1e-10)
    ranks = mesh[0] * mesh[1] * mesh[2]
    assert max(held for *_, held in results) < whole * (0.75 if ranks == 2 else 0.5)


def peak_while_building(mesh: Mesh) -> tuple[int, int]:
    """Bytes that building and laying out a model has added to this process at most, and what it then holds of it."""
    process, levels, done = psutil.Process(), [0], threading.Event()
    trainer = make_trainer(mesh, {}, precision="32-true", max_steps=1)

    def watch() -> None:
        while not done.wait(0.002):
            levels.append(process.memory_info().rss)

    class Wide(Tokens):
        def configure_model(self) -> None:
            watcher.start()
            self.blocks = nn.ModuleList(Block(512) for _ in range(BLOCKS))
            nn.init.trunc_normal_(self.blocks[0].up.weight, std=0.02)

        def on_fit_start(self) -> None:
            done.set()
            watcher.join()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = F.one_hot(batch, 512).to(torch.float32)
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    module = Wide()
    for name in ("embed", "blocks", "norm", "head"):
        delattr(module, name)
    watcher = threading.Thread(target=watch, daemon=True)
    torch.randn(100, 100).sum()
    before = process.memory_info().rss
    trainer.fit(module, loader(rows(8, 7, WORDS), 4, mesh))
    mine = [getattr(p, "_local_tensor", p) for p in module.parameters() if not is_placeholder(p)]
    return max(levels) - before, sum(tensor.untyped_storage().nbytes() for tensor in mine)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2)], ids=str)
def test_c52_a_rank_never_holds_more_than_its_share_and_a_block(mesh: Mesh) -> None:
    whole = BLOCKS * 4 * (2 * 2 * 512 * 512)
    for peak, held in on_ranks(peak_while_building, mesh):
        assert held < 0.52 * whole
        # What the libraries take, and the copies of one block that a plan is checked with, are some 50 MB.
        assert peak < held + 75 * 2**20 < whole, f"{peak / 2**20:.0f} MB while building, for {held / 2**20:.0f} MB"


class Unfilled(Tokens):
    """Has a large parameter that its constructor leaves to a checkpoint."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.scale = nn.Parameter(torch.empty(LARGE))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.loss(batch) * self.scale.mean()


def test_c52_parameters_without_values_need_a_checkpoint(tmp_path: Path) -> None:
    """C52: what nothing initialises is an error with its name, unless a checkpoint has it."""
    data = loader(rows(8), 4, None)
    with pytest.raises(ConfigError, match="never given values: scale"):
        make_trainer((1, 1, 1)).fit(Unfilled(), data)
    module = Tokens()
    module.scale = nn.Parameter(torch.full((LARGE,), 0.5))
    before = make_trainer(None, max_steps=1)
    before.fit(module, data)
    before.save_checkpoint(tmp_path / "a.ckpt")
    resumed = Unfilled()
    make_trainer((1, 1, 1), max_steps=2).fit(resumed, data, ckpt_path=tmp_path / "a.ckpt")
    assert torch.equal(resumed.scale, module.scale)


def test_c52_a_module_born_on_the_meta_device_is_initialised_in_order() -> None:
    """C52: built on the meta device in the script, where nothing records it."""
    expected = seeded(Tokens)
    with torch.device("meta"):
        module = Tokens()
    seeded(int)
    make_trainer((1, 1, 1), {}, max_steps=0).fit(module, loader(rows(8), 4, None))
    agree(module.state_dict(), {name: value.double() for name, value in expected.state_dict().items()})
