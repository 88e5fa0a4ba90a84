"""Lightning's callbacks that average weights, over weights of which every rank holds a part.

An average is taken element by element, so each rank averages what it holds. The callbacks keep their code: the model
they keep is replaced by this rank's parts under the names of the module, and what they compare it with by the same
parts of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from lightning_3d.checkpoint import ModelState, part_of
from lightning_3d.mesh import Mesh
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.reducer import local_of

_EVERY_STEP = getattr(callbacks, "WeightAveraging", None)
_EVERY_EPOCH = getattr(callbacks, "StochasticWeightAveraging", None)
_KINDS = tuple(kind for kind in (_EVERY_STEP, _EVERY_EPOCH) if kind is not None)
_EXTRA = "_extra_state"


class Parts(nn.Module):
    """A copy of this rank's parameters and buffers, as plain tensors in a tree of modules with the same names.

    Args:
        module: The LightningModule, laid out.
        state: Gives the rank's view of it, with gathered parameters freed.
        mesh: This rank's place.
        types: Types of the copies by name; those of others that are of half precision are float32.
    """

    def __init__(
        self, module: nn.Module, state: Callable[[], ModelState], mesh: Mesh, types: Mapping[str, torch.dtype]
    ) -> None:
        super().__init__()
        self._of, self._view, self._mesh = [module], state, mesh  # a list: it is no child
        view = state()
        self._keys = frozenset(view.keys)
        _copy_into(self, module, "", types, {})

    @property
    def live(self) -> Live:
        """The same parts of the module itself."""
        return Live(self._of[0], self._view)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        values = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, child in self._of[0].named_modules():
            key = f"{name}.{_EXTRA}" if name else _EXTRA
            if type(child).get_extra_state is not nn.Module.get_extra_state and key in self._keys:
                values[prefix + key] = child.get_extra_state()
        for key in [key for key in values if key.startswith(prefix) and key.removeprefix(prefix) not in self._keys]:
            del values[key]
        return values

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Fill the copy from whole tensors, or from parts as :meth:`state_dict` gave them."""
        view = self._view()
        live = {**view.parameters, **view.buffers}
        own = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers())}
        missing = [name for name in own if name in self._keys and name not in state_dict]
        if strict and missing:
            raise RuntimeError(f"The averaged weights lack {', '.join(missing[:8])}.")
        with torch.no_grad():
            for name, target in own.items():
                if name in state_dict and name in live and not is_placeholder(state_dict[name]):
                    target.copy_(part_of(name, state_dict[name], live[name], view, self._mesh))
        return nn.modules.module._IncompatibleKeys(missing, [])


def _copy_into(
    target: nn.Module, module: nn.Module, prefix: str, types: Mapping[str, torch.dtype], memo: dict[int, Any]
) -> None:
    def copy(key: str, tensor: Tensor) -> Tensor:
        # Half precision would lose the small changes that an average is made of.
        fallback = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
        return local_of(tensor.detach()).to(types.get(prefix + key, fallback), copy=True)

    for key, parameter in module._parameters.items():
        if parameter is not None and not is_placeholder(parameter):
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(copy(key, parameter), requires_grad=parameter.requires_grad)
            target._parameters[key] = memo[id(parameter)]
    for key, buffer in module._buffers.items():
        if buffer is not None:
            if id(buffer) not in memo:
                memo[id(buffer)] = copy(key, buffer)
            target._buffers[key] = memo[id(buffer)]
    target._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for key, child in module._modules.items():
        if child is not None:
            if id(child) not in memo:
                memo[id(child)] = nn.Module()
                _copy_into(memo[id(child)], child, f"{prefix}{key}.", types, memo)
            target._modules[key] = memo[id(child)]


class Live:
    """What this rank holds of a module, as plain tensors that share its memory, in the order of :class:`Parts`."""

    def __init__(self, module: nn.Module, state: Callable[[], ModelState]) -> None:
        self._module, self._state = module, state

    def parameters(self) -> Iterator[Tensor]:
        """This rank's parts of the parameters."""
        self._state()  # frees what is gathered
        return (local_of(p.detach()) for p in self._module.parameters() if not is_placeholder(p))

    def buffers(self) -> Iterator[Tensor]:
        """The buffers."""
        return (local_of(buffer.detach()) for buffer in self._module.buffers())


class AveragedParts(AveragedModel):
    """torch's averaged model over this rank's parts."""

    def __init__(self, parts: Parts, device: torch.device | None, like: Any, use_buffers: bool) -> None:
        nn.Module.__init__(self)
        self.module = parts if device is None else parts.to(device)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.long, device=device))
        self.avg_fn = like("avg_fn")
        self.multi_avg_fn = like("multi_avg_fn")
        self.use_buffers = use_buffers

    @override
    def update_parameters(self, model: Any) -> None:
        super().update_parameters(self.module.live)  # type: ignore[arg-type]

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        values = {key.removeprefix("module."): value for key, value in state_dict.items() if key != "n_averaged"}
        self.n_averaged.copy_(state_dict["n_averaged"])
        return self.module.load_state_dict(values, strict)


class Averaging:
    """Serves ``WeightAveraging``, ``StochasticWeightAveraging`` and their subclasses during a run."""

    def __init__(self) -> None:
        self._replaced: list[tuple[pl.Callback, str]] = []
        self._types: dict[str, torch.dtype] = {}

    def before_setup(self, items: Iterable[pl.Callback], module: pl.LightningModule) -> None:
        """Before the ``setup`` hook: keep the callbacks from copying the whole model, which no rank may have room for.

        Averages have the types that the module has now, as under the stock Trainer, whatever precision it trains in. A
        subclass with a ``setup`` of its own keeps it.
        """
        items = [item for item in items if isinstance(item, _KINDS)]
        if items:
            self._types = {name: t.dtype for name, t in (*module.named_parameters(), *module.named_buffers())}
        for item in items:
            for kind in _KINDS:
                if isinstance(item, kind) and type(item).setup is kind.setup:
                    self._replace(item, "setup", _later)

    def install(
        self,
        items: Iterable[pl.Callback],
        module: pl.LightningModule,
        state: Callable[[], ModelState],
        mesh: Mesh,
        fitting: bool,
    ) -> None:
        """Once ``module`` is laid out: let the callbacks work on this rank's parts; in ``fit``, on a copy of them."""
        for item in items:
            if _EVERY_STEP is not None and isinstance(item, _EVERY_STEP):
                if fitting:
                    self._begin_every_step(item, Parts(module, state, mesh, self._types))
                self._serve_every_step(item, Live(module, state))
            elif _EVERY_EPOCH is not None and isinstance(item, _EVERY_EPOCH) and fitting:
                self._serve_every_epoch(item, Parts(module, state, mesh, self._types), Live(module, state))

    def remove(self) -> None:
        """Give the callbacks their own methods back; what they keep stays."""
        for item, name in self._replaced:
            vars(item).pop(name, None)
        self._replaced.clear()

    def _begin_every_step(self, item: Any, parts: Parts) -> None:
        before = item._average_model
        if before is None or isinstance(before, AveragedParts):
            settings, use_buffers, device = item._kwargs, item._use_buffers, item._device
        else:  # a subclass has set it up
            settings, use_buffers, device = vars(before), before.use_buffers, before.n_averaged.device
        item._average_model = AveragedParts(parts, device, settings.get, use_buffers)

    def _serve_every_step(self, item: Any, live: Live) -> None:
        for name in ("_swap_models", "_copy_average_to_current"):
            original = getattr(item, name)
            self._replace(item, name, lambda _, original=original: original(live))

    def _serve_every_epoch(self, item: Any, parts: Parts, live: Live) -> None:
        item._average_model = parts
        update, transfer = item.update_parameters, item.transfer_weights
        self._replace(item, "update_parameters", lambda average, _, *rest: update(average, live, *rest))
        self._replace(item, "transfer_weights", lambda average, _: transfer(average, live))

    def _replace(self, item: pl.Callback, name: str, function: Any) -> None:
        setattr(item, name, function)
        self._replaced.append((item, name))


def _later(trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
    return
