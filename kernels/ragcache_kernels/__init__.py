"""Attention over a pool of KV blocks, and what else a step does on a GPU; no ragcache in here."""

from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.masks import LOWEST, apply_masks
from ragcache_kernels.registry import BACKENDS, PREFERENCE, best_backend, get_backend, objection
from ragcache_kernels.transfer import upload

__all__ = [
    "BACKENDS",
    "LOWEST",
    "PREFERENCE",
    "AttentionBackend",
    "AttentionSpec",
    "LayerCache",
    "StepLayout",
    "apply_masks",
    "best_backend",
    "get_backend",
    "objection",
    "upload",
]
