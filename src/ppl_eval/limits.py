"""``fail_if``: the metrics that a run bounds, checked before the run."""

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.metrics.names import LIMITED_FIDELITY, MACRO, METRICS


def limits(node: Mapping[str, Any], protocol: str) -> dict[str, float]:
    """Dotted keys and limits of ``fail_if``, written flat or nested.

    Args:
        node: as in the config.
        protocol: its name: ``hf_perplexity`` is of hf_stride alone.

    Raises:
        UserError: a name that results do not have, or a limit that is not a finite number.
    """
    found = dict(_flat(node))
    for key, limit in found.items():
        _check_name(key, protocol)
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise UserError(f"fail_if.{key} is {limit!r}, but it is a number: the most allowed")
        if not math.isfinite(limit):
            raise UserError(f"fail_if.{key} is {limit}, but it is a finite number")
    return {key: float(limit) for key, limit in found.items()}


def check_domains(keys: Iterable[str], domains: Collection[str]) -> None:
    """Refuse a limit on a domain that the text does not have.

    Args:
        keys: of ``fail_if``, dotted.
        domains: names of the text's domains.

    Raises:
        UserError: naming those that there are.
    """
    for key in keys:
        section, _, _ = key.rpartition(".")
        name = section.removeprefix("domains.").removesuffix(".metrics")
        if (key.startswith("domains.") and name not in domains) or (
            key.startswith("macro.") and not domains
        ):
            there = f"the domains {', '.join(sorted(domains))}" if domains else "no domains"
            raise UserError(f"fail_if has {key}, but the text has {there}")


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_name(key: str, protocol: str) -> None:
    section, _, name = key.rpartition(".")
    known = {"metrics": METRICS, "fidelity": LIMITED_FIDELITY, "macro": MACRO}
    known["teacher.metrics"] = METRICS
    if section.startswith("domains.") and section.endswith(".metrics"):
        known[section] = tuple(each for each in METRICS if each != "hf_perplexity")
    first = key.split(".", maxsplit=1)[0]
    if section not in known and first == "teacher":
        raise UserError(f"fail_if has {key}, but of a teacher it is teacher.metrics.NAME")
    if section not in known and first != section and first in known:
        section = first
    if section not in known:
        where = [f"{each}.{name}" for each, names in known.items() if name in names]
        hint = f"; did you mean {where[0]}?" if where else ""
        raise UserError(
            f"fail_if has {key}, but it is metrics.NAME, domains.DOMAIN.metrics.NAME, macro.NAME,"
            f" or with a teacher fidelity.NAME or teacher.metrics.NAME{hint}"
        )
    if name not in known[section] or key != f"{section}.{name}":
        names = ", ".join(f"{section}.{each}" for each in known[section])
        close = difflib.get_close_matches(name, known[section], n=1)
        hint = f"; did you mean {section}.{close[0]}?" if close else ""
        raise UserError(f"fail_if has {key}, but it is one of {names}{hint}")
    if name == "hf_perplexity" and protocol != "hf_stride":
        raise UserError(f"fail_if has {key}, but only protocol.name=hf_stride has it")
