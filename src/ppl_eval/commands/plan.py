"""Which mesh? Memory and communication of every layout of N processes, without weights or text.

The formulas are those of docs/parallelism.md; benchmarks/plan_memory.py holds them against measured
peaks, and tests hold parameters and communication against counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from ppl_eval.adapter.check import strip
from ppl_eval.config.command_line import load as load_config
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.plan import batch_budget
from ppl_eval.errors import UserError
from ppl_eval.evaluation.model_limits import fit_window
from ppl_eval.model.attention import QUERY_BLOCK, SCORE_ELEMENTS
from ppl_eval.model.build import build_on_meta
from ppl_eval.model.check_config import read_config_beside
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.process_group import DTYPES, device_type
from ppl_eval.parallel.products import CAST_ROWS
from ppl_eval.parallel.tensor import check_heads, split_axes
from ppl_eval.plural import counted
from ppl_eval.report.layout import align
from ppl_eval.score.head import CHUNK_ELEMENTS

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """What the formulas need to know of a decoder.

    Attributes:
        shapes: parameter name -> (shape, axis that tp splits or None).
        layers: number of decoder layers.
        dim: features of a hidden state.
        heads: query heads.
        kv_heads: key heads.
        head_dim: features of a head.
        hidden: hidden units of a feed-forward.
        vocabulary: rows of the embedding.
        item: bytes of a number.
        has_soft_cap: whether attention scores are capped, and so must be seen.
    """

    shapes: Mapping[str, tuple[torch.Size, int | None]]
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    item: int
    has_soft_cap: bool

    @classmethod
    def of(cls, model: TransformerDecoder) -> "Sizes":
        """Sizes of a decoder that is not split."""
        layers: Any = model.layers
        attention, mlp = layers[0].attn, layers[0].mlp
        axes = split_axes(TorchtuneDecoder(model))
        return cls(
            shapes={n: (p.shape, axes.get(n)) for n, p in model.named_parameters()},
            layers=len(layers),
            dim=model.tok_embeddings.weight.shape[1],
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            hidden=mlp.w1.weight.shape[0],
            vocabulary=model.tok_embeddings.weight.shape[0],
            item=model.tok_embeddings.weight.element_size(),
            has_soft_cap=any(a and a.soft_cap for a in TorchtuneDecoder(model).attentions),
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, the largest.

    Attributes:
        dims: the mesh.
        parameters: shards.
        gathered: parameters that FSDP2 has gathered while layers run.
        kept: those of them that stay while the head runs.
        activations: of a decoder layer.
        head: logits of a chunk, and what turns them into a loss.
        fsdp_traffic: bytes a step received for parameters.
        cp_traffic: bytes a step received for keys and values.
        tp_traffic: bytes a step received for sums of hidden states and for the loss.
    """

    dims: ParallelDims
    parameters: float
    gathered: float
    kept: float
    activations: float
    head: float
    fsdp_traffic: float
    cp_traffic: float
    tp_traffic: float

    @property
    def total(self) -> float:
        """Peak. Layers and head do not run at the same time, and when the embedding and head are
        gathered, before both, FSDP2 has them twice."""
        layers, head = self.gathered + self.activations, self.kept + self.head
        return self.parameters + max(layers, head, 2 * self.kept)

    def beside(self, teacher: "Estimate") -> "Estimate":
        """Both models on the same mesh; their layers do not run at the same time."""
        names = ("parameters", "gathered", "kept", "fsdp_traffic", "cp_traffic", "tp_traffic")
        sums = {name: getattr(self, name) + getattr(teacher, name) for name in names}
        most = {n: max(getattr(self, n), getattr(teacher, n)) for n in ("activations", "head")}
        return replace(self, **sums, **most)

    @property
    def traffic_per_batch(self) -> float:
        """Bytes a rank receives for each batch that a step completes over all ranks."""
        return (self.fsdp_traffic + self.cp_traffic + self.tp_traffic) / self.dims.batch_size


def estimate(
    sizes: Sizes, dims: ParallelDims, positions: int, *, reshard_after_forward: bool = True
) -> Estimate:
    """Memory and communication of one rank.

    Args:
        sizes: of the model.
        dims: the mesh.
        positions: of a batch, padding included.
        reshard_after_forward: see :func:`ppl_eval.parallel.shard.shard_decoder`.
    """
    tp, cp, fsdp, item = dims.tp, dims.cp, dims.fsdp_size, sizes.item
    root, layer, shards = 0, 0, 0
    for name, (shape, axis) in sizes.shapes.items():
        split = list(shape)
        if axis is not None:
            split[axis] = -(-split[axis] // tp)
        count = _count(split)
        if not name.startswith("layers."):
            root += count
        elif name.startswith("layers.0."):
            layer += count
        shards += _count([-(-split[0] // fsdp), *split[1:]])
    kept = gathered = 0
    if fsdp > 1:
        # of layers there are the one that runs, the next one, and the flat copy of that
        kept = (root if reshard_after_forward else root + sizes.layers * layer) * item
        gathered = kept + (3 if reshard_after_forward else 1) * layer * item

    own = positions / cp
    heads, kv_heads = sizes.heads // tp * sizes.head_dim, sizes.kv_heads // tp * sizes.head_dim
    hidden = -(-sizes.hidden // tp)
    wide = 4 / item if tp > 1 and item < 4 else 0.0  # fp32 of a sum over ranks, before its rounding
    attention = own * ((3 + wide) * sizes.dim + 5 * heads)
    if cp > 1:  # keys and values: this rank's, the window's, and these with all query heads
        before = own * (2 * sizes.dim + 3 * heads + 2 * kv_heads)
        gathering = before + 2 * (kv_heads + heads) * positions
        attending = before + 2 * heads * (positions + own)
        attention = max(attention, gathering, attending)
    feed_forward = own * (4 * sizes.dim + 3 * hidden)
    activations = item * max(attention, feed_forward)
    if sizes.has_soft_cap:  # scores of a block of queries, and their softmax in fp32
        scores = min(sizes.heads // tp * QUERY_BLOCK * positions, SCORE_ELEMENTS)
        activations = max(activations, item * attention + (item + 4) * scores)

    vocabulary = -(-sizes.vocabulary // tp)
    rows = min(own, max(1, CHUNK_ELEMENTS // vocabulary))
    head = 4 * rows * vocabulary + own * sizes.dim * 3 * item + rows * sizes.dim * 4
    if item < 4:  # rows of the weight in fp32, and their logits
        head += 4 * min(CAST_ROWS, vocabulary) * (sizes.dim + rows)

    def received(size: float, ranks: int) -> float:
        return size * (ranks - 1) / ranks

    fsdp_traffic = received(sizes.layers * layer * item, fsdp) if reshard_after_forward else 0.0
    cp_traffic = received(sizes.layers * 2 * positions * kv_heads * item, cp)
    sums = (item + 2 * sizes.layers * 4) * own * sizes.dim + 3 * own * 4
    return Estimate(
        dims=dims,
        parameters=shards * item,
        gathered=gathered,
        kept=kept,
        activations=activations,
        head=head,
        fsdp_traffic=fsdp_traffic,
        cp_traffic=cp_traffic,
        tp_traffic=2 * received(sums, tp),
    )


def meshes(model: TransformerDecoder, num_processes: int) -> Iterator[ParallelDims]:
    """All layouts of ``num_processes`` that can split the model."""
    for tp in _divisors(num_processes):
        try:
            check_heads(TorchtuneDecoder(model), tp)
        except UserError:
            continue
        for cp in _divisors(num_processes // tp):
            for dp_shard in _divisors(num_processes // tp // cp):
                dp_replicate = num_processes // tp // cp // dp_shard
                yield ParallelDims(dp_replicate, dp_shard, cp, tp, num_processes)


def describe(args: Sequence[str], num_processes: int, device_memory_mib: float) -> str:
    """The meshes that fit, the least communication first, as a table.

    Args:
        args: ``--config NAME key=value`` as for ``tune run ppl_eval``.
        num_processes: devices in all.
        device_memory_mib: of each.

    Raises:
        UserError: the config is wrong, or no mesh fits (naming the one that needs least).
    """
    cfg = load_config(args)
    if num_processes < 1 or device_memory_mib <= 0:
        raise UserError(
            f"--num-processes is {num_processes} and --device-memory-gib"
            f" {device_memory_mib / 1024:g}, but both are above 0"
        )
    models = list(_models(cfg))
    positions = _positions(cfg, models)
    reshard = cfg.parallel.reshard_after_forward
    own_reshard = cfg.teacher_parallel.reshard_after_forward
    reshards = (reshard, reshard if own_reshard is None else own_reshard)
    every = []
    common = set.intersection(*(set(meshes(model, num_processes)) for model in models))
    for dims in (dims for dims in meshes(models[0], num_processes) if dims in common):
        own, *teachers = (
            estimate(Sizes.of(model), dims, positions, reshard_after_forward=reshards[place])
            for place, model in enumerate(models)
        )
        every.append(own.beside(teachers[0]) if teachers else own)
    fit = [one for one in every if one.total <= device_memory_mib * MIB]
    kind = device_type(cfg.device)
    name = (
        f"{cfg.model['_component_']} in {cfg.dtype} on {kind}, batches of {positions:,} positions"
    )
    if cfg.has_teacher:
        dtype = cfg.teacher_dtype or cfg.dtype
        name += f", beside {cfg.teacher_model['_component_']} in {dtype} on the same mesh"
    if not fit:
        least = min(every, key=lambda one: one.total)
        raise UserError(
            f"{name}: none of {counted(len(every), 'mesh')} on"
            f" {counted(num_processes, 'process')} fits into"
            f" {device_memory_mib:,.0f} MiB; {least.dims} needs least,"
            f" {least.total / MIB:,.0f} MiB: take more processes, or a smaller max_tokens_per_batch"
        )
    fit.sort(key=lambda one: (one.traffic_per_batch, one.total))
    rows = [_HEADINGS, *map(_row, fit)]
    return (
        f"{name}\n{len(fit)} of {counted(len(every), 'mesh')} on"
        f" {counted(num_processes, 'process')} fit into {device_memory_mib:,.0f} MiB;"
        " MiB of a rank, the least communication first\n\n"
        f"{align(rows)}"
    )


def _models(cfg: EvalConfig) -> Iterator[TransformerDecoder]:
    """The student, and the teacher if there is one, on meta and without adapters."""
    sections = [(cfg.model, cfg.checkpointer, cfg.dtype)]
    if cfg.has_teacher:
        own = cfg.teacher_dtype or cfg.dtype
        sections.append((cfg.teacher_model, cfg.teacher_checkpointer, own))
    for section, checkpointer, dtype in sections:
        model = build_on_meta(section, DTYPES[dtype], read_config_beside(checkpointer))
        strip(model)
        yield model


_HEADINGS = (
    *("dp_rep-\nlicate", "dp_\nshard", "\ncp", "\ntp"),
    *("param-\neters", "gath-\nered", "activ-\nations", "\nhead", "\ntotal"),
    *("fsdp/\nstep", "cp/\nstep", "tp/\nstep", "per\nbatch"),
)


def _row(one: Estimate) -> list[str]:
    dims = one.dims
    numbers = (
        *(one.parameters, one.gathered, one.activations, one.head, one.total),
        *(one.fsdp_traffic, one.cp_traffic, one.tp_traffic, one.traffic_per_batch),
    )
    degrees = map(str, (dims.dp_replicate, dims.dp_shard, dims.cp, dims.tp))
    return [*degrees, *(f"{number / MIB:,.0f}" for number in numbers)]


def _positions(cfg: EvalConfig, models: Sequence[TransformerDecoder]) -> int:
    """Most positions of a batch: a window that is longer than the budget is a batch of its own."""
    window, _ = fit_window(models, cfg.protocol.name, cfg.protocol.max_seq_len)
    return max(batch_budget(cfg.max_tokens_per_batch, device_type(cfg.device)), window or 0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
