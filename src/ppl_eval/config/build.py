"""Turn the content of a config file into a checked :class:`EvalConfig`."""

import dataclasses
import difflib
import os
import types
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval import components, shipped
from ppl_eval.config import from_folder
from ppl_eval.config.checks import check_teacher, check_values, leaves
from ppl_eval.config.schema import EvalConfig, is_text, known_keys
from ppl_eval.errors import UserError
from ppl_eval.hints import did_you_mean, hint_for


def build(content: dict[str, Any], typed: Mapping[str, str]) -> EvalConfig:
    """Merge a mapping into the schema, resolve interpolations, and check every value.

    Args:
        content: the content of a config file, after the command line has changed it.
        typed: dotted key -> a number or boolean of the command line, as typed.

    Raises:
        UserError: an unknown key (naming the nearest that exists), a value of the wrong type or out
            of range, a component that does not exist or does not take an argument.
    """
    content = _expand_home(content)
    if content.get("fail_if", {}) is None:
        content["fail_if"] = {}
    _check_keys(content)
    for key, value in leaves(content):
        if value == "???":
            raise UserError(f"{key} is ???, a value that is still to be set: write {key}=VALUE")
        if is_text(key) and isinstance(value, bool | int | float):
            raise UserError(f"{key} is {value!r}, but it is text: put it in quotes")
    if isinstance(content.get("dataset"), list):
        content["dataset"] = _named_corpora(content["dataset"])
    if not OmegaConf.has_resolver("embedded"):
        # OmegaConf 2.4 renamed register_new_resolver
        register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
        register("embedded", lambda name: str(shipped.embedded_path(name)))
    try:
        merged = OmegaConf.merge(OmegaConf.structured(EvalConfig), OmegaConf.create(content))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"config: {where}{(error.msg or str(error)).splitlines()[0]}") from error
    assert isinstance(config, EvalConfig)
    check_values(config)
    from_folder.complete(config)
    check_teacher(config)
    _check_components(config, typed)
    return config


def _check_components(config: EvalConfig, typed: Mapping[str, str]) -> None:
    """Check that each component exists and takes its arguments, after setting defaults of ours."""
    for key in config.components:
        node = getattr(config, key)
        if not node.get("_component_"):
            raise UserError(f"config: {key} has no _component_ (the import path of what builds it)")
        if key.endswith("checkpointer"):
            from_folder.leave_open(node, key)
        if key == "metric_logger" and "log_dir" in components.missing_arguments(node, key):
            node["log_dir"] = f"{config.output_dir}/logs"
        for name in node:
            if f"{key}.{name}" in typed and components.takes_text(node, key, name):
                node[name] = typed[f"{key}.{name}"]
        components.check(node, key, supplied=("tokenizer",) if key == "dataset" else ())
    for name, node in config.dataset.get("corpora", {}).items():
        components.check(node, f"dataset {name}", supplied=("tokenizer",))


def _expand_home(node: Any) -> Any:
    """Replace ``~/x`` and ``~user/x`` by absolute paths, in every value."""
    if isinstance(node, dict):
        return {key: _expand_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_expand_home(value) for value in node]
    is_path = isinstance(node, str) and node.startswith("~") and "/" in node
    return os.path.expanduser(node) if is_path else node


def _named_corpora(datasets: list[Any]) -> dict[str, Any]:
    """Turn a list of named data sets into one component."""
    corpora: dict[str, Any] = {}
    for node in datasets:
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise UserError(
                f"config: dataset is a list, and one of it is {node!r:.80}, but each is a data set"
                " with a name and a _component_"
            )
        arguments = {"_component_": "ppl_eval.data.text_corpus", **node}
        name = arguments.pop("name")
        if name in corpora:
            raise UserError(f"config: two of dataset are called {name}: names differ")
        corpora[name] = arguments
    return {"_component_": "ppl_eval.data.named_corpora", "corpora": corpora}


def _check_keys(node: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse unknown keys, and a value that should be a mapping and is not."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        kinds = known_keys().get(key)
        if kinds is None:
            raise UserError(f"unknown config key {key}{_suggest(key)}")
        is_section = dataclasses.is_dataclass(kinds[0])
        if is_section or dict in kinds:
            allowed = (dict, list) if key == "dataset" else dict
            is_mapping = isinstance(value, allowed) or (isinstance(value, str) and "${" in value)
            if not is_mapping and not (value is None and types.NoneType in kinds):
                raise UserError(f"config: {key} is {value!r}, but it is a mapping of keys")
        elif isinstance(value, dict) and value:
            inner = f"{key}.{next(iter(value))}"
            raise UserError(f"unknown config key {inner}: {key} is not a mapping of keys")
        if is_section and isinstance(value, dict):
            _check_keys(value, f"{key}.")


def _suggest(key: str) -> str:
    """What to write instead of an unknown key, to end a message; empty if nothing is near."""
    name = key.split(".")[-1]
    by_name = {known.split(".")[-1]: known for known in reversed(known_keys())}
    if hint_for(name) or name in by_name:
        return hint_for(name) or f"; did you mean {by_name[name]}?"
    if hint := did_you_mean(key, known_keys()):
        return hint
    close = difflib.get_close_matches(name, by_name, n=1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""
