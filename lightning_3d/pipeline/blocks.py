"""Sharing the blocks of a model out over chunks, and deciding who owns the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_3d import partition
from lightning_3d.errors import ConfigError, StageError
from lightning_3d.pipeline.block_lists import BlockList, find_block_lists, in_call_order
from lightning_3d.pipeline.costs import Costing, Costs, matrix_costs, parameter_costs
from lightning_3d.pipeline.observe import CallOrder
from lightning_3d.pipeline.teachers import asked_last, teacher_parts

__all__ = ["BlockList", "ChunkMap", "find_block_lists", "share_out"]


@dataclass(frozen=True)
class ChunkMap:
    """Which chunk of the pipeline every module of the model belongs to."""

    blocks: tuple[str, ...]
    """All blocks, in the order in which they are called; one that is called several times stands there as often."""
    starts: tuple[int, ...]
    """Index of the first block of every chunk, and the number of blocks at the end."""
    outside: Mapping[str, tuple[int, ...]]
    """Module outside the blocks that holds parameters itself -> the chunks that need them."""
    costs: Costs | None = None
    """What the blocks cost; ``None`` where there is one chunk."""
    order_known: bool = True
    """Whether the order of calls was seen for the whole model, not for a part of it or not at all."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the pipeline."""
        return len(self.starts) - 1

    def blocks_of(self, chunk: int) -> tuple[str, ...]:
        """Names of the blocks of ``chunk``, each once."""
        return tuple(dict.fromkeys(self.blocks[self.starts[chunk] : self.starts[chunk + 1]]))

    def chunk_of(self, call: int) -> int:
        """The chunk that runs the call of a block with this number."""
        return max(0, min(bisect_right(self.starts, max(0, call)) - 1, self.num_chunks - 1))

    def chunks_of(self, module_name: str) -> tuple[int, ...]:
        """The chunks that own the module of that name.

        One without parameters belongs to the module around it that has some itself; without such, to every chunk.
        """
        inside = [
            chunk
            for chunk in range(self.num_chunks)
            if any(module_name == name or module_name.startswith(name + ".") for name in self.blocks_of(chunk))
        ]
        if inside:
            return tuple(inside)
        name = module_name
        while name and name not in self.outside:
            name = name.rpartition(".")[0]
        return self.outside.get(name, tuple(range(self.num_chunks)))


def share_out(
    module: nn.Module,
    lists: Sequence[BlockList],
    num_chunks: int,
    split: str | Sequence[int],
    call_order: Sequence[str] | None = None,
    costing: Costing | None = None,
    virtual_stages: int = 1,
) -> ChunkMap:
    """Assign every block, and every module with parameters outside of the blocks, to chunks.

    Args:
        module: The whole model.
        lists: Its block lists, as a chain.
        num_chunks: Pipeline stages times virtual stages.
        split: ``"uniform"``, ``"parameters"``, ``"flops"``, ``"profile"`` or the number of blocks of every chunk.
        call_order: Names of modules in the order of their calls in one step; without it, the order of
            registration decides what runs before the blocks and what after them.
        costing: What the blocks cost; without it, what their parameters tell.
        virtual_stages: Chunks of every rank; chunk c runs on rank ``c % (num_chunks / virtual_stages)``.

    Raises:
        ConfigError: if there are fewer blocks than chunks, or the explicit split does not fit.
        StageError: if there are no blocks.
    """
    blocks = in_call_order([name for blocks in lists for name in blocks.blocks], call_order)
    if num_chunks == 1:
        return ChunkMap(blocks, (0, len(blocks)), {})
    if virtual_stages > 1 and len(set(blocks)) < len(blocks):
        raise StageError(
            f"{blocks[0]!r} is called {len(blocks)} times in a step, so every stage holds it, and no stage can have"
            " several chunks of the model. Use virtual_stages=1."
        )
    if len(blocks) < num_chunks:
        found = ", ".join(f"{item.name} ({len(item.blocks)})" for item in lists) or "none"
        kind = ConfigError if blocks else StageError
        raise kind(
            f"The pipeline asks for {num_chunks} chunks (pipeline stages x virtual stages), but the model has only"
            f" {len(blocks)} blocks to share out (lists of repeated layers found: {found}). "
            + (
                f"Use at most {len(blocks)} chunks, or name the right list with pipeline_blocks."
                if blocks
                else "Use pipeline_parallel=1, or put the layers that repeat into a ModuleList or Sequential."
            )
        )
    outside = _positions(module, lists, blocks, call_order)
    if split == "parameters":
        costs = parameter_costs(module, blocks, outside)
    else:
        costs = costing(blocks, outside) if costing is not None else matrix_costs(module, blocks, outside)
    sizes = _sizes(costs.blocks, num_chunks, virtual_stages, split)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    chunk_of_block = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    owners: dict[str, tuple[int, ...]] = {}
    for name, positions in outside.items():
        everywhere = range(num_chunks)
        owners[name] = tuple(everywhere if positions is None else sorted({chunk_of_block[i] for i in positions}))
    order_known = call_order is not None and not getattr(call_order, "within", "")
    return ChunkMap(blocks, tuple(starts), _with_shared(module, owners), costs, order_known)


def _with_shared(module: nn.Module, owners: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Give modules that share a parameter the chunks of each other, so that one object stands under all its names."""
    modules = dict(module.named_modules(remove_duplicate=False))
    chunks: dict[int, set[int]] = {}
    for name, own in owners.items():
        for parameter in modules[name].parameters(recurse=False):
            chunks.setdefault(id(parameter), set()).update(own)
    return {
        name: tuple(sorted(set(own).union(*(chunks[id(p)] for p in modules[name].parameters(recurse=False)))))
        for name, own in owners.items()
    }


def _positions(
    module: nn.Module, lists: Sequence[BlockList], blocks: Sequence[str], call_order: Sequence[str] | None
) -> dict[str, frozenset[int] | None]:
    """Outside module with own parameters -> the blocks it runs with; ``None``: an ancestor of the blocks.

    What runs before the first block belongs with that, everything else with the block that ran last: a chunk runs the
    user's code up to the first block of the next chunk. A module that is called in several places belongs to each.
    Parameters held directly by an ancestor of the blocks are used where no hook can see it, so every chunk keeps them.
    """
    inside = tuple(name + "." for name in blocks)
    ancestors = {""} | {name[:i] for name in blocks for i in range(len(name)) if name[i] == "."}
    modules = dict(module.named_modules(remove_duplicate=False))
    holders = {
        name
        for name, child in modules.items()
        if any(True for _ in child.parameters(recurse=False)) and name not in blocks and not name.startswith(inside)
    }
    found: dict[str, set[int]] = {}
    # The first that is called: blocks before it are a teacher's, which the step alone calls.
    first = next((blocks.index(name) for name in call_order or () if name in blocks), 0)
    running = -1
    begins = {name.partition(".")[0]: blocks.index(name) for name in reversed(blocks)}
    furthest = running
    for name in call_order or modules:
        if not call_order and "." not in name:  # each part by itself: the named lists may be called in another order
            furthest = max(furthest, running)
            running = begins[name] - 1 if name in begins else furthest
        if name in blocks:
            running = blocks.index(name, running + 1) if name in blocks[running + 1 :] else blocks.index(name)
        elif name in holders and name not in ancestors:
            found.setdefault(name, set()).add(first if running < 0 else running)
    positions: dict[str, frozenset[int] | None] = {name: frozenset(where) for name, where in found.items()}
    last = frozenset({len(blocks) - 1})
    beside = _beside(modules, call_order.within) if isinstance(call_order, CallOrder) else {}
    for name in holders - positions.keys():
        known = {"before": frozenset({0}), "after": last}
        positions[name] = known.get(beside.get(name, "")) if name not in ancestors else None
    aside = teacher_parts(module) - begins.keys() if call_order is None else set()
    positions.update({name: None for name in holders if name.partition(".")[0] in aside})
    for teacher in asked_last(module, blocks, call_order):
        positions.update({name: last for name in holders if f"{name}.".startswith(f"{teacher}.")})
    return positions


def _beside(modules: Mapping[str, nn.Module], within: str) -> dict[str, str]:
    """Modules that train beside the part of the model of which the calls are known, registered before or after it.

    A Hugging Face model reads the inputs itself, so what is registered before it is not called before it.
    """
    if not within:
        return {}
    names = list(modules)
    first = names.index(within)
    takes_inputs = hasattr(modules[within], "main_input_name")
    found: dict[str, str] = {}
    for place, name in enumerate(names):
        trains = any(parameter.requires_grad for parameter in modules[name].parameters(recurse=False))
        if trains and name != within and not name.startswith(f"{within}."):
            found[name] = "after" if place > first else "" if takes_inputs else "before"
    return found


def _sizes(costs: Sequence[float], num_chunks: int, virtual_stages: int, split: str | Sequence[int]) -> list[int]:
    if not isinstance(split, str):
        return partition.explicit(list(split), len(costs), num_chunks)
    if split == "uniform":
        return partition.uniform(len(costs), num_chunks)
    return partition.balance_ranks(costs, num_chunks // virtual_stages, virtual_stages)
