"""Where torchtune 0.6.1 computes something else than the model: corrected here, and only here.

docs/families.md describes each case. A correction changes modules and buffers of a model on the
meta device. Parameters keep torchtune's names, except Gemma 2's norms: see
:mod:`ppl_eval.checkpoint.names`.
"""

from typing import Any

from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from ppl_eval.checkpoint.config_json import ModelConfig, differs
from ppl_eval.errors import UserError
from ppl_eval.model.attention import Attention, Causal, SlidingWindow
from ppl_eval.model.torchtune_decoder import CappedHead, LayerAttention
from ppl_eval.plural import counted


def correct(model: TransformerDecoder, config: ModelConfig) -> None:
    """Make ``model`` compute what its checkpoint's config.json describes.

    Args:
        model: as torchtune builds it.
        config: config.json; without one, only what the model itself shows is corrected.

    Raises:
        UserError: config.json asks for something that torchtune's modules cannot express.
    """
    layers: Any = model.layers
    windows = _windows(config, len(layers))
    for layer, window in zip(layers, windows, strict=True):
        if isinstance(layer.attn, Gemma2Attention):
            built = layer.attn.sliding_window_size
            if window is not None and built not in (None, window):
                raise differs("config.json", "sliding_window", window, built)
            layer.attn = _plain_attention(layer.attn, window if config.windows else built)
        elif window is not None:
            layer.attn._attention_call = LayerAttention(Attention(SlidingWindow(window)))
    if isinstance(model.norm, Gemma2FinalNorm):
        # torchtune caps the final hidden states where Gemma 2 caps the logits
        soft_cap = model.norm.capping_value
        model.norm = model.norm.rms_norm
        if soft_cap is not None:
            model.output = CappedHead(model.output, soft_cap)
    _set_rope_scaling(model, config)


def _windows(config: ModelConfig, num_layers: int) -> tuple[int | None, ...]:
    """Most keys that a query of each layer sees; None for all.

    torchtune has sliding windows for Gemma 2 only: Mistral, Phi 3 and Qwen 2 get full attention.
    """
    if len(config.windows) == num_layers:
        return config.windows
    if any(config.windows):
        raise UserError(
            f"config.json gives {counted(len(config.windows), 'layer')} a window, but the model"
            f" section builds {counted(num_layers, 'layer')}: make them the same"
        )
    return (None,) * num_layers


def _plain_attention(gemma2: Gemma2Attention, window: int | None) -> MultiHeadAttention:
    """Gemma 2's attention in the class of all other families, with the same parameters; torchtune's
    builds masks and scores of all queries x keys."""
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
    seen = Causal() if window is None else SlidingWindow(window)
    attention._attention_call = LayerAttention(
        Attention(seen, soft_cap=gemma2.softcapping, scale=gemma2.scaling)
    )
    return attention


def _set_rope_scaling(model: TransformerDecoder, config: ModelConfig) -> None:
    """Llama 3's rope scaling by config.json: torchtune's builders fix all but the factor."""
    scaling, kind = config.rope, config.rope.get("rope_type", "default")
    ropes = {m for m in model.modules() if hasattr(m, "rope_init")}
    factor = scaling.get("factor", 1)
    for rope in ropes if scaling else ():
        built = getattr(rope, "scale_factor", 1)
        if built != factor and kind in ("default", "llama3"):
            raise differs("config.json", "factor of its rotary scaling", factor, built)
    if kind == "default":
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
