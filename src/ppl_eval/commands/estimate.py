"""Memory and communication of one rank, from a decoder's shapes alone.

docs/parallelism.md explains the formulas. Tests count parameters and communication exactly;
benchmarks/plan_memory.py compares the memory with measured peaks.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ppl_eval.decoder import Decoder
from ppl_eval.model.attention import QUERY_BLOCK, SCORE_ELEMENTS
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.products import CAST_ROWS
from ppl_eval.parallel.tensor import split_axes
from ppl_eval.score.head import CHUNK_ELEMENTS


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


def bytes_of_rank(decoder: Decoder, dims: ParallelDims) -> int:
    """Bytes of parameters on the rank that has most of them; FSDP2 shards the first dim.

    Args:
        decoder: a decoder that is not split yet, on any device.
        dims: the degrees of parallelism.
    """
    rows_and_bytes = _rows_and_bytes(decoder, dims.tp).values()
    return sum(-(-rows // dims.fsdp_size) * row for rows, row in rows_and_bytes)


@lru_cache(maxsize=2)  # a table of meshes asks for both models, one tp after the other
def _rows_and_bytes(decoder: Decoder, tp: int) -> dict[str, tuple[int, int]]:
    """Parameter name -> (size of its first dim, bytes of a row) on the rank with most of it after
    tp has split it."""
    axes, found = split_axes(decoder), {}
    for name, parameter in decoder.model.named_parameters():
        shape = list(parameter.shape)
        if name in axes:
            shape[axes[name]] = -(-shape[axes[name]] // tp)
        found[name] = shape[0], math.prod(shape[1:]) * parameter.element_size()
    return found


def estimate(
    decoder: TorchtuneDecoder,
    dims: ParallelDims,
    positions: int,
    *,
    reshard_after_forward: bool = True,
) -> Estimate:
    """Memory and communication of one rank.

    Args:
        decoder: a decoder that is not split yet, on any device.
        dims: the degrees of parallelism.
        positions: number of tokens in a batch, padding included.
        reshard_after_forward: see :func:`ppl_eval.parallel.shard.shard_decoder`.
    """
    tp, fsdp, local = dims.tp, dims.fsdp_size, positions / dims.cp
    weight, num_layers = decoder.embedding.weight, len(decoder.layers)
    itemsize, dim = weight.element_size(), weight.shape[1]
    sizes = {name: rows * row for name, (rows, row) in _rows_and_bytes(decoder, tp).items()}
    root = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    layer = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    # gathered layers: the one that runs, the next one, and the flat copy of the next one
    num_gathered = 3 if reshard_after_forward else num_layers + 1
    attention: Any = decoder.layers[0].attn

    def received(size: float, ranks: int) -> float:
        return size * (ranks - 1) / ranks

    kv = 2 * positions * attention.num_kv_heads // tp * attention.head_dim * itemsize
    sums = (itemsize + 2 * num_layers * 4) * local * dim + 3 * local * 4
    return Estimate(
        dims=dims,
        parameters=bytes_of_rank(decoder, dims),
        gathered=root + num_gathered * layer if fsdp > 1 else 0,
        activations=_activations(decoder, dims, positions),
        head=_head(decoder, tp, local),
        fsdp_traffic=received(num_layers * layer, fsdp) * reshard_after_forward,
        cp_traffic=received(num_layers * kv, dims.cp),
        tp_traffic=2 * received(sums, tp),
    )


def _activations(decoder: TorchtuneDecoder, dims: ParallelDims, positions: int) -> float:
    """Bytes that a decoder layer computes: the larger of attention and feed-forward."""
    first: Any = decoder.layers[0]
    weight, tp, local = decoder.embedding.weight, dims.tp, positions / dims.cp
    itemsize, dim = weight.element_size(), weight.shape[1]
    heads = first.attn.num_heads // tp * first.attn.head_dim
    kv_heads = first.attn.num_kv_heads // tp * first.attn.head_dim
    attention = itemsize * local * (3 * dim + 5 * heads)
    if tp > 1 and itemsize < 4:
        attention += 4 * local * dim  # an fp32 sum over ranks, before it is rounded
    if dims.cp > 1:  # keys and values: this rank's, the window's, the window's for all query heads
        attention += itemsize * (2 * kv_heads * local + 2 * (kv_heads + heads) * positions)
    if any(each and each.soft_cap for each in decoder.attentions):
        # scores of a block of queries, and their softmax in fp32
        scores = min(first.attn.num_heads // tp * QUERY_BLOCK * positions, SCORE_ELEMENTS)
        attention += (itemsize + 4) * scores
    feed_forward = itemsize * local * (4 * dim + 3 * -(-first.mlp.w1.out_features // tp))
    return max(attention, feed_forward)


def _head(decoder: TorchtuneDecoder, tp: int, local: float) -> float:
    """Bytes of a chunk's logits and hidden states, and of the norm of all hidden states."""
    weight, vocabulary = decoder.embedding.weight, -(-decoder.num_ids // tp)
    itemsize, dim = weight.element_size(), weight.shape[1]
    rows = min(local, max(1, CHUNK_ELEMENTS // vocabulary))
    head = 4 * rows * (vocabulary + dim) + local * dim * 3 * itemsize
    if itemsize < 4:  # rows of the weight in fp32, and their logits
        head += 4 * min(CAST_ROWS, vocabulary) * (dim + rows)
    return head
