"""What Lightning calls a strategy for with every batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.events import EventSource, Phase
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.progress import Progress
from lightning_3d.sharding import global_norm
from lightning_3d.trainer.data.ledger import BatchFacts, BatchLedger
from lightning_3d.trainer.data.loaders import LoaderGate
from lightning_3d.trainer.data.predictions import PredictionGate
from lightning_3d.trainer.state import StatefulStrategy
from lightning_3d.trainer.step.sanity import SanityChecks
from lightning_3d.trainer.step.steps import StepRunner


class SteppingStrategy(StatefulStrategy):
    """A strategy that runs the user's steps, once the module is laid out."""

    events: EventSource
    progress: Progress
    _gate: LoaderGate
    _ledger: BatchLedger
    _predictions: PredictionGate
    _sanity: SanityChecks
    _runner: StepRunner | None = None

    @property
    def _precision(self) -> ThreeDPrecision:
        assert isinstance(self._precision_plugin, ThreeDPrecision)
        return self._precision_plugin

    # --- data ------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._gate.process(dataloader)

    # --- steps -----------------------------------------------------------------------------------------------------

    @property
    def _steps(self) -> StepRunner:
        assert self._runner is not None
        self._assembled.refuse_unset()
        return self._runner

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._saving.look()
        self.progress.enter(f"training batch, after {self.lightning_module.trainer.global_step} optimizer steps")
        if self._sanity.due(self.lightning_module.trainer.global_step):
            with self.events.span(Phase.SYNC, label="sanity"):
                self._sanity.check(args[0])
            self._precision.name_nonfinite = True
        return self._steps.training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        return self._steps.backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._assembled.stage.module.automatic_optimization:
            self._assembled.sharding.release()  # the step changes what the gathered parameters are copies of
        result = self._timed_step(optimizer, *args, **kwargs)
        self.progress.enter("between batches: hooks, loggers, loader")
        return result

    def _timed_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """The step; what follows the closure, which runs the batch, is the optimizer's time."""
        if not self.events.is_recording:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        with ExitStack() as stack:

            def batch() -> Any:
                stack.close()  # LBFGS runs several batches
                result = closure()
                stack.enter_context(self.events.span(Phase.OPTIMIZER))
                return result

            return super().optimizer_step(optimizer, batch, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation("validation")
        return self._steps.evaluation_step("validation", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation("test")
        return self._steps.evaluation_step("test", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_evaluation("predict")
        return self._steps.evaluation_step("predict", *args, **kwargs)

    def _begin_evaluation(self, mode: str) -> None:
        assert self.lightning_module is not None
        self.progress.enter(f"{mode} batch")
        self.events.begin_step(self.lightning_module.trainer.global_step, mode)

    def on_validation_start(self) -> None:
        """What follows is no part of a training step."""
        self.events.begin_evaluation()

    def on_validation_end(self) -> None:
        """Training goes on, if there is any."""
        self.events.end_evaluation()

    def on_test_end(self) -> None:
        """The last batch is through."""
        self.events.flush()

    @property
    def current_batch(self) -> BatchFacts:
        """Samples of the batch that is run, here and over all replicas, and whether it only fills up this replica."""
        return self._ledger.current

    def on_predict_start(self) -> None:
        """Keep fillers and peers out of the predictions."""
        self._predictions.install()

    def on_predict_end(self) -> None:
        """Give the callbacks back."""
        self._predictions.remove()
        self.events.flush()

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of the whole model, the same on all ranks; use it in ``on_before_optimizer_step``.

        Args:
            norm_type: 2, ``inf`` or any other p.

        Returns:
            A float64 tensor of no dimensions. Collective: every rank calls it.

        Raises:
            ConfigError: Before the module is laid out, or if ``norm_type`` is not positive.
        """
        return global_norm(self._assembled.sharding.owned, self.topology, norm_type)
