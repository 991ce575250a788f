"""What depth does before the first step, against closed formulas and plain loops."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from ablation import initial
from model import GPT, GPTConfig

# As ablate.py measures it: 128 wide, with 24 layers.
SHAPE = GPTConfig(
    vocab_size=257,
    block_size=64,
    n_layer=24,
    n_head=4,
    n_embd=128,
    init_std=0.02 * math.sqrt(768 / 128),
)
SMALL = dataclasses.replace(SHAPE, vocab_size=65, block_size=16, n_layer=3, n_embd=32)


def by_series(rows, figure) -> dict[str, dict[int, float]]:
    found = {}
    for r in rows:
        if r["figure"] == figure:
            found.setdefault(r["series"], {})[r["layer"]] = r["value"]
    return found


@pytest.fixture(scope="module")
def lesson():
    return initial.lesson()


@pytest.fixture(scope="module")
def last():
    """Gradient norm of the last layer's second MLP matrix by (series, depth)."""
    rows = initial.gradients(SHAPE, depths=(6, 24))
    assert {r["figure"] for r in rows} == {"gradients"}
    assert len(rows) == 6 * (6 + 24)
    return {(r["series"], r["depth"]): r["value"] for r in rows if r["layer"] == r["depth"]}


@pytest.fixture(scope="module")
def stream():
    return by_series(initial.stream(SHAPE, seeds=(0,)), "stream")


def test_bare_layers_take_a_signal_to_the_power_of_their_gain(lesson):
    signal = by_series(lesson, "signal")
    assert signal["bare, gain 0.7"][12] == pytest.approx(0.0138, rel=0.01)
    assert signal["bare, gain 1.3"][12] == pytest.approx(23.3, rel=0.01)
    for gain in (0.7, 1.0, 1.3):
        values = signal[f"bare, gain {gain}"]
        assert values == pytest.approx({l: gain**l for l in range(13)}, rel=0.01)


def test_bare_gradients_mirror_the_signal(lesson):
    gradient = by_series(lesson, "gradient")
    for gain in (0.7, 1.0, 1.3):
        values = gradient[f"bare, gain {gain}"]
        assert values == pytest.approx({l: gain ** (12 - l) for l in range(13)}, rel=0.01)


def test_a_norm_before_each_layer_holds_the_signal_at_the_gain(lesson):
    signal = by_series(lesson, "signal")
    for gain in (0.7, 1.0, 1.3):
        values = signal[f"norm, gain {gain}"]
        assert values.pop(0) == pytest.approx(1, rel=0.01)
        assert values == pytest.approx(dict.fromkeys(range(1, 13), gain), rel=0.01)


@pytest.mark.parametrize("figure", ["signal", "gradient"])
def test_skips_alone_grow_with_the_power_of_depth(lesson, figure):
    """Each layer adds a part at right angles, so that squares add: 1 + gain² a layer."""
    for gain in (0.7, 1.0, 1.3):
        values = by_series(lesson, figure)[f"skip, gain {gain}"]
        for layer, value in values.items():
            steps = layer if figure == "signal" else 12 - layer
            assert value == pytest.approx((1 + gain**2) ** (steps / 2), rel=0.03)


def test_norms_within_skips_let_the_square_grow_by_a_line(lesson):
    for gain in (0.7, 1.0, 1.3):
        values = by_series(lesson, "signal")[f"norm and skip, gain {gain}"]
        for layer, value in values.items():
            assert value == pytest.approx(math.sqrt(1 + layer * gain**2), rel=0.08)


def test_the_gradient_through_norms_and_skips_depends_little_on_the_gain(lesson):
    """Backward, layer l multiplies squares by about 1 + g² / (1 + (l - 1) g²): 1 + 12 g² in all."""
    for gain in (0.7, 1.0, 1.3):
        value = by_series(lesson, "gradient")[f"norm and skip, gain {gain}"][0]
        assert value == pytest.approx(math.sqrt(1 + 12 * gain**2), rel=0.1)


def test_a_small_lesson_is_what_numpy_computes():
    """Rotations from the same draws, R's diagonal positive; the gradient of sum(x_L * end) goes
    back through I + W with the skip, and through W without it."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(6, 8, generator=generator).double().numpy()
    end = torch.randn(6, 8, generator=generator).double().numpy()
    q, r = np.linalg.qr(torch.randn(3, 8, 8, generator=generator).double().numpy())
    q = np.stack([q[l] * np.sign(np.diag(r[l])) for l in range(3)])
    rows = initial.lesson(n_layer=3, width=8, tokens=6, seed=5)
    for gain in (0.7, 1.0, 1.3):
        for name, own in (("bare", 0), ("skip", 1)):
            steps = [own * np.eye(8) + gain * q[l] for l in range(3)]
            x, g = [start], [end]
            for step in steps:
                x.append(x[-1] @ step.T)
            for step in reversed(steps):
                g.insert(0, g[0] @ step)
            for figure, values in (("signal", x), ("gradient", g)):
                want = {l: np.sqrt((v**2).mean()) for l, v in enumerate(values)}
                assert by_series(rows, figure)[f"{name}, gain {gain}"] == pytest.approx(want, 1e-5)


def test_the_last_gradient_falls_with_depth_in_pre_ln_and_not_in_post_ln(last):
    """Xiong et al. 2020, theorem 1: as 1 / sqrt(depth), so by 2 from 6 to 24 layers; not at all."""
    pre, post = (last[f"{arm}, xavier", 6] / last[f"{arm}, xavier", 24] for arm in ("pre", "post"))
    assert 1.5 <= pre <= 2.1
    assert 1 / 1.3 < post < 1.3


def test_scaled_branches_remove_the_effect_of_depth_and_plain_ones_have_it(last):
    for arm in ("pre", "post"):
        assert 0.8 <= last[f"{arm}, scaled", 6] / last[f"{arm}, scaled", 24] <= 1.25
    assert last["pre, plain", 6] / last["pre, plain", 24] > 1.5


@pytest.mark.parametrize("init", ["xavier", "scaled", "plain"])
def test_the_mean_square_of_the_pre_ln_stream_is_a_line_in_depth(stream, init):
    layers, values = map(np.array, zip(*stream[f"pre, {init}"].items(), strict=True))
    assert list(layers) == list(range(1, 25))
    design = np.stack([np.ones(24), layers], axis=1)
    (_, slope), residual, *_ = np.linalg.lstsq(design, values, rcond=None)
    assert slope > 0
    assert 1 - residual[0] / ((values - values.mean()) ** 2).sum() > 0.98


@pytest.mark.parametrize("init", ["xavier", "scaled", "plain"])
def test_the_post_ln_stream_has_mean_square_one(stream, init):
    values = stream[f"post, {init}"]
    assert values == pytest.approx(dict.fromkeys(range(1, 25), 1.0), abs=1e-3)


def test_xavier_matrices_have_their_variance_query_key_and_value_one_by_one():
    model = initial.initialised(dataclasses.replace(SHAPE, n_layer=2), "xavier", 3)
    C = 128
    for block in model.h:
        q, k, v = block.attn.c_attn.weight.split(C)
        matrices = [q, k, v, block.attn.c_proj.weight, block.mlp.c_fc.weight]
        for matrix in [*matrices, block.mlp.c_proj.weight]:
            out, into = matrix.shape
            assert matrix.var().item() == pytest.approx(2 / (into + out), rel=0.05)
            assert abs(matrix.mean().item()) < 0.01
        assert not torch.equal(q, k)
    summed = model.wte.weight[:64] + model.wpe.weight
    assert summed.var().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("init", ["xavier", "scaled", "plain"])
def test_pre_and_post_ln_of_a_seed_start_from_the_same_weights(init):
    pre, post, other = (
        dict(initial.initialised(dataclasses.replace(SMALL, post_ln=p), init, s).named_parameters())
        for p, s in ((False, 3), (True, 3), (True, 4))
    )
    assert pre.keys() - post.keys() == {"ln_f.weight", "ln_f.bias"}
    for name, p in post.items():
        assert torch.equal(p, pre[name]), name
    assert not torch.equal(post["wte.weight"], other["wte.weight"])


def drawn(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, (2, 4, shape.block_size), generator=generator)


@pytest.mark.parametrize("post_ln", [False, True])
def test_the_stream_is_what_a_plain_loop_without_hooks_sees(post_ln):
    squares = []
    for seed in (0, 1):
        model = GPT(dataclasses.replace(SMALL, post_ln=post_ln, branch_init="plain"), seed)
        x = model.wte(drawn(SMALL, seed)[0]) + model.wpe(torch.arange(16))
        squares.append([])
        for b in model.h:
            if post_ln:
                x = b.ln_1(x + b.attn(x))
                x = b.ln_2(x + b.mlp(x))
            else:
                x = x + b.attn(b.ln_1(x))
                x = x + b.mlp(b.ln_2(x))
            squares[-1].append(float((x.detach().numpy().astype(np.float64) ** 2).mean()))
    rows = by_series(initial.stream(SMALL), "stream")
    want = dict(enumerate(np.mean(squares, axis=0).tolist(), start=1))
    assert rows[f"{'post' if post_ln else 'pre'}, plain"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("post_ln", [False, True])
def test_the_gradients_are_those_of_the_plain_loss(post_ln):
    norms = []
    for seed in (0, 1):
        model = GPT(dataclasses.replace(SMALL, post_ln=post_ln), seed)
        idx, targets = drawn(SMALL, seed)
        model.loss(idx, targets).backward()
        norms.append([float((b.mlp.c_proj.weight.grad**2).sum() ** 0.5) for b in model.h])
    rows = by_series(initial.gradients(SMALL, depths=(3,)), "gradients")
    want = dict(enumerate(np.mean(norms, axis=0).tolist(), start=1))
    assert rows[f"{'post' if post_ln else 'pre'}, scaled"] == pytest.approx(want, rel=1e-4)


def test_the_papers_head_has_rows_of_unit_length():
    """With all logits scaled by sqrt(2 / width), whose embeddings have variance a half."""
    model = initial.initialised(dataclasses.replace(SMALL, post_ln=True), "xavier", 0)
    idx, targets = drawn(SMALL, 0)
    head = model.wte.weight[:65] / math.sqrt(16)
    assert head.square().sum(1).mean().item() == pytest.approx(1, rel=0.1)
    logits = model.hidden(idx) @ head.detach().T
    model.zero_grad()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    want = model.h[-1].mlp.c_proj.weight.grad.norm().item()
    rows = by_series(initial.gradients(SMALL, depths=(3,), seeds=(0,)), "gradients")
    assert rows["post, xavier"][3] == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("depth", [6, 24])
@pytest.mark.parametrize("scale", [1, 5, 35])
def test_pre_lns_last_gradient_is_larger_as_the_final_norms_input_is_smaller(depth, scale):
    """The last matrix's gradient passes the last norm alone, which divides it by the root mean
    square of what it reads: small embeddings leave that small in pre-LN, and 1 in post-LN."""
    norms, sizes = [], []
    for post_ln in (False, True):
        model = GPT(dataclasses.replace(SHAPE, n_layer=depth, post_ln=post_ln))
        head = model.wte.weight[: SHAPE.vocab_size].detach().clone()
        with torch.no_grad():
            model.wte.weight.mul_(scale)
            model.wpe.weight.mul_(scale)
        last = model.h[-1].ln_2 if post_ln else model.ln_f
        last.register_forward_pre_hook(lambda _, x: sizes.append(x[0].square().mean().sqrt()))
        idx, targets = torch.randint(SHAPE.vocab_size, (2, 8, SHAPE.block_size))
        logits = torch.nn.functional.linear(model.hidden(idx), head).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, targets.flatten()).backward()
        norms.append(model.h[-1].mlp.c_proj.weight.grad.norm())
    ratio = (norms[0] / norms[1]).item()
    assert ratio == pytest.approx((sizes[1] / sizes[0]).item(), rel=0.1)
    if (depth, scale) == (24, 1):
        assert sizes[0].item() == pytest.approx(0.29, abs=0.01)
        assert ratio == pytest.approx(3.5, abs=0.2)
