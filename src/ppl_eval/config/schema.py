"""The whole config: every key, its type, its default, and what it means.

docs/config.md and ``ppl-eval cp --full`` show the text below a key as its meaning.
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
    """How texts are cut into windows and which tokens are scored (docs/protocols.md)."""

    name: str = "document"
    """The rule that cuts texts into windows."""
    max_seq_len: int | None = None
    """Most tokens in a window. null: 1024 (llama_cpp 512, gptq 2048, as these tools have it), or
    the model's context length if that is less."""
    stride: int | None = None
    """Text tokens from the start of a window to the start of the next. null: the protocol's
    default."""
    add_bos: bool | str = "auto"
    """Whether a window begins with a BOS token: true, false, or auto (as the tokenizer does)."""
    add_eos: bool = False
    """Whether an EOS token is appended to each document and scored."""
    separator: str | None = None
    """Text between two documents, for protocols that join them. null: the protocol's default."""


@dataclass
class ParallelConfig:
    """How the model is distributed over the processes (docs/parallelism.md)."""

    dp_replicate: int = 1
    """Number of copies of the model. Each copy reads different windows."""
    dp_shard: int = -1
    """Number of processes that the parameters of a copy are sharded over (FSDP2). Each process
    reads different windows. -1: all processes that the other degrees leave."""
    cp: int = 1
    """Number of processes that each window is split over (context parallelism)."""
    tp: int = 1
    """Number of processes that each matrix is split over (tensor parallelism)."""
    reshard_after_forward: bool = True
    """Whether FSDP2 frees the gathered parameters of a layer after its forward pass. false: faster,
    but each process ends up with all layers in memory."""


@dataclass
class TeacherParallelConfig:
    """How the teacher is distributed. null: as the student, by parallel. tp * cp must be the same
    for both."""

    tp: int | None = None
    """parallel.tp of the teacher."""
    cp: int | None = None
    """parallel.cp of the teacher."""
    reshard_after_forward: bool | None = None
    """parallel.reshard_after_forward of the teacher."""


@dataclass
class AdapterConfig:
    """A LoRA or DoRA adapter for the model (docs/distillation.md)."""

    dir: str | None = None
    """Folder with the adapter's files. null: no adapter."""
    merge: bool = True
    """Whether the adapter is added to the weights before the run. false: its matrices stay apart
    and are applied in every forward pass."""


@dataclass
class ProcessGroupConfig:
    """How the processes communicate."""

    backend: str = "auto"
    """Backend of torch.distributed. auto: gloo on a CPU, and nccl on CUDA (with gloo for CPU
    tensors)."""
    timeout_s: float = 180
    """Seconds that a process waits for another one before the run fails."""


@dataclass
class BootstrapConfig:
    """Confidence intervals by resampling documents (docs/protocols.md)."""

    resamples: int = 1000
    """Number of resampled corpora. 0: no intervals."""
    seed: int = 1234
    """Seed of the resampling."""


@dataclass
class VerifyConfig:
    """A check of the run's numbers by other code, in one process, after the results are written
    (docs/verify.md)."""

    windows: int | str = 0
    """Number of windows that are scored again, or all. 0: no check."""
    tolerance: float | None = None
    """How far the NLL of a window may be from the plain model's, relative to it. null: 1e-5 for
    fp32, 2e-2 for bf16, 2e-3 for fp16."""


@dataclass
class EvalConfig:
    """Every key of a config."""

    output_dir: str = "./out/ppl_eval"
    """Folder that the results are written to."""
    checkpoint_dir: str | None = None
    """Hugging Face folder with the weights and the tokenizer. Whatever tokenizer, model and
    checkpointer leave out is taken from it."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Component that turns text into tokens. Empty: the tokenizer in checkpoint_dir."""
    model: dict[str, Any] = field(default_factory=dict)
    """Component that builds the model. Empty: the model that config.json in checkpoint_dir
    describes."""
    checkpointer: dict[str, Any] = field(default_factory=dict)
    """Component that names the weight files and their format. Empty: the files in
    checkpoint_dir."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    quantizer: dict[str, Any] = field(default_factory=dict)
    """How the model's linear layers are quantised as they are read (docs/quantisation.md): scheme,
    and group_size for int4. Empty: not at all. The teacher is not quantised."""
    teacher_checkpoint_dir: str | None = None
    """Hugging Face folder of a teacher that the model is compared with (docs/distillation.md).
    null: no teacher, unless teacher_model is given."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """Component that builds the teacher. Empty: the model in teacher_checkpoint_dir."""
    teacher_checkpointer: dict[str, Any] = field(default_factory=dict)
    """Component that names the teacher's weight files. Empty: the files in
    teacher_checkpoint_dir."""
    teacher_parallel: TeacherParallelConfig = field(default_factory=TeacherParallelConfig)
    teacher_dtype: str | None = None
    """dtype of the teacher. null: as dtype."""
    noise_floor: bool = True
    """With a teacher: whether the run measures how large a divergence rounding alone causes. On
    every 16th batch the teacher is compared with itself after one more rounding of each layer's
    output. If the student's divergence is no larger, the models do not differ measurably."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """Component that reads the texts, or a list of data sets, each with a name
    (docs/protocols.md). The component ppl_eval.data.text_corpus takes source, data_files, split,
    column, domain_column, name, revision and unit."""
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    max_tokens_per_batch: int | None = None
    """Most tokens in a batch, padding included. A longer window is a batch of one. null: 1024 on a
    CPU, 8192 on CUDA."""
    max_documents: int | None = None
    """Read only this many documents, from the first one on. null: all."""
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    save_tokens: bool = False
    """Whether the loss of every token is written, to tokens.parquet."""
    fail_if: dict[str, Any] = field(default_factory=dict)
    """Upper limits: key of results.json, such as metrics.token_perplexity, and the largest value
    allowed. If a value is larger or null, the run fails after its results are written."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    process_group: ProcessGroupConfig = field(default_factory=ProcessGroupConfig)
    device: str | None = None
    """cpu, cuda, or (with one process) cuda:N. null: cuda if there is a CUDA device, else cpu."""
    dtype: str = "fp32"
    """Precision of the model's parameters and activations."""
    logits_dtype: str = "fp32"
    """Precision of the logits: fp32, or model (as dtype; not with a teacher)."""
    seed: int = 1234
    """Seed of torch's random numbers."""
    metric_logger: dict[str, Any] | None = field(
        default_factory=lambda: {"_component_": "torchtune.training.metric_logging.DiskLogger"}
    )
    """Component that logs progress and metrics to the folder log_dir (output_dir/logs if not
    given). null: no such log."""
    log_every_n_steps: int = 10
    """Number of steps between two entries of metric_logger. At each entry the losses are also
    checked, and NaN or infinity ends the run. On a GPU each entry waits for the device."""
    log_every_s: float = 30
    """Number of seconds between two lines of progress on stderr, when stderr is not a terminal (a
    terminal has a progress bar)."""
    log_peak_memory_stats: bool = True
    """Whether results.json has the peak memory."""
    log_level: str = "INFO"
    """Lowest level of the log messages on stderr."""

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
    """Dotted key -> the types that its value may have; for a section that is its dataclass.

    Arguments of components are not among the keys.
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
    """Whether the value of a dotted key is text, which is never read as a number or a boolean."""
    return set(known_keys().get(key, ())) - {types.NoneType} == {str}
