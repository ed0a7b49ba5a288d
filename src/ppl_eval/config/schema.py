"""The whole config surface: every key, its type and its default."""

from dataclasses import dataclass, field
from typing import Any

COMPONENTS = ("tokenizer", "model", "checkpointer", "dataset", "metric_logger")
"""Keys whose value is a torchtune-style component: ``_component_`` and its arguments."""

TEACHER_COMPONENTS = ("teacher_model", "teacher_checkpointer")
"""Those that only a run beside a teacher has."""


@dataclass
class ProtocolConfig:
    """Which windows are read and which tokens are scored: see docs/protocols.md."""

    name: str = "document"
    max_seq_len: int | None = None
    stride: int | None = None
    add_bos: Any = "auto"
    add_eos: bool = False
    separator: str | None = None


@dataclass
class ParallelConfig:
    """Degrees of the mesh; -1 for dp_shard takes the processes that are left."""

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    reshard_after_forward: bool = True


@dataclass
class TeacherParallelConfig:
    """What the teacher's mesh has otherwise; null is as in ``parallel``. tp * cp is the same."""

    tp: int | None = None
    cp: int | None = None
    reshard_after_forward: bool | None = None


@dataclass
class AdapterConfig:
    """A LoRA or DoRA adapter of the model in ``checkpoint_dir``: see docs/distillation.md."""

    dir: str | None = None
    merge: bool = True


@dataclass
class ProcessGroupConfig:
    """``auto`` is gloo on CPU and nccl (with gloo for CPU tensors) on CUDA."""

    backend: str = "auto"
    timeout_s: float = 180


@dataclass
class BootstrapConfig:
    """Resampled documents behind ``intervals_95_bootstrap``; 0 for none."""

    resamples: int = 1000
    seed: int = 1234


@dataclass
class EvalConfig:
    """Everything that a config file of the recipe may say."""

    output_dir: str = "./out/ppl_eval"
    checkpoint_dir: str | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    checkpointer: dict[str, Any] = field(default_factory=dict)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    teacher_checkpoint_dir: str | None = None
    teacher_model: dict[str, Any] = field(default_factory=dict)
    teacher_checkpointer: dict[str, Any] = field(default_factory=dict)
    teacher_parallel: TeacherParallelConfig = field(default_factory=TeacherParallelConfig)
    teacher_dtype: str | None = None
    noise_floor: bool = True
    dataset: dict[str, Any] = field(default_factory=dict)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    max_tokens_per_batch: int | None = None
    max_documents: int | None = None
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    save_tokens: bool = False
    fail_if: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    process_group: ProcessGroupConfig = field(default_factory=ProcessGroupConfig)
    device: str | None = None
    dtype: str = "fp32"
    logits_dtype: str = "fp32"
    seed: int = 1234
    metric_logger: dict[str, Any] | None = field(default_factory=dict)
    log_every_n_steps: int = 10
    log_every_s: float = 30
    log_peak_memory_stats: bool = True
    log_level: str = "INFO"

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher reads the same windows."""
        return bool(self.teacher_model)

    @property
    def components(self) -> list[str]:
        """Keys of the components that the run has."""
        keys = (*COMPONENTS, *(TEACHER_COMPONENTS if self.has_teacher else ()))
        return [key for key in keys if getattr(self, key) is not None]
