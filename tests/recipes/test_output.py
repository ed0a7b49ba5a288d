"""What a run leaves in output_dir: its own files, whole and all of one run, or none."""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppl_eval.errors import UserError
from ppl_eval.report.output import OutputFolder

OUT = Path("out/tiny_ppl_eval")


@pytest.fixture
def tune(run_recipe):
    """Run the tiny config in an empty folder: (exit code, stdout, stderr)."""
    return lambda *args: run_recipe("tiny_ppl_eval", *args)


def results(folder=OUT):
    return json.loads((folder / "results.json").read_text())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(num_bytes):
    """Files of this process cannot grow further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def publish(folder, run, *more):
    """Publish files of a made-up run: what is missing."""
    results = {"schema_version": 1, "counts": {"scored_tokens": 7}, "run": run}
    results["metrics"] = {"token_perplexity": 2.5}
    texts = {
        "results.json": json.dumps(results),
        "documents.jsonl": json.dumps({"nll_nats_sum": 1.0, "run": run}),
    }
    writers = {name: lambda path, text=text: path.write_text(text) for name, text in texts.items()}
    return OutputFolder(str(folder)).publish({**writers, **dict(more)})


def write_parquet(path, run):
    pq.write_table(pa.table({"nll_nats": [1.0], "run": [run]}), path)


def runs(folder):
    """Which made-up run each file is of."""
    found = {p.name: json.loads(p.read_text())["run"] for p in folder.glob("*.json*")}
    for path in folder.glob("*.parquet"):
        found[path.name] = pq.read_table(path)["run"][0].as_py()
    return found


def test_an_earlier_runs_files_do_not_stay(tune):
    OUT.mkdir(parents=True)
    (OUT / "notes.txt").write_text("mine")
    code, _, err = tune("max_documents=9", "save_tokens=true")
    assert code == 0, err
    assert "replace" not in err
    larger = results()["counts"]["scored_tokens"]
    for name in ("results.json", "documents.jsonl", "tokens.parquet"):
        (OUT / name).chmod(0o444)
    code, _, err = tune("max_documents=3")
    assert code == 0, err
    assert (OUT / "notes.txt").read_text() == "mine"
    assert set(names(OUT)) - {"logs", "torchtune_config.yaml"} == {
        *("documents.jsonl", "notes.txt", "results.json", "windows.parquet"),
    }
    content = results()
    assert content["counts"]["documents"] == 3
    assert len((OUT / "documents.jsonl").read_text().splitlines()) == 3
    assert f"has the results of a larger run ({larger:,} scored tokens, token ppl " in err
    assert f"replaced the results of an earlier run ({larger:,} scored tokens, token ppl " in err
    assert tune("max_documents=2", "fail_if.domains.none.metrics.token_perplexity=1")[0] == 1
    assert "max_documents: 3" in (OUT / "torchtune_config.yaml").read_text()
    code, _, err = tune("max_documents=3", "metric_logger=null")
    assert code == 0
    assert "larger" not in err
    assert "replaced the results of an earlier run" in err
    assert "torchtune_config.yaml" not in names(OUT)


def test_what_does_not_fit_on_the_disk_is_named(tune):
    """The rest is published, without an earlier run's files beside it."""
    assert tune("save_tokens=true")[0] == 0
    sizes = {path.name: path.stat().st_size for path in OUT.iterdir()}
    assert sizes["results.json"] < sizes["documents.jsonl"] < sizes["tokens.parquet"]
    before = (OUT / "results.json").read_bytes()
    with largest_file(sizes["tokens.parquet"] - 1):
        code, out, err = tune("save_tokens=true")
    assert code == 1
    assert err.splitlines()[-1] == (
        "ppl_eval: error: output_dir is out/tiny_ppl_eval, where this cannot be written:"
        " tokens.parquet (File too large); out/tiny_ppl_eval has results.json, documents.jsonl,"
        " windows.parquet of this run"
    )
    assert "token ppl" in out
    assert "Traceback" not in err
    assert {"results.json", "documents.jsonl"} <= set(names(OUT))
    assert not {"tokens.parquet", ".writing"} & set(names(OUT))
    assert (OUT / "results.json").read_bytes() != before
    with largest_file(sizes["results.json"] // 2):
        code, _, err = tune("log_every_n_steps=1000")
    assert code == 1
    assert "results.json (File too large), documents.jsonl (File too large)" in err
    assert results()["counts"]["documents"] == 120  # nothing was whole: the earlier run's stay


def test_a_file_that_fails_otherwise_leaves_everything_as_it_was(tmp_path):
    import numpy as np

    from ppl_eval.metrics.summary import DocumentTable
    from ppl_eval.report.results import write_documents, write_results

    publish(tmp_path, 1)
    counts = dict.fromkeys(("scored_tokens", "bytes", "characters", "words"), np.asarray([1]))
    sums = dict.fromkeys(("nll_nats", "nll_nats_squared"), np.asarray([np.nan]))
    table = DocumentTable([(None, None)], counts, sums)
    for name, write in (
        ("results.json", lambda path: write_results(path, {"bad": float("nan")})),
        ("documents.jsonl", lambda path: write_documents(path, table)),
    ):
        with pytest.raises(ValueError, match="JSON"):
            publish(tmp_path, 2, (name, write))
        assert runs(tmp_path) == {"results.json": 1, "documents.jsonl": 1}
        assert len(names(tmp_path)) == 2


def test_an_interrupt_while_files_are_written(tmp_path):
    publish(tmp_path, 1)

    def write(path):
        path.write_text('{"half')
        os.kill(os.getpid(), signal.SIGINT)
        path.write_text("whole")

    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path, 2, ("documents.jsonl", write))
    assert runs(tmp_path) == {"results.json": 1, "documents.jsonl": 1}
    assert len(names(tmp_path)) == 2


WHILE_MOVING = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_output import publish
changes = 0
def audit(event, args):
    global changes
    changes += event in ("os.remove", "os.rename")
    if event in ("os.remove", "os.rename") and changes == {change}:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(audit)
publish(Path("out"), 2)
"""


def test_a_process_that_ends_while_files_are_moved(tmp_path):
    """Wherever it is killed, no results.json stands beside files of another run."""
    out, change, code = tmp_path / "out", 0, None
    out.mkdir()
    while code != 0:
        change += 1
        publish(out, 1, ("tokens.parquet", lambda path: write_parquet(path, 1)))
        assert set(runs(out).values()) == {1}
        script = WHILE_MOVING.format(tests=str(Path(__file__).parent), change=change)
        code = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=60).returncode
        assert code in (0, -signal.SIGKILL)
        left = runs(out)
        if "results.json" in left:
            assert len(set(left.values())) == 1
            assert len(left) == (3 if left["results.json"] == 1 else 2)
    assert change > 5
    assert names(out) == ["documents.jsonl", "results.json"]


HOLDING = """
import sys
from pathlib import Path
from ppl_eval.report.output import OutputFolder
def write(path):
    path.write_text('{"half')
    print("writing", flush=True)
    sys.stdin.read()
OutputFolder("out/tiny_ppl_eval").publish({"results.json": write})
"""


def test_two_runs_and_a_killed_one(tune, tmp_path):
    """The second of two runs into one folder is refused; a killed run keeps nobody out."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDING],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout.readline() == b"writing\n"
    code, _, err = tune("max_documents=3")
    assert code == 1
    assert err == (
        "ppl_eval: error: output_dir is ./out/tiny_ppl_eval, but another run is going to write its"
        " results there: wait for its end or set another output_dir\n"
    )
    other.kill()
    other.communicate()
    assert names(OUT) == [".writing"]
    assert tune("max_documents=3")[0] == 0
    assert ".writing" not in names(OUT)
    assert results()["counts"]["documents"] == 3


OURS = ["results.json", "documents.jsonl", "tokens.parquet", "torchtune_config.yaml"]


@pytest.mark.parametrize("name", OURS)
def test_other_peoples_files_under_our_names(tune, name):
    """Such as a corpus called documents.jsonl, with output_dir=., or the config of a training."""
    Path("mine").mkdir()
    Path("mine", name).write_text('{"text": "a corpus"}\n')
    code, _, err = tune("output_dir=mine")
    assert code == 1
    assert f"output_dir is mine, whose {name} is not from ppl_eval and would be replaced" in err
    assert Path("mine", name).read_text() == '{"text": "a corpus"}\n'
    Path("mine", name).unlink()
    Path("mine", name).mkdir()
    assert tune("output_dir=mine")[0] == 1


def test_an_output_dir_that_is_a_file(tune):
    Path("file").write_text("mine")
    code, _, err = tune("output_dir=file")
    assert code == 1
    assert "output_dir is file, but nothing can be written there: Not a directory" in err


def test_results_that_cannot_be_put_in_place_are_kept(tmp_path):
    folder = OutputFolder(str(tmp_path))
    (tmp_path / "documents.jsonl").mkdir()
    text = '{"run": 2}'
    writers = {n: lambda path: path.write_text(text) for n in ("results.json", "documents.jsonl")}
    with pytest.raises(UserError, match="documents.jsonl cannot be replaced .*; the new") as error:
        folder.publish(writers)
    kept = Path(str(error.value).split("the new files are in ")[1])
    assert runs(kept) == {"results.json": 2, "documents.jsonl": 2}
    assert "results.json" not in names(tmp_path)


def test_a_name_that_is_no_utf8(tmp_path):
    """A file name is bytes; in JSON they are the surrogates that Python has for them."""
    from ppl_eval.report.results import write_results

    content = {"checkpoint_dir": os.fsdecode(b"caf\xe9"), "domain": "caf\u00e9"}
    write_results(tmp_path / "results.json", content)
    assert results(tmp_path) == content
    assert b'"caf\xc3\xa9"' in (tmp_path / "results.json").read_bytes()


def test_a_metric_logger_that_breaks_costs_no_results(tune):
    Path("breaking.py").write_text(
        "class Logger:\n"
        "    def __init__(self, log_dir=None): pass\n"
        "    def log_config(self, config): pass\n"
        "    def close(self): pass\n"
        "    def log_dict(self, payload, step): raise ConnectionError('the server is gone')\n"
    )
    code, out, err = tune("max_documents=9", "metric_logger=breaking.Logger")
    assert code == 1
    problem = "metric_logger (Logger) fails in log_dict: ConnectionError: the server is gone"
    assert err.count(problem) == 2  # when it happens, and in the end
    assert err.endswith(f"ppl_eval: error: {problem}\n")
    assert results()["counts"]["documents"] == 9
    assert "token ppl" in out


LOGGERS = """
from ppl_eval import components
from ppl_eval.errors import UserError
for name, argument in {loggers!r}:
    node = {{"_component_": f"torchtune.training.metric_logging.{{name}}", **argument}}
    try:
        components.build(node, "metric_logger")
    except UserError as error:
        print(error)
"""


def test_a_logger_that_cannot_be_built_gives_one_message(tmp_path):
    """None of the `__del__` that torchtune's have; in a process whose stderr is seen."""
    (tmp_path / "file").touch()
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb')\n")
    (tmp_path / "comet_ml.py").write_text("raise ImportError('no comet')\n")
    (tmp_path / "mlflow.py").write_text("raise ImportError('no mlflow')\n")
    nowhere = {"log_dir": "file/logs"}
    loggers = [
        *(("WandBLogger", {}), ("CometLogger", {}), ("MLFlowLogger", {})),
        *(("DiskLogger", nowhere), ("TensorBoardLogger", nowhere)),
    ]
    done = subprocess.run(
        [sys.executable, "-c", LOGGERS.format(loggers=loggers)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(loggers)
    for line, (name, _) in zip(lines, loggers, strict=True):
        assert line.startswith(f"metric_logger (torchtune.training.metric_logging.{name}) fails: ")
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr
