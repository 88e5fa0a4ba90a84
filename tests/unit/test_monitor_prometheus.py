"""Notices of ranks, what a scrape makes of them, counters of GPUs, and the dashboard that reads them."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.demos.boring_classes import BoringModel
from prometheus_client.parser import text_string_to_metric_families

from lightning_3d import ConfigError, ThreeDPrometheus
from lightning_3d.events import Event, Phase, StepEvents
from lightning_3d.monitor import endpoint as endpoint_module
from lightning_3d.monitor.device_scalars import DeviceScalars
from lightning_3d.monitor.endpoint import Endpoint
from lightning_3d.monitor.gpu_counters import REASONS, GpuCounters
from lightning_3d.monitor.metrics import METRICS, PREFIX
from lightning_3d.monitor.noticeboard import Notice, Noticeboard
from lightning_3d.monitor.rank_counters import RankCounters

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
UUID = "GPU-00000000-0000-0000-0000-00000000000"
LOCAL = "127.0.0.1"


def notice(rank: int, at: float, **values: Any) -> dict[str, Any]:
    place = {
        "run": "mine",
        "rank": rank,
        "host": "here",
        "pp": rank // 2,
        "dp": 0,
        "tp": rank % 2,
        "gpu_uuid": f"{UUID}{rank}",
    }
    return {"labels": place, "time": at, "values": values}


def get(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{LOCAL}:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """Values by name, rank and the label of its own."""
    return {
        (one.name.removeprefix(PREFIX), one.labels["rank"], one.labels.get("phase", one.labels.get("reason", ""))): (
            one.value
        )
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


# --- notices -------------------------------------------------------------------------------------------------------


def test_what_is_posted_last_is_read_by_whoever_maps_the_same_file() -> None:
    board = Noticeboard([4, 5])
    try:
        writer = Notice(Noticeboard.path(board.folder, 5))
        board.unlink()
        assert not board.folder.exists()
        assert board.notices[5].read() is None
        writer.post({"a": "long" * 100})
        writer.post({"a": 1})
        assert board.notices[5].read() == {"a": 1}
        assert board.notices[4].read() is None
        assert not writer.post({"a": "x" * (1 << 17)})  # more than there is room for
        assert board.notices[5].read() == {"a": 1}
        writer.close()
        assert board.notices[5].read() == {"a": 1}  # its rank is gone
    finally:
        board.close()


def test_a_notice_caught_half_written_is_not_believed() -> None:
    board = Noticeboard([0])
    try:
        one = board.notices[0]
        one.post({"a": 1})
        assert one.read() == {"a": 1}
        one.post({"a": 2})
        one._memory[8] ^= 1
        assert one.read() == {"a": 1}
    finally:
        board.close()


def test_counters_of_a_rank_add_up_what_its_steps_took() -> None:
    counters = RankCounters()
    for begin in (10.0, 20.0):
        events = (
            Event(Phase.LOADER, -1, -1, begin, begin + 1, "read", 0),
            Event(Phase.PIPELINE, -1, -1, begin + 1, begin + 7, "", 0),
            Event(Phase.FORWARD, 0, 0, begin + 1, begin + 4, "", 0),
            Event(Phase.TP, 0, 0, begin + 2, begin + 3, "all_reduce", 64),
            Event(Phase.EVALUATION, -1, -1, begin + 8, begin + 9, "", 0),
        )
        counters.add(
            StepEvents(step=0, begin=begin, end=begin + 10, wall=0.0, events=events, samples=4, tokens=28), None
        )
    assert (counters.batches, counters.samples, counters.tokens) == (2, 8, 56)
    assert counters.batch_s == pytest.approx(18) and counters.evaluation_s == pytest.approx(2)
    assert sum(counters.phase_s.values()) == pytest.approx(18)
    assert counters.phase_s["forward"] == pytest.approx(4) and counters.phase_s["tp"] == pytest.approx(2)
    assert (counters.pipeline_s, counters.busy_s) == pytest.approx((12, 6))
    assert counters.reading_s == pytest.approx(2) and counters.message_bytes == {"tp": 128}


def test_scalars_are_told_once_as_they_were_when_asked_for() -> None:
    scalars, value = DeviceScalars(), torch.tensor(2.0)
    scalars.ask(("loss_scale",), 3, value)
    value.mul_(2)
    scalars.ask(("loss_scale",), 4, value)
    assert list(scalars.arrived()) == [(("loss_scale",), 3, 2.0), (("loss_scale",), 4, 4.0)]
    assert not list(scalars.arrived())


# --- endpoint ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(*notices: dict[str, Any], gpus: GpuCounters | None = None, stale_after_s: float = 60) -> Iterator[Endpoint]:
    board = Noticeboard(range(len(notices)))
    for rank, one in enumerate(notices):
        board.notices[rank].post(one)
    endpoint = Endpoint(board.notices, 0, LOCAL, False, stale_after_s, gpus)
    try:
        yield endpoint
    finally:
        endpoint.close()
        board.close()
    with pytest.raises(OSError), socket.create_connection((LOCAL, endpoint.port), timeout=1):
        pass


def test_of_a_rank_that_is_silent_only_that_is_told() -> None:
    now = time.time()
    with serving(notice(0, now, batches_total=3), notice(1, now - 100, batches_total=3)) as endpoint:
        found = samples(get(endpoint.port))
    assert {key: value for key, value in found.items() if key[0] != "last_post_timestamp_seconds"} == {
        ("rank_up", "0", ""): 1,
        ("rank_up", "1", ""): 0,
        ("batches_total", "0", ""): 3,
    }


def test_a_port_that_is_taken_is_an_error_or_the_next_is_used() -> None:
    with serving(notice(0, time.time())) as first:
        with pytest.raises(ConfigError, match="if_taken='next'"):
            Endpoint({}, first.port, LOCAL, False, 60)
        with pytest.warns(UserWarning, match=f"Port {first.port} is taken"):
            second = Endpoint({}, first.port, LOCAL, True, 60)
        assert second.port > first.port
        second.close()
    with pytest.raises(ConfigError, match="cannot listen"):
        Endpoint({}, 0, "192.0.2.1", True, 60)


def test_names_and_kinds_follow_the_conventions_of_prometheus() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z_]+", name) and metric.text.endswith(".")
        for unit in ("_s", "_ms", "_percent", "_mb", "_gb", "_mhz"):
            assert not name.removesuffix("_total").endswith(unit)


# --- GPUs ----------------------------------------------------------------------------------------------------------


class FakeNvml:
    """Two GPUs, of which the second does not tell its energy."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    class NVMLError(Exception):
        pass

    def __init__(self, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.is_shut_down = False
        self.reads = 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.is_shut_down = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in (f"{UUID}0", f"{UUID}1"):
            raise self.NVMLError("Not Found")
        return int(uuid[-1])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.reads += 1
        return type("Rates", (), {"gpu": 75})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return type("Memory", (), {"used": 3 << 30, "total": 80 << 30})

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 650_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError("Not Supported")
        return 7_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return REASONS["sw_power_cap"] | 0x1


def test_counters_of_gpus_stand_beside_those_of_their_ranks() -> None:
    library = FakeNvml()
    now = time.time()
    with serving(*(notice(rank, now) for rank in range(3)), gpus=GpuCounters(library)) as endpoint:
        get(endpoint.port)
        found = samples(get(endpoint.port))
    assert library.is_shut_down and library.reads == 2  # once per GPU: two scrapes within a second read once
    assert found["gpu_utilization_ratio", "0", ""] == 0.75
    assert found["gpu_memory_used_bytes", "1", ""] == 3 << 30
    assert found["gpu_power_watts", "0", ""] == 650.5
    assert found["gpu_energy_joules_total", "0", ""] == 7 and ("gpu_energy_joules_total", "1", "") not in found
    assert found["gpu_sm_clock_hertz", "1", ""] == 1.98e9
    assert {reason: found["gpu_throttled", "0", reason] for reason in REASONS} == {
        reason: float(reason == "sw_power_cap") for reason in REASONS
    }
    assert not [key for key in found if key[1] == "2" and key[0].startswith("gpu")]  # it is on no GPU that is known
    assert {name.split("_")[0] for name, _, _ in found} <= {"gpu", "rank", "last"}


def test_counters_of_gpus_without_a_driver_are_refused() -> None:
    with pytest.raises(ConfigError, match="Driver Not Loaded"):
        GpuCounters(FakeNvml(has_driver=False))


def test_a_driver_that_hangs_does_not_hold_up_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hangs(FakeNvml):
        def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
            asked.set()
            answers.wait(60)

    asked, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(endpoint_module, "_PATIENCE_S", 0.2)
    with serving(notice(0, time.time()), gpus=GpuCounters(Hangs())) as endpoint:
        scrape = socket.create_connection((LOCAL, endpoint.port), timeout=10)
        scrape.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert asked.wait(10)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    answers.set()
    assert scrape.recv(100)
    scrape.close()


def test_reasons_and_calls_are_those_of_the_library() -> None:
    nvml = pytest.importorskip("pynvml")
    for name, bit in REASONS.items():
        names = {"sw_thermal": "SwThermalSlowdown", "hw_thermal": "HwThermalSlowdown"}
        names["hw_power_brake"] = "HwPowerBrakeSlowdown"
        constant = names.get(name, "".join(part.capitalize() for part in name.split("_")))
        assert getattr(nvml, f"nvmlClocksThrottleReason{constant}") == bit
    for name in (*vars(FakeNvml), "NVMLError"):
        assert name.startswith("_") or hasattr(nvml, name)


# --- callback ------------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense_are_refused() -> None:
    for arguments in ({"port": 70_000}, {"if_taken": "wait"}, {"stale_after_s": 0.5}):
        with pytest.raises(ConfigError):
            ThreeDPrometheus(**arguments)  # type: ignore[arg-type]


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(
        accelerator="cpu", callbacks=[ThreeDPrometheus()], logger=False, max_steps=1, enable_checkpointing=False
    )
    with pytest.raises(ConfigError, match="strategy='3d'"):
        trainer.fit(BoringModel())


def test_it_can_be_written_in_yaml() -> None:
    parser = LightningArgumentParser()
    parser.add_argument("--callback", type=ThreeDPrometheus)
    value = {"class_path": "lightning_3d.ThreeDPrometheus", "init_args": {"port": 9500, "if_taken": "error"}}
    made = parser.instantiate_classes(parser.parse_object({"callback": value})).callback
    assert isinstance(made, ThreeDPrometheus) and made.port == 9500


# --- dashboard -----------------------------------------------------------------------------------------------------

EXPRESSIONS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def concrete(expression: str) -> str:
    return (
        (expression.replace("$job", "lightning-3d").replace("$__rate_interval", "10s").replace("$__range", "10s"))
        .replace("[15m]", "[10s]")
        .replace("$run", "mine")
    )


def test_dashboard_and_alerts_ask_for_what_is_exported() -> None:
    # Two runs of one job must not add up; only dcgm-exporter knows of none.
    assert not [text for _, text in EXPRESSIONS if len(re.findall(PREFIX, text)) != text.count('run="$run"')]
    texts = [expression for _, expression in EXPRESSIONS] + [(FOLDER / "alerts.yml").read_text()]
    asked = {name for text in texts for name in re.findall(rf"\b{PREFIX}(\w+)", text)}
    assert asked <= METRICS.keys()
    forgotten = METRICS.keys() - asked
    assert not {name for name in forgotten if not re.search("timestamp|info|micro|energy|gpu_memory|last_|eval", name)}
    document = (FOLDER / "prometheus.md").read_text()
    assert not [name for name in METRICS if PREFIX + name not in document]


def test_panels_lie_beside_each_other() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: apt-get install prometheus) is not installed")
def test_promtool_accepts_rules_and_configuration() -> None:
    assert PROMTOOL is not None
    subprocess.run([PROMTOOL, "check", "rules", "alerts.yml"], cwd=FOLDER, check=True, capture_output=True)
    subprocess.run([PROMTOOL, "check", "config", "prometheus.yml"], cwd=FOLDER, check=True, capture_output=True)


@contextmanager
def _answering(text: Callable[[], str]) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((LOCAL, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _dcgm() -> str:
    """As dcgm-exporter answers."""
    names = ("POWER_USAGE", "GPU_UTIL", "GPU_TEMP", "SM_CLOCK", "CLOCKS_EVENT_REASONS")
    return "".join(
        f'DCGM_FI_{name}{{gpu="{rank}",UUID="{UUID}{rank}",device="nvidia{rank}",modelName="NVIDIA H100",'
        f'Hostname="here"}} {50 + rank}\n'
        for name in (*(f"DEV_{name}" for name in names), "PROF_PIPE_TENSOR_ACTIVE")
        for rank in range(4)
    )


def _busy(rank: int, started: float) -> dict[str, Any]:
    """What a rank has done since then; rank 3 is slow."""
    passed = time.time() - started
    slow = 0.1 if rank == 3 else 0.0
    phases = {"forward": 0.2 + slow, "backward": 0.4, "tp": 0.1, "pp_wait": 0.1, "dp": 0.05, "sync": 0.1 - slow}
    phases |= {"loader": 0.02, "optimizer": 0.02, "other": 0.01}
    single = {name: 1.0 for name, metric in METRICS.items() if not metric.labels and not name.startswith("gpu")}
    sums = {name: passed for name in single if name.endswith("_total")}
    values: dict[str, Any] = {**single, **sums, "memory_bytes": 1e9 + 1e6 * passed}
    values["phase_seconds_total"] = [([name], share * passed) for name, share in phases.items()]
    values["message_bytes_total"] = [(["tp"], 1e6 * passed)]
    values["pipeline_busy_seconds_total"] = 0.8 * passed
    values["learning_rate"] = [([0, 0], 1e-3)]
    return notice(rank, time.time(), **{name: value for name, value in values.items() if name != "rank_up"})


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus (Debian: apt-get install prometheus) is not installed")
def test_a_real_prometheus_answers_every_panel(tmp_path: Path) -> None:
    assert PROMETHEUS is not None
    started = time.time()
    board = Noticeboard(range(4))

    def post() -> None:
        for rank, one in board.notices.items():
            one.post(_busy(rank, started))

    post()
    endpoint = Endpoint(board.notices, 0, LOCAL, False, 60, GpuCounters(FakeNvml()))
    with socket.socket() as free, _answering(_dcgm) as dcgm:
        free.bind((LOCAL, 0))
        port = free.getsockname()[1]
        free.close()
        (tmp_path / "targets.json").write_text(json.dumps([{"targets": [f"{LOCAL}:{endpoint.port}"]}]))
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\nscrape_configs:\n"
            "  - {job_name: lightning-3d, file_sd_configs: [{files: [targets.json]}]}\n"
            f"  - {{job_name: dcgm, static_configs: [{{targets: ['{LOCAL}:{dcgm}']}}]}}\n"
        )
        arguments = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen(
                [PROMETHEUS, *arguments, f"--web.listen-address={LOCAL}:{port}"], stdout=log, stderr=log
            )
        try:
            results: dict[str, list[dict[str, Any]]] = {}
            end = time.monotonic() + 40
            while time.monotonic() < end and not (results and all(results.values())):
                time.sleep(1)
                post()
                try:
                    for title, expression in EXPRESSIONS:
                        query = urllib.parse.quote(concrete(expression))
                        answer = json.loads(get(port, f"/api/v1/query?query={query}"))
                        results[f"{title}: {expression}"] = answer["data"]["result"]
                except urllib.error.HTTPError as error:
                    if error.code != 503:
                        raise AssertionError(f"{expression}\n{error.read().decode()}") from error
                except OSError:
                    continue  # it starts
        finally:
            server.kill()
            server.wait()
            endpoint.close()
            board.close()
    assert not [key for key, result in results.items() if not result], (tmp_path / "log").read_text()[-2000:]
    first = {
        title: next(result for key, result in results.items() if key.startswith(f"{title}: "))
        for title in ("Power", "Compute above the median of its stage", "Bubble", "Shares of a batch's time")
    }
    assert {one["metric"]["rank"] for one in first["Power"]} == {"0", "1", "2", "3"}
    slowest = first["Compute above the median of its stage"][0]
    assert slowest["metric"]["rank"] == "3"
    assert float(slowest["value"][1]) == pytest.approx(0.05, rel=0.3)  # of two ranks, the median lies between them
    assert float(first["Bubble"][0]["value"][1]) == pytest.approx(0.2, abs=0.05)
    assert float(first["Shares of a batch's time"][0]["value"][1]) == pytest.approx(0.625, rel=0.1)
