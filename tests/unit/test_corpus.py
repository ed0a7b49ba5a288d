"""text_corpus and as_documents: what they read, and what they say about what they cannot."""

import bz2
import datetime
import functools
import gzip
import http.server
import io
import json
import lzma
import os
import socket
import subprocess
import sys
import threading

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.generator.generator import Generator

from ppl_eval import Document, UserError
from ppl_eval.data import text_corpus
from ppl_eval.data.documents import NamedCorpora, as_documents, labels
from ppl_eval.data.hub import out_of_reach

pytestmark = pytest.mark.usefixtures("hf_cache")


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def texts(corpus):
    return [document.text for document in corpus]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_jsonl_with_id_and_domain(write, name):
    rows = [{"id": f"r{n}", "text": f"text {n}", "domain": "xy"[n % 2]} for n in range(3)]
    corpus = text_corpus(data_files=write(name, "\n".join(map(json.dumps, rows))))
    assert list(corpus) == [Document(r["text"], r["id"], r["domain"]) for r in rows]
    assert labels(corpus) == [(r["id"], r["domain"]) for r in rows]


def test_columns_by_name(write):
    file = write("a.jsonl", '{"body": "b", "kind": 7, "id": 3}\n')
    corpus = text_corpus(data_files=file, column="body", domain_column="kind")
    assert list(corpus) == [Document("b", "3", "7")]


STORIES = "\n \nOnce,\nin May.\n\n\t\nTwice.\n  \nThrice\nand more.\n\n"
"""Three stories of five lines, with blank lines (white space included) around them."""


@pytest.mark.parametrize(
    ("unit", "expected"),
    {
        "line": ["", " ", "Once,", "in May.", "", "\t", "Twice.", "  ", "Thrice", "and more.", ""],
        "paragraph": ["Once,\nin May.", "Twice.", "Thrice\nand more."],
        "file": [STORIES],
    }.items(),
)
def test_units_of_a_text_file(write, unit, expected):
    file = write("a.txt", STORIES)
    corpus = text_corpus(data_files=file, unit=unit)
    assert texts(corpus) == expected
    assert corpus.notes == ()
    windows_file = write("b.txt", STORIES.replace("\n", "\r\n"))
    found = texts(text_corpus(data_files=windows_file, unit=unit))
    assert found == [text.replace("\n", "\r\n") for text in expected]  # as they stand


def test_a_text_file_with_blank_lines_between_others_needs_a_unit(write):
    message = (
        "a.txt has blank lines between others, .* dataset.unit to line: 11 documents, each line is"
        r" a document \(6 of them blank\); paragraph: 3 documents, .*; file: 1 document, "
    )
    file = write("a.txt", STORIES)
    for _ in range(2):  # a refusal leaves nothing in the cache
        with pytest.raises(UserError, match=message):
            text_corpus(data_files=file)
    with pytest.raises(UserError, match="line: 14 documents, .*paragraph: 4 .*file: 2 documents"):
        text_corpus(data_files=[file, write("b.txt", "\na\nb\n")])
    assert len(text_corpus(data_files=file, unit="line")) == 11


def test_a_text_file_without_them_is_read_by_line_and_says_so(write):
    for name, content, count in (("a.txt", "\na\nb\n\n", 4), ("b.txt", "a\n", 1)):
        corpus = text_corpus(data_files=write(name, content))
        assert len(corpus) == count
        (note,) = corpus.notes
        assert (
            f"{name} is read by line: {count} document{'s' * (count > 1)}; dataset.unit=paragraph"
            in note
        )
        assert as_documents(corpus, 1).notes == (note,)
    both = NamedCorpora({"one": corpus, "two": [Document("x")]})
    assert both.notes == (f"one: {note}",) == both.first(1).notes


def test_lines_end_with_either_character_or_both(write):
    file = write("a.txt", "a\rb\r\nc\nd\u2028d\x85d\x0cd\x00")
    assert texts(text_corpus(data_files=file)) == ["a", "b", "c", "d\u2028d\x85d\x0cd\x00"]


def test_a_unit_is_for_text_files(write):
    with pytest.raises(UserError, match="dataset.unit is 'file', but it is for .txt files"):
        text_corpus(data_files=write("a.jsonl", '{"text": "a"}\n'), unit="file")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_text(write, name):
    body = {"a.txt": "abc\n", "a.jsonl": '{"text": "abc"}\n', "a.csv": "text\nabc\n"}[name]
    assert texts(text_corpus(data_files=write(name, "\ufeff" + body))) == ["abc"]


def test_ids_and_domains_are_kept_as_they_are_spelled(write):
    spelled = [
        *('"2024-05-01T00:00:00Z"', '"2024-05-01"', '"007"', '"1e5"', '"NA"', '""', '"12:30"'),
        *("7", "-0", "1.0", "1e5", "1.50", "12345678901234567890", "true", "false", "NaN"),
        *('[1.0, "a"]', '{"a": {"b": 1e2}}'),
    ]
    expected = [text.strip('"') if text[0] == '"' else text for text in spelled]
    rows = "".join(f'{{"text": "t", "id": {s}, "domain": {s}}}\n' for s in spelled)
    rows += '{"text": "t", "id": null, "domain": null}\n{"text": "t"}\n'
    array = f"[{','.join(rows.splitlines())}]"
    for file in (write("a.jsonl", rows), write("a.json", array)):
        corpus = text_corpus(data_files=file)
        assert [document.id for document in corpus] == [*expected, None, None]
        assert corpus.labels() == [(s, s) for s in [*expected, None, None]]
    fields = ["2024-05-01T00:00:00Z", "007", "1.0", "true", "NA", "12345678901234567890"]
    file = write("a.csv", "id,text\n" + "".join(f"{field},t\n" for field in fields))
    assert [document.id for document in text_corpus(data_files=file)] == fields


def test_other_columns_may_hold_anything(write):
    one = [{"text": "a", "meta": None, "id": 1}, {"text": "b", "meta": [1], "id": "x"}]
    two = [{"text": "c", "meta": {"k": "2024-05-01"}, "more": 5, "id": 2.5}]
    two += [{"text": "d", "meta": n} for n in range(5000)]
    two += [{"text": "e", "meta": "late"}]
    files = [
        write(f"{n}.jsonl", "\n".join(map(json.dumps, rows))) for n, rows in enumerate((one, two))
    ]
    corpus = text_corpus(data_files=files)
    assert len(corpus) == 5004
    assert [d.id for d in corpus[:4]] == ["1", "x", "2.5", None]
    tables = [write("a.csv", "text,n\na,1\n"), write("b.csv", "more,id,text\nx,5,b\n")]
    assert list(text_corpus(data_files=tables)) == [Document("a"), Document("b", "5")]


def test_csv_rows_may_end_with_carriage_returns_alone(write):
    file = write("a.csv", 'text,id\ra,1\r"b\rc",2\r')
    assert list(text_corpus(data_files=file)) == [Document("a", "1"), Document("b\rc", "2")]


def test_csv_fields_are_text_as_they_stand(write):
    file = write("a.csv", 'text,n\nNA,1\n"",2\n12,3\n"x, ""y""",4\nnull,5\n')
    assert texts(text_corpus(data_files=file)) == ["NA", "", "12", 'x, "y"', "null"]
    tabs = write("a.tsv", "n\ttext\n1\ta, b\n")
    assert texts(text_corpus(data_files=tabs)) == ["a, b"]
    assert texts(text_corpus(data_files=[tabs, file]))[:2] == ["a, b", "NA"]
    long = "x" * 200_000  # above the csv module's limit
    file = write("b.csv", f'\ufeffid,text\r\n1,"{long}"\r\n\r\n2,"a\r\nb\nc"\r\n')
    assert texts(text_corpus(data_files=file)) == [long, "a\r\nb\nc"]


def arrow_tables():
    when = datetime.datetime(2024, 5, 1, 12, 30)
    yield {"text": pa.array(["p", "q"]), "id": pa.array([7, None])}, ["7", None]
    yield (
        {"text": pa.array(["p", "q"]).dictionary_encode(), "id": pa.array([1.0, 0.5])},
        [*("1.0", "0.5")],
    )
    ids = pa.array(["2024-05-01", "007"])
    yield {"text": pa.array(["p", "q"], pa.large_string()), "id": ids}, ["2024-05-01", "007"]
    yield {"text": ["p", "q"], "id": [when, None]}, ["2024-05-01 12:30:00.000000", None]
    yield {"text": ["p", "q"], "id": [[1], []], "other": [{"a": 1}, None]}, ["[1]", "[]"]
    yield {"text": ["p", "q"], "id": [True, False]}, ["true", "false"]


@pytest.mark.parametrize("name", ["a.parquet", "A.PARQUET", "a.arrow", "a.feather", "a.parquet.gz"])
@pytest.mark.parametrize(("columns", "ids"), [*arrow_tables()])
def test_parquet_and_arrow(tmp_path, name, columns, ids):
    file = tmp_path / name
    write_arrow(pa.table(columns), file)
    expected = [Document("p", ids[0]), Document("q", ids[1])]
    corpus = text_corpus(data_files=str(file))
    assert list(corpus) == expected
    assert [row_id for row_id, _ in corpus.labels()] == ids


def write_arrow(table, path):
    stream = io.BytesIO()
    if ".parquet" in path.name.lower():
        pq.write_table(table, stream)
    elif path.suffix == ".feather":
        feather.write_feather(table, stream)
    else:
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    content = stream.getvalue()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_what_the_datasets_library_writes(tmp_path):
    rows = datasets.Dataset.from_dict(
        {"text": list("abcd"), "id": [1, 2, 3, 4], "domain": list("xxyy"), "other": [None] * 4}
    )
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select([3, 1])}).save_to_disk(
        tmp_path / "two"
    )
    whole = [Document(t, str(n), d) for n, (t, d) in enumerate(zip("abcd", "xxyy", strict=True), 1)]
    assert list(text_corpus(str(tmp_path / "one"))) == whole
    assert list(text_corpus(data_files=str(tmp_path / "one"))) == whole
    assert list(text_corpus(str(tmp_path / "one"), split="train[1:3]")) == whole[1:3]
    corpus = text_corpus(str(tmp_path / "two"), split="test")
    assert list(corpus) == [whole[3], whole[1]]
    assert corpus.labels() == [("4", "y"), ("2", "x")]
    assert corpus[::-1] == [whole[1], whole[3]]
    with pytest.raises(UserError, match="splits train, test: choose one by dataset.split"):
        text_corpus(str(tmp_path / "two"))
    with pytest.raises(UserError, match="has the columns text, id, domain, other"):
        text_corpus(str(tmp_path / "one"), column="body")
    with pytest.raises(UserError, match="row 0 .* column 'id' holds int64 1, but every row"):
        list(text_corpus(str(tmp_path / "one"), column="id"))
    (tmp_path / "two" / "test" / "state.json").unlink()
    with pytest.raises(UserError, match="was made by save_to_disk, but cannot be loaded"):
        text_corpus(str(tmp_path / "two"), split="test")


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


compressions = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", compressions)
def test_compressed_files(tmp_path, suffix):
    content = b"".join(b'{"text": "text %d"}\n' % n for n in range(3000))
    raw = compressions[suffix](content)
    for name in (f"a.jsonl.{suffix}", f"A.JSONL.{suffix.upper()}"):
        (tmp_path / name).write_bytes(raw)
        corpus = text_corpus(data_files=str(tmp_path / name))
        assert (len(corpus), corpus[-1].text) == (3000, "text 2999")
    (tmp_path / f"two.jsonl.{suffix}").write_bytes(raw + raw)  # as `cat` makes them
    assert len(text_corpus(data_files=str(tmp_path / f"two.jsonl.{suffix}"))) == 6000
    (tmp_path / f"cut.jsonl.{suffix}").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=f"cut.jsonl.{suffix} is cut off"):
        text_corpus(data_files=str(tmp_path / f"cut.jsonl.{suffix}"))
    (tmp_path / f"no.jsonl.{suffix}").write_bytes(content)
    with pytest.raises(UserError, match=f"no.jsonl.{suffix} cannot be read: ") as error:
        text_corpus(data_files=str(tmp_path / f"no.jsonl.{suffix}"))
    assert "\n" not in str(error.value)


def test_several_files_in_the_order_given_and_patterns(tmp_path, write, monkeypatch):
    packed = tmp_path / "z.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    plain = write("a.jsonl", '{"text": "plain"}\n')
    assert texts(text_corpus(data_files=[str(packed), plain])) == ["packed", "plain"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "folder.jsonl").mkdir()
    for pattern in (f"{tmp_path}/*.jsonl", "~/*.jsonl", "~/a.jsonl"):
        assert texts(text_corpus(data_files=pattern)) == ["plain"]
        assert texts(text_corpus(pattern)) == ["plain"]


@pytest.mark.parametrize("source", ["json", "jsonl"])
def test_a_loader_name_is_no_hub_name(write, source):
    assert texts(text_corpus(source, data_files=write("strange.dat", '{"text": "a"}\n'))) == ["a"]


def test_a_local_path_as_source(write, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    file = write("texts/a.txt", "a\n")
    assert texts(text_corpus(file)) == ["a"]
    assert texts(text_corpus(str(folder))) == ["a"]


def test_a_local_folder_is_read_as_its_files_are(write, tmp_path):
    (tmp_path / "f").mkdir()
    write("f/a.txt", "\ufeffone\ntwo\n")
    assert texts(text_corpus(str(tmp_path / "f"), unit="file")) == ["one\ntwo\n"]
    (tmp_path / "c").mkdir()
    write("c/test.csv", "text,id\nNA,007\n")
    corpus = text_corpus(str(tmp_path / "c"))
    assert list(corpus) == [Document("NA", "007")]


def test_a_rewritten_file_with_the_same_time_is_read_anew(write, tmp_path):
    file = write("a.txt", "aaa\n")
    os.utime(file, (1, 1))
    assert texts(text_corpus(data_files=file)) == ["aaa"]
    write("a.txt", "bbb\n")
    os.utime(file, (1, 1))
    assert texts(text_corpus(data_files=file)) == ["bbb"]


def test_a_name_may_hold_brackets(write):
    assert texts(text_corpus(data_files=write("w[1].txt", "a\n"))) == ["a"]


def test_no_domain_on_request(write):
    file = write("a.jsonl", '{"text": "a", "domain": "d"}\n')
    assert text_corpus(data_files=file)[0].domain == "d"
    assert text_corpus(data_files=file, domain_column="")[0].domain is None


def test_indices_and_slices(write):
    corpus = text_corpus(data_files=write("a.txt", "a\nb\nc\n"))
    assert (corpus[0].text, corpus[-1].text, len(corpus[1:])) == ("a", "c", 2)
    with pytest.raises(IndexError):
        _ = corpus[3]


def test_the_first_documents_only(write):
    corpus = text_corpus(data_files=write("a.txt", "a\nb\nc\n"))
    assert texts(as_documents(corpus, 2)) == ["a", "b"]
    assert texts(as_documents(corpus, 9)) == ["a", "b", "c"]
    assert texts(as_documents(["x", {"text": "y"}, Document("z")], 2)) == ["x", "y"]


gap = '{"text": "a"}\n\n'
bad_files = {
    "pretty.json": ('{\n  "text": "a"\n}\n', "line 1 is not JSON: .*: write an object a line, or"),
    "strings.jsonl": ('"a"\n"b"\n', 'line 1 is the string "a", but each line is an object such'),
    "lists.jsonl": ('["a"]\n["b"]\n', r'line 1 is the list \["a"\], but each line is an object'),
    "numbers.jsonl": (f"{gap}5\n", "line 3 is the number 5, but each line is an object"),
    "array.json": ('["a"]', 'item 1 is the string "a", but each item is an object'),
    "array-null.json": ('[{"text": "a"}, null]', "item 2 is null, but each item is an object"),
    "array-cut.json": ('[{"text": "a"},\n{"te', r"array-cut.json is not JSON: .*line 2"),
    "half.jsonl": (f'{gap}{{"text": "\\ud800"}}', "line 3: column 'text' holds half a surrogate"),
    "half-id.jsonl": ('{"text": "", "id": "\\ud800"}', "line 1: column 'id' holds half a surr"),
    "half-list.jsonl": ('{"text": ["\\ud800"]}', "line 1: column 'text' holds the list"),
    "deep.jsonl": ("[" * 100_000, "deep.jsonl is not JSON"),
    "deep-line.jsonl": (f'{gap}{{"a": {"[" * 100_000}', "line 3 is not JSON"),
    "blank.jsonl": ("\n \n\n", "blank.jsonl has no rows"),
    "mark.jsonl": ("\ufeff", "mark.jsonl has no rows"),
    "header.csv": ("text,id\n", "header.csv has no rows"),
    "utf16.txt": ("a\nb\n".encode("utf-16"), "utf16.txt looks like UTF-16"),
    "utf16.jsonl": ('{"text": "a"}\n'.encode("utf-16-le"), "utf16.jsonl looks like UTF-16"),
    "lfs.txt": ("version https://git-lfs.github.com/spec/v1\noid", "lfs.txt is a git-lfs pointer"),
    "lfs.parquet": ("version https://git-lfs.github.com/spec/v1\noid", "is a git-lfs pointer"),
    "quote.csv": ('text,id\na,1\n"b,2\n', "line 3 cannot be read as CSV: unexpected end of data"),
    "inner.csv": ('text\n"a "b" c"\n', "line 2 cannot be read as CSV: .*is doubled"),
    "short.tsv": ("text\tid\na\n", "line 2 has 1 field, but the header has 2 fields"),
    "after.csv": ('text,id\n"a\n\nb",1\nc\n', "line 5 has 1 field, but the header has 2"),
    "twice.csv": ("text,text\na,b\n", "twice.csv has two columns called 'text'"),
    "no.arrow": ("xxxx", "no.arrow cannot be read"),
    "empty.jsonl": ("", "empty.jsonl is empty"),
    "empty.txt": ("", "empty.txt is empty"),
    "latin.txt": ("a\nb\ncaf\u00e9\n".encode("latin-1"), "latin.txt, line 3 is not UTF-8"),
    "latin.jsonl": (
        '{"text": "a"}\n{"text": "caf\u00e9"}\n'.encode("latin-1"),
        "latin.jsonl, line 2 is not UTF-8",
    ),
    "cut.jsonl": ('{"text": "a"}\n{"text": "b', "cut.jsonl, line 2 is not JSON"),
    "words.jsonl": ("hello\n", "words.jsonl, line 1 is not JSON"),
    "ragged.csv": (
        "text,d\na,b\nc,d,e,f\n",
        "ragged.csv, line 3 has 4 fields, but the header has 2",
    ),
    "no.parquet": ("xxxx", "no.parquet cannot be read: "),
    "a.xyz": ("a\n", "cannot tell what .*a.xyz is by its suffix"),
}


@pytest.mark.parametrize("name", bad_files)
def test_a_bad_file_is_named_with_its_line(write, name):
    content, message = bad_files[name]
    with pytest.raises(UserError, match=message) as error:
        list(text_corpus(data_files=write(name, content)))
    assert "\n" not in str(error.value)


bad_rows = {
    '{"text": "a"}\n\n{"text": null}\n': "line 3: column 'text' holds null, but",
    '{"text": "a"}\n{"x": 1}\n': "dataset.column is 'text', but .*, line 2 has the columns x",
    '{"text": "a"}\n{}\n': "dataset.column is 'text', but .*, line 2 has the columns none",
    '{"text": "a"}\n{"text": 5}\n': "line 2: column 'text' holds the number 5, but",
    '{"text": 1.0}\n{"text": "a"}\n': "line 1: column 'text' holds the number 1.0, but",
    '{"text": true}\n': "line 1: column 'text' holds the boolean true, but",
    '{"text": "a"}\n{"text": ["b"]}\n': r"line 2: column 'text' holds the list \[\"b\"\], but",
    '{"text": {"a": 1.0}}\n': "line 1: column 'text' holds the object {\"a\": 1.0}, but",
}


@pytest.mark.parametrize("content", bad_rows)
def test_a_row_that_is_no_text_is_named_by_its_line(write, content):
    with pytest.raises(UserError, match=bad_rows[content]):
        text_corpus(data_files=write("a.jsonl", content))


bad_columns = [
    (pa.array(["a", None]), r"row 1 \(the first is 0\): column 'text' holds null, but"),
    (pa.nulls(2), "row 0 .* column 'text' holds null"),
    (pa.array([1, 2]), "column 'text' holds int64, but every row needs a text: set dataset.col"),
    (pa.array([{"a": 1}, None]), "column 'text' holds struct<a: int64>, but"),
    (pa.array([b"a", b"b"]), "column 'text' holds binary, but"),
    (pa.array([b"a", b"\xff"]).view(pa.string()), "row 1 .*'text' holds bytes that are not UTF-8"),
]


@pytest.mark.parametrize(("column", "message"), bad_columns)
def test_a_column_that_holds_no_texts(tmp_path, column, message):
    write_arrow(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet.*{message}"):
        text_corpus(data_files=str(tmp_path / "a.parquet"))
    datasets.Dataset(pa.table({"text": column})).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="saved, rows? .*'text' holds"):
        list(text_corpus(str(tmp_path / "saved")))


def test_an_empty_parquet_has_no_rows(tmp_path):
    write_arrow(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet has no rows: there is nothing to measure"):
        text_corpus(data_files=str(tmp_path / "a.parquet"))


def test_wrong_column_lists_the_columns(write):
    file = write("a.jsonl", '{"body": "b", "kind": 1}\n')
    with pytest.raises(
        UserError, match="dataset.column is 'text', but .* has the columns body, kind"
    ):
        text_corpus(data_files=file)
    with pytest.raises(UserError, match="dataset.domain_column is 'dom', but"):
        text_corpus(data_files=file, column="body", domain_column="dom")


def test_splits_and_parts_of_them(write, tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    for split, count in (("train", 200), ("test", 10)):
        rows = "".join(f'{{"text": "{split} {n}"}}\n' for n in range(count))
        (folder / f"{split}-0001.jsonl").write_text(rows)
    (folder / "notes.md").write_text("Not a text to be measured.\n")
    expected = {
        "test": [f"test {n}" for n in range(10)],
        "train[:3]": ["train 0", "train 1", "train 2"],
        "train[99%:]": ["train 198", "train 199"],
        "test[-1:]+train[:1]": ["test 9", "train 0"],
    }
    for split, found in expected.items():
        assert texts(text_corpus(str(folder), split=split)) == found
        assert texts(text_corpus(data_files=str(folder), split=split)) == found
    (folder / "train-0001.jsonl").write_text("broken\n")
    assert len(text_corpus(str(folder), split="test")) == 10  # what is not asked for is not read
    (folder / "more.jsonl").write_text('{"text": "lost?"}\n')
    (note,) = text_corpus(str(folder), split="test").notes
    assert "1 file in no split by name, not read: " in note
    assert "more.jsonl" in note
    with pytest.raises(UserError, match="splits train, test: choose one by dataset.split"):
        text_corpus(str(folder))


def test_wrong_split_lists_the_splits(write):
    file = write("test.jsonl", '{"text": "a"}\n')
    with pytest.raises(UserError, match="split is 'test', but .*test.jsonl has the split train:"):
        text_corpus(data_files=file, split="test")
    with pytest.raises(UserError, match=r"split is 'train\[5', but .*Unrecognized"):
        text_corpus(data_files=file, split="train[5")
    with pytest.raises(UserError, match=r"split train\[:0\], has no rows: there is nothing to m"):
        text_corpus(data_files=file, split="train[:0]")


def test_names_of_files_that_are_none(write, tmp_path, monkeypatch):
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "blob")
    for pattern in ("gone.jsonl", "*.jsonl"):
        with pytest.raises(UserError, match="gone.jsonl is a link to .*blob, but there is no such"):
            text_corpus(data_files=str(tmp_path / pattern))
    with pytest.raises(UserError, match="gone.jsonl is a link to .*blob, but there is no such"):
        text_corpus(str(tmp_path))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match="pipe.txt is no regular file"):
        text_corpus(data_files=str(tmp_path / "pipe.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no file that can be read"):
        text_corpus(str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"of several kinds: .*a.jsonl \(json\), .*b.txt \(text\)"):
        text_corpus(data_files=[write("a.jsonl", "x"), write("b.txt", "x")])
    for argument in ("name", "revision"):
        with pytest.raises(
            UserError, match=f"dataset.{argument} is 'x', but that is for data sets"
        ):
            text_corpus(data_files=str(tmp_path / "b.txt"), **{argument: "x"})
    with pytest.raises(UserError, match="dataset.name is 'x', but that is for data sets of a hub"):
        text_corpus(str(tmp_path), name="x")
    with pytest.raises(UserError, match="dataset.data_files names .*b.txt twice"):
        text_corpus(data_files=[str(tmp_path / "b.txt"), str(tmp_path / "?.txt")])
    with pytest.raises(UserError, match="among other files, but that is a folder"):
        text_corpus(data_files=[str(tmp_path / "b.txt"), str(tmp_path / "empty")])


def test_folders_of_odd_names_and_hidden_files(write, tmp_path):
    folder = tmp_path / "w[1] test.jsonl"
    (folder / "a" / ".hidden").mkdir(parents=True)
    (folder / "__MACOSX").mkdir()
    (folder / "a" / "x.JSONL").write_text('{"text": "x"}\n')
    for name in ("a/.y.jsonl", "a/.hidden/y.jsonl", "__MACOSX/y.jsonl"):
        (folder / name).write_text('{"text": "y"}\n')
    assert texts(text_corpus(str(folder))) == ["x"]
    assert texts(text_corpus(str(folder / "a"))) == ["x"]


def test_a_clone_whose_readme_tells_the_splits_is_not_read_by_names(tmp_path):
    folder = tmp_path / "clone"
    folder.mkdir()
    (folder / "one.jsonl").write_text('{"text": "one"}\n')
    for readme in ("# Texts\n", "---\nlicense: mit\n---\nconfigs:\n---\n", "---\nconfigs: [\n"):
        (folder / "README.md").write_text(readme)
        assert texts(text_corpus(str(folder))) == ["one"]
    files = "  data_files:\n  - {split: train, path: one.jsonl}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n{files}---\n# Texts\n")
    with pytest.raises(UserError, match="README.md of .* says which of its files are which split"):
        text_corpus(str(folder))
    assert texts(text_corpus(data_files=str(folder / "*.jsonl"))) == ["one"]


def test_an_unwritable_cache_is_named(write, tmp_path, monkeypatch):
    file = write("a.txt", "a\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "a.txt" / "cache")
    with pytest.raises(UserError, match="cache of data sets .*a.txt/cache cannot be written: Not"):
        text_corpus(data_files=file)


def test_several_processes_share_one_build(write, tmp_path, hf_cache):
    file = write("a.jsonl", "".join(f'{{"text": "text {n}"}}\n' for n in range(20_000)))
    code = (
        "import sys; from ppl_eval.data import text_corpus;"
        "print(len(text_corpus(data_files=sys.argv[1])))"
    )
    env = {**os.environ, "HF_DATASETS_CACHE": str(hf_cache)}
    command = [sys.executable, "-c", code, file]
    running = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0] for process in running] == [b"20000\n"] * 2
    assert len(list(hf_cache.rglob("*.arrow"))) == 1


@pytest.fixture
def hub(monkeypatch):
    """Asks a hub of the given address, as without HF_HUB_OFFLINE."""

    def ask(endpoint, source="mine/set"):
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        return text_corpus(source)

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return ask


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("https://hub.invalid", r"the name hub.invalid does not resolve \(.*\)"),
        ("http://127.0.0.1:9", r"127.0.0.1:9 does not answer \(Connection refused\)"),
    ],
)
def test_a_hub_that_is_not_there(hub, endpoint, reason):
    with pytest.raises(
        UserError, match=f"source is 'mine/set', .*: {reason}: .* set dataset.data_files=FILE"
    ):
        hub(endpoint)


def test_without_a_hub_the_cache_is_read_on_request(hub, hf_cache, monkeypatch):
    def rows():
        yield {"text": "a", "id": datetime.datetime(2024, 5, 1), "other": None}

    Generator(
        generator=rows, config_id="default", dataset_name="set", repo_id="mine/set", hash="a"
    ).download_and_prepare()
    with pytest.raises(
        UserError, match="does not answer .* HF_HUB_OFFLINE=1 reads what was fetched"
    ):
        hub("http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    corpus = text_corpus("mine/set")
    assert list(corpus) == [Document("a", "2024-05-01 00:00:00.000000")]
    assert "column 'id' holds timestamp[us], which is printed as Arrow does" in corpus.notes[0]


def test_a_hub_behind_a_proxy_or_slow_is_left_to_the_library(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert out_of_reach("https://hub.invalid") is None
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, says nothing
        assert out_of_reach(f"http://127.0.0.1:{server.getsockname()[1]}") is None


def test_remote_files(write, tmp_path, monkeypatch):
    write("a.jsonl", '{"text": "a", "id": "2024-05-01T00:00:00Z"}\n')
    write("b.jsonl.gz", gzip.compress(b'{"text": "b", "other": 1}\n'))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", tmp_path / "downloads")
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        corpus = text_corpus(data_files=[f"{address}/a.jsonl", f"{address}/b.jsonl.gz"])
        assert list(corpus) == [Document("a", "2024-05-01T00:00:00Z"), Document("b")]
        with pytest.raises(UserError, match="c.jsonl cannot be fetched"):
            text_corpus(data_files=f"{address}/c.jsonl")
        server.shutdown()
    with pytest.raises(UserError, match="d.jsonl cannot be fetched: .* does not answer"):
        text_corpus(data_files=f"{address}/d.jsonl")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_missing_files_and_sources_ask_no_hub():
    with pytest.raises(UserError, match=r"data_files is 'no.jsonl', but there is no such file"):
        text_corpus(data_files="no.jsonl")
    with pytest.raises(UserError, match=r"source is './no.txt', but there is no such file"):
        text_corpus("./no.txt")
    with pytest.raises(
        UserError, match="source 'txt', which is a loader's name, and no data_files"
    ):
        text_corpus("txt")
    with pytest.raises(UserError, match="no source and no data_files"):
        text_corpus()
    with pytest.raises(UserError, match="unit is 'page'"):
        text_corpus(data_files="x.txt", unit="page")
    with pytest.raises(UserError, match="source is 'mine/set' and data_files is"):
        text_corpus("mine/set", data_files=__file__)


wrong_arguments = [
    ({"column": None}, "dataset.column is None"),
    ({"column": ""}, "dataset.column is ''"),
    ({"data_files": 5}, "dataset.data_files is 5"),
    ({"data_files": [5]}, r"dataset.data_files is \[5\]"),
    ({"source": 5}, "dataset.source is 5"),
    ({"source": ""}, "dataset.source is ''"),
    ({"split": 5}, "dataset.split is 5"),
    ({"name": ""}, "dataset.name is ''"),
    ({"domain_column": 5}, "dataset.domain_column is 5"),
]


@pytest.mark.parametrize(("arguments", "message"), wrong_arguments)
def test_arguments_of_the_wrong_kind(arguments, message):
    with pytest.raises(UserError, match=message):
        text_corpus(**arguments)


def test_a_bad_file_is_not_reported_by_datasets_as_well(write, capfd):
    with pytest.raises(UserError):
        text_corpus(data_files=write("a.jsonl", '{"text": "a"}\n{"text'))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("row", [5, None, {"body": "x"}, {"text": None}])
def test_python_rows_are_checked(row):
    with pytest.raises(UserError, match="document 1 is"):
        as_documents(["a", row])


def test_a_document_that_comes_as_tokens_keeps_them():
    (document,) = as_documents([Document("", 7, "d", tokens=np.arange(3, dtype=np.int32))])
    assert (document.id, document.domain, document.tokens.tolist()) == (7, "d", [0, 1, 2])


def test_no_documents_at_all():
    with pytest.raises(UserError, match="no documents"):
        as_documents([])


def test_several_data_sets_as_one_sequence(write):
    lines = "".join(json.dumps({"text": f"a{n}", "domain": f"d{n % 2}"}) + "\n" for n in range(5))
    corpora = NamedCorpora(
        {
            "one": text_corpus(data_files=write("a.jsonl", lines)),
            "two": [Document("b0"), Document("b1")],
        }
    )
    whole = [(f"a{n}", f"one/d{n % 2}") for n in range(5)] + [("b0", "two"), ("b1", "two")]
    found = [(document.text, document.domain) for document in corpora]
    assert found == whole
    assert [domain for _, domain in corpora.labels()] == [domain for _, domain in whole]
    for piece in (slice(3, 6), slice(None), slice(-2, None), slice(6, 1, -2), slice(1, 7, 3)):
        assert [(d.text, d.domain) for d in corpora[piece]] == whole[piece]
    assert corpora[-1].text == "b1"
    assert [d.text for d in corpora.first(1)] == ["a0", "b0"]
    with pytest.raises(IndexError):
        corpora[7]
