"""What a model's weights are stored in."""

import pytest
import torch
from helpers import ByteTokenizer, sharp_llama
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from ppl_eval import evaluate
from ppl_eval.model.stored import StoredWeights, stored_weights

TEXTS = ["the quick brown fox", "jumps over the lazy dog"]
NUM_LINEAR = 2 * 7 + 1
"""Two layers of q, k, v, output and three of the feed-forward; the head."""


def is_of_the_feed_forward(module, name):
    return isinstance(module, torch.nn.Linear) and ".mlp." in name


@pytest.mark.parametrize(
    ("chosen", "num_quantized"),
    [(is_of_the_feed_forward, 6), (lambda module, name: name == "no such layer", 0)],
)
def test_a_quantiser_says_what_it_quantised(chosen, num_quantized):
    """One whose filter matches nothing leaves the model in fp32, and the result shows it."""
    model = sharp_llama(259)
    everything = sum(parameter.numel() for parameter in model.parameters())
    inside = 2 * 3 * 64 * 128 if num_quantized else 0
    quantize_(model, Int8WeightOnlyConfig(), chosen)
    weights = evaluate(model, ByteTokenizer(), TEXTS).weights
    expected = {"float32": everything - inside, "int8": inside}
    assert weights == StoredWeights(
        {dtype: count for dtype, count in expected.items() if count}, NUM_LINEAR, num_quantized
    )


def test_dtypes_are_counted_by_parameter():
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).bfloat16())
    assert stored_weights(model) == StoredWeights({"float32": 20, "bfloat16": 12}, 2, 0)


def test_integers_in_buffers_are_weights_too():
    """torchtune's and torchao's older quantised layers keep them so; an integer bias is none."""

    class Int8Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.ones(2, 2, dtype=torch.int8))

    assert stored_weights(torch.nn.Sequential(Int8Linear())) == StoredWeights({}, 1, 1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_weights_that_are_packed_away_are_quantised_too():
    """torch.ao's dynamic quantisation leaves no parameter to look at."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    dynamic = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    weights = stored_weights(dynamic)
    assert (weights.linear_layers, weights.quantized_linear_layers) == (2, 2)
