"""ppl-eval: what it lists, copies, compares, and says when it cannot."""

import json
import math
import os
import shlex
import subprocess
import sys

import pytest

import ppl_eval as ppl_eval_package
from ppl_eval import cli, shipped


@pytest.fixture
def ppl_eval(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["ppl-eval", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_ls(ppl_eval):
    _, out, _ = ppl_eval("ls")
    assert out.splitlines()[0].split() == ["RECIPE", "CONFIG"]
    assert {"ppl_eval", *shipped.config_names()} <= set(out.split())


def test_cp(ppl_eval, tmp_path):
    for args, file in (
        (["ppl_eval", "mine.py"], "mine.py"),
        (["ppl_eval", "mine2"], "mine2.py"),
        (["tiny_ppl_eval", "."], "tiny_ppl_eval.yaml"),
        (["smollm2/135M_ppl_eval", "a/b/c", "--make-parents"], "a/b/c.yaml"),
    ):
        code, out, err = ppl_eval("cp", *args)
        assert (code, err) == (0, "")
        name = args[0]
        source = shipped.recipe_path() if name == "ppl_eval" else shipped.config_path(name)
        assert (tmp_path / file).read_bytes() == source.read_bytes()
        assert file in out
    assert "--full is for a config" in ppl_eval("cp", "--full", "ppl_eval", "mine.py")[2]
    (tmp_path / "mine.py").write_text("edited")
    _, out, _ = ppl_eval("cp", "-n", "ppl_eval", "mine.py")
    assert (tmp_path / "mine.py").read_text() == "edited"
    assert "left as it is" in out


def test_what_cannot_be_copied(ppl_eval, tmp_path):
    assert ppl_eval("cp", "nothing", "x")[::2] == (
        1,
        "ppl_eval: error: 'nothing' is no shipped recipe or config: `ppl-eval ls` lists them\n",
    )
    code, _, err = ppl_eval("cp", "ppl_eval", "no/such/x")
    assert code == 1
    assert "--make-parents creates the folder" in err
    (tmp_path / "file").touch()
    code, _, err = ppl_eval("cp", "ppl_eval", "file/x", "--make-parents")
    assert code == 1
    assert "cannot write file/x.py: " in err


def test_where(ppl_eval):
    for name in shipped.EMBEDDED:
        _, out, _ = ppl_eval("where", name)
        assert os.path.isdir(out.strip())
    code, _, err = ppl_eval("where", "huge_teacher")
    assert code == 1
    assert "choose one of tiny_teacher" in err


COMMANDS = ["ls", "cp", "where", "check", "plan", "compare", "drop-layers"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_examples_that_parse(ppl_eval, command):
    code, out, _ = ppl_eval(*command.split(), "--help")
    assert code == 0
    examples = out.split("examples:\n")[1].strip().splitlines()
    for example in examples:
        words = shlex.split(example)
        assert words[:2] == ["ppl-eval", command or words[1]]
        cli._parser().parse_args(words[1:])


@pytest.mark.parametrize("module", ["ppl_eval", "ppl_eval.cli"])
def test_version(module):
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"ppl_eval {ppl_eval_package.__version__}\n"


def test_an_import_changes_nothing_of_logging_and_warnings():
    """Only programs silence what other libraries say."""
    code = """
import logging, warnings
def state():
    names = {n: l.level for n, l in logging.root.manager.loggerDict.items() if hasattr(l, "level")}
    return names, logging.root.level, logging.root.handlers[:], warnings.filters[:]
before = state()
import ppl_eval, ppl_eval.config
assert state() == before
ppl_eval.evaluate, ppl_eval.Perplexity, ppl_eval.Document
assert logging.getLogger("torchao").level == logging.NOTSET
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_homes_are_expanded(ppl_eval, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ppl_eval("cp", "tiny_ppl_eval", "~/mine.yaml")[0] == 0
    assert (tmp_path / "mine.yaml").is_file()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text(json.dumps(result(5.25)))
    assert ppl_eval("compare", "~/run")[0] == 0
    code, _, err = ppl_eval("check", "--config", "~/mine.yaml", "checkpoint_dir=~/no")
    assert (code, err) == (
        1,
        f"ppl_eval: error: checkpoint_dir is {tmp_path}/no, but there is no such folder\n",
    )


def test_overrides_stand_where_they_like(ppl_eval):
    args = ["seed=1", "--config", "tiny_ppl_eval", "dtype=fp8", "--num-processes", "2", "sede=1"]
    assert "unknown config key sede" in ppl_eval("check", *args)[2]
    assert "dtype is 'fp8'" in ppl_eval("check", *args[:-1])[2]
    code, _, err = ppl_eval("check", "--config", "tiny_ppl_eval", "--batch_size", "4")
    assert code == 1
    assert "--batch_size is not an option; " in err
    assert "set max_tokens_per_batch" in err
    code, _, err = ppl_eval("ls", "tiny")
    assert code == 2
    assert "unrecognized arguments: tiny" in err


def result(perplexity, **fingerprints):
    metrics = {
        "token_perplexity": perplexity,
        "document_mean_perplexity": 2.0,
        "word_perplexity": None,
        "byte_perplexity": 1.5,
        "bits_per_byte": 0.5,
        "overflow": True,
    }
    counts = {"documents": 3, "scored_tokens": 1234}
    part = {"counts": counts, "metrics": metrics}
    prints = {"data": "a", "tokenizer": "b", "protocol": "c", **fingerprints}
    return {"schema_version": 1, **part, "domains": {"d": part}, "fingerprints": prints}


def test_compare(ppl_eval, tmp_path):
    for name, content in (("one", result(5.25)), ("two", result(6.5, tokenizer="x"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(content))
    code, out, _ = ppl_eval("compare", "one", "two/results.json")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert rows[3] == ["one", "3", "1,234", "5.2500", "2.0000", "overflow", "1.5000", "0.5000", "-"]
    assert rows[4][:4] == ["two", "3", "1,234", "6.5000"]
    assert rows[5:] == [
        "note: the tokenizers differ: compare byte ppl and bits/byte, not token ppl".split()
    ]
    assert len(ppl_eval("compare", "one", "--domains")[1].splitlines()) == 5
    for name, nlls in (("one", [10.0, 21.0, 33.0]), ("two", [12.0, 22.0, 36.0])):
        rows = [
            {"nll_nats_sum": nll, "scored_tokens": 10 * n, "bytes": 50 * n}
            for n, nll in enumerate(nlls, 1)
        ]
        (tmp_path / name / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # by byte, since the tokenizers differ: exp((2 + 1 + 3) / (50 + 100 + 150))
    by_byte = ppl_eval("compare", "one", "two")[1].splitlines()[5]
    assert by_byte.startswith(f"two against one: byte ppl x {math.exp(6 / 300):.4f}, 95 % ")
    (tmp_path / "two" / "results.json").write_text(json.dumps(result(6.5)))
    by_token = ppl_eval("compare", "one", "two")[1].splitlines()[5]
    assert by_token.startswith(f"two against one: token ppl x {math.exp(6 / 60):.4f}, 95 % ")
    low, high = (float(by_token.split()[n]) for n in (9, 11))
    assert low < math.exp(0.1) < high
    for name in ("one", "two"):
        file = tmp_path / name / "documents.jsonl"
        file.write_text("\n".join(file.read_text().splitlines()[:2]))
    of_two = ppl_eval("compare", "one", "two")[1]
    assert f"two against one: token ppl x {math.exp(3 / 30):.4f}, 95 % none, too few doc" in of_two
    (tmp_path / "two" / "results.json").write_text(json.dumps(result(6.5, data="z")))
    assert "against" not in ppl_eval("compare", "one", "two")[1]
    (tmp_path / "two" / "results.json").write_text('{"schema_version": 1}')
    assert "lacks counts, domains" in ppl_eval("compare", "two")[2]
    (tmp_path / "two" / "results.json").write_text("{")
    assert "is not readable JSON" in ppl_eval("compare", "two")[2]
    assert "there is no nowhere: has the run ended?" in ppl_eval("compare", "nowhere")[2]


def test_check_says_what_a_run_would_do(ppl_eval, tmp_path, monkeypatch):
    """Against the run: the same counts, windows and steps, and no weight is read."""
    from ppl_eval.checkpoint.tensor_files import FileSource

    monkeypatch.setattr(FileSource, "tensors", lambda *args: pytest.fail("a weight was read"))
    folder = shipped.embedded_path("tiny_student")
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={folder}", "protocol.max_seq_len=64"]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in range(5)))
    code, out, err = ppl_eval("check", *args, f"dataset.data_files={texts}", "dtype=fp32")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    stored = sum(
        math.prod(entry["shape"])
        for name, entry in json.loads(header(folder / "model.safetensors")).items()
        if name != "__metadata__"
    )
    assert f" {stored:,} parameters" in lines["model"]
    assert "names and shapes match" in lines["weights"]
    assert "5 documents, " in lines["text"]
    assert "4 words, 10 bytes" in lines["text"]
    assert "4 in 1 batch of" in lines["windows"]
    assert lines["mesh"].endswith("1 process: 1 step")
    two = ppl_eval("check", *args, f"dataset.data_files={texts}", "--num-processes", "2")[1]
    assert "dp_shard=2 cp=1 tp=1, 2 processes: 1 step" in two
    assert "--num-processes is 0, but" in ppl_eval("check", *args, "--num-processes", "0")[2]
    limit = ["protocol.name=gptq", "fail_if.metrics.bits_per_byte=1", f"dataset.data_files={texts}"]
    code, _, err = ppl_eval("check", *args, *limit, "protocol.max_seq_len=8")
    assert code != 0
    assert "fail_if has metrics.bits_per_byte, but protocol.name=gptq leaves out" in err
    code, _, err = ppl_eval("check", *args, "dataset.data_files=nowhere.jsonl")
    assert code != 0
    assert "nowhere.jsonl" in err


IDLE = {
    "8": "share 1 batch, so 7 ranks will have no work: max_tokens_per_batch=25 gives each of them",
    "2": "share 1 batch, so 1 rank will have no work: max_tokens_per_batch=151 gives each of them",
    "9": "so 8 ranks will have no work: the text has no more than 8 windows, so take fewer process",
    "8 max_tokens_per_batch=25": None,
    "2 max_tokens_per_batch=151": None,
    "1": None,
}


@pytest.mark.parametrize("args", IDLE)
def test_ranks_without_work(ppl_eval, tmp_path, args):
    """Windows of 19, 18, ... 12 input positions, so one batch of the 1,024 that a CPU takes. Two of
    13 and 12 fit into 26; seven of at most 19 into 151."""
    texts = tmp_path / "texts.txt"
    texts.write_text("".join("x" * n + "\n" for n in range(12, 20)))
    folder = f"checkpoint_dir={shipped.embedded_path('tiny_student')}"
    options = ["device=cpu", "protocol.max_seq_len=32", f"dataset.data_files={texts}"]
    command = ["check", "--config", "auto_ppl_eval", "--num-processes"]
    code, out, err = ppl_eval(*command, *args.split(), folder, *options)
    assert (code, err) == (0, "")
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == (IDLE[args] is not None)
    assert all(IDLE[args] in line for line in warnings)


def header(file):
    """The JSON that a safetensors file begins with."""
    with file.open("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little"))


def test_a_launcher_s_environment_does_not_matter(tmp_path):
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    command = [sys.executable, "-m", "ppl_eval.cli", "ls"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "tiny_ppl_eval" in done.stdout


def test_a_reader_that_has_seen_enough():
    command = f"{sys.executable} -m ppl_eval.cli ls | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
