"""``key=value`` and ``~key``: what a command line changes in a config file's content."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval import components
from ppl_eval.config.schema import COMPONENTS, TEACHER_COMPONENTS, EvalConfig, is_text, known_keys
from ppl_eval.errors import UserError
from ppl_eval.hints import did_you_mean, hint_for

_SECTIONS = (*COMPONENTS, *TEACHER_COMPONENTS)
_NULL = ("null", "None", "~")


@dataclass(frozen=True)
class _Override:
    """One argument. ``typed`` is its value as typed, None for a removal."""

    argument: str
    path: tuple[str, ...]
    typed: str | None
    value: Any = None

    @property
    def names_component(self) -> bool:
        return len(self.path) == 2 and self.path[0] in _SECTIONS and self.path[1] == "_component_"


def apply(content: dict[str, Any], arguments: Sequence[str]) -> dict[str, str]:
    """Change ``content`` as the command line says, in torchtune's notation.

    ``model=pkg.builder`` sets the ``_component_`` of ``model`` and removes the arguments of the old
    one. A mapping or a list replaces a whole section. ``None`` is null. Of two values for one key
    the last one counts.

    Args:
        content: the content of the config file, interpolations not resolved; changed in place.
        arguments: ``key=value`` or ``~key``. ``no`` and ``1e5`` are text for keys that hold text.

    Returns:
        Dotted key -> its value as typed, for all numbers and booleans among the values.

    Raises:
        UserError: an argument that is no override, a value that cannot be read, a key to remove
            that does not exist.
    """
    _expand_sections(content)
    before = copy.deepcopy(content)
    overrides = [_read(argument) for argument in arguments]
    # whole sections are set before their keys, whatever the order on the command line
    for override in sorted(overrides, key=lambda each: len(each.path) - each.names_component):
        if override.typed is None:
            _remove(content, override, before)
        elif override.names_component:
            _name_component(content, override.path[0], override.value)
        else:
            _set(content, override)
    _expand_sections(content)
    return {
        ".".join(each.path): each.typed
        for each in overrides
        if each.typed is not None and isinstance(each.value, bool | int | float)
    }


def _expand_sections(content: dict[str, Any]) -> None:
    """Make a section that is null empty, and one that is an import path a mapping."""
    for key in _SECTIONS:
        value = content.get(key)
        if isinstance(value, str) and not value.startswith("${"):
            content[key] = {"_component_": value}
        elif key in content and value is None and key != "metric_logger":
            content[key] = {}


def _read(argument: str) -> _Override:
    key, equals, typed = argument.partition("=")
    if key.startswith(("--", "+")):
        bare = key.lstrip("-+").replace("-", "_")
        kind = "an option" if key.startswith("--") else "an override"
        advice = hint_for(bare) or f": write {bare}={typed or 'VALUE'}"
        raise UserError(f"{argument} is not {kind}{advice}")
    if argument.startswith("~"):
        return _Override(argument, tuple(key[1:].split(".")), None)
    if not equals or not key or any(c.isspace() for c in key):
        raise UserError(f"{argument!r} is not an override: write key=value, or ~key to remove one")
    if not typed:
        raise UserError(
            f"{argument} gives no value: write {key}=null for none, or {key}=\"''\" for empty text"
        )
    value = _value(typed, key, argument)
    path = tuple(key.split("."))
    if key in _SECTIONS and isinstance(value, str) and "${" not in value:
        path = (key, "_component_")
    return _Override(argument, path, typed, value)


def _value(typed: str, key: str, argument: str) -> Any:
    """The value that OmegaConf reads; text without quotes stays as it was typed."""
    if typed in _NULL:
        return None
    in_quotes = len(typed) > 1 and typed[0] == typed[-1] and typed[0] in "'\""
    if is_text(key) and not in_quotes:
        return typed
    is_yaml = typed.lstrip()[:1] in ("[", "{", "'", '"')
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={typed}"]))["v"]  # pyright: ignore
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if not is_yaml:
            return typed
        reason = " ".join(str(error).split())
        raise UserError(
            f"override {argument!r} cannot be read: {reason} (a shell wants quotes around it all)"
        ) from error
    for name in _without_space(value):
        raise UserError(
            f"override {argument!r} has {name!r}, which is read as one key: put a space after the"
            f" colon, as in {{{name.replace(':', ': ', 1)}}}"
        )
    return value if is_yaml or isinstance(value, bool | int | float) else typed


def _without_space(node: Any) -> Iterator[str]:
    """Keys such as ``tp:2``, which YAML does not take for a key and its value."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if value is None and ":" in str(key):
                yield str(key)
            yield from _without_space(value)


def _name_component(content: dict[str, Any], key: str, component: Any) -> None:
    """Set a section's component; another component gets no argument that the old one had.

    Checkpointers are the exception: their arguments describe the checkpoint, not the class.
    """
    old = content.get(key)
    old = old if isinstance(old, dict) else {}
    if old.get("_component_") not in (None, component):
        keeps_arguments = key.endswith("checkpointer") and isinstance(component, str)
        kept = components.parameters({"_component_": component}, key) if keeps_arguments else []
        old = {name: value for name, value in old.items() if name in kept}
    content[key] = {**old, "_component_": component}


def _set(content: dict[str, Any], override: _Override) -> None:
    node: Any = content
    for number, part in enumerate(override.path[:-1], 1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            key = ".".join(override.path[:number])
            found = f"a list of {len(node)}" if isinstance(node, list) else repr(node)
            raise UserError(
                f"{override.argument}: {key} is {found}, not a mapping of keys: give the whole of"
                f" {key}"
            )
    node[override.path[-1]] = override.value


def _remove(content: dict[str, Any], override: _Override, before: Mapping[str, Any]) -> None:
    """Remove a key. An absent key is refused, unless the schema or a component has it."""
    *parents, last = override.path
    node: Any = content
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and last in node:
        del node[last]
        return
    section, key = override.path[0], ".".join(override.path)
    known = [*_paths(before), *known_keys()]
    if key not in known and section in _SECTIONS:
        node = before.get(section) or getattr(EvalConfig(), section)
        if isinstance(node, dict) and "_component_" in node:
            known += [f"{section}.{name}" for name in components.parameters(node, section)]
    if key not in known:
        hint = did_you_mean(key, known, prefix="~")
        raise UserError(f"{override.argument}: the config has no such key to remove{hint}")


def _paths(node: Any, above: str = "") -> Iterator[str]:
    """Dotted keys of everything in a mapping."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{above}{key}"
        yield from _paths(value, f"{above}{key}.")
