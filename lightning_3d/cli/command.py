"""The command ``lightning-3d``: LightningCLI with the options of the strategy, and errors that say what to change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning.pytorch
from jsonargparse import ActionConfigFile
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeUnion,
    Namespace,
    SaveConfigCallback,
    _InstantiatorFn,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

import lightning_3d.models  # so that --model GPT and --data ByteText are known by their short names
from lightning_3d import BatchScaledLR, ThreeDStrategy
from lightning_3d.cli.config_files import check_config_files
from lightning_3d.cli.did_you_mean import check_environment, check_strategy, explain, suggest
from lightning_3d.cli.paths import given_path
from lightning_3d.errors import ConfigError, ThreeDError

SUCCESS, FAILURE, BAD_INPUT = 0, 1, 2
"""Exit codes of the command; a failure is what Python makes of any other exception."""

READER_LEFT = 128 + 13
"""Exit code of a command whose output nobody reads any more: what shells make of SIGPIPE."""

CHOSEN_BY_TRAINER = ("last", "best", "hpc")
"""Values of ``--ckpt_path`` that are no paths."""

HEADINGS = {
    "model": "The model, a LightningModule",
    "data": "The data, a LightningDataModule",
    "optimizer": "The optimizer, in place of that of the model",
    "lr_scheduler": "The learning rate scheduler, to go with --optimizer",
}
"""Of groups of options whose classes have no short description, by name."""

GIVEN_BY_TRAINER = {"accelerator", "parallel_devices", "precision_plugin"}
"""Parameters of the strategy that the Trainer fills from options of its own; its help does not offer them."""

STRATEGY = "lightning_3d.ThreeDStrategy"
PROG = "lightning-3d"
_HELP = "--trainer.strategy.help"


def calibrate(args: list[str]) -> int:
    """Measure what these devices and links reach, for the planner."""
    from lightning_3d.cli.calibrate import calibrate as run

    return run(args)


def doctor(args: list[str]) -> int:
    """Show how a model would be cut, and check it with numbers, in one process."""
    from lightning_3d.cli.doctor import main

    return main(args)


def convert(args: list[str]) -> int:
    """Turn a checkpoint into another form."""
    from lightning_3d.cli.convert import convert as run

    return run(args)


def dry_run(args: list[str]) -> int:
    """Run ranks of a recipe without memory and without the others: memory, messages, arithmetic."""
    from lightning_3d.cli.dry_run import main

    return main(args)


def inspect(args: list[str]) -> int:
    """Show what lies in a checkpoint."""
    from lightning_3d.cli.inspect import inspect as run

    return run(args)


def plan(args: list[str]) -> int:
    """Choose the sizes of a layout for a model on a cluster, and say why and what it costs."""
    from lightning_3d.cli.plan import main

    return main(args)


def simulate(args: list[str]) -> int:
    """Show what pipeline schedules do: timeline, bubble and memory, as tables and pictures."""
    from lightning_3d.cli.simulate import main

    return main(args)


def report(args: list[str]) -> int:
    """Say what held a run back, from what ThreeDMonitor has written down, and what to change."""
    from lightning_3d.cli.report import main

    return main(args)


def trace(args: list[str]) -> int:
    """Put the traces of all ranks into one file and on one clock."""
    from lightning_3d.cli.trace import main

    return main(args)


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {
    "calibrate": calibrate,
    "convert": convert,
    "doctor": doctor,
    "dry-run": dry_run,
    "inspect": inspect,
    "plan": plan,
    "report": report,
    "simulate": simulate,
    "trace": trace,
}
"""Commands that train nothing, by name: each takes the arguments after its name and returns an exit code."""


_TAKES_LINKS = "applied_instantiation_links" in signature(_InstantiatorFn.__call__).parameters
"""Not so before 2.6."""


class Parser(LightningArgumentParser):
    """A parser whose help lists the options of the strategy, and whose errors name the nearest option."""

    @override
    def add_argument_group(self, title: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Add a group of options, under a heading that can be read: by default it is what Python prints of a class."""
        if title and "<class " in title:
            title = HEADINGS.get(kwargs.get("name") or "", kwargs.get("name"))
        return super().add_argument_group(title, *args, **kwargs)

    @override
    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help text, with a section for :class:`ThreeDStrategy` where a Trainer is configured."""
        text = super().format_help(*args, **kwargs)
        if self.prog == PROG:
            text += f"\n    {PROG} --version shows the version.\n"
            text += "\nFurther commands, each with its own --help:\n"
            text += "".join(f"    {name:<20}{_summary(run)}\n" for name, run in SUBCOMMANDS.items())
        if "trainer" not in (self.groups or {}):
            return text
        options = LightningArgumentParser(add_help=False, usage="", description="")
        options.add_class_arguments(
            ThreeDStrategy,
            "trainer.strategy",
            help="Options of ThreeDStrategy, the default strategy",
            skip=GIVEN_BY_TRAINER,
        )
        return text + "\n" + options.format_help().strip().removeprefix("usage:").strip() + "\n"

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print what is wrong and what is near to what was meant, and end with exit code 2."""
        if not self.exit_on_error or _debug():
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        sys.stderr.write(f"error: {explain(message, self, sorted([*CLI.subcommands(), *SUBCOMMANDS]))}\n")
        sys.stderr.write(f"All options: {parser.prog.replace(' [options]', '')} --help\n")
        raise SystemExit(BAD_INPUT)


class SaveConfig(SaveConfigCallback):
    """Writes the configuration of the run to ``config.yaml`` in its log folder.

    Holds the text, not the parser, so that it can be sent to processes that the strategy starts.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, filename: str = "config.yaml") -> None:
        self.text = parser.dump(config, skip_none=False)
        self.filename = filename

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file, on rank 0, when the run has a log folder."""
        folder = trainer.log_dir  # asks rank 0, so every rank must get here
        if folder is None or not trainer.loggers or not trainer.is_global_zero:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, self.filename).write_text(self.text)


class CLI(LightningCLI):
    """LightningCLI that trains with :class:`ThreeDStrategy` unless told otherwise, for any model and any data."""

    def __init__(self, args: ArgsType = None) -> None:
        self._refused: Exception | None = None
        options: dict[str, Any] = {"allow_abbrev": False, "default_env": True}
        super().__init__(
            args=args,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=42,
            save_config_callback=SaveConfig,
            trainer_defaults={"strategy": {"class_path": STRATEGY}},
            parser_kwargs={
                "prog": PROG,
                "description": "Train, validate, test or predict with 3D parallelism.",
                **options,
                **{name: dict(options) for name in self.subcommands()},
            },
        )

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Make a parser; before 2.6 Lightning takes no class of them."""
        kwargs.setdefault("dump_header", [f"lightning.pytorch=={lightning.pytorch.__version__}"])
        parser = Parser(**kwargs)
        what = "Path to a configuration file in json or yaml format."
        parser.add_argument("-c", "--config", action=ActionConfigFile, help=what)
        return parser

    @override
    @staticmethod
    def configure_optimizers(
        lightning_module: LightningModule, optimizer: Optimizer, lr_scheduler: LRSchedulerTypeUnion | None = None
    ) -> Any:
        """Return what ``--optimizer`` and ``--lr_scheduler`` name, for the module's ``configure_optimizers``."""
        if isinstance(lr_scheduler, BatchScaledLR):
            return lr_scheduler.configured()
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, environment variables and files, in that order of weight.

        Raises:
            ConfigError: A file cannot be one, or a variable or the strategy has a name that does not exist.
        """
        check_config_files(sys.argv[1:] if args is None else cast(Sequence[str], args))
        check_environment(parser, self.subcommands())
        super().parse_arguments(parser, args)
        chosen = self.config[self.config.subcommand]
        if isinstance(chosen.trainer.strategy, str):
            check_strategy(chosen.trainer.strategy)
        path = chosen.get("ckpt_path")
        if path and path not in CHOSEN_BY_TRAINER and ":" not in path and not given_path(path).exists():
            raise ConfigError(
                f"--ckpt_path {path}: there is no such checkpoint, seen from {os.getcwd()}. Give the path of one, or"
                f" one of {', '.join(CHOSEN_BY_TRAINER)}."
            )

    @override
    def before_instantiate_classes(self) -> None:
        """Keep the first error of a constructor: jsonargparse would answer with a list of all types that it tried."""
        builders: dict[type, Callable[..., Any]] = {kind: _build for kind in (Strategy, Callback, Logger)}
        builders[LightningModule] = _InstantiatorFn(cli=self, key="model")
        builders[LightningDataModule] = _InstantiatorFn(cli=self, key="data")
        for kind, build in builders.items():
            self.parser.add_instantiator(self._remember(build), kind, prepend=True)

    def _remember(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def construct(class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
            passes = build is not _build and _TAKES_LINKS
            links = {"applied_instantiation_links": applied_instantiation_links} if passes else {}
            try:
                return build(class_type, *args, **links, **kwargs)
            except Exception as error:
                self._refused = self._refused or error
                raise

        return construct

    @override
    def instantiate_classes(self) -> None:
        """Build Trainer, model and data.

        Raises:
            ConfigError: A constructor did not accept its arguments.
        """
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            refused = self._refused or error
            if isinstance(refused, ThreeDError):
                raise refused from None
            if isinstance(refused, (ValueError, MisconfigurationException)):
                raise ConfigError(str(refused)) from refused
            raise refused from None


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        args: What follows the name of the command; by default from ``sys.argv``.
    """
    given = list(sys.argv[1:] if args is None else args)
    if given[:1] == ["--version"]:
        sys.stdout.write(f"{PROG} {lightning_3d.__version__}\n")
        return SUCCESS
    try:
        if given and given[0] in SUBCOMMANDS:
            return _run(SUBCOMMANDS[given[0]], given[1:])
        if given and _is_unknown(given[0]):
            commands = sorted([*CLI.subcommands(), *SUBCOMMANDS])
            raise ConfigError(
                f"{given[0]!r} is not a command.{suggest(given[0], commands, '')} There are: {', '.join(commands)}."
            )
        CLI(None if args is None and _HELP not in given else _help_of_strategy(given))
    except (ThreeDError, MisconfigurationException) as error:
        if _debug():
            raise
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    return SUCCESS


def _is_unknown(word: str) -> bool:
    return not word.startswith("-") and word not in CLI.subcommands()


def _help_of_strategy(words: Sequence[str]) -> list[str]:
    """``--trainer.strategy.help`` without a class is about ours; the parser would show what all strategies have."""
    after = [*words, "--"][1:]
    return [
        f"{word}={STRATEGY}" if word == _HELP and following.startswith("-") else word
        for word, following in zip(words, after, strict=True)
    ]


def _run(run: Callable[[list[str]], int], args: list[str]) -> int:
    """Run a command that trains nothing: files that cannot be read or written are the caller's to put right."""
    try:
        try:
            return run(args)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough; what is still buffered must not complain when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    except OSError as error:
        if _debug():
            raise
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT


def _summary(run: Callable[..., Any]) -> str:
    return (run.__doc__ or "").strip().splitlines()[0]


def _build(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def _debug() -> bool:
    # jsonargparse's own switch: with it, its errors and ours come as tracebacks
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false", "no")
