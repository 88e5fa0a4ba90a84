"""Models start with a rank's share of memory and with the weights that one process would have given them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.errors import ConfigError
from lightning_3d.initialization import LARGE
from lightning_3d.placeholder import is_placeholder
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights

WORDS, SIZE, SEEN = 300, 64, 130


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
        ((1, 2, 2), {"zero_stage": 1}, ("configure", True)),  # C52
    ],
    ids=lambda value: str(value),
)
def test_weights_are_those_of_one_process(mesh: Mesh, options: dict[str, Any], how: Any) -> None:
    first, last, whole = train(None, {}, how[0])
    results = on_ranks(train, mesh, options, *how)
    agree(results[0][0], first)
    agree(results[0][1], last, 1e-10)
    ranks = mesh[0] * mesh[1] * mesh[2]
    assert max(held for *_, held in results) < whole * (0.75 if ranks == 2 else 0.5)
