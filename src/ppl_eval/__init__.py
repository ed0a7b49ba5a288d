"""ppl_eval: perplexity evaluation for torchtune models on any number of processes.

``ppl_eval.evaluate`` measures a model that is already built, ``ppl_eval.load`` builds one from a
folder, ``ppl_eval.Perplexity`` is the metric alone. All are loaded on first use: ``import
ppl_eval`` imports neither torch nor torchtune, and changes nothing of logging and warnings.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppl_eval.api import evaluate, load
    from ppl_eval.data.corpus import text_corpus
    from ppl_eval.data.documents import Document
    from ppl_eval.errors import UserError
    from ppl_eval.metrics.perplexity import Perplexity
    from ppl_eval.report.evaluation import Evaluation

__version__ = version("ppl_eval")

_HOME = {
    "Document": "ppl_eval.data.documents",
    "Evaluation": "ppl_eval.report.evaluation",
    "Perplexity": "ppl_eval.metrics.perplexity",
    "UserError": "ppl_eval.errors",
    "evaluate": "ppl_eval.api",
    "load": "ppl_eval.api",
    "text_corpus": "ppl_eval.data.corpus",
}

__all__ = [
    "Document",
    "Evaluation",
    "Perplexity",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "text_corpus",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ppl_eval' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
