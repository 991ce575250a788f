"""Program: train a GPT-2. `python train.py [PRESET.toml] [--option value ...]`, or under torchrun.

A run is a pure function of (config, step): rate, batch and dropout seed follow from them, and only
weights, optimizer state and step are carried along. Exit codes: 0 done, 2 a mistake in what was
given, 3 diverged, 128 + n stopped by signal n after saving (130 Ctrl-C, 143 SIGTERM).
"""

import contextlib
import math
import shlex
import signal
import sys

import numpy as np
import torch

import checkpoint
import config
import evaluate
import runtime
import sample
from config import TrainConfig
from metrics import Meter, RunLog
from optim import lr_at
from run import Run, claimed, prepare_loss, set_up, start_log, versions

BAD_STEPS_IN_A_ROW = 16  # float16's first loss scale, 2^16, may need that many halvings


class Diverged(RuntimeError):
    """The gradient was not finite for many steps in a row, or the weights are not."""


def train(cfg: TrainConfig) -> dict:
    """Train as cfg says. Returns {"step", "val_loss", "best_val_loss", "stopped_by"}, the last a
    signal's number or 0. ValueError for what can't be run; Diverged; CompileError."""
    processes = runtime.Processes.from_environment()
    device = runtime.find_device(cfg.run.device, processes.local_rank)
    if problems := cfg.problems(processes.world_size):
        if not processes.first:
            raise SystemExit(2)
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
    """Update, log, validate and save, until all steps are done or a signal asks to stop."""
    r, val_loss, stop, saved = run.cfg.run, None, False, run.step
    peak = runtime.peak_of(run.device, run.dtype)
    meter = Meter(batch_tokens=r.batch_tokens, flops=run.flops, peak=peak, processes=run.processes)
    with runtime.StopSignals() as signals:
        while run.step < r.steps and not stop:
            meter.add(*update(run))
            last = run.step == r.steps
            validate = last or run.step % r.eval_every == 0
            save = last or run.step % r.save_every == 0
            # Alone, a signal is seen at once; several processes agree on it when they talk anyway.
            asked = bool(signals.received)
            alone = run.processes.world_size == 1
            if validate or save or (asked and alone) or run.step % r.log_every == 0:
                rows, stop = meter.settle(run.step, asked)
                log.train(rows)
                if meter.bad_in_a_row >= BAD_STEPS_IN_A_ROW:
                    raise Diverged(diagnosis(run, rows[-1], meter.bad_in_a_row))
            with meter.watch.paused():
                if validate:
                    val_loss = validation_loss(run)
                    log.validation(run.step, val_loss)
                    save |= is_best(run, val_loss)
                if (save or stop) and saved != run.step:
                    save_checkpoint(run, log)
                    saved = run.step
    stopped = stop and run.step < r.steps
    if not stopped:
        if val_loss is not None and not math.isfinite(val_loss):
            raise Diverged(f"diverged: the validation loss is {val_loss} at the end")
        finish(run, log, val_loss)
    return {
        "step": run.step,
        "val_loss": val_loss,
        "best_val_loss": run.record["best_val_loss"],
        "stopped_by": int(signals.received or signal.SIGTERM) if stopped else 0,
    }


def update(run: Run) -> tuple[float, torch.Tensor, torch.Tensor]:
    """One optimizer step: its learning rate, this process's mean loss, and the gradient norm."""
    run.optimizer.zero_grad()
    total, n = torch.zeros((), device=run.device), run.accumulation
    batches = run.batches.micro_batches(run.step, run.cfg.run.micro_batch)
    for i, batch in enumerate(batches, start=1):
        # Dropout follows from the micro-batch's place in the step, whichever process has it.
        key = [run.cfg.run.seed, run.step, run.processes.rank * n + i]
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))
        x, y = (runtime.to_device(t, run.device) for t in batch)
        # Gradients are exchanged once a step; forward, too, must know when they are not.
        exchange = run.processes.world_size == 1 or i == n
        with contextlib.nullcontext() if exchange else run.loss.no_sync():
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
    """Whether this is the best validation so far; if so, the record says it from now on."""
    best = run.record["best_val_loss"]
    better = math.isfinite(val_loss) and (best is None or val_loss < best)
    if better:
        run.record |= {"best": step_name(run.step), "best_val_loss": val_loss}
    return better


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def save_checkpoint(run: Run, log: RunLog) -> None:
    """Write the state after run.step steps and make it the run's last checkpoint."""
    run.record["last"] = step_name(run.step)
    if not run.processes.first:
        return
    training = {"format": 1, "step": run.step, "data": run.data, "config": config.plain(run.cfg)}
    try:
        checkpoint.save(
            run.cfg.run.out_dir / run.record["last"],
            run.model,
            run.encoding,
            training=training | {"versions": versions()},
            optimizer=run.optimizer.state(),
        )
    except checkpoint.NotFinite as error:
        raise Diverged(f"diverged at step {run.step}: {error}") from None
    checkpoint.record(run.cfg.run.out_dir, run.record, run.cfg.run.keep)
    log.say(f"saved {run.cfg.run.out_dir / run.record['last']}")


def diagnosis(run: Run, row: dict, n: int) -> str:
    """Why training can't go on, from the last step and the gradients that still lie there."""
    grads = [(name, p.grad) for name, p in run.model.named_parameters() if p.grad is not None]
    first = next((name for name, g in grads if not g.isfinite().all()), "none")
    return (
        f"diverged: the gradient was not finite for {n} steps in a row, since step "
        f"{row['step'] - n + 1} (now loss {row['loss']}, lr {row['lr']:.2e}, gradient norm "
        f"{row['grad_norm']}, {run.dtype}, first bad parameter {first}). Those steps were skipped; "
        f"the last checkpoint is {run.record['last'] or 'still to come'}. Take a lower lr or more "
        "warmup_steps" + ("" if run.dtype == torch.float32 else ", or --dtype float32")
    )


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
        prompts, seeds = [[run.encoding.eot_token]], [run.cfg.run.seed]
        pieces = sample.stream(run.model, run.encoding, prompts, seeds, **options)
        log.say("a sample:\n" + "".join(text for (text,) in pieces))
    log.say(f"more: python sample.py {shlex.quote(str(run.cfg.run.out_dir))}")


def main(argv: list[str]) -> int:
    cfg = config.parse(TrainConfig, argv, prog="train.py", description=__doc__)
    try:
        stopped_by = train(cfg)["stopped_by"]
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except runtime.CompileError as error:
        raise ValueError(str(error)) from None
    if stopped_by:
        preset = shlex.quote(str(cfg.run.out_dir / "config.toml"))
        print(f"stopped and saved; continue with: python train.py {preset} --resume")
        return 128 + stopped_by
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
