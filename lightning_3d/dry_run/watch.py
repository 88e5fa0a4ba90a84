"""Looking at every operation of a rank: memory, messages and arithmetic, of a dry run and of a real one alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lightning_3d.dry_run.allocations import Allocations, Moment
from lightning_3d.dry_run.memoryless import ASKS_DEVICE, is_outlining
from lightning_3d.dry_run.traffic import Traffic, message_of
from lightning_3d.placeholder import Placeholder
from lightning_3d.progress import Progress
from lightning_3d.schedules import Action

_CPU_ATTENTION = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_CPU_ATTENTION_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


class Watch(TorchDispatchMode):
    """Follows a rank through its step.

    Wrappers of tensors (DTensors, placeholders) are passed by: the operations on what they hold are counted, once.

    Args:
        axes: The axis of every process group, by the group's name.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self.allocations = Allocations()
        self.traffic: dict[int, Traffic] = {}
        """By index of the moment."""
        self.flops: Counter[int] = Counter()
        """By index of the moment."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, everything is followed."""
        with self.allocations.watching(), self:
            yield

    @property
    def _now(self) -> int:
        return len(self.allocations.moments) - 1

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if is_outlining():
            return func(*args, **kwargs)
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **kwargs)
        if any(issubclass(kind, Placeholder) for kind in types):
            return result
        if func.namespace == "c10d":
            message = message_of(func, args, kwargs, self._axes)
            if message is not None:
                self.traffic.setdefault(self._now, Counter())[message] += 1
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and (piece := self.allocations.see(leaf)) and not piece.kind:
                        piece.kind = "communication"
            return result
        if (count := _flops(func, args, kwargs, result)) > 0:
            self.flops[self._now] += count
        if not func.is_view:  # of a tensor that is known, or of a buffer inside of gloo, which is not the run's
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.allocations.see(leaf)
        return result


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if packet is _CPU_ATTENTION:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet is _CPU_ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))
    formula = flop_registry.get(packet)
    if formula is None or any(isinstance(x, Tensor) and x.device.type == "meta" for x in args):
        return 0
    return int(formula(*args, **kwargs, out_val=result))


class Steps(Progress):
    """Tells a :class:`Watch` which action the engine begins."""

    def __init__(self, watch: Watch, between: Any) -> None:
        super().__init__()
        self._watch, self._between = watch, between

    @override
    def act(self, action: object) -> None:
        super().act(action)
        self._between()
        assert isinstance(action, Action)
        self._watch.allocations.begin(Moment(action.kind.value, action.chunk, action.micro_batch))

    @override
    def enter(self, phase: str) -> None:
        super().enter(phase)
        self._between()
        self._watch.allocations.begin(Moment(phase))
