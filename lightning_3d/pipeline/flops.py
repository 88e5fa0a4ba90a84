"""What the operations of a model cost, counted in a run on meta tensors, block by block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_3d.example_inputs import Call, example_inputs
from lightning_3d.pipeline.recurrent import FewSteps
from lightning_3d.tensor_parallel.clone import GuessValues, without_hooks

LONGEST = 4096
"""Length of made-up sequences at most: models are built for longer ones than they are trained on."""
_MOST_OPERATIONS = 100_000
"""Operations after which runs are given up (seconds; a number, not a time, so that all ranks decide alike)."""
_LENGTHS = (512, 128, 32, 8)
"""Lengths to try where the model does not tell one."""
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "block_size", "seq_len")


@dataclass(frozen=True)
class FlopCount:
    """Operations of one forward and backward."""

    blocks: tuple[float, ...]
    """Of every block, with what runs between it and the next one; the first has what runs before it too, the last all
    that runs after it and the loss."""
    inputs: str
    """Shapes of the inputs that were run, for people."""
    products: float = 0.0
    """Of all, those of matrix products, convolutions and attention, which are what is called a model's FLOPs."""


class _TooMany(Exception):
    """The run has too many operations to be counted."""


class FlopCounter(TorchDispatchMode):
    """Adds up operations of forward and backward, for the block that was called last.

    Only the forward is run. Matrix products, convolutions and attention count by torch's formulas, and once more in the
    backward for every operand that needs a gradient: three times where weights are trained, less where they are frozen.
    Any other operation counts one for every element of its result, and as much in the backward.
    """

    def __init__(self, count: int, recomputed: float = 0.0, most: int = _MOST_OPERATIONS) -> None:
        super().__init__()
        self.left = most
        self.costs = [0.0] * count
        self.products = 0.0
        self.position = 0
        self.is_inside = False
        self._recomputed = recomputed

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self.left -= 1
        if self.left < 0:
            raise _TooMany
        out = func(*args, **kwargs)
        forward, backward = _operations(func, args, kwargs, out)
        self.costs[self.position] += forward * (1 + self._recomputed * self.is_inside) + backward
        if _formula(func) is not None:
            self.products += forward + backward
        return out


_FREE = (torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided)


def _operations(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> tuple[float, float]:
    packet, formula = getattr(func, "_overloadpacket", func), _formula(func)
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
    if formula is None:
        returns = func._schema.returns if hasattr(func, "_schema") else ()
        if packet in _FREE or any(x.alias_info is not None and not x.alias_info.is_write for x in returns):
            return 0.0, 0.0  # a view, or memory
        count = sum(x.numel() for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())
        return float(count), float(count) if any(x.requires_grad for x in tensors) else 0.0
    forward = float(formula(*args, **kwargs, out_val=out))
    matrices = [x for x in tensors if x.dim() > 1]
    # The two factors: a bias comes before those of a product, after those of a convolution. Attention has three, and
    # two products.
    attention = "attention" in str(func)
    factors = matrices[:3] if attention else matrices[:2] if "conv" in str(func) else matrices[-2:]
    needed = sum(x.requires_grad for x in factors)
    return forward, forward * (2 * (needed > 0) if attention else needed)


def _formula(func: Any) -> Callable[..., Any] | None:
    """Counts a product of matrices, a convolution or attention; ``None`` for any other operation."""
    packet = getattr(func, "_overloadpacket", func)
    return _grouped_product if packet == torch.ops.aten._grouped_mm else flop_registry.get(packet)


def _grouped_product(rows: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    """Every row, of one expert or another, meets one matrix."""
    return 2 * out_val.numel() * rows.shape[-1]


def count_flops(
    module: nn.Module, blocks: Sequence[str], recomputed: float = 0.0, length: int | None = None
) -> FlopCount | None:
    """Count the operations of one forward and backward of ``module``, block by block; nothing is computed.

    Run are the inputs that ``example_inputs`` makes up, as long as the model's sequences may be (4096 at most), on the
    module or on the part of it that holds the blocks. A cross entropy of what it returns stands for the loss.

    Args:
        module: The whole model; left as it is.
        blocks: Names of its blocks, in the order of their calls.
        recomputed: Share of the blocks whose forward is run again in the backward.
        length: Of the sequences; by default as long as they may be.

    Returns:
        The count, or ``None`` if no inputs run through all blocks.
    """
    left = 2 * _MOST_OPERATIONS
    for target in _targets(module, blocks):
        lengths = (known_length(target), *_LENGTHS) if length is None else (length,)
        for tried in dict.fromkeys(number for number in lengths if number):
            found: FlopCount | None = None
            for call in example_inputs(target, 1, tried):
                for dtype in (None, torch.bfloat16):
                    counter = FlopCounter(len(blocks), recomputed, min(left, _MOST_OPERATIONS))
                    before, (reached, error) = counter.left, _run(module, target, blocks, call, dtype, counter)
                    left -= before - max(counter.left, 0)
                    if reached.issuperset(blocks) and not isinstance(error, _TooMany):
                        count = FlopCount(tuple(counter.costs), _shapes(call), counter.products)
                        if error is None or reached.issuperset(_holders(module, target)):
                            return count  # what failed after all that has parameters is a loss that wants targets
                        found = found or count
                    if left <= 0:
                        return found
                    if "BF16" not in str(error):  # some operations know only this type on meta
                        break
            if found is not None:
                return found
    return None


def _holders(module: nn.Module, target: nn.Module) -> list[str]:
    """Names, in ``module``, of the parts of ``target`` that hold parameters themselves."""
    inside = set(target.modules())
    named = ((name, part) for name, part in module.named_modules() if part in inside)
    return [name for name, part in named if any(True for _ in part.parameters(recurse=False))]


def _shapes(call: Call) -> str:
    shapes = [x.shape for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
    return " and ".join(" x ".join(map(str, shape)) for shape in dict.fromkeys(shapes))


def _targets(module: nn.Module, blocks: Sequence[str]) -> Iterator[nn.Module]:
    """The modules that hold the blocks, outermost first."""
    parts = blocks[0].split(".")[:-1]
    for depth in range(len(parts) + 1):
        part = module.get_submodule(".".join(parts[:depth]))
        if not isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield part


def known_length(module: nn.Module) -> int | None:
    """The longest sequence that the model is made for, up to ``LONGEST``."""
    for part in module.modules():
        config = getattr(part, "config", None)
        for holder in (getattr(config, "text_config", None), config):
            found = [getattr(holder, name, None) for name in _LIMITS]
            for value in found:
                if isinstance(value, int) and not isinstance(value, bool) and value > 1:
                    return min(value, LONGEST)
    return None


def _run(
    module: nn.Module,
    target: nn.Module,
    blocks: Sequence[str],
    call: Call,
    dtype: torch.dtype | None,
    counter: FlopCounter,
) -> tuple[set[str], Exception | None]:
    """Run ``target`` on meta, all floating point in one type if one is given; what was called, and how it failed."""
    reached: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: reached.add(name)

    def enter(index: int, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            reached.add(name)
            counter.position, counter.is_inside = index, True

        return hook

    def leave(*_: Any) -> None:
        counter.is_inside = False

    attributes = {part: dict(vars(part)) for part in module.modules()}
    for part in module.modules():
        vars(part).update(without_hooks(part))
    try:
        for name in _holders(module, target):
            module.get_submodule(name).register_forward_pre_hook(note(name))
        for index, name in enumerate(blocks):
            block = module.get_submodule(name)
            block.register_forward_pre_hook(enter(index, name))
            block.register_forward_hook(leave)
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: _to_meta(x, dtype), call)
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(GuessValues())
            tensors = _on_meta(target, dtype)
            stack.enter_context(FewSteps(counter))
            stack.enter_context(counter)
            output = torch.func.functional_call(target, tensors, args, kwargs, tie_weights=False)
            _loss(output)
    except Exception as error:
        return reached, error
    finally:
        for part, values in attributes.items():
            vars(part).clear()
            vars(part).update(values)
    return reached, None


def _loss(output: Any) -> None:
    floating = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
    if floating and all(x.dim() for x in pytree.tree_leaves(output) if isinstance(x, Tensor)):
        torch.log_softmax(floating[0].float(), -1).mean()


def _to_meta(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("meta", dtype if tensor.is_floating_point() else None)


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Parameters and buffers on the meta device, as trainable as they are; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = _to_meta(tensor, dtype).requires_grad_(tensor.requires_grad)
                tensors[f"{path}.{name}".lstrip(".")] = made[id(tensor)]
    return tensors
