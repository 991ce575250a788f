"""Program: pre-LN against post-LN, from one command to a report.

`python ablate.py [PRESET.toml] [--option value ...]`. The options are train.py's; arm, n_layer, lr,
warmup_steps and seed are axes, which take several values: each combination is trained by train.py's
own function in a folder of its own. Called again, an ablation goes on where it was, also with more
values on an axis. It writes report.md, results.csv, init.csv and five figures into out_dir.
"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
import tyro
from tqdm import tqdm

import checkpoint
import config
import evaluate
import run
import runtime
import train
from ablation import figures, initial, report
from config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from data import loader, prepare
from metrics import flops_per_token, n_params, read_records
from model import GPT, GPTConfig

# An arm is a name for a few options of the model.
ARMS: dict[str, dict] = {
    "pre": {"post_ln": False},
    "post": {"post_ln": True},
    "post-final": {"post_ln": True, "final_norm": True},
    "pre-no-final": {"post_ln": False, "final_norm": False},
    "pre-zero": {"post_ln": False, "branch_init": "zero"},
    "pre-plain": {"post_ln": False, "branch_init": "plain"},
    "pre-rms": {"post_ln": False, "norm": "rmsnorm"},
}
AXES = ("arm", "n_layer", "lr", "warmup_steps", "seed")
BAR = "{percentage:3.0f}% |{bar}| {elapsed} so far, {remaining} left{postfix}"
HIDDEN = {"post_ln", "sample_tokens"}  # no options here, so that no preset may have them
# What may differ when an ablation is continued: axes grow, machines and habits change.
FREE = {*AXES, *HIDDEN, "workers", "device", "micro_batch", "out_dir", "data_dir"}
FREE |= {"verify_data", "log_every", "save_every", "keep", "keep_weights"}


@dataclass(frozen=True)
class GridConfig:
    """The ablation."""

    arm: tuple[Literal[*ARMS], ...] = ("pre", "post")
    """AXIS: what is compared; the first is what the others are compared with. post-final: a norm
    before the head, too; pre-no-final: none; pre-zero, pre-plain: branch_init; pre-rms: RMSNorm."""
    workers: int | None = None
    """Runs side by side, on a CPU with a thread each; None: one per core, or one per GPU."""
    keep_weights: bool = False
    """Keep the checkpoints of finished runs, too; their metrics always stay."""


@dataclass(frozen=True)
class ModelAxes(ModelConfig):
    """The model; the arms decide about its norms."""

    n_layer: tuple[int, ...] = (12,)
    """AXIS: numbers of blocks."""
    post_ln: tyro.conf.Suppress[bool] = False


@dataclass(frozen=True)
class OptimizerAxes(OptimizerConfig):
    """The optimizer and its schedule."""

    lr: tuple[float, ...] = (3e-4, 6e-4, 1e-3, 3e-3)
    """AXIS: peak learning rates."""
    warmup_steps: tuple[int, ...] = (0, 700)
    """AXIS: steps of linear warm-up; 0 starts at lr."""


@dataclass(frozen=True)
class RunAxes(RunConfig):
    """The runs."""

    seed: tuple[int, ...] = (1, 2, 3)
    """AXIS: runs of one seed share initial draws and batches, so that their arms can be paired."""
    out_dir: Path = Path("runs/ablation")
    """Folder of the report and of all runs."""
    sample_tokens: tyro.conf.Suppress[int] = 0
    init_from: tyro.conf.Suppress[str | None] = None
    resume: tyro.conf.Suppress[bool] = False


@dataclass(frozen=True)
class AblationConfig:
    """Everything that decides an ablation."""

    grid: GridConfig = field(default_factory=GridConfig)
    model: ModelAxes = field(default_factory=ModelAxes)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerAxes = field(default_factory=OptimizerAxes)
    run: RunAxes = field(default_factory=RunAxes)

    def cells(self) -> dict[str, TrainConfig]:
        """All runs by name, deep ones first: so the work of all workers ends at about one time."""
        depths = sorted(self.model.n_layer, reverse=True)
        rest = (self.run.seed, self.optimizer.lr, self.optimizer.warmup_steps, self.grid.arm)
        found = [self._cell(arm, L, lr, w, seed) for L, seed, lr, w, arm in product(depths, *rest)]
        return {cell.run.out_dir.name: cell for cell in found}

    def _cell(self, arm: str, n_layer: int, lr: float, warmup_steps: int, seed: int) -> TrainConfig:
        name = f"{arm}-L{n_layer}-lr{lr}-w{warmup_steps}-s{seed}"
        options = config.flat(self) | {"out_dir": self.run.out_dir / "runs" / name} | ARMS[arm]
        options |= {"n_layer": n_layer, "lr": lr, "warmup_steps": warmup_steps, "seed": seed}
        groups = {}
        for group in dataclasses.fields(TrainConfig):
            names = {f.name for f in dataclasses.fields(group.default_factory)} & options.keys()
            groups[group.name] = group.default_factory(**{n: options[n] for n in names})
        return TrainConfig(**groups)

    def problems(self) -> list[str]:
        """Everything that keeps this from being run, a sentence each."""
        found = []
        for axis in AXES:
            values = config.flat(self)[axis]
            if not values:
                choices = f", some of {', '.join(ARMS)}" if axis == "arm" else ""
                found.append(f"the axis {axis} is empty: give it at least one value{choices}")
            if len(set(values)) < len(values):
                found.append(f"the axis {axis} has a value twice: {values}")
        for name, default in (("post_ln", False), ("init_from", None), ("resume", False)):
            if config.flat(self)[name] != default:
                found.append(
                    f"{name} is no option here: arms decide about norms, all runs start "
                    "from random weights, and an ablation always goes on where it was"
                )
        if self.run.out_dir == Path():
            found.append("out_dir must not be empty")
        if self.grid.workers is not None and self.grid.workers < 1:
            found.append(f"workers must be at least 1, got {self.grid.workers}")
        for cell in self.cells().values() if not found else ():
            found += [p for p in cell.problems() if p not in found]
        return found


def unigram_entropy(cfg: TrainConfig) -> float:
    """Entropy in nats per token of the validation text's own token frequencies: a run that ends
    above it has learned nothing from the context."""
    folder = prepare.folder_of(cfg.data.corpus, cfg.data.tokenizer, cfg.data.data_dir)
    tokens = loader.Tokens(folder, "val", cfg.model.block_size)
    _, targets = tokens.read(np.arange(evaluate.n_windows(tokens, cfg.run.eval_tokens)))
    share = np.unique(targets, return_counts=True)[1] / targets.numel()
    return float(-(share * np.log(share)).sum())


def finished(cell: TrainConfig) -> Path:
    """The file that a finished run has."""
    return cell.run.out_dir / "result.json"


def log_of(cell: TrainConfig) -> Path:
    """What training prints, while it runs; then it becomes the run's log.txt."""
    return cell.run.out_dir.with_name(f"{cell.run.out_dir.name}.log")


def run_cell(cell: TrainConfig, keep_weights: bool) -> bool:
    """Train one run, or go on with it; False if a signal stopped it. What training would print
    goes into the run's log.txt. To diverge is a result."""
    folder = cell.run.out_dir
    # A worker whose parent was killed may still be saving here.
    with loader.lock_of(folder).acquire(timeout=600):
        return finished(cell).exists() or _run_claimed(cell, keep_weights)


def _run_claimed(cell: TrainConfig, keep_weights: bool) -> bool:
    folder = cell.run.out_dir
    resume = bool(checkpoint.saved_in(folder))
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    cell = replace(cell, run=replace(cell.run, resume=resume))
    start, log = time.perf_counter(), log_of(cell)
    with (
        open(log, "a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            if train.train(cell)["stopped_by"]:
                return False
        except train.Diverged as error:
            print(error)
    records = read_records(folder / "metrics.jsonl")
    end = ("eval", cell.run.steps)
    ends = [r["val_loss"] for r in records if (r["kind"], r.get("step")) == end]
    speeds = [r["tokens_per_s"] for r in records if r["kind"] == "train"]
    result = {
        "val_loss": ends[-1] if ends else None,
        "unigram_entropy": unigram_entropy(cell),
        "seconds_per_step": cell.run.batch_tokens / median(speeds),
        "seconds": time.perf_counter() - start,
    }
    os.replace(log, folder / "log.txt")
    loader.replace_file(finished(cell), json.dumps(result) + "\n")
    if not keep_weights:  # only now: half a checkpoint can't be resumed from
        for name in checkpoint.saved_in(folder):
            shutil.rmtree(folder / name)
    return True


def work(end: Connection, device: str, keep_weights: bool) -> None:
    """A process that trains the runs it is sent until the other end is closed. It answers each with
    its name and whether it was finished, or with what went wrong. A SIGTERM ends it, as does the
    end of its parent: a run is saved before. Nothing is shared, so nobody waits for what a killed
    one held."""
    parent = multiprocessing.parent_process()
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C is the parent's: with its SIGTERM it would be a second signal

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own would be a semaphore that a kill leaves behind
    if device == "cpu":
        torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, cell = end.recv()
            cell = replace(cell, run=replace(cell.run, device=device))
            try:
                outcome = run_cell(cell, keep_weights)
            except (ValueError, OSError, RuntimeError) as error:
                outcome = f"{type(error).__name__}: {error}"
            end.send((name, outcome))


def train_all(
    cells: dict[str, TrainConfig],
    devices: list[str],
    keep_weights: bool,
    signals: runtime.StopSignals,
) -> bool:
    """Train the cells that are not finished, side by side, a process per device; False if a signal
    stopped that. ValueError if one of them can't be run."""
    context = multiprocessing.get_context("spawn")
    to_do = [task for task in cells.items() if not finished(task[1]).exists()]
    tasks, left = iter(to_do), len(to_do)
    cost = {name: cell.model.n_layer * cell.run.steps for name, cell in cells.items()}
    bar = tqdm(total=sum(cost.values()), disable=None, bar_format=BAR)
    bar.update(sum(cost.values()) - sum(cost[name] for name, _ in to_do))
    processes: dict[Connection, multiprocessing.Process] = {}
    try:
        for device in devices[: len(to_do)]:
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, device, keep_weights), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
            _send(ours, next(tasks))
        busy = {*processes}
        while busy and not signals.received:
            bar.set_postfix_str(f"{len(cells) - left} of {len(cells)} runs")
            for end in wait(busy, timeout=1):
                name, outcome = _answer(end, processes[end])
                if outcome is False:
                    return False
                if isinstance(outcome, str):
                    raise ValueError(f"run {name}: {outcome} (its log: {log_of(cells[name])})")
                bar.update(cost[name])
                left -= 1
                if bar.disable:  # no terminal
                    print(f"{len(cells) - left} of {len(cells)} runs", flush=True)
                if task := next(tasks, None):
                    _send(end, task)
                else:
                    busy.remove(end)
        return not signals.received
    finally:
        bar.close()
        for end, process in processes.items():
            end.close()
            if process.is_alive():
                process.terminate()  # a run in progress saves before it ends
        for process in processes.values():
            process.join()


def _send(end: Connection, task: tuple[str, TrainConfig]) -> None:
    with contextlib.suppress(ConnectionError):  # a process that died has no answer: that is told
        end.send(task)


def _answer(end: Connection, process: multiprocessing.Process) -> tuple[str, bool | str]:
    """What a process answers. ValueError if it died without that."""
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise ValueError(
            f"a process that trained ended with exit code {process.exitcode}; if memory was "
            "short, take fewer --workers. The same command goes on"
        ) from None


def devices_of(requested: str, workers: int | None, gpus: int, cores: int) -> list[str]:
    """A device for every process. Without `workers`: one process per GPU, or per core."""
    device = "cuda" if requested == "auto" and gpus else requested
    if device == "cuda":
        return [f"cuda:{i % gpus}" for i in range(workers or gpus)]
    device = "cpu" if device == "auto" else device
    return [device] * (workers or (cores if device == "cpu" else 1))


def operations(cells: dict[str, TrainConfig]) -> float:
    """Floating-point operations of all runs."""
    total, per_token = 0, {}
    for cell in cells.values():
        shape = replace(cell.model, vocab_size=257 if cell.data.tokenizer == "byte" else 50257)
        if shape not in per_token:
            with torch.device("meta"):
                n = n_params(GPT(shape))["without_positions"]
            per_token[shape] = flops_per_token(n, shape)
        total += per_token[shape] * cell.run.steps * cell.run.batch_tokens
    return total


def plan(cfg: AblationConfig, cells: dict[str, TrainConfig], devices: list[str]) -> str:
    """What is going to be done, and what it takes on a GPU."""
    axes = config.flat(cfg)
    product_of = " × ".join(f"{len(axes[axis])} {axis}" for axis in AXES)
    left = sum(not finished(cell).exists() for cell in cells.values())
    device = torch.device(devices[0])
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "H100"
    peak = runtime.peak_flops(card, torch.bfloat16) or runtime.peak_flops("H100", torch.bfloat16)
    flops = operations({n: c for n, c in cells.items() if not finished(c).exists()})
    hours = flops / (0.4 * peak) / 3600
    return (
        f"{len(cells)} runs ({product_of}), {left} to do, {len(devices)} at a time on "
        f"{', '.join(sorted(set(devices)))}: {flops:.1e} floating-point operations, "
        f"{f'{hours:.1f}' if hours > 0.1 else 'under 0.1'} GPU hours where bfloat16 products reach "
        f"40 % of an {card}'s {peak / 1e12:.0f} TFLOP/s"
    )


@contextlib.contextmanager
def claimed(cfg: AblationConfig) -> Iterator[None]:
    """Hold the ablation's folder, its options written down. ValueError if another process has it,
    or if what it holds was made with other options than the axes'."""
    out_dir = cfg.run.out_dir
    with run.alone_in(out_dir, "ablation is running"):
        (out_dir / "runs").mkdir(exist_ok=True)
        lines, path = config.to_toml(cfg).splitlines(True), out_dir / "config.toml"
        text = "".join(line for line in lines if line.split(" ")[0] not in HIDDEN)
        if path.exists():
            before, now = (tomllib.loads(t) for t in (path.read_text(encoding="utf-8"), text))
            keys = sorted(k for k in (before | now).keys() - FREE if before.get(k) != now.get(k))
            if keys:
                raise ValueError(
                    f"{out_dir} holds an ablation with other options: "
                    + ", ".join(f"{k} {before.get(k)} (now {now.get(k)})" for k in keys)
                    + ". Take another --out-dir; only the axes may change"
                )
        loader.replace_file(path, text)
        yield


def measured(cells: dict[str, TrainConfig]) -> tuple[list[dict], dict[tuple, list]]:
    """A row per run for results.csv, and all training losses by (arm, n_layer, warmup_steps, lr,
    seed)."""
    rows, histories = [], {}
    for name, cell in cells.items():
        row = {"arm": name.split("-L")[0], "n_layer": cell.model.n_layer}
        row |= {"warmup_steps": cell.optimizer.warmup_steps, "lr": cell.optimizer.lr}
        row |= {"seed": cell.run.seed}
        try:
            result = loader.read_json(finished(cell))
            start, *records = read_records(cell.run.out_dir / "metrics.jsonl")
            histories[tuple(row.values())] = [r["loss"] for r in records if r["kind"] == "train"]
            loss = math.nan if result["val_loss"] is None else result["val_loss"]
            row |= {"val_loss": loss, "diverged": not loss <= result["unigram_entropy"]}
            row |= {"unigram_entropy": result["unigram_entropy"]}
            row |= {"parameters": start["parameters"]["total"]}
            row |= {"norm_parameters": start["parameters"]["norms"]}
            rows.append(row | {k: result[k] for k in ("seconds_per_step", "seconds")})
        except (ValueError, KeyError, TypeError, OSError) as error:
            folder = cell.run.out_dir
            raise ValueError(
                f"what {folder} holds can't be read ({type(error).__name__}: {error}): delete it "
                "to train that run again"
            ) from None
    return rows, histories


def initial_rows() -> list[dict]:
    """What is measured without training, on random tokens, 128 wide."""
    std = 0.02 * math.sqrt(768 / 128)
    shape = GPTConfig(257, block_size=64, n_layer=24, n_head=4, n_embd=128, init_std=std)
    return [*initial.lesson(), *initial.stream(shape), *initial.gradients(shape)]


def setting(cfg: AblationConfig, cells: dict[str, TrainConfig]) -> str:
    """What was trained, on what, in sentences."""
    m, o, r = cfg.model, cfg.optimizer, cfg.run
    start = read_records(next(iter(cells.values())).run.out_dir / "metrics.jsonl")[0]
    return (
        f"Each: {r.steps} steps of {r.batch_tokens:,} tokens of `{cfg.data.corpus}` "
        f"({cfg.data.tokenizer} tokens), {m.n_embd} wide, {m.n_head} heads, {m.block_size} tokens "
        f"of context, matrices N(0, {m.init_std:g}²), branches `{m.branch_init}`, {o.optimizer}, "
        + (f"gradients clipped at {o.grad_clip:g}, " if o.grad_clip else "no clipping, ")
        + f"a cosine to a tenth of the rate; torch {start['versions']['torch']}, "
        f"{start['device']}."
    )


def write_report(cfg: AblationConfig, cells: dict[str, TrainConfig]) -> None:
    """The report, its tables and its figures, from the finished runs."""
    out_dir = cfg.run.out_dir
    rows, histories = measured(cells)
    at_start = initial_rows()
    loader.replace_file(out_dir / "results.csv", report.to_csv(rows))
    loader.replace_file(out_dir / "init.csv", report.to_csv(at_start))
    figures.draw(out_dir, report.Results(rows), at_start, histories)
    text = report.markdown(rows, at_start, setting(cfg, cells))
    loader.replace_file(out_dir / "report.md", text)


def main(argv: list[str]) -> int:
    cfg = config.parse(AblationConfig, argv, prog="ablate.py", description=__doc__)
    if problems := cfg.problems():
        raise ValueError("\n  ".join(["this ablation can't be run:", *problems]))
    gpus = torch.cuda.device_count()
    runtime.find_device(cfg.run.device)
    devices = devices_of(cfg.run.device, cfg.grid.workers, gpus, os.cpu_count() or 1)
    cells = cfg.cells()
    print(plan(cfg, cells, devices), flush=True)
    prepare.ensure(cfg.data.corpus, cfg.data.tokenizer, cfg.data.data_dir)
    with claimed(cfg):
        with runtime.StopSignals() as signals:
            done = train_all(cells, devices, cfg.grid.keep_weights, signals)
        if not done:
            print("stopped; the same command goes on where it was", file=sys.stderr)
            return 128 + (signals.received or signal.SIGTERM)
        write_report(cfg, cells)
    print(f"the report: {cfg.run.out_dir / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
