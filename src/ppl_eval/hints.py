"""What a key of torchtune's own recipes is called here, or why there is none."""

_NOT_TRAINED = "nothing is trained here: leave it out"
_NOT_GENERATED = "nothing is generated here: leave it out"
_ONE_READING = "every document is read once, in an order that changes no result: leave it out"
_WHOLE_RUNS = "a run has no state to go on from: leave it out"
_ELSEWHERE = "this measures perplexity; tasks are what `tune run eleuther_eval` measures"
_PROCESSES = "processes are counted before the recipe: tune run --nproc_per_node N ppl_eval ..."
_EMBEDDING = "embedding and head are sharded like all layers: leave it out"

HINTS = {
    "batch_size": "a batch is bounded by its positions, not its rows: set max_tokens_per_batch",
    "forward_batch_size": "set max_tokens_per_batch, the positions of a batch",
    "max_seq_length": "set protocol.max_seq_len, the tokens of a window",
    "max_length": "set protocol.max_seq_len, the tokens of a window",
    "packed": "set protocol.name=packed, which puts several windows into a row",
    "limit": "set max_documents, the number of documents that are read",
    "tasks": _ELSEWHERE,
    "num_fewshot": _ELSEWHERE,
    "compile": "models run without torch.compile: leave it out",
    "quantizer": "the recipe reads plain weights; build a quantised model in Python and give it to"
    " ppl_eval.evaluate (docs/python_api.md)",
    "quantization": "the recipe reads plain weights; build a quantised model in Python and give it"
    " to ppl_eval.evaluate (docs/python_api.md)",
    "shuffle": _ONE_READING,
    "collate_fn": "batches are made by protocol.name and max_tokens_per_batch: leave it out",
    "resume": _WHOLE_RUNS,
    "resume_from_checkpoint": _WHOLE_RUNS,
    "recipe_checkpoint": _WHOLE_RUNS,
    "enable_kv_cache": "a window is read in one forward pass, without a cache: leave it out",
    **dict.fromkeys(("max_new_tokens", "temperature", "top_k", "top_p", "prompt"), _NOT_GENERATED),
    **dict.fromkeys(("epochs", "max_steps_per_epoch", "num_steps", "optimizer"), _NOT_TRAINED),
    **dict.fromkeys(("loss", "lr_scheduler", "lr", "clip_grad_norm", "gradient"), _NOT_TRAINED),
    **dict.fromkeys(("gradient_accumulation_steps", "optimizer_in_bwd"), _NOT_TRAINED),
    **dict.fromkeys(("enable_activation_checkpointing", "ac_mode", "ac_option"), _NOT_TRAINED),
    **dict.fromkeys(("enable_activation_offloading", "kd_loss", "kd_ratio"), _NOT_TRAINED),
    **dict.fromkeys(("save_adapter_weights_only", "profiler"), _NOT_TRAINED),
    "low_cpu_ram": "each rank reads only its part of the weights: leave it out",
    "fsdp_cpu_offload": "weights stay on the device; more parallel.dp_shard or parallel.tp makes"
    " each rank's part smaller",
    "custom_sharded_layers": _EMBEDDING,
    "memory_efficient_fsdp_wrap": _EMBEDDING,
    "tensor_parallel_dim": "set parallel.tp",
    "tensor_parallel_plan": "set parallel.tp: how each family is split is known",
    "context_parallel_dim": "set parallel.cp",
    "data_parallel_dim": "set parallel.dp_shard, or parallel.dp_replicate for copies",
    "data_parallel_shard_dim": "set parallel.dp_shard",
    "data_parallel_replicate_dim": "set parallel.dp_replicate",
    **dict.fromkeys(("nproc_per_node", "nnodes", "num_processes", "world_size"), _PROCESSES),
    **{
        key: f"set dataset.{key}"
        for key in ("data_files", "source", "split", "column", "domain_column", "unit")
    },
    **{key: f"set checkpointer.{key}" for key in ("checkpoint_files", "model_type")},
    "log_dir": "set metric_logger.log_dir",
    "adapter_dir": "set adapter.dir",
    "adapter_checkpoint": "set adapter.dir, the folder of the adapter",
}
"""Key, wherever it stands -> what to do, in one sentence."""


def of_torchtune(key: str) -> str:
    """The end of a message about a key that is not ours; empty if nothing is known of it."""
    return f"; {HINTS[key]}" if key in HINTS else ""
