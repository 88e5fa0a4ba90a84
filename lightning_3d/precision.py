"""``precision=`` under the 3D strategy: types, loss scaling, and an optimizer step that is one for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import Optimizable, Steppable
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding import OwnedParameter, clip_by_norm, clip_by_value, has_nonfinite, nonfinite_gradients
from lightning_3d.sharding.loss_scale import LossScaler
from lightning_3d.sharding.optimizer import local_step, steps_on_parts
from lightning_3d.sharding.user_step import UserStep


@dataclass(frozen=True, kw_only=True)
class PrecisionRule:
    """The types of one ``precision=`` string."""

    kept: torch.dtype
    """Parameters and optimizer state; the float32 of a mixed mode is the master copy."""
    computed: torch.dtype
    """Matrix products and activations."""
    reduced: torch.dtype
    """Sums of gradients over ranks, unless ``reduce_dtype`` says otherwise."""
    scales_loss: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether parameters are kept in another type than is computed in."""
        return self.kept != self.computed


_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

PRECISION_RULES: dict[str, PrecisionRule] = {
    "32-true": PrecisionRule(kept=_F32, computed=_F32, reduced=_F32),
    "64-true": PrecisionRule(kept=_F64, computed=_F64, reduced=_F64),
    "bf16-mixed": PrecisionRule(kept=_F32, computed=_BF16, reduced=_F32),
    "16-mixed": PrecisionRule(kept=_F32, computed=_F16, reduced=_F32, scales_loss=True),
    "bf16-true": PrecisionRule(kept=_BF16, computed=_BF16, reduced=_F32),
    "16-true": PrecisionRule(kept=_F16, computed=_F16, reduced=_F32),
}

_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


class ThreeDPrecision(Precision):
    """Precision of a 3D run.

    Mixed modes compute under autocast, keep float32 parameters (sharded from ZeRO stage 1 on) and gather them in the
    type of the computation; the ``true`` modes keep one type throughout. Gradients are summed over ranks in float32
    (float64 under ``64-true``). Gradient norms, overflow and NaN are those of the whole model, on every rank alike.

    Args:
        precision: ``"32-true"``, ``"64-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"`` or ``"16-true"``.
        scaler: The loss scaler of ``"16-mixed"``; by default one with the settings of :class:`torch.amp.GradScaler`.

    Raises:
        ConfigError: if the precision is not known, or a scaler is given to another one than ``"16-mixed"``.
    """

    def __init__(self, precision: str = "32-true", scaler: LossScaler | None = None) -> None:
        precision = _ALIASES.get(str(precision), str(precision))
        if precision not in PRECISION_RULES:
            known = ", ".join(repr(name) for name in PRECISION_RULES)
            raise ConfigError(f"precision={precision!r} is not known to the 3D strategy. Use one of {known}.")
        self.precision = precision  # type: ignore[assignment]
        self.rule = PRECISION_RULES[precision]
        if scaler is not None and not self.rule.scales_loss:
            raise ConfigError(
                f"precision={precision!r} does not scale the loss, but a scaler was given. Leave it out, or use"
                " precision='16-mixed'."
            )
        self.scaler = scaler or (LossScaler() if self.rule.scales_loss else None)
        self.on_batch: Callable[[Any], Any] | None = None
        """Called with every batch before it is converted; the strategy sets it."""
        self.owned: Sequence[OwnedParameter] = ()
        """This rank's parameters, with what counts in norms; the strategy sets it."""
        self.step_skipped = False
        """Whether the last optimizer step was left out, on all ranks; LR schedulers then do not advance either."""
        self.name_nonfinite = False
        """Look at the gradients of the next step, and warn with the names of those that are NaN or infinite."""
        self._mesh: Mesh | None = None
        self._nonfinite = "continue"
        self._loss_flag: Tensor | None = None

    @classmethod
    def from_stock(cls, plugin: Precision) -> ThreeDPrecision:
        """The same precision as one of Lightning's plugins.

        Raises:
            ConfigError: if the plugin is not one of those for ``precision=`` strings.
        """
        if isinstance(plugin, ThreeDPrecision):
            return plugin
        if isinstance(plugin, MixedPrecision):
            return cls(plugin.precision, _same_scaler(plugin.scaler))
        if isinstance(plugin, DoublePrecision | HalfPrecision) or type(plugin) is Precision:
            return cls(str(plugin.precision))
        raise ConfigError(
            f"The precision plugin {type(plugin).__name__} cannot work with the 3D strategy, which sums gradients and"
            f" scales losses over all ranks. Use precision= with one of {', '.join(map(repr, PRECISION_RULES))}."
        )

    def attach(self, mesh: Mesh, config: ParallelConfig) -> None:
        """Work for a run on ``mesh``; ``config.nonfinite`` is read."""
        self._mesh = mesh
        self._nonfinite = config.nonfinite
        if self.scaler is not None:
            self.scaler.attach(mesh)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        trainer = getattr(model, "_trainer", None)
        if trainer is not None and (self.scaler is not None or self._nonfinite == "skip"):
            self._hold_schedulers(trainer)
        return model, optimizers, lr_schedulers

    def _hold_schedulers(self, trainer: pl.Trainer) -> None:
        """Let schedulers that count optimizer steps not advance after one that was left out."""
        loop = trainer.fit_loop.epoch_loop
        if "update_lr_schedulers" in vars(loop):
            return
        update = loop.update_lr_schedulers

        def update_unless_skipped(interval: str, update_plateau_schedulers: bool) -> None:
            precision = trainer.precision_plugin
            if interval == "step" and isinstance(precision, ThreeDPrecision) and precision.step_skipped:
                return
            update(interval, update_plateau_schedulers)

        loop.update_lr_schedulers = update_unless_skipped  # type: ignore[method-assign]

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Type in which sharded parameters are gathered; ``None``: the type they are kept in."""
        return self.rule.computed if self.rule.is_mixed else None

    # --- types -----------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.rule.is_mixed or self.rule.kept == torch.float32:
            return module
        return module.to(self.rule.kept)

    @override
    def convert_input(self, data: Any) -> Any:
        if self.on_batch is not None:
            self.on_batch(data)
        if self.rule.is_mixed or self.rule.kept == torch.float32:
            return data
        return apply_to_collection(data, Tensor, self._convert)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.rule.kept) if tensor.is_floating_point() else tensor

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        if self.rule.is_mixed:
            return nullcontext()
        return _DtypeContextManager(self.rule.kept)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Within, the user's step computes in the type of this precision."""
        if self.rule.is_mixed:
            # No cache: FSDP2 frees and re-fills parameters, so a cast of one must not outlive its use.
            return torch.autocast(self._device_type, dtype=self.rule.computed, cache_enabled=False)
        return nullcontext() if self.rule.kept == torch.float32 else _DtypeContextManager(self.rule.kept)

    @override
    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.forward_context()

    @property
    def _device_type(self) -> str:
        if self._mesh is not None:
            return self._mesh.device.type
        return "cuda" if torch.cuda.is_available() else "cpu"

    # --- loss ------------------------------------------------------------------------------------------------------

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward from; the engine calls it for every micro-batch, on the last stage.

        :meth:`pre_backward` only calls hooks: the loss is scaled here and nowhere else.
        """
        if self._nonfinite != "continue":
            flag = (~torch.isfinite(loss.detach())).any().float()
            self._loss_flag = flag if self._loss_flag is None else torch.maximum(self._loss_flag, flag)
        return loss if self.scaler is None else self.scaler.scale(loss)

    # --- step ------------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Closure, unscaling, hooks, clipping and the step, in Lightning's order; left out on all ranks or on none."""
        if self.scaler is not None and isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS runs its closure several times in a step, which loss scaling cannot follow. Use another"
                " optimizer, or precision='bf16-mixed' or '32-true'."
            )
        self.step_skipped = False
        if self.scaler is None and self._nonfinite == "continue":
            return self._plain_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # the user's step returned None: there was no backward
            self._after_closure(model, optimizer)
            return result
        self.step_skipped = self._decide(optimizer)
        self._after_closure(model, optimizer)
        if self.step_skipped:
            return result
        with local_step(optimizer):  # type: ignore[arg-type]
            output = optimizer.step(**kwargs)
        return result if output is None else output

    def _plain_step(
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if not steps_on_parts(optimizer):  # type: ignore[arg-type]
            step = UserStep(optimizer)  # type: ignore[arg-type]
            closure = step.closure(partial(self._wrap_closure, model, optimizer, closure))
            with step.running():
                return optimizer.step(closure=closure, **kwargs)
        # The closure runs first and not inside the step: while it runs, user code must see the optimizer as it is.
        result = self._wrap_closure(model, optimizer, closure)
        with local_step(optimizer):  # type: ignore[arg-type]
            output = optimizer.step(**kwargs)
        return result if output is None else output

    def _decide(self, optimizer: Steppable) -> bool:
        """Unscale, and agree on whether this step is left out. Reads one number from the device, as any scaler must.

        Raises:
            FloatingPointError: on all ranks, under ``nonfinite="raise"``.
        """
        mesh, flag = self._mesh_or_fail(), self._loss_flag
        self._loss_flag = None
        owned = self._of(optimizer)
        if self.scaler is None:
            found = has_nonfinite(owned, mesh, flag)
        else:
            found = self.scaler.unscale([item.param for item in owned])
            self.scaler.update(found)
            if self._nonfinite == "raise":  # an overflow is what the scaler is for; a loss that is NaN is not
                found = torch.stack([found, has_nonfinite((), mesh, flag)])
        values = [float(value) for value in found.reshape(-1).tolist()]
        if self._nonfinite == "raise" and values[-1] > 0 and (self.scaler is None or len(values) > 1):
            names = nonfinite_gradients(owned, mesh) or "the loss alone"
            raise FloatingPointError(
                f"A loss or gradient is NaN or infinite, and nonfinite='raise' was asked for: {names}."
                " Look for a learning rate that is too high, a division by zero or bad samples in this batch; with"
                " nonfinite='skip' such steps are left out."
            )
        return values[0] > 0

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Steppable) -> None:
        if self.name_nonfinite:
            self.name_nonfinite = False
            owned, mesh = self._of(optimizer), self._mesh_or_fail()
            # An overflow is what a scaler is for, and other answers than going on give their own message.
            if self.scaler is None and self._nonfinite == "continue" and bool(has_nonfinite(owned, mesh)):
                rank_zero_warn(
                    f"Gradients are NaN or infinite: {nonfinite_gradients(owned, mesh)}. The step is taken all the"
                    " same, as in one process; nonfinite='skip' leaves such steps out and nonfinite='raise' stops."
                )
        super()._after_closure(model, optimizer)

    # --- clipping --------------------------------------------------------------------------------------------------

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of this optimizer's gradients over the whole model."""
        mesh = self._mesh_or_fail()
        if mesh.world.size == 1:  # bit for bit what the stock Trainer does
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            clip_by_norm(self._of(optimizer), mesh, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self._of(optimizer), float(clip_val))

    def _of(self, optimizer: Steppable) -> list[OwnedParameter]:
        """This rank's parameters that ``optimizer`` steps."""
        mine = {id(p) for p in self.main_params(optimizer)}  # type: ignore[arg-type]
        if self.owned:
            return [item for item in self.owned if id(item.param) in mine]
        return [OwnedParameter("", p) for p in self.main_params(optimizer) if not is_placeholder(p)]  # type: ignore[arg-type]

    def _mesh_or_fail(self) -> Mesh:
        if self._mesh is None:
            raise ConfigError("ThreeDPrecision works only under ThreeDStrategy, which tells it about the other ranks.")
        return self._mesh

    # --- checkpoint ------------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def _same_scaler(scaler: Any) -> LossScaler | None:
    """Our scaler with the settings of a ``GradScaler``."""
    if scaler is None or not scaler.is_enabled():
        return None
    return LossScaler(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    )
