"""What a run tells: metrics.jsonl, loss.png, the terminal, and Weights & Biases if asked."""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from data.loader import replace_file
from model import GPT, GPTConfig
from runtime import Processes


def n_params(model: GPT) -> dict[str, int]:
    """Parameters, the tied head counted once and the vocabulary's padding not at all."""
    V, wte, wpe = model.config.vocab_size, model.wte.weight, model.wpe.weight
    total = sum(p.numel() for p in model.parameters()) - wte[V:].numel()
    return {
        "total": total,
        "without_positions": total - wpe.numel(),
        "without_embeddings": total - wpe.numel() - wte[:V].numel(),
        "norms": sum(p.numel() for name, p in model.named_parameters() if "ln_" in name),
    }


def flops_per_token(without_positions: int, config: GPTConfig) -> int:
    """Floating-point operations to train on one token, forward and backward: 6 N + 12 L C T, N the
    parameters without positions (Chowdhery et al. 2022, PaLM, appendix B)."""
    return 6 * without_positions + 12 * config.n_layer * config.n_embd * config.block_size


def mfu(tokens_per_s: float, flops: int, peak: float | None) -> float | None:
    """Model FLOP/s as a fraction of the hardware's peak; None where that is not known."""
    return tokens_per_s * flops / peak if peak else None


class Stopwatch:
    """Seconds of training since the last lap: what `paused` encloses does not count."""

    def __init__(self):
        self.start = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self.start = now - self.start, now
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.start += time.perf_counter() - before


class Meter:
    """Turns the steps' losses and gradient norms, which lie on the device, into records: those of
    many steps at once, since each look at the device makes it wait."""

    def __init__(self, *, batch_tokens: int, flops: int, peak: float | None, processes: Processes):
        self.batch_tokens, self.flops, self.processes = batch_tokens, flops, processes
        self.peak = peak * processes.world_size if peak else None
        self.pending: list[tuple[float, torch.Tensor, torch.Tensor]] = []
        self.watch = Stopwatch()
        self.bad_in_a_row = 0

    def add(self, lr: float, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """A step: its learning rate, this process's mean loss, and the gradient norm."""
        self.pending.append((lr, loss, norm))

    def settle(self, step: int, stop: bool = False) -> tuple[list[dict], bool]:
        """The records of all steps added, up to `step`, and whether any process wants to stop.
        Losses are means over all processes. `bad_in_a_row`: steps without a finite gradient."""
        rates, losses, norms = zip(*self.pending, strict=True)
        wish = torch.tensor([float(stop)], device=losses[0].device)
        sums = self.processes.sum(torch.cat([torch.stack([*losses, *norms]), wish]))
        *means, wish = (sums / self.processes.world_size).tolist()
        n = len(self.pending)
        speed = n * self.batch_tokens / self.watch.lap()
        self.pending.clear()
        records = []
        for i, (lr, loss, norm) in enumerate(zip(rates, means[:n], means[n:], strict=True)):
            self.bad_in_a_row = 0 if math.isfinite(norm) else self.bad_in_a_row + 1
            at = step - n + i + 1
            records.append(
                {"kind": "train", "step": at, "tokens": at * self.batch_tokens, "loss": loss}
                | {"lr": lr, "grad_norm": norm, "tokens_per_s": speed}
                | {"mfu": mfu(speed, self.flops, self.peak)}
            )
        return records, wish > 0


def read_records(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a kill may have left the last line incomplete. ValueError,
    with the number, for any other line that is no record."""
    records, lines = [], path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            # Not what a run wrote: rather ask than drop somebody's measurements.
            keys = {"train": ("step", "loss"), "eval": ("step", "val_loss")}.get(record["kind"], ())
            if any(key not in record for key in keys) or type(record.get("step", 0)) is not int:
                raise ValueError("it lacks something")
            records.append(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"line {number} of {path} is no record ({error}): mend or remove that line"
                ) from None
    return records


class RunLog:
    """The records of one run. On a terminal a bar shows where it stands, elsewhere plain lines do.

    `active`: False in all processes but the first, where nothing is written or shown.
    `resume_step`: continue an existing metrics.jsonl from there; what it has of later steps, which
    will be trained again, is dropped. ValueError if Weights & Biases can't start."""

    def __init__(
        self,
        out_dir: Path,
        start: dict,
        steps: int,
        *,
        active: bool = True,
        resume_step: int | None = None,
        wandb_mode: str = "disabled",
        options: dict | None = None,
    ):
        self.path, self.steps, self.active = out_dir / "metrics.jsonl", steps, active
        self.records, self.wandb, self.bar = [], None, None
        if not active:
            return
        if resume_step is not None and self.path.exists():
            old = read_records(self.path)
            self.records = [r for r in old if r.get("step", 0) <= resume_step]
            start = start | {"kind": "resume", "step": resume_step}
        self.records.append(start)
        if wandb_mode != "disabled":
            self.wandb = _start_wandb(out_dir, wandb_mode, options)
        replace_file(self.path, "".join(json.dumps(r) + "\n" for r in self.records))
        self.bar = tqdm(total=steps, initial=resume_step or 0, unit="step", disable=None)

    def train(self, records: list[dict]) -> None:
        """Steps, whose last one is shown."""
        if self.active:
            self._add(records)
            self._show(records[-1])

    def validation(self, step: int, val_loss: float) -> None:
        if self.active:
            self._add([{"kind": "eval", "step": step, "val_loss": val_loss}])
            self.say(f"step {step:>6}/{self.steps}  validation loss {val_loss:.4f}")
            self._plot()

    def _add(self, records: list[dict]) -> None:
        # JSON has no NaN: what is not finite becomes null.
        records = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()}
            for r in records
        ]
        self.records += records
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(r) + "\n" for r in records)
        for record in records if self.wandb else ():
            self.wandb.log({k: v for k, v in record.items() if k != "kind"}, step=record["step"])

    def say(self, text: str) -> None:
        """A line, above the bar where there is one. Nobody reading any more does not end a run."""
        if self.active:
            try:
                tqdm.write(text)
                sys.stdout.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _show(self, row: dict) -> None:
        """A step on the bar, or as a line."""
        rate = f"{row['tokens_per_s']:,.0f} tokens/s"
        share = f"MFU {row['mfu']:.1%}" if row["mfu"] is not None else "MFU n/a"
        if not self.bar.disable:
            self.bar.set_postfix_str(f"loss {row['loss']:.3f}, {rate}, {share}")
            self.bar.update(row["step"] - self.bar.n)
            return
        self.say(
            f"step {row['step']:>6}/{self.steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"|g| {row['grad_norm']:.2f}  {rate}  {share}"
        )

    def _plot(self) -> None:
        """Redraw loss.png from all records."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.subplots()
        styles = {"train": ("loss", "#9ecae1", 1.0, ""), "eval": ("val_loss", "#08519c", 2.0, "o")}
        for kind, (key, colour, width, marker) in styles.items():
            mine = [r for r in self.records if r["kind"] == kind]
            points = [(r["step"], r[key]) for r in mine if r[key] is not None]
            if points:
                x, y = zip(*points, strict=True)
                label = "training" if kind == "train" else f"validation: {y[-1]:.4f} at the end"
                axes.plot(x, y, color=colour, lw=width, marker=marker, ms=3, label=label)
        axes.set(xlabel="step", ylabel="loss (nats per token)", title=self.path.parent.name)
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        partial = self.path.with_name("loss.tmp.png")
        figure.savefig(partial, dpi=120)
        os.replace(partial, self.path.with_name("loss.png"))

    def close(self) -> None:
        if self.bar:
            self.bar.close()
        if self.wandb:
            self.wandb.finish()


def _start_wandb(out_dir: Path, mode: str, options: dict | None):
    """A Weights & Biases run, or the continuation of the one whose id the run's folder keeps."""
    import wandb

    note = out_dir / "wandb_id.txt"
    try:
        run = wandb.init(
            project="gpt2",
            name=out_dir.name,
            id=note.read_text(encoding="utf-8") if note.exists() else None,
            resume="allow" if mode == "online" else None,
            dir=out_dir,
            mode=mode,
            config=options,
        )
    except wandb.errors.Error as error:
        raise ValueError(
            f"Weights & Biases could not start ({error}): run `wandb login`, "
            "or take --wandb offline or disabled"
        ) from None
    replace_file(note, run.id)
    return run
