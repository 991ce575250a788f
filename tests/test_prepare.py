"""From text to shards: every id, every byte and every document is accounted for."""

import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import config
from data import corpora, loader, prepare, tokenizer
from data.corpora import Corpus
from data.prepare import PrepareConfig
from data.writer import ShardWriter

ROOT = Path(config.__file__).parent.parent
END = "<|endoftext|>"


def chunked(data: bytes, size: int = 1 << 20):
    return iter([data[i : i + size] for i in range(0, len(data), size)])


def made(*documents, chunk: int = 1 << 20, **fields) -> Corpus:
    """A corpus of (split, text or bytes) or of mere texts, which are then training text."""

    def give(start=0):
        for document in documents[start:]:
            split, text = document if isinstance(document, tuple) else ("train", document)
            yield split, chunked(text if isinstance(text, bytes) else text.encode(), chunk)

    return Corpus("made", {"text": "made"}, give, **fields)


def ids_of(folder: Path, split: str) -> list[int]:
    """All ids of a split, read without the loader."""
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return [int(i) for p in paths for i in np.frombuffer(p.read_bytes()[1024:], "<u2")]


def documents_of(folder: Path, split: str, encoding) -> list[str]:
    """The texts between the end marks."""
    documents = []
    for i in ids_of(folder, split):
        if i == encoding.eot_token:
            documents.append([])
        else:
            documents[-1].append(i)
    return [encoding.decode(ids) for ids in documents]


@pytest.fixture(params=["gpt2", "byte"])
def encoding(request):
    return tokenizer.load(request.param)


@pytest.fixture
def byte():
    return tokenizer.load("byte")


def test_each_document_has_an_end_mark_in_front_and_none_elsewhere(encoding, tmp_path):
    documents = [("train", "one two"), ("val", "three"), ("train", "vier\n\n"), ("val", "fünf 😀")]
    prepare.prepare(made(*documents), encoding, tmp_path)
    for split in ("train", "val"):
        wanted = []
        for its_split, text in documents:
            if its_split == split:
                wanted += [encoding.eot_token, *encoding.encode_ordinary(text)]
        assert ids_of(tmp_path, split) == wanted


def test_an_end_mark_within_a_text_stays_text(encoding, tmp_path):
    text = f"a{END}b\n{END}"
    prepare.prepare(made(text), encoding, tmp_path)
    ids = ids_of(tmp_path, "train")
    assert ids.count(encoding.eot_token) == 1
    assert encoding.decode(ids[1:]) == text


def test_empty_documents_are_left_out_and_counted(byte, tmp_path):
    documents = ["", "a", ("val", ""), ("val", "b"), (None, ""), ""]
    meta = prepare.prepare(made(*documents), byte, tmp_path)
    assert meta["empty_documents"] == 4
    assert ids_of(tmp_path, "train") == [256, 97]
    assert ids_of(tmp_path, "val") == [256, 98]


BROKEN = [
    b"",
    b"plain",
    b"a\xffb",
    b"\x80\x80\x80",
    b"ends within \xf0\x9f\x98",
    b"ends within \xe2\x88",
    b"\x80" * 50 + "😀".encode() * 20,
    b"\xc3(\xc3",
    b"over\xc0\xafong",
    b"surrogate \xed\xa0\x80.",
    b"beyond \xf5\x80\x80\x80\xf4\x90\x80\x80.",
    "ä∩😀 \xff is fine".encode(),
    "ä∩😀".encode()[1:-1] + b"\r\n\xfe",
    bytes(range(256)) * 2,
]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("data", BROKEN)
def test_invalid_utf8_is_replaced_and_counted_wherever_the_pieces_end(
    data, size, byte, tmp_path, monkeypatch
):
    monkeypatch.setattr(prepare, "PIECE_BYTES", size)
    data = b"begins " + data
    wanted = data.decode("utf-8", "replace")
    meta = prepare.prepare(made(data, chunk=size), byte, tmp_path)
    assert documents_of(tmp_path, "train", byte) == [wanted]
    assert meta["replaced_invalid_utf8"] == wanted.count("\ufffd")


def test_replaced_bytes_are_told_in_meta_json(byte, tmp_path):
    meta = prepare.prepare(made(b"a\xffb", b"\xe2\x88", "\ufffd"), byte, tmp_path)
    assert meta["replaced_invalid_utf8"] == 2
    wanted = ["a\ufffdb", "\ufffd", "\ufffd"]
    assert documents_of(tmp_path, "train", byte) == wanted
    assert sum(s["bytes"] for s in meta["shards"]) == len("".join(wanted).encode())


@pytest.mark.parametrize(("chunk_bytes", "piece_bytes"), [(1, 20), (3, 30), (64, 20), (7, 100)])
def test_a_file_in_small_chunks_and_pieces_becomes_the_same_tokens(
    chunk_bytes, piece_bytes, encoding, tmp_path, monkeypatch
):
    text = "ä∩😀 'll don't  x\r\n\r\n\t日本 語\xa0, 12 345\u2028\x1c .\n" * 5
    data = text.encode() + b"\xff\xf0\x9f\r\n"
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    prepare.prepare(corpora.find(str(path)), encoding, tmp_path / "whole")
    monkeypatch.setattr(corpora, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(prepare, "PIECE_BYTES", piece_bytes)
    prepare.prepare(corpora.find(str(path)), encoding, tmp_path / "small")
    for split in ("train", "val"):
        assert ids_of(tmp_path / "small", split) == ids_of(tmp_path / "whole", split)
    whole = "".join(documents_of(tmp_path / "whole", s, encoding)[0] for s in ("train", "val"))
    assert whole == data.decode("utf-8", "replace")


WORDS = ["a", "the", "naïve", "日本", "Ünï", "12", "3.5", "...", "'ll", "'s", "don't", "😀"]
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\n\n", " \n ", "\u00a0", "\u2028", "\u3000", "\x85"]
BLANKS += ["\x1c"]  # a blank for Python, but not for GPT-2's pattern


@pytest.mark.parametrize("seed", range(8))
def test_pieces_laid_end_to_end_have_the_ids_of_the_whole(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(prepare, "PIECE_BYTES", rng.choice([100, 150, 300]))
    text = "".join(
        rng.choice(WORDS) if rng.random() < 0.6 else rng.choice(BLANKS) for _ in range(8000)
    )
    data = list(prepare._cut(chunked(text.encode(), rng.choice([1, 7, 100]))))
    pieces = [piece.decode() for piece in data]
    assert len(pieces) > 30
    assert "".join(pieces) == text
    gpt2 = tokenizer.load("gpt2")
    ids = [i for piece in pieces for i in gpt2.encode_ordinary(piece)]
    assert ids == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("text", ["x" * 5000, "日本" * 2500, " " * 5000, "x" * 4999 + " "])
def test_text_without_a_place_to_cut_comes_in_bounded_pieces_too(text, monkeypatch):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 10)
    pieces = list(prepare._cut(chunked(text.encode(), 12)))
    assert "".join(piece.decode() for piece in pieces) == text
    assert max(map(len, pieces)) <= 16 * 10 + 12


def test_line_ends_of_all_kinds_survive(encoding, tmp_path):
    text = "one\r\ntwo\nthree\r\r\n\n"
    prepare.prepare(made(text), encoding, tmp_path)
    assert documents_of(tmp_path, "train", encoding) == [text]


TWENTY = [f"document {i}, {'many words ' * i}ä" for i in range(20)]


def test_the_same_text_gives_the_same_hashes_and_one_character_changes_them(encoding, tmp_path):
    metas = [
        prepare.prepare(made(*documents), encoding, tmp_path / str(i))
        for i, documents in enumerate([TWENTY, TWENTY, [*TWENTY[:-1], TWENTY[-1] + "."]])
    ]
    one, two, other = ([s["sha256"] for s in meta["shards"]] for meta in metas)
    assert one == two != other
    ids = [loader.data_id(meta) for meta in metas]
    assert ids[0] == ids[1] != ids[2]
    for i, meta in enumerate(metas):
        for shard in meta["shards"]:
            data = (tmp_path / str(i) / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(data).hexdigest()


def test_meta_json_tells_everything_and_agrees_with_the_shards(encoding, tmp_path):
    documents = [*TWENTY[:15], *(("val", text) for text in TWENTY[15:])]
    returned = prepare.prepare(made(*documents), encoding, tmp_path, shard_tokens=50)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert meta == returned == loader.read_meta(tmp_path)
    assert meta["corpus"] == "made"
    assert meta["source"] == {"text": "made"}
    assert meta["tokenizer"] == tokenizer.identity(encoding)
    assert {s["file"] for s in meta["shards"]} == {p.name for p in tmp_path.glob("*.bin")}
    for split, texts in (("train", TWENTY[:15]), ("val", TWENTY[15:])):
        shards = [s for s in meta["shards"] if s["file"].startswith(split)]
        assert len(shards) > 3
        assert sum(s["documents"] for s in shards) == len(texts)
        assert sum(s["bytes"] for s in shards) == len("".join(texts).encode())
        assert sum(s["tokens"] for s in shards) == len(ids_of(tmp_path, split))
        for shard in shards:
            assert shard["tokens"] == loader.count_tokens(tmp_path / shard["file"])
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("limit", [1, 7, 64, 10**6])
def test_shards_are_full_but_the_last_and_make_the_unsplit_tokens(limit, byte, tmp_path):
    documents = ["one", "two ä", "three " * 5, "4"]
    prepare.prepare(made(*documents), byte, tmp_path / "whole")
    meta = prepare.prepare(made(*documents), byte, tmp_path / "split", shard_tokens=limit)
    whole = ids_of(tmp_path / "whole", "train")
    assert ids_of(tmp_path / "split", "train") == whole
    sizes = [s["tokens"] for s in meta["shards"]]
    assert set(sizes[:-1]) <= {limit}
    assert 0 < sizes[-1] <= limit
    assert sum(sizes) == len(whole)
    assert [s["file"] for s in meta["shards"]] == [f"train_{i:06d}.bin" for i in range(len(sizes))]


def test_preparing_again_leaves_nothing_of_the_old_shards(byte, tmp_path):
    prepare.prepare(made(*TWENTY), byte, tmp_path, shard_tokens=300)
    assert len(list(tmp_path.iterdir())) > 5
    prepare.prepare(made("short"), byte, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"meta.json", "train_000000.bin"}
    assert documents_of(tmp_path, "train", byte) == ["short"]


@pytest.mark.parametrize("ids", [[65_536], [1, 70_000, 2], [-1], [50_256, 2**32]])
def test_ids_that_do_not_fit_are_refused_and_not_wrapped(ids, byte, tmp_path):
    writer = ShardWriter(tmp_path, "train", 100, byte)
    with writer, pytest.raises(ValueError, match="must fit 16 bits"):
        writer.add(ids)
    assert list(tmp_path.iterdir()) == []


class Broken(Exception):
    pass


def breaks_after(*documents, within: bool):
    """A corpus whose source fails after these documents, between or within documents."""

    def chunks():
        yield b"the beginning of a document " * 20
        raise Broken

    def give(start=0):
        yield from made(*documents).documents()
        if within:
            yield "train", chunks()
        raise Broken

    return Corpus("made", {"text": "made"}, give)


@pytest.mark.parametrize("within", [True, False])
def test_what_is_incomplete_never_has_a_final_name(within, byte, tmp_path, monkeypatch):
    """And a second call goes on where the first one failed."""
    limit = 100
    monkeypatch.setattr(prepare, "PIECE_BYTES", 20)
    with pytest.raises(Broken):
        prepare.prepare(breaks_after(*TWENTY, within=within), byte, tmp_path, shard_tokens=limit)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert meta["complete"] is False
    shards = {p.name: p for p in tmp_path.glob("*.bin")}
    assert shards.keys() == {s["file"] for s in meta["shards"]} != set()
    for path in shards.values():
        assert loader.count_tokens(path) == limit
    tokens = loader.Tokens(tmp_path, "train", 16)
    with pytest.raises(ValueError, match="nobody is preparing"):
        tokens.wait_for(10**6)
    again = prepare.prepare(made(*TWENTY), byte, tmp_path, shard_tokens=limit)
    fresh = prepare.prepare(made(*TWENTY), byte, tmp_path / "fresh", shard_tokens=limit)
    assert again == fresh


def test_a_failure_does_not_leave_the_old_meta_json_beside_new_shards(byte, tmp_path):
    prepare.prepare(made(*TWENTY), byte, tmp_path)
    with pytest.raises(Broken):
        prepare.prepare(breaks_after("new", within=False), byte, tmp_path)
    assert not (tmp_path / "meta.json").exists()


@pytest.mark.parametrize(("limit", "n"), [(1, 1), (6, 1), (7, 2), (18, 3), (19, 4), (10**6, 20)])
def test_a_limit_of_tokens_stops_after_the_document_that_reaches_it(limit, n, byte, tmp_path):
    prepare.prepare(made(*["five5"] * 20), byte, tmp_path, max_tokens=limit)
    assert documents_of(tmp_path, "train", byte) == ["five5"] * n


def write_files(folder: Path, numbers) -> None:
    folder.mkdir(exist_ok=True)
    for i in numbers:
        (folder / f"{i * 7919 % 1000:03d}.txt").write_text(f"Text number {i}.", encoding="utf-8")


def test_a_document_stays_in_its_split_when_others_come(byte, tmp_path):
    splits = []
    for n in (400, 500):
        write_files(tmp_path / "text", range(n))
        corpus = corpora.find(str(tmp_path / "text"))
        prepare.prepare(corpus, byte, tmp_path / "out")
        both = [documents_of(tmp_path / "out", s, byte) for s in ("train", "val")]
        assert sorted(both[0] + both[1]) == sorted(f"Text number {i}." for i in range(n))
        assert 0.4 * corpus.val_share * n < len(both[1]) < 2 * corpus.val_share * n
        splits.append({text: split for split, texts in enumerate(both) for text in texts})
    assert {text: splits[1][text] for text in splits[0]} == splits[0]


@pytest.mark.parametrize(("share", "split"), [(0.0, "train"), (1.0, "val")])
def test_the_share_of_validation_text_goes_from_none_to_all(share, split, byte, tmp_path):
    corpus = made(*((None, text) for text in TWENTY), val_share=share)
    prepare.prepare(corpus, byte, tmp_path)
    assert documents_of(tmp_path, split, byte) == TWENTY


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text("To be, or not to be.\n" * 50, encoding="utf-8")
    return path


def forbid(monkeypatch):
    def prepared_again(*_, **__):
        raise AssertionError("prepared again")

    monkeypatch.setattr(prepare, "prepare", prepared_again)


def test_local_text_is_prepared_on_first_use_and_only_then(text_file, tmp_path, monkeypatch):
    folder = prepare.ensure(str(text_file), "byte", tmp_path / "data")
    assert folder == prepare.folder_of(str(text_file), "byte", tmp_path / "data")
    assert loader.Tokens(folder, "train", 16).n_tokens == 1 + int(0.9 * 1050)
    forbid(monkeypatch)
    assert prepare.ensure(str(text_file), "byte", tmp_path / "data") == folder
    monkeypatch.chdir(tmp_path)
    assert prepare.ensure(text_file.name, "byte", tmp_path / "data") == folder


def test_each_tokenizer_has_its_own_folder(text_file, tmp_path):
    folders = {prepare.ensure(str(text_file), name, tmp_path) for name in ("byte", "gpt2")}
    names = {loader.read_meta(folder)["tokenizer"]["name"] for folder in folders}
    assert names == {"byte", "gpt2"}


def test_prepared_text_is_usable_after_its_source_is_gone(text_file, tmp_path, monkeypatch):
    folder = prepare.ensure(str(text_file), "byte", tmp_path)
    text_file.unlink()
    forbid(monkeypatch)
    assert prepare.ensure(str(text_file), "byte", tmp_path) == folder


def command_in(message: str) -> list[str]:
    """The arguments of the command that a message tells the user to run."""
    (command,) = re.findall(r"`(python -m data\.prepare [^`]*)`", message)
    return shlex.split(command)[3:]


def test_text_that_has_changed_is_refused_with_the_command_that_helps(text_file, tmp_path, capsys):
    data_dir = tmp_path / "the data"
    folder = prepare.ensure(str(text_file), "byte", data_dir)
    text_file.write_text("Something else.\n" * 50, encoding="utf-8")
    with pytest.raises(ValueError, match="changed since it was prepared") as refusal:
        prepare.ensure(str(text_file), "byte", data_dir)
    assert prepare.main(command_in(str(refusal.value))) == 0
    assert prepare.ensure(str(text_file), "byte", data_dir) == folder
    assert documents_of(folder, "train", tokenizer.load("byte"))[0].startswith("Something else.")


@pytest.mark.parametrize("name", ["fineweb_edu", "openwebtext"])
def test_what_needs_a_large_download_is_refused_with_command_and_cost(name, tmp_path):
    with pytest.raises(ValueError, match=name) as refusal:
        prepare.ensure(name, "gpt2", tmp_path)
    message = str(refusal.value)
    assert corpora.find(name).cost in message
    arguments = command_in(message)
    assert arguments[0] == name
    assert arguments[arguments.index("--data-dir") + 1] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_corpus_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(ValueError, match="did you mean stdlib"):
        prepare.ensure("stdlibb", "byte", tmp_path)
    with pytest.raises(ValueError, match=r"no corpus 'gone\.txt'"):
        prepare.ensure("gone.txt", "byte", tmp_path)


def test_shards_that_others_have_made_are_used_by_their_folders_name(byte, tmp_path):
    prepare.prepare(made("text " * 20), byte, tmp_path / "theirs-byte")
    assert prepare.ensure("theirs", "byte", tmp_path) == tmp_path / "theirs-byte"


def test_a_named_corpus_that_is_prepared_is_used_as_it_is(byte, tmp_path, monkeypatch):
    folder = tmp_path / "openwebtext-byte"
    prepare.prepare(made("text " * 20), byte, folder)
    forbid(monkeypatch)
    assert prepare.ensure("openwebtext", "byte", tmp_path) == folder


def test_damaged_tokens_are_refused_and_not_silently_made_again(text_file, tmp_path):
    folder = prepare.ensure(str(text_file), "byte", tmp_path)
    shard = folder / "train_000000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train_000000\.bin is damaged"):
        prepare.ensure(str(text_file), "byte", tmp_path)


def test_of_two_that_start_at_once_only_one_prepares(text_file, tmp_path, monkeypatch):
    calls, real = [], prepare.prepare

    def slow(*args, **kwargs):
        calls.append(args)
        time.sleep(0.2)
        return real(*args, **kwargs)

    monkeypatch.setattr(prepare, "prepare", slow)
    folders = []
    threads = [
        threading.Thread(
            target=lambda: folders.append(prepare.ensure(str(text_file), "byte", tmp_path))
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(folders) == 3
    assert len(set(folders)) == 1


def test_the_program_prepares_tells_what_it_made_and_does_it_once(text_file, tmp_path, capsys):
    argv = [str(text_file), "--tokenizer", "byte", "--data-dir", str(tmp_path / "data")]
    assert prepare.main(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"train 946 tokens in 1 documents", out)
    assert re.search(r"val 106 tokens in 1 documents", out)
    folder = prepare.folder_of(str(text_file), "byte", tmp_path / "data")
    before = (folder / "meta.json").stat().st_mtime_ns
    assert prepare.main(argv) == 0
    assert "--force" in capsys.readouterr().out
    assert (folder / "meta.json").stat().st_mtime_ns == before
    assert prepare.main([*argv, "--force", "--max-tokens=1", "--shard_tokens=100"]) == 0
    assert len(list(folder.glob("train_*.bin"))) == 10
    assert not list(folder.glob("val_*.bin"))


def test_the_program_lists_the_corpora_and_what_they_cost(capsys):
    assert prepare.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in corpora.NAMED:
        (line,) = [line for line in lines if line.startswith(name + " ")]
        assert (corpora.find(name).cost or "a second") in line


@pytest.mark.parametrize("option", ["--shard-tokens=0", "--max-tokens=0", "--max-tokens=-5"])
def test_impossible_limits_are_refused(option, text_file, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        prepare.main([str(text_file), option, "--data-dir", str(tmp_path / "data")])
    assert not (tmp_path / "data").exists()


def test_every_use_of_the_program_that_the_options_help_names_is_understood():
    help_text = Path(config.__file__).read_text(encoding="utf-8")
    commands = re.findall(r"`python -m data\.prepare([^`]*)`", help_text)
    assert commands
    for command in commands:
        argv = shlex.split(command)
        config.parse(PrepareConfig, argv, prog="prepare", description="", preset=False)


def program(*argv: str, python=(), **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *python, "-m", "data.prepare", *argv],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith(("LC_", "PYTHON"))}
        | environment,
        capture_output=True,
        timeout=300,
    )


STRANGE = "ä∩😀\r\n"


@pytest.mark.parametrize(
    ("file", "environment"),
    [
        ("t.txt", {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}),
        ("ä∩😀.txt", {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}),
        ("ä∩😀.txt", {"PYTHONIOENCODING": "ascii"}),
    ],
    ids=["strange text", "strange name", "strange name, poor terminal"],
)
def test_text_and_names_beyond_ascii_work_on_a_machine_without_utf8(
    file, environment, byte, tmp_path
):
    (tmp_path / file).write_bytes((STRANGE * 20).encode())
    data_dir = tmp_path / "data"
    argv = [str(tmp_path / file), "--tokenizer", "byte", "--data-dir", str(data_dir)]
    done = program(*argv, **environment)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    (folder,) = [p for p in data_dir.iterdir() if p.is_dir()]
    assert loader.read_meta(folder)["tokenizer"]["name"] == "byte"
    both = [documents_of(folder, split, byte)[0] for split in ("train", "val")]
    assert "".join(both) == STRANGE * 20


def test_no_file_is_opened_with_the_platforms_encoding(tmp_path):
    (tmp_path / "t.txt").write_bytes((STRANGE * 20).encode())
    done = program(
        str(tmp_path / "t.txt"),
        "--data-dir",
        str(tmp_path / "data"),
        python=["-X", "warn_default_encoding", "-W", "always::EncodingWarning"],
    )
    assert done.returncode == 0
    warnings = [line for line in done.stderr.decode().splitlines() if "EncodingWarning" in line]
    ours = [w for w in warnings if w.startswith(str(ROOT)) and "site-packages" not in w]
    assert ours == []


def test_a_mistake_is_one_message_and_code_2(tmp_path, capfd):
    argv = ["stdlibb", "--data-dir", str(tmp_path / "data")]
    assert config.run_program(prepare.main, argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: no corpus 'stdlibb'")
    assert err.count("\n") == 1


MEASURE = """
import re, sys
from pathlib import Path
from data import prepare, tokenizer

def mb(field):
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(field + r":\\s+(\\d+)", status)[1]) / 1024

tokenizer.load(sys.argv[3])
before = mb("VmRSS")
prepare.main(sys.argv[1:])
print(mb("VmHWM") - before)
"""


def words(rng: random.Random) -> str:
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(2000)]
    return "\n".join(rng.choices(vocabulary, k=50_000))


def without_blanks(rng: random.Random) -> str:
    return "".join(chr(rng.randint(0x4E00, 0x9FA0)) + "，" * (i % 12 == 0) for i in range(90_000))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("make", "name", "size"),
    [(words, "byte", 30_000_000), (without_blanks, "gpt2", 20_000_000)],
    ids=["words", "no blank"],
)
def test_memory_does_not_grow_with_the_text(make, name, size, tmp_path):
    """nanoGPT PR #4: preparing took 90 GB; here it takes less than 300 MB."""
    part = make(random.Random(0)).encode()
    path = tmp_path / "large.txt"
    path.write_bytes(part * (size // len(part)))
    data_dir, encoding = tmp_path / "data", tokenizer.load(name)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), "--tokenizer", name, "--data-dir", data_dir],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        check=True,
    )
    assert float(done.stdout.splitlines()[-1]) < 300
    sample = part[:100_000].decode("utf-8", "ignore")
    ids = encoding.encode_ordinary(sample)[:-10]
    shard = prepare.folder_of(str(path), name, data_dir) / "train_000000.bin"
    beginning = np.fromfile(shard, "<u2", len(ids) + 1, offset=1024).tolist()
    assert beginning == [encoding.eot_token, *ids]
