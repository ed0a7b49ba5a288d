"""Every key of the config with its meaning: docs/config.md and ``ppl-eval cp --full``.

``python -m ppl_eval.config.reference`` prints the table of docs/config.md.
"""

import ast
import dataclasses
import inspect
import operator
import textwrap
import types
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
    below: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if isinstance(node, ast.ClassDef):
            for item, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(item, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(text.value, ast.Constant)
                    below[node.name, ast.unparse(item.target)] = str(text.value.value)
    found = {}
    for key, kinds in known_keys().items():
        section, _, name = key.rpartition(".")
        owner = known_keys()[section][0].__name__ if section else EvalConfig.__name__
        docstring = inspect.getdoc(kinds[0]) if dataclasses.is_dataclass(kinds[0]) else None
        found[key] = " ".join((docstring or below[owner, name]).split())
    return found


def table() -> list[str]:
    """The lines of the table in docs/config.md."""
    lines = ["| key | values | default | meaning |", "| --- | --- | --- | --- |"]
    for key, meaning in meanings().items():
        default = ""
        if not dataclasses.is_dataclass(known_keys()[key][0]):
            as_yaml = yaml.safe_dump(_default(key), default_flow_style=True, width=1000)
            default = f"`{as_yaml.splitlines()[0]}`"
        lines.append(f"| `{key}` | {_values(key)} | {default} | {meaning} |")
    return lines


def full_config(name: str) -> str:
    """A shipped config with every key, each below its meaning; it leads to the same run."""
    path = shipped.config_path(name)
    header = path.read_text(encoding="utf-8").split("\n\n")[0].split("\n#\n# All other keys")[0]
    content = read_yaml(path)
    lines = [header]
    for key, meaning in meanings().items():
        section, _, name = key.rpartition(".")
        indent = "  " if section else ""
        lines += [] if section else [""]
        meaning += f" One of {', '.join(CHOICES[key])}." if key in CHOICES else ""
        comment = textwrap.fill(meaning, _WIDTH - len(f"{indent}# "))
        lines.append(textwrap.indent(comment, f"{indent}# "))
        if dataclasses.is_dataclass(known_keys()[key][0]):
            lines.append(f"{key}:")
            continue
        value = (content.get(section) or {} if section else content).get(name, _default(key))
        as_yaml = yaml.safe_dump({name: value}, sort_keys=False, width=1000)
        lines.append(textwrap.indent(as_yaml.rstrip("\n"), indent))
    return "\n".join(lines) + "\n"


def _default(key: str) -> Any:
    return operator.attrgetter(key)(EvalConfig())


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
