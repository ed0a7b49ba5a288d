"""A model in one process, whole, with full logits: what a sharded run is compared with."""

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.config.schema import EvalConfig
from ppl_eval.errors import one_line
from ppl_eval.files import read_json
from ppl_eval.model.prepare import prepare_model
from ppl_eval.parallel.process_group import DTYPES
from ppl_eval.quantize.schemes import read_quantizer
from ppl_eval.verify.windows import Window

_ROWS = 256
"""Positions whose probabilities are computed at once, in float64."""


@dataclass(frozen=True)
class PlainModel:
    """A whole model in fp32 (a quantised one in the run's dtype), from weights that were rounded to
    the run's dtype.

    Attributes:
        logits: ids (int64 [T]) -> logits (float32 [T, V]).
        device: where it computes.
        description: whose forward pass it is.
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device
    description: str

    @torch.no_grad()
    def nll(self, window: Window, changed: Mapping[int, int] | None = None) -> torch.Tensor:
        """NLL in nats of the scored tokens of a window (float64 [scored]).

        Args:
            window: what is read.
            changed: index -> another id that the model reads there; the targets stay.
        """
        ids = torch.tensor(window.ids, device=self.device)
        inputs = ids[:-1].clone()
        for index, other in (changed or {}).items():
            inputs[index] = other
        logits, scored = self.logits(inputs), torch.tensor(window.scored, device=self.device)
        parts = []
        for some in scored.split(_ROWS):
            log_probs = logits[some - 1].double().log_softmax(dim=-1)
            parts.append(-log_probs.gather(1, ids[some, None])[:, 0])
        return torch.cat(parts).cpu()


def load_plain(cfg: EvalConfig, longest: int, device: torch.device) -> PlainModel | str:
    """The model of a run, whole: as transformers builds it, or else as the run does.

    Args:
        cfg: the config of the run.
        longest: ids in the longest window.
        device: where it is to compute; if it does not fit there, on the CPU.

    Returns:
        The model; or, in one sentence, why it does not fit into one process.
    """
    checkpoint = Checkpoint.open(cfg.checkpointer)
    num_bytes, free = _bytes_needed(checkpoint, longest), 0
    # a quantised model may have another kernel on a CPU
    is_quantized = bool(cfg.quantizer or checkpoint.quantized())
    for place in dict.fromkeys((device, device if is_quantized else torch.device("cpu"))):
        free = free_bytes(place)
        if num_bytes <= free:
            return _load(cfg, checkpoint, place)
    return (
        f"the whole model needs about {num_bytes / 2**30:,.1f} GiB in one process, but"
        f" {free / 2**30:,.1f} GiB are free: run `ppl-eval verify` where there is more memory"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that a process can still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
        return 1024 * sizes["MemAvailable"]
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes_needed(checkpoint: Checkpoint, longest: int) -> int:
    """Weights in fp32, and while one is converted also as stored; logits and attention scores."""
    shapes = [stored.shape for stored in checkpoint.source.stored.values()]
    num_weights = sum(math.prod(shape) for shape in shapes)
    num_ids = max((shape[0] for shape in shapes if len(shape) == 2), default=0)
    num_heads = checkpoint.config.values.get("num_attention_heads", 64)
    return 6 * num_weights + 8 * longest * num_ids + 12 * num_heads * longest**2


def _load(cfg: EvalConfig, checkpoint: Checkpoint, device: torch.device) -> PlainModel:
    reason = _why_not_transformers(cfg, checkpoint)
    if reason is None:
        found = _by_transformers(cfg, device)
        if isinstance(found, PlainModel):
            return found
        reason = found
    prepared = prepare_model(
        cfg.model,
        cfg.checkpointer,
        DTYPES[cfg.dtype],
        adapter_dir=cfg.adapter.dir,
        merge=cfg.adapter.merge,
        quantizer=read_quantizer(cfg.quantizer),
        device_type=device.type,
    )
    prepared.load(device)
    model, dtype = prepared.decoder.model.eval(), cfg.dtype
    if prepared.quantized is None:
        model, dtype = model.float(), "fp32"
    name = f"{prepared.component} unsharded, {dtype} (not transformers: {reason})"
    return PlainModel(lambda ids: model(ids[None])[0], device, name)


def _why_not_transformers(cfg: EvalConfig, checkpoint: Checkpoint) -> str | None:
    if cfg.quantizer or checkpoint.quantized():
        return "the weights are quantised"
    if importlib.util.find_spec("transformers") is None:
        return "it is not installed"
    if not str(cfg.checkpointer["_component_"]).endswith(".FullModelHFCheckpointer"):
        return "the checkpoint is not in Hugging Face's layout"
    if cfg.adapter.dir is not None:
        folder = Path(cfg.adapter.dir)
        if not all((folder / name).is_file() for name in (_ADAPTER, _ADAPTER_CONFIG)):
            return f"the adapter has no {_ADAPTER} with {_ADAPTER_CONFIG}"
        settings = read_json(folder / _ADAPTER_CONFIG)
        more = [
            key for key in _BEYOND_LORA if settings.get(key) not in (None, False, {}, [], "none")
        ]
        if more:
            return f"the adapter has {', '.join(more)}"
    return None


_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BEYOND_LORA = (
    *("use_dora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save", "fan_in_fan_out"),
    *("layer_replication", "lora_bias", "trainable_token_indices", "target_parameters"),
)
"""Settings of PEFT that make an adapter more than W + alpha / r B A (or alpha / sqrt(r))."""


def _add_lora(model: torch.nn.Module, folder: Path) -> None:
    """Add B A to the weights of transformers' model, in place."""
    settings = read_json(folder / _ADAPTER_CONFIG)
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    tensors = load_file(folder / _ADAPTER)
    weights = dict(model.named_parameters())
    for name in [name for name in tensors if ".lora_A." in name]:
        a, b = tensors.pop(name), tensors.pop(name.replace(".lora_A.", ".lora_B."))
        weight = weights[name.removeprefix("base_model.model.").replace(".lora_A.", ".")]
        weight.data = (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)
    if tensors:
        raise KeyError(f"{next(iter(tensors))} in {_ADAPTER}")


def _by_transformers(cfg: EvalConfig, device: torch.device) -> PlainModel | str:
    """transformers' model, or why it cannot be used."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            cfg.checkpointer["checkpoint_dir"],
            dtype=DTYPES[cfg.dtype],
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
        model, info = loaded
        if info["missing_keys"] or info["mismatched_keys"]:
            return "it finds other tensors in the checkpoint than it needs"
        if cfg.adapter.dir is not None:
            _add_lora(model, Path(cfg.adapter.dir))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        return one_line(error)
    finally:
        transformers.logging.set_verbosity(verbosity)
    model = model.float().eval().to(device)
    name = f"{type(model).__name__} of transformers {transformers.__version__}, fp32"
    return PlainModel(lambda ids: model(ids[None]).logits[0], device, name)
