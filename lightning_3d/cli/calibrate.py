"""The command ``lightning-3d calibrate``: what these devices and links reach, for the planner."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

from lightning_3d.cli.paths import check_writable, write_file
from lightning_3d.errors import ConfigError
from lightning_3d.planner.calibration import Measurement, as_cluster, measure

DESCRIPTION = """
Measure matrix products, attention, memory and, under torchrun, collectives on these devices, and write them to a
YAML file that `plan --cluster FILE` and Cluster.from_file read. A node: torchrun --nproc-per-node 8 -m lightning_3d
calibrate --write cluster.yaml. With several nodes the network is measured instead of NVLink.
"""


def calibrate(args: list[str]) -> int:
    """Run ``calibrate`` with the arguments after its name and return the exit code."""
    parser = argparse.ArgumentParser("lightning-3d calibrate", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--write", type=Path, help="YAML file to write (default: print it)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what to measure")
    parser.add_argument("--size", type=int, help="side of the matrices (default: 8192 on a GPU, 1024 on a CPU)")
    parser.add_argument("--json", action="store_true", help="print the measurement as one JSON object")
    given = parser.parse_args(args)
    if given.size is not None and given.size < 256:
        raise ConfigError(f"--size={given.size} is too small to measure anything. Use 256 or more.")
    if os.environ.get("RANK", "0") == "0":
        check_writable("--write", given.write)  # not after minutes of measuring
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: there is no CUDA device here. Use --device=cpu.")
    on_gpu = given.device == "cuda" or (given.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    starts = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if starts:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        found = measure(device, given.size)
        if not dist.is_initialized() or dist.get_rank() == 0:
            _report(found, given.write, given.json)
    finally:
        if starts:
            dist.destroy_process_group()
    return 0


def _report(found: Measurement, path: Path | None, as_json: bool) -> None:
    cluster = as_cluster(found)
    text = yaml.safe_dump(cluster, sort_keys=False)
    if path is not None:
        write_file("--write", path, text)
    if as_json:
        print(json.dumps({"measurement": dataclasses.asdict(found), "cluster": cluster}))
        return
    print(f"{found.device}, {found.memory_gb:.0f} GB")
    print(f"  matrix products   {found.matmul_tflops:9.3f} TFLOP/s (side {found.matmul_size})")
    print(f"  causal attention  {found.attention_tflops:9.3f} TFLOP/s")
    print(f"  memory            {found.memory_GBps:9.1f} GB/s")
    if found.gather_GBps is not None and found.latency_us is not None:
        print(f"  all-gather        {found.gather_GBps:9.2f} GB/s over {found.ranks} ranks")
        print(f"  latency of a hop  {found.latency_us:9.1f} us")
    print(f"written to {path}" if path is not None else f"\n{text}", end="\n" if path is not None else "")
