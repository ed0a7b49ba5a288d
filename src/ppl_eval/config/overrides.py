"""``key=value`` and ``~key``: what a command line changes in a config file's content."""

import copy
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppl_eval import components
from ppl_eval.config.schema import COMPONENTS, TEACHER_COMPONENTS, EvalConfig, is_text, known_keys
from ppl_eval.errors import UserError
from ppl_eval.hints import hint_for

_SECTIONS = (*COMPONENTS, *TEACHER_COMPONENTS)
_NULL = ("null", "None", "~")


@dataclass(frozen=True)
class _Override:
    """One argument. ``spelled`` is its value as typed, None for a removal."""

    argument: str
    path: tuple[str, ...]
    spelled: str | None
    value: Any = None

    @property
    def names_component(self) -> bool:
        return self.path[-1] == "_component_" and self.path[0] in _SECTIONS and len(self.path) == 2

    @property
    def depth(self) -> int:
        """Whole sections come before keys in them, whatever the order on the command line."""
        return len(self.path) - self.names_component


def apply(content: dict[str, Any], arguments: Sequence[str]) -> dict[str, str]:
    """Change ``content`` as the command line says, in torchtune's notation.

    ``model=pkg.builder`` names the ``_component_`` of ``model``; the keys of the old one go with
    it. A mapping or a list replaces a whole section. ``None`` is null. The last of two values wins.

    Args:
        content: the content of the config file, interpolations not resolved; changed in place.
        arguments: ``key=value`` or ``~key``. Values of the schema's text keys are text as typed,
            such as ``no`` or ``1e5``.

    Returns:
        Dotted key -> its value as typed, for all numbers and booleans among the values.

    Raises:
        UserError: an argument that is no override, a value that cannot be read, a key to remove
            that does not exist.
    """
    _spell_out_sections(content)
    before = copy.deepcopy(content)
    read = [_read(argument) for argument in arguments]
    for override in sorted(read, key=lambda each: each.depth):
        if override.spelled is None:
            _remove(content, override, before)
        elif override.names_component:
            _name_component(content, override.path[0], override.value)
        else:
            _set(content, override)
    _spell_out_sections(content)
    return {
        ".".join(each.path): each.spelled
        for each in read
        if each.spelled is not None and isinstance(each.value, bool | int | float)
    }


def _spell_out_sections(content: dict[str, Any]) -> None:
    """A section that is null is empty; one that is an import path has it as ``_component_``."""
    for key in _SECTIONS:
        value = content.get(key)
        if isinstance(value, str) and not value.startswith("${"):
            content[key] = {"_component_": value}
        elif key in content and value is None and key != "metric_logger":
            content[key] = {}


def _read(argument: str) -> _Override:
    key, equals, spelled = argument.partition("=")
    if key.startswith(("--", "+")):
        bare = key.lstrip("-+").replace("-", "_")
        way = "an option" if key.startswith("--") else "an override"
        advice = hint_for(bare) or f": write {bare}={spelled or 'VALUE'}"
        raise UserError(f"{argument} is not {way}{advice}")
    if argument.startswith("~"):
        return _Override(argument, tuple(key[1:].split(".")), None)
    if not equals or not key or any(c.isspace() for c in key):
        raise UserError(f"{argument!r} is not an override: write key=value, or ~key to remove one")
    if not spelled:
        raise UserError(
            f"{argument} gives no value: write {key}=null for none, or {key}=\"''\" for empty text"
        )
    path = tuple(key.split("."))
    value = _text(spelled) if is_text(key) else _value(spelled, argument)
    if len(path) == 1 and key in _SECTIONS and isinstance(value, str) and "${" not in value:
        path = (key, "_component_")
    return _Override(argument, path, spelled, value)


def _text(spelled: str) -> str | None:
    """Text as it stands, unless it stands in quotes."""
    if spelled in _NULL:
        return None
    if len(spelled) > 1 and spelled[0] == spelled[-1] and spelled[0] in "'\"":
        return str(_value(spelled, spelled))
    return spelled


def _value(spelled: str, argument: str) -> Any:
    """What OmegaConf reads, but text is text as it stands unless it stands in quotes."""
    if spelled in _NULL:
        return None
    marked = spelled.lstrip()[:1] in ("[", "{", "'", '"')
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={spelled}"]))["v"]  # pyright: ignore
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if not marked:
            return spelled
        reason = " ".join(str(error).split())
        raise UserError(
            f"override {argument!r} cannot be read: {reason} (a shell wants quotes around it all)"
        ) from error
    for key in _without_space(value):
        raise UserError(
            f"override {argument!r} has {key!r}, which is read as one key: put a space after the"
            f" colon, as in {{{key.replace(':', ': ', 1)}}}"
        )
    return value if marked or isinstance(value, bool | int | float) else spelled


def _without_space(node: Any) -> Iterator[str]:
    """Keys such as ``tp:2``, which YAML does not take for a key and its value."""
    if isinstance(node, list):
        for value in node:
            yield from _without_space(value)
    elif isinstance(node, dict):
        yield from (str(key) for key, value in node.items() if value is None and ":" in str(key))
        for value in node.values():
            yield from _without_space(value)


def _name_component(content: dict[str, Any], key: str, component: Any) -> None:
    """Another component takes none of the old one's arguments.

    Checkpointers are the exception: their arguments describe the checkpoint, not the class.
    """
    old = content.get(key)
    old = old if isinstance(old, dict) else {}
    if old.get("_component_") not in (None, component):
        about_files = key.endswith("checkpointer") and isinstance(component, str)
        taken = components.argument_names({"_component_": component}, key) if about_files else []
        old = {name: value for name, value in old.items() if name in taken}
    content[key] = {**old, "_component_": component}


def _set(content: dict[str, Any], override: _Override) -> None:
    *parents, last = override.path
    node: Any = content
    for number, part in enumerate(parents):
        inner = node.get(part)
        if inner is None:
            inner = node[part] = {}
        if not isinstance(inner, dict):
            where = ".".join(override.path[: number + 1])
            what = f"a list of {len(inner)}" if isinstance(inner, list) else repr(inner)
            raise UserError(
                f"{override.argument}: {where} is {what}, not a mapping of keys: give the whole of"
                f" {where}"
            )
        node = inner
    node[last] = override.value


def _remove(content: dict[str, Any], override: _Override, before: Mapping[str, Any]) -> None:
    """Remove a key. One that is not there has its default already, if it is a key at all."""
    *parents, last = override.path
    node: Any = content
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and last in node:
        del node[last]
        return
    dotted = override.argument[1:]
    known = [*_paths(before), *known_keys()]
    if dotted not in known and override.path[0] in _SECTIONS:
        known += _component_paths(before, override.path[0])
    if dotted not in known:
        close = difflib.get_close_matches(dotted, known, n=1)
        hint = f"; did you mean ~{close[0]}?" if close else ""
        raise UserError(f"{override.argument}: the config has no such key to remove{hint}")


def _component_paths(content: Mapping[str, Any], section: str) -> list[str]:
    """Dotted keys of the arguments that a section's component takes."""
    node = content.get(section) or getattr(EvalConfig(), section)
    if not isinstance(node, dict) or "_component_" not in node:
        return []
    return [f"{section}.{name}" for name in components.argument_names(node, section)]


def _paths(node: Any, above: str = "") -> list[str]:
    """Dotted keys of everything in a mapping."""
    if not isinstance(node, dict):
        return []
    return [
        path
        for key, value in node.items()
        for path in (f"{above}{key}", *_paths(value, f"{above}{key}."))
    ]
