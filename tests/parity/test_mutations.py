"""The parity test can fail: each mechanism, broken on purpose, is seen in the numbers or ends the run.

A mutation changes one thing on every rank after the model is laid out, so it also gets past the check of
tensor-parallel plans at start-up. ``numbers`` means that the run ends and differs from the stock Trainer, ``ranks``
that ranks which should agree do not, ``error`` that the run fails with an error of its own, well before the time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lightning_3d.mesh import Axis
from lightning_3d.pipeline import engine
from lightning_3d.pipeline.micro_batches import loss_weights
from lightning_3d.random import LocalStream, StepStreams
from lightning_3d.schedules import Kind, Schedule, build
from lightning_3d.sharding import gradients, reducer, sharding
from lightning_3d.sharding.reducer import local_of
from lightning_3d.tensor_parallel import collectives, convert, embedding, layers, linear, loss, region, sequence
from lightning_3d.trainer.step import steps
from tests.harness import RankFailure, run_trainer
from tests.parity.record import Numbers, compare
from tests.parity.table import Row, reference, run_row
from tests.parity.test_dropout import check_masks, masks_of_rank
from tests.parity.test_parity import EXACT

Mutation = Callable[[Trainer], None]


def nothing(trainer: Trainer) -> None:
    pass


# --- tensor parallel ------------------------------------------------------------------------------------------------


def row_layers_do_not_sum(trainer: Trainer) -> None:
    layers.reduce_from_tp = lambda x, axis: x
    linear.all_reduce = _without_sums(of_outputs=True)


def column_layers_do_not_sum_input_gradients(trainer: Trainer) -> None:
    region.copy_to_tp = lambda x, axis: x
    linear.all_reduce = _without_sums(of_outputs=False)


def _without_sums(of_outputs: bool) -> Callable[..., Any]:
    """``all_reduce`` that leaves out the sums of row layers' outputs, or those of column layers' input gradients."""
    whole = linear.all_reduce

    def reduce(tensor: Tensor, axis: Axis, async_op: bool = False) -> Any:
        if async_op is of_outputs:
            return whole(tensor, axis, async_op=async_op)
        return SimpleNamespace(wait=lambda: tensor) if async_op else tensor

    return reduce


def embeddings_do_not_sum(trainer: Trainer) -> None:
    embedding.reduce_from_tp = lambda x, axis: x


def cross_entropy_does_not_sum(trainer: Trainer) -> None:
    whole = loss.all_reduce
    loss.all_reduce = lambda x, axis, op="sum": x if op == "sum" else whole(x, axis, op)


def partial_gradients_are_not_summed(trainer: Trainer) -> None:
    sharding.sum_over_tensor_parallel = lambda partial, mesh: None


def gathered_sequences_do_not_sum_gradients(trainer: Trainer) -> None:
    gather = collectives.gather_from_sequence
    for user in (region, convert):
        user.gather_from_sequence = lambda x, axis, dim, reduce_gradient: gather(x, axis, dim, reduce_gradient=False)
    of_outputs = linear.reduce_scatter

    def of_gradients(x: Any, axis: Any, dim: int, async_op: bool = False) -> Any:
        piece = x.chunk(axis.size, dim)[axis.rank].contiguous()
        return SimpleNamespace(wait=lambda: piece) if async_op else of_outputs(x, axis, dim)

    linear.reduce_scatter = of_gradients


def the_end_of_the_blocks_sums_gradients(trainer: Trainer) -> None:
    gather = collectives.gather_from_sequence
    sequence.gather_from_sequence = lambda x, axis, dim, reduce_gradient: gather(x, axis, dim, reduce_gradient=True)


# --- data parallel --------------------------------------------------------------------------------------------------


def replicas_do_not_reduce(trainer: Trainer) -> None:
    def send(self: Any, bucket: Any) -> None:
        self._next += 1

    reducer.BucketReducer._send = send


def replicas_sum_instead_of_average(trainer: Trainer) -> None:
    def receive(self: Any, bucket: Any) -> None:
        bucket.work.wait()
        bucket.work = None

    reducer.BucketReducer._receive = receive


def shards_sum_instead_of_average(trainer: Trainer) -> None:
    for module in trainer.strategy._assembled.stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)


def shards_are_reduced_for_the_last_micro_batch_only(trainer: Trainer) -> None:
    shards = trainer.strategy._assembled.sharding.shards
    prepare = shards.prepare_backward

    def forget(chunk: int, last_of_chunk: bool, last_of_step: bool, sync: bool) -> None:
        if last_of_chunk:
            for parameter in shards.parameters:
                parameter.grad = None
        prepare(chunk, last_of_chunk, last_of_step, sync)

    shards.prepare_backward = forget


# --- scale of the loss ----------------------------------------------------------------------------------------------


def losses_are_scaled_twice(trainer: Trainer) -> None:
    once = steps._scaled
    steps._scaled = lambda loss, factor: once(once(loss, factor), factor)


def accumulation_is_not_divided(trainer: Trainer) -> None:
    once = steps._scaled
    steps._scaled = lambda loss, factor: once(loss, factor * trainer.accumulate_grad_batches)


def token_weights_are_ignored(trainer: Trainer) -> None:
    steps.loss_weights = lambda pieces, weigh, device: [
        torch.as_tensor(weight) for weight in loss_weights(pieces, None, device)
    ]


def fillers_count(trainer: Trainer) -> None:
    runner = trainer.strategy._steps
    pieces, weigh = runner._pieces, runner._weigh
    runner._pieces = lambda batch, facts, **options: pieces(batch, replace(facts, filler=False), **options)
    runner._weigh = lambda cut, facts, **options: weigh(cut, replace(facts, filler=False), **options)


# --- whole-model gradients ------------------------------------------------------------------------------------------


def ties_are_not_summed(trainer: Trainer) -> None:
    sharding.sum_over_ties = lambda ties: None


def ties_count_twice_in_the_norm(trainer: Trainer) -> None:
    for item in trainer.strategy._assembled.sharding.owned:
        object.__setattr__(item, "counted", True)


def clipping_takes_the_local_norm(trainer: Trainer) -> None:
    gradients.global_norm = lambda owned, mesh, norm_type=2.0: torch.stack(
        [local_of(item.param.grad).norm() for item in owned if item.param.grad is not None]
    ).norm()


# --- random numbers -------------------------------------------------------------------------------------------------


def blocks_draw_otherwise_on_every_tensor_parallel_rank(trainer: Trainer) -> None:
    trainer.strategy._assembled.streams._block_salt = 1 + trainer.strategy.topology.tp.rank


def sharded_activations_draw_alike(trainer: Trainer) -> None:
    LocalStream.open = lambda self: None


def replicas_draw_alike(trainer: Trainer) -> None:
    trainer.strategy._assembled.streams._replica = 0


def micro_batches_draw_alike(trainer: Trainer) -> None:
    stream = StepStreams.micro_batch
    StepStreams.micro_batch = lambda self, step, micro_batch: stream(self, step, 0)


def pieces_of_the_sequence_draw_alike(trainer: Trainer) -> None:
    trainer.strategy._assembled.streams._block_salt = 0


# --- schedule -------------------------------------------------------------------------------------------------------


def _edit(change: Callable[[list[Any], int], list[Any]]) -> None:
    def build_wrong(*args: Any) -> Schedule:
        schedule = build(*args)
        actions = tuple(tuple(change(list(mine), rank)) for rank, mine in enumerate(schedule.actions))
        return replace(schedule, actions=actions)

    engine.build = build_wrong


def a_send_is_missing(trainer: Trainer) -> None:
    def drop(actions: list[Any], rank: int) -> list[Any]:
        first = next((a for a in actions if a.kind is Kind.SEND_F and a.micro_batch == 1), None)
        return [action for action in actions if action is not first]

    _edit(drop)


def a_backward_comes_before_its_forward(trainer: Trainer) -> None:
    def swap(actions: list[Any], rank: int) -> list[Any]:
        backward = next(a for a in actions if a.kind is Kind.B)
        return [backward, *(action for action in actions if action is not backward)]

    _edit(swap)


def the_last_micro_batch_gets_no_backward(trainer: Trainer) -> None:
    backwards = (Kind.B, Kind.SEND_B, Kind.RECV_B)

    def drop(actions: list[Any], rank: int) -> list[Any]:
        last = max(action.micro_batch for action in actions)
        return [action for action in actions if not (last and action.micro_batch == last and action.kind in backwards)]

    _edit(drop)


def stages_swap_two_micro_batches(trainer: Trainer) -> None:
    def swap(actions: list[Any], rank: int) -> list[Any]:
        order = {0: 1, 1: 0} if rank == 0 and len({action.micro_batch for action in actions}) > 1 else {}
        forward = (Kind.F, Kind.B)
        return [
            a._replace(micro_batch=order.get(a.micro_batch, a.micro_batch)) if a.kind in forward else a for a in actions
        ]

    _edit(swap)


CASES: list[tuple[Mutation, str, str]] = [
    (nothing, "gpt dp2.tp2 - 2 1 64-true clip", "parity"),
    (row_layers_do_not_sum, "gpt tp2 - - - 64-true", "ranks"),
    (column_layers_do_not_sum_input_gradients, "gpt tp2 - - - 64-true", "ranks"),
    (embeddings_do_not_sum, "gpt tp2 - - - 64-true", "ranks"),
    (cross_entropy_does_not_sum, "gpt tp2 - - - 64-true lossp", "ranks"),
    (partial_gradients_are_not_summed, "gpt tp2 - - - 64-true sp", "ranks"),
    (gathered_sequences_do_not_sum_gradients, "gpt tp2 - - - 64-true sp", "numbers"),
    (the_end_of_the_blocks_sums_gradients, "gpt tp2 - - - 64-true sp", "numbers"),
    (replicas_do_not_reduce, "gpt dp2 - 2 0 64-true", "ranks"),
    (replicas_sum_instead_of_average, "gpt dp2 - - 0 64-true", "numbers"),
    (shards_sum_instead_of_average, "gpt dp2 - - 1 64-true", "numbers"),
    (shards_are_reduced_for_the_last_micro_batch_only, "gpt dp2 - 2 2 64-true", "numbers"),
    (losses_are_scaled_twice, "gpt pp2 1f1b 4 - 64-true", "numbers"),
    (accumulation_is_not_divided, "gpt dp2 - 2 1 64-true acc2", "numbers"),
    (token_weights_are_ignored, "padded dp2 - 3 1 64-true", "numbers"),
    (fillers_count, "gpt dp2 - 2 0 64-true lone", "numbers"),
    (ties_are_not_summed, "gpt pp2 1f1b 4 - 64-true tied", "error"),
    (ties_count_twice_in_the_norm, "gpt pp2 1f1b 4 - 64-true tied clip", "numbers"),
    (clipping_takes_the_local_norm, "gpt pp2 1f1b 4 - 64-true clip", "numbers"),
    (blocks_draw_otherwise_on_every_tensor_parallel_rank, "gpt tp2 - - - 64-true dropout", "ranks"),
    (a_send_is_missing, "gpt pp2 1f1b 4 - 64-true patience", "error"),
    (a_backward_comes_before_its_forward, "gpt pp2 1f1b 4 - 64-true patience", "error"),
    (the_last_micro_batch_gets_no_backward, "gpt pp2 gpipe 4 - 64-true", "numbers"),
    (stages_swap_two_micro_batches, "gpt pp2 gpipe 4 - 64-true patience", "error"),
]


@pytest.mark.parametrize(("mutation", "line", "expected"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_broken_mechanism_shows(mutation: Mutation, line: str, expected: str) -> None:
    row = Row.parse(line)
    outcome, detail = _outcome(mutation, row)
    assert outcome == expected, detail


def _outcome(mutation: Mutation, row: Row) -> tuple[str, str]:
    try:
        ranks: list[Numbers] = run_trainer(row.world, broken_rank, row, mutation)
    except RankFailure as failure:
        assert failure.rank is not None, f"the run hung:\n{failure}"
        return "error", str(failure).splitlines()[0]
    drift = {name: size for numbers in ranks for name, size in numbers.drift.items()}
    if drift or any(numbers.norms != ranks[0].norms or numbers.logged != ranks[0].logged for numbers in ranks):
        return "ranks", str(drift)
    differences = compare(reference(row.reference()), ranks[0])
    seen = {
        kind: difference for kind, difference in differences.items() if not difference.value <= EXACT[row.precision]
    }
    return ("numbers" if seen else "parity"), str(seen)


def broken_rank(rank: int, world: int, row: Row, mutation: Mutation) -> Numbers:
    return run_row(row, callbacks=[_Break(mutation)])


class _Break(Callback):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mutation(trainer)


@pytest.mark.parametrize(
    ("mutation", "sequence_parallel"),
    [
        (sharded_activations_draw_alike, False),
        (blocks_draw_otherwise_on_every_tensor_parallel_rank, False),
        (replicas_draw_alike, False),
        (micro_batches_draw_alike, False),
        (pieces_of_the_sequence_draw_alike, True),
    ],
)
def test_a_swapped_seed_shows_in_the_masks(mutation: Mutation, sequence_parallel: bool) -> None:
    ranks = run_trainer(4, masks_of_rank, sequence_parallel, mutation)
    with pytest.raises(AssertionError, match="elements"):
        check_masks(ranks, sequence_parallel)
