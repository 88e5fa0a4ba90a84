"""``lightning-3d doctor``: what the strategy would do with a model, and whether a cut model keeps its numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.cli.command import BAD_INPUT, FAILURE, SUCCESS, Parser
from lightning_3d.cli.config_files import read_recipe
from lightning_3d.cli.doctor_report import render
from lightning_3d.cli.examination import examine
from lightning_3d.cli.model_choice import (
    BuiltModel,
    build_class,
    build_hugging_face,
    check_required,
    find_function,
    import_file_class,
)
from lightning_3d.config import ParallelConfig
from lightning_3d.errors import ConfigError

_SHORT = {"--tp": "--tensor_parallel", "--pp": "--pipeline_parallel", "--dp": "--data_parallel"}
_DESCRIPTION = """Show what the 3D strategy would do with a model: the blocks it finds, what becomes of every layer and
why, what each pipeline stage holds, which weights are tied, and whether blocks that are cut over tensor-parallel ranks
compute what the whole ones do. It runs on the CPU, without a cluster; nothing is trained. Without sizes it looks at two
stages and two tensor-parallel ranks. Exit code 0: all is well; 1: a check failed; 2: the input cannot work."""
_EPILOG = """examples:
  lightning-3d doctor --model llama --tp 2 --pp 2
  lightning-3d doctor --model my_project.MyModule --model.width 512 --tp 4
  lightning-3d doctor --model train.py:MyModule --pp 4 --pipeline_split profile --json
  lightning-3d doctor --config recipes/quickstart.yaml"""


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Args:
        args: What follows ``doctor``.

    Raises:
        ConfigError: for a model that cannot be found or built, or options that are not known.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr) if "--json" in args else contextlib.nullcontext():
            given = _parse(list(args))
    except SystemExit as exit:  # of --help, or of an argument that the parser has refused
        return int(exit.code or SUCCESS)
    # The user's code may print, and stdout is for the answer; ranks are forks, which lack the threads of this process.
    with contextlib.redirect_stdout(sys.stderr), _one_thread():
        model = given.build()
        sizes = given.config.sizes(given.world, given.world)
        if left := [name for name in ("tensor_parallel", "pipeline_parallel") if getattr(given.config, name) == "auto"]:
            sys.stderr.write(
                f"note: left 'auto' and taken to be 1 here: {', '.join(left)}. A run chooses for its devices, and"
                " `lightning-3d dry-run --cluster` tells what.\n"
            )
        found = examine(model.module, model.title, given.config, sizes)
    if given.as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        render(found)
        sys.stdout.flush()
    for problem in found.problems:
        sys.stderr.write(f"error: {problem.part}: {problem.message}\n")
    return BAD_INPUT if found.is_input_wrong else FAILURE if found.problems else SUCCESS


def build_model(args: Sequence[str]) -> BuiltModel:
    """Build the model that arguments of this command name, for other commands.

    Raises:
        ConfigError: as `main`.
    """
    return _parse(list(args)).build()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class _Request:
    config: ParallelConfig
    as_json: bool
    on_meta: bool
    hf_config: str | None
    choice: str
    model: Any
    """What the parser made of the arguments of a class, with the parser; ``None`` for a Hugging Face type."""
    function: Callable[..., Any] | None = None
    """What makes the model, if it is no class."""

    @property
    def world(self) -> int:
        """Ranks in all; data parallelism is 1 unless it is given."""
        sizes = (self.config.tensor_parallel, self.config.pipeline_parallel, self.config.data_parallel)
        count = 1
        for size in sizes:
            count *= 1 if isinstance(size, str) else size
        return count

    def build(self) -> BuiltModel:
        if self.model is None:
            return build_hugging_face(self.choice, self.hf_config)
        parser, arguments = self.model
        refused: list[Exception] = []

        def construct(kind: type, *args: Any, applied_instantiation_links: Any = None, **kwargs: Any) -> Any:
            try:
                return kind(*args, **kwargs)
            except Exception as error:  # jsonargparse would answer with all types that it has tried
                refused.append(error)
                raise

        def make() -> Any:
            parser.add_instantiator(construct, nn.Module, prepend=True)
            if self.function is not None:
                with torch.device("meta") if self.on_meta else contextlib.nullcontext():
                    return self.function(**(arguments.get("model") or {}))
            try:
                instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its new name
                with torch.device("meta") if self.on_meta else contextlib.nullcontext():
                    return instantiate(arguments).model
            except Exception as error:
                raise (refused or [error])[0] from None

        return build_class(self.choice, make)


def _parse(args: list[str]) -> _Request:
    args = [_long(arg) for arg in args]
    named = _take(args, "--config")
    recipe = {} if named is None else read_recipe(named, "to examine")
    wanted, options = _model_of(recipe), _strategy_of(recipe)
    given = _take(args, "--model")
    if given is not None:
        wanted = {"class_path": given}
    choice = wanted.get("class_path", "")
    is_help = any(arg in ("-h", "--help") for arg in args)
    if not choice and not is_help:
        raise ConfigError(
            "doctor needs --model (package.module.Class, file.py:Class or a type such as llama) or --config."
        )
    hugging_face = bool(choice) and ":" not in choice and "." not in choice and not _is_short_name(choice)
    path = import_file_class(choice) if ":" in choice else choice
    function = find_function(path) if "." in path and not hugging_face else None
    if choice and not hugging_face and not is_help and "." in path:
        given_names = {arg.removeprefix("--model.").split("=")[0].split(".")[0] for arg in args if "--model." in arg}
        check_required(path, given_names | set(wanted.get("init_args") or {}))
    parser = _parser(None if hugging_face or not choice else path, function)
    if function is not None:
        parser.set_defaults({f"model.{name}": value for name, value in (wanted.get("init_args") or {}).items()})
    elif choice and not hugging_face:
        args = ["--model", json.dumps({**wanted, "class_path": path}), *args]
    for name, value in options.items():
        parser.set_defaults({name: value})
    parsed = parser.parse_args(args)
    values = {item.name: parsed[item.name] for item in dataclasses.fields(ParallelConfig)}
    if all(values[name] == "auto" for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")) and not recipe:
        values.update(tensor_parallel=2, pipeline_parallel=2)
    model = None if hugging_face else (parser, parsed)
    return _Request(ParallelConfig(**values), parsed.json, parsed.meta, parsed.hf_config, choice, model, function)


def _parser(choice: str | None, function: Callable[..., Any] | None = None) -> Parser:
    parser = Parser(prog="lightning-3d doctor", description=_DESCRIPTION, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--meta", action="store_true", help="build a class without memory, for models that do not fit")
    parser.add_argument("--hf_config", type=str, default=None, help=_HF_HELP)
    if choice is None:
        parser.add_argument("--model", type=str, default=None, help=_MODEL_HELP)
    elif function is not None:
        parser.add_function_arguments(function, "model", fail_untyped=False)
    else:
        # A name without dots is looked for among the known subclasses, of which there are few of this one.
        base = nn.Module if "." in choice else LightningModule
        parser.add_subclass_arguments(base, "model", required=True, help=_MODEL_HELP)
    parser.add_argument("--config", type=str, default=None, help="a recipe whose model and strategy are examined")
    parser.add_class_arguments(ParallelConfig, None, help="Options of the strategy (--tp, --pp and --dp for short)")
    return parser


_MODEL_HELP = (
    "package.module.Class or file.py:Class, or a function that returns a model, with --model.ARGUMENT VALUE for what it"
    " takes; or a Hugging Face type"
)
_HF_HELP = "JSON file, folder or text: the configuration of a Hugging Face model, or what to change in the small one"


def _long(arg: str) -> str:
    name, sign, value = arg.partition("=")
    name = "--hf_config" if name == "--hf-config" else _SHORT.get(name, name)
    return name + sign + value


def _take(args: list[str], name: str) -> str | None:
    """Take every ``--name value`` and ``--name=value`` out of ``args``; gives the last."""
    found = None
    for index in reversed(range(len(args))):
        if args[index].startswith(f"{name}="):
            value = args.pop(index).partition("=")[2]
            found = found or value
        elif args[index] == name and index + 1 < len(args):
            value = args.pop(index + 1)
            args.pop(index)
            found = found or value
    return found


def _is_short_name(choice: str) -> bool:
    """Whether ``choice`` is the name of one of our own models, as recipes have them."""
    import lightning_3d.models

    return isinstance(getattr(lightning_3d.models, choice, None), type)


def _model_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    model = recipe.get("model", {})
    return {"class_path": model} if isinstance(model, str) else dict(model)


def _strategy_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    strategy = (recipe.get("trainer") or {}).get("strategy")
    options = cast("dict[str, Any]", strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
    known = {item.name for item in dataclasses.fields(ParallelConfig)}
    return {name: value for name, value in options.items() if name in known}
