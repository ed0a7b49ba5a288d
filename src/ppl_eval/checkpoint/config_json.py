"""What a checkpoint's config.json says about the forward pass, read as transformers reads it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ppl_eval.checkpoint.families import DEFAULT_THETA, DERIVED, FAMILIES, INVISIBLE, TYPES, Family
from ppl_eval.errors import UserError
from ppl_eval.files import read_json

_FULL, _SLIDING = ("full_attention", "attention"), "sliding_attention"
"""Values of ``layer_types``; the second name of full attention is an old one."""


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, every value as transformers takes it.

    Attributes:
        family: model_type, or None if there is no config.json or the family is not in
            :data:`ppl_eval.checkpoint.families.FAMILIES`.
        values: value of each key that the family reads; all of config.json if it is unknown.
        rope: ``rope_type``, ``rope_theta``, ``partial_rotary_factor``, and the numbers of
            Llama 3's scaling if that is the type.
        windows: how many keys a query of each layer sees at most, None for all; empty if the
            family is unknown.
        notes: which of two values is used, and which keys have no effect, one sentence each.
        is_quantized: whether the weights are quantised, by torchao.
    """

    family: str | None
    values: Mapping[str, Any]
    rope: Mapping[str, Any]
    windows: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()
    is_quantized: bool = False


NOTHING = ModelConfig(None, {}, {})
"""No config.json."""


def differs(path: str, key: str, stated: Any, built: Any) -> UserError:
    """The error for a model section that builds another model than config.json describes."""
    return UserError(
        f"{path} gives {key} {stated}, but the model section builds {built}: make the model section"
        " describe the checkpoint, or set it to {}, which takes everything from config.json"
    )


def read_model_config(path: Path) -> ModelConfig:
    """Read a config.json.

    Raises:
        UserError: it is not JSON, has a value that transformers refuses or gives no meaning, or
            belongs to a checkpoint that is quantised, and not by torchao.
    """
    return interpret(read_json(path), path)


def interpret(content: Mapping[str, Any], path: Path) -> ModelConfig:
    """What the content of a config.json means; see :func:`read_model_config`."""
    is_quantized = _is_quantized(content, path)
    reader = _Reader(content, path)
    family = reader.family()
    if family is None:
        return ModelConfig(None, content, reader.rope(), is_quantized=is_quantized)
    values = reader.values(family)
    for key, usual in (("is_causal", True), ("per_layer_config", None)):
        if content.get(key, usual) != usual:
            reader.refuse(key, "only causal models whose layers are alike have a perplexity here")
    rope = reader.rope(family, values["max_position_embeddings"])
    windows = reader.windows(family, values)
    reader.note_unread(family, windows)
    reader.note_defaults(family, windows)
    values.pop("layer_types", None)  # in windows
    notes = tuple(f"{path}: {note}" for note in reader.notes)
    return ModelConfig(family, values, rope, windows, notes, is_quantized)


def _is_quantized(content: Mapping[str, Any], path: Path) -> bool:
    """Whether the weights are quantised by torchao; any other method is refused."""
    section = content.get("quantization_config") or content.get("compression_config")
    if not section:
        return False
    method = None
    if isinstance(section, Mapping):
        uses_bitsandbytes = any(key.startswith("load_in_") for key in section)
        method = section.get("quant_method") or ("bitsandbytes" if uses_bitsandbytes else None)
    if method == "torchao":
        return True
    raise UserError(
        f"{path} is of a model that is quantised{f' by {method}' if method else ''}, but only"
        " torchao's quantised checkpoints are read: give the full-precision one, or measure it with"
        " transformers or lm-eval"
    )


@dataclass
class _Reader:
    """Takes values out of one config.json and says what is wrong with them."""

    content: Mapping[str, Any]
    path: Path
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, rule: str, value: Any = ...) -> NoReturn:
        value = self.content.get(key) if value is ... else value
        raise UserError(f"{self.path} has {key} {value!r}, but {rule}")

    def family(self) -> str | None:
        """The family, chosen as transformers' auto classes do: by model_type, whatever the
        architecture is called; None if it is unknown."""
        kind, names = self.content.get("model_type"), self.content.get("architectures") or []
        if not isinstance(names, list):
            self.refuse("architectures", "it is a list of names")
        if not isinstance(kind, str | None):
            self.refuse("model_type", "it is a name")
        name = str(names[0]) if names else None
        if kind is None:
            return next((kind for kind, f in FAMILIES.items() if f.architecture == name), None)
        if kind not in FAMILIES:
            return None
        if name not in (None, FAMILIES[kind].architecture):
            if not name.endswith("ForCausalLM"):
                raise UserError(
                    f"{self.path} is of {name}, which is no causal language model: its weights have"
                    " no head that gives a perplexity"
                )
            self.notes.append(f"model_type {kind!r} counts, not architectures {name!r}")
        if kind == "mistral" and "layer_types" in self.content:
            return "ministral"
        return kind

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
        window, layers = values.get("sliding_window"), range(values["num_hidden_layers"])
        if family == "qwen2" and not values["use_sliding_window"]:
            window = None
        slides = [window is not None] * len(layers)
        if family == "gemma2":
            slides = [number % 2 == 0 for number in layers]
        elif family == "qwen2" and window is not None:
            slides = [number >= values["max_window_layers"] for number in layers]
        kinds = self._layer_types(len(layers))
        if kinds is not None and "layer_types" in FAMILIES[family].defaults:
            stated = [kind == _SLIDING for kind in kinds]
            if family == "qwen2" and stated != slides:
                self.notes.append("layer_types counts, not max_window_layers and sliding_window")
            slides = stated
        if any(slides) and (window is None or window < 1):
            self.refuse("sliding_window", "layers have a window, which is above 0", window)
        return tuple(window if sliding else None for sliding in slides)

    def _layer_types(self, num_layers: int) -> list[str] | None:
        kinds = self.content.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            self.refuse("layer_types", f"it is a list with one of each of {num_layers} layers")
        if not all(kind in (*_FULL, _SLIDING) for kind in kinds):
            self.refuse("layer_types", "layers are full_attention or sliding_attention")
        return kinds

    def rope(
        self, family: str | None = None, max_position_embeddings: int | None = None
    ) -> dict[str, Any]:
        """The rotary embedding.

        ``rope_scaling`` counts before ``rope_parameters``, and a key in the section before the
        same key outside.
        """
        name, section = self._rope_section()
        kind = section.get("rope_type", section.get("type", "default"))
        if not isinstance(kind, str):
            self.refuse(name, "its rope_type is a name")
        if "rope_type" in section and section.get("type", kind) != kind:
            self.notes.append(f"rope_type {kind!r} counts, not type {section['type']!r}")
        rope = {"rope_type": kind}
        for key, default in (("rope_theta", DEFAULT_THETA), ("partial_rotary_factor", 1.0)):
            outside = self.content.get(key, default)
            if key == "partial_rotary_factor" and outside is None and family != "phi3":
                outside = default  # null is as good as absent
            rope[key] = section.get(key, outside)
            if self.content.get(key, rope[key]) not in (None, rope[key]):
                self.notes.append(
                    f"{key} {rope[key]} of {name} counts, not {key} {self.content[key]}"
                )
        self._need_positive("rope_theta", rope["rope_theta"], "it is a number above 0")
        if kind == "llama3":
            rope |= self._llama3_scaling(section, max_position_embeddings)
        return rope

    def _rope_section(self) -> tuple[str, Mapping[str, Any]]:
        """(key, its value) of the section that counts."""
        sections = {}
        for key in ("rope_scaling", "rope_parameters"):
            section = self.content.get(key)
            if section is not None and not isinstance(section, Mapping):
                self.refuse(key, "it is a mapping of keys")
            if section:
                sections[key] = section
        name, section = next(iter(sections.items()), ("rope_parameters", {}))
        other = sections.get("rope_parameters", section)
        if other != section:
            self.notes.append(f"{name} {dict(section)} counts, not rope_parameters {dict(other)}")
        if any(isinstance(value, Mapping) for value in section.values()):
            self.refuse(name, "its layers have one rotary embedding")
        return name, section

    def _llama3_scaling(
        self, section: Mapping[str, Any], max_position_embeddings: int | None
    ) -> dict[str, Any]:
        original = "original_max_position_embeddings"
        scaling = {original: max_position_embeddings, **section}
        # transformers looks outside the section once more when it builds the model
        if original in self.content:
            scaling[original] = self.content[original]
            if section.get(original, scaling[original]) != scaling[original]:
                self.notes.append(
                    f"{original} {scaling[original]} counts, not {section[original]} of the rotary"
                    " section"
                )
        names = ("factor", "low_freq_factor", "high_freq_factor", original)
        found = {name: scaling.get(name) for name in names}
        for name, value in found.items():
            self._need_positive(name, value, "Llama 3's rotary scaling needs a number above 0")
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if high <= low:
            self.refuse("high_freq_factor", f"it is above low_freq_factor, {low}", high)
        return found

    def _need_positive(self, key: str, value: Any, rule: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            self.refuse(key, rule, value)

    def note_unread(self, family: str, windows: tuple[int | None, ...]) -> None:
        """Note the keys of other families, which this one does not read."""
        read = {*FAMILIES[family].defaults, "original_max_position_embeddings"}  # see rope
        same = {"hidden_act": "hidden_activation", "hidden_activation": "hidden_act"}
        for key in dict.fromkeys(key for other in FAMILIES.values() for key in other.defaults):
            value = self.content.get(key)
            switched_off = key == "use_sliding_window" and value is False and any(windows)
            is_same = value == self.content.get(same.get(key, ""))
            if key not in read and (value or switched_off) and not is_same:
                self.notes.append(
                    f"{key} {value!r} has no effect, since transformers' {family} does not read it"
                )

    def note_defaults(self, family: str, windows: tuple[int | None, ...]) -> None:
        """Note the defaults that no tensor's shape shows."""
        defaults = FAMILIES[family].defaults
        taken = [k for k in INVISIBLE if k not in self.content and defaults.get(k) is not None]
        if not any(windows):
            taken = [key for key in taken if key != "sliding_window"]
        if taken:
            values = ", ".join(f"{key} ({defaults[key]})" for key in taken)
            self.notes.append(f"it has no {values}: transformers' default is taken")
