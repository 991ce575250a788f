"""Where text comes from: a table of named corpora, the Hub's datasets, and any path to text.

A corpus yields documents, each a split ("train", "val", or None: to be chosen by the document's
hash) and its text as chunks of UTF-8 bytes, so that no document has to fit into memory.
"""

import difflib
import functools
import itertools
import json
import os
import platform
import re
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

CHUNK_BYTES = 1 << 20
TEXT_SUFFIXES, ROW_SUFFIXES = (".txt", ".md", ".py"), (".jsonl", ".parquet")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
Document = tuple[str | None, Iterator[bytes]]


@dataclass(frozen=True)
class Corpus:
    """A source of documents: documents(n) yields those from the n-th on, in a fixed order; where
    `revision` finds the newest version of a source, documents(n, version) those of that one.
    `source` is what meta.json says of it, and differs when the text does; n_bytes: its size, 0 if
    unknown; cost: what preparing it takes, None where train.py may do it by itself; val_share: of
    the documents that name no split. `shards`, instead of documents: a repository of the Hub whose
    files have our layout already."""

    name: str
    source: dict
    documents: Callable[..., Iterator[Document]] | None
    n_bytes: int = 0
    val_share: float = 0.05
    cost: str | None = None
    revision: Callable[[], str] | None = None
    shards: str | None = None


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


def _rows(path: Path, field: str) -> Iterator[bytes | memoryview]:
    """The texts of a .jsonl or .parquet file as UTF-8, valid or not, and null as an empty one.
    ValueError, with the place, if a row has no text there."""
    if path.suffix.lower() == ".parquet":
        yield from _column(path, field)
        return
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            where = f"line {number} of {path}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is no JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where} is no JSON object, but a {type(row).__name__}")
            if field not in row:
                raise ValueError(_no_field(where, field, list(row)))
            yield _utf8(row[field], f"{field!r} in {where}")


def _column(path: Path, field: str) -> Iterator[memoryview]:
    """The values of a Parquet file's column as they lie in memory, about CHUNK_BYTES at a time."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ValueError(_no_field(path, field, file.schema_arrow.names))
            groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
            row_bytes = sum(g.total_byte_size for g in groups) // max(1, file.metadata.num_rows)
            rows = max(1, min(256, CHUNK_BYTES // max(1, row_bytes)))
            for batch in file.iter_batches(batch_size=rows, columns=[field]):
                for value in batch.column(0).cast(pyarrow.large_binary()):
                    yield memoryview(value.as_buffer() or b"")
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file with text in {field!r}: {error}") from None


def _utf8(text: object, where: str) -> bytes:
    """ValueError, with the place, if it is neither text nor null."""
    if not isinstance(text, str | None):
        raise ValueError(f"{where} is no text, but a {type(text).__name__}")
    try:
        return (text or "").encode("utf-8", "surrogateescape")  # invalid bytes become themselves
    except UnicodeEncodeError:  # half a character that was written as \ud800
        return text.encode("utf-8", "surrogatepass")


def _no_field(where: Path | str, field: str, fields: list[str]) -> str:
    fields = f"{where} has no field {field!r}, but {', '.join(fields) or 'none'}: "
    return fields + "name the one with text by --text-field of `python -m data.prepare`"


def _file_documents(paths: list[Path], text_field: str, start: int = 0) -> Iterator[Document]:
    """A document per text file, and per row of the others. Where files are too few for a hash to
    choose fairly, the end of each is validation text instead."""

    def documents() -> Iterator[Document]:
        by_hash = len(paths) >= 64 or any(p.suffix.lower() in ROW_SUFFIXES for p in paths)
        for path in paths:
            size = path.stat().st_size
            if path.suffix.lower() in ROW_SUFFIXES:
                for text in _rows(path, text_field):
                    yield None, iter((text,))
            elif by_hash:
                yield None, _read(path, 0, size)
            else:
                point = _split_point(path, size)
                yield "train", _read(path, 0, point)
                yield "val", _read(path, point, size)

    return itertools.islice(documents(), start, None)


def _stdlib(name: str) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths.sort(key=lambda p: p.relative_to(root).as_posix())
    source = {"text": "the running Python's standard library, without its tests"}
    source["revision"] = f"{platform.python_implementation()} {platform.python_version()}"
    documents = functools.partial(_file_documents, paths, "text")
    return Corpus(name, source, documents, sum(p.stat().st_size for p in paths))


def _shakespeare(name: str) -> Corpus:
    def documents(start: int = 0) -> Iterator[Document]:
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=4) as answer:
                text = answer.read()
        except OSError as error:
            raise ValueError(
                f"{SHAKESPEARE_URL} can't be downloaded ({error}): put the file anywhere and give "
                "its path as --corpus, or take --corpus stdlib"
            ) from None
        if sha256(text).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError(f"{SHAKESPEARE_URL} is not the text it was: its sha256 differs")
        point = int(0.9 * len(text))
        parts = [("train", iter((text[:point],))), ("val", iter((text[point:],)))]
        yield from parts[start:]

    source = {"text": SHAKESPEARE_URL, "sha256": SHAKESPEARE_SHA256}
    return Corpus(name, source, documents, 1_115_394)


def _local(path: Path, text_field: str) -> Corpus:
    known = TEXT_SUFFIXES + ROW_SUFFIXES
    if path.is_file():
        paths = [path] if path.suffix.lower() in known else []
    else:
        walk = os.walk(path)
        paths = [Path(folder, name) for folder, _, names in walk for name in names]
        paths = [p for p in paths if p.suffix.lower() in known and p.is_file()]
        paths = [p for p in paths if not any(s.startswith(".") for s in p.relative_to(path).parts)]
    if not paths:
        raise ValueError(f"{path} holds no text: files that end in {', '.join(known)}")
    paths.sort(key=lambda p: p.as_posix())
    stats = [p.stat() for p in paths]
    source = {
        "text": path.name,
        "files": len(paths),
        "bytes": sum(s.st_size for s in stats),
        "modified_ns": max(s.st_mtime_ns for s in stats),
    }
    if any(p.suffix.lower() in ROW_SUFFIXES for p in paths):
        source["text_field"] = text_field
    documents = functools.partial(_file_documents, paths, text_field)
    return Corpus(local_name(path), source, documents, source["bytes"])


def local_name(path: Path) -> str:
    """A folder name for a path: two paths never share one."""
    stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in path.stem[:80])
    return f"{stem}-{sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"


def _revision(repo: str, revision: str) -> str:
    """The commit that a branch of a Hub dataset stands at now."""
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(repo, revision=revision, timeout=4).sha
    except Exception as error:  # its HTTP client's errors come through as they are
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"the Hub does not give the dataset {repo} ({reason}): look at the connection and the "
            "name, or give a path to text"
        ) from None


def _from_hub(
    name: str,
    repo: str,
    subset: str | None = None,
    column: str = "text",
    revision: str = "main",
    cost: str = "an unknown download, and a minute of tokenizing per GB and core",
    n_bytes: int = 0,
) -> Corpus:
    """A text column of a Parquet dataset, streamed by `datasets`; no script is ever run. Its own
    validation split, where there is one, comes first: training needs some of it to start."""

    def chunks(row: dict) -> Iterator[bytes]:
        return iter((_utf8(row[column], f"a value of {column}"),))

    def documents(start: int = 0, commit: str = revision) -> Iterator[Document]:
        from datasets import load_dataset

        try:
            splits = load_dataset(repo, subset, streaming=True, revision=commit)
            if "train" not in splits:
                raise ValueError(f"it has no split 'train', but {', '.join(splits)}")
            own = splits.get("validation")
            if own is not None:
                for row in own.select_columns([column]):
                    if start:  # a skip would not tell how many rows it has skipped
                        start -= 1
                    else:
                        yield "val", chunks(row)
            for row in splits["train"].select_columns([column]).skip(start):
                yield (None if own is None else "train"), chunks(row)
        except Exception as error:  # its HTTP client's errors come through as they are
            reason = str(error).strip().split("\n")[0]
            raise ValueError(
                f"datasets can't stream {repo}, column {column} ({reason}). If it says that "
                "dataset scripts are no longer supported, take a dataset in Parquet; if it names "
                "configs or columns, write hf:owner/name:config:column"
            ) from None

    source = {"text": repo, "subset": subset, "column": column, "branch": revision}
    newest = functools.partial(_revision, repo, revision)
    return Corpus(name, source, documents, n_bytes, 0.01, cost, newest)


NAMED: dict[str, Callable[[str], Corpus]] = {
    "stdlib": _stdlib,
    "shakespeare": _shakespeare,
    "fineweb_edu": functools.partial(
        _from_hub,
        repo="HuggingFaceFW/fineweb-edu",
        subset="sample-10BT",
        cost="about 28 GB to download, 20 GB of tokens on disk, and some hours of tokenizing",
        n_bytes=48_000_000_000,
    ),
    "openwebtext": functools.partial(
        _from_hub,
        repo="Skylion007/openwebtext",
        revision="refs/convert/parquet",
        cost="about 24 GB to download, 18 GB of tokens on disk, and some hours of tokenizing",
        n_bytes=40_000_000_000,
    ),
    "fineweb10B-gpt2": lambda name: Corpus(
        name,
        {"text": "kjj0/fineweb10B-gpt2"},
        None,
        cost="20 GB to download, already tokenized: training can start after the first 400 MB",
        revision=functools.partial(_revision, "kjj0/fineweb10B-gpt2", "main"),
        shards="kjj0/fineweb10B-gpt2",
    ),
}


def find(corpus: str, text_field: str = "text") -> Corpus:
    """The corpus of that name or path. ValueError, with the choices, if there is none."""
    if text_field != "text" and (corpus in NAMED or corpus.startswith("hf:")):
        raise ValueError(
            "--text-field is for local rows; a column of the Hub's is named in the corpus: "
            "hf:owner/name:config:column, or hf:owner/name::column"
        )
    if corpus in NAMED:
        return NAMED[corpus](corpus)
    if corpus.startswith("hf:"):
        repo, *rest = corpus.removeprefix("hf:").split(":")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or len(rest) > 2:
            raise ValueError(f"{corpus}: write hf:owner/name, with :config and :column if needed")
        subset, column = (*rest, "", "")[:2]
        return _from_hub(folder_name(corpus), repo, subset or None, column or "text")
    if Path(corpus).exists():
        return _local(Path(corpus), text_field)
    near = difflib.get_close_matches(corpus, NAMED, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    names = ", ".join(NAMED)
    raise ValueError(
        f"no corpus {corpus!r}: {hint}there are {names}, hf:owner/name, or give a path that exists"
    )


def folder_name(corpus: str) -> str:
    """The part of a prepared folder's name that stands for the corpus."""
    if corpus in NAMED:
        return corpus
    if corpus.startswith("hf:"):
        parts = corpus.removeprefix("hf:").replace("/", "--").split(":")  # no two share a name
        return "+".join(re.sub(r"[^\w.-]", "_", part) for part in parts)
    return local_name(Path(corpus))
