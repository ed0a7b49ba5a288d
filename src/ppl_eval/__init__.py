"""ppl_eval: perplexity evaluation for torchtune models on any number of processes.

``ppl_eval.evaluate`` measures a model that is already built; ``ppl_eval.Perplexity`` is the metric
alone. Both are loaded on first use: ``import ppl_eval`` imports neither torch nor torchtune, and
changes nothing of logging and warnings.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_eval.data.documents import Document
    from ppl_eval.errors import UserError
    from ppl_eval.evaluation.api import evaluate
    from ppl_eval.evaluation.loop import Evaluation
    from ppl_eval.metrics.perplexity import Perplexity

__version__ = version("ppl_eval")

__all__ = ["Document", "Evaluation", "Perplexity", "UserError", "__version__", "evaluate"]

_HOME = {
    "Document": "ppl_eval.data.documents",
    "Evaluation": "ppl_eval.evaluation.loop",
    "Perplexity": "ppl_eval.metrics.perplexity",
    "UserError": "ppl_eval.errors",
    "evaluate": "ppl_eval.evaluation.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ppl_eval' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
