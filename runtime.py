"""Where and how a run computes: processes, device, precision, compilation, signals.

Decisions are pure functions of what the machine has, so that a machine without a GPU can test them.
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.attention
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from model import GPT

# Dense peak of the matrix units in FLOP/s, from the makers' data sheets: bfloat16 and float16,
# and float32 products with TF32. The first name that occurs in the device's name counts.
PEAKS = {
    "H200": (989e12, 495e12),
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 418e12),
    "H100": (989e12, 495e12),
    "B200": (2250e12, 1125e12),
    "A100": (312e12, 156e12),
    "L40S": (362e12, 183e12),
    "L4": (121e12, 60e12),
    "A10G": (70e12, 35e12),
    "RTX 4090": (165e12, 83e12),
    "RTX 3090": (71e12, 36e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Dense peak in FLOP/s for products in dtype; None where it is not known."""
    for name, (half, single) in PEAKS.items():
        # Whole words only: neither an L40 nor a laptop's 4090 is what the table has.
        if re.search(rf"\b{name}\b(?! (Ti|Laptop|D|SUPER)\b)", device_name):
            bfloat16_missing = name in ("V100", "T4") and dtype == torch.bfloat16
            return None if bfloat16_missing else (single if dtype == torch.float32 else half)
    return None


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """peak_flops of this machine's device."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), dtype)


def onednn_has(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's products in place of MKL's, and this CPU the dtype."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


@dataclass(frozen=True)
class Processes:
    """This process among those of the run; torchrun sets them, alone it is 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Processes":
        return cls(*(int(os.environ.get(k, d)) for k, d in _TORCHRUN.items()))

    @property
    def first(self) -> bool:
        """Whether this one prints and writes files."""
        return self.rank == 0

    def connect(self, device: torch.device) -> None:
        """Join the other processes: over nccl between GPUs, else over gloo."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self.world_size > 1:
            backend, bound = ("nccl", device) if device.type == "cuda" else ("gloo", None)
            dist.init_process_group(backend, device_id=bound)

    def first_does(self, work: Callable[[], object]) -> object:
        """work() of the first process; the others wait until it is done, then do it too. If it
        raises ValueError or OSError there, the others leave with exit code 2 and no word."""
        if self.world_size == 1:
            return work()
        outcome, failed = None, [None]
        if self.first:
            try:
                outcome = work()
            except (ValueError, OSError) as error:
                failed = [error]
        dist.broadcast_object_list(failed)
        if failed[0] is None:
            return outcome if self.first else work()
        raise failed[0] if self.first else SystemExit(2)

    def say(self, text: str) -> None:
        """A line of the first process."""
        if self.first:
            print(text, flush=True)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor summed over all processes, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def disconnect(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def resolve_device(
    requested: str, *, local_rank: int = 0, cuda: Callable[[], int], mps: Callable[[], bool]
) -> torch.device:
    """The device to use. `cuda` counts the CUDA devices and `mps` says whether there is Apple's;
    neither is asked unless it matters. ValueError for what is not there."""
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "auto":
        n = cuda()
        if n:
            return resolve_device("cuda", local_rank=local_rank, cuda=lambda: n, mps=mps)
        return torch.device("mps" if mps() else "cpu")
    if named := re.fullmatch(r"cuda(?::([0-9]+))?", requested):
        n, wanted = cuda(), int(named[1]) if named[1] else local_rank
        if wanted < n:
            return torch.device("cuda", wanted)
        raise ValueError(
            f"device {requested}: this machine has {n} CUDA devices and this process needs number "
            f"{wanted}; take --device cpu, or fewer processes"
        )
    if requested == "mps":
        if mps():
            return torch.device("mps")
        raise ValueError("device mps: this machine has none; take --device cpu or auto")
    raise ValueError(f"device must be auto, cpu, cuda, cuda:N or mps, got {requested!r}")


def find_device(requested: str, local_rank: int = 0) -> torch.device:
    """resolve_device on this machine."""
    return resolve_device(
        requested,
        local_rank=local_rank,
        cuda=torch.cuda.device_count,
        mps=torch.backends.mps.is_available,
    )


def resolve_dtype(requested: str, device: torch.device, bfloat16: bool) -> tuple[torch.dtype, str]:
    """The products' dtype and why; `bfloat16`: whether a CUDA device has it. float16 brings loss
    scaling with it. ValueError for what the device can't do."""
    if requested == "auto":
        if device.type != "cuda":
            return torch.float32, f"{device.type} is used with full precision"
        if bfloat16:
            return torch.bfloat16, "this GPU has it"
        return torch.float16, "this GPU has no bfloat16; with loss scaling"
    if requested == "float16" and device.type != "cuda":
        raise ValueError(f"dtype float16 needs a CUDA device, not {device.type}: take float32")
    if requested == "bfloat16" and device.type == "cuda" and not bfloat16:
        raise ValueError("dtype bfloat16: this GPU does not have it; take float16 or float32")
    return getattr(torch, requested), "as asked"


def find_dtype(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """resolve_dtype on this machine."""
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return resolve_dtype(requested, device, capable)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def allow_tf32(device: torch.device) -> None:
    """On CUDA, TF32 for the products that are left in float32; elsewhere nothing changes."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def copies_ahead(device: torch.device) -> bool:
    """Whether a copy there need not be waited for: towards CUDA, from pinned memory."""
    return device.type == "cuda"


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy there, which nothing waits for where that is possible."""
    if copies_ahead(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def attention(kind: str) -> AbstractContextManager:
    """ "math": the plain formula within; "auto": the fastest kernel that fits."""
    if kind == "math":
        return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    return contextlib.nullcontext()


class OneDNN(TorchFunctionMode):
    """Within it, the linear layers of a model on a CPU are oneDNN's products, with a copy of the
    weights in the order that it reads fastest for `batch` tokens at a time: on an AMD EPYC up to
    twice as fast as the plain products. Later changes of the weights don't count. Nothing changes
    elsewhere, where oneDNN lacks the dtype, and where gradients are wanted, which these operators
    (torch.compile's) have not."""

    def __init__(self, model: GPT, batch: int):
        super().__init__()
        self.packed, head = {}, model.wte.weight
        if head.device.type == "cpu" and onednn_has(head.dtype):
            for w in [head, *(m.weight for m in model.modules() if isinstance(m, nn.Linear))]:
                self.packed[w] = torch.ops.mkldnn._reorder_linear_weight(w.detach(), batch)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear and args[1] in self.packed and not torch.is_grad_enabled():
            x, w, bias = (*args, None)[:3]
            return torch.ops.mkldnn._linear_pointwise(x, self.packed[w], bias, "none", [], "")
        return func(*args, **(kwargs or {}))


class Loss(nn.Module):
    """model.loss as a forward(), which is what DistributedDataParallel and torch.compile wrap."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.loss(idx, targets)


def wants_compile(requested: str, device: torch.device) -> bool:
    """On a CPU it costs a minute and gains nothing for one step, so auto leaves it out there."""
    return requested == "true" or (requested == "auto" and device.type == "cuda")


class CompileError(RuntimeError):
    """torch.compile was asked for and failed."""


def compiled(loss: Loss, trial: Callable[[Callable], object], requested: str) -> Callable:
    """The compiled loss after a successful trial of it; on "auto" the eager one if that fails, with
    a line that says why. CompileError, with the remedy, if it fails on "true"."""
    try:
        fast = torch.compile(loss)
        trial(fast)
        return fast
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler may raise
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        if requested == "true":
            message = f"torch.compile failed; run with --compile=false: {reason}"
            raise CompileError(message) from None
        print(f"warning: torch.compile failed, training without it: {reason}", flush=True)
        return loss


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a wish that the loop reads between steps; a second one ends the
    process at once."""

    def __init__(self):
        self.received = 0
        self._before = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # others may not ask for signals
            names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
            for number in [getattr(signal, name) for name in names if hasattr(signal, name)]:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
