"""Biases, fused and tied weights, scaled embeddings, windows and caps under tp and cp.

One process is compared with transformers elsewhere; here every mesh is compared with one process.
"""

import pytest
from ranks import run_on_ranks

pytest.importorskip("transformers")
import families
from meshes import on_mesh, prepared

from ppl_eval import UserError

GEMMA2 = "gemma2 (caps 2 and 4, window of 11)"
MISTRAL = "mistral (window of 7)"
QWEN2 = "qwen2 (window of 9 from layer 1 on)"
TP, CP, BOTH = (1, 1, 1, 2), (1, 1, 2, 1), (1, 1, 2, 2)
SPLIT = {name: 3 if name.startswith("phi4") else 2 for name in families.FAMILIES}
SPLIT["gemma"] = 1  # it has a single kv head


def texts():
    return [row["text"] for row in families.documents(12)] + ["a", "Ada", "the mill by the"]


def by_document(rank, world_size, runs):
    """NLL of each document, for (folder, mesh) pairs."""
    found = []
    for folder, mesh in runs:
        result = on_mesh(
            folder,
            mesh,
            world_size,
            f"protocol.max_seq_len={families.MAX_SEQ_LEN}",
            "max_tokens_per_batch=500",
            dataset=f"{__name__}.texts",
        )
        found.append([row["nll_nats_sum"] for row in result.summary.documents.rows()])
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for name in families.FAMILIES:
        found[name] = tmp_path_factory.mktemp("family")
        families.write(name, found[name])
    return found


@pytest.fixture(scope="module")
def alone(folders, device):
    runs = [(folder, (1, 1, 1, 1)) for folder in folders.values()]
    return dict(zip(folders, run_on_ranks(1, by_document, 1, runs, device=device)[0], strict=True))


@pytest.mark.parametrize(
    ("world_size", "mesh"),
    [(2, TP), (2, CP), (3, (1, 1, 1, 3)), (4, BOTH), (4, (1, 2, 1, 2)), (4, (1, 2, 2, 1))],
)
def test_every_family_on_a_mesh(folders, alone, world_size, mesh, device, rtol):
    """Also where a window or a cap must hold across the chunks of a shared window."""
    names = [name for name in folders if mesh[3] in (1, SPLIT[name])]
    assert len(names) > 12 or mesh[3] == 3
    if world_size == 4:
        names = [GEMMA2, MISTRAL, QWEN2, "qwen2 (biases, tied)", "phi3 (window of 13)"]
    runs = [(folders[name], mesh) for name in names]
    for of_rank in run_on_ranks(
        world_size, by_document, world_size, runs, timeout_s=300, device=device
    ):
        for name, documents in zip(names, of_rank, strict=True):
            assert documents == pytest.approx(alone[name], rel=rtol), name


def test_heads_that_tp_does_not_divide_are_refused(folders):
    """Before any weight is read, and from the checkpoint's headers alone."""
    shipped = "max_documents=1"
    with pytest.raises(UserError) as error:
        prepared(folders["gemma"], TP, shipped, dataset=f"{__name__}.texts")
    assert str(error.value) == (
        "parallel.tp is 2, but torchtune.models.gemma.gemma has 4 heads and 1 kv heads, which tp"
        " must both divide: set parallel.tp to 1"
    )
    with pytest.raises(UserError, match=r"6 heads and 2 kv heads.*: set parallel.tp to 1 or 2"):
        prepared(folders["llama2"], (1, 1, 1, 3), shipped, dataset=f"{__name__}.texts")
