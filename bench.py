"""Program: what this code does on this machine, and how far that is from the limit.

`python bench.py` measures the machine, then training, peak memory, sampling, tokenizing and start-up;
`--vs transformers` and `--vs-checkout DIR` let another program take turns with it, step by step, on
the same weights and batches. Figures are medians of such rounds after one that is not counted.
`--full`: what only a GPU can show; `--scaling`: how cost grows; `--plan`: many GPUs, predicted.
"""

import contextlib
import copy
import csv
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

import torch

import checkpoint
import config
import runtime
import sample
import train
from config import ModelConfig, OptimizerConfig, TrainConfig
from data import corpora, loader, prepare, tokenizer
from metrics import flops_per_token, mfu
from model import GPT
from optim import Optimizer
from run import versions

ROOT = Path(__file__).parent
Part = Literal["training", "memory", "sampling", "tokenizing", "startup"]
HERE = "here"  # this code, among the contestants
LEARNING_RATE = 1e-4  # so low that differences in rounding stay small
PROMPT, BATCHES = 16, (1, 16)  # sampling: tokens before the first drawn one; samples at a time
BACKWARD_SHARE = 2 / 3  # of a step: a product needs one more for each of its two gradients
FULL_STEPS, FULL_WINDOWS = 300, 32  # the pre- and post-LN runs of --full


@dataclass(frozen=True)
class BenchConfig:
    """What to measure."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parts: tuple[Part, ...] = ("training", "memory", "sampling", "tokenizing", "startup")
    """What to measure, of all this."""
    vs: Literal["transformers"] | None = None
    """Let Hugging Face's GPT-2 take turns with ours."""
    vs_checkout: Path | None = None
    """Let the model.py of this folder, which has nanoGPT's interface, take turns with ours."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """GPT-2's 50,257 byte pairs, or the 256 bytes and an end mark."""
    micro_batch: int | None = None
    """Sequences per step; None: what fits on a GPU, at most 64, and 1,024 tokens on a CPU."""
    repeats: int = 5
    """Rounds that are counted, of each measurement."""
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
    """Plan: training tokens/s of one GPU; None: measured now, here."""
    accumulation: int = 4
    """Plan: micro-batches per step and GPU; gradients are exchanged once a step."""
    gpus_per_node: int = 8
    """Plan: GPUs that share a machine."""
    node_gb_per_s: float = 450.0
    """Plan: GB/s that a GPU sends within its machine (NVIDIA H100's data sheet: NVLink, 900 both
    ways)."""
    network_gb_per_s: float = 50.0
    """Plan: GB/s that a GPU sends to another machine (a 400 Gbit/s adapter for each)."""
    overlap: float = 0.8
    """Plan: share of the last backward pass during which gradients travel already; the tied
    embedding's, which is ready last, can't."""

    @property
    def names(self) -> list[str]:
        """The contestants."""
        others = {"transformers": self.vs, "checkout": self.vs_checkout}
        return [HERE, *(name for name, wanted in others.items() if wanted)]

    def problems(self) -> list[str]:
        """Everything that keeps this from being measured, a sentence each."""
        found, T = self.model.problems(), self.model.block_size
        sizes = ("repeats", "corpus_tokens", "sample_tokens", "accumulation", "gpus_per_node")
        for name in (*sizes, *(["micro_batch"] if self.micro_batch is not None else [])):
            if getattr(self, name) < 1:
                found.append(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("node_gb_per_s", "network_gb_per_s", "tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                found.append(f"{name} must be a positive number, got {value}")
        if not 0 <= self.overlap <= 1:
            found.append(f"overlap must be between 0 and 1, got {self.overlap}")
        modes = [name for name in ("full", "scaling", "plan") if getattr(self, name)]
        if len(modes) > 1:
            found.append(f"{' and '.join(modes)} exclude each other: ask for one at a time")
        if modes and len(self.names) > 1:
            found.append(f"{modes[0]} measures this code alone: leave {' and '.join(self.names)}")
        if "sampling" in self.parts and not modes and PROMPT + self.sample_tokens > T:
            found.append(f"sample_tokens must be at most {T} - {PROMPT}, got {self.sample_tokens}")
        if self.scaling and T % 8:
            found.append(f"block_size must be a multiple of 8 to be scaled, got {T}")
        return found


@dataclass(frozen=True)
class Bench:
    """What the contestants share: options that are settled, device, weights and tokens."""

    cfg: BenchConfig
    device: torch.device
    dtype: torch.dtype
    folder: Path

    @cached_property
    def batches(self) -> loader.Batches:
        tokens = loader.Tokens(self.folder / "tokens", "train", self.cfg.model.block_size)
        return loader.Batches(tokens, seed=0, rows_per_step=self.cfg.micro_batch)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, on the device."""
        pair = next(self.batches.micro_batches(step, self.cfg.micro_batch))
        x, y = (runtime.to_device(t, self.device) for t in pair)
        return x, y


@dataclass
class Contestant:
    """A program that trains: its loss of a batch, and its update by the gradients that lie there.
    `generate(model, prompts, n)` appends the likeliest n tokens to each prompt; None: it is not
    asked to."""

    model: torch.nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], object]
    generate: Callable[[torch.nn.Module, list[list[int]], int], object] | None = None


@dataclass(frozen=True)
class Figure:
    """What was measured, round by round, of each contestant. `limit`: what the machine allows, in
    the same unit. Of times and sizes less is better, of rates more."""

    name: str
    unit: str
    samples: dict[str, list[float]]
    limit: float | None = None

    def record(self) -> dict:
        """Medians and quartiles; `share` of the limit; `ratio`: how many times as good ours is, the
        median over the rounds."""
        ours, of = self.samples.get(HERE), {}
        for name, values in self.samples.items():
            of[name] = dict(zip(("q1", "median", "q3"), quartiles(values), strict=True))
            if self.limit:
                of[name]["share"] = of[name]["median"] / self.limit
            if ours and name != HERE:
                ratios = [a / b for a, b in zip(ours, values, strict=True)]
                less_is_better = self.unit in ("s", "ms", "MB")
                of[name]["ratio"] = statistics.median(
                    1 / r if less_is_better else r for r in ratios
                )
        return {"name": self.name, "unit": self.unit, "limit": self.limit, "of": of}


def quartiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """First quartile, median, third quartile; None each where nothing could be measured."""
    if len(values) < 2:
        return (values[0],) * 3 if values else (None,) * 3
    return tuple(statistics.quantiles(values, method="inclusive"))


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
    """Seconds from one mark to the other."""
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
    """Everyone's results, round by round: what else the machine does then meets all alike. The
    first round is not counted, and every other one goes backwards."""
    results = {name: [] for name in work}
    for n in range(rounds + 1):
        for name in list(work)[:: -1 if n % 2 else 1]:
            result = work[name](n)
            results[name] += [result] if n else []
    return results


def product_rate(device: torch.device, dtype: torch.dtype) -> Callable[[int], float]:
    """Measures FLOP/s of the product of two square matrices that are large enough to be fast."""
    n = 8192 if device.type == "cuda" else 2048
    generator = torch.Generator().manual_seed(0)
    # Random numbers: equal ones need less power, and a GPU may then run faster than it ever could.
    a, b = (torch.randn(n, n, generator=generator).to(device, dtype) for _ in range(2))
    return lambda _: 2 * n**3 / timed(device, lambda: a @ b)


def read_rate(device: torch.device) -> Callable[[int], float]:
    """Measures bytes/s that a product of a matrix and a vector reads, which is what a sampled token
    is made of; the matrix is larger than any cache."""
    n = 16384 if device.type == "cuda" else 8192
    matrix, vector = torch.ones(n, n, device=device), torch.ones(n, device=device)
    return lambda _: matrix.nbytes / timed(device, lambda: matrix @ vector)


def ours(model: GPT) -> Contestant:
    """This code, as train.py and sample.py run it."""
    optimizer = Optimizer(model, OptimizerConfig())

    def update() -> None:
        optimizer.step(LEARNING_RATE)
        optimizer.zero_grad()

    def generate(model: GPT, prompts: list[list[int]], n: int) -> None:
        seeds = [0] * len(prompts)
        list(sample.generate(model, prompts, seeds, max_new_tokens=n, temperature=0))

    return Contestant(model, runtime.Loss(model), update, generate)


def their_update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    """Clip, update and forget the gradients, as their own training programs do."""

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def import_transformers() -> Any:
    """ValueError, with the remedy, where it is not installed."""
    try:
        import transformers
        from transformers import AutoTokenizer, GPT2LMHeadModel  # noqa: F401  they load when named
    except ImportError:
        raise ValueError(
            "--vs transformers: that package is not installed: run `pip install -r "
            "requirements-dev.txt`"
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers


def theirs(bench: Bench) -> Contestant:
    """transformers' GPT-2 with the optimizer and the clipping of its Trainer."""
    load = import_transformers().GPT2LMHeadModel.from_pretrained
    model = load(bench.folder / "weights", dtype=torch.float32).to(bench.device).train()
    o, p = OptimizerConfig(), list(model.parameters())
    groups = [
        {"params": [q for q in p if q.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [q for q in p if q.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, LEARNING_RATE, (o.beta1, o.beta2), fused=True)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss

    def generate(model: torch.nn.Module, prompts: list[list[int]], n: int) -> None:
        ids = torch.tensor(prompts, device=bench.device)
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)

    return Contestant(model, loss, their_update(model, adamw), generate)


def import_checkout(folder: Path) -> Any:
    """The model.py of a folder as a module of its own. ValueError if it can't be imported."""
    path = folder / "model.py"
    if not path.is_file():
        raise ValueError(f"--vs-checkout {folder}: there is no model.py; give nanoGPT's folder")
    spec = importlib.util.spec_from_file_location("checkout_model", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever somebody's code may raise
        raise ValueError(f"{path} can't be imported ({type(error).__name__}: {error})") from error
    if missing := [name for name in ("GPT", "GPTConfig") if not hasattr(module, name)]:
        raise ValueError(f"{path} has no {' and no '.join(missing)}, which nanoGPT's model.py has")
    return module


def from_checkout(bench: Bench) -> Contestant:
    """A program with nanoGPT's interface, with our weights where it has our names and shapes, and
    the padded vocabulary that nanoGPT has by default: it is faster with it."""
    module, m, o = import_checkout(bench.cfg.vs_checkout), bench.cfg.model, OptimizerConfig()
    shape = {k: getattr(m, k) for k in ("block_size", "n_layer", "n_head", "n_embd", "dropout")}
    try:
        model = module.GPT(module.GPTConfig(**shape, vocab_size=m.padded_vocab, bias=True))
        model = model.to(bench.device).train()
        adamw = model.configure_optimizers(
            weight_decay=o.weight_decay,
            learning_rate=LEARNING_RATE,
            betas=(o.beta1, o.beta2),
            device_type=bench.device.type,
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{module.__file__} lacks nanoGPT's interface: {error}") from error
    mine = checkpoint.load(str(bench.folder / "weights")).model.state_dict()
    mine["lm_head.weight"], strangers = mine["wte.weight"], []
    with torch.no_grad():
        for name, p in model.named_parameters():
            weight = mine.get(checkpoint.PREFIXES.sub("", name))
            if weight is None or weight.shape != p.shape:
                strangers.append(name)
            else:
                p.copy_(weight)
    if strangers:
        print(f"warning: checkout: {', '.join(strangers)} are its own: the losses will differ")
    return Contestant(model, lambda x, y: model(x, y)[1], their_update(model, adamw))


def enter(bench: Bench, name: str) -> Contestant:
    """A contestant with the shared weights, compiled where that is wanted."""
    runtime.allow_tf32(bench.device)
    if name == HERE:
        one = ours(checkpoint.load(str(bench.folder / "weights")).model.to(bench.device))
    else:
        one = {"transformers": theirs, "checkout": from_checkout}[name](bench)
    return made_fast(bench, one)


def made_fast(bench: Bench, one: Contestant) -> Contestant:
    """Compiled where that is wanted, whoever it is."""
    if runtime.wants_compile(bench.cfg.compile, bench.device):

        def trial(loss: Callable) -> None:
            timed_step(bench, replace(one, loss=loss), 0)

        one = replace(one, loss=runtime.compiled(one.loss, trial, bench.cfg.compile))
    return one


def timed_step(bench: Bench, one: Contestant, step: int) -> dict[str, float]:
    """Train one step: the seconds of its phases and of the whole, and its loss."""
    marks = [mark(bench.device)]
    x, y = bench.batch(step)
    marks.append(mark(bench.device))
    with runtime.autocast(bench.device, bench.dtype):
        loss = one.loss(x, y)
    marks.append(mark(bench.device))
    loss.backward()
    marks.append(mark(bench.device))
    one.update()
    marks.append(mark(bench.device))
    times = [between(a, b) for a, b in itertools.pairwise(marks)]
    phases = dict(zip(("data", "forward", "backward", "optimizer"), times, strict=True))
    return phases | {"step": between(marks[0], marks[-1]), "loss": loss.item()}


def training(
    bench: Bench, contestants: dict[str, Contestant], products: Callable
) -> Iterator[Figure]:
    """Steps in turn, with a look at the machine's own rate in every round."""
    work = {name: partial(timed_step, bench, one) for name, one in contestants.items()}
    rounds = in_turns(bench.cfg.repeats, work | {"machine": products})
    limit = statistics.median(rounds.pop("machine"))
    model, tokens = contestants[HERE].model, bench.cfg.micro_batch * bench.cfg.model.block_size
    flops = flops_per_token(model.n_params()["without_positions"], model.config)
    rates = {name: [tokens / r["step"] for r in rows] for name, rows in rounds.items()}
    yield Figure("training", "tokens/s", rates, limit / flops)
    peaks = {"measured": limit, "data sheet's": runtime.peak_of(bench.device, bench.dtype)}
    for which, peak in peaks.items():
        shares = {n: [100 * mfu(r, flops, peak) for r in v if peak] for n, v in rates.items()}
        yield Figure(f"  MFU of the {which} peak", "%", shares)
    for phase in ("forward", "backward", "optimizer", "data"):
        times = {name: [1e3 * r[phase] for r in rows] for name, rows in rounds.items()}
        yield Figure(f"  of a step: {phase}", "ms", times)
    losses = {name: [r["loss"] for r in rows] for name, rows in rounds.items()}
    for name in losses.keys() - {HERE}:
        apart = [abs(a - b) for a, b in zip(losses[HERE], losses[name], strict=True)]
        yield Figure("  largest difference in loss", "nats", {name: [max(apart)]})


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had so far; on CUDA, of the device's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    # Linux hands a parent's ru_maxrss down to a new program; VmHWM begins anew with it.
    if status.exists() and (kb := re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"))):
        return 1024 * int(kb[1])
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(bench: Bench, name: str) -> int:
    """Bytes that two training steps need at most beyond the imports, in a process of its own."""
    if name == "transformers":
        import_transformers()
    before = peak_bytes(bench.device)
    one = enter(bench, name)
    for step in range(2):
        timed_step(bench, one, step)
    return peak_bytes(bench.device) - before


def memory(bench: Bench) -> Iterator[Figure]:
    sizes, fresh = {}, multiprocessing.get_context("spawn")
    for name in bench.cfg.names:
        with ProcessPoolExecutor(1, mp_context=fresh) as pool:
            sizes[name] = [pool.submit(memory_of, bench, name).result() / 1e6]
    yield Figure("peak memory of training", "MB", sizes)


def sampling(bench: Bench, contestants: dict[str, Contestant], read: float) -> Iterator[Figure]:
    """Tokens/s of greedy sampling with a cache. The limit: weights are read once per position,
    however many samples share them; positions are looked up and hardly read."""
    n, of = bench.cfg.sample_tokens, bench.cfg.model.n_embd * bench.cfg.model.block_size
    ids = bench.batches.tokens
    for dtype in (torch.float32, torch.bfloat16):
        models = {
            name: (one, copy.deepcopy(one.model).to(dtype).eval())
            for name, one in contestants.items()
            if one.generate
        }
        n_bytes = dtype.itemsize * (
            sum(p.numel() for p in contestants[HERE].model.parameters()) - of
        )
        for batch in BATCHES:
            rows = torch.cat([ids.read(bench.batches.windows(s))[0] for s in range(batch)])
            prompts = rows[:batch, :PROMPT].tolist()

            def rate(_: int, name: str, batch=batch, prompts=prompts, models=models) -> float:
                one, model = models[name]
                work = lambda: one.generate(model, copy.deepcopy(prompts), n)  # noqa: E731
                return batch * n / timed(bench.device, work)

            rates = in_turns(bench.cfg.repeats, {k: partial(rate, name=k) for k in models})
            name = f"sampling, batch {batch}, {str(dtype).removeprefix('torch.')}"
            yield Figure(name, "tokens/s", rates, batch * read / n_bytes)


def tokenizing(bench: Bench) -> Iterator[Figure]:
    """The standard library's source to shards; of transformers the tokens alone, in memory."""
    corpus, encoding = corpora.find("stdlib"), tokenizer.load(bench.cfg.tokenizer)
    work, folder = {}, bench.folder / "timed"

    def here(_: int) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        limits = {"max_tokens": bench.cfg.corpus_tokens, "workers": os.cpu_count() or 1}
        start = time.perf_counter()
        meta = prepare.prepare(corpus, encoding, folder, **limits)
        return sum(s["tokens"] for s in meta["shards"]) / (time.perf_counter() - start)

    work[HERE] = here
    if bench.cfg.vs:
        meta = loader.read_meta(bench.folder / "tokens")
        n = sum(s["documents"] for s in meta["shards"]) + meta["empty_documents"]
        chunks = (chunks for _, chunks in itertools.islice(corpus.documents(0), n))
        texts = [b"".join(c).decode("utf-8", "replace") for c in chunks]
        encode = import_transformers().AutoTokenizer.from_pretrained(bench.folder / "weights")

        def there(_: int) -> float:
            start = time.perf_counter()
            ids = encode(texts, verbose=False)["input_ids"]
            return sum(map(len, ids)) / (time.perf_counter() - start)

        work["transformers"] = there
    yield Figure("tokenizing", "tokens/s", in_turns(bench.cfg.repeats, work))


def startup(bench: Bench) -> Iterator[Figure]:
    """Seconds of whole processes."""
    quickstart = ["train.py", "config/quickstart.toml", "--steps=1", "--eval-tokens=128"]
    quickstart += ["--sample-tokens=0", f"--data-dir={bench.folder / 'prepared'}"]
    commands = {
        "import torch": ["-c", "import torch"],
        "train.py --help": ["train.py", "--help"],
        "sample.py --help": ["sample.py", "--help"],
        "quickstart, one step, validated and saved": quickstart,
    }
    if bench.cfg.vs:
        commands["import of its GPT-2"] = ["-c", "from transformers import GPT2LMHeadModel"]

    def seconds(n: int, name: str) -> float:
        more = [f"--out-dir={bench.folder / f'run{n}'}"] if "quickstart" in name else []
        start = time.perf_counter()
        command = [sys.executable, *commands[name], *more]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    rounds = in_turns(bench.cfg.repeats, {name: partial(seconds, name=name) for name in commands})
    for name, values in rounds.items():
        whose = "transformers" if name.startswith("import of") else HERE
        yield Figure(f"start-up: {name}", "s", {whose: values})


def largest_that_fits(attempt: Callable[[int], object], largest: int = 64) -> int:
    """The largest power of two, up to `largest`, whose attempt does not run out of memory."""
    n = largest
    while n > 1:
        try:
            attempt(n)
            break
        except torch.OutOfMemoryError:
            n //= 2
        torch.cuda.empty_cache()
    return n


def find_micro_batch(bench: Bench) -> int:
    """As asked; else what fits on a GPU, or 1,024 tokens, a second's work of a small CPU."""
    if bench.cfg.micro_batch or bench.device.type != "cuda":
        return bench.cfg.micro_batch or max(1, 1024 // bench.cfg.model.block_size)

    def attempt(n: int) -> None:
        trial = replace(bench, cfg=replace(bench.cfg, micro_batch=n, compile="false"))
        timed_step(trial, enter(trial, HERE), 0)

    return largest_that_fits(attempt)


@contextlib.contextmanager
def opened(cfg: BenchConfig) -> Iterator[Bench]:
    """Weights and tokens in a temporary folder, and the options settled."""
    device = runtime.find_device(cfg.device)
    dtype, _ = runtime.find_dtype(cfg.dtype, device)
    encoding = tokenizer.load(cfg.tokenizer)
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=encoding.n_vocab))
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(cfg, device, dtype, Path(name))
        checkpoint.save(bench.folder / "weights", GPT(cfg.model), encoding)
        kind = loader.read_json(bench.folder / "weights" / "config.json")["model_type"]
        if kind != "gpt2" and len(cfg.names) > 1:
            raise ValueError(
                f"{cfg.names[1]} has GPT-2 only, and this is a variant of it: leave --vs"
            )
        limits = {"max_tokens": cfg.corpus_tokens, "workers": os.cpu_count() or 1}
        prepare.prepare(corpora.find("stdlib"), encoding, bench.folder / "tokens", **limits)
        yield replace(bench, cfg=replace(cfg, micro_batch=find_micro_batch(bench)))


def machine(bench: Bench) -> dict:
    """What the figures depend on, besides the options."""
    name, cpu = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpu.exists() and (found := re.search(r"model name\s*: (.+)", cpu.read_text("utf-8"))):
        name = found[1]
    return {
        "device": torch.cuda.get_device_name()
        if bench.device.type == "cuda"
        else bench.device.type,
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(bench.dtype).removeprefix("torch."),
        "compiled": runtime.wants_compile(bench.cfg.compile, bench.device),
        "system": platform.platform(),
        "versions": versions(),
    }


def measure(cfg: BenchConfig) -> dict:
    """All parts that were asked for: what bench.json holds."""
    with opened(cfg) as bench:
        cfg, parts, figures = bench.cfg, set(cfg.parts), []
        if "memory" in parts:  # while this process is small: the others need the room
            print("measuring memory", flush=True)
            figures += memory(bench)
        runtime.allow_tf32(bench.device)
        rates = {
            "products": product_rate(bench.device, bench.dtype),
            "reads": read_rate(bench.device),
        }
        print("measuring the machine", flush=True)
        machines = in_turns(cfg.repeats, rates)
        giga = {name: [v / 1e9 for v in values] for name, values in machines.items()}
        own = [Figure("machine: matrix products", "GFLOP/s", {HERE: giga["products"]})]
        own.append(Figure("machine: memory read", "GB/s", {HERE: giga["reads"]}))
        todo = {"tokenizing": partial(tokenizing, bench), "startup": partial(startup, bench)}
        if parts & {"training", "sampling"}:
            contestants = {name: enter(bench, name) for name in cfg.names}
            read = statistics.median(machines["reads"])
            todo["training"] = partial(training, bench, contestants, rates["products"])
            todo["sampling"] = partial(sampling, bench, contestants, read)
        for part in ("training", "sampling", "tokenizing", "startup"):
            if part in parts:
                print(f"measuring {part}", flush=True)
                figures += todo[part]()
        records = [figure.record() for figure in own + figures]
        return {"machine": machine(bench), "options": options(cfg), "figures": records}


def options(cfg: BenchConfig) -> dict:
    """As JSON can hold them."""
    flat = config.flat(cfg).items()
    return {k: str(v) if isinstance(v, Path) else v for k, v in flat}


def full(cfg: BenchConfig) -> dict:
    """The CUDA tests, the throughput, and both kinds of blocks trained. ValueError without a GPU."""
    if runtime.find_device(cfg.device).type != "cuda":
        raise ValueError(
            "--full needs a CUDA device, and there is none here (or another was asked for): "
            "`python bench.py` without it measures any machine"
        )
    if used := [str(f) for f in (cfg.out_dir / "pre", cfg.out_dir / "post") if f.exists()]:
        raise ValueError(f"{' and '.join(used)} exist already: take another --out-dir")
    code = subprocess.run([sys.executable, "-m", "pytest", "-m", "cuda"], cwd=ROOT).returncode
    report = measure(replace(cfg, parts=("memory", "training", "sampling")))
    micro_batch = math.gcd(report["options"]["micro_batch"], FULL_WINDOWS)
    runs = both_norms(replace(cfg, micro_batch=micro_batch), FULL_STEPS)
    return report | {"cuda_tests": "failed" if code else "passed", "runs": runs}


def both_norms(cfg: BenchConfig, steps: int) -> list[dict]:
    """Train with pre-LN and with post-LN blocks, each in a folder of its own: on the FineWeb that is
    prepared here, or else on the standard library's bytes."""
    data_dir, T = config.DataConfig().data_dir, cfg.model.block_size
    there = [
        name
        for name in ("fineweb10B-gpt2", "fineweb_edu")
        if loader.is_complete(prepare.folder_of(name, "gpt2", data_dir))
    ]
    corpus, kind = (there[0], "gpt2") if there else ("stdlib", "byte")
    shape = [f"--{name}={value}" for name, value in config.flat(cfg.model).items()]
    shape += [f"--corpus={corpus}", f"--tokenizer={kind}", f"--micro-batch={cfg.micro_batch}"]
    shape += [f"--steps={steps}", f"--batch-tokens={FULL_WINDOWS * T}", f"--eval-tokens={64 * T}"]
    shape += ["--warmup-steps=100", "--eval-every=100", "--sample-tokens=0"]
    shape += [f"--{name}={getattr(cfg, name)}" for name in ("device", "dtype", "compile")]
    rows = []
    for name, flag in (("pre", "--no-post-ln"), ("post", "--post-ln")):
        argv = [*shape, f"--out-dir={cfg.out_dir / name}", flag]
        try:
            result = train.train(config.parse(TrainConfig, argv, prog="train.py", description=""))
        except train.Diverged as error:
            result = {"diverged": str(error)}
        rows.append({"run": name, "corpus": corpus, "steps": steps, "val_loss": None} | result)
    return rows


def grid(m: ModelConfig, micro_batch: int) -> Iterator[tuple[str, ModelConfig, int]]:
    """What --scaling measures: an axis, a model, and a micro-batch. Quarters of depth and width with
    heads of the same size; lengths with the same tokens per step; batches of the shortest length."""
    head = m.n_embd // m.n_head
    for k in (1, 2, 3, 4):
        heads, layers = max(1, m.n_head * k // 4), max(1, m.n_layer * k // 4)
        shape = replace(m, n_layer=layers, n_head=heads, n_embd=heads * head)
        yield "model size", shape, micro_batch
    for k in (8, 4, 2, 1):
        yield "sequence length", replace(m, block_size=m.block_size // k), micro_batch * k
    for k in (1, 2, 4, 8):
        yield "micro-batch", replace(m, block_size=m.block_size // 8), micro_batch * k


def scaling(cfg: BenchConfig) -> dict:
    """Tokens/s at every point of the grid, into scaling.csv and scaling.png."""
    rows = []
    with opened(cfg) as bench:
        products = product_rate(bench.device, bench.dtype)
        for axis, shape, micro_batch in grid(bench.cfg.model, bench.cfg.micro_batch):
            print(f"measuring {axis}", flush=True)
            point = replace(bench, cfg=replace(bench.cfg, model=shape, micro_batch=micro_batch))
            one = made_fast(point, ours(GPT(shape).to(bench.device)))
            figure = next(training(point, {HERE: one}, products)).record()
            n, measured = one.model.n_params()["total"], figure["of"][HERE]
            about = {"axis": axis, "parameters": n, "block_size": shape.block_size}
            about |= {"micro_batch": micro_batch, "tokens_per_s": measured["median"]}
            rows.append(about | {k: measured[k] for k in ("q1", "q3", "share")})
        report = {"machine": machine(bench), "options": options(bench.cfg), "scaling": rows}
    with open(cfg.out_dir / "scaling.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    draw_scaling(rows, cfg.out_dir / "scaling.png", report["machine"])
    return report


def predicted(
    n: int, cfg: BenchConfig, *, tokens_per_s: float, gradient_bytes: int, backward_share: float
) -> dict:
    """A step of n GPUs, each with the micro-batches of one: what is added is the part of the
    exchange that the last backward pass does not hide (DistributedDataParallel: Li et al. 2020,
    "PyTorch Distributed"). A ring sends and receives 2 (n - 1) / n times the gradient per GPU
    (Patarasuk & Yuan 2009), at the pace of its slowest link."""
    micro_tokens = cfg.micro_batch * cfg.model.block_size
    tokens, micro_seconds = cfg.accumulation * micro_tokens, micro_tokens / tokens_per_s
    gb_per_s = cfg.node_gb_per_s if n <= cfg.gpus_per_node else cfg.network_gb_per_s
    exchange = 2 * (n - 1) / n * gradient_bytes / (1e9 * gb_per_s)
    exposed = max(0.0, exchange - cfg.overlap * backward_share * micro_seconds)
    seconds = cfg.accumulation * micro_seconds + exposed
    return {
        "gpus": n,
        "tokens_per_step": n * tokens,
        "tokens_per_s": n * tokens / seconds,
        "efficiency": tokens / seconds / tokens_per_s,
        "exchange_ms": 1e3 * exchange,
        "exposed_ms": 1e3 * exposed,
    }


def plan(cfg: BenchConfig) -> dict:
    """Predictions from a given speed of one GPU, or from what is measured now."""
    about, share = {}, BACKWARD_SHARE
    if cfg.tokens_per_s is None:
        report = measure(replace(cfg, parts=("training",)))
        of = {f["name"].strip(): f["of"].get(HERE, {}).get("median") for f in report["figures"]}
        cfg = replace(cfg, micro_batch=report["options"]["micro_batch"])
        cfg = replace(cfg, tokens_per_s=of["training"])
        step_ms = 1e3 * cfg.micro_batch * cfg.model.block_size / cfg.tokens_per_s
        about, share = {"machine": report["machine"]}, of["of a step: backward"] / step_ms
    cfg = replace(cfg, micro_batch=cfg.micro_batch or config.RunConfig().micro_batch)
    with torch.device("meta"):
        shape = replace(cfg.model, vocab_size=257 if cfg.tokenizer == "byte" else 50257)
        n_bytes = sum(p.nbytes for p in GPT(shape).parameters())
    known = {"tokens_per_s": cfg.tokens_per_s, "gradient_bytes": n_bytes, "backward_share": share}
    rows = [predicted(2**k, cfg, **known) for k in range(7)]
    return about | {"options": options(cfg), "known": known, "plan": rows}


def short(value: float | str | None) -> str:
    """A cell of a table."""
    if isinstance(value, str | None):
        return value or "n/a"
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def aligned(rows: list[list[str]]) -> str:
    """Rows of equal length as text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def figures_table(figures: list[dict]) -> str:
    """Medians (quartiles), the limit and our share of it, and how many times as good ours is."""
    others = list(dict.fromkeys(n for f in figures for n in f["of"] if n != HERE))
    rows = [["", "unit", HERE, "limit", "of it", *(c for n in others for c in (n, "ratio"))]]
    for f in figures:
        cells = [f["name"], f["unit"]]
        for name in (HERE, *others):
            v = f["of"].get(name)
            spread = v and v["q1"] != v["q3"]
            text = short(v["median"]) if v else ""
            cells.append(f"{text} ({short(v['q1'])}–{short(v['q3'])})" if spread else text)
            if name == HERE:
                cells += [short(f["limit"]), f"{v['share']:.0%}"] if f["limit"] else ["", ""]
            else:
                cells.append(f"{v['ratio']:.2f} ×" if v and "ratio" in v else "")
        rows.append(cells)
    return aligned(rows)


def report_text(report: dict) -> str:
    """What the terminal shows of a report; all of it is in bench.json."""
    lines = []
    if m := report.get("machine"):
        lines.append(
            f"{m['device']} ({m['cpu']}, {m['cores']} cores, {m['threads']} threads), {m['dtype']}, "
            f"{'compiled' if m['compiled'] else 'not compiled'}, torch {m['versions']['torch']}"
        )
    if "cuda_tests" in report:
        lines.append(f"CUDA tests: {report['cuda_tests']}")
    if "figures" in report:
        lines.append(figures_table(report["figures"]))
    for key in ("scaling", "plan", "runs"):
        if rows := report.get(key):
            names = list(dict.fromkeys(k for row in rows for k in row))
            cells = [[short(row.get(k)) for k in names] for row in rows]
            lines.append(aligned([[k.replace("_", " ") for k in names], *cells]))
    return "\n".join(lines)


def draw_figures(report: dict, path: Path) -> None:
    """Bars of everything that has a limit, against it."""
    from matplotlib.figure import Figure as Picture

    limited = [f for f in report["figures"] if f["limit"]]
    bars = [(f, name, v) for f in limited for name, v in f["of"].items()][::-1]
    picture = Picture(figsize=(8, 1.2 + 0.32 * len(bars)), layout="constrained")
    axes, colours = picture.subplots(), {HERE: "#08519c", "transformers": "#e6550d"}
    labels = [f"{f['name']}: {name}" for f, name, _ in bars]
    colour = [colours.get(name, "#9ecae1") for _, name, _ in bars]
    drawn = axes.barh(labels, [100 * v["share"] for *_, v in bars], color=colour)
    axes.bar_label(drawn, [f"{short(v['median'])} {f['unit']}" for f, _, v in bars], padding=3)
    axes.axvline(100, color="black", lw=1)
    axes.margins(x=0.25)
    m = report["machine"]
    axes.set(xlabel="% of what the machine's matrix products, or its memory, allow")
    axes.set_title(f"{m['cpu'] if m['device'] == 'cpu' else m['device']}, {m['dtype']}")
    picture.savefig(path, dpi=120)


def draw_scaling(rows: list[dict], path: Path, m: dict) -> None:
    """Tokens/s with quartiles, an axis each."""
    from matplotlib.figure import Figure as Picture

    keys = {"model size": "parameters", "sequence length": "block_size"}
    keys |= {"micro-batch": "micro_batch"}
    picture = Picture(figsize=(10, 3.4), layout="constrained")
    for axes, (axis, key) in zip(picture.subplots(1, 3), keys.items(), strict=True):
        mine = [row for row in rows if row["axis"] == axis]
        y = [row["tokens_per_s"] for row in mine]
        spread = [[abs(row[q] - row["tokens_per_s"]) for row in mine] for q in ("q1", "q3")]
        axes.errorbar([row[key] for row in mine], y, yerr=spread, marker="o", color="#08519c")
        scale = "log" if axis == "model size" else "linear"
        axes.set(xlabel=axis, ylabel="tokens/s", xscale="log", yscale=scale)
        axes.grid(alpha=0.3)
    picture.suptitle(f"{m['cpu'] if m['device'] == 'cpu' else m['device']}, {m['dtype']}")
    picture.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    cfg = config.parse(BenchConfig, argv, prog="bench.py", description=__doc__, preset=False)
    if problems := cfg.problems():
        raise ValueError("\n  ".join(["this can't be measured:", *problems]))
    # What was asked for and is not there is told at once, not after minutes.
    if cfg.vs:
        import_transformers()
    if cfg.vs_checkout:
        import_checkout(cfg.vs_checkout)
    modes = {"full": full, "scaling": scaling, "plan": plan}
    work = next((modes[name] for name in modes if getattr(cfg, name)), measure)
    cfg.out_dir.mkdir(parents=True, exist_ok=True)
    report = work(cfg)
    loader.replace_file(cfg.out_dir / "bench.json", json.dumps(report, indent=1) + "\n")
    print(report_text(report))
    if cfg.plot and "figures" in report:
        draw_figures(report, cfg.out_dir / "bench.png")
    print(f"wrote {cfg.out_dir / 'bench.json'}")
    return int(report.get("cuda_tests") == "failed")


if __name__ == "__main__":
    sys.exit(config.run_program(main))
