"""A checkpoint folder -> the model, checkpointer and tokenizer sections that describe it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ppl_eval.errors import UserError
from ppl_eval.model.agree import read_config
from ppl_eval.model.corrections import rope_scaling
from ppl_eval.model.folder import refuse_adapter_only

_ELSEWHERE = "measure it with transformers or lm-eval"


def sections(checkpoint_dir: str) -> dict[str, dict[str, Any]]:
    """The ``model``, ``checkpointer`` and ``tokenizer`` sections for a Hugging Face folder.

    Args:
        checkpoint_dir: holds config.json and tokenizer files.

    Raises:
        UserError: no such folder or files, or a model that torchtune 0.6.1 cannot express, naming
            what it lacks and what could be used instead.
    """
    found = model_sections(checkpoint_dir)
    folder = Path(checkpoint_dir)
    config = read_config(folder / "config.json")
    return {**found, "tokenizer": tokenizer_section(folder, config)}


def model_sections(checkpoint_dir: str, key: str = "checkpoint_dir") -> dict[str, dict[str, Any]]:
    """The ``model`` and ``checkpointer`` sections for a Hugging Face folder.

    Args:
        checkpoint_dir: holds config.json.
        key: of the config, for messages.

    Raises:
        UserError: no such folder or files, or a model that torchtune 0.6.1 cannot express, naming
            what it lacks and what could be used instead.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise UserError(f"{key} is {checkpoint_dir}, but there is no such folder")
    path = folder / "config.json"
    if not path.is_file():
        refuse_adapter_only(folder)
        raise UserError(
            f"{checkpoint_dir} has no config.json, by which the model is known: it is not a Hugging"
            " Face folder, so name model, checkpointer and tokenizer in the config"
        )
    config = read_config(path)
    model, model_type = _model(config, path)
    return {
        "model": model,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": checkpoint_dir,
            "model_type": model_type,
        },
    }


def _model(config: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], str]:
    """(model section, model type of the checkpointer)."""
    names = config.get("architectures") or ["none"]
    architecture = str(names[0])
    family = _FAMILIES.get(architecture)
    if family is None:
        raise UserError(
            f"{path} is of {architecture}, but torchtune 0.6.1 has"
            f" {', '.join(name.removesuffix('ForCausalLM') for name in _FAMILIES)} only:"
            f" {_ELSEWHERE}"
        )
    return family(_Config(config, path))


class _Config:
    """config.json with errors that say which key is missing or cannot be expressed."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self._content = content
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        """A value, ``default`` if it is missing or null."""
        value = self._content.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A value that must be there."""
        if self.get(key) is None:
            raise UserError(f"{self._path} has no {key}, without which the model is not known")
        return self.get(key)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse other values of ``key``; the first is what a missing one means."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise UserError(
                f"{self._path} has {key} {value!r}, but torchtune 0.6.1 has"
                f" {' and '.join(map(repr, allowed))} only: {_ELSEWHERE}"
            )

    def sizes(self, *, head_dim: bool = False) -> dict[str, Any]:
        """The builder arguments that all families share."""
        heads = self.need("num_attention_heads")
        dim = self.need("hidden_size")
        if not head_dim:
            self.only("head_dim", dim // heads)
        extra = {"head_dim": self.need("head_dim")} if head_dim else {}
        scaling = rope_scaling(self._content)
        theta = self.get("rope_theta", scaling.get("rope_theta", 10_000.0))
        return {
            "vocab_size": self.need("vocab_size"),
            "num_layers": self.need("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads", heads),
            "embed_dim": dim,
            "intermediate_dim": self.need("intermediate_size"),
            "max_seq_len": self.need("max_position_embeddings"),
            "norm_eps": self.need("rms_norm_eps"),
            "rope_base": theta,
            **extra,
        }

    def rope_factor(self) -> float | None:
        """Factor of Llama 3's rope scaling, or None where the rotary embedding is not scaled."""
        scaling = rope_scaling(self._content)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind in ("default", None):
            return None
        if kind != "llama3":
            raise UserError(
                f"{self._path} scales its rotary embedding by {kind!r}, but torchtune 0.6.1 has"
                f" 'llama3' only: {_ELSEWHERE}"
            )
        wanted = ("factor", "low_freq_factor", "high_freq_factor")
        for key in (*wanted, "original_max_position_embeddings"):
            if not isinstance(scaling.get(key), int | float):
                raise UserError(f"{self._path} scales its rotary embedding without a {key}")
        return scaling["factor"]


def _llama(config: _Config) -> tuple[dict[str, Any], str]:
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    tied = config.get("tie_word_embeddings", False)
    factor = config.rope_factor()
    sizes = config.sizes()
    if tied:
        builder, more = "llama3_2", {"scale_factor": factor or 1, "tie_word_embeddings": True}
    elif factor is not None:
        builder, more = "llama3_1", {"scale_factor": factor}
    elif config.need("vocab_size") > 100_000:
        builder, more = "llama3", {}
    else:
        builder, more = "llama2", {}
    model = {"_component_": f"torchtune.models.{builder}.{builder}", **sizes, **more}
    return model, {"llama2": "LLAMA2", "llama3_2": "LLAMA3_2"}.get(builder, "LLAMA3")


def _mistral(config: _Config) -> tuple[dict[str, Any], str]:
    config.only("hidden_act", "silu")
    config.only("tie_word_embeddings", False)
    _unscaled(config)
    return {"_component_": "torchtune.models.mistral.mistral", **config.sizes()}, "MISTRAL"


def _qwen2(config: _Config) -> tuple[dict[str, Any], str]:
    config.only("hidden_act", "silu")
    _unscaled(config)
    tied = config.get("tie_word_embeddings", False)
    sizes = config.sizes()
    model = {"_component_": "torchtune.models.qwen2.qwen2", **sizes, "tie_word_embeddings": tied}
    return model, "QWEN2"


def _gemma(config: _Config) -> tuple[dict[str, Any], str]:
    # transformers reads "gelu" of the first releases as the tanh approximation that was meant
    config.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("tie_word_embeddings", True)
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    _unscaled(config)
    return {"_component_": "torchtune.models.gemma.gemma", **config.sizes(head_dim=True)}, "GEMMA"


def _gemma2(config: _Config) -> tuple[dict[str, Any], str]:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("tie_word_embeddings", True)
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    _unscaled(config)
    model = {
        "_component_": "torchtune.models.gemma2.gemma2",
        **config.sizes(head_dim=True),
        "hidden_capping_value": config.get("attn_logit_softcapping"),
        "final_capping_value": config.get("final_logit_softcapping"),
        "sliding_window_size": config.get("sliding_window"),
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar"),
    }
    return model, "GEMMA2"


def _phi3(config: _Config) -> tuple[dict[str, Any], str]:
    config.only("hidden_act", "silu")
    config.only("tie_word_embeddings", False)
    config.only("attention_bias", False)
    config.only("partial_rotary_factor", 1.0)
    _unscaled(config)
    return {"_component_": "torchtune.models.phi3.phi3", **config.sizes()}, "PHI3_MINI"


def _unscaled(config: _Config) -> None:
    if config.rope_factor() is not None:
        config.only("rope_scaling", None)
        config.only("rope_parameters", None)


_FAMILIES: dict[str, Callable[[_Config], tuple[dict[str, Any], str]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Phi3ForCausalLM": _phi3,
}


def tokenizer_section(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tokenizer`` section for the files in a folder.

    Args:
        folder: holds tokenizer.json, tokenizer.model, or vocab.json and merges.txt.
        config: its config.json.

    Raises:
        UserError: it holds none of these.
    """
    model_type = str(config.get("model_type"))
    if (folder / "tokenizer.json").is_file():
        return {"_component_": "ppl_eval.data.hf_tokenizer", "path": str(folder)}
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        if model_type == "qwen2":
            return {
                "_component_": "torchtune.models.qwen2.qwen2_tokenizer",
                "path": str(folder / "vocab.json"),
                "merges_file": str(folder / "merges.txt"),
            }
    elif (folder / "tokenizer.model").is_file():
        large_llama = model_type == "llama" and config.get("vocab_size", 0) > 100_000
        builder = {
            "llama": "llama3.llama3_tokenizer" if large_llama else "llama2.llama2_tokenizer",
            "mistral": "mistral.mistral_tokenizer",
            "gemma": "gemma.gemma_tokenizer",
            "gemma2": "gemma.gemma_tokenizer",
            "phi3": "phi3.phi3_mini_tokenizer",
        }.get(model_type)
        if builder is not None:
            return {
                "_component_": f"torchtune.models.{builder}",
                "path": str(folder / "tokenizer.model"),
            }
    raise UserError(
        f"{folder} has no tokenizer that is known: tokenizer.json, or tokenizer.model, or (Qwen 2)"
        " vocab.json and merges.txt; or name one by tokenizer._component_"
    )
