"""Program: train a GPT-2. `python train.py [PRESET.toml] [--option value ...]`, or under torchrun.

A run is a pure function of (config, step): rate, batch and dropout seed follow from them, and only
weights, optimizer state and step are carried along. Exit codes: 0 done, 2 a mistake in what was
given, 3 diverged, 128 + n stopped by signal n after saving (130 Ctrl-C, 143 SIGTERM).
"""

import contextlib
import importlib.metadata
import math
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import numpy as np
import tiktoken
import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import config
import evaluate
import runtime
import sample
from config import TrainConfig
from data import loader, prepare, tokenizer
from metrics import Meter, RunLog, flops_per_token, write_durably
from model import GPT
from optim import Optimizer, lr_at

BAD_STEPS_IN_A_ROW = 16  # float16's first loss scale, 2^16, may need that many halvings
# What a resumed run must share with the saved one, and what it may change without a word.
FIXED = {"n_layer", "n_head", "n_embd", "block_size", "post_ln", "final_norm", "norm"}
FIXED |= {"tokenizer", "optimizer"}
QUIET = {"out_dir", "data_dir", "micro_batch", "log_every", "eval_every", "eval_tokens", "keep"}
QUIET |= {"save_every", "device", "dtype", "compile", "attention", "wandb", "sample_tokens"}
QUIET |= {"resume", "init_from", "branch_init", "init_std"}


class Diverged(RuntimeError):
    """The gradient was not finite for many steps in a row."""


@dataclass
class Run:
    """Everything the loop works with. Weights, optimizer, step and record change; the rest stays.
    `fast` is the loss, compiled or not; `loss` the same, wrapped where there are more processes."""

    cfg: TrainConfig
    processes: runtime.Processes
    dtype: torch.dtype
    model: GPT
    encoding: tiktoken.Encoding
    optimizer: Optimizer
    batches: loader.Batches
    validation: loader.Tokens
    data: dict
    record: dict
    step: int = 0
    fast: Callable | None = None
    loss: Callable | None = None

    @property
    def device(self) -> torch.device:
        return self.model.wte.weight.device

    @property
    def windows(self) -> int:
        """Validation windows in use."""
        return evaluate.n_windows(self.validation, self.cfg.run.eval_tokens)


def train(cfg: TrainConfig) -> dict:
    """Train as cfg says: {"step", "val_loss", "best_val_loss", "stopped_by"} at the end, the last
    a signal's number or 0. ValueError for what can't be run; Diverged."""
    processes = runtime.Processes.from_environment()
    device = runtime.find_device(cfg.run.device, processes.local_rank)
    if problems := cfg.problems(processes.world_size):
        raise ValueError("\n  ".join(["these options can't be run:", *problems]))
    processes.connect(device)
    try:
        with claimed(cfg, processes), runtime.attention(cfg.run.attention):
            run = set_up(cfg, processes, device)
            seconds = prepare_loss(run)
            with contextlib.closing(start_log(run, seconds)) as log:
                return loop(run, log)
    finally:
        processes.disconnect()


def loop(run: Run, log: RunLog) -> dict:
    """Update, log, validate and save until all steps are done or a signal asks to stop."""
    r, flops = (
        run.cfg.run,
        flops_per_token(run.model.n_params()["without_positions"], run.model.config),
    )
    peak = runtime.peak_of(run.device, run.dtype)
    meter = Meter(batch_tokens=r.batch_tokens, flops=flops, peak=peak, processes=run.processes)
    val_loss, stop, saved = None, False, run.step
    with runtime.StopSignals() as signals:
        while run.step < r.steps and not stop:
            meter.add(*update(run))
            last = run.step == r.steps
            validate = last or run.step % r.eval_every == 0
            save = last or run.step % r.save_every == 0
            # Alone, a signal is seen at once; several processes agree on it when they talk anyway.
            asked = bool(signals.received) and run.processes.world_size == 1
            if validate or save or asked or run.step % r.log_every == 0:
                rows, stop = meter.settle(run.step, bool(signals.received))
                log.train(rows)
                if meter.bad_in_a_row >= BAD_STEPS_IN_A_ROW:
                    raise Diverged(diagnosis(run, rows[-1], meter.bad_in_a_row))
            with meter.watch.paused():
                if validate:
                    val_loss = validation_loss(run)
                    log.validation(run.step, val_loss)
                    save |= is_best(run, val_loss)
                if (save or stop) and saved != run.step:
                    save_checkpoint(run)
                    saved = run.step
    stopped_by = (signals.received or signal.SIGTERM) if stop and run.step < r.steps else 0
    if not stopped_by:
        finish(run, log, val_loss)
    return {
        "step": run.step,
        "val_loss": val_loss,
        "best_val_loss": run.record["best_val_loss"],
        "stopped_by": stopped_by,
    }


def update(run: Run) -> tuple[float, torch.Tensor, torch.Tensor]:
    """One optimizer step: its learning rate, this process's mean loss, and the gradient norm."""
    key = np.random.SeedSequence([run.cfg.run.seed, run.step, run.processes.rank])
    torch.manual_seed(int(key.generate_state(1, np.uint64)[0]))  # dropout
    run.optimizer.zero_grad()
    total = torch.zeros((), device=run.device)
    micro = run.cfg.run.micro_batch
    n = run.batches.share // micro
    for i, batch in enumerate(run.batches.micro_batches(run.step, micro), start=1):
        x, y = (runtime.to_device(t, run.device) for t in batch)
        # Gradients are exchanged once a step, and forward must know it too when they are not.
        alone = run.processes.world_size == 1 or i == n
        with contextlib.nullcontext() if alone else run.loss.no_sync():
            with runtime.autocast(run.device, run.dtype):
                loss = run.loss(x, y)
            (loss * run.optimizer.scale / n).backward()
        total += loss.detach()
    lr = lr_at(run.step, run.cfg.optimizer, run.cfg.run.steps)
    norm = run.optimizer.step(lr)
    run.step += 1
    return lr, total / n, norm


def validation_loss(run: Run) -> float:
    return evaluate.validation_loss(
        run.model,
        run.validation,
        windows=run.windows,
        micro_batch=run.cfg.run.micro_batch,
        dtype=run.dtype,
        processes=run.processes,
        fast=run.fast,
    )


def is_best(run: Run, val_loss: float) -> bool:
    """Whether this is the best validation so far; then the record says so."""
    best = run.record["best_val_loss"]
    better = math.isfinite(val_loss) and (best is None or val_loss < best)
    if better:
        run.record |= {"best": step_name(run.step), "best_val_loss": val_loss}
    return better


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def save_checkpoint(run: Run) -> None:
    """Write the state after run.step steps and make it the run's last checkpoint."""
    run.record["last"] = step_name(run.step)
    if not run.processes.first:
        return
    options = {k: str(v) if isinstance(v, Path) else v for k, v in config.flat(run.cfg).items()}
    training = {"format": 1, "step": run.step, "data": run.data, "config": options}
    checkpoint.save(
        run.cfg.run.out_dir / run.record["last"],
        run.model,
        run.encoding,
        training=training | {"versions": versions()},
        optimizer=run.optimizer.state(),
    )
    checkpoint.record(run.cfg.run.out_dir, run.record, run.cfg.run.keep)


def diagnosis(run: Run, row: dict, n: int) -> str:
    """Why training can't go on, from the gradients that still lie there."""
    grads = [(name, p.grad) for name, p in run.model.named_parameters() if p.grad is not None]
    first = next((name for name, g in grads if not g.isfinite().all()), "none")
    return (
        f"diverged: the gradient was not finite for {n} steps in a row, since step "
        f"{row['step'] - n + 1} (now loss {row['loss']}, lr {row['lr']:.2e}, "
        f"gradient norm {row['grad_norm']}, dtype {run.dtype}, first bad parameter {first}). "
        f"Those steps were skipped; the last checkpoint is {run.record['last']}. "
        "Take a lower lr, more warmup_steps, or --dtype float32"
    )


@contextlib.contextmanager
def claimed(cfg: TrainConfig, processes: runtime.Processes):
    """Hold the run's folder. ValueError if it is used already, or not there to be resumed."""
    out_dir = cfg.run.out_dir
    used = [
        n for n in ("config.toml", "metrics.jsonl", "checkpoints.json") if (out_dir / n).exists()
    ]
    if used and not cfg.run.resume:
        raise ValueError(
            f"{out_dir} holds a run already ({', '.join(used)}): continue it with `python train.py "
            f"{out_dir / 'config.toml'} --resume`, or take another --out-dir"
        )
    if cfg.run.resume and not used:
        raise ValueError(f"there is no run in {out_dir} to resume: start it without --resume")
    if not processes.first:
        yield
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(out_dir / ".lock", timeout=0):
            yield
    except filelock.Timeout:
        raise ValueError(f"another process is training in {out_dir}") from None


def set_up(cfg: TrainConfig, processes: runtime.Processes, device: torch.device) -> Run:
    """Tokens, model and optimizer, new or as the last checkpoint has them."""
    d, r = cfg.data, cfg.run
    dtype, _ = runtime.find_dtype(r.dtype, device)
    record = checkpoint.read_record(r.out_dir)
    resumed = checkpoint.load(str(r.out_dir)) if r.resume and record["last"] else None
    if resumed:
        saved_optimizer = checkpoint.load_optimizer(resumed.folder)
        compare_options(cfg, resumed, processes)
    source = resumed or (checkpoint.load(r.init_from) if r.init_from else None)
    model, encoding, cfg = build_model(cfg, source)
    folder = processes.first_does(lambda: prepare.ensure(d.corpus, d.tokenizer, d.data_dir))
    loader.check_tokenizer(folder, tokenizer.identity(encoding))
    data = {"folder": folder.name, "id": loader.data_id(loader.read_meta(folder))}
    if resumed and resumed.training["data"]["id"] != data["id"] and processes.first:
        print(f"warning: different data: {folder} is not what this run was trained on", flush=True)
    T = model.config.block_size
    run = Run(
        cfg=cfg,
        processes=processes,
        dtype=dtype,
        model=model.to(device),
        encoding=encoding,
        optimizer=Optimizer(model, cfg.optimizer, float16=dtype == torch.float16),
        batches=loader.Batches(
            loader.Tokens(folder, "train", T),
            seed=r.seed,
            rows_per_step=r.batch_tokens // T,
            rank=processes.rank,
            world_size=processes.world_size,
        ),
        validation=loader.Tokens(folder, "val", T),
        data=data,
        record=record,
    )
    if resumed:
        run.optimizer.load_state(saved_optimizer)
        run.step = resumed.training["step"]
    return run


def build_model(cfg: TrainConfig, source: checkpoint.Checkpoint | None):
    """The model, its tokenizer, and cfg with the shape that the model really has."""
    if source is None:
        encoding = tokenizer.load(cfg.data.tokenizer)
        shape = replace(cfg.model, vocab_size=encoding.n_vocab)
        return GPT(shape, cfg.run.seed), encoding, replace(cfg, model=shape)
    model, theirs = source.model, source.model.config
    if cfg.model.block_size > theirs.block_size:
        raise ValueError(
            f"block_size {cfg.model.block_size} is longer than the {theirs.block_size} of "
            f"{source.folder}: take --block-size {theirs.block_size} or less"
        )
    model.crop(cfg.model.block_size)
    shape = {n: getattr(theirs, n) for n in ("vocab_size", "n_layer", "n_head", "n_embd")}
    shape |= {n: getattr(theirs, n) for n in ("post_ln", "final_norm", "norm")}
    shape = replace(cfg.model, **shape)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = shape.dropout
    model.config = shape
    return model, source.encoding, replace(cfg, model=shape)


def compare_options(
    cfg: TrainConfig, resumed: checkpoint.Checkpoint, processes: runtime.Processes
) -> None:
    """ValueError for changes that the saved state can't follow; a line for those that it can."""
    before, now = resumed.training["config"], config.flat(cfg)
    changed = {k for k in now if k not in QUIET and str(now[k]) != str(before.get(k))}
    notes = {k: f"{k} was {before.get(k)}, is {now[k]}" for k in sorted(changed)}
    if fixed := [notes[k] for k in notes if k in FIXED]:
        raise ValueError(
            f"{resumed.folder} can't be resumed with other options: {'; '.join(fixed)}. "
            f"Its own are in {cfg.run.out_dir / 'config.toml'}"
        )
    if notes and processes.first:
        print(f"warning: resumed with changes: {'; '.join(notes.values())}", flush=True)


def prepare_loss(run: Run) -> float:
    """Set run.fast and run.loss after a trial, which changes nothing; seconds of a micro-batch."""
    x, y = next(run.batches.micro_batches(run.step, run.cfg.run.micro_batch))
    x, y = x.to(run.device), y.to(run.device)
    if run.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is left

    def trial(loss: Callable) -> float:
        start = time.perf_counter()
        with runtime.autocast(run.device, run.dtype):
            value = loss(x, y)
        value.backward()
        if run.device.type != "cpu":
            torch.accelerator.synchronize()
        run.optimizer.zero_grad()
        return time.perf_counter() - start

    run.fast = run.loss = runtime.Loss(run.model)
    try:
        if runtime.wants_compile(run.cfg.run.compile, run.device):
            run.fast = run.loss = runtime.compiled(run.loss, trial, run.cfg.run.compile)
        trial(run.fast)
        seconds = trial(run.fast)
    except torch.OutOfMemoryError:
        n = run.model.n_params()["total"]
        raise ValueError(
            f"out of memory on {run.device}: weights, gradients and optimizer need "
            f"{16 * n / 1e9:.1f} GB, the rest grows with micro_batch × block_size = "
            f"{len(x)} × {x.size(1)}: lower --micro-batch (the result stays the same)"
        ) from None
    if run.processes.world_size > 1:
        ids = [run.device.index] if run.device.type == "cuda" else None
        run.loss = DistributedDataParallel(run.fast, device_ids=ids, gradient_as_bucket_view=True)
    return seconds


def versions() -> dict:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "tiktoken")}
    return {"python": platform.python_version(), **packages}


def start_log(run: Run, seconds: float) -> RunLog:
    """Write the resolved config, open the log, and say once what will be done."""
    r, n, T = run.cfg.run, run.model.n_params(), run.model.config.block_size
    accumulation = run.batches.share // r.micro_batch
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
    tokens = len(run.batches.tokens) * T
    start = {
        "kind": "start",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "device": name,
        "dtype": str(run.dtype),
        "processes": run.processes.world_size,
        "parameters": n,
        "data": run.data,
    }
    if run.processes.first:
        write_durably(r.out_dir / "config.toml", config.to_toml(run.cfg))
    log = RunLog(
        r.out_dir,
        start,
        r.steps,
        active=run.processes.first,
        resume_step=run.step if r.resume else None,
        wandb_mode=r.wandb,
        options=config.flat(run.cfg),
    )
    _, why = runtime.find_dtype(r.dtype, run.device)
    left = (r.steps - run.step) * accumulation * seconds
    placement = "post-LN" if run.model.config.post_ln else "pre-LN"
    log.say(f"device      {name}, {run.dtype} ({why}), {run.processes.world_size} process(es)")
    log.say(
        f"model       {placement}, {n['total']:,} parameters (the tied head counted once), "
        f"{n['without_positions']:,} without positions, {n['without_embeddings']:,} without "
        f"embeddings; norms {n['norms']:,} ({n['norms'] / n['total']:.2%})"
    )
    groups = ", ".join(
        f"{k} {len(v)} ({sum(p.numel() for p in v.values()):,})"
        for k, v in run.optimizer.groups.items()
        if v
    )
    log.say(f"optimizer   tensors (numbers): {groups}")
    log.say(
        f"step        {r.batch_tokens:,} tokens = {run.processes.world_size} process(es) × "
        f"{accumulation} × {r.micro_batch} windows of {T}"
    )
    log.say(
        f"data        {run.data['folder']}, id {run.data['id'][:12]}: {tokens:,} training tokens, "
        f"{run.windows * T:,} validation tokens"
    )
    log.say(
        f"run         steps {run.step} to {r.steps}, {r.steps * r.batch_tokens / tokens:.1f} "
        f"epochs, about {left / 60:.1f} minutes and validations, into {r.out_dir}"
    )
    return log


def finish(run: Run, log: RunLog, val_loss: float | None) -> None:
    """The run's last words: its result beside gzip's, and a sample."""
    if not run.processes.first:
        return
    if val_loss is None:
        log.say(f"all {run.step} steps were done before: nothing was left to do")
        return
    log.say(evaluate.summary(val_loss, run.encoding, run.validation, run.windows))
    if run.cfg.run.sample_tokens:
        options = {"max_new_tokens": run.cfg.run.sample_tokens, "temperature": 0.8}
        prompt = [[run.encoding.eot_token]]
        pieces = sample.stream(run.model, run.encoding, prompt, [run.cfg.run.seed], **options)
        log.say("a sample:\n" + "".join(text for (text,) in pieces))
    log.say(f"more: python sample.py {run.cfg.run.out_dir}")


def main(argv: list[str]) -> int:
    cfg = config.parse(TrainConfig, argv, prog="train.py", description=__doc__)
    try:
        stopped_by = train(cfg)["stopped_by"]
    except (Diverged, runtime.CompileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, Diverged) else 2
    if stopped_by:
        folder = cfg.run.out_dir
        print(f"stopped and saved; continue with: python train.py {folder}/config.toml --resume")
        return 128 + stopped_by
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
