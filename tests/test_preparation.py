"""Preparations that are killed, shared among threads, or watched by a training run."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import config
import train
from data import corpora, loader, prepare, tokenizer, writer

ROOT = Path(config.__file__).parent.parent


class Killed(BaseException):
    """Nothing may catch it, as nothing catches SIGKILL."""


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Documents of many lengths, some empty, one of several pieces, some not quite UTF-8."""
    rng = random.Random(5)
    words = ["the", "ä∩😀", "x" * 30, "12", "\r\n", "def f(x):", "<|endoftext|>", "日本語"]
    lengths = [0, 1, 3, 10, 40, 400]
    return [" ".join(rng.choices(words, k=rng.choice(lengths))) for _ in range(80)]


def corpus_of(texts, **fields) -> corpora.Corpus:
    def documents(start=0):
        for i, text in enumerate(texts[start:], start=start):
            data = text.encode() + (b"\xff" if i % 7 == 0 and text else b"")
            yield None, iter([data[k : k + 100] for k in range(0, len(data), 100)])

    return corpora.Corpus("made", {"text": "made"}, documents, val_share=0.2, **fields)


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    monkeypatch.setattr(prepare, "SNAPSHOT_SECONDS", 0.0)


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(texts, tmp_path, monkeypatch, name):
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    encoding = tokenizer.load(name)
    for workers in (1, 2, 7):
        out = tmp_path / str(workers)
        prepare.prepare(corpus_of(texts), encoding, out, shard_tokens=2000, workers=workers)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2") == hashes(tmp_path / "7")
    assert len(hashes(tmp_path / "1")) > 5


@pytest.mark.usefixtures("small_pieces")
def test_a_kill_at_any_write_loses_nothing(texts, tmp_path, monkeypatch):
    """Killed before and after every renaming and every fsync of a preparation, one after another:
    the next call goes on, and the shards are those of an uninterrupted one."""
    encoding = tokenizer.load("gpt2")
    whole = prepare.prepare(corpus_of(texts), encoding, tmp_path / "whole", shard_tokens=1500)
    countdown = [10**9]

    def deadly(function):
        def call(*args):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed
            result = function(*args)
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed
            return result

        return call

    monkeypatch.setattr(os, "replace", deadly(os.replace))
    monkeypatch.setattr(os, "fsync", deadly(os.fsync))
    kills, parts = 0, tmp_path / "parts"
    for life in range(1, 10**6):  # each call lives one write longer than the one before
        countdown[0] = life
        try:
            meta = prepare.prepare(corpus_of(texts), encoding, parts, shard_tokens=1500)
            break
        except Killed:
            kills += 1
            for path in parts.glob("*.bin"):
                named = {s["file"] for s in json.loads((parts / "meta.json").read_text())["shards"]}
                assert path.name in named
                loader.count_tokens(path)
    countdown[0] = 10**9
    assert kills > 10
    assert meta == whole
    assert hashes(parts) == hashes(tmp_path / "whole")


@pytest.mark.usefixtures("small_pieces")
def test_what_is_tokenized_is_not_tokenized_again(texts, tmp_path, monkeypatch):
    encoding = tokenizer.load("byte")
    encoded = []

    class Counting:
        def encode_to_numpy(self, text, **options):
            encoded.append(len(text))
            return encoding.encode_to_numpy(text, **options)

    monkeypatch.setattr(tokenizer, "copy_of", lambda _: Counting())
    snapshot, count = writer.Preparation.snapshot, []

    def stops(self):
        snapshot(self)
        count.append(1)
        if len(count) == 20:
            raise Killed

    monkeypatch.setattr(writer.Preparation, "snapshot", stops)
    with pytest.raises(Killed):
        prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)
    first = sum(encoded)
    prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)
    # At most what lay ahead in the queue, and the pieces of one batch, is done twice.
    total = sum(len(t) + (i % 7 == 0 and bool(t)) for i, t in enumerate(texts))
    assert first > total / 10
    assert sum(encoded) < total + 5 * (200 + 400)


@pytest.mark.slow
def test_sigkill_at_random_moments_changes_no_byte(tmp_path):
    rng = random.Random(2)
    words = ["lorem", "ipsum", "dolor", "sit", "amet", "ä", "42"]
    text = "\n".join(" ".join(rng.choices(words, k=12)) for _ in range(200_000))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    code = (
        "import sys; from data import prepare; prepare.SNAPSHOT_SECONDS = 0.02;"
        "prepare.PIECE_BYTES = 20000; sys.exit(prepare.main(sys.argv[1:]))"
    )

    def start(out):
        argv = [str(tmp_path / "text.txt"), "--shard-tokens=100000", f"--data-dir={tmp_path / out}"]
        return subprocess.Popen(
            [sys.executable, "-c", code, *argv], cwd=ROOT, stdout=subprocess.DEVNULL
        )

    assert start("whole").wait(60) == 0
    killed = 0
    for _ in range(6):
        process = start("parts")
        folder = None
        while process.poll() is None and not folder:  # until it has begun to write
            folder = next((tmp_path / "parts").glob("*-gpt2/*.tmp"), None)
            time.sleep(0.01)
        time.sleep(rng.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 3
    assert start("parts").wait(60) == 0
    whole, parts = (next((tmp_path / out).glob("*-gpt2")) for out in ("whole", "parts"))
    assert {n: h for n, h in hashes(whole).items()} == hashes(parts)


def test_unfinished_tokens_of_something_else_are_refused(texts, tmp_path, monkeypatch):
    encoding = tokenizer.load("byte")
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    unfinish(texts, encoding, tmp_path)
    other = [*texts, "more"]
    changed = corpora.Corpus("made", {"text": "other"}, corpus_of(other).documents)
    for corpus, options in ((changed, {}), (corpus_of(texts), {"shard_tokens": 77})):
        with pytest.raises(ValueError, match="--force"):
            prepare.prepare(corpus, encoding, tmp_path, **({"shard_tokens": 500} | options))


def unfinish(texts, encoding, folder) -> None:
    """Leave a preparation as it is in its middle."""

    def documents(start=0):
        yield from list(corpus_of(texts).documents(start))[: max(0, 60 - start)]
        raise Killed

    broken = corpora.Corpus("made", {"text": "made"}, documents, val_share=0.2)
    with pytest.raises(Killed):
        prepare.prepare(broken, encoding, folder, shard_tokens=500)
    assert json.loads((folder / "meta.json").read_text())["complete"] is False


@pytest.mark.parametrize(
    "progress",
    ["x", {"a": 1}, {"place": 5}, {"place": {"document": -1, "piece": 0}}, {"place": {}}]
    + [{"place": {"document": 0, "piece": 0}, "opened": o} for o in (None, {}, {"val": 5})],
    ids=str,
)
def test_a_damaged_place_in_the_source_is_refused_with_what_to_do(progress, texts, tmp_path):
    encoding = tokenizer.load("byte")
    meta = prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)
    damaged = json.dumps(meta | {"complete": False, "progress": progress})
    (tmp_path / "meta.json").write_text(damaged, encoding="utf-8")
    before = hashes(tmp_path)
    with pytest.raises(ValueError, match=r"meta\.json .*: prepare again with --force"):
        prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("value", ["x", None, [], -1])
@pytest.mark.parametrize("name", ["empty_documents", "replaced_invalid_utf8", "tokens", "bytes"])
def test_damaged_counts_of_unfinished_tokens_are_refused(name, value, texts, tmp_path, monkeypatch):
    encoding = tokenizer.load("byte")
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    unfinish(texts, encoding, tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert meta["shards"]
    (meta if name in meta else meta["shards"][0])[name] = value
    (tmp_path / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(ValueError, match=r"meta\.json .*: prepare again with --force"):
        prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)


@pytest.mark.parametrize("damage", ["short", "gone", "shard"])
def test_damaged_unfinished_tokens_are_refused_with_what_to_do(
    texts, tmp_path, monkeypatch, damage
):
    encoding = tokenizer.load("byte")
    monkeypatch.setattr(prepare, "PIECE_BYTES", 200)
    unfinish(texts, encoding, tmp_path)
    opened = json.loads((tmp_path / "meta.json").read_text())["progress"]["opened"]
    split = next(s for s in opened if opened[s] and opened[s]["tokens"])
    path = next(tmp_path.glob(f"{split}_*.bin.tmp"))
    if damage == "short":
        os.truncate(path, 1024)
    elif damage == "gone":
        path.unlink()
    else:
        next(tmp_path.glob("*.bin")).unlink()
    with pytest.raises(ValueError, match="--force"):
        prepare.prepare(corpus_of(texts), encoding, tmp_path, shard_tokens=500)


# Training meanwhile


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A preparation on another thread that makes a shard whenever it is told to go on."""
    rng = random.Random(1)
    documents = ["".join(rng.choices("abc \n", k=300)) for _ in range(60)]
    monkeypatch.setattr(prepare, "PIECE_BYTES", 300)
    monkeypatch.setattr(prepare, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(loader, "POLL_SECONDS", 0.01)
    gate = threading.Semaphore(0)

    def give(start=0, wait=True):
        for i, text in enumerate(documents[start:], start=start):
            if wait:
                gate.acquire()
            yield "val" if i % 5 == 4 else "train", iter([text.encode()])

    def run(folder, wait):
        corpus = corpora.Corpus("made", {"text": "made"}, lambda start=0: give(start, wait))
        with loader.lock_of(folder):
            prepare.prepare(corpus, tokenizer.load("byte"), folder, shard_tokens=1000)

    run(tmp_path / "whole-byte", wait=False)
    folder = tmp_path / "watched-byte"
    thread = threading.Thread(target=run, args=(folder, True))
    yield gate, thread, folder
    gate.release(1000)
    if thread.ident:
        thread.join()


def batch_hashes(tokens, steps):
    batches = loader.Batches(tokens, seed=3, rows_per_step=8)
    for step in range(steps):
        x, y = tokens.read(batches.windows(step))
        yield hashlib.sha256(x.numpy().tobytes() + y.numpy().tobytes()).hexdigest()


def test_a_step_sees_the_same_tokens_during_a_preparation_and_after_it(slow, tmp_path, capsys):
    gate, thread, folder = slow
    steps = 250  # more than two epochs
    after = list(batch_hashes(loader.Tokens(tmp_path / "whole-byte", "train", 16), steps))
    thread.start()
    gate.release(10)
    while not (folder / "meta.json").exists():
        time.sleep(0.01)
    tokens = loader.Tokens(folder, "train", 16)
    threading.Timer(0.3, gate.release, [30]).start()
    tokens.wait_for(5 * (1000 // 16))  # five shards, of which two can be there
    during = []
    for digest in batch_hashes(tokens, steps):
        during.append(digest)
        gate.release(2)
    assert during == after
    assert tokens.complete
    assert "waiting for more train tokens" in capsys.readouterr().out


def test_a_preparation_that_died_is_told_and_not_waited_for(slow, tmp_path, monkeypatch):
    _, _, folder = slow
    texts = ["".join(random.Random(i).choices("ab ", k=300)) for i in range(60)]
    unfinish(texts, tokenizer.load("byte"), folder)
    tokens = loader.Tokens(folder, "train", 16)
    with pytest.raises(ValueError, match=r"nobody is preparing.*data\.prepare"):
        tokens.wait_for(10**6)


def test_training_during_a_preparation_has_the_losses_of_training_after_it(slow, tmp_path):
    gate, thread, folder = slow
    base = [
        *("--tokenizer=byte", "--n-layer=1", "--n-head=2", "--n-embd=16", "--block-size=16"),
        *("--batch-tokens=256", "--micro-batch=8", "--steps=30", "--eval-every=10"),
        *("--eval-tokens=1600", "--save-every=1000", "--log-every=1", "--sample-tokens=0"),
        *(f"--data-dir={tmp_path}", "--device=cpu", "--warmup-steps=2"),
    ]

    def losses(name):
        argv = [*base, f"--corpus={name}", f"--out-dir={tmp_path / 'runs' / name}"]
        assert config.run_program(train.main, argv) == 0
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [r.get("loss", r.get("val_loss")) for r in rows if r["kind"] in ("train", "eval")]

    thread.start()
    gate.release(10)
    while not (folder / "meta.json").exists():
        time.sleep(0.01)
    update = train.update

    def and_go_on(run):
        gate.release(1)
        return update(run)

    releasing = threading.Timer(0.5, gate.release, [30])  # what validation waits for
    releasing.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "update", and_go_on)
        during = losses("watched")
    gate.release(1000)
    thread.join()
    assert during == losses("whole")
    assert len(during) == 33


def test_only_new_shards_are_no_other_data(slow, tmp_path):
    whole = loader.identity_of(loader.read_meta(tmp_path / "whole-byte"))
    part = {"complete": False, "val": whole["val"][:1], "train": whole["train"][:3]}
    assert not loader.difference(part, whole)
    assert not loader.difference(whole, part)
    assert loader.difference(part | {"train": ["0" * 64]}, whole)
    assert loader.difference(part | {"complete": True}, whole)


def test_the_queue_ahead_of_the_writer_stays_bounded():
    """It holds two batches per worker, however slow the writer is."""
    taken, written = [], []

    def batches():
        for n in range(50):
            taken.append(n)
            yield [prepare.Piece(n, 0, "train", b"some text")]

    for batch, ids in prepare._encoded(batches(), tokenizer.load("gpt2"), 3):
        written.append(batch[0].document)
        assert np.array_equal(ids[0][0], [11246, 2420])
        assert len(taken) - len(written) <= 2 * 3
    assert written == list(range(50))


def test_ids_come_in_the_order_of_the_text_whichever_thread_is_first():
    text = "word " * 5000
    pieces = [prepare.Piece(0, i, "train", text[i * 50 : i * 50 + 50].encode()) for i in range(500)]
    encoding = tokenizer.load("byte")
    ids = [
        i
        for _, batch in prepare._encoded(iter([[p] for p in pieces]), encoding, 4)
        for part, _ in batch
        for i in part.tolist()
    ]
    assert torch.equal(torch.tensor(ids), torch.tensor(list(text.encode())))
