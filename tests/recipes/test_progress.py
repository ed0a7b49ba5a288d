"""What one sees while a run goes on: lines in a log, a bar on a terminal."""

import io
import json
import re
import sys
from pathlib import Path

import pytest

from ppl_eval import cli, shipped
from ppl_eval.report.layout import columns

TOKENISING = re.compile(r"tokenising \((\d+\.\d) %\), \d\d:\d\d left")
SCORING = re.compile(
    r"([\d,]+) of 9,155 tokens \((\d+\.\d) %\), [\d,]+ tokens/s, ppl (\d\.\d+), \d\d:\d\d left"
)
NOISE = re.compile(r"noise floor \((\d+\.\d) %\), \d\d:\d\d left")


@pytest.fixture
def tune(run_recipe):
    """Run the embedded pair on 40 documents: (exit code, stdout, stderr)."""
    return lambda *args: run_recipe("tiny_pair_ppl_eval", "max_documents=40", *args)


def test_lines_in_a_log(tune):
    """6 batches, the last of which is small; number 0 is read once more for the noise."""
    code, _, err = tune("log_every_s=0")
    assert code == 0, err
    lines = err.splitlines()
    assert all(len(line) <= 80 for line in lines if "left" in line)
    assert len([line for line in lines if TOKENISING.fullmatch(line)]) == 0  # 40 are done at once
    found = [match.groups() for line in lines if (match := SCORING.fullmatch(line))]
    assert len(found) == 5
    tokens, percents, perplexities = zip(*found, strict=True)
    # the longest windows come first, 8 of 255 positions in a batch
    assert [int(n.replace(",", "")) for n in tokens[:2]] == [8 * 255, 2 * 8 * 255]
    assert all(1 < float(ppl) < 2 for ppl in perplexities)
    shares = [float(percent) for percent in percents]
    assert shares == sorted(shares)
    noise = [match.group(1) for line in lines if (match := NOISE.fullmatch(line))]
    # six batches are read and the noise floor is left: 2,040 of its and their positions
    assert len(noise) == 1
    assert shares[-1] < float(noise[0]) < 100


def test_a_short_run_has_no_lines(tune):
    assert "left" not in tune("noise_floor=false")[2]


def test_the_log_level_silences_lines(tune):
    assert tune("log_every_s=0", "log_level=WARNING")[2].count("\n") <= 1  # the logger's own


def test_lines_while_documents_become_tokens(tune, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("a b c\n" * 200)
    args = (f"dataset.data_files={texts}", "max_documents=null", "log_every_s=0")
    code, _, err = tune(*args)
    assert code == 0, err
    shares = [TOKENISING.fullmatch(line) for line in err.splitlines() if "tokenising" in line]
    assert [share and share.group(1) for share in shares] == ["32.0", "64.0", "96.0"]


class Terminal(io.StringIO):
    """A stderr on which bars are drawn."""

    def isatty(self):
        return True


def test_a_bar_on_a_terminal(tune, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    code, _, _ = tune("log_every_s=0")
    assert code == 0
    shown = [text.strip("\n") for text in terminal.getvalue().split("\r")]
    bars = [text for text in shown if "tok/s" in text or "noise floor, " in text]
    assert [text for text in bars if len(text) > 80] == []
    assert any("noise floor, " in text for text in bars)
    assert bars[-1].startswith("100 %|")
    assert "9.15k/9.15k tok, " in bars[-1] or "9.16k/9.16k tok, " in bars[-1]
    assert not any(text.startswith("100") and "noise floor" in text for text in bars)
    assert not any(SCORING.search(text) or "tokenising" in text for text in shown)


def test_results_say_which_budget_was_used(run_recipe):
    """Left open, a CPU's; the noise floor, switched off, is null."""
    folders = [shipped.embedded_path(name) for name in ("tiny_student", "tiny_teacher")]
    code, out, err = run_recipe(
        "auto_ppl_eval",
        *(f"{n}checkpoint_dir={f}" for n, f in zip(("", "teacher_"), folders, strict=True)),
        f"dataset.data_files={shipped.embedded_path('tiny_text')}/heldout.jsonl",
        *("protocol.max_seq_len=256", "dtype=fp32", "max_documents=8", "output_dir=out"),
        *("device=cpu", "noise_floor=false"),
    )
    assert code == 0, err
    content = json.loads(Path("out/results.json").read_text())
    assert content["config"]["max_tokens_per_batch"] == 1024
    assert content["fidelity"]["noise_floor"] is None
    assert "noise floor" not in out


CHINESE = "\u5929\u5730\u7384\u9ec4\u5b87\u5b99\u6d2a\u8352"


def test_a_result_fits_a_terminal(run_recipe, tmp_path, monkeypatch, capsys):
    """With a teacher, Chinese, a domain and a folder of long names, a word perplexity that
    overflows, a text of two documents: the run and a comparison with another."""
    texts = [{"text": CHINESE * 5, "domain": "\u5343\u5b57\u6587"}]
    texts += [{"text": "one two three " * 4, "domain": "a domain with a very long name " * 3}]
    text = tmp_path / "texts.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in texts))
    folders = [f"out/{name}{'_long' * 10}" for name in ("first", "second")]
    for folder in folders:
        args = (f"dataset.data_files={text}", f"output_dir={folder}")
        code, out, err = run_recipe("tiny_pair_ppl_eval", *args)
        assert code == 0, err
        lines = out.splitlines()
        assert [line for line in lines if columns(line) > 80 and "/" not in line] == []
        assert "interval  none, too few documents: 2 documents, at least 3 are needed" in lines
        table = [line.split() for line in lines if line.startswith(("  \u5343", "  a dom"))]
        assert [len(row) for row in table if row[0].startswith("\u5343")] == [9, 9]
        # docs, tokens, token, doc-mean, word, byte, bits/byte, bits/char
        content = json.loads(Path(folder, "results.json").read_text())
        for (name, part), row in zip(content["domains"].items(), table[:2], strict=True):
            few_words, metrics = name.startswith("\u5343"), part["metrics"]
            assert metrics["few_words"] is few_words
            assert metrics["overflow"] == (metrics["word_perplexity"] is None) == few_words
            assert (row[-4] == "-") == few_words
            assert float(row[-1]) == pytest.approx(metrics["bits_per_character"], rel=1e-4)
    monkeypatch.setattr(sys, "argv", ["ppl-eval", "compare", *folders, "--domains"])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(columns, lines)) <= 80
    assert any("no interval (2 documents of at least" in line for line in lines)
