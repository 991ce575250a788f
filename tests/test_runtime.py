"""Device, precision, compilation and signals, on whatever machine the tests run."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import runtime
from model import GPT, GPTConfig
from runtime import CompileError, Loss, Processes, StopSignals

ROOT = Path(runtime.__file__).parent


def forbidden(*_):
    raise AssertionError("asked for something that does not matter")


@pytest.mark.parametrize(
    ("requested", "n_cuda", "mps", "local_rank", "device"),
    [
        ("auto", 0, False, 0, "cpu"),
        ("auto", 0, True, 0, "mps"),
        ("auto", 1, True, 0, "cuda:0"),
        ("auto", 8, False, 5, "cuda:5"),
        ("cpu", 8, True, 3, "cpu"),
        ("cuda", 2, False, 0, "cuda:0"),
        ("cuda", 2, False, 1, "cuda:1"),
        ("cuda:0", 2, False, 1, "cuda:0"),
        ("cuda:7", 8, False, 0, "cuda:7"),
        ("mps", 0, True, 0, "mps"),
    ],
)
def test_the_device_follows_from_the_wish_and_the_machine(
    requested, n_cuda, mps, local_rank, device
):
    got = runtime.resolve_device(
        requested, local_rank=local_rank, cuda=lambda: n_cuda, mps=lambda: mps
    )
    assert got == torch.device(device)


@pytest.mark.parametrize(
    ("requested", "n_cuda", "local_rank", "named"),
    [
        ("cuda", 0, 0, ["0 CUDA devices", "--device cpu"]),
        ("cuda:7", 2, 0, ["cuda:7", "2 CUDA devices", "number 7"]),
        ("cuda:2", 2, 0, ["cuda:2", "number 2"]),
        ("cuda", 2, 2, ["2 CUDA devices", "number 2", "fewer processes"]),
        ("auto", 2, 3, ["2 CUDA devices", "number 3", "fewer processes"]),
        ("mps", 2, 0, ["mps", "--device cpu"]),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_there_is(
    requested, n_cuda, local_rank, named
):
    with pytest.raises(ValueError, match="device") as refusal:
        runtime.resolve_device(
            requested, local_rank=local_rank, cuda=lambda: n_cuda, mps=lambda: False
        )
    assert [word for word in named if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    "garbage", ["", "gpu", "CPU", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cudax", "mps:0"]
)
def test_a_name_that_is_no_device_is_refused_with_the_choices(garbage):
    with pytest.raises(ValueError, match=r"auto, cpu, cuda, cuda:N or mps") as refusal:
        runtime.resolve_device(garbage, cuda=lambda: 8, mps=lambda: True)
    assert repr(garbage) in str(refusal.value)


def test_the_cpu_is_taken_without_asking_for_anything_else(monkeypatch):
    """nanoGPT #293: --device=cpu failed, because the default precision asked CUDA."""
    for module, name in [
        (torch.cuda, "is_available"),
        (torch.cuda, "device_count"),
        (torch.cuda, "get_device_capability"),
        (torch.cuda, "get_device_name"),
        (torch.cuda, "is_bf16_supported"),
        (torch.backends.mps, "is_available"),
    ]:
        monkeypatch.setattr(module, name, forbidden)
    device = runtime.find_device("cpu")
    assert device == torch.device("cpu")
    assert runtime.find_dtype("auto", device)[0] == torch.float32
    assert runtime.peak_of(device, torch.float32) is None
    with pytest.raises(ValueError, match="float16"):
        runtime.find_dtype("float16", device)


@pytest.mark.parametrize(
    ("requested", "device", "bfloat16", "dtype"),
    [
        ("auto", "cuda", True, torch.bfloat16),
        ("auto", "cuda", False, torch.float16),
        ("auto", "cpu", False, torch.float32),
        ("auto", "mps", False, torch.float32),
        ("float32", "cuda", True, torch.float32),
        ("float16", "cuda", True, torch.float16),
        ("float16", "cuda", False, torch.float16),
        ("bfloat16", "cuda", True, torch.bfloat16),
        ("bfloat16", "cpu", False, torch.bfloat16),
        ("float32", "cpu", False, torch.float32),
    ],
)
def test_the_precision_follows_from_the_wish_and_the_device(requested, device, bfloat16, dtype):
    got, reason = runtime.resolve_dtype(requested, torch.device(device), bfloat16)
    assert got == dtype
    assert reason
    if requested == "auto" and dtype == torch.float16:
        assert "loss scaling" in reason


@pytest.mark.parametrize(
    ("requested", "device", "instead"),
    [
        ("float16", "cpu", "float32"),
        ("float16", "mps", "float32"),
        ("bfloat16", "cuda", "float16 or float32"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused_with_one_that_it_has(
    requested, device, instead
):
    with pytest.raises(ValueError, match=f"dtype {requested}.*take {instead}"):
        runtime.resolve_dtype(requested, torch.device(device), bfloat16=False)


@pytest.mark.parametrize(
    ("dtype", "product"), [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_autocast_makes_products_in_the_dtype_asked_for(dtype, product):
    a = torch.ones(2, 2)
    with runtime.autocast(torch.device("cpu"), dtype):
        assert (a @ a).dtype == product
    assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 495e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H100 NVL", torch.bfloat16, 835e12),
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-PCIE-80GB", torch.float32, 156e12),
        ("Tesla V100-SXM2-16GB", torch.float16, 125e12),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65e12),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165e12),
        # Not in the table, though a name in the table is a part of theirs.
        ("NVIDIA L40", torch.bfloat16, None),
        ("NVIDIA T400 4GB", torch.float16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
        ("NVIDIA A100X", torch.bfloat16, None),
        ("AMD Instinct MI300X", torch.bfloat16, None),
        ("", torch.bfloat16, None),
    ],
)
def test_the_peak_is_the_data_sheets_or_unknown_but_never_another_devices(name, dtype, peak):
    assert runtime.peak_flops(name, dtype) == peak


@pytest.mark.parametrize(
    ("requested", "device", "wanted"),
    [
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("auto", "mps", False),
        ("true", "cpu", True),
        ("true", "cuda", True),
        ("false", "cuda", False),
        ("false", "cpu", False),
    ],
)
def test_auto_compiles_on_cuda_only(requested, device, wanted):
    assert runtime.wants_compile(requested, torch.device(device)) is wanted


@pytest.fixture
def loss() -> Loss:
    return Loss(GPT(GPTConfig(vocab_size=65, block_size=16, n_layer=2, n_head=2, n_embd=32)))


def breaks(error: Exception):
    """A torch.compile whose result raises when it is called, as most failures do."""

    def compile_(_):
        def call(*_):
            raise error

        return call

    return compile_


def breaks_at_once(error: Exception):
    def compile_(_):
        raise error

    return compile_


def trial(fast):
    return fast(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize("kind", [breaks, breaks_at_once])
def test_a_compiler_that_fails_costs_one_line_and_training_goes_on_eagerly(
    kind, loss, monkeypatch, capsys
):
    before = trial(loss)
    monkeypatch.setattr(torch, "compile", kind(RuntimeError("no C compiler\nand\nmuch more")))
    fast = runtime.compiled(loss, trial, "auto")
    assert fast is loss
    assert torch.equal(trial(fast), before)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning:")
    assert line.endswith("no C compiler")


@pytest.mark.parametrize("kind", [breaks, breaks_at_once])
@pytest.mark.parametrize("error", [RuntimeError("no C compiler\nand more"), NotImplementedError()])
def test_a_compiler_that_was_asked_for_and_fails_is_an_error_with_the_remedy(
    kind, error, loss, monkeypatch
):
    monkeypatch.setattr(torch, "compile", kind(error))
    with pytest.raises(CompileError, match="--compile=false") as refusal:
        runtime.compiled(loss, trial, "true")
    assert str(refusal.value).endswith(str(error).split("\n")[0] or "NotImplementedError")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("requested", ["auto", "true"])
def test_too_little_memory_is_no_failure_of_the_compiler(requested, loss, monkeypatch):
    monkeypatch.setattr(torch, "compile", breaks(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        runtime.compiled(loss, trial, requested)


def test_a_compiled_loss_is_used_after_its_trial(loss, monkeypatch):
    calls = []

    def compile_(eager):
        def fast(*args):
            calls.append(args)
            return eager(*args)

        return fast

    monkeypatch.setattr(torch, "compile", compile_)
    fast = runtime.compiled(loss, trial, "auto")
    assert len(calls) == 1
    assert fast is not loss
    assert torch.equal(trial(fast), trial(loss))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_wish_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received == 0
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert signals.received == number


def test_the_handlers_come_back_after_an_error_too():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopSignals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_than_the_main_one_goes_without_signals():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopSignals() as signals:
            seen.append((signals.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


TWICE = """
import os, runtime, signal, time
with runtime.StopSignals() as signals:
    for number in (signal.{first}, signal.{second}):
        os.kill(os.getpid(), number)
        print("after", signals.received, flush=True)
print("the end")
"""


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGINT")])
def test_a_second_signal_ends_the_process_at_once(first, second):
    done = subprocess.run(
        [sys.executable, "-c", TWICE.format(first=first, second=second)],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        encoding="utf-8",
    )
    assert done.stdout == f"after {int(signal.Signals[first])}\n"
    assert done.returncode == 128 + signal.Signals[second]


def test_one_process_alone_is_number_0_of_1(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = Processes.from_environment()
    assert alone == Processes(rank=0, local_rank=0, world_size=1)
    assert alone.first
    alone.connect(torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    tensor = torch.tensor([1.5, 2.0])
    assert torch.equal(alone.sum(tensor), torch.tensor([1.5, 2.0]))
    calls = []
    assert alone.first_does(lambda: calls.append(1) or "done") == "done"
    assert calls == [1]
    alone.disconnect()


def test_torchrun_says_which_process_this_is(monkeypatch):
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    processes = Processes.from_environment()
    assert processes == Processes(rank=5, local_rank=1, world_size=8)
    assert not processes.first


def test_attention_by_the_plain_formula_gives_the_same_loss_and_gradients(loss):
    model = loss.model.double()
    x = torch.arange(32).view(2, 16) % 65
    results = {}
    for kind in ("auto", "math"):
        with runtime.attention(kind):
            model.zero_grad()
            value = loss(x, (x * 7 + 1) % 65)
            value.backward()
            flash = torch.backends.cuda.flash_sdp_enabled()
        results[kind] = [value.detach(), *(p.grad.clone() for p in model.parameters())], flash
    assert results["auto"][1] is True
    assert results["math"][1] is False
    assert torch.backends.cuda.flash_sdp_enabled()
    for auto, math in zip(results["auto"][0], results["math"][0], strict=True):
        torch.testing.assert_close(auto, math, rtol=0, atol=1e-12)


def test_the_loss_module_is_the_models_own_loss(loss):
    x = torch.arange(16).view(1, 16)
    assert torch.equal(loss(x, x), loss.model.loss(x, x))
    assert {name.removeprefix("model.") for name in loss.state_dict()} == set(
        loss.model.state_dict()
    )


def test_a_tensor_on_its_way_to_the_cpu_keeps_its_values():
    tensor = torch.arange(5)
    assert torch.equal(runtime.to_device(tensor, torch.device("cpu")), tensor)
