"""Where text comes from: named corpora, files and folders."""

import io
import sys
import types
import urllib.request
from hashlib import sha256
from pathlib import Path

import pytest

from data import corpora


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(corpus: corpora.Corpus) -> list[tuple[str | None, bytes]]:
    return [(split, b"".join(chunks)) for split, chunks in corpus.documents()]


def texts(corpus: corpora.Corpus) -> list[bytes]:
    """The documents that were split by position, whole again."""
    parts = read(corpus)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [train + val for (_, train), (_, val) in pairs]


def test_the_standard_library_is_a_corpus_on_every_machine():
    corpus = corpora.find("stdlib")
    assert corpus.cost is None
    assert corpus.n_bytes > 5_000_000
    assert sys.version.split()[0] in corpus.source["revision"]
    documents = corpus.documents()
    for _ in range(5):
        split, chunks = next(documents)
        assert split is None
        assert all(isinstance(chunk, bytes) for chunk in chunks)


def test_the_standard_library_comes_whole_and_without_installed_packages():
    corpus = corpora.find("stdlib")
    everything = read(corpus)
    assert sum(len(text) for _, text in everything) == corpus.n_bytes
    everything = {text for _, text in everything}
    assert Path(io.__file__).read_bytes() in everything
    assert Path(pytest.__file__).read_bytes() not in everything


def test_no_named_corpus_needs_a_network_to_be_described(monkeypatch):
    def blocked(*_):
        raise AssertionError("network")

    monkeypatch.setattr("socket.socket.connect", blocked)
    monkeypatch.setattr("socket.getaddrinfo", blocked)
    for name in corpora.NAMED:
        corpus = corpora.find(name)
        assert corpus.name == name
        assert corpus.source["text"]
        assert 0 < corpus.val_share < 0.5


@pytest.mark.parametrize("name", ["fineweb_edu", "openwebtext"])
def test_a_large_download_tells_its_cost_in_bytes(name):
    assert "GB" in corpora.find(name).cost


@pytest.mark.parametrize(
    ("typo", "near"),
    [("fineweb-edu", "fineweb_edu"), ("stdlb", "stdlib"), ("openwebtxt", "openwebtext")],
)
def test_an_unknown_corpus_is_answered_with_the_nearest_and_all_there_are(typo, near):
    with pytest.raises(ValueError, match=f"no corpus '{typo}': did you mean {near}") as refusal:
        corpora.find(typo)
    assert [name for name in corpora.NAMED if name not in str(refusal.value)] == []
    assert "path" in str(refusal.value)


@pytest.mark.parametrize("corpus", ["hf:owner/name", "openwebtext", "stdlib"])
def test_a_text_field_that_would_be_ignored_is_refused(corpus):
    with pytest.raises(ValueError, match="hf:owner/name::column"):
        corpora.find(corpus, "body")


def test_a_folder_gives_its_text_files_sorted_and_nothing_hidden(tmp_path):
    for name in ("b.txt", "a/z.md", "a/y.py", "c.TXT", "d.bin", ".hidden.txt", ".git/x.txt", "e"):
        write(tmp_path / name, f"the text of {name}")
    corpus = corpora.find(str(tmp_path))
    wanted = [f"the text of {n}".encode() for n in ("a/y.py", "a/z.md", "b.txt", "c.TXT")]
    assert texts(corpus) == wanted
    assert corpus.source["files"] == 4
    assert corpus.n_bytes == corpus.source["bytes"] == sum(map(len, wanted))
    assert corpus.cost is None


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: write(p, "text")])
def test_what_holds_no_text_is_refused_with_the_endings_that_count(make, tmp_path):
    path = tmp_path / "image.png"
    make(path)
    with pytest.raises(ValueError, match=r"image\.png") as refusal:
        corpora.find(str(path))
    assert [suffix for suffix in corpora.TEXT_SUFFIXES if suffix not in str(refusal.value)] == []


@pytest.mark.parametrize(
    "text", ["0123456789" * 10, "é" * 100, "日本" * 33, "😀" * 7, "a", "😀", ""]
)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
def test_few_files_end_in_validation_text_cut_between_characters(
    text, chunk_bytes, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpora, "CHUNK_BYTES", chunk_bytes)
    (first, train), (second, val) = read(corpora.find(str(write(tmp_path / "t.txt", text))))
    assert (first, second) == ("train", "val")
    assert train.decode() + val.decode() == text
    size = len(text.encode())
    assert int(0.9 * size) <= len(train) < int(0.9 * size) + 4


@pytest.mark.parametrize("data", [b"\x80" * 100, b"\xff" * 100, b"a" * 90 + b"\xf0\x9f" * 5])
def test_text_that_is_not_utf8_is_split_without_loss_too(data, tmp_path):
    assert texts(corpora.find(str(write(tmp_path / "t.txt", data)))) == [data]


def test_the_validation_text_of_a_large_file_is_at_most_20_mb(tmp_path):
    path = write(tmp_path / "t.txt", "x")
    with open(path, "r+b") as file:
        file.truncate(300_000_000)  # a hole: it takes no place on the disk
    sizes = [
        (split, sum(map(len, chunks))) for split, chunks in corpora.find(str(path)).documents()
    ]
    assert sizes == [("train", 280_000_000), ("val", 20_000_000)]


@pytest.mark.parametrize(("n", "splits"), [(63, {"train", "val"}), (64, {None})])
def test_from_64_files_on_whole_documents_are_split(n, splits, tmp_path):
    for i in range(n):
        write(tmp_path / f"{i:03d}.txt", f"text {i}\r\n")
    documents = read(corpora.find(str(tmp_path)))
    assert {split for split, _ in documents} == splits
    if splits == {None}:
        assert [text for _, text in documents] == [f"text {i}\r\n".encode() for i in range(n)]


def test_chunks_are_never_larger_than_their_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "CHUNK_BYTES", 10)
    path = write(tmp_path / "t.txt", bytes(range(97, 123)) * 4)
    for _, chunks in corpora.find(str(path)).documents():
        assert max(map(len, chunks)) == 10


def test_two_paths_never_share_a_name_and_one_path_has_one_name(tmp_path, monkeypatch):
    paths = [tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt", tmp_path / "a" / "t.md"]
    names = {corpora.local_name(write(p, "x")) for p in paths}
    assert len(names) == 3
    monkeypatch.chdir(tmp_path)
    assert corpora.local_name(Path("a/../a/t.txt")) in names
    assert not any(set(name) & set("/\\:. ") for name in names)


def test_the_source_changes_when_the_text_does(tmp_path):
    path = write(tmp_path / "t.txt", "one")
    before = corpora.find(str(path)).source
    assert corpora.find(str(path)).source == before
    write(path, "three")
    assert corpora.find(str(path)).source != before


class Rows(list):
    """What `datasets` gives for a streamed table, as far as it is used."""

    def select_columns(self, names):
        return Rows({name: row[name] for name in names} for row in self)

    def skip(self, n):
        return Rows(self[n:])


@pytest.mark.parametrize("name", ["fineweb_edu", "openwebtext"])
def test_a_corpus_of_the_hub_is_streamed_from_a_revision_and_runs_no_script(name, monkeypatch):
    """nanoGPT #633: `datasets` runs no loading scripts any more."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return {"train": Rows({"text": text, "id": 1} for text in ("one ä", "", "a\ud800b"))}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    corpus = corpora.find(name)
    expected = [(None, "one ä".encode()), (None, b""), (None, b"a\xed\xa0\x80b")]
    for start in range(4):
        got = [(s, b"".join(chunks)) for s, chunks in corpus.documents(start, commit="0123abc")]
        assert got == expected[start:]
    args, kwargs = calls[0]
    assert args[0] == corpus.source["text"]
    assert kwargs["revision"] == "0123abc"
    assert kwargs["streaming"] is True
    assert "trust_remote_code" not in kwargs


@pytest.mark.skipif("shakespeare" not in corpora.NAMED, reason="not among the corpora")
def test_a_download_that_fails_or_is_another_text_is_refused(monkeypatch):
    corpus = corpora.find("shakespeare")

    def fails(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", fails)
    with pytest.raises(ValueError, match="no network") as refusal:
        next(corpus.documents())
    assert "--corpus" in str(refusal.value)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"another text"))
    with pytest.raises(ValueError, match="sha256 differs"):
        next(corpus.documents())


@pytest.mark.skipif("shakespeare" not in corpora.NAMED, reason="not among the corpora")
def test_a_download_is_split_at_nine_tenths(monkeypatch):
    text = b"0123456789" * 10
    monkeypatch.setattr(corpora, "SHAKESPEARE_SHA256", sha256(text).hexdigest())
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(text))
    assert read(corpora.find("shakespeare")) == [("train", text[:90]), ("val", text[90:])]
