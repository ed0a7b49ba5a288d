"""A step never waits for a CUDA device: shown without one, on fake tensors that have no values."""

import pytest
import torch
from fake_cuda import CUDA, NoWaiting, one_of
from ranks import require
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune.models.gemma2 import gemma2
from torchtune.models.llama3 import llama3
from torchtune.models.qwen2 import qwen2

from ppl_eval.checkpoint.config_json import NOTHING
from ppl_eval.metrics.fidelity import PROFILED, SUMS, Fidelity
from ppl_eval.metrics.ledger import NLL, Ledger
from ppl_eval.metrics.perplexity import Perplexity
from ppl_eval.metrics.profiles import context_profile
from ppl_eval.model.attention import QUERY_BLOCK, Attention
from ppl_eval.model.corrections import correct
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.tensor import split_decoder
from ppl_eval.score import reader as reader_module
from ppl_eval.score.batch import Batch, Tokens
from ppl_eval.score.reader import Reader, evaluating
from ppl_eval.score.scoring import Scorer

ROWS, LENGTH, SCORED = 2, 30, 18
SIZES = {"vocab_size": 101, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
SIZES |= {"max_seq_len": 64, "intermediate_dim": 128}
BUILDERS = {
    "untied": lambda: llama3(**SIZES),
    "tied": lambda: qwen2(**SIZES, tie_word_embeddings=True),
    "capped": lambda: gemma2(**SIZES, head_dim=16, sliding_window_size=7),
}


def zeros(shape, dtype=torch.int64, device=CUDA):
    return torch.zeros(shape, dtype=dtype, device=device)


def decoder(kind, dtype, mesh=None):
    """A reader whose parameters and buffers are made on CUDA, split over a mesh if there is one."""
    with torch.device("meta"):
        model = BUILDERS[kind]()
    correct(model, NOTHING)
    if mesh is not None:
        split_decoder(decoder_of(model), mesh)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = nn.Parameter(on_cuda(parameter, dtype), requires_grad=False)
            module.register_parameter(name, made)
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, zeros(buffer.shape, buffer.dtype), persistent=False)
    return Reader(model, decoder_of(model))


def on_cuda(parameter, dtype):
    if not isinstance(parameter, DTensor):
        return zeros(parameter.shape, dtype)
    local = parameter.to_local()
    return DTensor.from_local(
        zeros(local.shape, dtype),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def step(readers, device=CUDA, mode="default"):
    """What the loop does with a batch on ``device``: score it, and add up what was found."""
    per_window = torch.full((ROWS,), SCORED // ROWS, device=device)
    of_tokens = (zeros(SCORED, device=device) for _ in range(5))
    batch = Batch(
        zeros((ROWS, LENGTH), device=device),
        Tokens(*of_tokens, torch.arange(ROWS, device=device), per_window),
    )
    is_pair = len(readers) > 1
    ledger = Ledger(9, CUDA, columns=SUMS if is_pair else NLL)
    tables = [ledger, context_profile(PROFILED if is_pair else ["nll_nats"], CUDA)]
    tables += [Fidelity(CUDA)] if is_pair else []
    running, scorer = Perplexity(CUDA), Scorer(readers, CUDA)
    with evaluating(readers):
        for sync_debug_mode in ("default", mode):
            if mode != "default":
                torch.cuda.set_sync_debug_mode(sync_debug_mode)
            scored, values = scorer.score(batch)
            for table in tables:
                table.update(scored, values)
            running.update(values["nll_nats"], len(scored))
    assert values["nll_nats"].device == CUDA
    assert values["nll_nats"].shape == (SCORED,)
    assert running.nll_nats_sum.device == CUDA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", BUILDERS)
def test_one_model(kind, dtype):
    with NoWaiting():
        step([decoder(kind, dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_and_its_teacher(dtype):
    with NoWaiting():
        step([decoder("tied", dtype), decoder("untied", dtype)])


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [["tied"], ["untied"], ["capped"], ["tied", "untied"]])
def test_a_real_device(kinds):
    """CUDA itself says what waits; the batch comes from the CPU."""
    require("cuda")
    try:
        step([decoder(kind, torch.bfloat16) for kind in kinds], torch.device("cpu"), "error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kinds", [["tied"], ["untied"], ["capped"], ["tied", "untied"]])
def test_tensor_parallel(kinds):
    with one_of(2, 1):
        mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("tp",))
        with NoWaiting():
            step([decoder(kind, torch.bfloat16, mesh) for kind in kinds])


def test_a_mask_in_place_of_the_index_is_found(monkeypatch):
    """The guard of this file."""

    def masked(values_BTD, index_N):
        return values_BTD[zeros((ROWS, LENGTH), torch.bool)]

    monkeypatch.setattr(reader_module, "rows_of", masked)
    with NoWaiting(), pytest.raises(AssertionError, match="a mask is an index"):
        step([decoder("tied", torch.float32)])


@pytest.mark.parametrize("read", [lambda x: x.sum().item(), lambda x: x.tolist(), torch.Tensor.cpu])
def test_a_value_that_is_read_is_found(read):
    with NoWaiting(), pytest.raises((AssertionError, RuntimeError)):
        read(zeros(3, torch.float32))


class Largest(TorchDispatchMode):
    """The most numbers that a tensor has, and how often torch's own attention was called."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("queries", [4 * QUERY_BLOCK, QUERY_BLOCK], ids=["whole", "last part"])
def test_scores_of_all_queries_and_keys_in_float64_never_exist(queries):
    """torch has no kernel for it on CUDA, and would build them."""
    heads, keys = 2, 4 * QUERY_BLOCK
    with NoWaiting(), Largest() as largest:
        q = zeros((1, heads, queries, 16), torch.float64)
        kv = zeros((1, heads, keys, 16), torch.float64)
        assert Attention()(q, kv, kv).shape == q.shape
    assert 0 < largest.numbers <= heads * QUERY_BLOCK * keys
