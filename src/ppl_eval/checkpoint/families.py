"""What each family's configuration class in transformers 5 reads: keys that change the forward.

A key that the class does not know has no effect there, and none here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DERIVED = object()
"""A default that follows from other keys; unlike with None, null is refused."""


@dataclass(frozen=True)
class Family:
    """A configuration class of transformers.

    Attributes:
        architecture: class of the causal language model.
        defaults: key that changes the forward -> the value if config.json lacks it. A value must
            have the default's type; null is allowed if the default is None or the key is in
            ``nullable``.
        nullable: further keys that may be null.
    """

    architecture: str
    defaults: Mapping[str, Any]
    nullable: tuple[str, ...] = ()


def _sizes(*numbers: int) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "max_position_embeddings")
    return dict(zip(names, numbers, strict=True))


_GEMMA = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
_GEMMA |= {"attention_bias": False, "use_bidirectional_attention": None}

_MISTRAL = _sizes(32000, 4096, 14336, 32, 32, 131072)
_MISTRAL |= {"num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-6}
_MISTRAL |= {"hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": 4096}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        _sizes(32000, 4096, 11008, 32, 32, 2048)
        | {"num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6}
        | {"hidden_act": "silu", "tie_word_embeddings": False}
        | {"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Family("MistralForCausalLM", _MISTRAL, nullable=("sliding_window",)),
    "ministral": Family("MinistralForCausalLM", _MISTRAL | {"layer_types": None}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _sizes(151936, 4096, 22016, 32, 32, 32768)
        | {"num_key_value_heads": 32, "head_dim": DERIVED, "rms_norm_eps": 1e-6}
        | {"hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": 4096}
        | {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None},
        nullable=("num_key_value_heads", "sliding_window"),
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        _sizes(256000, 3072, 24576, 28, 16, 8192)
        | {"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"}
        | _GEMMA,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _sizes(256000, 2304, 9216, 26, 8, 8192)
        | {"num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"}
        | _GEMMA
        | {"query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        nullable=("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _sizes(32064, 3072, 8192, 32, 32, 4096)
        | {"num_key_value_heads": None, "head_dim": DERIVED, "rms_norm_eps": 1e-5}
        | {"hidden_act": "silu", "tie_word_embeddings": False, "sliding_window": None}
        | {"original_max_position_embeddings": 4096},
    ),
}
"""model_type of config.json -> its family."""

DEFAULT_THETA = 10_000.0
"""Rotary base where config.json has none, in every family."""

TYPES = {
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), int),
    "use_bidirectional_attention": bool,
    "layer_types": list,
}
"""Types of the keys whose default does not show the type."""

INVISIBLE = ("rms_norm_eps", "sliding_window", "query_pre_attn_scalar")
INVISIBLE += ("attn_logit_softcapping", "final_logit_softcapping")
"""Keys whose value no tensor's shape shows: a note says where a default is taken."""
