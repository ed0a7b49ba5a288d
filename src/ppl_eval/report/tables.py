"""Tables for the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    ("documents", "counts", "documents"),
    ("scored tokens", "counts", "scored_tokens"),
    ("token ppl", "metrics", "token_perplexity"),
    ("doc-mean ppl", "metrics", "document_mean_perplexity"),
    ("word ppl", "metrics", "word_perplexity"),
    ("byte ppl", "metrics", "byte_perplexity"),
    ("bits/byte", "metrics", "bits_per_byte"),
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
        more = f"  ... {len(domains) - _MOST_DOMAINS} more domains"
        rows.append([more, *("" for _ in COLUMNS)])
    return rows


def teacher_rows(
    content: Mapping[str, Any], name: str, *, with_domains: bool = True
) -> list[list[str]]:
    """Rows of the teacher in one results.json; it read the same tokens."""
    whole = {**content["teacher"], "counts": content["counts"]}
    return result_rows(whole, name, with_domains=with_domains)


def _cells(part: Mapping[str, Any]) -> list[str]:
    null = "overflow" if part["metrics"]["overflow"] else "-"
    values = (part[section][key] for _, section, key in COLUMNS)
    return [null if value is None else number(value) for value in values]


def result_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of rows from :func:`result_rows`."""
    return align([["", *(heading for heading, _, _ in COLUMNS)], *rows])


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as a table: the first column to the left, the others to the right.

    The first row is the heading.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])


def number(value: float | int) -> str:
    """A number as people read it: 1,234 or 24.7184 or 1.2345e+09."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not math.isfinite(value):
        return str(value)
    return f"{value:,.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4e}"


def describe_run(content: Mapping[str, Any]) -> str:
    """What was measured and how: the lines above the table."""
    protocol, counts, environment = content["protocol"], content["counts"], content["environment"]
    skipped = counts["not_scored"]
    performance, config = content["performance"], content["config"]
    dataset = config["dataset"]
    checkpoint = config["checkpointer"].get("checkpoint_dir", "")
    lines = [
        ("model", f"{config['model']['_component_']} {checkpoint}".rstrip() + _adapted(config)),
        (
            "text",
            _some_of(dataset.get("data_files") or dataset.get("source"))
            or ", ".join(dataset.get("corpora", ()))
            or dataset["_component_"],
        ),
        ("protocol", describe_protocol(protocol)),
        (
            "scored",
            f"{counts['scored_tokens']:,} tokens of {counts['documents']:,} documents; not scored:"
            f" {skipped['no_context']:,} tokens without context, {skipped['context_only']:,} as"
            f" context only, {skipped['truncated']:,} truncated, {skipped['masked']:,} masked,"
            f" {skipped['empty']:,} empty documents",
        ),
        (
            "mesh",
            f"{environment['mesh']['description']} on {environment['num_processes']} x"
            f" {environment['device']}, {environment['dtype']}"
            f" (checkpoint {environment['checkpoint_dtype']})",
        ),
        ("speed", f"{performance['tokens_per_s']:,.0f} scored tokens/s"),
    ]
    if "teacher" in content:
        teacher = content["teacher"]
        about = f"{teacher['dtype']} (checkpoint {teacher['checkpoint_dtype']})"
        if teacher["mesh"] != environment["mesh"]:
            about += f" on {teacher['mesh']['description']}"
        named = f"{teacher['model']} {teacher['checkpoint_dir'] or ''}".rstrip()
        lines.insert(1, ("teacher", f"{named}, {about}"))
    interval = content["intervals_95"]["token_perplexity"]
    if interval is not None:
        low, high = map(number, interval)
        text = f"token ppl {low} to {high} (95 %, clustered by document)"
        lines.insert(len(lines) - 2, ("interval", text))
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _adapted(config: Mapping[str, Any]) -> str:
    adapter = config["adapter"]
    how = "merged" if adapter["merge"] else "not merged"
    return "" if adapter["dir"] is None else f", adapter {adapter['dir']} ({how})"


def describe_workload(workload: Any, mesh: str, num_ranks: int) -> str:
    """How much is about to run, in one line.

    Args:
        workload: of :mod:`ppl_eval.evaluation`.
        mesh: described.
        num_ranks: data-parallel ranks.
    """
    windows, plan, corpus = workload.windows, workload.plan, workload.corpus
    return (
        f"{len(corpus.documents):,} documents, {corpus.num_tokens.sum():,} tokens:"
        f" {len(windows):,} windows in {len(plan.batches):,} batches"
        f" ({padding(workload):.1%} padding), {plan.num_steps(num_ranks):,} steps on {mesh}"
    )


def padding(workload: Any) -> float:
    """Share of the input positions that hold no token."""
    return float(1 - workload.windows.num_inputs.sum() / workload.plan.num_positions.sum())


def _some_of(files: Any) -> str:
    if isinstance(files, list):
        return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
    return files or ""


def describe_protocol(protocol: Mapping[str, Any]) -> str:
    """One line such as ``document: windows of 1,024 tokens, no overlap, no BOS, no EOS``."""
    stride = protocol["stride"]
    overlap = "no overlap" if stride is None else f"stride {stride:,}"
    bos = "no BOS" if protocol["bos_id"] is None else "BOS first"
    if protocol["name"] == "lm_eval_rolling":
        bos = "prefix token" if protocol["opening_id"] is None else "prefix token, BOS scored"
    eos = "no EOS" if protocol["eos_id"] is None else "EOS scored"
    window = f"windows of {protocol['max_seq_len']:,} tokens"
    joined = protocol["separator"]
    joined = "" if joined is None else f", texts joined by {joined!r}"
    return f"{protocol['name']}: {window}, {overlap}, {bos}, {eos}{joined}"
