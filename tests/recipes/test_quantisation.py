"""Quantised models through the recipe, against a plain loop over transformers' model that torchao
quantised: in fp32, on the embedded student, with groups of 32."""

import json

import pytest
import torch
from helpers import chunks, oracle
from meshes import on_mesh, prepared
from ranks import run_on_ranks
from safetensors.torch import load_file
from torchao import quantization as ao

from ppl_eval import cli, shipped
from ppl_eval.data import hf_tokenizer
from ppl_eval.errors import UserError
from ppl_eval.quantize import linear
from ppl_eval.quantize.schemes import SCHEMES

STUDENT, TEACHER = map(shipped.embedded_path, ("tiny_student", "tiny_teacher"))
GROUPS = {name: 32 for name, scheme in SCHEMES.items() if scheme.group_size}
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
DOCUMENTS = 16


def rtol_of(scheme):
    """An activation's last bit may round to another int8."""
    return 1e-5 if SCHEMES[scheme].activations is None else 1e-4


def overrides(scheme):
    size = GROUPS.get(scheme)
    return [f"quantizer.scheme={scheme}", *([f"quantizer.group_size={size}"] if size else [])]


@pytest.fixture(scope="module")
def expected(held_out):
    """Scheme -> (scored tokens, NLL) of the first documents; None for no quantisation."""
    transformers = pytest.importorskip("transformers")
    tokenizer = hf_tokenizer(str(STUDENT))
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:DOCUMENTS]]
    windows = []
    for text in texts:
        windows += chunks(tokenizer.encode(text, False, False), 200, tokenizer.bos_id)

    def of(scheme):
        model = transformers.AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
        if scheme is not None:
            ao.quantize_(model.model.layers, CONFIGS[scheme]())
        return oracle(lambda tokens: model(tokens).logits, windows)

    return {scheme: of(scheme) for scheme in (None, *SCHEMES)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_number_of_a_plain_loop(run_recipe, expected, scheme):
    args = "protocol.max_seq_len=200", f"max_documents={DOCUMENTS}", "verify.windows=3"
    code, out, err = run_recipe("tiny_ppl_eval", *overrides(scheme), *args)
    assert code == 0, err
    with open("out/tiny_ppl_eval/results.json") as file:
        content = json.load(file)
    count, nll = expected[scheme]
    assert content["counts"]["scored_tokens"] == count
    assert content["metrics"]["nll_nats_sum"] == pytest.approx(nll, rel=rtol_of(scheme))
    assert nll != pytest.approx(expected[None][1], rel=3 * rtol_of(scheme))  # it can fail
    found = content["quantization"]
    assert (found["scheme"], found["group_size"]) == (scheme, GROUPS.get(scheme))
    assert (found["linear_layers"], found["quantized_linear_layers"]) == (
        21,
        21,
    )  # the head is tied
    assert content["weights"]["quantized_linear_layers"] == 21
    assert 0.4 < found["largest_error_in_steps"] <= 1
    matrices = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160)
    assert found["bytes_before"] == 4 * (matrices + 509 * 64 + 7 * 64)
    assert found["bytes_after"] < found["bytes_before"] - 2.5 * matrices
    assert f"quantised {scheme}" in " ".join(out.split())
    assert content["verify"]["method"].endswith("(not transformers: the weights are quantised)")


def nll_on(rank, folder, mesh, world_size, options):
    result = on_mesh(folder, mesh, world_size, *options)
    return result.summary.total.num_scored, result.summary.total.nll_nats_sum


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 1, 2)],
    ids=["dp_shard=2", "cp=2", "tp=2", "dp_shard=2 x tp=2"],
)
def test_the_same_number_from_shards(expected, held_out, mesh, scheme):
    size = mesh[1] * mesh[2] * mesh[3]
    groups = GROUPS.get(scheme)
    if mesh[3] == 2 and groups:  # 160 features are no 2 x n groups of 32
        pytest.skip("groups of the student straddle the cut: see the teacher's test")
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200"
    options += (f"max_documents={DOCUMENTS}", *overrides(scheme))
    for count, nll in run_on_ranks(size, nll_on, STUDENT, mesh, size, options):
        assert count == expected[scheme][0]
        assert nll == pytest.approx(expected[scheme][1], rel=rtol_of(scheme))


def with_scales_of_each_rank(rank, *args):
    """The fault: a token's activations are quantised by the scale of this rank's features."""

    def alone(self, input):
        pair = torch.stack([input.amax(dim=-1), input.amin(dim=-1)], dim=-1)
        width = self.quantizer.group_size or 2
        return torch.cat([input, torch.nn.functional.pad(pair, (0, width - 2))], dim=-1)

    linear.QuantizedLinear._with_extremes = alone
    return nll_on(rank, *args)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensor_parallelism(held_out, scheme):
    """The teacher, whose groups of 32 can be shared by two ranks, against itself in one process;
    and with activations that each rank quantises by its own part of a token."""
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=8"
    options += tuple(overrides(scheme))
    (alone,) = run_on_ranks(1, nll_on, TEACHER, (1, 1, 1, 1), 1, options)
    args = TEACHER, (1, 1, 1, 2), 2, options
    for count, nll in run_on_ranks(2, nll_on, *args):
        assert count == alone[0]
        assert nll == pytest.approx(alone[1], rel=rtol_of(scheme))
    if SCHEMES[scheme].activations is not None:
        for _, nll in run_on_ranks(2, with_scales_of_each_rank, *args):
            assert nll != pytest.approx(alone[1], rel=rtol_of(scheme))


def test_layers_that_a_group_does_not_divide_are_left_out(run_recipe):
    """64 input features, and 160 in the last matrix of the feed-forward."""
    args = "quantizer.scheme=int4_weight_only", "quantizer.group_size=64", "max_documents=3"
    code, _, err = run_recipe("tiny_ppl_eval", *args)
    assert code == 0, err
    with open("out/tiny_ppl_eval/results.json") as file:
        found = json.load(file)["quantization"]
    assert found["quantized_linear_layers"] == 18
    (reason,) = found["left_out"]
    assert reason == "160 input features are no multiple of 64"
    assert found["left_out"][reason] == [f"layers.{n}.mlp.w2" for n in range(3)]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["quantizer.scheme=int9"], "quantizer.scheme is 'int9', but it is one of"),
        (
            ["quantizer.scheme=int4_weight_only", "quantizer.group_size=48"],
            "quantizer.group_size is 48, but no layer can be quantised: 64 input features are no",
        ),
        (["quantizer.schema=int8_dynamic"], "unknown config key quantizer.schema"),
    ],
)
def test_what_is_refused(run_recipe, args, sentence):
    code, _, err = run_recipe("tiny_ppl_eval", *args)
    assert code == 1
    assert sentence in err


def test_check_knows_the_bytes(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = "check --config tiny_teacher_ppl_eval quantizer.scheme=int8_weight_only"
    monkeypatch.setattr("sys.argv", ["ppl-eval", *args.split()])
    cli.main()
    teacher = load_file(shipped.embedded_path("tiny_teacher") / "model.safetensors")
    count = sum(tensor.numel() for tensor in teacher.values())
    said = f"{count:,} parameters, 1.4 MiB in fp32 and int8_weight_only"
    assert said in capsys.readouterr().out


def test_groups_that_straddle_a_cut_are_refused():
    """160 input features of the student's last matrix are five groups of 32."""
    options = "quantizer.scheme=int4_weight_only", "quantizer.group_size=32", "parallel.tp=2"
    with pytest.raises(UserError, match=r"mlp.w2 has 160 input features in groups of 32, which 2"):
        prepared(STUDENT, (1, 1, 1, 2), *options, "dataset.data_files=unused")
