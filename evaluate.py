"""Program: how well a checkpoint predicts its corpus. `python evaluate.py RUN_OR_CHECKPOINT`

Prints validation loss (nats per token), perplexity and bits per byte, and writes nothing.
"""

import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tiktoken
import torch
import tyro

import checkpoint
import config
import runtime
from data import loader, prepare, tokenizer
from model import GPT


def n_windows(tokens: loader.Tokens, eval_tokens: int) -> int:
    """How many windows from the beginning of the split make eval_tokens targets, at most all."""
    return min(len(tokens), eval_tokens // tokens.block_size)


@torch.no_grad()
def validation_loss(
    model: GPT,
    tokens: loader.Tokens,
    *,
    windows: int,
    micro_batch: int,
    dtype: torch.dtype = torch.float32,
    processes: runtime.Processes | None = None,
    fast: Callable | None = None,
) -> float:
    """Mean loss in nats per token over the first `windows` windows, each target counted once: the
    same for every micro_batch and number of processes, up to rounding.

    `fast` is the compiled loss, called with full micro-batches only: it never sees another shape.
    Dropout is off meanwhile, and the model's mode is restored; no random number is drawn."""
    processes = processes or runtime.Processes()
    device, was_training = model.wte.weight.device, model.training
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=device)
    starts = range(0, windows, micro_batch)[processes.rank :: processes.world_size]
    model.eval()
    try:
        for start in starts:
            pair = tokens.read(np.arange(start, min(start + micro_batch, windows)))
            x, y = (runtime.to_device(t, device) for t in pair)
            loss = model.loss if fast is None or len(x) < micro_batch else fast
            with runtime.autocast(device, dtype):
                total += loss(x, y).to(wide) * y.numel()
    finally:
        model.train(was_training)
    return processes.sum(total).item() / (windows * tokens.block_size)


def text_sizes(encoding: tiktoken.Encoding, tokens: loader.Tokens, windows: int) -> tuple[int, int]:
    """Bytes of the text that these windows' targets stand for, and what `gzip -9` makes of it."""
    table = list(tokenizer.token_table(encoding))
    table[encoding.eot_token] = b""
    gzip = zlib.compressobj(9, wbits=31)
    size = packed = 0
    for window in range(windows):
        text = b"".join(table[i] for i in tokens.read(np.array([window]))[1][0].tolist())
        size, packed = size + len(text), packed + len(gzip.compress(text))
    return size, packed + len(gzip.flush())


def bits_per_byte(nats_per_token: float, n_tokens: int, n_bytes: int) -> float:
    """Comparable between tokenizers: all that was spent, end marks included, per byte of text."""
    return nats_per_token * n_tokens / math.log(2) / n_bytes


def summary(loss: float, encoding: tiktoken.Encoding, tokens: loader.Tokens, windows: int) -> str:
    """The result in one line, beside what gzip needs for the same text."""
    n_bytes, packed = text_sizes(encoding, tokens, windows)
    n_tokens = windows * tokens.block_size
    perplexity = f"{math.exp(loss):.2f}" if loss < 20 else "above 1e8"
    return (
        f"validation loss {loss:.4f} nats per token, perplexity {perplexity}, "
        f"{bits_per_byte(loss, n_tokens, n_bytes):.3f} bits per byte "
        f"(gzip -9 on the same {n_bytes:,} bytes: {8 * packed / n_bytes:.3f}), {n_tokens:,} tokens"
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and on what."""

    target: tyro.conf.Positional[str]
    """A run's folder, a checkpoint's folder, or a model of the Hub (gpt2)."""
    which: Literal["last", "best"] = "last"
    """Which checkpoint of a run."""
    corpus: str | None = None
    """Prepared corpus, a name or a path; None: the one it was trained on."""
    data_dir: Path | None = None
    """Folder of the prepared tokens; None: the run's."""
    eval_tokens: int | None = None
    """Tokens of the validation split, from its beginning; None: as in training, or all."""
    micro_batch: int = 8
    """Sequences per forward pass."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the matrix products."""


def main(argv: list[str]) -> int:
    cfg = config.parse(EvaluateConfig, argv, prog="evaluate.py", description=__doc__, preset=False)
    for name in ("micro_batch", "eval_tokens"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(cfg, name)}")
    device = runtime.find_device(cfg.device)
    dtype, _ = runtime.find_dtype(cfg.dtype, device)
    loaded = checkpoint.load(cfg.target, cfg.which)
    trained_on = (loaded.training or {}).get("config", {})
    corpus = cfg.corpus or trained_on.get("corpus")
    if not corpus:
        raise ValueError(f"{cfg.target} does not say what it was trained on: give --corpus")
    data_dir = cfg.data_dir or Path(trained_on.get("data_dir", "data/prepared"))
    kind = "byte" if loaded.encoding.n_vocab == 257 else "gpt2"
    folder = prepare.folder_of(corpus, kind, data_dir)
    if not (folder / "meta.json").exists():
        command = prepare.command_of(corpus, kind, data_dir)
        raise ValueError(f"{corpus} is not prepared in {data_dir}: run `{command}`")
    loader.check_tokenizer(folder, tokenizer.identity(loaded.encoding))
    tokens = loader.Tokens(folder, "val", loaded.model.config.block_size)
    eval_tokens = cfg.eval_tokens or trained_on.get("eval_tokens") or tokens.n_tokens
    windows = n_windows(tokens, eval_tokens)
    if not windows:
        raise ValueError(f"eval_tokens must be at least block_size, {tokens.block_size}")
    model = loaded.model.to(device)
    loss = validation_loss(model, tokens, windows=windows, micro_batch=cfg.micro_batch, dtype=dtype)
    print(f"{loaded.folder} on {folder}")
    print(summary(loss, loaded.encoding, tokens, windows))
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
