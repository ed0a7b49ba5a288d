"""torchtune-style components: ``_component_`` names what to call, the other keys are arguments."""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ppl_eval import signature
from ppl_eval.errors import UserError, one_line
from ppl_eval.hints import did_you_mean, hint_for


def find(path: Any, key: str) -> Callable[..., Any]:
    """Import the object behind a dotted path; the current folder is searched as well.

    Args:
        path: such as ``torchtune.models.llama3_2.llama3_2``.
        key: the config key of the component, for messages.

    Raises:
        UserError: no such module, or no such name in it.
    """
    if not isinstance(path, str):
        raise UserError(f"{key}._component_ is {path!r}, but it is an import path")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and f"{module}.".startswith(f"{error.name}."):
                continue
            raise UserError(
                f"{key}._component_ is {path}, but importing it fails: {error}"
            ) from error
        for part in parts[cut:]:
            if not hasattr(found, part):
                raise _no_such_name(path, key, module, part, dir(found))
            found = getattr(found, part)
        return found
    raise UserError(
        f"{key}._component_ is {path!r}, but there is no module {parts[0]}: write the import path "
        "of what builds it, such as torchtune.models.llama3_2.llama3_2"
    )


def _signature(path: Any, key: str) -> inspect.Signature | None:
    """The arguments of a component, without importing it if its source shows them.

    Returns:
        None for a builtin that does not declare its arguments.

    Raises:
        UserError: no such module, or no such name in it.
    """
    if isinstance(path, str) and path.rpartition(".")[0] not in sys.modules:
        try:
            shown = signature.read(path)
        except LookupError as error:
            raise _no_such_name(path, key, *error.args) from error
        if shown is not None:
            return shown
    component = find(path, key)
    try:
        return inspect.signature(component)
    except (TypeError, ValueError):
        return None


def parameters(node: Mapping[str, Any], key: str) -> Mapping[str, inspect.Parameter]:
    """The arguments that the component declares, by name; none for some builtins."""
    declared = _signature(node["_component_"], key)
    return {} if declared is None else declared.parameters


def _no_such_name(path: str, key: str, module: str, name: str, names: Iterable[str]) -> UserError:
    hint = did_you_mean(name, names)
    return UserError(f"{key}._component_ is {path}, but {module} has no {name}{hint}")


def check(node: Mapping[str, Any], key: str, *, supplied: Sequence[str] = ()) -> None:
    """Check that a component exists and takes its arguments, without calling it.

    Args:
        node: ``_component_`` and the arguments.
        key: the config key of the component, for messages.
        supplied: arguments that ppl_eval passes if the component has them.

    Raises:
        UserError: naming the argument that is unknown or missing.
    """
    declared = _signature(node["_component_"], key)
    if declared is None:
        return
    known, arguments = declared.parameters, _arguments(node)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for name in arguments:
        if name not in known and not takes_any:
            hint = did_you_mean(name, known, prefix=f"{key}.") or hint_for(name)
            raise UserError(
                f"unknown config key {key}.{name}: {node['_component_']} has no such argument{hint}"
            )
    try:
        declared.bind(**{name: None for name in supplied if name in known} | arguments)
    except TypeError as error:
        raise UserError(f"config: {key} ({node['_component_']}): {error}") from error


def missing_arguments(node: Mapping[str, Any], key: str) -> list[str]:
    """Names of the arguments that the component needs and ``node`` does not give."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters(node, key).items()
        if parameter.default is parameter.empty and parameter.kind not in open_ended
        if name not in node
    ]


def takes_text(node: Mapping[str, Any], key: str, name: str) -> bool:
    """Whether the component declares an argument as a string, and not as a number as well."""
    declared = parameters(node, key).get(name)
    if declared is None:
        return False
    annotation = declared.annotation
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kinds = set(re.findall(r"\w+", text))
    return "str" in kinds and not kinds & {"int", "float", "bool", "Any"}


def build(node: Mapping[str, Any], key: str, **more: Any) -> Any:
    """Call the component with its arguments and with ``more``, which takes precedence.

    Raises:
        UserError: whatever the component raises, because the user chose it and its arguments. With
            ``log_level: DEBUG`` its traceback is shown.
    """
    component = find(node["_component_"], key)
    try:
        return component(**{**_arguments(node), **more})
    except UserError:
        raise
    except Exception as error:  # a user's code may raise anything; the cause is kept
        with silent_destruction(error):
            raise UserError(f"{key} ({node['_component_']}) fails: {one_line(error)}") from error


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name != "_component_"}


@contextmanager
def silent_destruction(error: BaseException) -> Iterator[None]:
    """Free the objects that a failed call has made, without a message if that fails as well.

    torchtune's loggers close in ``__del__`` what a failed ``__init__`` did not open, and Python
    then prints a second traceback.

    Args:
        error: the exception; its traceback stays, without the local variables.
    """
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        traceback.clear_frames(error.__traceback__)
        sys.unraisablehook = before


def need(built: Any, key: str, *names: str) -> None:
    """Refuse an object that a component returned and that lacks one of the attributes ``names``."""
    for name in names:
        if not hasattr(built, name):
            raise UserError(f"{key} ({type(built).__name__}) has no {name}")
