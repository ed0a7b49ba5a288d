"""``ppl-eval``: the commands around a run. The run itself is ``tune run ppl_eval``.

The docstring of a command is its help text: a summary and examples. Commands that need torch
import it in their function, after the command line has been checked.
"""

import argparse
import inspect
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppl_eval import __version__, boundary, shipped
from ppl_eval.config.command_line import load, load_for_run
from ppl_eval.config.reference import full_config
from ppl_eval.errors import UserError
from ppl_eval.plural import counted


def main() -> None:
    """Entry point of the ``ppl-eval`` command."""
    boundary.guarded(_run, alone=True)


def _run() -> None:
    parser = _parser()
    args, rest = parser.parse_known_args()  # overrides may stand between options
    if rest and "overrides" not in args:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # an unknown option first: the error must be about it, not about its value
        args.overrides = sorted([*args.overrides, *rest], key=lambda text: not text.startswith("-"))
    args.run(args)


def _ls(args: argparse.Namespace) -> None:
    """List the shipped recipes and configs.

    ppl-eval ls
    """
    print(f"{'RECIPE':<24}CONFIG")
    for recipe in shipped.RECIPES:
        for number, name in enumerate(shipped.config_names()):
            print(f"{recipe if number == 0 else '':<24}{name}")


def _cp(args: argparse.Namespace) -> None:
    """Copy a shipped recipe or config to edit it.

    ppl-eval cp smollm2/135M_ppl_eval mine.yaml
    ppl-eval cp --full auto_ppl_eval mine.yaml
    ppl-eval cp ppl_eval my_recipe.py
    """
    name, destination = args.name, args.destination
    if name in shipped.RECIPES:
        source, suffix = shipped.recipe_path(name), ".py"
    elif name in shipped.config_names():
        source, suffix = shipped.config_path(name), ".yaml"
    else:
        raise UserError(f"{name!r} is no shipped recipe or config: `ppl-eval ls` lists them")
    if args.full and suffix == ".py":
        raise UserError(f"--full is for a config, and {name} is a recipe: leave it out")
    if destination.is_dir():
        destination = destination / f"{Path(name).name}{suffix}"
    elif destination.suffix != suffix:
        destination = destination.with_name(destination.name + suffix)
    if args.no_clobber and destination.exists():
        print(f"{destination} is there already and was left as it is")
        return
    try:
        if args.make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
        if args.full:
            destination.write_text(full_config(name), encoding="utf-8")
        else:
            shutil.copyfile(source, destination)
    except OSError as error:
        hint = "" if destination.parent.is_dir() else "; --make-parents creates the folder"
        raise UserError(f"cannot write {destination}: {error.strerror}{hint}") from error
    print(f"copied to {destination}")


def _where(args: argparse.Namespace) -> None:
    """Print the folder of an embedded model or text.

    ppl-eval where tiny_teacher
    """
    print(shipped.embedded_path(args.name))


def _check(args: argparse.Namespace) -> None:
    """Show what a run would do, without reading weights.

    ppl-eval check --config tiny_ppl_eval --num-processes 2
    ppl-eval check --config auto_ppl_eval checkpoint_dir=DIR dataset.data_files=FILE.jsonl
    """
    if args.num_processes < 1:
        raise UserError(f"--num-processes is {args.num_processes}, but it is at least 1")
    cfg = load_for_run(["--config", args.config, *args.overrides])
    from ppl_eval.commands.check import check

    print(check(cfg, args.num_processes))


def _plan(args: argparse.Namespace) -> None:
    """Show the meshes that fit, with memory and communication of each.

    ppl-eval plan --config llama3_1/8B_ppl_eval --num-processes 8 --device-memory-gib 24
    """
    gib, mib = args.device_memory_gib, args.device_memory_mib
    if (gib is None) == (mib is None):
        raise UserError("give one of --device-memory-gib G and --device-memory-mib M")
    cfg = load(["--config", args.config, *args.overrides])
    from ppl_eval.commands.plan import plan

    print(plan(cfg, args.num_processes, mib or 1024 * (gib or 0)))


def _compare(args: argparse.Namespace) -> None:
    """Show several runs as one table, and say which differences are established.

    ppl-eval compare out/before out/after
    ppl-eval compare out/*/ --baseline out/teacher --sort bits_per_byte --format markdown
    """
    if len(args.baseline or ()) > 1:
        raise UserError(f"--baseline is given {len(args.baseline)} times, but there is one")
    from ppl_eval.commands.compare import compare

    print(
        compare(
            args.results,
            baseline=args.baseline[0] if args.baseline else None,
            sort=args.sort,
            format=args.format,
            with_domains=args.domains,
            force=args.force,
        )
    )


def _verify(args: argparse.Namespace) -> None:
    """Score windows of a finished run again, by other code in one process.

    ppl-eval verify out/student
    ppl-eval verify out/student --windows all
    """
    from ppl_eval.report.layout import wrapped
    from ppl_eval.verify.verify import verify_folder

    verdict = verify_folder(args.results, args.windows, args.tolerance)
    print(*wrapped(verdict, indent="  "), sep="\n")


def _drop_layers(args: argparse.Namespace) -> None:
    """Copy a Hugging Face folder without some of the model's layers: a student to distil.

    ppl-eval drop-layers TEACHER STUDENT 2 3
    """
    from ppl_eval.commands.drop_layers import drop_layers

    kept = drop_layers(args.teacher, args.student, args.layers)
    numbers = ", ".join(map(str, kept))
    print(f"{args.student}: {counted(len(kept), 'layer')}, those that were {numbers}")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _windows(text: str) -> int | str:
    return text if text == "all" else int(text)


_CONFIG = {
    "--config": {"required": True, "metavar": "NAME_OR_PATH"},
    "overrides": {"nargs": "*", "metavar": "key=value"},
}
_COMMANDS: dict[Callable[[argparse.Namespace], None], dict[str, dict[str, Any]]] = {
    _ls: {},
    _cp: {
        "name": {"help": "as `ppl-eval ls` shows it"},
        "destination": {"type": _path, "help": "file or existing folder"},
        "--full": {"action": "store_true", "help": "with every key of the config, explained"},
        "-n --no-clobber": {"action": "store_true", "help": "keep a file that is there"},
        "--make-parents": {"action": "store_true", "help": "create missing folders"},
    },
    _where: {"name": {"help": f"one of {', '.join(shipped.EMBEDDED)}"}},
    _check: {"--num-processes": {"type": int, "default": 1, "help": "1 if left out"}} | _CONFIG,
    _plan: {
        "--num-processes": {"type": int, "required": True, "help": "number of devices in all"},
        "--device-memory-gib": {"type": float, "metavar": "G", "help": "GiB of each device"},
        "--device-memory-mib": {"type": float, "metavar": "M", "help": "the same in MiB"},
        **_CONFIG,
    },
    _compare: {
        "results": {"nargs": "+", "type": _path, "help": "output folders or results.json"},
        "--baseline": {
            "type": _path,
            "action": "append",
            "metavar": "DIR",
            "help": "what the others are compared with; the first if left out",
        },
        "--sort": {"metavar": "METRIC", "help": "such as token_perplexity, or name"},
        "--format": {"choices": ("table", "markdown", "csv", "json"), "default": "table"},
        "--domains": {"action": "store_true", "help": "with a row for each domain"},
        "--force": {"action": "store_true", "help": "also runs that cannot be compared; mark them"},
    },
    _verify: {
        "results": {"type": _path, "help": "output folder of the run"},
        "--windows": {"metavar": "K", "type": _windows, "help": "number of windows, or all"},
        "--tolerance": {"type": float, "metavar": "X", "help": "largest relative error of the NLL"},
    },
    _drop_layers: {
        "teacher": {"type": _path, "help": "Hugging Face folder"},
        "student": {"type": _path, "help": "folder to write"},
        "layers": {"type": int, "nargs": "+", "help": "layers to drop, from 0"},
    },
}
"""Command -> the names and options of its arguments, for ``add_argument``."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppl-eval",
        description="The commands around a run. The run itself is `tune run ppl_eval`.",
        epilog="examples:\n  ppl-eval ls\n  ppl-eval check --config tiny_ppl_eval",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppl_eval {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, arguments in _COMMANDS.items():
        summary, examples = (inspect.getdoc(run) or "").split("\n\n")
        command = commands.add_parser(
            run.__name__.removeprefix("_").replace("_", "-"),
            help=summary[0].lower() + summary[1:].removesuffix("."),
            description=summary,
            epilog="examples:\n" + textwrap.indent(examples, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        for names, options in arguments.items():
            command.add_argument(*names.split(), **options)
    return parser


if __name__ == "__main__":
    main()
