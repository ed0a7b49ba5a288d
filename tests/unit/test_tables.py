"""Tables and lines for a terminal of 80 columns, whatever they hold."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppl_eval.commands.compare import fidelity_rows
from ppl_eval.commands.runs import Run
from ppl_eval.plural import counted
from ppl_eval.report.layout import align, columns, number, shortened
from ppl_eval.report.tables import result_rows, result_table

METRICS = (
    "token_perplexity",
    "document_mean_perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
    "bits_per_character",
)
FIDELITY = (
    "perplexity_ratio",
    "kl_teacher_student_nats",
    "kl_student_teacher_nats",
    "js_nats",
    "top1_agreement",
    "top5_agreement",
)

names = st.text(max_size=200)
counts = st.integers(0, 10**14)
values = st.none() | st.floats(0, 1.7e308)
metrics = st.fixed_dictionaries(
    {**dict.fromkeys(METRICS, values), "overflow": st.booleans(), "few_words": st.booleans()}
)
parts = st.fixed_dictionaries(
    {
        "counts": st.fixed_dictionaries({"documents": counts, "scored_tokens": counts}),
        "metrics": metrics,
    }
)
domains = st.dictionaries(names, parts, max_size=25)


def fits(table):
    return all(columns(line) <= 80 for line in table.split("\n"))


@given(parts, names, domains)
def test_a_table_of_results_fits(part, name, domains):
    table = result_table(result_rows({**part, "domains": domains}, name))
    assert fits(table)
    shown = 1 + len(domains) if len(domains) <= 20 else 22
    assert len(table.split("\n")) == 2 + 1 + shown


@given(
    st.lists(st.fixed_dictionaries(dict.fromkeys(FIDELITY, values)), min_size=1, max_size=4),
    st.lists(names, min_size=4, max_size=4),
)
def test_a_table_beside_a_teacher_fits(found, names):
    contents = [{"fidelity": {**part, "by_domain": {names[-1]: part}}} for part in found]
    runs = [Run(Path(), name, content) for name, content in zip(names, contents, strict=False)]
    assert fits(align(fidelity_rows(runs, with_domains=True)))


def test_a_usual_table_keeps_names_and_digits():
    part = {
        "counts": {"documents": 120, "scored_tokens": 26_695},
        "metrics": {
            **dict(
                zip(METRICS, (1.49167, 1.60189, 2.2335, 1.22506, 0.29287, 0.29287), strict=True)
            ),
            "overflow": False,
            "few_words": False,
        },
    }
    content = {**part, "domains": {"\u4e2d\u6587": part}}
    lines = result_table(result_rows(content, "tiny_teacher_ppl_eval")).split("\n")
    assert lines[0].split() == ["scored", "token", "doc-mean", "word", "byte", "bits/", "bits/"]
    assert lines[1].split() == ["docs", "tokens", *["ppl"] * 4, "byte", "char"]
    numbers = ["120", "26,695", "1.4917", "1.6019", "2.2335", "1.2251", "0.2929", "0.2929"]
    assert lines[3].split() == ["tiny_teacher_ppl_eval", *numbers]
    assert lines[4].split() == ["\u4e2d\u6587", *numbers]
    assert columns(lines[3]) == columns(lines[4]) == len(lines[2])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.2346"),
        (999.99999, "1,000.00"),
        (20_541.08, "20,541.1"),
        (123_456.7, "123,457"),
        (1.5e9, "1.50e+09"),
        (1e300, "1.0e+300"),
        (7.71e-14, "7.71e-14"),
        (0.0, "0.0"),
        (1, "1"),
        (9_999_999, "9,999,999"),
        (12_345_678, "12.35M"),
        (999_960_000, "1B"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@given(st.floats(0, 1.7e308) | st.integers(0, 10**15))
def test_a_number_is_short_and_near(value):
    text = number(value)
    assert len(text) <= 9
    for unit, size in (("M", "e6"), ("B", "e9"), ("T", "e12")):
        text = text.replace(unit, size)
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.05, abs_tol=0)


@given(st.text(max_size=100), st.integers(6, 100))
def test_a_shortened_name_has_both_ends(text, most):
    short = shortened(text, most)
    assert columns(short) <= most
    if short != text:
        head, _, tail = short.partition("...")
        assert text.startswith(head)
        assert text.endswith(tail)


def test_numbers_with_their_nouns():
    found = [counted(n, noun) for n, noun in ((1, "batch"), (2, "batch"), (0, "empty document"))]
    assert found == ["1 batch", "2 batches", "0 empty documents"]
    assert counted(1_000, "process") == "1,000 processes"
