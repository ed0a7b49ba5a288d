"""``ppl-eval``: what goes on around a run. The run itself is ``tune run ppl_eval``.

Commands that need torch import it in their function, after the command line has been checked.
"""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

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
    if rest:  # an option that is none first, for the message to be about it and not its value
        args.overrides = sorted([*args.overrides, *rest], key=lambda text: not text.startswith("-"))
    args.run(args)


def _parser() -> argparse.ArgumentParser:
    """Every command: its function, its arguments, and examples."""
    parser = argparse.ArgumentParser(
        prog="ppl-eval",
        description="What goes on around a run. The run itself is `tune run ppl_eval`.",
        epilog=_examples("ls", "check --config tiny_ppl_eval"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppl_eval {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[argparse.Namespace], None], what: str, *examples: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=_examples(*(f"{name} {example}".strip() for example in examples)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    command("ls", _ls, "list the shipped recipes and configs", "")

    cp = command(
        "cp",
        _cp,
        "copy a shipped recipe or config to edit it",
        "smollm2/135M_ppl_eval mine.yaml",
        "--full auto_ppl_eval mine.yaml",
        "ppl_eval my_recipe.py",
    )
    cp.add_argument("name", help="as `ppl-eval ls` shows it")
    cp.add_argument("destination", type=_path, help="file or existing folder")
    cp.add_argument("--full", action="store_true", help="with every key of the config, explained")
    cp.add_argument("-n", "--no-clobber", action="store_true", help="keep a file that is there")
    cp.add_argument("--make-parents", action="store_true", help="create missing folders")

    where = command(
        "where", _where, "print the folder of an embedded model or text", "tiny_teacher"
    )
    where.add_argument("name", help=f"one of {', '.join(shipped.EMBEDDED)}")

    check = command(
        "check",
        _check,
        "all of a run that needs no weights",
        "--config tiny_ppl_eval",
        "--config auto_ppl_eval checkpoint_dir=DIR dataset.data_files=FILE.jsonl --num-processes 2",
    )
    check.add_argument("--num-processes", type=int, default=1, help="that the run would have")

    plan = command(
        "plan",
        _plan,
        "meshes that fit: memory and communication of each",
        "--config llama3_1/8B_ppl_eval --num-processes 8 --device-memory-gib 24",
    )
    plan.add_argument("--num-processes", type=int, required=True, help="devices in all")
    memory = plan.add_mutually_exclusive_group(required=True)
    memory.add_argument("--device-memory-gib", type=float, metavar="G")
    memory.add_argument("--device-memory-mib", type=float, metavar="M")
    for with_config in (check, plan):
        with_config.add_argument("--config", required=True, metavar="NAME_OR_PATH")
        with_config.add_argument("overrides", nargs="*", metavar="key=value")

    compare = command(
        "compare",
        _compare,
        "show several runs as one table",
        "out/student out/teacher",
        "out/*/results.json --domains",
    )
    compare.add_argument("results", nargs="+", type=_path, help="output folders or results.json")
    compare.add_argument("--domains", action="store_true", help="with a row for each domain")

    drop_layers = command(
        "drop-layers",
        _drop_layers,
        "copy a Hugging Face folder without some of the model's layers: a student to distil",
        "TEACHER STUDENT 2 3",
    )
    drop_layers.add_argument("teacher", type=_path, help="Hugging Face folder")
    drop_layers.add_argument("student", type=_path, help="folder to write")
    drop_layers.add_argument("layers", type=int, nargs="+", help="layers to drop, from 0")
    return parser


def _examples(*commands: str) -> str:
    return "\n".join(["examples:", *(f"  ppl-eval {command}" for command in commands)])


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _ls(args: argparse.Namespace) -> None:
    print(f"{'RECIPE':<24}CONFIG")
    names = shipped.config_names()
    for recipe in shipped.RECIPES:
        for number, name in enumerate(names):
            print(f"{recipe if number == 0 else '':<24}{name}")


def _cp(args: argparse.Namespace) -> None:
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
        destination = destination / (f"{name}.py" if suffix == ".py" else source.name)
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
    print(shipped.embedded_path(args.name))


def _check(args: argparse.Namespace) -> None:
    if args.num_processes < 1:
        raise UserError(f"--num-processes is {args.num_processes}, but it is at least 1")
    run_args = ["--config", args.config, *args.overrides]
    load_for_run(run_args)
    from ppl_eval.commands.check import check

    print(check(run_args, args.num_processes))


def _plan(args: argparse.Namespace) -> None:
    run_args = ["--config", args.config, *args.overrides]
    load(run_args)
    from ppl_eval.commands.plan import plan

    memory = args.device_memory_mib or 1024 * (args.device_memory_gib or 0)
    print(plan(run_args, args.num_processes, memory))


def _compare(args: argparse.Namespace) -> None:
    from ppl_eval.commands.compare import compare

    print(compare(args.results, with_domains=args.domains))


def _drop_layers(args: argparse.Namespace) -> None:
    from ppl_eval.commands.drop_layers import drop_layers

    kept = drop_layers(args.teacher, args.student, args.layers)
    numbers = ", ".join(map(str, kept))
    print(f"{args.student}: {counted(len(kept), 'layer')}, those that were {numbers}")


if __name__ == "__main__":
    main()
