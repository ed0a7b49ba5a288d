"""Quantised layers: torchao's bits, whatever rows a rank has; and which sections are refused."""

import pytest
import torch
from helpers import sharp_llama
from torch import nn
from torchao import quantization as ao
from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

from ppl_eval.errors import UserError
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.quantize import linear, tensors
from ppl_eval.quantize.layers import quantize_layers
from ppl_eval.quantize.linear import QuantizedLinear, quantize
from ppl_eval.quantize.schemes import SCHEMES, read_quantizer
from ppl_eval.score.head import Head

CONFIGS = {
    "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(),
    "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    "int8_dynamic_int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)
    ),
    "int4_weight_only": lambda: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=ao.PerGroup(32)
    ),
    "float8_weight_only": lambda: ao.Float8WeightOnlyConfig(),
}
OTHERS = ("float8_dynamic", "nf4")
"""Schemes that ``quantize_`` does not make on a CPU."""


def quantizer_of(scheme):
    groups = {} if SCHEMES[scheme].group_size is None else {"group_size": 32}
    if scheme == "nf4":
        groups = {}
    return read_quantizer({"scheme": scheme, **groups})


def layer(seed=0, dtype=torch.float32, rows=96):
    torch.manual_seed(seed)
    return nn.Linear(128, rows, dtype=dtype).requires_grad_(False)


def loaded(plain, scheme):
    slot = nn.Linear(128, len(plain.weight), device="meta", dtype=plain.weight.dtype)
    quantised = QuantizedLinear(slot, quantizer_of(scheme))
    shards = quantised.shards(plain.weight, torch.device("cpu"))
    quantised.load_state_dict({**shards, "bias": plain.bias}, assign=True)
    return quantised.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", CONFIGS)
def test_the_bits_of_torchao(scheme, dtype):
    plain = layer(dtype=dtype)
    ours = loaded(plain, scheme)
    x = torch.randn(2, 5, 128, dtype=dtype)
    before = plain(x)
    ao.quantize_(plain, CONFIGS[scheme]())
    assert torch.equal(ours(x), plain(x))
    assert not torch.equal(ours(x), before)
    assert 0.4 < ours.error_in_steps < 1.5


@pytest.mark.parametrize(
    ("device_type", "dtype", "size", "tiled"),
    [
        ("cuda", torch.bfloat16, 64, True),
        ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 16, False),
        ("cpu", torch.bfloat16, 64, False),
    ],
)
def test_the_kernel_of_int4(monkeypatch, device_type, dtype, size, tiled):
    """torchao packs tiles on the meta device, but computes with them on CUDA only."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    section = {"scheme": "int4_weight_only", "group_size": size}
    quantizer = tensors.for_device(read_quantizer(section), dtype, device_type)
    slot = nn.Linear(128, 96, device="meta", dtype=dtype)
    quantised = QuantizedLinear(slot, quantizer)
    kernel = "Int4TilePackedTo4dTensor" if tiled else "IntxUnpackedToInt8Tensor"
    assert (quantised.kernel, quantised.group_size) == (kernel, size)
    if tiled:
        with pytest.raises(UserError, match="w1 is quantised to int4 by Int4TilePackedTo4dTensor"):
            quantised.check_split("columns", 2, "w1", "parallel.tp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4(dtype):
    plain = layer(dtype=dtype, rows=128)
    ours, x = loaded(plain, "nf4"), torch.randn(2, 5, 128, dtype=dtype)
    expected = linear_nf4(x, to_nf4(plain.weight)) + plain.bias
    torch.testing.assert_close(ours(x), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
    assert not torch.allclose(ours(x), plain(x), rtol=1e-2, atol=1e-2)
    assert 0.3 < ours.error_in_steps < 1


def test_one_block_of_nf4_in_a_row():
    torch.manual_seed(0)
    plain = nn.Linear(64, 256).requires_grad_(False)
    slot = nn.Linear(64, 256, device="meta")
    quantised = QuantizedLinear(slot, read_quantizer({"scheme": "nf4"}))
    found = quantised.shards(plain.weight, torch.device("cpu"))
    assert found.keys() >= {"quantized_data", "quantized_scalers"}
    assert 0.3 < quantised.error_in_steps < 1


def test_a_row_of_zeros():
    """torchao's float8 makes it NaN; the checkpoint is right."""
    plain = layer()
    plain.weight[3] = 0
    with pytest.raises(UserError, match=r"cannot hold it in torch.float32, as where all weights"):
        loaded(plain, "float8_weight_only")
    assert loaded(plain, "int8_weight_only")(torch.ones(1, 128)).isfinite().all()


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", ["subclass", "hook"])
def test_layers_that_compute_more_are_refused(kind):
    model = sharp_llama()
    mlp = model.layers[1].mlp
    if kind == "hook":
        mlp.w1.register_forward_hook(lambda *_: None)
    else:
        mlp.w1 = Doubled(64, 128, bias=False)
    with pytest.raises(UserError, match=r"layers.1.mlp.w1 is a .* may compute more than a product"):
        quantize_layers(TorchtuneDecoder(model.to("meta")), quantizer_of("int8_dynamic"), "cpu")


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_multiplies_in_fp32(bias):
    """Also of a bf16 model: its weight is not rounded to bf16 before."""
    plain = layer(dtype=torch.bfloat16)
    ours = loaded(plain, "int8_weight_only")
    ours.bias = ours.bias if bias else None
    ours.bias = None if ours.bias is None else nn.Parameter(torch.zeros_like(ours.bias), False)
    head, x = Head.of(ours, None, fp32=True, num_ids=96), torch.randn(4, 128).bfloat16()
    parts = dict(ours.named_parameters())
    numbers = next(p for p in parts.values() if p.dtype == torch.int8).double()
    scale = next(p for n, p in parts.items() if n.endswith("scale")).double()
    expected = x.double() @ (numbers * scale.view(-1, 1)).T
    torch.testing.assert_close(head.logits(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_float8_dynamic():
    """A CPU multiplies in float8, too, but torchao has its kernel for CUDA only."""
    plain = layer()
    ours, x = loaded(plain, "float8_dynamic"), torch.randn(2, 5, 128)

    def rounded(t):
        scale = t.double().abs().amax(dim=-1, keepdim=True) / 448
        return (t.double() / scale).to(torch.float8_e4m3fn).double() * scale

    expected = rounded(x) @ rounded(plain.weight).T + plain.bias.double()
    torch.testing.assert_close(ours(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours(x), plain(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scheme", sorted({*SCHEMES} - {"nf4"}))
def test_rows_are_quantised_alone(scheme):
    plain = layer()
    whole, x = loaded(plain, scheme), torch.randn(3, 128)
    part = nn.Linear(128, 40)
    part.weight, part.bias = (nn.Parameter(p[20:60], False) for p in (plain.weight, plain.bias))
    assert torch.equal(loaded(part, scheme)(x), whole(x)[:, 20:60])


def test_a_kernel_that_is_off_is_an_error(monkeypatch):
    """torchao 0.15's second version of int8 dequantises bf16 wrongly."""
    config = ao.Int8WeightOnlyConfig
    monkeypatch.setattr(ao, "Int8WeightOnlyConfig", lambda version: config(version=2))
    assert loaded(layer(), "int8_weight_only").error_in_steps < 1
    with pytest.raises(UserError, match="quantisation steps from the checkpoint's"):
        loaded(layer(dtype=torch.bfloat16), "int8_weight_only")


def test_the_error_is_that_of_the_checkpoints_weight(monkeypatch):
    real = quantize
    monkeypatch.setattr(linear, "quantize", lambda w, q: real(w + (len(w) > 1) * 0.01, q))
    with pytest.raises(UserError, match="quantisation steps from the checkpoint's"):
        loaded(layer(), "int8_weight_only")


def test_a_weight_that_is_no_number():
    plain = layer()
    plain.weight[3, 4] = float("nan")
    with pytest.raises(UserError, match="holds NaN or infinite numbers"):
        loaded(plain, "int8_weight_only")


@pytest.mark.parametrize(
    ("section", "scheme", "size"),
    [
        ({"scheme": "int8_dynamic"}, "int8_dynamic", None),
        ({"scheme": "int4_weight_only"}, "int4_weight_only", 128),
        ({"scheme": "int8_dynamic_int4", "group_size": 64}, "int8_dynamic_int4", 64),
        (
            {
                "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQuantizer",
                "groupsize": 32,
            },
            "int8_dynamic_int4",
            32,
        ),
        (
            {"_component_": "torchtune.training.quantization.Int4WeightOnlyQuantizer"},
            "int4_weight_only",
            128,
        ),
    ],
)
def test_sections(section, scheme, size):
    found = read_quantizer(section)
    assert (found.scheme, found.group_size) == (scheme, size)
    assert bool(found.notes) == ("_component_" in section)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"scheme": "int8_weight"}, "did you mean quantizer.int8_weight_only|int8_weight_only"),
        ({"_component_": "torchtune.training.quantization.Int4WeightOnlyQATQuantizer"}, "zero poi"),
        ({"scheme": ["nf4"]}, r"quantizer.scheme is \['nf4'\], but it is one of"),
        (
            {
                "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQuantizer",
                "groupsize": 64,
                "group_size": 32,
            },
            "quantizer has _component_ and group_size",
        ),
        ({"scheme": None}, "quantizer.scheme is None, but it is one of int8_weight_only"),
        ({"scheme": "int8_dynamic", "group_size": 32}, "one scale for each output feature"),
        ({"scheme": "int4_weight_only", "group_size": 0}, "group_size is 0, but"),
        ({"scheme": "int4_weight_only", "group_size": "a"}, "group_size is 'a', but"),
        ({"scheme": "int8_dynamic", "groups": 32}, "unknown config key quantizer.groups"),
        ({"_component_": "my.Quantizer"}, "a quantizer is one of torchtune's"),
    ],
)
def test_sections_that_are_refused(section, sentence):
    with pytest.raises(UserError, match=sentence):
        read_quantizer(section)
