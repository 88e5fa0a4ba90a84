"""Field cases about memory and traffic: what a rank holds, for how long, and how often it sends."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.reducer import local_of
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded, whole_weights
from tests.dist.test_field_cases_data import assert_same_weights

# --- C13 ------------------------------------------------------------------------------------------------------------


class Bytes(Callback):
    """Bytes of parameters, gradients and optimizer state that this rank holds around a step."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.held["gradients"] = _bytes(p.grad for p in module.parameters() if p.grad is not None)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.held["parameters"] = _bytes(p for p in module.parameters() if not is_placeholder(p))
        states = trainer.optimizers[0].state.values()
        self.held["optimizer"] = _bytes(value for state in states for value in state.values() if value.dim())


def _bytes(tensors: Any) -> int:
    return sum(local_of(tensor).untyped_storage().nbytes() for tensor in tensors)


def with_zero(mesh: Mesh | None, stages: list[int]) -> Any:
    results = []
    for stage in stages:
        watch = Bytes()
        options = {"zero_stage": stage, "num_micro_batches": 4}
        trainer = make_trainer(mesh, options if mesh else None, callbacks=[watch], gradient_clip_val=0.1)
        trainer.fit(seeded(Tokens), loader(rows(16), 8, mesh))
        results.append((watch.held, whole_weights(trainer)))
    return results


def test_c13_every_zero_stage_trains_a_pipeline_alike_and_holds_its_share() -> None:
    ((_, weights),) = with_zero(None, [0])
    for rank, results in enumerate(on_ranks(with_zero, (2, 2, 1), [0, 1, 2, 3])):
        whole = results[0][0]
        for stage, (held, found) in enumerate(results):
            if rank == 0:
                assert_same_weights(found, weights)
            # The rest of a division is padded: up to a row of every parameter.
            for kind in ("optimizer", "gradients", "parameters"):
                assert held[kind] == pytest.approx(whole[kind] / (2 if stage else 1), rel=0.1), (stage, kind)


# --- C60 ------------------------------------------------------------------------------------------------------------


class Alive(Callback):
    """Follows what this rank's blocks receive, keep for backward and send: how much lives at once, and for how long."""

    def __init__(self) -> None:
        self.alive: dict[str, set[int]] = {"received": set(), "kept": set(), "sent": set()}
        self.peak = dict.fromkeys(self.alive, 0)
        self.peaks: list[dict[str, int]] = []
        self.left: list[dict[str, int]] = []
        self.calls = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        blocks = [block for block in module.blocks if not is_placeholder(block.up.weight)]
        blocks[0].norm.register_forward_hook(lambda block, args, output: self._follow("received", args[0]))
        blocks[0].up.register_forward_hook(lambda block, args, output: self._follow("kept", output))
        blocks[-1].register_forward_hook(lambda block, args, output: self._follow("sent", output))

    def _follow(self, kind: str, value: Tensor) -> None:
        if is_placeholder(value):
            return
        self.calls += 1
        alive = self.alive[kind]
        alive.add(self.calls)
        # What the graph saves for backward keeps this object too.
        weakref.finalize(value, alive.discard, self.calls)
        self.peak[kind] = max(self.peak[kind], len(alive))

    def on_train_batch_end(self, *args: Any) -> None:
        gc.collect()
        self.peaks.append(dict(self.peak))
        self.left.append({kind: len(alive) for kind, alive in self.alive.items()})
        self.peak = dict.fromkeys(self.alive, 0)


def live_activations(mesh: Mesh, counts: list[int]) -> Any:
    results = []
    for count in counts:
        watch = Alive()
        trainer = make_trainer(mesh, {"num_micro_batches": count}, callbacks=[watch])
        trainer.fit(seeded(Tokens), loader(rows(64), 32, mesh))
        results.append((watch.peaks[-1], watch.left))
    return trainer.strategy.topology.pp.rank, results


def test_c60_live_activations_are_bounded_by_the_stage_and_none_outlives_its_step() -> None:
    for stage, results in on_ranks(live_activations, (2, 1, 1), [4, 32]):
        for peak, left in results:
            assert peak["kept"] == 2 - stage
            assert max(peak.values()) <= 2
            assert [set(kinds.values()) for kinds in left] == [{0}, {0}]


# --- C61 ------------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts collectives that carry gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::") and not name.endswith("barrier"):
            self.count[name.split("::")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


class Sends(Callback):
    def __init__(self) -> None:
        self.batches: list[dict[str, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.mode = Traffic()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.batches.append(dict(self.mode.count))


def accumulated(mesh: Mesh | None, stages: list[int]) -> Any:
    results = []
    for stage in stages:
        watch = Sends()
        trainer = make_trainer(
            mesh,
            {"zero_stage": stage, "sanity_checks": 0} if mesh else None,
            callbacks=[watch],
            accumulate_grad_batches=4,
        )
        trainer.fit(seeded(Tokens), loader(rows(64), 8, mesh))
        results.append((watch.batches, whole_weights(trainer)))
    return results


def test_c61_accumulated_batches_send_no_gradients_up_to_zero_1_and_shards_from_zero_2() -> None:
    ((_, weights),) = accumulated(None, [0])
    for rank, results in enumerate(on_ranks(accumulated, (1, 2, 1), [0, 1, 2, 3])):
        for stage, (batches, found) in enumerate(results):
            if rank == 0:
                assert_same_weights(found, weights)
            assert len(batches) == 8
            scatters = [sum(n for name, n in batch.items() if "reduce_scatter" in name) for batch in batches]
            gathers = [sum(n for name, n in batch.items() if "allgather" in name) for batch in batches]
            units = max(scatters)
            if stage == 0:
                assert scatters == [0] * 8
            elif stage == 1:
                assert scatters == [0, 0, 0, units] * 2, "once per optimizer step"
                # What is left are the numbers that replicas tell each other.
                assert gathers[1] == gathers[2] == gathers[3] == gathers[0] - units, "parameters stay gathered"
            else:
                assert scatters == [units] * 8, "every batch, which saves the memory of whole gradients"
