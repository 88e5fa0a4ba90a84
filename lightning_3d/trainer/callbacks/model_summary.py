"""``ModelSummary`` of the whole model, taken before it is laid out, and what each rank holds of it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
from lightning.pytorch.utilities.model_summary import get_human_readable_count, summarize
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless

from lightning_3d.collectives import all_gather_object
from lightning_3d.mesh import Mesh
from lightning_3d.pipeline.block_state import attributes_kept
from lightning_3d.placeholder import is_placeholder
from lightning_3d.sharding.reducer import local_of


@dataclass(frozen=True)
class WholeSummary:
    """What the callback asks a summary for."""

    summary_data: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    @classmethod
    def of(cls, module: pl.LightningModule, max_depth: int, run: bool = True) -> WholeSummary:
        """Of a module whose parameters need no memory.

        With an ``example_input_array`` the model is run without computing anything. If it cannot be, because its code
        looks at values, the summary goes without the sizes of inputs and outputs.

        Args:
            module: Not laid out yet, to be run.
            max_depth: As for ``ModelSummary``.
            run: Whether to.
        """
        example = module.example_input_array
        if example is not None and run:
            try:
                with _without_values(module):
                    summary = summarize(module, max_depth)
                return cls._from(summary)  # with the parameters that train
            except Exception as error:
                rank_zero_warn(
                    "The model summary goes without input and output sizes: with example_input_array the model could"
                    f" not be run without values ({type(error).__name__}: {error})."
                )
        module.example_input_array = None
        try:
            return cls._from(summarize(module, max_depth))
        finally:
            module.example_input_array = example

    @classmethod
    def _from(cls, summary: Summary) -> WholeSummary:
        return cls(
            summary._get_summary_data(),
            summary.total_parameters,
            summary.trainable_parameters,
            summary.model_size,
            summary.total_training_modes,
            getattr(summary, "total_flops", 0),  # Lightning counts them since 2.5.2
        )

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.summary_data


_taken: WeakKeyDictionary[nn.Module, dict[int, WholeSummary]] = WeakKeyDictionary()
"""By depth, for Trainers that get the module when it is laid out already."""


class Summaries:
    """Serves ``ModelSummary`` and its subclasses, such as ``RichModelSummary``, during a run."""

    def __init__(self) -> None:
        self._served: list[ModelSummary] = []

    def before_layout(self, items: Iterable[pl.Callback], module: pl.LightningModule, mesh: Mesh, whole: bool) -> None:
        """Summarise the whole module, and have the callbacks show that.

        Args:
            items: The callbacks of the Trainer.
            module: Its LightningModule.
            mesh: The mesh.
            whole: Whether no earlier Trainer has laid the module out.
        """
        for item in items:
            if not isinstance(item, ModelSummary) or not item._max_depth:
                continue
            if type(item)._summary is ModelSummary._summary:
                taken = _taken.setdefault(module, {})
                if item._max_depth not in taken:
                    taken[item._max_depth] = WholeSummary.of(module, item._max_depth, run=whole)
                item._summary = _always(taken[item._max_depth])  # type: ignore[method-assign]
            item.on_fit_start = _with_ranks(item.on_fit_start, mesh)  # type: ignore[method-assign]
            self._served.append(item)

    def remove(self) -> None:
        """End."""
        for item in self._served:
            vars(item).pop("_summary", None)
            vars(item).pop("on_fit_start", None)
        self._served.clear()


def _always(summary: WholeSummary) -> Callable[..., Any]:
    return lambda *args: summary


def held_by_stage(module: nn.Module, mesh: Mesh) -> str:
    """How many parameters the ranks of every stage hold, in one line; collective."""
    mine = sum(local_of(p.detach()).numel() for p in module.parameters() if not is_placeholder(p))
    counts: dict[int, set[int]] = {}
    for stage, count in all_gather_object((mesh.pp.rank, mine), mesh.control_world):
        counts.setdefault(stage, set()).add(count)
    shares = []
    for stage, found in sorted(counts.items()):
        fewest, most = (get_human_readable_count(count).strip() for count in (min(found), max(found)))
        amount = most if fewest == most else f"{fewest} to {most}"
        shares.append(f"{amount} on stage {stage}" if len(counts) > 1 else amount)
    return f"Of these, each rank holds parameters: {', '.join(shares)}."


def _with_ranks(show: Callable[..., None], mesh: Mesh) -> Callable[..., None]:
    def on_fit_start(trainer: pl.Trainer, module: pl.LightningModule) -> None:
        show(trainer, module)
        rank_zero_info(held_by_stage(module, mesh))

    return on_fit_start


@contextlib.contextmanager
def _without_values(module: pl.LightningModule) -> Iterator[None]:
    """Within, the module runs on tensors that have shapes only, whether it has memory or not."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=[]), fake, attributes_kept(module), torch.no_grad():
        stand_ins: dict[str, Tensor] = {}
        by_id: dict[int, Tensor] = {}
        for name, tensor in (
            (f"{path}.{key}".lstrip("."), tensor)
            for path, child in module.named_modules()
            for key, tensor in (*child._parameters.items(), *child._buffers.items())
            if tensor is not None
        ):
            if id(tensor) not in by_id:
                by_id[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=module.device)
            stand_ins[name] = by_id[id(tensor)]
        with stateless._reparametrize_module(module, stand_ins):
            yield
