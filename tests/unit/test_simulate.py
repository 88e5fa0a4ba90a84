"""``lightning-3d simulate``: tables, pictures and traces of schedules on paper."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_3d.cli.simulate import main
from lightning_3d.errors import ConfigError
from lightning_3d.pictures import Drawing, Panel, chrome_trace, draw_timelines, png, svg
from lightning_3d.pictures.axes import number, ticks
from lightning_3d.pictures.colours import OF_KIND, ink_on, shade
from lightning_3d.pictures.drawing import Line, Rect, Text
from lightning_3d.schedules import SCHEDULES, Kind, build, simulate

SVG = "{http://www.w3.org/2000/svg}"


def panel(name: str, stages: int, micro_batches: int, send_time: float = 0.0, unit: str = "ms") -> Panel:
    virtual_stages = SCHEDULES[name].virtual_stages or 2
    schedule = build(name, stages, virtual_stages, micro_batches)
    weight = 1.0 if SCHEDULES[name].splits_backward else 0.0
    timeline = simulate(schedule, 1.0, 2.0 - weight, send_time, weight_time=weight)
    return Panel(schedule, timeline, [1.0 / virtual_stages] * schedule.num_chunks, unit)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 0
    return capsys.readouterr().out


def results(capsys: pytest.CaptureFixture[str], *args: str) -> list[dict[str, Any]]:
    return json.loads(run(capsys, *args, "--json"))["schedules"]


# The command.


def test_bubble_is_a_fraction_of_the_total_time_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--stages", "8", "--micro-batches", "32")
    (found,) = results(capsys, *sizes, "--schedule", "interleaved_1f1b", "--virtual-stages", "2")
    assert found["bubble_fraction_of_total"] == pytest.approx(7 / (2 * 32 + 7))
    assert found["total_time"] == pytest.approx(96 + 3 * 7 / 2) and found["messages"] == 2 * 15 * 32
    first, last = found["ranks"][0], found["ranks"][-1]
    assert first["chunks"] == [0, 8] and first["busy"] == pytest.approx(96)
    assert (first["peak_live_chunk_activations"], last["peak_live_chunk_activations"]) == (23, 9)
    assert first["peak_activations"] == pytest.approx(11.5), "in stages: chunks are half as large"
    text = run(capsys, *sizes)
    assert "bubble of total" in text and "17.9%" in text and "forwards of a stage" in text


def test_schedules_are_compared_on_one_scale(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--stages", "4", "--micro-batches", "16")
    found = {entry["schedule"]: entry for entry in results(capsys, *sizes, "--schedule", "all")}
    assert found.keys() == SCHEDULES.keys()
    assert [found[name]["total_time"] for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv")] == (
        pytest.approx([57, 57, 52.5, 51, 49.5])
    )
    assert [name for name, entry in found.items() if not entry["engine_runs_it"]] == ["zb_h1", "zbv"]
    text = run(capsys, *sizes, "--schedule", "1f1b,zbv")
    assert "zbv *" in text and "training runs gpipe, 1f1b, interleaved_1f1b" in text


def test_unequal_stages_messages_and_memory_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--stages", "2", "--micro-batches", "2", "--forward-times", "1,2", "--send-time", "0.5", "--unit", "s")
    (found,) = results(capsys, *args, "--activation-gb", "3,5")
    assert found["total_time"] == 16.0 and found["time_unit"] == "s"
    assert [rank["idle"] for rank in found["ranks"]] == [10.0, 4.0]
    assert [rank["bubble_fraction_of_total"] for rank in found["ranks"]] == [10 / 16, 4 / 16]
    assert [rank["peak_activations"] for rank in found["ranks"]] == [6.0, 5.0] and found["memory_unit"] == "GB"
    # Times are of pieces of the model, so they mean the same however many chunks a schedule makes of it.
    sizes = ("--stages", "2", "--micro-batches", "2", "--schedule", "interleaved_1f1b")
    busy = [[rank["busy"] for rank in entry["ranks"]] for entry in results(capsys, *sizes, "--forward-times", "1,2")]
    assert busy == [[9.0, 9.0]]
    for times in ("2", "1,1,1,1", "0.5,0.5,0.5,0.5,0.5,0.5,0.5,0.5"):
        (found,) = results(capsys, *sizes, "--forward-times", times)
        assert [rank["busy"] for rank in found["ranks"]] == [12.0, 12.0]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--schedule", "zb-h1"), "'zb-h1' is not known. Did you mean 'zb_h1'"),
        (("--virtual-stages", "2"), "1f1b cannot have so many chunks.*interleaved_1f1b"),
        (("--forward-times", "1,2,3"), "--forward-times has 3 values.*4 chunks.*1 value, or 4: one for every stage"),
        (("--weight-share", "2"), "between 0 and 1"),
        (("--forward-times", "0"), "nothing to draw"),
        (("-o", "step.pdf"), r"step.pdf: the name must end in one of .svg, .png, .json"),
    ],
)
def test_bad_input_is_refused_with_a_reason(args: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        main(["--stages", "4", "--micro-batches", "8", *args])


@pytest.mark.parametrize("times", ["fast", "-1", "inf"])
def test_times_that_are_none_end_with_exit_code_2(times: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--stages", "4", "--micro-batches", "8", f"--forward-times={times}"])
    assert end.value.code == 2 and times in capsys.readouterr().err


def test_files_are_written_by_their_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "new" / f"step{suffix}" for suffix in (".svg", ".png", ".json")]
    run(capsys, "--stages", "2", "--micro-batches", "4", "-o", *map(str, files))
    assert ElementTree.parse(files[0]).getroot().tag == SVG + "svg"
    assert Image.open(files[1]).size[0] == 1804
    assert json.loads(files[2].read_text())["displayTimeUnit"] == "ms"


# The pictures.


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_picture_shows_every_action_where_it_is_in_time(name: str) -> None:
    shown = panel(name, 4, 8)
    drawing = draw_timelines([shown])
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Rect) and shape.title]
    spans = [span for spans in shown.timeline.spans for span in spans]
    assert len(boxes) == len(spans)
    scale = (boxes[-1].x - boxes[0].x) / (spans[-1].start - spans[0].start)
    for box, span in zip(boxes, spans, strict=True):
        assert box.x - boxes[0].x == pytest.approx((span.start - spans[0].start) * scale)
        assert -1e-9 <= (span.end - span.start) * scale - box.width <= 1.0 + 1e-9, (
            "at most a hair's breadth between boxes"
        )
    texts = [shape.text for shape in drawing.shapes if isinstance(shape, Text)]
    assert {"rank 0", "rank 3", "time (ms)", "activations kept (micro-batches of a stage)", "idle"} <= set(texts)
    assert shown.title in texts and f"{shown.timeline.bubble_fraction:.1%} of the total time" in " ".join(texts)
    assert texts.count("7") >= 8, "numbers of micro-batches stand in the boxes"


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 3), (16, 128), (64, 64)])
def test_all_stays_inside_the_picture_at_any_size(stages: int, micro_batches: int) -> None:
    drawing = draw_timelines([panel("1f1b", stages, micro_batches), panel("zbv", stages, micro_batches, 0.1)])
    for shape in drawing.shapes:
        if isinstance(shape, Rect):
            assert shape.x >= 0 and shape.x + shape.width <= drawing.width + 0.01
            assert shape.y >= 0 and shape.y + shape.height <= drawing.height
        points = shape.points if isinstance(shape, Line) else [(shape.x, shape.y)]
        assert all(0 <= x <= drawing.width + 0.01 and 0 <= y <= drawing.height for x, y in points)
    assert 900 <= drawing.width <= 1800


def test_svg_is_valid_and_describes_itself() -> None:
    drawing = draw_timelines([panel("zbv", 2, 4, 0.1)])
    drawing.add(Text(10, 10, "<&>", bold=True))
    root = ElementTree.fromstring(svg(drawing))
    assert float(root.attrib["width"]) == drawing.width and root.find(SVG + "title") is not None
    assert "zbv: 2 stages × 2 chunks" in (root.findtext(SVG + "title") or "")
    assert "<&>" in [text.text for text in root.iter(SVG + "text")]
    assert len(list(root.iter(SVG + "rect"))) == 1 + sum(isinstance(shape, Rect) for shape in drawing.shapes)


def test_png_has_the_colours_of_the_drawing() -> None:
    drawing = Drawing(40, 20)
    drawing.add(
        Rect(10, 5, 20, 10, "#e69f00"), Line(((0, 1), (40, 1)), "#009e73", 2), Text(20, 12, "×", anchor="middle")
    )
    image = Image.open(io.BytesIO(png(drawing, scale=1))).convert("RGB")
    assert image.size == (40, 20)
    assert image.getpixel((12, 6)) == (0xE6, 0x9F, 0x00) and image.getpixel((5, 1)) == (0, 0x9E, 0x73)
    assert image.getpixel((2, 10)) == (255, 255, 255)
    with pytest.raises(ConfigError, match="too large for PNG"):
        png(Drawing(20000, 20000))


def test_numbers_can_be_read_on_every_colour() -> None:
    def luminance(colour: str) -> float:
        values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for kind in Kind:
        for index in range(4 if kind in OF_KIND else 0):
            colour = shade(OF_KIND[kind], index, 4)
            light, dark = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) > 3.0, (kind, index)


def test_ticks_are_round_and_numbers_short() -> None:
    assert (
        ticks(9.5, 5) == [0, 2, 4, 6, 8]
        and ticks(0, 5) == [0]
        and ticks(1200, 6) == [0, 200, 400, 600, 800, 1000, 1200]
    )
    assert [number(value) for value in (0, 0.25, 12.345678, 1500.4)] == ["0", "0.25", "12.35", "1,500"]


# What is kept, and the trace.


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_over_time_begins_and_ends_at_nothing_and_peaks_as_promised(name: str) -> None:
    timeline = panel(name, 4, 8).timeline
    for rank, spans in enumerate(timeline.spans):
        steps = timeline.live(rank)
        assert max(value for _, value in steps) == timeline.peak_live[rank]
        assert steps[0] == (spans[0].start, 1.0) and steps[-1] == (spans[-1].end, 0.0)
        assert steps == sorted(steps) and len({time for time, _ in steps}) == len(steps)


def test_a_trace_has_every_action_message_and_counter() -> None:
    shown = [panel("1f1b", 2, 3, 0.5), panel("zbv", 2, 3, unit="")]
    events = chrome_trace(shown)["traceEvents"]
    json.dumps(events)
    for process, one in enumerate(shown):
        mine = [event for event in events if event["pid"] == process]
        work = [event for event in mine if event["ph"] == "X" and event["cat"] != "message"]
        spans = [(rank, span) for rank, spans in enumerate(one.timeline.spans) for span in spans]
        assert [event["tid"] for event in work] == [2 * rank for rank, _ in spans]
        assert [event["ts"] for event in work] == pytest.approx([1000 * span.start for _, span in spans])
        assert [event["dur"] for event in work] == pytest.approx([1000 * (s.end - s.start) for _, s in spans])
        starts, ends = ([event for event in mine if event["ph"] == phase] for phase in "sf")
        assert len(starts) == len(ends) == len(one.timeline.messages)
        for begin, end in zip(starts, ends, strict=True):
            assert begin["id"] == end["id"]
            for flow in (begin, end):
                inside = [e for e in work if e["tid"] == flow["tid"] and e["ts"] < flow["ts"] < e["ts"] + e["dur"]]
                assert len(inside) == 1
        assert {event["args"]["name"] for event in mine if event["name"] == "process_name"} == {one.title}
        assert max(event["args"]["activations"] for event in mine if event["ph"] == "C") == pytest.approx(max(one.kept))
    moving = [event for event in events if event["ph"] == "X" and event["cat"] == "message"]
    assert len(moving) == 6 and {event["dur"] for event in moving} == {500.0}
