"""evaluate: a model, a tokenizer and documents -> a ledger, on any number of ranks.

The recipe and the Python API both go through here.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ppl_eval.data.batch import collate
from ppl_eval.data.documents import as_documents, come_as_tokens
from ppl_eval.data.documents import notes as notes_of
from ppl_eval.data.encode import EncodedCorpus, check_ids, encode_corpus
from ppl_eval.data.plan import Plan, batch_budget, make_plan
from ppl_eval.data.protocol import RULES, Protocol, make_protocol
from ppl_eval.data.tokenizer import TextTokenizer
from ppl_eval.data.windows import Windows
from ppl_eval.errors import UserError
from ppl_eval.evaluation.steps import (
    Alone,
    BesideTeacher,
    Teacher,
    check_meshes,
    evaluating,
    noise_batches,
    noise_sample,
)
from ppl_eval.metrics.fidelity import Fidelity
from ppl_eval.metrics.ledger import Ledger
from ppl_eval.metrics.perplexity import Perplexity
from ppl_eval.metrics.summary import Summary, summarise
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.model.stored import StoredWeights, stored_weights
from ppl_eval.parallel.context import ContextSplit
from ppl_eval.parallel.dims import Meshes
from ppl_eval.parallel.tensor import check_groups
from ppl_eval.plural import counted
from ppl_eval.score.head import unwrapped

logger = logging.getLogger("ppl_eval")


@dataclass(frozen=True)
class Workload:
    """All that is to be scored, known before any weight is read; the same on every rank."""

    corpus: EncodedCorpus
    protocol: Protocol
    windows: Windows
    plan: Plan


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step.

    Attributes:
        step: steps done, from 1; those of the noise floor come after ``num_steps``.
        num_steps: steps that score.
        num_scored: tokens that all ranks together have scored so far.
        share: of the run's forward work that all ranks together have done, in input positions; the
            noise floor is part of it.
        running: this rank's own sums so far; reading them waits for the device.
    """

    step: int
    num_steps: int
    num_scored: int
    share: float
    running: Perplexity


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found; the same on every rank.

    Attributes:
        workload: what was scored.
        ledger: results by window.
        summary: counts and metrics of the whole, by domain and by document.
        teacher: the teacher's, if there is one.
        fidelity: how far the model is from its teacher, beside the ledger's sums.
        weights: what the model's numbers are stored in, and how many linear layers are quantised.
        notes: what the reading of texts and the choice of windows decided, one sentence each.
    """

    workload: Workload
    ledger: Ledger
    summary: Summary
    teacher: Summary | None = None
    fidelity: Fidelity | None = None
    weights: StoredWeights | None = None
    notes: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """exp(NLL sum / scored tokens) over the whole corpus."""
        return self.summary.total.perplexity


def prepare(
    tokenizer: TextTokenizer,
    documents: Iterable[Any],
    protocol: Protocol,
    *,
    max_tokens_per_batch: int,
    max_documents: int | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    on_encode: Callable[[int, int], None] | None = None,
) -> Workload:
    """Read, tokenise, cut into windows and plan.

    Args:
        tokenizer: the model's.
        documents: texts, mappings with ``text``, ``Document`` objects, or a ``text_corpus``; the
            same on every rank.
        protocol: makes the windows.
        max_tokens_per_batch: input positions of a batch at most, padding included.
        max_documents: take the first N documents.
        vocab_size: rows of the model's embedding; an id outside is an error.
        group: ranks that share the work of tokenising, or None for this rank alone.
        on_encode: see :func:`ppl_eval.data.encode.encode_corpus`.

    Raises:
        UserError: a bad row, an empty corpus, or one in which no token has any context.
    """
    rows = as_documents(documents, max_documents)
    if come_as_tokens(rows):
        protocol = protocol.for_tokens()
        if not any(d.counts is None or d.counts[1:].any() for d in rows):
            raise UserError(
                f"0 scored tokens: of {counted(len(rows), 'document')} none has a token that counts"
                " and has one before it: are all masked, or were the answers cut off by the"
                " tokenizer's max_seq_len?"
            )
    rows = protocol.joined(rows)
    if vocab_size is not None:
        check_ids([protocol.bos_id], vocab_size, "the tokenizer's BOS")
        check_ids([protocol.eos_id], vocab_size, "the tokenizer's EOS")
    corpus = encode_corpus(
        rows,
        tokenizer,
        vocab_size=vocab_size,
        added=protocol.added,
        count_words=protocol.rule.count_words,
        joined=protocol.separator is not None,
        group=group,
        on_encode=on_encode,
    )
    windows = protocol.windows(corpus.num_tokens)
    if len(windows) == 0:
        raise UserError(
            f"0 scored tokens: the {counted(len(rows), 'document')}"
            f" {'has' if len(rows) == 1 else 'have'} {counted(corpus.num_tokens.sum(), 'token')},"
            f" but {_why_nothing(windows)}"
        )
    plan = make_plan(windows, max_tokens_per_batch=max_tokens_per_batch)
    return Workload(corpus, protocol, windows, plan)


def _why_nothing(windows: Windows) -> str:
    if windows.truncated.any():
        return "no document has enough for a window: take a smaller protocol.max_seq_len"
    return "no token has another before it in its window: give longer documents or add a BOS"


def run(
    model: nn.Module,
    workload: Workload,
    *,
    device: torch.device,
    batch_group: dist.ProcessGroup | None = None,
    loss_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    teacher: Teacher | None = None,
    fp32_logits: bool = True,
    records: TokenRecords | None = None,
    noise_floor: bool = True,
    on_step: Callable[[Progress], None] | None = None,
    check_every: int | None = None,
) -> Evaluation:
    """Score a workload. Every rank calls it and runs the same number of steps.

    Args:
        model: on ``device``; see :func:`ppl_eval.score.head.score`. It is put into eval mode and
            back, and no gradients are kept.
        workload: from :func:`prepare`.
        device: of the model.
        batch_group: ranks that read different windows; None for this rank alone.
        loss_group: ranks that write different rows of the ledger, or parts of rows (batch x cp);
            None for this rank alone.
        cp_group: ranks that share a window; None where none is shared.
        teacher: reads the same windows in the same pass; its logits and the model's are fp32 then.
        fp32_logits: see :func:`ppl_eval.score.head.score`.
        records: filled with every token that this rank scores.
        noise_floor: with a teacher, measure what another rounding of it would give.
        on_step: called on this rank after every step, those of the noise floor included.
        check_every: steps between looks for a NaN or infinite loss among this rank's own (each
            waits for the device). Only a rank that has one raises, so give it where such an error
            ends all processes. None: only at the end, when all ranks raise.

    Raises:
        UserError: a loss is NaN or infinite, naming document and window; a model that is split over
            ranks which would read different windows.
    """
    check_groups(model, loss_group)
    if teacher is not None:
        check_groups(teacher.model, teacher.loss_group)
        check_meshes(model, batch_group, cp_group, teacher)
    windows, plan = workload.windows, workload.plan
    batch_rank = 0 if batch_group is None else dist.get_rank(batch_group)
    num_batch_ranks = 1 if batch_group is None else dist.get_world_size(batch_group)
    num_steps = plan.num_steps(num_batch_ranks)
    num_scored = np.cumsum([windows.num_scored[numbers].sum() for numbers in plan.batches])
    context = ContextSplit.of(cp_group)
    steps, models, contexts = _steps(model, teacher, device, context, fp32_logits, records)
    num_parts = 1 if context is None else context.size
    ledger = Ledger(len(windows), device, num_parts, steps.columns)
    sources = (plan, windows, workload.corpus, workload.protocol)
    sample = range(0)
    if isinstance(steps, BesideTeacher) and noise_floor and steps.measures_noise:
        sample = noise_sample(len(plan.batches))
    # two forwards of each position: a batch is read by both models, for the noise twice by one
    work = np.cumsum([*plan.num_positions, *(plan.num_positions[number] for number in sample)])

    def tell(step: int, num_read: int) -> None:
        """Report ``step``, with which all ranks together have read so many batches."""
        if on_step is not None:
            scored = num_scored[min(num_read, len(num_scored)) - 1]
            share = work[min(num_read, len(work)) - 1] / work[-1]
            on_step(Progress(step, num_steps, int(scored), float(share), steps.running))

    # where an error ends all processes there is no need to go on until the end with it
    together = workload.corpus.failing_together() if check_every is None else nullcontext()
    with together, evaluating(models, contexts):
        weights = stored_weights(model)
        for step in range(num_steps):
            number = plan.batch_of(step, batch_rank, num_batch_ranks)
            steps.run(collate(number, *sources), ledger)
            if check_every is not None and (step + 1) % check_every == 0:
                _raise_if_not_finite(ledger, workload)
            tell(step + 1, min((step + 1) * num_batch_ranks, len(plan.batches)))
        if isinstance(steps, BesideTeacher):
            for turn, number in enumerate(noise_batches(sample, batch_rank, num_batch_ranks), 1):
                steps.run_noise(collate(number, *sources), seed=number or 0)
                tell(num_steps + turn, len(plan.batches) + turn * num_batch_ranks)
    ledger.assemble(loss_group)
    steps.assemble(loss_group)
    _raise_if_not_finite(ledger, workload)

    def summary(of: Ledger, by_position: list[dict[str, Any]]) -> Summary:
        return summarise(workload.corpus, workload.protocol, windows, of, by_position)

    found = Evaluation(workload, ledger, summary(ledger, steps.by_position()), weights=weights)
    if isinstance(steps, Alone):
        return found
    teachers = summary(ledger.with_nll_of("teacher_"), steps.teacher_by_position())
    return replace(found, teacher=teachers, fidelity=steps.fidelity)


def _steps(
    model: nn.Module,
    teacher: Teacher | None,
    device: torch.device,
    context: ContextSplit | None,
    fp32_logits: bool,
    records: TokenRecords | None,
) -> tuple[Alone | BesideTeacher, list[nn.Module], list[ContextSplit | None]]:
    """What a step does, the models, and how each splits windows."""
    if teacher is None:
        return Alone(model, device, context, fp32_logits, records), [model], [context]
    models, contexts = [model, teacher.model], [context, ContextSplit.of(teacher.cp_group)]
    return BesideTeacher(model, teacher, device, context, records), models, contexts


def _raise_if_not_finite(ledger: Ledger, workload: Workload) -> None:
    found = ledger.first_non_finite()
    if found is None:
        return
    number, column = found
    windows = workload.windows
    document, start = int(windows.document[number]), int(windows.start[number])
    row_id = workload.corpus.documents[document].id
    what = {"nll_nats": "the loss", "teacher_nll_nats": "the teacher's loss"}.get(column, column)
    raise UserError(
        f"{what} is {float(ledger.column(column)[number])} in document {document}"
        f"{'' if row_id is None else f' (id {row_id!r})'}, tokens {start} to"
        f" {start + int(windows.num_tokens[number]) - 1}: look for NaN in the checkpoint, or try"
        " dtype=fp32 (fp16 overflows at 65,504)"
    )


def evaluate(
    model: nn.Module,
    tokenizer: TextTokenizer,
    documents: Iterable[Any],
    *,
    protocol: str = "document",
    max_seq_len: int | None = None,
    stride: int | None = None,
    add_bos: bool | str = "auto",
    add_eos: bool = False,
    separator: str | None = None,
    max_tokens_per_batch: int | None = None,
    max_documents: int | None = None,
    fp32_logits: bool = True,
    group: dist.ProcessGroup | None = None,
    meshes: Meshes | None = None,
    teacher: nn.Module | None = None,
    teacher_meshes: Meshes | None = None,
    noise_floor: bool = True,
) -> Evaluation:
    """Perplexity of a model that is already built and, if at all, sharded.

    For a training loop or a notebook. With several processes every rank calls it with the same
    arguments, and gets the same result.

    Args:
        model: a torchtune ``TransformerDecoder``, plain or under FSDP2 or DDP, or any module that
            maps token ids [B, T] to logits [B, T, V] (or to an object with ``.logits``).
        tokenizer: the model's: ``encode(text, add_bos, add_eos)``, ``bos_id``, ``eos_id``.
        documents: texts, mappings with ``text`` (and ``id``, ``domain``), or a ``text_corpus``.
        protocol: the rule that makes windows: see docs/protocols.md.
        max_seq_len: tokens in a window, BOS included; None: the protocol's own, mostly 1,024, or
            what the models read if that is less.
        stride: text tokens by which windows advance; None: they do not overlap.
        add_bos: True, False, or ``auto``: as the tokenizer has it.
        add_eos: score an EOS after each document.
        separator: between texts that the protocol joins; None: the protocol's own.
        max_tokens_per_batch: input positions of a batch at most, padding included; None: 1,024 on
            a CPU, 8,192 on CUDA.
        max_documents: take the first N documents.
        fp32_logits: see :func:`ppl_eval.score.head.score`.
        group: the ranks that read different documents. None: all processes, which is right for
            FSDP2 and DDP.
        meshes: from :meth:`ParallelDims.build_mesh`, in place of ``group``, for a torchtune decoder
            that is split by :func:`ppl_eval.parallel.tensor.split_decoder`, or whose windows are to
            be shared by several ranks (cp).
        teacher: a model with the same tokenizer, on the same device, that reads the same windows;
            the result then has ``teacher`` and ``fidelity``.
        teacher_meshes: the teacher's, if it is split otherwise; ``meshes`` if not given.
        noise_floor: with a teacher, measure what another rounding of it would give: one batch in
            sixteen is read by it twice more.

    Raises:
        UserError: a bad row, an empty corpus, a window longer than the model allows, a NaN loss.

    Example:
        >>> from torchtune.models.llama3_2 import llama3_2
        >>> from ppl_eval.data import hf_tokenizer
        >>> tokenizer = hf_tokenizer("CHECKPOINT_DIR")
        >>> result = evaluate(model, tokenizer, ["A text.", "Another one."])
        >>> result.perplexity, result.summary.total.num_scored
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    group = group or world
    models = [model] if teacher is None else [model, teacher]
    window, notes = fit_window(models, protocol, max_seq_len)
    rule = make_protocol(
        tokenizer,
        protocol,
        max_seq_len=window,
        stride=stride,
        add_bos=add_bos,
        add_eos=add_eos,
        separator=separator,
    )
    for each in models:
        check_window(each, rule.max_seq_len)
    device = _device_of(model)
    sizes = [size for size in map(vocab_size_of, models) if size is not None]
    workload = prepare(
        tokenizer,
        documents,
        rule,
        max_tokens_per_batch=batch_budget(max_tokens_per_batch, device.type),
        max_documents=max_documents,
        vocab_size=min(sizes, default=None),
        group=group if meshes is None else world,
    )
    notes += notes_of(documents)
    for note in notes if world is None or dist.get_rank() == 0 else ():
        logger.warning(note)
    result = run(
        model,
        workload,
        device=device,
        batch_group=group if meshes is None else meshes.batch.get_group(),
        loss_group=group if meshes is None else meshes.loss.get_group(),
        cp_group=None if meshes is None else meshes.cp.get_group(),
        teacher=None if teacher is None else _beside(teacher, teacher_meshes or meshes, group),
        fp32_logits=fp32_logits,
        noise_floor=noise_floor,
    )
    return replace(result, notes=notes)


def _beside(model: nn.Module, meshes: Meshes | None, group: dist.ProcessGroup | None) -> Teacher:
    return Teacher(model, group) if meshes is None else Teacher.on(model, meshes)


def fit_window(
    models: Sequence[nn.Module], protocol: str, max_seq_len: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """The window that is read where none is given: the protocol's own, or less if a model reads
    less.

    Args:
        models: what reads the windows.
        protocol: its name.
        max_seq_len: tokens in a window, or None if it is not given.

    Returns:
        (tokens in a window, a sentence if the models decided).
    """
    if max_seq_len is not None or protocol not in RULES:
        return max_seq_len, ()
    own = RULES[protocol].max_seq_len
    window = min([own, *(limit for limit in map(window_limit, models) if limit is not None)])
    if window == own:
        return own, ()
    return window, (
        f"protocol.max_seq_len is not given: windows have {window:,} tokens, all that the model"
        f" reads ({protocol} would take {own:,})",
    )


def window_limit(model: nn.Module) -> int | None:
    """Most tokens that a model reads at once, by torchtune's ``max_seq_len`` or transformers'
    configuration; None if it does not say. In a module of one's own the model inside says it."""
    for inner in unwrapped(model).modules():
        config: Any = getattr(inner, "config", None)
        is_of_transformers = hasattr(config, "get_text_config")
        text = config.get_text_config() if is_of_transformers else config
        for owner, name in (
            (inner, "max_seq_len"),
            (text, "max_position_embeddings"),
            (text, "max_seq_len"),  # MPT's
        ):
            limit = getattr(owner, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        if is_of_transformers:
            return None
    return None


def check_window(model: nn.Module, max_seq_len: int) -> None:
    """Refuse windows that are longer than the model allows.

    Raises:
        UserError: naming both lengths.
    """
    limit = window_limit(model)
    if limit is not None and max_seq_len > limit:
        raise UserError(
            f"protocol.max_seq_len is {max_seq_len}, but the model reads at most {limit} tokens:"
            f" set protocol.max_seq_len={limit} or less"
        )


def vocab_size_of(model: nn.Module) -> int | None:
    """Rows of the embedding of torchtune's or transformers' model, or None for other modules."""
    inner = unwrapped(model)
    embedding = getattr(inner, "tok_embeddings", None)
    if embedding is None and hasattr(getattr(inner, "config", None), "get_text_config"):
        embedding = inner.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)


def _device_of(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device
