"""Where torchtune 0.6.1 computes something else than the model: set right here, and only here.

docs/families.md tells each case. A correction changes modules and buffers of a model that was just
built on the meta device; the names of its parameters stay torchtune's, with one exception that
``renamed`` gives.
"""

from collections.abc import Mapping
from typing import Any

from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from ppl_eval.errors import UserError
from ppl_eval.score.attention import CausalAttention
from ppl_eval.score.head import CappedHead


def correct(model: TransformerDecoder, config: Mapping[str, Any]) -> None:
    """Make ``model`` compute what its checkpoint's config.json describes.

    Args:
        model: as torchtune builds it.
        config: config.json; empty if there is none, and then only what the model itself shows is
            corrected.

    Raises:
        UserError: config.json asks for something that torchtune's modules cannot express.
    """
    windows = sliding_windows(config, len(model.layers))
    layers: Any = model.layers
    for layer, window in zip(layers, windows, strict=True):
        if isinstance(layer.attn, Gemma2Attention):
            layer.attn = _plain_attention(layer.attn)
        elif window is not None:
            layer.attn._attention_call = CausalAttention(window=window)
    _uncap_hidden_states(model)
    _set_rope_scaling(model, config)


def sliding_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Keys that a query of each layer sees at most, by config.json; None for all.

    torchtune has sliding windows for Gemma 2 only; Mistral, Phi 3 and Qwen 2 silently get full
    attention.
    """
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [None] * num_layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if config.get("model_type") == "gemma2":
        return [window if n % 2 == 0 else None for n in range(num_layers)]
    first = config.get("max_window_layers", 0) if config.get("model_type") == "qwen2" else 0
    return [window if n >= first else None for n in range(num_layers)]


def _plain_attention(gemma2: Gemma2Attention) -> MultiHeadAttention:
    """Gemma 2's attention as the class that all other families have, with the same parameters.

    torchtune's builds masks and scores of all queries x keys.
    """
    attention = MultiHeadAttention(
        embed_dim=gemma2.embed_dim,
        num_heads=gemma2.num_heads,
        num_kv_heads=gemma2.num_kv_heads,
        head_dim=gemma2.head_dim,
        q_proj=gemma2.q_proj,
        k_proj=gemma2.k_proj,
        v_proj=gemma2.v_proj,
        output_proj=gemma2.output_proj,
        pos_embeddings=gemma2.pos_embeddings,
        max_seq_len=gemma2.max_seq_len,
    )
    attention._attention_call = CausalAttention(
        window=gemma2.sliding_window_size, soft_cap=gemma2.softcapping, scale=gemma2.scaling
    )
    return attention


def _uncap_hidden_states(model: TransformerDecoder) -> None:
    """Gemma 2: torchtune caps the final hidden states where the model caps the logits."""
    if isinstance(model.norm, Gemma2FinalNorm):
        soft_cap = soft_cap_of(model.norm)
        model.norm = model.norm.rms_norm
        if soft_cap is not None:
            model.output = CappedHead(model.output, soft_cap)


def soft_cap_of(norm: Gemma2FinalNorm) -> float | None:
    """The cap of the logits, None for none."""
    return norm.capping_value


def renamed(name: str, model_type: str | None) -> str:
    """Where a tensor belongs that torchtune's key conversion calls ``name``.

    For Gemma 2 torchtune's map puts the norm before the feed-forward where the one after it
    belongs, and the other way round. Its final norm moves because the soft cap left it.
    """
    if model_type != "GEMMA2":
        return name
    if name == "norm.rms_norm.scale":
        return "norm.scale"
    if ".mlp_norm." in name:
        return name.replace(".mlp_norm.", ".mlp_scale.")
    return name.replace(".mlp_scale.", ".mlp_norm.")


def _set_rope_scaling(model: TransformerDecoder, config: Mapping[str, Any]) -> None:
    """Llama 3's rope scaling by config.json: torchtune's builders fix all but the factor."""
    scaling = rope_scaling(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    ropes = {m for m in model.modules() if hasattr(m, "rope_init")}
    if kind in ("default", None):
        return
    if kind != "llama3" or not all(isinstance(rope, Llama3ScaledRoPE) for rope in ropes):
        raise UserError(
            f"config.json scales its rotary embedding by {kind!r}, but torchtune has only Llama 3's"
            " kind, in llama3_1 and llama3_2: use transformers or lm-eval for this model"
        )
    for rope in ropes:
        rope.scale_factor = scaling["factor"]
        rope.low_freq_factor = scaling["low_freq_factor"]
        rope.high_freq_factor = scaling["high_freq_factor"]
        rope.old_context_len = scaling["original_max_position_embeddings"]


def rope_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope section of config.json: ``rope_parameters`` (transformers 5) or ``rope_scaling``."""
    for key in ("rope_parameters", "rope_scaling"):
        section = config.get(key)
        if isinstance(section, Mapping):
            return dict(section)
    return {}
