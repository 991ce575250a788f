"""Program: text from a checkpoint. `python sample.py RUN_OR_CHECKPOINT_OR_HUB_NAME`"""

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tiktoken
import torch
import tyro

import checkpoint
import config
import runtime
from data import tokenizer
from model import GPT, KVCache

SAMPLES_AT_ONCE = 64  # in one batch: the cache of more may not fit


def pick(
    logits: torch.Tensor,
    draws: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> torch.Tensor:
    """The next ids (B,) from logits (B, V) and uniform draws (B,) in [0, 1): the inverse of the
    cumulative distribution, after temperature (0: the likeliest id), the top_k likeliest ids, and
    the fewest likeliest ids whose probability reaches top_p (Holtzman et al. 2020)."""
    if temperature < 1e-6:  # nothing but the likeliest is left then, and float32 would overflow
        return logits.argmax(-1)
    logits, ids, V = logits.float() / temperature, None, logits.size(-1)
    top_k = min(top_k or V, V)
    if top_k < V or top_p < 1:
        logits, ids = logits.topk(top_k)
    probs = logits.softmax(-1)
    if top_p < 1:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill((before >= top_p) & (before > 0), 0)
    reached = probs.cumsum(-1)
    chosen = (reached <= draws[:, None] * reached[:, -1:]).sum(-1).clamp(max=reached.size(-1) - 1)
    return chosen if ids is None else ids.gather(1, chosen[:, None])[:, 0]


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    max_new_tokens: int,
    cached: bool = True,
    products: runtime.OneDNN | None = None,
    **choice,
) -> Iterator[list[int]]:
    """Yield the next id of every prompt (at least one id each), max_new_tokens times.

    Each row draws from its own seed and sees its own last block_size ids only, so that it comes out
    the same alone and in company. Positions are learned, so once a window slides, everything
    before must be read again for each token; until then the cache holds it (cached=False: read
    always). `products`: what computes the linear layers. `choice`: the options of pick()."""
    T, device = model.config.block_size, model.wte.weight.device
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    rows, cache, was_training = [p[-T:] for p in prompts], None, model.training
    if not all(rows):
        raise ValueError("a prompt is empty: give it at least one id, such as <|endoftext|>'s")
    model.eval()
    try:
        for remaining in range(max_new_tokens, 0, -1):
            if cached and cache and cache.length < T:
                new = torch.tensor([row[-1:] for row in rows], device=device)
            else:
                windows = [row[-T:] for row in rows]
                longest = max(map(len, windows))
                pad = torch.tensor([longest - len(w) for w in windows], device=device)
                capacity = min(T, longest + remaining - 1)
                some = any(len(w) < longest for w in windows)
                cache = KVCache(model, len(rows), capacity, pad if some else None)
                filled = [[0] * (longest - len(w)) + w for w in windows]
                new = torch.tensor(filled, device=device)
            with products or contextlib.nullcontext():
                logits = model.head(model.hidden(new, cache)[:, -1])
            draws = torch.stack([torch.rand((), generator=g) for g in generators])
            ids = pick(logits, draws.to(device), **choice).tolist()
            for row, i in zip(rows, ids, strict=True):
                row.append(i)
            yield ids
    finally:
        model.train(was_training)


class TextStream:
    """One row's ids as text while they come: whole characters, up to the end mark or a stop string.
    Text that may be the beginning of a stop string is held back until that is clear."""

    def __init__(self, encoding: tiktoken.Encoding, stop: tuple[str, ...] = ()):
        self.end, self.stop, self.done = encoding.eot_token, stop, False
        self.decoder, self.held = tokenizer.StreamDecoder(encoding), ""

    def feed(self, i: int) -> str:
        """The text that id i settles."""
        if self.done:
            return ""
        if i == self.end:
            return self.finish()
        self.held += self.decoder.feed([i])
        found = [at for s in self.stop if (at := self.held.find(s)) >= 0]
        if found:
            self.done = True
            return self.held[: min(found)]
        keep = max((self._overlap(s) for s in self.stop), default=0)
        settled, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return settled

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        lengths = range(min(len(stop) - 1, len(self.held)), 0, -1)
        return next((n for n in lengths if self.held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """The rest, at the end of generation."""
        if self.done:
            return ""
        self.done = True
        return self.held + self.decoder.feed([], final=True)


def stream(
    model: GPT,
    encoding: tiktoken.Encoding,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    stop: tuple[str, ...] = (),
    **options,
) -> Iterator[list[str]]:
    """Yield, token by token, what each row's text grows by; ends when all rows have ended.
    `options`: those of generate()."""
    texts = [TextStream(encoding, stop) for _ in prompts]
    for ids in generate(model, prompts, seeds, **options):
        yield [text.feed(i) for text, i in zip(texts, ids, strict=True)]
        if all(text.done for text in texts):
            return
    yield [text.finish() for text in texts]


@dataclass(frozen=True)
class SampleConfig:
    """What to sample, and how."""

    target: tyro.conf.Positional[str]
    """A run's folder, a checkpoint's folder, or a model of the Hub (gpt2)."""
    which: Literal["last", "best"] = "last"
    """Which checkpoint of a run."""
    prompt: tuple[str, ...] = ()
    """One or more beginnings; none: the beginning of a document."""
    prompt_file: tuple[Path, ...] = ()
    """UTF-8 files, a beginning each."""
    max_new_tokens: int = 200
    """Tokens to generate per sample, at most."""
    temperature: float = 0.8
    """Below 1 sharpens the distribution, above flattens it; 0: always the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens; None: all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability."""
    num_samples: int = 1
    """Samples per prompt."""
    seed: int = 1337
    """Sample n of any prompt is drawn with seed + n."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample and are not shown; <|endoftext|> always does."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights; bfloat16 halves what a token has to read from memory."""

    def problems(self) -> list[str]:
        found = []
        for name, least in (("max_new_tokens", 1), ("num_samples", 1), ("seed", 0), ("top_k", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                found.append(f"{name} must be at least {least}, got {value}")
        if self.seed + self.num_samples >= 2**63:
            found.append(f"seed + num_samples must be below 2^63, got {self.seed}")
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p must be in (0, 1], got {self.top_p}")
        if "" in self.stop:
            found.append("stop must not be an empty text")
        return found


def _mended(text: str) -> str:
    """Under a locale like C, bytes of the command line arrive as lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _prompt_ids(cfg: SampleConfig, encoding: tiktoken.Encoding, block_size: int) -> list[list[int]]:
    texts = [_mended(text) for text in cfg.prompt]
    for path in cfg.prompt_file:
        try:
            with open(path, encoding="utf-8", newline="") as file:
                texts.append(file.read())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"prompt_file {path} can't be read as UTF-8 text: {error}") from None
    prompts = []
    for text in texts or [""]:
        ids = encoding.encode(text, allowed_special={tokenizer.END}) or [encoding.eot_token]
        if len(ids) > block_size:
            print(
                f"a prompt of {len(ids)} tokens is longer than block_size: the model sees its last "
                f"{block_size}",
                file=sys.stderr,
            )
        prompts.append(ids)
    return prompts


def main(argv: list[str]) -> int:
    cfg = config.parse(SampleConfig, argv, prog="sample.py", description=__doc__, preset=False)
    if problems := cfg.problems():
        raise ValueError("; ".join(problems))
    device = runtime.find_device(cfg.device)
    loaded = checkpoint.load(cfg.target, cfg.which)
    model = loaded.model.to(device, getattr(torch, cfg.dtype))
    prompts = _prompt_ids(cfg, loaded.encoding, model.config.block_size)
    end, total = [loaded.encoding.eot_token], len(prompts) * cfg.num_samples
    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    options = {name: getattr(cfg, name) for name in names} | {"stop": tuple(map(_mended, cfg.stop))}
    options["products"] = runtime.OneDNN(model, min(total, SAMPLES_AT_ONCE))
    everything = ((i, n) for i in range(len(prompts)) for n in range(cfg.num_samples))
    while group := list(itertools.islice(everything, SAMPLES_AT_ONCE)):
        rows, seeds = [prompts[i] for i, _ in group], [cfg.seed + n for _, n in group]
        texts = ["" if p == end else tokenizer.decode(loaded.encoding, p) for p in rows]
        pieces = stream(model, loaded.encoding, rows, seeds, **options)
        if total == 1:
            print(texts[0], end="", flush=True)
            for (piece,) in pieces:
                print(piece, end="", flush=True)
            print()
            return 0
        for new in pieces:
            texts = [text + piece for text, piece in zip(texts, new, strict=True)]
        for (i, n), text in zip(group, texts, strict=True):
            print(f"--- prompt {i + 1}, sample {n + 1}\n{text}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(config.run_program(main))
