"""Texts on several ranks: who tokenises what, and what happens when one rank cannot."""

import time
import traceback

import datasets
import pyarrow as pa
import pytest
import torch.distributed as dist
from helpers import ByteTokenizer, sharp_llama
from ranks import run_on_ranks

from ppl_eval import Document, UserError, evaluate
from ppl_eval.data.documents import Corpus, NamedCorpora
from ppl_eval.model.torchtune_decoder import decoder_of
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.shard import shard_decoder
from ppl_eval.parallel.tensor import split_decoder

OPTIONS = {"max_seq_len": 32, "max_tokens_per_batch": 32}


def error_of(documents, tokenizer=None, **options):
    with pytest.raises((UserError, RuntimeError)) as error:
        evaluate(sharp_llama(259), tokenizer or ByteTokenizer(), documents, **OPTIONS, **options)
    if isinstance(error.value, RuntimeError):  # every rank shows where the other failed
        shown = "".join(traceback.format_exception(error.value))
        assert "in __getitem__" in shown or "in encode" in shown
    return type(error.value).__name__, str(error.value)


def rows(column):
    """Rows of a table that is read on demand, as a hub's data sets are."""
    return Corpus(datasets.Dataset(pa.table({"text": column})), "text", None, None, "the table")


class TornRows(list):
    """A data set whose last row cannot be read."""

    def __getitem__(self, index):
        if len(self) - 1 in range(len(self))[index]:
            raise OSError("the disk is gone")
        return super().__getitem__(index)

    def __len__(self):
        return super().__len__() + 1


class FailingTokenizer(ByteTokenizer):
    """Fails on texts with ``z``."""

    def encode(self, text, add_bos=True, add_eos=True):
        if "z" in text:
            raise ValueError("cannot spell z")
        return super().encode(text, add_bos, add_eos)


def bad_rows(rank):
    """Each is the last of ten, in the share of rank 1."""
    texts = ["the cat"] * 9
    found = {
        "null": error_of(rows(pa.array([*texts, None]))),
        "bytes": error_of(
            rows(pa.array([*(t.encode() for t in texts), b"\xff"]).view(pa.string()))
        ),
        "disk": error_of(NamedCorpora({"torn": TornRows(map(Document, texts))})),
        "tokenizer": error_of([*texts, "z"], FailingTokenizer()),
    }
    found["afterwards"] = evaluate(
        sharp_llama(259), ByteTokenizer(), texts, **OPTIONS
    ).summary.total.num_scored
    return found


def test_a_row_that_one_rank_cannot_read_is_an_error_on_every_rank():
    """The others do not wait for it, and all can go on with another corpus."""
    first, second = run_on_ranks(2, bad_rows)
    assert first == second
    assert first["null"][0] == first["bytes"][0] == "UserError"
    assert "the table, row 9 (the first is 0): column 'text' holds null" in first["null"][1]
    assert "the table, row 9 (the first is 0): column 'text' holds bytes that" in first["bytes"][1]
    assert first["disk"] == ("RuntimeError", "rank 1 failed with OSError: the disk is gone")
    assert first["tokenizer"] == ("RuntimeError", "rank 1 failed with ValueError: cannot spell z")
    assert first["afterwards"] == 9 * len("the cat")


def bad_in_a_step(rank, degrees, with_teacher):
    """A text that rank 0 counts and rank 1 has to read, but cannot, in an early step."""

    def split():
        model = sharp_llama(259)
        split_decoder(decoder_of(model), meshes.tp)
        shard_decoder(decoder_of(model), meshes.fsdp)
        return model

    meshes = ParallelDims(**degrees, world_size=2).build_mesh("cpu")
    tokenizer = FailingTokenizer() if rank == 1 else ByteTokenizer()
    texts = ["z" * 25, "the cat sat on the mat, it did", *("a" * n for n in range(2, 20))]
    with pytest.raises(RuntimeError) as error:
        evaluate(
            split(),
            tokenizer,
            texts,
            meshes=meshes,
            teacher=split() if with_teacher else None,
            **OPTIONS,
        )
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("with_teacher", [False, True], ids=["alone", "beside a teacher"])
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 1, "cp": 2}], ids=str)
def test_a_text_that_one_rank_cannot_read_again_is_an_error_on_every_rank(degrees, with_teacher):
    """The rank takes part in the steps that are left, with the shapes that the others expect."""
    found = run_on_ranks(2, bad_in_a_step, degrees, with_teacher)
    assert found == ["rank 1 failed with ValueError: cannot spell z"] * 2


class MeetingTokenizer(ByteTokenizer):
    """Notes what it encodes, and goes on with a long text only when all ranks have one."""

    def __init__(self, store):
        super().__init__()
        self.store, self.encoded = store, []

    def encode(self, text, add_bos=True, add_eos=True):
        if text:
            self.encoded.append(text)
        if len(text) > 50:
            self.store.add("have begun", 1)
            give_up = time.monotonic() + 30
            while self.store.add("have begun", 0) < dist.get_world_size():
                assert time.monotonic() < give_up, "the other ranks wait for this one"
                time.sleep(0.01)
        return super().encode(text, add_bos, add_eos)


def encoded_by(rank, store, texts, protocol):
    tokenizer = MeetingTokenizer(dist.FileStore(store, dist.get_world_size()))
    total = evaluate(sharp_llama(259), tokenizer, texts, protocol=protocol, **OPTIONS).summary.total
    return tokenizer.encoded, total.num_scored


@pytest.mark.parametrize("protocol", ["concat", "hf_stride", "llama_cpp", "gptq"])
def test_no_rank_waits_while_another_tokenises_a_stream(tmp_path, protocol):
    """All tokenise it, each once, at the same time."""
    texts = ["the cat sat on the mat"] * 5
    separator = "\n" if protocol == "llama_cpp" else "\n\n"
    found = run_on_ranks(2, encoded_by, str(tmp_path / "store"), texts, protocol)
    assert [encoded for encoded, _ in found] == [[separator.join(texts)]] * 2
    assert found[0][1] == found[1][1] > 40


def test_no_rank_waits_while_another_tokenises_one_long_text(tmp_path):
    found = run_on_ranks(2, encoded_by, str(tmp_path / "store"), ["the cat " * 30], "document")
    assert found == [(["the cat " * 30], 8 * 30)] * 2


def test_few_documents_are_shared_out(tmp_path):
    """Each rank begins with five of ten; one rank does not tokenise them all."""
    texts = [chr(ord("a") + n) * (n + 2) for n in range(10)]
    first, second = run_on_ranks(2, encoded_by, str(tmp_path / "store"), texts, "document")
    assert first[0][:5] == texts[:5]
    assert second[0][:5] == texts[5:]


def different_texts(rank, protocol):
    return error_of([f"rank {rank}", *["the cat sat on the mat"] * 5], protocol=protocol)


def test_ranks_that_see_different_streams_are_told():
    for found in run_on_ranks(2, different_texts, "concat"):
        assert found[0] == "UserError"
        assert "document 0 is not the same on all ranks: do all nodes read the same" in found[1]
