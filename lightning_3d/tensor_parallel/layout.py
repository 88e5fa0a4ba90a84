"""How a block is cut: plain data, found by ``derive`` and carried out by ``convert``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_3d.tensor_parallel.region import Entry

Position = int | str
"""Place of an argument of a module: index among the positional ones, or keyword."""


@dataclass(frozen=True)
class Division:
    """An attribute that code reads at call time and that is smaller on a rank, such as the number of heads."""

    module: str
    attribute: str
    """Name, or ``config.name`` for an attribute of the module's configuration object."""
    value: int


@dataclass(frozen=True)
class ColumnLayout:
    """A linear layer whose output features are cut."""

    name: str
    sections: tuple[int, ...]
    """Lengths of the packed parts of the output features."""
    entry: Entry = "copy"
    shared_heads: int = 0
    """Key/value heads of a layer that has fewer of them than there are ranks; its weight stays whole."""
    shared_sections: tuple[int, ...] = (0,)
    """Which sections hold those heads."""


@dataclass(frozen=True)
class HeadSlice:
    """An argument with a dim of heads, of which a module is shown the rank's own."""

    place: Position
    dim: int
    heads: int
    """Number of heads of the whole; a longer dim is one of ``batch * heads``."""


@dataclass(frozen=True)
class HeadView:
    """A parameter or buffer of which a module is shown the rank's own piece while it runs; it is held whole."""

    module: str
    name: str
    dim: int


@dataclass(frozen=True)
class WeightCut:
    """A parameter of several matrices (experts) that is cut."""

    name: str
    dim: int
    sections: tuple[int, ...]


@dataclass(frozen=True)
class RegionLayout:
    """Column layers and the row layer that reads all of them, or one module whose own parameters are cut.

    A layer that is cut alone is a column whose output is gathered, or a row that splits its input.
    """

    columns: tuple[ColumnLayout, ...]
    row: str
    """The row layer, or the module with the parameters of ``weights``; empty for a column that is cut alone."""
    divisions: tuple[Division, ...] = ()
    entry_module: str | None = None
    """Module whose arguments are changed on entry; ``None`` when the column layers see to it."""
    stand_ins: tuple[Position, ...] = ()
    """Arguments shown with one rank's share of the features, for code that reads sizes from them."""
    gathers: tuple[Position, ...] = ()
    """Arguments gathered along the sequence."""
    gathered: bool = False
    """Whether column outputs are gathered and the row layer splits its input, so that all between runs whole."""
    inner: tuple[str, ...] = ()
    """Whole parameters read between column and row layers, whose gradients are partial."""
    around: str = ""
    """The innermost module that holds all these layers; ``slices``, ``copies``, ``views`` and ``exits`` are its."""
    slices: tuple[HeadSlice, ...] = ()
    copies: tuple[Position, ...] = ()
    """Arguments read between column and row layers, so that their gradients are partial."""
    views: tuple[HeadView, ...] = ()
    exits: tuple[tuple[int, int], ...] = ()
    """``(leaf, dim)`` of what the module returns with the rank's own heads and others want whole."""
    weights: tuple[WeightCut, ...] = ()
    """Parameters of the module ``row`` that are cut, instead of layers in it."""
    added: tuple[str, ...] = ()
    """Biases of it that every rank would add, so that each adds its share."""
    more_rows: tuple[str, ...] = ()
    """Further row layers that read what the row layer reads, such as the first layer of an adapter around it."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Every row layer."""
        return (self.row, *self.more_rows) if self.row else ()


@dataclass(frozen=True)
class BlockLayout:
    """All that is cut in a block. Names are relative to the block."""

    regions: tuple[RegionLayout, ...] = ()
    attentions: tuple[str, ...] = ()
    """``nn.MultiheadAttention`` modules whose heads are cut."""
    columns: tuple[str, ...] = ()
    """Column layers that stand alone, with gathered output."""
    rows: tuple[str, ...] = ()
    """Row layers that stand alone, which split their input."""

    @property
    def names(self) -> frozenset[str]:
        """Every cut layer."""
        regions = (name for region in self.regions for name in (*(c.name for c in region.columns), *region.rows))
        return frozenset((*regions, *self.attentions, *self.columns, *self.rows))


@dataclass(frozen=True)
class Sequence:
    """Where the sequence stands in the hidden states of a block."""

    dim: int = 1
    hidden: Position = 0
    """Argument of a block that holds its hidden states."""


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer."""

    name: str
    kind: str
    """``"colwise"``, ``"rowwise"``, ``"vocab"``, ``"attention"``, ``"replicated"`` and variants for the table."""
    source: str
    """``"user"``, ``"model plan"``, ``"derived"`` or ``"replicated"``."""
    note: str = ""


@dataclass(frozen=True)
class Rule:
    """What the user's or the model's plan says of one layer."""

    style: str
    parts: int = 1
    source: str = "user"
    pattern: str = ""


Rules = Mapping[str, Rule]


@dataclass
class Alternatives:
    """Ways to cut a region, best first; the first that keeps the numbers is taken."""

    layouts: list[RegionLayout] = field(default_factory=list)
    untried: list[RegionLayout] = field(default_factory=list)
    """Further ways, of which it is not known yet whether they fit the shapes of the block's code."""
