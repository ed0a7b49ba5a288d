"""adapter_config.json: what PEFT or torchtune says of an adapter that its tensors do not."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.files import read_json

_CHANGES_MORE = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Keys of PEFT's LoraConfig that, if set, make something else than W + B A."""

_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Values of init_lora_weights for which PEFT subtracts the initial B A from the base weights."""


_NAMES = {
    "attn.q_proj": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "attn.k_proj": ("self_attn.k_proj", "self_attn.qkv_proj"),
    "attn.v_proj": ("self_attn.v_proj", "self_attn.qkv_proj"),
    "attn.output_proj": ("self_attn.o_proj",),
    "mlp.w1": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "mlp.w2": ("mlp.down_proj",),
    "mlp.w3": ("mlp.up_proj", "mlp.gate_up_proj"),
    "output": ("lm_head",),
}
"""torchtune's name of a matrix -> Hugging Face's names of what it comes from."""


def read_settings(path: Path) -> dict[str, Any]:
    """An adapter_config.json, if it is one of LoRA, rsLoRA or DoRA.

    Raises:
        UserError: it is not readable, lacks r or lora_alpha, or asks for anything else.
    """
    settings = read_json(path)
    kind = settings.get("peft_type", "LORA")
    if kind != "LORA":
        raise UserError(f"{path} has peft_type {kind}, but only LORA (with DoRA) is evaluated")
    for key, least in (("r", 1), ("lora_alpha", 0)):
        value = settings.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < least:
            raise UserError(f"{path} has {key} {value!r}, but it is a number of at least {least}")
    if settings.get("bias", "none") != "none":
        raise UserError(
            f"{path} has bias {settings['bias']!r}, but trained biases are not evaluated: merge the"
            " adapter with PEFT's merge_and_unload() first"
        )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UserError(
            f"{path} has init_lora_weights {start!r}, which changed the base weights too: save the"
            " adapter with path_initial_model_for_weight_conversion, or merge it with PEFT's"
            " merge_and_unload() first"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(path, key, settings.get(key))
    more = [key for key in _CHANGES_MORE if settings.get(key)]
    if more:
        raise UserError(
            f"{path} sets {', '.join(more)}, but only plain LoRA, rsLoRA and DoRA matrices are"
            " evaluated: merge the adapter with PEFT's merge_and_unload() first"
        )
    return settings


def _check_pattern(path: Path, key: str, pattern: Any) -> None:
    if pattern is None:
        return
    if isinstance(pattern, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        for value in pattern.values()
    ):
        try:
            for name in pattern:
                re.compile(name)
        except re.error as error:
            raise UserError(f"{path} has a {key} that is no regular expression: {error}") from error
        return
    raise UserError(f"{path} has {key} {pattern!r}, but it maps names of modules to numbers")


def is_by_torchtune(settings: Mapping[str, Any]) -> bool:
    """Whether torchtune wrote it: PEFT writes every key that it knows, torchtune five of them."""
    return not {"bias", "use_dora"} & set(settings)


def rank_and_alpha(settings: Mapping[str, Any], module: str) -> tuple[int, float]:
    """r and lora_alpha of a module, patterns included: the first that matches the end of its name.

    Args:
        settings: from :func:`read_settings`.
        module: its name in the base model, by the layout of the adapter.
    """
    found = []
    for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        special = settings.get(pattern) or {}
        key = next((k for k in special if re.match(rf"(.*\.)?({k})$", module)), None)
        found.append(settings[default] if key is None else special[key])
    rank, alpha = found
    return rank, alpha


def scale_of(settings: Mapping[str, Any], rank: int, alpha: float) -> float:
    """What B A is multiplied with: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def targeted(settings: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    """Those of the model's matrices that target_modules names; none if it is a pattern.

    Args:
        settings: from :func:`read_settings`.
        modules: torchtune's names.
    """
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if not isinstance(targets, list) or settings.get("exclude_modules"):
        return []
    chosen = [layers] if isinstance(layers, int) else layers
    found = []
    for module in modules:
        index = re.match(r"layers\.(\d+)\.", module)
        own = _NAMES.get(module[index.end() :] if index else module, ())
        names = [module, *(f"model.layers.{index[1]}.{name}" if index else name for name in own)]
        in_layer = not chosen or (index is not None and int(index[1]) in chosen)
        ends = any(name.endswith(f".{target}") for name in names for target in targets)
        if (ends and in_layer) or any(name in targets for name in names):
            found.append(module)
    return found
