"""The config surface: strict keys, typed values, overrides in torchtune's notation."""

import subprocess
import sys

import pytest

from ppl_eval import UserError
from ppl_eval.config import known_keys, load
from ppl_eval.schema import EvalConfig

TINY = ["--config", "tiny_ppl_eval"]


@pytest.fixture
def yaml(tmp_path):
    def write(content):
        path = tmp_path / "mine.yaml"
        path.write_text(content)
        return ["--config", str(path)]

    return write


def test_the_shipped_default_is_typed_and_resolved():
    config = load(TINY)
    assert isinstance(config, EvalConfig)
    assert config.protocol.max_seq_len == 256
    assert config.tokenizer["path"] == config.checkpointer["checkpoint_dir"]
    assert config.metric_logger["log_dir"] == "./out/tiny_ppl_eval/logs"
    assert config.checkpointer["checkpoint_files"] is None


def test_overrides():
    config = load(
        [
            *TINY,
            "protocol.max_seq_len=64",
            "protocol.stride=None",
            "protocol.add_bos=false",
            "checkpointer.checkpoint_dir=/some=where",
            "dataset.data_files=[a.txt,b.txt]",
            "metric_logger=torchtune.training.metric_logging.StdoutLogger",
            "~metric_logger.log_dir",
            "~device",
        ]
    )
    assert (config.protocol.max_seq_len, config.protocol.stride) == (64, None)
    assert config.protocol.add_bos is False
    assert config.tokenizer["path"] == "/some=where"
    assert config.dataset["data_files"] == ["a.txt", "b.txt"]
    assert config.metric_logger == {"_component_": "torchtune.training.metric_logging.StdoutLogger"}
    assert config.device is None


def test_the_surface_that_users_share_stays():
    assert set(known_keys()) >= {
        *("output_dir", "tokenizer", "model", "checkpointer", "dataset", "metric_logger"),
        *(f"protocol.{k}" for k in ("name", "max_seq_len", "stride", "add_bos", "add_eos")),
        *("max_tokens_per_batch", "max_documents", "device", "dtype", "logits_dtype", "seed"),
        *(f"parallel.{k}" for k in ("dp_replicate", "dp_shard", "cp", "tp")),
        *("parallel.reshard_after_forward", "process_group.backend", "process_group.timeout_s"),
        *("log_every_n_steps", "log_every_s", "log_peak_memory_stats", "log_level"),
        "noise_floor",
    }


mistakes = {
    "max_seq_len=64": "unknown config key max_seq_len; did you mean protocol.max_seq_len",
    "protocol.max_seqlen=64": "unknown config key protocol.max_seqlen; did you mean protocol.max",
    "dtpye=bf16": "unknown config key dtpye; did you mean dtype",
    "dataset.colum=text": "unknown config key dataset.colum: .*did you mean dataset.column",
    "model.num_layer=3": "unknown config key model.num_layer: .*did you mean model.num_layers",
    "protocol.max_seq_len=long": "protocol.max_seq_len: .*'long'",
    "protocol=5": "protocol is 5, but it is a mapping",
    "max_documents=0": "max_documents is 0, but it is at least 1",
    "max_tokens_per_batch=-1": "max_tokens_per_batch is -1",
    "log_every_n_steps=0": "log_every_n_steps is 0",
    "log_every_s=-1": "log_every_s is -1",
    "process_group.timeout_s=0": "timeout_s is 0",
    "process_group.backend=mpi": "backend is 'mpi', but it is one of auto, gloo, nccl",
    "protocol.name=sliding": "protocol.name is 'sliding', but it is one of document",
    "seed=-1": "seed is -1",
    "seed=1000000000000000000000000": "seed is 1000000000000000000000000, but it is below",
    "model.rope_base=.inf": "model.rope_base is inf, but it is a finite number",
    "process_group.timeout_s=.nan": "process_group.timeout_s is nan",
    "model._component_=5": "model._component_ is 5, but it is an import path",
    "custom_sharded_layers=[tok_embeddings]": "unknown config key custom_sharded_layers",
    "dtype=float32": "dtype is 'float32', but it is one of fp32, bf16, fp16",
    "logits_dtype=bf16": "logits_dtype is 'bf16', but it is one of fp32, model",
    "log_level=LOUD": "log_level is 'LOUD'",
    "bootstrap.resamples=-1": "bootstrap.resamples is -1, but it is at least 0",
    "fail_if.metrics.ppl=3": "fail_if has metrics.ppl, but it is one of metrics.nll_nats_per",
    "fail_if.metrics.token_perplexity=low": "fail_if.metrics.token_perplexity is 'low', but it is",
    "protocol.name=wikitext": "protocol.name is 'wikitext', but it is one of document, concat,",
    "model=torchtune.models.llama9": "model._component_ is .*, but torchtune.models has no llama9",
    "model=nowhere.builder": "model._component_ is 'nowhere.builder', but there is no module",
    "~nothing": "~nothing: the config has no such key",
    "nothing": "'nothing' is not an override: write key=value",
    "--verbose": "--verbose is not an option",
    "~dataset": "dataset has no _component_",
    "~checkpointer.checkpoint_dir": r"Interpolation key 'checkpointer.checkpoint_dir' not found",
    "~checkpointer.model_type": "checkpointer .*missing a required argument: 'model_type'",
}


@pytest.mark.parametrize("override", mistakes)
def test_a_mistake_is_one_sentence(override):
    with pytest.raises(UserError, match=mistakes[override]) as error:
        load([*TINY, override])
    assert "\n" not in str(error.value)


def test_unknown_config_names(tmp_path):
    with pytest.raises(UserError, match="tiny_pl_eval: no such file.*did you mean tiny_ppl_eval"):
        load(["--config", "tiny_pl_eval"])
    with pytest.raises(UserError, match="--config"):
        load([])
    with pytest.raises(UserError, match="no such file"):
        load(["--config", str(tmp_path)])


def test_unreadable_files(yaml, tmp_path):
    with pytest.raises(UserError, match="mine.yaml is not readable YAML: .*line 2"):
        load(yaml("a: 1\n b: : 2\n"))
    with pytest.raises(UserError, match="holds a list"):
        load(yaml("- a\n"))
    with pytest.raises(UserError, match="unknown config key modle; did you mean model"):
        load(yaml("modle: {}\n"))


def test_components_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_own_texts.py").write_text("def texts(words):\n    return words\n")
    monkeypatch.chdir(tmp_path)
    keys = ("source", "data_files", "split", "column", "domain_column")
    args = [*TINY, "dataset=my_own_texts.texts", *(f"~dataset.{key}" for key in keys)]
    assert load([*args, "dataset.words=[a,b]"]).dataset["words"] == ["a", "b"]
    with pytest.raises(UserError, match="missing a required argument: 'words'"):
        load(args)
    with pytest.raises(UserError, match="has no text; did you mean texts"):
        load([*args, "dataset=my_own_texts.text"])


def test_a_component_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "my_broken_texts.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="importing it fails: No module named 'no_such_package'"):
        load([*TINY, "dataset=my_broken_texts.texts"])


@pytest.mark.parametrize("override", ["checkpoint_dir=x", "~dataset.data_files", "dtype=bf16"])
def test_overrides_in_a_fresh_process(override):
    """The first command line of a process meets ${embedded:...} before anything resolved it."""
    code = f"from ppl_eval.config import load; load(['--config', 'tiny_ppl_eval', {override!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_interpolation_that_leads_nowhere(yaml):
    path = yaml("output_dir: ${nowhere}\ncheckpoint_dir: ${env:X}\n")
    for override in ("output_dir=x", "checkpoint_dir=x", "seed=1", "~output_dir"):
        with pytest.raises(UserError, match=r"config: |checkpoint_dir"):
            load([*path, override])
