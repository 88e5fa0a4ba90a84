"""One batch: from Lightning's call to the engine and back, with gradients, logs and outputs as under one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.collectives import all_reduce
from lightning_3d.config import ParallelConfig, default_micro_batches, micro_batch_count
from lightning_3d.errors import ConfigError
from lightning_3d.events import Phase
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.engine import Step
from lightning_3d.pipeline.foreign import refuse_foreign
from lightning_3d.pipeline.micro_batches import (
    MicroBatch,
    batch_size_of,
    cut,
    cut_parts,
    find_parts,
    in_proportion,
    loss_weights,
    part_sizes,
    piece_sizes,
    tokens_of,
)
from lightning_3d.pipeline.needs import Alone
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.random import mix_seed
from lightning_3d.tensor_parallel import mixing_refused
from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger
from lightning_3d.trainer.data.outputs import combine
from lightning_3d.trainer.logging.logs import LogRelay
from lightning_3d.trainer.module.mirror import StateMirror
from lightning_3d.trainer.setup.assembly import Assembly
from lightning_3d.trainer.setup.preflight import bubble_warning, check_steps
from lightning_3d.trainer.step.report import StepReport


class StepRunner:
    """Runs the user's steps for the Trainer.

    Without a pipeline and with one micro-batch the step runs as under any strategy: Lightning's closure calls forward,
    ``zero_grad`` and backward in its order. Otherwise the engine runs forward and backward of all micro-batches within
    :meth:`training_step`; the fresh gradients are set aside while Lightning zeroes the old ones, and put back in
    :meth:`backward`, so that every hook fires in Lightning's order, once, and sees what it would see.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        assembly: Assembly,
        config: ParallelConfig,
        mesh: Mesh,
        precision: ThreeDPrecision,
        ledger: BatchLedger,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._assembly = assembly
        self._config = config
        self._mesh = mesh
        self._precision = precision
        self._ledger = ledger
        self._events = mesh.events
        self._relay = LogRelay(module, mesh)
        cut = assembly.stage.cut
        mirror = StateMirror(module, in_block=cut.in_block, is_everywhere=cut.is_everywhere)
        self._report = StepReport(module, mesh, self._relay, mirror)
        self._loss_factor: float | Tensor = 1.0
        self._fresh: list[tuple[Tensor, Tensor | None]] | None = None
        self._in_engine = False
        self._looked_for_replaced = False
        self._proportions_told = False
        check_steps(module, config, mesh.pp.size)
        if not module.automatic_optimization:
            assembly.sharding.allow_manual_use()
        self._expected_pieces = config.num_micro_batches or default_micro_batches(mesh.pp.size)

    # --- training --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any) -> Any:
        """The user's ``training_step`` on a batch; with the engine, its backward too."""
        facts = self._ledger.current
        pieces = self._pieces(args[0], facts, training=True)
        self._tell_of_bubble(len(pieces), facts)
        self._in_engine = self._mesh.pp.size > 1 or len(pieces) > 1
        self._count(facts, len(pieces), args[0])
        if self._mesh.world.size == 1 and not self._in_engine:
            with self._precision.train_step_context(), self._events.span(Phase.FORWARD, 0, 0):
                return self._module.training_step(*args)
        weights, factors = self._weigh(pieces, facts)
        self._begin(facts, len(pieces))
        call = self._caller("training", self._module.training_step, args, weights)
        if not self._in_engine:
            self._loss_factor = factors[0]
            output = self._report.publish(self._run_alone(call, pieces[0]))
            if not self._module.automatic_optimization:
                self._assembly.sharding.release()
                return output
            return self._in_step(output)

        if self._trainer.fit_loop._skip_backward:  # StochasticWeightAveraging goes once more through the data
            with torch.no_grad():
                outputs = self._assembly.engine.run(Step(pieces=pieces, call=call, mode="forward"))
            self._assembly.sharding.release()
            return self._in_step(self._report.publish(self._combined(outputs, weights, pieces)))

        window_starts = self._batch_idx % self._trainer.accumulate_grad_batches == 0
        old = self._set_old_gradients_aside() if window_starts else None

        def backward(result: Any, piece: MicroBatch) -> None:
            if result is None:  # earlier chunks get zeros
                return
            loss = _loss_of(result)
            scaled = _scaled(loss, factors[piece.index] / self._trainer.accumulate_grad_batches)
            self._module.backward(self._precision.scale_loss(scaled))

        engine = self._assembly.engine
        outputs = engine.run(Step(pieces=pieces, call=call, backward=backward, sync=self._sync, mode="train"))
        self._assembly.sharding.finish(self._sync)
        if old is not None:
            self._fresh = [(p, p.grad) for p in self._parameters]
            for parameter, gradient in old:
                parameter.grad = gradient
        return self._in_step(self._report.publish(self._combined(outputs, weights, pieces)))

    def _in_step(self, output: Any) -> Any:
        """What the step gave; in its place a loss without gradients if it gave None, so that all ranks go on alike."""
        if output is not None or self._mesh.world.size == 1:
            return output
        if self._fresh is not None and not self._report.any_output:  # where another replica has a loss, zeros are right
            self._fresh = [(parameter, None) for parameter, _ in self._fresh]
        return torch.zeros((), device=self._mesh.device, requires_grad=True)

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of what :meth:`training_step` returned, with the hooks around it."""
        loss = self._precision.pre_backward(loss, self._module)
        if self._in_engine:
            self._put_gradients_back()
        else:
            sharding, sync = self._assembly.sharding, self._sync
            earlier = self._take_gradients() if not self._module.automatic_optimization else []
            sharding.gather()
            sharding.prepare_backward(0, last_of_chunk=True, last_of_step=True, sync=sync)
            scaled = self._precision.scale_loss(_scaled(loss, self._loss_factor))
            with self._events.span(Phase.BACKWARD, 0, 0):
                self._precision.backward(scaled, self._module, optimizer, *args, **kwargs)
            sharding.finish(sync)
            for parameter, gradient in earlier:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if not self._looked_for_replaced:
            self._looked_for_replaced = True
            self._assembly.refuse_replaced()
        return self._precision.post_backward(loss, self._module)

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients of earlier backwards, off their parameters: they are complete, and not to be reduced again."""
        # Clones: the reducer writes the next gradients where these are.
        earlier = [(parameter, parameter.grad.clone()) for parameter in self._parameters if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        return earlier

    def _tell_of_bubble(self, num_pieces: int, facts: BatchFacts) -> None:
        """Once, when the first batch could be cut into more pieces than it is; options were looked at before."""
        expected, self._expected_pieces = self._expected_pieces, 0
        is_short = num_pieces < min(expected, self._common_size(facts))
        if is_short and (message := bubble_warning(self._config, self._mesh.pp.size, num_pieces)):
            rank_zero_info(message)

    def _warn_of_proportions(self) -> None:
        """Once, when a mean per loader comes out otherwise than in one process."""
        weighs = getattr(self._module, "micro_batch_weight", None) is not None
        if self._proportions_told or weighs or self._config.loss_reduction == "sum":
            return
        self._proportions_told = True
        rank_zero_warn(_OTHER_PROPORTIONS)

    @property
    def _parameters(self) -> list[Tensor]:
        return [item.param for item in self._assembly.sharding.owned]

    @property
    def _batch_idx(self) -> int:
        return self._trainer.fit_loop.epoch_loop.batch_idx

    @property
    def _sync(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return not self._module.automatic_optimization or not self._trainer.fit_loop._should_accumulate()

    def _set_old_gradients_aside(self) -> list[tuple[Tensor, Tensor | None]]:
        """Take the last step's gradients off the parameters, and keep them only if user code may look at them."""
        module = self._module
        looks = is_overridden("on_before_zero_grad", module) or is_overridden("optimizer_zero_grad", module)
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        looks = looks or any(is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in callbacks)
        old = []
        for parameter in self._parameters:
            # A clone: the reducer writes the fresh gradients where the old ones are.
            kept = parameter.grad.clone() if looks and parameter.grad is not None else None
            old.append((parameter, kept))
            parameter.grad = None
        return old

    def _put_gradients_back(self) -> None:
        for parameter, gradient in self._fresh or ():
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient is not None:  # the user's `optimizer_zero_grad` keeps gradients on purpose
                parameter.grad = parameter.grad + gradient
        self._fresh = None

    # --- evaluation ------------------------------------------------------------------------------------------------

    def evaluation_step(self, mode: str, *args: Any) -> Any:
        """The user's ``validation_step``, ``test_step`` or ``predict_step`` on a batch.

        Args:
            mode: ``"validation"``, ``"test"`` or ``"predict"``.
            *args: The batch and what else Lightning passes.
        """
        step_fn = getattr(self._module, f"{mode}_step")
        if self._mesh.world.size == 1:
            self._count(self._ledger.current, 1, args[0])
            with self._context(mode), self._events.span(Phase.FORWARD, 0, 0):
                return step_fn(*args)
        facts = self._ledger.current
        pieces = self._pieces(args[0], facts, training=False)
        self._count(facts, len(pieces), args[0])
        # What is predicted need not have the targets that the user's weight counts.
        weights, _ = self._weigh(pieces, facts, has_loss=mode != "predict")
        self._begin(facts, len(pieces))
        call = self._caller(mode, step_fn, args, weights)
        if self._mesh.pp.size == 1:
            output = self._run_alone(call, pieces[0])
        else:
            outputs = self._assembly.engine.run(Step(pieces=pieces, call=call, mode=mode))
            output = self._combined(outputs, weights, pieces)
        self._assembly.sharding.release()
        return self._report.publish(output)

    # --- both ------------------------------------------------------------------------------------------------------

    def _count(self, facts: BatchFacts, num_pieces: int, batch: Any) -> None:
        if self._events.is_recording:
            of_own = not facts.filler
            self._events.count(num_pieces, facts.size if of_own else 0, tokens_of(batch) if of_own else 0)

    def _begin(self, facts: BatchFacts, num_pieces: int) -> None:
        self._relay.begin(facts, num_pieces)
        self._report.begin(facts.filler, num_pieces)
        self._assembly.sharding.prepare_forward()

    def _pieces(self, batch: Any, facts: BatchFacts, training: bool) -> list[MicroBatch]:
        """Cut the batch. Every replica makes as many pieces, whatever its own share of a ragged batch is."""
        stages = self._mesh.pp.size
        if facts.is_uneven and training:
            self._warn_of_proportions()
        if not training and stages == 1:
            return [_whole(batch, facts)]
        count = micro_batch_count(self._config, stages, self._common_size(facts))
        if facts.most_pieces is not None:
            count = min(count, facts.most_pieces)
        split_hook = getattr(self._module, "split_micro_batches", None)
        if count == 1 and split_hook is None:
            return [_whole(batch, facts)]
        parts = find_parts(batch, [path for path, _ in facts.parts]) if split_hook is None else None
        if parts is not None and len({part.size for part in parts}) > 1:
            sizes = part_sizes([part.size for part in parts], count)
            if training and not in_proportion(sizes):
                self._warn_of_proportions()
            pieces = cut_parts(batch, parts, sizes)
        else:
            total = batch_size_of(batch)  # now: hooks may have put more samples into the batch
            size = self._config.micro_batch_size
            sizes_of_all = piece_sizes(total, count, size if size is not None and count * size >= total else None)
            pieces = cut(batch, sizes_of_all, split_hook)
        return [MicroBatch(piece.index, piece.data, 0) for piece in pieces] if facts.filler else pieces

    def _common_size(self, facts: BatchFacts) -> int:
        """Samples of a replica, the same number on all of them: the mean, rounded up."""
        first = facts.parts[0][1] if facts.parts else facts  # of several loaders one may have run out here, not there
        return max(1, -(-first.global_size // self._mesh.dp.size))

    def _weigh(
        self, pieces: Sequence[MicroBatch], facts: BatchFacts, has_loss: bool = True
    ) -> tuple[Sequence[float | Tensor], list[float | Tensor]]:
        """What every piece weighs in means, and by what its loss is multiplied before backward.

        Gradients are averaged over replicas, so the loss of piece i is multiplied by w_i * dp / W, with W the weight of
        all pieces of all replicas. This is the one place where losses are scaled.
        """
        replicas = self._mesh.dp.size
        weigh = getattr(self._module, "micro_batch_weight", None) if has_loss else None
        weights = loss_weights(pieces, weigh, self._mesh.device)
        if self._config.loss_reduction == "sum":
            return weights, [float(replicas) if piece.size else 0.0 for piece in pieces]
        if weigh is None:
            total = sum(piece.samples for piece in pieces)
            if total != facts.samples and total:  # a hook has changed the batch, or a part of it repeats samples
                weights = [float(w) * facts.samples / total for w in weights]
            return weights, [float(w) * replicas / facts.global_samples for w in weights]
        together = all_reduce(torch.stack([torch.as_tensor(w) for w in weights]).sum(), self._mesh.dp)
        # Where nobody has a token that counts, 0 / 0 would make all gradients NaN.
        return weights, [torch.where(together > 0, w * replicas / together, 0.0) for w in weights]

    def _caller(
        self, mode: str, step_fn: Callable[..., Any], args: Sequence[Any], weights: Sequence[float | Tensor]
    ) -> Callable[[MicroBatch], Any]:
        number = mix_seed(mode, self._batches_seen)

        def call(piece: MicroBatch) -> Any:
            with (
                self._context(mode),
                self._assembly.streams.micro_batch(number, piece.index),
                self._relay.recording(piece.size, weights[piece.index]),
                self._report.counting(piece.size, self._config.virtual_stages),
                self._assembly.loose or nullcontext(),
                mixing_refused(step_fn) as check,
                self._report.calls.recording(piece.size, weights[piece.index]),
            ):
                output = step_fn(piece.data, *args[1:])
                check(output)
                return output

        return call

    def _context(self, mode: str) -> Any:
        contexts = {
            "training": self._precision.train_step_context,
            "validation": self._precision.val_step_context,
            "test": self._precision.test_step_context,
            "predict": self._precision.predict_step_context,
        }
        return contexts[mode]()

    def _run_alone(self, call: Callable[[MicroBatch], Any], piece: MicroBatch) -> Any:
        with self._events.span(Phase.FORWARD, 0, 0):
            return self._assembly.stage(lambda: call(piece), 0, Alone())[1]

    def _combined(self, outputs: Sequence[Any], weights: Sequence[float | Tensor], pieces: Sequence[MicroBatch]) -> Any:
        if not outputs:
            return None
        if any(piece.size for piece in pieces):  # else this replica has nothing of its own in this batch
            kept = [piece.index for piece in pieces if piece.size]
            outputs, weights = [outputs[i] for i in kept], [weights[i] for i in kept]
            pieces = [pieces[i] for i in kept]
        else:
            weights = [1.0] * len(pieces)
        training = self._trainer.state.stage is RunningStage.TRAINING
        given = [i for i, output in enumerate(outputs) if output is not None or not training]
        if not given:
            return None
        whole = combine(
            [outputs[i] for i in given], [weights[i] for i in given], [max(1, pieces[i].size) for i in given]
        )
        if training and self._config.loss_reduction == "sum":
            return _with_loss(whole, sum(_loss_of(outputs[i]) for i in given))
        if len(given) < len(outputs):  # a piece without a loss counts as one of zero
            return _with_loss(whole, _loss_of(whole) * (sum(weights[i] for i in given) / sum(weights)))
        return whole

    @property
    def _batches_seen(self) -> int:
        loop = self._trainer._active_loop
        progress = getattr(getattr(loop, "epoch_loop", loop), "batch_progress", None)
        return progress.total.ready if progress is not None else 0


_OTHER_PROPORTIONS = (
    "A batch of several loaders has parts whose samples do not divide among micro-batches and replicas in equal"
    " proportions. A loss over the samples of all loaders together is exact, but a sum of one mean per loader weighs"
    " some samples more than one process does. If yours is such a sum, make the batch sizes multiples of the number"
    " of micro-batches and set drop_last=True, or give the module split_micro_batches and micro_batch_weight."
)


def _whole(batch: Any, facts: BatchFacts) -> MicroBatch:
    return MicroBatch(0, batch, 0) if facts.filler else MicroBatch(0, batch, facts.size, facts.samples - facts.size)


def _scaled(loss: Tensor, factor: float | Tensor) -> Tensor:
    """``loss * factor``, and zero where the factor is: a mean over no tokens is NaN, and must not spoil the others."""
    if isinstance(factor, Tensor):
        return torch.where(factor > 0, loss * factor, 0.0)
    if factor == 0:
        return torch.where(torch.isfinite(loss), loss, 0.0) * 0.0
    return loss if factor == 1 else loss * factor


def _with_loss(output: Any, loss: Any) -> Any:
    return {**output, "loss": loss} if isinstance(output, dict) else loss


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"training_step returned {type(result).__name__} where a loss is needed: a tensor, or a dict with the key"
            " 'loss'; or None, to leave the batch out."
        )
    refuse_foreign(loss, "The loss")
    return loss
