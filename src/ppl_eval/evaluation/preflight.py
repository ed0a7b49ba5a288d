"""Everything that a run can check without weights: `ppl-eval check` stops after it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ppl_eval import components
from ppl_eval.config.limits import check_domains, check_known
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.corpus import build_dataset
from ppl_eval.data.documents import labels
from ppl_eval.data.documents import notes as notes_of
from ppl_eval.data.plan import batch_budget, largest_budget_for
from ppl_eval.data.protocol import make_protocol
from ppl_eval.data.tokenizer import TextTokenizer, fingerprint_of
from ppl_eval.evaluation.model_limits import fit_window
from ppl_eval.evaluation.teacher import check_tokenizer, of_the_teacher, teacher_degrees
from ppl_eval.evaluation.workload import Workload, prepare_workload
from ppl_eval.model.prepare import PreparedModel, prepare_model
from ppl_eval.parallel import process_group
from ppl_eval.plural import counted
from ppl_eval.quantize.schemes import read_quantizer


@dataclass(frozen=True)
class Preflight:
    """What is known before any weight is read; the same on every rank.

    Attributes:
        student: the model that is measured.
        teacher: the model that it is compared with, if there is one.
        tokenizer: the tokenizer of both.
        workload: documents, windows and plan.
        warnings: to print before the run, one sentence each.
        notes: what was decided for the user, one sentence each.
    """

    student: PreparedModel
    teacher: PreparedModel | None
    tokenizer: TextTokenizer
    workload: Workload
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def models(self) -> list[PreparedModel]:
        """The student, and the teacher if there is one."""
        return [self.student] if self.teacher is None else [self.student, self.teacher]


def prepare(
    cfg: EvalConfig,
    group: dist.ProcessGroup | None = None,
    *,
    num_ranks: int = 1,
    on_encode: Callable[[int, int], None] | None = None,
) -> Preflight:
    """Check everything that can be checked without reading a weight. Every rank calls it.

    Args:
        cfg: the checked config; ``max_tokens_per_batch``, if null, is filled in.
        group: ranks that share the work of tokenising, or None for this process alone.
        num_ranks: data-parallel ranks that will share the batches.
        on_encode: see :func:`ppl_eval.data.encode.encode_corpus`.

    Raises:
        UserError: anything wrong with checkpoint, model section, tokenizer, text or protocol.
    """
    for key in cfg.components:
        components.find(getattr(cfg, key)["_component_"], key)
    student = prepare_model(
        cfg.model,
        cfg.checkpointer,
        process_group.DTYPES[cfg.dtype],
        tp=cfg.parallel.tp,
        cp=cfg.parallel.cp,
        adapter_dir=cfg.adapter.dir,
        merge=cfg.adapter.merge,
        quantizer=read_quantizer(cfg.quantizer),
        device_type=process_group.device_type(cfg.device),
    )
    teacher = _teacher(cfg) if cfg.has_teacher else None
    decoders = [student.decoder] if teacher is None else [student.decoder, teacher.decoder]
    models, num_ids = [d.model for d in decoders], [d.num_ids for d in decoders]
    tokenizer = components.build(cfg.tokenizer, "tokenizer")
    window, notes = fit_window(models, cfg.protocol.name, cfg.protocol.max_seq_len)
    protocol = make_protocol(tokenizer, **{**asdict(cfg.protocol), "max_seq_len": window})
    notes, warnings = student.notes + notes, student.warnings
    if teacher is not None:
        notes += tuple(f"the teacher: {note}" for note in teacher.notes)
        warnings += tuple(f"the teacher: {warning}" for warning in teacher.warnings)
        notes += tuple(check_tokenizer(cfg, tokenizer, *num_ids))
    budget = batch_budget(cfg.max_tokens_per_batch, process_group.device_type(cfg.device))
    cfg.max_tokens_per_batch = budget
    documents = build_dataset(cfg.dataset, "dataset", tokenizer)
    workload = prepare_workload(
        tokenizer,
        documents,
        protocol,
        max_tokens_per_batch=budget,
        max_documents=cfg.max_documents,
        vocab_size=min(num_ids),
        group=group,
        on_encode=on_encode,
    )
    domains = {domain for _, domain in labels(workload.corpus.documents) if domain is not None}
    check_domains(cfg.fail_if, domains)
    left_out = int((workload.windows.context_only + workload.windows.truncated).sum())
    check_known(cfg.fail_if, left_out, cfg.protocol.name)
    warnings = (
        *warnings,
        *_text_warnings(workload, student.checkpoint.config.family, tokenizer),
        *_idle_warnings(workload, num_ranks, budget),
    )
    return Preflight(student, teacher, tokenizer, workload, warnings, notes + notes_of(documents))


def _teacher(cfg: EvalConfig) -> PreparedModel:
    tp, cp = teacher_degrees(cfg)
    dtype = process_group.DTYPES[cfg.teacher_dtype or cfg.dtype]
    model, checkpointer = cfg.teacher_model, cfg.teacher_checkpointer
    with of_the_teacher():
        return prepare_model(
            model,
            checkpointer,
            dtype,
            tp=tp,
            cp=cp,
            parallel_key="teacher_parallel",
            device_type=process_group.device_type(cfg.device),
        )


def _text_warnings(
    workload: Workload, family: str | None, tokenizer: TextTokenizer
) -> Iterator[str]:
    """What makes the number wrong or hard to compare: a missing BOS, lost bytes, cut samples."""
    corpus = workload.corpus
    if family in ("gemma", "gemma2") and workload.protocol.bos_id is None:
        yield (
            f"{family} needs a BOS before every window, and this run gives none: its loss will be"
            " far too high; set protocol.add_bos=true"
        )
    lost = int(corpus.lost_bytes.sum())
    if lost:
        yield (
            f"the tokenizer has no token for {lost:,} of {counted(corpus.num_bytes.sum(), 'byte')}"
            " of the texts: they cost nothing, or an unknown token; do not compare bits per byte"
        )
    # torchtune's data sets cut samples at the tokenizer's max_seq_len, and do not say so
    limit = getattr(tokenizer, "max_seq_len", None)
    cut = 0 if limit is None else int((corpus.num_tokens >= limit - 1).sum())
    if cut and corpus.as_tokens:
        yield (
            f"{cut:,} of {counted(len(corpus.num_tokens), 'sample')} {'is' if cut == 1 else 'are'}"
            f" as long as tokenizer.max_seq_len={limit} allows: the data set cuts there, and what"
            " it cut is not counted; set it to null"
        )


def _idle_warnings(workload: Workload, num_ranks: int, budget: int) -> Iterator[str]:
    """Ranks that have no batch, and what would give them one."""
    num_batches = len(workload.plan.batches)
    num_idle = num_ranks - num_batches
    if num_idle <= 0:
        return
    enough = largest_budget_for(num_ranks, workload.windows, budget)
    advice = f"max_tokens_per_batch={enough} gives each of them some"
    if enough is None:
        windows = counted(len(workload.windows), "window")
        advice = f"the text has no more than {windows}, so take fewer processes"
    yield (
        f"{num_ranks:,} data-parallel ranks share {counted(num_batches, 'batch')}, so"
        f" {counted(num_idle, 'rank')} will have no work: {advice}"
    )


def fingerprints(ready: Preflight) -> dict[str, str]:
    """Short hashes of everything that the number depends on."""
    teacher = {} if ready.teacher is None else {"teacher": ready.teacher.fingerprint()}
    return {
        "data": ready.workload.corpus.fingerprint,
        "tokenizer": fingerprint_of(ready.tokenizer),
        "model": ready.student.fingerprint(),
        **teacher,
        "protocol": ready.workload.protocol.fingerprint,
        "plan": ready.workload.plan.fingerprint,
    }
