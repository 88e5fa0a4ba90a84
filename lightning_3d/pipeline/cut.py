"""Running the user's whole step for one chunk: what comes before is a placeholder, what comes after is not run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_3d.errors import StageError
from lightning_3d.pipeline.blocks import ChunkMap
from lightning_3d.pipeline.foreign import order_of_calls, refuse_unbound
from lightning_3d.pipeline.needs import Exchange, Needs
from lightning_3d.pipeline.stand_in import StandIn
from lightning_3d.placeholder import (
    Placeholder,
    bind_on_demand,
    is_placeholder,
    leaves_of,
    placeholder_parameter,
    recording,
    resolve,
    user_line,
)


class StageEnd(BaseException):
    """No error: the first block of the next chunk ends the user's step, with the flattened arguments of its call."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.leaves = leaves


@dataclass
class _Run:
    """One pass of the user's step for one chunk."""

    chunk: int
    exchange: Exchange
    needs: Needs
    entered: bool
    """Whether the chunk's own part has begun: from then on it holds the values of what it needs."""
    next_block: int = 0


class Cut:
    """Cuts a module by the calls that the user's step makes, for the chunks that this rank owns.

    Parameters of other chunks become placeholders where they stand, so names, structure and attributes stay whole.
    Where a rank owns several chunks, the modules of those that are not running are exchanged for twins which hold
    placeholders, for the time of the run.
    """

    def __init__(self, module: nn.Module, chunks: ChunkMap, owned: Sequence[int], device: torch.device) -> None:
        self.module = module
        self.chunks = chunks
        self.owned = tuple(owned)
        self._run: _Run | None = None
        self._twins = self._make_twins(device) if len(self.owned) > 1 else {}
        self._swaps = {
            chunk: [twin for name, twin in self._twins.items() if chunk not in chunks.chunks_of(name)]
            for chunk in self.owned
        }
        """The twins that stand in while a chunk runs."""
        self._doubles = self._make_doubles(device)
        self._strip(device)

    def owns(self, name: str) -> bool:
        """Whether a chunk of this rank owns the module of that name."""
        return any(chunk in self.owned for chunk in self.chunks.chunks_of(name))

    def in_block(self, name: str) -> bool:
        """Whether the module of that name is a block, of this stage or another, or a part of one."""
        return name in self.chunks.blocks or any(name.startswith(f"{block}.") for block in self.chunks.blocks)

    def is_everywhere(self, name: str) -> bool:
        """Whether every chunk of the pipeline, on whatever rank, has the module of that name."""
        return len(self.chunks.chunks_of(name)) == self.chunks.num_chunks

    @property
    def twins(self) -> dict[str, nn.Module]:
        """Modules of this rank that have a twin, each with it."""
        return {name: twin for name, (_, _, twin) in self._twins.items()}

    def install(self) -> None:
        """Hook the blocks; call this last, so that no other hook runs before."""
        if self.chunks.num_chunks == 1:
            return
        modules = dict(self.module.named_modules(remove_duplicate=False))
        for name in dict.fromkeys(self.chunks.blocks):
            blocks = [modules[name]] if self.owns(name) else []
            stand_ins = [self._twins[name][2]] if name in self._twins else [] if blocks else [modules[name]]
            for stand_in in stand_ins:
                stand_in.forward = StandIn(stand_in, name)
            if name in self._doubles:
                modules[name].forward = _ByCall(self, modules[name].forward, StandIn(self._doubles[name], name))
            calls = [index for index, block in enumerate(self.chunks.blocks) if block == name]
            for block in (*blocks, *stand_ins):
                block.register_forward_pre_hook(_BlockHook(self, calls, name), prepend=True, with_kwargs=True)
        for name in self.chunks.outside:
            # What a plain layer of torch answers with depends on the shapes of its input alone.
            layers = [self._twins[name][2]] if name in self._twins else [] if self.owns(name) else [modules[name]]
            for layer in layers:
                plain = type(layer).__module__.startswith("torch.nn.modules.") or isinstance(layer, ParametrizationList)
                if plain and "forward" not in vars(layer):
                    layer.forward = StandIn(layer, name)
        for name in self.chunks.outside:
            if self.owns(name):
                arrival = _ArrivalHook(self, name)
                modules[name].register_forward_pre_hook(arrival, prepend=True, with_kwargs=True)
        inside = tuple(f"{name}." for name in self.chunks.blocks)
        for name, module in self.module.named_modules():
            if name and not name.startswith(inside):
                around = any(block.startswith(f"{name}.") for block in self.chunks.blocks)
                seen = _OutputHook(self, name, whole=not around and any(True for _ in module.parameters()))
                for part in (module, *([self._twins[name][2]] if name in self._twins else [])):
                    part.register_forward_hook(seen)

    @contextmanager
    def running(self, chunk: int, exchange: Exchange) -> Iterator[None]:
        """Within, the module acts as ``chunk``, and gets through ``exchange`` what it needs of other chunks."""
        order_of_calls(self.chunks.order_known)
        self._run = _Run(chunk, exchange, Needs(exchange), entered=chunk == 0)
        swapped = self._swaps[chunk]
        originals = [(parent, key, parent._modules[key]) for parent, key, _ in swapped]
        for parent, key, twin in swapped:
            parent._modules[key] = twin
        try:
            with recording() if self._run.needs.watching else nullcontext():
                yield
        finally:
            self._run = None
            for parent, key, original in originals:
                parent._modules[key] = original

    @property
    def is_running(self) -> bool:
        """Whether the user's step is being run for a chunk."""
        return self._run is not None

    def _strip(self, device: torch.device) -> None:
        """Replace the parameters of modules that other ranks own; shared parameters stay shared."""
        new: dict[int, nn.Parameter] = {}
        for name, child in self.module.named_modules(remove_duplicate=False):
            if self.owns(name):
                continue
            for key, parameter in list(child._parameters.items()):
                if parameter is None or is_placeholder(parameter):
                    continue
                if id(parameter) not in new:
                    new[id(parameter)] = placeholder_parameter(parameter, device, f"{name}.{key}")
                child._parameters[key] = new[id(parameter)]

    def _make_twins(self, device: torch.device) -> dict[str, tuple[nn.Module, str, nn.Module]]:
        """Copies, without memory, of the modules that some but not all chunks of this rank own."""
        modules = dict(self.module.named_modules(remove_duplicate=False))
        outside = {name for name, chunks in self.chunks.outside.items() if len(chunks) < self.chunks.num_chunks}
        twins = {}
        for name in (*self.chunks.blocks, *outside):
            if not self.owns(name):
                continue
            parent_name, _, key = name.rpartition(".")
            twins[name] = (modules[parent_name], key, _without_memory(modules[name], name, device))
        return twins

    def _make_doubles(self, device: torch.device) -> dict[str, nn.Module]:
        """Copies, without memory, of blocks that several chunks call: they answer for the calls of the others."""
        repeated = {name for name in self.chunks.blocks if len(self.chunks.chunks_of(name)) > 1}
        modules = dict(self.module.named_modules(remove_duplicate=False))
        return {name: _without_memory(modules[name], name, device) for name in repeated}

    def name_of_call(self, name: str) -> str:
        """A name for the call of a block that has just begun: its own, with a number if it is called several times."""
        return f"{name} {self._run.next_block}" if self._run is not None and name in self._doubles else name

    def answers_itself(self) -> bool:
        """Whether the call of a block that has just begun is for the running chunk to compute."""
        return self._run is None or self.chunks.chunk_of(self._run.next_block - 1) == self._run.chunk

    def _block_called(self, calls: Sequence[int], name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        run = self._run
        if run is None:
            return None
        starts = self.chunks.starts
        index = run.next_block
        if index not in calls:
            self._refuse_order(calls[0], name, run)
        run.next_block = index + 1
        if index == starts[run.chunk + 1]:
            arguments = leaves_of((args, kwargs))
            if run.entered:
                run.needs.bind([leaf for leaf in arguments if isinstance(leaf, Placeholder)])
            raise StageEnd(leaves_of(arguments))
        if index == starts[run.chunk] and run.chunk > 0:
            return self._enter(run, args, kwargs)
        if index >= starts[run.chunk]:
            return self._bind(run, args, kwargs, name)
        return None

    def _enter(self, run: _Run, args: Any, kwargs: Any) -> tuple[Any, Any]:
        wanted: dict[int, tuple[int, Placeholder]] = {}
        for position, leaf in enumerate(leaves_of((args, kwargs))):
            if isinstance(leaf, Placeholder) and id(leaf) not in wanted:
                wanted[id(leaf)] = (position, leaf)
        placeholders = [leaf for _, leaf in wanted.values()]
        run.entered = True
        run.exchange.enter([position for position, _ in wanted.values()], placeholders, run.needs.roots)
        if run.needs.watching:
            bind_on_demand(run.needs.bind)
        args, kwargs = resolve((args, kwargs))
        return args, kwargs

    def _bind(self, run: _Run, args: Any, kwargs: Any, name: str) -> tuple[Any, Any] | None:
        """Let the values of placeholders among the arguments of a module of this chunk come."""
        unbound = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Placeholder)]
        if not unbound:
            return None
        if not run.entered or run.chunk == 0 or not run.needs.bind(unbound):
            refuse_unbound(unbound, name)
        args, kwargs = resolve((args, kwargs))
        return args, kwargs

    def _module_called(self, name: str, output: Any, whole: bool) -> None:
        run = self._run
        if run is not None:
            running = self.chunks.chunk_of(run.next_block - 1)
            run.needs.module_called(name, output, running, entered=run.entered, whole=whole)

    def _outside_called(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        run = self._run
        # Before the entry a module that earlier chunks run too stands for theirs.
        if run is None or (not run.entered and len(self.chunks.outside[name]) > 1):
            return None
        return self._bind(run, args, kwargs, name)

    def _refuse_order(self, index: int, name: str, run: _Run) -> None:
        expected = self.chunks.blocks[run.next_block] if run.next_block < len(self.chunks.blocks) else "nothing more"
        twice = index < run.next_block
        raise StageError(
            f"Block {name!r} was called {'again' if twice else 'out of order'} at {user_line()} in one step, where the"
            f" pipeline expects {expected!r}. A pipeline runs every block of {list(self.chunks.blocks)[:3]}... once, in"
            " their order. Call the model once in a step and its blocks in order, name another list of layers with"
            " pipeline_blocks, or use pipeline_parallel=1."
        )


class _BlockHook:
    """Tells the cut that a block is about to run."""

    def __init__(self, cut: Cut, calls: Sequence[int], name: str) -> None:
        self._cut, self._calls, self._name = cut, calls, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._cut._block_called(self._calls, self._name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BlockHook:
        return self


class _ArrivalHook:
    """Lets values come that a module of this chunk outside of the blocks needs."""

    def __init__(self, cut: Cut, name: str) -> None:
        self._cut, self._name = cut, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._cut._outside_called(self._name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ArrivalHook:
        return self


class _OutputHook:
    """Tells the cut what a module gave."""

    def __init__(self, cut: Cut, name: str, whole: bool) -> None:
        self._cut, self._name, self._whole = cut, name, whole

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._cut._module_called(self._name, output, self._whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> _OutputHook:
        return self


class _ByCall:
    """The forward of a block that is called several times in a step: for real where this chunk runs it."""

    def __init__(self, cut: Cut, forward: Callable[..., Any], stand_in: StandIn) -> None:
        self._cut, self._forward, self._stand_in = cut, forward, stand_in

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._forward if self._cut.answers_itself() else self._stand_in)(*args, **kwargs)


def _without_memory(module: nn.Module, name: str, device: torch.device) -> nn.Module:
    memo: dict[int, Any] = {
        id(parameter): placeholder_parameter(parameter, device, f"{name}.{leaf}")
        for leaf, parameter in module.named_parameters()
    }
    return copy.deepcopy(module, memo)
