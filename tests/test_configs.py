"""Every shipped config: schema, components, names, and the commands in its header."""

import dataclasses
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import torchtune
from omegaconf import OmegaConf
from torchtune._recipe_registry import get_all_recipes
from torchtune.config._utils import _get_component_from_path as component_from_path

from ppl_eval import shipped
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.config_json import NOTHING, interpret
from ppl_eval.config.checks import leaves
from ppl_eval.config.command_line import load, read_yaml
from ppl_eval.config.reference import full_config
from ppl_eval.config.schema import EvalConfig, ProtocolConfig, known_keys
from ppl_eval.errors import UserError
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_config import check_against_config
from ppl_eval.model.from_folder import sections
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder

STUDENT = str(shipped.embedded_path("tiny_student"))
TEACHER = str(shipped.embedded_path("tiny_teacher"))
NAMES = shipped.config_names()


def test_the_configs_are_found_and_none_has_a_name_of_torchtune():
    assert {"tiny_ppl_eval", "tiny_teacher_ppl_eval", "smollm2/135M_ppl_eval"} <= set(NAMES)
    theirs = {recipe.name for recipe in get_all_recipes()}
    theirs |= {config.name for recipe in get_all_recipes() for config in recipe.configs}
    assert not theirs & {*NAMES, *shipped.RECIPES}
    assert all(name.endswith("_ppl_eval") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_fits_the_schema_and_builds_its_model(name):
    folder = [f"checkpoint_dir={STUDENT}"] if name == "auto_ppl_eval" else []
    config = load(["--config", name, *folder])
    for section in (config.model, config.teacher_model):
        if section:
            model = build_on_meta(section, torch.float32, NOTHING)
            assert all(p.is_meta for p in model.parameters())
            limit = model.max_seq_len
            assert (config.protocol.max_seq_len or 1024) <= limit or name == "auto_ppl_eval"
    assert config.output_dir == f"./out/{name.replace('/', '_')}"


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_only_what_is_particular_to_it(name):
    """No key has its default, neither the schema's nor that of the component that takes it."""
    content = read_yaml(shipped.config_path(name))
    defaults = dict(leaves(dataclasses.asdict(EvalConfig())))
    for key, value in leaves(content):
        assert key not in defaults or value != defaults[key], key
    for section in {"tokenizer", "checkpointer", "dataset", "teacher_checkpointer"} & set(content):
        node = dict(content[section])
        declared = inspect.signature(component_from_path(node.pop("_component_"))).parameters
        for key, value in node.items():
            assert value != declared[key].default, f"{section}.{key}"


ELSEWHERE = {
    "parallel.tp=2": lambda config: config.parallel.tp == 2,
    "process_group.timeout_s=60": lambda config: config.process_group.timeout_s == 60,
    "protocol.stride=16": lambda config: config.protocol.stride == 16,
    "~protocol.stride": lambda config: config.protocol.stride is None,
    "~protocol": lambda config: config.protocol == ProtocolConfig(),
    "~device": lambda config: config.device is None,
    "~dataset.column": lambda config: "column" not in config.dataset,
    "~metric_logger.log_dir": lambda config: config.metric_logger["log_dir"].endswith("/logs"),
    "metric_logger.log_dir=L": lambda config: config.metric_logger["log_dir"] == "L",
    "metric_logger=null": lambda config: config.metric_logger is None,
    "metric_logger={log_dir: L}": lambda config: (
        config.metric_logger
        == {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "L"}
    ),
    "dataset.source=wikitext": lambda config: config.dataset["source"] == "wikitext",
    "adapter.dir=A": lambda config: config.adapter.dir == "A",
    "bootstrap.resamples=5": lambda config: config.bootstrap.resamples == 5,
    "fail_if.metrics.token_perplexity=3": lambda config: (
        config.fail_if == {"metrics.token_perplexity": 3}
    ),
}
"""Overrides of keys that a config does not have -> what they lead to."""


@pytest.mark.parametrize("override", ELSEWHERE)
@pytest.mark.parametrize("name", ["auto", "tiny_pair", "llama3_1/8B", "qwen2/1.5B_to_0.5B_KD"])
def test_keys_that_a_config_leaves_out_can_be_set_and_removed(name, override):
    folder = [f"checkpoint_dir={STUDENT}"] if name == "auto" else []
    config = load(["--config", f"{name}_ppl_eval", *folder, override])
    assert ELSEWHERE[override](config)


@pytest.mark.parametrize("name", NAMES)
def test_other_components_by_override(name):
    """Of what the config says of its own data set and logger nothing stays."""
    chat = {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": "chat.jsonl",
        "conversation_column": "conversations",
        "conversation_style": "sharegpt",
    }
    logger = {"_component_": "torchtune.training.metric_logging.TensorBoardLogger", "log_dir": "X"}
    tokenizer = {
        "_component_": "torchtune.models.llama3.llama3_tokenizer",
        "path": "DIR/tokenizer.model",
        "max_seq_len": 512,
    }
    sections = {"dataset": chat, "metric_logger": logger, "tokenizer": tokenizer}
    config = load(
        [
            *("--config", name, f"checkpoint_dir={STUDENT}"),
            *(f"{key}.{k}={v}" for key, node in sections.items() for k, v in node.items()),
        ]
    )
    for key, node in sections.items():
        assert getattr(config, key) == node


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_in_the_header_parse(name):
    header = shipped.config_path(name).read_text().split("\n\n")[0]
    commands = re.findall(r"^#\s+(tune run .*)$", header, re.MULTILINE)
    commands = [shlex.split(c) for c in commands if " ppl_eval " in c]
    assert len(commands) >= 3
    assert any("--nproc_per_node" in command for command in commands)
    for command in commands:
        args = command[command.index("--config") :]
        assert args[1] == name
        args = [arg.replace("=DIR", f"={STUDENT}") for arg in args]
        config = load(args)
        if f"checkpoint_dir={STUDENT}" in args:
            assert config.tokenizer["path"] == config.checkpointer["checkpoint_dir"] == STUDENT
            assert config.dataset["data_files"] == "FILE.jsonl"
    if name != "auto_ppl_eval":
        pointed = load(["--config", name, f"checkpointer.checkpoint_dir={TEACHER}"])
        assert pointed.tokenizer["path"] == pointed.checkpointer["checkpoint_dir"] == TEACHER


@pytest.mark.parametrize("name", NAMES)
def test_a_full_config_has_every_key_explained_and_means_the_same_run(name, tmp_path):
    folder = [f"checkpoint_dir={STUDENT}"] if name == "auto_ppl_eval" else []
    text = full_config(name)
    (tmp_path / "full.yaml").write_text(text)
    content = read_yaml(tmp_path / "full.yaml")
    for key in known_keys():
        node = content
        for part in key.split("."):
            node = node[part]
    commented = re.findall(r"# .*\n *(\w+):", text)
    assert commented == [key.split(".")[-1] for key in known_keys()]
    full = load(["--config", str(tmp_path / "full.yaml"), *folder])
    assert full == load(["--config", name, *folder])


def llama(**more):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        **more,
    }


def llama3_rope(factor):
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def qwen(**more):
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": more["num_hidden_layers"],
        "torch_dtype": "bfloat16",
        **more,
    }


def gemma(architecture, **more):
    return {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 256000,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **more,
    }


def gemma2(**more):
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    scalar = {"query_pre_attn_scalar": 256, "sliding_window": 4096}
    return gemma("Gemma2ForCausalLM", **caps, **scalar, **more)


def sized(layers, dim, heads, kv_heads, intermediate, **more):
    return {
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        **more,
    }


SMALL_QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
LARGE_QWEN = {"vocab_size": 152064, "tie_word_embeddings": False}
PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

PUBLISHED = {
    "smollm2/135M": (
        134_515_008,
        llama(
            **sized(30, 576, 9, 3, 1536),
            vocab_size=49152,
            max_position_embeddings=8192,
            rope_theta=100000,
            tie_word_embeddings=True,
        ),
    ),
    "llama3_2/1B": (
        1_235_814_400,
        llama(
            **sized(16, 2048, 32, 8, 8192), tie_word_embeddings=True, rope_scaling=llama3_rope(32.0)
        ),
    ),
    "llama3_2/3B": (
        3_212_749_824,
        llama(
            **sized(28, 3072, 24, 8, 8192), tie_word_embeddings=True, rope_scaling=llama3_rope(32.0)
        ),
    ),
    "llama3_1/8B": (
        8_030_261_248,
        llama(**sized(32, 4096, 32, 8, 14336), rope_scaling=llama3_rope(8.0)),
    ),
    "llama3_1/70B": (
        70_553_706_496,
        llama(**sized(80, 8192, 64, 8, 28672), rope_scaling=llama3_rope(8.0)),
    ),
    "qwen2/0.5B": (494_032_768, qwen(**sized(24, 896, 14, 2, 4864), **SMALL_QWEN)),
    "qwen2/1.5B": (1_543_714_304, qwen(**sized(28, 1536, 12, 2, 8960), **SMALL_QWEN)),
    "qwen2_5/0.5B": (494_032_768, qwen(**sized(24, 896, 14, 2, 4864), **SMALL_QWEN)),
    "qwen2_5/1.5B": (1_543_714_304, qwen(**sized(28, 1536, 12, 2, 8960), **SMALL_QWEN)),
    "qwen2_5/3B": (3_085_938_688, qwen(**sized(36, 2048, 16, 2, 11008), **SMALL_QWEN)),
    "qwen2_5/7B": (7_615_616_512, qwen(**sized(28, 3584, 28, 4, 18944), **LARGE_QWEN)),
    "qwen2_5/14B": (14_770_033_664, qwen(**sized(48, 5120, 40, 8, 13824), **LARGE_QWEN)),
    "qwen2_5/32B": (32_763_876_352, qwen(**sized(64, 5120, 40, 8, 27648), **LARGE_QWEN)),
    "qwen2_5/72B": (72_706_203_648, qwen(**sized(80, 8192, 64, 8, 29568), **LARGE_QWEN)),
    "mistral/7B": (
        7_241_732_096,
        {
            **sized(32, 4096, 32, 8, 14336),
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_act": "silu",
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
        },
    ),
    "gemma/2B": (2_506_172_416, gemma("GemmaForCausalLM", **sized(18, 2048, 8, 1, 16384))),
    "gemma/7B": (8_537_680_896, gemma("GemmaForCausalLM", **sized(28, 3072, 16, 16, 24576))),
    "gemma2/2B": (2_614_341_888, gemma2(**sized(26, 2304, 8, 4, 9216))),
    "gemma2/9B": (9_241_705_984, gemma2(**sized(42, 3584, 16, 8, 14336))),
    "phi3/mini": (
        3_821_079_552,
        {
            **PHI,
            **sized(32, 3072, 32, 32, 8192),
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
        },
    ),
    "phi4/14B": (
        14_659_507_200,
        {
            **PHI,
            **sized(40, 5120, 40, 10, 17920),
            "vocab_size": 100352,
            "max_position_embeddings": 16384,
            "rope_theta": 250000,
            "sliding_window": None,
        },
    ),
}
"""Parameters, and what the publishers' config.json says."""


def said(published):
    return interpret(published, Path("config.json"))


def built(model_section, config):
    model = build_on_meta(model_section, torch.bfloat16, said(config))
    return model, {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_every_published_model_with_a_config_is_checked():
    ours = {name.removesuffix("_ppl_eval") for name in NAMES}
    assert ours - {"auto", "tiny", "tiny_teacher", "tiny_pair", *PAIRS} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_builds_the_published_model(name, tmp_path):
    parameters, published = PUBLISHED[name]
    config = load(["--config", f"{name}_ppl_eval"])
    model, shapes = built(config.model, published)
    assert sum(p.numel() for p in model.parameters()) == parameters
    dim, heads = published["hidden_size"], published["num_attention_heads"]
    head_dim = published.get("head_dim", dim // heads)
    kv_heads, hidden = published["num_key_value_heads"], published["intermediate_size"]
    assert len(model.layers) == published["num_hidden_layers"]
    assert shapes["tok_embeddings.weight"] == (published["vocab_size"], dim)
    assert ("output.weight" in shapes) != published.get("tie_word_embeddings", False)
    assert shapes["layers.0.attn.q_proj.weight"] == (heads * head_dim, dim)
    assert shapes["layers.0.attn.k_proj.weight"] == (kv_heads * head_dim, dim)
    assert shapes["layers.0.mlp.w1.weight"] == (hidden, dim)
    assert model.max_seq_len == published["max_position_embeddings"]
    check_against_config(model, Checkpoint(config.checkpointer, said(published)))

    # and what the folder says leads to the same model, in both layouts of config.json
    moved = {k: v for k, v in published.items() if k not in ("rope_theta", "rope_scaling")}
    rope = published.get("rope_scaling", {"rope_type": "default"})
    moved["rope_parameters"] = {**rope, "rope_theta": published["rope_theta"]}
    for content in (published, moved):
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").touch()
        auto = sections(str(tmp_path))
        auto_model, auto_shapes = built(auto["model"], content)
        assert auto_shapes == shapes
        check_against_config(auto_model, Checkpoint(config.checkpointer, said(content)))
        assert TorchtuneDecoder(model).attentions == TorchtuneDecoder(auto_model).attentions


@pytest.mark.parametrize(
    ("component", "name", "key"),
    [
        (
            "gemma2.gemma2_2b",
            "gemma2/2B",
            "attn_logit_softcapping 50.0, but the model section builds 30",
        ),
        (
            "gemma2.gemma2_9b",
            "gemma2/9B",
            "attn_logit_softcapping 50.0, but the model section builds 30",
        ),
        ("phi4.phi4_14b", "phi4/14B", "rope_theta 250000, but the model section builds 10000"),
    ],
)
def test_builders_of_torchtune_that_differ_from_the_published_model_are_refused(
    component, name, key
):
    _, published = PUBLISHED[name]
    model, _ = built({"_component_": f"torchtune.models.{component}"}, published)
    with pytest.raises(UserError, match=key):
        check_against_config(model, Checkpoint({"checkpoint_dir": "DIR"}, said(published)))


PAIRS = {
    "llama3_2/8B_to_1B_KD": ("llama3_2/8B_to_1B_KD_lora", "llama3_2/1B", "llama3_1/8B"),
    "qwen2/1.5B_to_0.5B_KD": ("qwen2/1.5_to_0.5B_KD_lora", "qwen2/0.5B", "qwen2/1.5B"),
}
"""Our config of a pair -> torchtune's of its distillation, ours of the student, of the teacher."""


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", ["distributed", "single_device"])
def test_a_pair_is_torchtunes(name, kind):
    """Builders and folders of torchtune's own config; sections as in our configs of each alone."""
    theirs, student, teacher = PAIRS[name]
    theirs = f"{theirs}_{kind}"
    recipes = Path(torchtune.__file__).parents[1] / "recipes"
    published = OmegaConf.load(recipes / "configs" / f"{theirs}.yaml")
    pair, *alone = (
        OmegaConf.load(shipped.config_path(f"{n}_ppl_eval")) for n in (name, student, teacher)
    )
    builder = pair.model._component_
    assert published.model._component_ == builder.replace(".qwen2_0", ".lora_qwen2_0").replace(
        ".llama3_2_1b", ".lora_llama3_2_1b"
    )
    assert published.teacher_model._component_ == pair.teacher_model._component_
    assert Path(published.teacher_checkpointer.checkpoint_dir) == Path(pair.teacher_checkpoint_dir)
    if kind == "distributed":
        assert pair.checkpoint_dir == f"{published.output_dir}/epoch_0"
    assert (pair.model, pair.teacher_model) == tuple(each.model for each in alone)
    types = pair.checkpointer.model_type, pair.teacher_checkpointer.model_type
    assert types == tuple(each.checkpointer.model_type for each in alone)
    registered = {c.name for recipe in get_all_recipes() for c in recipe.configs}
    assert theirs in registered
    header = shipped.config_path(f"{name}_ppl_eval").read_text().split("\n\n")[0]
    assert f"--config {theirs}" in header or kind == "single_device"
    for download in re.findall(r"--output-dir (\S+)", header):
        assert any(
            Path(section.checkpoint_dir) == Path(download)
            for section in (published.checkpointer, published.teacher_checkpointer)
        )
