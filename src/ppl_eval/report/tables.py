"""Results as tables: a row for each run, domain and teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

from ppl_eval.metrics.definitions import METRICS
from ppl_eval.plural import counted
from ppl_eval.report.layout import align, number

COLUMNS = (
    ("\ndocs", "counts", "documents"),
    ("scored\ntokens", "counts", "scored_tokens"),
    *((metric.heading, "metrics", metric.key) for metric in METRICS),
)
"""Heading, section of results.json, key."""


_MOST_DOMAINS = 20


def result_rows(
    content: Mapping[str, Any], name: str, *, with_domains: bool = True
) -> list[list[str]]:
    """Rows of one results.json: the whole, then (at most 20 of) its domains."""
    domains = list(content["domains"].items()) if with_domains else []
    parts = [(name, content), *((f"  {d}", part) for d, part in domains[:_MOST_DOMAINS])]
    rows = [[title, *_cells(part)] for title, part in parts]
    if len(domains) > _MOST_DOMAINS:
        more = f"  ... {counted(len(domains) - _MOST_DOMAINS, 'more domain')}"
        rows.append([more, *("" for _ in COLUMNS)])
    return rows


def teacher_rows(
    content: Mapping[str, Any], name: str, *, with_domains: bool = True
) -> list[list[str]]:
    """Rows of the teacher in one results.json; it read the same tokens."""
    whole = {**content["teacher"], "counts": content["counts"]}
    return result_rows(whole, name, with_domains=with_domains)


def _cells(part: Mapping[str, Any]) -> list[str]:
    return [_cell(part, section, key) for _, section, key in COLUMNS]


def _cell(part: Mapping[str, Any], section: str, key: str) -> str:
    value = part[section].get(key)
    if key == "word_perplexity" and part["metrics"].get("few_words", False):
        return "-"
    if value is None:  # bits are a logarithm
        is_overflow = part["metrics"]["overflow"] and key.endswith("perplexity")
        return "overflow" if is_overflow else "-"
    return number(value)


def result_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of rows from :func:`result_rows`."""
    return align([["", *(heading for heading, _, _ in COLUMNS)], *rows])
