"""What Lightning asks a strategy about the state of a run: saved and loaded at any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_3d import checkpoint as checkpoints
from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.events import Phase
from lightning_3d.trainer.data.host_random import HostRandomState
from lightning_3d.trainer.logging.metrics import leave_states_to_first, persistent_states, states_of_all
from lightning_3d.trainer.processes.failure import say
from lightning_3d.trainer.replicas import ReplicaStrategy
from lightning_3d.trainer.saving import Saving
from lightning_3d.trainer.setup.assembly import Assembly
from lightning_3d.trainer.setup.launcher import ProcessLauncher


class StatefulStrategy(ReplicaStrategy):
    """A strategy whose ranks each hold a part of the model, and which knows which part."""

    config: ParallelConfig
    _assembly: Assembly | None = None
    _loaded_rank_state: Any = None
    final_state_dict: dict[str, Tensor] | None = None
    """The whole model after a run in processes that end with it, for the process that started them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saving = Saving()

    @property
    def _assembled(self) -> Assembly:
        if self._assembly is None:
            raise ConfigError("The module is laid out when the Trainer sets it up: from the `on_fit_start` hook on.")
        return self._assembly

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model by its original names: this rank's part, and placeholders for that of other stages."""
        return self._model_state().local_state_dict()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint directory that loads at any layout; collective.

        With ``async_save`` it is complete some steps later, and :meth:`finish_saving` waits for it.

        Raises:
            CheckpointError: on every rank, if a rank could not write its part.
        """
        if storage_options is not None:
            raise ConfigError(
                "storage_options were given, but they go to a CheckpointIO, which sharded checkpoints do not use. Leave"
                " them out."
            )

        def gather() -> checkpoints.Content:
            return checkpoints.gather(checkpoint, self._model_state(), self.topology, self._rank_state())

        assert self.lightning_module is not None
        with states_of_all(self.lightning_module) as states:
            named = checkpoint.get("state_dict") or {}
            named.update({key: value for key, value in states.items() if key in named})
            with self.topology.events.span(Phase.CHECKPOINT):
                self._saving.save(filepath, gather, self.topology)

    def finish_saving(self) -> None:
        """Wait until no checkpoint is under way in the background; collective.

        Raises:
            CheckpointError: on every rank, if a rank could not write its part of it.
        """
        self._saving.wait()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saving()
        path = self.broadcast(str(checkpoint_path))
        checkpoint = checkpoints.read(path, self.topology, weights_only)
        self._saving.resumed = checkpoints.local_path(path)
        self._saving.known_callbacks = frozenset(checkpoint.get("callbacks", ()))
        if state := checkpoint.pop(checkpoints.RANK_STATE, None):
            self._loaded_rank_state = state["state"]
        if self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            _warn_of_lost_place(checkpoint)
        if self._assembly is not None:
            checkpoints.place_copies(checkpoint, self._model_state(), self.topology)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        checkpoints.load_model(checkpoint["state_dict"], self._model_state(), self.topology, strict)
        leave_states_to_first(self.lightning_module, self.topology)
        self._assembled.complaint = ""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        checkpoints.load_optimizers(checkpoint["optimizer_states"], self._model_state(), self.topology, strict)
        if self._loaded_rank_state is not None:
            HostRandomState.of(self._loaded_rank_state).set()
            self._loaded_rank_state = None

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            self._saving.delete(filepath)

    @override
    def on_train_start(self) -> None:
        self._saving.training = True

    @override
    def on_train_end(self) -> None:
        self._saving.training = False
        self.finish_saving()
        self.topology.events.flush()
        if isinstance(self._launcher, ProcessLauncher):
            self.final_state_dict = self.full_state_dict()  # the process that started this one takes it over

    def _give_up_saving(self, patience_s: float) -> None:
        if lost := self._saving.give_up(patience_s):
            say(f"{lost}\n")

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict, as the module in one process would give it; collective.

        Returns:
            On rank 0 every tensor in host memory under its original name; an empty dict on the other ranks.
        """
        return checkpoints.full_state_dict(self._model_state(), self.topology)

    def _model_state(self) -> checkpoints.ModelState:
        assembly, module = self._assembled, self.lightning_module
        assert module is not None
        assembly.sharding.release()
        persistent = set(assembly.keys)
        named = (*module.named_buffers(), *persistent_states(module).items())
        buffers = {name: buffer for name, buffer in named if name in persistent}
        return checkpoints.ModelState(
            parameters=dict(module.named_parameters(remove_duplicate=False)),
            keys=assembly.keys,
            module=module,
            buffers=buffers,
            borrowed=assembly.borrowed(buffers),
            ties=assembly.ties,
            cuts=assembly.plan.cuts,
            optimizers=self.optimizers,
            layout={"zero_stage": self.config.zero_stage, "schedule": self.config.schedule},
        )

    def _rank_state(self) -> Any:
        return HostRandomState.get().state


def _warn_of_lost_place(checkpoint: Mapping[str, Any]) -> None:
    """A file of the stock Trainer counts the batches of an epoch; only loaders with a state know which they were."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loop.get("epoch_loop.batch_progress", {})
    done = progress.get("current", {}).get("completed", 0)
    if done and not progress.get("is_last_batch") and not loop.get("state_dict", {}).get("combined_loader"):
        rank_zero_warn(
            f"The checkpoint was saved after {done} batches of an epoch and does not hold the place in the data, so the"
            " loader starts over: their samples are read again, and others of this epoch never. Save at the end of an"
            " epoch, use a loader with a state_dict, or save with the 3D strategy, which keeps the place."
        )
