"""``lightning-3d doctor``: what it finds, as tables and as JSON, its exit codes and its messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.cli import main
from lightning_3d.collectives import all_reduce
from lightning_3d.dry_run.forks import ForkError
from lightning_3d.dry_run.simulated_ranks import on_tensor_parallel_ranks
from lightning_3d.errors import PlanError

HERE = f"{__name__}"


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(LightningModule):
    """A module of a user, with a loud constructor, a tied head and a layer that no plan can cut."""

    def __init__(self, width: int = 8, layers: int = 4) -> None:
        super().__init__()
        print("a user's own message")
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Mlp(width) for _ in range(layers))
        self.mix = nn.Conv1d(width, width, 1)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.example_input_array = torch.zeros(2, 16, dtype=torch.long)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NoModule:
    """Something that is no model."""


def build(width: int = 8, layers=4) -> Net:  # type: ignore[no-untyped-def]
    return Net(width, layers)


def forgets() -> None:
    """Gives nothing."""


class Broken(nn.Module):
    def __init__(self) -> None:
        raise ValueError("no such file: weights.bin")


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(["doctor", *args])
    out, err = capsys.readouterr()
    return code, out, err


def ask_json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any, str]:
    code, out, err = ask(capsys, *args, "--json")
    return code, json.loads(out), err


def test_a_class_with_arguments_is_examined_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = ask_json(
        capsys, "--model", f"{HERE}.Net", "--model.layers=6", "--tp", "2", "--pp=2", "--dp", "3"
    )
    assert code == 0 and found["ok"] and not found["problems"]
    assert "a user's own message" in err, "stdout is one JSON object whatever the user's code prints"
    assert found["sizes"] == {"pipeline_parallel": 2, "data_parallel": 3, "tensor_parallel": 2}
    (blocks,) = found["blocks"]
    assert (blocks["name"], blocks["kind"], blocks["count"]) == ("layers", "Mlp", 6)
    first, last = found["chunks"]
    assert first["blocks"] + last["blocks"] == [f"layers.{i}" for i in range(6)]
    assert last["outside"] == ["mix"] and found["everywhere"] == ["embed", "head"]
    assert first["share"] + last["share"] == pytest.approx(1.0)
    assert found["cost_source"] == "by flops, counted on inputs of 2 x 16"
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["layers.3.up"]["kind"] == "colwise" and layers["layers.3.up"]["source"] == "derived"
    assert layers["layers.3.down"]["kind"] == "rowwise"
    assert layers["embed"]["kind"] == "vocab"
    (check,) = found["checks"]
    assert check["passed"] and check["count"] == 6 and "equal those of the whole block" in check["result"]
    assert found["ties"] == [{"names": ["embed.weight", "head.weight"], "stages": [0, 1]}]


def test_a_hugging_face_type_is_built_small_and_shown_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    code, out, err = ask(capsys, "--model", "llama", "--hf-config", '{"vocab_size": 4096, "num_hidden_layers": 6}')
    assert code == 0, err
    assert "LlamaForCausalLM (Hugging Face llama, a small configuration with changes)" in out
    assert "pp2 x dp1 x tp2" in out, "without sizes"
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "model.layers LlamaDecoderLayer 6 221,952" in lines
    assert "model.layers.*.self_attn.q_proj 6 colwise model plan" in lines
    assert any(line.startswith("model.layers.0 6 yes ") and "equal those of the whole" in line for line in lines)
    assert any(line.startswith("0 model.layers.0 .. 4 model.embed_tokens ") for line in lines), "the head weighs much"
    assert "Nothing was found that would be refused." in out


def test_a_whole_configuration_is_taken_as_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=1600, n_layer=24, n_head=25).save_pretrained(tmp_path)
    code, found, _ = ask_json(capsys, "--model", "gpt2", "--hf-config", str(tmp_path), "--pp", "4")
    assert code == 0
    assert found["parameters"] > 800_000_000, "built without memory"
    assert [len(chunk["blocks"]) for chunk in found["chunks"]] == [6, 7, 7, 4], (
        "the head weighs as much as almost three blocks"
    )


def test_a_class_in_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "parts_beside.py").write_text("WIDTH = 4\n")
    file = tmp_path / "a_users_script.py"
    file.write_text(
        "import torch\nfrom parts_beside import WIDTH\n\n"
        "class Stack(torch.nn.Module):\n"
        "    def __init__(self, depth: int):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth)))\n"
        "    def forward(self, x):\n        return self.net(x)\n"
    )
    code, found, _ = ask_json(capsys, "--model", f"{file}:Stack", "--model.depth", "5", "--pp", "2")
    assert code == 0 and [len(chunk["blocks"]) for chunk in found["chunks"]] in ([2, 3], [3, 2])
    assert found["layers"] == [] and found["checks"] == [], "with one tensor-parallel rank nothing is cut"
    code, _, err = ask(capsys, "--model", f"{file}:Stac")
    assert code == 2 and "has no class 'Stac'. Did you mean 'Stack'?" in err


def test_the_model_and_the_sizes_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    code, found, _ = ask_json(capsys, "--config", str(recipe), "--model.num_layers=6")
    assert code == 0 and found["model"] == "lightning_3d.models.GPT"
    assert found["sizes"] == {"pipeline_parallel": 2, "data_parallel": 1, "tensor_parallel": 2}
    assert found["blocks"][0]["count"] == 6
    code, found, _ = ask_json(capsys, "--config", str(recipe), "--tp", "1", "--pp", "4")
    assert code == 0 and found["sizes"]["tensor_parallel"] == 1 and len(found["chunks"]) == 4


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "doctor needs --model"),
        (["--model", "lama"], 2, "neither package.module.Class, file.py:Class nor a type of Hugging Face model"),
        (["--model", "lama"], 2, "Did you mean 'llama'?"),
        (["--model", "nowhere.py:Net"], 2, "there is no file nowhere.py"),
        (["--model", f"{HERE}.Nett"], 2, "Did you mean"),
        (["--model", f"{HERE}.Net", "--model.widht=4"], 2, "Net has no option 'widht'. Did you mean 'width'?"),
        (["--model", f"{HERE}.Net", "--pipeline_spit=flops"], 2, "Did you mean 'pipeline_split'?"),
        (["--model", f"{HERE}.Broken"], 2, "could not be built: ValueError: no such file: weights.bin"),
        (["--model", f"{HERE}.NoModule"], 2, "NoModule is a class, but not of an nn.Module or LightningModule"),
        (["--model", f"{HERE}.forgets"], 2, "forgets gives a NoneType, not an nn.Module"),
        (["--model", f"{HERE}.HERE"], 2, "HERE is an instance of str. Give a class of models or a function"),
        (["--model", f"{HERE}.build", "--model.nope=3"], 2, "'model.nope' is not an option"),
        (["--model", "no_such_package.Net"], 2, "there is no package or module 'no_such_package'"),
        (["--model", f"{HERE}.Mlp", "--model.width=8", "--pp", "2"], 2, "only 0 blocks to share out"),
        (["--model", f"{HERE}.Net", "--pp", "8"], 2, "cut: The pipeline asks for 8 chunks"),
        (["--model", f"{HERE}.Manual", "--pp", "2"], 2, "steps: This module optimizes manually"),
        (["--model", f"{HERE}.Net", "--pipeline_split", "[1, 2]", "--pp", "2"], 2, "places 3 blocks of a model of 4"),
        (["--config", "nowhere.yaml"], 2, "there is no such file"),
        (["--model", "llama", "--hf-config", "{oops"], 2, "is not JSON"),
    ],
)
def test_input_that_cannot_work_is_said_on_stderr_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, says: str
) -> None:
    found, _, err = ask(capsys, *args)
    assert found == code, err
    assert says in err


def test_a_plan_that_changes_the_numbers_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    plan = '{"layers.*.up": "colwise", "layers.*.down": "replicate"}'
    code, found, err = ask_json(capsys, "--model", f"{HERE}.Net", "--tp", "2", "--tp_plan", plan)
    assert code == 1 and not found["ok"]
    (problem,) = found["problems"]
    assert problem["part"] == "tensor parallelism" and problem["kind"] == "PlanError"
    assert "layers.0" in problem["message"] and problem["message"] in err
    assert found["blocks"], "what else was found is told all the same"


def test_help_names_the_options_of_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, "--help")
    assert code == 0
    for option in ("--model", "--hf_config", "--json", "--tp_plan", "--pipeline_split", "--tensor_parallel"):
        assert option in out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out


def test_the_last_of_several_models_counts_and_sizes_left_open_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found, _ = ask_json(capsys, f"--model={HERE}.nothing", f"--model={HERE}.build", "--pp=2", "--tp=1")
    assert code == 0 and found["blocks"][0]["count"] == 4
    path = tmp_path / "open.yaml"
    path.write_text(f"model:\n  class_path: {HERE}.Net\n")
    assert main(["doctor", "--config", str(path)]) == 0
    assert "note: left 'auto' and taken to be 1 here: tensor_parallel, pipeline_parallel" in capsys.readouterr().err


def test_simulated_ranks_reduce_and_their_errors_arrive() -> None:
    assert on_tensor_parallel_ranks(3, lambda mesh: all_reduce(torch.tensor(mesh.rank + 1.0), mesh.tp).item()) == 6.0

    def fail(mesh: Any) -> None:
        if mesh.rank == 1:
            raise PlanError("rank 1 says no")
        all_reduce(torch.ones(1), mesh.tp)  # waits for rank 1

    with pytest.raises(PlanError, match="rank 1 says no"):
        on_tensor_parallel_ranks(2, fail)
    with pytest.raises(ForkError, match=r"Simulated rank \d failed: ZeroDivisionError"):
        on_tensor_parallel_ranks(2, lambda mesh: 1 // 0)
    with pytest.raises(ForkError, match="did not answer within 1 s"):
        on_tensor_parallel_ranks(2, lambda mesh: __import__("time").sleep(30), limit_s=1.0)


def test_a_function_that_returns_a_model_is_examined_with_its_arguments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found, _ = ask_json(capsys, "--model", f"{HERE}.build", "--model.layers=6", "--pp=2", "--tp=1")
    assert code == 0 and found["blocks"][0]["count"] == 6
    (tmp_path / "their_models.py").write_text(f"from {HERE} import build, Net\n")
    code, found, _ = ask_json(capsys, "--model", f"{tmp_path}/their_models.py:build", "--pp=2", "--tp=1")
    assert code == 0 and found["blocks"][0]["count"] == 4
