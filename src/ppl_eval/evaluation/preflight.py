"""All of a run that needs no weights: what the recipe does first and `ppl-eval check` alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppl_eval import components
from ppl_eval.config.limits import check_domains, check_known
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.corpus import build_dataset
from ppl_eval.data.documents import labels
from ppl_eval.data.documents import notes as notes_of
from ppl_eval.data.plan import batch_budget, largest_budget_for
from ppl_eval.data.protocol import Protocol, make_protocol
from ppl_eval.data.tokenizer import TextTokenizer, fingerprint_of
from ppl_eval.evaluation.model_limits import check_window, fit_window
from ppl_eval.evaluation.teacher import (
    check_tokenizer,
    of_the_teacher,
    teacher_degrees,
)
from ppl_eval.evaluation.workload import Workload, prepare_workload
from ppl_eval.model.prepare import PreparedModel, num_ids, prepare_model
from ppl_eval.parallel import process_group
from ppl_eval.plural import counted


@dataclass(frozen=True)
class Preflight:
    """What is ready before any weight is read; the same on every rank.

    Attributes:
        student: the model that is measured.
        teacher: the model that reads the same windows, if there is one.
        tokenizer: the text's.
        workload: documents, windows and plan.
        warnings: what a user should hear before the run, one sentence each.
        notes: what is good to know, one sentence each.
    """

    student: PreparedModel
    teacher: PreparedModel | None
    tokenizer: TextTokenizer
    workload: Workload
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def prepare(
    cfg: EvalConfig,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    *,
    num_ranks: int = 1,
    on_encode: Callable[[int, int], None] | None = None,
) -> Preflight:
    """Check everything that can be checked without reading a weight.

    Args:
        cfg: the checked config; ``max_tokens_per_batch``, if null, is filled in.
        dtype: of the model's parameters.
        group: ranks that share the work of tokenising, or None for this process alone.
        num_ranks: data-parallel ranks that will share the batches.
        on_encode: see :func:`ppl_eval.data.encode.encode_corpus`.

    Raises:
        UserError: whatever is wrong with checkpoint, model section, tokenizer, text or protocol.
    """
    for key in cfg.components:
        components.find(getattr(cfg, key)["_component_"], key)
    student = prepare_model(
        cfg.model,
        cfg.checkpointer,
        dtype,
        tp=cfg.parallel.tp,
        cp=cfg.parallel.cp,
        adapter_dir=cfg.adapter.dir,
        merge=cfg.adapter.merge,
    )
    teacher = _teacher(cfg, dtype) if cfg.has_teacher else None
    models = [ready.model for ready in (student, teacher) if ready is not None]
    tokenizer = components.build(cfg.tokenizer, "tokenizer")
    window, notes = fit_window(models, cfg.protocol.name, cfg.protocol.max_seq_len)
    protocol = make_protocol(
        tokenizer,
        cfg.protocol.name,
        max_seq_len=window,
        stride=cfg.protocol.stride,
        add_bos=cfg.protocol.add_bos,
        add_eos=cfg.protocol.add_eos,
        separator=cfg.protocol.separator,
    )
    check_window(student.model, protocol.max_seq_len)
    notes, warnings = student.notes + notes, student.warnings
    if teacher is not None:
        with of_the_teacher():
            check_window(teacher.model, protocol.max_seq_len)
        notes += tuple(f"the teacher: {note}" for note in teacher.notes)
        warnings += tuple(f"the teacher: {warning}" for warning in teacher.warnings)
        notes += tuple(check_tokenizer(cfg, tokenizer, *map(num_ids, models)))
    budget = batch_budget(cfg.max_tokens_per_batch, process_group.device_type(cfg.device))
    cfg.max_tokens_per_batch = budget
    documents = build_dataset(cfg.dataset, "dataset", tokenizer)
    notes += notes_of(documents)
    workload = prepare_workload(
        tokenizer,
        documents,
        protocol,
        max_tokens_per_batch=budget,
        max_documents=cfg.max_documents,
        vocab_size=min(map(num_ids, models)),
        group=group,
        on_encode=on_encode,
    )
    domains = {domain for _, domain in labels(workload.corpus.documents) if domain is not None}
    check_domains(cfg.fail_if, domains)
    left_out = int((workload.windows.context_only + workload.windows.truncated).sum())
    check_known(cfg.fail_if, left_out, cfg.protocol.name)
    warnings = (
        *warnings,
        *_bos_warnings(student.checkpoint.config.family, protocol),
        *_loss_warnings(workload),
        *_cut_warnings(workload, getattr(tokenizer, "max_seq_len", None)),
        *_idle_warnings(workload, num_ranks, budget),
    )
    return Preflight(student, teacher, tokenizer, workload, warnings, notes)


def _teacher(cfg: EvalConfig, dtype: torch.dtype) -> PreparedModel:
    tp, cp = teacher_degrees(cfg)
    own = dtype if cfg.teacher_dtype is None else process_group.DTYPES[cfg.teacher_dtype]
    with of_the_teacher():
        return prepare_model(
            cfg.teacher_model,
            cfg.teacher_checkpointer,
            own,
            tp=tp,
            cp=cp,
            parallel_key="teacher_parallel",
        )


def _bos_warnings(family: str | None, protocol: Protocol) -> Iterator[str]:
    if family in ("gemma", "gemma2") and protocol.bos_id is None:
        yield (
            f"{family} needs a BOS before every window, and this run gives none: its loss will be"
            " far too high; set protocol.add_bos=true"
        )


def _loss_warnings(workload: Workload) -> Iterator[str]:
    lost = int(workload.corpus.lost_bytes.sum())
    if lost:
        yield (
            f"the tokenizer has no token for {lost:,} of"
            f" {counted(workload.corpus.num_bytes.sum(), 'byte')} of the texts: they cost nothing,"
            " or an unknown token; do not compare bits per byte"
        )


def _cut_warnings(workload: Workload, limit: int | None) -> Iterator[str]:
    """torchtune's data sets cut samples at the tokenizer's max_seq_len, and do not say so."""
    if limit is None or not workload.corpus.as_tokens:
        return
    num_tokens = workload.corpus.num_tokens
    cut = int((num_tokens >= limit - 1).sum())
    if cut:
        yield (
            f"{cut:,} of {counted(len(num_tokens), 'sample')} {'is' if cut == 1 else 'are'} as long"
            f" as tokenizer.max_seq_len={limit} allows: the data set cuts there, and what it cut is"
            " not counted; set it to null"
        )


def _idle_warnings(workload: Workload, num_ranks: int, budget: int) -> Iterator[str]:
    num_batches = len(workload.plan.batches)
    num_idle = num_ranks - num_batches
    if num_idle <= 0:
        return
    enough = largest_budget_for(num_ranks, workload.windows, budget)
    if enough is None:
        windows = counted(len(workload.windows), "window")
        advice = f"the text has no more than {windows}, so take fewer processes"
    else:
        advice = f"max_tokens_per_batch={enough} gives each of them some"
    yield (
        f"{num_ranks:,} data-parallel ranks share {counted(num_batches, 'batch')}, so"
        f" {counted(num_idle, 'rank')} will have no work: {advice}"
    )


def fingerprints(ready: Preflight) -> dict[str, str]:
    """What the number depends on, in short hashes."""
    teacher = {} if ready.teacher is None else {"teacher": ready.teacher.fingerprint()}
    return {
        "data": ready.workload.corpus.fingerprint,
        "tokenizer": fingerprint_of(ready.tokenizer),
        "model": ready.student.fingerprint(),
        **teacher,
        "protocol": ready.workload.protocol.fingerprint,
        "plan": ready.workload.plan.fingerprint,
    }
