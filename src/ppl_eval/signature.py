"""A component's arguments, read from its source: importing torchtune takes four seconds."""

import __future__

import ast
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_MOST_HOPS = 8  # from a package's __init__.py to the definition


def read(path: str) -> inspect.Signature | None:
    """The signature of a function or class, without importing anything.

    Annotations are source text, and every default is None.

    Args:
        path: dotted, such as ``torchtune.models.llama3_2.llama3_2``.

    Returns:
        The signature, or None where only an import tells: no Python source, a decorator, a
        constructor that is inherited, a name bound under a condition or by an assignment.

    Raises:
        LookupError: the module does not bind the name, with (module, name, names that it binds).
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for cut in range(len(parts) - 1, 0, -1):
        spec = _spec(".".join(parts[:cut]))
        if spec is not None:
            found = _definition(spec, parts[cut], _MOST_HOPS)
            return None if found is None or cut < len(parts) - 1 else _signature(found)
    return None


def _spec(module: str) -> ModuleSpec | None:
    """Where a module is, found without running its parents."""
    spec, places = None, [*sys.path, os.getcwd()]
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or [])
    return spec


def _definition(spec: ModuleSpec, name: str, hops: int) -> ast.FunctionDef | ast.ClassDef | None:
    if not (spec.origin or "").endswith(".py") or hops == 0:
        return None
    try:
        body = ast.parse(Path(str(spec.origin)).read_bytes()).body
    except SyntaxError:  # importing it will say where
        return None
    binding = [node for node in body if {name, "*"} & set(_bound(node))]
    if not binding:
        bound = {each for node in body for each in _bound(node)}
        if "__getattr__" in bound or _spec(f"{spec.name}.{name}") is not None:
            return None
        inner = (
            module.name for module in pkgutil.iter_modules(spec.submodule_search_locations or [])
        )
        raise LookupError(spec.name, name, [*bound, *inner])
    last = binding[-1]
    if isinstance(last, ast.FunctionDef | ast.ClassDef):
        return last
    if not isinstance(last, ast.ImportFrom) or "*" in _bound(last):
        return None
    package = spec.name if spec.submodule_search_locations is not None else spec.parent
    above = str(package).split(".")
    prefix = above[: len(above) - last.level + 1] if last.level else []
    origin = _spec(".".join([*prefix, *([last.module] if last.module else [])]))
    original = next(a.name for a in last.names if name in (a.asname, a.name))
    return None if origin is None else _definition(origin, original, hops - 1)


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.split(".")[0]
    else:
        for child in ast.iter_child_nodes(node):
            yield from _bound(child)


def _signature(found: ast.FunctionDef | ast.ClassDef) -> inspect.Signature | None:
    function: ast.AST = found
    if isinstance(found, ast.ClassDef):
        made = [node for node in found.body if {"__init__", "__new__"} & set(_bound(node))]
        function = made[0] if len(made) == 1 and not found.keywords else found
    if not isinstance(function, ast.FunctionDef) or function.name == "__new__":
        return None
    if found.decorator_list or function.decorator_list:
        return None
    none, given = ast.Constant(None), function.args
    given.defaults = [none for _ in given.defaults]
    given.kw_defaults = [default and none for default in given.kw_defaults]
    function.body, function.returns = [ast.Pass()], None
    stub = ast.fix_missing_locations(ast.Module([function], []))
    made_of_stub: dict[str, Any] = {}
    exec(compile(stub, "stub", "exec", __future__.annotations.compiler_flag), made_of_stub)
    signature = inspect.signature(made_of_stub[function.name])
    own = list(signature.parameters.values())[isinstance(found, ast.ClassDef) :]
    return signature.replace(parameters=own)
