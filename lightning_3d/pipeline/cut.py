"""Running the user's whole step for one chunk: what comes before is a placeholder, what comes after is not run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.errors import StageError
from lightning_3d.pipeline.blocks import ChunkMap
from lightning_3d.placeholder import (
    Placeholder,
    is_placeholder,
    leaves_of,
    placeholder_parameter,
    resolve,
    user_line,
)

Receive = Callable[[list[int], list[Placeholder]], list[Tensor]]


class StageEnd(BaseException):
    """No error: the first block of the next chunk ends the user's step, with the flattened arguments of its call."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self.leaves = leaves


@dataclass
class _Run:
    """One pass of the user's step for one chunk."""

    chunk: int
    receive: Receive
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
        self._strip(device)

    def owns(self, name: str) -> bool:
        """Whether a chunk of this rank owns the module of that name."""
        return any(chunk in self.owned for chunk in self.chunks.chunks_of(name))

    @property
    def twins(self) -> dict[str, nn.Module]:
        """Modules of this rank that have a twin, each with it."""
        return {name: twin for name, (_, _, twin) in self._twins.items()}

    def install(self) -> None:
        """Hook the blocks; call this last, so that no other hook runs before."""
        if self.chunks.num_chunks == 1:
            return
        modules = dict(self.module.named_modules(remove_duplicate=False))
        for index, name in enumerate(self.chunks.blocks):
            blocks = [modules[name]] if self.owns(name) else []
            stand_ins = [self._twins[name][2]] if name in self._twins else [] if blocks else [modules[name]]
            for stand_in in stand_ins:
                stand_in.forward = StandIn(stand_in, name)
            for block in (*blocks, *stand_ins):
                block.register_forward_pre_hook(_BlockHook(self, index, name), prepend=True, with_kwargs=True)
        for name in self.chunks.outside:
            # What a plain layer of torch answers with depends on the shapes of its input alone.
            layers = [self._twins[name][2]] if name in self._twins else [] if self.owns(name) else [modules[name]]
            for layer in layers:
                if type(layer).__module__.startswith("torch.nn.modules.") and "forward" not in vars(layer):
                    layer.forward = StandIn(layer, name)
        for name, owners in self.chunks.outside.items():
            if len(owners) == 1 and owners[0] in self.owned and owners[0] > 0:
                hook = _ArrivalCheck(self, name)
                modules[name].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    @contextmanager
    def running(self, chunk: int, receive: Receive) -> Iterator[None]:
        """Within, the module acts as ``chunk``; ``receive`` gives the tensors that its first block needs."""
        self._run = _Run(chunk, receive)
        swapped = [entry for name, entry in self._twins.items() if chunk not in self.chunks.chunks_of(name)]
        originals = [(parent, key, parent._modules[key]) for parent, key, _ in swapped]
        for parent, key, twin in swapped:
            parent._modules[key] = twin
        try:
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
            memo: dict[int, Any] = {
                id(parameter): placeholder_parameter(parameter, device, f"{name}.{leaf}")
                for leaf, parameter in modules[name].named_parameters()
            }
            twins[name] = (modules[parent_name], key, copy.deepcopy(modules[name], memo))
        return twins

    def _block_called(self, index: int, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        run = self._run
        if run is None:
            return None
        starts = self.chunks.starts
        if index != run.next_block:
            self._refuse_order(index, name, run)
        run.next_block = index + 1
        if index == starts[run.chunk + 1]:
            raise StageEnd(leaves_of((args, kwargs)))
        if index == starts[run.chunk] and run.chunk > 0:
            return self._enter(run, args, kwargs)
        if index > starts[run.chunk]:
            refuse_unbound((args, kwargs), name)
        return None

    def _enter(self, run: _Run, args: Any, kwargs: Any) -> tuple[Any, Any]:
        wanted: dict[int, tuple[int, Placeholder]] = {}
        for position, leaf in enumerate(leaves_of((args, kwargs))):
            if isinstance(leaf, Placeholder) and id(leaf) not in wanted:
                wanted[id(leaf)] = (position, leaf)
        tensors = run.receive([p for p, _ in wanted.values()], [leaf for _, leaf in wanted.values()])
        for (_, leaf), tensor in zip(wanted.values(), tensors, strict=True):
            leaf.bind(tensor)
        args, kwargs = resolve((args, kwargs))
        return args, kwargs

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

    def __init__(self, cut: Cut, index: int, name: str) -> None:
        self._cut, self._index, self._name = cut, index, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return self._cut._block_called(self._index, self._name, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _BlockHook:
        return self


class _ArrivalCheck:
    """Refuses a placeholder that reaches a module of this chunk outside of the blocks."""

    def __init__(self, cut: Cut, name: str) -> None:
        self._cut, self._name = cut, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._cut.is_running:
            refuse_unbound((args, kwargs), self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _ArrivalCheck:
        return self


def refuse_unbound(tree: Any, where: str) -> None:
    """Raise if ``tree`` holds a placeholder whose tensor has not arrived.

    Raises:
        StageError: naming the module the value comes from and ``where`` it is needed.
    """
    missing = next((leaf for leaf in leaves_of(tree) if isinstance(leaf, Placeholder)), None)
    if missing is not None:
        raise StageError(
            f"{where!r} needs a value of shape {tuple(missing.shape)} that comes from {missing.origin!r} on another"
            f" pipeline stage and was not among the arguments of the first block of this stage (at {user_line()})."
            " Pass the value through the arguments of the blocks, move the module that makes it (give"
            " `example_input_array` on the LightningModule so that the order of calls is known), or use"
            " pipeline_parallel=1."
        )


class StandIn:
    """The forward of a module that another chunk owns: on meta tensors once per signature, then from memory."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._forward = module.forward
        self._module = module
        self._name = name
        self._memory: dict[Any, tuple[list[Any], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as the module would, with placeholders."""
        inputs: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():  # placeholders answer for themselves
            signature = _signature((args, kwargs), inputs)
        key = None if signature is None else (signature, self._module.training, torch.is_grad_enabled())
        if key is not None and key in self._memory:
            answer, out_spec = self._memory[key]
        else:
            args, kwargs = resolve((args, kwargs))
            outputs, out_spec = pytree.tree_flatten(self._forward(*args, **kwargs))
            answer = [self._describe(leaf, inputs) for leaf in outputs]
            if key is not None and not any(isinstance(item, Tensor) for item in answer):
                self._memory[key] = (answer, out_spec)
        outputs = [self._recall(item, inputs) for item in answer]
        return outputs[0] if out_spec.is_leaf() else pytree.tree_unflatten(outputs, out_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._forward, memo)

    @staticmethod
    def _describe(leaf: Any, inputs: list[Tensor]) -> Any:
        for index, given in enumerate(inputs):
            if leaf is given:
                return _Input(index)
        if isinstance(leaf, Placeholder):
            return _Fact(leaf.meta, leaf.device, leaf.requires_grad)
        return leaf

    def _recall(self, item: Any, inputs: list[Tensor]) -> Any:
        if isinstance(item, _Input):
            return inputs[item.index]
        if isinstance(item, _Fact):
            return Placeholder(item.meta, item.device, item.requires_grad, origin=self._name)
        return item


def _signature(tree: Any, tensors: list[Tensor]) -> Any:
    """What decides the shapes that a module answers with; ``None`` if that cannot be told. Collects the tensors."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        if isinstance(tree, Placeholder) and tree.bound is not None:
            tree = tree.bound
        tensors.append(tree)
        return isinstance(tree, Placeholder), tree.shape, tree.dtype, tree.requires_grad
    if tree is None or isinstance(tree, bool | int | float | str | torch.dtype | torch.device):
        return kind, tree
    layout: Any = kind
    if kind is dict:
        layout, tree = tuple(tree), tree.values()
    elif kind is not tuple and kind is not list:
        if pytree.tree_is_leaf(tree):
            return None
        tree, spec = pytree.tree_flatten(tree)
        layout = str(spec)
    parts = [_signature(item, tensors) for item in tree]
    return None if any(part is None for part in parts) else (layout, *parts)


@dataclass(frozen=True)
class _Input:
    """The answer is the input tensor of this number."""

    index: int


@dataclass(frozen=True)
class _Fact:
    """The answer is a new placeholder with these facts."""

    meta: Tensor
    device: torch.device
    requires_grad: bool
