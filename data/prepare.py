"""Program: text to token shards. `python -m data.prepare CORPUS [--tokenizer gpt2|byte]`

<data_dir>/<corpus>-<tokenizer>/ gets {val,train}_NNNNNN.bin (see data/loader.py) and meta.json:
corpus, source, tokenizer, and per shard tokens, documents, bytes of text and sha256. Killed at any
moment, the same command goes on where it was. Training may start meanwhile.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import tyro
from tqdm import tqdm

import config
from data import corpora, loader, tokenizer
from data.writer import Preparation

PIECE_BYTES = 1 << 18
# Read backwards: a blank and, before it, a visible ASCII character or another one that is no blank
# in UTF-8. There GPT-2's pattern always ends a piece.
LAST_BLANK = re.compile(
    rb"[ \t\r\n](?=[!-~\x80-\xff])"
    rb"(?![\x85\xa0]\xc2|\x80\x9a\xe1|[\x80-\x8a\xa8\xa9\xaf]\x80\xe2|\x9f\x81\xe2|\x80\x80\xe3)"
)
SNAPSHOT_SECONDS = 5.0
SHARD_TOKENS = 100_000_000


@dataclass
class Piece:
    """A part of a document: the `piece`-th of the `document`-th. An empty document has one, too."""

    document: int
    piece: int
    split: str
    text: bytes


class NeedsDownload(ValueError):
    """A corpus that is not prepared, and not done in a minute."""


def _cut(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """A document's UTF-8 in bounded pieces whose ids, laid end to end, are the whole's ids, but
    where half a megabyte has no place to cut: there a token may become two."""
    rest = b""
    for chunk in chunks:
        # A row of a dataset comes as one chunk, whatever its length.
        for start in range(0, len(chunk), corpora.CHUNK_BYTES):
            rest += chunk[start : start + corpora.CHUNK_BYTES]
            if len(rest) >= PIECE_BYTES and (cut := _last_cut(rest)):
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


def _last_cut(text: bytes) -> int:
    if found := LAST_BLANK.search(text[::-1]):
        return len(text) - found.end()
    if len(text) < 2 * PIECE_BYTES:
        return 0
    last = range(len(text) - 1, len(text) - 4, -1)  # a character has at most four bytes
    return next((i for i in last if not 0x80 <= text[i] < 0xC0), len(text))


def _is_validation(first_piece: bytes, share: float) -> bool:
    """Chosen by the document's own beginning, so that it stays where it is when others come."""
    digest = hashlib.sha256(first_piece).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _pieces(documents: Iterator[corpora.Document], place: dict, share: float) -> Iterator[Piece]:
    """All pieces from `place` on; documents begin with the one that it names."""
    for number, (split, chunks) in enumerate(documents, start=place["document"]):
        n = 0
        for n, text in enumerate(_cut(chunks), start=1):
            if n == 1:
                split = split or ("val" if _is_validation(text, share) else "train")
            if number > place["document"] or n > place["piece"]:
                yield Piece(number, n - 1, split, text)
        if not n and (number > place["document"] or not place["piece"]):
            yield Piece(number, 0, "train", b"")


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces, about PIECE_BYTES together: short documents share the cost of a task."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= PIECE_BYTES or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterator[list[Piece]], encoding: tiktoken.Encoding, workers: int
) -> Iterator[tuple[list[Piece], list[tuple[np.ndarray, int]]]]:
    """The batches in order with each piece's ids and number of invalid sequences, which become
    U+FFFD; some of them ahead on other threads: tiktoken does not hold Python's lock, so threads
    are as fast as processes."""
    of_thread = threading.local()

    def start() -> None:
        # The regular expressions within keep their memory for one thread: others wait for it.
        of_thread.encoding = tokenizer.copy_of(encoding)

    def encode(piece: Piece) -> tuple[np.ndarray, int]:
        text = piece.text.decode("utf-8", "replace")
        replaced = text.count("\ufffd") - piece.text.count("\ufffd".encode())
        return of_thread.encoding.encode_to_numpy(text, disallowed_special=()), replaced

    def encode_all(batch: list[Piece]) -> list[tuple[np.ndarray, int]]:
        return [encode(piece) for piece in batch]

    with ThreadPoolExecutor(workers, initializer=start) as pool:
        ahead = deque()
        for batch in batches:
            ahead.append((batch, pool.submit(encode_all, batch)))
            if len(ahead) > 2 * workers:
                done, ids = ahead.popleft()
                yield done, ids.result()
        for done, ids in ahead:
            yield done, ids.result()


def prepare(
    corpus: corpora.Corpus,
    encoding: tiktoken.Encoding,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    max_tokens: int | None = None,
    workers: int = 1,
    force: bool = False,
) -> dict:
    """Write the shards of a corpus, or go on writing them, and return meta.json. Memory does not
    grow with the text, and the bytes do not depend on `workers`. `force`: unfinished tokens of
    another source or other sizes give way.

    Each document is preceded by <|endoftext|>; that mark within a text stays text. Empty documents
    are skipped and counted. Validation shards are a hundredth as long as training shards, so that
    some are there early."""
    old = loader.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    source, documents = corpus.source, corpus.documents
    if corpus.revision:
        newest = corpus.revision()  # asked for in any case: it fails soon where there is no network
        version = old.get("source", {}).get("revision") or newest
        source = source | {"revision": version}
        documents = partial(documents, commit=version) if documents else None
    about = {"corpus": corpus.name, "source": source, "tokenizer": tokenizer.identity(encoding)}
    val_tokens = max(shard_tokens // 100, min(shard_tokens, 1_000_000))
    limits = {"val": val_tokens, "train": shard_tokens}
    state = Preparation(folder, about, limits, encoding, force)
    with state.writers["val"], state.writers["train"]:
        if corpus.shards:
            _fetch_shards(corpus.shards, version, state, max_tokens)
        else:
            pieces = _pieces(documents(state.place["document"]), state.place, corpus.val_share)
            with tqdm(total=corpus.n_bytes or None, unit="B", unit_scale=True, disable=None) as bar:
                bar.set_description(f"tokenizing {corpus.name}")
                bar.update(sum(w.total("bytes") for w in state.writers.values()))
                encoded = _encoded(_batches(pieces), encoding, workers)
                _write(encoded, state, bar, encoding.eot_token, max_tokens)
        if not any(writer.total("tokens") for writer in state.writers.values()):
            raise ValueError(f"{corpus.name} has no text: {corpus.source}")
        state.finish()
    if replaced := state.meta["replaced_invalid_utf8"]:
        print(f"warning: {replaced} invalid UTF-8 sequences were replaced: is that text?")
    return state.meta


def _write(
    encoded: Iterator[tuple[list[Piece], list[tuple[np.ndarray, int]]]],
    state: Preparation,
    bar: tqdm,
    end: int,
    max_tokens: int | None,
) -> None:
    total = before = sum(w.total("tokens") for w in state.writers.values())
    left_out = None
    start = last = time.monotonic()
    for batch, ids in encoded:
        for piece, (its, replaced) in zip(batch, ids, strict=True):
            if not piece.piece and max_tokens:
                if total >= max_tokens:
                    return
                # A source's own validation split may be longer than all that is wanted.
                full = state.writers["val"].total("tokens") >= max(1, max_tokens // 10)
                left_out = piece.document if piece.split == "val" and full else None
            if piece.document == left_out:
                continue
            if not piece.text:
                state.meta["empty_documents"] += 1
            elif not piece.piece:
                its = np.concatenate([np.array([end], its.dtype), its])
            state.meta["replaced_invalid_utf8"] += replaced
            state.writers[piece.split].add(its)
            state.place = {"document": piece.document, "piece": piece.piece + 1}
            total += len(its)
            bar.update(len(piece.text))
        speed = (total - before) / (time.monotonic() - start + 1e-9)
        bar.set_postfix_str(f"{total:,} tokens, {speed:,.0f} tokens/s")
        if state.unpublished or time.monotonic() - last > SNAPSHOT_SECONDS:
            state.snapshot()
            last = time.monotonic()


def _fetch_shards(repo: str, commit: str, state: Preparation, max_tokens: int | None) -> None:
    """Shards that somebody has tokenized already, one by one, checked and used as they are."""
    from huggingface_hub import HfApi, hf_hub_download

    if state.meta["tokenizer"]["name"] != "gpt2":
        raise ValueError(f"{repo} holds GPT-2 tokens: take --tokenizer gpt2")
    where = {"repo_id": repo, "repo_type": "dataset", "revision": commit}
    fetch = partial(hf_hub_download, local_dir=state.folder / "hub", **where)
    try:
        names = sorted(n for n in HfApi().list_repo_files(**where) if n.endswith(".bin"))
        for split, writer in state.writers.items():
            theirs = [n for n in names if f"_{split}_" in n]
            for name in tqdm(theirs[len(writer.shards) :], unit="shard", desc=split, disable=None):
                if split == "train" and max_tokens and writer.total("tokens") >= max_tokens:
                    break
                fetched = Path(fetch(filename=name))
                try:
                    writer.adopt(fetched)
                except ValueError:
                    fetched.unlink()  # or the next call would find it and not ask again
                    raise
                state.snapshot()
    except ValueError:
        raise
    except Exception as error:  # its HTTP client's errors come through as they are
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"the Hub does not give {repo} ({reason}): try again later") from None
    shutil.rmtree(state.folder / "hub", ignore_errors=True)


def estimate(
    corpus: corpora.Corpus,
    encoding: tiktoken.Encoding,
    folder: Path,
    workers: int,
    max_tokens: int | None = None,
) -> str:
    """How much disk and time preparing takes. ValueError if the disk has too little room."""
    if corpus.shards or not corpus.n_bytes:
        return corpus.cost or "an unknown amount of text"
    # At most a million tokens more: the document that reaches the limit.
    n_bytes = min(corpus.n_bytes, 4 * (max_tokens + 1_000_000)) if max_tokens else corpus.n_bytes
    sample = ("The quick brown fox, who has 3 cubs, jumps over it.\n" * 2000)[:100_000]
    start = time.perf_counter()
    encoding.encode_to_numpy(sample, disallowed_special=())
    seconds = (time.perf_counter() - start) / len(sample) * n_bytes / workers
    # A token of GPT-2 stands for 4 bytes of English and 2 or fewer of much else; 2 bytes each.
    need = n_bytes * (2 if encoding.n_vocab == 257 else 1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < need:
        raise ValueError(
            f"{folder} needs up to {need / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB free: "
            "make room, take another --data-dir, or set --max-tokens"
        )
    return (
        f"{n_bytes / 1e9:.3f} GB of text, up to {need / 1e9:.3f} GB of tokens "
        f"({free / 1e9:.0f} GB free), about {seconds / 60:.1f} minutes on {workers} worker(s)"
    )


def folder_of(corpus: str, tokenizer_name: str, data_dir: Path) -> Path:
    """Where the tokens of a corpus (a name or a path) lie, whether they are prepared or not."""
    plain = data_dir / f"{corpus}-{tokenizer_name}"
    if os.sep not in corpus and (plain / "meta.json").exists():
        return plain
    return data_dir / f"{corpora.folder_name(corpus)}-{tokenizer_name}"


def command_of(corpus: str, tokenizer_name: str, data_dir: Path, text_field: str = "text") -> str:
    """What a person types to prepare this."""
    command = f"python -m data.prepare {shlex.quote(corpus)} --tokenizer {tokenizer_name}"
    if data_dir != Path("data/prepared"):
        command += f" --data-dir {shlex.quote(str(data_dir))}"
    return command + (f" --text-field {shlex.quote(text_field)}" if text_field != "text" else "")


def check_unchanged(found: corpora.Corpus, folder: Path, command: str) -> None:
    """ValueError, with the command that helps, if the text is not what a folder was prepared
    from."""
    before = loader.read_meta(folder)["source"]
    if before and any(before.get(k) != v for k, v in found.source.items()):
        raise ValueError(
            f"the text of {folder} has changed since it was prepared (then {before}, now "
            f"{found.source}): run `{command} --force` to prepare it again"
        )


def ensure(corpus: str, tokenizer_name: str, data_dir: Path) -> Path:
    """The folder of tokens, prepared or being prepared; local text is prepared on first use.
    ValueError where that needs a download, or where the text has changed since."""
    folder = folder_of(corpus, tokenizer_name, data_dir)
    if loader.is_complete(folder):
        if folder.name.startswith(corpora.local_name(Path(corpus))) and Path(corpus).exists():
            field = loader.read_meta(folder)["source"].get("text_field", "text")
            command = command_of(corpus, tokenizer_name, data_dir, field)
            check_unchanged(corpora.find(corpus, field), folder, command)
        return folder
    started = (folder / "meta.json").exists()
    if started and loader.is_being_prepared(folder):
        return folder
    found = corpora.find(corpus)
    if found.cost:
        state = "only partly prepared" if started else "not prepared"
        raise NeedsDownload(
            f"corpus {corpus} is {state} in {data_dir}. That takes {found.cost}: "
            f"run `{command_of(corpus, tokenizer_name, data_dir)}`.\nWithout a download: "
            "`python train.py config/quickstart.toml` trains a small model on text that is already "
            "here."
        )
    with loader.lock_of(folder):
        if not loader.is_complete(folder):
            encoding = tokenizer.load(tokenizer_name)
            estimate(found, encoding, folder, 1)
            prepare(found, encoding, folder, workers=os.cpu_count() or 1)
    return folder


def inspect(folder: Path) -> Iterator[str]:
    """What a person wants to see of a prepared folder. ValueError at the end, if a shard's hash is
    not the one that was written down."""
    if not (folder / "meta.json").exists():
        raise ValueError(f"no {folder / 'meta.json'}: give a folder of prepared tokens")
    meta = loader.read_meta(folder)
    state = "complete" if meta.get("complete", True) else "not complete"
    yield f"{folder}: {meta['corpus']}, {meta['tokenizer']['name']} tokens, {state}"
    yield f"source: {meta['source']}"
    empty, replaced = meta.get("empty_documents", 0), meta.get("replaced_invalid_utf8", 0)
    yield f"skipped empty documents: {empty}; replaced invalid UTF-8 sequences: {replaced}"
    damaged = []
    for shard in meta["shards"]:
        path = folder / shard["file"]
        same, n = loader.sha256_of(path) == shard["sha256"], shard["tokens"]
        yield (
            f"{shard['file']}  {n:,} tokens, {shard['documents']:,} documents, "
            f"{shard['bytes'] / max(1, n):.2f} bytes per token, {path.stat().st_size:,} bytes, "
            f"sha256 {shard['sha256'][:16]} {'checked' if same else 'DIFFERS'}"
        )
        damaged += [] if same else [shard["file"]]
    for split in ("val", "train"):
        first = next((s for s in meta["shards"] if s["file"].startswith(split)), None)
        if first:
            ids = np.fromfile(folder / first["file"], "<u2", 200, offset=loader.HEADER_BYTES)
            encoding = tokenizer.load(meta["tokenizer"]["name"])
            lines = tokenizer.decode(encoding, ids.tolist()).splitlines()[:5]
            yield from (f"{split}| {line}" for line in lines)
    if damaged:
        raise ValueError(f"damaged in {folder}: {', '.join(damaged)}; prepare again with --force")


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare."""

    corpus: tyro.conf.Positional[str] = ""
    """A name, hf:owner/name[:config][:column], or a path to text (.txt, .md, .py, .jsonl, .parquet)
    or a folder of it; without one, the names are listed."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """GPT-2's 50,257 byte pairs, or the 256 bytes and an end mark."""
    data_dir: Path = Path("data/prepared")
    """Folder of the prepared tokens."""
    shard_tokens: int = SHARD_TOKENS
    """Tokens per training shard; windows are shuffled within one."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many tokens, a tenth of them validation at most."""
    workers: int = os.cpu_count() or 1
    """Threads that tokenize; the result does not depend on it."""
    text_field: str = "text"
    """Field of .jsonl rows, column of .parquet files."""
    force: bool = False
    """Prepare again what is already prepared."""
    inspect: Path | None = None
    """Show what lies in this prepared folder, and check its hashes; nothing is prepared."""


def main(argv: list[str]) -> int:
    cfg = config.parse(
        PrepareConfig, argv, prog="python -m data.prepare", description=__doc__, preset=False
    )
    if cfg.inspect and cfg.corpus:
        raise ValueError(f"--inspect prepares nothing: leave out {cfg.corpus}")
    if cfg.inspect:
        for line in inspect(cfg.inspect):
            print(line)
        return 0
    if not cfg.corpus:
        for name in corpora.NAMED:
            print(f"{name:16} {corpora.find(name).cost or 'a second'}")
        print("or hf:owner/name[:config][:column], or a path to text or a folder of it")
        return 0
    for name in ("shard_tokens", "max_tokens", "workers"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    found = corpora.find(cfg.corpus, cfg.text_field)
    folder = folder_of(cfg.corpus, cfg.tokenizer, cfg.data_dir)
    with loader.lock_of(folder):
        if not cfg.force and loader.is_complete(folder):
            command = command_of(cfg.corpus, cfg.tokenizer, cfg.data_dir, cfg.text_field)
            check_unchanged(found, folder, command)
            print(f"{folder} is prepared already; --force prepares it again")
        else:
            encoding = tokenizer.load(cfg.tokenizer)
            print(estimate(found, encoding, folder, cfg.workers, cfg.max_tokens), flush=True)
            limits = {"shard_tokens": cfg.shard_tokens, "max_tokens": cfg.max_tokens}
            # The old tokens stay until the new ones are there.
            new = folder.with_name(f".{folder.name}.new") if cfg.force else folder
            prepare(found, encoding, new, **limits, workers=cfg.workers, force=cfg.force)
            if cfg.force:
                old = folder.with_name(f".{folder.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                if folder.exists():
                    os.rename(folder, old)
                os.rename(new, folder)
                shutil.rmtree(old, ignore_errors=True)
    shards = loader.read_meta(folder)["shards"]
    for split in ("train", "val"):
        its = [s for s in shards if s["file"].startswith(split)]
        tokens, documents = (sum(s[k] for s in its) for k in ("tokens", "documents"))
        print(f"{folder}: {split} {tokens:,} tokens in {documents:,} documents")
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
