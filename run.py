"""A run before its first step: its folder claimed, tokens, model, optimizer and loss made ready."""

import contextlib
import importlib.metadata
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import filelock
import tiktoken
import torch
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import config
import evaluate
import runtime
from config import TrainConfig
from data import loader, prepare, tokenizer
from metrics import RunLog, flops_per_token, n_params
from model import GPT
from optim import Optimizer, lr_at

# What a resumed run must share with the saved one, and what it may change without a word.
SHAPE = ("n_layer", "n_head", "n_embd", "post_ln", "final_norm", "norm")
FIXED = {*SHAPE, "block_size", "tokenizer", "optimizer", "batch_tokens"}
QUIET = {"out_dir", "data_dir", "micro_batch", "log_every", "eval_every", "keep", "verify_data"}
QUIET |= {"save_every", "device", "dtype", "compile", "attention", "wandb", "sample_tokens"}
QUIET |= {"resume", "init_from", "branch_init", "init_std"}


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

    @property
    def accumulation(self) -> int:
        """Micro-batches per step and process."""
        return self.batches.share // self.cfg.run.micro_batch

    @property
    def flops(self) -> int:
        """Floating-point operations per token."""
        return flops_per_token(n_params(self.model)["without_positions"], self.model.config)


@contextlib.contextmanager
def alone_in(out_dir: Path, other: str) -> Iterator[None]:
    """Hold a folder, which is made if need be. ValueError if it can't be written in, or if another
    process has it; `other` tells what that does."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(out_dir / ".lock").acquire(timeout=0)
    except filelock.Timeout:
        raise ValueError(f"another {other} in {out_dir}: let it end first") from None
    except OSError as error:
        raise ValueError(f"{out_dir}: {error.strerror}: take another --out-dir") from None
    with held:
        yield


@contextlib.contextmanager
def claimed(cfg: TrainConfig, processes: runtime.Processes) -> Iterator[None]:
    """Hold the run's folder. ValueError if it is used already, or not there to be resumed."""
    if not processes.first:
        yield
        return
    out_dir = cfg.run.out_dir
    new = not out_dir.exists()
    with alone_in(out_dir, "process is training"):
        try:
            check_folder(out_dir, cfg.run.resume)
            yield
        finally:
            if new and [p.name for p in out_dir.iterdir()] == [".lock"]:
                shutil.rmtree(out_dir)  # a start that failed leaves nothing behind


def check_folder(out_dir: Path, resume: bool) -> None:
    """ValueError for a used folder without `resume`, or an unused one with it."""
    files = ("config.toml", "metrics.jsonl", "checkpoints.json")
    used = [name for name in files if (out_dir / name).exists()] + checkpoint.saved_in(out_dir)
    if used and not resume:
        command = f"python train.py {shlex.quote(str(out_dir / 'config.toml'))} --resume"
        raise ValueError(
            f"{out_dir} holds a run already ({', '.join(used)}): continue it with `{command}`, or "
            "take another --out-dir"
        )
    if resume and not used:
        raise ValueError(f"there is no run in {out_dir} to resume: start it without --resume")


def set_up(cfg: TrainConfig, processes: runtime.Processes, device: torch.device) -> Run:
    """Tokens, model and optimizer, new or as the last checkpoint has them."""
    r = cfg.run
    dtype, _ = runtime.find_dtype(r.dtype, device)
    record = checkpoint.read_record(r.out_dir)
    saved = checkpoint.saved_in(r.out_dir)
    if r.resume and saved and not record["last"]:
        record["last"] = saved[-1]  # a folder is whole by its name, whatever became of the record
        processes.say(f"warning: no checkpoints.json: resuming from the newest, {saved[-1]}")
    resumed = checkpoint.load(str(r.out_dir / record["last"])) if record["last"] else None
    if resumed:
        state = checkpoint.load_optimizer(resumed.folder)
        changed = compare_options(cfg, resumed, processes)
    source = resumed or (checkpoint.load(r.init_from) if r.init_from else None)
    folder = processes.first_does(lambda: find_tokens(cfg, device))
    # A resumed run's shape was compared already, and stays written as it was.
    model, encoding, cfg = build_model(cfg, source, () if resumed else SHAPE)
    loader.check_tokenizer(folder, tokenizer.identity(encoding))
    if cfg.data.verify_data:
        loader.verify(folder)
    meta = loader.read_meta(folder)
    data = {"folder": folder.name, "id": loader.data_id(meta), **loader.identity_of(meta)}
    if resumed:
        different = loader.difference(resumed.training["data"], data)
        if different:
            processes.say(f"warning: different data: {folder} is not what this run was trained on")
        if different or "eval_tokens" in changed:
            record |= {"best": None, "best_val_loss": None}
            processes.say("warning: other validation text: the best loss so far no longer counts")
    T = model.config.block_size
    model = model.to(device)
    optimizer = Optimizer(model, cfg.optimizer, float16=dtype == torch.float16)
    windows, validation = (loader.Tokens(folder, split, T) for split in ("train", "val"))
    place = {"rank": processes.rank, "world_size": processes.world_size}
    batches = loader.Batches(windows, seed=r.seed, rows_per_step=r.batch_tokens // T, **place)
    # The list of validation windows must not depend on how far a preparation has come.
    validation.wait_for(r.eval_tokens // T)
    run = Run(cfg, processes, dtype, model, encoding, optimizer, batches, validation, data, record)
    if resumed:
        run.optimizer.load_state(state)
        run.step = resumed.training["step"]
    return run


def find_tokens(cfg: TrainConfig, device: torch.device) -> Path:
    """The prepared folder. Where it needs a download, ValueError tells what the run needs, too."""
    try:
        return prepare.ensure(cfg.data.corpus, cfg.data.tokenizer, cfg.data.data_dir)
    except prepare.NeedsDownload as error:
        if device.type != "cpu":
            raise
        with torch.device("meta"):
            vocab_size = 257 if cfg.data.tokenizer == "byte" else 50257
            n = n_params(GPT(replace(cfg.model, vocab_size=vocab_size)))
        tokens = cfg.run.steps * cfg.run.batch_tokens
        days = tokens * flops_per_token(n["without_positions"], cfg.model) / 1e11 / 86400
        raise ValueError(
            f"{error}\nThis run has {n['total'] / 1e6:,.0f}M parameters and {tokens / 1e9:,.2f}B "
            f"tokens, and no GPU here: about {days:,.0f} days at 100 GFLOP/s"
        ) from None


def build_model(
    cfg: TrainConfig, source: checkpoint.Checkpoint | None, taken: tuple[str, ...] = SHAPE
) -> tuple[GPT, tiktoken.Encoding, TrainConfig]:
    """The model, its tokenizer, and cfg with the options `taken` over from the source."""
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
    # Of a longer context the first positions stay, without the memory of the others.
    positions = model.wpe.weight[: cfg.model.block_size].detach().clone()
    model.wpe = torch.nn.Embedding.from_pretrained(positions, freeze=False)
    shape = {name: getattr(theirs, name) for name in ("vocab_size", *taken)}
    model.config = replace(cfg.model, **shape)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = cfg.model.dropout
    return model, source.encoding, replace(cfg, model=model.config)


def compare_options(
    cfg: TrainConfig, resumed: checkpoint.Checkpoint, processes: runtime.Processes
) -> list[str]:
    """The options that changed, of those that matter: a line tells them. ValueError for changes
    that the saved state can't follow."""
    before, now = resumed.training["config"], config.flat(cfg)
    changed = sorted(k for k in now if k not in QUIET and str(now[k]) != str(before.get(k)))
    notes = {k: f"{k} was {before.get(k)}, is {now[k]}" for k in changed}
    if fixed := [notes[k] for k in notes if k in FIXED]:
        raise ValueError(
            f"{resumed.folder} can't be resumed with other options: {'; '.join(fixed)}. "
            f"Its own are in {cfg.run.out_dir / 'config.toml'}"
        )
    if notes:
        processes.say(f"warning: resumed with changes: {'; '.join(notes.values())}")
    return changed


def prepare_loss(run: Run) -> float:
    """Set run.fast and run.loss after a trial, which changes nothing; seconds of a micro-batch."""
    batch = next(run.batches.micro_batches(run.step, run.cfg.run.micro_batch))
    x, y = (t.to(run.device) for t in batch)
    runtime.allow_tf32(run.device)

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
    run.processes.say(f"trying one micro-batch of {len(x)} × {x.size(1)} tokens on {run.device}")
    try:
        if runtime.wants_compile(run.cfg.run.compile, run.device):
            run.fast = run.loss = runtime.compiled(run.loss, trial, run.cfg.run.compile)
        trial(run.fast)
        seconds = trial(run.fast)
    except torch.OutOfMemoryError:
        n = n_params(run.model)["total"]
        raise ValueError(
            f"out of memory on {run.device}: weights, gradients and optimizer need "
            f"{16 * n / 1e9:.1f} GB, the rest grows with micro_batch × block_size = "
            f"{len(x)} × {x.size(1)}: lower --micro-batch (the result stays the same)"
        ) from None
    if run.processes.world_size > 1:
        ids = [run.device.index] if run.device.type == "cuda" else None
        run.loss = DistributedDataParallel(run.fast, device_ids=ids, gradient_as_bucket_view=True)
    return seconds


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "tiktoken")}
    return {"python": platform.python_version(), **packages}


def start_log(run: Run, seconds: float) -> RunLog:
    """Write the resolved config, open the log, and say once what will be done; `seconds`: of a
    micro-batch."""
    r = run.cfg.run
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else run.device.type
    start = {
        "kind": "start",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "device": name,
        "dtype": str(run.dtype),
        "processes": run.processes.world_size,
        "parameters": n_params(run.model),
        "data": run.data,
    }
    log = RunLog(
        r.out_dir,
        start,
        r.steps,
        active=run.processes.first,
        resume_step=run.step if r.resume else None,
        wandb_mode=r.wandb,
        options=config.plain(run.cfg),
    )
    if run.processes.first:
        loader.replace_file(r.out_dir / "config.toml", config.to_toml(run.cfg))
    for line in describe(run, name, seconds):
        log.say(line)
    return log


def describe(run: Run, device_name: str, seconds: float) -> Iterator[str]:
    """What a person wants to know before a run."""
    r, o, T, n = run.cfg.run, run.optimizer, run.model.config.block_size, n_params(run.model)
    _, why = runtime.find_dtype(r.dtype, run.device)
    compiled = "not compiled" if isinstance(run.fast, runtime.Loss) else "compiled"
    yield f"device     {device_name}, {run.dtype} ({why}), {compiled}"
    yield (
        f"model      {'post' if run.model.config.post_ln else 'pre'}-LN, {n['total']:,} parameters "
        f"(the tied head counted once), {n['without_positions']:,} without positions, "
        f"{n['without_embeddings']:,} without embeddings; norms {n['norms']:,} "
        f"({n['norms'] / n['total']:.2%})"
    )
    sizes = {k: sum(p.numel() for p in group.values()) for k, group in o.groups.items() if group}
    padding = run.model.wte.weight[run.model.config.vocab_size :].numel()
    sizes["decayed" if run.cfg.optimizer.decay_embeddings else "plain"] -= padding
    groups = ", ".join(f"{k} {size:,} in {len(o.groups[k])} tensors" for k, size in sizes.items())
    yield f"optimizer  {run.cfg.optimizer.optimizer}, fused; {groups}"
    if run.cfg.optimizer.warmup_steps > r.steps:
        highest = lr_at(r.steps - 1, run.cfg.optimizer, r.steps)
        yield f"warning: warm-up is longer than the run: the learning rate ends at {highest:.2e}"
    if o.muon and run.device.type == "cpu":
        yield "warning: torch's Muon works in bfloat16, which is very slow on a CPU without it"
    yield (
        f"step       {r.batch_tokens:,} tokens = {run.processes.world_size} process(es) × "
        f"{run.accumulation} micro-batches × {r.micro_batch} windows of {T}"
    )
    tokens, used = len(run.batches.tokens) * T, run.windows * T
    yield (
        f"data       {run.data['folder']} (id {run.data['id'][:12]}): {tokens:,} training tokens, "
        f"{used:,} of {len(run.validation) * T:,} validation tokens"
    )
    epochs, left = r.steps * r.batch_tokens / tokens, (r.steps - run.step) * run.accumulation
    yield (
        f"run        steps {run.step} to {r.steps}, {epochs:.1f} epochs, about "
        f"{left * seconds / 60:.1f} minutes and the validations, into {r.out_dir}"
    )
