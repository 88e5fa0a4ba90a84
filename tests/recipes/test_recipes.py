"""Every recipe can be read, printed and built; the command explains itself, and what is wrong with its input."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_3d import ThreeDStrategy
from lightning_3d.cli import main
from lightning_3d.cli.command import CLI

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
QUICKSTART = next(path for path in RECIPES if path.stem == "quickstart")
SET_BY_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "precision_plugin"}


@pytest.fixture(autouse=True)
def as_from_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No arguments of pytest, no files in the repository, no seed left behind."""
    monkeypatch.setattr("sys.argv", ["lightning-3d"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


def run(*args: str) -> int:
    """Exit code of the command."""
    try:
        return main(args)
    except SystemExit as ended:
        return int(ended.code or 0)


def built(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    """The command's Trainer, model and data, built but not run."""
    seen: list[CLI] = []
    monkeypatch.setattr(CLI, "_run_subcommand", lambda self, name: seen.append(self))
    assert main(args) == 0
    return seen[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_a_recipe_prints_its_whole_configuration(
    recipe: Path, subcommand: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(subcommand, "--config", str(recipe), "--print_config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    given = yaml.safe_load(recipe.read_text())
    for part in ("model", "data"):
        assert printed[part]["class_path"] == given[part]["class_path"]
        assert printed[part]["init_args"].items() >= given[part]["init_args"].items()
    assert printed["trainer"]["strategy"]["init_args"].items() >= given["trainer"]["strategy"]["init_args"].items()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = built(monkeypatch, "fit", "--config", str(recipe))
    assert isinstance(cli.trainer, Trainer)
    assert isinstance(cli.trainer.strategy, ThreeDStrategy)
    assert type(cli.model).__name__ in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_explained(recipe: Path) -> None:
    lines = recipe.read_text().splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        value = re.match(r"\s*(?P<key>\w+): \S", line)
        if value and value["key"] != "class_path":
            assert before.strip().startswith("#"), f"{recipe.name}: no comment above {line.strip()!r}"


def test_options_change_layout_text_and_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cli = built(
        monkeypatch,
        *("fit", "--config", str(QUICKSTART), "--trainer.devices=4"),
        *("--trainer.strategy.pipeline_parallel=4", "--trainer.strategy.tensor_parallel=1"),
        *("--model.num_layers=6", "--model.width=64", f"--data.folder={tmp_path}"),
    )
    config = cli.trainer.strategy.config
    assert (config.pipeline_parallel, config.tensor_parallel, config.zero_stage) == (4, 1, 1)
    assert len(cli.model.blocks) == 6
    assert cli.datamodule.folder == str(tmp_path)


def test_the_strategy_needs_no_class_path(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = built(monkeypatch, "fit", "--model=GPT", "--data=ByteText", "--trainer.strategy.zero_stage=2")
    assert isinstance(cli.trainer.strategy, ThreeDStrategy)
    assert cli.trainer.strategy.config.zero_stage == 2


@pytest.mark.parametrize("subcommand", ["fit", "predict"])
def test_help_shows_every_option_of_the_strategy(subcommand: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(subcommand, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    explained = {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for parameter in docstring_parser.parse(inspect.getdoc(ThreeDStrategy) or "").params
    }
    options = [name for name in inspect.signature(ThreeDStrategy).parameters if name not in SET_BY_TRAINER]
    assert len(options) > 15
    for name in options:
        assert f"--trainer.strategy.{name} " in text
        # words may be broken at hyphens, so the comparison is without white space
        assert explained[name].replace(" ", "")[:60] in text.replace(" ", ""), name


def test_general_help_names_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("fit", "validate", "test", "predict"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trainer.max_step=3",), ("'trainer.max_step' is not an option", "Did you mean 'trainer.max_steps'?")),
        (("--trianer.max_steps=3",), ("'trianer' is not an option", "Did you mean 'trainer'?")),
        (("--trainer.strategy.tensor_paralel=2",), ("no option 'tensor_paralel'", "Did you mean 'tensor_parallel'?")),
        (("--model.num_layer=2",), ("GPT has no option 'num_layer'", "Did you mean 'num_layers'?")),
        (("--data.file=x",), ("ByteText has no option 'file'",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_typo_is_an_error_that_names_the_nearest(
    args: tuple[str, ...], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", "--config", str(QUICKSTART), *args) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in said), error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("max_steps:", "max_step:", "Did you mean 'trainer.max_steps'?"),
        ("zero_stage:", "zero_stag:", "Did you mean 'zero_stage'?"),
        ("num_heads:", "n_heads:", "Did you mean 'num_heads'?"),
        ("\ndata:", "\ndatum:", "Did you mean 'data'?"),
        ("ThreeDStrategy", "ThreeStrategy", "Did you mean 'lightning_3d.ThreeDStrategy'?"),
    ],
)
def test_a_typo_in_a_recipe_is_found_too(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "typo.yaml"
    recipe.write_text(QUICKSTART.read_text().replace(old, new))
    assert run("fit", "--config", str(recipe)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trainer.strategy.schedule=2f2b",), "schedule='2f2b' is not known"),
        (("--trainer.strategy.zero_stage=7",), "zero_stage=7"),
        (("--trainer.devices=6",), "the world has 6 ranks"),
        (("--trainer.strategy.micro_batch_size=2",), "num_micro_batches=8 and micro_batch_size=2"),
        (("--model.num_heads=3",), "width=128 cannot be shared by num_heads=3"),
        (("--data.folder=/not/there",), "folder='/not/there' is not a folder"),
        (("--trainer.strategy=4d",), "strategy='4d'"),
        (("--config=missing.yaml",), "missing.yaml"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_bad_input_ends_with_2_and_a_message_before_any_process_starts(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", lambda self, name: pytest.fail("the run began"))
    assert run("fit", "--config", str(QUICKSTART), *args) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_a_fault_of_the_program_is_not_taken_for_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: CLI, name: str) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(CLI, "_run_subcommand", fails)
    with pytest.raises(RuntimeError, match="a fault"):  # Python ends with 1 and the traceback
        main(["fit", "--config", str(QUICKSTART)])
