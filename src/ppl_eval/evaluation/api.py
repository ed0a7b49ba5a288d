"""evaluate: a model that is already built, a tokenizer and documents -> an Evaluation."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ppl_eval.data.documents import notes as notes_of
from ppl_eval.data.plan import batch_budget
from ppl_eval.data.protocol import make_protocol
from ppl_eval.data.tokenizer import TextTokenizer
from ppl_eval.evaluation.loop import Evaluation, run
from ppl_eval.evaluation.model_limits import fit_window, vocab_size_of
from ppl_eval.evaluation.workload import prepare_workload
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import Groups, Meshes
from ppl_eval.score.reader import Reader

logger = logging.getLogger("ppl_eval")


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
    device: torch.device | str | None = None,
) -> Evaluation:
    """Perplexity of a model that is already built, and sharded if it is to be.

    For a training loop or a notebook. Every rank calls it with the same arguments and gets the
    same result.

    Args:
        model: a torchtune ``TransformerDecoder``, plain or under FSDP2 or DDP, or any module that
            maps token ids [B, T] to logits [B, T, V] (or to an object with ``.logits``).
        tokenizer: has ``encode(text, add_bos, add_eos)``, ``bos_id`` and ``eos_id``.
        documents: texts, mappings with ``text`` (and ``id``, ``domain``), or a ``text_corpus``.
        protocol: the rule that makes windows: see docs/protocols.md.
        max_seq_len: tokens in a window, BOS included; None: the protocol's default, mostly 1,024,
            or what the models read if that is less.
        stride: text tokens by which windows advance; None: windows do not overlap.
        add_bos: True, False, or ``auto``: as the tokenizer does it.
        add_eos: score an EOS after each document.
        separator: between texts that the protocol joins; None: the protocol's default.
        max_tokens_per_batch: most input positions of a batch, padding included; None: 1,024 on a
            CPU, 8,192 on CUDA.
        max_documents: take the first N documents.
        fp32_logits: compute logits in fp32, also for a bf16 model; see
            :class:`ppl_eval.score.reader.Reader`. With a teacher logits are always fp32.
        group: ranks that read different documents; None: all, which is right for FSDP2 and DDP.
        meshes: from :meth:`ParallelDims.build_mesh`, in place of ``group``, for a torchtune decoder
            split by :func:`ppl_eval.parallel.tensor.split_decoder`, or windows split over ranks
            (cp).
        teacher: a model with the same tokenizer, on the same device; the result then has
            ``teacher`` and ``fidelity``.
        teacher_meshes: the teacher's meshes, if it is split otherwise; None: ``meshes``.
        noise_floor: with a teacher, measure how far a differently rounded teacher is from it; the
            teacher reads one batch in sixteen twice more.
        device: where the models compute; None: see :func:`device_of`.

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
    groups = Groups(group, group) if meshes is None else Groups.of(meshes)
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
    device = device_of(model) if device is None else torch.device(device)
    sizes = [size for size in map(vocab_size_of, models) if size is not None]
    workload = prepare_workload(
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
    readers = [Reader(model, decoder_of(model), groups, fp32_logits or teacher is not None)]
    if teacher is not None:
        teachers = groups if teacher_meshes is None else Groups.of(teacher_meshes)
        readers.append(Reader(teacher, decoder_of(teacher), teachers))
    result = run(readers, workload, device=device, noise_floor=noise_floor)
    return replace(result, notes=notes)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, or the one that FSDP2 moves offloaded parameters to."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return torch.device("cpu")
    if isinstance(first, DTensor) and first.device_mesh.device_type != first.device.type:
        kind = first.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return first.device
