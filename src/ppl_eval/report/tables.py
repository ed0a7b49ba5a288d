"""Results as tables: a row for each run, domain and teacher."""

from collections.abc import Mapping, Sequence
from typing import Any

from ppl_eval.metrics.definitions import METRICS
from ppl_eval.plural import counted
from ppl_eval.report.layout import align, number

Column = tuple[str, str, str]
"""Heading, section of results.json, key."""

COUNTS: tuple[Column, ...] = (
    ("\ndocs", "counts", "documents"),
    ("scored\ntokens", "counts", "scored_tokens"),
)


def columns_of(*, by_bytes: bool = False) -> tuple[Column, ...]:
    """The columns of a table of results.

    Args:
        by_bytes: only those that can be compared between tokenizers.
    """
    units = ("bytes", "characters") if by_bytes else {each.unit for each in METRICS}
    chosen = (each for each in METRICS if each.unit in units)
    return (*COUNTS, *((each.heading, "metrics", each.key) for each in chosen))


_MOST_DOMAINS = 20


def result_rows(
    content: Mapping[str, Any],
    name: str,
    columns: Sequence[Column] = columns_of(),
    *,
    with_domains: bool = True,
) -> list[list[str]]:
    """Rows of one results.json: the whole, then (at most 20 of) its domains."""
    domains = list(content["domains"].items()) if with_domains else []
    parts = [(name, content), *((f"  {d}", part) for d, part in domains[:_MOST_DOMAINS])]
    rows = [
        [title, *(_cell(part, section, key) for _, section, key in columns)]
        for title, part in parts
    ]
    if len(domains) > _MOST_DOMAINS:
        more = f"  ... {counted(len(domains) - _MOST_DOMAINS, 'more domain')}"
        rows.append([more, *("" for _ in columns)])
    return rows


def teacher_rows(
    content: Mapping[str, Any],
    name: str,
    columns: Sequence[Column] = columns_of(),
    *,
    with_domains: bool = True,
) -> list[list[str]]:
    """Rows of the teacher in one results.json; it read the same tokens."""
    whole = {**content["teacher"], "counts": content["counts"]}
    return result_rows(whole, name, columns, with_domains=with_domains)


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
    return align([["", *(heading for heading, _, _ in columns_of())], *rows])
