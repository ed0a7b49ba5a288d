"""The recipe with a teacher: what it writes and prints, and what it refuses."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import compared, in_float64
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from ppl_eval import UserError, evaluate, shipped
from ppl_eval.data import hf_tokenizer
from ppl_eval.data.protocol import RULES

STUDENT, TEACHER = (shipped.embedded_path(name) for name in ("tiny_student", "tiny_teacher"))
PAIR = (f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={TEACHER}")


@pytest.fixture
def tune(run_recipe, held_out):
    """Run auto_ppl_eval on the held-out texts: (exit code, stdout, stderr)."""
    text = (f"dataset.data_files={held_out}", "max_documents=12", "protocol.max_seq_len=256")

    def run(*args, config="auto_ppl_eval"):
        return run_recipe(config, *text, "dtype=fp32", "output_dir=out", *args)

    return run


def results(folder="out"):
    return json.loads(Path(folder, "results.json").read_text())


def rows(folder="out"):
    return [json.loads(line) for line in Path(folder, "documents.jsonl").read_text().splitlines()]


def copy_of(folder, destination, **config):
    """A checkpoint that may be spoiled, with changes to its config.json."""
    shutil.copytree(folder, destination)
    path = destination / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return destination


def test_both_models_have_the_numbers_that_each_has_alone(tune):
    for name, folder in (("student", STUDENT), ("teacher", TEACHER)):
        assert tune(f"checkpoint_dir={folder}", f"output_dir={name}")[0] == 0
    code, out, err = tune(*PAIR, "save_tokens=true")
    assert code == 0, err
    content, table = results(), rows()
    alone = {name: results(name) for name in ("student", "teacher")}
    assert content["counts"] == alone["student"]["counts"]
    for part, name in ((content, "student"), (content["teacher"], "teacher")):
        assert part["metrics"] == pytest.approx(alone[name]["metrics"], rel=1e-6)
        for key, interval in part["intervals_95"].items():
            assert interval == pytest.approx(alone[name]["intervals_95"][key], rel=1e-6)
        for domain, metrics in part["domains"].items():
            expected = alone[name]["domains"][domain]["metrics"]
            assert metrics["metrics"] == pytest.approx(expected, rel=1e-6)
    assert content["fingerprints"]["teacher"] == alone["teacher"]["fingerprints"]["model"]
    fidelity = content["fidelity"]
    ratio = alone["student"]["metrics"]["token_perplexity"]
    ratio /= alone["teacher"]["metrics"]["token_perplexity"]
    assert fidelity["perplexity_ratio"] == pytest.approx(ratio, rel=1e-7)
    assert math.log(ratio) == pytest.approx(fidelity["ln_perplexity_ratio"], rel=1e-5)
    low, high = fidelity["interval_95"]["ln_perplexity_ratio"]
    assert low < fidelity["ln_perplexity_ratio"] < high
    count = content["counts"]["scored_tokens"]
    kl = math.fsum(row["kl_teacher_student_sum"] for row in table) / count
    assert fidelity["kl_teacher_student_nats"] == pytest.approx(kl, rel=1e-12)
    for row, expected in zip(table, rows("teacher"), strict=True):
        assert row["teacher_nll_nats_sum"] == pytest.approx(expected["nll_nats_sum"], rel=1e-6)
    shown = out.splitlines()
    assert any(line.startswith("its teacher") for line in shown)
    assert any(line.startswith("KL(t||s)") and f"{kl:.5f} nats" in line for line in shown)
    assert any(line.startswith("noise floor") for line in shown)


def test_tokens_of_both_models(tune, held_out):
    import pyarrow.parquet as pq

    assert tune(*PAIR, "save_tokens=true")[0] == 0
    tokens = pq.read_table("out/tokens.parquet").to_pydict()
    section = results()["fidelity"]
    for name, mean in (
        ("kl_teacher_student_nats", section["kl_teacher_student_nats"]),
        ("nll_nats", results()["metrics"]["nll_nats_per_token"]),
        ("teacher_nll_nats", results()["teacher"]["metrics"]["nll_nats_per_token"]),
    ):
        values = [value for value in tokens[name] if value is not None]
        assert len(values) == section["scored_tokens"]
        assert math.fsum(values) / len(values) == pytest.approx(mean, rel=1e-9)
    worst = section["worst_tokens"][0]
    place = next(
        n
        for n in range(len(tokens["document"]))
        if (tokens["document"][n], tokens["position"][n]) == (worst["document"], worst["position"])
    )
    assert tokens["kl_teacher_student_nats"][place] == worst["kl_teacher_student_nats"]
    assert worst["kl_teacher_student_nats"] == section["kl_maximum_nats"]
    row = rows()[worst["document"]]
    assert worst["id"] == row["id"]
    assert worst["token_id"] == tokens["token_id"][place]
    text = next(
        each["text"]
        for each in map(json.loads, held_out.read_text().splitlines())
        if each["id"] == row["id"]
    )
    assert worst["before"] + worst["token"] in text
    assert worst["teacher_top1"] != worst["student_top1"]


def samples():
    """Rows that come as tokens, a third of which do not count."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 500, (n,), generator=generator).tolist() for n in (3, 40, 300)]
    return [{"tokens": row, "mask": [n % 3 == 0 for n in range(len(row))]} for row in ids]


@pytest.mark.parametrize("name", [*RULES, "samples"])
def test_every_protocol(tune, name):
    """Losses as of each model alone."""
    protocol = [f"protocol.name={'document' if name == 'samples' else name}", "max_documents=4"]
    protocol += ["protocol.max_seq_len=48", "max_tokens_per_batch=200"]
    if name == "samples":
        keys = ("source", "data_files", "split", "column", "domain_column")
        protocol += [f"dataset={__name__}.samples", *(f"~dataset.{key}" for key in keys)]
    losses = []
    for folder in (STUDENT, TEACHER):
        code, _, err = tune(f"checkpoint_dir={folder}", *protocol)
        assert code == 0, err
        losses.append([row["nll_nats_sum"] for row in rows()])
    code, _, err = tune(*PAIR, *protocol)
    assert code == 0, err
    table = rows()
    for key, expected in zip(("nll_nats_sum", "teacher_nll_nats_sum"), losses, strict=True):
        assert [row[key] for row in table] == pytest.approx(expected, rel=1e-6)
    assert results()["fidelity"]["kl_teacher_student_nats"] > 0.01


def test_a_model_that_is_its_own_teacher(held_out):
    """The same object; and it is left as it was."""
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:3]]
    model = in_float64(STUDENT).float()
    tokenizer = hf_tokenizer(str(STUDENT))
    found = evaluate(model, tokenizer, texts, max_seq_len=64, teacher=model)
    assert float(found.ledger.column("kl_teacher_student").abs().sum()) == 0
    assert found.teacher.total.nll_nats_sum == found.summary.total.nll_nats_sum
    assert "unembed" not in vars(model)
    assert model(torch.ones(1, 3, dtype=torch.int64)).shape == (1, 3, 509)


KD_SECTIONS = """
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 4
  lora_alpha: 8
  vocab_size: 509
  num_layers: 3
  num_heads: 8
  num_kv_heads: 4
  embed_dim: 64
  intermediate_dim: 160
  max_seq_len: 256
  rope_base: 10000
  scale_factor: 1
  norm_eps: 1e-5
teacher_model:
  _component_: torchtune.models.llama3_2.llama3_2
  vocab_size: 509
  num_layers: 6
  num_heads: 8
  num_kv_heads: 4
  embed_dim: 128
  intermediate_dim: 256
  max_seq_len: 256
  rope_base: 10000
  scale_factor: 1
  norm_eps: 1e-5
  tie_word_embeddings: false
tokenizer:
  _component_: ppl_eval.data.hf_tokenizer
  path: {student}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {student}
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${{output_dir}}
  model_type: LLAMA3
teacher_checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {teacher}
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: null
  output_dir: ${{output_dir}}
  model_type: LLAMA3
"""


def test_sections_of_a_distillation_config_can_be_pasted(tune, tmp_path):
    config = tmp_path / "pasted.yaml"
    text = "dataset: {_component_: ppl_eval.data.text_corpus}\n"
    config.write_text(KD_SECTIONS.format(student=STUDENT, teacher=TEACHER) + text)
    code, _, err = tune(config=config)
    assert code == 0, err
    assert "lora_llama3_2 and no adapter is given: its base is evaluated" in err
    pasted = results()
    assert tune(*PAIR)[0] == 0
    assert pasted["fidelity"] == results()["fidelity"]


def test_limits_on_fidelity(tune):
    code, _, err = tune(*PAIR, "fail_if.fidelity.kl_teacher_student_nats=0.001")
    assert code == 3
    assert "fail_if: fidelity.kl_teacher_student_nats is 0.0" in err
    assert tune(*PAIR, "fail_if.fidelity.kl_teacher_student_nats=1")[0] == 0
    assert tune(*PAIR, "fail_if.teacher.metrics.token_perplexity=1.2")[0] == 3


def test_a_teacher_can_be_left_out(tune, tmp_path):
    """Of a config that has one, such as those of published pairs."""
    assert tune("teacher_checkpoint_dir=null", config="tiny_pair_ppl_eval")[0] == 0
    assert "fidelity" not in results()
    assert "teacher" not in results()


def test_two_students_whose_tokenizers_differ_in_what_does_not_matter(
    tune, tmp_path, capsys, monkeypatch
):
    """KL is by token all the same, while perplexities are by byte."""
    from ppl_eval import cli

    def change(content):
        more = {**content["added_tokens"][-1], "id": 509, "content": "<|more|>"}
        content["added_tokens"].append(more)

    other = other_vocabulary(copy_of(STUDENT, tmp_path / "other"), change)
    assert tune(*PAIR, "output_dir=one")[0] == 0
    weights = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert tune(f"checkpoint_dir={other}", PAIR[1], "output_dir=two")[0] == 0
    one, two = results("one"), results("two")
    assert one["fingerprints"]["tokenizer"] != two["fingerprints"]["tokenizer"]
    monkeypatch.setattr(sys, "argv", ["ppl-eval", "compare", "one", "two"])
    cli.main()
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "KL to the teacher" in line)
    kls = [run["fidelity"]["kl_teacher_student_nats"] for run in (one, two)]
    assert float(line.split()[5]) == pytest.approx(kls[1] - kls[0], abs=1e-3)
    assert "two: byte perplexity x" in shown
    assert shown.count("tiny_teacher (teacher)") == 1
    assert tune(*PAIR, "output_dir=three", "max_documents=5")[0] == 0
    monkeypatch.setattr(sys, "argv", ["ppl-eval", "compare", "one", "three", "--force"])
    cli.main()
    assert capsys.readouterr().out.count("tiny_teacher (teacher)") == 2


def test_the_noise_is_of_the_coarser_dtype(tune):
    """A bf16 copy of an fp32 teacher is not below a floor of fp32."""
    same = (f"checkpoint_dir={TEACHER}", f"teacher_checkpoint_dir={TEACHER}")
    assert tune(*same, "dtype=bf16", "teacher_dtype=fp32")[0] == 0
    section = results()["fidelity"]
    assert section["noise_floor"]["dtype"] == "bf16"
    floor = section["noise_floor"]["kl_teacher_student_nats"]
    assert floor / 10 < section["kl_teacher_student_nats"] < floor * 10
    assert tune(*same)[0] == 0
    assert results()["fidelity"]["noise_floor"]["dtype"] == "fp32"


def test_what_is_wrong_with_the_teacher_is_said_of_the_teacher(tune, tmp_path):
    damaged = copy_of(TEACHER, tmp_path / "damaged")
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    short = copy_of(TEACHER, tmp_path / "short", max_position_embeddings=100)
    few = copy_of(TEACHER, tmp_path / "few", vocab_size=300)
    weights = load_file(few / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:300].clone()
    save_file(weights, few / "model.safetensors", {"format": "pt"})
    alone = tmp_path / "alone"
    shutil.copytree(damaged, alone)
    (alone / "model.safetensors").rename(alone / "adapter_model.safetensors")
    for folder, message in (
        (damaged, "the teacher: model.norm.weight holds NaN"),
        (short, "protocol.max_seq_len is 256, but the teacher reads at most 100 tokens"),
        (few, "embedding has 300 rows"),
        (alone, f"the teacher: {alone} holds an adapter and no model weights"),
    ):
        code, _, err = tune(PAIR[0], f"teacher_checkpoint_dir={folder}")
        assert code == 1
        assert message in err
        assert len([line for line in err.splitlines() if "ppl_eval: error" in line]) == 1


def test_an_infinite_divergence_is_said_of_the_divergence(held_out):
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:2]]
    tokenizer = hf_tokenizer(str(STUDENT))
    student, teacher = (in_float64(folder).float() for folder in (STUDENT, TEACHER))
    teacher.output.weight.data[7] = float("nan")
    with pytest.raises(UserError, match="the teacher's loss is nan in document 0"):
        evaluate(student, tokenizer, texts, max_seq_len=64, teacher=teacher)


@pytest.mark.parametrize("swap", [True, False])
def test_torchtunes_tokenizers_are_compared_by_their_files(tune, tmp_path, swap):
    """As sections of distillation configs name them; two merges change places."""
    from tokenizers.implementations import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    text = "the cat sat on the mat and the dog sat on the cat"
    bpe.train_from_iterator([text] * 9, vocab_size=275)
    folders = []
    for name, source in (("student", STUDENT), ("teacher", TEACHER)):
        folders.append(copy_of(source, tmp_path / name))
        for path in folders[-1].glob("tokenizer*"):
            path.unlink()
        bpe.save_model(str(folders[-1]))
    if swap:
        merges = (folders[1] / "merges.txt").read_text().splitlines()
        merges[-1], merges[-2] = merges[-2], merges[-1]
        (folders[1] / "merges.txt").write_text("\n".join(merges) + "\n")
    tokenizer = "torchtune.models.qwen2.qwen2_tokenizer"
    code, _, err = tune(
        f"checkpoint_dir={folders[0]}",
        f"teacher_checkpoint_dir={folders[1]}",
        f"tokenizer._component_={tokenizer}",
        f"tokenizer.path={folders[0] / 'vocab.json'}",
        f"tokenizer.merges_file={folders[0] / 'merges.txt'}",
        "protocol.add_bos=false",
    )
    assert ("student and teacher have different tokenizers" in err) == swap
    assert code == int(swap), err


REFUSED = {
    "half a teacher": (
        [f"checkpoint_dir={STUDENT}", "teacher_model._component_=torchtune.models.llama3.llama3"],
        "teacher_model is given and teacher_checkpointer is not: give both, or",
    ),
    "no folder": (
        [f"checkpoint_dir={STUDENT}", "teacher_checkpoint_dir=/no/such"],
        "teacher_checkpoint_dir is /no/such, but there is no such folder",
    ),
    "no teacher": (
        [f"checkpoint_dir={STUDENT}", "teacher_parallel.tp=1"],
        "teacher_parallel.tp is set, but there is no teacher: set teacher_checkpoint_dir=DIR",
    ),
    "a limit and no teacher": (
        [f"checkpoint_dir={STUDENT}", "fail_if.fidelity.js_nats=1"],
        "fidelity.js_nats is set, but there is no teacher",
    ),
    "a limit on what should be large": (
        [*PAIR, "fail_if.fidelity.top1_agreement=0.9"],
        "fail_if has fidelity.top1_agreement, but it is one of fidelity.perplexity_ratio",
    ),
    "other batches": (
        [*PAIR, "teacher_parallel.tp=2"],
        "teacher_parallel has tp(2) * cp(1) = 2 and parallel has tp(1) * cp(1) = 1",
    ),
    "degree": ([*PAIR, "teacher_parallel.cp=0"], "teacher_parallel.cp is 0, but it is at least 1"),
    "a dtype of no teacher": (
        [f"checkpoint_dir={STUDENT}", "teacher_dtype=bf16"],
        "teacher_dtype is set, but there is no teacher",
    ),
    "a teacher of no builder": (
        [f"checkpoint_dir={STUDENT}", "teacher_model.vocab_size=5"],
        "teacher_model has no _component_, and there is no teacher_checkpoint_dir",
    ),
    "a limit without a section": (
        [*PAIR, "fail_if.teacher.token_perplexity=2"],
        "or teacher.metrics.NAME; did you mean teacher.metrics.token_perplexity?",
    ),
    "dtype": (
        [*PAIR, "teacher_dtype=int4"],
        "teacher_dtype is 'int4', but it is one of fp32, bf16, fp16",
    ),
    "rounded logits": ([*PAIR, "logits_dtype=model"], "but with a teacher logits are fp32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tune, case):
    args, message = REFUSED[case]
    code, out, err = tune(*args)
    assert code == 1
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def other_vocabulary(folder, change):
    """Rewrite tokenizer.json."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    Tokenizer.from_file(str(path))  # it is one
    return folder


def swap_two_tokens(content):
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def other_merges(content):
    content["model"]["merges"].reverse()


@pytest.mark.parametrize(
    ("change", "difference"),
    [(swap_two_tokens, " in one and "), (other_merges, "they cut texts differently")],
)
def test_a_teacher_whose_ids_mean_other_texts_is_refused(tune, tmp_path, change, difference):
    """Its vocabulary has the same size, so every shape fits and KL would be computed."""
    teacher = other_vocabulary(copy_of(TEACHER, tmp_path / "teacher"), change)
    code, out, err = tune(f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={teacher}")
    assert code == 1
    assert difference in err
    assert "run each alone and compare metrics.bits_per_byte" in err
    assert (out, len(err.splitlines())) == ("", 1)


def test_what_does_not_make_another_tokenizer(tune, tmp_path):
    """Padding, truncation, templates and one more special token."""

    def change(content):
        content["post_processor"] = None
        content["truncation"] = {
            "direction": "Right",
            "max_length": 8,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        more = {**content["added_tokens"][-1], "id": 509, "content": "<|more|>"}
        content["added_tokens"].append(more)

    teacher = other_vocabulary(copy_of(TEACHER, tmp_path / "teacher"), change)
    code, _, err = tune(f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={teacher}")
    assert code == 0, err
    for path in teacher.glob("tokenizer*"):
        path.unlink()
    code, _, err = tune(f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={teacher}")
    assert code == 0
    assert f"{teacher} has no tokenizer files that are known: the teacher is taken to" in err


def test_more_rows_are_said(tune, tmp_path):
    """That the teacher's vocabulary is larger; the numbers are tested in tests/distributed."""
    teacher = copy_of(TEACHER, tmp_path / "teacher", vocab_size=520)
    weights = load_file(teacher / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], weights[name][:11]])
    save_file(weights, teacher / "model.safetensors", {"format": "pt"})
    code, out, err = tune(f"checkpoint_dir={STUDENT}", f"teacher_checkpoint_dir={teacher}")
    assert code == 0, err
    said = "the student's head has 509 rows and the teacher's 520: they are compared over the 509"
    assert said in err
    vocabulary = {"student_ids": 509, "teacher_ids": 520, "shared_ids": 509}
    assert results()["fidelity"]["vocabulary"] == vocabulary
    assert "509 ids that both have" in out


def test_compare_says_which_is_nearer_to_the_teacher(tune, tmp_path, capsys, monkeypatch):
    from ppl_eval import cli

    assert tune(*PAIR, "output_dir=after")[0] == 0
    spoiled = copy_of(STUDENT, tmp_path / "before")
    weights = load_file(spoiled / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 0.5
    save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
    pair = (f"checkpoint_dir={spoiled}", PAIR[1])
    assert tune(*pair, "output_dir=out/before")[0] == 0
    monkeypatch.setattr(sys, "argv", ["ppl-eval", "compare", "out/before", "after"])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.startswith(("before  ", "after  "))]
    assert [row[0] for row in table] == ["before", "after"] * 2
    kls = [float(row[2]) for row in table[2:]]
    assert kls == pytest.approx(
        [results(f)["fidelity"]["kl_teacher_student_nats"] for f in ("out/before", "after")],
        abs=1e-4,
    )
    difference = next(line for line in lines if "KL to the teacher" in line)
    assert float(difference.split()[5]) == pytest.approx(kls[1] - kls[0], abs=1e-4)


def test_the_python_api(held_out):
    """Any two modules, one of them a plain function of the tokens."""
    from transformers import AutoModelForCausalLM

    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:5]]
    tokenizer = hf_tokenizer(str(STUDENT))
    student, teacher = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (STUDENT, TEACHER))
    found = evaluate(student, tokenizer, texts, max_seq_len=128, teacher=teacher)
    windows = []
    for text in texts:
        ids = tokenizer.encode(text, False, False)
        windows += [([1, *ids[n : n + 127]], 1) for n in range(0, len(ids), 127)]
    expected = compared(
        lambda t: student.double()(t).logits, lambda t: teacher.double()(t).logits, windows
    )
    for name in ("kl_teacher_student", "js", "top1"):
        value = float(found.ledger.column(name).sum())
        assert value == pytest.approx(float(expected[name].sum()), rel=1e-6)
    assert found.teacher.total.nll_nats_sum == pytest.approx(
        float(expected["teacher_nll_nats"].sum()), rel=1e-6
    )
    assert found.fidelity.noise.sums[0, 0] == 0  # no layers that are known
