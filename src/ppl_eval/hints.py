"""Hints for keys that are not in the config: keys of torchtune's recipes, and misspelled names."""

import difflib
from collections.abc import Iterable

_KEYS = {
    "a batch is limited by tokens, not by rows: set max_tokens_per_batch": "batch_size",
    "set max_tokens_per_batch, the number of tokens in a batch": "forward_batch_size",
    "set protocol.max_seq_len, the number of tokens in a window": "max_seq_length max_length",
    "windows are not packed; batches hold windows of similar length: leave it out": "packed",
    "set max_documents, the number of documents that are read": "limit",
    "this measures perplexity; `tune run eleuther_eval` measures tasks": "tasks num_fewshot",
    "models run without torch.compile: leave it out": "compile",
    "set quantizer.scheme (docs/quantisation.md)": "quantization",
    "every document is read once, in an order that changes no result: leave it out": "shuffle",
    "batches are made by protocol.name and max_tokens_per_batch: leave it out": "collate_fn",
    "a run cannot be resumed: leave it out": "resume resume_from_checkpoint recipe_checkpoint",
    "a window is read in one forward pass, without a cache: leave it out": "enable_kv_cache",
    "nothing is generated here: leave it out": "max_new_tokens temperature top_k top_p prompt",
    "nothing is trained here: leave it out": (
        "epochs max_steps_per_epoch num_steps optimizer loss lr_scheduler lr clip_grad_norm"
        " gradient gradient_accumulation_steps optimizer_in_bwd enable_activation_checkpointing"
        " ac_mode ac_option enable_activation_offloading kd_loss kd_ratio"
        " save_adapter_weights_only profiler"
    ),
    "each rank reads only its part of the weights: leave it out": "low_cpu_ram",
    "weights stay on the device; a larger parallel.dp_shard or parallel.tp makes each rank's part"
    " smaller": "fsdp_cpu_offload",
    "embedding and head are sharded like all layers: leave it out": (
        "custom_sharded_layers memory_efficient_fsdp_wrap"
    ),
    "set parallel.tp": "tensor_parallel_dim",
    "set parallel.tp: how each family is split is known": "tensor_parallel_plan",
    "set parallel.cp": "context_parallel_dim",
    "set parallel.dp_shard, or parallel.dp_replicate for copies": "data_parallel_dim",
    "set parallel.dp_shard": "data_parallel_shard_dim",
    "set parallel.dp_replicate": "data_parallel_replicate_dim",
    "the launcher takes it: tune run --nproc_per_node N ppl_eval ...": (
        "nproc_per_node nnodes num_processes world_size"
    ),
    "set dataset.{key}": "data_files source split column domain_column unit",
    "set checkpointer.{key}": "checkpoint_files model_type",
    "set metric_logger.log_dir": "log_dir",
    "set adapter.dir, the folder of the adapter": "adapter_dir adapter_checkpoint",
}
"""What to do, in one sentence -> the keys, in whatever section they stand."""

_HINTS = {key: hint.format(key=key) for hint, keys in _KEYS.items() for key in keys.split()}


def hint_for(key: str) -> str:
    """What to do about a key of torchtune's recipes, to end a message; empty for other keys."""
    return f"; {_HINTS[key]}" if key in _HINTS else ""


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest of the known names, to end a message; empty if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
