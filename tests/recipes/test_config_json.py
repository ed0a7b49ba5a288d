"""config.json as transformers reads it: the same forward, or a refusal, over the space of its keys.

The truth is transformers' own configuration class and forward. What a checkpoint folder says goes
the whole way through ours: auto_ppl_eval's sections, the checks, the weights, the loss.
"""

import dataclasses
import json
import shutil

import families
import pytest
import torch
from helpers import chunks, nll_of, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ppl_eval import UserError, evaluate
from ppl_eval.checkpoint.config_json import interpret
from ppl_eval.checkpoint.families import FAMILIES
from ppl_eval.config.command_line import load as load_config
from ppl_eval.data import hf_tokenizer
from ppl_eval.evaluation import preflight
from ppl_eval.model import from_folder as auto
from ppl_eval.model.prepare import prepare_model
from ppl_eval.shipped import embedded_path

transformers = pytest.importorskip("transformers")

ABSENT = "absent"
WINDOW, LENGTH, LAYERS = 5, 24, 2
CAUSAL = torch.arange(3, 3 + LENGTH).repeat(1, 1) * 7 % 61
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 6.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 16,
}
FULL, SLIDING = "full_attention", "sliding_attention"

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What every case has unless it says otherwise: sizes that a test can afford."""

SPACE = {
    "num_key_value_heads": [ABSENT, None, 1, 4, 2.0],
    "head_dim": [ABSENT, None, 8, 16],
    "rms_norm_eps": [ABSENT, None, 1e-2, 1, float("nan"), 0.0, -1e-5],
    "tie_word_embeddings": [ABSENT, None, True, False, 1],
    "hidden_act": [ABSENT, None, "silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": [ABSENT, None, "gelu", "gelu_pytorch_tanh", "silu"],
    "attention_bias": [ABSENT, None, True, False],
    "mlp_bias": [ABSENT, None, True, False],
    "sliding_window": [ABSENT, None, WINDOW, 40, 0, -1, 5.0],
    "use_sliding_window": [ABSENT, None, True, False],
    "max_window_layers": [ABSENT, None, 0, 1, 2],
    "layer_types": [
        *(ABSENT, None, [SLIDING, FULL], [FULL, SLIDING], [FULL, FULL], [SLIDING, SLIDING]),
        *(["attention", SLIDING], [FULL], ["linear_attention", FULL], "full_attention"),
    ],
    "rope_theta": [ABSENT, None, 500.0, 10000, "500", float("nan"), -3],
    "rope_parameters": [
        *(ABSENT, None, {}, {"rope_theta": 2000.0}, {"rope_type": "default", "rope_theta": 900.0}),
        *({**LLAMA3, "rope_theta": 700.0}, {"rope_type": "linear", "factor": 2.0}, LLAMA3),
        *({"type": "default"}, {"rope_theta": None}, {"rope_type": None}, "default"),
        *({"rope_theta": 800.0, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 1.0}),
        {SLIDING: {"rope_theta": 300.0}, FULL: {"rope_theta": 800.0}},
    ],
    "rope_scaling": [
        *(ABSENT, None, {}, {"rope_theta": 3000.0}, {"type": "llama3", "factor": 2.0}),
        *({**LLAMA3, "factor": 3}, {k: v for k, v in LLAMA3.items() if k[:8] != "original"}),
        *({"rope_type": "default", "type": "llama3"}, {**LLAMA3, "type": "default"}),
        *({**LLAMA3, "low_freq_factor": None}, {**LLAMA3, "high_freq_factor": 1.0}),
        *({**LLAMA3, "factor": 0.5}, {**LLAMA3, "partial_rotary_factor": 0.5}),
        {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    ],
    "original_max_position_embeddings": [ABSENT, None, 16, 48],
    "partial_rotary_factor": [ABSENT, None, 1.0, 0.5],
    "query_pre_attn_scalar": [ABSENT, None, 8, 100, 8.0],
    "attn_logit_softcapping": [ABSENT, None, 2.0, 50.0, 2],
    "final_logit_softcapping": [ABSENT, None, 4.0, 0.0],
    "is_causal": [ABSENT, True, False, None],
    "use_bidirectional_attention": [ABSENT, None, False, True],
    "per_layer_config": [ABSENT, None, {"0": {"rms_norm_eps": 0.1}}],
}
"""Key -> values that a config.json may have for it."""


def written(family, changes):
    content = {"model_type": family, **BASE}
    content |= {"head_dim": 8} if family in ("gemma", "gemma2", "ministral") else {}
    content |= {key: json.loads(json.dumps(value)) for key, value in changes.items()}
    return {key: value for key, value in content.items() if value != ABSENT}


def transformers_says(content, folder):
    """(its configuration, NLL of each token in float64), or (configuration or None, None) if it
    refuses or gives NaN; its weights are saved in ``folder``."""
    config = model = None
    try:
        (folder / "config.json").write_text(json.dumps(content))
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        sharpen(model)
        with torch.no_grad():
            logits = model.eval()(CAUSAL[:, :-1], use_cache=False).logits
    except Exception as error:  # noqa: BLE001  (whatever it raises is a refusal)
        return config, None, f"{type(error).__name__}: {error}"
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors")
    nll = -logits.double().log_softmax(dim=-1).gather(2, CAUSAL[:, 1:, None])[..., 0]
    return config, nll if bool(nll.isfinite().all()) else None, ""


def sharpen(model):
    """Weights by which a wrong window, angle, cap, norm or activation shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
                continue
            size = 0.4 if "embed" in key or "lm_head" in key else 0.35
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))


def ours_says(folder):
    """NLL of each token through auto_ppl_eval's sections, and the notes."""
    found = auto.model_sections(str(folder))
    ready = prepare_model(
        found["model"], {**found["checkpointer"], "checkpoint_files": None}, torch.float32
    )
    ready.load(torch.device("cpu"))
    targets = CAUSAL[:, 1:]
    with torch.no_grad():
        return nll_of(
            ready.decoder.model, CAUSAL[:, :-1], targets, torch.ones_like(targets).bool()
        ).double(), ready.notes


def beyond_torchtune(family, config, content):
    """Why torchtune's decoders cannot compute what transformers does, by its configuration; or
    why the content has no meaning that one would want."""
    act = config.hidden_activation if family == "gemma2" else config.hidden_act
    rope, heads = config.rope_parameters, config.num_attention_heads
    gemma = family.startswith("gemma")
    scaled = rope["rope_type"] == "llama3"
    head_dim = getattr(config, "head_dim", config.hidden_size // heads)
    return {
        "activation": act not in (("gelu_pytorch_tanh",) if gemma else ("silu", "swish")),
        "bias": (family == "llama" or gemma) and config.attention_bias,
        "mlp bias": family == "llama" and config.mlp_bias,
        "tied": config.tie_word_embeddings != gemma and family not in ("llama", "qwen2"),
        "head_dim": not gemma and head_dim * heads != config.hidden_size,
        "rope type": rope["rope_type"] not in (("default", "llama3")[: 1 + (family == "llama")]),
        "partial": (family == "phi3" or scaled) and rope.get("partial_rotary_factor", 1.0) != 1.0,
        "llama3": scaled and rope["high_freq_factor"] <= rope["low_freq_factor"],
        "not causal": not getattr(config, "is_causal", True),
        "both directions": gemma and config.use_bidirectional_attention,
        "window below 1": (getattr(config, "sliding_window", None) or 1) < 1
        or getattr(config, "sliding_window", None) == 0,
        "norm epsilon": config.rms_norm_eps <= 0,
        "cap of 0": family == "gemma2" and 0 in (config.final_logit_softcapping,),
        "rope by layer": any(isinstance(v, dict) for v in rope.values()),
        "layer of another kind": "linear_attention" in (content.get("layer_types") or ()),
    }


def agree(family, changes, folder):
    """Compare both; returns what happened."""
    content = written(family, changes)
    config, truth, reason = transformers_says(content, folder)
    ours, notes, refusal = None, (), ""
    try:
        ours, notes = ours_says(folder)
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    if ours is None and truth is None:
        return "both refuse"
    if ours is None:
        why = [name for name, holds in beyond_torchtune(family, config, content).items() if holds]
        assert why, f"{changes}: refused ({refusal}), but transformers computes it"
        return "beyond torchtune"
    assert truth is not None, f"{changes}: computed, but transformers refuses: {reason}"
    assert (ours - truth).abs().max() < 2e-4, f"{changes}: {(ours - truth).abs().max()}; {notes}"
    return "equal"


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_key(family, tmp_path):
    """Each key alone, in a config.json that says the least."""
    happened = [
        agree(family, {key: value}, tmp_path) for key, values in SPACE.items() for value in values
    ]
    assert happened.count("equal") > 40, happened


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_values_that_stand_together(family, data, tmp_path_factory):
    keys = data.draw(st.lists(st.sampled_from(sorted(SPACE)), min_size=2, max_size=6, unique=True))
    changes = {key: data.draw(st.sampled_from(SPACE[key])) for key in keys}
    folder = tmp_path_factory.getbasetemp() / family
    folder.mkdir(exist_ok=True)
    agree(family, changes, folder)


WITHOUT_EFFECT = {
    *("initializer_range", "use_cache", "pretraining_tp", "attention_dropout"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "resid_pdrop", "embd_pdrop"),
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type"),
}
"""Fields of the configuration classes that change no forward of an evaluation."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_the_fields_of_the_configuration_class(family):
    """Names, defaults, and which of them may be null."""
    known = transformers.CONFIG_MAPPING[family]
    fields = {field.name: field for field in dataclasses.fields(known)}
    wanted = set(fields) - WITHOUT_EFFECT - {"rope_parameters"}
    own = FAMILIES[family]
    undeclared = {"head_dim"} - set(fields)  # read by getattr where a class lacks it
    assert set(own.defaults) == wanted | undeclared
    for key in wanted:
        assert own.defaults[key] == fields[key].default, key
        if (family, key) in (("gemma2", "sliding_window"), ("ministral", "sliding_window")):
            continue  # the class takes null, the forward does not
        nullable = own.defaults[key] is None or key in own.nullable
        assert nullable == ("None" in str(fields[key].type)), key
    assert known.default_theta == 10_000.0


def notes_of(family, **changes):
    from pathlib import Path

    return " | ".join(interpret(written(family, changes), Path("config.json")).notes)


@pytest.mark.parametrize(
    ("family", "changes", "note"),
    [
        (
            "llama",
            {"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000}},
            "rope_theta 500000 of rope_parameters counts, not rope_theta 10000",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_theta": 7.0}, "rope_parameters": {"rope_theta": 8.0}},
            "rope_scaling {'rope_theta': 7.0} counts, not rope_parameters {'rope_theta': 8.0}",
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "type": "linear"}},
            "rope_type 'llama3' counts, not type 'linear'",
        ),
        (
            "llama",
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 48},
            "original_max_position_embeddings 48 counts, not 16 of the rotary section",
        ),
        ("llama", {"sliding_window": 16}, "sliding_window 16 has no effect, since transformers'"),
        ("gemma", {"sliding_window": 16}, "sliding_window 16 has no effect"),
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation 'silu' has no effect"),
        ("mistral", {"use_sliding_window": False}, "use_sliding_window False has no effect"),
        ("phi3", {"use_sliding_window": False, "sliding_window": 9}, "use_sliding_window False"),
        ("mistral", {}, "it has no sliding_window (4096): transformers' default is taken"),
        (
            "gemma2",
            {"rms_norm_eps": ABSENT},
            "it has no rms_norm_eps (1e-06), sliding_window (4096), query_pre_attn_scalar (256),"
            " attn_logit_softcapping (50.0), final_logit_softcapping (30.0)",
        ),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 0, "layer_types": [FULL, SLIDING]},
            "layer_types counts, not max_window_layers and sliding_window",
        ),
        (
            "mistral",
            {"architectures": ["LlamaForCausalLM"], "sliding_window": None},
            "model_type 'mistral' counts, not architectures 'LlamaForCausalLM'",
        ),
    ],
)
def test_what_counts_is_said(family, changes, note):
    assert note in notes_of(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_theta": 500000.0, "rope_scaling": None, "pretraining_tp": 1}),
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}),
        ("phi3", {"sliding_window": 5, "attention_bias": False, "embd_pdrop": 0.0}),
    ],
)
def test_what_the_publishers_write_needs_no_note(family, changes):
    caps = {"query_pre_attn_scalar": 8, "sliding_window": 9}
    caps |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
    assert notes_of(family, **(caps if family == "gemma2" else {}), **changes) == ""


def test_the_notes_are_said_before_the_run(tmp_path):
    content = written("llama", {"sliding_window": 16})
    transformers_says(content, tmp_path)
    (tmp_path / "words.jsonl").write_text('{"text": "3 4 5"}\n')
    args = ["--config", "auto_ppl_eval", f"checkpoint_dir={tmp_path}", "max_documents=1"]
    args += [f"dataset.data_files={tmp_path}/words.jsonl", "tokenizer._component_=helpers.words"]
    ready = preflight.prepare(load_config(args))
    assert [n for n in ready.notes if "sliding_window 16 has no effect" in n]
    assert [n for n in ready.notes if "windows have 64 tokens, all that the model reads" in n]


@pytest.mark.parametrize(
    ("component", "changes", "message"),
    [
        (
            "llama3_1.llama3_1",
            {"scale_factor": 8},
            "factor of its rotary scaling 1, but the model section builds 8",
        ),
        ("llama2.llama2", {"rope_base": 500000}, "rope_theta 10000.0, but .* builds 500000"),
        (
            "llama3_2.llama3_2",
            {"scale_factor": 1, "tie_word_embeddings": True},
            "tie_word_embeddings False, but the model section builds True",
        ),
        ("llama2.llama2", {"norm_eps": 1e-6}, "rms_norm_eps 1e-05, but .* builds 1e-06"),
        (
            "llama2.llama2",
            {"num_layers": 3},
            "num_hidden_layers 2, but .* builds 3.* or set it to {}",
        ),
    ],
)
def test_a_model_section_that_differs_from_config_json(component, changes, message, tmp_path):
    transformers_says(written("llama", {}), tmp_path)
    found = auto.model_sections(str(tmp_path))
    section = {**found["model"], "_component_": f"torchtune.models.{component}", **changes}
    checkpointer = {**found["checkpointer"], "checkpoint_files": None}
    with pytest.raises(UserError, match=message):
        prepare_model(section, checkpointer, torch.float32)


def test_an_activation_that_the_builder_lacks_is_refused_with_a_named_builder_too(tmp_path):
    transformers_says(written("llama", {}), tmp_path)
    found = auto.model_sections(str(tmp_path))
    transformers_says(written("llama", {"hidden_act": "gelu"}), tmp_path)
    checkpointer = {**found["checkpointer"], "checkpoint_files": None}
    with pytest.raises(UserError, match="hidden_act 'gelu', but torchtune 0.6.1 has"):
        prepare_model(found["model"], checkpointer, torch.float32)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000.0}}),
        ("llama", {"rope_theta": 10000, "rope_scaling": LLAMA3, "rope_parameters": None}),
        ("llama", {"sliding_window": 16}),
        ("llama", {"rms_norm_eps": ABSENT}),
        ("mistral", {}),
        ("mistral", {"sliding_window": 16, "use_sliding_window": False}),
        ("mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    ],
)
def test_trained_weights(kind, changes, tmp_path):
    """The embedded teacher under another config.json, against a float64 loop over transformers."""
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_path("tiny_teacher") / name, tmp_path)
    content = json.loads((embedded_path("tiny_teacher") / "config.json").read_text())
    content |= {"model_type": kind, "architectures": None, **changes}
    content = {key: value for key, value in content.items() if value != ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(content))
    texts = families.documents(4)
    found = auto.sections(str(tmp_path))
    checkpointer = {**found["checkpointer"], "checkpoint_files": None}
    ready = prepare_model(found["model"], checkpointer, torch.float32)
    ready.load(torch.device("cpu"))
    tokenizer = hf_tokenizer(str(tmp_path))
    result = evaluate(ready.decoder.model, tokenizer, texts, max_seq_len=200)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float64
    )
    ids = [tokenizer.encode(row["text"], False, False) for row in texts]
    windows = [w for i in ids for w in chunks(i, 200, bos_id=tokenizer.bos_id)]
    count, nll = oracle(lambda tokens: theirs(tokens, use_cache=False).logits, windows)
    assert result.summary.total.num_scored == count > 400
    assert result.summary.total.nll_nats_sum == pytest.approx(nll, rel=1e-6)
