"""``fail_if``: the metrics that a run bounds, checked before the run and held after it."""

import difflib
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
"""Section of results.json -> its names that can be bounded."""

_NEED_WHOLE_TEXT = {metric.key for metric in METRICS if metric.unit in WHOLE_TEXT}


def check_limits(limits: Mapping[str, Any], protocol: str) -> None:
    """Refuse what results do not have, or what is no number.

    Args:
        limits: dotted key -> the most allowed, as in ``fail_if``.
        protocol: name of the protocol: only hf_stride has ``hf_perplexity``.

    Raises:
        UserError: a name that results do not have, or a limit that is not a number.
    """
    for key, limit in limits.items():
        _check_name(key, protocol)
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise UserError(f"fail_if.{key} is {limit!r}, but it is a number: the most allowed")


def check_domains(keys: Iterable[str], domains: Collection[str]) -> None:
    """Refuse a limit on a domain that the text does not have.

    Args:
        keys: the dotted keys of ``fail_if``.
        domains: names of the text's domains.

    Raises:
        UserError: naming those that there are.
    """
    for key in keys:
        path, _ = _split(key)
        if (path[0] == "domains" and path[1] not in domains) or (
            path[0] == "macro" and not domains
        ):
            there = f"the domains {', '.join(sorted(domains))}" if domains else "no domains"
            raise UserError(f"fail_if has {key}, but the text has {there}")


def check_known(keys: Iterable[str], num_left_out: int, protocol: str) -> None:
    """Refuse a limit on what is null because the protocol does not score all tokens.

    Args:
        keys: the dotted keys of ``fail_if``.
        num_left_out: tokens that are never read, or read and never scored.
        protocol: its name.

    Raises:
        UserError: naming the key, and what can be limited instead.
    """
    for key in keys if num_left_out else ():
        if _split(key)[1] in _NEED_WHOLE_TEXT:
            raise UserError(
                f"fail_if has {key}, but protocol.name={protocol} leaves out"
                f" {counted(num_left_out, 'token')} of this text, so that no loss by word, byte or"
                " character is known: limit metrics.token_perplexity"
            )


def over_limits(content: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """What of ``fail_if`` a results.json exceeds, in one sentence; None if nothing.

    A metric that is null (not finite, or without tokens) exceeds every limit.

    Args:
        content: of the results.json.
        limits: of ``fail_if``, checked before the run.
    """
    problems = []
    for key, limit in limits.items():
        path, name = _split(key)
        value: Any = content
        for part in (*path, name):
            value = value[part]
        if value is None:
            problems.append(f"{key} is null, which no limit allows")
        elif value > limit:
            problems.append(f"{key} is {value:.6g}, above {limit:g}")
    return f"fail_if: {'; '.join(problems)}" if problems else None


def _split(key: str) -> tuple[tuple[str, ...], str]:
    """``domains.a.b.metrics.NAME`` is NAME of the metrics of the domain ``a.b``."""
    section, _, name = key.rpartition(".")
    if section.startswith("domains.") and section.endswith(".metrics"):
        domain = section.removeprefix("domains.").removesuffix(".metrics")
        return ("domains", domain, "metrics"), name
    return tuple(section.split(".")), name


def _check_name(key: str, protocol: str) -> None:
    section, _, name = key.rpartition(".")
    known = dict(_NAMES)
    path, _ = _split(key)
    if path[0] == "domains" and path[-1] == "metrics":
        known[section] = tuple(each for each in _METRICS if each != "hf_perplexity")
    if name == "hf_perplexity" and name in known.get(section, ()) and protocol != "hf_stride":
        raise UserError(f"fail_if has {key}, but only protocol.name=hf_stride has it")
    if name in known.get(section, ()):
        return
    every = [f"{section}.{each}" for section, names in known.items() for each in names]
    same = [each for each in every if each.endswith(f".{name}")]
    of_section = [each for each in same if each.startswith(key.split(".")[0])]
    close = of_section or same or difflib.get_close_matches(key, every, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    for section, names in known.items():
        if f"{key}.".startswith(f"{section}."):
            listed = ", ".join(f"{section}.{each}" for each in names)
            raise UserError(f"fail_if has {key}, but it is one of {listed}{hint}")
    raise UserError(
        f"fail_if has {key}, but it is metrics.NAME, domains.DOMAIN.metrics.NAME, macro.NAME, or"
        f" with a teacher fidelity.NAME or teacher.metrics.NAME{hint}"
    )
