"""Token shards, the windows in them, and which of these a step sees."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from data import loader, tokenizer
from data.loader import Batches, Tokens

BYTE = tokenizer.identity(tokenizer.load("byte"))


def shard_bytes(ids) -> bytes:
    """A shard built by hand: 256 little-endian int32, then uint16."""
    ids = [int(i) for i in ids]
    header = struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253)
    return header + struct.pack(f"<{len(ids)}H", *ids)


def write_folder(folder: Path, identity: dict = BYTE, **splits: list) -> Path:
    """A prepared folder: train=[[ids of a shard], …], val=[[…], …]."""
    shards = []
    for split, contents in splits.items():
        for i, ids in enumerate(contents):
            data = shard_bytes(ids)
            name = f"{split}_{i:06d}.bin"
            (folder / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            shards.append({"file": name, "tokens": len(ids), "documents": 1, "sha256": digest})
    write_meta(folder, {"format": 1, "tokenizer": identity, "shards": shards})
    return folder


def write_meta(folder: Path, meta) -> None:
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def numbered(n: int, start: int = 0) -> np.ndarray:
    """Ids that tell their place, as far as 257 of them can."""
    return np.arange(start, start + n) % 257


def test_a_header_is_256_little_endian_integers():
    header = struct.pack("<256i", 20240520, 1, 123_456_789, *[0] * 253)
    assert loader.shard_header(123_456_789) == header
    assert len(header) == 1024


def test_a_shard_written_by_hand_is_counted(tmp_path):
    path = tmp_path / "train_000000.bin"
    path.write_bytes(shard_bytes([1, 2, 65_535]))
    assert loader.count_tokens(path) == 3


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGED = {
    "nothing": lambda d: b"",
    "half of a header": lambda d: d[:512],
    "another magic number": lambda d: flipped(d, 0),
    "another version": lambda d: flipped(d, 4),
    "another number of tokens": lambda d: flipped(d, 8),
    "a negative number of tokens": lambda d: d[:8] + struct.pack("<i", -1) + d[12:],
    "the last token cut off": lambda d: d[:-2],
    "the last byte cut off": lambda d: d[:-1],
    "a byte too much": lambda d: d + b"\0",
    "only zeros": lambda d: bytes(len(d)),
    "a header and no tokens": lambda d: d[:1024],
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_shard_is_refused_by_name(damage, tmp_path):
    write_folder(tmp_path, train=[numbered(100), numbered(100)], val=[numbered(50)])
    path = tmp_path / "train_000001.bin"
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    for read in (
        lambda: loader.count_tokens(path),
        lambda: loader.read_meta(tmp_path),
        lambda: Tokens(tmp_path, "val", 16),
    ):
        with pytest.raises(ValueError, match=r"train_000001\.bin"):
            read()


def test_a_shard_that_is_missing_or_has_another_length_is_refused_by_name(tmp_path):
    write_folder(tmp_path, train=[numbered(100)], val=[numbered(50)])
    (tmp_path / "train_000000.bin").write_bytes(shard_bytes(numbered(90)))
    with pytest.raises(ValueError, match=r"train_000000\.bin does not have the 100 tokens"):
        loader.read_meta(tmp_path)
    (tmp_path / "train_000000.bin").unlink()
    with pytest.raises(ValueError, match=r"train_000000\.bin is missing"):
        loader.read_meta(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '"text"', "{}", '{"shards": [{"file": "train_000000.bin"}]}',
     '{"shards": 3}', '{"shards": [3]}', '{"shards": []}', '{"shards": [], "tokenizer": {}}'],
)  # fmt: skip
def test_a_meta_json_that_lacks_what_is_needed_is_refused_by_name(text, tmp_path):
    (tmp_path / "meta.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"meta\.json"):
        loader.read_meta(tmp_path)


def test_a_folder_without_a_meta_json_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"meta\.json"):
        loader.read_meta(tmp_path)


def windows_by_hand(shards: list, T: int) -> list[tuple[list, list]]:
    """Inputs and targets of all windows, by slicing."""
    found = []
    for ids in shards:
        ids = [int(i) for i in ids]
        at = 0
        while at + T + 1 <= len(ids):
            found.append((ids[at : at + T], ids[at + 1 : at + T + 1]))
            at += T
    return found


@pytest.mark.parametrize(
    ("sizes", "T", "n"),
    [
        ([1000], 16, 62),
        ([17], 16, 1),
        ([33], 16, 2),
        ([32], 16, 1),
        ([100, 3, 50, 16, 17], 16, 6 + 0 + 3 + 0 + 1),
        ([5], 1, 4),
        ([140, 100], 8, 17 + 12),
    ],
)
def test_windows_are_the_slices_of_each_shard(sizes, T, n, tmp_path):
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 257, size) for size in sizes]
    tokens = Tokens(write_folder(tmp_path, train=shards), "train", T)
    assert (len(tokens), tokens.n_tokens) == (n, sum(sizes))
    x, y = tokens.read(np.arange(n))
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((n, T), (n, T), torch.int64, torch.int64)
    assert x.is_contiguous()
    assert y.is_contiguous()
    wanted = windows_by_hand(shards, T)
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == wanted


def test_windows_cover_every_target_once_but_for_a_rest_shorter_than_a_window(tmp_path):
    ids = np.random.default_rng(1).integers(0, 257, 1000)
    tokens = Tokens(write_folder(tmp_path, train=[ids]), "train", 16)
    _, y = tokens.read(np.arange(len(tokens)))
    assert y.numel() == 999 // 16 * 16 == 992
    assert y.flatten().tolist() == ids[1:993].tolist()


def test_windows_are_read_in_the_order_asked_for_and_as_often(tmp_path):
    tokens = Tokens(write_folder(tmp_path, train=[numbered(50), numbered(40, 7)]), "train", 8)
    order = np.array([9, 0, 5, 5, 6])
    x, y = tokens.read(order)
    wanted = windows_by_hand([numbered(50), numbered(40, 7)], 8)
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == [wanted[i] for i in order]


def test_ids_above_32767_are_no_negative_numbers(tmp_path):
    large = BYTE | {"n_vocab": 65_536}
    folder = write_folder(tmp_path, large, train=[[65_535, 32_768, 0, 40_000]])
    x, y = Tokens(folder, "train", 3).read(np.array([0]))
    assert (x.tolist(), y.tolist()) == ([[65_535, 32_768, 0]], [[32_768, 0, 40_000]])


@pytest.mark.parametrize("n", [0, 1, 16])
def test_a_split_too_short_for_a_window_is_refused_with_the_numbers(n, tmp_path):
    folder = write_folder(tmp_path, train=[numbered(100)], val=[numbered(n)])
    with pytest.raises(ValueError, match=rf"val split .* has {n} tokens.* = 17"):
        Tokens(folder, "val", 16)


def test_a_split_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"val split .* has 0 tokens"):
        Tokens(write_folder(tmp_path, train=[numbered(100)]), "val", 16)


def test_an_id_that_the_tokenizer_does_not_know_is_refused_by_the_shards_name(tmp_path):
    wrong = numbered(100)
    wrong[60] = 257
    tokens = Tokens(write_folder(tmp_path, train=[numbered(100), wrong]), "train", 16)
    tokens.read(np.array([0, 1, 2, 6, 7, 8, 10, 11]))
    with pytest.raises(ValueError, match=r"train_000001\.bin holds id 257"):
        tokens.read(np.array([9]))


def make_tokens(folder: Path, *windows: int, T: int = 4) -> Tokens:
    """Shards of so many windows each, with a rest of 0, 1, 2 … tokens behind them."""
    shards = [numbered(n * T + 1 + i % T, 50 * i) for i, n in enumerate(windows)]
    return Tokens(write_folder(folder, train=shards), "train", T)


def test_forty_windows_in_batches_of_four_are_a_function_of_the_step(tmp_path):
    """litgpt #1712: a resumed run saw only the tail of the data; here there is no position."""
    tokens = make_tokens(tmp_path, 40)
    straight = Batches(tokens, seed=1, rows_per_step=4)
    steps = [straight.windows(s).tolist() for s in range(25)]
    for order in (range(24, -1, -1), [13, 7, 24, 0, 19, 19, 12]):
        again = Batches(tokens, seed=1, rows_per_step=4)
        assert [again.windows(s).tolist() for s in order] == [steps[s] for s in order]
    resumed = []
    for first, last in ((0, 7), (7, 13), (13, 25)):
        fresh = Batches(tokens, seed=1, rows_per_step=4)
        resumed += [fresh.windows(s).tolist() for s in range(first, last)]
    assert resumed == steps
    epochs = [np.concatenate(steps[s : s + 10]).tolist() for s in (0, 10)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(40))
        assert epoch != list(range(40))
    assert epochs[0] != epochs[1]
    assert len(set(np.concatenate(steps[20:]).tolist())) == 20


def test_another_seed_gives_another_order(tmp_path):
    tokens = make_tokens(tmp_path, 40)
    orders = {
        tuple(Batches(tokens, seed=seed, rows_per_step=40).windows(0).tolist())
        for seed in range(20)
    }
    assert len(orders) == 20


def test_the_order_is_a_fair_shuffle(tmp_path):
    """Each of 8 windows comes first in about an eighth of 800 epochs."""
    batches = Batches(make_tokens(tmp_path, 8), seed=3, rows_per_step=8)
    firsts = [int(batches.windows(epoch)[0]) for epoch in range(800)]
    counts = np.bincount(firsts, minlength=8)
    assert counts.min() > 60
    assert counts.max() < 140


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_processes_and_micro_batches_tile_the_batch_of_one_process(world_size, micro, tmp_path):
    tokens = make_tokens(tmp_path, 10, 13)
    whole = Batches(tokens, seed=5, rows_per_step=16)
    parts = [
        Batches(tokens, seed=5, rows_per_step=16, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in range(5):
        together = np.concatenate([part.windows(step) for part in parts])
        assert together.tolist() == whole.windows(step).tolist()
        x, y = tokens.read(whole.windows(step))
        pieces = [piece for part in parts for piece in part.micro_batches(step, micro)]
        assert len(pieces) == 16 // micro
        assert {len(p[0]) for p in pieces} == {micro}
        assert torch.equal(torch.cat([p[0] for p in pieces]), x)
        assert torch.equal(torch.cat([p[1] for p in pieces]), y)


@pytest.mark.parametrize(
    ("shards", "rows"),
    [
        ((40,), 3),
        ((17, 12), 8),
        ((17, 12), 29),
        ((7, 1, 9, 5), 4),
        ((7, 1, 9, 5), 50),
        ((3,), 10),
        ((1,), 3),
        ((2, 0, 3), 2),
    ],
)
def test_batches_go_across_ends_of_shards_and_epochs_and_lose_nothing(shards, rows, tmp_path):
    """build-nanogpt #105: ranks left a shard at different steps, and tokens were lost."""
    tokens = make_tokens(tmp_path, *shards)
    n = sum(shards)
    assert len(tokens) == n
    n_steps = -(-4 * n // rows)
    batches = Batches(tokens, seed=2, rows_per_step=rows)
    steps = [batches.windows(s) for s in range(n_steps)]
    assert {len(step) for step in steps} == {rows}
    stream = np.concatenate(steps)[: 4 * n].reshape(4, n)
    for epoch in stream:
        assert sorted(epoch.tolist()) == list(range(n))
    alone = Batches(tokens, seed=2, rows_per_step=1)
    assert [int(alone.windows(i)[0]) for i in range(4 * n)] == stream.flatten().tolist()


@pytest.mark.parametrize(("n_tokens", "steps"), [(140, 2), (100, 1)])
def test_all_processes_see_every_full_batch_of_a_shard_once(n_tokens, steps, tmp_path):
    """build-nanogpt #105 with its own numbers: B = 2, T = 8, four processes."""
    tokens = Tokens(write_folder(tmp_path, train=[numbered(n_tokens)]), "train", 8)
    assert len(tokens) // 8 == steps
    parts = [Batches(tokens, seed=0, rows_per_step=8, rank=r, world_size=4) for r in range(4)]
    seen = [int(w) for part in parts for s in range(steps) for w in part.windows(s)]
    assert len(set(seen)) == len(seen) == 8 * steps


def test_a_late_epoch_is_found_at_once(tmp_path):
    batches = Batches(make_tokens(tmp_path, 40), seed=1, rows_per_step=4)
    late = [batches.windows(10**9 + s) for s in range(10)]
    assert sorted(np.concatenate(late).tolist()) == list(range(40))
    assert batches.windows(10**9).tolist() == late[0].tolist()


def test_no_step_draws_from_the_global_random_numbers(tmp_path):
    batches = Batches(make_tokens(tmp_path, 40), seed=1, rows_per_step=4)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for step in range(12):
        list(batches.micro_batches(step, 2))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_the_data_id_changes_with_any_shard(tmp_path):
    ids = []
    for i, shards in enumerate([[[1, 2], [3]], [[1, 2], [3]], [[1, 2], [4]], [[3], [1, 2]]]):
        (tmp_path / str(i)).mkdir()
        meta = loader.read_meta(write_folder(tmp_path / str(i), train=shards))
        ids.append(loader.data_id(meta))
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_tokens_of_another_tokenizer_are_refused_with_both_sides_named(tmp_path):
    folder = write_folder(tmp_path, train=[numbered(50)])
    loader.check_tokenizer(folder, BYTE)
    gpt2 = tokenizer.identity(tokenizer.load("gpt2"))
    with pytest.raises(ValueError, match=folder.name) as refusal:
        loader.check_tokenizer(folder, gpt2)
    message = str(refusal.value)
    for word in ("byte", "257", BYTE["sha256"][:12], "gpt2", "50257", gpt2["sha256"][:12]):
        assert word in message


def anonymous_memory() -> int:
    """Bytes of this process's memory that are no file's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def resident_memory() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file_that_is_read(tmp_path):
    """nanoGPT #287: a memory map's pages count as the process's own until it is killed."""
    n = 32 * 2**20
    data = np.random.default_rng(0).integers(0, 257, n, dtype=np.uint16)
    path = tmp_path / "train_000000.bin"
    path.write_bytes(loader.shard_header(n) + data.astype("<u2").tobytes())
    shard = {"file": path.name, "tokens": n, "documents": 1, "sha256": ""}
    write_meta(tmp_path, {"format": 1, "tokenizer": BYTE, "shards": [shard]})
    tokens = Tokens(tmp_path, "train", 1024)
    batches = Batches(tokens, seed=1, rows_per_step=32)
    seen = np.zeros(len(tokens), bool)
    steps = len(tokens) // 32
    for step in range(3):
        list(batches.micro_batches(step, 32))
    del data
    before = anonymous_memory(), resident_memory()
    for step in range(steps):
        list(batches.micro_batches(step, 32))
        seen[batches.windows(step)] = True
    assert seen.mean() > 0.99
    assert anonymous_memory() - before[0] < 5e6
    assert resident_memory() - before[1] < 10e6
