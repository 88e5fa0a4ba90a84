"""What happened in a run: every hook call in order with the Trainer's state at it, metrics, messages, files, error."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor

_OPTIMIZATION = (
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
MODULE_HOOKS = (
    *(
        name
        for kind in (ModelHooks, DataHooks, CheckpointHooks)
        for name in vars(kind)
        if not name.startswith("_") and name not in ("configure_sharded_model", *_LOADERS)
    ),
    *_OPTIMIZATION,
    "backward",
)
CALLBACK_HOOKS = tuple(
    sorted(name for name in vars(Callback) if not name.startswith("_") and callable(getattr(Callback, name)))
)
_METRICS_AT = ("_end", "on_save_checkpoint")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_UNTOLD = ("does not have many workers", "isinstance(treespec, LeafSpec)", "micro-batches per step for")
"""Warnings about the machine, inside of Lightning, and of the bubble that batches of a test leave."""


@dataclass(frozen=True)
class Event:
    """One call."""

    call: str
    """Who was called with what, such as ``callback.on_train_batch_start(batch_idx=0)``."""
    state: dict[str, Any] = field(default_factory=dict)
    """Of the Trainer when it was called: numbers and words, metrics among them as ``callback_metrics/loss``."""


@dataclass
class Happened:
    """All that one rank saw of a run. Pickles."""

    events: list[Event] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    """What the case itself wrote down, by name."""
    messages: list[str] = field(default_factory=list)
    """Warnings and the Trainer's reasons to stop."""
    files: list[str] = field(default_factory=list)
    """Written below the folder of the case; a directory that is a checkpoint counts as one."""
    error: str = ""
    """Type and first line of what ended the case."""
    seconds: float = 0.0

    @property
    def calls(self) -> list[str]:
        return [event.call for event in self.events]


class Recorder:
    """Makes modules, data modules and callbacks that write down every hook call, in one order."""

    def __init__(self) -> None:
        self.happened = Happened()
        self._trainer: Trainer | None = None

    def note(self, name: str, value: Any) -> None:
        """Write down a value under a name; numbers in it are compared as numbers."""
        self.happened.notes[name] = plain(value)

    def module(self, kind: type[LightningModule]) -> type[LightningModule]:
        """A subclass of ``kind`` whose hooks are recorded; its steps are not, they run once per micro-batch."""
        names = [*MODULE_HOOKS, *(name for name in _LOADERS if getattr(kind, name) is not vars(DataHooks)[name])]
        return type(
            kind.__name__, (kind,), {name: self._recorded("module", name, getattr(kind, name)) for name in names}
        )

    def data_module(self, kind: type[LightningDataModule]) -> type[LightningDataModule]:
        """The same for a data module."""
        names = [*(name for name in vars(DataHooks) if name.startswith(("on_", "transfer")))]
        names += ["prepare_data", "setup", "teardown", "state_dict", "load_state_dict", "on_exception"]
        names += [name for name in _LOADERS if getattr(kind, name) is not vars(DataHooks)[name]]
        return type(kind.__name__, (kind,), {name: self._recorded("data", name, getattr(kind, name)) for name in names})

    def callback(self, kind: type[Callback] = Callback, who: str = "callback") -> type[Callback]:
        """A subclass of a callback class whose hooks are recorded as those of ``who``."""
        hooks = {name: self._recorded(who, name, getattr(kind, name)) for name in CALLBACK_HOOKS}
        return type(kind.__name__, (kind,), hooks)

    def _recorded(self, who: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(this: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(this, *args, **kwargs).arguments
            shown = [f"{key}={value}" for key, value in bound.items() if type(value) in (int, str, float, bool)]
            trainer = next((value for value in bound.values() if isinstance(value, Trainer)), None)
            state = state_of(trainer, name) if trainer is not None else {}
            self.happened.events.append(Event(f"{who}.{name}({', '.join(shown)})", state))
            return original(this, *args, **kwargs)

        return call


def state_of(trainer: Trainer, hook: str = "on_train_batch_end") -> dict[str, Any]:
    """What a Trainer says of itself; metrics only at hooks where something has ended."""
    loop = trainer.fit_loop
    epoch = loop.epoch_loop
    state: dict[str, Any] = {
        "stage": str(trainer.state.stage),
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "batch_idx": epoch.batch_idx,
        "should_stop": trainer.should_stop,
        "num_training_batches": trainer.num_training_batches,
        "num_val_batches": trainer.num_val_batches,
        "grad": torch.is_grad_enabled(),
        "epochs": _progress(loop.epoch_progress),
        "batches": _progress(epoch.batch_progress),
        "optimizer": _progress(epoch.automatic_optimization.optim_progress),
        "schedulers": _progress(epoch.scheduler_progress),
        "validation": _progress(epoch.val_loop.batch_progress),
    }
    for i, optimizer in enumerate(trainer.optimizers if trainer.optimizers else ()):
        state |= {f"lr{i}.{j}": float(group["lr"]) for j, group in enumerate(optimizer.param_groups)}
    if trainer.lightning_module is not None:
        state["training"] = trainer.lightning_module.training
    if hook.endswith(_METRICS_AT):
        for kind in _METRICS:
            state |= {f"{kind}/{key}": plain(value) for key, value in getattr(trainer, kind).items()}
    return state


def _progress(progress: Any) -> str:
    """Counters in one line: total and current, without the names of those at zero."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            found = {key: short(inner) for key, inner in value.items()}
            return {key: inner for key, inner in found.items() if inner not in (0, False, {})}
        return value

    return str(short(dataclasses.asdict(progress)))


def plain(value: Any) -> Any:
    """A value as numbers, words and lists, so that it pickles and compares."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (int, float, str, bool)) or value is None:
        return value
    return str(value)


@contextlib.contextmanager
def listening(happened: Happened) -> Iterator[None]:
    """Write down what is told on the console within: warnings, and why the Trainer stopped."""
    _forget_warnings()
    told = _Told(happened)
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning_3d")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(told)
        logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("always", PossibleUserWarning)
            yield
        lines = [f"{w.category.__name__}: {str(w.message).strip().splitlines()[0]}" for w in caught]
        happened.messages += [line for line in lines if not any(part in line for part in _UNTOLD)]
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(told)
            logger.setLevel(level)


class _Told(logging.Handler):
    def __init__(self, happened: Happened) -> None:
        super().__init__(logging.INFO)
        self._happened = happened

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("`Trainer", "Trainer will", "Time limit", "Trainer was signaled", "Monitored metric")):
            self._happened.messages.append(text.splitlines()[0].split("Elapsed time")[0])


def _forget_warnings() -> None:
    """Lightning tells some things once per process; here every case is to be told them."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning.") and module is not None:
            for value in list(vars(module).values()):
                cache = vars(value).get("warning_cache") if isinstance(value, type) else value
                if isinstance(cache, WarningCache):
                    cache.clear()


def files_below(folder: Path) -> list[str]:
    """Relative paths of all files, sorted; a checkpoint that is a directory counts as a file."""
    found: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and path.suffix != ".ckpt":
            found += [f"{path.name}/{below}" for below in files_below(path)]
        else:
            found.append("events" if path.name.startswith("events.out.tfevents") else path.name)
    return found
