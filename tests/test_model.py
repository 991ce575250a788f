"""The model against independent oracles: numbers worked by hand, torch's own layers, autograd."""

import copy
import math
from dataclasses import replace
from functools import cache, reduce

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from tiny import TINY
from torch.autograd.functional import jacobian
from torch.nn.attention import SDPBackend, sdpa_kernel

from metrics import n_params
from model import GPT, MLP, Block, GPTConfig, HeadLoss, KVCache

SMALL = GPTConfig()
LAYOUTS = pytest.mark.parametrize("post_ln", [False, True], ids=["pre-LN", "post-LN"])
NORMS = pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])


def tiny(**changes):
    return replace(TINY, **changes)


@cache
def on_meta(config):
    with torch.device("meta"):
        return GPT(config)


def lively(config, dtype=torch.float64):
    """A model in which nothing hides behind small weights, zero biases or norms of weight 1."""
    model = GPT(replace(config, init_std=0.2)).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += torch.randn(p.shape, generator=generator, dtype=dtype) / 4
    return model


def tokens(B, T, V=TINY.vocab_size, seed=2):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


def stream(B=2, T=5, C=TINY.n_embd, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, C, generator=generator, dtype=torch.float64).to(dtype)


def run_blocks(blocks, x):
    return reduce(lambda x, block: block(x), blocks, x)


def close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class Branch(nn.Module):
    """Any function in the place of attention or MLP."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x, extend=None):
        return self.f(x)


# Counting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "norms"),
    [
        (SMALL, 38_400),
        (replace(SMALL, n_layer=24, n_head=16, n_embd=1024), 100_352),
        (replace(SMALL, post_ln=True), 36_864),
        (replace(SMALL, norm="rmsnorm"), 19_200),
        (replace(SMALL, post_ln=True, final_norm=True), 38_400),
        (replace(SMALL, final_norm=False), 36_864),
        (TINY, 320),
    ],
)
def test_norm_parameters_are_as_many_as_the_lesson_says(config, norms):
    model = on_meta(config)
    assert n_params(model)["norms"] == norms
    kinds = (nn.LayerNorm, nn.RMSNorm)
    modules = [m for m in model.modules() if isinstance(m, kinds)]
    assert sum(p.numel() for m in modules for p in m.parameters()) == norms


def test_norms_are_three_hundredths_of_a_percent_of_gpt2_small():
    counts = n_params(on_meta(SMALL))
    assert round(100 * counts["norms"] / counts["total"], 2) == 0.03


@pytest.mark.parametrize(
    ("config", "total", "without_positions", "without_embeddings"),
    [
        (SMALL, 124_439_808, 123_653_376, 85_056_000),
        (replace(SMALL, vocab_size=50304), 124_475_904, 123_689_472, 85_056_000),
        (TINY, 28_064, 27_552, 25_472),
    ],
)
def test_parameters_count_the_tied_head_once_and_the_padding_never(
    config, total, without_positions, without_embeddings
):
    counts = n_params(on_meta(config))
    assert counts["total"] == total
    assert counts["without_positions"] == without_positions
    assert counts["without_embeddings"] == without_embeddings
    V, T, C = config.vocab_size, config.block_size, config.n_embd
    in_the_blocks = config.n_layer * (12 * C * C + 13 * C) + 2 * C
    assert total == V * C + T * C + in_the_blocks


def test_a_model_on_the_meta_device_takes_no_memory():
    assert {p.device.type for p in on_meta(SMALL).parameters()} == {"meta"}


# Norms ------------------------------------------------------------------------------------------


def normed(values, *, weight=None, bias=None, eps=None):
    """What the norm of our blocks makes of one token."""
    norm = tiny(n_embd=len(values), n_head=1).make_norm().double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(weight or norm.weight.tolist()))
        norm.bias.copy_(torch.tensor(bias or norm.bias.tolist()))
        norm.eps = norm.eps if eps is None else eps
        return norm(torch.tensor(values, dtype=torch.float64))


def test_layer_norm_of_2_4_6_8_uses_the_biased_variance():
    by_hand = [v / 5**0.5 for v in (-3.0, -1.0, 1.0, 3.0)]
    close(normed([2.0, 4.0, 6.0, 8.0]), torch.tensor(by_hand, dtype=torch.float64), 2e-6)
    rounded = [-1.3416, -0.4472, 0.4472, 1.3416]
    close(normed([2.0, 4.0, 6.0, 8.0]), torch.tensor(rounded, dtype=torch.float64), 5e-5)
    unbiased = torch.tensor([-1.162, -0.387, 0.387, 1.162], dtype=torch.float64)
    assert (normed([2.0, 4.0, 6.0, 8.0]) - unbiased).abs().min() > 0.05


def test_layer_norm_scales_and_shifts_each_channel():
    out = normed([2.0, 4.0, 6.0, 8.0], weight=[1.0, 1.0, 2.0, 2.0], bias=[0.0, 0.0, 1.0, 1.0])
    expected = torch.tensor([-1.3416, -0.4472, 1.8944, 3.6833], dtype=torch.float64)
    close(out, expected, 5e-5)


def test_layer_norm_of_1_3_without_epsilon_is_exactly_minus_1_and_1():
    assert normed([1.0, 3.0], eps=0.0).tolist() == [-1.0, 1.0]


def test_epsilon_stands_inside_the_root():
    """The variance of [1, 1.002] is 1e-6, a tenth of epsilon: outside the root it would not
    matter, and the result would be near [-1, 1]."""
    by_hand = 1e-3 / math.sqrt(1e-6 + 1e-5)
    expected = torch.tensor([-by_hand, by_hand], dtype=torch.float64)
    close(normed([1.0, 1.002]), expected, 1e-9)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e4])
def test_layer_norm_of_a_constant_vector_is_its_shift(value):
    bias = [0.5, -1.0, 0.0, 2.0]
    assert normed([value] * 4, weight=[3.0, 3.0, 3.0, 3.0], bias=bias).tolist() == bias


def test_rms_norm_divides_by_the_root_mean_square_and_has_no_shift():
    norm = tiny(n_embd=4, n_head=1, norm="rmsnorm").make_norm()
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    x = torch.tensor([2.0, 4.0, 6.0, 8.0])
    close(norm(x), x / 30**0.5, 2e-6)


def test_each_token_is_normed_to_mean_0_and_variance_1():
    y = TINY.make_norm()(7 * stream() + 3)
    close(y.mean(-1), torch.zeros(2, 5), 1e-4)
    close(y.var(-1, correction=0), torch.ones(2, 5), 1e-4)


@NORMS
def test_a_token_is_normed_without_a_look_at_anything_else(norm):
    norm, x = tiny(norm=norm).make_norm(), 7 * stream(B=3) + 3
    y = norm(x)
    other = x.clone()
    other[:, 3:], other[2] = 100 * stream(B=3, seed=4)[:, 3:], -x[2]
    assert torch.equal(norm(other)[:2, :3], y[:2, :3])
    close(norm(x[1:2, 2:3]), y[1:2, 2:3], 1e-6)
    assert torch.equal(norm.eval()(x), y)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"post_ln": True}, False),
        ({"post_ln": True, "final_norm": True}, True),
        ({"final_norm": False}, False),
    ],
)
def test_the_final_norm_is_on_for_pre_ln_only_unless_told(changes, expected):
    model = lively(tiny(**changes))
    assert ("ln_f.weight" in model.state_dict()) == expected
    x = run_blocks(model.h, model.wte(tokens(2, 5)) + model.wpe(torch.arange(5)))
    hidden = model.hidden(tokens(2, 5))
    if expected:
        x = F.layer_norm(x, (32,), model.ln_f.weight, model.ln_f.bias, 1e-5)
    close(hidden, x, 1e-12)


# Residual connections ---------------------------------------------------------------------------


def block_of(f, n_embd=2, post_ln=False):
    """A block whose attention is f and whose MLP gives 0."""
    block = Block(tiny(n_embd=n_embd, n_head=1, post_ln=post_ln))
    block.attn, block.mlp = Branch(f), Branch(torch.zeros_like)
    return block


def test_a_residual_connection_adds_the_branch_to_its_input():
    block = block_of(lambda x: torch.tensor([0.1, 0.2]))
    close(block(torch.tensor([1.0, -1.0])), torch.tensor([1.1, -0.8]), 1e-7)


def test_the_gradient_of_a_residual_connection_is_one_and_the_branchs():
    block = block_of(lambda x: 0.5 * x)
    block.ln_1 = nn.Identity()
    v = torch.tensor([1.0, -1.0], requires_grad=True)
    block(v).sum().backward()
    assert v.grad.tolist() == [1.5, 1.5]


def test_post_ln_norms_the_sum_and_not_the_branchs_input():
    x = torch.tensor([3.0, 1.0])
    block = block_of(lambda x: x + torch.tensor([0.0, 4.0]), post_ln=True)
    # x + f(x) = [6, 6], which both norms make 0; f(norm(x)) would not give a constant vector.
    assert block(x).tolist() == [0.0, 0.0]


def zeroed(**changes):
    return GPT(tiny(n_layer=12, branch_init="zero", init_std=0.2, **changes))


@NORMS
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_zero_init_block_and_a_stack_of_12_return_their_input(dropout, norm):
    model, x = zeroed(dropout=dropout, norm=norm), stream()
    for mode in (True, False):
        model.train(mode)
        assert all(torch.equal(block(x), x) for block in model.h)
        assert torch.equal(run_blocks(model.h, x), x)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_jacobian_of_a_zero_init_stack_is_the_identity(dropout):
    model, x = zeroed(dropout=dropout, n_embd=8), stream(B=1, T=3, C=8)
    for f in (*model.h, lambda x: run_blocks(model.h, x)):
        assert torch.equal(jacobian(f, x).reshape(24, 24), torch.eye(24))


def test_a_zero_init_post_ln_block_is_two_layer_norms():
    block, x = zeroed(post_ln=True).h[0], 5 * stream() + 1
    expected = F.layer_norm(F.layer_norm(x, (32,)), (32,))
    close(block(x), expected, 1e-6)
    assert not torch.allclose(block(x), x, atol=0.1)


@pytest.mark.parametrize("n_layer", [1, 3])
def test_the_jacobian_of_residual_blocks_is_the_product_of_identity_plus_branch(n_layer):
    """(I + J_N) ... (I + J_1): each block is two residual connections, attention's and the MLP's.
    Post-LN, whose norms stand on the stream, is no such product."""
    config = tiny(n_layer=n_layer, n_embd=8)
    model, x = lively(config), stream(B=1, T=3, C=8, dtype=torch.float64)
    n, product, here = x.numel(), torch.eye(x.numel(), dtype=torch.float64), x
    for block in model.h:
        for branch in (lambda x, b=block: b.attn(b.ln_1(x)), lambda x, b=block: b.mlp(b.ln_2(x))):
            J = jacobian(branch, here).reshape(n, n)
            product = (torch.eye(n, dtype=torch.float64) + J) @ product
            here = here + branch(here)
    whole = jacobian(lambda x: run_blocks(model.h, x), x).reshape(n, n)
    close(whole, product, 1e-11 * whole.abs().max().item())
    post = lively(replace(config, post_ln=True))
    whole = jacobian(lambda x: run_blocks(post.h, x), x).reshape(n, n)
    assert (whole - product).abs().max() > 0.1


@pytest.mark.parametrize(("gain", "expected"), [(0.7, 0.0138), (1.3, 23.3)])
def test_12_random_layers_fade_or_blow_up_a_signal_and_pre_ln_does_not(gain, expected):
    assert gain**12 == pytest.approx(expected, rel=5e-3)
    n, generator = 512, torch.Generator().manual_seed(0)
    x = bare = torch.randn(256, n, generator=generator)
    for _ in range(12):
        W = gain * torch.randn(n, n, generator=generator) / n**0.5
        bare = bare @ W
        x = block_of(lambda x, W=W: x @ W, n_embd=n)(x)
    assert bare.square().mean().sqrt().item() == pytest.approx(expected, rel=0.05)
    # Each branch adds gain² to the mean square: it grows by sums, not by products.
    assert x.square().mean().item() == pytest.approx(1 + 12 * gain**2, rel=0.1)


def test_the_pre_ln_stream_grows_like_the_root_of_depth_until_the_final_norm():
    config = GPTConfig(65, 32, n_layer=24, n_head=2, n_embd=128, branch_init="plain", init_std=0.07)
    model = GPT(config)
    x = model.wte(tokens(4, 32)) + model.wpe(torch.arange(32))
    power = [x.square().mean().item()]
    for block in model.h:
        x = block(x)
        power.append(x.square().mean().item())
    depth, y = torch.arange(25, dtype=torch.float64), torch.tensor(power, dtype=torch.float64)
    r2 = torch.corrcoef(torch.stack([depth, y]))[0, 1] ** 2
    assert r2 > 0.98
    assert power[-1] > 10 * power[0]
    assert model.ln_f(x).square().mean().sqrt().item() == pytest.approx(1, abs=1e-3)


# Against torch's own Transformer ----------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_two_blocks_equal_torchs_transformer_encoder_layers(post_ln, dtype, atol):
    model = lively(tiny(post_ln=post_ln, final_norm=False), dtype)
    C, theirs = 32, []
    for block in model.h:
        layer = nn.TransformerEncoderLayer(
            C,
            nhead=2,
            dim_feedforward=4 * C,
            dropout=0.0,
            activation=lambda x: F.gelu(x, approximate="tanh"),
            batch_first=True,
            norm_first=not post_ln,
            dtype=dtype,
        )
        copies = {
            "self_attn.in_proj_": block.attn.c_attn,
            "self_attn.out_proj.": block.attn.c_proj,
            "linear1.": block.mlp.c_fc,
            "linear2.": block.mlp.c_proj,
            "norm1.": block.ln_1,
            "norm2.": block.ln_2,
        }
        weights = {p + k: v for p, m in copies.items() for k, v in m.state_dict().items()}
        layer.load_state_dict(weights)
        theirs.append(layer)
    x = stream(dtype=dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=dtype)
    expected = reduce(lambda x, layer: layer(x, src_mask=mask, is_causal=True), theirs, x)
    ours = run_blocks(model.h, x)
    close(ours / expected.abs().max(), expected / expected.abs().max(), atol)


def manual_logits(model, idx):
    """GPT-2 written out with softmax and loops over heads, from the state dict alone."""
    w = model.state_dict()
    c, (_, T) = model.config, idx.shape
    D, C = c.n_embd // c.n_head, c.n_embd
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    x = w["wte.weight"][idx] + w["wpe.weight"][:T]
    for i in range(c.n_layer):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(C, -1)
        heads = []
        for h in range(c.n_head):
            s = slice(h * D, (h + 1) * D)
            scores = q[..., s] @ k[..., s].mT / D**0.5
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[..., s])
        x = x + linear(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        u = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        u = 0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3)))
        x = x + linear(u, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"][: c.vocab_size].T


@pytest.mark.parametrize("n_head", [1, 2, 8])
def test_the_whole_model_equals_gpt2_written_out(n_head):
    model, idx = lively(tiny(n_head=n_head)), tokens(2, 16)
    close(model(idx), manual_logits(model, idx), 1e-10)


@LAYOUTS
def test_fused_and_math_attention_agree(post_ln):
    model, idx = lively(tiny(post_ln=post_ln)), tokens(2, 16)
    results = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        model.zero_grad()
        with sdpa_kernel(backend):
            model.loss(idx, tokens(2, 16, seed=5)).backward()
            results.append((model(idx), [p.grad for p in model.parameters()]))
    (fused, fused_grads), (plain, plain_grads) = results
    close(fused, plain, 1e-10)
    for a, b in zip(fused_grads, plain_grads, strict=True):
        close(a, b, 1e-9)


def test_gelu_is_the_tanh_form():
    """The exact GELU differs by up to 4.73e-4, which is how a silent swap would show."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)[:, None]
    by_hand = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    exact = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    gap = (exact - by_hand).abs()
    assert gap.max().item() == pytest.approx(4.73e-4, abs=1e-6)
    assert abs(x[gap.argmax()].item()) == pytest.approx(2.699, abs=2e-3)
    mlp = MLP(tiny(n_embd=1, n_head=1)).double()
    with torch.no_grad():
        for p in mlp.parameters():
            p.zero_()
        mlp.c_fc.weight[0, 0] = mlp.c_proj.weight[0, 0] = 1
        close(mlp(x), by_hand, 1e-12)
        close(mlp.float()(x.float()), by_hand.float(), 1e-6)


@LAYOUTS
def test_no_gradient_flows_from_a_logit_to_a_later_token(post_ln):
    model, T = lively(tiny(post_ln=post_ln)), 8
    embedded = []
    model.wte.register_forward_hook(lambda module, args, out: embedded.append(out))
    logits = model(tokens(2, T))
    weights = stream(T=1, C=65, dtype=torch.float64)[:, 0]
    for t in range(T):
        out = (logits[:, t] * weights).sum()
        (grad,) = torch.autograd.grad(out, embedded, retain_graph=True)
        reached = grad.abs().amax((0, 2)) > 0
        assert reached.tolist() == [s <= t for s in range(T)]


@LAYOUTS
@pytest.mark.parametrize("t", [0, 4, 15])
def test_changing_a_token_changes_no_logit_before_it(post_ln, t):
    model, idx = lively(tiny(post_ln=post_ln)), tokens(2, 16)
    other = idx.clone()
    other[:, t] = (other[:, t] + 1) % 65
    before, after = model(idx), model(other)
    assert torch.equal(before[:, :t], after[:, :t])
    assert ((before - after)[:, t:].abs().amax(-1) > 0).all()


# Dropout ----------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize(("name", "other"), [("attn", "mlp"), ("mlp", "attn")])
def test_dropout_falls_on_the_branch_only(post_ln, name, other):
    block, x = lively(tiny(dropout=0.5, post_ln=post_ln)).h[0].train(), stream(dtype=torch.float64)
    setattr(block, other, Branch(torch.zeros_like))
    block.ln_1 = block.ln_2 = nn.Identity()
    f = getattr(block, name)(x)
    added = block(x) - x
    kept = (added - 2 * f).abs() < 1e-12
    assert (kept | (added.abs() < 1e-12)).all()
    assert 0.3 < kept.double().mean() < 0.7
    assert torch.equal(block.eval()(x), x + f)


def test_there_is_no_dropout_on_embeddings_attention_or_inside_the_mlp():
    model, idx, x = zeroed(dropout=0.5).train(), tokens(2, 5), stream()
    embeddings = model.wte.weight[idx] + model.wpe.weight[:5]
    close(model.hidden(idx), F.layer_norm(embeddings, (32,)), 1e-6)
    block = GPT(tiny(dropout=0.5, init_std=0.2)).train().h[0]
    for branch in (block.attn, block.mlp):
        assert torch.equal(branch(x), branch(x))


# Initial weights --------------------------------------------------------------------------------


def test_matrices_are_drawn_with_init_std_biases_zero_and_norms_one():
    config = GPTConfig(1000, 128, n_layer=2, n_head=2, n_embd=128, branch_init="plain")
    for name, p in GPT(config).named_parameters():
        if p.dim() == 2:
            drawn = p[: config.vocab_size]
            assert drawn.std().item() == pytest.approx(0.02, rel=0.03), name
            assert abs(drawn.mean().item()) < 0.02 * 4 / drawn.numel() ** 0.5, name
            assert drawn.abs().max() > 0.06, name  # three deviations: uniform ones end at 1.73
        else:
            assert (p == (1 if "ln_" in name and name.endswith("weight") else 0)).all(), name


@pytest.mark.parametrize(("init", "scale"), [("scaled", 6**-0.5), ("plain", 1), ("zero", 0)])
def test_branch_init_scales_the_branch_outputs_and_nothing_else(init, scale):
    plain = GPT(tiny(n_layer=3, branch_init="plain")).state_dict()
    for name, p in GPT(tiny(n_layer=3, branch_init=init)).state_dict().items():
        branch = name.endswith(("attn.c_proj.weight", "mlp.c_proj.weight"))
        close(p, plain[name] * (scale if branch else 1), 1e-8)


@pytest.mark.parametrize(
    "changes",
    [
        {"post_ln": True},
        {"norm": "rmsnorm"},
        {"final_norm": False},
        {"dropout": 0.1},
        {"post_ln": True, "norm": "rmsnorm", "final_norm": True},
    ],
)
def test_variants_of_one_seed_share_their_draws(changes):
    base, variant = GPT(TINY, seed=7).state_dict(), GPT(tiny(**changes), seed=7).state_dict()
    matrices = [name for name, p in base.items() if p.dim() == 2]
    assert len(matrices) == 2 + 4 * 2
    assert all(torch.equal(base[name], variant[name]) for name in matrices)


def test_init_std_scales_every_draw():
    base, wide = GPT(TINY).state_dict(), GPT(tiny(init_std=0.04)).state_dict()
    for name, p in base.items():
        close(wide[name], p * (2 if p.dim() == 2 else 1), 1e-7)


def test_building_twice_gives_equal_weights_and_another_seed_others():
    first, again, other = (GPT(TINY, seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(p, other[name]) for name, p in first.items() if p.dim() == 2)


def test_building_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    GPT(TINY)
    on_meta(TINY)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_initial_loss_is_that_of_a_uniform_guess():
    loss = GPT(TINY).loss(tokens(8, 16), tokens(8, 16, seed=5))
    assert loss.item() == pytest.approx(math.log(65), abs=0.05)


# Padding of the vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "padded"), [(50257, 50304), (64, 64), (65, 128), (1, 64), (257, 320)]
)
def test_the_vocabulary_is_padded_to_a_multiple_of_64(vocab, padded):
    assert tiny(vocab_size=vocab).padded_vocab == padded
    assert on_meta(tiny(vocab_size=vocab)).wte.weight.shape == (padded, 32)


def test_padding_rows_start_at_zero_and_get_no_gradient():
    model = GPT(TINY)
    assert (model.wte.weight[65:] == 0).all()
    for chunk in (None, 7):
        model.zero_grad()
        model.loss(tokens(2, 16), tokens(2, 16, seed=5), chunk=chunk).backward()
        assert (model.wte.weight.grad[65:] == 0).all()
        assert (model.wte.weight.grad[:65] != 0).any(1).all()


def test_padding_never_shows_in_logits_or_loss():
    model, idx, targets = lively(TINY), tokens(2, 16), tokens(2, 16, seed=5)
    expected = F.cross_entropy(manual_logits(model, idx).flatten(0, 1), targets.flatten())
    with torch.no_grad():
        model.wte.weight[65:] = 1e3 * stream(B=1, T=63)[0].double()  # would win every softmax
    assert model(idx).shape == (2, 16, 65)
    close(model(idx), manual_logits(model, idx), 1e-10)
    for chunk in (None, 7):
        close(model.loss(idx, targets, chunk=chunk), expected, 1e-12)


# The chunked loss -------------------------------------------------------------------------------


def loss_and_grads(model, idx, targets, chunk):
    model.zero_grad()
    loss = model.loss(idx, targets, chunk=chunk)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_change_neither_loss_nor_gradients(chunk, dtype, relative):
    model = lively(tiny(vocab_size=5000), dtype)
    idx, targets = tokens(5, 16, 5000), tokens(5, 16, 5000, seed=5)
    logits = model(idx)
    picked = logits.log_softmax(-1).gather(-1, targets[..., None])
    expected = torch.autograd.grad(-picked.mean(), list(model.parameters()))
    for size in (chunk, None):
        loss, grads = loss_and_grads(model, idx, targets, size)
        assert loss.dtype == dtype
        close(loss, -picked.mean().detach(), relative * loss.item())
        for a, b in zip(grads, expected, strict=True):
            close(a, b, relative * b.abs().max().item())


def test_the_chunked_loss_works_without_gradients():
    model, idx, targets = lively(TINY), tokens(2, 16), tokens(2, 16, seed=5)
    with torch.no_grad():
        close(model.loss(idx, targets, chunk=7), model.loss(idx, targets), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_chunked_loss_in_low_precision_is_the_plain_one_to_its_precision(dtype):
    model = lively(tiny(vocab_size=500), torch.float32)
    idx, targets = tokens(5, 16, 500), tokens(5, 16, 500, seed=5)
    exact, wanted = loss_and_grads(model, idx, targets, None)
    with torch.autocast("cpu", dtype):
        loss, grads = loss_and_grads(model, idx, targets, 7)
        plain, plain_grads = loss_and_grads(model, idx, targets, None)
    assert loss.dtype == plain.dtype == torch.float32
    close(loss, exact, 1e-2)
    for a, b, c in zip(grads, plain_grads, wanted, strict=True):
        assert a.dtype == torch.float32
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-3 * c.norm()


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_large_logits_cost_no_precision(offset):
    """Products that float32 holds exactly: a channel adds the offset to all logits."""
    w = torch.cat([torch.arange(64.0)[:, None] / 16, torch.ones(64, 1)], 1)
    x = torch.tensor([[1.0, offset], [-1.0, offset]])
    both = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        loss = HeadLoss.apply(leaf, w.to(dtype), torch.tensor([3, 63]), 64, 1)
        loss.backward()
        both.append((loss.detach().double(), leaf.grad[:, 0].double()))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0)


def test_gradients_are_used_once_and_never_wrong():
    model = lively(TINY)
    loss = model.loss(tokens(2, 16), tokens(2, 16, seed=5), chunk=7)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = model.loss(tokens(2, 16), tokens(2, 16, seed=5), chunk=7)
    with pytest.raises(AssertionError, match="second derivative"):
        torch.autograd.grad(loss, model.wpe.weight, create_graph=True)


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("target", [65, 127, -1])
def test_targets_beyond_the_vocabulary_are_refused_also_within_its_padding(target, chunk):
    targets = tokens(2, 16, seed=5)
    targets[1, 3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        lively(TINY).loss(tokens(2, 16), targets, chunk=chunk)


def logits_in_memory(model, *args):
    """Elements with a column per token id, while the loss and its gradient are computed: the most
    in one operand of any operation, and all that are kept for the backward pass."""
    columns, kept = (model.config.vocab_size, model.config.padded_vocab), [0]

    def pack(tensor):
        kept.append(tensor.numel() if tensor.dim() and tensor.size(-1) in columns else 0)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile, hooks:
        model.loss(*args).backward()
    shapes = [shape for event in profile.events() for shape in event.input_shapes or ()]
    made = [math.prod(shape) for shape in shapes if shape and shape[-1] in columns]
    return max(made), sum(kept)


def test_only_a_chunk_of_logits_is_ever_made_or_kept():
    # n_embd 4: the head's own transposed weight and its gradient are smaller than a chunk.
    model = GPT(tiny(vocab_size=5000, n_embd=4))
    idx, targets = tokens(5, 16, 5000), tokens(5, 16, 5000, seed=5)
    made, kept = logits_in_memory(model, idx, targets, 80)  # all at once must be seen
    assert made == 80 * 5056
    assert kept >= 80 * 5000
    made, kept = logits_in_memory(model, idx, targets, 7)
    assert 7 * 5000 <= made <= 7 * 5056
    assert kept <= 7 * 5056


# The tied head ----------------------------------------------------------------------------------


def test_the_head_is_the_token_embedding():
    """There is one tensor, so nothing can untie it: the head's columns are the rows of wte."""
    model = GPT(TINY)
    assert not any("head" in name for name in model.state_dict())
    assert sum(p.numel() for p in model.parameters()) == 28_064 + 63 * 32  # with the padding
    assert torch.equal(model.head(torch.eye(32)).T, model.wte.weight[:65])


def test_the_tied_gradient_is_the_sum_of_both_uses():
    model, idx, targets = lively(TINY), tokens(2, 16), tokens(2, 16, seed=5).flatten()
    weight, hidden = model.wte.weight, model.hidden(tokens(2, 16)).flatten(0, 1)
    as_head = F.cross_entropy(F.linear(hidden.detach(), weight[:65]), targets)
    as_embedding = F.cross_entropy(F.linear(hidden, weight[:65].detach()), targets)
    (a,), (b,) = (torch.autograd.grad(loss, weight) for loss in (as_head, as_embedding))
    assert min(a.abs().max(), b.abs().max()) > 1e-3
    model.loss(idx, targets.view(2, 16)).backward()
    close(weight.grad, a + b, 1e-12)


def test_a_copy_is_tied_in_itself_and_to_nothing_else():
    model, idx = GPT(TINY), tokens(2, 16)
    twin, before = copy.deepcopy(model), model(idx)
    assert torch.equal(twin(idx), before)
    twin.loss(idx, tokens(2, 16, seed=5)).backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.equal(twin.head(torch.eye(32)).T, twin.wte.weight[:65])
    assert not torch.equal(twin.wte.weight, model.wte.weight)
    assert torch.equal(model(idx), before)


def test_loaded_weights_reach_both_uses():
    model, other, idx = GPT(TINY), lively(TINY, torch.float32), tokens(2, 16)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(idx), other(idx))


def test_names_are_gpt2s():
    names = {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for i in range(2):
        names |= {f"h.{i}.{part}.{what}" for part in parts for what in ("weight", "bias")}
    assert set(GPT(TINY).state_dict()) == names


# The KV cache -----------------------------------------------------------------------------------


def cached_logits(model, idx, sizes, pad=None):
    """Logits of idx, fed through a cache in pieces of these sizes."""
    cache = KVCache(model, len(idx), idx.size(1), pad)
    return torch.cat([model(piece, cache) for piece in idx.split(sizes, 1)], 1)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("prompt", [1, 5, 15])
@pytest.mark.parametrize("prefill", ["whole", "by two", "one by one"])
def test_cached_logits_equal_uncached_ones(batch, prompt, prefill):
    step = {"whole": prompt, "by two": 2, "one by one": 1}[prefill]
    sizes = [min(step, prompt - i) for i in range(0, prompt, step)] + [1] * (16 - prompt)
    model, idx = lively(TINY), tokens(batch, 16)
    close(cached_logits(model, idx, sizes), model(idx), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes", [{"post_ln": True}, {"norm": "rmsnorm"}, {"n_head": 1}, {"n_layer": 1}]
)
def test_the_cache_serves_every_variant(changes):
    model, idx = lively(tiny(**changes)), tokens(2, 16)
    close(cached_logits(model, idx, [5, 3, 1, 7]), model(idx), 1e-12)


@torch.no_grad()
@LAYOUTS
@pytest.mark.parametrize("sizes", [[9, 1, 1], [2, 2, 2, 2, 2, 1], [1] * 11])
def test_rows_with_fillers_on_the_left_equal_each_row_alone(sizes, post_ln):
    model = lively(tiny(post_ln=post_ln))
    idx, pad = tokens(4, 11), torch.tensor([0, 3, 8, 5])
    logits = cached_logits(model, idx, sizes, pad)
    assert logits.isfinite().all()
    for row, n in enumerate(pad.tolist()):
        close(logits[row, n:], model(idx[row : row + 1, n:])[0], 1e-12)
    idx[torch.arange(11) < pad[:, None]] = 64  # another filler
    real = torch.arange(11) >= pad[:, None]
    assert torch.equal(cached_logits(model, idx, sizes, pad)[real], logits[real])


@torch.no_grad()
def test_generations_do_not_share_anything():
    """Caches that were planted on the modules broke as soon as two generations took turns."""
    model, idx = lively(TINY), tokens(4, 8)
    names = {n: set(vars(m)) for n, m in model.named_modules()}
    first, second = KVCache(model, 2, 8), KVCache(model, 2, 8)
    logits = [
        torch.cat([model(idx[rows, t : t + 1], cache) for t in range(8)], 1)
        for rows, cache in ((slice(2), first), (slice(2, 4), second))
    ]
    close(torch.cat(logits), model(idx), 1e-12)
    first, second = KVCache(model, 2, 8), KVCache(model, 2, 8)
    for t in range(8):
        for rows, its in ((slice(2), first), (slice(2, 4), second)):
            close(model(idx[rows, t : t + 1], its), model(idx[rows])[:, t : t + 1], 1e-12)
    assert {n: set(vars(m)) for n, m in model.named_modules()} == names


def test_the_cache_has_the_models_dtype():
    assert KVCache(GPT(TINY).bfloat16(), 1, 4).kv.dtype == torch.bfloat16


@torch.no_grad()
def test_a_full_cache_says_both_lengths_and_stays_usable():
    model, idx = lively(TINY), tokens(1, 9)
    cache = KVCache(model, 1, 8)
    start = model(idx[:, :7], cache)
    with pytest.raises(ValueError, match=r"\b8\b.*\b9\b"):
        model(idx[:, 7:], cache)
    logits = torch.cat([start, model(idx[:, 7:8], cache)], 1)
    close(logits, model(idx[:, :8]), 1e-12)


@torch.no_grad()
@pytest.mark.parametrize("cached", [0, 1, 16])
def test_a_too_long_sequence_says_both_lengths(cached):
    model, idx = GPT(TINY), tokens(1, 17)
    cache = KVCache(model, 1, 32) if cached else None
    if cached:
        model(idx[:, :cached], cache)
    with pytest.raises(ValueError, match=r"\b17\b.*\b16\b"):
        model(idx[:, cached:], cache)


def test_a_too_long_sequence_has_no_loss():
    with pytest.raises(ValueError, match=r"\b17\b.*\b16\b"):
        GPT(TINY).loss(tokens(1, 17), tokens(1, 17))


# Impossible configs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, ["vocab_size", "at least 1", "0"]),
        ({"block_size": -3}, ["block_size", "at least 1", "-3"]),
        ({"n_layer": 0}, ["n_layer", "at least 1", "0"]),
        ({"n_embd": 0}, ["n_embd", "at least 1", "0"]),
        ({"n_head": 0}, ["n_head", "at least 1", "0"]),
        ({"n_head": 5}, ["n_head", "5", "n_embd", "32", "[1, 2, 4, 8]"]),
        ({"dropout": 1.0}, ["dropout", "[0, 1)", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "[0, 1)", "-0.1"]),
        ({"dropout": math.nan}, ["dropout", "[0, 1)", "nan"]),
        ({"init_std": 0.0}, ["init_std", "positive", "0.0"]),
        ({"init_std": math.inf}, ["init_std", "positive", "inf"]),
        ({"norm": "batchnorm"}, ["norm", "batchnorm", "layernorm", "rmsnorm"]),
        ({"branch_init": "zeros"}, ["branch_init", "zeros", "scaled", "plain", "zero"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_impossible_config_is_refused_with_what_got_and_allowed(changes, words):
    (problem,) = tiny(**changes).problems()
    assert all(word in problem for word in words)
    with pytest.raises(ValueError, match=words[0]) as refused:
        GPT(tiny(**changes))
    assert problem in str(refused.value)


def test_all_problems_are_told_at_once():
    config = tiny(n_layer=0, vocab_size=0, dropout=2.0)
    assert len(config.problems()) == 3
    with pytest.raises(ValueError, match="n_layer") as refused:
        GPT(config)
    assert all(problem in str(refused.value) for problem in config.problems())


@pytest.mark.parametrize("config", [TINY, SMALL, tiny(post_ln=True, norm="rmsnorm")])
def test_a_possible_config_has_no_problems(config):
    assert config.problems() == []
