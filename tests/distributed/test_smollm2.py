"""A real trained model (9 heads, 3 kv heads, a tied head of 49,152 rows) on several meshes."""

import json

import pytest
from meshes import on_mesh
from ranks import run_on_ranks

FIVE_ARTICLES = 69_883.43025
"""See tests/recipes/test_reference.py."""


def measure(rank, folder, texts, mesh, world_size):
    result = on_mesh(
        folder,
        mesh,
        world_size,
        f"dataset.data_files={texts}",
        "max_documents=5",
        "protocol.add_bos=false",
        "max_tokens_per_batch=2048",
    )
    return result.summary.total.num_scored, result.summary.total.nll_nats_sum


@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1, 3), (1, 1, 2, 1), (1, 2, 1, 1), (1, 1, 2, 3)],
    ids=["tp=3", "cp=2", "dp_shard=2", "tp=3 x cp=2"],
)
def test_five_wikitext_articles(real_model, real_corpus, mesh, device, rtol):
    folder, texts = real_model("smollm2"), real_corpus("en_wikitext2_raw_test.jsonl")
    world_size = mesh[1] * mesh[2] * mesh[3]
    args = str(folder), str(texts), mesh, world_size
    found = run_on_ranks(world_size, measure, *args, timeout_s=1800, device=device)
    assert len({json.dumps(one) for one in found}) == 1
    num_scored, nll = found[0]
    assert num_scored == 22_236
    assert nll == pytest.approx(FIVE_ARTICLES, rel=rtol)
    print(f"{mesh}: {nll:.5f} nats, {nll / FIVE_ARTICLES - 1:+.1e}")
