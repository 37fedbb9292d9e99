"""The attention backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragcache_kernels.interface import AttentionBackend


def _torch() -> AttentionBackend[Any]:
    from ragcache_kernels.torch_backend import TorchBackend

    return TorchBackend()


BACKENDS: dict[str, Callable[[], AttentionBackend[Any]]] = {"torch": _torch}


def get_backend(name: str) -> AttentionBackend[Any]:
    """The backend of this name; raises KeyError for an unknown one."""
    return BACKENDS[name]()
