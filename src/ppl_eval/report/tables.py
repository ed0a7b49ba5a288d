"""Tables for the terminal."""

import math
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ppl_eval.metrics.names import FEWEST_DOCUMENTS
from ppl_eval.plural import counted, some

WIDTH = 80
"""Columns of a terminal that everything fits into, paths excepted."""

COLUMNS = (
    ("\ndocs", "counts", "documents"),
    ("scored\ntokens", "counts", "scored_tokens"),
    ("token\nppl", "metrics", "token_perplexity"),
    ("doc-mean\nppl", "metrics", "document_mean_perplexity"),
    ("word\nppl", "metrics", "word_perplexity"),
    ("byte\nppl", "metrics", "byte_perplexity"),
    ("bits/\nbyte", "metrics", "bits_per_byte"),
    ("bits/\nchar", "metrics", "bits_per_character"),
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


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as a table: the first column to the left, the others to the right.

    The first row is the heading; its cells may have several lines. Where the table is wider than a
    terminal, columns stand closer, and then names of the first column lose their middle.
    """
    headings = [cell.split("\n") for cell in rows[0]]
    height = max(map(len, headings))
    top = list(zip(*([""] * (height - len(cell)) + cell for cell in headings), strict=True))
    body = [[_printable(row[0]), *row[1:]] for row in rows[1:]]
    widths = [max(map(columns, column)) for column in zip(*top, *body, strict=True)]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    room = WIDTH - sum(widths[1:]) - gap * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, _SHORTEST_NAME))

    def line(row: Sequence[str]) -> str:
        name = shortened(row[0], widths[0])
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        name += " " * (widths[0] - columns(name))
        return (" " * gap).join([name, *cells]).rstrip()

    rule = "-" * (sum(widths) + gap * (len(widths) - 1))
    return "\n".join([*map(line, top), rule, *map(line, body)])


_SHORTEST_NAME = 6


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for each Chinese character."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it takes more than ``most`` columns."""
    if columns(text) <= most:
        return text
    head, tail = text, text
    while columns(head) > (most - 2) // 2:
        head = head[:-1]
    while columns(tail) > most - 3 - columns(head):
        tail = tail[1:]
    return f"{head}...{tail}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def number(value: float | int) -> str:
    """A number as people read it, in at most 9 characters: 1,234 or 24.7184 or 1.23e+09.

    Whole numbers from ten million on are rounded: 12.35M.
    """
    if isinstance(value, int):
        return _whole(value)
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e-3:
        for decimals in (4, 2, 1, 0):
            text = f"{value:,.{decimals}f}"
            if len(text) <= _DIGITS:
                return text
    text = f"{value:.2e}"
    return text if len(text) <= _DIGITS else f"{value:.1e}"


_DIGITS = 8


def _whole(value: int) -> str:
    if abs(value) < 10_000_000:
        return f"{value:,}"
    for unit, size in (("M", 10**6), ("B", 10**9), ("T", 10**12)):
        if abs(value) < 999.95 * size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.2e}"


def entries(pairs: Iterable[tuple[str, str]], indent: int) -> str:
    """Names to the left and texts beside them, in lines that fit a terminal.

    A text may have several lines; each is broken at spaces alone, so a path stays whole.
    """
    lines = []
    for name, text in pairs:
        for line in text.split("\n"):
            for part in wrapped(line, WIDTH - indent):
                lines.append(f"{name:<{indent}}{part}".rstrip())
                name = ""
    return "\n".join(lines)


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """Lines of at most ``width`` characters; what :func:`kept` made is not broken."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def kept(text: str) -> str:
    """A text that :func:`wrapped` does not break."""
    return text.replace(" ", _NO_BREAK)


_NO_BREAK = "\N{NO-BREAK SPACE}"


def describe_run(content: Mapping[str, Any]) -> str:
    """What was measured and how: the lines above the table."""
    protocol, counts, environment = content["protocol"], content["counts"], content["environment"]
    performance, config = content["performance"], content["config"]
    dataset = config["dataset"]
    files = dataset.get("data_files") or dataset.get("source")
    checkpoint = config["checkpointer"].get("checkpoint_dir", "")
    lines = [
        ("model", f"{config['model']['_component_']} {checkpoint}".rstrip() + _adapted(config)),
        (
            "text",
            some([files] if isinstance(files, str) else [*(files or [])], 2)
            or ", ".join(dataset.get("corpora", ()))
            or dataset["_component_"],
        ),
        ("protocol", describe_protocol(protocol)),
        ("scored", _scored(counts)),
        (
            "mesh",
            f"{environment['mesh']['description']} on {environment['num_processes']} x"
            f" {environment['device']}, "
            + kept(f"{environment['dtype']} (checkpoint {environment['checkpoint_dtype']})"),
        ),
        ("speed", f"{performance['tokens_per_s']:,.0f} scored tokens/s"),
    ]
    if "teacher" in content:
        teacher = content["teacher"]
        about = kept(f"{teacher['dtype']} (checkpoint {teacher['checkpoint_dtype']})")
        if teacher["mesh"] != environment["mesh"]:
            about += f" on {teacher['mesh']['description']}"
        named = f"{teacher['model']} {teacher['checkpoint_dir'] or ''}".rstrip()
        lines.insert(1, ("teacher", f"{named}, {about}"))
    interval = content["intervals_95"]["token_perplexity"]
    if interval is not None:
        low, high = map(number, interval)
        text = f"token ppl {low} to {high} (95 %, clustered by document)"
        lines.insert(len(lines) - 2, ("interval", text))
    elif 1 < counts["documents_scored"] < FEWEST_DOCUMENTS:  # one may be a stream of many
        lines.insert(len(lines) - 2, ("interval", too_few(counts["documents_scored"])))
    return entries(lines, 10)


def too_few(num_documents: int) -> str:
    """Why there is no interval."""
    return (
        f"none, too few documents: {counted(num_documents, 'document')}, at least"
        f" {FEWEST_DOCUMENTS} are needed"
    )


def _scored(counts: Mapping[str, Any]) -> str:
    """How many tokens counted, and how many did not and why."""
    skipped = counts["not_scored"]
    reasons = [
        f"{counted(skipped[reason], 'token')} {why}"
        for reason, why in (
            ("no_context", "without context"),
            ("context_only", "as context only"),
            ("truncated", "truncated"),
            ("masked", "masked"),
        )
        if skipped[reason]
    ]
    if skipped["empty"]:
        reasons.append(counted(skipped["empty"], "empty document"))
    scored = counted(counts["scored_tokens"], "token")
    documents = counted(counts["documents"], "document")
    return f"{scored} of {documents}; not scored: {', '.join(map(kept, reasons)) or 'none'}"


def _adapted(config: Mapping[str, Any]) -> str:
    adapter = config["adapter"]
    how = "merged" if adapter["merge"] else "not merged"
    return "" if adapter["dir"] is None else f", adapter {adapter['dir']} ({how})"


def describe_workload(workload: Any, mesh: str, num_ranks: int) -> list[str]:
    """How much is about to run, in two lines.

    Args:
        workload: of :mod:`ppl_eval.evaluation.loop`.
        mesh: described.
        num_ranks: data-parallel ranks.
    """
    windows, plan, corpus = workload.windows, workload.plan, workload.corpus
    return [
        f"{counted(len(corpus.documents), 'document')},"
        f" {counted(corpus.num_tokens.sum(), 'token')}: {counted(len(windows), 'window')} in"
        f" {counted(len(plan.batches), 'batch')} ({padding(workload):.1%} padding)",
        f"{counted(plan.num_steps(num_ranks), 'step')} on {mesh}",
    ]


def padding(workload: Any) -> float:
    """Share of the input positions that hold no token."""
    return float(1 - workload.windows.num_inputs.sum() / workload.plan.num_positions.sum())


def describe_protocol(protocol: Mapping[str, Any]) -> str:
    """One line such as ``document: windows of 1,024 tokens, no overlap, no BOS, no EOS``."""
    stride = protocol["stride"]
    overlap = "no overlap" if stride is None else f"stride {stride:,}"
    bos = "no BOS" if protocol["bos_id"] is None else "BOS first"
    if protocol["name"] == "lm_eval_rolling":
        bos = "prefix token" if protocol["opening_id"] is None else "prefix token, BOS scored"
    eos = "no EOS" if protocol["eos_id"] is None else "EOS scored"
    window = f"windows of {counted(protocol['max_seq_len'], 'token')}"
    joined = protocol["separator"]
    joined = "" if joined is None else f", texts joined by {joined!r}"
    return f"{protocol['name']}: {window}, {overlap}, {bos}, {eos}{joined}"
