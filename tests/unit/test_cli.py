"""ppl-eval: what it lists and copies, and what it says when it cannot."""

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


COMMANDS = ["ls", "cp", "where", "check", "plan", "compare", "verify", "drop-layers"]


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


def test_two_baselines_are_refused(ppl_eval):
    code, _, err = ppl_eval("compare", "a", "--baseline", "a", "--baseline", "b")
    assert code == 1
    assert "--baseline is given 2 times, but there is one" in err


def test_homes_are_expanded(ppl_eval, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ppl_eval("cp", "tiny_ppl_eval", "~/mine.yaml")[0] == 0
    assert (tmp_path / "mine.yaml").is_file()
    (tmp_path / "run").mkdir()
    assert f"no results.json in {tmp_path}/run" in ppl_eval("compare", "~/run")[2]
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
