"""The table of rooms in docs/architecture.md is the code's, and imports go one way.

`python tests/test_architecture.py` prints the table.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/ppl_eval"
FLOORS = (
    *(
        "commands",
        "verify",
        "report",
        "evaluation",
        "config",
        "model",
        "adapter",
        "metrics",
        "data",
    ),
    *("checkpoint", "score", "quantize", "parallel"),
)
"""Rooms from the top. A file imports from its own room and from rooms below it, and any file may
import those of the package's own folder that are no programs."""
PROGRAMS = {"__init__", "__main__", "api", "cli"}
APART = ("tools", "embedded")
"""What nothing else imports."""


def files():
    """Every module of the package outside :data:`APART`."""
    found = sorted(PACKAGE.rglob("*.py"))
    return [path for path in found if path.relative_to(PACKAGE).parts[0] not in APART]


def room_of(path):
    """Folder of a module directly below the package; None in the package's own folder."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def summary(path):
    """First sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text()))
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z])", paragraph)[0].rstrip(".").replace("``", "`")


def table():
    """The rooms from the top, a line for each file."""
    lines = []
    for room in (*FLOORS, None, *APART[:1]):
        folder = PACKAGE if room is None else PACKAGE / room
        about = "The programs, and what every room may import"
        about = summary(folder / "__init__.py") if room else about
        lines += [f"**{'src/ppl_eval' if room is None else room}/** {about}.", ""]
        paths = sorted(folder.glob("*.py") if room is None else folder.rglob("*.py"))
        for path in paths:
            if path.stem != "__init__":
                lines.append(f"- `{path.relative_to(folder).as_posix()}`: {summary(path)}")
        lines.append("")
    return "\n".join(lines).rstrip()


def _run(node):
    """Nodes of a syntax tree but those under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from _run(child)


def imports(path):
    """Modules of the package that a module imports when it runs, as paths."""
    for node in _run(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("ppl_eval"):
            continue
        for alias in node.names:
            for dotted in (f"{node.module}.{alias.name}", node.module):
                module = PACKAGE.joinpath(*dotted.split(".")[1:])
                if module.with_suffix(".py").is_file():
                    yield module.with_suffix(".py")
                    break


def test_the_table_of_rooms_is_the_codes():
    """If this fails: `python tests/test_architecture.py` prints the table."""
    assert table() in (ROOT / "docs/architecture.md").read_text()


def test_every_room_has_a_floor():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert rooms == {*FLOORS, *APART}


def test_no_import_goes_up():
    floor = {room: number for number, room in enumerate(reversed(FLOORS))}
    up = [
        f"{path.relative_to(PACKAGE)} imports {other.relative_to(PACKAGE)}"
        for path in files()
        for other in imports(path)
        if path.stem not in PROGRAMS and room_of(path) != room_of(other)
        if floor.get(room_of(path), -1) < floor.get(room_of(other), -1)
        or (room_of(other) is None and other.stem in PROGRAMS)
    ]
    assert up == []


def test_no_import_comes_round():
    edges = {path: set(imports(path)) - {path} for path in files()}
    while free := {path for path, others in edges.items() if not others}:
        edges = {path: others - free for path, others in edges.items() if path not in free}
    assert {str(path.relative_to(PACKAGE)) for path in edges} == set()


if __name__ == "__main__":
    print(table())
