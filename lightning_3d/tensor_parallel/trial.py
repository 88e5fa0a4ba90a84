"""Runs a block with a layout without its values: whether its code can work with one rank's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.mesh import Axis
from lightning_3d.tensor_parallel.clone import Ground, GuessValues, trial_clone, trial_tensor
from lightning_3d.tensor_parallel.convert import convert_block
from lightning_3d.tensor_parallel.layout import BlockLayout, RegionLayout
from lightning_3d.tensor_parallel.parameters import ParameterCut
from lightning_3d.tensor_parallel.probe import BlockCall
from lightning_3d.tensor_parallel.region import Regions


@dataclass(frozen=True)
class Trial:
    """A block, how it is called, and what it gives whole: what layouts are tried on."""

    block: nn.Module
    call: BlockCall
    ground: Ground
    tp: int
    sequence_dim: int | None
    shapes: dict[int, Size] | str
    """Shapes of what the whole block returns and others read, by leaf; or why it does not run without values."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the block, on its way to another rank: there another of the same kind takes its place."""
        return Trial, (nn.Identity(), self.call, self.ground, self.tp, self.sequence_dim, self.shapes)

    @classmethod
    def of(cls, block: nn.Module, call: BlockCall, ground: Ground, tp: int, sequence_dim: int | None) -> Trial:
        """Run the whole ``block`` once."""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), GuessValues():
                output = _call(trial_clone(block, ground), call, ground)
            shapes: dict[int, Size] | str = {index: leaf.shape for index, leaf in call.outputs(output).items()}
        except Exception as error:
            shapes = _said(error)
        return cls(block, call, ground, tp, sequence_dim, shapes)

    def fault(self, layout: BlockLayout) -> str:
        """Why the block cannot run with ``layout``; empty if it can. Nothing is sent, no values are computed."""
        return self._run(layout)[0]

    def complete(self, layout: BlockLayout, index: int) -> tuple[RegionLayout, str]:
        """``layout.regions[index]``, with exits for what it returns with the rank's own heads; or what is wrong."""
        region = layout.regions[index]
        fault, exits = self._run(layout, region.around)
        if not fault or not exits:
            return region, fault
        regions = list(layout.regions)
        regions[index] = replace(region, exits=exits)
        fault = self.fault(replace(layout, regions=tuple(regions)))
        return regions[index], fault

    def _run(self, layout: BlockLayout, around: str = "") -> tuple[str, tuple[tuple[int, int], ...]]:
        """What is wrong, and which of the things that the module ``around`` returned would have to be gathered."""
        if isinstance(self.shapes, str):
            return self.shapes, ()
        axis = Axis("tp", self.tp, 0, tuple(range(self.tp)), None)
        copy = trial_clone(self.block, self.ground)
        expected = {index: list(shape) for index, shape in self.shapes.items()}
        done: set[int] = set()
        inner: list[Any] = []

        def cut(_: str, parameter: nn.Parameter, cut: ParameterCut) -> None:
            if id(parameter) not in done:
                parameter.data = cut.take(parameter.detach(), axis.rank)
                done.add(id(parameter))

        dim = self.sequence_dim
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), GuessValues():
                convert_block(copy, layout, Regions(axis, torch.device("cpu"), dim or 0), cut, dim)
                if around:
                    copy.get_submodule(around).register_forward_hook(
                        lambda _, args, output: inner.extend(pytree.tree_leaves(output))
                    )
                leaves, spec = self.call.leaves()
                hidden = self.call.hidden
                if dim is not None and hidden >= 0:
                    if leaves[hidden].shape[dim] % self.tp:
                        return f"the example's sequence of {leaves[hidden].shape[dim]} does not divide by {self.tp}", ()
                    leaves[hidden] = leaves[hidden].narrow(dim, 0, leaves[hidden].shape[dim] // self.tp)
                    expected[next(iter(expected))][dim] //= self.tp
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                output = _call(copy, BlockCall(args, kwargs), self.ground)
        except Exception as error:
            return _said(error), ()
        found = pytree.tree_leaves(output)
        fault, exits = "", []
        for index, shape in expected.items():
            leaf = found[index] if index < len(found) else None
            if not isinstance(leaf, Tensor):
                return "it does not return what it returns whole", ()
            if list(leaf.shape) == shape:
                continue
            fault = fault or f"the output has shape {tuple(leaf.shape)} instead of {tuple(shape)}"
            narrow = [d for d, (one, all_) in enumerate(zip(leaf.shape, shape, strict=False)) if one != all_]
            place = next((i for i, given in enumerate(inner) if given is leaf), None)
            cut_once = len(narrow) == 1 and leaf.dim() == len(shape)
            if place is None or not cut_once or leaf.shape[narrow[0]] * self.tp != shape[narrow[0]]:
                return fault, ()
            exits.append((place, narrow[0]))
        return fault, tuple(exits)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _call(block: nn.Module, call: BlockCall, ground: Ground) -> object:
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: trial_tensor(x, ground), (call.args, call.kwargs))
    return block(*args, **kwargs)
