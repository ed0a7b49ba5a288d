"""Quantised models through the recipe, against a plain loop over transformers' model that torchao
quantised: in fp32, on the embedded student, with groups of 32."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dist_checkpoint
from helpers import compared, held_out_windows, in_float64, oracle, peer
from meshes import on_mesh, prepared
from ranks import require, run_on_ranks
from safetensors.torch import load_file
from torch import nn
from torchao import quantization as ao
from torchao.dtypes.nf4tensor import to_nf4
from torchao.quantization.quantize_.workflows import Int4PackingFormat
from torchtune.training import quantization as tune

from ppl_eval import cli, shipped
from ppl_eval.checkpoint import tensor_files
from ppl_eval.errors import UserError
from ppl_eval.quantize import linear
from ppl_eval.quantize.linear import quantized_layers
from ppl_eval.quantize.schemes import SCHEMES

STUDENT, TEACHER = map(shipped.embedded_path, ("tiny_student", "tiny_teacher"))
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
GROUPS = {name: 32 for name in CONFIGS if SCHEMES[name].group_size}
DOCUMENTS = 16


def with_nf4(model):
    """torchtune's QLoRA base: NF4 where a matrix has whole blocks of scales. (The scales of a block
    depend on its neighbours, and these on torchtune's order of rows.)"""
    for module in model.layers.modules():
        if isinstance(module, nn.Linear) and module.weight.numel() % (64 * 256) == 0:
            module.weight = nn.Parameter(to_nf4(module.weight.data), requires_grad=False)
    return model


def with_fake_quantisation(model):
    """torchtune's model while it trains for int4: head and all."""
    return tune.Int8DynActInt4WeightQATQuantizer(32).prepare(model)


def rtol_of(scheme):
    """An activation's last bit may round to another int8."""
    return 1e-5 if SCHEMES[scheme].activations is None else 1e-4


def overrides(scheme):
    size = GROUPS.get(scheme)
    return [f"quantizer.scheme={scheme}", *([f"quantizer.group_size={size}"] if size else [])]


@pytest.fixture(scope="module")
def expected():
    """Scheme -> (scored tokens, NLL) of the first documents; None for no quantisation."""
    transformers = peer("transformers")
    windows = held_out_windows(STUDENT, DOCUMENTS)

    def of(scheme):
        model = transformers.AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
        if scheme is not None:
            ao.quantize_(model.model.layers, CONFIGS[scheme]())
        return oracle(lambda tokens: model(tokens).logits, windows)

    return {scheme: of(scheme) for scheme in (None, *CONFIGS)}


@pytest.mark.parametrize("scheme", CONFIGS)
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


@pytest.mark.parametrize("scheme", CONFIGS)
@pytest.mark.parametrize(
    "mesh",
    [(1, 2, 1, 1), (1, 4, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 1, 2)],
    ids=["dp_shard=2", "dp_shard=4", "cp=2", "tp=2", "dp_shard=2 x tp=2"],
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


def fidelity_on(rank, folder, mesh, world_size, options):
    opened, real = [], tensor_files._safe_open
    tensor_files._safe_open = lambda path: opened.append(path) or real(path)
    found = on_mesh(folder, mesh, world_size, *options, f"teacher_checkpoint_dir={folder}")
    return found.summary.total.sums, len(opened)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 1, 1)], ids=["one process", "dp_shard=2"])
def test_the_teacher_of_the_same_folder(mesh):
    """KL says what quantisation costs. Headers are read for each model, weights once."""
    models = [
        peer("transformers").AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
        for _ in range(2)
    ]
    ao.quantize_(models[0].model.layers, CONFIGS["int4_weight_only"]())
    pair = [lambda tokens, model=model: model(tokens).logits for model in models]
    expected = compared(*pair, held_out_windows(STUDENT, 8))
    options = "protocol.max_seq_len=200", "max_documents=8", *overrides("int4_weight_only")
    options += (f"dataset.data_files={shipped.embedded_path('tiny_text')}/heldout.jsonl",)
    for found, num_opened in run_on_ranks(mesh[1], fidelity_on, STUDENT, mesh, mesh[1], options):
        for name in ("kl_teacher_student", "js"):
            assert found[name] == pytest.approx(float(expected[name].sum()), rel=1e-4)
        assert num_opened == 3


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 1, 1)], ids=["one process", "dp_shard=2"])
def test_a_distributed_checkpoint(tmp_path, expected, held_out, mesh):
    state = in_float64(STUDENT).float().state_dict()
    dist_checkpoint.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STUDENT / file, tmp_path)
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200"
    options += f"max_documents={DOCUMENTS}", *overrides("int4_weight_only")
    options += ("checkpointer._component_=torchtune.training.DistributedCheckpointer",)
    for found in run_on_ranks(mesh[1], nll_on, tmp_path, mesh, mesh[1], options):
        assert found == (
            expected["int4_weight_only"][0],
            pytest.approx(expected["int4_weight_only"][1], rel=1e-5),
        )


def with_scales_of_each_rank(rank, *args):
    """The fault: a token's activations are quantised by the scale of this rank's features."""

    def alone(self, input):
        pair = torch.stack([input.amax(dim=-1), input.amin(dim=-1)], dim=-1)
        width = self.group_size or 2
        return torch.cat([input, torch.nn.functional.pad(pair, (0, width - 2))], dim=-1)

    linear.QuantizedLinear._with_extremes = alone
    return nll_on(rank, *args)


@pytest.mark.parametrize(
    ("scheme", "size"), [*((scheme, None) for scheme in CONFIGS), *((s, 64) for s in GROUPS)]
)
def test_tensor_parallelism(held_out, scheme, size):
    """The teacher, whose groups of 32 and of 64 (one for each rank) can be shared by two ranks,
    against itself in one process; and with activations that each rank quantises by its own part of
    a token."""
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=8"
    options += tuple(overrides(scheme))
    options += () if size is None else (f"quantizer.group_size={size}",)
    (alone,) = run_on_ranks(1, nll_on, TEACHER, (1, 1, 1, 1), 1, options)
    args = TEACHER, (1, 1, 1, 2), 2, options
    for count, nll in run_on_ranks(2, nll_on, *args):
        assert count == alone[0]
        assert nll == pytest.approx(alone[1], rel=rtol_of(scheme))
    if SCHEMES[scheme].activations is not None:
        for _, nll in run_on_ranks(2, with_scales_of_each_rank, *args):
            assert nll != pytest.approx(alone[1], rel=rtol_of(scheme))


BY_TORCHTUNE = {
    "NF4": (with_nf4, ["quantizer.scheme=nf4"], 30, 1e-6),
    "QAT": (
        with_fake_quantisation,
        [
            "quantizer._component_=torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
            "quantizer.groupsize=32",
        ],
        43,
        1e-4,
    ),
}
"""torchtune's model -> (what it becomes, our config, quantised layers of 43, tolerance)."""


@pytest.mark.parametrize("kind", BY_TORCHTUNE)
def test_the_number_of_torchtunes_model(held_out, kind):
    """NF4, and weights that were trained for int4 and are evaluated as they were trained."""
    change, section, num_layers, rtol = BY_TORCHTUNE[kind]
    windows = held_out_windows(TEACHER, 6)
    plain = oracle(in_float64(TEACHER).float(), windows)
    count, expected = oracle(change(in_float64(TEACHER).float()), windows)
    assert expected != pytest.approx(plain[1], rel=3 * rtol)
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=6"
    options += tuple(section)
    ready = prepared(TEACHER, (1, 1, 1, 1), *options)
    assert len(quantized_layers(ready.student.decoder.model)) == num_layers
    for mesh in ((1, 1, 1, 1), (1, 2, 1, 1), (1, 4, 1, 1), (1, 1, 2, 1)):
        size = mesh[1] * mesh[2]
        for found in run_on_ranks(size, nll_on, TEACHER, mesh, size, options):
            assert found == (count, pytest.approx(expected, rel=rtol))


def test_layers_that_a_group_does_not_divide_are_left_out(run_recipe):
    """64 input features, and 160 in the last matrix of the feed-forward."""
    args = "quantizer.scheme=int4_weight_only", "quantizer.group_size=64", "max_documents=3"
    code, _, err = run_recipe("tiny_ppl_eval", *args)
    assert code == 0, err
    with open("out/tiny_ppl_eval/results.json") as file:
        found = json.load(file)["quantization"]
    assert found["quantized_linear_layers"] == 18
    reason = "160 input features are no multiple of 64"
    assert found["left_out"].keys() == {"embedding", reason}
    assert found["left_out"]["embedding"] == ["tok_embeddings"]
    assert found["left_out"][reason] == [f"layers.{n}.mlp.w2" for n in range(3)]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["quantizer.scheme=int9"], "quantizer.scheme is 'int9', but it is one of"),
        (
            ["quantizer.scheme=int4_weight_only", "quantizer.group_size=48"],
            "with group_size 48, but no layer can be quantised: 64 input features are no multiple",
        ),
        (["quantizer.schema=int8_dynamic"], "unknown config key quantizer.schema"),
        (
            ["quantizer.scheme=float8_dynamic", "device=cpu"],
            "quantizer.scheme is float8_dynamic, which has no kernel on this device: run it on a",
        ),
        (["quantizer.scheme=nf4"], "can be quantised: 64 x 64 weights are no multiple of 256"),
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


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [*CONFIGS, "float8_dynamic"])
@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 1, 1)], ids=["one GPU", "dp_shard=2"])
def test_on_a_gpu(held_out, mesh, scheme):
    """In bf16, for which torchao's kernels on CUDA are made; the loop's logits are bf16, too."""
    require("cuda", mesh[1])
    windows = held_out_windows(TEACHER, 6)
    transformers = peer("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.bfloat16).cuda()
    tiles = Int4PackingFormat.TILE_PACKED_TO_4D
    of_cuda = {
        "float8_dynamic": ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
        "int4_weight_only": ao.Int4WeightOnlyConfig(32, int4_packing_format=tiles),
    }
    ao.quantize_(model.model.layers, of_cuda.get(scheme) or CONFIGS[scheme]())
    count, expected = oracle(lambda tokens: model(tokens.cuda()).logits.cpu(), windows)
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=6"
    args = TEACHER, mesh, mesh[1], (*options, *overrides(scheme), "dtype=bf16")
    for found in run_on_ranks(mesh[1], nll_on, *args, device="cuda"):
        assert found == (count, pytest.approx(expected, rel=5e-3))
