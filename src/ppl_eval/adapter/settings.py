"""adapter_config.json: what PEFT or torchtune states about an adapter besides its tensors."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ppl_eval.errors import UserError
from ppl_eval.files import read_json

_CHANGES_MORE = (
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias"),
    *("modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices"),
    *("use_bdlora", "use_qalora"),
)
"""Keys of PEFT's LoraConfig that, if set, give another matrix than W + B A."""

_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Values of init_lora_weights for which PEFT subtracts the initial B A from the base weights."""

_MERGE_FIRST = "merge the adapter with PEFT's merge_and_unload() first"

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
"""torchtune's name of a matrix -> Hugging Face's names of the matrices that it comes from."""


def read_settings(path: Path) -> dict[str, Any]:
    """Read an adapter_config.json.

    Raises:
        UserError: it is not readable, lacks r or lora_alpha, or is not for LoRA, rsLoRA or DoRA.
    """
    settings = read_json(path)

    def refuse(key: str, rule: str) -> NoReturn:
        raise UserError(f"{path} has {key} {settings.get(key)!r}, but {rule}")

    if settings.get("peft_type", "LORA") != "LORA":
        refuse("peft_type", "only LORA (with DoRA) is evaluated")
    for key, least in (("r", 1), ("lora_alpha", 0)):
        if not _is_number(settings.get(key), least):
            refuse(key, f"it is a number of at least {least}")
    if settings.get("bias", "none") != "none":
        refuse("bias", f"trained biases are not evaluated: {_MERGE_FIRST}")
    if str(settings.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        saving = "save the adapter with path_initial_model_for_weight_conversion"
        refuse("init_lora_weights", f"it changed the base weights too: {saving}, or {_MERGE_FIRST}")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = {} if settings.get(key) is None else settings[key]
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            refuse(key, "it maps names of modules to numbers")
        try:
            for name in pattern:
                re.compile(name)
        except re.error as error:
            raise UserError(f"{path} has a {key} that is no regular expression: {error}") from error
    more = [key for key in _CHANGES_MORE if settings.get(key)]
    if more:
        raise UserError(
            f"{path} sets {', '.join(more)}, but only plain LoRA, rsLoRA and DoRA matrices are"
            f" evaluated: {_MERGE_FIRST}"
        )
    return settings


def _is_number(value: Any, least: int = 0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def is_by_torchtune(settings: Mapping[str, Any]) -> bool:
    """Whether torchtune wrote them: it writes five keys, and PEFT every key that it knows."""
    return not {"bias", "use_dora"} & set(settings)


def rank_and_alpha(settings: Mapping[str, Any], module: str) -> tuple[int, float]:
    """r and lora_alpha of a module; in a pattern the first key that matches the name's end counts.

    Args:
        settings: from :func:`read_settings`.
        module: the module's name in the adapter's file.
    """

    def value(key: str, pattern: str) -> Any:
        special = settings.get(pattern) or {}
        matching = (k for k in special if re.match(rf"(.*\.)?({k})$", module))
        return next((special[k] for k in matching), settings[key])

    return value("r", "rank_pattern"), value("lora_alpha", "alpha_pattern")


def targeted(settings: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    """The modules that target_modules lists; none if it is a pattern.

    Args:
        settings: from :func:`read_settings`.
        modules: the model's matrices by torchtune's names.
    """
    targets, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if not isinstance(targets, list) or settings.get("exclude_modules"):
        return []
    chosen = [layers] if isinstance(layers, int) else layers
    found = []
    for module in modules:
        index = re.match(r"layers\.(\d+)\.", module)
        within = module[index.end() :] if index else module
        prefix = f"model.layers.{index[1]}." if index else ""
        names = [module, *(prefix + name for name in _NAMES.get(within, ()))]
        in_layer = not chosen or (index is not None and int(index[1]) in chosen)
        ends = any(name.endswith(f".{target}") for name in names for target in targets)
        if (ends and in_layer) or any(name in targets for name in names):
            found.append(module)
    return found
