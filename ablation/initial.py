"""What depth does to signal and gradient before the first step: measured on random weights, in
seconds, without training. Every function returns rows {"figure", "series", "depth", "layer",
"value"}, which report.py draws and tells."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from model import GPT, GPTConfig

GAINS = (0.7, 1.0, 1.3)
# A layer f in the middle of a network, with nothing around it, with a norm, with the skip, both.
WIRINGS: dict[str, Callable] = {
    "bare": lambda x, f, norm: f(x),
    "norm": lambda x, f, norm: f(norm(x)),
    "skip": lambda x, f, norm: x + f(x),
    "norm and skip": lambda x, f, norm: x + f(norm(x)),
}
INITS = ("xavier", "scaled", "plain")


def _row(figure: str, series: str, depth: int, layer: int, value: float) -> dict:
    named = {"figure": figure, "series": series, "depth": depth}
    return named | {"layer": layer, "value": value}


def _rms(x: torch.Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item()


def lesson(*, n_layer: int = 12, width: int = 256, tokens: int = 512, seed: int = 0) -> list[dict]:
    """Random linear layers, each `gain` times a random rotation, wired in each way: rms of the
    signal after every layer (0: the input, of rms 1), and of the gradient there, which has rms 1
    at the output."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    start, end = draw(tokens, width), draw(tokens, width)
    q, r = torch.linalg.qr(draw(n_layer, width, width))
    # LAPACK's Q leans to -I. With R's signs it favours no direction (Mezzadri 2007).
    rotations = q * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    norm, rows = partial(F.layer_norm, normalized_shape=(width,)), []
    for gain in GAINS:
        for name, wiring in WIRINGS.items():
            xs = [start.clone().requires_grad_()]
            for weight in gain * rotations:
                xs.append(wiring(xs[-1], partial(F.linear, weight=weight), norm))
            gradients = torch.autograd.grad((xs[-1] * end).sum(), xs)
            series = f"{name}, gain {gain}"
            for layer, (x, gradient) in enumerate(zip(xs, gradients, strict=True)):
                rows.append(_row("signal", series, n_layer, layer, _rms(x)))
                rows.append(_row("gradient", series, n_layer, layer, _rms(gradient)))
    return rows


def initialised(config: GPTConfig, init: str, seed: int) -> GPT:
    """A model whose branches start "scaled" or "plain" as GPT-2's config has it, or "xavier": the
    setting of Xiong et al. 2020, with matrices N(0, 2 / (fan in + fan out)), queries, keys and
    values one by one, and token and position embeddings whose sum has unit variance."""
    model = GPT(replace(config, branch_init="plain" if init == "xavier" else init), seed)
    if init == "xavier":
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in ("wte.weight", "wpe.weight"):
                    p.normal_(0, math.sqrt(0.5), generator=generator)
                elif p.dim() == 2:
                    for part in p.split(config.n_embd) if "c_attn" in name else [p]:
                        torch.nn.init.xavier_normal_(part, generator=generator)
    return model


def _tokens(config: GPTConfig, seed: int, batch: int = 4) -> torch.Tensor:
    shape, generator = (2, batch, config.block_size), torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, shape, generator=generator)


def series_name(post_ln: bool, init: str) -> str:
    return f"{'post' if post_ln else 'pre'}, {init}"


def stream(config: GPTConfig, seeds: tuple[int, ...] = (0, 1)) -> list[dict]:
    """Mean square of the stream (B, T, C) after each block of n_layer, mean over seeds. Pre-LN's
    grows by the branches' variance in each block: a line (Xiong et al. 2020, lemma 2)."""
    rows = []
    for post_ln in (False, True):
        for init in INITS:
            squares = torch.zeros(config.n_layer, dtype=torch.float64)
            for seed in seeds:
                model, outputs = initialised(replace(config, post_ln=post_ln), init, seed), []
                for block in model.h:
                    block.register_forward_hook(lambda _, __, out, seen=outputs: seen.append(out))
                with torch.no_grad():
                    model(_tokens(config, seed)[0])
                squares += torch.tensor([_rms(x) ** 2 for x in outputs]) / len(seeds)
            for layer, value in enumerate(squares.tolist(), start=1):
                series = series_name(post_ln, init)
                rows.append(_row("stream", series, config.n_layer, layer, value))
    return rows


def gradients(
    config: GPTConfig, depths: tuple[int, ...] = (2, 4, 6, 12, 24, 48), seeds: tuple = (0, 1)
) -> list[dict]:
    """Norm of the loss's gradient by every layer's second MLP matrix, mean over seeds (Xiong et al.
    2020, theorem 1: of order sqrt(log d / depth) in pre-LN, and free of depth in post-LN)."""
    rows = []
    for post_ln in (False, True):
        for init in INITS:
            for depth in depths:
                norms = torch.zeros(depth)
                for seed in seeds:
                    shape = replace(config, n_layer=depth, post_ln=post_ln)
                    model = initialised(shape, init, seed)
                    idx, targets = _tokens(config, seed)
                    # The head of the paper's setting has rows of unit length.
                    scale = (config.n_embd / 2) ** -0.5 if init == "xavier" else 1.0
                    logits = scale * model(idx).flatten(0, 1)
                    F.cross_entropy(logits, targets.flatten()).backward()
                    its = [block.mlp.c_proj.weight.grad.norm() for block in model.h]
                    norms += torch.stack(its) / len(seeds)
                for layer, value in enumerate(norms.tolist(), start=1):
                    rows.append(_row("gradients", series_name(post_ln, init), depth, layer, value))
    return rows
