"""``ppl-eval compare``: names, order, formats, what is established, and what is not compared."""

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from ppl_eval.commands.compare import compare
from ppl_eval.errors import UserError
from ppl_eval.report.layout import columns

PROTOCOL = {"name": "document", "max_seq_len": 64, "bos_id": 1, "quirks": []}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the results of a run: its folder, the NLL of each document of 10, 20, ... tokens."""
    monkeypatch.chdir(tmp_path)

    def run(name, nll, protocol=(), **fingerprints):
        nll = list(map(float, nll))
        tokens = [10 * n for n in range(1, len(nll) + 1)]
        perplexity = math.exp(min(sum(nll) / sum(tokens), 700))
        metrics = {
            "token_perplexity": perplexity,
            "document_mean_perplexity": 2.0,
            "word_perplexity": None,
            "byte_perplexity": perplexity ** (1 / 5),
            "bits_per_byte": 0.5,
            "overflow": True,
        }
        counts = {"documents": len(nll), "scored_tokens": sum(tokens)}
        part = {"counts": counts, "metrics": metrics}
        content = {
            "schema_version": 1,
            **part,
            "domains": {"d": part},
            "protocol": {**PROTOCOL, **dict(protocol)},
            "fingerprints": {"data": "a", "tokenizer": "b", "protocol": "c", **fingerprints},
        }
        Path(name).mkdir(parents=True)
        Path(name, "results.json").write_text(json.dumps(content))
        rows = [
            {"nll_nats_sum": nats, "scored_tokens": count, "bytes": 5 * count}
            for nats, count in zip(nll, tokens, strict=True)
        ]
        Path(name, "documents.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return Path(name)

    return run


def interval(first, second, tokens):
    """Jackknife over documents of ln of the ratio, with Student's t: a plain loop."""
    difference, tokens = np.subtract(second, first), np.asarray(tokens)
    count = len(tokens)
    left_out = [
        (difference.sum() - difference[n]) / (tokens.sum() - tokens[n]) for n in range(count)
    ]
    variance = (count - 1) / count * sum((x - np.mean(left_out)) ** 2 for x in left_out)
    half = stats.t.ppf(0.975, count - 1) * math.sqrt(variance)
    value = difference.sum() / tokens.sum()
    return [math.exp(value - half), math.exp(value + half)]


def rows_of(shown):
    table = shown.split("\n\n")[0].split("\n")
    return [line.split()[0] for line in table[3:]]


BEFORE, AFTER = [20, 41, 62, 80], [12, 22, 36, 45]


def test_the_ratio_and_what_it_establishes(write):
    folders = [write("before", BEFORE), write("after", AFTER), write("again", [21, 40, 63, 79])]
    shown = compare(folders).replace("\n ", "")
    low, high = interval(BEFORE, AFTER, [10, 20, 30, 40])
    ratio = math.exp((sum(AFTER) - sum(BEFORE)) / 100)
    assert (
        f"after: perplexity x {ratio:.3f} of before (95 % {low:.3f} to {high:.3f}); the difference"
        " is established" in shown
    )
    assert "again: perplexity x 1.000 of before" in shown
    assert shown.count("the difference is established") == 1
    assert shown.count("the difference is not established") == 1
    record = json.loads(compare(folders, format="json"))[1]["against_baseline"][0]
    assert record["ratio"] == pytest.approx(ratio, rel=1e-12)
    assert record["interval_95"] == pytest.approx([low, high], rel=1e-9)
    assert record["established"] is True


def test_two_documents_establish_nothing(write):
    shown = compare([write("a", [10, 21]), write("b", [12, 22])])
    assert (
        f"b: perplexity x {math.exp(0.1):.3f} of a; no interval (2 documents of at least" in shown
    )
    assert "so nothing is established" in shown.replace("\n ", "")


def test_another_baseline_and_order(write):
    folders = [write("a", BEFORE), write("b", AFTER), write("c", [30, 50, 70, 90])]
    shown = compare(folders, baseline=folders[1], sort="token_perplexity")
    assert rows_of(shown) == ["b", "a", "c"]
    assert "a: perplexity x" in shown
    assert "of b (95 %" in shown
    assert rows_of(compare(folders[:1], baseline=folders[1])) == ["a", "b"]
    assert rows_of(compare(folders, sort="word_perplexity")) == ["a", "b", "c"]  # all null
    with pytest.raises(UserError, match="'perplexty', which is no metric; did you mean"):
        compare(folders, sort="perplexty")
    with pytest.raises(UserError, match="--baseline is none, which has no results.json"):
        compare(folders, baseline=Path("none"))


def test_names_are_the_shortest_that_tell_runs_apart(write):
    paths = ("sweep/a/out", "sweep/b/out", "b/out", "last")
    folders = [write(path, BEFORE) for path in paths]
    names = [record["name"] for record in json.loads(compare(folders, format="json"))]
    assert names[:2] == ["a/out", "sweep/b/out"]
    assert names[2].endswith("/b/out")
    assert names[3] == "last"
    same = [folders[0], folders[0] / "results.json", folders[0].resolve()]
    assert rows_of(compare(same, baseline=folders[0].resolve())) == ["out"]  # once


def test_a_folder_without_results_is_left_out(write):
    (Path("killed")).mkdir()
    shown = compare([write("a", BEFORE), Path("killed"), Path("nowhere")])
    assert rows_of(shown) == ["a"]
    assert "note: killed has no results.json: left out" in shown
    assert "note: nowhere has no results.json: left out" in shown
    with pytest.raises(UserError, match=r"no results.json in killed: have the runs ended\?"):
        compare([Path("killed")])


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"data": "z"}, "it read other texts"),
        ({"protocol": {"max_seq_len": 32}}, "its protocol differs: max_seq_len is 32, not 64"),
        ({"protocol": {"bos_id": None}}, "its protocol differs: bos is False, not True"),
    ],
)
def test_what_cannot_be_compared(write, more, reason):
    folders = [write("a", BEFORE), write("b", AFTER, **more)]
    with pytest.raises(UserError, match=f"b cannot be compared with a: {reason}"):
        compare(folders)
    shown = compare(folders, force=True)
    assert "b *" in shown
    assert f"note: * b: {reason}" in shown.replace("\n ", "")
    assert "established" not in shown


def test_other_tokenizers_are_compared_by_byte(write):
    other = write("b", AFTER, {"bos_id": 7}, tokenizer="other")
    shown = compare([write("a", BEFORE), other])
    heading = " ".join(shown.split("\n")[0].split())
    assert heading == "scored byte bits/ bits/"
    ratio = math.exp((sum(AFTER) - sum(BEFORE)) / 500)
    assert f"b: byte perplexity x {ratio:.3f} of a" in shown
    assert "the tokenizers differ" in shown
    forced = compare([Path("a"), other], force=True)
    assert "token" in forced.split("\n")[0]
    assert "note: * b: its tokenizer differs" in forced


def test_a_difference_beyond_float64(write):
    folders = [write("a", BEFORE), write("b", [8_000.5 * n for n in range(1, 5)])]
    assert "b: perplexity x inf of a" in compare(folders)
    record = json.loads(compare(folders, format="json"))[1]["against_baseline"][0]
    assert record["ratio"] is None
    assert record["interval_95"] == [None, None]


def test_a_run_without_documents_is_told(write):
    folders = [write("a", BEFORE), write("b", AFTER)]
    (folders[1] / "documents.jsonl").unlink()
    shown = compare(folders)
    assert "note: b has no documents.jsonl, so it takes part in no paired difference" in shown
    assert "established" not in shown


def test_csv_and_markdown(write):
    folders = [write("a", BEFORE), write("b|c", AFTER)]
    rows = list(csv.DictReader(io.StringIO(compare(folders, format="csv"))))
    assert [row["name"] for row in rows] == ["a", "b|c"]
    assert float(rows[1]["token_perplexity"]) == math.exp(sum(AFTER) / 100)
    assert float(rows[1]["ratio"]) == pytest.approx(math.exp((sum(AFTER) - sum(BEFORE)) / 100))
    assert rows[0]["ratio"] == rows[0]["word_perplexity"] == ""
    lines = compare(folders, format="markdown").split("\n")
    assert lines[0].startswith("|  | docs | scored tokens | token ppl |")
    assert lines[1] == "| --- |" + " ---: |" * 8
    assert lines[3].startswith(r"| b\|c | 4 | 100 |")
    assert len({line.replace(r"\|", "").count("|") for line in lines[:4]}) == 1


def test_everything_fits_a_terminal(write):
    folders = [write(f"{'long_' * 20}{n}/out", [n + x for x in BEFORE]) for n in range(4)]
    assert all(columns(line) <= 80 for line in compare(folders, with_domains=True).split("\n")[:12])


@pytest.mark.parametrize(
    ("content", "reason"),
    [('{"schema_version": 1}', "lacks counts, domains"), ("{", "is not readable JSON")],
)
def test_files_that_are_no_results(write, content, reason):
    folder = write("a", BEFORE)
    (folder / "results.json").write_text(content)
    with pytest.raises(UserError, match=reason):
        compare([folder])
