"""The attention backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ragcache_kernels.interface import AttentionBackend


def _torch() -> AttentionBackend[Any]:
    from ragcache_kernels.torch_backend import TorchBackend

    return TorchBackend()


def _triton() -> AttentionBackend[Any]:
    from ragcache_kernels.triton.backend import TritonBackend

    return TritonBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {"torch": _torch, "triton": _triton}


def get_backend(name: str) -> AttentionBackend[Any]:
    """The backend of this name; raises KeyError for an unknown one."""
    return BACKENDS[name]()


def best_backend(device: torch.device, dtype: torch.dtype, head_dims: Iterable[int]) -> str:
    """The name of the fastest backend for layers with these head dims.

    The GPU kernels are for half precision, since float32 would not fit their registers, and for
    Ampere and later, whose shared memory and asynchronous loads they count on.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return "torch"
    if not takes_kernels(device):
        return "torch"
    from ragcache_kernels.triton.configs import WIDEST

    return "triton" if max(head_dims) <= WIDEST else "torch"


@cache
def takes_kernels(device: torch.device) -> bool:
    """Whether it is a GPU that our kernels are for, with a Triton that compiles them."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", installed)[:2])) >= (3, 6)
