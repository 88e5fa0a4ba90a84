"""Prometheus sees every rank of a run that trains, and the run does not notice."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from prometheus_client.parser import text_string_to_metric_families

from lightning_3d import ThreeDPrometheus
from lightning_3d.monitor import prometheus
from lightning_3d.monitor.metrics import LABELS, METRICS, PREFIX
from tests.dist.lightning_modules import Mesh, Tokens, loader, make_trainer, on_ranks, rows, seeded

MESH = (2, 1, 2)
STEPS, BATCH, PIECES, LENGTH = 6, 8, 4, 7
PROMETHEUS = shutil.which("prometheus")
Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics["train_loss_step"].item())


class Scraper(Callback):
    """Scrapes in the midst of training on rank 0, after a slow batch too."""

    def __init__(self, exporter: ThreeDPrometheus, folder: str) -> None:
        self.exporter, self.folder = exporter, folder
        self.texts: list[str] = []
        self.asked: dict[str, Any] = {}
        self.leftovers: list[str] = []
        self.targets: list[str] = []

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            address = ("127.0.0.1", int(self.exporter.targets[0].rpartition(":")[2]))
            self.hangs = socket.create_connection(address, timeout=10)  # asks, and never hangs up
            self.hangs.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert self.exporter._board is not None
            self.leftovers = [str(self.exporter._board.folder)] if self.exporter._board.folder.exists() else []
            self.targets = json.loads((Path(self.folder) / "run" / prometheus.TARGETS).read_text())[0]["targets"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, o: Any, b: Any, batch_idx: int) -> None:
        if batch_idx not in (1, STEPS - 1):
            return
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            port = self.exporter.targets[0].rpartition(":")[2]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                self.texts.append(answer.read().decode())
            if batch_idx > 1 and PROMETHEUS is not None:
                self.asked = _ask_prometheus(PROMETHEUS, f"127.0.0.1:{port}", Path(self.folder))
        trainer.strategy.barrier()


def _ask_prometheus(binary: str, target: str, folder: Path) -> dict[str, Any]:
    """What a real Prometheus answers that has scraped us."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: lightning-3d, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        query = urllib.parse.quote(f"count by (rank) ({PREFIX}rank_up == 1)")
        end = time.monotonic() + 20
        while time.monotonic() < end:
            time.sleep(0.3)
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={query}") as answer:
                    data = json.load(answer)["data"]["result"]
            except OSError:
                continue
            if data:
                return {one["metric"]["rank"]: one["value"][1] for one in data}
        return {"log": (folder / "prometheus.log").read_text()}
    finally:
        server.kill()
        server.wait()


def _fit(mesh: Mesh, exports: bool, folder: str, port: int) -> dict[str, Any]:
    prometheus._POST_S = 0.0  # every batch
    losses = Losses()
    callbacks: list[Any] = [losses]
    scraper: Any = None
    if exports:
        exporter = ThreeDPrometheus(port=port, peak_tflops=1e-3, gradient_norm_every_n_steps=2)
        scraper = Scraper(exporter, folder)
        callbacks += [exporter, scraper]
    trainer = make_trainer(
        mesh,
        {"num_micro_batches": PIECES},
        callbacks=callbacks,
        max_steps=STEPS,
        logger=CSVLogger(folder, name="", version="run") if exports else False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(seeded(Tokens), loader(rows(BATCH * STEPS), BATCH, mesh))
    return {
        "losses": losses.losses,
        "scraper": (scraper.texts, scraper.asked, scraper.leftovers, scraper.targets) if exports else None,
        "warnings": [str(one.message) for one in caught if "ThreeDPrometheus" in str(one.message)],
        "threads": [one.name for one in threading.enumerate() if "serve_forever" in one.name],
    }


def _with_and_without(mesh: Mesh, folder: str, port: int) -> dict[str, Any]:
    return {**_fit(mesh, True, folder, port), "quiet": _fit(mesh, False, folder, 0)["losses"]}


def _parsed(text: str) -> tuple[Scrape, dict[str, str]]:
    """Values by name and labels, and the kinds of the families."""
    values: Scrape = {}
    kinds: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        kinds[family.name] = family.type
        for sample in family.samples:
            values[sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())] = sample.value
    return values, kinds


def _of(values: Scrape, rank: int, **labels: str) -> Callable[[str], float]:
    """Looks up the value of a name for a rank."""
    (run,) = {dict(labels)["run"] for _, labels in values}
    place = {"run": run, "rank": str(rank), "host": socket.gethostname(), "gpu_uuid": ""}
    place |= {"pp": str(rank // 2), "dp": "0", "tp": str(rank % 2), **labels}
    return lambda name: values[name, frozenset(place.items())]


def test_c65_every_rank_is_seen_while_it_trains_and_losses_stay(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = on_ranks(_with_and_without, MESH, str(tmp_path), port)
    for rank in told:
        assert rank["losses"] == rank["quiet"] and len(rank["quiet"]) == STEPS

    texts, asked, leftovers, targets = told[0]["scraper"]
    assert not leftovers and not (tmp_path / "run" / prometheus.TARGETS).exists()
    assert not any(rank["threads"] for rank in told)
    assert f"Port {port} is taken" in told[0]["warnings"][0] and not told[1]["warnings"]
    assert len(targets) == 1 and port < int(targets[0].rpartition(":")[2]) <= port + 100
    assert asked == ({str(rank): "1" for rank in range(4)} if PROMETHEUS is not None else {})

    (before, kinds), (after, _) = map(_parsed, texts)
    assert {name.removeprefix(PREFIX) for name in kinds} <= {name.removesuffix("_total") for name in METRICS}
    assert all((kind == "counter") == (name.removeprefix(PREFIX) + "_total" in METRICS) for name, kind in kinds.items())
    for _, labels in after:
        assert set(LABELS) <= dict(labels).keys()
        assert dict(labels)["run"] == f"{tmp_path.name}/run"
    for rank in range(4):
        first, last = _of(before, rank), _of(after, rank)
        # A batch is known when the next begins, so a scrape within one does not count it.
        assert (first("batches_total"), last("batches_total")) == (1, STEPS - 1)
        assert last("micro_batches_total") == PIECES * (STEPS - 1)
        assert last("global_step") == STEPS
        assert last("rank_up") == 1 and abs(last("last_post_timestamp_seconds") - time.time()) < 100
        assert 0 < last("last_batch_seconds") < last("batch_seconds_total") < 60
        phases = {
            dict(labels)["phase"]: value
            for (name, labels), value in after.items()
            if name == "phase_seconds_total" and ("rank", str(rank)) in labels
        }
        assert sum(phases.values()) == pytest.approx(last("batch_seconds_total"))
        assert {"forward", "backward", "tp", "pp_wait", "optimizer", "other"} <= phases.keys()
        assert 0 < last("pipeline_busy_seconds_total") < last("pipeline_seconds_total") < last("batch_seconds_total")
        assert 1e6 < last("memory_bytes") <= 1.1 * last("memory_peak_bytes") < 1e12
        assert _of(after, rank, phase="tp")("message_bytes_total") > 0
        assert last("skipped_steps_total") == 0
        if rank == 0:
            assert last("samples_total") == BATCH * (STEPS - 1)
            assert last("tokens_total") == BATCH * LENGTH * (STEPS - 1)
            assert last("gradient_norm") > 0 and last("model_flops_per_sample") > 0
            assert last("bubble_predicted_ratio") == pytest.approx(1 / (PIECES + 1))
            assert _of(after, 0, optimizer="0", group="0")("learning_rate") == 0.05
        else:
            assert not [name for name, labels in after if name == "samples_total" and ("rank", str(rank)) in labels]


def _taken(mesh: Mesh, port: int) -> str:
    trainer = make_trainer(mesh, callbacks=[ThreeDPrometheus(port=port, if_taken="error")], max_steps=1)
    try:
        trainer.fit(seeded(Tokens), loader(rows(8), 8, mesh))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_port_that_is_taken_ends_all_ranks_where_that_is_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = on_ranks(_taken, (1, 2, 1), port)
    assert all(f"port={port}" in text and "if_taken='next'" in text for text in told)
