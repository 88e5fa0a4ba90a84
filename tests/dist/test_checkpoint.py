"""A checkpoint saved at one layout loads at any other, every value where it belongs."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint import consolidate, full_state_dict, load, read, save
from lightning_3d.config import Sizes
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import build_mesh
from tests.checkpoint_model import BLOCKS, Model, build, cut_of
from tests.harness import _context, run_ranks

ONE = Sizes(pp=1, dp=1, tp=1)
MESH = build_mesh(ONE, torch.device("cpu"))
LAYOUTS = [
    Sizes(pp=2, dp=2, tp=2),
    Sizes(pp=1, dp=1, tp=4),
    Sizes(pp=1, dp=3, tp=1),
    Sizes(pp=4, dp=1, tp=2),
    Sizes(pp=1, dp=2, tp=3),
    ONE,
]


def name_of(sizes: Sizes) -> str:
    return f"pp{sizes.pp}dp{sizes.dp}tp{sizes.tp}"


def everything(built) -> dict[str, torch.Tensor]:
    """All full tensors of a one-process model: weights, buffers and optimizer state by name."""
    tensors = dict(built.model.state_dict())
    names = {id(parameter): name for name, parameter in reversed(list(built.model.named_parameters()))}
    for parameter, state in built.state.optimizers[0].state.items():
        for key, value in state.items():
            tensors[f"{names[id(parameter)]}/{key}"] = value
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def slice_by_torch(full, name, mesh, sharded):
    """This rank's part of a full tensor, by torch's own chunking."""
    cut = cut_of(name, tuple(full.shape), mesh.tp.size)
    if cut is not None and mesh.tp.size > 1:
        pieces = []
        for part in full.split(cut.sections, cut.dim):
            chunks = part.chunk(mesh.tp.size, cut.dim)
            pieces.append(chunks[mesh.tp.rank] if mesh.tp.rank < len(chunks) else part.narrow(cut.dim, 0, 0))
        full = torch.cat(pieces, cut.dim)
    if sharded:
        chunks = full.chunk(mesh.dp.size, 0)
        full = chunks[mesh.dp.rank] if mesh.dp.rank < len(chunks) else full[:0]
    return full


def differences(built, expected) -> list[str]:
    """Names whose local values are not this rank's part of ``expected``."""
    mesh, wrong = built.mesh, []
    sharded = mesh.dp.size > 1 and built.state.layout["zero_stage"] == 3

    def local(tensor):
        return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()

    optimizer = built.state.optimizers[0]
    for name, tensor in built.state.held:
        part = slice_by_torch(expected[name], name, mesh, sharded and name not in built.state.buffers)
        if not torch.equal(local(tensor), part):
            wrong.append(name)
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        state = optimizer.state[tensor]
        if not state:
            wrong.append(f"{name}: no optimizer state")
        for key, value in state.items():
            full = expected[f"{name}/{key}"]
            part = full if full.dim() == 0 else slice_by_torch(full, name, mesh, sharded)
            if value.dtype != full.dtype or not torch.equal(local(value), part):
                wrong.append(f"{name}/{key}")
    return wrong


def save_reference(folder: Path, **kwargs):
    built = build(ONE, steps=2, **kwargs)
    checkpoint = {
        "epoch": 3,
        "global_step": 7,
        "state_dict": built.model.state_dict(),
        "optimizer_states": [built.state.optimizers[0].state_dict()],
        "loops": {"fit_loop": {"batches": 5}},
    }
    save(folder, checkpoint, built.state, built.mesh)
    return built


def pass_on(rank, world, sizes, source, target, expected, shard):
    """Load ``source`` at a layout, compare, save as ``target``."""
    built = build(sizes, seed=1, steps=0, shard=shard)
    rest = load(source, built.state, built.mesh)
    wrong = differences(built, expected)
    checkpoint = {"optimizer_states": [built.state.optimizers[0].state_dict()], **rest}
    save(target, checkpoint, built.state, built.mesh, rank_state={"rank": rank})
    groups = [(group["weight_decay"], group["betas"]) for group in built.state.optimizers[0].param_groups]
    return wrong, rest, groups


@pytest.mark.parametrize("shard", [True, False], ids=["sharded", "replicated"])
def test_every_value_survives_a_tour_of_layouts(tmp_path, shard):
    reference = save_reference(tmp_path / "start")
    expected = everything(reference)
    source = tmp_path / "start"
    for sizes in LAYOUTS:
        target = tmp_path / name_of(sizes)
        for wrong, rest, groups in run_ranks(pass_on, sizes.world, sizes, source, target, expected, shard):
            assert wrong == [], name_of(sizes)
            assert (rest["epoch"], rest["global_step"], rest["loops"]) == (3, 7, {"fit_loop": {"batches": 5}})
            assert groups == [(0.1, (0.9, 0.999)), (0.0, (0.9, 0.999))]
        source = target
    manifest = json.loads((source / "layout.json").read_text())
    assert manifest["keys"] == list(reference.model.state_dict())
    assert manifest["ties"] == {"head.weight": "embed.weight"}


def saved_at(rank, world, sizes, folder):
    built = build(sizes, steps=2)
    save(folder, {"optimizer_states": []}, built.state, built.mesh)
    return sum(file.stat().st_size for file in Path(folder).glob(f"__{rank}_*.distcp"))


def test_every_byte_is_written_once_and_the_ranks_share_the_work(tmp_path):
    built = save_reference(tmp_path / "one")
    sizes = run_ranks(saved_at, 8, Sizes(pp=2, dp=2, tp=2), tmp_path / "eight")
    index = json.loads((tmp_path / "eight" / "tensors.json").read_text())["tensors"]
    assert set(index) == set(json.loads((tmp_path / "one" / "tensors.json").read_text())["tensors"])
    assert "model.head.weight" not in index and "model.embed.weight" in index
    assert all(name.removeprefix("model.") in built.full for name in index if name.startswith("model."))
    for entry in index.values():
        values = torch.zeros(entry["shape"], dtype=torch.int)
        for offsets, extents, *_ in entry["chunks"]:
            values[tuple(slice(start, start + size) for start, size in zip(offsets, extents, strict=True))] += 1
        assert bool((values == 1).all())
    assert max(sizes) < 2 * sum(sizes) / len(sizes)


def gathered(rank, world, sizes):
    built = build(sizes)
    full = full_state_dict(built.state, built.mesh)
    return {name: tensor.clone() for name, tensor in full.items()}


def test_live_parameters_are_gathered_on_rank_zero_only(tmp_path):
    reference = build(ONE).model.state_dict()
    first, *others = run_ranks(gathered, 8, Sizes(pp=2, dp=2, tp=2))
    assert list(first) == list(reference)
    for name, tensor in reference.items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-7)
    assert all(other == {} for other in others)


def stage_by_stage(rank, world, folder):
    """Each stage gives only its own names, drops one and adds one; the last stage holds the truth about a buffer."""
    built = build(Sizes(pp=2, dp=2, tp=1))
    seen = torch.tensor(float(built.mesh.pp.rank * 10 + built.mesh.dp.rank))
    state = dataclasses.replace(
        built.state,
        buffers={**built.state.buffers, "seen": seen},
        keys=[*built.state.keys, "seen"],
        borrowed=frozenset() if built.mesh.pp.is_last else frozenset({"seen"}),
    )
    whole = list(state.local_state_dict())
    values = {**state.owned, f"added{built.mesh.pp.rank}": torch.ones(2)}
    for name in ("blocks.0.norm.weight", "blocks.3.norm.weight"):
        values.pop(name, None)
    save(folder, {"state_dict": values}, state, built.mesh)
    load(folder, state, built.mesh, strict=False)
    return whole, float(seen)


def test_stages_that_know_only_their_own_names_make_one_whole(tmp_path):
    keys = [*Model().state_dict(), "seen"]
    for whole, seen in run_ranks(stage_by_stage, 4, tmp_path / "c"):
        assert set(whole) <= set(keys) and set(whole) >= {key for key in keys if not key.endswith("seen")}
        assert seen == 10.0
    kept = [key for key in keys if key not in ("blocks.0.norm.weight", "blocks.3.norm.weight")]
    assert list(consolidate(tmp_path / "c")) == [*kept, "added0", "added1"]


def collide(rank, world, folder):
    built = build(Sizes(pp=2, dp=1, tp=1))
    buffers = {**built.state.buffers, "blocks.0.norm.extra": torch.full((2,), float(rank))}
    keys = [*built.state.keys, "blocks.0.norm.extra"]
    state = type(built.state)(
        parameters=built.state.parameters, buffers=buffers, keys=keys, ties=built.state.ties, cuts=built.state.cuts
    )
    try:
        save(folder, {}, state, built.mesh)
    except CheckpointError as error:
        return str(error)
    return None


def test_one_name_for_different_values_of_two_stages_is_refused(tmp_path):
    for message in run_ranks(collide, 2, tmp_path / "c"):
        assert message is not None and "blocks.0.norm.extra" in message and "pp1" in message
    assert not (tmp_path / "c").exists()


def one_fails(rank, world, folder, kind):
    built = build(Sizes(pp=1, dp=2, tp=1))
    save(folder, {"global_step": 1}, built.state, built.mesh)
    if rank == 1 and kind == "entries":
        object.__setattr__(built.state, "cuts", {"blocks.0.norm.weight": cut_of("embed.weight", (9,), 1)})
    rank_state = (lambda: None) if kind == "pickle" and rank == 1 else None
    if rank == 1 and kind == "write":
        import lightning_3d.checkpoint.writer as writer

        def full_disk(*_):
            raise OSError(28, "No space left on device")

        writer._ChunkPlanner.resolve_data = full_disk
    before = {name: tensor.clone() for name, tensor in everything(built).items() if not isinstance(tensor, DTensor)}
    try:
        save(folder, {"global_step": 2}, built.state, built.mesh, rank_state=rank_state)
    except CheckpointError as error:
        after = everything(built)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        return str(error), read(folder, built.mesh)["global_step"]
    return None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("entries", "blocks.0.norm.weight"), ("pickle", "pickle"), ("write", "No space left on device")],
)
def test_a_failure_on_one_rank_is_raised_on_all_and_keeps_the_old_checkpoint(tmp_path, kind, reason):
    for result in run_ranks(one_fails, 2, tmp_path / "c", kind):
        assert result is not None
        message, step = result
        assert reason in message and "rank 1" in message
        assert step == 1
    assert (tmp_path / "c").is_dir()


def load_ties(rank, world, sizes, folder, tied, expected):
    built = build(sizes, seed=1, steps=0, tied=tied)
    load(folder, built.state, built.mesh)
    return differences(built, expected)


def test_tied_weights_load_untied(tmp_path):
    expected = everything(save_reference(tmp_path / "tied"))
    expected.update(
        {f"head.weight/{key}": expected[f"embed.weight/{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
    )
    built = build(ONE, seed=1, steps=0, tied=False)
    with pytest.raises(CheckpointError, match=r"head\.weight"):
        load(tmp_path / "tied", built.state, built.mesh)
    assert torch.equal(built.model.head.weight, expected["embed.weight"])
    for wrong in run_ranks(load_ties, 2, Sizes(pp=2, dp=1, tp=1), tmp_path / "tied", True, expected):
        assert wrong == []


def from_stock(rank, world, sizes, file, expected):
    built = build(sizes, seed=1, steps=0)
    rest = load(file, built.state, built.mesh)
    return differences(built, expected), rest["epoch"]


@pytest.mark.parametrize("sizes", [ONE, Sizes(pp=2, dp=2, tp=2)], ids=name_of)
def test_a_stock_checkpoint_loads_at_any_layout(tmp_path, sizes):
    built = build(ONE, steps=2)
    stock = {
        "epoch": 2,
        "state_dict": {f"_orig_mod.{name}": tensor for name, tensor in built.model.state_dict().items()},
        "optimizer_states": [built.state.optimizers[0].state_dict()],
    }
    torch.save(stock, tmp_path / "stock.ckpt")
    for wrong, epoch in run_ranks(from_stock, sizes.world, sizes, tmp_path / "stock.ckpt", everything(built)):
        assert (wrong, epoch) == ([], 2)


def ranks_own(rank, world, sizes, folder, write):
    built = build(sizes, steps=0)
    if write:
        save(folder, {}, built.state, built.mesh, rank_state={"seed": torch.tensor(rank)})
    kept = read(folder, built.mesh)["lightning_3d.rank_state"]
    return int(kept["state"]["seed"]), kept["same_layout"]


def test_state_of_a_rank_returns_to_it_at_the_same_layout_only(tmp_path):
    sizes = Sizes(pp=1, dp=2, tp=1)
    assert run_ranks(ranks_own, 2, sizes, tmp_path / "c", True) == [(0, True), (1, True)]
    assert run_ranks(ranks_own, 2, Sizes(pp=2, dp=1, tp=1), tmp_path / "c", False) == [(0, False), (0, False)]


def test_blocks_are_numbered_as_in_the_whole_model(tmp_path):
    run_ranks(saved_at, 4, Sizes(pp=4, dp=1, tp=1), tmp_path / "c")
    keys = json.loads((tmp_path / "c" / "layout.json").read_text())["keys"]
    assert {key.split(".")[1] for key in keys if key.startswith("blocks")} == {str(index) for index in range(BLOCKS)}


def keep_saving(folder, started):
    torch.set_num_threads(1)
    built = build(ONE)
    for step in range(1000):
        save(folder / "last", {"global_step": step}, built.state, built.mesh)
        save(folder / f"step{step}", {"global_step": step}, built.state, built.mesh)
        started.set()


def test_a_kill_at_any_moment_leaves_what_was_finished_and_nothing_that_loads_wrongly(tmp_path):
    context = _context()
    delays, keys = random.Random(0), list(Model().state_dict())
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        started = context.Event()
        process = context.Process(target=keep_saving, args=(folder, started), daemon=True)
        process.start()
        assert started.wait(30)
        time.sleep(delays.random() * 0.3)
        process.kill()
        process.join()
        steps = sorted(int(path.name[4:]) for path in folder.glob("step*"))
        assert steps == list(range(len(steps)))
        for path in folder.glob("step*"):
            assert read(path, MESH)["global_step"] == int(path.name[4:])
            assert list(consolidate(path)) == keys
        assert read(folder / "last", MESH)["global_step"] - steps[-1] in (0, 1)
