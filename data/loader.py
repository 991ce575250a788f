"""Token shards on disk, and which of their tokens a step sees.

A shard has the layout of llm.c and modded-nanogpt: 256 little-endian int32 (20240520, 1, number of
tokens, zeros), then that many uint16 ids. Beside the shards lies meta.json (see data/prepare.py).

A window is block_size inputs and the same shifted by one as targets: block_size + 1 ids, whose last
one is the next window's first, so that each target is predicted exactly once per epoch.

Training may start while data/prepare.py is still at work: meta.json then says "complete": false and
names the shards that are there, and who needs a later one waits for it.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import numpy as np
import torch

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
POLL_SECONDS = 1.0


def shard_header(n_tokens: int) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes()


def count_tokens(path: Path) -> int:
    """Tokens of a shard. ValueError, naming the file, if its header or its size is wrong."""
    header = np.fromfile(path, "<i4", 256)
    if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is no token shard: its header is not ({MAGIC}, {VERSION}, …)")
    n, size = int(header[2]), path.stat().st_size
    if n < 0 or size != HEADER_BYTES + 2 * n:
        raise ValueError(
            f"{path} is damaged: {n} tokens need {HEADER_BYTES + 2 * n} bytes, it has {size}; "
            "delete its folder and prepare the corpus again"
        )
    return n


def read_json(path: Path) -> dict:
    """ValueError, naming the file, if it can't be read or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content.items()
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {error})") from None
    return content


def replace_file(path: Path, text: str) -> None:
    """Replace a file by one with this text, which is on the disk then: whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    with open(partial, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def lock_of(folder: Path) -> filelock.FileLock:
    """What a process holds while it works on this folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(folder.parent / f".{folder.name}.lock")


def is_being_prepared(folder: Path) -> bool:
    try:
        with lock_of(folder).acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True


def is_complete(folder: Path) -> bool:
    """Whether a corpus lies there, prepared to its end."""
    return (folder / "meta.json").exists() and _meta(folder).get("complete", True)


def _meta(folder: Path) -> dict:
    try:
        return read_json(folder / "meta.json")
    except ValueError as error:
        raise ValueError(f"{error}: prepare the corpus again with --force") from None


def read_meta(folder: Path) -> dict:
    """meta.json of a prepared folder. ValueError if it can't be read or names missing shards."""
    path = folder / "meta.json"
    # Folders that other programs made need not say where their text came from.
    meta = {"corpus": folder.name, "source": {}} | _meta(folder)
    try:
        meta["shards"] = [{"documents": 0, "bytes": 0} | s for s in meta["shards"]]
        if not meta.get("complete", True):  # the last ones may be getting their names just now
            meta["shards"] = [s for s in meta["shards"] if (folder / s["file"]).exists()]
        shards = {s["file"]: s["tokens"] for s in meta["shards"]}
        kinds = [(meta["tokenizer"], "name", str), (meta["tokenizer"], "sha256", str)]
        kinds += [(meta["tokenizer"], "n_vocab", int), (meta, "source", dict)]
        types = {"file": str, "sha256": str, "tokens": int, "documents": int, "bytes": int}
        kinds += [(s, key, kind) for s in meta["shards"] for key, kind in types.items()]
        for holder, key, kind in kinds:
            if type(holder[key]) is not kind:
                raise TypeError(f"{key} is {holder[key]!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} can't be read ({type(error).__name__}: {error}): prepare the corpus again "
            "with --force"
        ) from None
    if meta.get("complete", True) and not shards:
        raise ValueError(f"{path} names no shards: prepare the corpus again with --force")
    for name, tokens in shards.items():
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing; prepare the corpus again with --force")
        if count_tokens(folder / name) != tokens:
            raise ValueError(f"{folder / name} does not have the {tokens} tokens of meta.json")
    return meta


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> None:
    """ValueError, naming the file, for a shard that is not what meta.json's sha256 says."""
    for shard in read_meta(folder)["shards"]:
        if sha256_of(folder / shard["file"]) != shard["sha256"]:
            raise ValueError(f"{folder / shard['file']} is damaged: its sha256 differs")


def check_tokenizer(folder: Path, identity: dict) -> None:
    """ValueError if a prepared folder's tokens are of another tokenizer than this identity."""
    theirs = read_meta(folder)["tokenizer"]
    if theirs["sha256"] != identity["sha256"]:
        both = (f"{t['name']} ({t['n_vocab']} ids, {t['sha256'][:12]})" for t in (theirs, identity))
        raise ValueError("{} was tokenized with {}, but the model's is {}".format(folder, *both))


def data_id(meta: dict) -> str:
    """One hash for a prepared corpus: equal if and only if all its shards are."""
    return hashlib.sha256("".join(s["sha256"] for s in meta["shards"]).encode()).hexdigest()


def difference(before: dict, now: dict) -> bool:
    """Whether two corpora, as `identity_of` tells them, differ in what both have."""
    pairs = [(before[split], now[split]) for split in ("val", "train")]
    if before["complete"] and now["complete"]:
        return any(a != b for a, b in pairs)
    return any(x != y for a, b in pairs for x, y in zip(a, b, strict=False))


def identity_of(meta: dict) -> dict:
    """What a checkpoint keeps of a corpus: the hashes of its shards so far."""
    hashes = {s["file"]: s["sha256"] for s in meta["shards"]}
    splits = {p: [h for f, h in hashes.items() if f.startswith(p)] for p in ("val", "train")}
    return {"complete": meta.get("complete", True), **splits}


class Tokens:
    """The windows of one split ("train" or "val"), numbered through all its shards.

    Files are read window by window and never mapped: a map's pages count as the process's own in a
    container. ValueError, with the numbers, if the split is too short for a single window."""

    def __init__(self, folder: Path, split: str, block_size: int):
        self.folder, self.split, self.block_size = folder, split, block_size
        self._look()
        self.wait_for(1)
        if not len(self):
            raise ValueError(
                f"the {split} split of {folder} has {self.n_tokens} tokens: too few for one window "
                f"of block_size + 1 = {block_size + 1}; add text"
                + (" or take a smaller block_size" if self.n_tokens > 2 else "")
            )

    def _look(self) -> None:
        meta = read_meta(self.folder)
        self.complete, self.n_vocab = meta.get("complete", True), meta["tokenizer"]["n_vocab"]
        shards = [s for s in meta["shards"] if s["file"].startswith(self.split + "_")]
        self.paths = [self.folder / s["file"] for s in shards]
        self.n_tokens = sum(s["tokens"] for s in shards)
        windows = [max(0, s["tokens"] - 1) // self.block_size for s in shards]
        self.first = np.concatenate([[0], np.cumsum(windows)]).astype(np.int64)

    def wait_for(self, windows: int) -> None:
        """Return when there are so many windows, or all that there will be. ValueError if nobody
        is preparing the rest."""
        told = False
        while len(self) < windows and not self.complete:
            prepared = is_being_prepared(self.folder)
            self._look()  # after that question: who has just finished has written all
            if len(self) >= windows or self.complete:
                return
            if not prepared:
                raise ValueError(
                    f"{self.folder} is not complete, and nobody is preparing it: go on with the "
                    "same `python -m data.prepare` command"
                )
            if not told:
                print(f"waiting for more {self.split} tokens in {self.folder}", flush=True)
                told = True
            time.sleep(POLL_SECONDS)

    def __len__(self) -> int:
        """Windows that are there."""
        return int(self.first[-1])

    def read(self, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, (n, block_size) int64 each, of these window numbers."""
        T = self.block_size
        ids = np.empty((len(windows), T + 1), np.int64)
        shards = np.searchsorted(self.first, windows, side="right") - 1
        for row, window, shard in zip(ids, windows, shards, strict=True):
            start = HEADER_BYTES + 2 * T * int(window - self.first[shard])
            ids_there = np.fromfile(self.paths[shard], "<u2", T + 1, offset=start)
            if len(ids_there) <= T:
                raise ValueError(f"{self.paths[shard]} has become shorter: prepare it again")
            row[:] = ids_there
            if row.max() >= self.n_vocab:
                bad = f"{self.paths[shard]} holds id {row.max()}, but its tokenizer ends at"
                raise ValueError(f"{bad} {self.n_vocab - 1}: prepare the corpus again")
        ids = torch.from_numpy(ids)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Batches:
    """The batch of any step, from (seed, step) alone: there is no position to save or to lose.

    An epoch goes through the shards in order, and through the windows of each in a permutation
    drawn from (seed, epoch, shard): so training can start with the first shard and see what it
    would have seen later. The price: windows mix within a shard (100M tokens unless told otherwise)
    and never across; documents keep the source's order at that scale, in every epoch.
    Step s takes the s-th rows_per_step rows of the epochs laid end to end; of these, process `rank`
    takes its equal share, and a micro-batch its part of that."""

    def __init__(
        self, tokens: Tokens, *, seed: int, rows_per_step: int, rank: int = 0, world_size: int = 1
    ):
        self.tokens, self.seed, self.rows_per_step = tokens, seed, rows_per_step
        self.rank, self.share = rank, rows_per_step // world_size
        self._permutations: dict[tuple[int, int], np.ndarray] = {}

    def _permutation(self, epoch: int, shard: int) -> np.ndarray:
        if (epoch, shard) not in self._permutations:
            n = int(self.tokens.first[shard + 1] - self.tokens.first[shard])
            bits = np.random.PCG64([self.seed, epoch, shard])  # raw bits: the same in every numpy
            while len(self._permutations) > 3:
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[epoch, shard] = bits.random_raw(n).argsort(kind="stable")
        return self._permutations[epoch, shard]

    def windows(self, step: int) -> np.ndarray:
        """Window numbers of this process at a step (0-based), in order."""
        first_row = step * self.rows_per_step + self.rank * self.share
        rows = np.arange(first_row, first_row + self.share)
        self.tokens.wait_for(int(rows[-1]) + 1)
        epochs, places = np.divmod(rows, len(self.tokens))
        first = self.tokens.first
        shards = np.searchsorted(first, places, side="right") - 1
        windows = np.empty_like(rows)
        for epoch, shard in sorted(set(zip(epochs.tolist(), shards.tolist(), strict=True))):
            here = (epochs == epoch) & (shards == shard)
            order = self._permutation(epoch, shard)
            windows[here] = first[shard] + order[places[here] - first[shard]]
        return windows

    def micro_batches(
        self, step: int, micro_batch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and targets of a step, micro_batch rows at a time."""
        windows = self.windows(step)
        for i in range(0, len(windows), micro_batch):
            yield self.tokens.read(windows[i : i + micro_batch])
