"""The ablation: its grid, what is refused, and runs that are killed, continued or diverge."""

import csv
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from test_ablation_report import check, read
from test_train import TINY, corpus  # noqa: F401  (a fixture)

import ablate
import config
import evaluate
import metrics
import run as run_module
import runtime
import train
from ablation import initial
from data import loader, prepare
from model import GPT

ROOT = Path(__file__).parent.parent
TIMES = ("seconds_per_step", "seconds")
GRID = {
    "arm": ["pre", "post"],
    "n_layer": [1],
    "lr": [1e-2, 1e3],
    "warmup_steps": [0],
    "seed": [1, 2],
    "steps": 60,
    "workers": 1,
}


def options(text, folder, **changes) -> list[str]:
    pairs = {k: v for k, v in TINY.items() if k != "sample_tokens"} | GRID | text
    pairs |= {"out_dir": folder} | changes
    found = []
    for name, value in pairs.items():
        if isinstance(value, list):
            found += [f"--{name}", *map(str, value)]
        else:
            found.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return found


def grid(text, out_dir, **changes) -> ablate.AblationConfig:
    argv = options(text, out_dir, **changes)
    return config.parse(ablate.AblationConfig, argv, prog="ablate.py", description="")


def few_initial_rows() -> list[dict]:
    shape = ablate.GPTConfig(vocab_size=65, block_size=8, n_layer=3, n_head=2, n_embd=16)
    rows = [*initial.lesson(n_layer=3, width=8, tokens=8), *initial.stream(shape, seeds=(0,))]
    return rows + initial.gradients(shape, depths=(2, 3), seeds=(0,))


def one_after_the_other(cells, devices, keep_weights, signals) -> bool:
    """What several processes do side by side, as a plain loop."""
    for cell in cells.values():
        if not (cell.run.out_dir / "result.json").exists():
            assert ablate.run_cell(replace(cell, run=replace(cell.run, device="cpu")), keep_weights)
    return True


def call(argv: list[str], *, processes: bool = False, draws: bool = False) -> int:
    """The program in this process, with few measurements before training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablate, "initial_rows", few_initial_rows)
        patch.setattr(metrics.RunLog, "_plot", lambda _: None)
        if not draws:
            patch.setattr(ablate.figures, "draw", lambda *_: None)
        if not processes:
            patch.setattr(ablate, "train_all", one_after_the_other)
        return config.run_program(ablate.main, argv)


def start(argv: list[str]) -> subprocess.Popen:
    """The program itself, a session of its own."""
    return subprocess.Popen(
        [sys.executable, "ablate.py", *argv],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def table(out_dir, without=()) -> list[dict]:
    with open(out_dir / "results.csv", encoding="utf-8", newline="") as file:
        return [{k: v for k, v in r.items() if k not in without} for r in csv.DictReader(file)]


def wait_until(met, process=None, seconds=90) -> None:
    """Poll; the limit only ends a test that has failed anyway."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it never came"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)


def files(out_dir, *names) -> dict[Path, tuple[bytes, int]]:
    found = [p for name in names for p in (out_dir / "runs").glob(f"*/{name}")]
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in found}


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):  # noqa: F811
    """The folder of a small ablation whose higher rate diverges."""
    out_dir = tmp_path_factory.mktemp("whole") / "ablation"
    assert call(options(corpus, out_dir), draws=True) == 0
    return out_dir


# The grid


def test_there_is_a_cell_for_each_combination_with_a_name_and_a_folder_of_its_own(tmp_path):
    axes = {"arm": list(ablate.ARMS), "n_layer": [1, 3], "lr": [1e-3, 2e-3, 1.0000001e-3]}
    axes |= {"warmup_steps": [0, 5], "seed": [1, 2, 3]}
    cells = grid({}, tmp_path, **axes).cells()
    assert len(cells) == 7 * 2 * 3 * 2 * 3
    seen = {
        (name.split("-L")[0], c.model.n_layer, c.optimizer.lr, c.optimizer.warmup_steps, c.run.seed)
        for name, c in cells.items()
    }
    assert seen == set(itertools.product(*axes.values()))
    for name, cell in cells.items():
        assert cell.run.out_dir == tmp_path / "runs" / name
    depths = [c.model.n_layer for c in cells.values()]
    assert depths == sorted(depths, reverse=True)


def test_a_cell_is_the_ablations_options_with_its_arms(tmp_path):
    cells = grid({}, tmp_path, arm=list(ablate.ARMS), lr=[1e-3], seed=[1], dropout=0.25).cells()
    cells = {name.split("-L")[0]: cell for name, cell in cells.items()}
    plain = {"post_ln": False, "final_norm": None, "branch_init": "scaled", "norm": "layernorm"}
    changes = {
        "pre": {},
        "post": {"post_ln": True},
        "post-final": {"post_ln": True, "final_norm": True},
        "pre-no-final": {"final_norm": False},
        "pre-zero": {"branch_init": "zero"},
        "pre-plain": {"branch_init": "plain"},
        "pre-rms": {"norm": "rmsnorm"},
    }
    assert cells.keys() == changes.keys()
    shared = {k: v for k, v in TINY.items() if k not in (*GRID, "device", "dropout")}
    for arm, cell in cells.items():
        got = config.flat(cell)
        assert {k: got[k] for k in plain} == plain | changes[arm]
        assert {k: got[k] for k in shared} == shared
        assert (got["dropout"], got["lr"], got["seed"]) == (0.25, 1e-3, 1)
        assert not cell.problems()


def test_all_arms_of_a_seed_share_their_draws_and_their_batches(corpus, tmp_path):  # noqa: F811
    cfg = grid(corpus, tmp_path / "x", arm=list(ablate.ARMS), lr=[1e-2], n_layer=[2])
    runs = {
        name: run_module.set_up(cell, runtime.Processes(), torch.device("cpu"))
        for name, cell in cfg.cells().items()
    }
    assert len(runs) == 14
    factors = {"pre-plain": 2.0, "pre-zero": 0.0}  # of a branch's output: sqrt(2 · 2 layers), none
    for seed in (1, 2):
        first = runs[f"pre-L2-lr0.01-w0-s{seed}"]
        for arm in ablate.ARMS:
            other = runs[f"{arm}-L2-lr0.01-w0-s{seed}"]
            weights = dict(first.model.named_parameters())
            for name, p in other.model.named_parameters():
                if "ln_" not in name:
                    factor = factors.get(arm, 1.0) if name.endswith("c_proj.weight") else 1.0
                    assert torch.equal(p, factor * weights[name]), (arm, name)
            for step in (0, 7, 500):
                assert np.array_equal(other.batches.windows(step), first.batches.windows(step))
    one, two = (runs[f"pre-L2-lr0.01-w0-s{s}"] for s in (1, 2))
    assert not torch.equal(one.model.wte.weight, two.model.wte.weight)
    assert not np.array_equal(one.batches.windows(0), two.batches.windows(0))


@pytest.mark.parametrize(
    ("requested", "workers", "gpus", "cores", "devices"),
    [
        ("auto", None, 0, 3, ["cpu"] * 3),
        ("auto", 2, 0, 8, ["cpu"] * 2),
        ("cpu", None, 4, 2, ["cpu"] * 2),
        ("auto", None, 2, 64, ["cuda:0", "cuda:1"]),
        ("cuda", 3, 2, 64, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", 1, 2, 64, ["cuda:0"]),
        ("cuda:1", None, 2, 64, ["cuda:1"]),
        ("cuda:1", 2, 2, 64, ["cuda:1"] * 2),
        ("mps", None, 0, 8, ["mps"]),
    ],
)
def test_every_process_has_a_device(requested, workers, gpus, cores, devices):
    assert ablate.devices_of(requested, workers, gpus, cores) == devices


def test_the_plan_tells_runs_and_hours(tmp_path):
    """6 N + 12 L C T operations a token, N without positions; 40 % of an H100's 989 TFLOP/s."""
    sizes = {"tokenizer": "gpt2", "n_embd": 768, "n_head": 12, "block_size": 1024, "steps": 3000}
    sizes |= {"batch_tokens": 131072, "eval_tokens": 2048}
    axes = {"n_layer": [12, 24], "lr": [1e-3, 2e-3, 4e-3], "warmup_steps": [0, 300]}
    cfg = grid({}, tmp_path, **sizes, **axes)
    total, C = 0, 768
    for L in (12, 24):
        for final in (2 * C, 0):  # pre-LN's last norm
            n = 50257 * C + L * (12 * C * C + 13 * C) + final
            total += 3 * 2 * 2 * (6 * n + 12 * L * C * 1024) * 3000 * 131072
    text = ablate.plan(cfg, cfg.cells(), ["cpu", "cpu"])
    assert "48 runs (2 arm × 2 n_layer × 3 lr × 2 warmup_steps × 2 seed), 48 to do, 2 at a" in text
    assert f"{total:.1e} floating-point" in text
    assert float(re.search(r"([\d.]+) GPU hours", text)[1]) == pytest.approx(
        total / (0.4 * 989e12) / 3600, abs=0.051
    )


def test_the_plan_leaves_out_what_is_done(tmp_path):
    cfg = grid({}, tmp_path, tokenizer="byte", lr=[1e-2])
    cells = cfg.cells()
    for name in ("pre-L1-lr0.01-w0-s1", "pre-L1-lr0.01-w0-s2", "post-L1-lr0.01-w0-s1"):
        cells[name].run.out_dir.mkdir(parents=True)
        (cells[name].run.out_dir / "result.json").write_text("{}", encoding="utf-8")
    with torch.device("meta"):
        last = GPT(replace(cells["post-L1-lr0.01-w0-s2"].model, vocab_size=257))
    n = sum(p.numel() for name, p in last.named_parameters() if name != "wpe.weight")
    n -= (last.wte.weight.size(0) - 257) * 32
    flops = (6 * n + 12 * 1 * 32 * 16) * 60 * 64
    text = ablate.plan(cfg, cells, ["cpu"])
    assert "4 runs" in text
    assert "1 to do" in text
    assert f"{flops:.1e} floating-point" in text


# What is refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arm": ["pre", "post", "pre"]}, ["the axis arm has a value twice"]),
        ({"lr": [1e-2, 0.01]}, ["the axis lr has a value twice"]),
        ({"arm": []}, ["the axis arm is empty", *ablate.ARMS]),
        ({"lr": [], "seed": []}, ["the axis lr is empty", "the axis seed is empty"]),
        ({"n_layer": []}, ["the axis n_layer is empty"]),
        ({"warmup_steps": []}, ["the axis warmup_steps is empty"]),
        ({"post_ln": True}, ["--post-ln"]),
        ({"init_from": "gpt2"}, ["--init-from"]),
        ({"resume": True}, ["--resume"]),
        ({"workers": 0}, ["workers must be at least 1"]),
        ({"out_dir": ""}, ["out_dir must not be empty"]),
        ({"lr": [1e-2, -1.0]}, ["lr must be a positive number, got -1.0"]),
        ({"n_layer": [2, 0]}, ["n_layer must be at least 1, got 0"]),
        ({"warmup_steps": [0, -5]}, ["warmup_steps must be 0 to"]),
        ({"min_lr": 0.5}, ["min_lr must be between 0 and lr 0.01"]),
        ({"arm": ["pre", "neither"]}, ["neither", *ablate.ARMS]),
        ({"lr": ["fast"]}, ["fast"]),
    ],
    ids=str,
)
def test_what_makes_no_ablation_is_refused_with_the_choices(
    corpus,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    changes,
    words,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    argv = options(corpus, tmp_path / "x", **changes)
    try:
        code = call(argv)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    error = capsys.readouterr().err
    assert [word for word in words if word not in error] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("group", "change"),
    [
        ("model", {"post_ln": True}),
        ("run", {"init_from": "gpt2"}),
        ("run", {"resume": True}),
    ],
    ids=str,
)
def test_what_the_arms_decide_is_no_option_of_the_ablations(tmp_path, group, change):
    cfg = grid({}, tmp_path)
    (problem,) = replace(cfg, **{group: replace(getattr(cfg, group), **change)}).problems()
    assert problem.startswith(f"{next(iter(change))} is no option here")


def test_the_options_of_an_ablation_are_a_preset(corpus, whole):  # noqa: F811
    argv = [str(whole / "config.toml")]
    cfg = config.parse(ablate.AblationConfig, argv, prog="ablate.py", description="")
    assert cfg == grid(corpus, whole)


def test_a_problem_of_many_cells_is_told_once(corpus, tmp_path):  # noqa: F811
    assert len(grid(corpus, tmp_path, n_head=3).problems()) == 1
    assert grid(corpus, tmp_path).problems() == []


def test_the_help_explains_each_axis(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        call(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for axis in ("--arm", "--n-layer", "--lr", "--warmup-steps", "--seed"):
        own = re.split(rf" {axis} \[", text)[1].split(" --")[0]
        assert "AXIS: " in own, axis
    assert text.count("AXIS: ") == 5
    for arm in ablate.ARMS:
        assert arm in text
    for hidden in ("--post-ln", "--resume", "--init-from"):
        assert hidden not in text


def test_a_corpus_that_is_missing_ends_it_and_leaves_no_folder(tmp_path, capsys):
    for name in ("nowhere", "fineweb10B-gpt2"):
        text = {"corpus": name, "data_dir": tmp_path / "prepared", "tokenizer": "gpt2"}
        assert call(options(text, tmp_path / "x")) == 2
        assert name in capsys.readouterr().err
        assert not (tmp_path / "x").exists()


def test_a_folder_in_use_is_refused(corpus, tmp_path, capsys):  # noqa: F811
    (tmp_path / "x").mkdir()
    with filelock.FileLock(tmp_path / "x" / ".lock"):
        assert call(options(corpus, tmp_path / "x")) == 2
    assert f"another ablation is running in {tmp_path / 'x'}" in capsys.readouterr().err
    assert list((tmp_path / "x").glob("runs/*")) == []


@pytest.mark.parametrize("name", ["file", "file/inside"])
def test_a_folder_that_is_a_file_is_refused(name, corpus, tmp_path, capsys):  # noqa: F811
    (tmp_path / "file").touch()
    assert call(options(corpus, tmp_path / name)) == 2
    error = capsys.readouterr().err
    reason = {"file": "File exists", "file/inside": "Not a directory"}[name]
    assert f"{tmp_path / name}: {reason}: take another --out-dir" in error


# Runs and what becomes of them


def test_an_ablation_leaves_its_report_its_tables_and_its_runs(whole):
    names = {p.name for p in whole.iterdir() if not p.name.startswith(".")}
    figures = {"lr_sweep.png", "depth.png", "curves.png", "signal.png", "gradients.png"}
    assert names == figures | {"report.md", "results.csv", "init.csv", "config.toml", "runs"}
    folders = [p for p in (whole / "runs").iterdir() if p.is_dir()]
    assert len(folders) == 8
    assert [p for p in (whole / "runs").iterdir() if p.is_file() and p.name[0] != "."] == []
    for folder in folders:
        assert {"config.toml", "metrics.jsonl", "log.txt", "result.json"} <= set(os.listdir(folder))
        assert not list(folder.glob("step_*"))
        assert "model" in (folder / "log.txt").read_text(encoding="utf-8")


def test_the_report_of_an_ablation_follows_from_its_tables(whole):
    rows, at_start = read(whole / "results.csv"), read(whole / "init.csv")
    check(rows, at_start, (whole / "report.md").read_text(encoding="utf-8"))


def test_a_row_is_the_run_that_train_would_make(corpus, whole, tmp_path):  # noqa: F811
    cell = grid(corpus, whole).cells()["post-L1-lr0.01-w0-s2"]
    result = train.train(replace(cell, run=replace(cell.run, out_dir=tmp_path / "run")))
    (row,) = [r for r in table(whole) if (r["arm"], r["lr"], r["seed"]) == ("post", "0.01", "2")]
    assert float(row["val_loss"]) == result["val_loss"]
    assert row["diverged"] == "False"
    assert (row["n_layer"], row["warmup_steps"]) == ("1", "0")
    C, T = 32, 16
    norms = 4 * C
    assert int(row["norm_parameters"]) == norms
    assert int(row["parameters"]) == 257 * C + T * C + 12 * C * C + 9 * C + norms
    assert float(row["seconds_per_step"]) > 0


def test_a_run_that_diverges_is_a_result(whole):
    rows = table(whole)
    assert len(rows) == 8
    for row in rows:
        loss, entropy = float(row["val_loss"]), float(row["unigram_entropy"])
        assert (row["diverged"] == "True") == (not loss <= entropy)
        assert (row["diverged"] == "True") == (row["lr"] == "1000.0")


def test_a_run_that_is_never_finite_is_a_result_too(corpus, tmp_path, monkeypatch):  # noqa: F811
    original = run_module.Optimizer.step

    def step(self, lr):
        next(iter(self.names)).grad.fill_(math.nan)
        return original(self, lr)

    monkeypatch.setattr(run_module.Optimizer, "step", step)
    changes = {"arm": ["pre"], "lr": [1e-2], "seed": [1]}
    assert call(options(corpus, tmp_path / "x", **changes)) == 0
    (row,) = table(tmp_path / "x")
    assert (row["val_loss"], row["diverged"]) == ("nan", "True")
    log = tmp_path / "x" / "runs" / "pre-L1-lr0.01-w0-s1" / "log.txt"
    assert "diverged: the gradient was not finite" in log.read_text(encoding="utf-8")


def test_the_unigram_entropy_is_that_of_counting(corpus, whole):  # noqa: F811
    """Of the first 16 windows' targets: bytes 1 to 256 of the validation tokens."""
    folder = prepare.folder_of(str(corpus["corpus"]), "byte", corpus["data_dir"])
    ids = np.fromfile(next(folder.glob("val_*.bin")), "<u2", offset=1024)[1:257].tolist()
    counts = {i: ids.count(i) for i in set(ids)}
    want = -sum(n / 256 * math.log(n / 256) for n in counts.values())
    got = [float(r["unigram_entropy"]) for r in table(whole)]
    assert got == pytest.approx([want] * 8, abs=1e-9)
    assert evaluate.n_windows(loader.Tokens(folder, "val", 16), 256) == 16


def test_a_continued_ablation_repeats_no_finished_run_and_takes_more_values(
    corpus,  # noqa: F811
    tmp_path,
):
    changes = {"lr": [1e-2], "seed": [1]}
    assert call(options(corpus, tmp_path, **changes)) == 0
    first, rows = files(tmp_path, "*"), table(tmp_path)
    assert len(rows) == 2
    assert call(options(corpus, tmp_path, **changes)) == 0
    assert files(tmp_path, "*") == first
    assert table(tmp_path) == rows
    assert call(options(corpus, tmp_path, lr=[1e-2], seed=[1, 2], arm=["post", "pre"])) == 0
    assert {p: files(tmp_path, "*")[p] for p in first} == first
    more = table(tmp_path)
    assert len(more) == 4
    assert [r for r in more if r["seed"] == "1"] == rows[::-1]


def test_other_options_than_the_axes_are_refused(corpus, whole, capsys):  # noqa: F811
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    assert call(options(corpus, whole, steps=61, weight_decay=0.0)) == 2
    error = capsys.readouterr().err
    assert "steps 60 (now 61)" in error
    assert "weight_decay 0.1 (now 0.0)" in error
    assert before == {p: p.read_bytes() for p in whole.rglob("*") if p.is_file()}


def test_the_weights_are_kept_on_request(corpus, tmp_path):  # noqa: F811
    changes = {"arm": ["pre"], "lr": [1e-2], "seed": [1], "keep_weights": True}
    assert call(options(corpus, tmp_path, **changes)) == 0
    assert (tmp_path / "runs" / "pre-L1-lr0.01-w0-s1" / "step_00000060").is_dir()


def test_a_kill_while_weights_are_deleted_costs_no_run(
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """Half a checkpoint, which no run can be resumed from, once ended every later call."""
    changes = {"arm": ["pre"], "lr": [1e-2], "seed": [1]}
    original = ablate.shutil.rmtree

    def rmtree(path, **rest):
        if Path(path).name.startswith("step_"):
            (Path(path) / "model.safetensors").unlink()
            raise KeyboardInterrupt
        original(path, **rest)

    monkeypatch.setattr(ablate.shutil, "rmtree", rmtree)
    call(options(corpus, tmp_path, **changes))
    monkeypatch.undo()
    assert call(options(corpus, tmp_path, **changes)) == 0
    assert len(table(tmp_path)) == 1


def test_a_run_waits_for_a_worker_that_is_still_saving_it(corpus, tmp_path):  # noqa: F811
    """Its parent was killed, and the ablation was called again at once."""
    (tmp_path / "runs").mkdir()
    cell = grid(corpus, tmp_path, lr=[1e-2]).cells()["pre-L1-lr0.01-w0-s1"]
    folder, done = cell.run.out_dir, []
    thread = threading.Thread(target=lambda: done.append(ablate.run_cell(cell, False)))
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock")):
        thread.start()
        thread.join(1)
        assert not folder.exists()
        folder.mkdir()
        (folder / "result.json").write_text('{"mine": 1}', encoding="utf-8")
    thread.join()
    assert done == [True]
    assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == {"mine": 1}


def descendants(pid: int) -> set[int]:
    """Living processes below this one, of those that are not zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(path.parent.name)] = int(parent)
    found, new = set(), {pid}
    while new := {p for p, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def steps_of(out_dir) -> dict[Path, int]:
    """Lines of metrics of the runs that are not finished."""
    found = (out_dir / "runs").glob("*/metrics.jsonl")
    return {
        p: len(p.read_text(encoding="utf-8").splitlines())
        for p in found
        if not (p.parent / "result.json").exists()
    }


def under_way(out_dir, before: dict[Path, int]) -> bool:
    """Whether a run has trained for some steps since then, and is not finished."""
    return any(n > before.get(p, 0) + 5 for p, n in steps_of(out_dir).items())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_an_ablation_killed_three_times_has_the_results_of_an_uninterrupted_one(
    corpus,  # noqa: F811
    tmp_path,
):
    """SIGKILL of the parent, at random moments while a run is under way; its workers save and end.
    The last call trains in worker processes, the uninterrupted one in a plain loop."""
    rng = random.Random(7)
    changes = {"lr": [1e-2], "seed": [1, 2, 3], "steps": 100, "save_every": 20}
    parts = options(corpus, tmp_path / "parts", **changes)
    saved, finished = [], {}
    for _ in range(3):
        before = steps_of(tmp_path / "parts")
        process = start(parts)
        wait_until(lambda before=before: under_way(tmp_path / "parts", before), process)
        time.sleep(rng.uniform(0, 0.3))
        below = descendants(process.pid)
        assert below
        process.kill()
        process.communicate()
        wait_until(lambda below=below: all(map(is_gone, below)))
        now = files(tmp_path / "parts", "result.json", "metrics.jsonl")
        finished = {p: v for p, v in now.items() if (p.parent / "result.json").exists()}
        saved.append(len(finished) // 2)
    assert saved == sorted(saved)
    assert saved[-1] < 6
    assert call(parts, processes=True) == 0
    now = files(tmp_path / "parts", "result.json", "metrics.jsonl")
    assert {p: now[p] for p in finished} == finished
    assert call(options(corpus, tmp_path / "whole", **changes)) == 0
    got = table(tmp_path / "parts", TIMES)
    assert len(got) == 6
    assert got == table(tmp_path / "whole", TIMES)
    resumed = [p for p, (text, _) in now.items() if b'"resume"' in text]
    assert resumed


def ctrl_c(process):
    os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to all processes at once


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "code"), [(ctrl_c, 130), (subprocess.Popen.terminate, 143)])
def test_a_signal_saves_and_says_that_the_same_command_goes_on(
    stop,
    code,
    corpus,  # noqa: F811
    tmp_path,
):
    """The run that was trained is saved, and nothing waits for the many that are left."""
    seeds = list(range(200))
    argv = options(corpus, tmp_path / "x", steps=100000, lr=[1e-2], seed=seeds)
    process = start(argv)
    wait_until(lambda: under_way(tmp_path / "x", {}), process)
    stop(process)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error == "stopped; the same command goes on where it was\n"
    (run,) = [p for p in (tmp_path / "x" / "runs").iterdir() if p.is_dir()]
    assert list(run.glob("step_*"))
    assert not (tmp_path / "x" / "report.md").exists()


@pytest.mark.parametrize(
    ("result", "metrics"),
    [
        ("{", "{}"),
        ("{}", '{"kind": "start", "parameters": {"total": 1, "norms": 1}}\n'),
        ('{"val_loss": 1.0, "unigram_entropy": 3.0}', "{bad"),
        ('{"val_loss": 1.0, "unigram_entropy": 3.0}', '{"kind": "start"}\n'),
        ('{"val_loss": 1.0, "unigram_entropy": 3.0}', None),
    ],
)
def test_a_finished_run_that_is_damaged_is_named_with_what_to_do(
    result,
    metrics,
    corpus,  # noqa: F811
    tmp_path,
):
    cells = grid(corpus, tmp_path).cells()
    cell = next(iter(cells.values()))
    cell.run.out_dir.mkdir(parents=True)
    ablate.finished(cell).write_text(result, encoding="utf-8")
    if metrics is not None:
        (cell.run.out_dir / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{cell.run.out_dir.name} .*: delete it to train"):
        ablate.measured(cells)


@pytest.mark.parametrize("outcome", [False, True])
def test_a_worker_whose_parent_has_closed_its_end_takes_no_further_run(
    outcome,
    corpus,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """A signal during the first run, or after its last step: it once went on with the second."""
    ours, theirs = multiprocessing.Pipe()
    trained = []

    def run_cell(cell, _):
        trained.append(cell.run.out_dir.name)
        ours.close()
        return outcome

    monkeypatch.setattr(ablate, "run_cell", run_cell)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: ALIVE)
    monkeypatch.setattr(os, "setpgrp", lambda: None)
    cells = grid(corpus, tmp_path, lr=[1e-2]).cells()
    for task in list(cells.items())[:2]:
        ours.send(task)
    ablate.work(theirs, "cpu", False)
    assert trained == [next(iter(cells))]


def test_a_process_that_died_is_told_with_what_to_do(corpus, tmp_path):  # noqa: F811
    """Before its task reached it, or before it answered."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(9,))
    process.start()
    theirs.close()
    ablate._send(ours, next(iter(grid(corpus, tmp_path, lr=[1e-2]).cells().items())))
    with pytest.raises(ValueError, match=r"exit code 9.*--workers"):
        ablate._answer(ours, process)


class Alive:
    """A parent that lives on."""

    def join(self):
        threading.Event().wait()


ALIVE = Alive()


@pytest.mark.slow
def test_a_run_that_can_not_be_trained_is_named(corpus, tmp_path, capsys):  # noqa: F811
    """A worker answers what went wrong, and the others end."""
    argv = options(corpus, tmp_path, lr=[1e-2], seed=[1], block_size=4096, eval_tokens=4096)
    argv += ["--batch_tokens=4096", "--micro_batch=1"]
    argv = [a for a in argv if a not in ("--batch_tokens=64", "--micro_batch=2")]
    assert call(argv, processes=True) == 2
    error = capsys.readouterr().err
    assert "error: run pre-L1-lr0.01-w0-s1: ValueError: the val split" in error
    assert not list((tmp_path / "runs").glob("*/result.json"))
