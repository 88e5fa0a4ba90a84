"""What the report makes of a record, and traces laid on one line of time."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.cli.command import main
from lightning_3d.errors import ConfigError
from lightning_3d.monitor import record
from lightning_3d.monitor.causes import causes_of
from lightning_3d.monitor.clocks import offsets
from lightning_3d.monitor.record import Growth, Leak, Place, RankWindow, Run, Spread, Straggler, Window, Writer
from lightning_3d.monitor.run_figures import figures_of
from lightning_3d.monitor.trace_merge import merge
from lightning_3d.schedules import bubble_fraction

GB = 10**9


def run_of(pp: int, dp: int, tp: int, **options: Any) -> Run:
    places = tuple(
        Place(rank=rank, host="node", pp=rank // (dp * tp), dp=rank // tp % dp, tp=rank % tp, memory_bytes=80 * GB)
        for rank in range(pp * dp * tp)
    )
    return Run(started=0.0, places=places, **options)


def window(run: Run, seconds: dict[int, dict[str, float]], micro_batches: int = 8, **more: Any) -> Window:
    ranks = []
    for place in run.places:
        mine = {name: Spread(value, value, 0.0) for name, value in seconds[place.rank].items()}
        total = sum(seconds[place.rank].values())
        compute = sum(value for name, value in seconds[place.rank].items() if name in ("forward", "backward"))
        values = {"pipeline_s": total, "busy_s": compute, "memory_peak": 60 * GB, "samples": 32.0, **more}
        ranks.append(
            RankWindow(rank=place.rank, steps=20, step_s=total, seconds=mine, micro_batches=micro_batches, **values)
        )
    return Window(first_step=3, last_step=23, wall=1.0, ranks=tuple(ranks))


def test_a_bubble_is_told_with_more_micro_batches_and_what_they_bring() -> None:
    run = run_of(4, 1, 1, shares=(0.25,) * 4)
    bubble = bubble_fraction("1f1b", 4, 1, 8)
    assert bubble == pytest.approx(3 / 11)
    work = {"forward": (1 - bubble) / 3, "backward": 2 * (1 - bubble) / 3, "pp_wait": bubble}
    causes = causes_of(figures_of([run, window(run, dict.fromkeys(range(4), work))]))
    assert [cause.kind for cause in causes] == ["bubble"]
    assert causes[0].lost == pytest.approx(bubble)
    assert "num_micro_batches 8 → 32: bubble 27% → 9%" in causes[0].change
    assert f"bubble 27% → {bubble_fraction('interleaved_1f1b', 4, 2, 8):.0%}" in causes[0].change
    assert "27% of the pipeline's time" in causes[0].figure


def test_uneven_stages_are_no_bubble_of_the_schedule() -> None:
    run = run_of(2, 1, 1, shares=(0.5, 0.5))
    seconds = {0: {"forward": 0.1, "backward": 0.2, "pp_wait": 0.4}, 1: {"forward": 0.2, "backward": 0.4}}
    causes = {cause.kind: cause for cause in causes_of(figures_of([run, window(run, seconds, micro_batches=32)]))}
    assert causes["uneven stages"].lost > causes["bubble"].lost
    assert "stage 1 computes 600.0 ms per batch" in causes["uneven stages"].figure


def test_messages_count_without_the_waiting_for_late_ranks() -> None:
    run = run_of(1, 2, 2)
    # Rank 3 is slow: its tensor-parallel peer waits for it, and so does its replica.
    seconds = {rank: {"forward": 0.5, "tp": 0.3, "dp": 0.2} for rank in range(4)}
    seconds[3] = {"forward": 0.7, "tp": 0.1, "dp": 0.2}
    slow = Straggler(
        place=run.places[3], phase="forward", seconds=0.7, usual=0.5, score=9.0, step_s=1.0, first_step=3, last_step=23
    )
    causes = {cause.kind: cause for cause in causes_of(figures_of([run, window(run, seconds), slow]))}
    assert causes["straggler"].lost == pytest.approx(0.2) and causes["straggler"].rank == 3
    assert "800.0 ms instead of" in causes["straggler"].change
    assert causes["tensor parallel"].lost == pytest.approx(
        0.2
    )  # 0.3 between ranks that are well, 0.1 with the slow one
    assert causes["data parallel"].lost == pytest.approx(0.2)
    assert "accumulate_grad_batches 1 → 2" in causes["data parallel"].change


def test_a_slow_loader_is_told_with_its_rank_though_all_wait_for_it() -> None:
    run = run_of(1, 3, 1)
    slow = Straggler(
        place=run.places[2], phase="loader", seconds=0.3, usual=0.01, score=9.0, step_s=1.0, first_step=3, last_step=23
    )
    seconds = {rank: {"forward": 0.7, "loader": 0.3} for rank in range(3)}
    (cause,) = causes_of(figures_of([run, window(run, seconds), slow]))
    assert (cause.kind, cause.rank) == ("loader", 2) and "the data loader of rank 2 (pp0 dp2 tp0)" in cause.figure


def test_leaks_come_first_and_memory_is_a_hint() -> None:
    run = run_of(1, 1, 1)
    grown = (Growth("Tensor float32 [9] on cuda:0", 20, 20 * 36, "list of 60 in Net.losses"),)
    leak = Leak(
        place=run.places[0], kind="device", bytes_per_step=1e7, bytes=70 * GB, first_step=3, last_step=23, grown=grown
    )
    seconds = {0: {"forward": 0.3, "backward": 0.6, "loader": 0.1}}
    causes = causes_of(figures_of([run, window(run, seconds, memory_peak=76 * GB), leak]))
    assert [cause.kind for cause in causes] == ["leak", "loader", "memory"]
    assert "the device is full after 1,000 more" in causes[0].figure and "Net.losses" in causes[0].figure
    assert "uses 95% of its memory" in causes[2].figure and "activation_checkpointing" in causes[2].change
    healthy = causes_of(figures_of([run, window(run, {0: {"forward": 0.3, "backward": 0.6}}, memory_peak=30 * GB)]))
    assert "micro_batch_size=8" in healthy[0].change  # 32 samples in 8 pieces are 4 each


def test_a_record_survives_a_kill_and_a_second_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(1, 2, 1)
    writer = Writer(tmp_path)
    first = window(run, {rank: {"forward": 0.9, "loader": 0.1} for rank in range(2)})
    for entry in (run, first, dataclasses.replace(run, started=5.0), first):
        writer.write(entry)
    with writer.path.open("a") as file:
        file.write('{"entry":"window","first_st')
    entries = list(record.read(tmp_path))
    assert entries == [run, first, dataclasses.replace(run, started=5.0), first]
    assert len(figures_of(entries).windows) == 1  # of the last run alone

    assert main(["report", str(tmp_path), "--html", str(tmp_path / "pages" / "report.html")]) == 0
    assert "loader (10% of a batch)" in capsys.readouterr().out
    assert (tmp_path / "pages" / "report.html").read_text().count("<svg") == 2
    assert main(["report", str(tmp_path / "pages")]) == 2
    assert "has no monitor/record.jsonl" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no window"):
        figures_of([run])


def test_a_run_that_goes_on_after_a_kill_is_read_apart_from_the_one_before(tmp_path: Path) -> None:
    run = run_of(1, 1, 1)
    Writer(tmp_path).write(run)
    with (tmp_path / record.FILE).open("a") as file:
        file.write('{"entry":"window","first_st')
    resumed = dataclasses.replace(run, started=5.0)
    Writer(tmp_path).write(resumed)
    with (tmp_path / record.FILE).open("a") as file:
        file.write('{"entry":"run","star')  # and is killed at once
    assert list(record.read(tmp_path)) == [run, resumed] and record.last_run(tmp_path) == resumed


def test_the_record_of_a_long_run_stays_short_and_has_its_means(tmp_path: Path) -> None:
    run, writer, count = run_of(1, 1, 1), Writer(tmp_path), 1010
    writer.write(run)
    for index in range(count):
        one = window(run, {0: {"forward": 1.0 + index, "loader": 0.5}}, memory_peak=index)
        writer.write(dataclasses.replace(one, first_step=20 * index, last_step=20 * index + 20))
    named = Straggler(
        place=run.places[0], phase="forward", seconds=2.0, usual=1.0, score=9.0, step_s=2.0, last_step=20 * count
    )
    writer.write(named)
    assert figures_of(record.read(tmp_path)).slow == ()  # its window waits for others
    writer.flush()
    _, *lines = record.read(tmp_path)
    assert len(lines) < 300
    figures = figures_of(record.read(tmp_path))
    assert figures.num_windows == count and figures.windows[-1].last_step == 20 * count
    assert figures.seconds[0]["forward"] == pytest.approx(1.0 + (count - 1) / 2)
    assert figures.memory_peak == (count - 1,) and figures.slow[0].windows == 1
    for before, after in itertools.pairwise(figures.windows):
        assert before.last_step == after.first_step


def test_clocks_of_hosts_are_laid_on_that_of_rank_0() -> None:
    # Host b is 3 s ahead; ranks of one host read one clock, whatever a single barrier shows.
    stamps = [[10.0, 20.0, 30.0], [10.1, 20.0, 30.0], [13.0, 23.0, 33.0], [13.2, 23.0, 33.1]]
    assert offsets(["a", "a", "b", "b"], stamps) == pytest.approx([0.0, 0.0, -3.05, -3.05])


def _torch_trace(rank: int, base_s: float, start_us: float) -> dict[str, Any]:
    return {
        "baseTimeNanoseconds": int(base_s * 1e9),
        "distributedInfo": {"rank": rank},
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "ts": 0, "args": {"name": "thread 5"}},
            {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
            {"ph": "X", "name": "forward s0 c0 m1", "pid": 77, "tid": 5, "ts": start_us, "dur": 10.0},
            {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": start_us + 5, "dur": 20.0},
            {"ph": "s", "id": 3, "name": "ac2g", "cat": "ac2g", "pid": 77, "tid": 5, "ts": start_us},
            {"ph": "f", "id": 3, "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7, "ts": start_us + 5},
        ],
    }


def _readers(event: dict[str, Any]) -> list[tuple[int, int]]:
    """Start and end in nanoseconds, as versions of Perfetto make them of an event."""
    return [
        (convert(event["ts"] * 1000.0), convert(event["ts"] * 1000.0) + convert(event["dur"] * 1000.0))
        for convert in (int, round)
    ]


def test_what_lies_within_an_event_of_a_trace_ends_within_it_when_merged(tmp_path: Path) -> None:
    dice = random.Random(5)
    # As torch writes them: nanoseconds with three digits, counted from months ago.
    began, spans = 5_311_245_678_901_235, []
    for _ in range(300):
        began += dice.randrange(1, 9999)
        end = began + dice.randrange(2, 9999)
        inner = dice.randrange(began, end)
        spans += [(began, end), (inner, end)]
        began = end
    events = [
        {"ph": "X", "name": "op", "pid": 7, "tid": 7, "ts": start / 1e3, "dur": (end - start) / 1e3}
        for start, end in spans
    ]
    trace = {"baseTimeNanoseconds": 1735689600 * 10**9, "distributedInfo": {"rank": 0}, "traceEvents": events}
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    merge(tmp_path, tmp_path / "merged.json")
    found = [event for event in json.loads((tmp_path / "merged.json").read_text())["traceEvents"] if event["ph"] == "X"]
    first = spans[0][0]
    for event, (start, end) in zip(found, spans, strict=True):
        assert _readers(event) == [(start - first, end - first)] * 2


def test_traces_of_all_ranks_are_one_file_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(1, 2, 1)
    far = dataclasses.replace(run.places[1], host="far", clock_offset_s=-2.0)
    Writer(tmp_path).write(dataclasses.replace(run, places=(run.places[0], far)))
    (tmp_path / "fit-0.pt.trace.json").write_text(json.dumps(_torch_trace(0, 100.0, 1000.0)))
    # 2 s ahead by its clock, so really 500 us after rank 0
    with gzip.open(tmp_path / "fit-1.pt.trace.json.gz", "wt") as file:
        json.dump(_torch_trace(1, 102.0, 1500.0), file)
    steps = {
        "lightning_3d": {"base_us": 100.0e6, "ranks_are_processes": True},
        "traceEvents": [{"ph": "X", "name": "backward 0", "pid": 1, "tid": 0, "ts": 2000.0, "dur": 1.0}],
    }
    (tmp_path / "monitor" / "step_000004.trace.json").write_text(json.dumps(steps))
    (tmp_path / "hparams.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")

    target = tmp_path / "merged.json"
    assert main(["trace", "merge", str(tmp_path), "-o", str(target)]) == 0
    said, warned = capsys.readouterr()
    assert "9 events of ranks 0, 1" in said and "broken.json" in warned and "hparams" not in warned
    events = json.loads(target.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 (pp0 dp0 tp0) on node", 1: "rank 1 (pp0 dp1 tp0) on far"}
    times = {(event["pid"], event["name"]): event["ts"] for event in events if event["ph"] == "X"}
    assert times == pytest.approx(
        {
            (0, "forward s0 c0 m1"): 0.0,
            (0, "gemm"): 5.0,
            (1, "forward s0 c0 m1"): 500.0,
            (1, "gemm"): 505.0,
            (1, "backward 0"): 1000.0,
        },
        abs=1e-3,
    )
    threads = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    assert threads >= {(0, "stream 7 GPU 0"), (1, "thread 5"), (1, "steps of ThreeDMonitor")}
    arrows = [event["id"] for event in events if event["ph"] in "sf"]
    assert len(arrows) == 4 and len(set(arrows)) == 2  # each meets its own
    assert all(isinstance(arrow, int) for arrow in arrows)  # Perfetto drops those that are no number

    assert merge(tmp_path, tmp_path / "again.json.gz").events == 9  # what was merged is no trace of a rank
    (tmp_path / "empty").mkdir()
    assert main(["trace", "merge", str(tmp_path / "empty"), "-o", str(target)]) == 2
    assert "has no trace of a rank" in capsys.readouterr().err
