"""Compare the model with config.json in what the shapes of a checkpoint do not show."""

from collections.abc import Iterator
from typing import Any

from torchtune.modules import MultiHeadAttention, TransformerDecoder

from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.config_json import ModelConfig, differs
from ppl_eval.errors import UserError
from ppl_eval.model.attention import Attention
from ppl_eval.model.torchtune_decoder import CappedHead, TorchtuneDecoder

_LLAMA = {"LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL"}
_CONVERSIONS = {
    "qwen2": {"QWEN2"},
    "phi3": {"PHI3_MINI", "PHI4"},
    "gemma": {"GEMMA"},
    "gemma2": {"GEMMA2"},
    **dict.fromkeys(("llama", "mistral", "ministral"), _LLAMA),
}
"""config.json's model_type -> the torchtune model types whose key conversion is right for it."""


def check_against_config(model: TransformerDecoder, checkpoint: Checkpoint) -> None:
    """Compare the model with config.json.

    A wrong family, number of layers or heads, rotary base, norm epsilon, tying, soft cap or scale
    of the attention loads without complaint and gives a wrong loss. What config.json does not
    state is not compared.

    Args:
        model: on any device.
        checkpoint: the model's checkpoint.

    Raises:
        UserError: config.json and the model section differ, naming both values.
    """
    config, model_type = checkpoint.config, checkpoint.model_type
    where = f"{checkpoint.folder}/config.json"
    suited = _CONVERSIONS.get(config.family or "")
    if suited and model_type is not None and model_type not in suited:
        raise UserError(
            f"{where} is of a {config.family}, but checkpointer.model_type is {model_type}:"
            f" set it to {' or '.join(sorted(suited))}"
        )
    for key, stated, built in _pairs(model, config):
        if stated != built and (None in (stated, built) or abs(stated - built) > 1e-6 * stated):
            raise differs(where, key, stated, built)


def _pairs(model: TransformerDecoder, config: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value in config.json, value in the model) of the values that both have."""
    modules = list(model.modules())
    attention = next((m for m in modules if isinstance(m, MultiHeadAttention)), None)
    norm = next((m for m in modules if isinstance(getattr(m, "eps", None), float)), None)
    rope = getattr(attention, "pos_embeddings", None)
    attends = next(iter(TorchtuneDecoder(model).attentions), None) or Attention()
    scale = attends.scale
    built = {
        "num_hidden_layers": len(getattr(model, "layers", ())) or None,
        "num_attention_heads": getattr(attention, "num_heads", None),
        "num_key_value_heads": getattr(attention, "num_kv_heads", None),
        "rms_norm_eps": getattr(norm, "eps", None),
        "query_pre_attn_scalar": None if scale is None else round(scale**-2, 6),
        "tie_word_embeddings": all(name != "output.weight" for name, _ in model.named_parameters()),
    }
    for key, value in built.items():
        if value is not None and config.values.get(key) is not None:
            yield key, config.values[key], value
    if rope is not None and hasattr(rope, "base") and "rope_theta" in config.rope:
        yield "rope_theta", config.rope["rope_theta"], rope.base
    output_cap = model.output.soft_cap if isinstance(model.output, CappedHead) else None
    caps = {"attn_logit_softcapping": attends.soft_cap, "final_logit_softcapping": output_cap}
    for key, soft_cap in caps.items():
        if key in config.values:  # where null means none
            yield key, config.values[key], soft_cap
