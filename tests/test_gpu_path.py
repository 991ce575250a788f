"""What makes a GPU fast, asserted on a CPU as far as it goes: one graph, no waiting, even sizes.

Tests marked `cuda` need a CUDA device, which only `pytest -m cuda` sees; `python bench.py --full`
runs them.
"""

import itertools
import random
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import config
import evaluate
import model as model_module
import run as run_module
import runtime
import sample
import train
from data import loader
from model import GPT, GPTConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16, "dropout": 0.0}
SMALL |= {"tokenizer": "byte", "batch_tokens": 64, "micro_batch": 2, "eval_tokens": 64}
SMALL |= {"steps": 20, "log_every": 5, "eval_every": 1000, "save_every": 1000, "sample_tokens": 0}
SMALL |= {"init_std": 0.1, "lr": 1e-2, "warmup_steps": 2}

# torch.compile makes an instance of each autograd.Function, which torch itself has deprecated.
deprecated_within_torch = pytest.mark.filterwarnings("ignore:.*should not be instantiated")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("text"), random.Random(2)
    words = " ".join(rng.choice(["a", "cat", "sat", "here", "and", "there"]) for _ in range(5000))
    (folder / "text.txt").write_text(words, encoding="utf-8")
    return {"corpus": folder / "text.txt", "data_dir": folder / "prepared"}


def options(text, out_dir, **more) -> config.TrainConfig:
    argv = [f"--{k}={v}" for k, v in (SMALL | text | {"out_dir": out_dir} | more).items()]
    return config.parse(config.TrainConfig, argv, prog="train.py", description="")


def ready(text, out_dir, device=CPU, **more) -> run_module.Run:
    """A run before its first step, its loss compiled where `compile` says so."""
    cfg = options(text, out_dir, device=device.type, **more)
    run = run_module.set_up(cfg, runtime.Processes(), runtime.find_device(device.type))
    run_module.prepare_loss(run)
    return run


# One graph.


@pytest.fixture
def dynamo(monkeypatch):
    """torch.compile without its code generator, and strict: a graph that breaks is an error."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    strict = partial(torch.compile, backend="eager", fullgraph=True)
    monkeypatch.setattr(torch, "compile", strict)
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


@deprecated_within_torch
@pytest.mark.parametrize(
    ("chunked", "more"),
    [
        (False, {"dtype": "bfloat16", "dropout": 0.1}),
        (True, {"dtype": "float32"}),
        (True, {"dtype": "bfloat16"}),
    ],
)
def test_the_loss_is_one_graph_for_training_and_one_for_evaluation(
    text, tmp_path, monkeypatch, dynamo, chunked, more
):
    """Gradients are off in evaluation, so it can't share the graph of training; nothing else makes
    a graph: neither accumulation, nor an odd last batch of windows, nor a second evaluation."""
    if chunked:
        monkeypatch.setitem(model_module.LOGITS_AT_ONCE, "cpu", 10 * 257)
    run = ready(text, tmp_path, compile="true", n_layer=1, eval_tokens=7 * 16, **more)
    assert run.accumulation == 2
    for graphs in (1, 2, 2):
        for _ in range(2):
            train.update(run)
        if graphs == 2:
            train.validation_loss(run)
        assert dynamo["stats"]["unique_graphs"] == graphs
    assert not dynamo["graph_break"]


@deprecated_within_torch
@pytest.mark.parametrize("chunked", [False, True])
def test_the_compiled_loss_is_the_loss(text, tmp_path, monkeypatch, dynamo, chunked):
    if chunked:
        monkeypatch.setitem(model_module.LOGITS_AT_ONCE, "cpu", 10 * 257)
    run = ready(text, tmp_path, compile="true", n_layer=1)
    x, y = next(run.batches.micro_batches(0, 2))
    assert not isinstance(run.fast, runtime.Loss)
    both = []
    for loss in (run.fast, run.model.loss):
        run.model.zero_grad()
        value = loss(x, y)
        value.backward()
        both.append([value.detach(), *(p.grad for p in run.model.parameters())])
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# No waiting.


class Waits(TorchDispatchMode):
    """Counts the operations whose result Python has to wait for: a number, a truth value, or a
    shape that depends on the values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name.startswith(self.NAMES) and name != "equal_":
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch):
    """All that would make the host wait for the device while the test runs."""
    with Waits() as mode:
        for name in ("tolist", "item", "cpu", "numpy"):
            original = getattr(torch.Tensor, name)

            def counted(tensor, *args, name=name, original=original, **kwargs):
                mode.seen.append(name)
                return original(tensor, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, counted)
        yield mode.seen


def test_what_waits_is_noticed(waits):
    x = torch.tensor([1.0, 2.0])
    assert x.sum() == 3
    assert float(x[0]) == 1
    assert x.tolist() == [1, 2]
    x.cpu()
    assert {*waits} == {"_local_scalar_dense", "tolist", "cpu"}


@pytest.mark.parametrize("more", [{}, {"dtype": "bfloat16"}, {"dropout": 0.1}, {"grad_clip": 0.0}])
def test_an_update_waits_for_nothing(text, tmp_path, waits, more):
    run = ready(text, tmp_path, **more)
    waits.clear()
    for _ in range(3):
        train.update(run)
    assert waits == []


def test_a_run_waits_at_log_steps_only(text, tmp_path, monkeypatch, waits):
    steps, original = [], train.update

    def update(run):
        before = len(waits)
        steps.append(before)
        return original(run)

    monkeypatch.setattr(train, "update", update)
    monkeypatch.setattr(train, "validation_loss", lambda run: 1.0)
    train.train(options(text, tmp_path, device="cpu"))
    changes = [n for n, (a, b) in enumerate(itertools.pairwise(steps), 1) if b > a]
    assert changes == [5, 10, 15]


def test_an_evaluation_waits_once_at_its_end(text, tmp_path, waits):
    run = ready(text, tmp_path)
    waits.clear()
    evaluate.validation_loss(run.model, run.validation, windows=7, micro_batch=2)
    assert [name for name in waits if name == "item"] == ["item"]
    assert {*waits} <= {"item", "_local_scalar_dense"}


# Copies, precision, sizes.


@pytest.mark.parametrize(("kind", "ahead"), [("cuda", True), ("cuda:1", True), ("cpu", False)])
def test_copies_towards_cuda_alone_are_not_waited_for(kind, ahead, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: calls.append("pinned") or t)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *args, **how: calls.append(how) or t)
    assert runtime.copies_ahead(torch.device(kind)) is ahead
    runtime.to_device(torch.zeros(2), torch.device(kind))
    assert calls == (["pinned", {"non_blocking": True}] if ahead else [{}])


def test_training_and_evaluation_copy_in_the_same_way(text, tmp_path, monkeypatch):
    run, copied = ready(text, tmp_path), []
    monkeypatch.setattr(runtime, "to_device", lambda t, device: copied.append(t.shape) or t)
    train.update(run)
    train.validation_loss(run)
    assert copied == [(2, 16)] * 8


@pytest.mark.parametrize(("kind", "precision"), [("cuda", "high"), ("cpu", "highest")])
def test_tf32_is_for_cuda_alone(kind, precision):
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        runtime.allow_tf32(torch.device(kind))
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


class Products(TorchDispatchMode):
    """Notes the sizes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.sizes, self.dtypes = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in ("aten::mm", "aten::addmm"):
            *_, a, b = args
            self.sizes |= {*a.shape, *b.shape}
            self.dtypes |= {a.dtype, b.dtype}
        return func(*args, **(kwargs or {}))


def test_every_product_has_even_sizes_in_the_dtype_asked_for():
    """No 257 (or 50,257) anywhere, forward or backward, whose rows a GPU could not align."""
    gpt = GPT(GPTConfig(vocab_size=257, block_size=32, n_layer=2, n_head=2, n_embd=64))
    x = torch.randint(257, (2, 32))
    with Products() as seen:
        with runtime.autocast(CPU, torch.bfloat16):
            loss = gpt.loss(x, x)
        loss.backward()
    assert 320 in seen.sizes
    assert all(size % 64 == 0 for size in seen.sizes)
    assert seen.dtypes == {torch.bfloat16}


# With a GPU.


@pytest.fixture
def cuda():
    """The device; products are in full precision again afterwards."""
    yield CUDA
    torch.set_float32_matmul_precision("highest")


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("compile_", ["false", "true"])
def test_an_update_never_synchronises(text, tmp_path, cuda, compile_):
    run = ready(text, tmp_path, cuda, compile=compile_)
    train.update(run)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train.update(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@pytest.mark.cuda
def test_the_compiled_loss_is_the_loss_on_cuda(text, tmp_path, cuda):
    run = ready(text, tmp_path, cuda, compile="true")
    x, y = (t.to(cuda) for t in next(run.batches.micro_batches(0, 2)))
    with runtime.autocast(cuda, run.dtype):
        fast, plain = run.fast(x, y).item(), run.model.loss(x, y).item()
    assert fast == pytest.approx(plain, abs=2e-2)


@needs_cuda
@pytest.mark.cuda
def test_flash_attention_takes_this_models_shapes_in_bfloat16(cuda):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has neither bfloat16 nor flash attention")
    gpt = GPT(GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=128)).to(cuda)
    x = torch.randint(257, (2, 64), device=cuda)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), runtime.autocast(cuda, torch.bfloat16):
        loss = gpt.loss(x, x)
    loss.backward()
    assert gpt.wte.weight.grad.isfinite().all()


@needs_cuda
@pytest.mark.cuda
def test_float32_gives_the_cpus_text(cuda):
    gpt = GPT(GPTConfig(vocab_size=257, block_size=32, n_layer=2, n_head=2, n_embd=32))
    choice = {"max_new_tokens": 20, "temperature": 0}
    here = list(sample.generate(gpt, [[1, 2, 3]], [0], **choice))
    assert list(sample.generate(gpt.to(cuda), [[1, 2, 3]], [0], **choice)) == here


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_a_run_learns_and_its_checkpoint_has_the_same_loss(text, tmp_path, cuda, dtype):
    more = {"device": "cuda", "dtype": dtype, "steps": 60, "batch_tokens": 256}
    result = train.train(options(text, tmp_path, **more))
    assert result["val_loss"] < 3
    (folder,) = text["data_dir"].glob("*-byte")
    tokens, loaded = loader.Tokens(folder, "val", 16), checkpoint.load(str(tmp_path)).model
    again = evaluate.validation_loss(loaded, tokens, windows=4, micro_batch=2)
    assert again == pytest.approx(result["val_loss"], abs=5e-2)
