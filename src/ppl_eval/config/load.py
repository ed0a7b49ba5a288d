"""The way from a command line to a checked config.

A YAML file plus ``key=value`` and ``~key`` overrides become one :class:`EvalConfig`. The schema is
strict: a key that is not in it is an error that names the nearest one that is.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval import __version__, boundary, components, shipped
from ppl_eval.checkpoint.weight_files import need_folder
from ppl_eval.config import from_folder, limits, overrides
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.corpus import check_files
from ppl_eval.data.protocol import rule_of
from ppl_eval.errors import UserError
from ppl_eval.hints import HINTS, of_torchtune

_DEFAULT_LOGGER = "torchtune.training.metric_logging.DiskLogger"
_DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
_DTYPES |= {f"torch.{name}": short for name, short in _DTYPES.items()}
_EXAMPLES = """examples:
  python -m ppl_eval --config tiny_ppl_eval
  tune run ppl_eval --config auto_ppl_eval checkpoint_dir=DIR dataset.data_files=FILE.jsonl
  tune run --nproc_per_node 4 ppl_eval --config smollm2/135M_ppl_eval parallel.tp=2 dtype=bf16
  tune run ppl_eval --config tiny_ppl_eval model=my_models.builder ~model.norm_eps

`ppl-eval ls` lists the configs, `ppl-eval check` tells what a run would do."""


def parse(recipe_main: Callable[[EvalConfig], None]) -> Callable[[], None]:
    """Decorator of a recipe's ``main``: read the command line, then run it behind one boundary.

    It stands where torchtune's ``config.parse`` would: that one opens the YAML file before the
    recipe runs, so it knows neither our config names nor our schema. A user's copy of the recipe
    gets both as well.

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

    torch is not imported for it, unless a component of one's own can only be known that way.

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
    if "log_level=DEBUG" in arguments:  # also for what is wrong with the config itself
        boundary.set_log_level("DEBUG")
    content: Any = OmegaConf.to_container(read_yaml(shipped.config_path(known.config)))
    text_keys = [key for key, kind in known_keys().items() if kind in (str, str | None)]
    spelled = overrides.apply(content, arguments, text_keys)
    config = to_config(content, spelled)
    _refuse_ignored_folder(config, arguments)
    boundary.set_log_level(config.log_level)
    return config


def load_for_run(args: Sequence[str]) -> EvalConfig:
    """As :func:`load`; the folders and files that it names are there.

    Raises:
        UserError: also what is wrong with a path.
    """
    config = load(args)
    for key, node in (
        ("checkpoint_dir", config.checkpointer),
        ("teacher_checkpoint_dir", config.teacher_checkpointer),
    ):
        folder = node.get("checkpoint_dir")
        # a component of one's own may mean something else by it
        if str(node.get("_component_")).startswith("torchtune.") and isinstance(folder, str):
            need_folder(folder, key)
    if config.adapter.dir is not None:
        need_folder(config.adapter.dir, "adapter.dir")
    for node in (config.dataset, *config.dataset.get("corpora", {}).values()):
        if node["_component_"] == "ppl_eval.data.text_corpus":
            check_files(node)
    return config


def _refuse_ignored_folder(config: EvalConfig, arguments: Sequence[str]) -> None:
    """A config that names its folder elsewhere would measure another model than asked for."""
    for whose in ("", "teacher_"):
        asked = getattr(config, f"{whose}checkpoint_dir")
        used = getattr(config, f"{whose}checkpointer").get("checkpoint_dir")
        if used != asked and any(o.startswith(f"{whose}checkpoint_dir=") for o in arguments):
            raise UserError(
                f"{whose}checkpoint_dir is {asked}, but the {whose}checkpointer section names"
                f" {used}: set {whose}checkpointer.checkpoint_dir instead"
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: {self.format_usage().removeprefix('usage: ').strip()}")


def read_yaml(path: Path) -> DictConfig:
    """A YAML file as a mapping, interpolations not yet resolved."""
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise UserError(f"{path} holds a list or a single value: a config is a mapping of keys")
    return content


def to_config(content: dict[str, Any], spelled: Mapping[str, str] | None = None) -> EvalConfig:
    """Merge a mapping into the schema, resolve interpolations, and check every value.

    Args:
        content: of a config file, after the command line.
        spelled: numbers and booleans of the command line as typed, by dotted key.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of range, a component that does
            not exist or does not take an argument.
    """
    content = _expand_home(content)
    if content.get("fail_if", {}) is None:
        content["fail_if"] = {}
    _check_keys(content, EvalConfig)
    for key, value in _leaves(content):
        if value == "???":
            raise UserError(f"{key} is ???, a value that is still to be set: write {key}=VALUE")
        if known_keys().get(key) in (str, str | None) and isinstance(value, bool | int | float):
            raise UserError(f"{key} is {value!r}, but it is text: put it in quotes")
    if isinstance(content.get("dataset"), list):
        content["dataset"] = _named(content["dataset"])
    if content.get("metric_logger", {}) == {}:
        content["metric_logger"] = {"_component_": _DEFAULT_LOGGER}
    _register_resolver()
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvalConfig), OmegaConf.create(content))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"config: {where}{(error.msg or str(error)).splitlines()[0]}") from error
    assert isinstance(config, EvalConfig)
    _check_values(config)
    from_folder.from_folder(config)
    from_folder.teacher_from_folder(config)
    _check_teacher(config)
    _check_components(config, spelled or {})
    return config


def _check_components(config: EvalConfig, spelled: Mapping[str, str]) -> None:
    """Complete the sections and compare them with what their components take."""
    for key in config.components:
        node = getattr(config, key)
        if not node.get("_component_"):
            raise UserError(f"config: {key} has no _component_ (the import path of what builds it)")
        if key.endswith("checkpointer"):
            from_folder.checkpointer(node, key)
        if key == "metric_logger" and "log_dir" in components.lacks(node, key):
            node["log_dir"] = f"{config.output_dir}/logs"
        for name in node:
            if f"{key}.{name}" in spelled and components.takes_text(node, key, name):
                node[name] = spelled[f"{key}.{name}"]
        supplied = ("tokenizer",) if key == "dataset" else ()
        components.check(node, key, supplied=supplied)
    for name, node in config.dataset.get("corpora", {}).items():
        components.check(node, f"dataset {name}", supplied=("tokenizer",))


def _expand_home(node: Any) -> Any:
    """``~/x`` and ``~user/x`` as the folder that is meant, in every value."""
    if isinstance(node, dict):
        return {key: _expand_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_expand_home(value) for value in node]
    is_path = isinstance(node, str) and node.startswith("~") and "/" in node
    return os.path.expanduser(node) if is_path else node


def _leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is no mapping and no list."""
    if not isinstance(node, dict | list):
        yield key, node
        return
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def _named(datasets: list[Any]) -> dict[str, Any]:
    """A list of data sets with names as one component."""
    corpora: dict[str, Any] = {}
    for node in datasets:
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise UserError(
                f"config: dataset is a list, and one of it is {node!r:.80}, but each is a data set"
                " with a name and a _component_"
            )
        rest = {key: value for key, value in node.items() if key != "name"}
        if node["name"] in corpora:
            raise UserError(f"config: two of dataset are called {node['name']}: names differ")
        corpora[node["name"]] = {"_component_": "ppl_eval.data.text_corpus", **rest}
    return {"_component_": "ppl_eval.data.named_corpora", "corpora": corpora}


def _register_resolver() -> None:
    """``${embedded:NAME}`` in a config is the folder of an embedded checkpoint or text."""
    if OmegaConf.has_resolver("embedded"):
        return
    # OmegaConf 2.4 renamed register_new_resolver
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("embedded", lambda name: str(shipped.embedded_path(name)))


@functools.cache
def known_keys(schema: type = EvalConfig, prefix: str = "") -> dict[str, Any]:
    """All dotted keys of the schema and their types, down to where components' arguments begin."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(schema):
        found[prefix + item.name] = item.type
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            found |= known_keys(item.type, f"{prefix}{item.name}.")
    return found


def _check_keys(node: Any, schema: type, prefix: str = "") -> None:
    fields = {item.name: item.type for item in dataclasses.fields(schema)}
    for key in node:
        if key not in fields:
            raise UserError(f"unknown config key {prefix}{key}{_suggest(f'{prefix}{key}')}")
        inner, value = fields[str(key)], node[key]
        is_section = isinstance(inner, type) and dataclasses.is_dataclass(inner)
        takes = (dict, list) if key == "dataset" else dict
        kinds = typing.get_args(inner) if isinstance(inner, types.UnionType) else (inner,)
        is_mapping = isinstance(value, takes) or (isinstance(value, str) and "${" in value)
        is_mapping |= value is None and types.NoneType in kinds
        if (is_section or dict[str, Any] in kinds) and not is_mapping:
            raise UserError(f"config: {prefix}{key} is {value!r}, but it is a mapping of keys")
        if isinstance(inner, type) and is_section and isinstance(value, dict):
            _check_keys(value, inner, f"{prefix}{key}.")


def _suggest(dotted: str) -> str:
    keys = list(known_keys())
    leaf = dotted.split(".")[-1]
    if leaf in HINTS:
        return of_torchtune(leaf)
    elsewhere = [key for key in keys if key.split(".")[-1] == leaf]
    close = elsewhere or difflib.get_close_matches(dotted, keys, n=1)
    if not close:
        by_leaf = {key.split(".")[-1]: key for key in keys}
        close = [by_leaf[k] for k in difflib.get_close_matches(leaf, list(by_leaf), n=1)]
    return f"; did you mean {close[0]}?" if close else ""


def _check_values(config: EvalConfig) -> None:
    def one_of(key: str, value: object, allowed: Sequence[object]) -> None:
        if value not in allowed:
            raise UserError(f"{key} is {value!r}, but it is one of {', '.join(map(str, allowed))}")

    def at_least(key: str, value: float | None, least: float) -> None:
        if value is not None and value < least:
            raise UserError(f"{key} is {value}, but it is at least {least}")

    for key in ("dtype", "teacher_dtype", "logits_dtype"):
        value = getattr(config, key)
        setattr(config, key, _DTYPES.get(value, value))
    for key in ("output_dir", "checkpoint_dir", "teacher_checkpoint_dir"):
        if getattr(config, key) == "":
            raise UserError(f"{key} is empty: write . for the current folder")
    rule_of(config.protocol.name)  # refuses an unknown name
    one_of("dtype", config.dtype, ("fp32", "bf16", "fp16"))
    one_of("teacher_dtype", config.teacher_dtype, (None, "fp32", "bf16", "fp16"))
    one_of("logits_dtype", config.logits_dtype, ("fp32", "model"))
    one_of("process_group.backend", config.process_group.backend, ("auto", "gloo", "nccl"))
    one_of("log_level", config.log_level, ("DEBUG", "INFO", "WARNING", "ERROR"))
    at_least("process_group.timeout_s", config.process_group.timeout_s, 1)
    at_least("max_tokens_per_batch", config.max_tokens_per_batch, 1)
    at_least("max_documents", config.max_documents, 1)
    at_least("log_every_n_steps", config.log_every_n_steps, 1)
    at_least("log_every_s", config.log_every_s, 0)
    at_least("seed", config.seed, 0)
    at_least("teacher_parallel.tp", config.teacher_parallel.tp, 1)
    at_least("teacher_parallel.cp", config.teacher_parallel.cp, 1)
    at_least("bootstrap.resamples", config.bootstrap.resamples, 0)
    at_least("bootstrap.seed", config.bootstrap.seed, 0)
    if config.seed >= 2**63:
        raise UserError(f"seed is {config.seed}, but it is below 2**63")
    config.fail_if = dict(_leaves(config.fail_if))
    limits.check_limits(config.fail_if, config.protocol.name)
    for key, value in _leaves(dataclasses.asdict(config)):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}, but it is a finite number")


def _check_teacher(config: EvalConfig) -> None:
    if config.has_teacher:
        if config.logits_dtype != "fp32":
            raise UserError(
                f"logits_dtype is {config.logits_dtype}, but beside a teacher logits are fp32: the"
                " rounding of bf16 logits is as large as what is measured; set logits_dtype=fp32"
            )
        return
    asked = [key for key in config.fail_if if key.startswith(("fidelity.", "teacher."))]
    asked += [
        f"teacher_parallel.{name}"
        for name, value in dataclasses.asdict(config.teacher_parallel).items()
        if value is not None
    ]
    asked += ["teacher_dtype"] if config.teacher_dtype is not None else []
    if asked:
        raise UserError(
            f"{asked[0]} is set, but there is no teacher: set teacher_checkpoint_dir=DIR"
        )
