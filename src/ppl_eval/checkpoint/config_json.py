"""What a checkpoint's config.json says of the forward, read as transformers reads it.

:mod:`ppl_eval.checkpoint.families` has the keys of each family and their defaults.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ppl_eval.checkpoint.families import DEFAULT_THETA, DERIVED, FAMILIES, INVISIBLE, TYPES, Family
from ppl_eval.errors import UserError
from ppl_eval.files import read_json

_LAYER_TYPES = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
}
"""Name in config.json -> today's name."""


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, every value as transformers takes it.

    Attributes:
        family: model_type, or None if there is no config.json or its family is not in
            :data:`ppl_eval.checkpoint.families.FAMILIES`.
        values: value of each key that the family reads; all of config.json if it is unknown.
        rope: ``rope_type``, ``rope_theta``, ``partial_rotary_factor``, and the numbers of
            Llama 3's scaling where that is the type.
        windows: keys that a query of each layer sees at most, None for all; empty if the family is
            unknown.
        notes: which of two values counts, and which keys count for nothing, one sentence each.
    """

    family: str | None
    values: Mapping[str, Any]
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING = ModelConfig(None, {}, {})
"""No config.json."""


def differs(path: str, key: str, stated: Any, built: Any) -> UserError:
    """The error of a model section that builds another model than its checkpoint's config.json."""
    return UserError(
        f"{path} gives {key} {stated}, but the model section builds {built}: make the model section"
        " describe the checkpoint, or set it to {}, which takes everything from config.json"
    )


def read_model_config(path: Path) -> ModelConfig:
    """Read a config.json.

    Raises:
        UserError: it is not JSON; a value that transformers refuses or gives no meaning; a
            quantised checkpoint.
    """
    return interpret(read_json(path), path)


def interpret(content: Mapping[str, Any], path: Path) -> ModelConfig:
    """What the content of a config.json means; see :func:`read_model_config`."""
    _refuse_quantised(content, path)
    family, notes = _family(content, path)
    if family is None:
        return ModelConfig(None, content, _Reader(content, path).rope())
    reader = _Reader(content, path)
    values = reader.values(family)
    for key in ("is_causal", "per_layer_config"):
        if key in content and content[key] != {"is_causal": True}.get(key):
            reader.refuse(key, "only causal models whose layers are alike have a perplexity here")
    rope = reader.rope(family, values["max_position_embeddings"])
    windows = reader.windows(family, values)
    notes += [
        *reader.notes,
        *_unread(content, family, windows),
        *_defaults_taken(content, family, windows),
    ]
    values.pop("layer_types", None)  # in windows
    return ModelConfig(family, values, rope, windows, tuple(f"{path}: {note}" for note in notes))


def _refuse_quantised(content: Mapping[str, Any], path: Path) -> None:
    section = content.get("quantization_config") or content.get("compression_config")
    if not section:
        return
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if method is None and isinstance(section, Mapping):
        method = "bitsandbytes" if any(key.startswith("load_in_") for key in section) else None
    raise UserError(
        f"{path} is of a model that is quantised{f' by {method}' if method else ''}, but quantised"
        " checkpoints are not read: give the full-precision one, or measure it with transformers or"
        " lm-eval"
    )


def _family(content: Mapping[str, Any], path: Path) -> tuple[str | None, list[str]]:
    """(family, notes), as transformers' auto classes choose: by model_type, whatever the
    architecture is called."""
    kind, names = content.get("model_type"), content.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(f"{path} has architectures {names!r}, but it is a list of names")
    if not isinstance(kind, str | None):
        raise UserError(f"{path} has model_type {kind!r}, but it is a name")
    if kind == "mistral" and "layer_types" in content:  # so do transformers' auto classes
        kind = "ministral"
    name = str(names[0]) if names else None
    if kind is None:
        by_architecture = {family.architecture: kind for kind, family in FAMILIES.items()}
        return by_architecture.get(str(name)), []
    if kind not in FAMILIES or name is None:
        return (kind if kind in FAMILIES else None), []
    if name == FAMILIES[kind].architecture or (kind, name) == ("ministral", "MistralForCausalLM"):
        return kind, []
    if not name.endswith("ForCausalLM"):
        raise UserError(
            f"{path} is of {name}, which is no causal language model: its weights have no head that"
            " gives a perplexity"
        )
    return kind, [f"model_type {kind!r} counts, not architectures {name!r}"]


@dataclass
class _Reader:
    """Takes values out of one config.json and says what is wrong with them."""

    content: Mapping[str, Any]
    path: Path

    def __post_init__(self) -> None:
        self.notes: list[str] = []

    def refuse(self, key: str, rule: str, value: Any = ...) -> NoReturn:
        value = self.content.get(key) if value is ... else value
        raise UserError(f"{self.path} has {key} {value!r}, but {rule}")

    def values(self, family: str) -> dict[str, Any]:
        """Every key that the family reads, checked."""
        keys = FAMILIES[family]
        found = {key: self._value(key, default, keys) for key, default in keys.defaults.items()}
        heads, size = found["num_attention_heads"], found["hidden_size"]
        if found["num_key_value_heads"] is None:
            found["num_key_value_heads"] = heads
        if found["head_dim"] is None and family == "ministral":
            self.refuse("head_dim", "transformers needs one for a Mistral with layer_types", None)
        if found["head_dim"] in (None, DERIVED):
            found["head_dim"] = size // heads
        if found.get("hidden_act") == "gelu" and family == "gemma":  # of the first releases
            found["hidden_act"] = "gelu_pytorch_tanh"
        return found

    def _value(self, key: str, default: Any, family: Family) -> Any:
        if key not in self.content:
            return default
        value, wanted = self.content[key], TYPES.get(key, type(default))
        if value is None:
            if default is None or key in family.nullable:
                return None
            self.refuse(key, f"it is of type {wanted.__name__}, and transformers takes no null")
        if type(value) is not wanted:
            self.refuse(key, f"it is of type {wanted.__name__}")
        is_count = wanted is int and key not in ("sliding_window", "max_window_layers")
        if (is_count or wanted is float) and not 0 < value < math.inf:
            self.refuse(key, "it is above 0")
        return value

    def windows(self, family: str, values: Mapping[str, Any]) -> tuple[int | None, ...]:
        """Window of each layer."""
        num_layers = values["num_hidden_layers"]
        kinds = self._layer_types(num_layers)
        window = values.get("sliding_window")
        if family == "qwen2" and not values["use_sliding_window"]:
            window = None
        rule = [False] * num_layers
        if family in ("mistral", "ministral", "phi3"):
            rule = [window is not None] * num_layers
        elif family == "gemma2":
            rule = [number % 2 == 0 for number in range(num_layers)]
        elif family == "qwen2":
            first = values["max_window_layers"]
            rule = [window is not None and number >= first for number in range(num_layers)]
        slides = rule
        if "layer_types" in FAMILIES[family].defaults and kinds is not None:
            slides = [kind == "sliding_attention" for kind in kinds]
            if family == "qwen2" and slides != rule:
                self.notes.append("layer_types counts, not max_window_layers and sliding_window")
        if any(slides) and (window is None or window < 1):
            self.refuse("sliding_window", "layers have a window, which is above 0", window)
        return tuple(window if sliding else None for sliding in slides)

    def _layer_types(self, num_layers: int) -> list[str] | None:
        kinds = self.content.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.refuse("layer_types", f"it is a list with one of each of {num_layers} layers")
        if not all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in kinds):
            self.refuse("layer_types", "layers are full_attention or sliding_attention")
        return [_LAYER_TYPES[kind] for kind in kinds]

    def rope(
        self, family: str | None = None, max_position_embeddings: int | None = None
    ) -> dict[str, Any]:
        """The rotary embedding: ``rope_scaling`` counts before ``rope_parameters``, and what stands
        in the section before the same key outside."""
        sections = {}
        for key in ("rope_scaling", "rope_parameters"):
            section = self.content.get(key)
            if section is not None and not isinstance(section, Mapping):
                self.refuse(key, "it is a mapping of keys")
            if section:
                sections[key] = section
        name, section = next(iter(sections.items()), ("rope_parameters", {}))
        if len(sections) == 2 and sections["rope_scaling"] != sections["rope_parameters"]:
            self.notes.append(
                f"rope_scaling {dict(section)} counts, not rope_parameters"
                f" {dict(sections['rope_parameters'])}"
            )
        if any(isinstance(value, Mapping) for value in section.values()):
            self.refuse(name, "its layers have one rotary embedding")
        kind = section.get("rope_type", section.get("type", "default"))
        if not isinstance(kind, str):
            self.refuse(name, "its rope_type is a name")
        if "rope_type" in section and section.get("type", kind) != kind:
            self.notes.append(f"rope_type {kind!r} counts, not type {section['type']!r}")

        def inside_first(key: str, default: Any) -> Any:
            if key not in section:
                return self.content.get(key, default)
            if key in self.content and self.content[key] != section[key]:
                self.notes.append(
                    f"{key} {section[key]} of {name} counts, not {key} {self.content[key]}"
                )
            return section[key]

        partial = "partial_rotary_factor"
        if self.content.get(partial) is None and family != "phi3":  # as good as absent
            self.content = {k: v for k, v in self.content.items() if k != partial}
        rope = {
            "rope_type": kind,
            "rope_theta": inside_first("rope_theta", DEFAULT_THETA),
            partial: inside_first(partial, 1.0),
        }
        if not _is_above_0(rope["rope_theta"]):
            self.refuse("rope_theta", "it is a number above 0", rope["rope_theta"])
        if kind == "llama3":
            rope |= self._llama3_scaling(section, max_position_embeddings)
        return rope

    def _llama3_scaling(
        self, section: Mapping[str, Any], max_position_embeddings: int | None
    ) -> dict[str, Any]:
        key = "original_max_position_embeddings"
        # transformers looks outside the section once more when it builds the model
        if key in self.content:
            if section.get(key, self.content[key]) != self.content[key]:
                self.notes.append(
                    f"{key} {self.content[key]} counts, not {section[key]} of the rotary section"
                )
            section = {**section, key: self.content[key]}
        section = {key: max_position_embeddings, **section}
        found = {}
        for name in ("factor", "low_freq_factor", "high_freq_factor", key):
            found[name] = section.get(name)
            if not _is_above_0(found[name]):
                self.refuse(name, "Llama 3's rotary scaling needs a number above 0", found[name])
        if found["high_freq_factor"] <= found["low_freq_factor"]:
            self.refuse(
                "high_freq_factor",
                f"it is above low_freq_factor, {found['low_freq_factor']}",
                found["high_freq_factor"],
            )
        return found


def _is_above_0(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _unread(
    content: Mapping[str, Any], family: str, windows: tuple[int | None, ...]
) -> Iterator[str]:
    """Keys of other families, which this one does not read."""
    own = {*FAMILIES[family].defaults, "original_max_position_embeddings"}  # see rope
    every = dict.fromkeys(key for other in FAMILIES.values() for key in other.defaults)
    same = {"hidden_act": "hidden_activation", "hidden_activation": "hidden_act"}
    for key in every:
        value = content.get(key)
        switched_off = key == "use_sliding_window" and value is False and any(windows)
        if key in own or not (value or switched_off) or value == content.get(same.get(key, "")):
            continue
        yield f"{key} {value!r} has no effect, since transformers' {family} does not read it"


def _defaults_taken(
    content: Mapping[str, Any], family: str, windows: tuple[int | None, ...]
) -> Iterator[str]:
    defaults = FAMILIES[family].defaults
    taken = [key for key in INVISIBLE if key not in content and defaults.get(key) is not None]
    if not any(windows):
        taken = [key for key in taken if key != "sliding_window"]
    if taken:
        values = ", ".join(f"{key} ({defaults[key]})" for key in taken)
        yield f"it has no {values}: transformers' default is taken"
