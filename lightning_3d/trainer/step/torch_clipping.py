"""Makes torch's own functions for norms and clipping, called by user code, see the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from lightning_3d.mesh import Mesh
from lightning_3d.sharding import OwnedParameter, global_norm
from lightning_3d.sharding.reducer import local_of


class TorchClipping:
    """While installed, ``torch.nn.utils.clip_grad_norm_`` and its siblings act on the gradients of the whole model.

    They loop over the gradients they are given: with a pipeline those of one stage, and with tensor parallelism a mix
    of tensors and DTensors that torch refuses. So ``get_total_norm``, which ``clip_grad_norm_`` calls, becomes
    collective for gradients of the model, and what clips them works on local shards. The functions are looked up in
    their own module when they run, so it does not matter how the user has imported ``clip_grad_norm_``.

    Args:
        mesh: The mesh.
        owned: This rank's parameters.
    """

    def __init__(self, mesh: Mesh, owned: Sequence[OwnedParameter]) -> None:
        self._mesh = mesh
        self._owned = owned
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def install(self) -> None:
        """Begin. With one rank there is nothing to do."""
        if self._mesh.world.size == 1 or self._replaced:
            return
        self._replace(clip_grad, "_get_total_norm", self._total_norm)
        self._replace(utils, "get_total_norm", self._total_norm)
        self._replace(clip_grad, "_group_tensors_by_device_and_dtype", self._grouped)

    def remove(self) -> None:
        """End, and leave torch as it was."""
        while self._replaced:
            place, name, before, ours = self._replaced.pop()
            if getattr(place, name) is ours:
                setattr(place, name, before)

    def _replace(self, place: Any, name: str, make: Callable[..., Any]) -> None:
        before = getattr(place, name, None)
        if before is None:  # another version of torch
            return

        def ours(*args: Any, **kwargs: Any) -> Any:
            return make(before, *args, **kwargs)

        setattr(place, name, ours)
        self._replaced.append((place, name, before, ours))

    def _total_norm(
        self,
        before: Callable[..., Tensor],
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        wanted = {id(tensor) for tensor in given}
        mine = [item for item in self._owned if item.param.grad is not None and id(item.param.grad) in wanted]
        if given and not mine:
            return before(given, norm_type, error_if_nonfinite, foreach)
        # Nothing given: this stage trains none of these parameters, and the others wait for it.
        norm = global_norm(mine, self._mesh, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"The norm of order {norm_type} of these gradients is not finite on some rank, so they cannot be"
                " clipped. Pass error_if_nonfinite=False to scale them by it all the same."
            )
        types = {tensor.dtype for tensor in given} or {torch.get_default_dtype()}
        return norm.to(max(types, key=lambda dtype: torch.finfo(dtype).bits))

    @staticmethod
    def _grouped(before: Callable[..., Any], lists: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
        if not any(lists):  # which torch does not expect: it has no stages that train nothing
            return {}
        return before([[local_of(tensor) for tensor in tensors] for tensors in lists], *args, **kwargs)
