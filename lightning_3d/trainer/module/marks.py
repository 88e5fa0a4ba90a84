"""What user code has hung on parameters, for ranks that start as functions: there parameters arrive without it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.trainer.module.kept import renew_ids


@dataclass(frozen=True)
class Marks:
    """Attributes of parameters, and their ids, in the process that starts the ranks. Pickles."""

    attributes: dict[str, dict[str, Any]]
    ids: dict[int, str]

    @classmethod
    def of(cls, module: nn.Module, start_method: str) -> Marks:
        """What is to be taken along.

        Raises:
            ConfigError: if there are hooks on parameters, which pickling leaves behind.
        """
        named = dict(module.named_parameters())
        hooked = [name for name, p in named.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise ConfigError(
                f"There are hooks on parameters ({', '.join(hooked[:8])}), and start_method={start_method!r} sends the"
                " module to the ranks without them. Put them on in setup() or configure_model(), which run in every"
                " rank, change gradients in on_after_backward, or use start_method='popen'."
            )
        attributes = {name: _picklable(name, vars(p), start_method) for name, p in named.items() if vars(p)}
        return cls(attributes, {id(p): name for name, p in named.items()})

    def put_on(self, module: nn.Module) -> None:
        """In a rank: give the parameters of its copy what they had, and containers with ids those of this process."""
        for name, attributes in self.attributes.items():
            vars(module.get_parameter(name)).update(attributes)
        renew_ids(module, self.ids)


def _picklable(name: str, attributes: dict[str, Any], start_method: str) -> dict[str, Any]:
    found = {}
    for key, value in attributes.items():
        try:
            if not isinstance(value, Tensor):
                ForkingPickler.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            rank_zero_warn(
                f"The attribute {key!r} of the parameter {name} does not pickle ({error}), so with"
                f" start_method={start_method!r} the ranks will not have it. Set it in setup() instead."
            )
        else:
            found[key] = value
    return found
