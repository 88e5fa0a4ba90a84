"""Hooks that user code has put on parameters: refused where nothing would call them, or not with the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_3d.collectives import all_gather_object
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder

_INSTEAD = (
    "Change gradients in on_after_backward or on_before_optimizer_step, which see the final ones in parameter.grad, or"
    " put the hook on the module (register_full_backward_hook)"
)


class ParameterHooks:
    """The parameters that had hooks before the module was laid out.

    Args:
        module: The LightningModule, whole; the same on all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._hooked = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        }

    def refuse_cut(self, module: nn.Module, partial: Iterable[str], mesh: Mesh) -> None:
        """After tensor parallelism: refuse hooks that would see a part of the gradient. Collective if there are hooks.

        Args:
            module: The LightningModule.
            partial: Parameters of whose gradient every tensor-parallel rank makes a part.
            mesh: The mesh.

        Raises:
            ConfigError: naming the parameters; raised on every rank.
        """
        summed = set(partial)
        lost = [
            name
            for name, parameter in self._hooked.items()
            if name in summed or _replaced(parameter, module.get_parameter(name))
        ]
        self._refuse(lost, mesh, "tensor parallelism cuts, so that a rank sees only a part of the gradient")

    def refuse_sharded(self, module: nn.Module, mesh: Mesh) -> None:
        """After sharding: refuse hooks that read ``parameter.grad`` of what is replaced by shards.

        Those of ``register_hook`` are called with the gradient that this replica has made, as without shards.

        Raises:
            ConfigError: naming the parameters; raised on every rank.
        """
        lost = [
            name
            for name, parameter in self._hooked.items()
            if parameter._post_accumulate_grad_hooks and _replaced(parameter, module.get_parameter(name))
        ]
        self._refuse(lost, mesh, "a ZeRO stage shards (register_post_accumulate_grad_hook)")
        self._hooked.clear()  # the parameters are whole

    def _refuse(self, lost: Sequence[str], mesh: Mesh, why: str) -> None:
        if not self._hooked:
            return
        everywhere = sorted({name for names in all_gather_object(lost, mesh.control_world) for name in names})
        if everywhere:
            raise ConfigError(f"There are hooks on parameters that {why}: {_some(everywhere)}. {_INSTEAD}.")


def refuse_late_hooks(module: nn.Module, shards: Sequence[nn.Parameter]) -> None:
    """Before the first step: refuse hooks on shards, which no backward computes with, so that nothing calls them.

    Raises:
        ConfigError: naming the parameters.
    """
    ids = {id(shard) for shard in shards if shard._backward_hooks or shard._post_accumulate_grad_hooks}
    if ids:
        names = [name for name, parameter in module.named_parameters() if id(parameter) in ids]
        raise ConfigError(
            "Hooks were put on parameters that a ZeRO stage has sharded, and no backward computes with shards:"
            f" {_some(names)}. {_INSTEAD}; those of register_hook may also be put on in __init__ or configure_model."
        )


def _replaced(old: nn.Parameter, new: nn.Parameter) -> bool:
    return new is not old and not is_placeholder(new)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
