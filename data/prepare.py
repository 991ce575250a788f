"""Program: text to token shards. `python -m data.prepare CORPUS [--tokenizer gpt2|byte]`

<data_dir>/<corpus>-<tokenizer>/ gets {val,train}_NNNNNN.bin (see data/loader.py) and, last of all,
meta.json: corpus, source, tokenizer, and per shard tokens, documents, bytes of text and sha256.
"""

import codecs
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import tyro
from filelock import FileLock
from tqdm import tqdm

import config
from data import corpora, loader, tokenizer

PIECE_CHARS = 1 << 20


class TextPieces:
    """UTF-8 chunks to text in bounded pieces whose ids, laid end to end, are the whole's ids.

    A cut lies between a character and the blank after it, where GPT-2's pattern always ends a
    piece. Invalid bytes become U+FFFD and are counted in `replaced`."""

    def __init__(self):
        self.replaced = 0
        codecs.register_error("count-and-replace", self._replace)

    def _replace(self, error: UnicodeError) -> tuple[str, int]:
        self.replaced += 1
        return "\ufffd", error.end

    def of(self, chunks: Iterator[bytes]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("count-and-replace")
        text = ""
        for chunk in chunks:
            text += decoder.decode(chunk)
            if len(text) >= PIECE_CHARS and (cut := self._last_cut(text)):
                yield text[:cut]
                text = text[cut:]
        text += decoder.decode(b"", True)
        if text:
            yield text

    @staticmethod
    def _last_cut(text: str) -> int:
        cut = len(text) - 1
        while cut > 0 and not (text[cut] in " \t\r\n" and not text[cut - 1].isspace()):
            cut -= 1
        # Text without blanks must be cut somewhere too: only then may a token be split.
        return cut if cut or len(text) < 2 * PIECE_CHARS else len(text)


class ShardWriter:
    """The shards of one split; each gets its final name when it is complete and on the disk."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, encoding: tiktoken.Encoding):
        self.folder, self.split, self.limit = folder, split, shard_tokens
        self.end, self.lengths = encoding.eot_token, tokenizer.text_bytes(encoding)
        self.shards: list[dict] = []
        self.file, self.tokens = None, 0

    def add(self, ids: list[int]) -> None:
        """Append token ids. ValueError for an id that uint16 can't hold: nothing is wrapped."""
        ids = np.asarray(ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < 2**16:
            raise ValueError(f"token ids must fit 16 bits, got {ids.min()} to {ids.max()}")
        while len(ids):
            if self.file is None:
                self._open()
            part, ids = ids[: self.limit - self.tokens], ids[self.limit - self.tokens :]
            self.file.write(part.astype("<u2").tobytes())
            self.tokens += len(part)
            self.shards[-1]["documents"] += int((part == self.end).sum())
            self.shards[-1]["bytes"] += int(self.lengths[part].sum())
            if self.tokens == self.limit:
                self.close()

    def _open(self) -> None:
        name = f"{self.split}_{len(self.shards):06d}.bin"
        self.shards.append({"file": name, "tokens": 0, "documents": 0, "bytes": 0})
        self.file, self.tokens = open(self.folder / f"{name}.tmp", "wb"), 0  # noqa: SIM115
        self.file.write(loader.shard_header(0))

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.close()
        elif self.file is not None:
            self.file.close()

    def close(self) -> None:
        if self.file is None:
            return
        self.file.seek(0)
        self.file.write(loader.shard_header(self.tokens))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file, shard = None, self.shards[-1]
        with open(self.folder / f"{shard['file']}.tmp", "rb") as file:
            shard["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
        shard["tokens"] = self.tokens
        os.replace(self.folder / f"{shard['file']}.tmp", self.folder / shard["file"])


def _is_validation(first_piece: str, share: float) -> bool:
    """Chosen by the document's own beginning, so that it stays where it is when others come."""
    digest = hashlib.sha256(first_piece.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def prepare(
    corpus: corpora.Corpus,
    encoding: tiktoken.Encoding,
    folder: Path,
    *,
    shard_tokens: int = 100_000_000,
    max_tokens: int | None = None,
) -> dict:
    """Write the shards of a corpus and return its meta.json. Memory does not grow with the text.

    Each document is preceded by <|endoftext|>; that mark within a text stays text. Empty documents
    are skipped and counted."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [folder / "meta.json", *folder.glob("*.bin*")]:
        old.unlink(missing_ok=True)
    writers = {s: ShardWriter(folder, s, shard_tokens, encoding) for s in ("val", "train")}
    pieces, empty, total = TextPieces(), 0, 0
    bar = tqdm(total=corpus.n_bytes or None, unit="B", unit_scale=True, disable=None)
    bar.set_description(f"tokenizing {corpus.name}")
    with bar, writers["val"], writers["train"]:
        for split, chunks in corpus.documents():
            writer = None
            for piece in pieces.of(chunks):
                if writer is None:
                    chosen = "val" if _is_validation(piece, corpus.val_share) else "train"
                    writer = writers[split or chosen]
                    writer.add([encoding.eot_token])
                ids = encoding.encode_ordinary(piece)
                writer.add(ids)
                total += len(ids)
                bar.update(len(piece.encode("utf-8", "replace")))
            empty += writer is None
            if max_tokens and total >= max_tokens:
                break
    meta = {
        "format": 1,
        "corpus": corpus.name,
        "source": corpus.source,
        "tokenizer": tokenizer.identity(encoding),
        "empty_documents": empty,
        "replaced_invalid_utf8": pieces.replaced,
        "shards": [shard for writer in writers.values() for shard in writer.shards],
    }
    with open(folder / "meta.json.tmp", "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "meta.json.tmp", folder / "meta.json")
    return meta


def folder_of(corpus: str, tokenizer_name: str, data_dir: Path) -> Path:
    """Where the tokens of a corpus (a name or a path) lie, whether they are prepared or not."""
    plain = data_dir / f"{corpus}-{tokenizer_name}"
    if corpus in corpora.NAMED or (os.sep not in corpus and (plain / "meta.json").exists()):
        return plain
    return data_dir / f"{corpora.local_name(Path(corpus))}-{tokenizer_name}"


def ensure(corpus: str, tokenizer_name: str, data_dir: Path) -> Path:
    """The folder of prepared tokens; local text is prepared on first use. ValueError where that
    needs a download, or where the text has changed since."""
    folder = folder_of(corpus, tokenizer_name, data_dir)
    command = f"python -m data.prepare {shlex.quote(corpus)} --tokenizer {tokenizer_name}"
    if data_dir != Path("data/prepared"):
        command += f" --data-dir {shlex.quote(str(data_dir))}"
    if (folder / "meta.json").exists():
        meta = loader.read_meta(folder)
        if corpus not in corpora.NAMED and Path(corpus).exists():
            now = corpora.find(corpus).source
            if meta["source"] != now:
                raise ValueError(
                    f"{corpus} has changed since it was prepared (then {meta['source']}, now "
                    f"{now}): run `{command} --force` to prepare it again"
                )
        return folder
    found = corpora.find(corpus)
    if found.cost:
        raise ValueError(
            f"corpus {corpus} is not prepared in {data_dir}. That takes {found.cost}: "
            f"run `{command}`.\nWithout a download: `python train.py config/quickstart.toml` "
            "trains a small model on text that is already here."
        )
    with _locked(folder):
        if not (folder / "meta.json").exists():
            prepare(found, tokenizer.load(tokenizer_name), folder)
    return folder


def _locked(folder: Path) -> FileLock:
    """One preparation of a folder at a time, over all processes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.parent / f".{folder.name}.lock")


@dataclass(frozen=True)
class PrepareConfig:
    """What to prepare."""

    corpus: tyro.conf.Positional[str] = ""
    """A name, or a path to text or a folder of it; without one, the names are listed."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """GPT-2's 50,257 byte pairs, or the 256 bytes and an end mark."""
    data_dir: Path = Path("data/prepared")
    """Folder of the prepared tokens."""
    shard_tokens: int = 100_000_000
    """Tokens per shard file."""
    max_tokens: int | None = None
    """Stop after the document that reaches this many tokens."""
    force: bool = False
    """Prepare again what is already prepared."""


def main(argv: list[str]) -> int:
    cfg = config.parse(
        PrepareConfig, argv, prog="python -m data.prepare", description=__doc__, preset=False
    )
    if not cfg.corpus:
        for name, make in corpora.NAMED.items():
            print(f"{name:16} {make().cost or 'no download'}")
        print("or a path to text: " + ", ".join(corpora.TEXT_SUFFIXES) + ", or a folder of them")
        return 0
    for name in ("shard_tokens", "max_tokens"):
        value = getattr(cfg, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    found = corpora.find(cfg.corpus)
    folder = folder_of(cfg.corpus, cfg.tokenizer, cfg.data_dir)
    with _locked(folder):
        if (folder / "meta.json").exists() and not cfg.force:
            print(f"{folder} is prepared already; --force prepares it again")
            meta = loader.read_meta(folder)
        else:
            limits = {"shard_tokens": cfg.shard_tokens, "max_tokens": cfg.max_tokens}
            meta = prepare(found, tokenizer.load(cfg.tokenizer), folder, **limits)
    for split in ("train", "val"):
        shards = [s for s in meta["shards"] if s["file"].startswith(split)]
        tokens, documents = (sum(s[k] for s in shards) for k in ("tokens", "documents"))
        print(f"{folder}: {split} {tokens:,} tokens in {documents:,} documents")
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
