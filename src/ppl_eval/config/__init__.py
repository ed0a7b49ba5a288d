"""The config of a run: ``schema.py`` has every key, ``command_line.py`` reads them.

Recipes import ``parse`` from here, as torchtune's recipes do from ``torchtune.config``.
"""

from typing import TYPE_CHECKING, Any

from ppl_eval.config.schema import EvalConfig

if TYPE_CHECKING:
    from ppl_eval.config.command_line import parse

__all__ = ["EvalConfig", "parse"]


def __getattr__(name: str) -> Any:
    if name != "parse":
        raise AttributeError(f"module 'ppl_eval.config' has no attribute {name!r}")
    from ppl_eval.config import command_line  # imports boundary, which only programs may import

    return command_line.parse
