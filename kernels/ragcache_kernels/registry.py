"""The attention backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ragcache_kernels.interface import AttentionBackend
from ragcache_kernels.native.library import NativeUnavailable, chosen_tier
from ragcache_kernels.native.structs import ACTIVATIONS, MAX_DIM


def _torch() -> AttentionBackend[Any]:
    from ragcache_kernels.torch_backend import TorchBackend

    return TorchBackend()


def _triton() -> AttentionBackend[Any]:
    from ragcache_kernels.triton.backend import TritonBackend

    return TritonBackend()


def _against_triton(
    device: torch.device, dtype: torch.dtype, head_dims: Sequence[int]
) -> str | None:
    """The kernels are for half precision: float32 would not fit their registers."""
    if reason := against_kernels(device):
        return reason
    if dtype not in (torch.float16, torch.bfloat16):
        return "it is for float16 and bfloat16"
    from ragcache_kernels.triton.configs import WIDEST

    return None if max(head_dims) <= WIDEST else f"it is for heads of up to {WIDEST} elements"


def _native() -> AttentionBackend[Any]:
    from ragcache_kernels.native.backend import NativeBackend

    return NativeBackend()


def _against_native(
    device: torch.device, dtype: torch.dtype, head_dims: Sequence[int]
) -> str | None:
    if device.type != "cpu":
        return "it is for CPUs"
    if dtype not in ACTIVATIONS:
        return "it is for float32 and bfloat16"
    if max(head_dims) > MAX_DIM:
        return f"it is for heads of up to {MAX_DIM} elements"
    try:
        chosen_tier()
    except NativeUnavailable as error:
        return str(error)
    return None


BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {
    "torch": _torch,
    "triton": _triton,
    "native": _native,
}

# Why a backend is not for a device, a dtype and head dims; torch is for all of them.
Objection = Callable[[torch.device, torch.dtype, Sequence[int]], str | None]
OBJECTIONS: dict[str, Objection] = {"triton": _against_triton, "native": _against_native}
PREFERENCE = ("triton", "native", "torch")  # the fastest first


def get_backend(name: str) -> AttentionBackend[Any]:
    """The backend of this name; raises KeyError for an unknown one."""
    return BACKENDS[name]()


def best_backend(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> str:
    """The name of the fastest backend for layers with these head dims."""
    dims = list(head_dims)
    return next(name for name in PREFERENCE if objection(name, device, dtype, dims) is None)


def objection(
    name: str, device: torch.device, dtype: torch.dtype, head_dims: Sequence[int]
) -> str | None:
    """Why layers with these head dims cannot have the backend; None where they can."""
    against = OBJECTIONS.get(name)
    return against(device, dtype, head_dims) if against else None


def takes_kernels(device: torch.device) -> bool:
    """Whether it is a GPU that our kernels are for, with a Triton that compiles them."""
    return against_kernels(device) is None


@cache
def against_kernels(device: torch.device) -> str | None:
    """Why the GPU kernels cannot run there.

    They count on the shared memory and the asynchronous loads of Ampere.
    """
    if device.type != "cuda":
        return "it is for CUDA devices"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it is for GPUs of compute capability 8.0 or later"
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < (3, 6):
        return f"it takes Triton 3.6 or later, and this is {installed}"
    return None
