"""``ppl-eval plan``: memory and communication of every mesh of N processes."""

from collections.abc import Iterator, Sequence

from ppl_eval.adapter.check import strip
from ppl_eval.checkpoint.checkpoint import config_of
from ppl_eval.commands.estimate import Estimate, estimate
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.plan import batch_budget
from ppl_eval.errors import UserError
from ppl_eval.evaluation.model_limits import fit_window
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.process_group import DTYPES, device_type
from ppl_eval.parallel.tensor import check_heads
from ppl_eval.plural import counted
from ppl_eval.report.layout import align

MIB = 2**20

_HEADINGS = (
    *("dp_rep-\nlicate", "dp_\nshard", "\ncp", "\ntp"),
    *("param-\neters", "gath-\nered", "activ-\nations", "\nhead", "\ntotal"),
    *("fsdp/\nstep", "cp/\nstep", "tp/\nstep", "per\nbatch"),
)


def plan(cfg: EvalConfig, num_processes: int, device_memory_mib: float) -> str:
    """A table of the meshes that fit, the one with the least communication first.

    Neither weights nor texts are read.

    Raises:
        UserError: a number is not positive, or no mesh fits (naming the one that needs least).
    """
    if num_processes < 1 or device_memory_mib <= 0:
        raise UserError(
            f"--num-processes is {num_processes} and --device-memory-gib"
            f" {device_memory_mib / 1024:g}, but both are above 0"
        )
    decoders = _decoders(cfg)
    positions = _positions(cfg, decoders)
    estimates = _estimates(cfg, decoders, num_processes, positions)
    fit = [each for each in estimates if each.total <= device_memory_mib * MIB]
    name = f"{cfg.model['_component_']} in {cfg.dtype} on {device_type(cfg.device)}, batches of"
    name += f" {positions:,} positions"
    if cfg.has_teacher:
        dtype = cfg.teacher_dtype or cfg.dtype
        name += f", teacher {cfg.teacher_model['_component_']} in {dtype} on the same mesh"
    meshes_of = f"{counted(len(estimates), 'mesh')} on {counted(num_processes, 'process')}"
    if not fit:
        least = min(estimates, key=lambda each: each.total)
        raise UserError(
            f"{name}: none of {meshes_of} fits into {device_memory_mib:,.0f} MiB; {least.dims}"
            f" needs least, {least.total / MIB:,.0f} MiB: take more processes, or a smaller"
            " max_tokens_per_batch"
        )
    fit.sort(key=lambda each: (each.traffic_per_batch, each.total))
    return (
        f"{name}\n{len(fit)} of {meshes_of} fit into {device_memory_mib:,.0f} MiB;"
        f" MiB of a rank, the least communication first\n\n{align([_HEADINGS, *map(_row, fit)])}"
    )


def meshes(decoder: TorchtuneDecoder, num_processes: int) -> Iterator[ParallelDims]:
    """All degrees of parallelism that use ``num_processes`` and can split the model."""
    for tp in _divisors(num_processes):
        try:
            check_heads(decoder, tp)
        except UserError:
            continue
        for cp in _divisors(num_processes // tp):
            for dp_shard in _divisors(num_processes // tp // cp):
                dp_replicate = num_processes // tp // cp // dp_shard
                yield ParallelDims(dp_replicate, dp_shard, cp, tp, world_size=num_processes)


def _decoders(cfg: EvalConfig) -> list[TorchtuneDecoder]:
    """The student, and the teacher if there is one, on meta and without adapters."""
    sections = [(cfg.model, cfg.checkpointer, cfg.dtype)]
    if cfg.has_teacher:
        dtype = cfg.teacher_dtype or cfg.dtype
        sections.append((cfg.teacher_model, cfg.teacher_checkpointer, dtype))
    found = []
    for section, checkpointer, dtype in sections:
        model = build_on_meta(section, DTYPES[dtype], config_of(checkpointer))
        strip(model)
        found.append(TorchtuneDecoder(model))
    return found


def _positions(cfg: EvalConfig, decoders: Sequence[TorchtuneDecoder]) -> int:
    """Most tokens in a batch: a window that is longer than the budget is a batch of one."""
    models = [decoder.model for decoder in decoders]
    window, _ = fit_window(models, cfg.protocol.name, cfg.protocol.max_seq_len)
    return max(batch_budget(cfg.max_tokens_per_batch, device_type(cfg.device)), window or 0)


def _estimates(
    cfg: EvalConfig, decoders: Sequence[TorchtuneDecoder], num_processes: int, positions: int
) -> list[Estimate]:
    """The estimate of every mesh that can split all models."""
    reshard = cfg.parallel.reshard_after_forward
    by_teacher = cfg.teacher_parallel.reshard_after_forward
    reshards = (reshard, reshard if by_teacher is None else by_teacher)
    allowed = [list(meshes(decoder, num_processes)) for decoder in decoders]
    found = []
    for dims in [each for each in allowed[0] if each in allowed[-1]]:
        student, *teacher = (
            estimate(decoder, dims, positions, reshard_after_forward=reshard)
            for decoder, reshard in zip(decoders, reshards, strict=False)
        )
        found.append(student.with_teacher(teacher[0]) if teacher else student)
    return found


def _row(planned: Estimate) -> list[str]:
    dims = planned.dims
    numbers = (
        *(planned.parameters, planned.gathered, planned.activations, planned.head, planned.total),
        *(planned.fsdp_traffic, planned.cp_traffic, planned.tp_traffic, planned.traffic_per_batch),
    )
    degrees = map(str, (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp))
    return [*degrees, *(f"{number / MIB:,.0f}" for number in numbers)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
