"""A component's arguments, read from its source: importing torchtune takes four seconds."""

import __future__

import ast
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_MOST_IMPORTS = 8  # from a package's __init__.py to the definition


def read(path: str) -> inspect.Signature | None:
    """The signature of a function or class, without importing anything.

    Annotations are source text, and every default is None.

    Args:
        path: dotted, such as ``torchtune.models.llama3_2.llama3_2``.

    Returns:
        The signature, or None if only an import can show it: no Python source, a decorator, an
        inherited constructor, a name bound under a condition or by an assignment.

    Raises:
        LookupError: the module does not bind the name, with (module, name, names that it binds).
    """
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    for cut in range(len(parts) - 1, 0, -1):
        spec = _spec(".".join(parts[:cut]))
        if spec is not None:
            found = _definition(spec, parts[cut], _MOST_IMPORTS)
            return None if found is None or cut < len(parts) - 1 else _signature(found)
    return None


def _spec(module: str) -> ModuleSpec | None:
    """Find a module without running its parent packages."""
    spec, folders = None, [*sys.path, os.getcwd()]
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return spec


def _definition(
    spec: ModuleSpec, name: str, most_imports: int
) -> ast.FunctionDef | ast.ClassDef | None:
    """The statement that defines a name, found through the imports of the module."""
    if not (spec.origin or "").endswith(".py") or most_imports == 0:
        return None
    try:
        body = ast.parse(Path(str(spec.origin)).read_bytes()).body
    except SyntaxError:  # an import will report it
        return None
    bound = [(node, set(_bound(node))) for node in body]
    binding = [node for node, names in bound if names & {name, "*"}]
    if not binding:
        every = {each for _, names in bound for each in names}
        if "__getattr__" in every or _spec(f"{spec.name}.{name}") is not None:
            return None
        modules = pkgutil.iter_modules(spec.submodule_search_locations or [])
        raise LookupError(spec.name, name, [*every, *(module.name for module in modules)])
    last = binding[-1]
    if isinstance(last, ast.FunctionDef | ast.ClassDef):
        return last
    if not isinstance(last, ast.ImportFrom) or "*" in _bound(last):
        return None
    try:
        module = importlib.util.resolve_name("." * last.level + (last.module or ""), spec.parent)
    except ImportError:  # too many dots: an import will report it
        return None
    origin = _spec(module)
    original = next(alias.name for alias in last.names if name in (alias.asname, alias.name))
    return None if origin is None else _definition(origin, original, most_imports - 1)


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
    """The signature of a stub with the same parameters; a method's lacks ``self``."""
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
    namespace: dict[str, Any] = {}
    exec(compile(stub, "stub", "exec", __future__.annotations.compiler_flag), namespace)
    signature = inspect.signature(namespace[function.name])
    skipped = 1 if isinstance(found, ast.ClassDef) else 0
    return signature.replace(parameters=list(signature.parameters.values())[skipped:])
