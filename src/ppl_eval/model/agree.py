"""Does the model section describe the checkpoint? What shapes cannot show, config.json can."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torchtune.modules import MultiHeadAttention

from ppl_eval.errors import UserError
from ppl_eval.model.convert import layout_of
from ppl_eval.model.corrections import rope_scaling

_CONVERSIONS = {
    "qwen2": {"QWEN2"},
    "phi3": {"PHI3_MINI", "PHI4"},
    "gemma": {"GEMMA"},
    "gemma2": {"GEMMA2"},
    "llama": {"LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL"},
    "mistral": {"LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL"},
}
"""config.json's model_type -> model types whose key conversion is right for it."""


def check_against_config(
    model: nn.Module, checkpointer: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Compare family, heads, rotary base, norm epsilon, soft caps and scale with config.json.

    All of these load without complaint and give a wrong loss. What config.json does not state is
    taken as it comes.

    Args:
        model: built, on meta or not.
        checkpointer: the checked section.
        config: config.json of its folder, or empty.

    Raises:
        UserError: config.json and the model section differ, naming both values.
    """
    folder = checkpointer.get("checkpoint_dir")
    family, model_type = config.get("model_type"), checkpointer.get("model_type")
    suited = _CONVERSIONS.get(str(family))
    if suited and model_type is not None and model_type not in suited:
        raise UserError(
            f"{folder}/config.json is of a {family}, but checkpointer.model_type is {model_type}:"
            f" set it to {' or '.join(sorted(suited))}"
        )
    for key, stated, built in _pairs(model, config):
        if stated is not None and built is not None and abs(stated - built) > 1e-6 * abs(stated):
            raise UserError(
                f"{folder}/config.json has {key} {stated:g}, but the model section builds"
                f" {built:g}: make the model section describe the checkpoint, or use"
                " --config auto_ppl_eval, which reads it from config.json"
            )


def config_of(checkpointer: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json beside the weights that a ``checkpointer`` section names; empty if none."""
    folder = checkpointer.get("checkpoint_dir")
    path = Path(folder) / "config.json" if folder else None
    if path is None or not path.is_file():
        if path is not None and layout_of(checkpointer) == "Hugging Face":
            raise UserError(f"there is no {path}, which a Hugging Face checkpoint needs")
        return {}
    return read_config(path)


def read_config_beside(checkpointer: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a ``checkpointer`` section's folder; empty where there is none."""
    path = Path(checkpointer.get("checkpoint_dir") or "") / "config.json"
    return read_config(path) if path.is_file() else {}


def read_config(path: Path) -> dict[str, Any]:
    """A config.json as a mapping.

    Raises:
        UserError: it is none.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, but it is a mapping of keys")
    return config


def _pairs(model: nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value in config.json, value in the model), None where one of them does not say."""
    modules = list(model.modules())
    attention = next((m for m in modules if isinstance(m, MultiHeadAttention)), None)
    norm = next((m for m in modules if isinstance(getattr(m, "eps", None), float)), None)
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads") or heads
    yield "num_attention_heads", heads, getattr(attention, "num_heads", None)
    yield "num_key_value_heads", kv_heads, getattr(attention, "num_kv_heads", None)
    yield "rms_norm_eps", _number(config, "rms_norm_eps"), getattr(norm, "eps", None)
    rope = getattr(attention, "pos_embeddings", None)
    # transformers 5 moved rope_theta into rope_parameters
    theta = _number(config, "rope_theta") or _number(rope_scaling(config), "rope_theta")
    yield "rope_theta", theta, getattr(rope, "base", None)
    call = getattr(attention, "_attention_call", None)
    head = getattr(model, "output", None)
    for key, owner in (("attn_logit_softcapping", call), ("final_logit_softcapping", head)):
        yield key, _number(config, key), getattr(owner, "soft_cap", None)
    scale = getattr(call, "scale", None)
    key = "query_pre_attn_scalar"
    yield key, _number(config, key), None if scale is None else scale**-2


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None
