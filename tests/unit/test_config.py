"""The config surface: strict keys, typed values, overrides in torchtune's notation."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torchtune
from omegaconf import OmegaConf

from ppl_eval import UserError, shipped
from ppl_eval.config.command_line import load
from ppl_eval.config.schema import EvalConfig, known_keys

STUDENT = str(shipped.embedded_path("tiny_student"))
TEACHER = str(shipped.embedded_path("tiny_teacher"))
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
    "protocol.name=packed": "no longer a protocol: .* same number; set protocol.name=document",
    "seed=-1": "seed is -1",
    "seed=1000000000000000000000000": "seed is 1000000000000000000000000, but it is below",
    "model.rope_base=.inf": "model.rope_base is inf, but it is a finite number",
    "process_group.timeout_s=.nan": "process_group.timeout_s is nan",
    "model._component_=5": "model._component_ is 5, but it is an import path",
    "custom_sharded_layers=[tok_embeddings]": "unknown config key custom_sharded_layers",
    "dtype=fp8": "dtype is 'fp8', but it is one of fp32, bf16, fp16",
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
    "~model.vocab_sizes": "the config has no such key to remove; did you mean ~model.vocab_size",
    "seed=???": r"seed is \?\?\?, a value that is still to be set: write seed=VALUE",
    "tokenizer.path=???": r"tokenizer.path is \?\?\?, a value that is still to be set",
    "dataset=???": r"dataset._component_ is \?\?\?",
    "seed=": "seed= gives no value: write seed=null for none, or seed=\"''\" for empty text",
    "output_dir=''": "output_dir is empty: write . for the current folder",
    "+seed=1": r"\+seed=1 is not an override: write seed=1",
    "++seed=1": r"\+\+seed=1 is not an override: write seed=1",
    "--seed": "--seed is not an option: write seed=VALUE",
    "--seed=5": "--seed=5 is not an option: write seed=5",
    "--batch-size=4": "--batch-size=4 is not an option; .*set max_tokens_per_batch",
    "--nproc_per_node": "not an option; .*tune run --nproc_per_node N ppl_eval",
    "seed =4": "'seed =4' is not an override: write key=value",
    "seed.x=1": "unknown config key seed.x: seed is not a mapping of keys",
    "seed=1e3": "seed: Value '1000.0' of type 'float' could not be converted to Integer",
    "protocol.name=no": "protocol.name is 'no', but it is one of document",
    "output_dir=${": "config: output_dir: ",
    "dataset.data_files=[a": r"override 'dataset.data_files=\[a' cannot be read: ",
    "parallel={tp:2,cp:1}": "has 'tp:2', which is read as one key: put a space .* in {tp: 2}",
    "dataset=[{name:a,data_files:~/x:y}]": "'name:a', which is read as one key",
    "checkpointer={checkpoint_files:": "cannot be read: .*a shell wants quotes around it all",
    "dataset=[{name: a}, b]": "dataset is a list, and one of it is 'b'",
    "dataset.0.name=x": "unknown config key dataset.0",
    "model=5": "model is 5, but it is a mapping of keys",
    "metric_logger=false": "metric_logger is False, but it is a mapping of keys",
    "model=torchtune.models.llama3_1.llama3_1": "llama3_1, which has no tie_word_embeddings, but"
    " .*tiny_student/config.json says tie_word_embeddings=True: .*as .*llama3_2.llama3_2 has",
    "metric_logger=torchtune.training.metric_logging.MLFLowLogger": "did you mean MLFlowLogger",
    "dataset={data_files: x}": "dataset has no _component_",
    "~dataset.colum": "the config has no such key to remove; did you mean ~dataset.column",
    "~protocol.strid": "the config has no such key to remove; did you mean ~protocol.stride",
    "fail_if=3": "fail_if is 3, but it is a mapping of keys",
    "fail_if.token_perplexity=3": "has token_perplexity, .*did you mean metrics.token_perplexity",
    "fail_if.metrics.token_perplexity=.inf": "token_perplexity is inf, but it is a finite number",
    "fail_if.metrics.token_perplexity=true": "token_perplexity is True, but it is a number",
    "fail_if.metrics=3": "fail_if has metrics, but it is one of metrics.nll_nats_per_token",
    "fail_if.metrics.hf_perplexity=3": "only protocol.name=hf_stride has it",
    "fail_if.domains.metrics.token_perplexity=3": "domains.metrics.token_perplexity, but it is m",
    "fail_if.domains.a=3": "fail_if has domains.a, but it is metrics.NAME, domains.DOMAIN.metrics",
    "fail_if.domains.a.metrics.ppl=3": "it is one of domains.a.metrics.nll_nats_per_token",
    "fail_if.macro.hf_perplexity=3": "it is one of macro.token_perplexity",
    "fail_if.counts.documents=3": "fail_if has counts.documents, but it is metrics.NAME",
    "fail_if.fidelity.by_domain.a.js_nats=3": "it is one of fidelity.perplexity_ratio",
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


def torchtunes_keys():
    """Top-level keys of torchtune's configs that ours do not have, and of newer versions."""
    recipes = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
    for name in ("eleuther_evaluation.yaml", "llama3_1/8B_full.yaml", "qwen2/0.5B_lora.yaml"):
        yield from OmegaConf.load(recipes / name)
    yield from ("resume", "max_seq_len", "packed", "data_files", "fsdp_cpu_offload", "limit")
    yield from ("tensor_parallel_dim", "data_parallel_dim", "context_parallel_dim", "epochs")


@pytest.mark.parametrize("key", sorted(set(torchtunes_keys()) - set(known_keys())))
def test_a_key_of_torchtunes_recipes_gets_a_hint(key):
    with pytest.raises(UserError, match=f"unknown config key {key}; ") as error:
        load([*TINY, f"{key}=1"])
    found = set(re.findall(r"[a-z_]+(?:[.][a-z_]+)*", str(error.value).split("; ", 1)[1]))
    is_named = found & {*known_keys(), "dataset.data_files"}
    assert is_named or re.search("leave it out|eleuther_eval|ppl_eval.evaluate", str(error.value))


def test_what_torchtunes_data_set_takes_gets_a_hint_here():
    with pytest.raises(UserError, match="dataset.packed: .*similar length.*leave it out"):
        load([*TINY, "dataset.packed=true"])


@pytest.mark.parametrize(
    ("spelled", "short"),
    [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), ("torch.bfloat16", "bf16")],
)
def test_dtypes_as_torch_spells_them(spelled, short):
    config = load(
        ["--config", "tiny_pair_ppl_eval", f"dtype={spelled}", f"teacher_dtype={spelled}"]
    )
    assert (config.dtype, config.teacher_dtype) == (short, short)


def test_text_in_a_file_is_text(yaml):
    """YAML reads no, 1e5 and 0123 as other things than what is written."""
    for value in ("no", "1e5", "0123"):
        with pytest.raises(UserError, match="output_dir is .*, but it is text: put it in quotes"):
            load(yaml(f"output_dir: {value}\n"))
    path = yaml("output_dir: '1e5'\ndataset: {_component_: ppl_eval.data.text_corpus}\n")
    assert load([*path, f"checkpoint_dir={STUDENT}"]).output_dir == "1e5"


@pytest.mark.parametrize("section", ["{}", "null", None])
@pytest.mark.parametrize("turned", [False, True])
def test_a_component_with_what_the_folder_says(yaml, section, turned):
    """A component on the command line counts, and takes from the folder what it still needs."""
    names = ("tokenizer", "model", "checkpointer")
    content = "" if section is None else "".join(f"{name}: {section}\n" for name in names)
    arguments = [
        "model=torchtune.models.llama3_2.llama3_2",
        "model.max_seq_len=128",
        "tokenizer=ppl_eval.data.hf_tokenizer",
        "tokenizer.max_seq_len=99",
        "checkpointer=torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpointer.checkpoint_files=[model.pt]",
        "teacher_model=torchtune.models.mistral.mistral",
        "teacher_model.norm_eps=0.5",
        "teacher_checkpointer=torchtune.training.FullModelMetaCheckpointer",
        "teacher_checkpointer.checkpoint_files=[a]",
        "dataset=ppl_eval.data.text_corpus",
        "dataset.column=body",
        "metric_logger=torchtune.training.metric_logging.DiskLogger",
        "metric_logger.filename=f",
    ]
    arguments = arguments[::-1] if turned else arguments
    folders = [f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={TEACHER}"]
    config = load([*yaml(content or "seed: 1\n"), *folders, *arguments])
    model, teacher = config.model, config.teacher_model
    assert model["_component_"] == "torchtune.models.llama3_2.llama3_2"
    assert teacher["_component_"] == "torchtune.models.mistral.mistral"
    told = json.loads((Path(STUDENT) / "config.json").read_text())
    assert (model["max_seq_len"], model["num_layers"]) == (128, told["num_hidden_layers"])
    assert (teacher["norm_eps"], model["norm_eps"]) == (0.5, told["rms_norm_eps"])
    assert config.tokenizer == {
        "_component_": "ppl_eval.data.hf_tokenizer",
        "path": STUDENT,
        "max_seq_len": 99,
    }
    for node, folder, kind, model_type in (
        (config.checkpointer, STUDENT, "TorchTune", "LLAMA3_2"),
        (config.teacher_checkpointer, TEACHER, "Meta", "LLAMA2"),
    ):
        assert node["_component_"] == f"torchtune.training.FullModel{kind}Checkpointer"
        assert (node["checkpoint_dir"], node["model_type"]) == (folder, model_type)
    assert config.dataset == {"_component_": "ppl_eval.data.text_corpus", "column": "body"}
    assert config.metric_logger == {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "filename": "f",
        "log_dir": "./out/ppl_eval/logs",
    }


def test_a_default_of_another_builder_is_no_guess():
    """llama3_2 scales its rotary embedding by 32 unless told otherwise."""
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={TEACHER}"]
    args += ["model=torchtune.models.llama3_2.llama3_2"]
    with pytest.raises(UserError, match="does not say its scale_factor: set model.scale_factor="):
        load(args)
    args += ["model.scale_factor=1", "model.tie_word_embeddings=false"]
    assert load(args).model["num_layers"] == 6


def test_a_builder_that_lacks_what_the_checkpoint_says():
    """The folder's own word, not what llama3_2 makes of it."""
    with pytest.raises(UserError, match="has no tie_word_embeddings, but .*=True: take a builder"):
        load([*TINY, "model=torchtune.models.llama2.llama2"])


@pytest.mark.parametrize(
    ("component", "files"),
    [
        ("llama2.llama2_tokenizer", {"path": "tokenizer.model"}),
        ("qwen2.qwen2_tokenizer", {"path": "vocab.json", "merges_file": "merges.txt"}),
    ],
)
def test_torchtunes_tokenizers_read_files_of_the_folder(tmp_path, component, files):
    for file in Path(STUDENT).iterdir():
        (tmp_path / file.name).symlink_to(file)
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={tmp_path}"]
    args += [f"tokenizer=torchtune.models.{component}"]
    first = next(iter(files.values()))
    with pytest.raises(UserError, match=f"there is no .*/{first} for it: set tokenizer.path=FILE"):
        load(args)
    for name in files.values():
        (tmp_path / name).touch()
    tokenizer = load(args).tokenizer
    assert {key: tokenizer[key] for key in files} == {
        key: f"{tmp_path}/{name}" for key, name in files.items()
    }


def test_what_would_say_the_rest_is_not_set():
    args = ["--config", "auto_ppl_eval", "model=torchtune.models.llama3_2.llama3_2_1b"]
    with pytest.raises(UserError, match="DIR, .*what builds checkpointer and tokenizer by"):
        load(args)


def test_a_complete_builder_takes_nothing_from_the_folder():
    config = load([*TINY, "model=torchtune.models.llama3_2.llama3_2_1b"])
    assert config.model == {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}


def test_homes_are_expanded_before_others_refer_to_them(monkeypatch, yaml):
    monkeypatch.setenv("HOME", "/home/me")
    config = load([*TINY, "checkpoint_dir=~/m", "output_dir=~/o", "dataset.data_files=[~/a,b~/c]"])
    assert config.checkpointer["checkpoint_dir"] == config.tokenizer["path"] == "/home/me/m"
    assert (config.output_dir, config.metric_logger["log_dir"]) == ("/home/me/o", "/home/me/o/logs")
    assert config.dataset["data_files"] == ["/home/me/a", "b~/c"]
    config = load([*TINY, "adapter.dir=~/a", "metric_logger.log_dir=~/l", "tokenizer.path=~/t"])
    assert (config.adapter.dir, config.metric_logger["log_dir"]) == ("/home/me/a", "/home/me/l")
    assert config.tokenizer["path"] == "/home/me/t"
    path = yaml("teacher_checkpoint_dir: ~/t\n")[1]
    monkeypatch.setenv("HOME", str(Path(path).parent))
    with pytest.raises(UserError, match=f"{Path(path).parent}/t, but there is no such folder"):
        load(["--config", "~/mine.yaml", f"checkpoint_dir={STUDENT}"])


FAST = [
    [*TINY, "sede=3"],
    [*TINY, "batch_size=3"],
    [*TINY, "protocol.max_seq_len=long"],
    [*TINY, "protocol.name=sliding"],
    [*TINY, "fail_if.metrics.ppl=3"],
    ["--config", "tiny_pl_eval"],
    [*TINY, "checkpoint_dir=/no/such"],
    [*TINY, "adapter.dir=/no/such"],
    ["--config", "tiny_pair_ppl_eval", "teacher_checkpoint_dir=/no/such"],
    ["--config", "auto_ppl_eval", "checkpoint_dir=/no/such"],
    ["--config", "auto_ppl_eval", f"checkpoint_dir={STUDENT}", "model.num_layer=3"],
    ["--config", "auto_ppl_eval", f"checkpoint_dir={STUDENT}/config.json"],
    [*TINY, "model.num_layer=3"],
    [*TINY, "model=torchtune.models.llama9"],
    [*TINY, "dataset=torchtune.datasets.chat_datset"],
    [*TINY, "dataset=torchtune.datasets.chat_dataset", "dataset.source=json"],
    [*TINY, "checkpointer.model_typ=LLAMA3"],
    [*TINY, "dataset.data_files=nowhere.jsonl"],
    [*TINY, "dataset.data_files=[nowhere/*.jsonl]"],
    [*TINY, "dataset.source=./nowhere", "dataset.data_files=null"],
    [*TINY, "dataset=[{name: a, data_files: nowhere.jsonl}]"],
]


def test_mistakes_are_told_without_torch():
    """Nor what takes as long to import."""
    code = """
import sys
from ppl_eval import UserError
from ppl_eval.config.command_line import load_for_run
for args in %r:
    try:
        load_for_run(args)
        print("no mistake in", args)
    except UserError:
        pass
    slow = {"torch", "torchtune", "torchao", "datasets", "transformers", "pyarrow"}
    if slow & set(sys.modules):
        sys.exit(f"{args} imports {slow & set(sys.modules)}")
"""
    command = [sys.executable, "-c", code % FAST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("command", [["ppl_eval"], ["ppl_eval.cli", "check"]])
def test_programs_tell_a_mistake_before_they_import_torch(command):
    """Which takes seconds; without it the sentence is there in about 0.4 s."""
    command = [sys.executable, "-X", "importtime", "-m", *command, *TINY, "model.num_layer=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ppl_eval: error: unknown config key model.num_layer: " in done.stderr
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "omegaconf" in imported
    assert not {"torch", "torchtune", "datasets", "pyarrow"} & imported


@pytest.mark.parametrize("override", ["checkpoint_dir=x", "~dataset.data_files", "dtype=bf16"])
def test_overrides_in_a_fresh_process(override):
    """The first command line of a process meets ${embedded:...} before anything resolved it."""
    code = "from ppl_eval.config.command_line import load; "
    code += f"load(['--config', 'tiny_ppl_eval', {override!r}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_interpolation_that_leads_nowhere(yaml):
    path = yaml("output_dir: ${nowhere}\ncheckpoint_dir: ${env:X}\n")
    for override in ("output_dir=x", "checkpoint_dir=x", "seed=1", "~output_dir"):
        with pytest.raises(UserError, match=r"config: |checkpoint_dir"):
            load([*path, override])
