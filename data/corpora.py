"""Where text comes from: a table of named corpora, and any path to text.

A corpus yields documents, each a split ("train", "val", or None: to be chosen by the document's
hash) and its text as chunks of UTF-8 bytes, so that no document has to fit into memory.
"""

import difflib
import functools
import os
import platform
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

CHUNK_BYTES = 1 << 20
TEXT_SUFFIXES = (".txt", ".md", ".py")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
Document = tuple[str | None, Iterator[bytes]]


@dataclass(frozen=True)
class Corpus:
    """A source of documents. `source` is what meta.json says of it, and differs when the text does;
    n_bytes: its size, 0 if unknown; cost: what preparing it takes, None where train.py may do it by
    itself; val_share: of the documents that name no split."""

    name: str
    source: dict
    documents: Callable[[], Iterator[Document]]
    n_bytes: int = 0
    val_share: float = 0.05
    cost: str | None = None


def _read(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(CHUNK_BYTES, stop - start))):
            start += len(chunk)
            yield chunk


def _split_point(path: Path, size: int) -> int:
    """The byte at which the last tenth of a file (at most 20 MB) begins, between characters."""
    point = max(int(0.9 * size), size - 20_000_000)
    with open(path, "rb") as file:
        file.seek(point)
        while (byte := file.read(1)) and 0x80 <= byte[0] < 0xC0:  # inside a UTF-8 character
            point += 1
    return point


def _file_documents(paths: list[Path]) -> Iterator[Document]:
    """A document per file. Where they are too few for a hash to choose fairly, the end of each
    one is validation text instead."""
    for path in paths:
        size = path.stat().st_size
        if len(paths) >= 64:
            yield None, _read(path, 0, size)
        else:
            point = _split_point(path, size)
            yield "train", _read(path, 0, point)
            yield "val", _read(path, point, size)


def _stdlib() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    paths.sort(key=lambda p: p.relative_to(root).as_posix())
    source = {"text": "the running Python's standard library, without its tests"}
    source["revision"] = f"{platform.python_implementation()} {platform.python_version()}"
    size = sum(p.stat().st_size for p in paths)
    return Corpus("stdlib", source, functools.partial(_file_documents, paths), size)


def _shakespeare() -> Corpus:
    def documents() -> Iterator[Document]:
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as answer:
                text = answer.read()
        except OSError as error:
            raise ValueError(
                f"{SHAKESPEARE_URL} can't be downloaded ({error}): put the file anywhere and give "
                "its path as --corpus, or take --corpus stdlib"
            ) from None
        if sha256(text).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError(f"{SHAKESPEARE_URL} is not the text it was: its sha256 differs")
        point = int(0.9 * len(text))
        yield "train", iter((text[:point],))
        yield "val", iter((text[point:],))

    source = {"text": SHAKESPEARE_URL, "sha256": SHAKESPEARE_SHA256}
    return Corpus("shakespeare", source, documents, 1_115_394)


def _local(path: Path) -> Corpus:
    if path.is_file():
        paths = [path] if path.suffix.lower() in TEXT_SUFFIXES else []
    else:
        walk = os.walk(path)
        paths = [Path(folder, name) for folder, _, names in walk for name in names]
        paths = [p for p in paths if p.suffix.lower() in TEXT_SUFFIXES]
        paths = [p for p in paths if not any(s.startswith(".") for s in p.relative_to(path).parts)]
    if not paths:
        raise ValueError(f"{path} holds no text: files that end in {', '.join(TEXT_SUFFIXES)}")
    paths.sort(key=lambda p: p.as_posix())
    stats = [p.stat() for p in paths]
    source = {
        "text": path.name,
        "files": len(paths),
        "bytes": sum(s.st_size for s in stats),
        "modified_ns": max(s.st_mtime_ns for s in stats),
    }
    documents = functools.partial(_file_documents, paths)
    return Corpus(local_name(path), source, documents, source["bytes"])


def local_name(path: Path) -> str:
    """A folder name for a path: two paths never share one."""
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in path.stem)
    return f"{stem}-{sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"


def _from_hub(name: str, repo: str, subset: str | None, revision: str, cost: str) -> Corpus:
    """A text column of a Parquet dataset, streamed with `datasets`; scripts are never run."""

    def documents() -> Iterator[Document]:
        from datasets import load_dataset

        rows = load_dataset(repo, subset, split="train", streaming=True, revision=revision)
        for row in rows.select_columns(["text"]):
            yield None, iter((row["text"].encode("utf-8", "surrogatepass"),))

    source = {"text": repo, "subset": subset, "revision": revision}
    return Corpus(name, source, documents, val_share=0.001, cost=cost)


NAMED: dict[str, Callable[[], Corpus]] = {
    "stdlib": _stdlib,
    "shakespeare": _shakespeare,
    "fineweb_edu": lambda: _from_hub(
        "fineweb_edu",
        "HuggingFaceFW/fineweb-edu",
        "sample-10BT",
        "main",
        "about 28 GB to download, 20 GB of tokens on disk, and some hours of tokenizing",
    ),
    "openwebtext": lambda: _from_hub(
        "openwebtext",
        "Skylion007/openwebtext",
        None,
        "refs/convert/parquet",
        "about 24 GB to download, 18 GB of tokens on disk, and some hours of tokenizing",
    ),
}


def find(corpus: str) -> Corpus:
    """The corpus of that name or path. ValueError, with the choices, if there is none."""
    if corpus in NAMED:
        return NAMED[corpus]()
    if Path(corpus).exists():
        return _local(Path(corpus))
    near = difflib.get_close_matches(corpus, NAMED, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(NAMED)
    raise ValueError(f"no corpus {corpus!r}: {hint}there are {names}, or give a path that exists")
