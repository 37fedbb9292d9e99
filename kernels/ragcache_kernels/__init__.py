"""Attention over a pool of KV blocks, for ragcache's engine; knows nothing of ragcache itself."""

from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.registry import BACKENDS, best_backend, get_backend

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionSpec",
    "LayerCache",
    "StepLayout",
    "best_backend",
    "get_backend",
]
