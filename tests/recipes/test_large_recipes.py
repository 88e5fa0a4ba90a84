"""Recipes of published models: what their heads predict is what the planner says, and the dry run accepts them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.cli import main
from lightning_3d.cli.plan_recipe import prediction
from lightning_3d.models import GPT, CausalLM
from lightning_3d.planner import Cluster, Plan, plan
from lightning_3d.planner.reading import shape_of_module
from lightning_3d.trainer.setup.outline import outline

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "recipes.md"
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in ("quickstart", "elastic"))
PLANNED = (
    "tensor_parallel", "pipeline_parallel", "data_parallel", "zero_stage", "schedule", "virtual_stages",
    "micro_batch_size", "activation_checkpointing", "sequence_parallel", "loss_parallel",
)  # fmt: skip
NAMES = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def section(recipe: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = recipe["trainer"]["strategy"]["init_args"]
    return options


def cluster_of(path: Path) -> str:
    found = re.search(r"--cluster (\S+)", path.read_text())
    assert found is not None
    return found[1]


def planned(path: Path) -> Plan:
    """The plan with everything given that the recipe gives."""
    recipe = yaml.safe_load(path.read_text())
    kind = {"GPT": GPT, "CausalLM": CausalLM}[recipe["model"]["class_path"].rpartition(".")[2]]
    module = outline(kind(**recipe["model"]["init_args"]))
    shape = shape_of_module(module, recipe["data"]["init_args"]["sequence_length"])
    options = section(recipe)
    fixed = {name: options[name] for name in PLANNED if name in options}
    fixed["precision"] = recipe["trainer"]["precision"]
    return plan(shape, Cluster.parse(cluster_of(path)), options["global_batch_size"], fixed=fixed)


def test_the_recipes_are_those_of_the_docs() -> None:
    listed = DOCS.read_text()
    assert len(RECIPES) == 4
    assert not [path.name for path in RECIPES if path.name not in listed]


@NAMES
def test_the_head_says_what_the_planner_says(path: Path) -> None:
    found = planned(path)
    text = path.read_text()
    expected = [f"# Layout: {found.best.layout}.", *(f"# {line}" for line in prediction(found))]
    assert not [line for line in expected if line not in text.splitlines()], "\n".join(expected)
    cluster, trainer = found.cluster, yaml.safe_load(text)["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (cluster.num_nodes, cluster.ranks_per_node)
    assert f"--nnodes={cluster.num_nodes} --nproc-per-node={cluster.ranks_per_node}" in text
    assert f"--nodes={cluster.num_nodes} --ntasks-per-node={cluster.ranks_per_node}" in text
    listed = DOCS.read_text()
    row = next(line for line in listed.splitlines() if path.name in line)
    best = found.best.estimate
    assert all(f"{value}" in row for value in (f"{best.step_time_s:.1f} s", f"{best.device_memory_gb:.0f} GB")), row


def smaller(path: Path, folder: Path) -> Path:
    """The recipe with four blocks on two stages, narrow, and two replicas."""
    recipe = yaml.safe_load(path.read_text())
    options, model = section(recipe), recipe["model"]["init_args"]
    chunks = options.get("virtual_stages", 1)
    options["virtual_stages"] = min(chunks, 2)
    options |= {"pipeline_parallel": 2, "data_parallel": 2, "global_batch_size": 16 * options["micro_batch_size"]}
    recipe["trainer"] |= {"num_nodes": 4 * options["tensor_parallel"] // 8, "devices": 8}
    sizes = model.get("config", model)
    for name in sizes:
        sizes[name] = {"num_layers": 4, "n_layer": 4, "num_hidden_layers": 4}.get(name, sizes[name])
        if name in ("width", "hidden_size", "intermediate_size", "num_heads", "n_head", "num_attention_heads"):
            sizes[name] //= 8 if name not in ("num_heads", "n_head", "num_attention_heads") else 4
    made = folder / path.name
    made.write_text(yaml.safe_dump(recipe))
    return made


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.stem.startswith(("gpt-1t", "llama3")) else pytest.mark.long)
        for path in RECIPES
    ],
    ids=lambda path: path.stem,
)
def test_a_smaller_copy_runs_dry(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copied = smaller(path, tmp_path)
    length = yaml.safe_load(path.read_text())["data"]["init_args"]["sequence_length"] + 1
    args = ("--config", str(copied), "--stages", "0", "--batch-shape", f"{length}:int64", "--json")
    assert main(["dry-run", *args]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found


@NAMES
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_first_stage_runs_dry_and_fits(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    length = yaml.safe_load(path.read_text())["data"]["init_args"]["sequence_length"] + 1
    args = ("--config", str(path), "--cluster", cluster_of(path), "--stages", "0", "--batch-shape", f"{length}:int64")
    assert main(["dry-run", *args, "--json"]) == 0, capfd.readouterr().err
