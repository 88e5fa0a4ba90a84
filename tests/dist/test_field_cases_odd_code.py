"""What people write in their modules, unmodified, against one process: teachers, kept parameters, odd steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_3d.placeholder import is_placeholder
from tests.dist.lightning_modules import (
    VOCAB,
    WIDTH,
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
from tests.harness import RankFailure

BATCH = 4


class Seen(Callback):
    """Losses of all batches."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def train(mesh: Mesh | None, kinds: list[Any], options: dict[str, Any], data: list[Any]) -> list[Any]:
    """For every kind of module: losses, what it kept, metrics, weights, and the names of what this rank holds."""
    results = []
    for kind in kinds:
        seen = Seen()
        trainer = make_trainer(
            mesh, options if mesh else None, callbacks=[seen], **getattr(kind, "trainer_options", {})
        )
        module = seeded(kind)
        trainer.fit(module, loader(data, BATCH, mesh), loader(data[:BATCH], BATCH, mesh))
        held = [name for name, p in module.named_parameters() if not is_placeholder(p)]
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        results.append((seen.losses, getattr(module, "kept", None), metrics, whole_weights(trainer), held))
    return results


def check(mesh: Mesh, kinds: list[Any], data: list[Any] | None = None, **options: Any) -> list[list[Any]]:
    """Everything is as under one process; gives the names that every rank holds, by kind."""
    data = data if data is not None else rows(2 * BATCH)
    expected = train(None, kinds, {}, data)
    every = on_ranks(train, mesh, kinds, options, data)
    for rank, results in enumerate(every):
        for kind, got, wanted in zip(kinds, results, expected, strict=True):
            what = (kind.__name__, mesh, rank)
            if mesh[1] == 1:  # else each replica has the loss of its own samples
                assert got[0] == pytest.approx(wanted[0], rel=1e-10), what
            assert (got[1] is None) == (wanted[1] is None), what
            assert got[1] is None or got[1] == pytest.approx(wanted[1], rel=1e-10), what
            assert got[2] == pytest.approx(wanted[2], rel=1e-10), what
            if rank == 0:
                assert got[3].keys() == wanted[3].keys(), what
                for name, value in got[3].items():
                    assert torch.allclose(value, wanted[3][name], rtol=1e-10, atol=1e-10), (what, name)
    return [[result[4] for result in results] for results in every]


# --- teachers ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, num_blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Distils(LightningModule):
    """The usual one: a larger frozen teacher, asked before the student under ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net(5, 2 * WIDTH).eval().requires_grad_(False)
        self.student = Net(4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.student(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch).softmax(-1)
        loss = F.kl_div(self(batch).log_softmax(-1), wanted, reduction="none").sum(-1).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            agree = (self.teacher(batch).argmax(-1) == self(batch).argmax(-1)).double().mean()
        self.log("agree", agree)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class MeanTeacher(Distils):
    """The teacher is a copy of the student that follows it, asked after it; only the optimizer leaves it out."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.student)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch)
        with torch.no_grad():
            wanted = self.teacher(batch.flip(1)).softmax(-1)
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten()) + F.mse_loss(logits.softmax(-1), wanted)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.05)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 1)])
def test_a_frozen_teacher_answers_where_the_loss_is(mesh: Mesh) -> None:
    held = check(mesh, [Distils])
    if mesh[0] > 1:
        assert not any(name.startswith("teacher") for name in held[0][0]), "the first stage needs no teacher"
        assert any(name.startswith("teacher.blocks.0") for name in held[1][0])


# --- C59 --------------------------------------------------------------------------------------------------------------


class MySGD(torch.optim.Optimizer):
    """An optimizer of the user's own, with momentum, written as in the tutorials."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(parameter)
                state["velocity"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.add_(state["velocity"], alpha=-group["lr"])
        return loss


class ByNames(Tokens):
    """Groups by name, an optimizer of the user's own, a schedule that closes over it."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        bias = [p for name, p in named.items() if name.endswith("bias") or "norm" in name]
        rest = [p for name, p in named.items() if not (name.endswith("bias") or "norm" in name)]
        optimizer = MySGD([{"params": rest}, {"params": bias, "lr": 0.01}], lr=0.05)

        def rate(epoch: int) -> float:
            return 0.5**epoch * len(optimizer.param_groups)

        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate), "interval": "step"}]


class KeepsParameters(Tokens):
    """Parameters in lists, tuples and dicts from ``__init__`` on, for the optimizer and for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [block.up.weight for block in self.blocks]
        self.groups = {"norm": tuple(self.norm.parameters()), "rest": [*self.embed.parameters()]}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x, (WIDTH,), *self.groups["norm"]))

    def configure_optimizers(self) -> Any:
        known = {id(p) for group in (*self.groups.values(), self.decayed) for p in group}
        other = [p for p in self.parameters() if id(p) not in known]
        groups = [{"params": self.decayed, "weight_decay": 0.1}, {"params": other}]
        groups += [{"params": group, "lr": 0.02} for group in self.groups.values()]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.0)


@pytest.mark.parametrize(
    "mesh, zero", [((1, 2, 2), 1), ((1, 2, 1), 3), ((2, 1, 1), 1)], ids=["tp2dp2-zero1", "dp2-zero3", "pp2"]
)
def test_c59_optimizers_and_parameters_are_used_as_they_are(mesh: Mesh, zero: int) -> None:
    check(mesh, [ByNames, KeepsParameters], zero_stage=zero)


def test_a_teacher_is_cut_where_both_lists_are_named() -> None:
    held = check((2, 1, 1), [Distils], pipeline_blocks=["teacher.blocks", "student.blocks"])
    assert not any(name.startswith("student.blocks.3") for name in held[0][0])
    assert not any(name.startswith("teacher.blocks.0") for name in held[1][0])


class DistilsSilently(LightningModule):
    """No ``forward``, a deeper frozen teacher registered last, and a loss of hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net(4)
        self.teacher = Net(6).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden: list[Tensor] = []
        heads = (self.teacher.head, self.student.head)
        handles = [head.register_forward_pre_hook(lambda _, given: hidden.append(given[0])) for head in heads]
        with torch.no_grad():
            wanted = self.teacher(batch).log_softmax(-1)
        kl = F.kl_div(self.student(batch).log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1).mean()
        for handle in handles:
            handle.remove()
        self.log("kl", kl)
        return kl + F.mse_loss(hidden[1], hidden[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.05)


def test_a_deeper_teacher_is_known_without_a_forward() -> None:
    held = check((2, 1, 1), [DistilsSilently])
    assert not any(name.startswith("teacher") for name in held[0][0])
    assert any(name.startswith("teacher.blocks.0") for name in held[1][0])
    assert not any(name.startswith("student.blocks.0") for name in held[1][0])
    check((2, 1, 1), [DistilsSilently], pipeline_blocks=["teacher.blocks", "student.blocks"], pipeline_split=[6, 4])


class Follows(MeanTeacher):
    """The teacher follows the student, as in BYOL and its kin: values in place, and by ``data``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
        for slow, fast in pairs[::2]:
            slow.data = slow.data * 0.9 + fast.data * 0.1
        with torch.no_grad():
            for slow, fast in pairs[1::2]:
                slow.lerp_(fast, 0.1)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 1)])
def test_a_teacher_that_follows_the_student(mesh: Mesh) -> None:
    check(mesh, [Follows])


def test_a_teacher_cannot_follow_values_of_another_stage() -> None:
    with pytest.raises(RankFailure, match=r"test_field_cases_odd_code\.py:\d+ .* writes a value of 'student\.embed"):
        on_ranks(fit_following, (2, 1, 1), Follows)


def fit_following(mesh: Mesh, kind: Any) -> None:
    make_trainer(mesh).fit(seeded(kind), loader(rows(BATCH), BATCH, mesh))
