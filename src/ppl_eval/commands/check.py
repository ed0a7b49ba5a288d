"""``ppl-eval check``: everything about a run that is known without its weights."""

from ppl_eval.commands.estimate import bytes_of_rank
from ppl_eval.config.schema import EvalConfig
from ppl_eval.evaluation import preflight
from ppl_eval.evaluation.teacher import teacher_dims
from ppl_eval.evaluation.workload import Workload
from ppl_eval.model.prepare import PreparedModel
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.plural import counted
from ppl_eval.report.progress import TokenisingProgress
from ppl_eval.report.terminal import padding, protocol_line


def check(cfg: EvalConfig, num_processes: int) -> str:
    """What a run with this config would do, one subject a line, then notes and warnings.

    Neither weights nor other processes are needed.

    Raises:
        UserError: the error that the run would end with.
    """
    dims = ParallelDims.of(cfg.parallel, num_processes)
    prepared = preflight.prepare(
        cfg,
        num_ranks=dims.batch_size,
        on_encode=TokenisingProgress(cfg.log_every_s),
    )
    lines = [
        ("model", _model(prepared.student, dims, cfg.dtype)),
        ("weights", _weights(prepared.student)),
    ]
    if prepared.teacher is not None:
        dtype = cfg.teacher_dtype or cfg.dtype
        lines.append(("teacher", _model(prepared.teacher, teacher_dims(cfg, dims), dtype)))
        lines.append(("", _weights(prepared.teacher)))
    num_steps = prepared.workload.plan.num_steps(dims.batch_size)
    lines += _texts(prepared.workload)
    lines.append(
        ("mesh", f"{dims}, {counted(num_processes, 'process')}: {counted(num_steps, 'step')}")
    )
    warnings = [f"warning: {warning}" for warning in prepared.warnings]
    return "\n".join([*(f"{name:<10}{text}" for name, text in lines), *prepared.notes, *warnings])


def _model(prepared: PreparedModel, dims: ParallelDims, dtype: str) -> str:
    decoder, quantized = prepared.decoder, prepared.quantized
    num_parameters = sum(slot.numel() for slot in decoder.weights().values())
    num_bytes = sum(p.numel() * p.element_size() for p in decoder.model.parameters())
    kept_in = dtype
    if quantized is not None:
        scheme = None if quantized.quantizer is None else quantized.quantizer.scheme
        kept_in = f"{dtype} and {scheme or 'the quantised weights of the checkpoint'}"
    return (
        f"{prepared.component}, {num_parameters:,} parameters, {_size(num_bytes)} in {kept_in}"
        f" ({_size(bytes_of_rank(decoder, dims))} on each of {dims.world_size})"
    )


def _weights(prepared: PreparedModel) -> str:
    checkpoint, adapter = prepared.checkpoint, prepared.adapter
    stored = checkpoint.source.stored.values()
    return (
        f"{checkpoint.folder or ''}: {counted(len(stored), 'tensor')},"
        f" {_size(sum(s.num_bytes for s in stored))} in {prepared.checkpoint_dtype}; names and"
        f" shapes match{'' if adapter is None else f', adapter {adapter.files[0].parent}'}"
    )


def _texts(workload: Workload) -> list[tuple[str, str]]:
    corpus, windows, plan = workload.corpus, workload.windows, workload.plan
    less_masked = " less what the data set masks" if corpus.as_tokens else ""
    totals = (
        (len(corpus.documents), "document"),
        (corpus.num_tokens.sum(), "token"),
        (corpus.num_words.sum(), "word"),
        (corpus.num_bytes.sum(), "byte"),
    )
    return [
        ("text", ", ".join(counted(number, noun) for number, noun in totals)),
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


def _size(num_bytes: float) -> str:
    if num_bytes >= 2**28:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
