"""Find the recipes, configs and embedded models that come with the package."""

from pathlib import Path

from ppl_eval.errors import UserError
from ppl_eval.hints import did_you_mean

RECIPES = {"ppl_eval": "perplexity_eval.py"}
"""Name on the command line -> file in recipes/."""
EMBEDDED = ("tiny_teacher", "tiny_student", "tiny_text")
"""Folders in the package: two trained checkpoints and the held-out text."""

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    """recipes/ or configs/: at the top of a source tree, or inside an installed package."""
    root = _PACKAGE.parent.parent
    if _PACKAGE.parent.name == "src" and (root / "pyproject.toml").is_file():
        return root / name
    return _PACKAGE / name


def recipe_path(name: str = "ppl_eval") -> Path:
    """Path of a shipped recipe's source file."""
    return _folder("recipes") / RECIPES[name]


def config_names() -> list[str]:
    """Names of all shipped configs, such as ``smollm2/135M_ppl_eval``, sorted."""
    folder = _folder("configs")
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def config_path(name_or_path: str) -> Path:
    """The YAML file that ``--config NAME_OR_PATH`` names: an existing file, else a shipped config.

    Raises:
        UserError: there is neither.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    names = config_names()
    if name_or_path in names:
        return _folder("configs") / f"{name_or_path}.yaml"
    raise UserError(
        f"--config {name_or_path}: no such file, and no shipped config has that name"
        f"{did_you_mean(name_or_path, names)}; `ppl-eval ls` lists the shipped ones"
    )


def embedded_path(name: str) -> Path:
    """Folder of an embedded checkpoint or text."""
    if name not in EMBEDDED:
        raise UserError(f"{name!r} is not embedded: choose one of {', '.join(EMBEDDED)}")
    return _PACKAGE / "embedded" / name
