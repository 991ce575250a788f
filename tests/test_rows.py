"""Rows of .jsonl and .parquet files as documents, and what the program says before and after."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import config
from data import corpora, loader, prepare, tokenizer
from data.corpora import Corpus

ROOT = Path(config.__file__).parent.parent
END = "<|endoftext|>"
TEXTS = [
    "one",
    "zwei ä∩😀",
    "three\r\n3",
    " \n\t",
    "五\u2028\x85\x1c.",
    f"a{END}b{END}",
    '"\\/\x00\x7f',
]


def write_jsonl(path: Path, rows, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, **options) + "\n" for row in rows]
    path.write_bytes("".join(lines).encode())
    return path


def write_parquet(path: Path, texts, field: str = "text", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"id": range(len(texts)), field: texts})
    pyarrow.parquet.write_table(table, path, **options)
    return path


def write_rows(path: Path, texts, field: str = "text") -> Path:
    if path.suffix == ".parquet":
        return write_parquet(path, pyarrow.array(texts), field)
    return write_jsonl(path, [{"id": i, field: text} for i, text in enumerate(texts)])


def read(corpus: Corpus, start: int = 0) -> list[tuple[str | None, bytes]]:
    return [(split, b"".join(chunks)) for split, chunks in corpus.documents(start)]


def found(path: Path, *field: str) -> list[bytes]:
    """The documents of a path with rows in it: none of them names its split."""
    documents = read(corpora.find(str(path), *field))
    assert {split for split, _ in documents} <= {None}
    return [text for _, text in documents]


def documents_of(folder: Path, split: str, encoding) -> list[str]:
    """The texts between the end marks, read without the loader."""
    ids = [np.frombuffer(p.read_bytes()[1024:], "<u2") for p in sorted(folder.glob(f"{split}_*"))]
    ids = np.concatenate(ids) if ids else np.zeros(0, np.int64)
    ends = [*np.flatnonzero(ids == encoding.eot_token), len(ids)]
    assert ends[0] == 0
    return [encoding.decode(ids[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


def prepared(path: Path, folder: Path, name: str = "byte", share: float = 0.0) -> dict:
    corpus = replace(corpora.find(str(path)), val_share=share)
    return prepare.prepare(corpus, tokenizer.load(name), folder)


def program(*argv: object) -> int:
    """The exit code of the program, run in this process."""
    return config.run_program(prepare.main, [str(a) for a in argv])


@pytest.fixture
def byte():
    return tokenizer.load("byte")


# Rows


@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "utf-8"])
def test_each_row_of_a_jsonl_file_is_a_document_in_order(ascii_only, tmp_path):
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    path = write_jsonl(tmp_path / "t.jsonl", rows, ensure_ascii=ascii_only)
    assert found(path) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("line_end", ["\r\n", "\n\n", "\n \t\r\n"])
@pytest.mark.parametrize("last", ["", None])
def test_blank_lines_and_any_line_end_lie_between_rows(line_end, last, tmp_path):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    path = tmp_path / "t.jsonl"
    path.write_bytes((line_end.join(lines) + (line_end if last is None else last)).encode())
    assert found(path) == [text.encode() for text in TEXTS]


KINDS = {
    "string": pyarrow.array(TEXTS),
    "large string": pyarrow.array(TEXTS, pyarrow.large_string()),
    "string view": pyarrow.array(TEXTS, pyarrow.string_view()),
    "categories": pyarrow.array(TEXTS).dictionary_encode(),
    "bytes": pyarrow.array([text.encode() for text in TEXTS]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 3, 1000])
def test_each_row_of_a_parquet_file_is_a_document_whatever_its_row_groups(kind, group, tmp_path):
    path = write_parquet(tmp_path / "t.parquet", KINDS[kind], row_group_size=group)
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == -(-len(TEXTS) // group)
    assert found(path) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("n_files", [1, 3])
def test_a_parquet_file_of_more_rows_than_one_read_takes_comes_whole(n_files, tmp_path):
    texts = [f"text {i}" for i in range(1000 * n_files)]
    for i in range(n_files):
        part = texts[1000 * i : 1000 * (i + 1)]
        write_parquet(tmp_path / f"{i}.parquet", pyarrow.array(part), row_group_size=300)
    assert found(tmp_path) == [text.encode() for text in texts]


def mixed_folder(folder: Path) -> list[str]:
    """Files of all kinds, and their documents in the order that is due: sorted by path."""
    write_jsonl(folder / "a" / "rows.jsonl", [{"text": "a1"}, {"text": ""}, {"text": "a3"}])
    write_parquet(folder / "b.parquet", pyarrow.array(["b1", None, "b3"]))
    (folder / "c.txt").write_bytes(b"c is one\r\ndocument")
    write_jsonl(folder / "d.JSONL", [{"text": "d1"}])
    (folder / "e.md").write_bytes(b"e")
    write_jsonl(folder / "f.json", [{"text": "not of a known kind"}])
    write_jsonl(folder / ".g.jsonl", [{"text": "hidden"}])
    return ["a1", "", "a3", "b1", "", "b3", "c is one\r\ndocument", "d1", "e"]


def test_a_folder_may_mix_rows_and_text_files(byte, tmp_path):
    texts = mixed_folder(tmp_path / "mixed")
    assert found(tmp_path / "mixed") == [text.encode() for text in texts]
    meta = prepared(tmp_path / "mixed", tmp_path / "out")
    assert documents_of(tmp_path / "out", "train", byte) == [text for text in texts if text]
    assert meta["empty_documents"] == 2
    assert meta["source"]["files"] == 5
    assert meta["source"]["text_field"] == "text"


def make_jsonl(folder: Path) -> Path:
    return write_rows(folder / "t.jsonl", [*TEXTS, "", None, *TEXTS])


def make_parquet(folder: Path) -> Path:
    texts = pyarrow.array([*TEXTS, "", None, *TEXTS] * 40)
    return write_parquet(folder / "t.parquet", texts, row_group_size=100)


def make_mixed(folder: Path) -> Path:
    mixed_folder(folder / "mixed")
    return folder / "mixed"


def make_text(folder: Path) -> Path:
    (folder / "t.txt").write_bytes(b"0123456789" * 10)
    return folder / "t.txt"


def make_texts(folder: Path) -> Path:
    for i in range(70):
        (folder / f"{i}.txt").write_bytes(b"text %d" % i)
    return folder


@pytest.mark.parametrize("make", [make_jsonl, make_parquet, make_mixed, make_text, make_texts])
def test_documents_from_the_nth_on_are_the_rest_of_all_documents(make, tmp_path):
    corpus = corpora.find(str(make(tmp_path)))
    everything = read(corpus)
    assert len(everything) > 1
    step = max(1, len(everything) // 30)
    for start in [*range(0, len(everything), step), len(everything), len(everything) + 5]:
        assert read(corpus, start) == everything[start:]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_text_field_may_have_any_name(suffix, tmp_path):
    path = write_rows(tmp_path / f"t{suffix}", TEXTS, "the body ä")
    assert found(path, "the body ä") == [text.encode() for text in TEXTS]
    assert corpora.find(str(path), "the body ä").source["text_field"] == "the body ä"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_program_takes_the_text_field_as_an_option(suffix, byte, tmp_path, capsys):
    path, data_dir = write_rows(tmp_path / f"t{suffix}", TEXTS, "body"), tmp_path / "data"
    argv = [path, "--tokenizer", "byte", "--data-dir", data_dir]
    assert program(*argv) == 2
    assert "--text-field" in capsys.readouterr().err
    assert program(*argv, "--text-field", "body") == 0
    folder = prepare.folder_of(str(path), "byte", data_dir)
    both = [text for split in ("val", "train") for text in documents_of(folder, split, byte)]
    assert sorted(both) == sorted(TEXTS)
    assert loader.read_meta(folder)["source"]["text_field"] == "body"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_missing_field_is_refused_with_the_file_and_the_fields_there_are(suffix, tmp_path):
    path = write_rows(tmp_path / f"t{suffix}", TEXTS, "body")
    with pytest.raises(ValueError, match=r"has no field 'text', but id, body") as refusal:
        found(path)
    assert str(path) in str(refusal.value)
    assert "--text-field" in str(refusal.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("force", [(), ("--force",)], ids=["new", "force"])
def test_a_refused_corpus_leaves_no_folder_behind(suffix, force, tmp_path):
    path, data_dir = write_rows(tmp_path / f"t{suffix}", TEXTS, "body"), tmp_path / "data"
    assert program(path, "--tokenizer", "byte", "--data-dir", data_dir, *force) == 2
    assert [p for p in data_dir.iterdir() if p.suffix != ".lock"] == []


BAD_LINES = {
    "another field": (b'{"body": "x", "id": 1}', "no field 'text', but body, id"),
    "no field": (b"{}", "no field 'text'"),
    "broken": (b'{"text": "x"', "JSON"),
    "no json": (b"plain text", "JSON"),
    "cut in a string": (b'{"text": "x', "JSON"),
    "two rows": (b'{"text": "x"} {"text": "y"}', "JSON"),
    "list": (b'["text"]', "list"),
    "string": (b'"text"', "str"),
    "number": (b"5", "int"),
    "null": (b"null", "NoneType"),
    "field is a number": (b'{"text": 5}', "text.*int"),
    "field is zero": (b'{"text": 0}', "text.*int"),
    "field is false": (b'{"text": false}', "text.*bool"),
    "field is a list": (b'{"text": ["x"]}', "text.*list"),
    "field is an empty list": (b'{"text": []}', "text.*list"),
    "field is an object": (b'{"text": {"text": "x"}}', "text.*dict"),
    "nested without end": (b"[" * 100_000, "JSON"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_without_text_is_refused_by_its_number(name, tmp_path):
    line, said = BAD_LINES[name]
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "fine"}\r\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(ValueError, match=rf"line 3 of {re.escape(str(path))}") as refusal:
        found(path)
    assert re.search(said, str(refusal.value))
    assert len(str(refusal.value)) < 400


BAD_COLUMNS = [pyarrow.array([1, 2]), pyarrow.array([["a"], ["b"]]), pyarrow.array([{"x": "a"}])]


@pytest.mark.parametrize("column", BAD_COLUMNS, ids=lambda column: str(column.type))
def test_a_column_that_is_no_text_is_refused_with_file_and_type(column, tmp_path):
    path = write_parquet(tmp_path / "t.parquet", column)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refusal:
        found(path)
    assert str(column.type).partition("<")[0] in str(refusal.value)


def cut(data: bytes) -> bytes:
    return data[:-20]


def damaged(data: bytes) -> bytes:
    """Its compressed texts are zeros; the table of contents at the end is whole."""
    start = data.index(b"some text 0")
    return data[:start] + bytes(400) + data[start + 400 :]


@pytest.mark.parametrize(
    "spoil", [lambda _: b"", lambda _: b"PAR1 not really PAR1", lambda _: b"text", cut, damaged]
)
def test_what_is_no_parquet_file_is_refused_by_its_name(spoil, tmp_path, capfd):
    path = tmp_path / "t.parquet"
    write_parquet(path, pyarrow.array([f"some text {i}" for i in range(2000)]))
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        found(path)
    assert program(path, "--data-dir", tmp_path / "data") == 2
    assert capfd.readouterr().err.startswith(f"error: {path}")
    assert list((tmp_path / "data").rglob("*.bin")) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_text_are_skipped_and_counted(suffix, byte, tmp_path):
    path = write_rows(tmp_path / f"t{suffix}", ["", "a", None, "b", " ", "", None])
    meta = prepared(path, tmp_path / "out")
    assert meta["empty_documents"] == 4
    assert documents_of(tmp_path / "out", "train", byte) == ["a", "b", " "]
    assert sum(s["documents"] for s in meta["shards"]) == 3


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_texts_with_end_marks_line_ends_and_any_character_come_back(suffix, name, tmp_path):
    meta = prepared(write_rows(tmp_path / f"t{suffix}", TEXTS), tmp_path / "out", name)
    encoding = tokenizer.load(name)
    assert documents_of(tmp_path / "out", "train", encoding) == TEXTS
    assert sum(s["documents"] for s in meta["shards"]) == len(TEXTS)
    assert sum(s["bytes"] for s in meta["shards"]) == len("".join(TEXTS).encode())
    assert meta["replaced_invalid_utf8"] == 0


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "\udc80\udcff", "\ude00\ud83d 😀"])
def test_half_a_character_in_an_escape_is_replaced_and_counted(text, byte, tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "before"}, {"text": text}])
    assert b"\\ud" in path.read_bytes()
    meta = prepared(path, tmp_path / "out")
    before, after = documents_of(tmp_path / "out", "train", byte)
    assert before == "before"
    wanted = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert re.sub("\ufffd+", "\ufffd", after) == re.sub("\ufffd+", "\ufffd", wanted)
    assert meta["replaced_invalid_utf8"] == after.count("\ufffd") > 0


def test_a_carriage_return_between_the_parts_of_a_row_does_not_end_it(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": 1,\r"text":\r"a"}\r\n{"text": "b"}\r')
    assert found(path) == [b"a", b"b"]


def test_a_byte_order_mark_before_the_first_row_is_no_part_of_it(tmp_path):
    path = write_rows(tmp_path / "t.jsonl", TEXTS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert found(path) == [text.encode() for text in TEXTS]


def test_a_pair_of_escapes_is_one_character(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(rb'{"text": "\ud83d\ude00\u00e4\r\n"}')
    assert found(path) == ["😀ä\r\n".encode()]


INVALID = [
    b"a\xffb",
    b"\x80\x80",
    b"ends within \xf0\x9f\x98",
    b"over\xc0\xaflong",
    b"\xed\xa0\x80",
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_invalid_utf8_in_rows_is_replaced_and_counted_as_in_text_files(suffix, byte, tmp_path):
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        write_parquet(path, pyarrow.array(INVALID).view(pyarrow.string()))
    else:
        path.write_bytes(b"".join(b'{"text": "%s"}\n' % data for data in INVALID))
    meta = prepared(path, tmp_path / "out")
    wanted = [data.decode("utf-8", "replace") for data in INVALID]
    assert documents_of(tmp_path / "out", "train", byte) == wanted
    assert meta["replaced_invalid_utf8"] == "".join(wanted).count("\ufffd")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_stay_in_their_split_when_others_are_appended(suffix, byte, tmp_path):
    """nanoGPT PR #10: other validation tokens came with new data."""
    splits = []
    for n in (400, 500):
        texts = [f"Text number {i}." for i in range(n)]
        path = write_rows(tmp_path / f"t{suffix}", texts)
        prepared(path, tmp_path / "out", share=0.1)
        train, val = (documents_of(tmp_path / "out", s, byte) for s in ("train", "val"))
        assert sorted(train + val) == sorted(texts)
        assert 0.05 * n < len(val) < 0.2 * n
        splits.append(dict.fromkeys(train, "train") | dict.fromkeys(val, "val"))
    assert {text: splits[1][text] for text in splits[0]} == splits[0]


def test_all_kinds_of_files_give_the_same_tokens_of_the_same_texts(tmp_path):
    texts = [f"{text} {i}" for i in range(30) for text in TEXTS]
    write_rows(tmp_path / "rows.jsonl", texts)
    write_rows(tmp_path / "rows.parquet", texts)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:03d}.txt").write_bytes(text.encode())
    metas = [
        prepared(tmp_path / name, tmp_path / f"out {name}", "gpt2", share=0.1)
        for name in ("rows.jsonl", "rows.parquet", "texts")
    ]
    assert len(metas[0]["shards"]) == 2
    assert metas[0]["shards"] == metas[1]["shards"] == metas[2]["shards"]


# What the program says of what is prepared: --inspect


@pytest.fixture
def folder(tmp_path, byte):
    """Prepared tokens: two training shards and one for validation."""
    texts = [("train", "first line ä\nsecond line"), ("val", "of val"), ("train", "x" * 90)]

    def documents(start=0):
        for split, text in [*texts, ("train", ""), ("train", b"\xff")][start:]:
            yield split, iter((text if isinstance(text, bytes) else text.encode(),))

    made = Corpus("made", {"text": "the source"}, documents)
    prepare.prepare(made, byte, tmp_path / "made-byte", shard_tokens=100)
    return tmp_path / "made-byte"


def test_inspection_shows_counts_sizes_hashes_and_the_first_lines(folder, capsys):
    assert program("--inspect", folder) == 0
    out = capsys.readouterr().out.splitlines()
    assert re.search(r"made, byte tokens, complete$", out[0])
    assert "the source" in out[1]
    assert re.search(r"empty documents: 1; .*: 1$", out[2])
    # 25 + 90 bytes, U+FFFD's three, and an end mark for each of the three documents.
    for line, name, tokens, documents, ratio, size in (
        (out[3], "val_000000.bin", 7, 1, "0.86", "1,038"),
        (out[4], "train_000000.bin", 100, 2, "0.98", "1,224"),
        (out[5], "train_000001.bin", 21, 1, "0.95", "1,066"),
    ):
        digest = loader.read_meta(folder)["shards"][out.index(line) - 3]["sha256"]
        assert line.startswith(f"{name}  {tokens} tokens, {documents} documents, {ratio} bytes")
        assert line.endswith(f" {size} bytes, sha256 {digest[:16]} checked")
    lines = [f"val| {END}of val", f"train| {END}first line ä", f"train| second line{END}{'x' * 73}"]
    assert out[6:] == lines


def test_inspection_finds_a_single_flipped_bit(folder, capsys):
    shard = folder / "train_000000.bin"
    data = bytearray(shard.read_bytes())
    data[1024 + 2 * 50] ^= 1
    shard.write_bytes(data)
    assert program("--inspect", folder) == 2
    out, err = capsys.readouterr()
    assert "train_000000.bin; prepare again" in err
    lines = {line.split()[0]: line for line in out.splitlines() if ".bin" in line}
    assert "DIFFERS" in lines["train_000000.bin"]
    assert "checked" not in lines["train_000000.bin"]
    for name in ("train_000001.bin", "val_000000.bin"):
        assert lines[name].endswith("checked")


def test_inspection_of_tokens_in_preparation_says_so(folder, capsys):
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["complete"] = False
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert program("--inspect", folder) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("not complete")


def is_gone(folder: Path) -> None:
    shutil.rmtree(folder)


def is_empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def lacks_a_shard(folder: Path) -> None:
    (folder / "train_000001.bin").unlink()


def is_cut(folder: Path) -> None:
    path = folder / "train_000001.bin"
    path.write_bytes(path.read_bytes()[:-2])


def is_other_json(folder: Path) -> None:
    (folder / "meta.json").write_text('{"a": 1}', encoding="utf-8")


def counts_in_words(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["shards"][0]["documents"] = "two"
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def test_inspection_prepares_nothing_beside(folder, capfd):
    assert program("stdlib", "--inspect", folder) == 2
    assert "leave out stdlib" in capfd.readouterr().err


def names_no_shards(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    (folder / "meta.json").write_text(json.dumps(meta | {"shards": []}), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (is_gone, "meta.json"),
        (names_no_shards, "meta.json"),
        (is_empty, "meta.json"),
        (is_other_json, "meta.json"),
        (counts_in_words, "meta.json"),
        (lacks_a_shard, "train_000001.bin"),
        (is_cut, "train_000001.bin"),
    ],
)
def test_inspection_of_a_wrong_folder_is_one_clear_error(spoil, named, folder, capfd):
    spoil(folder)
    assert program("--inspect", folder) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(folder / named) in err


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_command_after_a_change_takes_the_field_that_was_prepared(suffix, byte, tmp_path):
    path, data_dir = write_rows(tmp_path / f"t{suffix}", TEXTS, "the body"), tmp_path / "data"
    argv = [path, "--tokenizer", "byte", "--data-dir", data_dir, "--text-field", "the body"]
    assert program(*argv) == 0
    write_rows(path, TEXTS[:-1], "the body")
    with pytest.raises(ValueError, match="has changed since") as refusal:
        prepare.ensure(str(path), "byte", data_dir)
    (command,) = re.findall("`python -m data.prepare (.*)`", str(refusal.value))
    assert program(*shlex.split(command)) == 0
    assert prepare.ensure(str(path), "byte", data_dir).is_dir()


@pytest.mark.parametrize("damaged", ["", "[]", '{"a": 1}'])
def test_force_replaces_tokens_whose_meta_json_is_damaged(damaged, byte, tmp_path):
    path, data_dir = write_rows(tmp_path / "t.jsonl", TEXTS), tmp_path / "data"
    argv = [path, "--tokenizer", "byte", "--data-dir", data_dir]
    assert program(*argv) == 0
    meta = prepare.folder_of(str(path), "byte", data_dir) / "meta.json"
    before = meta.read_bytes()
    meta.write_text(damaged, encoding="utf-8")
    assert program(*argv) == 2
    assert program(*argv, "--force") == 0
    assert meta.read_bytes() == before


def test_preparing_again_what_has_changed_is_refused_and_not_said_to_be_done(tmp_path, capfd):
    path, data_dir = write_rows(tmp_path / "t.jsonl", TEXTS, "body"), tmp_path / "data"
    argv = [path, "--tokenizer", "byte", "--data-dir", data_dir]
    assert program(*argv, "--text-field", "body") == 0
    assert program(*argv, "--text-field", "body") == 0
    assert "prepared already" in capfd.readouterr().out
    assert program(*argv, "--text-field", "title") == 2
    assert "has changed since it was prepared" in capfd.readouterr().err
    # A folder that does not tell what the source was like can't be taken for the same.
    path = prepare.folder_of(str(path), "byte", data_dir) / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    del meta["source"]["bytes"]
    path.write_text(json.dumps(meta), encoding="utf-8")
    assert program(*argv, "--text-field", "body") == 2
    assert "has changed since it was prepared" in capfd.readouterr().err


@pytest.mark.parametrize("texts", [[], [""], [None, "", None]])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_corpus_without_any_text_is_refused_and_leaves_no_folder(suffix, texts, tmp_path, capfd):
    path = write_rows(tmp_path / f"t{suffix}", texts)
    argv = [path, "--tokenizer", "byte", "--data-dir", tmp_path / "data"]
    assert program(*argv) == 2
    assert "has no text" in capfd.readouterr().err
    assert not [p for p in (tmp_path / "data").iterdir() if p.is_dir()]


@pytest.mark.parametrize("key", ["corpus", "source"])
def test_tokens_whose_meta_json_does_not_tell_their_source_are_shown(key, folder, capsys):
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    del meta[key], meta["shards"][0]["documents"], meta["shards"][0]["bytes"]
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert program("--inspect", folder) == 0
    assert " 7 tokens, 0 documents" in capsys.readouterr().out


# Room on the disk

Usage = namedtuple("Usage", "total used free")


def set_free(monkeypatch, n_bytes: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**15, 0, int(n_bytes)))


def large(n_bytes: int = 3_000_000_000) -> Corpus:
    return Corpus("large", {"text": "large"}, lambda start=0: iter(()), n_bytes)


@pytest.mark.parametrize(("name", "need"), [("gpt2", 3e9), ("byte", 6e9)])
def test_a_disk_with_too_little_room_is_refused_with_what_it_needs_and_has(
    name, need, tmp_path, monkeypatch
):
    encoding, folder = tokenizer.load(name), tmp_path / "large-gpt2"
    set_free(monkeypatch, need)
    told = prepare.estimate(large(), encoding, folder, 1)
    assert told.startswith(f"3.000 GB of text, up to {need / 1e9:.3f} GB of tokens")
    set_free(monkeypatch, need - 1e7)
    said = rf"large-gpt2 needs up to {need / 1e9:.2f} GB, but .* {need / 1e9 - 0.01:.2f} GB free"
    with pytest.raises(ValueError, match=said) as refusal:
        prepare.estimate(large(), encoding, folder, 1)
    assert "--max-tokens" in str(refusal.value)
    assert not folder.exists()


def test_the_estimate_of_time_halves_with_twice_the_workers(byte, tmp_path, monkeypatch):
    set_free(monkeypatch, 1e15)
    ticks = itertools.count()  # each look at the clock is a second after the last
    monkeypatch.setattr(prepare.time, "perf_counter", lambda: float(next(ticks)))
    one, two = (prepare.estimate(large(60_000_000), byte, tmp_path / "x", n) for n in (1, 2))
    assert "about 10.0 minutes on 1 worker" in one  # 60 MB at 100,000 bytes per second
    assert "about 5.0 minutes on 2 worker" in two


def test_a_limit_of_tokens_makes_a_large_corpus_fit(byte, tmp_path, monkeypatch, capsys):
    """The refusal says that it would."""

    def documents(start=0):
        for i in range(start, 1000):
            yield "train", iter((b"%06d" % i,))

    corpus = Corpus("fineweb_edu", {"text": "fineweb_edu"}, documents, 48_000_000_000)
    monkeypatch.setitem(corpora.NAMED, "fineweb_edu", lambda _: corpus)
    set_free(monkeypatch, 1e9)
    argv = ["fineweb_edu", "--tokenizer", "byte", "--data-dir", tmp_path]
    assert program(*argv) == 2
    assert "--max-tokens" in capsys.readouterr().err
    assert program(*argv, "--max-tokens", 70) == 0
    wanted = [f"{i:06d}" for i in range(10)]
    assert documents_of(tmp_path / "fineweb_edu-byte", "train", byte) == wanted


def test_the_program_writes_nothing_where_the_disk_is_too_small(tmp_path, monkeypatch, capfd):
    path = write_rows(tmp_path / "t.jsonl", TEXTS)
    set_free(monkeypatch, 100)
    assert program(path, "--data-dir", tmp_path / "data") == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert re.match(r"error: .*needs up to .* GB free", err)
    assert [p for p in (tmp_path / "data").rglob("*") if p.suffix != ".lock"] == []


def test_tokens_that_can_not_be_made_again_are_not_deleted(tmp_path, monkeypatch):
    path, data_dir = write_rows(tmp_path / "t.jsonl", TEXTS), tmp_path / "data"
    argv = [path, "--tokenizer", "byte", "--data-dir", data_dir]
    assert program(*argv) == 0
    folder = prepare.folder_of(str(path), "byte", data_dir)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    set_free(monkeypatch, 100)
    assert program(*argv, "--force") == 2
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_forced_preparation_that_broke_does_not_stand_in_the_way_of_the_next(
    byte, tmp_path, monkeypatch
):
    breaks = True

    def documents(start=0):
        for i in range(start, 100):
            if breaks and i == 70:
                raise ValueError("broken off")
            yield "train", iter((b"%06d" % i,))

    corpus = Corpus("stdlib", {"text": "stdlib"}, documents)
    monkeypatch.setitem(corpora.NAMED, "stdlib", lambda _: corpus)
    monkeypatch.setattr(prepare, "PIECE_BYTES", 30)
    argv = ["stdlib", "--tokenizer", "byte", "--data-dir", tmp_path, "--force", "--shard-tokens"]
    assert program(*argv, 100) == 2
    assert list(tmp_path.rglob("train_000002.bin"))
    breaks = False
    assert program(*argv, 200) == 0
    folder = tmp_path / "stdlib-byte"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [folder.name]
    assert documents_of(folder, "train", byte) == [f"{i:06d}" for i in range(100)]
    assert loader.count_tokens(folder / "train_000000.bin") == 200


# Large documents

MEASURE = """
import re, sys
from pathlib import Path
import pyarrow.parquet
from data import prepare, tokenizer

def mb(field):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(field + r":\\s+(\\d+)", status)[1]) / 1024

tokenizer.load("byte")
before = mb("VmRSS")
prepare.main(sys.argv[1:])
print(mb("VmHWM") - before)
"""


def large_document() -> str:
    return "".join(f"{i} is a number, and this is a line\r\n" for i in range(2_500_000))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_a_document_of_100_mb_passes_within_bounded_memory(suffix, tmp_path):
    path, text = tmp_path / f"t{suffix}", large_document()
    assert len(text) > 100_000_000
    if suffix == ".txt":
        path.write_bytes(text.encode())
    else:
        write_rows(path, ["before", text])
    argv = [path, "--tokenizer", "byte", "--workers", "1", "--data-dir", tmp_path / "data"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *argv], cwd=ROOT, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    assert float(done.stdout.split()[-1]) < 500
    folder = prepare.folder_of(str(path), "byte", tmp_path / "data")
    ids = np.concatenate([np.fromfile(p, "<u2", offset=1024) for p in sorted(folder.glob("*.bin"))])
    sizes = {".txt": [int(0.9 * len(text)), len(text) - int(0.9 * len(text))]}
    assert sorted(np.diff([*np.flatnonzero(ids == 256), len(ids)]) - 1) == sorted(
        sizes.get(suffix, [len("before"), len(text)])
    )


@pytest.mark.slow
def test_runs_of_a_million_equal_characters_end_within_a_minute(tmp_path):
    """Byte-pair encoding done naively takes time that is quadratic in such a run."""
    texts = [c * 1_000_000 for c in ("a", " ", "=", "\n", "0", "日", "\r\n")]
    path = write_rows(tmp_path / "t.jsonl", texts)
    argv = [sys.executable, "-m", "data.prepare", path, "--data-dir", tmp_path / "data"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    folder = prepare.folder_of(str(path), "gpt2", tmp_path / "data")
    encoding = tokenizer.load("gpt2")
    both = [text for s in ("train", "val") for text in documents_of(folder, s, encoding)]
    assert sorted(both) == sorted(texts)
