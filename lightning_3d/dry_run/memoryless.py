"""Computing without memory: tensors know shape, type and storage, and have no values."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.placeholder import Placeholder

_LEAST = 16
"""Elements from which a new tensor has no memory. Smaller ones are made: counters, seeds, flags that the host reads."""

_MOST = 2**20
"""Elements up to which positions have values, and what is computed from them. Models decide by them on the host:
transformers looks whether they count up by ones, and leaves the causal mask to the attention kernel if they do."""

ASKS_DEVICE = torch.ops.prim.device.default
"""How torch asks a tensor without memory where it is."""

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_MODELS = f"{_OURS}{os.sep}models"


class Memoryless(TorchDispatchMode):
    """Within, new tensors have no memory, and everything computed from such tensors has none either.

    Small tensors, positions, and what is computed from real tensors alone, are real, so that what the host decides by
    is there.
    Collectives on tensors without memory are only announced. A value that is read from such a tensor is taken to be
    zero; :attr:`reads` counts where.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.reads: Counter[str] = Counter()
        """Lines of code that have read a value, each with how often."""

    def tensor(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """A tensor without memory, with a storage of its own."""
        with self.fake:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if is_outlining():
            return func(*args, **kwargs)
        if func is ASKS_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        leaves, _ = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, DTensor) for leaf in tensors):
            return NotImplemented  # it calls operations on what it holds
        if any(isinstance(leaf, Placeholder) for leaf in tensors):
            return func(*args, **kwargs)
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tensors)
        if func.namespace == "c10d":
            return _announced(func, args, kwargs) if is_fake else func(*args, **kwargs)
        if is_fake:
            return self._computed(func, args, kwargs)
        return self._grown(func, args, kwargs) if tensors else self._made(func, args, kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The answer of an operation that reads no tensor."""
        if str(kwargs.get("device")) == "meta" or not any(a.name == "device" for a in func._schema.arguments):
            return func(*args, **kwargs)
        with self.fake:
            outline = func(*args, **kwargs)
        most = _MOST if func.overloadpacket is torch.ops.aten.arange else _LEAST - 1
        is_large = isinstance(outline, Tensor) and outline.numel() > most
        return outline if is_large else func(*args, **kwargs)

    def _grown(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The answer of an operation on tensors with values: without them if it is large, as masks of s x s are."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        most = max(tensor.numel() for tensor in tensors)
        if most >= _LEAST and not func.is_view and not func._schema.is_mutable:
            with self.fake:
                outline = func(*args, **kwargs)
            if isinstance(outline, Tensor) and outline.numel() > max(most, _MOST):
                return outline
        return func(*args, **kwargs)

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake:
                result = func(*args, **kwargs)
        except DataDependentOutputException:
            return self._read(func, args)
        except DynamicOutputShapeException as error:
            raise ConfigError(
                f"{user_line()} makes a tensor whose shape depends on values ({func}), which a dry run does not have."
                " Let shapes follow from shapes (masks instead of selected elements), or leave that part out of the dry"
                " run."
            ) from error
        return _same_objects(func, args, kwargs, result)

    def _read(self, func: Any, args: Any) -> Any:
        """A value, for code that cannot go on without: zero."""
        if func is torch.ops.aten.equal.default:
            return True
        if func is not torch.ops.aten._local_scalar_dense.default:
            raise ConfigError(f"{user_line()} needs values ({func}), which a dry run does not have.")
        self.reads[user_line()] += 1
        return torch.zeros((), dtype=args[0].dtype).item()


def is_outlining() -> bool:
    """Whether somebody else works out shapes: DTensor does, with tensors of the size of the whole."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def user_line() -> str:
    """The innermost line of code that is neither torch's nor ours."""
    names = [(frame.filename, frame.lineno) for frame in traceback.extract_stack()]
    outside = [
        (name, line)
        for name, line in names
        if not name.startswith(_TORCH) and (not name.startswith(_OURS) or name.startswith(_MODELS))
    ]
    name, line = outside[-1]
    return f"{os.path.relpath(name)}:{line}"


def _announced(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a collective on nothing: what it gives, with the tensors that it was called on."""
    stub = torch.empty(0)
    bare = pytree.tree_map_only(Tensor, lambda tensor: stub, (args, kwargs))
    result = func(*bare[0], **bare[1])
    return (args[0], result[-1]) if isinstance(result, tuple) else result


def _same_objects(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """``result``, with the very tensors that the operation was told to write to."""
    returns = func._schema.returns
    if not any(item.alias_info is not None and item.alias_info.is_write for item in returns):
        return result
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if len(returns) == 1:
        return written[0] if len(written) == 1 and written[0] is not None else result
    return tuple(written) if len(written) == len(returns) and None not in written else result
