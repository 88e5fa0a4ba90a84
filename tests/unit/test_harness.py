from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.harness import RankFailure, free_port, run_ranks, run_trainer


def sum_of_ranks(rank: int, world_size: int, offset: float) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset], dtype=torch.float64)
    dist.all_reduce(total)
    return rank, total


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(sum_of_ranks, 4, 0.5)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(torch.equal(total, torch.tensor([8.0], dtype=torch.float64)) for _, total in results)


def test_eight_ranks_start_quickly() -> None:
    run_ranks(sum_of_ranks, 2, 0.0)  # the server may have to start
    start = time.monotonic()
    run_ranks(sum_of_ranks, 8, 0.0)
    assert time.monotonic() - start < 10  # half a second on two idle cores; importing torch in each would take 30


def set_apart(rank: int, world_size: int) -> int:
    return gc.get_freeze_count()


def test_garbage_collections_of_ranks_leave_out_what_is_imported() -> None:
    assert run_ranks(set_apart, 1, init=False)[0] > 100_000


def test_ports_are_new_and_none_that_the_kernel_gives_away() -> None:
    ports = {free_port() for _ in range(50)}
    assert len(ports) == 50
    assert min(ports) >= 12_000 and max(ports) < 32_000


def environment(rank: int, world_size: int, name: str) -> tuple[str | None, str | None, int, bool]:
    return os.environ.get(name), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads(), dist.is_initialized()


def test_environment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(environment, 2, "COLOUR", env={"COLOUR": "red"}, init=False) == [("red", "1", 1, False)] * 2
    monkeypatch.setenv("COLOUR", "blue")
    assert run_ranks(environment, 1, "COLOUR") == [("blue", "1", 1, True)]


def fail_on(rank: int, world_size: int, bad: int) -> None:
    print(f"hello from {rank}")
    if rank == bad:
        raise ValueError("out of cheese")
    dist.barrier()


def test_an_exception_is_reported_with_rank_traceback_and_output() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(fail_on, 3, 1)
    message = str(failure.value)
    assert failure.value.rank == 1
    assert message.startswith("rank 1 of 3 in tests.unit.test_harness.fail_on: ValueError: out of cheese")
    assert 'raise ValueError("out of cheese")' in message
    assert "hello from 1" in message


def leave(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 of 2 .* died, exit code 7") as failure:
        run_ranks(leave, 2)
    assert failure.value.rank == 1


def crash(rank: int, world_size: int) -> None:
    import ctypes

    ctypes.string_at(0)


def test_a_crash_shows_where_it_happened() -> None:
    with pytest.raises(RankFailure, match=r"exit code -11(.|\n)*in crash"):
        run_ranks(crash, 1)


def wait_in_vain(rank: int, world_size: int, pids: str) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{pids}/{rank}", "w") as file:
        file.write(f"{os.getpid()} {sleeper.pid}")
    if rank == 0:
        stuck_here()
    dist.barrier()


def stuck_here() -> None:
    time.sleep(600)


def test_a_hang_is_cut_short_with_all_stacks_and_nothing_left_running(tmp_path: Any) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match="ran longer than 6 s on rank 0, 1 of 2") as failure:
        run_ranks(wait_in_vain, 2, str(tmp_path), timeout=6)
    assert time.monotonic() - start < 30
    message = str(failure.value)
    assert "in stuck_here" in message
    assert "in barrier" in message
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(pids) == 4
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def unpicklable(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_a_result_that_does_not_pickle_is_an_error_of_that_rank() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 of 1 .*pickle"):
        run_ranks(unpicklable, 1)


class Seen(BoringModel):
    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 32)), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


def train_with_ddp(rank: int, world_size: int, folder: str) -> tuple[int, int, int, bool, torch.Tensor]:
    torch.manual_seed(3)
    model = Seen()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=world_size // 2,
        strategy="ddp",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model)
    launches = trainer.strategy.launcher is not None and bool(trainer.strategy.launcher.procs)
    return trainer.global_rank, trainer.local_rank, trainer.node_rank, launches, model.layer.weight.detach().clone()


@pytest.mark.parametrize(("world_size", "num_nodes"), [(2, 1), (4, 2)])
def test_a_stock_trainer_joins_the_ranks(world_size: int, num_nodes: int, tmp_path: Any) -> None:
    results = run_trainer(world_size, train_with_ddp, str(tmp_path), num_nodes=num_nodes)
    assert [result[:3] for result in results] == [(rank, rank % 2, rank // 2) for rank in range(world_size)]
    assert not any(result[3] for result in results)
    assert all(torch.equal(result[4], results[0][4]) for result in results)
    torch.manual_seed(3)
    assert not torch.equal(results[0][4], Seen().layer.weight)
