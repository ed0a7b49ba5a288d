"""Checkpoints that torchao or torchtune has quantised, through the recipe and on meshes, against a
plain loop over the model that was saved: in fp32, on the embedded teacher."""

import copy
import json
import shutil

import pytest
import torch
from helpers import held_out_windows, in_float64, oracle, peer
from meshes import on_mesh, prepared
from ranks import run_on_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torchao import quantization as ao
from torchao.dtypes.nf4tensor import to_nf4
from torchao.quantization.quant_primitives import MappingType
from torchtune.training import quantization as tune

from ppl_eval import shipped
from ppl_eval.errors import UserError
from ppl_eval.quantize import linear

TEACHER = shipped.embedded_path("tiny_teacher")
INT4 = {"weight_dtype": torch.int4, "weight_granularity": ao.PerGroup(32)}
GROUPS = {"weight_dtype": torch.int4, "granularity": ao.PerGroup(32)}
BY_TORCHAO = {
    "int8": lambda: ao.Int8WeightOnlyConfig(version=1),
    "int8 v2": lambda: ao.Int8WeightOnlyConfig(version=2),
    "int8 dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=1),
    "int8 dynamic v2": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "8da4w": lambda: ao.Int8DynamicActivationIntxWeightConfig(**INT4),
    "int4": lambda: ao.IntxWeightOnlyConfig(**GROUPS),
    "int4 asymmetric": lambda: ao.IntxWeightOnlyConfig(
        **GROUPS, mapping_type=MappingType.ASYMMETRIC
    ),
    "int4 v1": lambda: ao.IntxWeightOnlyConfig(**GROUPS, version=1),
    "float8": lambda: ao.Float8WeightOnlyConfig(),
    "float8 v1": lambda: ao.Float8WeightOnlyConfig(version=1),
}
"""What torchao makes of the decoder layers, head left out."""
RTOL = {
    **dict.fromkeys(("int8 dynamic", "8da4w", "PTQ", "QAT"), 1e-4),
    # 128 steps for the largest activation: it lies half-way between two integers
    "int8 dynamic v2": 3e-4,
}
"""Where activations are quantised: their last bit may round to another int8."""


def rtol_of(name):
    return RTOL.get(name, 1e-6)


def by_torchtune(name, model):
    """All linear layers, the head too, as torchtune's quantize recipe makes them."""
    if name == "PTQ":
        return tune.Int8DynActInt4WeightQuantizer(32).quantize(model)
    quantizer = tune.Int8DynActInt4WeightQATQuantizer(32)
    return quantizer.convert(quantizer.prepare(model))


def with_nf4(model):
    """torchtune's QLoRA base: NF4 where a matrix has whole blocks of scales."""
    for module in model.layers.modules():
        if isinstance(module, nn.Linear) and module.weight.numel() % (64 * 256) == 0:
            module.weight = nn.Parameter(to_nf4(module.weight.data), requires_grad=False)
    return model


NAMES = (*BY_TORCHAO, "PTQ", "QAT", "NF4")


@pytest.fixture(scope="module")
def windows():
    return held_out_windows(TEACHER, 6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, windows):
    """Name -> (folder, scored tokens, NLL of a plain loop)."""
    found, plain = {}, in_float64(TEACHER).float()
    for name in (None, *NAMES):
        model = copy.deepcopy(plain)
        if name in BY_TORCHAO:
            ao.quantize_(model.layers, BY_TORCHAO[name]())
        elif name == "NF4":
            model = with_nf4(model)
        elif name is not None:
            model = by_torchtune(name, model)
        count, nll = oracle(model, windows)
        folder = tmp_path_factory.mktemp("quantised")
        for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TEACHER / file, folder)
        torch.save(model.state_dict(), folder / "model.pt")
        found[name] = folder, count, nll
    return found


def overrides(held_out):
    return [
        "checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpointer.checkpoint_files=[model.pt]",
        *(f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=6"),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_a_plain_loop(run_recipe, saved, held_out, name):
    folder, count, nll = saved[name]
    args = f"checkpoint_dir={folder}", "dtype=fp32", *overrides(held_out), "verify.windows=2"
    code, out, err = run_recipe("auto_ppl_eval", *args)
    assert code == 0, err
    with open("out/auto_ppl_eval/results.json") as file:
        content = json.load(file)
    rtol = rtol_of(name)
    assert content["counts"]["scored_tokens"] == count
    assert content["metrics"]["nll_nats_sum"] == pytest.approx(nll, rel=rtol)
    assert nll != pytest.approx(saved[None][2], rel=2 * rtol)  # it can fail
    found = content["quantization"]
    with_head = name in ("PTQ", "QAT")
    num_layers = 5 * 6 if name == "NF4" else 7 * 6 + with_head  # k and v are too small for NF4
    assert found["quantized_linear_layers"] == num_layers
    left_out = {"embedding"} if with_head else {"embedding", "not quantised in the checkpoint"}
    assert set(found["left_out"]) == left_out
    assert found["scheme"] is found["largest_error_in_steps"] is None
    assert "quantised in the checkpoint: weights" in " ".join(out.split())
    assert (found["activations"] == "int8") == (name in RTOL)


def nll_on(rank, folder, mesh, world_size, options):
    result = on_mesh(folder, mesh, world_size, *options)
    return result.summary.total.num_scored, result.summary.total.nll_nats_sum


def test_a_folder_with_such_a_file_alone(saved, held_out):
    with pytest.raises(UserError, match=r"if model.pt is torchtune's, set .*TuneCheckpointer"):
        prepared(saved["int4"][0], (1, 1, 1, 1), f"dataset.data_files={held_out}")


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ((1, 2, 1, 1), NAMES),
        ((1, 4, 1, 1), ("8da4w", "QAT", "float8", "NF4")),
        ((1, 1, 2, 1), ("int8", "8da4w", "PTQ", "NF4")),
        ((1, 1, 1, 2), tuple(BY_TORCHAO)),
        ((1, 2, 1, 2), ("int8 dynamic", "8da4w", "int4")),
    ],
    ids=["dp_shard=2", "dp_shard=4", "cp=2", "tp=2", "dp_shard=2 x tp=2"],
)
def test_the_same_number_from_shards(saved, held_out, mesh, names):
    size = mesh[1] * mesh[2] * mesh[3]
    for count, nlls in run_on_ranks(size, nlls_on, saved, mesh, size, names, overrides(held_out)):
        for name, nll in zip(names, nlls, strict=True):
            assert (name, count) == (name, saved[name][1])
            rtol = 1e-3 if name == "int8 dynamic v2" else rtol_of(name)
            assert nll == pytest.approx(saved[name][2], rel=rtol), name


def nlls_on(rank, saved, mesh, world_size, names, options):
    found = [nll_on(rank, saved[name][0], mesh, world_size, options) for name in names]
    assert len({count for count, _ in found}) == 1
    return found[0][0], [nll for _, nll in found]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> a transformers folder that torchao has quantised."""
    transformers, found = peer("transformers"), {}
    for kind in ("int4", "8da4w", "float8"):
        settings = transformers.TorchAoConfig(quant_type=BY_TORCHAO[kind]())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            TEACHER, dtype=torch.float32, quantization_config=settings
        )
        found[kind] = tmp_path_factory.mktemp("transformers")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TEACHER / file, found[kind])
        # several files: the parts of a weight are in different ones
        model.save_pretrained(found[kind], max_shard_size="500KB")
        assert len(list(found[kind].glob("*.safetensors"))) > 2
    return found


def on_meshes(folder, held_out, kind, expected):
    options = f"dataset.data_files={held_out}", "protocol.max_seq_len=200", "max_documents=6"
    for mesh in ((1, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2)):
        size = mesh[1] * mesh[3]
        for count, nll in run_on_ranks(size, nll_on, folder, mesh, size, options):
            assert (count, nll) == (expected[0], pytest.approx(expected[1], rel=rtol_of(kind)))


@pytest.mark.parametrize("kind", ["int4", "8da4w", "float8"])
def test_a_folder_of_transformers(folders, windows, held_out, kind):
    model = peer("transformers").AutoModelForCausalLM.from_pretrained(folders[kind])
    expected = oracle(lambda tokens: model(tokens).logits, windows)
    on_meshes(folders[kind], held_out, kind, expected)


@pytest.mark.parametrize("kind", ["int8", "int8 dynamic"])
def test_a_pickle_of_transformers(tmp_path, windows, held_out, kind):
    """torchao writes these classes into no safetensors."""
    model = peer("transformers").AutoModelForCausalLM.from_pretrained(TEACHER)
    ao.quantize_(model.model.layers, BY_TORCHAO[kind]())
    expected = oracle(lambda tokens: model(tokens).logits, windows)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / file, tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    on_meshes(tmp_path, held_out, kind, expected)


def test_config_json_that_promises_quantised_weights(tmp_path):
    shutil.copytree(TEACHER, tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "torchao"}}
    file.write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="has quantization_config of torchao, but the files name no"
    ):
        prepared(tmp_path / "model", (1, 1, 1, 1), "dataset.data_files=unused")


@pytest.mark.parametrize(
    ("name", "mesh", "args", "sentence"),
    [
        ("int4", (1, 1, 1, 1), ["quantizer.scheme=int8_dynamic"], "42 weights that are quantised"),
        ("int4", (1, 1, 1, 1), ["adapter.dir=lora"], "an adapter is merged into full-precision"),
        ("QAT", (1, 1, 1, 2), [], "the head is quantised to int4 by Intx"),
        ("NF4", (1, 1, 1, 2), [], "q_proj is quantised to nf4 by NF4Tensor, which ranks cannot"),
        ("int4", (1, 1, 1, 1), ["config.json=student"], "checkpoint and model do not match"),
        ("int4", (1, 1, 1, 1), ["checkpointer=hf"], "the names are torchtune's: use torchtune"),
    ],
    ids=["quantizer", "adapter", "head over tp", "NF4 over tp", "another model", "checkpointer"],
)
def test_what_is_refused(saved, held_out, tmp_path, name, mesh, args, sentence):
    options = [*overrides(held_out), *args]
    folder = shutil.copytree(saved[name][0], tmp_path / "model")
    if args == ["config.json=student"]:
        shutil.copy(shipped.embedded_path("tiny_student") / "config.json", folder)
        del options[-1]
    if args == ["checkpointer=hf"]:
        options[-1:] = ["checkpointer._component_=torchtune.training.FullModelHFCheckpointer"]
    if args == ["adapter.dir=lora"]:
        options[-1:] = [f"adapter.dir={tmp_path}"]
    with pytest.raises(UserError, match=sentence):
        prepared(folder, mesh, *options)


class Code:
    """Unpickled, it would run something."""

    def __reduce__(self):
        return print, ("it ran",)


def test_code_in_a_file_does_not_run(saved, held_out, tmp_path, capsys):
    shutil.copytree(saved["int8"][0], tmp_path / "model")
    file = tmp_path / "model/model.pt"
    torch.save(torch.load(file, weights_only=True) | {"more": Code()}, file)
    with pytest.raises(UserError, match="model.pt cannot be loaded with weights_only=True"):
        prepared(tmp_path / "model", (1, 1, 1, 1), *overrides(held_out))
    assert "it ran" not in capsys.readouterr().out


def per_tensor(model):
    ao.quantize_(model.layers, ao.Int8WeightOnlyConfig(version=2, granularity=ao.PerTensor()))


def per_batch(model):
    config = ao.Int8DynamicActivationInt8WeightConfig(version=2, granularity=ao.PerTensor())
    ao.quantize_(model.layers, config)


def packed(model):
    ao.quantize_(model.layers, ao.UIntXWeightOnlyConfig(dtype=torch.uint4, group_size=32))


def with_float8_activations(model):
    for module in model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = linear._float8_dynamic(module.weight.data)
            module.weight = nn.Parameter(weight, requires_grad=False)


def with_its_embedding(model):
    config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerGroup(32))
    ao.quantize_(model, config, lambda module, _: isinstance(module, nn.Embedding))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (per_batch, "not known to take a scale for each"),
        (packed, "weights_only=True"),
        (with_float8_activations, "multiplies in float8, which has no kernel on this device"),
        (
            with_its_embedding,
            "tok_embeddings.weight is quantised .*, but of these only weights of linear",
        ),
    ],
)
def test_classes_that_are_refused(tmp_path, held_out, change, sentence):
    shutil.copytree(TEACHER, tmp_path / "model")
    change(model := in_float64(TEACHER).float())
    torch.save(model.state_dict(), tmp_path / "model/model.pt")
    with pytest.raises(UserError, match=sentence):
        prepared(tmp_path / "model", (1, 1, 1, 1), *overrides(held_out), "device=cpu")


def test_a_scale_of_a_whole_weight(tmp_path, held_out, windows):
    """It has no rows, but FSDP2 can shard it."""
    shutil.copytree(TEACHER, tmp_path / "model")
    per_tensor(model := in_float64(TEACHER).float())
    torch.save(model.state_dict(), tmp_path / "model/model.pt")
    expected = oracle(model, windows)
    args = tmp_path / "model", (1, 2, 1, 1), 2, overrides(held_out)
    for count, nll in run_on_ranks(2, nll_on, *args):
        assert (count, nll) == (expected[0], pytest.approx(expected[1], rel=1e-6))


def plainly_dequantised(weight):
    """(integers - zero points) * scales, in fp32."""
    weight = getattr(weight, "tensor_impl", weight)
    found = (getattr(weight, name, None) for name in ("qdata", "int_data", "float8_data"))
    numbers = next(each for each in found if each is not None).float()
    scale, zero = weight.scale.float(), getattr(weight, "zero_point", None)
    groups = numbers.unflatten(1, (scale.numel() // len(numbers), -1))
    if zero is not None:
        groups = groups - zero.float().reshape(len(numbers), -1, 1)
    return (groups * scale.reshape(len(numbers), -1, 1)).flatten(1)


@pytest.mark.parametrize(
    "name", ["int8", "int8 v2", "int4", "int4 asymmetric", "int4 v1", "float8"]
)
def test_bf16_weights_in_an_fp32_run(tmp_path, windows, held_out, name):
    """Integers and scales stay as they are stored; products are in the run's dtype."""
    model = in_float64(TEACHER).float()
    layers = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    for module in layers:
        module.bfloat16()
    ao.quantize_(model.layers, BY_TORCHAO[name]())
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / file, tmp_path)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for module in layers:
        module.weight = nn.Parameter(plainly_dequantised(module.weight), requires_grad=False)
    count, expected = oracle(model, windows)
    for size in (1, 2):
        args = tmp_path, (1, 1, 1, size), size, overrides(held_out)
        for found in run_on_ranks(size, nll_on, *args):
            assert found == (count, pytest.approx(expected, rel=1e-6))


def rewritten(folder, tmp_path, change):
    """A copy of a folder with one safetensors file, whose tensors and metadata are changed."""
    copied = shutil.copytree(TEACHER, tmp_path / "model")
    tensors, metadata = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata()
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, copied / "model.safetensors", metadata)
    shutil.copy(folder / "config.json", copied)
    return copied


Q_PROJ = "model.layers.0.self_attn.q_proj"


def without_metadata(tensors, metadata):
    metadata.clear()


def without_a_part(tensors, metadata):
    del tensors[f"{Q_PROJ}._weight_scale"]


def with_other_blocks(tensors, metadata):
    metadata[f"{Q_PROJ}.weight"] = metadata[f"{Q_PROJ}.weight"].replace("[1, 32]", "[1, 64]")


def with_a_plain_copy(tensors, metadata):
    tensors[f"{Q_PROJ}.weight"] = torch.zeros(128, 128)


def of_an_unknown_class(tensors, metadata):
    about = metadata[f"{Q_PROJ}.weight"].replace("IntxUnpackedToInt8Tensor", "Int3Tensor")
    metadata[f"{Q_PROJ}.weight"] = about


def test_scales_of_half_the_rows(saved, held_out, tmp_path):
    """torchao's Float8Tensor would read them as scales of two rows each."""
    folder = shutil.copytree(saved["float8"][0], tmp_path / "model")
    state = torch.load(folder / "model.pt", weights_only=True)
    weight = state["layers.0.attn.q_proj.weight"]
    weight.scale = weight.scale[::2].clone()
    torch.save(state, folder / "model.pt")
    with pytest.raises(UserError, match=r"q_proj.weight has scales of shape \(64, 1\), but its b"):
        prepared(folder, (1, 1, 1, 1), *overrides(held_out))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without_metadata, "the metadata of the safetensors is lost"),
        (without_a_part, "are not evaluated"),
        (with_other_blocks, "q_proj.weight cannot be put together from .*Expected scale to have"),
        (with_a_plain_copy, "q_proj.weight is in the checkpoint twice, plain and quantised"),
        (of_an_unknown_class, "q_proj.weight cannot be put together .*Unsupported tensor type"),
    ],
)
def test_safetensors_that_contradict_themselves(folders, tmp_path, change, sentence):
    folder = rewritten(folders["int4"], tmp_path, change)
    with pytest.raises(UserError, match=sentence):
        prepared(folder, (1, 1, 1, 1), f"dataset.data_files={TEACHER}")


def test_int8_weights_that_are_no_qat(saved, tmp_path, held_out):
    """Scales and zeros beside int8 weights of more than four bits."""
    folder = shutil.copytree(saved["QAT"][0], tmp_path / "model")
    state = torch.load(folder / "model.pt", weights_only=True)
    state["layers.0.mlp.w1.weight"][3, 4] = 100
    torch.save(state, folder / "model.pt")
    with pytest.raises(AssertionError, match="beyond int4 .* torchtune's QAT does not write"):
        run_on_ranks(1, nll_on, folder, (1, 1, 1, 1), 1, overrides(held_out))
