"""GPT-2 in one file, with pre-LN or, for comparison, post-LN blocks.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3. Shapes:
B batch, T tokens, S keys seen so far, C channels (n_embd), H heads, D = C / H, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
# At most this many logits exist at once while the loss is computed: 4 bytes each, or 6 in bfloat16.
LOGITS_AT_ONCE = {"cpu": 2**25, "cuda": 2**29}


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 50257
    """Token ids the tokenizer knows; padded inside to a multiple of 64, which never shows."""
    block_size: int = 1024
    """Longest sequence, in tokens."""
    n_layer: int = 12
    """Number of blocks."""
    n_head: int = 12
    """Attention heads per block; must divide n_embd."""
    n_embd: int = 768
    """Width of the residual stream, in channels."""
    dropout: float = 0.0
    """Probability of dropping an element of a branch's output; GPT-2 also dropped elsewhere."""
    post_ln: bool = False
    """Norm after the addition, as in the first Transformer, instead of on the branch's input."""
    final_norm: bool | None = None
    """Norm between the last block and the head; None: with pre-LN only."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """LayerNorm (scale and shift) or RMSNorm (scale only, no mean)."""
    branch_init: Literal["scaled", "plain", "zero"] = "scaled"
    """Initial branch outputs: divided by sqrt(2 n_layer) as GPT-2 does, left as drawn, or zero."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices; narrow models want 0.02 sqrt(768 / n_embd)."""

    @property
    def padded_vocab(self) -> int:
        return math.ceil(self.vocab_size / 64) * 64

    @property
    def has_final_norm(self) -> bool:
        return not self.post_ln if self.final_norm is None else self.final_norm

    def problems(self) -> list[str]:
        """Everything that keeps this from being built, a sentence each."""
        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
        found = [f"{n} must be at least 1, got {v}" for n in sizes if (v := getattr(self, n)) < 1]
        if not found and self.n_embd % self.n_head:
            fits = [h for h in range(1, min(2 * self.n_head, 256)) if self.n_embd % h == 0]
            found.append(f"n_head {self.n_head} must divide n_embd {self.n_embd}, as {fits} do")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout must be in [0, 1), got {self.dropout}")
        choices = {"norm": [*NORMS], "branch_init": ["scaled", "plain", "zero"]}
        wrong = [n for n in choices if getattr(self, n) not in choices[n]]
        found += [f"{n} must be one of {choices[n]}, got {getattr(self, n)}" for n in wrong]
        if not 0 < self.init_std < math.inf:
            found.append(f"init_std must be a positive number, got {self.init_std}")
        return found

    def make_norm(self) -> nn.Module:
        """(x - mean) / sqrt(biased variance + 1e-5) per token, or x / sqrt(mean of x² + 1e-5)."""
        return NORMS[self.norm](self.n_embd, eps=1e-5)


class KVCache:
    """Keys and values of the tokens read so far: owned by one generation, unknown to the model.
    `pad` (B,) counts the fillers on the left of each row, with which prompts of unequal length
    share a batch: nobody looks at a filler, and positions count from the first real token."""

    def __init__(self, model: "GPT", batch: int, capacity: int, pad: torch.Tensor | None = None):
        c, like = model.config, model.wte.weight
        shape = (2, c.n_layer, batch, c.n_head, capacity, c.n_embd // c.n_head)
        self.kv = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.pad, self.mask, self.start, self.length = pad, None, 0, 0

    def advance(self, T: int) -> torch.Tensor:
        """Make room for T more tokens; returns their positions, (T,) or with fillers (B, T)."""
        if self.length + T > self.kv.size(4):
            raise ValueError(f"the cache holds {self.kv.size(4)} tokens, not {self.length + T}")
        self.start, self.length = self.length, self.length + T
        slots = torch.arange(self.length, device=self.kv.device)
        new = slots[self.start :, None]
        if self.pad is None:
            # No mask where SDPA's own causal mask or none at all does: those kernels are faster.
            self.mask = slots <= new if self.start and T > 1 else None
            return slots[self.start :]
        real = slots >= self.pad[:, None, None]  # (B, 1, S)
        # A filler looks at itself: a row of the mask without any key would turn into NaN.
        self.mask = (real & (slots <= new) | (slots == new))[:, None]  # (B, 1, T, S)
        return (slots[self.start :] - self.pad[:, None]).clamp(min=0)

    def extend(self, layer: int, k: torch.Tensor, v: torch.Tensor):
        """Store a layer's new keys and values (B, H, T, D); returns all (B, H, S, D), and mask."""
        kv = self.kv[:, layer, :, :, : self.length]
        kv[0, :, :, self.start :], kv[1, :, :, self.start :] = k, v
        return kv[0], kv[1], self.mask


class Attention(nn.Module):
    """Causal self-attention, a pure branch: no norm, no residual, no dropout."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor, extend: Callable | None = None) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        k, v, mask = extend(k, v) if extend else (k, v, None)
        causal = mask is None and k.size(2) == T
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two matrices around a GELU in GPT-2's tanh form, a pure branch."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Where the norm stands. Pre-LN adds to an untouched stream: y = x + f(norm(x)), so that
    dy/dx = I + df/dx and the gradient always has a way around f. Post-LN normalises the sum."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.post_ln = config.post_ln
        self.ln_1, self.attn = config.make_norm(), Attention(config)
        self.ln_2, self.mlp = config.make_norm(), MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, extend: Callable | None = None) -> torch.Tensor:
        if self.post_ln:
            x = self.ln_1(x + self.drop(self.attn(x, extend)))
            return self.ln_2(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attn(self.ln_1(x), extend))
        return x + self.drop(self.mlp(self.ln_2(x)))


class HeadLoss(torch.autograd.Function):
    """Summed cross-entropy in nats of x (N, C) by the head w (padded V, C) and targets (N,). The
    gradients come with it, for use once: no logits are kept or made again (Hsu et al. 2024)."""

    @staticmethod
    def forward(ctx, x, w, targets, V: int, chunk: int) -> torch.Tensor:
        total, gx, gw = 0.0, torch.empty_like(x), torch.zeros_like(w)
        for xs, t, gxs in zip(*(a.split(chunk) for a in (x, targets[:, None], gx)), strict=True):
            logits = F.linear(xs, w)
            logits[:, V:] = -math.inf
            g = logits.to(torch.promote_types(logits.dtype, torch.float32))  # float32: the same
            picked = g.sub_(g.amax(-1, keepdim=True))[:, :V].gather(1, t)
            sums = g.exp_().sum(-1, keepdim=True)
            total = total + (sums.log() - picked).sum()
            # The gradient by the logits: softmax minus one-hot. addmm_ makes nothing of gw's size.
            g = g.div_(sums).scatter_add_(1, t, torch.full_like(sums, -1)).to(logits.dtype)
            gxs.copy_(g @ w)  # a part of gx
            gw = gw.addmm_(g.T, xs) if g.dtype == gw.dtype else gw.add_(g.T @ xs)
        ctx.save_for_backward(gx, gw)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        assert not torch.is_grad_enabled(), "the chunked loss has no second derivative"
        gx, gw = ctx.saved_tensors
        return gx.mul_(grad), gw.mul_(grad), None, None, None


class GPT(nn.Module):
    """Token and position embeddings, n_layer blocks, with pre-LN a final norm, and the head tied to
    the token embedding: one tensor for both. Raises ValueError for an impossible config."""

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        self.config = config
        # Built without memory, then drawn once: torch's own init would cost time and global RNG.
        with torch.device("meta"):
            self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
            self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
            self.ln_f = config.make_norm() if config.has_final_norm else nn.Identity()
        self.to_empty(device=torch.get_default_device())  # "meta": to count, or to load weights
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices N(0, init_std) in order of definition, biases 0, norms 1 and 0; then the branch
        outputs by branch_init. All variants of one seed share their draws: norms draw nothing."""
        generator = torch.Generator().manual_seed(seed)
        V, std = self.config.vocab_size, self.config.init_std
        for name, p in self.named_parameters():
            # The vocabulary's padding stays zero; the only vectors called weight are the norms'.
            p.fill_(1 if p.dim() == 1 and name.endswith("weight") else 0)
            if p.dim() == 2:
                (p[:V] if p is self.wte.weight else p).normal_(0, std, generator=generator)
        scale = {"scaled": (2 * self.config.n_layer) ** -0.5, "plain": 1, "zero": 0}
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                p.mul_(scale[self.config.branch_init])

    def hidden(self, idx: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """The stream before the head, (B, T, C), of token ids (B, T) that follow the cache's."""
        total = idx.size(1) + (cache.length if cache else 0)
        if total > self.config.block_size:
            raise ValueError(f"{total} tokens are longer than block_size {self.config.block_size}")
        pos = cache.advance(idx.size(1)) if cache else torch.arange(total, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for i, block in enumerate(self.h):
            x = block(x, partial(cache.extend, i) if cache else None)
        return self.ln_f(x)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (..., V): the padding is computed, since even sizes are faster, and cut off."""
        return F.linear(x, self.wte.weight)[..., : self.config.vocab_size]

    def forward(self, idx: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """Logits (B, T, V) of the next token after each of idx (B, T)."""
        return self.head(self.hidden(idx, cache))

    def loss(self, idx: torch.Tensor, targets: torch.Tensor, chunk: int | None = None):
        """Mean nats per token of targets (B, T) < V. `chunk`: tokens whose logits exist at once."""
        x, targets, V = self.hidden(idx).flatten(0, 1), targets.flatten(), self.config.vocab_size
        chunk = chunk or max(1, LOGITS_AT_ONCE.get(x.device.type, 2**25) // V)
        if len(x) > chunk and torch.is_grad_enabled():
            return HeadLoss.apply(x, self.wte.weight, targets, V, chunk) / len(x)
        wide, total = torch.promote_types(x.dtype, torch.float32), 0.0
        for xs, t in zip(x.split(chunk), targets.split(chunk), strict=True):
            total = total + F.cross_entropy(self.head(xs).to(wide), t, reduction="sum")
        return total / len(x)
