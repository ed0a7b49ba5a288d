"""The config's metric logger. If it fails, the run goes on."""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from ppl_eval import components
from ppl_eval.errors import one_line

logger = logging.getLogger("ppl_eval")


class MetricLogger:
    """A metric logger whose failure does not end a run: results matter more than their record.

    Args:
        node: the config's component, or None for none.

    Raises:
        UserError: it cannot be built, or is no metric logger.

    Attributes:
        problem: in one sentence, why it is no longer called; None while it works.
    """

    def __init__(self, node: Mapping[str, Any] | None) -> None:
        self.problem: str | None = None
        self._built = None
        if node is not None:
            self._built = components.build(node, "metric_logger")
            components.need(self._built, "metric_logger", "log_dict", "log_config", "close")

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""
        self._call("log_dict", payload, step=step)

    def log_results(self, content: Mapping[str, Any], config: Any, step: int) -> None:
        """Log the config and every number of ``metrics`` and ``fidelity``, then close the logger.

        Args:
            content: what results.json has.
            config: the run's config, a dataclass.
            step: the run's last.
        """
        self._call("log_config", OmegaConf.structured(config))
        numbers = dict(content["metrics"])
        numbers |= {f"fidelity/{k}": value for k, value in content.get("fidelity", {}).items()}
        payload = {name: value for name, value in numbers.items() if isinstance(value, float)}
        self.log_dict(payload, step=step)
        self._call("close")

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        if self._built is None:
            return
        try:
            getattr(self._built, name)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  (anyone's code, and perhaps a network)
            self.problem = (
                f"metric_logger ({type(self._built).__name__}) fails in {name}: {one_line(error)}"
            )
            logger.warning("warning: %s; the run goes on without it", self.problem)
            with components.silent_destruction(error):
                self._built = None
