"""Every family against transformers, through auto_ppl_eval; and what each correction is worth."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torchao import quantization as ao
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

pytest.importorskip("transformers")
import families

from ppl_eval import UserError
from ppl_eval.checkpoint import names
from ppl_eval.checkpoint.config_json import NOTHING, ModelConfig, read_model_config
from ppl_eval.config.command_line import load as load_config
from ppl_eval.model import build, corrections, torchtune_decoder
from ppl_eval.model import from_folder as auto

MISTRAL = "mistral (window of 7)"
GEMMA2 = "gemma2 (caps 2 and 4, window of 11)"
LLAMA3_1 = "llama3_1 (scaled rope)"


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_family_equals_transformers(name, tmp_path):
    """Documents to 1e-6 relative, tokens to 1e-4 nats, in fp32."""
    document, token, perplexity = families.compare(name, tmp_path)
    assert document < 1e-6
    assert token < 1e-4
    assert perplexity > 1000  # sharp, and nothing like the 521 of a model that knows nothing


@pytest.mark.parametrize("how", ["by the quantizer", "in the checkpoint"])
@pytest.mark.parametrize(
    "name",
    ["llama3_2 (tied, scaled rope)", "qwen2_5 (biases, untied)", "gemma", GEMMA2, "phi3", MISTRAL],
)
def test_a_quantised_family_equals_transformers(name, how, tmp_path, monkeypatch):
    """Weights that torchtune's conversion permutes or splits, a scale to each row."""
    write = families.write

    def write_quantised(name, folder):
        model = write(name, folder)
        ao.quantize_(model.model.layers, ao.Float8WeightOnlyConfig())
        if how == "in the checkpoint":
            tensors, metadata = flatten_tensor_state_dict(model.state_dict())
            if model.config.tie_word_embeddings:
                tensors.pop("lm_head.weight")
            save_file(tensors, folder / "model.safetensors", metadata)
        return model

    plain = families.compare(name, tmp_path)
    monkeypatch.setattr(families, "write", write_quantised)
    overrides = ["quantizer.scheme=float8_weight_only"] if how == "by the quantizer" else []
    document, token, perplexity = families.compare(name, tmp_path, overrides)
    assert document < 1e-6
    assert token < 1e-4
    assert perplexity != pytest.approx(plain[2], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "module", "attribute", "broken"),
    [
        (MISTRAL, corrections, "_windows", lambda config, n: [None] * n),
        ("phi3 (window of 13)", corrections, "_windows", lambda config, n: [None] * n),
        ("qwen2 (window of 9 from layer 1 on)", corrections, "_windows", lambda c, n: [9] * n),
        (LLAMA3_1, corrections, "_set_rope_scaling", lambda model, config: None),
        (GEMMA2, torchtune_decoder, "soft_capped", lambda logits, soft_cap: logits),
        (GEMMA2, names, "_corrected", lambda name, kind: name.replace("norm.rms_norm.", "norm.")),
    ],
)
def test_each_correction_is_needed(name, module, attribute, broken, tmp_path, monkeypatch):
    """Without it the same comparison is off by far more than it allows."""
    monkeypatch.setattr(module, attribute, broken)
    document, token, _ = families.compare(name, tmp_path)
    assert document > 1e-3
    assert token > 0.1


def in_the_old_layout(folder):
    """config.json as transformers 4 wrote it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.get("rope_type")
    config["rope_scaling"] = None if kind == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", [LLAMA3_1, MISTRAL, GEMMA2, "qwen2 (window of 9 from layer 1 on)"])
def test_both_layouts_of_config_json_say_the_same(name, tmp_path):
    def said():
        config = read_model_config(tmp_path / "config.json")
        return auto.sections(str(tmp_path)), config.values, config.rope, config.windows

    families.write(name, tmp_path)
    new = said()
    in_the_old_layout(tmp_path)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert said() == new


def test_a_checkpoint_in_the_old_layout_gives_the_same_numbers(tmp_path, monkeypatch):
    write = families.write
    new = families.compare(LLAMA3_1, tmp_path)

    def write_old(name, folder):
        model = write(name, folder)
        in_the_old_layout(folder)
        return model

    monkeypatch.setattr(families, "write", write_old)
    assert families.compare(LLAMA3_1, tmp_path) == new


def test_given_keys_win_over_the_folder(tmp_path):
    families.write("llama2", tmp_path)
    base = ["--config", "auto_ppl_eval", f"checkpoint_dir={tmp_path}", "dataset.data_files=x"]
    cfg = load_config([*base, "model.max_seq_len=64", "model.norm_eps=1e-5"])
    assert cfg.model["_component_"] == "torchtune.models.llama2.llama2"
    assert (cfg.model["max_seq_len"], cfg.model["num_layers"]) == (64, 3)
    mine = "model._component_=torchtune.models.llama2.llama2_7b"
    assert load_config([*base, mine]).model == {"_component_": "torchtune.models.llama2.llama2_7b"}
    tokenizer = [
        "tokenizer._component_=torchtune.models.llama2.llama2_tokenizer",
        "tokenizer.path=y",
    ]
    assert load_config([*base, *tokenizer]).tokenizer["path"] == "y"
    with pytest.raises(UserError, match="unknown config key model.max_len"):
        load_config([*base, "model.max_len=64"])


def test_checkpoint_dir_must_mean_something():
    with pytest.raises(UserError, match="checkpoint_dir is not set"):
        load_config(["--config", "auto_ppl_eval"])
    with pytest.raises(UserError, match="checkpoint_dir is nowhere, but there is no such folder"):
        load_config(["--config", "auto_ppl_eval", "checkpoint_dir=nowhere"])
    with pytest.raises(
        UserError, match="checkpoint_dir is a, but the checkpointer section names b"
    ):
        load_config(
            ["--config", "tiny_ppl_eval", "checkpoint_dir=a", "checkpointer.checkpoint_dir=b"]
        )
    cfg = load_config(["--config", "tiny_ppl_eval", "checkpointer.checkpoint_dir=b"])
    assert (cfg.checkpointer["checkpoint_dir"], cfg.tokenizer["path"]) == ("b", "b")
    cfg = load_config(["--config", "tiny_ppl_eval", "checkpoint_dir=a"])
    assert (cfg.checkpointer["checkpoint_dir"], cfg.tokenizer["path"]) == ("a", "a")


def llama_config(**changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{"vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


inexpressible = [
    (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        "is of model_type qwen3, but torchtune 0.6.1 has Llama",
    ),
    (
        {"architectures": None, "model_type": ...},
        "is of no model_type and no architectures, but torchtune",
    ),
    ({"model_type": "yi"}, "is of model_type yi, but torchtune 0.6.1 has Llama"),
    (
        {"model_type": ..., "architectures": ["Qwen3ForCausalLM"]},
        "is of architecture Qwen3ForCausalLM, but",
    ),
    ({"model_type": ["llama"]}, r"has model_type \['llama'\], but it is a name"),
    ({"architectures": "LlamaForCausalLM"}, "has architectures 'LlamaForCausalLM', but it is a"),
    ({"architectures": ["LlamaModel"]}, "is of LlamaModel, which is no causal language model"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised by gptq, but only torchao's"),
    ({"quantization_config": {"load_in_4bit": True}}, "quantised by bitsandbytes, but"),
    ({"attention_bias": True}, "attention_bias True, but .* has False only for llama: measure it"),
    ({"mlp_bias": True}, "mlp_bias True"),
    ({"head_dim": 16}, "head_dim 16, but torchtune 0.6.1 has 12 only"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu', but torchtune 0.6.1 has 'silu' and 'swish' only"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear', but"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn', but"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None, but"),
    ({"hidden_size": None}, "hidden_size None, but it is of type int"),
    (
        {"architectures": None, "model_type": "phi3", "partial_rotary_factor": 0.75},
        "partial_rotary_factor 0.75",
    ),
    (
        {"architectures": None, "model_type": "phi3", "tie_word_embeddings": True},
        "tie_word_embeddings True",
    ),
    (
        {"architectures": None, "model_type": "mistral", "head_dim": 128},
        "head_dim 128",
    ),
    (
        {"architectures": None, "model_type": "gemma", "tie_word_embeddings": False},
        "tie_word_embeddings False",
    ),
]


@pytest.mark.parametrize(("changes", "message"), inexpressible)
def test_what_torchtune_cannot_express_is_named(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_config(**changes)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        auto.sections(str(tmp_path))


def test_folders_without_the_files(tmp_path):
    with pytest.raises(UserError, match="has no config.json, by which the model is known"):
        auto.sections(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    with pytest.raises(UserError, match="has no tokenizer that is known"):
        auto.sections(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "files", "component"),
    [
        ({}, ["tokenizer.json", "tokenizer.model"], "ppl_eval.data.hf_tokenizer"),
        ({}, ["tokenizer.model"], "torchtune.models.llama2.llama2_tokenizer"),
        ({"vocab_size": 128_256}, ["tokenizer.model"], "torchtune.models.llama3.llama3_tokenizer"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
            ["tokenizer.model"],
            "torchtune.models.mistral.mistral_tokenizer",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            ["vocab.json", "merges.txt"],
            "torchtune.models.qwen2.qwen2_tokenizer",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
            ["tokenizer.model"],
            "torchtune.models.phi3.phi3_mini_tokenizer",
        ),
    ],
)
def test_the_tokenizer_files_choose_the_tokenizer(family, files, component, tmp_path):
    from ppl_eval import components

    (tmp_path / "config.json").write_text(json.dumps(llama_config(**family)))
    for file in files:
        (tmp_path / file).touch()
    tokenizer = auto.sections(str(tmp_path))["tokenizer"]
    assert tokenizer["_component_"] == component
    components.check(tokenizer, "tokenizer")


def test_windows_that_are_longer_than_the_text_change_nothing():
    """And a model without config.json is taken as torchtune builds it."""
    node = {"_component_": "torchtune.models.mistral.mistral", **_SMALL}
    plain = build.build_on_meta(node, torch.float32, NOTHING)
    windowed = build.build_on_meta(node, torch.float32, ModelConfig("mistral", {}, {}, (9, 9)))
    calls = [layer.attn._attention_call for layer in (*plain.layers, *windowed.layers)]
    q = torch.randn(1, 4, 9, 12)
    results = [call(q, q, q, mask=None, dropout_p=0.0, is_causal=True) for call in calls]
    assert all(torch.equal(result, results[0]) for result in results)


_SMALL = {
    **{"vocab_size": 50, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 48},
    **{"intermediate_dim": 80, "max_seq_len": 64},
}


def test_gemma_without_a_bos_gets_a_warning(tmp_path, monkeypatch):
    """With BOS its first tokens are scored as well, one more for each document."""
    from ppl_eval.commands.check import check
    from ppl_eval.evaluation import preflight

    families.write("gemma", tmp_path)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("Ada lived.", "A bill: 3.")))
    base = ["--config", "auto_ppl_eval", f"checkpoint_dir={tmp_path}", "protocol.max_seq_len=96"]
    base.append(f"dataset.data_files={texts}")
    scored = {}
    for bos in ("true", "false"):
        cfg = load_config([*base, f"protocol.add_bos={bos}"])
        ready = preflight.prepare(cfg)
        scored[bos] = int(ready.workload.windows.num_scored.sum())
        assert len(ready.warnings) == (bos == "false")
    assert scored["true"] == scored["false"] + 2
    assert "gemma needs a BOS before every window" in ready.warnings[0]
    described = check(load_config([*base, "protocol.add_bos=false"]), 1)
    assert "warning: gemma needs a BOS" in described.splitlines()[-1]
