"""A student beside its teacher on every mesh of four ranks, against a float64 loop over logits.

The ranks are started once. The loop runs in this process and shares no code with the product but
torchtune's modules.
"""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from helpers import chunks, compared, in_float64
from meshes import on_mesh
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from ppl_eval import UserError, evaluate, shipped
from ppl_eval.data import hf_tokenizer
from ppl_eval.metrics.fidelity import PERCENTILES
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.tensor import split_decoder
from ppl_eval.report.fidelity_section import fidelity

WINDOW = 100
STUDENT, TEACHER = "tiny_student", "tiny_teacher"
FOUR = [m for m in itertools.product((1, 2, 4), repeat=4) if math.prod(m) == 4]
OTHERWISE = [  # the student's mesh, the teacher's cp and tp
    ((1, 2, 1, 2), (2, 1)),
    ((1, 2, 2, 1), (1, 2)),
    ((1, 1, 2, 2), (4, 1)),
    ((1, 1, 2, 2), (1, 4)),
    ((1, 1, 1, 4), (2, 2)),
    ((1, 1, 4, 1), (2, 2)),
    ((2, 1, 2, 1), (1, 2)),
]
PADDED = [(1, 4, 1, 1), (1, 1, 1, 4), (1, 2, 1, 2), (1, 1, 2, 2)]


def texts():
    """The embedded texts, cut to many lengths, in two domains."""
    lines = (shipped.embedded_path("tiny_text") / "heldout.jsonl").read_text().splitlines()
    whole = [json.loads(line)["text"] for line in lines[:17]]
    cut = [text[: 1 + 53 * n % 700] for n, text in enumerate(whole)]
    return [{"text": text, "domain": "odd" if n % 2 else "even"} for n, text in enumerate(cut)]


def padded(name, folder, num_rows):
    """An embedded model whose embedding and head have more rows, as some sizes of a family do."""
    source = shipped.embedded_path(name)
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for matrix in {"model.embed_tokens.weight", "lm_head.weight"} & set(weights):
        rows = weights[matrix]
        more = rows[torch.randint(0, len(rows), (num_rows,), generator=generator)] * 0.9
        weights[matrix] = torch.cat([rows, more])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config["vocab_size"] += num_rows
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def report_of(student, teacher, mesh, *overrides):
    """(scored tokens, the ``fidelity`` section, the student's NLL, the teacher's)."""
    result = on_mesh(
        student,
        mesh,
        math.prod(mesh),
        f"teacher_checkpoint_dir={teacher}",
        f"protocol.max_seq_len={WINDOW}",
        "max_tokens_per_batch=400",
        *overrides,
        dataset=f"{__name__}.texts",
    )
    found = fidelity(result.summary, result.fidelity, result.by_context, num_ids=(509, 509))
    totals = result.summary.total, result.teacher.total
    return found, *((total.num_scored, total.nll_nats_sum) for total in totals)


def on_four(rank, folders):
    """Key -> what was found, of every mesh, layout and pair."""
    student, teacher = (shipped.embedded_path(name) for name in (STUDENT, TEACHER))
    found = {}
    for mesh in FOUR:
        found["pair", mesh] = report_of(student, teacher, mesh)
    for mesh, (cp, tp) in OTHERWISE:
        asked = (f"teacher_parallel.cp={cp}", f"teacher_parallel.tp={tp}")
        found["otherwise", mesh, cp, tp] = report_of(student, teacher, mesh, *asked)
    for mesh in PADDED:
        found["more rows", mesh] = report_of(student, folders["teacher"], mesh)
        found["fewer rows", mesh] = report_of(folders["student"], teacher, mesh)
    cp, tp = "teacher_parallel.cp=2", "teacher_parallel.tp=1"
    found["more rows", (1, 2, 1, 2), cp] = report_of(
        student, folders["teacher"], (1, 2, 1, 2), cp, tp
    )
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("padded")
    return {
        "teacher": padded(TEACHER, base / "teacher", 7),
        "student": padded(STUDENT, base / "student", 8),
    }


@pytest.fixture(scope="module")
def found(folders, device):
    of_ranks = run_on_ranks(4, on_four, folders, timeout_s=600, device=device)
    for other in of_ranks[1:]:
        assert other == of_ranks[0]
    return of_ranks[0]


@pytest.fixture(scope="module")
def truth(folders):
    """Pair -> (values of each token by the loop, domain of each token)."""
    tokenizer = hf_tokenizer(str(shipped.embedded_path(STUDENT)))
    windows, domains, documents, positions = [], [], [], []
    for number, row in enumerate(texts()):
        ids = tokenizer.encode(row["text"], False, False)
        of_document = chunks(ids, WINDOW, tokenizer.bos_id)
        windows += of_document
        domains += [row["domain"]] * len(ids)
        documents += [number] * len(ids)
        positions += range(len(ids))
    embedded = {name: in_float64(shipped.embedded_path(name)) for name in (STUDENT, TEACHER)}
    own = embedded[STUDENT], embedded[TEACHER]
    models = {
        "pair": own,
        "more rows": (own[0], in_float64(folders["teacher"])),
        "fewer rows": (in_float64(folders["student"]), own[1]),
    }
    found = {k: compared(*pair, windows, 509) for k, pair in models.items()}
    for values in found.values():
        values["document"] = torch.tensor(documents)
        values["position"] = torch.tensor(positions)
    return found, np.asarray(domains)


def check(results, values, rtol):
    """Sums and counts to ``rtol`` of the loop's, histograms to their own error."""
    section, (num_scored, nll), (teacher_scored, teacher_nll) = results
    assert num_scored == teacher_scored == len(values["nll_nats"]) == section["scored_tokens"]

    def close(value, expected):
        assert value == pytest.approx(float(expected), rel=rtol)

    close(nll, values["nll_nats"].sum())
    close(teacher_nll, values["teacher_nll_nats"].sum())
    check_means(section, values, rtol)
    percentiles = section["kl_percentiles_nats"]
    error = 1 + section["kl_percentiles_relative_error"] + 1e-6
    ordered = values["kl_teacher_student"].sort().values
    for percent in PERCENTILES:
        place = max(0, math.ceil(percent / 100 * num_scored) - 1)
        assert ordered[place] / error < percentiles[f"{percent:g}"] < ordered[place] * error
    ordered = values["probability_difference"].sort().values
    for percent in PERCENTILES:
        place = max(0, math.ceil(percent / 100 * num_scored) - 1)
        given = section["probability_difference_percentiles"][f"{percent:g}"]
        assert abs(given - ordered[place]) <= 0.0005 + 1e-5
    close(section["kl_maximum_nats"], values["kl_teacher_student"].max())
    worst = values["kl_teacher_student"].sort(descending=True).indices[:20].tolist()
    for token, place in zip(section["worst_tokens"], worst, strict=True):
        found = (
            *(token["document"], token["position"]),
            *(token[f"{whose}_top1_id"] for whose in ("student", "teacher")),
        )
        names = ("document", "position", "top1_id", "teacher_top1_id")
        assert found == tuple(int(values[name][place]) for name in names)
        for key, name in (
            ("kl_teacher_student_nats", "kl_teacher_student"),
            ("student_nll_nats", "nll_nats"),
            ("teacher_nll_nats", "teacher_nll_nats"),
        ):
            assert token[key] == pytest.approx(float(values[name][place]), rel=1e-5)
    check_documents(section, values)


def check_documents(section, values):
    """Intervals and the worst, from sums over documents: the jackknife written out as a loop."""
    numbers = values["document"].long()
    count = int(numbers.max()) + 1
    tokens = torch.zeros(count).double().index_add_(0, numbers, torch.ones(len(numbers)).double())

    def interval(values):
        sums = torch.zeros(count).double().index_add_(0, numbers, values)
        kept = tokens > 0
        s, n = sums[kept], tokens[kept]
        without = torch.tensor(
            [(s.sum() - s[i]) / (n.sum() - n[i]) for i in range(len(s))], dtype=torch.float64
        )
        error = math.sqrt((len(s) - 1) / len(s) * float(((without - without.mean()) ** 2).sum()))
        reach = float(stats.t.ppf(0.975, len(s) - 1)) * error
        mean = float(s.sum() / n.sum())
        return mean - reach, mean + reach

    for name, of_tokens in (
        ("kl_teacher_student_nats", values["kl_teacher_student"]),
        ("js_nats", values["js"]),
        ("ln_perplexity_ratio", values["nll_nats"] - values["teacher_nll_nats"]),
    ):
        low, high = interval(of_tokens)
        if name != "ln_perplexity_ratio":
            low = max(low, 0.0)
        assert section["interval_95"][name] == pytest.approx([low, high], rel=1e-5, abs=1e-6), name
    low, high = interval(values["top1"])
    assert section["interval_95"]["top1_agreement"] == pytest.approx([low, min(high, 1)], rel=1e-5)
    kl = torch.zeros(count).double().index_add_(0, numbers, values["kl_teacher_student"])
    order = (kl / tokens).nan_to_num(-1).sort(descending=True).indices[:10].tolist()
    assert [document["document"] for document in section["worst_documents"]] == order


def check_means(section, values, rtol):
    difference = values["nll_nats"] - values["teacher_nll_nats"]
    expected = {
        "kl_teacher_student_nats": values["kl_teacher_student"].mean(),
        "kl_student_teacher_nats": values["kl_student_teacher"].mean(),
        "js_nats": values["js"].mean(),
        "cross_entropy_nats": values["cross_entropy"].mean(),
        "teacher_entropy_nats": values["teacher_entropy"].mean(),
        "student_entropy_nats": values["student_entropy"].mean(),
        "top1_agreement": values["top1"].mean(),
        "top5_agreement": values["top5"].mean(),
        "probability_difference_rms": values["probability_difference"].square().mean().sqrt(),
        "perplexity_ratio": difference.mean().exp(),
    }
    for name, value in expected.items():
        assert section[name] == pytest.approx(float(value), rel=rtol), name
    # what is small because it is a difference: to 1e-6 of what it is a difference of
    mean = float(values["probability_difference"].mean())
    assert section["probability_difference_mean"] == pytest.approx(mean, abs=3e-7)
    nll = float(values["teacher_nll_nats"].mean())
    ratio = float(difference.mean())
    assert section["ln_perplexity_ratio"] == pytest.approx(ratio, abs=rtol * nll)


@pytest.mark.parametrize("mesh", FOUR, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_statistic_on_every_mesh(found, truth, mesh, rtol):
    check(found["pair", mesh], truth[0]["pair"], rtol)


@pytest.mark.parametrize(("mesh", "degrees"), OTHERWISE)
def test_a_teacher_that_is_laid_out_otherwise(found, truth, mesh, degrees, rtol):
    check(found[("otherwise", mesh, *degrees)], truth[0]["pair"], rtol)


@pytest.mark.parametrize("mesh", PADDED, ids=lambda mesh: "x".join(map(str, mesh)))
@pytest.mark.parametrize("pair", ["more rows", "fewer rows"])
def test_vocabularies_of_two_sizes(found, truth, pair, mesh, rtol):
    """509 rows and 516, 509 and 517: no degree of tp cuts both models at the same ids."""
    check(found[pair, mesh], truth[0][pair], rtol)


def test_rows_that_the_student_lacks_laid_out_otherwise(found, truth, rtol):
    key = ("more rows", (1, 2, 1, 2), "teacher_parallel.cp=2")
    check(found[key], truth[0]["more rows"], rtol)


@pytest.mark.parametrize("mesh", FOUR, ids=lambda mesh: "x".join(map(str, mesh)))
def test_profiles(found, truth, mesh, rtol):
    """By domain, by the teacher's confidence and by position: each against the loop's tokens."""
    (pair, domains), section = (truth[0]["pair"], truth[1]), found["pair", mesh][0]
    for name, part in section["by_domain"].items():
        chosen = torch.from_numpy(domains == name)
        assert part["scored_tokens"] == int(chosen.sum())
        check_means(part, {key: values[chosen] for key, values in pair.items()}, rtol)
    assert len(section["by_domain"]) == 2
    for key, values, scale in (
        (
            "by_teacher_confidence",
            pair["teacher_confidence"],
            lambda row: row["teacher_confidence"],
        ),
        ("by_position", pair["context"], lambda row: row["context_tokens"]),
    ):
        rows = section[key]
        assert sum(row["scored_tokens"] for row in rows) == len(values)
        for row in rows:
            low, high = scale(row)
            inside = (values >= low) & ((values < high) if key[3] == "t" else (values <= high))
            assert row["scored_tokens"] == int(inside.sum())
            for name, column in (
                ("kl_teacher_student_nats", "kl_teacher_student"),
                ("student_nll_nats_per_token", "nll_nats"),
                ("teacher_nll_nats_per_token", "teacher_nll_nats"),
            ):
                mean = float(pair[column][inside].mean())
                assert row[name] == pytest.approx(mean, rel=1e-5), name
            assert row["top1_agreement"] == pytest.approx(float(pair["top1"][inside].mean()))


def test_the_noise_is_of_the_same_tokens_on_every_mesh(found):
    """One batch in sixteen, whoever reads it."""
    counts = {found["pair", mesh][0]["noise_floor"]["scored_tokens"] for mesh in FOUR}
    counts |= {
        found[("otherwise", mesh, *degrees)][0]["noise_floor"]["scored_tokens"]
        for mesh, degrees in OTHERWISE
    }
    (count,) = counts
    assert 0 < count < 0.5 * found["pair", FOUR[0]][1][0]


def other_meshes(rank, names):
    """What ``evaluate`` says of a teacher on meshes that are not the student's."""
    texts_ = [row["text"] for row in texts()]
    tokenizer = hf_tokenizer(str(shipped.embedded_path(STUDENT)))
    said = []
    for student, teacher in names:
        models = []
        for folder, degrees in zip((STUDENT, TEACHER), (student, teacher), strict=True):
            model = in_float64(shipped.embedded_path(folder)).float()
            meshes = ParallelDims(**degrees, world_size=2).build_mesh("cpu")
            split_decoder(decoder_of(model), meshes.tp)
            models.append((model, meshes))
        (model, meshes), (other, its) = models
        try:
            evaluate(
                model,
                tokenizer,
                texts_,
                max_seq_len=64,
                meshes=meshes,
                teacher=other,
                teacher_meshes=its,
            )
        except UserError as error:
            said.append(str(error))
    return said


def test_a_teacher_that_does_not_read_the_students_batches():
    alone, tp, cp = ({"dp_replicate": 2, "dp_shard": 1}, {"tp": 2}, {"cp": 2})
    names = [(alone, tp), (alone, cp), (tp, alone), (cp, alone)]
    for said in run_on_ranks(2, other_meshes, names):
        assert len(said) == 4
        assert all("both read the same batches on the same ranks" in each for each in said)


def gathers(rank, *overrides):
    """All-gathers of a run on two ranks that shard both models."""
    count = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal count
            count += func.namespace == "c10d" and func.overloadpacket.__name__ == "_allgather_base_"
            return func(*args, **(kwargs or {}))

    folders = (shipped.embedded_path(name) for name in (STUDENT, TEACHER))
    with Watch():
        report_of(*folders, (1, 2, 1, 1), *overrides)
    return count


def test_each_model_reshards_as_it_is_told():
    """Layers that stay gathered are gathered once."""
    own, its = (f"{key}.reshard_after_forward=false" for key in ("parallel", "teacher_parallel"))
    again = "teacher_parallel.reshard_after_forward=true"
    both, teachers, students, none = (
        run_on_ranks(2, gathers, *overrides)[0] for overrides in ((), (own, again), (its,), (own,))
    )
    assert none < students < both  # 3 layers of the student's, 6 of the teacher's
    assert none < teachers < both


def test_data_parallelism_changes_no_bit(found):
    """Of what is summed by window; profiles are added up over ranks."""
    alone = {"interval_95", "by_domain", "worst_documents", "worst_tokens", "kl_percentiles_nats"}
    for one, other in (((4, 1, 1, 1), (1, 4, 1, 1)), ((2, 1, 1, 2), (1, 2, 1, 2))):
        first, second = (found["pair", mesh] for mesh in (one, other))
        assert first[1:] == second[1:]
        for name, value in first[0].items():
            if isinstance(value, float) or name in alone:
                assert value == second[0][name], name


def itself(rank, world_size, meshes):
    """Mesh -> the ``fidelity`` section of the embedded teacher against itself."""
    folder = shipped.embedded_path(TEACHER)
    return {mesh: report_of(folder, folder, mesh)[0] for mesh in meshes}


@pytest.mark.parametrize(
    "meshes",
    [[(1, 1, 1, 1)], [(1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)], [(1, 4, 1, 1), (1, 1, 2, 2)]],
    ids=["1", "2", "4"],
)
def test_a_model_against_itself(meshes):
    """Divergences are 0, agreement and the ratio 1, and the noise floor is that of fp32."""
    world_size = math.prod(meshes[0])
    for found in run_on_ranks(world_size, itself, world_size, meshes):
        for section in found.values():
            for name in ("kl_teacher_student_nats", "kl_student_teacher_nats", "js_nats"):
                assert abs(section[name]) <= 1e-7
            assert section["top1_agreement"] == section["top5_agreement"] == 1
            assert section["perplexity_ratio"] == 1
            assert section["kl_maximum_nats"] <= 1e-7
            noise = section["noise_floor"]
            assert 0 < noise["kl_teacher_student_nats"] < 1e-11
            assert noise["top1_agreement"] == 1


def of_batches(rank, budget, dtype):
    """The section in batches of ``budget`` positions."""
    folders = (shipped.embedded_path(name) for name in (STUDENT, TEACHER))
    return report_of(*folders, (1, 1, 1, 1), f"max_tokens_per_batch={budget}", f"dtype={dtype}")[0]


def test_the_batch_size_changes_no_statistic():
    """Neither padding nor the number of batches is in it."""
    sections = [run_on_ranks(1, of_batches, budget, "fp32")[0] for budget in (100, 230, 4000)]
    for name, value in sections[0].items():
        if isinstance(value, float):
            for other in sections[1:]:
                assert other[name] == pytest.approx(value, rel=1e-5), name


def test_the_noise_of_bf16():
    """The floor lies where a bf16 copy of the fp32 teacher would be, and far below the student."""
    section = run_on_ranks(1, of_batches, 400, "bf16")[0]
    noise = section["noise_floor"]["kl_teacher_student_nats"]
    assert 1e-6 < noise < 1e-3
    assert noise < section["kl_teacher_student_nats"] / 20
