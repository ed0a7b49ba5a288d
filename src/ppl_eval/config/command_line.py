"""From a command line to a checked config.

``--config NAME_OR_PATH`` names a YAML file, ``key=value`` and ``~key`` change its content.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf

from ppl_eval import __version__, boundary, shipped
from ppl_eval.checkpoint.weight_files import need_folder
from ppl_eval.config import overrides
from ppl_eval.config.build import build
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.corpus import check_files
from ppl_eval.errors import UserError

_EXAMPLES = """examples:
  python -m ppl_eval --config tiny_ppl_eval
  tune run ppl_eval --config auto_ppl_eval checkpoint_dir=DIR dataset.data_files=FILE.jsonl
  tune run --nproc_per_node 4 ppl_eval --config smollm2/135M_ppl_eval parallel.tp=2 dtype=bf16
  tune run ppl_eval --config tiny_ppl_eval model=my_models.builder ~model.norm_eps

`ppl-eval ls` lists the configs, docs/config.md the keys, and `ppl-eval check` shows what a run
would do."""


def parse(recipe_main: Callable[[EvalConfig], None]) -> Callable[[], None]:
    """Decorator of a recipe's ``main``: read the command line, run, and show errors once.

    It replaces torchtune's ``config.parse``, which opens the YAML file before the recipe runs and
    so knows neither our config names nor our schema. A user's copy of the recipe gets both.

    Example:
        >>> @parse
        ... def recipe_main(cfg: EvalConfig) -> None: ...
        >>> if __name__ == "__main__":
        ...     recipe_main()
    """

    @functools.wraps(recipe_main)
    def main() -> None:
        boundary.guarded(lambda: recipe_main(load_for_run(sys.argv[1:])))

    return main


def load(args: Sequence[str]) -> EvalConfig:
    """The checked config of a command line such as ``--config NAME key=value ~key``.

    torch is imported only where a component's arguments cannot be read from its source.

    Raises:
        UserError: whatever is wrong with the file, a key or a value.
    """
    parser = _Parser(
        prog="tune run ppl_eval",
        usage="%(prog)s --config NAME_OR_PATH key=value ~key",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", required=True, metavar="NAME_OR_PATH", help="as `ppl-eval ls` shows it"
    )
    parser.add_argument("--version", action="version", version=f"ppl_eval {__version__}")
    known, arguments = parser.parse_known_args(args)
    if "log_level=DEBUG" in arguments:  # an error in the config itself then has a traceback
        boundary.set_log_level("DEBUG")
    content = read_yaml(shipped.config_path(known.config))
    config = build(content, overrides.apply(content, arguments))
    _refuse_ignored_folder(config, arguments)
    boundary.set_log_level(config.log_level)
    return config


def load_for_run(args: Sequence[str]) -> EvalConfig:
    """As :func:`load`, and check that the folders and files in the config exist.

    Raises:
        UserError: also what is wrong with a path.
    """
    config = load(args)
    for prefix in ("", "teacher_"):
        node = getattr(config, f"{prefix}checkpointer")
        folder = node.get("checkpoint_dir")
        # a user's component may mean something else by checkpoint_dir
        if str(node.get("_component_")).startswith("torchtune.") and isinstance(folder, str):
            need_folder(folder, f"{prefix}checkpoint_dir")
    if config.adapter.dir is not None:
        need_folder(config.adapter.dir, "adapter.dir")
    for node in (config.dataset, *config.dataset.get("corpora", {}).values()):
        if node["_component_"] == "ppl_eval.data.text_corpus":
            check_files(node)
    return config


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file that holds a mapping, interpolations not yet resolved.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} holds a list or a single value: a config is a mapping of keys")
    return OmegaConf.to_container(content)  # pyright: ignore[reportReturnType]


def _refuse_ignored_folder(config: EvalConfig, arguments: Sequence[str]) -> None:
    """Refuse checkpoint_dir=DIR if the checkpointer section names another folder."""
    for prefix in ("", "teacher_"):
        asked = getattr(config, f"{prefix}checkpoint_dir")
        used = getattr(config, f"{prefix}checkpointer").get("checkpoint_dir")
        if used != asked and any(each.startswith(f"{prefix}checkpoint_dir=") for each in arguments):
            raise UserError(
                f"{prefix}checkpoint_dir is {asked}, but the {prefix}checkpointer section names"
                f" {used}: set {prefix}checkpointer.checkpoint_dir instead"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: {self.format_usage().removeprefix('usage: ').strip()}")
