"""Field cases about gradients: their norm, their scale, weights that several ranks hold, and parameters without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from lightning_3d import ThreeDStrategy
from lightning_3d.placeholder import is_placeholder
from tests.dist.lightning_modules import LENGTH, VOCAB, Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded
from tests.dist.test_field_cases_data import assert_same_weights, collate, of_length

BATCH = 8
Case = tuple[Callable[[], LightningModule], dict[str, Any], dict[str, Any]]
"""A module, options of the strategy, options of the Trainer."""


class Watch(Callback):
    """The norm of the gradients as user code sees it before every step, and the loss of every batch."""

    def __init__(self) -> None:
        self.norms: list[tuple[float, float]] = []
        self.losses: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        if isinstance(trainer.strategy, ThreeDStrategy):
            norms = (trainer.strategy.gradient_norm(), trainer.strategy.gradient_norm(float("inf")))
        else:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            norms = (nn.utils.get_total_norm(gradients), nn.utils.get_total_norm(gradients, float("inf")))
        self.norms.append((float(norms[0]), float(norms[1])))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


Result = tuple[list[tuple[float, float]], list[float], dict[str, Tensor]]


def train(mesh: Mesh | None, cases: list[Case], data: list[Any]) -> list[Result]:
    results = []
    for make, options, trainer_options in cases:
        watch = Watch()
        trainer = make_trainer(mesh, options if mesh else None, callbacks=[watch], **trainer_options)
        trainer.fit(seeded(make), loader(data, BATCH, mesh))
        norms = watch.norms + [(norm, 0.0) for norm in getattr(trainer.lightning_module, "norms", [])]
        results.append((norms, watch.losses, whole_parameters(trainer)))
    return results


def whole_parameters(trainer: Trainer) -> dict[str, Tensor]:
    strategy, module = trainer.strategy, trainer.lightning_module
    state = strategy.full_state_dict() if isinstance(strategy, ThreeDStrategy) else module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}


def check(mesh: Mesh, cases: list[Case], data: list[Any] | None = None) -> None:
    """Norms on every rank, losses where there is one replica, and the weights, are those of one process."""
    data = data or rows(2 * BATCH)
    expected: list[Result] = []
    known: dict[str, Result] = {}
    for case in cases:
        key = repr((case[0], case[2]))
        if key not in known:
            known[key] = train(None, [case], data)[0]
        expected.append(known[key])
    for rank, results in enumerate(on_ranks(train, mesh, cases, data)):
        for case, got, wanted in zip(cases, results, expected, strict=True):
            assert got[0] == [pytest.approx(norms, rel=1e-9) for norms in wanted[0]], (rank, case)
            if mesh[1] == 1:
                assert got[1] == pytest.approx(wanted[1], rel=1e-9), (rank, case)
            if rank == 0:
                assert_same_weights(got[2], wanted[2])


# --- C02 ------------------------------------------------------------------------------------------------------------


class Loud(Tokens):
    """Layers of very different scale, so that every stage has another norm; plain SGD shows the scale of a step."""

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.down.weight.data *= 10.0 ** (1 - i)

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


class ClipsByLargest(Loud):
    """Clips with torch's own functions, by the largest entry, and then only the head by value."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        norm = clip_grad_norm_(self.parameters(), 0.05, norm_type=float("inf"))
        self.norms.append(float(norm))
        nn.utils.clip_grad_value_(self.head.parameters(), 0.02)

    def on_train_end(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))


BY_NORM = {"gradient_clip_val": 0.1}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("mesh", [(2, 1, 1), (4, 1, 1)])
def test_c02_clipping_uses_the_norm_of_the_whole_model_on_every_stage(mesh: Mesh) -> None:
    check(mesh, [(Loud, {}, BY_NORM), (Loud, {}, BY_VALUE)])


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 2)])
def test_c02_clipping_by_the_user_with_torchs_function_uses_the_whole_model(mesh: Mesh) -> None:
    check(mesh, [(ClipsByLargest, {}, {})])


# --- C03 ------------------------------------------------------------------------------------------------------------


class HeadNormed(nn.Module):
    """Attention with norms of q and k per head, biases everywhere and a plain scale, as newer models have them."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(width // heads), nn.LayerNorm(width // heads)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.9))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_in(x)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y))
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2)) * self.scale
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Normed(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HeadNormed() for _ in range(2))
        self.gain = nn.Parameter(torch.ones(8))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x * self.gain))


class Replicas(Callback):
    """After every step, by name: parameters that the tensor-parallel ranks should hold alike, but do not."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.apart: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        axis, cuts = strategy.topology.tp, strategy._assembled.plan.cuts
        for name, parameter in module.named_parameters():
            if name in cuts or is_placeholder(parameter):
                continue
            self.whole.add(name)
            local = getattr(parameter, "_local_tensor", parameter).detach()
            copies = [torch.empty_like(local) for _ in range(axis.size)]
            torch.distributed.all_gather(copies, local.contiguous(), group=axis.group)
            if not all(torch.equal(copy, copies[0]) for copy in copies):
                self.apart.append(f"{name} after batch {trainer.global_step}")


def replicas(mesh: Mesh | None, options: dict[str, Any]) -> Any:
    callbacks: list[Callback] = [Watch()]
    if mesh:
        callbacks.append(Replicas())
    trainer = make_trainer(mesh, options if mesh else None, callbacks=callbacks)
    trainer.fit(seeded(Normed), loader(list(collate(of_length([8] * 5 * BATCH))), BATCH, mesh))
    found = (callbacks[1].whole, callbacks[1].apart) if mesh else None
    return found, callbacks[0].norms, whole_parameters(trainer)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 4), (1, 2, 2)])
def test_c03_weights_that_tensor_parallel_ranks_replicate_stay_equal_to_the_bit(mesh: Mesh, sequence: bool) -> None:
    _, norms, weights = replicas(None, {})
    for rank, ((whole, apart), got, found) in enumerate(on_ranks(replicas, mesh, {"sequence_parallel": sequence})):
        assert {"gain", "norm.weight", "blocks.0.norm.bias", "blocks.1.q_norm.weight", "blocks.0.scale"} <= whole
        assert {"blocks.0.out.bias", "blocks.1.down.bias"} <= whole, "the bias of a row layer is added once"
        assert not apart
        assert len(got) == 5
        assert got == [pytest.approx(pair, rel=1e-9) for pair in norms]
        if rank == 0:
            assert_same_weights(found, weights)


# --- C04 ------------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ModuleDict({"words": nn.Embedding(VOCAB, 8), "mix": nn.Linear(8, 8)})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table["mix"](self.table["words"](tokens))


class TwiceTied(Tokens):
    """Head tied to the embedding, a whole sub-module used at both ends, and a scale shared by two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.decoder = nn.Module()
        self.decoder.mix = self.inner.table["mix"]
        self.head = nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.inner.table["words"].weight
        self.norm_in = nn.LayerNorm(8)
        self.norm.weight = self.norm_in.weight
        del self.embed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm_in(self.inner(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.decoder.mix(self.norm(x)))

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 1, 1), {}),
        ((4, 1, 1), {"num_micro_batches": 4}),
        ((2, 1, 1), {"schedule": "interleaved_1f1b", "virtual_stages": 2}),
        ((2, 1, 2), {}),
        ((2, 2, 1), {"zero_stage": 3}),
    ],
)
def test_c04_several_ties_between_the_ends_of_a_pipeline_train_as_one_weight(
    mesh: Mesh, options: dict[str, Any]
) -> None:
    check(mesh, [(TwiceTied, options, BY_NORM)])


# --- C10 ------------------------------------------------------------------------------------------------------------


class Reduces(Tokens):
    """A loss that is the mean or the sum over samples; SGD without momentum shows any factor."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1]).transpose(1, 2)
        losses = F.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1)
        return losses.sum() if self.reduction == "sum" else losses.mean()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.02)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 1)])
def test_c10_gradients_do_not_depend_on_the_number_of_micro_batches(mesh: Mesh) -> None:
    mean, total = partial(Reduces, "mean"), partial(Reduces, "sum")
    cases: list[Case] = [(mean, {"num_micro_batches": count}, {}) for count in (1, 2, 4, 8)]
    cases += [(total, {"num_micro_batches": count, "loss_reduction": "sum"}, {}) for count in (1, 2, 8)]
    cases += [(mean, {"num_micro_batches": 3}, {"accumulate_grad_batches": 2})]
    check(mesh, cases, rows(2 * BATCH + 3))


# --- C11 ------------------------------------------------------------------------------------------------------------


class Counts(Tokens):
    """Cross entropy over the tokens that are not padding, with the hook that says how many these are."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:], ignore_index=0)

    def micro_batch_weight(self, batch: Tensor) -> Tensor:
        return (batch[:, 1:] != 0).sum()

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 1)])
def test_c11_with_the_weight_hook_padding_counts_for_nothing_however_a_batch_is_cut(mesh: Mesh) -> None:
    data = list(collate(of_length([1, 9, 1, 2, 9, 9, 1, 1, 3, 1, 9, 2, 1, 1, 1, 9])))
    cases: list[Case] = [(Counts, {"num_micro_batches": count}, {}) for count in (1, 2, 4)]
    check(mesh, cases, data)


# --- C20, C21 -------------------------------------------------------------------------------------------------------


class Adam(Tokens):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=0.05, **self.how)


SOME = {"tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "blocks.2.*": "replicate"}}


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2)])
def test_c20_clip_and_step_work_on_cut_and_whole_layers_together(mesh: Mesh) -> None:
    ways: list[dict[str, Any]] = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]
    cases: list[Case] = [(partial(Adam, **way), SOME, BY_NORM) for way in ways]
    cases += [(Adam, {**SOME, "zero_stage": 0}, BY_NORM), (Adam, {**SOME, "zero_stage": 3}, BY_VALUE)]
    check(mesh, cases)


class ClipsItself(Adam):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class ClipsItsValues(Adam):
    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")


@pytest.mark.parametrize("zero", [1, 3])
def test_c21_clipping_of_shards_is_that_of_the_whole_by_flag_and_by_call(zero: int) -> None:
    options = {"zero_stage": zero}
    cases: list[Case] = [(Adam, options, BY_NORM), (Adam, options, BY_VALUE)]
    cases += [(ClipsItself, options, {}), (ClipsItsValues, options, {})]
    check((1, 4, 1), cases)


# --- C36 ------------------------------------------------------------------------------------------------------------


class Partly(Tokens):
    """Trains only what begins with one of the given names, with a scheduler and a filtered optimizer."""

    def __init__(self, *trained: str) -> None:
        super().__init__(num_blocks=6)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(trained))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


LAST, FIRST, MIDDLE = (("head", "norm"), ("embed",), ("blocks.3",))


def train_partly(mesh: Mesh | None, folder: str, trained: list[tuple[str, ...]]) -> list[Any]:
    """Two epochs: in one go under one process, else with a checkpoint between them."""
    results = []
    for names in trained:
        path = f"{folder}/{names[0]}.ckpt"
        for resume, epochs in ((None, 1), (path, 2)) if mesh else ((None, 2),):
            watch = Watch()
            trainer = make_trainer(mesh, callbacks=[watch], max_epochs=epochs, **BY_NORM)
            trainer.fit(seeded(partial(Partly, *names)), loader(rows(2 * BATCH), BATCH, mesh), ckpt_path=resume)
            if mesh:
                trainer.save_checkpoint(path)
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        results.append((watch.norms[-2:], watch.losses[-2:], rate, whole_parameters(trainer)))
    return results


@pytest.mark.parametrize("mesh", [(3, 1, 1), (3, 2, 1)])
def test_c36_stages_without_trainable_parameters_take_part(mesh: Mesh, tmp_path: Any) -> None:
    trained = [LAST, FIRST, MIDDLE]
    expected = train_partly(None, "", trained)
    for rank, results in enumerate(on_ranks(train_partly, mesh, str(tmp_path), trained)):
        for got, wanted in zip(results, expected, strict=True):
            assert len(got[1]) == 2 and got[0] == [pytest.approx(pair, rel=1e-9) for pair in wanted[0]]
            if mesh[1] == 1:
                assert got[1] == pytest.approx(wanted[1], rel=1e-9)
            assert got[2] == pytest.approx(wanted[2])
            if rank == 0:
                assert_same_weights(got[3], wanted[3])


# --- C37 ------------------------------------------------------------------------------------------------------------


class Skips(Tokens):
    """A layer is left out where no sample of the batch asks for it, and another is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleDict({"sometimes": nn.Linear(8, 8), "never": nn.Linear(8, 8)})
        self.example_input_array = ((torch.zeros(2, LENGTH, dtype=torch.long), torch.ones(2)),)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, flags = batch
        x = self.embed(tokens)
        if flags.any():
            x = x + flags[:, None, None] * self.extra["sometimes"](x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = self((batch[0][:, :-1], batch[1]))
        return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def flagged() -> list[tuple[Tensor, Tensor]]:
    """Replica 1 of 2 (every second sample) has flags in even batches only; the last batch has none at all."""
    return [
        (row, torch.tensor(float(i < 3 * BATCH and (i % 2 == 0 or i // BATCH % 2 == 0))))
        for i, row in enumerate(rows(4 * BATCH))
    ]


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 2, 2), (2, 2, 1)])
def test_c37_a_layer_that_one_replica_skips_counts_as_zero_there(mesh: Mesh) -> None:
    check(mesh, [(Skips, {"zero_stage": zero}, BY_NORM) for zero in (0, 1, 3)], flagged())
