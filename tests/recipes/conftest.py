"""Fixtures: the recipe in this process."""

import runpy
import sys

import pytest

from ppl_eval import shipped


@pytest.fixture(scope="session")
def recipe_main():
    """The shipped recipe's entry point."""
    return runpy.run_path(str(shipped.recipe_path()), run_name="recipe")["recipe_main"]


@pytest.fixture
def run_recipe(recipe_main, tmp_path, monkeypatch, capsys):
    """Run a config with overrides in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(config, *args):
        monkeypatch.setattr(sys, "argv", ["ppl_eval", "--config", str(config), *map(str, args)])
        code = 0
        try:
            recipe_main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run
