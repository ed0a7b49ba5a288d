"""``ppl-eval``: what goes on around a run. The run itself is ``tune run ppl_eval``."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from ppl_eval import __version__, boundary, shipped
from ppl_eval.config.command_line import load, load_for_run
from ppl_eval.config.reference import full_config
from ppl_eval.errors import UserError


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
    parser = argparse.ArgumentParser(
        prog="ppl-eval",
        description=__doc__,
        epilog=_examples("ls", "check --config tiny_ppl_eval"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ppl_eval {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, what: str, *examples: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=_examples(*(f"{name} {example}".strip() for example in examples)),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    ls = command("ls", "list the shipped recipes and configs", "")
    ls.set_defaults(run=lambda args: _ls())

    cp = command(
        "cp",
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
    cp.set_defaults(
        run=lambda args: _cp(
            args.name,
            args.destination,
            full=args.full,
            keep=args.no_clobber,
            make_parents=args.make_parents,
        )
    )

    where = command("where", "print the folder of an embedded model or text", "tiny_teacher")
    where.add_argument("name", help=f"one of {', '.join(shipped.EMBEDDED)}")
    where.set_defaults(run=lambda args: print(shipped.embedded_path(args.name)))

    check = command(
        "check",
        "all of a run that needs no weights",
        "--config tiny_ppl_eval",
        "--config auto_ppl_eval checkpoint_dir=DIR dataset.data_files=FILE.jsonl --num-processes 2",
    )
    check.add_argument("--config", required=True, metavar="NAME_OR_PATH")
    check.add_argument("--num-processes", type=int, default=1, help="that the run would have")
    check.add_argument("overrides", nargs="*", metavar="key=value")
    check.set_defaults(run=lambda args: _check(args.config, args.overrides, args.num_processes))

    plan = command(
        "plan",
        "meshes that fit: memory and communication of each",
        "--config llama3_1/8B_ppl_eval --num-processes 8 --device-memory-gib 24",
    )
    plan.add_argument("--config", required=True, metavar="NAME_OR_PATH")
    plan.add_argument("--num-processes", type=int, required=True, help="devices in all")
    memory = plan.add_mutually_exclusive_group(required=True)
    memory.add_argument("--device-memory-gib", type=float, metavar="G")
    memory.add_argument("--device-memory-mib", type=float, metavar="M")
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.set_defaults(run=_plan)

    compare = command(
        "compare",
        "show several runs as one table",
        "out/student out/teacher",
        "out/*/results.json --domains",
    )
    compare.add_argument("results", nargs="+", type=_path, help="output folders or results.json")
    compare.add_argument("--domains", action="store_true", help="with a row for each domain")
    compare.set_defaults(run=lambda args: _compare(args.results, with_domains=args.domains))
    return parser


def _examples(*commands: str) -> str:
    return "\n".join(["examples:", *(f"  ppl-eval {command}" for command in commands)])


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _ls() -> None:
    print(f"{'RECIPE':<24}CONFIG")
    names = shipped.config_names()
    for recipe in shipped.RECIPES:
        for number, name in enumerate(names):
            print(f"{recipe if number == 0 else '':<24}{name}")


def _cp(name: str, destination: Path, *, full: bool, keep: bool, make_parents: bool) -> None:
    if name in shipped.RECIPES:
        source, suffix = shipped.recipe_path(name), ".py"
    elif name in shipped.config_names():
        source, suffix = shipped.config_path(name), ".yaml"
    else:
        raise UserError(f"{name!r} is no shipped recipe or config: `ppl-eval ls` lists them")
    if full and suffix == ".py":
        raise UserError(f"--full is for a config, and {name} is a recipe: leave it out")
    if destination.is_dir():
        destination = destination / (f"{name}.py" if suffix == ".py" else source.name)
    elif destination.suffix != suffix:
        destination = destination.with_name(destination.name + suffix)
    if keep and destination.exists():
        print(f"{destination} is there already and was left as it is")
        return
    try:
        if make_parents:
            destination.parent.mkdir(parents=True, exist_ok=True)
        if full:
            destination.write_text(full_config(name), encoding="utf-8")
        else:
            shutil.copyfile(source, destination)
    except OSError as error:
        hint = "" if destination.parent.is_dir() else "; --make-parents creates the folder"
        raise UserError(f"cannot write {destination}: {error.strerror}{hint}") from error
    print(f"copied to {destination}")


def _check(config: str, overrides: Sequence[str], num_processes: int) -> None:
    if num_processes < 1:
        raise UserError(f"--num-processes is {num_processes}, but it is at least 1")
    args = ["--config", config, *overrides]
    load_for_run(args)  # a mistake is told before torch is imported

    from ppl_eval.evaluation.preflight import describe

    print(describe(args, num_processes))


def _plan(args: argparse.Namespace) -> None:
    load(["--config", args.config, *args.overrides])  # as above

    from ppl_eval.commands.plan import describe

    memory = args.device_memory_mib or 1024 * (args.device_memory_gib or 0)
    print(describe(["--config", args.config, *args.overrides], args.num_processes, memory))


def _compare(paths: Sequence[Path], *, with_domains: bool) -> None:
    from ppl_eval.commands.compare import compare

    print(compare(paths, with_domains=with_domains))


if __name__ == "__main__":
    main()
