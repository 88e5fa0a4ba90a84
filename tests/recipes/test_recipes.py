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

import lightning_3d
from lightning_3d import ThreeDStrategy
from lightning_3d.cli import main
from lightning_3d.cli.command import CLI, SUBCOMMANDS
from tests.told import told

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
    cli = built(monkeypatch, "fit", "--config", str(recipe), "--trainer.accelerator=cpu")
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


def test_general_help_names_the_subcommands_each_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in (*CLI.subcommands(), *SUBCOMMANDS):
        assert re.search(rf"^ +{name} +\w+ \w+", text, re.M), name
    assert run("--version") == 0
    assert capsys.readouterr().out == f"lightning-3d {lightning_3d.__version__}\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--trainer.max_step=3",), ("'trainer.max_step' is not an option", "Did you mean 'trainer.max_steps'?")),
        (("--trianer.max_steps=3",), ("'trianer' is not an option", "Did you mean 'trainer'?")),
        (("--trainer.strategy.tensor_paralel=2",), ("no option 'tensor_paralel'", "Did you mean 'tensor_parallel'?")),
        (("--model.num_layer=2",), ("GPT has no option 'num_layer'", "Did you mean 'num_layers'?")),
        (("--data.file=x",), ("ByteText has no option 'file'",)),
        (("--seed_evrything=3",), ("'seed_evrything' is not an option", "Did you mean 'seed_everything'?")),
        (("--model=GTP",), ("model='GTP'", "Did you mean 'GPT'?")),
        (("--data=ByteTxt",), ("data='ByteTxt'", "Did you mean 'ByteText'?")),
        (("--model=nosuch.GPT",), ("no package or module 'nosuch'",)),
        (("--optimizer=AdamWW",), ("Did you mean 'AdamW'?",)),
        (("--optimizer=AdamW", "--optimizer.lrr=3"), ("AdamW has no option 'lrr'. Did you mean 'lr'?",)),
        (("--trainer.callbacks+=lightning_3d.RunReprt",), ("Did you mean 'lightning_3d.RunReport'?",)),
        (("--trainer.strategy=3d_zero4",), ("strategy='3d_zero4'", "Did you mean '3d_zero3'?")),
        (("--trainer.strategy=lightning_3d.ThreeDStrateg",), ("Did you mean 'lightning_3d.ThreeDStrategy'?",)),
        (("--trainer.precision=bf16-mixd",), ("trainer.precision='bf16-mixd'", "Did you mean 'bf16-mixed'?")),
        (("--trainer.strategy.zero_stage=two",), ("ThreeDStrategy.zero_stage='two' is not valid: expected int.",)),
        (("--trainer.max_steps=many",), ("trainer.max_steps='many' is not valid: expected int.",)),
        (("--ckpt_path=/not/there",), ("--ckpt_path /not/there: there is no such checkpoint",)),
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
        ("init_args:", "init_arg:", "Did you mean 'init_args'?"),
        ("    class_path: lightning_3d.Three", "    clas_path: lightning_3d.Three", "Did you mean 'class_path'?"),
        ("\nmodel:", "\ntrainer:\n  max_steps: 3\nmodel:", "gives 'trainer' again, which line"),
        ("  max_steps:", " max_steps:", "typo.yaml:"),
        ("  max_steps:", "\tmax_steps:", "is not YAML: found character '\\t'"),
    ],
)
def test_a_typo_in_a_recipe_is_found_too(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "typo.yaml"
    recipe.write_text(QUICKSTART.read_text().replace(old, new, 1))
    assert run("fit", "-c", str(recipe)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "No command was given. There are: "),
        (("fitt",), "'fitt' is not a command. Did you mean 'fit'?"),
        (("doctr", "x"), "Did you mean 'doctor'?"),
        (("fit", "-c", "recipe.yml"), "Did you mean 'recipe.yaml'?"),
        (("fit", "-c", "."), "is a folder"),
        (("fit", "-c", "empty.yaml"), "empty.yaml is empty"),
        (("fit", "-c", "list.yaml"), "list.yaml holds no keys"),
        (("fit", "-c", "fit.yaml"), "'fit' is a command. A file with such keys is given before it"),
        (("fit", "-c", "named.yaml", "--trainer.strategy.zero_stage=1"), "is a name, which takes no options"),
        (("fit", "--data=ByteText"), "'model' is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_and_files_that_cannot_be(
    args: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "recipe": "model: GPT\n",
        "empty": "",
        "list": "- a\n",
        "fit": "fit:\n  model: GPT\n",
        "named": "trainer:\n  strategy: 3d_zero2\nmodel: GPT\ndata: ByteText\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert "Traceback" not in error


def test_later_files_and_options_win_and_what_is_printed_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "trainer.yaml").write_text("max_steps: 5\nlog_every_n_steps: 3\n")
    (tmp_path / "more" / "change.yaml").write_text("trainer: trainer.yaml\nmodel:\n  init_args:\n    num_layers: 6\n")
    merged = ("-c", str(QUICKSTART), "-c", "more/change.yaml", "--trainer.max_steps=7")
    assert run("fit", *merged, "--print_config") == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed)
    assert (config["trainer"]["max_steps"], config["trainer"]["log_every_n_steps"]) == (7, 3)
    assert (config["model"]["init_args"]["num_layers"], config["model"]["init_args"]["num_heads"]) == (6, 4)
    (tmp_path / "again.yaml").write_text(printed)
    monkeypatch.chdir(tmp_path / "more")
    assert run("fit", "-c", "../again.yaml", "--print_config") == 0
    assert capsys.readouterr().out == printed
    assert built(monkeypatch, "fit", "-c", "../again.yaml").trainer.max_steps == 7


def test_environment_variables_set_options_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PL_FIT__MODEL", "GPT")
    monkeypatch.setenv("PL_FIT__DATA", "ByteText")
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_STEPS", "77")
    monkeypatch.setenv("PL_FIT__TRAINER__LOG_EVERY_N_STEPS", "3")
    strategy = "{class_path: lightning_3d.ThreeDStrategy, init_args: {zero_stage: 2}}"
    monkeypatch.setenv("PL_FIT__TRAINER__STRATEGY", strategy)
    assert run("fit", "--trainer.log_every_n_steps=4", "--print_config") == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["class_path"] == "lightning_3d.models.GPT"
    assert config["trainer"]["strategy"]["init_args"]["zero_stage"] == 2
    assert (config["trainer"]["max_steps"], config["trainer"]["log_every_n_steps"]) == (77, 4)
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_STEP", "3")
    assert run("fit", "--print_config") == 2
    assert "PL_FIT__TRAINER__MAX_STEP is not an option of fit. Did you mean 'PL_FIT__TRAINER__MAX_STEPS'?" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("PL_TRAINER__MAX_STEPS", "PL_FIT__TRAINER__MAX_STEPS"),
        ("PL_FIT_TRAINER__MAX_STEPS", "PL_FIT__TRAINER__MAX_STEPS"),
        ("PL_TRAINER_MAX_STEPS", "PL_FIT__TRAINER__MAX_STEPS"),
        ("PL_TEST_CKPT_PATH", "PL_TEST__CKPT_PATH"),
        ("PL_FITT__MODEL", "PL_FIT__MODEL"),
    ],
)
def test_variables_that_name_no_command_are_refused(
    variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "11")
    assert run("fit", "--print_config") == 2
    message = capsys.readouterr().err
    assert variable in message and f"Did you mean {nearest!r}?" in message


def test_variables_of_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "PL_WAREHOUSE"):
        monkeypatch.setenv(name, "1")
    with told() as texts:
        assert run("fit", "-c", str(QUICKSTART), "--print_config") == 0
    assert "seed_everything" in capsys.readouterr().out
    named = [text for text in texts if "PL_" in text]
    assert len(named) == 1 and "PL_WAREHOUSE is not an option" in named[0]


def test_a_schedule_for_the_batch_is_given_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = built(
        monkeypatch,
        *("fit", "-c", str(QUICKSTART), "--optimizer=SGD", "--optimizer.lr=0.1"),
        *("--lr_scheduler=BatchScaledLR", "--lr_scheduler.reference_batch_size=4", "--lr_scheduler.warmup_steps=10"),
    )
    configured = cli.model.configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    assert configured["lr_scheduler"]["scheduler"].warmup_steps == 10


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
