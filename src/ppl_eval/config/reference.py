"""Every key of the config with its meaning: docs/config.md and ``ppl-eval cp --full``.

    python -m ppl_eval.config.reference

prints the table of docs/config.md.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import yaml

from ppl_eval import shipped
from ppl_eval.config import schema
from ppl_eval.config.checks import CHOICES
from ppl_eval.config.command_line import read_yaml
from ppl_eval.config.schema import EvalConfig, known_keys

_TYPES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping"}
_WIDTH = 100


def meanings() -> dict[str, str]:
    """Dotted key -> what it means, in the order of the schema; a section means its docstring."""
    tree = ast.parse(inspect.getsource(schema))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    below: dict[tuple[str, str], str] = {}
    for name, node in classes.items():
        for item, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(text.value, ast.Constant)
                below[name, ast.unparse(item.target)] = " ".join(str(text.value.value).split())
    found = {}
    for key, kinds in known_keys().items():
        section, _, name = key.rpartition(".")
        owner = known_keys()[section][0].__name__ if section else EvalConfig.__name__
        docstring = inspect.getdoc(kinds[0]) if dataclasses.is_dataclass(kinds[0]) else None
        found[key] = docstring or below[owner, name]
    return found


def table() -> list[str]:
    """The lines of the table in docs/config.md."""
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, meaning in meanings().items():
        default = _default(key)
        shown = "" if dataclasses.is_dataclass(default) else f"`{_spelled(default)}`"
        lines.append(f"| `{key}` | {_values(key)} | {shown} | {meaning} |")
    return lines


def full_config(name: str) -> str:
    """A shipped config with every key, each below its meaning; it leads to the same run."""
    path = shipped.config_path(name)
    header = path.read_text(encoding="utf-8").split("\n\n")[0].split("\n#\n# All other keys")[0]
    content = read_yaml(path)
    lines = [header]
    for key, meaning in meanings().items():
        section, _, leaf = key.rpartition(".")
        indent = "  " if section else ""
        lines += [""] if not section else []
        lines += textwrap.wrap(
            meaning + (f" One of {', '.join(CHOICES[key])}." if key in CHOICES else ""),
            width=_WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}# ",
        )
        default = _default(key)
        if dataclasses.is_dataclass(default):
            lines.append(f"{key}:")
            continue
        value = (content.get(section) or {} if section else content).get(leaf, default)
        lines += _dumped(leaf, value, indent)
    return "\n".join(lines) + "\n"


def _dumped(key: str, value: Any, indent: str) -> Iterator[str]:
    text = yaml.safe_dump({key: value}, sort_keys=False, width=1000)
    yield from (indent + line for line in text.splitlines())


def _default(key: str) -> Any:
    node: Any = EvalConfig()
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _spelled(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]


def _values(key: str) -> str:
    kinds = known_keys()[key]
    if dataclasses.is_dataclass(kinds[0]):
        return "section"
    ends = ["null"] if types.NoneType in kinds else []
    if key in CHOICES:
        return ", ".join([*CHOICES[key], *ends])
    return " or ".join([*(_TYPES[kind] for kind in kinds if kind in _TYPES), *ends])


if __name__ == "__main__":
    print("\n".join(table()))  # noqa: T201
