"""Hugging Face's ``from_pretrained`` while a model is built: files are read later, for what a rank keeps."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.initialization.deferral import made_by, paused

_LOADER = "transformers.modeling_utils"
_ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@contextlib.contextmanager
def reading_late(least: int | None) -> Iterator[None]:
    """Within, ``from_pretrained`` gives tensors of ``least`` elements and more a recipe: which key of which file.

    Its own code runs: it finds and renames keys, converts and casts, ties, initialises what the files lack. Only the
    tensors it handles have no memory, so what it does to them is recorded. Where it builds on the meta device to
    overwrite everything afterwards, nothing is recorded and no random numbers are drawn, as without us.

    Args:
        least: ``None`` reads everything at once.
    """
    undo: list[Callable[[], None]] = []

    def patch(module: ModuleType) -> None:
        undo.append(_patch(module, least))

    finder = _AfterImport(_LOADER, patch)
    before = os.environ.get(_ONE_THREAD)
    if _LOADER in sys.modules:
        patch(sys.modules[_LOADER])
    else:
        sys.meta_path.insert(0, finder)
    if least is not None:
        os.environ[_ONE_THREAD] = "1"  # recording belongs to this thread; there is nothing to wait for in others
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        if before is None:
            os.environ.pop(_ONE_THREAD, None)
        else:
            os.environ[_ONE_THREAD] = before
        for restore in undo:
            restore()


def _patch(module: Any, least: int | None) -> Callable[[], None]:
    """Let the loader build without recording and open files lazily; gives what undoes it."""
    base, opener = module.PreTrainedModel, module.safe_open
    contexts = vars(base)["get_init_context"]

    def get_init_context(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return [*contexts.__get__(None, cls)(*args, **kwargs), paused()]

    base.get_init_context = classmethod(get_init_context)
    if least is not None:
        module.safe_open = lambda filename, *args, **kwargs: _File(opener, least, filename, *args, **kwargs)

    def restore() -> None:
        base.get_init_context = contexts
        module.safe_open = opener

    return restore


class _File:
    """An open safetensors file whose large tensors are read when their values are needed."""

    def __init__(self, opener: Any, least: int, filename: Any, *args: Any, **kwargs: Any) -> None:
        self._file = opener(filename, *args, **kwargs)
        self._path = Path(os.path.abspath(filename))
        self._least = least
        self._on_cpu = str(kwargs.get("device", args[1] if len(args) > 1 else "cpu")) in ("cpu", "None")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def get_slice(self, key: str) -> Any:
        """What reads the tensor, or a part of it, when it is indexed."""
        found = self._file.get_slice(key)
        return _Slice(found, self._path, key) if self._is_late(found) else found

    def get_tensor(self, key: str) -> Tensor:
        """The tensor."""
        found = self._file.get_slice(key)
        whole: Tensor = _Slice(found, self._path, key)[...] if self._is_late(found) else self._file.get_tensor(key)
        return whole

    def _is_late(self, found: Any) -> bool:
        shape = found.get_shape()
        return self._on_cpu and found.get_dtype() in _TYPES and torch.Size(shape).numel() >= self._least


class _Slice:
    """Stands for a tensor of a file; indexing gives a tensor with a recipe."""

    def __init__(self, found: Any, path: Path, key: str) -> None:
        self._found, self._path, self._key = found, path, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __getitem__(self, index: Any) -> Tensor:
        dtype = _TYPES[self._found.get_dtype()]
        whole = made_by(_read, (self._path, self._key), self._found.get_shape(), dtype)
        return whole if index is ... else whole[index]


def _read(path: Path, key: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(key).clone()  # of its own: the file would stay mapped otherwise
    return found


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as that is imported."""

    def __init__(self, name: str, after: Callable[[ModuleType], None]) -> None:
        self._name, self._after = name, after
        self._is_looking = False

    @override
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        """Find the module as others would, and wrap its execution."""
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
