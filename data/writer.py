"""Token shards while they are written: whole under their final name or not there at all, and after
a kill continued from the last snapshot.

meta.json is the snapshot. While "complete" is false it also holds "progress": the place in the
source (document, piece), and how much of each split's open shard, NAME.tmp, is valid. A shard gets
its final name only after meta.json names it.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import tiktoken

from data import loader, tokenizer


class ShardWriter:
    """The shards of one split, `limit` tokens each. `shards`: the complete ones, as meta.json lists
    them; `opened`: tokens, documents and bytes of the one that is being written."""

    def __init__(self, folder: Path, split: str, limit: int, encoding: tiktoken.Encoding):
        self.folder, self.split, self.limit = folder, split, limit
        self.end, self.lengths = encoding.eot_token, tokenizer.text_bytes(encoding)
        self.shards: list[dict] = []
        self.opened: dict | None = None
        self.file = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_) -> None:
        if self.file is not None:
            self.file.close()

    def add(self, ids: np.ndarray) -> None:
        """Append token ids. ValueError for one that uint16 can't hold: nothing is wrapped."""
        ids = np.asarray(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < 2**16:
            raise ValueError(f"token ids must fit 16 bits, got {ids.min()} to {ids.max()}")
        ids = ids.astype("<u2")
        while len(ids):
            if self.opened is None:
                self._open({"tokens": 0, "documents": 0, "bytes": 0})
            room = self.limit - self.opened["tokens"]
            part, ids = ids[:room], ids[room:]
            self.file.write(part.data)
            self.opened["tokens"] += len(part)
            self.opened["documents"] += int(np.count_nonzero(part == self.end))
            self.opened["bytes"] += int(self.lengths.take(part).sum(dtype=np.int64))
            if self.opened["tokens"] == self.limit:
                self.close_shard()

    def _name(self) -> str:
        return f"{self.split}_{len(self.shards):06d}.bin"

    def _open(self, opened: dict) -> None:
        """Begin a shard, or go on with one of which only these tokens are valid."""
        path = self.folder / f"{self._name()}.tmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = loader.HEADER_BYTES + 2 * opened["tokens"]
        if opened["tokens"] and (not path.exists() or path.stat().st_size < size):
            raise ValueError(f"{path} is shorter than meta.json says")
        self.file = open(path, "r+b" if opened["tokens"] else "w+b")  # noqa: SIM115
        self.file.write(loader.shard_header(0))
        self.file.truncate(size)
        self.file.seek(size)
        self.opened = opened

    def close_shard(self) -> None:
        """Complete the open shard, still under its temporary name."""
        if self.opened is None:
            return
        self.file.seek(0)
        self.file.write(loader.shard_header(self.opened["tokens"]))
        self.sync()
        self.file.close()
        digest = loader.sha256_of(self.folder / f"{self._name()}.tmp")
        self.shards.append({"file": self._name()} | self.opened | {"sha256": digest})
        self.file = self.opened = None

    def sync(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Give complete shards their final names. FileNotFoundError if one is gone."""
        for shard in self.shards:
            if not (self.folder / shard["file"]).exists():
                os.replace(self.folder / f"{shard['file']}.tmp", self.folder / shard["file"])

    def adopt(self, path: Path) -> None:
        """A shard that is complete already becomes the next one. ValueError if it is damaged."""
        tokens = loader.count_tokens(path)
        ids = np.fromfile(path, "<u2", offset=loader.HEADER_BYTES)
        if len(ids) and ids.max() > self.end:
            raise ValueError(f"{path} holds id {ids.max()}, but GPT-2's end at {self.end}")
        digest, counts = loader.sha256_of(path), {"tokens": tokens}
        counts["documents"] = int((ids == self.end).sum())
        counts["bytes"] = int(self.lengths[ids].sum())
        os.replace(path, self.folder / f"{self._name()}.tmp")
        self.shards.append({"file": self._name()} | counts | {"sha256": digest})

    def total(self, key: str) -> int:
        """Of all shards, "tokens", "documents" or "bytes"."""
        return sum(shard[key] for shard in [*self.shards, *filter(None, [self.opened])])

    def restore(self, shards: list[dict], opened: dict | None) -> None:
        self.shards = [s for s in shards if s["file"].startswith(self.split + "_")]
        self.publish()
        if opened:
            self._open(opened)


class Preparation:
    """A corpus on its way into a folder: writers for both splits, and snapshots of all.

    Goes on where an incomplete meta.json stands, else starts anew. ValueError if that one is of
    another source, tokenizer or sizes (with `force`, it gives way), or if its files are damaged."""

    def __init__(self, folder: Path, about: dict, limits: dict[str, int], encoding, force=False):
        self.folder, self.encoding = folder, encoding
        self.meta = {"format": 1, "complete": False, **about, "limits": limits}
        self.meta |= {"empty_documents": 0, "replaced_invalid_utf8": 0, "shards": []}
        self.place = {"document": 0, "piece": 0}
        self.writers = {s: ShardWriter(folder, s, n, encoding) for s, n in limits.items()}
        old = loader.read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
        differing = [k for k in ("source", "tokenizer", "limits") if old.get(k) != self.meta[k]]
        if old.get("progress") and not (force and differing):
            self._restore(old, differing)
        elif folder.exists():
            shutil.rmtree(folder)  # made again with the first token: a refusal leaves none

    def _restore(self, old: dict, differing: list[str]) -> None:
        if differing:
            options = {"limits": "shard_tokens"}
            other = " and ".join(options.get(k, k) for k in differing)
            raise ValueError(
                f"{self.folder} holds unfinished tokens of another {other}: go on with the same "
                "`python -m data.prepare` command as before, or give it --force to begin again"
            )
        path = self.folder / "meta.json"
        try:
            self.place, self.meta = old["progress"]["place"], old
            parts = [*old["shards"], *filter(None, old["progress"]["opened"].values())]
            numbers = [old["empty_documents"], old["replaced_invalid_utf8"]]
            numbers += [part[k] for part in parts for k in ("tokens", "documents", "bytes")]
            numbers += [self.place["document"], self.place["piece"]]
            if not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{path} has counts or a place that are no numbers")
            for split, writer in self.writers.items():
                writer.restore(old["shards"], old["progress"]["opened"][split])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            for writer in self.writers.values():
                writer.__exit__()
            if not isinstance(error, OSError | ValueError):
                error = f"{path} can't be read ({type(error).__name__}: {error})"
            raise ValueError(f"{error}: prepare again with --force") from None

    def snapshot(self) -> None:
        """Bring everything so far to the disk, so that a kill loses nothing before this place."""
        for writer in self.writers.values():
            writer.sync()
        self.meta["shards"] = [s for writer in self.writers.values() for s in writer.shards]
        opened = {split: writer.opened for split, writer in self.writers.items()}
        self.meta["progress"] = {"place": self.place, "opened": opened}
        self._write_meta()
        for writer in self.writers.values():
            writer.publish()

    def finish(self) -> None:
        """Complete the open shards, and say so when all have their final names."""
        for writer in self.writers.values():
            writer.close_shard()
        self.snapshot()
        del self.meta["progress"]
        self.meta["complete"] = True
        self._write_meta()

    def _write_meta(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        loader.replace_file(self.folder / "meta.json", json.dumps(self.meta, indent=1) + "\n")

    @property
    def unpublished(self) -> bool:
        """Whether there are complete shards that meta.json does not name yet."""
        return sum(len(w.shards) for w in self.writers.values()) > len(self.meta["shards"])
