"""Schedule, groups and update against hand formulas and torch's unfused optimizers."""

import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from tiny import TINY

from config import OptimizerConfig
from model import GPT
from optim import Optimizer, lr_at, parameter_groups

KINDS = pytest.mark.parametrize("kind", ["adamw", "muon"])
EMBEDDINGS = {"wte.weight", "wpe.weight"}
SCHEDULE = OptimizerConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10)


def gradients(model, seed, gain=1.0):
    """Random gradients of global norm `gain`, the same for every model of this shape."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    for p in model.parameters():
        p.grad *= gain / norm


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def saved(optimizer):
    return {name: t.clone() for name, t in optimizer.state().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def steps(model, optimizer, seeds, gain=1.0, lr=1e-2):
    for seed in seeds:
        gradients(model, seed, gain)
        optimizer.step(lr)


# Schedule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 1e-4), (4, 5e-4), (9, 1e-3), (10, 1e-3), (55, 5.5e-4), (100, 1e-4), (101, 1e-4)],
)
def test_the_learning_rate_is_the_tables(step, lr):
    assert lr_at(step, SCHEDULE, 100) == pytest.approx(lr, rel=1e-12)


def test_the_learning_rate_rises_then_falls_and_is_never_0():
    rates = [lr_at(step, SCHEDULE, 100) for step in range(101)]
    assert all(a < b for a, b in pairwise(rates[:10]))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert min(rates) == pytest.approx(1e-4)
    assert max(rates) == 1e-3


def test_the_decay_is_a_cosine():
    for step in range(10, 101):
        half_angle = math.pi / 2 * (step - 10) / 90
        expected = 1e-4 + 9e-4 * math.cos(half_angle) ** 2
        assert lr_at(step, SCHEDULE, 100) == pytest.approx(expected, rel=1e-12)


def test_the_learning_rate_depends_on_nothing_but_the_step():
    forwards = [lr_at(step, SCHEDULE, 100) for step in range(101)]
    backwards = [lr_at(step, SCHEDULE, 100) for step in reversed(range(101))]
    assert forwards == backwards[::-1]


def test_without_warm_up_the_first_step_has_the_full_learning_rate():
    assert lr_at(0, OptimizerConfig(lr=1e-3, warmup_steps=0), 100) == 1e-3


def test_the_last_learning_rate_is_a_tenth_unless_told():
    assert lr_at(100, OptimizerConfig(lr=1e-3, warmup_steps=0), 100) == pytest.approx(1e-4)
    assert lr_at(100, OptimizerConfig(lr=1e-3, min_lr=0.0, warmup_steps=0), 100) == 0


@pytest.mark.parametrize("total", [1, 10])
def test_a_run_may_be_all_warm_up(total):
    cfg = OptimizerConfig(lr=1e-3, warmup_steps=total)
    expected = [1e-3 * (step + 1) / total for step in range(total)]
    assert [lr_at(step, cfg, total) for step in range(total)] == pytest.approx(expected)


# Groups -----------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_every_parameter_is_in_exactly_one_group(kind, decay_embeddings):
    model = GPT(TINY)
    cfg = OptimizerConfig(optimizer=kind, decay_embeddings=decay_embeddings)
    groups = parameter_groups(model, cfg)
    names = [name for group in groups.values() for name in group]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert names.count("wte.weight") == 1  # the tied one too
    matrices = {n for n, p in model.named_parameters() if p.dim() == 2}
    blocks = matrices - EMBEDDINGS
    assert set(groups["muon"]) == (blocks if kind == "muon" else set())
    decayed = EMBEDDINGS if decay_embeddings else set()
    assert set(groups["decayed"]) == (decayed if kind == "muon" else blocks | decayed)
    assert all(
        groups[g][n] is p for n, p in model.named_parameters() for g in groups if n in groups[g]
    )


@KINDS
def test_the_optimizers_hold_each_tensor_once_and_decay_no_vector(kind):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind, weight_decay=0.3))
    used = [o for o in (optimizer.adamw, optimizer.muon) if o]
    groups = [group for o in used for group in o.param_groups]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert all(decays[id(p)] == (0.3 if p.dim() == 2 else 0) for p in model.parameters())


@KINDS
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_a_zero_gradient_step_only_decays_matrices(kind, decay_embeddings):
    model = GPT(TINY)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5 if p.dim() == 1 else 0
    before = weights(model)
    cfg = OptimizerConfig(optimizer=kind, weight_decay=0.1, decay_embeddings=decay_embeddings)
    optimizer = Optimizer(model, cfg)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(lr=0.1)
    for name, p in model.named_parameters():
        kept = p.dim() == 1 or (name in EMBEDDINGS and not decay_embeddings)
        expected = before[name] * (1 if kept else 0.99)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)


@KINDS
def test_the_vocabularys_padding_stays_zero(kind):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    idx = torch.randint(65, (2, 17))
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(idx[:, :-1], idx[:, 1:]).backward()
        optimizer.step(lr=1e-2)
    assert (model.wte.weight[65:] == 0).all()
    assert (model.wte.weight[:65] != GPT(TINY).wte.weight[:65]).any()


# The update -------------------------------------------------------------------------------------

# AdamW forgets a constant factor of all gradients, so that clipping shows only where norms differ.
GAINS = [0.1, 50.0, 3.0]


def reference(model, cfg):
    """torch's plain loops and clip_grad_norm_, with groups by shape."""
    by_dim = {d: [p for p in model.parameters() if p.dim() == d] for d in (1, 2)}
    embeddings, muon = [model.wte.weight, model.wpe.weight], None
    if cfg.optimizer == "muon":
        blocks = [p for p in by_dim[2] if not any(p is e for e in embeddings)]
        muon = torch.optim.Muon(
            blocks, weight_decay=cfg.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        by_dim[2] = embeddings
    adamw = torch.optim.AdamW(
        [
            {"params": by_dim[2], "weight_decay": cfg.weight_decay},
            {"params": by_dim[1], "weight_decay": 0.0},
        ],
        betas=(cfg.beta1, cfg.beta2),
        eps=1e-8,
        foreach=False,
        fused=False,
    )
    optimizers = [adamw, muon] if muon else [adamw]

    def step(lr):
        if cfg.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    return step


def three_steps(model, step):
    norms = []
    for seed, gain in enumerate(GAINS):
        gradients(model, seed, gain)
        norms.append(step(lr=1e-2 / (seed + 1)))
    return norms


@KINDS
@pytest.mark.parametrize("grad_clip", [0.0, 1.0, 10.0, 100.0])
def test_three_steps_equal_those_of_torchs_unfused_optimizers(kind, grad_clip):
    cfg = OptimizerConfig(optimizer=kind, grad_clip=grad_clip, beta1=0.8, beta2=0.9)
    ours = GPT(TINY)
    theirs, start = copy.deepcopy(ours), weights(ours)
    norms = three_steps(ours, Optimizer(ours, cfg).step)
    three_steps(theirs, reference(theirs, cfg))
    assert [norm.item() for norm in norms] == pytest.approx(GAINS, rel=1e-5)  # before clipping
    # Muon rounds to bfloat16 on its way: a last bit of a gradient may move it by 2^-8 of a step.
    atol = 1e-4 if kind == "muon" else 1e-6
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        assert (a - start[name]).abs().max() > 1e-3


@KINDS
def test_clipping_changes_the_steps_that_the_last_test_compares(kind):
    after = {}
    for grad_clip in (0.0, 1.0, 10.0):
        model = GPT(TINY)
        cfg = OptimizerConfig(optimizer=kind, grad_clip=grad_clip)
        three_steps(model, Optimizer(model, cfg).step)
        after[grad_clip] = model.h[0].mlp.c_fc.weight
    assert (after[0.0] - after[1.0]).abs().max() > 1e-3
    assert (after[1.0] - after[10.0]).abs().max() > 1e-3


def test_muon_steps_as_far_as_adamw_in_every_direction():
    """The gradient's singular values all become about 1; times 0.2 sqrt(max(A, B)), so that the
    root mean square of the update is AdamW's usual 0.2."""
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer="muon", weight_decay=0.0))
    before = weights(model)
    gradients(model, seed=0)
    optimizer.step(lr=1.0)
    assert set(optimizer.muon.state) == set(parameter_groups(model, optimizer.cfg)["muon"].values())
    for name in parameter_groups(model, optimizer.cfg)["muon"]:
        update = model.get_parameter(name).detach() - before[name]
        assert 0.15 < update.square().mean().sqrt() < 0.22, name
        values = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
        assert values.max() < 1.2, name
        assert values.quantile(0.1) > 0.6, name


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_splitting_a_batch_changes_neither_gradient_nor_step(decay_embeddings):
    """8 rows at once, as 2 x 4 and as 1 x 8. The division of the loss by the number of
    micro-batches is what makes clipping see the same norm."""
    idx = torch.randint(65, (8, 17))
    results = []
    for parts in (1, 2, 8):
        model = GPT(TINY).double()
        cfg = OptimizerConfig(grad_clip=0.5, decay_embeddings=decay_embeddings)
        optimizer, norms, first = Optimizer(model, cfg), [], None
        for _ in range(3):
            optimizer.zero_grad()
            for rows in idx.chunk(parts):
                (model.loss(rows[:, :-1], rows[:, 1:]) / parts).backward()
            first = first or [p.grad.clone() for p in model.parameters()]
            norms.append(optimizer.step(lr=1e-3))
        results.append((first, torch.stack(norms), list(weights(model).values())))
    (grads, norms, after), *others = results
    assert norms.min() > 0.5
    for other_grads, other_norms, other_after in others:
        torch.testing.assert_close(other_grads, grads, rtol=0, atol=1e-12)
        torch.testing.assert_close(other_norms, norms, rtol=1e-9, atol=0)
        torch.testing.assert_close(other_after, after, rtol=0, atol=1e-10)


@KINDS
def test_training_lowers_the_loss(kind):
    model, idx = GPT(TINY), torch.randint(65, (2, 17))
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        loss = model.loss(idx[:, :-1], idx[:, 1:])
        loss.backward()
        optimizer.step(lr=1e-2)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(65), abs=0.1)
    assert losses[-1] < 0.5


def test_one_step_moves_the_tied_matrix_once_for_both_uses():
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(weight_decay=0.0))
    before = weights(model)["wte.weight"]
    gradients(model, seed=0)
    optimizer.step(lr=1e-2)
    # AdamW's first step is lr times the gradient's sign, once.
    assert (model.wte.weight - before).abs().max().item() == pytest.approx(1e-2, rel=1e-3)
    assert torch.equal(model.head(torch.eye(32)).T, model.wte.weight[:65])


# Gradients that are not finite ------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("name", ["wpe.weight", "h.1.mlp.c_fc.weight", "ln_f.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_leaves_no_trace(kind, name, value, grad_clip):
    cfg = OptimizerConfig(optimizer=kind, grad_clip=grad_clip)
    model, other = GPT(TINY), GPT(TINY)
    optimizer, undisturbed = Optimizer(model, cfg), Optimizer(other, cfg)
    steps(model, optimizer, [1, 2])
    steps(other, undisturbed, [1, 2])
    before, state = weights(model), saved(optimizer)
    gradients(model, seed=3)
    model.get_parameter(name).grad.view(-1)[5] = value
    norm = optimizer.step(lr=1e-2)
    assert not norm.isfinite()
    assert_equal(weights(model), before)
    assert_equal(saved(optimizer), state)
    steps(model, optimizer, [4, 5])
    steps(other, undisturbed, [4, 5])
    assert_equal(weights(model), weights(other))
    assert_equal(saved(optimizer), saved(undisturbed))
    assert not torch.equal(model.wte.weight, before["wte.weight"])


@KINDS
def test_the_very_first_step_may_be_skipped(kind):
    model, other = GPT(TINY), GPT(TINY)
    cfg = OptimizerConfig(optimizer=kind)
    optimizer, undisturbed = Optimizer(model, cfg), Optimizer(other, cfg)
    gradients(model, seed=1, gain=math.nan)
    optimizer.step(lr=1e-2)
    assert_equal(weights(model), weights(other))
    steps(model, optimizer, [2, 3])
    steps(other, undisturbed, [2, 3])
    assert_equal(weights(model), weights(other))


# float16's loss scale ---------------------------------------------------------------------------


def adapt(optimizer, finite, times=1):
    for _ in range(times):
        optimizer._adapt_scale(torch.tensor(finite))


@pytest.mark.parametrize(
    ("events", "scale", "good"),
    [
        ([], 2**16, 0),
        ([(True, 1)], 2**16, 1),
        ([(False, 1)], 2**15, 0),
        ([(False, 3)], 2**13, 0),
        ([(True, 1999)], 2**16, 1999),
        ([(True, 2000)], 2**17, 0),
        ([(True, 4000)], 2**18, 0),
        ([(True, 1999), (False, 1), (True, 1)], 2**15, 1),
        ([(True, 1999), (False, 1), (True, 2000)], 2**16, 0),
    ],
)
def test_the_loss_scale_halves_on_overflow_and_doubles_after_2000_good_steps(events, scale, good):
    optimizer = Optimizer(GPT(TINY), OptimizerConfig(), float16=True)
    for finite, times in events:
        adapt(optimizer, finite, times)
    assert optimizer.scale.item() == scale
    assert optimizer.good_steps.item() == good


@pytest.mark.parametrize(("float16", "scales"), [(True, [2**16, 2**15]), (False, [1, 1])])
def test_only_float16_scales_the_loss(float16, scales):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(), float16=float16)
    seen = []
    for gain in (1.0, math.inf):
        gradients(model, 0, gain)
        optimizer.step(lr=1e-3)
        seen.append(optimizer.scale.item())
    assert seen == scales


@KINDS
def test_the_loss_scale_changes_nothing_but_the_loss(kind):
    cfg = OptimizerConfig(optimizer=kind, grad_clip=1.0)
    results = []
    for scales in ([1.0] * 3, [2.0**16, 2.0**15, 2.0**16], [8.0, 64.0, 1.0]):
        model, norms = GPT(TINY), []
        optimizer = Optimizer(model, cfg, float16=True)
        for seed, (scale, gain) in enumerate(zip(scales, GAINS, strict=True)):
            optimizer.scale.fill_(scale)
            gradients(model, seed, gain * scale)
            norms.append(optimizer.step(lr=1e-2).item())
        results.append((norms, weights(model)))
    (norms, after), *others = results
    for other_norms, other_after in others:
        assert other_norms == pytest.approx(norms, rel=1e-6)
        for name, p in other_after.items():
            torch.testing.assert_close(p, after[name], rtol=1e-6, atol=1e-7)


# State ------------------------------------------------------------------------------------------


def restarted(model, state, **options):
    """A new model and optimizer that continue from copies of these weights and this state."""
    new = GPT(model.config, seed=99)
    new.load_state_dict(weights(model))
    optimizer = Optimizer(new, OptimizerConfig(**options))
    optimizer.load_state(state)
    return new, optimizer


@KINDS
def test_a_restart_from_the_state_continues_bit_for_bit(kind):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    steps(model, optimizer, [1, 2], gain=3.0)
    new, again = restarted(model, saved(optimizer), optimizer=kind)
    assert_equal(again.state(), optimizer.state())
    for seed in (3, 4, 5):
        steps(model, optimizer, [seed], gain=3.0)
        steps(new, again, [seed], gain=3.0)
        assert_equal(weights(new), weights(model))
    assert_equal(saved(again), saved(optimizer))


def test_the_loss_scale_is_part_of_the_state():
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(), float16=True)
    again = Optimizer(GPT(TINY), OptimizerConfig(), float16=True)
    steps(model, optimizer, [1])
    adapt(optimizer, False, 2)
    adapt(optimizer, True, 5)
    again.load_state(saved(optimizer))
    assert (again.scale.item(), again.good_steps.item()) == (2**14, 5)


@pytest.mark.parametrize("float16", [True, False])
def test_a_run_resumed_in_another_dtype_starts_with_that_dtypes_loss_scale(float16):
    """--dtype may change on a resume: float16 would lose its small gradients at scale 1, which
    takes 2,000 steps to double, and the others need no scale."""
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(), float16=not float16)
    steps(model, optimizer, [1])
    again = Optimizer(GPT(TINY), OptimizerConfig(), float16=float16)
    again.load_state(saved(optimizer))
    assert again.scale.item() == (2**16 if float16 else 1)
    assert again.good_steps.item() == 0


@KINDS
@pytest.mark.parametrize("skipped", [0, 1])
def test_the_state_of_a_run_without_a_good_step_can_be_loaded(kind, skipped):
    """float16's first steps overflow until the loss scale fits; a run that is stopped and saved by
    then must be resumable like any other."""
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    for seed in range(skipped):
        gradients(model, seed, gain=math.inf)
        optimizer.step(lr=1e-2)
    new, again = restarted(model, saved(optimizer), optimizer=kind)
    steps(model, optimizer, [1, 2])
    steps(new, again, [1, 2])
    assert_equal(weights(new), weights(model))


@KINDS
def test_the_state_names_every_tensor_after_its_parameter(kind):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    steps(model, optimizer, [1])
    expected = {"loss_scale", "good_steps"}
    for name, p in model.named_parameters():
        muon = kind == "muon" and p.dim() == 2 and name not in EMBEDDINGS
        keys = ("momentum_buffer",) if muon else ("exp_avg", "exp_avg_sq", "step")
        expected |= {f"{name}.{key}" for key in keys}
    assert set(optimizer.state()) == expected


@KINDS
def test_loading_copies_the_tensors(kind):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    steps(model, optimizer, [1])
    state = saved(optimizer)
    as_read = {name: t.clone() for name, t in state.items()}
    new, again = restarted(model, state, optimizer=kind)
    steps(new, again, [2, 3])
    assert_equal(state, as_read)


def without(state, name):
    return {n: t for n, t in state.items() if n != name}


@pytest.mark.parametrize(
    ("kind", "spoil", "name"),
    [
        ("adamw", without, "wte.weight.exp_avg"),
        ("adamw", without, "h.0.ln_1.bias.step"),
        ("adamw", without, "loss_scale"),
        ("muon", without, "h.1.attn.c_attn.weight.momentum_buffer"),
        ("adamw", lambda state, name: state | {name: torch.zeros(3)}, "h.7.ln_1.weight.exp_avg"),
        ("adamw", lambda state, name: state | {name: torch.zeros(8, 32)}, "wpe.weight.exp_avg_sq"),
        ("muon", lambda state, name: state | {name: torch.zeros(2)}, "good_steps"),
        (
            "muon",
            lambda state, name: state | {name: state[name].T},
            "h.0.mlp.c_fc.weight.momentum_buffer",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(kind, spoil, name):
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    steps(model, optimizer, [1])
    before = saved(optimizer)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        optimizer.load_state(spoil(saved(optimizer), name))
    assert_equal(saved(optimizer), before)


def test_the_state_of_another_optimizer_is_refused():
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(optimizer="muon"))
    steps(model, optimizer, [1])
    with pytest.raises(ValueError, match=r"exp_avg.* and \d+ more"):
        Optimizer(GPT(TINY), OptimizerConfig(optimizer="adamw")).load_state(optimizer.state())


def test_both_uses_of_the_embedding_learn():
    """A word that is never read is still learnt as an answer, and the other way round."""
    model = GPT(TINY)
    optimizer = Optimizer(model, OptimizerConfig(weight_decay=0.0))
    read, answer = torch.full((1, 4), 3), torch.full((1, 4), 9)
    before = model(read)[0, :, 9].mean().item()
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(read).flatten(0, 1), answer.flatten()).backward()
        optimizer.step(lr=1e-2)
    assert model(read)[0, :, 9].mean().item() > before + 0.1
