"""Memory and communication of one rank, from a decoder's shapes alone.

docs/parallelism.md explains the formulas. Tests count parameters and communication exactly;
benchmarks/plan_memory.py compares the memory with measured peaks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppl_eval.decoder import Decoder
from ppl_eval.model.attention import QUERY_BLOCK, SCORE_ELEMENTS
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.products import CAST_ROWS
from ppl_eval.parallel.tensor import split_axes
from ppl_eval.score.head import CHUNK_ELEMENTS


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder before it is split.

    Attributes:
        shapes: parameter name -> (shape, dim that tp splits or None).
        dim: features of a hidden state.
        hidden: hidden units of a feed-forward layer.
        vocabulary: rows of the embedding.
        itemsize: bytes of a number.
        has_soft_cap: whether attention scores are capped, which needs all scores in memory.
    """

    shapes: Mapping[str, tuple[torch.Size, int | None]]
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    itemsize: int
    has_soft_cap: bool

    @classmethod
    def of(cls, decoder: TorchtuneDecoder) -> "Sizes":
        """The sizes of a torchtune decoder, on any device."""
        first: Any = decoder.layers[0]
        weight, axes = decoder.embedding.weight, split_axes(decoder)
        return cls(
            shapes={n: (p.shape, axes.get(n)) for n, p in decoder.model.named_parameters()},
            layers=len(decoder.layers),
            dim=weight.shape[1],
            heads=first.attn.num_heads,
            kv_heads=first.attn.num_kv_heads,
            head_dim=first.attn.head_dim,
            hidden=first.mlp.w1.weight.shape[0],
            vocabulary=decoder.num_ids,
            itemsize=weight.element_size(),
            has_soft_cap=any(a and a.soft_cap for a in decoder.attentions),
        )


@dataclass(frozen=True)
class Estimate:
    """Bytes on the rank that needs most; traffic is what a rank receives in a step.

    Attributes:
        parameters: the shards that the rank keeps.
        gathered: parameters that FSDP2 gathers while layers run.
        activations: intermediate results of a decoder layer.
        head: logits of a chunk, and the computation of the loss.
        fsdp_traffic: parameters.
        cp_traffic: keys and values.
        tp_traffic: sums of hidden states and of losses.
    """

    dims: ParallelDims
    parameters: float
    gathered: float
    activations: float
    head: float
    fsdp_traffic: float
    cp_traffic: float
    tp_traffic: float

    @property
    def total(self) -> float:
        """The peak. Layers and head do not run at the same time."""
        return self.parameters + self.gathered + max(self.activations, self.head)

    @property
    def traffic_per_batch(self) -> float:
        """Bytes that a rank receives, divided by the batches that all ranks complete in a step."""
        return (self.fsdp_traffic + self.cp_traffic + self.tp_traffic) / self.dims.batch_size

    def with_teacher(self, teacher: "Estimate") -> "Estimate":
        """Both models on the same mesh; their layers do not run at the same time."""
        names = ("parameters", "gathered", "fsdp_traffic", "cp_traffic", "tp_traffic")
        sums = {name: getattr(self, name) + getattr(teacher, name) for name in names}
        most = {n: max(getattr(self, n), getattr(teacher, n)) for n in ("activations", "head")}
        return replace(self, **sums, **most)


def num_parameters_of_rank(decoder: Decoder, dims: ParallelDims) -> int:
    """Parameters that the rank with the most of them holds."""
    axes = split_axes(decoder)
    return sum(
        _num_of_rank(parameter.shape, axes.get(name), dims.tp, dims.fsdp_size)
        for name, parameter in decoder.model.named_parameters()
    )


def estimate(
    sizes: Sizes, dims: ParallelDims, positions: int, *, reshard_after_forward: bool = True
) -> Estimate:
    """Memory and communication of one rank.

    Args:
        sizes: the sizes of the model.
        dims: the degrees of parallelism.
        positions: number of tokens in a batch, padding included.
        reshard_after_forward: see :func:`ppl_eval.parallel.shard.shard_decoder`.
    """
    tp, fsdp, itemsize = dims.tp, dims.fsdp_size, sizes.itemsize
    local = positions / dims.cp
    shards = root = layer = 0  # numbers, not bytes
    for name, (shape, axis) in sizes.shapes.items():
        shards += _num_of_rank(shape, axis, tp, fsdp)
        if not name.startswith("layers."):
            root += _num_of_rank(shape, axis, tp, 1)
        elif name.startswith("layers.0."):
            layer += _num_of_rank(shape, axis, tp, 1)
    # gathered layers: the one that runs, the next one, and the flat copy of the next one
    num_gathered = 3 if reshard_after_forward else sizes.layers + 1
    gathered = (root + num_gathered * layer) * itemsize if fsdp > 1 else 0

    def received(size: float, ranks: int) -> float:
        return size * (ranks - 1) / ranks

    kv = 2 * positions * sizes.kv_heads // tp * sizes.head_dim * itemsize
    sums = (itemsize + 2 * sizes.layers * 4) * local * sizes.dim + 3 * local * 4
    return Estimate(
        dims=dims,
        parameters=shards * itemsize,
        gathered=gathered,
        activations=_activations(sizes, dims, positions),
        head=_head(sizes, tp, local),
        fsdp_traffic=received(sizes.layers * layer * itemsize, fsdp) * reshard_after_forward,
        cp_traffic=received(sizes.layers * kv, dims.cp),
        tp_traffic=2 * received(sums, tp),
    )


def _activations(sizes: Sizes, dims: ParallelDims, positions: int) -> float:
    """Bytes that a decoder layer computes: the larger of attention and feed-forward."""
    tp, itemsize, local = dims.tp, sizes.itemsize, positions / dims.cp
    heads, kv_heads = sizes.heads // tp * sizes.head_dim, sizes.kv_heads // tp * sizes.head_dim
    attention = itemsize * local * (3 * sizes.dim + 5 * heads)
    if tp > 1 and itemsize < 4:
        attention += 4 * local * sizes.dim  # an fp32 sum over ranks, before it is rounded
    if dims.cp > 1:  # keys and values: this rank's, the window's, the window's for all query heads
        attention += itemsize * (2 * kv_heads * local + 2 * (kv_heads + heads) * positions)
    if sizes.has_soft_cap:  # scores of a block of queries, and their softmax in fp32
        scores = min(sizes.heads // tp * QUERY_BLOCK * positions, SCORE_ELEMENTS)
        attention += (itemsize + 4) * scores
    feed_forward = itemsize * local * (4 * sizes.dim + 3 * -(-sizes.hidden // tp))
    return max(attention, feed_forward)


def _head(sizes: Sizes, tp: int, local: float) -> float:
    """Bytes of a chunk's logits and hidden states, and of the norm of all hidden states."""
    vocabulary = -(-sizes.vocabulary // tp)
    rows = min(local, max(1, CHUNK_ELEMENTS // vocabulary))
    head = 4 * rows * (vocabulary + sizes.dim) + local * sizes.dim * 3 * sizes.itemsize
    if sizes.itemsize < 4:  # rows of the weight in fp32, and their logits
        head += 4 * min(CAST_ROWS, vocabulary) * (sizes.dim + rows)
    return head


def _num_of_rank(shape: torch.Size, axis: int | None, tp: int, fsdp: int) -> int:
    """Numbers of a parameter that the rank with most holds; FSDP2 shards the first dim."""
    split = list(shape)
    if axis is not None:
        split[axis] = -(-split[axis] // tp)
    split[0] = -(-split[0] // fsdp)
    return torch.Size(split).numel()
