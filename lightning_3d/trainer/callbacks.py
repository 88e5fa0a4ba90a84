"""Lightning's callbacks that take parameters for whole tensors: served, or refused before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.optim import Optimizer

from lightning_3d.errors import ConfigError

_AVERAGING = tuple(
    found for name in ("StochasticWeightAveraging", "WeightAveraging") if (found := getattr(callbacks, name, None))
)


def check_callbacks(items: Sequence[pl.Callback]) -> None:
    """Refuse callbacks that would average parts of a model with whole copies of it.

    Raises:
        ConfigError: naming the callback.
    """
    for item in items:
        if isinstance(item, _AVERAGING):
            raise ConfigError(
                f"The callback {type(item).__name__} keeps a copy of the whole model and copies weights between the"
                " two, but here every rank holds a part. Leave it out, or train on one device."
            )


class Finetuning:
    """Lets ``BaseFinetuning`` and its kind unfreeze parameters over several ranks.

    Whether the optimizer has a parameter they find out by comparing values, which sharded parameters, and those of
    other stages, refuse. The parameter is the same object or it is not, so that is what is compared while installed.
    """

    def __init__(self) -> None:
        self._before: Any = None

    def install(self, items: Sequence[pl.Callback]) -> None:
        """Begin, if one of the callbacks unfreezes parameters."""
        if self._before is None and any(isinstance(item, BaseFinetuning) for item in items):
            self._before = vars(BaseFinetuning)["filter_on_optimizer"]
            BaseFinetuning.filter_on_optimizer = staticmethod(_not_in)  # type: ignore[method-assign]

    def remove(self) -> None:
        """End."""
        if self._before is not None:
            BaseFinetuning.filter_on_optimizer = self._before  # type: ignore[method-assign]
            self._before = None


def _not_in(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in known]
