"""The attention backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

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


def best_backend(device_type: str, head_dims: Iterable[int]) -> str:
    """The name of the fastest backend on a device for layers with these head dims."""
    if device_type != "cuda" or find_spec("triton") is None:
        return "torch"
    from ragcache_kernels.triton.configs import WIDEST

    return "triton" if max(head_dims) <= WIDEST else "torch"
