"""What a run is made of, as frozen dataclasses, and the one parser for files and command lines.

A preset is a flat TOML file. Its keys become arguments in front of the command line's own, so that
tyro reports a mistake in either alike: exit code 2, and the nearest name.
"""

import contextlib
import dataclasses
import difflib
import json
import math
import os
import sys
import tomllib
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from model import GPTConfig

# What people who come from nanoGPT may type.
NANOGPT_NAMES = {
    "learning-rate": "lr",
    "max-iters": "steps",
    "batch-size": "micro-batch",
    "eval-interval": "eval-every",
    "dataset": "corpus",
}


@dataclass(frozen=True)
class ModelConfig(GPTConfig):
    """The model; defaults: GPT-2 small, 124M parameters."""

    # The tokenizer decides it.
    vocab_size: tyro.conf.Suppress[int] = 50257

    def problems(self) -> list[str]:
        found, size = super().problems(), 12 * self.n_layer * self.n_embd**2
        if size > 10**13 or self.n_layer > 10**4 or self.block_size > 2**31:
            found.append(f"a model with {size:.0e} parameters in its blocks fits no machine")
        return found


@dataclass(frozen=True)
class DataConfig:
    """The tokens."""

    corpus: str = "fineweb_edu"
    """A name (`python -m data.prepare` lists them), or a path to text or a folder of it."""
    tokenizer: Literal["gpt2", "byte"] = "gpt2"
    """GPT-2's 50,257 byte pairs, or the 256 bytes and an end mark."""
    data_dir: Path = Path("data/prepared")
    """Folder that holds prepared tokens, a folder per corpus and tokenizer."""
    verify_data: bool = False
    """Check the sha256 of every shard at the start."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all; or Muon for the blocks' matrices and AdamW for the rest."""
    lr: float = 6e-4
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: float | None = None
    """Learning rate at the last step, after a cosine; None: a tenth of lr."""
    warmup_steps: int = 700
    """Steps of linear warm-up; 0 starts at lr. Post-LN needs it, pre-LN hardly does."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; norms and biases are never decayed."""
    decay_embeddings: bool = True
    """Decay the token and position embeddings too."""
    beta1: float = 0.9
    """AdamW's decay of the gradient's mean; Muon's momentum stays at 0.95."""
    beta2: float = 0.95
    """AdamW's decay of the squared gradient's mean."""
    grad_clip: float = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it. 0: no clipping."""

    @property
    def final_lr(self) -> float:
        return self.lr / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True)
class RunConfig:
    """The run."""

    seed: int = 1337
    """Seed of the initial weights, the order of the data and dropout."""
    steps: int = 19073
    """Optimizer steps (default: 10B tokens)."""
    batch_tokens: int = 524288
    """Tokens per optimizer step, over all processes; gradient accumulation follows from it."""
    micro_batch: int = 16
    """Sequences per process and forward pass: lower it when memory runs out."""
    eval_every: int = 250
    """Steps between validations; the last step is always validated."""
    eval_tokens: int = 10485760
    """Tokens of the validation split that are used, from its beginning."""
    save_every: int = 1000
    """Steps between checkpoints; the best validation and the last step are always saved."""
    keep: int = 1
    """Checkpoints kept besides the best one."""
    log_every: int = 10
    """Steps between printed lines; metrics.jsonl has every step."""
    out_dir: Path = Path("runs/gpt2")
    """The run's folder."""
    init_from: str | None = None
    """Start from the weights of a run, a checkpoint folder or the Hub's gpt2; its shape wins."""
    resume: bool = False
    """Continue the run in out_dir, bit for bit."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products; weights are always float32. auto: what the device has."""
    compile: Literal["auto", "true", "false"] = "auto"
    """torch.compile; auto: on a CUDA device, with a fall-back to eager if it fails."""
    attention: Literal["auto", "math"] = "auto"
    """torch's fused attention where it has one, or the plain formula: they differ in rounding."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases, beside the metrics.jsonl that is always written."""
    sample_tokens: int = 200
    """Tokens of the sample that ends the run; 0: none."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def problems(self, world_size: int = 1) -> list[str]:
        """Everything that keeps this from being run on that many processes, a sentence each."""
        o, r, found = self.optimizer, self.run, self.model.problems()
        at_least = {"steps": 1, "batch_tokens": 1, "micro_batch": 1, "eval_every": 1, "keep": 1}
        at_least |= {"save_every": 1, "log_every": 1, "sample_tokens": 0, "seed": 0}
        for name, least in at_least.items():
            if not least <= getattr(r, name) < 2**53:
                found.append(f"{name} must be {least} to 2^53, got {getattr(r, name)}")
        for name, value in flat(self).items():
            if value == "" or (name == "out_dir" and value == Path()):
                found.append(f"{name} must not be empty")
            if any("\ud800" <= c <= "\udfff" for c in str(value)):
                found.append(f"{name} is not UTF-8 under this locale: set PYTHONUTF8=1")
        if not (0 < o.lr < math.inf):
            found.append(f"lr must be a positive number, got {o.lr}")
        elif not 0 <= o.final_lr <= o.lr:
            found.append(f"min_lr must be between 0 and lr {o.lr}, got {o.final_lr}")
        if not 0 <= o.warmup_steps < 2**53:
            found.append(f"warmup_steps must be 0 to 2^53, got {o.warmup_steps}")
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= getattr(o, name) < math.inf:
                found.append(f"{name} must be at least 0, got {getattr(o, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(o, name) < 1:
                found.append(f"{name} must be in [0, 1), got {getattr(o, name)}")
        T = max(1, self.model.block_size)
        if r.eval_tokens < T:
            found.append(f"eval_tokens must be at least block_size ({T}), got {r.eval_tokens}")
        unit = T * max(1, r.micro_batch) * world_size
        if r.batch_tokens % unit:
            low, rows = r.batch_tokens // unit * unit, r.batch_tokens // (T * world_size)
            exact = r.batch_tokens % (T * world_size) == 0
            micro = next((m for m in range(min(r.micro_batch, rows), 0, -1) if rows % m == 0), 1)
            more = f", or micro_batch {micro}, which changes nothing else" if exact and rows else ""
            found.append(
                f"batch_tokens {r.batch_tokens} is not a multiple of block_size × micro_batch × "
                f"processes = {T} × {r.micro_batch} × {world_size} = {unit}: take "
                f"{f'{low} or ' if low else ''}{low + unit}{more}"
            )
        return found


def flat(config) -> dict[str, object]:
    """The options of a (nested) dataclass by name, without the vocabulary, which is no option."""
    pairs = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        pairs |= flat(value) if dataclasses.is_dataclass(value) else {f.name: value}
    pairs.pop("vocab_size", None)
    return pairs


def plain(config) -> dict[str, object]:
    """flat(), as JSON and TOML can hold it."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in flat(config).items()}


def to_toml(config) -> str:
    """The options as a preset. `resume` is an order and no property of the run: left out."""
    lines = []
    for group in dataclasses.fields(config):
        lines.append(f"# {group.name}")
        for name, value in plain(getattr(config, group.name)).items():
            if value is not None and name != "resume":
                lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        lines.append("")
    return "\n".join(lines)


def _types(cls) -> dict[str, object]:
    """Option names (as on the command line) and their types."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        found |= _types(hint) if dataclasses.is_dataclass(hint) else {name.replace("_", "-"): hint}
    return found


def _argument(name: str, value, hint) -> str:
    """`--name=value` as tyro takes it: bool options are flags there, `--x` and `--no-x`."""
    word = str(value)
    if hint is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError(f"--{name} is true or false, got {word}")
        return f"--{name}" if word.lower() == "true" else f"--no-{name}"
    if hint == bool | None and word.lower() in ("true", "false", "none"):
        word = word.title()
    elif isinstance(value, bool):
        word = word.lower()
    return f"--{name}={word}"


def _preset_arguments(path: Path, hints: dict) -> list[str]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = sorted(Path(__file__).parent.glob("*.toml"))
        near = difflib.get_close_matches(path.stem, [p.stem for p in presets], 1)
        shown = {p.stem: os.path.relpath(p) for p in presets}
        names = ", ".join(shown.values())
        hint = f"did you mean {shown[near[0]]}? " if near else ""
        raise ValueError(f"no preset {path}: {hint}there are {names}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"preset {path} is no readable TOML file: {error}") from None
    arguments = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, dict):
            raise ValueError(f"preset {path}: presets are flat; put the keys of [{key}] on top")
        if isinstance(value, list):
            arguments += [f"--{name}", *map(str, value)]
        else:
            arguments.append(_argument(name, value, hints.get(name)))
    return arguments


def _joined(argv: list[str], hints: dict) -> list[str]:
    """Flags that were given a word (`--post-ln true`, `--resume=false`) in tyro's form."""
    arguments = []
    rest, seen = list(argv), set()
    while rest:
        word = rest.pop(0)
        name, eq, value = word.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if word.startswith("--"):
            word = f"--{name}{eq}{value}"
            if name in seen and typing.get_origin(hints.get(name)) is tuple:
                raise ValueError(f"--{name} is there twice: give all its values behind one")
            seen.add(name)
            if hints.get(name) in (bool, bool | None):
                if not eq and rest and rest[0].lower() in ("true", "false", "none"):
                    eq, value = "=", rest.pop(0)
                word = _argument(name, value, hints[name]) if eq else word
        arguments.append(word)
    return arguments


def parse(cls: type, argv: list[str], *, prog: str, description: str, preset: bool = True):
    """An instance of dataclass `cls` from `[PRESET.toml] [--option value ...]`.

    Exits with 2 on what tyro refuses and with 0 after --help. ValueError: an unreadable preset."""
    hints, before = _types(cls), []
    if preset and argv and not argv[0].startswith("-"):
        before, argv = _preset_arguments(Path(argv[0]), hints), argv[1:]
    arguments = before + _joined(argv, hints)
    conf = (tyro.conf.OmitArgPrefixes,)
    try:
        return tyro.cli(cls, args=arguments, prog=prog, description=description, config=conf)
    except SystemExit as stop:
        if stop.code:
            for name in sorted({a.partition("=")[0] for a in arguments if a.startswith("--")}):
                if near := _nearest(name.removeprefix("--").removeprefix("no-"), hints):
                    print(f"{name}: did you mean {near}?", file=sys.stderr)
            if before:
                print("The preset stands for: " + " ".join(before), file=sys.stderr)
        raise


def _nearest(name: str, hints: dict) -> str:
    """The option that an unknown name may stand for, among ours and nanoGPT's; else nothing."""
    known = {n: n for n in hints} | {n: o for n, o in NANOGPT_NAMES.items() if o in hints}
    near = difflib.get_close_matches(name, known, 1, 0.5) if name not in hints else []
    return f"--{known[near[0]]}" if near else ""


def run_program(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """main's exit code; what a user can cause (ValueError, OSError) becomes one message and 2."""
    with contextlib.suppress(AttributeError):  # a stream of a test's or a notebook's own
        sys.stdout.reconfigure(errors="replace")  # a terminal may not have every character
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (MemoryError, RuntimeError) as error:
        wanting = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not wanting and "can't allocate memory" not in str(error):
            raise
        print("error: out of memory: take a smaller model, batch or context", file=sys.stderr)
        return 2
