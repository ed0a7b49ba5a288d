"""The Python API: ``load`` a model from a folder, ``evaluate`` any model that is built."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune.modules import TransformerDecoder

from ppl_eval import components
from ppl_eval.checkpoint.weight_files import need_folder
from ppl_eval.config.checks import check_values
from ppl_eval.config.from_folder import complete
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.documents import notes as notes_of
from ppl_eval.data.plan import batch_budget
from ppl_eval.data.protocol import make_protocol
from ppl_eval.data.tokenizer import HFTokenizer, TextTokenizer, as_text_tokenizer, fingerprint_of
from ppl_eval.errors import UserError
from ppl_eval.evaluation.loop import run
from ppl_eval.evaluation.model_limits import fit_window, vocab_size_of
from ppl_eval.evaluation.workload import Workload, prepare_workload
from ppl_eval.model.prepare import prepare_model
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import Groups, Meshes
from ppl_eval.parallel.process_group import DTYPES, device_type, pick_device
from ppl_eval.ranks import Ranks
from ppl_eval.report import environment
from ppl_eval.report.evaluation import Evaluation
from ppl_eval.report.metric_logger import MetricLogger
from ppl_eval.report.progress import ProgressBar, Timer
from ppl_eval.report.results import RunInfo
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
    progress: bool = False,
) -> Evaluation:
    """Perplexity of a model that is already built, and sharded if it is to be.

    For a training loop or a notebook. Every rank calls it with the same arguments and gets the
    same result.

    Args:
        model: a torchtune ``TransformerDecoder``, plain or under FSDP2 or DDP, or any module that
            maps token ids [B, T] to logits [B, T, V] (or to an object with ``.logits``).
        tokenizer: torchtune's, :class:`ppl_eval.data.tokenizer.HFTokenizer`, or transformers'.
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
        progress: show a bar on rank 0.

    Raises:
        UserError: something that is no model or no tokenizer, a bad row, an empty corpus, a window
            longer than the model allows, a NaN loss.

    Example:
        >>> model, tokenizer = load("CHECKPOINT_DIR")
        >>> result = evaluate(model, tokenizer, ["A text.", "Another one."])
        >>> result.perplexity, result.intervals["token_perplexity"]
        >>> result.save("out/mine")
    """
    models = [model] if teacher is None else [model, teacher]
    for name, each in zip(("model", "teacher"), models, strict=False):
        _need_module(each, name)
    tokenizer = as_text_tokenizer(tokenizer)
    world = dist.group.WORLD if dist.is_initialized() else None
    is_first = world is None or dist.get_rank() == 0
    group = group or world
    groups = Groups(group, group) if meshes is None else Groups.of(meshes)
    timer = Timer()
    with timer.phase("data"):
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
    for note in notes if is_first else ():
        logger.warning(note)
    teachers = groups if teacher_meshes is None else Groups.of(teacher_meshes)
    fp32_logits = fp32_logits or teacher is not None
    readers = [
        Reader(each, decoder_of(each), place, fp32_logits)
        for each, place in zip(models, (groups, teachers), strict=False)
    ]
    bar = _bar(workload, device) if progress and is_first else None
    with timer.phase("evaluate"):
        on_step = None if bar is None else bar.update
        found = run(readers, workload, device=device, noise_floor=noise_floor, on_step=on_step)
    if bar is not None:
        bar.close()
    info = _info(readers, workload, tokenizer, device, notes, timer.seconds)
    return Evaluation(**vars(found), info=info)


def _bar(workload: Workload, device: torch.device) -> ProgressBar:
    num_scored = int(workload.windows.num_scored.sum())
    return ProgressBar(num_scored, MetricLogger(None), device, always=True)


def _need_module(model: Any, name: str) -> None:
    """Refuse a path or another thing that is no model.

    Raises:
        UserError: with the way out.
    """
    if isinstance(model, str | Path):
        raise UserError(
            f"{name} is {str(model)!r}, but evaluate() takes a model that is built: model,"
            f" tokenizer = ppl_eval.load({str(model)!r}) builds the model of a folder"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} is of type {type(model).__name__}, but it is a torch.nn.Module")


def _info(
    readers: Sequence[Reader],
    workload: Workload,
    tokenizer: TextTokenizer,
    device: torch.device,
    notes: Sequence[str],
    seconds: Mapping[str, float],
) -> RunInfo:
    """What is known of models that are not ours: neither where they come from nor their mesh."""
    student, teacher = readers[0], readers[-1] if len(readers) > 1 else None
    unknown = {"checkpoint_dtype": None, "mesh": None}
    dtypes = [_DTYPE_NAMES.get(reader.dtype, str(reader.dtype)) for reader in readers]
    return RunInfo(
        tokenizer,
        lambda: {
            "data": workload.corpus.fingerprint,
            "tokenizer": fingerprint_of(tokenizer),
            "model": None,
            **({} if teacher is None else {"teacher": None}),
            "protocol": workload.protocol.fingerprint,
            "plan": workload.plan.fingerprint,
        },
        environment={
            "versions": environment.versions(),
            "device": environment.device_name(device),
            "num_processes": dist.get_world_size() if dist.is_initialized() else 1,
            "dtype": dtypes[0],
            "logits_dtype": "fp32" if student.fp32_logits else "model",
            **unknown,
        },
        seconds=seconds,
        num_ids=tuple(vocab_size_of(reader.model) or 0 for reader in readers),
        notes=notes,
        teacher=teacher
        and {
            "model": type(teacher.model).__name__,
            "checkpoint_dir": None,
            "dtype": dtypes[-1],
            **unknown,
        },
    )


_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load(
    folder: str | Path,
    *,
    dtype: str | torch.dtype = "fp32",
    device: torch.device | str | None = None,
    meshes: Meshes | None = None,
    adapter: str | Path | None = None,
) -> tuple[TransformerDecoder, HFTokenizer]:
    """The model and the tokenizer of a folder, ready for :func:`evaluate`.

    What ``auto_ppl_eval`` does with ``checkpoint_dir``: the model is torchtune's, and computes what
    config.json describes. With several processes every rank calls it with its device and its
    meshes, and gets its shards.

    Args:
        folder: a Hugging Face folder with weights, config.json and tokenizer.json.
        dtype: of parameters and activations: ``fp32``, ``bf16``, ``fp16``, or torch's.
        device: where this rank computes; None: its GPU if there is one, else the CPU.
        meshes: from :meth:`ParallelDims.build_mesh`; None: the whole model on this rank.
        adapter: folder of a LoRA or DoRA adapter that is merged into the weights.

    Raises:
        UserError: no such folder, a family that is not evaluated, or whatever is wrong with it.

    Example:
        >>> model, tokenizer = load("CHECKPOINT_DIR", dtype="bf16")
    """
    need_folder(Path(folder), "folder")
    cfg = EvalConfig(checkpoint_dir=str(folder), dtype=str(dtype))
    check_values(cfg)
    complete(cfg)
    prepared = prepare_model(
        cfg.model,
        cfg.checkpointer,
        DTYPES[cfg.dtype],
        tp=1 if meshes is None else meshes.tp.size(),
        cp=1 if meshes is None else meshes.cp.size(),
        adapter_dir=None if adapter is None else str(adapter),
        device_type=device_type(None if device is None else str(device)),
    )
    tokenizer = components.build(cfg.tokenizer, "tokenizer")
    place = pick_device(None if device is None else str(device), Ranks.from_env().local_rank)
    prepared.shard(meshes)
    prepared.load(place)
    return prepared.decoder.model, tokenizer


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter, or the one that FSDP2 moves offloaded parameters to."""
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return torch.device("cpu")
    if isinstance(first, DTensor) and first.device_mesh.device_type != first.device.type:
        kind = first.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return first.device
