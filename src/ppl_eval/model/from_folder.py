"""A checkpoint folder -> the model, checkpointer and tokenizer sections that describe it."""

from pathlib import Path
from typing import Any

from ppl_eval.checkpoint.config_json import ModelConfig, read_model_config
from ppl_eval.checkpoint.families import FAMILIES
from ppl_eval.checkpoint.weight_files import need_folder, refuse_adapter_only
from ppl_eval.errors import UserError

_ELSEWHERE = "measure it with transformers or lm-eval"


def sections(checkpoint_dir: str) -> dict[str, dict[str, Any]]:
    """The ``model``, ``checkpointer`` and ``tokenizer`` sections for a Hugging Face folder.

    Args:
        checkpoint_dir: holds config.json and tokenizer files.

    Raises:
        UserError: no such folder or files, or a model that torchtune 0.6.1 cannot express.
    """
    config, found = _described(checkpoint_dir, "checkpoint_dir")
    return {**found, "tokenizer": tokenizer_section(Path(checkpoint_dir), config)}


def model_sections(checkpoint_dir: str, key: str = "checkpoint_dir") -> dict[str, dict[str, Any]]:
    """As :func:`sections`, without the tokenizer.

    Args:
        checkpoint_dir: holds config.json.
        key: the key that names the folder, for messages.
    """
    return _described(checkpoint_dir, key)[1]


def _described(checkpoint_dir: str, key: str) -> tuple[ModelConfig, dict[str, dict[str, Any]]]:
    """(config.json, the model and checkpointer sections)."""
    need_folder(checkpoint_dir, key)
    path = Path(checkpoint_dir) / "config.json"
    if not path.is_file():
        refuse_adapter_only(path.parent)
        raise UserError(
            f"{checkpoint_dir} has no config.json, by which the model is known: it is not a Hugging"
            " Face folder, so name model, checkpointer and tokenizer in the config"
        )
    config = read_model_config(path)
    if config.family is None:
        raise UserError(
            f"{path} is of {_kind(config)}, but torchtune 0.6.1 has"
            f" {', '.join(f.architecture.removesuffix('ForCausalLM') for f in FAMILIES.values())}"
            f" only: {_ELSEWHERE}"
        )
    check_expressible(config, path)
    model, model_type = _model(config)
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": checkpoint_dir,
        "model_type": model_type,
    }
    return config, {"model": model, "checkpointer": checkpointer}


def _kind(config: ModelConfig) -> str:
    """The model_type, or else the architecture, for messages."""
    kind, names = config.values.get("model_type"), config.values.get("architectures")
    if kind is None and not names:
        return "no model_type and no architectures"
    return f"architecture {names[0]}" if kind is None and names else f"model_type {kind}"


_SILU, _TANH = ("silu", "swish"), ("gelu_pytorch_tanh",)
_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"hidden_act": _SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    "mistral": {"hidden_act": _SILU, "tie_word_embeddings": (False,)},
    "ministral": {"hidden_act": _SILU, "tie_word_embeddings": (False,)},
    "qwen2": {"hidden_act": _SILU},
    "gemma": {"hidden_act": _TANH, "tie_word_embeddings": (True,), "attention_bias": (False,)},
    "gemma2": {
        "hidden_activation": _TANH,
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
    },
    "phi3": {"hidden_act": _SILU, "tie_word_embeddings": (False,)},
}
"""Family -> key of config.json -> values that torchtune 0.6.1 can compute."""


def check_expressible(config: ModelConfig, path: Path) -> None:
    """Refuse what torchtune's builder for the family cannot compute.

    Args:
        config: an unknown family is not checked.
        path: config.json, for messages.

    Raises:
        UserError: naming the key and what could measure the model instead.
    """
    if config.family is None:
        return

    def only(key: str, value: Any, *allowed: Any) -> None:
        if value not in allowed:
            raise UserError(
                f"{path} has {key} {value!r}, but torchtune 0.6.1 has"
                f" {' and '.join(map(repr, allowed))} only for {config.family}: {_ELSEWHERE}"
            )

    values, rope = config.values, config.rope
    for key, allowed in _ONLY[config.family].items():
        only(key, values[key], *allowed)
    if config.family in ("gemma", "gemma2"):
        only("use_bidirectional_attention", values["use_bidirectional_attention"], False, None)
    else:
        heads, size = values["num_attention_heads"], values["hidden_size"]
        only("head_dim", values["head_dim"], size // heads)
    kinds = ("default", "llama3") if config.family == "llama" else ("default",)
    only("rope_type", rope["rope_type"], *kinds)
    if config.family == "phi3" or rope["rope_type"] == "llama3":
        only("partial_rotary_factor", rope["partial_rotary_factor"], 1.0)


def _model(config: ModelConfig) -> tuple[dict[str, Any], str]:
    """(model section, model type of the checkpointer)."""
    values, family = config.values, str(config.family)
    sizes = {
        "vocab_size": values["vocab_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values["num_key_value_heads"],
        "embed_dim": values["hidden_size"],
        "intermediate_dim": values["intermediate_size"],
        "max_seq_len": values["max_position_embeddings"],
        "norm_eps": values["rms_norm_eps"],
        "rope_base": config.rope["rope_theta"],
    }
    builder = "mistral" if family == "ministral" else family
    more, model_type = {}, "PHI3_MINI" if family == "phi3" else builder.upper()
    if family == "llama":
        builder, more, model_type = _llama(config)
    elif family == "qwen2":
        more = {"tie_word_embeddings": values["tie_word_embeddings"]}
    elif family in ("gemma", "gemma2"):
        more = {"head_dim": values["head_dim"]}
    if family == "gemma2":
        more |= {
            "hidden_capping_value": values["attn_logit_softcapping"],
            "final_capping_value": values["final_logit_softcapping"],
            "sliding_window_size": values["sliding_window"],
            "query_pre_attn_scalar": values["query_pre_attn_scalar"],
        }
    return {"_component_": f"torchtune.models.{builder}.{builder}", **sizes, **more}, model_type


def _llama(config: ModelConfig) -> tuple[str, dict[str, Any], str]:
    """(builder, its further arguments, model type of the checkpointer)."""
    factor = config.rope.get("factor")
    if config.values["tie_word_embeddings"]:
        more = {"tie_word_embeddings": True, "scale_factor": factor or 1}
        return "llama3_2", more, "LLAMA3_2"
    if factor is not None:
        return "llama3_1", {"scale_factor": factor}, "LLAMA3"
    if config.values["vocab_size"] > 100_000:
        return "llama3", {}, "LLAMA3"
    return "llama2", {}, "LLAMA2"


def tokenizer_section(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The ``tokenizer`` section for the files in a folder.

    Args:
        folder: holds tokenizer.json, tokenizer.model, or vocab.json and merges.txt.
        config: its config.json.

    Raises:
        UserError: it holds none of these.
    """
    vocabulary, merges, model = (
        folder / name for name in ("vocab.json", "merges.txt", "tokenizer.model")
    )
    if (folder / "tokenizer.json").is_file():
        return {"_component_": "ppl_eval.data.hf_tokenizer", "path": str(folder)}
    if vocabulary.is_file() and merges.is_file():
        if config.family == "qwen2":
            component = "torchtune.models.qwen2.qwen2_tokenizer"
            return {"_component_": component, "path": str(vocabulary), "merges_file": str(merges)}
    elif model.is_file():
        large_llama = config.family == "llama" and config.values["vocab_size"] > 100_000
        builder = {
            "llama": "llama3.llama3_tokenizer" if large_llama else "llama2.llama2_tokenizer",
            "mistral": "mistral.mistral_tokenizer",
            "ministral": "mistral.mistral_tokenizer",
            "gemma": "gemma.gemma_tokenizer",
            "gemma2": "gemma.gemma_tokenizer",
            "phi3": "phi3.phi3_mini_tokenizer",
        }.get(config.family or "")
        if builder is not None:
            return {"_component_": f"torchtune.models.{builder}", "path": str(model)}
    raise UserError(
        f"{folder} has no tokenizer that is known: tokenizer.json, or tokenizer.model, or (Qwen 2)"
        " vocab.json and merges.txt; or name one by tokenizer._component_"
    )
