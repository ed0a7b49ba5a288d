"""Heads that are more than a product, and what a model is like after an evaluation."""

import pytest
import torch
import torch.nn.functional as F
from helpers import ByteTokenizer, nll_of, sharp_llama, tokens_of
from torch import nn
from torch._dynamo.testing import CompileCounter

from ppl_eval import UserError, evaluate
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.parallel.lora import AdaptedLinear

TEXTS = ["the cat sat on the mat, " * n + "x" * n for n in (1, 2, 3)]


def batch():
    torch.manual_seed(1)
    tokens = torch.randint(101, (3, 21))
    return tokens[:, :-1], tokens[:, 1:], torch.rand(3, 20) < 0.7


def adapted(weight, is_dora):
    head = AdaptedLinear(
        64, 101, 4, bias=False, is_dora=is_dora, device=weight.device, dtype=weight.dtype
    )
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.1)
    head.weight.data.copy_(weight)
    return head


def with_bias(weight):
    head = nn.Linear(64, 101, dtype=weight.dtype)
    head.weight.data.copy_(weight)
    nn.init.normal_(head.bias)
    return head


HEADS = {
    "a bias": with_bias,
    "LoRA": lambda weight: adapted(weight, is_dora=False),
    "DoRA": lambda weight: adapted(weight, is_dora=True),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_with_more_than_a_weight_gives_fp32_logits_too(kind):
    """It multiplied in bf16 without a word: 0.14 nats off."""
    model = sharp_llama().bfloat16()
    model.output = HEADS[kind](model.output.weight.data)
    inputs, targets, scored = batch()
    seen = {}
    model.norm.register_forward_hook(lambda m, a, out: seen.update(hidden=out))
    with torch.no_grad():
        nll = nll_of(model, inputs, targets, scored)[scored]
        rounded = nll_of(model, inputs, targets, scored, fp32_logits=False)[scored]
        head = model.output.double()
        logits = F.linear(seen["hidden"].double(), head.weight)
        if isinstance(head, AdaptedLinear):
            low_rank = F.linear(seen["hidden"].double(), head.lora_a.weight)
            logits = logits + F.linear(low_rank, head.lora_b.weight)
            logits = logits if head.dora_scale is None else logits * head.dora_scale
        logits = logits if head.bias is None else logits + head.bias
        truth = F.cross_entropy(logits, targets[scored], reduction="none")
    assert (nll - truth).abs().max() < 2e-5
    assert (rounded - truth).abs().max() > 1e-3


class Scaled(nn.Linear):
    """A head of one's own."""

    def forward(self, input):
        return super().forward(input) * 0.5


def test_a_head_that_cannot_give_fp32_logits_is_refused():
    model = sharp_llama(259).bfloat16()
    model.output = Scaled(64, 259, bias=False, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="logits_dtype is fp32, but the head is a Scaled that mul"):
        evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32)
    rounded = evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32, fp32_logits=False)
    own = evaluate(model.float(), ByteTokenizer(), TEXTS, max_seq_len=32)
    assert rounded.perplexity == pytest.approx(own.perplexity, rel=0.02)


def test_every_module_is_in_its_own_mode_afterwards():
    """A part that is frozen in eval mode inside a model that trains."""
    model = sharp_llama(259).train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    evaluate(model, ByteTokenizer(), TEXTS, max_seq_len=32)
    assert [module.training for module in model.modules()] == modes


def test_a_compiled_model_is_not_compiled_again_for_each_batch():
    """It was, until torch gave up and ran it uncompiled."""
    model, counter = sharp_llama(259), CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True)
    texts = ["x" * n for n in (5, 9, 14, 20, 27, 30)]
    options = {"max_seq_len": 32, "max_tokens_per_batch": 1}
    torch._dynamo.reset()
    plain = evaluate(model, ByteTokenizer(), texts, **options)
    first = evaluate(compiled, ByteTokenizer(), texts[:2], **options)
    frames = counter.frame_count
    second = evaluate(compiled, ByteTokenizer(), texts, **options)
    assert len(first.workload.plan.batches) == 2
    assert len(second.workload.plan.batches) == 6
    assert 0 < frames == counter.frame_count
    assert second.summary.total.nll_nats_sum == pytest.approx(plain.summary.total.nll_nats_sum)


def test_records_of_tokens_are_small():
    """Two int32 and the NLL as it was computed: 12 bytes a token, where there were 20."""
    records, scored = TokenRecords(), torch.ones(3, 20).bool()
    records.update(tokens_of(torch.zeros(3, 20).long(), scored), {"nll_nats": torch.rand(60)})
    columns = records.gather(None)
    assert {name: column.dtype.name for name, column in columns.items()} == {
        "document": "int32",
        "position": "int32",
        "nll_nats": "float32",
    }
