"""Adapters by torchtune and PEFT give the logits that their own libraries compute."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapters import (
    LORA,
    TOKENS,
    distance,
    edit,
    loaded,
    logits,
    lora_node,
    prepared,
    randomise,
    without_torchao,
    write_base,
    write_peft,
)
from helpers import peer
from safetensors.torch import load_file, save_file
from torch import nn
from torchtune.models import qwen2
from torchtune.modules.peft import DoRALinear, get_adapter_state_dict, get_merged_lora_ckpt
from torchtune.training import FullModelHFCheckpointer

from ppl_eval import UserError, components
from ppl_eval.adapter.check import install, strip
from ppl_eval.adapter.merge import LowRank, merged_shard
from ppl_eval.checkpoint.weight_files import find_adapter
from ppl_eval.model.torchtune_decoder import TorchtuneDecoder
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.parallel.tensor import check_heads, split_axes

TIED = "SmolLM2 (llama, tied, rope_theta 100000)"
SCALED = "llama3_2 (tied, scaled rope)"
QWEN = "qwen2_5 (biases, untied)"
GEMMA2 = "gemma2 (caps 2 and 4, window of 11)"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PHI = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
CLOSE = 1e-5
"""Of the spread of the logits. Without an adapter we are 3e-6 from transformers: fp32 in another
order. An adapter whose rows of q are in the wrong order moves them by more than 0.1."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Family -> (``model`` section, ``checkpointer`` section) of its checkpoint."""
    found = {}

    def base(name):
        if name not in found:
            found[name] = write_base(name, tmp_path_factory.mktemp("base"))
        node, checkpointer = found[name]
        return dict(node), dict(checkpointer)

    return base


def by_torchtune(node, checkpointer, folder, **changes):
    """torchtune's lora_* model with adapters that matter, and what its checkpointer saves."""
    model = components.build(lora_node(node, **changes), "model")
    base = Path(checkpointer["checkpoint_dir"])
    theirs = FullModelHFCheckpointer(
        base, ["model.safetensors"], checkpointer["model_type"], folder, safe_serialization=True
    )
    model.load_state_dict(theirs.load_checkpoint()["model"], strict=False)
    for module in model.modules():
        if isinstance(module, DoRALinear):
            module.initialize_dora_magnitude()
    randomise(model)
    names = sorted({n.split(".")[-3] for n in model.state_dict() if n.endswith("lora_a.weight")})
    settings = {"r": 4, "lora_alpha": 10, "target_modules": names, "peft_type": "LORA"}
    state = {"adapter": get_adapter_state_dict(model.state_dict()), "adapter_config": settings}
    theirs.save_checkpoint(state, epoch=0, intermediate_checkpoint=False, adapter_only=True)
    return model.eval(), Path(folder) / "epoch_0"


def merged_by_torchtune(model, node):
    plain = components.build(node, "model")
    plain.load_state_dict(get_merged_lora_ckpt(model.state_dict(), rank=4, alpha=10))
    return plain.eval()


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ["llama2", TIED, QWEN])
def test_by_torchtune(bases, tmp_path, name, use_dora):
    """Its forward, its merged weights, and ours of both of its files, merged and not."""
    node, checkpointer = bases(name)
    output = {} if name == TIED else {"apply_lora_to_output": True}
    theirs, folder = by_torchtune(node, checkpointer, tmp_path, use_dora=use_dora, **output)
    expected = logits(theirs)
    merged = logits(merged_by_torchtune(theirs, node))
    biased = use_dora and name == QWEN
    if biased:  # its forward scales the bias as well, and nothing else does
        assert distance(merged, expected) > 0.01
    else:
        assert distance(merged, expected) < CLOSE
    assert distance(logits(loaded(node, checkpointer)[0]), merged) > 1
    lora = lora_node(node, use_dora=use_dora, **output)
    only_peft = tmp_path / "peft"
    shutil.copytree(folder, only_peft)
    (only_peft / "adapter_model.pt").unlink()
    for section, where, merge in (
        (lora, folder, True),
        (lora, folder, False),
        (node, only_peft, True),
        (lora, only_peft, False),
    ):
        model, adapter = loaded(section, checkpointer, where, merge=merge)
        assert distance(logits(model), merged) < CLOSE
        assert any(isinstance(m, AdaptedLinear) for m in model.modules()) is not merge
        assert [path.suffix for path in adapter.files] == [
            ".pt" if where == folder else ".safetensors",
            ".json",
        ]
        assert ("bias of 9 matrices scaled" in "".join(adapter.warnings)) is biased
        assert len(adapter.warnings) == biased


def test_torchtunes_export_of_qwen2_is_not_what_it_trained(bases, tmp_path):
    """Why such a file is not read as PEFT reads it: q and k are permuted as if for Llama."""
    from families import reference

    node, checkpointer = bases(QWEN)
    theirs, folder = by_torchtune(node, checkpointer, tmp_path)
    with without_torchao():
        misread = peer("peft").PeftModel.from_pretrained(reference(QWEN), folder).eval()
    assert distance(logits(misread), logits(theirs)) > 0.1
    (folder / "adapter_model.pt").unlink()
    assert distance(logits(loaded(node, checkpointer, folder)[0]), logits(theirs)) < CLOSE


def test_torchtunes_names_in_any_file(bases, tmp_path):
    """The names tell the layout; a lora_* builder stands in for adapter_config.json."""
    node, checkpointer = bases("llama2")
    theirs, folder = by_torchtune(node, checkpointer, tmp_path)
    state = torch.load(folder / "adapter_model.pt")
    lora = lora_node(node)
    for name in ("adapter_model.bin", "adapter_3.pt", "adapter_model.safetensors"):
        other = tmp_path / name
        other.mkdir()
        save_file(state, other / name) if "safe" in name else torch.save(state, other / name)
        if name == "adapter_3.pt":
            torch.save({}, other / "adapter_2.pt")
        assert find_adapter(other) == other / name
        model, adapter = loaded(lora, checkpointer, other)
        assert adapter.files == (other / name,)
        assert distance(logits(model), logits(theirs)) < CLOSE
        with pytest.raises(UserError, match="has no adapter_config.json, which gives alpha: add"):
            prepared(node, checkpointer, other)


PEFT_CASES = [
    ("llama2", {"target_modules": [*LINEARS, "lm_head"]}),
    ("llama2", {"target_modules": [*LINEARS, "lm_head"], "use_dora": True}),
    ("llama2", {"target_modules": "all-linear", "use_rslora": True}),
    (SCALED, {"target_modules": LINEARS, "use_dora": True, "use_rslora": True}),
    (QWEN, {"target_modules": LINEARS}),
    (QWEN, {"target_modules": [*LINEARS, "lm_head"], "use_dora": True}),
    (
        QWEN,
        {
            "target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj", "down_proj"],
            "layers_to_transform": [0, 2],
            "rank_pattern": {"down_proj": 3, "layers.0.*q_proj": 2},
            "alpha_pattern": {"^model.layers.2.self_attn.q_proj": 5},
        },
    ),
    ("phi3", {"target_modules": PHI, "rank_pattern": {"qkv_proj": 2}}),
    ("phi3", {"target_modules": [*PHI, "lm_head"], "use_dora": True}),
    ("gemma", {"target_modules": LINEARS, "use_dora": True}),
    (GEMMA2, {"target_modules": ["q_proj", "k_proj", "gate_proj"]}),
]


@pytest.mark.parametrize(("name", "settings"), PEFT_CASES)
def test_by_peft(bases, tmp_path, name, settings):
    node, checkpointer = bases(name)
    theirs = write_peft(name, tmp_path, **settings)
    expected = logits(theirs)
    with theirs.disable_adapter():
        assert distance(logits(theirs), expected) > 0.5
    for merge in (True, False):
        model, adapter = loaded(node, checkpointer, tmp_path, merge=merge)
        assert distance(logits(model), expected) < CLOSE
        assert adapter.warnings == ()
        assert type(model.output) is not AdaptedLinear


def test_by_an_old_peft(bases, tmp_path):
    """Before DoRA its settings had no use_dora, as torchtune's have none; rows are in its order."""
    theirs = write_peft(QWEN, tmp_path, target_modules=LINEARS)
    edit(tmp_path, use_dora=None)
    model, _ = loaded(*bases(QWEN), tmp_path)
    assert distance(logits(model), logits(theirs)) < CLOSE


def test_peft_on_torchtunes_weights(bases, tmp_path):
    """The adapter's layout is its own: the checkpoint may have another, and no config.json."""
    node, checkpointer = bases("llama2")
    base, _ = loaded(node, checkpointer)
    torch.save(base.state_dict(), tmp_path / "model.pt")
    section = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(tmp_path),
        "checkpoint_files": ["model.pt"],
        "model_type": "LLAMA3",
        "output_dir": None,
    }
    theirs = write_peft("llama2", tmp_path / "adapter", target_modules=LINEARS, use_dora=True)
    model, _ = loaded(node, section, tmp_path / "adapter")
    assert distance(logits(model), logits(theirs)) < CLOSE


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_merged_weights_are_rounded_once(bases, tmp_path, dtype, use_dora):
    """Against the formula, with NumPy's float64."""
    node, checkpointer = bases("llama2")
    _, folder = by_torchtune(node, checkpointer, tmp_path, use_dora=use_dora)
    base, _ = loaded(node, checkpointer, dtype=torch.float32)
    model, _ = loaded(node, checkpointer, folder, dtype=dtype)
    state = {k: t.double().numpy() for k, t in torch.load(folder / "adapter_model.pt").items()}
    for name in ("layers.0.attn.k_proj", "layers.2.mlp.w2"):
        truth = base.get_submodule(name).weight.detach().double().numpy().copy()
        truth += 2.5 * state[f"{name}.lora_b.weight"] @ state[f"{name}.lora_a.weight"]
        if use_dora:
            norm = (truth**2).sum(axis=1) ** 0.5
            truth *= (state[f"{name}.magnitude"] / norm)[:, None]
        found = model.get_submodule(name).weight.detach()
        assert found.dtype == dtype
        if dtype == torch.bfloat16:
            assert torch.equal(found, torch.from_numpy(truth).to(dtype))
        else:
            assert float((found - torch.from_numpy(truth)).abs().max()) < 1e-7


def test_a_distributed_checkpoint(bases, tmp_path):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    node, checkpointer = bases(QWEN)
    base, _ = loaded(node, checkpointer)
    save(base.state_dict(), storage_writer=FileSystemWriter(tmp_path / "dist"), no_dist=True)
    section = {
        "_component_": "torchtune.training.DistributedCheckpointer",
        "checkpoint_dir": str(tmp_path / "dist"),
        "output_dir": None,
    }
    _, lora = by_torchtune(node, checkpointer, tmp_path / "lora")
    expected, _ = loaded(node, checkpointer, lora, dtype=torch.bfloat16)
    for merge in (True, False):
        model, _ = loaded(node, section, lora, merge=merge)
        assert distance(logits(model), logits(loaded(node, checkpointer, lora)[0])) < CLOSE
    model, _ = loaded(node, section, lora, dtype=torch.bfloat16)  # stored in fp32: rounded once
    for key, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(key))
    _, dora = by_torchtune(node, checkpointer, tmp_path / "dora", use_dora=True)
    with pytest.raises(UserError, match=r"the adapter is DoRA \(21 matrices\), whose norms need"):
        prepared(node, section, dora)


def test_a_layer_of_its_own():
    """y = s * (W x + B A x) + bias: the bias is neither scaled nor added twice."""
    layer = AdaptedLinear(
        5, 3, 2, bias=True, is_dora=True, device=torch.device("cpu"), dtype=torch.float64
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(4, 5, dtype=torch.float64)
    weight = layer.weight + layer.lora_b.weight @ layer.lora_a.weight
    torch.testing.assert_close(layer(x), x @ weight.T * layer.dora_scale + layer.bias)
    half = AdaptedLinear(
        5, 3, 2, bias=True, is_dora=True, device=torch.device("cpu"), dtype=torch.bfloat16
    )
    assert half.dora_scale.dtype == torch.float32
    half.load_state_dict(layer.state_dict())
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_blocks_of_rows():
    """More rows than are merged at a time."""
    torch.manual_seed(0)
    full, a, b = torch.randn(2500, 7), torch.randn(3, 7), torch.randn(2500, 3)
    update = LowRank(a, b, torch.rand(2500))
    slot, cpu = torch.empty(2500, 7, device="meta"), torch.device("cpu")
    sums = full.double() + b.double() @ a.double()
    truth = sums / sums.norm(dim=1, keepdim=True) * update.magnitude.unsqueeze(1)
    torch.testing.assert_close(merged_shard(full, update, slot, cpu), truth.float())
    found = merged_shard(full, LowRank(a, b, None), slot, cpu)
    torch.testing.assert_close(found, sums.float())


def test_a_merged_number_does_not_depend_on_the_cut():
    """In fp32 it does: the product takes another kernel for another shape."""
    torch.manual_seed(0)
    full, a, b = torch.randn(503, 611), torch.randn(16, 611), torch.randn(503, 16)

    def merged(rows, columns):
        slot = torch.empty(full[rows, columns].shape, device="meta")
        update = LowRank(a[:, columns], b[rows], None)
        return merged_shard(full[rows, columns], update, slot, torch.device("cpu"))

    whole = merged(slice(None), slice(None))
    for size in (1, 7, 171, 300):
        for i in range(0, 503, size):
            part = slice(i, i + size)
            assert torch.equal(merged(part, slice(None)), whole[part])
            assert torch.equal(merged(slice(None), part), whole[:, part])


def test_builders(bases):
    node, _ = bases("llama2")
    with torch.device("meta"):
        plain = components.build(node, "model")
        adapted = components.build(lora_node(node, use_dora=True, lora_alpha=7), "model")
    assert strip(plain) == {}
    slots = strip(adapted)
    assert len(slots) == 3 * 7
    slot = slots["layers.2.mlp.w3"]
    assert (slot.rank, slot.is_dora, slot.alpha) == (4, True, pytest.approx(7))
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in adapted.named_parameters()} == shapes
    assert {type(m) for m in adapted.modules() if "Linear" in type(m).__name__} == {nn.Linear}
    quantised = qwen2.lora_qwen2(
        ["q_proj"],
        vocab_size=11,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        embed_dim=128,
        intermediate_dim=128,
        max_seq_len=8,
        lora_rank=2,
        lora_alpha=2,
        quantize_base=True,
    )
    with pytest.raises(UserError, match=r"quantises layers.0.attn.q_proj \(quantize_base\), but"):
        strip(quantised)


@pytest.fixture(scope="module")
def saved(bases, tmp_path_factory):
    """An adapter by each library, to be damaged."""
    node, checkpointer = bases("llama2")
    peft, tune = tmp_path_factory.mktemp("peft"), tmp_path_factory.mktemp("tune")
    write_peft("llama2", peft, target_modules=["q_proj", "lm_head"])
    _, written = by_torchtune(node, checkpointer, tune)
    (written / "adapter_model.safetensors").unlink()
    return {"peft": peft, "tune": written}


@pytest.fixture
def damage(saved, tmp_path):
    """Copies an adapter and edits its tensors and settings."""

    def copy(kind, tensors=lambda state: None, **settings):
        folder = tmp_path / f"{kind}_{len(list(tmp_path.iterdir()))}"
        shutil.copytree(saved[kind], folder)
        if kind == "peft":
            path = folder / "adapter_model.safetensors"
            state = load_file(path)
            tensors(state)
            save_file(state, path)
        else:
            path = folder / "adapter_model.pt"
            state = torch.load(path)
            tensors(state)
            torch.save(state, path)
        if settings:
            edit(folder, **settings)
        return folder

    return copy


Q = "base_model.model.model.layers.1.self_attn.q_proj"


def change(key, function):
    def apply(state):
        state[key] = function(state[key])

    return apply


@pytest.mark.parametrize(
    ("kind", "tensors", "settings", "message"),
    [
        ("peft", lambda s: s.pop(f"{Q}.lora_B.weight"), {}, "q_proj has no lora_B in .*incomplete"),
        ("peft", lambda s: s.pop(f"{Q}.lora_A.weight"), {}, "q_proj has no lora_A in .*incomplete"),
        (
            "peft",
            lambda s: [s.pop(k) for k in list(s) if k.startswith(Q)],
            {},
            "lacks 1 of the matrices that target_modules in .*: layers.1.attn.q_proj$",
        ),
        (
            "peft",
            lambda s: s.update({f"{Q.replace('1', n)}.lora_A.bias": torch.ones(4) for n in "012"}),
            {},
            "holds 3 tensors that are no LoRA or DoRA matrices .*: base_model",
        ),
        (
            "peft",
            lambda s: s.update(
                {f"{Q}{n}.lora_{x}.weight": torch.ones(4, 4) for n in range(4) for x in "AB"}
            ),
            {},
            "holds 8 tensors .*q_proj0.lora_A.weight, .* and 3 more$",
        ),
        (
            "tune",
            lambda s: s.update({f"some.lora_{x}.weight": torch.ones(4, 4) for x in "ab"}),
            {},
            "adapts 1 modules that the model does not have: some$",
        ),
        (
            "tune",
            change("layers.1.attn.v_proj.lora_b.weight", lambda t: t[:-1]),
            {},
            r"for a layers.1.attn.v_proj of \(15, 48\), but the model's is \(16, 48\)",
        ),
        (
            "peft",
            change(f"{Q}.lora_B.weight", lambda t: t[:-2].clone()),
            {},
            r"q_proj.weight is \(46, 4\) in the adapter, which does not go with the heads",
        ),
        (
            "peft",
            change(f"{Q}.lora_A.weight", lambda t: t[:3].clone()),
            {},
            r"lora_A of .*q_proj is \(3, 48\) and lora_B \(48, 4\) in",
        ),
        (
            "peft",
            change(f"{Q}.lora_A.weight", lambda t: t * float("nan")),
            {},
            "q_proj.lora_A.weight in .* holds NaN or infinite",
        ),
        (
            "peft",
            change(f"{Q}.lora_A.weight", lambda t: t.to(torch.int8)),
            {},
            "q_proj.lora_A.weight is int8 in .* quantised adapters",
        ),
        (
            "tune",
            change("layers.1.attn.v_proj.lora_b.weight", lambda t: t.to(torch.float8_e4m3fn)),
            {},
            "lora_b.weight is float8_e4m3fn in .* quantised adapters",
        ),
        (
            "peft",
            lambda s: s.update(
                {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 48)}
            ),
            {},
            r"adapts the embedding \(.*lora_embedding_A\), which is not evaluated",
        ),
        ("peft", lambda s: s.clear(), {}, "holds no tensors"),
        ("peft", None, {"r": 8}, "has r=8 for lm_head, but lora_A in .* has 4 rows"),
        ("peft", None, {"r": None}, "has r None, but it is a number"),
        ("peft", None, {"lora_alpha": "16"}, "has lora_alpha '16', but it is a number"),
        ("peft", None, {"rank_pattern": {"lm_head": 2}}, "has r=2 for lm_head, but lora_A"),
        (
            "peft",
            None,
            {"rank_pattern": []},
            r"has rank_pattern \[\], but it maps names of modules",
        ),
        ("peft", None, {"alpha_pattern": False}, "has alpha_pattern False, but it maps names of"),
        ("peft", None, {"peft_type": "LOHA"}, "has peft_type 'LOHA', but only LORA"),
        ("peft", None, {"bias": "all"}, "has bias 'all', but trained biases"),
        ("peft", None, {"modules_to_save": ["lm_head"]}, "sets modules_to_save, but only plain"),
        ("peft", None, {"kasa_config": {"beta": 1}, "lora_bias": True}, "sets kasa_config, lora_b"),
        ("peft", None, {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4', but it changed"),
        ("peft", None, {"use_dora": True}, "is true, but .* has no magnitude for output"),
        (
            "peft",
            lambda s: s.update({f"{Q}.lora_magnitude_vector": torch.ones(48)}),
            {},
            "use_dora in adapter_config.json is false, but .* has a magnitude for layers.1",
        ),
        (
            "tune",
            lambda s: s.update({"layers.0.attn.q_proj.magnitude": torch.ones(47)}),
            {},
            r"the magnitude of layers.0.attn.q_proj is \(47,\) in .* lora_B has 48 rows",
        ),
        (
            "tune",
            lambda s: s.update({"layers.0.attn.q_proj.magnitude": torch.ones(48)}),
            {},
            "has no DoRA magnitude for 20 of 21 matrices, and one for the others: layers.0",
        ),
        (
            "peft",
            change("base_model.model.lm_head.base_layer.weight", lambda t: t[:-1].clone()),
            {},
            r"holds a output.weight of \(520, 48\), but in the model it is \(521, 48\)",
        ),
    ],
)
def test_what_is_refused(bases, damage, kind, tensors, settings, message):
    folder = damage(kind, tensors or (lambda state: None), **settings)
    with pytest.raises(UserError, match=message) as error:
        prepared(*bases("llama2"), folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"lora_alpha": 20}, {}, "lora_rank=4 and lora_alpha=20 for .* rank 4 and alpha 10"),
        ({"lora_rank": 8}, {}, "lora_rank=8 and lora_alpha=10 for .* rank 4 and alpha 10"),
        ({}, {"lora_alpha": 32}, "lora_rank=4 and lora_alpha=10 for .* rank 4 and alpha 32"),
        ({"use_dora": True}, {}, "model.use_dora is true, but .* has no magnitude"),
        ({"apply_lora_to_mlp": False}, {}, "adapts 9 modules that the lora_. builder does not"),
        ({"apply_lora_to_output": True}, {}, "lacks 1 of the matrices .* builder asks for: output"),
    ],
)
def test_a_builder_that_does_not_fit_the_adapter_is_refused(
    bases, damage, changes, settings, message
):
    node, checkpointer = bases("llama2")
    with pytest.raises(UserError, match=message):
        prepared(lora_node(node, **changes), checkpointer, damage("tune", **settings))


def test_base_weights_beside_the_adapter(bases, damage):
    """PEFT stores the head where it is adapted: it must be the checkpoint's."""
    changed = damage("peft", change("base_model.model.lm_head.base_layer.weight", lambda t: t * 2))
    with pytest.raises(UserError, match=r"comes with a output.weight that is not the checkpoint's"):
        loaded(*bases("llama2"), changed)


def test_a_tied_head(bases, saved):
    with pytest.raises(UserError, match="adapts the head, which the model ties to its embedding"):
        prepared(*bases(TIED), saved["peft"])


def test_folders(bases, tmp_path, saved):
    sections = bases("llama2")
    with pytest.raises(UserError, match="adapter.dir is /nowhere, but there is no such folder"):
        prepared(*sections, "/nowhere")
    with pytest.raises(UserError, match="has no adapter: neither adapter_model.pt"):
        prepared(*sections, tmp_path)
    assert find_adapter(tmp_path) is None
    with pytest.raises(UserError, match=r"has no adapter: .*did you mean .*/epoch_0\?"):
        prepared(*sections, saved["tune"].parent)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 99)
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 10}')
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        prepared(*sections, tmp_path)
    shutil.copy(saved["peft"] / "adapter_model.safetensors", tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a list"):
        prepared(*sections, tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="has no adapter_config.json, which gives alpha"):
        prepared(*sections, tmp_path)
    node, checkpointer = sections
    with pytest.raises(UserError, match="PEFT's layout and no adapter_config.json, which tells"):
        prepared(lora_node(node), checkpointer, tmp_path)


def test_an_adapter_that_changes_nothing(bases, damage):
    def zero(state):
        for key in state:
            if "lora_b" in key:
                state[key].zero_()

    folder = damage("tune", zero)
    node, checkpointer = bases("llama2")
    model, adapter = loaded(node, checkpointer, folder)
    assert len(adapter.warnings) == 1
    assert "all lora_B of the adapter in" in adapter.warnings[0]
    assert torch.equal(model(TOKENS), loaded(node, checkpointer)[0](TOKENS))


def test_patterns_and_layers_are_not_checked_too_far(bases, damage):
    """target_modules as a pattern, or with exclusions, does not say which matrices there are."""
    sections = bases("llama2")
    for settings in (
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "v_proj", "lm_head"], "exclude_modules": ["v_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 7},
    ):
        prepared(*sections, damage("peft", **settings))
    with pytest.raises(UserError, match=r"lacks 3 of .*layers.0.attn.v_proj, layers.1.attn.v_proj"):
        prepared(*sections, damage("peft", target_modules=["q_proj", "v_proj"]))


def test_unmerged_layers_on_meta(bases, saved):
    node, checkpointer = bases("llama2")
    model, _, adapter = prepared(node, checkpointer, saved["tune"])
    before = dict(model.named_parameters())
    install(model, adapter)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    added = set(after) - set(before)
    assert len(added) == 2 * len(adapter.updates)
    assert all(after[name].is_meta for name in added)
    assert json.loads((saved["tune"] / "adapter_config.json").read_text())["r"] == LORA["lora_rank"]


def test_how_tensor_parallelism_splits_them(bases, saved):
    node, checkpointer = bases("llama2")
    model, *_ = prepared(node, checkpointer, saved["tune"], merge=False)
    decoder = TorchtuneDecoder(model)
    check_heads(decoder, 2)
    axes = split_axes(decoder)
    q, w2 = "layers.0.attn.q_proj", "layers.0.mlp.w2"
    assert {name: axes.get(name) for name, _ in model.named_parameters() if name.startswith(q)} == {
        f"{q}.weight": 0,
        f"{q}.lora_a.weight": None,
        f"{q}.lora_b.weight": 0,
    }
    assert {
        name: axes.get(name) for name, _ in model.named_parameters() if name.startswith(w2)
    } == {
        f"{w2}.weight": 1,
        f"{w2}.lora_a.weight": 1,
        f"{w2}.lora_b.weight": None,
    }

    class Other(AdaptedLinear):
        pass

    model.layers[0].mlp.w2.__class__ = Other
    with pytest.raises(UserError, match="how to split layers.0.mlp.w2.weight of a Other is not"):
        check_heads(decoder, 2)
