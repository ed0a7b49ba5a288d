"""``ppl-eval check``: everything about a run that is known without its weights."""

from collections.abc import Sequence

from ppl_eval.commands.estimate import num_parameters_of_rank
from ppl_eval.config.command_line import load
from ppl_eval.evaluation import preflight
from ppl_eval.evaluation.teacher import teacher_dims
from ppl_eval.evaluation.workload import Workload
from ppl_eval.model.prepare import PreparedModel
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.process_group import DTYPES
from ppl_eval.plural import counted
from ppl_eval.report.progress import TokenisingProgress
from ppl_eval.report.terminal import padding, protocol_line


def check(args: Sequence[str], num_processes: int) -> str:
    """What a run with this command line would do, one subject a line.

    Neither a weight nor a second process is needed for it.

    Args:
        args: ``--config NAME key=value`` as for ``tune run ppl_eval``.
        num_processes: number of processes that the run would have.

    Raises:
        UserError: what the run would stop at.
    """
    cfg = load(args)
    dims = ParallelDims(
        dp_replicate=cfg.parallel.dp_replicate,
        dp_shard=cfg.parallel.dp_shard,
        cp=cfg.parallel.cp,
        tp=cfg.parallel.tp,
        world_size=num_processes,
    )
    ready = preflight.prepare(
        cfg,
        DTYPES[cfg.dtype],
        num_ranks=dims.batch_size,
        on_encode=TokenisingProgress(cfg.log_every_s),
    )
    lines = [
        ("model", _model(ready.student, dims, cfg.dtype)),
        ("weights", _weights(ready.student)),
    ]
    if ready.teacher is not None:
        dtype = cfg.teacher_dtype or cfg.dtype
        lines.append(("teacher", _model(ready.teacher, teacher_dims(cfg, dims), dtype)))
        lines.append(("", _weights(ready.teacher)))
    num_steps = ready.workload.plan.num_steps(dims.batch_size)
    lines += _texts(ready.workload)
    lines.append(
        ("mesh", f"{dims}, {counted(num_processes, 'process')}: {counted(num_steps, 'step')}")
    )
    said = [*ready.notes, *(f"warning: {warning}" for warning in ready.warnings)]
    return "\n".join([*(f"{name:<10}{text}" for name, text in lines), *said])


def _model(ready: PreparedModel, dims: ParallelDims, dtype: str) -> str:
    itemsize = DTYPES[dtype].itemsize
    num_parameters = sum(p.numel() for p in ready.model.parameters())
    of_rank = num_parameters_of_rank(TorchtuneDecoder(ready.model), dims)
    return (
        f"{ready.component}, {num_parameters:,} parameters, {_gib(num_parameters * itemsize)} in"
        f" {dtype} ({_gib(of_rank * itemsize)} on each of {dims.world_size})"
    )


def _weights(ready: PreparedModel) -> str:
    stored = ready.checkpoint.source.stored.values()
    adapted = "" if ready.adapter is None else f", adapter {ready.adapter.folder}"
    return (
        f"{ready.checkpoint.folder or ''}: {counted(len(stored), 'tensor')},"
        f" {_gib(sum(s.num_bytes for s in stored))} in {ready.checkpoint_dtype}; names and shapes"
        f" match{adapted}"
    )


def _texts(workload: Workload) -> list[tuple[str, str]]:
    corpus, windows, plan = workload.corpus, workload.windows, workload.plan
    less_masked = " less what the data set masks" if corpus.as_tokens else ""
    return [
        (
            "text",
            f"{counted(len(corpus.documents), 'document')},"
            f" {counted(corpus.num_tokens.sum(), 'token')},"
            f" {counted(corpus.num_words.sum(), 'word')},"
            f" {counted(corpus.num_bytes.sum(), 'byte')}",
        ),
        ("protocol", protocol_line(workload.protocol.as_dict())),
        (
            "scored",
            f"{counted(windows.num_scored.sum(), 'token')}{less_masked};"
            f" {windows.no_context.sum():,} without context,"
            f" {windows.context_only.sum():,} as context only,"
            f" {windows.truncated.sum():,} truncated",
        ),
        (
            "windows",
            f"{len(windows):,} in {counted(len(plan.batches), 'batch')} of at most"
            f" {counted(plan.num_positions.max(), 'position')},"
            f" {padding(workload):.1%} padding",
        ),
    ]


def _gib(num_bytes: float) -> str:
    if num_bytes >= 2**28:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
