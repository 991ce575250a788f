"""Program: what this code does on this machine, and how far that is from the limit.

`python bench.py` measures the machine, training, peak memory, sampling, tokenizing and start-up.
`--vs transformers` and `--vs-checkout DIR` let others take turns with it, step by step, on the same
weights and batches. Figures are medians of the rounds after a first one that is not counted.
`--full`: what only a GPU can show; `--scaling`: how cost grows; `--plan`: many GPUs, predicted.
"""

import contextlib
import copy
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import checkpoint
import config
import runtime
import sample
import train
from config import ModelConfig, OptimizerConfig, TrainConfig
from data import corpora, loader, prepare, tokenizer
from metrics import flops_per_token, mfu, n_params
from model import GPT
from optim import Optimizer
from run import alone_in, versions

ROOT = Path(__file__).parent
Part = Literal["memory", "training", "sampling", "tokenizing", "startup"]
SIZES = ("block_size", "n_layer", "n_head", "n_embd", "dropout")
HERE = "here"  # this code, among the contestants
LEARNING_RATE = 1e-4  # so low that differences in rounding stay small
PROMPT = 16  # tokens before the first sampled one
BACKWARD_SHARE = 2 / 3  # of a step: each product has two gradients, a product each
FULL_STEPS, FULL_WINDOWS = 300, 32  # of the pre- and post-LN runs of --full


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parts: tuple[Part, ...] = ("memory", "training", "sampling", "tokenizing", "startup")
    """What to measure, of all this."""
    vs: Literal["transformers"] | None = None
    """Let Hugging Face's GPT-2 take turns with ours."""
    vs_checkout: Path | None = None
    """Let the model.py of this folder, which has nanoGPT's interface, take turns with ours."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """GPT-2's 50,257 byte pairs, or the 256 bytes and an end mark."""
    micro_batch: int | None = None
    """Sequences per step; None: on a GPU what fits, at most 64, on a CPU 1,024 tokens."""
    repeats: int = 5
    """Rounds that count, of each measurement."""
    corpus_tokens: int = 1_000_000
    """Tokens of the standard library's source to prepare, which is timed, and to train on."""
    sample_tokens: int = 32
    """Tokens to sample behind a prompt of 16."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; auto: what the device has."""
    compile: Literal["auto", "true", "false"] = "auto"
    """torch.compile, for all contestants; auto: on a CUDA device."""
    out_dir: Path = Path("runs/bench")
    """Folder of bench.json, and of bench.png, scaling.csv and scaling.png where asked for."""
    plot: bool = False
    """Draw bench.png: how much of its limit everything reaches."""
    full: bool = False
    """The CUDA tests, a GPU's throughput, and 300 steps of pre- and of post-LN on it."""
    scaling: bool = False
    """Tokens/s over model size, sequence length and micro-batch."""
    plan: bool = False
    """Predict tokens/s of 1 to 64 GPUs from one GPU's."""
    tokens_per_s: float | None = None
    """Plan: training tokens/s of one GPU; None: measured here and now."""
    accumulation: int = 4
    """Plan: micro-batches per step and GPU; gradients are exchanged once a step."""
    gpus_per_node: int = 8
    """Plan: GPUs that share a machine."""
    node_gb_per_s: float = 450.0
    """Plan: GB/s a GPU sends within its machine (NVIDIA's H100 data sheet: NVLink, 2 x 450)."""
    network_gb_per_s: float = 50.0
    """Plan: GB/s a GPU sends to another machine (a 400 Gbit/s adapter each)."""
    overlap: float = 0.8
    """Plan: share of the last backward pass that can hide the exchange of all gradients but the
    tied embedding's, which is ready last."""

    @property
    def names(self) -> list[str]:
        """The contestants."""
        others = {"transformers": self.vs, "checkout": self.vs_checkout}
        return [HERE, *(name for name, wanted in others.items() if wanted)]

    def problems(self) -> list[str]:
        """Everything that keeps this from being measured, a sentence each."""
        found, m = self.model.problems(), self.model
        counts = ("repeats", "corpus_tokens", "sample_tokens", "accumulation", "gpus_per_node")
        speeds = ("node_gb_per_s", "network_gb_per_s", "tokens_per_s")
        for name in (*counts, "micro_batch", *speeds):
            least, value = (1e-6 if name in speeds else 1), getattr(self, name)
            if value is not None and not least <= value <= 1e15:
                found.append(f"{name} must be {least:g} to 1e15, got {value}")
        if self.out_dir == Path():
            found.append("out_dir must not be empty")
        if not 0 <= self.overlap <= 1:
            found.append(f"overlap must be between 0 and 1, got {self.overlap}")
        if not self.parts or len(set(self.parts)) < len(self.parts):
            found.append(f"parts must be at least one, each once, got {self.parts}")
        modes = [name for name in ("full", "scaling", "plan") if getattr(self, name)]
        if len(modes) > 1 or (modes and len(self.names) > 1):
            found.append(f"{', '.join(modes + self.names[1:])}: ask for one at a time")
        if len(self.names) > 1 and m != ModelConfig(**{k: getattr(m, k) for k in SIZES}):
            found.append(f"{self.names[1]} has no such variant of GPT-2: leave it or the variant")
        if "sampling" in self.parts and not modes and PROMPT + self.sample_tokens > m.block_size:
            room = m.block_size - PROMPT
            found.append(f"sample_tokens must be at most block_size - {PROMPT} = {room}")
        if self.plot and (self.scaling or self.plan):
            found.append("plot draws what a plain run measures: leave it out here")
        if self.scaling and m.block_size % 8:
            found.append(f"block_size must be a multiple of 8 for --scaling, got {m.block_size}")
        return found


@dataclass(frozen=True)
class Bench:
    """What the contestants share: settled options, the device, weights and tokens."""

    cfg: BenchConfig
    device: torch.device
    dtype: torch.dtype
    folder: Path

    @cached_property
    def batches(self) -> loader.Batches:
        tokens = loader.Tokens(self.folder / "tokens", "train", self.cfg.model.block_size)
        return loader.Batches(tokens, seed=0, rows_per_step=self.cfg.micro_batch)

    @cached_property
    def rates(self) -> dict[str, Callable[[int], float]]:
        """What measures the machine itself."""
        return {"products": product_rate(self.device, self.dtype), "reads": read_rate(self.device)}

    @cached_property
    def everyone(self) -> dict[str, "Contestant"]:
        return {name: enter(self, name) for name in self.cfg.names}


@dataclass(frozen=True)
class Contestant:
    """A program that trains: its loss of a batch, its update by the gradients that lie there, and
    sampler(model, batch), which makes what goes on with the likeliest n tokens of as many prompts
    (None: not asked to)."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], object]
    sampler: Callable[[Any, int], Callable[[list[list[int]], int], object]] | None = None


def figure(name: str, unit: str, samples: dict[str, list], limit: float | None = None) -> dict:
    """A quantity as bench.json has it: of each contestant median and quartiles over the rounds,
    `share` of what the machine allows (`limit`, in the same unit), and `ratio`: how many times as
    good ours is (of times and sizes less is better, of rates more), the median over the rounds."""
    of = {}
    for who, values in samples.items():
        cuts = statistics.quantiles(values, method="inclusive") if values[1:] else [*values] * 3
        of[who] = dict(zip(("q1", "median", "q3"), cuts or [None] * 3, strict=True))
        if limit:
            of[who]["share"] = of[who]["median"] / limit
        if who != HERE and values and HERE in samples:
            ratio = statistics.median(a / b for a, b in zip(samples[HERE], values, strict=True))
            of[who]["ratio"] = 1 / ratio if unit in ("s", "ms", "MB") else ratio
    return {"name": name, "unit": unit, "limit": limit, "of": of}


def mark(device: torch.device) -> Any:
    """A point in time; on CUDA in the device's own queue, so that nothing has to wait for it."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def between(start: Any, end: Any) -> float:
    """Seconds from one mark to another."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that work() takes."""
    start = mark(device)
    work()
    return between(start, mark(device))


def in_turns(rounds: int, work: dict[str, Callable[[int], Any]]) -> dict[str, list]:
    """Everyone's results, round by round, so that what else the machine does meets all alike. The
    first round does not count, and every other one goes backwards."""
    results = {name: [] for name in work}
    for n in range(rounds + 1):
        for name in list(work)[:: -1 if n % 2 else 1]:
            result = work[name](n)
            results[name] += [result] if n else []
    return results


def product_rate(device: torch.device, dtype: torch.dtype) -> Callable[[int], float]:
    """Measures FLOP/s of products of square matrices that are large enough to be fast."""
    n, generator = 8192 if device.type == "cuda" else 2048, torch.Generator().manual_seed(0)
    # Random: equal numbers need less power, with which a GPU may be faster than it ever is.
    a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
    return lambda _: 2 * n**3 / timed(device, lambda: a @ b)


def read_rate(device: torch.device) -> Callable[[int], float]:
    """Measures bytes/s of adding up a matrix that is larger than any cache. A sampled token reads
    all weights: no product does so faster."""
    n = 16384 if device.type == "cuda" else 8192
    matrix = torch.ones(n, n, device=device)
    return lambda _: matrix.nbytes / timed(device, matrix.sum)


def use(device: torch.device) -> None:
    """Make a process compute there as train.py does."""
    runtime.Processes().connect(device)
    runtime.allow_tf32(device)


def ours(bench: Bench) -> Contestant:
    """This code, as train.py and sample.py run it."""
    model = GPT(bench.cfg.model).to(bench.device)
    optimizer = Optimizer(model, OptimizerConfig())

    def update() -> None:
        optimizer.step(LEARNING_RATE)
        optimizer.zero_grad()

    def generate(model: GPT, products: runtime.OneDNN, prompts: list[list[int]], n: int) -> None:
        seeds, options = [0] * len(prompts), {"temperature": 0, "products": products}
        list(sample.generate(model, prompts, seeds, max_new_tokens=n, **options))

    def sampler(model: GPT, batch: int) -> Callable[[list[list[int]], int], object]:
        return partial(generate, model, runtime.OneDNN(model, batch))

    return Contestant(model, runtime.Loss(model), update, sampler)


def their_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Clip, update and forget the gradients, as their own training programs do."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def import_transformers() -> type:
    """GPT2LMHeadModel. ValueError, with the remedy, where the package is not installed."""
    try:
        from transformers import GPT2LMHeadModel, logging
    except ImportError:
        remedy = "`pip install -r requirements-dev.txt`"
        raise ValueError(f"--vs transformers: it is not installed: run {remedy}") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return GPT2LMHeadModel


def theirs(bench: Bench) -> Contestant:
    """transformers' GPT-2 with the optimizer and the clipping of its Trainer."""
    weights, o = bench.folder / "weights", OptimizerConfig()
    checkpoint.save(weights, GPT(bench.cfg.model), tokenizer.load(bench.cfg.tokenizer))
    model = import_transformers().from_pretrained(weights, dtype=torch.float32)
    model = model.to(bench.device).train()
    kinds = ([p for p in model.parameters() if (p.dim() < 2) == plain] for plain in (False, True))
    decays = (o.weight_decay, 0.0)
    groups = [{"params": p, "weight_decay": d} for p, d in zip(kinds, decays, strict=True)]
    adamw = torch.optim.AdamW(groups, LEARNING_RATE, (o.beta1, o.beta2), fused=True)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss

    def generate(model: torch.nn.Module, prompts: list[list[int]], n: int) -> None:
        ids = torch.tensor(prompts, device=bench.device)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)

    return Contestant(model, loss, their_update(model, adamw), lambda m, _: partial(generate, m))


def import_checkout(folder: Path) -> Any:
    """The model.py of a folder, as a module beside our own. ValueError if it can't be one."""
    path = folder / "model.py"
    if not path.is_file():
        raise ValueError(f"--vs-checkout {folder}: no model.py there; give a clone of nanoGPT")
    spec = importlib.util.spec_from_file_location("checkout_model", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever somebody's code may raise
        raise ValueError(f"{path} can't be imported ({type(error).__name__}: {error})") from error
    return module


def from_checkout(bench: Bench) -> Contestant:
    """A program with nanoGPT's interface, its weights ours where it has our names, its vocabulary
    padded as nanoGPT's is by default: that is faster, and adds a little to the loss."""
    module, m, o = import_checkout(bench.cfg.vs_checkout), bench.cfg.model, OptimizerConfig()
    options = {"weight_decay": o.weight_decay, "learning_rate": LEARNING_RATE}
    options |= {"betas": (o.beta1, o.beta2), "device_type": bench.device.type}
    shape = {k: getattr(m, k) for k in SIZES} | {"vocab_size": m.padded_vocab, "bias": True}
    try:
        model = module.GPT(module.GPTConfig(**shape)).to(bench.device).train()
        optimizer = model.configure_optimizers(**options)
        trial = torch.zeros(1, 2, dtype=torch.long, device=bench.device)
        model(trial, trial)[1].backward()
        optimizer.zero_grad(set_to_none=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever somebody's code may raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{module.__file__} lacks nanoGPT's interface ({reason})") from error
    mine = GPT(m).state_dict()
    mine["lm_head.weight"] = mine["wte.weight"]
    names = {checkpoint.PREFIXES.sub("", name): p for name, p in model.named_parameters()}
    if strangers := [n for n, p in names.items() if n not in mine or p.shape != mine[n].shape]:
        print(f"warning: checkout: {', '.join(strangers)} are not ours: losses will differ")
    with torch.no_grad():
        for name in names.keys() - strangers:
            names[name].copy_(mine[name])
    return Contestant(model, lambda x, y: model(x, y)[1], their_update(model, optimizer))


def enter(bench: Bench, name: str = HERE) -> Contestant:
    """A contestant, compiled where that is wanted, whoever it is."""
    one = {HERE: ours, "transformers": theirs, "checkout": from_checkout}[name](bench)
    if not runtime.wants_compile(bench.cfg.compile, bench.device):
        return one

    def trial(loss: Callable) -> None:
        timed_step(bench, replace(one, loss=loss), 0)

    return replace(one, loss=runtime.compiled(one.loss, trial, bench.cfg.compile))


def timed_step(bench: Bench, one: Contestant, step: int) -> dict[str, float]:
    """Train one step: the seconds of its phases and of the whole, and its loss."""
    device, marks = bench.device, [mark(bench.device)]
    pair = next(bench.batches.micro_batches(step, bench.cfg.micro_batch))
    x, y = (runtime.to_device(t, device) for t in pair)
    marks.append(mark(device))
    with runtime.autocast(device, bench.dtype):
        loss = one.loss(x, y)
    marks.append(mark(device))
    loss.backward()
    marks.append(mark(device))
    one.update()
    marks.append(mark(device))
    times = [between(a, b) for a, b in itertools.pairwise(marks)]
    phases = dict(zip(("data", "forward", "backward", "optimizer"), times, strict=True))
    return phases | {"step": between(marks[0], marks[-1]), "loss": loss.item()}


def training(bench: Bench) -> Iterator[dict]:
    """Steps in turn, and in every round a look at what the machine can do just then."""
    work = {name: partial(timed_step, bench, one) for name, one in bench.everyone.items()}
    rounds = in_turns(bench.cfg.repeats, work | {"machine": bench.rates["products"]})
    # The fastest round is the limit: what else the machine does can only slow it down.
    peak, model = max(rounds.pop("machine")), bench.everyone[HERE].model
    flops = flops_per_token(n_params(model)["without_positions"], model.config)
    tokens = bench.cfg.micro_batch * bench.cfg.model.block_size
    rates = {name: [tokens / r["step"] for r in rows] for name, rows in rounds.items()}
    yield figure("training", "tokens/s", rates, peak / flops)
    peaks = {"measured": peak, "data sheet's": runtime.peak_of(bench.device, bench.dtype)}
    for kind, peak in peaks.items():
        shares = {n: [100 * mfu(r, flops, peak) for r in v if peak] for n, v in rates.items()}
        yield figure(f"  MFU of the {kind} peak", "%", shares)
    for phase in ("forward", "backward", "optimizer", "data"):
        times = {name: [1e3 * r[phase] for r in rows] for name, rows in rounds.items()}
        yield figure(f"  {phase}", "ms", times)
    mine, apart = [r["loss"] for r in rounds.pop(HERE)], {}
    for name, rows in rounds.items():
        apart[name] = [max(abs(r["loss"] - m) for r, m in zip(rows, mine, strict=True))]
    if apart:
        yield figure("  largest difference in loss", "nats", apart)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has had so far; on CUDA, of the device's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).exists():
        # Not ru_maxrss: Linux hands a parent's down to the program that replaces its copy.
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"))[1])
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(bench: Bench, name: str) -> float:
    """MB that two training steps need at most, beyond what the imports do."""
    if name == "transformers":
        import_transformers()
    with contextlib.suppress(OSError):  # Linux: forget the imports' own peak
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    use(bench.device)
    before = peak_bytes(bench.device)
    one = enter(bench, name)
    for step in range(2):
        timed_step(bench, one, step)
    return (peak_bytes(bench.device) - before) / 1e6


def memory(bench: Bench) -> Iterator[dict]:
    """Of a new process each."""
    sizes, context = {}, multiprocessing.get_context("spawn")
    for name in bench.cfg.names:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            sizes[name] = [pool.submit(memory_of, replace(bench), name).result()]
    yield figure("peak memory of training", "MB", sizes)


def sampling(bench: Bench) -> Iterator[dict]:
    """Greedy sampling with a cache. Its limit: all weights but the positions' are read once per
    token, however many samples share them."""
    rounds, n, tokens = bench.cfg.repeats, bench.cfg.sample_tokens, bench.batches.tokens
    reads = max(in_turns(rounds, {HERE: bench.rates["reads"]})[HERE])
    model = bench.everyone[HERE].model
    n_weights = sum(p.numel() for p in model.parameters()) - model.wpe.weight.numel()
    for dtype, batch in itertools.product((torch.float32, torch.bfloat16), (1, 16)):
        prompts = tokens.read(np.arange(batch) % len(tokens))[0][:, :PROMPT].tolist()

        def rate(_: int, call: Callable, n_tokens: int = batch * n) -> float:
            return n_tokens / timed(bench.device, call)

        work = {}
        for name, one in bench.everyone.items():
            if one.sampler:
                copied = copy.deepcopy(one.model).to(dtype).eval()
                work[name] = partial(rate, call=partial(one.sampler(copied, batch), prompts, n))
        kind, limit = str(dtype).removeprefix("torch."), batch * reads / dtype.itemsize / n_weights
        speeds = in_turns(rounds, work)
        yield figure(f"sampling, batch {batch}, {kind}", "tokens/s", speeds, limit)


def prepare_tokens(bench: Bench, name: str) -> float:
    """The standard library's source to shards, in a new folder; tokens/s, files and all."""
    corpus, encoding = corpora.find("stdlib"), tokenizer.load(bench.cfg.tokenizer)
    limits = {"max_tokens": bench.cfg.corpus_tokens, "workers": os.cpu_count() or 1}
    start = time.perf_counter()
    meta = prepare.prepare(corpus, encoding, bench.folder / name, **limits)
    return sum(s["tokens"] for s in meta["shards"]) / (time.perf_counter() - start)


def tokenizing(bench: Bench) -> Iterator[dict]:
    rates = in_turns(bench.cfg.repeats, {HERE: lambda n: prepare_tokens(bench, f"tokens{n}")})
    yield figure("tokenizing", "tokens/s", rates)


def startup(bench: Bench) -> Iterator[dict]:
    """Whole processes."""
    one_step = ["train.py", "config/quickstart.toml", "--steps=1", "--eval-tokens=128"]
    one_step += ["--sample-tokens=0", f"--data-dir={bench.folder}", f"--out-dir={bench.folder}/run"]
    commands = {
        "import torch": ["-c", "import torch"],
        "train.py --help": ["train.py", "--help"],
        "sample.py --help": ["sample.py", "--help"],
        "quickstart, one step, validated and saved": one_step,
    }

    def seconds(n: int, name: str) -> float:
        shutil.rmtree(bench.folder / "run", ignore_errors=True)
        command, quiet = [sys.executable, *commands[name]], subprocess.DEVNULL
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, stdout=quiet, check=True)
        return time.perf_counter() - start

    work = {name: partial(seconds, name=name) for name in commands}
    for name, values in in_turns(bench.cfg.repeats, work).items():
        yield figure(f"start-up: {name}", "s", {HERE: values})


def largest_that_fits(attempt: Callable[[int], object], n: int = 64) -> int:
    """The largest of n, n / 2, n / 4, … 1 whose attempt does not run out of memory."""
    while n > 1:
        try:
            attempt(n)
            break
        except torch.OutOfMemoryError:
            n //= 2
        finally:
            torch.cuda.empty_cache()
    return n


def find_micro_batch(bench: Bench) -> int:
    if bench.device.type != "cuda":
        return max(1, 1024 // bench.cfg.model.block_size)

    def attempt(n: int) -> None:
        trial = replace(bench, cfg=replace(bench.cfg, micro_batch=n, compile="false"))
        timed_step(trial, enter(trial), 0)

    return largest_that_fits(attempt)


@contextlib.contextmanager
def opened(cfg: BenchConfig) -> Iterator[Bench]:
    """A temporary folder with tokens, and the options settled."""
    device = runtime.find_device(cfg.device)
    dtype, _ = runtime.find_dtype(cfg.dtype, device)
    use(device)
    shape = replace(cfg.model, vocab_size=tokenizer.load(cfg.tokenizer).n_vocab)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(replace(cfg, model=shape), device, dtype, Path(name))
        prepare_tokens(bench, "tokens")
        micro_batch = cfg.micro_batch or find_micro_batch(bench)
        yield replace(bench, cfg=replace(bench.cfg, micro_batch=micro_batch))


def machine(bench: Bench) -> dict:
    """What the figures depend on besides the options."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text(encoding="utf-8") if cpu.exists() else ""
    names = re.findall(r"model name\s*: (.+)", text) or [platform.processor()]
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else names[0]
    about = {"device": f"{bench.device.type}, {name}", "cores": os.cpu_count()}
    about |= {"threads": torch.get_num_threads(), "dtype": str(bench.dtype).removeprefix("torch.")}
    return about | versions()


def measure(cfg: BenchConfig) -> dict:
    """The machine, then all parts that were asked for."""
    with opened(cfg) as bench:
        seen = in_turns(cfg.repeats, bench.rates)
        giga = {name: {HERE: [v / 1e9 for v in seen[name]]} for name in seen}
        figures = [figure("matrix products", "GFLOP/s", giga["products"])]
        figures.append(figure("memory, read", "GB/s", giga["reads"]))
        # Memory first: this process may need all of it later.
        for part in (memory, training, sampling, tokenizing, startup):
            if part.__name__ in cfg.parts:
                print(f"measuring {part.__name__}", flush=True)
                figures += part(bench)
        return {"machine": machine(bench), "options": config.plain(bench.cfg), "figures": figures}


def full(cfg: BenchConfig) -> dict:
    """The CUDA tests, the throughput, both kinds of blocks trained."""
    if used := [name for name in ("pre", "post") if (cfg.out_dir / name).exists()]:
        raise ValueError(
            f"{cfg.out_dir} holds {' and '.join(used)} already: take another --out-dir"
        )
    tests = [sys.executable, "-m", "pytest", "-m", "cuda"]
    passed = subprocess.run(tests, cwd=ROOT).returncode == 0
    report = measure(replace(cfg, parts=("memory", "training", "sampling")))
    micro_batch = math.gcd(report["options"]["micro_batch"], FULL_WINDOWS)
    runs = both_norms(replace(cfg, micro_batch=micro_batch), FULL_STEPS)
    return report | {"cuda_tests": "passed" if passed else "failed", "runs": runs}


def both_norms(cfg: BenchConfig, steps: int) -> list[dict]:
    """Train with pre-LN and with post-LN blocks, in a folder each, on FineWeb where it is prepared
    and else on the standard library's bytes."""
    T, data_dir = cfg.model.block_size, config.DataConfig().data_dir
    fineweb = [prepare.folder_of(c, "gpt2", data_dir) for c in ("fineweb10B-gpt2", "fineweb_edu")]
    there = [folder.name.removesuffix("-gpt2") for folder in fineweb if loader.is_complete(folder)]
    data = {"corpus": there[0], "tokenizer": "gpt2"} if there else {"corpus": "stdlib"}
    chosen = {"tokenizer": "byte", "steps": steps, "batch_tokens": FULL_WINDOWS * T} | data
    chosen |= {"warmup_steps": 100, "eval_every": 100, "eval_tokens": 64 * T, "sample_tokens": 0}
    chosen |= {k: getattr(cfg, k) for k in ("micro_batch", "device", "dtype", "compile")}
    shared = [f"--{k}={v}" for k, v in (config.flat(cfg.model) | chosen).items()]
    rows = []
    for name, flag in (("pre", "--no-post-ln"), ("post", "--post-ln")):
        argv = [*shared, flag, f"--out-dir={cfg.out_dir / name}"]
        try:
            result = train.train(config.parse(TrainConfig, argv, prog="train.py", description=""))
        except train.Diverged as error:
            result = {"step": None, "val_loss": None, "diverged": str(error)}
        rows.append({"blocks": name, "corpus": chosen["corpus"]} | result)
    return rows


def grid(m: ModelConfig, micro_batch: int) -> Iterator[tuple[str, ModelConfig, int]]:
    """What --scaling measures: an axis, a model and a micro-batch. Quarters of depth and width with
    heads of one size; lengths with the same tokens per step; batches of the shortest length."""
    head = m.n_embd // m.n_head
    for k in (1, 2, 3, 4):
        heads, layers = max(1, m.n_head * k // 4), max(1, m.n_layer * k // 4)
        shape = replace(m, n_layer=layers, n_head=heads, n_embd=heads * head)
        yield "parameters", shape, micro_batch
    for k in (8, 4, 2, 1):
        yield "block_size", replace(m, block_size=m.block_size // k), micro_batch * k
    for k in (1, 2, 4, 8):
        yield "micro_batch", replace(m, block_size=m.block_size // 8), micro_batch * k


def scaling(cfg: BenchConfig) -> dict:
    """Training at every point of the grid, also as scaling.csv and scaling.png."""
    rows = []
    with opened(cfg) as bench:
        for axis, shape, n in dict.fromkeys(grid(bench.cfg.model, bench.cfg.micro_batch)):
            print(f"measuring {axis}", flush=True)
            point = replace(bench, cfg=replace(bench.cfg, model=shape, micro_batch=n))
            speed, model = next(training(point))["of"][HERE], point.everyone[HERE].model
            about = {"axis": axis, "parameters": n_params(model)["total"]}
            about |= {"block_size": shape.block_size, "micro_batch": n}
            rows.append(about | {"tokens_per_s": speed.pop("median")} | speed)
        report = {"machine": machine(bench), "options": config.plain(bench.cfg), "scaling": rows}
    lines = [",".join(map(str, line)) for line in (rows[0], *(row.values() for row in rows))]
    loader.replace_file(cfg.out_dir / "scaling.csv", "\n".join(lines) + "\n")
    draw_scaling(report, cfg.out_dir / "scaling.png")
    return report


def predicted(
    n: int,
    cfg: BenchConfig,
    *,
    tokens_per_s: float,
    gradient_bytes: int,
    late_bytes: int,
    backward_share: float,
) -> dict:
    """A step of n GPUs, each with the micro-batches that one has: what it takes longer is the part
    of the exchange that the last backward pass does not hide (Li et al. 2020, PyTorch Distributed):
    of the gradients that are ready last, late_bytes, all. In a ring each GPU sends and receives
    2 (n - 1) / n times the gradient (Patarasuk & Yuan 2009), at the pace of the slowest link."""
    micro_tokens = cfg.micro_batch * cfg.model.block_size
    alone = cfg.accumulation * micro_tokens / tokens_per_s
    gb_per_s = cfg.node_gb_per_s if n <= cfg.gpus_per_node else cfg.network_gb_per_s
    exchange = 2 * (n - 1) / n * gradient_bytes / (1e9 * gb_per_s)
    late = exchange * late_bytes / gradient_bytes
    hidden = cfg.overlap * backward_share * micro_tokens / tokens_per_s
    exposed = late + max(0.0, exchange - late - hidden)
    tokens = n * cfg.accumulation * micro_tokens
    row = {"gpus": n, "tokens_per_step": tokens, "tokens_per_s": tokens / (alone + exposed)}
    row |= {"efficiency": alone / (alone + exposed)}
    return row | {"exchange_ms": 1e3 * exchange, "exposed_ms": 1e3 * exposed}


def plan(cfg: BenchConfig) -> dict:
    """Predictions from a given speed of one GPU, or from the one measured now."""
    report, share, speed = {}, BACKWARD_SHARE, cfg.tokens_per_s
    if speed is None:
        report = measure(replace(cfg, parts=("training",)))
        cfg = replace(cfg, micro_batch=report["options"]["micro_batch"])
        of = {f["name"].strip(): f["of"][HERE]["median"] for f in report["figures"]}
        speed = of["training"]
        share = of["backward"] / 1e3 * speed / (cfg.micro_batch * cfg.model.block_size)
    cfg = replace(cfg, micro_batch=cfg.micro_batch or config.RunConfig().micro_batch)
    n_vocab = tokenizer.load(cfg.tokenizer).n_vocab
    with torch.device("meta"):
        model = GPT(replace(cfg.model, vocab_size=n_vocab))
    known = {"tokens_per_s": speed, "backward_share": share}
    known["gradient_bytes"] = sum(p.nbytes for p in model.parameters())
    known["late_bytes"] = model.wte.weight.nbytes  # tied: its first use comes last in backward
    rows = [predicted(2**k, cfg, **known) for k in range(7)]
    return report | {"options": config.plain(cfg), "known": known, "plan": rows}


def short(value: float | str | None) -> str:
    """A cell of a table."""
    if isinstance(value, str | None):
        return "n/a" if value is None else value
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def table_of(rows: list[dict]) -> str:
    """Rows as text: first column to the left, the others to the right."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([short(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [[c.rjust(w) for c, w in zip(l, widths, strict=True)] for l in lines]
    return "\n".join("  ".join([l[0].strip().ljust(widths[0]), *l[1:]]).rstrip() for l in aligned)


def figure_row(f: dict) -> dict:
    """Medians (quartiles), the limit and our share of it, and how many times as good ours is."""
    row = {"": f["name"], "unit": f["unit"], HERE: "", "limit": "", "of it": ""}
    for name, v in f["of"].items():
        spread = f" ({short(v['q1'])}–{short(v['q3'])})" if v["q1"] != v["q3"] else ""
        row[name] = short(v["median"]) + spread
        if name == HERE and f["limit"]:
            row |= {"limit": f["limit"], "of it": f"{v['share']:.0%}"}
        if "ratio" in v:
            row[f"to {name}"] = f"{v['ratio']:.2f} ×"
    return row


def report_text(report: dict) -> str:
    """What the terminal shows of a report."""
    lines = [", ".join(f"{k} {v}" for k, v in report.get("machine", {}).items())]
    if "cuda_tests" in report:
        lines.append(f"CUDA tests: {report['cuda_tests']}")
    if figures := report.get("figures"):
        about = (
            "{n_layer} layers of {n_embd}, {micro_batch} × {block_size} {tokenizer} tokens a step"
        )
        lines.append(about.format(**report["options"]) + "; medians (quartiles)")
        if any(len(f["of"]) > 1 for f in figures):
            lines.append("to X: times as good as X's; chunked losses do the head's backward early")
    tables = [map(figure_row, report.get("figures", []))]
    tables += [report.get(key, []) for key in ("scaling", "plan", "runs")]
    lines += [table_of(rows) for rows in map(list, tables) if rows]
    return "\n".join(lines).strip()


def draw_figures(report: dict, path: Path) -> None:
    """A bar for everything that has a limit, against it."""
    from matplotlib.figure import Figure

    bars = [(f, *pair) for f in report["figures"] if f["limit"] for pair in f["of"].items()]
    picture = Figure(figsize=(9, 1.2 + 0.32 * len(bars)), layout="constrained")
    axes, colours = picture.subplots(), {HERE: "#08519c", "transformers": "#e6550d"}
    for f, name, v in reversed(bars):
        label, colour = f"{f['name']}: {name}", colours.get(name, "#9ecae1")
        bar = axes.barh(label, 100 * v["share"], color=colour)
        axes.bar_label(bar, [f"{short(v['median'])} {f['unit']}"], padding=3)
    axes.axvline(100, color="black", lw=1)
    axes.margins(x=0.25)
    axes.set(xlabel="% of what the machine's matrix products, or its memory, allow")
    axes.set_title(report["machine"]["device"])
    picture.savefig(path, dpi=120)


def draw_scaling(report: dict, path: Path) -> None:
    """Tokens/s with their quartiles, along each axis."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 3.4), layout="constrained")
    axes_of = dict.fromkeys(row["axis"] for row in report["scaling"])
    for axes, axis in zip(picture.subplots(1, len(axes_of)), axes_of, strict=True):
        rows = [row for row in report["scaling"] if row["axis"] == axis]
        x, low, y, high = zip(
            *((r[axis], r["q1"], r["tokens_per_s"], r["q3"]) for r in rows), strict=True
        )
        axes.plot(x, y, marker="o", color="#08519c")
        axes.fill_between(x, low, high, color="#9ecae1")
        axes.set(xlabel=axis.replace("_", " "), ylabel="training, tokens/s", xscale="log", ylim=0)
        axes.set_xticks(x, [f"{n / 1e6:.3g}M" if n >= 1e6 else f"{n:,}" for n in x])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    picture.suptitle(report["machine"]["device"])
    picture.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    cfg = config.parse(BenchConfig, argv, prog="bench.py", description=__doc__, preset=False)
    if problems := cfg.problems():
        raise ValueError("\n  ".join(["this can't be measured:", *problems]))
    # What is not there is told at once, not after minutes.
    if cfg.vs:
        import_transformers()
    if cfg.vs_checkout:
        import_checkout(cfg.vs_checkout)
    if cfg.full and runtime.find_device(cfg.device).type != "cuda":
        raise ValueError("--full needs a CUDA device: leave it out where there is none")
    work = next((mode for mode in (full, scaling, plan) if getattr(cfg, mode.__name__)), measure)
    with alone_in(cfg.out_dir, "bench.py is running"):
        try:
            report = work(cfg)
        except runtime.CompileError as error:
            raise ValueError(str(error)) from None
        drawn = ["scaling.csv", "scaling.png"] if cfg.scaling else ["bench.png"] * cfg.plot
        loader.replace_file(cfg.out_dir / "bench.json", json.dumps(report, indent=1) + "\n")
        if cfg.plot:
            draw_figures(report, cfg.out_dir / "bench.png")
    print(f"{report_text(report)}\nwrote {', '.join(['bench.json', *drawn])} into {cfg.out_dir}")
    return int(report.get("cuda_tests") == "failed")


if __name__ == "__main__":
    sys.exit(config.run_program(main))
