"""Alerts of docs/monitoring fire for the run that is sick, and for no other; promtool plays both to them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

RULES = Path(__file__).parents[2] / "docs" / "monitoring" / "alerts.yml"
PROMTOOL = shutil.which("promtool")
JOB, MINUTES, RANKS = "lightning-3d", 60, 6


def place(run: str, rank: int) -> dict[str, str]:
    """Two stages of three replicas, on a host of its own for each run."""
    at = {"pp": str(rank // 3), "dp": str(rank % 3), "tp": "0"}
    return {"job": JOB, "instance": f"{run}:9410", "run": run, "rank": str(rank), "host": run, **at}


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def rising(per_second: float, minutes: int = MINUTES) -> str:
    return f"0+{60 * per_second:g}x{minutes}"


def run_of(run: str, sick: bool) -> list[dict[str, str]]:
    found = [series("up", f"1x{MINUTES}", job=JOB, instance=f"{run}:9410")]
    posts = f"{rising(1.0, 40)} {40 * 60}x20" if sick else rising(1.0)
    for rank in range(RANKS):
        labels = place(run, rank)
        slow = 1.5 if sick and rank == 4 else 1.0
        silent = sick and rank == 1  # its endpoint tells so
        found += [
            series("lightning3d_rank_up", f"1x20 {int(not silent)}x40", **labels),
            series("lightning3d_last_post_timestamp_seconds", posts, **labels),
            series("lightning3d_phase_seconds_total", rising(0.2 * slow), **labels, phase="forward"),
            series("lightning3d_phase_seconds_total", rising(0.4 * slow), **labels, phase="backward"),
            series("lightning3d_pipeline_seconds_total", rising(0.8), **labels),
            series("lightning3d_pipeline_busy_seconds_total", rising(0.4 if sick else 0.62), **labels),
            series("lightning3d_skipped_steps_total", rising(2 / 60 if sick else 0.5 / 60), **labels),
            series("lightning3d_memory_peak_bytes", f"{0.97 if sick and rank == 2 else 0.9}x{MINUTES}", **labels),
            series("lightning3d_memory_size_bytes", f"1x{MINUTES}", **labels),
        ]
    return [*found, series("lightning3d_bubble_predicted_ratio", f"0.2x{MINUTES}", **place(run, 0))]


def fires(minute: int, name: str, labels: dict[str, str] | None, summary: str = "", severity: str = "") -> Any:
    """That an alert fires at a time, once and with these labels, or not at all."""
    alert = {"exp_labels": {**(labels or {}), "severity": severity}, "exp_annotations": {"summary": summary}}
    expected = [] if labels is None else [alert]
    return {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected}


def only(labels: dict[str, str], *names: str) -> dict[str, str]:
    return {name: labels[name] for name in names}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: apt-get install prometheus) is not installed")
def test_every_alert_fires_for_the_sick_run_alone(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    job_and_run = {"job": JOB, "run": "sick"}
    gone = series("up", f"1x30 0x{MINUTES}", job=JOB, instance="gone:9410")
    tests = [
        fires(20, "RankDown", None),
        fires(30, "RankDown", place("sick", 1), "rank 1 on sick has posted nothing for minutes", "critical"),
        fires(30, "EndpointDown", None),
        fires(
            33,
            "EndpointDown",
            {"job": JOB, "instance": "gone:9410"},
            "nobody answers at gone:9410, though its run has not ended",
            "critical",
        ),
        fires(42, "NoProgress", None),
        fires(
            46,
            "NoProgress",
            {**job_and_run, "instance": "sick:9410"},
            "no batch of sick has ended on sick:9410 for 3 minutes",
            "critical",
        ),
        fires(
            30,
            "Straggler",
            only(place("sick", 4), "job", "run", "rank", "host", "pp"),
            "rank 4 on sick computes 30 % longer than its stage",
            "warning",
        ),
        fires(
            35,
            "BubbleAbovePrediction",
            job_and_run,
            "stages of sick wait 10 % of the time more than the schedule costs",
            "warning",
        ),
        fires(30, "SkippedSteps", job_and_run, "gradients of sick overflow again and again", "warning"),
        fires(30, "MemoryAlmostFull", place("sick", 2), "rank 2 on sick has used 95 % of its memory", "warning"),
    ]
    content = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [*run_of("sick", True), *run_of("well", False), gone],
                "alert_rule_test": tests,
            }
        ],
    }
    asked = tmp_path / "alerts_test.yml"
    asked.write_text(json.dumps(content))  # JSON is YAML
    answer = subprocess.run([PROMTOOL, "test", "rules", str(asked)], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    named = {line.split()[-1] for line in RULES.read_text().splitlines() if "- alert:" in line}
    assert named == {test["alertname"] for test in tests}
