"""``fail_if``: upper limits on metrics, checked before the run and compared with its results."""

import difflib
import functools
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.metrics.definitions import FIDELITY, MACRO, METRICS, WHOLE_TEXT
from ppl_eval.plural import counted

_METRICS = ("nll_nats_per_token", *(metric.key for metric in METRICS), "hf_perplexity")
_NAMES = {
    "metrics": _METRICS,
    "fidelity": tuple(each.key for each in FIDELITY if each.less_is_better),
    "macro": tuple(metric.key for metric in MACRO),
    "teacher.metrics": _METRICS,
}
"""Section of results.json -> its names that can be limited."""

_OF_DOMAIN = re.compile(r"domains\.(.+)\.metrics\.([^.]*)")
_NEED_WHOLE_TEXT = {metric.key for metric in METRICS if metric.unit in WHOLE_TEXT}


def check_limits(limits: Mapping[str, Any], protocol: str) -> None:
    """Refuse a key that results do not have with this protocol, and a limit that is no number."""
    for key, limit in limits.items():
        _check_name(key, protocol)
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise UserError(f"fail_if.{key} is {limit!r}, but it is a number: the most allowed")


def check_domains(keys: Iterable[str], domains: Collection[str]) -> None:
    """Refuse a limit on a domain that the text does not have, naming the domains that it has."""
    for key in keys:
        section, domain, *_ = _path(key)
        if (section == "domains" and domain not in domains) or (section == "macro" and not domains):
            found = f"the domains {', '.join(sorted(domains))}" if domains else "no domains"
            raise UserError(f"fail_if has {key}, but the text has {found}")


def check_known(keys: Iterable[str], num_left_out: int, protocol: str) -> None:
    """Refuse a limit on a metric that is null because the protocol does not score all tokens.

    ``num_left_out`` is the number of tokens that are never read, or read and never scored.
    """
    for key in keys if num_left_out else ():
        if _path(key)[-1] in _NEED_WHOLE_TEXT:
            raise UserError(
                f"fail_if has {key}, but protocol.name={protocol} leaves out"
                f" {counted(num_left_out, 'token')} of this text, so that no loss by word, byte or"
                " character is known: limit metrics.token_perplexity"
            )


def over_limits(content: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """One sentence about the limits that a results.json exceeds; None if it exceeds none.

    A metric that is null (not finite, or without tokens) exceeds every limit.
    """
    problems = []
    for key, limit in limits.items():
        value: Any = functools.reduce(operator.getitem, _path(key), content)
        if value is None:
            problems.append(f"{key} is null, which no limit allows")
        elif value > limit:
            problems.append(f"{key} is {value:.6g}, above {limit:g}")
    return f"fail_if: {'; '.join(problems)}" if problems else None


def _path(key: str) -> list[str]:
    """Keys that lead into results.json; the name of a domain may have dots."""
    domain = _OF_DOMAIN.fullmatch(key)
    return ["domains", domain[1], "metrics", domain[2]] if domain else key.split(".")


def _check_name(key: str, protocol: str) -> None:
    section, _, name = key.rpartition(".")
    known = dict(_NAMES)
    if _OF_DOMAIN.fullmatch(key):
        known[section] = tuple(each for each in _METRICS if each != "hf_perplexity")
    if name in known.get(section, ()):
        if name == "hf_perplexity" and protocol != "hf_stride":
            raise UserError(f"fail_if has {key}, but only protocol.name=hf_stride has it")
        return
    every = [f"{section}.{each}" for section, names in known.items() for each in names]
    same_name = [each for each in every if each.endswith(f".{name}")]
    same_name.sort(key=lambda each: not each.startswith(key.split(".")[0]))
    close = same_name or difflib.get_close_matches(key, every, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    allowed = "metrics.NAME, domains.DOMAIN.metrics.NAME, macro.NAME, or with a teacher"
    allowed += " fidelity.NAME or teacher.metrics.NAME"
    for section, names in known.items():
        if f"{key}.".startswith(f"{section}."):
            allowed = f"one of {', '.join(f'{section}.{each}' for each in names)}"
    raise UserError(f"fail_if has {key}, but it is {allowed}{hint}")
