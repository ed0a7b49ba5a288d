"""The way from a command line to a checked config.

A YAML file plus ``key=value`` and ``~key`` overrides become one :class:`EvalConfig`. The schema is
strict: a key that is not in it is an error that names the nearest one that is.
"""

import argparse
import dataclasses
import difflib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval import components, launch, shipped
from ppl_eval.data.protocol import RULES
from ppl_eval.errors import UserError
from ppl_eval.metrics.names import LIMITED_FIDELITY, METRICS
from ppl_eval.model import auto
from ppl_eval.schema import COMPONENTS, TEACHER_COMPONENTS, EvalConfig

_DEFAULT_LOGGER = {
    "_component_": "torchtune.training.metric_logging.DiskLogger",
    "log_dir": "${output_dir}/logs",
}


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
        launch.guarded(lambda: recipe_main(load(sys.argv[1:])))

    return main


def load(args: Sequence[str]) -> EvalConfig:
    """The checked config of a command line such as ``--config NAME key=value ~key``.

    Raises:
        UserError: whatever is wrong with the file, a key or a value.
    """
    parser = _Parser(
        prog="tune run ppl_eval", usage="%(prog)s --config NAME_OR_PATH key=value ~key"
    )
    parser.add_argument("--config", required=True, metavar="NAME_OR_PATH")
    known, overrides = parser.parse_known_args(args)
    if "log_level=DEBUG" in overrides:  # also for what is wrong with the config itself
        launch.set_log_level("DEBUG")
    path = shipped.config_path(known.config)
    config = to_config(override(read_yaml(path), overrides))
    _refuse_ignored_folder(config, overrides)
    launch.set_log_level(config.log_level)
    return config


def _refuse_ignored_folder(config: EvalConfig, overrides: Sequence[str]) -> None:
    """A config that names its folder elsewhere would measure another model than asked for."""
    for whose in ("", "teacher_"):
        asked = getattr(config, f"{whose}checkpoint_dir")
        used = getattr(config, f"{whose}checkpointer").get("checkpoint_dir")
        if used != asked and any(o.startswith(f"{whose}checkpoint_dir=") for o in overrides):
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


def override(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Apply ``key=value`` and ``~key``, in torchtune's notation.

    ``model=pkg.builder`` replaces the ``_component_`` of ``model``, and ``None`` is null.
    """
    config = config.copy()
    for text in overrides:
        if text.startswith("--"):
            raise UserError(f"{text} is not an option: give --config NAME_OR_PATH and key=value")
        plain: Any = OmegaConf.to_container(config, resolve=False)
        if text.startswith("~"):
            _remove(plain, text[1:].split("=")[0])
            config = OmegaConf.create(plain)
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r} is not an override: write key=value, or ~key to remove one")
        if isinstance(plain.get(key), dict) and "_component_" in plain[key]:
            key += "._component_"
        try:
            parsed = OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"])
            merged = OmegaConf.merge(config, parsed)
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"override {text!r} cannot be read: {reason}") from error
        assert isinstance(merged, DictConfig)
        config = merged
    return config


def _remove(config: dict[str, Any], dotted: str) -> None:
    *parents, last = dotted.split(".")
    node: Any = config
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        raise UserError(f"~{dotted}: the config has no such key to remove{_suggest(dotted)}")
    del node[last]


def to_config(content: DictConfig) -> EvalConfig:
    """Merge a mapping into the schema, resolve interpolations, and check every value.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of range, a component that does
            not exist or does not take an argument.
    """
    plain: Any = OmegaConf.to_container(content, resolve=False)
    _check_keys(plain, EvalConfig)
    if isinstance(plain.get("dataset"), list):
        content = OmegaConf.create({**plain, "dataset": _named(plain["dataset"])})
        plain = OmegaConf.to_container(content, resolve=False)
    if not plain.get("metric_logger"):
        content = OmegaConf.create({**plain, "metric_logger": _DEFAULT_LOGGER})
    _register_resolver()
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvalConfig), content)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"config: {where}{(error.msg or str(error)).splitlines()[0]}") from error
    assert isinstance(config, EvalConfig)
    _complete_from_folder(config)
    _complete_teacher(config)
    _check_values(config)
    _fill_in_checkpointer(config.checkpointer, "checkpointer")
    if config.has_teacher:
        _fill_in_checkpointer(config.teacher_checkpointer, "teacher_checkpointer")
    for key in (*COMPONENTS, *(TEACHER_COMPONENTS if config.has_teacher else ())):
        supplied = ("tokenizer",) if key == "dataset" else ()
        components.check(getattr(config, key), key, supplied=supplied)
    for name, node in config.dataset.get("corpora", {}).items():
        components.check(node, f"dataset {name}", supplied=("tokenizer",))
    return config


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


def known_keys(schema: type = EvalConfig, prefix: str = "") -> Iterator[str]:
    """All dotted keys of the schema, down to where a component's own arguments begin."""
    for item in dataclasses.fields(schema):
        yield prefix + item.name
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            yield from known_keys(item.type, f"{prefix}{item.name}.")


def _check_keys(node: Any, schema: type, prefix: str = "") -> None:
    fields = {item.name: item.type for item in dataclasses.fields(schema)}
    for key in node:
        if key not in fields:
            raise UserError(f"unknown config key {prefix}{key}{_suggest(f'{prefix}{key}')}")
        inner = fields[str(key)]
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            value = node[key]
            if not isinstance(value, dict):
                raise UserError(f"config: {prefix}{key} is {value!r}, but it is a mapping of keys")
            _check_keys(value, inner, f"{prefix}{key}.")


def _suggest(dotted: str) -> str:
    keys = list(known_keys())
    leaf = dotted.split(".")[-1]
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

    one_of("protocol.name", config.protocol.name, tuple(RULES))
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
    config.fail_if = dict(_limits(config.fail_if))
    _check_teacher(config)
    if config.seed >= 2**63:
        raise UserError(f"seed is {config.seed}, but it is below 2**63")
    _check_finite(dataclasses.asdict(config), "")
    for key in (*COMPONENTS, *(TEACHER_COMPONENTS if config.has_teacher else ())):
        if not getattr(config, key).get("_component_"):
            raise UserError(f"config: {key} has no _component_ (the import path of what builds it)")


_LIMITED = {"metrics": METRICS, "fidelity": LIMITED_FIDELITY}


def _limits(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Dotted keys and limits of ``fail_if``, written flat or nested."""
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _limits(value, f"{dotted}.")
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"fail_if.{dotted} is {value!r}, but it is a number: the most allowed")
        for section, allowed in _LIMITED.items():
            if dotted.startswith(f"{section}.") and dotted.split(".", 1)[1] not in allowed:
                names = ", ".join(f"{section}.{name}" for name in allowed)
                more = ", or domains.NAME. and one" if section == "metrics" else ""
                raise UserError(f"fail_if has {dotted}, but it is one of {names}{more}")
        name = dotted.removeprefix("teacher.metrics.")
        if dotted.startswith("teacher.") and name not in METRICS:
            raise UserError(f"fail_if has {dotted}, but of a teacher it is teacher.metrics.NAME")
        yield dotted, float(value)


def _complete_from_folder(config: EvalConfig) -> None:
    """Sections without a ``_component_`` are what the checkpoint folder says; given keys win."""
    described = ("model", "checkpointer", "tokenizer")
    open_sections = [key for key in described if "_component_" not in getattr(config, key)]
    if config.checkpoint_dir is None:
        if len(open_sections) == len(described):
            raise UserError(
                "checkpoint_dir is not set: set checkpoint_dir=DIR, a Hugging Face folder"
            )
        return
    if open_sections:
        with_tokenizer = "tokenizer" in open_sections
        read = auto.sections if with_tokenizer else auto.model_sections
        found = read(config.checkpoint_dir)
        for key in open_sections:
            setattr(config, key, {**found[key], **getattr(config, key)})


def _complete_teacher(config: EvalConfig) -> None:
    """As :func:`_complete_from_folder`; none of the sections, or no folder, means no teacher."""
    if config.teacher_checkpointer.get("checkpoint_dir", "") is None:  # teacher_checkpoint_dir=null
        config.teacher_model, config.teacher_checkpointer = {}, {}
    folder = config.teacher_checkpoint_dir
    open_sections = [k for k in TEACHER_COMPONENTS if "_component_" not in getattr(config, k)]
    if folder is not None and open_sections:
        found = auto.model_sections(folder, "teacher_checkpoint_dir")
        for key in open_sections:
            section = {**found[key.removeprefix("teacher_")], **getattr(config, key)}
            setattr(config, key, section)
    given = [key for key in TEACHER_COMPONENTS if getattr(config, key).get("_component_")]
    if len(given) == 1:
        missing = next(key for key in TEACHER_COMPONENTS if key not in given)
        raise UserError(
            f"config: {given[0]} is given and {missing} is not: give both, or"
            " teacher_checkpoint_dir=DIR, a Hugging Face folder"
        )
    for key in TEACHER_COMPONENTS:
        if not given and getattr(config, key):
            raise UserError(
                f"config: {key} has no _component_, and there is no teacher_checkpoint_dir that"
                " says which: set teacher_checkpoint_dir=DIR"
            )


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


def _check_finite(node: Any, key: str) -> None:
    if isinstance(node, dict):
        for name, value in node.items():
            _check_finite(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, float) and not math.isfinite(node):
        raise UserError(f"{key} is {node}, but it is a finite number")


def _fill_in_checkpointer(node: dict[str, Any], key: str) -> None:
    """Keys that torchtune's checkpointers want and an evaluation can do without.

    They are found later: the files in the folder, and a place that nothing is written to.
    """
    accepted = components.argument_names(node, key)
    for name in ("checkpoint_files", "output_dir"):
        if name in accepted:
            node.setdefault(name, None)
