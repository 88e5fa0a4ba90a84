"""Dynamic loss scaling for float16, with one decision for the whole world."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh
from lightning_3d.sharding.gradients import agree_on_max
from lightning_3d.sharding.reducer import local_of


class LossScaler:
    """Multiplies the loss so that float16 gradients do not vanish, and backs off when they overflow.

    The rule and the saved state are those of :class:`torch.amp.GradScaler`; but an overflow on any rank counts on all,
    so scales and steps never part, and it works on every device.

    Args:
        init_scale: First factor.
        growth_factor: What the factor is multiplied by after ``growth_interval`` steps without overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Steps.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._scale = torch.tensor(float(init_scale), dtype=torch.float32)
        self._growth_tracker = torch.tensor(0, dtype=torch.int32)
        self._mesh: Mesh | None = None

    def attach(self, mesh: Mesh) -> None:
        """Work with the ranks of ``mesh``, on its device."""
        self._mesh = mesh
        self._scale = self._scale.to(mesh.device)
        self._growth_tracker = self._growth_tracker.to(mesh.device)

    @property
    def factor(self) -> Tensor:
        """The factor, a float32 scalar on the device."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """The loss whose backward gives scaled gradients."""
        return loss * self._scale.to(loss.device)

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Divide the gradients of ``parameters`` by the factor, in place.

        Collective: a rank without gradients takes part.

        Returns:
            1.0 if a gradient on any rank is not finite, else 0.0; a scalar on the device, the same on all ranks.
        """
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        inverse = self._scale.double().reciprocal().float()
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                kinds.setdefault(gradient.dtype, []).append(gradient)
        for gradients in kinds.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        return found if self._mesh is None else agree_on_max(found, self._mesh)

    @torch.no_grad()
    def update(self, found: Tensor) -> None:
        """Adapt the factor to what :meth:`unscale` found."""
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, found, self.growth_factor, self.backoff_factor, self.growth_interval
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, under the keys of :class:`torch.amp.GradScaler`."""
        return {
            "scale": float(self._scale),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self._growth_tracker),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of this class or of :class:`torch.amp.GradScaler`.

        Raises:
            CheckpointError: if keys are missing.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise CheckpointError(
                f"The loss scaler's state has the keys {sorted(state)} but lacks {sorted(missing)}, so the scale is not"
                " known. Load a checkpoint of a 16-mixed run, or start with ckpt_path=None."
            )
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._scale.fill_(float(state["scale"]))
        self._growth_tracker.fill_(int(state["_growth_tracker"]))
