"""Suggestions for names that a parser does not know."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from lightning_3d.cli.command import _help_of_strategy
from lightning_3d.cli.did_you_mean import children_of, explain, keys_of, options_of, unknown_part

KNOWN = {"trainer.max_steps", "trainer.max_epochs", "model", "data", "seed_everything"}


def parser() -> ArgumentParser:
    parser = ArgumentParser()
    sub = parser.add_subparsers().add_parser("fit")
    for key in KNOWN:
        sub.add_argument(f"--{key}")
    return parser


def test_keys_of_subcommands_are_known() -> None:
    assert keys_of(parser()) >= KNOWN


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("trainer.max_step", ("trainer", "max_step")),
        ("triner.max_steps", ("", "triner")),
        ("seed_evrything", ("", "seed_evrything")),
        ("model.init_args.width", ("model", "init_args")),
    ],
)
def test_a_key_is_split_at_its_first_unknown_part(key: str, parts: tuple[str, str]) -> None:
    assert unknown_part(key, KNOWN) == parts


def test_help_about_the_strategy_is_about_the_one_of_this_command() -> None:
    ours = "--trainer.strategy.help=lightning_3d.ThreeDStrategy"
    assert _help_of_strategy(["fit", "--trainer.strategy.help"]) == ["fit", ours]
    assert _help_of_strategy(["fit", "--trainer.strategy.help", "--x=1"]) == ["fit", ours, "--x=1"]
    named = ["fit", "--trainer.strategy.help", "DDPStrategy"]
    assert _help_of_strategy(named) == named


def test_children_are_the_next_parts() -> None:
    assert children_of("", KNOWN) == ["data", "model", "seed_everything", "trainer"]
    assert children_of("trainer", KNOWN) == ["max_epochs", "max_steps"]


@pytest.mark.parametrize(
    "message",
    [
        "Subcommand 'fit' does not accept option 'trainer.max_step'",
        "unrecognized arguments: --trainer.max_step=3",
        "Option 'trainer.max_step' is not accepted",
        "Key 'trainer.max_step' is not expected",
    ],
)
def test_each_wording_of_the_parser_is_understood(message: str) -> None:
    assert explain(message, parser()) == "'trainer.max_step' is not an option. Did you mean 'trainer.max_steps'?"


def test_an_option_of_a_class_is_compared_with_its_arguments() -> None:
    path = "lightning_3d.models.ByteText"
    message = f"Problem with given class_path '{path}':\n    Option 'seqence_length' is not accepted"
    assert "ByteText has no option 'seqence_length'. Did you mean 'sequence_length'?" in explain(message, parser())
    assert "pattern" in options_of(path)


def test_what_is_nothing_like_a_name_gets_no_suggestion() -> None:
    assert explain("Option 'zzz' is not accepted", parser()) == "'zzz' is not an option."


def test_other_messages_stay_as_they_are() -> None:
    assert explain("something else is wrong", parser()) == "something else is wrong"
    assert explain("the following arguments are required: fit.model", parser()).startswith("'model' is missing.")
    assert options_of("no.such.module.Class") == []
