"""The update: schedule, parameter groups, clipping, AdamW or Muon; nothing waits for the GPU."""

import math

import torch

from config import OptimizerConfig
from model import GPT

FIRST_LOSS_SCALE, GROW_SCALE_AFTER = 2.0**16, 2000  # float16 only; the values of torch's GradScaler


def lr_at(step: int, cfg: OptimizerConfig, steps: int) -> float:
    """Learning rate of the 0-based step: linear from lr / warmup_steps to lr, then a cosine that
    reaches min_lr at `steps` (Loshchilov & Hutter 2017, SGDR, equation 5)."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    progress = min(1.0, (step - cfg.warmup_steps) / max(1, steps - cfg.warmup_steps))
    return cfg.final_lr + (cfg.lr - cfg.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: GPT, cfg: OptimizerConfig) -> dict[str, dict[str, torch.nn.Parameter]]:
    """Every parameter by name in exactly one of "muon", "decayed" and "plain": matrices are
    decayed, vectors (norms and biases) are not."""
    groups = {"muon": {}, "decayed": {}, "plain": {}}
    for name, p in model.named_parameters():
        embedding = name in ("wte.weight", "wpe.weight")
        if p.dim() < 2 or (embedding and not cfg.decay_embeddings):
            groups["plain"][name] = p
        elif cfg.optimizer == "muon" and not embedding:
            groups["muon"][name] = p
        else:
            groups["decayed"][name] = p
    return groups


class Optimizer:
    """AdamW (Loshchilov & Hutter 2019), or Muon (Jordan 2024) for the blocks' matrices beside it.

    A step whose gradient is not finite is skipped: weights and moments stay as they are. That is
    decided on the device, where AdamW's fused kernel also applies clipping and loss scale, so that
    nothing waits (Muon, which has no such kernel, waits once a step)."""

    def __init__(self, model: GPT, cfg: OptimizerConfig, *, float16: bool = False):
        self.cfg, self.float16 = cfg, float16
        self.groups = groups = parameter_groups(model, cfg)
        self.names = {p: name for group in groups.values() for name, p in group.items()}
        decays = (("decayed", cfg.weight_decay), ("plain", 0.0))
        self.adamw = torch.optim.AdamW(
            [{"params": list(groups[g].values()), "weight_decay": d} for g, d in decays],
            lr=cfg.lr,
            betas=(cfg.beta1, cfg.beta2),
            eps=1e-8,
            fused=True,
        )
        self.muon = None
        if groups["muon"]:
            matrices = list(groups["muon"].values())
            # match_rms_adamw: one learning rate suits both (Liu et al. 2025, section 2.2).
            self.muon = torch.optim.Muon(
                matrices, cfg.lr, cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        # The moments exist from the start, so that a run without a good step can be resumed too.
        for p in (p for group in self.adamw.param_groups for p in group["params"]):
            zeros = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device)
            } | zeros
        for p in groups["muon"].values():
            self.muon.state[p] = {"momentum_buffer": torch.zeros_like(p)}
        device = model.wte.weight.device
        self.scale = torch.tensor(FIRST_LOSS_SCALE if float16 else 1.0, device=device)
        self.good_steps = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        """One update with the gradients that lie there. Returns their norm before clipping, on the
        device; not finite: the step was skipped."""
        grads = [p.grad for p in self.names if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) / self.scale
        finite = norm.isfinite()
        shrink = torch.clamp(self.cfg.grad_clip / (norm + 1e-6), max=1.0)
        shrink = shrink if self.cfg.grad_clip else torch.ones_like(norm)
        for optimizer in filter(None, (self.adamw, self.muon)):
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.adamw.grad_scale = (self.scale / shrink).float()
        self.adamw.found_inf = (~finite).float()
        self.adamw.step()
        if self.muon and finite.item():
            matrices = [p.grad for p in self.muon.param_groups[0]["params"]]
            torch._foreach_mul_(matrices, (shrink / self.scale).to(matrices[0].dtype))
            self.muon.step()
        if self.float16:
            self._adapt_scale(finite)
        return norm

    def _adapt_scale(self, finite: torch.Tensor) -> None:
        """Halve the loss scale after an overflow, double it after many steps without one."""
        self.good_steps = torch.where(finite, self.good_steps + 1, 0)
        grow = self.good_steps == GROW_SCALE_AFTER
        self.good_steps = torch.where(grow, 0, self.good_steps)
        factor = torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)
        self.scale = self.scale * factor

    def zero_grad(self) -> None:
        for p in self.names:
            p.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Everything the next step depends on, as tensors named `<parameter>.<what>`."""
        tensors = {"loss_scale": self.scale, "good_steps": self.good_steps}
        for optimizer in filter(None, (self.adamw, self.muon)):
            for p, entries in optimizer.state.items():
                tensors |= {f"{self.names[p]}.{key}": t for key, t in entries.items()}
        return tensors

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Inverse of state(). ValueError that names what is missing or does not fit."""
        expected = self.state()
        bad = sorted(expected.keys() ^ tensors.keys())
        both = [(name, expected[name], tensors[name]) for name in expected.keys() & tensors]
        bad += [n for n, a, b in both if (a.shape, a.dtype) != (b.shape, b.dtype)]
        if bad:
            more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
            raise ValueError(
                f"the optimizer's state does not fit this run: {', '.join(bad[:5])}{more}; to "
                "start anew from the weights alone, use --init-from with another --out-dir"
            )
        copy = {name: t.to(expected[name].device, copy=True) for name, t in tensors.items()}
        if self.float16 and copy["loss_scale"] != 1:  # 1: saved by a run in another dtype
            self.scale, self.good_steps = copy["loss_scale"], copy["good_steps"]
        for optimizer in filter(None, (self.adamw, self.muon)):
            for p, entries in optimizer.state.items():
                entries.update({key: copy[f"{self.names[p]}.{key}"] for key in entries})
