"""The repeated layers are found, shared out, and everything else goes with the block it runs with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, StageError
from lightning_3d.pipeline.blocks import find_block_lists, share_out
from lightning_3d.pipeline.observe import call_order
from lightning_3d.pipeline.ties import find_shared


class Gpt(nn.Module):
    """Registers its head and last norm first, so that only the order of calls tells where they run."""

    def __init__(self, layers: int = 6, vocab: int = 50, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocab, bias=False)
        self.norm = nn.LayerNorm(width)
        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(16, width))
        blocks = (nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position[: ids.size(1)]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.bridge = nn.Linear(4, 4, bias=False)
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.encoder:
            x = layer(x)
        x = self.bridge(x)
        for layer in self.decoder:
            x = layer(x)
        return self.head(x)


class Distils(nn.Module):
    """A teacher, larger than the student, that ``forward`` does not ask."""

    def __init__(self, frozen: bool = True, known: bool = True) -> None:
        super().__init__()
        self.teacher = Gpt(8, width=16).requires_grad_(not frozen)
        self.student = Gpt(4)
        self.encoder = nn.Linear(3, 3).requires_grad_(False)
        self.known = known

    def forward(self, ids: Tensor) -> Tensor:
        assert self.known
        return self.student(ids)


def test_the_list_with_the_most_parameters_is_found() -> None:
    (found,) = find_block_lists(Gpt())
    assert found.name == "layers"
    assert found.blocks == tuple(f"layers.{i}" for i in range(6))


def test_lists_of_the_same_class_form_one_chain_and_can_be_named() -> None:
    assert [item.name for item in find_block_lists(Seq2Seq())] == ["encoder", "decoder"]
    assert [item.name for item in find_block_lists(Seq2Seq(), "decoder")] == ["decoder"]
    with pytest.raises(StageError, match=r"'decode', which is not .* encoder, decoder"):
        find_block_lists(Seq2Seq(), "decode")


def test_call_order_decides_who_owns_what_runs_outside_the_blocks() -> None:
    model = Gpt()
    order = call_order(model)
    assert order is not None
    assert order[0] == "embed"
    assert order[-1] == "head"
    chunks = share_out(model, find_block_lists(model), 3, "uniform", order)
    assert chunks.blocks_of(1) == ("layers.2", "layers.3")
    assert chunks.outside["embed"] == chunks.outside["head"] == (0, 2), "modules that share a weight stay together"
    assert chunks.outside["norm"] == (2,)
    assert chunks.outside[""] == (0, 1, 2), "an ancestor's own parameter is kept by every chunk"


def test_registration_order_decides_when_no_run_is_possible() -> None:
    model = Seq2Seq()
    chunks = share_out(model, find_block_lists(model), 2, [3, 2])
    assert chunks.outside == {"embed": (0,), "bridge": (0,), "head": (1,)}


@pytest.mark.parametrize(("split", "owner"), [([2, 3], 1), ([3, 2], 0), ([4, 1], 0)])
def test_what_stands_between_two_lists_runs_with_the_block_before(split: list[int], owner: int) -> None:
    model = Seq2Seq()
    chunks = share_out(model, find_block_lists(model), 2, split, call_order(model))
    assert chunks.outside["bridge"] == (owner,)


class Twice(Gpt):
    """One module under two names, called before the blocks and after them, and one called after every block."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.ModuleDict({"mix": nn.Linear(8, 8)})
        self.mix = self.entry["mix"]
        self.between = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.entry["mix"](self.embed(ids))
        for layer in self.layers:
            x = self.between(x + layer(x))
        return self.head(self.mix(x))


def test_a_module_that_is_called_in_several_places_belongs_to_all_of_them() -> None:
    model = Twice()
    before = dict(model.named_parameters(remove_duplicate=False))
    chunks = share_out(model, find_block_lists(model), 3, [2, 2, 2], call_order(model))
    assert chunks.outside["mix"] == chunks.outside["entry.mix"] == (0, 2)
    assert chunks.outside["between"] == (0, 1, 2)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items()), "the trial run leaves no trace"


def test_shared_parameters_are_found_by_identity_with_their_stages() -> None:
    model = Gpt()
    chunks = share_out(model, find_block_lists(model), 4, [2, 2, 1, 1], call_order(model))
    shared = {item.names: item.stages for item in find_shared(model, chunks, 2)}
    assert shared[("head.weight", "embed.weight")] == (0, 1)
    assert shared[("position",)] == (0, 1)


def test_flops_split_gives_the_stage_with_a_large_head_fewer_blocks() -> None:
    model = Gpt(layers=8, vocab=64)
    order = call_order(model)
    sizes = share_out(model, find_block_lists(model), 2, "flops", order).starts
    assert sizes == (0, 6, 8), "the head costs as much as four blocks of two 8 x 8 matrices"


def test_more_chunks_than_blocks_and_wrong_lists_are_refused_with_the_numbers() -> None:
    model = Gpt(layers=3)
    lists = find_block_lists(model)
    with pytest.raises(ConfigError, match=r"4 chunks .* only 3 blocks"):
        share_out(model, lists, 4, "flops")
    with pytest.raises(ConfigError, match="7"):
        share_out(model, lists, 2, [3, 4])
    with pytest.raises(StageError, match="none"):
        share_out(nn.Linear(2, 2), find_block_lists(nn.Linear(2, 2)), 2, "flops")


def test_a_teacher_is_not_the_model_and_stands_where_the_loss_is() -> None:
    for known in (True, False):
        assert [item.name for item in find_block_lists(Distils(known=known))] == ["student.layers"]
    assert len(find_block_lists(Distils(frozen=False))) == 2
    assert len(find_block_lists(Distils().requires_grad_(False))) == 2, "which of them trains cannot be told"
    model = Distils()
    chunks = share_out(model, find_block_lists(model), 2, "uniform", call_order(model))
    assert chunks.chunks_of("teacher.embed") == chunks.chunks_of("teacher.layers.0.1") == (1,)
    assert chunks.chunks_of("encoder") == (0, 1), "what feeds the blocks may be asked anywhere"


class NeverSaysHow(nn.Module):
    """Parts that only a step calls, none of them by a ``forward``."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_without_a_forward_a_larger_frozen_model_of_the_same_layers_is_a_teacher() -> None:
    for names in (("student", "teacher"), ("teacher", "student")):
        parts = {"student": Gpt(4), "teacher": Gpt(8, width=16).requires_grad_(False)}
        model = NeverSaysHow(**{name: parts[name] for name in names})
        order = call_order(model)
        assert order is not None and order.within == "student", "the larger part is not the one that trains"
        lists = find_block_lists(model, num_chunks=2, order=order)
        assert [item.name for item in lists] == ["student.layers"]
        for known in (order, None):
            chunks = share_out(model, lists, 2, "uniform", known)
            assert not chunks.order_known
            assert chunks.chunks_of("student.embed") == ((0, 1) if known else (0,)), "tied to the head"
            assert chunks.chunks_of("student.norm") == ((1,) if known else (0,))
            assert chunks.chunks_of("teacher.embed") == chunks.chunks_of("teacher.layers.7.1") == (1,)
        both = find_block_lists(model, ["teacher.layers", "student.layers"])
        chunks = share_out(model, both, 2, [8, 4], None)
        assert chunks.chunks_of("teacher.layers.7") == (0,) and chunks.chunks_of("student.layers.0") == (1,)


def test_frozen_layers_in_front_of_others_of_one_model_are_no_teacher() -> None:
    lists = {"encoder": Seq2Seq().encoder.requires_grad_(False), "decoder": Seq2Seq().decoder}
    assert len(find_block_lists(NeverSaysHow(**lists))) == 2
    inner = NeverSaysHow(model=NeverSaysHow(**lists))
    assert [item.name for item in find_block_lists(inner)] == ["model.encoder", "model.decoder"]


def test_a_frozen_encoder_that_forward_calls_stays_in_the_chain() -> None:
    model = Seq2Seq()
    model.encoder.requires_grad_(False)
    assert [item.name for item in find_block_lists(model)] == ["encoder", "decoder"]


class Deep(nn.Module):
    """A layer made of parts, so that it counts as one."""

    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.cross = nn.Linear(4, 4) if cross else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.two(self.one(x)) + (self.cross(memory) if self.cross is not None else 0)


class Cross(Deep):
    def __init__(self) -> None:
        super().__init__(cross=True)


class Translator(nn.Module):
    """Registers the decoder first; its layers are of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Cross() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.encoder = nn.ModuleList(Deep() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.encoder:
            x = layer(x)
        for layer, norm in zip(self.decoder, self.norms, strict=True):
            y = norm(layer(y, x))
        return y


class Loops(nn.Module):
    """Runs through its layers twice."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Deep() for _ in range(layers))
        self.between = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
            x = self.between(x)
        return x


def test_lists_of_other_classes_that_are_called_before_or_after_join_the_chain_in_that_order() -> None:
    model = Translator()
    lists = find_block_lists(model, num_chunks=2)
    assert [item.name for item in lists] == ["decoder", "encoder"], "norms are called between the layers"
    chunks = share_out(model, lists, 2, "uniform", call_order(model))
    assert chunks.blocks == (*(f"encoder.{i}" for i in range(3)), *(f"decoder.{i}" for i in range(3)))
    assert chunks.outside["norms.0"] == (1,)


def test_layers_of_various_kinds_and_lists_within_lists_are_taken_where_there_are_not_enough_blocks() -> None:
    mixed = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    (found,) = find_block_lists(mixed, num_chunks=2)
    assert found.blocks == ("0.0", "0.1", "0.2")
    stages = nn.Sequential(nn.ModuleList(nn.Sequential(Deep(), Deep()) for _ in range(2)))
    assert [item.name for item in find_block_lists(stages, num_chunks=2)] == ["0"]
    assert [item.name for item in find_block_lists(stages, num_chunks=3)] == ["0.0", "0.1"]


def test_layers_that_are_called_again_are_as_many_blocks_as_calls_and_belong_to_every_stage_that_calls_them() -> None:
    model = Loops()
    chunks = share_out(model, find_block_lists(model, num_chunks=2), 2, "uniform", call_order(model))
    assert chunks.blocks == ("layers.0", "layers.1") * 2
    assert chunks.chunks_of("layers.0.one") == chunks.outside["between"] == (0, 1)
    assert [chunks.chunk_of(call) for call in range(4)] == [0, 0, 1, 1]
    shared = {item.names[0]: item.stages for item in find_shared(model, chunks, 2)}
    assert shared["layers.0.one.weight"] == (0, 1)
    shared_layer = Loops(layers=1)
    assert find_block_lists(shared_layer, num_chunks=2)[0].blocks == ("layers.0", "layers.0")
    with pytest.raises(StageError, match="virtual_stages=1"):
        share_out(model, find_block_lists(model, num_chunks=4), 4, "uniform", call_order(model), None, 2)


class Wrapped(nn.Module):
    """Its own forward is unknown; that of the part with the blocks runs on made-up inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.body = Loops(layers=3)
        self.head = nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_what_stands_beside_the_part_whose_calls_are_known_goes_by_registration() -> None:
    model = Wrapped()
    order = call_order(model)
    assert order is not None and order.within == "body"
    chunks = share_out(model, find_block_lists(model, num_chunks=2), 2, "uniform", order)
    assert (chunks.outside["stem"], chunks.outside["head"]) == ((0,), (1,))
    assert chunks.outside["frozen"] == (0, 1), "nobody knows where it is asked"
