"""The whole config: every key, its type, its default, and what it means.

The text below a key is its meaning; docs/config.md and ``ppl-eval cp --full`` are made of it.
"""

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass, field
from typing import Any

COMPONENTS = ("tokenizer", "model", "checkpointer", "dataset", "metric_logger")
"""Keys whose value is a torchtune-style component: ``_component_`` and its arguments."""

TEACHER_COMPONENTS = ("teacher_model", "teacher_checkpointer")
"""Components that only a run with a teacher has."""


@dataclass
class ProtocolConfig:
    """Which windows are read and which tokens are scored (docs/protocols.md)."""

    name: str = "document"
    """The rule that cuts texts into windows."""
    max_seq_len: int | None = None
    """Most tokens of a window. null: what the protocol's own tool takes (1024; llama_cpp 512, gptq
    2048), or what the model reads if that is less."""
    stride: int | None = None
    """Text tokens from the beginning of a window to that of the next. null: the protocol's own."""
    add_bos: bool | str = "auto"
    """Whether a window begins with BOS: true, false, or auto (as the tokenizer does it)."""
    add_eos: bool = False
    """Whether an EOS is appended to each document, and scored."""
    separator: str | None = None
    """Text between two documents, for protocols that join them. null: the protocol's own."""


@dataclass
class ParallelConfig:
    """How the processes are laid out (docs/parallelism.md)."""

    dp_replicate: int = 1
    """Copies of the model, each of which reads its own windows."""
    dp_shard: int = -1
    """Processes that share the parameters of a copy (FSDP2), each of which reads its own windows.
    -1: all that are left."""
    cp: int = 1
    """Processes that share each window (context parallelism)."""
    tp: int = 1
    """Processes that share each matrix (tensor parallelism)."""
    reshard_after_forward: bool = True
    """Whether the gathered parameters of a layer are freed after its forward pass."""


@dataclass
class TeacherParallelConfig:
    """How the teacher is laid out; null takes the student's. tp * cp is the same for both."""

    tp: int | None = None
    """Processes that share each of the teacher's matrices."""
    cp: int | None = None
    """Processes that share each window when the teacher reads it."""
    reshard_after_forward: bool | None = None
    """Whether the gathered parameters of the teacher's layers are freed after use."""


@dataclass
class AdapterConfig:
    """A LoRA or DoRA adapter for the model (docs/distillation.md)."""

    dir: str | None = None
    """Folder of the adapter. null: none."""
    merge: bool = True
    """Whether the adapter is added to the weights before the run, or computed beside them."""


@dataclass
class ProcessGroupConfig:
    """How the processes communicate."""

    backend: str = "auto"
    """auto is gloo on CPU, and on CUDA nccl (with gloo for CPU tensors)."""
    timeout_s: float = 180
    """Seconds after which a process that waits for another gives up."""


@dataclass
class BootstrapConfig:
    """Bootstrap intervals over documents (docs/protocols.md)."""

    resamples: int = 1000
    """Number of resampled corpora. 0: no bootstrap."""
    seed: int = 1234
    """Seed of the resampling."""


@dataclass
class EvalConfig:
    """Everything that a config may say."""

    output_dir: str = "./out/ppl_eval"
    """Folder that the results are written to."""
    checkpoint_dir: str | None = None
    """Folder of the weights and the tokenizer. It also completes tokenizer, model and checkpointer
    where these leave something open."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Component that turns text into tokens. Empty: the tokenizer in checkpoint_dir."""
    model: dict[str, Any] = field(default_factory=dict)
    """Component that builds the model. Empty: as config.json in checkpoint_dir describes it."""
    checkpointer: dict[str, Any] = field(default_factory=dict)
    """Component that says which files hold the weights, in which layout. Empty: the files in
    checkpoint_dir."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    teacher_checkpoint_dir: str | None = None
    """Folder of a teacher that reads the same windows (docs/distillation.md). null: none, unless
    teacher_model is given."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """Component that builds the teacher. Empty: as for model."""
    teacher_checkpointer: dict[str, Any] = field(default_factory=dict)
    """Component that says which files hold the teacher's weights. Empty: as for checkpointer."""
    teacher_parallel: TeacherParallelConfig = field(default_factory=TeacherParallelConfig)
    teacher_dtype: str | None = None
    """The teacher's precision. null: dtype."""
    noise_floor: bool = True
    """Whether the divergence that rounding alone causes is measured as well, on one batch in 16."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """Component that reads the texts, or a list of data sets with names (docs/protocols.md).
    ppl_eval.data.text_corpus takes source, data_files, split, column, domain_column, name, revision
    and unit."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    max_tokens_per_batch: int | None = None
    """Most positions of a batch, padding included. null: 1024 on a CPU, 8192 on CUDA."""
    max_documents: int | None = None
    """Documents to read, from the first one on. null: all."""
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    save_tokens: bool = False
    """Whether tokens.parquet is written, with the loss of every token."""
    fail_if: dict[str, Any] = field(default_factory=dict)
    """Upper limits: keys of results.json, such as metrics.token_perplexity, with the largest number
    allowed. A run with a larger value, or null, fails after its results are written."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    process_group: ProcessGroupConfig = field(default_factory=ProcessGroupConfig)
    device: str | None = None
    """cpu, cuda, or cuda:N for one process. null: cuda if there is one."""
    dtype: str = "fp32"
    """Precision of the model's parameters and activations."""
    logits_dtype: str = "fp32"
    """Precision of the logits: fp32, or the model's own (not with a teacher)."""
    seed: int = 1234
    """Seed of torch's random numbers."""
    metric_logger: dict[str, Any] | None = field(
        default_factory=lambda: {"_component_": "torchtune.training.metric_logging.DiskLogger"}
    )
    """Component that logs progress and metrics; it writes to log_dir, by default output_dir/logs.
    null: none."""
    log_every_n_steps: int = 10
    """Steps between two entries of metric_logger, and between two looks for a loss that is NaN or
    infinite, which ends the run. On a GPU each of these waits for the device."""
    log_every_s: float = 30
    """Seconds between two progress lines in the log, where there is no terminal for a bar."""
    log_peak_memory_stats: bool = True
    """Whether results.json has the peak of memory."""
    log_level: str = "INFO"
    """What is told on stderr, from this level up."""

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher reads the same windows."""
        return bool(self.teacher_model)

    @property
    def components(self) -> list[str]:
        """Keys of the components that the run has."""
        keys = (*COMPONENTS, *(TEACHER_COMPONENTS if self.has_teacher else ()))
        return [key for key in keys if getattr(self, key) is not None]


@functools.cache
def known_keys(schema: type = EvalConfig, prefix: str = "") -> dict[str, tuple[type, ...]]:
    """All dotted keys of the schema, down to where components' arguments begin.

    Returns:
        Key -> the types that its value may have; a section's is its dataclass.
    """
    found: dict[str, tuple[type, ...]] = {}
    for item in dataclasses.fields(schema):
        kind: Any = item.type
        args = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        found[prefix + item.name] = tuple(typing.get_origin(each) or each for each in args)
        if dataclasses.is_dataclass(kind):
            found |= known_keys(typing.cast(type, kind), f"{prefix}{item.name}.")
    return found


def is_text(key: str) -> bool:
    """Whether the values of a dotted key are text, and so never read as a number or a boolean."""
    return set(known_keys().get(key, ())) - {types.NoneType} == {str}
