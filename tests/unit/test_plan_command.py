"""``lightning-3d plan``: what a person reads, what a program reads, the recipe and the page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from lightning_3d.cli import main
from lightning_3d.cli.plan_recipe import hugging_face_config
from lightning_3d.errors import ConfigError
from lightning_3d.models import GPT
from lightning_3d.pictures import Bar, draw_bars
from lightning_3d.pictures.drawing import Rect, Text
from lightning_3d.planner import PRESETS
from lightning_3d.planner.reading import shape_of_config, shape_of_module

SMALL = ("--model", "gpt2-large", "--cluster", "a100-80g:2x8", "--global-batch", "64")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def as_from_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["lightning-3d"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def run(*args: str) -> int:
    try:
        return main(["plan", *args])
    except SystemExit as ended:
        return int(ended.code or 0)


def result(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run(*args, "--json") == 0
    return json.loads(capsys.readouterr().out)


# What is printed.


def test_a_reader_sees_what_to_take_why_and_why_not_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--top", "3") == 0
    text = capsys.readouterr().out
    assert "gpt2-large: 774.0e6 parameters, 36 layers" in text and "16 GPUs of 80 GB, 77.6 GB usable" in text
    assert re.search(r"^Take tp\d pp\d+ dp\d+, .* micro-batches of \d+, ZeRO-\d", text, flags=re.MULTILINE)
    assert "It fits" in text and "more sizes" in text
    for heading in ("Why not the others", "At the sizes of the first, with other settings", "Warnings for the first"):
        assert heading in text
    table = [line for line in text.splitlines() if re.match(r"^[1-3] ", line)]
    assert len(table) == 3 and all("%" in line for line in table)
    assert re.search(r"^ 2  \+\d+\.\d%: ", text, flags=re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


def test_json_has_everything_with_units_in_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    found = result(capsys, *SMALL, "--tp", "2,4", "--zero", "1", "--recompute", "none,full")
    best = found["ranking"][0]
    assert found["model"]["parameters"] == PRESETS["gpt2-large"].parameters and found["cluster"]["gpus"] == 16
    assert {entry["layout"]["tensor_parallel"] for entry in found["ranking"]} <= {2, 4}
    assert best["step_time_s"] <= found["ranking"][-1]["step_time_s"] and best["why_not_first"] == ""
    assert sum(best["time_share"].values()) == pytest.approx(1.0, abs=0.01)
    assert 0 <= best["bubble_fraction_of_total"] < 1 and best["layout"]["num_micro_batches"] >= 1
    assert len(best["memory_gb_per_stage"]) == best["layout"]["pipeline_parallel"]
    assert set(best["memory_gb_per_stage"][0]) >= {"parameters", "gradients", "optimizer", "activations"}
    assert found["usable_memory_gb"] == pytest.approx(77.6) and found["layouts_tried"] >= found["layouts_timed"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--model", "lama3-70b"), "Did you mean llama3-70b"),
        (("--model", "no.such.Module"), "no package or module 'no'"),
        (("--model", "missing.json"), "missing.json cannot be read"),
        (("--cluster", "z9000:2x8"), "gpu='z9000' is not known"),
        (("--cluster", "a100-80g:2by8"), "not understood"),
        (("--schedule", "1f2b"), "1f2b"),
        (("--tp", "3"), "does not divide the 16 GPUs"),
        (("--global-batch", "0"), "--global-batch: 0 must be at least 1"),
        (("--recompute", "some"), "--recompute 'some' is not known"),
        (("--micro-batches", "4"), "--micro-batches is no option of plan"),
        (("--config", "recipe.yaml"), "one of --model and --config"),
        (("--reserve-gb", "79"), "does not fit"),
        (("--tp", "fast"), "'fast' is no number"),
        (("--all-schedules", "--schedule", "zbv", "--pp", "4", "--write", "r.yaml"), "cannot be trained yet"),
        (("--cluster", "h100-80g:2x8", "--precision", "fp8", "--write", "r.yaml"), "trains in fp8"),
        (("--model.kv_heads=4", "--write", "r.yaml"), "a gpt2 of these sizes has"),
    ],
)
def test_bad_input_ends_with_code_2_and_a_reason_on_stderr(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*SMALL, *args) == 2
    streams = capsys.readouterr()
    assert says in streams.err and streams.out == "" and "Traceback" not in streams.err


def test_the_batch_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "gpt2", "--cluster", "a100-80g:1x8") == 2
    assert "--global-batch" in capsys.readouterr().err


# Models.


def test_a_recipe_brings_model_batch_length_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    found = result(capsys, "--config", recipe, "--cluster", "cpu:1x8")
    assert found["global_batch_size"] == 16 and found["model"]["seq_len"] == 128
    assert (found["model"]["layers"], found["model"]["hidden"], found["model"]["heads"]) == (4, 128, 4)
    assert found["ranking"][0]["layout"]["precision"] == "32-true"
    assert found["ranking"][0]["device_memory_gb"] == found["ranking"][0]["memory_gb"] < 1, "no CUDA on a CPU"


def test_a_module_of_the_users_is_read_off_without_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model.num_layers=24", "--model.width=4096", "--model.num_heads=32", "--model.sequence_length=2048")
    found = result(
        capsys, "--model", "lightning_3d.models.GPT", *arguments, "--cluster", "a100-80g:1x8", "--global-batch", "64"
    )
    assert (found["model"]["layers"], found["model"]["hidden"], found["model"]["seq_len"]) == (24, 4096, 2048)
    assert found["model"]["parameters"] == pytest.approx(12 * 24 * 4096**2, rel=0.01)


class Twice(GPT):
    """Runs through its blocks twice: what its parameters do not tell."""

    def forward(self, tokens: Tensor) -> Tensor:
        rotary, x = self.rotary(tokens.shape[1]), self.token_embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x, rotary)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("name", "warned"), [("lightning_3d.models.GPT", False), (f"{__name__}.Twice", True)])
def test_operations_that_the_shape_does_not_tell_are_a_warning(
    name: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--model", name, "--model.width=64", "--cluster", "a100-80g:1x8", "--global-batch", "64") == 0
    told = capsys.readouterr().err
    assert ("TFLOP, counted on the module, but" in told) is warned, told


def test_arguments_of_a_module_come_into_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpt.yaml"
    args = ("--cluster", "cpu:1x4", "--global-batch", "8", "--precision", "32-true", "--write", str(path))
    assert run("--model", "lightning_3d.models.GPT", "--model.num_layers", "6", "--model.width=96", *args) == 0
    model = yaml.safe_load(path.read_text())["model"]
    assert model == {"class_path": "lightning_3d.models.GPT", "init_args": {"num_layers": 6, "width": 96}}
    (tmp_path / "mine.py").write_text("from lightning_3d.models import GPT\n\n\nclass Mine(GPT):\n    pass\n")
    assert run("--model", f"{tmp_path}/mine.py:Mine", *args[:-2]) == 0
    assert run("--model", f"{tmp_path}/mine.py:Mine", *args) == 2
    assert "package.module.Class" in capsys.readouterr().err


def test_a_configuration_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(PRESETS["llama3-8b"])))
    args = ("--cluster", "h100-80g:1x8", "--global-batch", "64", "--seq-len", "4096")
    for given in (str(tmp_path), str(tmp_path / "config.json")):
        found = result(capsys, "--model", given, *args)
        assert found["model"]["parameters"] == PRESETS["llama3-8b"].parameters and found["model"]["seq_len"] == 4096


@pytest.mark.parametrize("name", PRESETS)
def test_recipes_describe_models_of_the_published_shape(name: str) -> None:
    shape = PRESETS[name]
    read = shape_of_config(hugging_face_config(shape), shape.seq_len)
    assert read.parameters == shape.parameters
    assert (read.layers, read.hidden, read.heads, read.vocab) == (shape.layers, shape.hidden, shape.heads, shape.vocab)


HUGGING_FACE = (
    "bloom falcon gemma gemma2 gpt2 gpt_neox gptj granite llama mistral mixtral olmo2 opt phi phi3 qwen2 qwen3"
    " stablelm starcoder2"
)


@pytest.mark.parametrize("kind", HUGGING_FACE.split())
def test_hugging_face_models_are_read_with_the_parameters_that_they_have(kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2)
        model = transformers.AutoModelForCausalLM.from_config(config)
    read = shape_of_module(model, 512)
    held = sum(parameter.numel() for parameter in model.parameters())
    positions = (512 - getattr(config, "max_position_embeddings", 512)) * read.hidden
    held += positions if read.learned_positions else 0
    assert read.layers == 2 and read.parameters == pytest.approx(held, rel=0.004)


def test_what_a_configuration_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"does not say layers, vocab.*num_hidden_layers"):
        shape_of_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_seq_len": 8})
    with pytest.raises(ConfigError, match="an encoder and a decoder"):
        shape_of_config({"model_type": "t5", "is_encoder_decoder": True})


# What is written.


@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b", "mixtral-8x7b"])
def test_the_recipe_is_one_that_fit_accepts(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "recipe.yaml"
    args = ("--model", name, "--cluster", "h100-80g:64x8", "--global-batch", "512", "--tp", "8", "--write", str(path))
    best = result(capsys, *args)["ranking"][0]
    text = path.read_text()
    for part in (
        "torchrun --nnodes=64 --nproc-per-node=8",
        "#SBATCH --nodes=64",
        f"{best['step_time_s']:.2f} s per step",
    ):
        assert part in text
    assert f"{best['device_memory_gb']:.1f} GB of 80 GB" in text and "recipe.yaml" in text
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-0.bin").write_bytes(bytes(8 * 8200))
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(path), "--print_config"])
    assert not end.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    options = printed["trainer"]["strategy"]["init_args"]
    for field in ("tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "schedule", "virtual_stages"):
        assert options[field] == best["layout"][field]
    assert options["global_batch_size"] == 512 and options["micro_batch_size"] == best["layout"]["micro_batch_size"]
    assert printed["trainer"]["num_nodes"] == 64 and printed["trainer"]["devices"] == 8


def test_the_users_own_recipe_keeps_what_is_not_about_sizes(tmp_path: Path) -> None:
    given = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    path = tmp_path / "sized.yaml"
    args = ("--config", str(ROOT / "recipes" / "quickstart.yaml"), "--cluster", "cpu:1x4", "--tp", "2", "--pp", "2")
    assert run(*args, "--write", str(path)) == 0
    written = yaml.safe_load(path.read_text())
    assert written["model"] == given["model"] and written["data"] == given["data"]
    assert written["trainer"]["callbacks"] == given["trainer"]["callbacks"] and written["trainer"]["max_steps"] == 150
    options = written["trainer"]["strategy"]["init_args"]
    assert (options["tensor_parallel"], options["pipeline_parallel"], options["data_parallel"]) == (2, 2, 1)
    assert options["start_method"] == "forkserver" and "num_micro_batches" not in options
    assert written["trainer"]["devices"] == 4 and written["trainer"]["accelerator"] == "cpu"


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


@pytest.mark.parametrize("pipeline", ["1", "4", "8"])
def test_the_page_needs_nothing_outside_of_it(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    args = ("--pp", pipeline, "--all-schedules") if pipeline == "8" else ("--pp", pipeline)
    best = result(capsys, *SMALL, *args, "--html", str(path))["ranking"][0]
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert not page.open and not page.outside and "script" not in page.tags
    assert page.tags.count("svg") == (2 if pipeline == "1" else 3)
    for heading in ("Ranking", "Where the time goes", "Memory of the first layout", "A step of the first layout"):
        assert f"<h2>{heading}</h2>" in text
    assert f"{best['step_time_s']:.2f}" in text and "GB on a rank, at its peak" in text and "seconds per step" in text


def test_bars_are_as_long_as_what_they_show() -> None:
    drawing = draw_bars(
        [Bar("a", {"x": 2.0, "y": 1.0}, "3"), Bar("b", {"x": 4.0, "y": 0.0})], "GB", "T", (6.0, "limit")
    )
    boxes = [shape for shape in drawing.shapes if isinstance(shape, Rect) and shape.title]
    assert [box.width / boxes[1].width for box in boxes] == pytest.approx([2, 1, 4, 0])
    assert boxes[1].x == pytest.approx(boxes[0].x + boxes[0].width)
    texts = {shape.text for shape in drawing.shapes if isinstance(shape, Text)}
    assert texts >= {"T", "a", "b", "x", "y", "GB", "limit", "3"}


@pytest.mark.parametrize(
    ("argument", "said"),
    [("activation=3", "must be a word"), ("packed_attention=3", "must be true or false"), ("layers=x", "whole number")],
)
def test_a_field_of_a_shape_says_what_it_must_be(argument: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "gpt2", f"--model.{argument}", "--cluster", "a100-80g:1x8", "--global-batch", "8"]
    assert main(["plan", *args]) == 2
    assert said in capsys.readouterr().err
