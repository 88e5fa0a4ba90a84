"""Steps of optimizers that are not torch's: they run on DTensors, and what they read from one is that of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_3d.errors import ConfigError

_READ = torch.ops.aten._local_scalar_dense.default


class UserStep:
    """One step of such an optimizer.

    DTensor arithmetic gives the norm of a whole parameter, but ``.item()``, ``float()`` and ``if`` read this rank's
    share of it. Within :meth:`running` they read the whole number. That is collective, and safe there, because all
    ranks that hold parts of a parameter step it together. It does not hold for the user's closure.

    Args:
        optimizer: Its class is named in errors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._in_closure = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the step.

        Raises:
            ConfigError: if the step computes with DTensors and plain tensors together.
        """
        handlers = DTensor._op_dispatcher._custom_op_handlers
        handlers[_READ] = self._read
        try:
            yield
        except RuntimeError as error:
            if self._in_closure or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise ConfigError(
                f"The step of {type(self._optimizer).__name__} computes with parameters, of which each rank holds a"
                f" part here, and with plain tensors of its own: {error} Create its states with torch.zeros_like(p),"
                " use an optimizer of torch.optim, or tensor_parallel=1 and zero_stage=0, where parameters are plain."
            ) from error
        finally:
            handlers.pop(_READ, None)

    def closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` as it is outside of the step."""

        def call() -> Any:
            self._in_closure = True
            result = closure()
            self._in_closure = False  # left set by an error, which is then not one of the step
            return result

        return call

    def _read(self, op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        tensor = args[0]
        assert isinstance(tensor, DTensor)
        if not self._in_closure and not all(placement.is_replicate() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return op_call(tensor.to_local())
