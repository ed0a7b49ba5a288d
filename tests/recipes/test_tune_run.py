"""What a user types, sees and gets on several processes: by `tune run` where the launcher matters,
and by forks of the recipe where it does not."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_script

from ppl_eval import shipped

TUNE = Path(sys.executable).parent / "tune"


def tune_run(*args, cwd, num_processes, **env):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    launcher = ["--nproc_per_node", str(num_processes)] if num_processes > 1 else []
    return subprocess.run(
        [str(TUNE), "run", *launcher, *args],
        cwd=cwd,
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def run_recipe_on(num_processes, *args, cwd, recipe=None):
    """What each process of a run of the recipe ended with, without a launcher."""
    script = recipe or shipped.recipe_path()
    return run_script(num_processes, script, "--config", "tiny_ppl_eval", *args, cwd=cwd)


def by_our_processes(stderr):
    """stderr without what tune and torchrun say themselves."""
    ours = re.split(r"^E\d{4} .*failed \(exitcode", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in ours.splitlines() if not re.match(r"W\d{4} ", line)]
    by_tune = [line for line in lines if line.startswith("Skipping import of cpp extensions")]
    assert len(by_tune) <= 1  # tune's own process; ours keep it to themselves
    return "\n".join(line for line in lines if line not in by_tune)


def test_a_copied_recipe_with_a_component_of_ones_own_on_two_processes(tmp_path):
    """From an empty folder: an edited recipe, a shipped config's name, and own texts."""
    source = shipped.recipe_path().read_text()
    edited = source.replace('print(f"results:', 'print("edited by me")\n        print(f"results:')
    assert edited != source
    (tmp_path / "my_recipe.py").write_text(edited)
    (tmp_path / "my_texts.py").write_text(
        "def texts(count):\n"
        "    return [{'text': 'Ada lived near the mill. ' * n, 'id': n} for n in range(count)]\n"
    )
    keys = ("source", "data_files", "split", "column", "domain_column")
    done = tune_run(
        *("my_recipe", "--config", "tiny_ppl_eval", "dataset=my_texts.texts", "dataset.count=5"),
        *(f"~dataset.{key}" for key in keys),
        cwd=tmp_path,
        num_processes=2,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("edited by me") == 1
    said = by_our_processes(done.stderr).splitlines()
    beginnings = ("warning: 2 data-parallel ranks share 1 batch", "5 documents, ", "1 step on ")
    assert len(said) == len(beginnings)
    assert all(line.startswith(begin) for line, begin in zip(said, beginnings, strict=True))
    content = json.loads((tmp_path / "out/tiny_ppl_eval/results.json").read_text())
    assert content["counts"]["documents"] == 5
    assert content["counts"]["not_scored"]["empty"] == 1
    assert content["environment"]["mesh"]["dp_shard"] == 2
    assert content["command"].startswith("tune run --nproc_per_node 2 my_recipe --config tiny")


@pytest.mark.parametrize("how", [["-m", "ppl_eval"], ["my_recipe.py"]])
def test_nothing_is_printed_for_torchao(tmp_path, how):
    """Its notice comes when it is imported, which a copied recipe does in its first lines."""
    shutil.copyfile(shipped.recipe_path(), tmp_path / "my_recipe.py")
    args = ["--config", "tiny_ppl_eval", "max_documents=3", "log_level=WARNING"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *how, *args], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_mistake_is_shown_once_and_ends_the_launchers_report(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"text\n')
    args = ("ppl_eval", "--config", "tiny_ppl_eval", "dataset.data_files=broken.jsonl")
    done = tune_run(*args, cwd=tmp_path, num_processes=2)
    assert done.returncode != 0
    ours = by_our_processes(done.stderr)
    assert len(ours.splitlines()) == 1
    assert ours.startswith("ppl_eval: error: ")
    assert "broken.jsonl, line 3 is not JSON" in ours
    assert "Traceback" not in ours
    assert "Exception ignored" not in done.stderr
    cause = done.stderr.split("Root Cause (first observed failure):")[1]
    assert f"traceback : {ours}" in cause  # torchrun ends with it
    exits = re.findall(r"exitcode\s*: (-?\d+)", done.stderr)
    assert exits
    assert all(code != "0" for code in exits)
    assert not list(tmp_path.rglob("results.json"))


@pytest.mark.parametrize(
    ("num_processes", "override", "sentence"),
    [
        (2, "protocol.max_seqlen=9", "unknown config key protocol.max_seqlen; did you mean"),
        (
            2,
            "metric_logger.log_dir=a_file/logs",
            "metric_logger (torchtune.training.metric_logging.DiskLogger) fails: NotADirectory",
        ),
        (
            3,
            "parallel.tp=3",
            "parallel.tp is 3, but torchtune.models.llama3_2.llama3_2 has 8 heads and 4 kv heads,"
            " which tp must both divide: set parallel.tp to 1 or 2 or 4",
        ),
    ],
)
def test_a_mistake_is_shown_once_by_all_processes(tmp_path, num_processes, override, sentence):
    (tmp_path / "a_file").touch()
    ended = run_recipe_on(num_processes, override, cwd=tmp_path)
    assert [process.code for process in ended] == [1] * num_processes
    (said,) = [process.err for process in ended if process.err]
    assert said.startswith("ppl_eval: error: ")
    assert said.count("\n") == 1
    assert sentence in said
    assert not re.search("gloo|connection|nccl", said, re.IGNORECASE)
    assert not list(tmp_path.rglob("results.json"))


def test_one_rank_that_breaks_shows_one_traceback(tmp_path):
    """A defect on rank 1 in the middle of a run: its traceback, and none of rank 0's."""
    source = shipped.recipe_path().read_text()
    broken = source.replace(
        "on_step=None if bar is None else bar.update", "on_step=self.break_on_rank_one"
    ).replace(
        "    def report(",
        "    def break_on_rank_one(self, progress):\n"
        "        if self.ranks.rank == 1 and progress.step == 2:\n"
        "            raise RuntimeError('a defect of rank one')\n\n"
        "    def report(",
    )
    assert broken.count("break_on_rank_one") == 2
    (tmp_path / "broken_recipe.py").write_text(broken)
    ended = run_recipe_on(2, cwd=tmp_path, recipe=tmp_path / "broken_recipe.py")
    assert [process.code for process in ended] == [1, 1]
    assert "Traceback" not in ended[0].err
    assert ended[1].err.count("Traceback (most recent call last)") == 1
    assert ended[1].err.startswith("ppl_eval: unexpected error on rank 1")
    assert "RuntimeError: a defect of rank one" in ended[1].err
    assert not list(tmp_path.rglob("results.json"))


FINE_TUNING = """
output_dir: tuned
tokenizer: {{_component_: ppl_eval.data.hf_tokenizer, path: {student}, max_seq_len: 64}}
dataset:
  _component_: torchtune.datasets.text_completion_dataset
  source: json
  data_files: mine.jsonl
  split: train
seed: 1
shuffle: true
model:
  _component_: torchtune.models.llama3_2.llama3_2
  vocab_size: 509
  num_layers: 3
  num_heads: 8
  num_kv_heads: 4
  embed_dim: 64
  intermediate_dim: 160
  max_seq_len: 256
  rope_base: 10000
  scale_factor: 1
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {student}
  checkpoint_files: [model.safetensors]
  output_dir: tuned
  model_type: LLAMA3_2
resume_from_checkpoint: false
batch_size: 3
epochs: 1
optimizer: {{_component_: torch.optim.AdamW, lr: 1.0e-3}}
optimizer_in_bwd: false
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
max_steps_per_epoch: 2
gradient_accumulation_steps: 1
clip_grad_norm: null
compile: false
device: cpu
enable_activation_checkpointing: false
enable_activation_offloading: false
dtype: fp32
metric_logger: {{_component_: torchtune.training.metric_logging.StdoutLogger}}
log_every_n_steps: 1
log_peak_memory_stats: false
"""


def test_a_recipe_of_torchtune_takes_our_tokenizer_and_we_measure_what_it_wrote(tmp_path):
    """Documents of unequal length, so that the tokenizer's pad_id is needed."""
    student = shipped.embedded_path("tiny_student")
    (tmp_path / "tune.yaml").write_text(FINE_TUNING.format(student=student))
    words = ["Ada lived near the mill.", "Bela slept.", "Cem lost the lamp in the attic."]
    lines = [json.dumps({"text": text}) for text in words * 2]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    done = tune_run(
        "full_finetune_single_device", "--config", "tune.yaml", cwd=tmp_path, num_processes=1
    )
    assert done.returncode == 0, done.stderr
    written = tmp_path / "tuned" / "epoch_0"
    losses = []
    for folder in (student, written):
        options = ("dataset.data_files=mine.jsonl", f"checkpointer.checkpoint_dir={folder}")
        (ended,) = run_recipe_on(1, *options, cwd=tmp_path)
        assert ended.code == 0, ended.err
        content = json.loads((tmp_path / "out/tiny_ppl_eval/results.json").read_text())
        losses.append(content["metrics"]["nll_nats_per_token"])
    assert losses[1] < losses[0]


OF_THE_RUN = ("command", "warnings", "performance", "environment", "config")
"""Sections of results.json that differ from run to run."""


def test_records_of_tokens_from_every_mesh(tmp_path):
    """The same tokens, and their NLL to fp32, wherever they were scored; of data-parallel ranks
    everything has the same bits, but for the profiles that each rank adds up."""
    import pyarrow.parquet as pq

    tables, results, documents, means = [], [], [], []
    for name, processes, mesh in (
        ("alone", 1, []),
        ("dp", 2, []),
        ("cp_tp", 4, ["parallel.cp=2", "parallel.tp=2"]),
    ):
        options = ("max_documents=12", "save_tokens=true", f"output_dir={name}", *mesh)
        ended = run_recipe_on(processes, *options, cwd=tmp_path)
        assert [process.code for process in ended] == [0] * processes, ended
        tables.append(pq.read_table(tmp_path / name / "tokens.parquet"))
        results.append(json.loads((tmp_path / name / "results.json").read_text()))
        documents.append((tmp_path / name / "documents.jsonl").read_bytes())
    assert tables[1].equals(tables[0])
    assert documents[1] == documents[0]
    one, two = ({k: v for k, v in part.items() if k not in OF_THE_RUN} for part in results[:2])
    for profile in (one.pop("loss_by_position"), two.pop("loss_by_position")):
        means.append([row["nll_nats_per_token"] for row in profile])
    assert one == two
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    for column in ("document", "position", "token_id", "scored"):
        assert tables[2][column].equals(tables[0][column])
    nlls = zip(tables[2]["nll_nats"].to_pylist(), tables[0]["nll_nats"].to_pylist(), strict=True)
    assert all(one == pytest.approx(two, abs=1e-4) for one, two in nlls)


HELD_TOKENS = """
import runpy
import sys
from ppl_eval.config.command_line import load_for_run
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.shipped import recipe_path

held = []
update = TokenRecords.update
TokenRecords.update = lambda self, tokens, values: held.append(len(tokens)) or update(
    self, tokens, values
)
cfg = load_for_run(sys.argv[1:])
recipe = runpy.run_path(str(recipe_path()))["PerplexityEvalRecipe"](cfg)
recipe.setup(cfg)
recipe.evaluate()
recipe.cleanup()
print("held", sum(held), "of", recipe.num_scored)
"""


def test_of_tensor_parallel_ranks_one_holds_the_records_of_tokens(tmp_path):
    (tmp_path / "script.py").write_text(HELD_TOKENS)
    args = "--config", "tiny_ppl_eval", "max_documents=3", "save_tokens=true", "parallel.tp=2"
    ended = run_script(2, tmp_path / "script.py", *args, cwd=tmp_path)
    (num_held, num_scored), (others, _) = (
        re.search(r"held (\d+) of (\d+)", process.out).groups() for process in ended
    )
    assert num_held == num_scored
    assert others == "0"


SLOW_REPORT = """
    def report(self):
        import time
        while self.is_first and not os.path.exists("rank_1_has_left"):
            time.sleep(0.1)
        self.report_at_last()

    def report_at_last("""


def test_above_a_limit_rank_0_writes_and_fails_while_no_rank_waits(tmp_path):
    """Rank 0 reports when the other is through, as if its bootstrap outlasted their time-out."""
    source = shipped.recipe_path().read_text()
    slow = source.replace("\n    def report(", SLOW_REPORT).replace(
        "    recipe.report()\n", "    recipe.report()\n    open('rank_1_has_left', 'w').close()\n"
    )
    assert slow.count("rank_1_has_left") == 2
    recipe = tmp_path / "slow_recipe.py"
    recipe.write_text(slow.replace("import logging\n", "import logging\nimport os\n", 1))
    options = ("fail_if.metrics.token_perplexity=1.1", "process_group.timeout_s=60")
    ended = run_recipe_on(2, "max_documents=9", *options, cwd=tmp_path, recipe=recipe)
    said = "".join(process.err for process in ended)
    assert said.count("ppl_eval: error: fail_if: metrics.token_perplexity is ") == 1
    assert "Traceback" not in said
    assert [process.code for process in ended] == [3, 0]
    content = json.loads((tmp_path / "out/tiny_ppl_eval/results.json").read_text())
    assert content["counts"]["documents"] == 9


TUNE_RUN = f"'{TUNE}' run"
TORCHRUN = f"'{sys.executable}' -m torch.distributed.run --standalone --nproc_per_node 2 -m"


@pytest.mark.parametrize("launcher", [TUNE_RUN, TORCHRUN])
def test_a_reader_that_goes_ends_no_run(tmp_path, launcher):
    """The exit code is the run's, and its files are whole."""
    run = f"{launcher} ppl_eval --config tiny_ppl_eval max_documents=9"
    done = subprocess.run(
        ["bash", "-c", f"{run} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert "Error" not in done.stderr
    content = json.loads((tmp_path / "out/tiny_ppl_eval/results.json").read_text())
    lines = (tmp_path / "out/tiny_ppl_eval/documents.jsonl").read_text().splitlines()
    assert content["counts"]["documents"] == len(lines) == 9


def test_letters_of_the_world_in_an_ascii_locale(tmp_path):
    """Folders, files, ids and texts; everything that is written is UTF-8."""
    shutil.copytree(shipped.embedded_path("tiny_student"), tmp_path / "modèle文")
    rows = [{"text": f"Übermut 文 {n}.", "id": "ü文", "domain": "Größe"} for n in range(3)]
    (tmp_path / "текст.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    done = tune_run(
        *("ppl_eval", "--config", "tiny_ppl_eval", "checkpoint_dir=modèle文", "save_tokens=true"),
        *("dataset.data_files=текст.jsonl", "output_dir=ausgänge/文"),
        cwd=tmp_path,
        num_processes=2,
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "ausgänge/文"
    assert f"results: {folder.relative_to(tmp_path)}/results.json" in done.stdout
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert content["config"]["checkpoint_dir"] == "modèle文"
    assert list(content["domains"]) == ["Größe"]
    first = (folder / "documents.jsonl").read_bytes().splitlines()[0]
    assert json.loads(first.decode("utf-8"))["id"] == "ü文"
    assert (folder / "tokens.parquet").is_file()
