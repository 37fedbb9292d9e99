"""The fused steps beside attention against the plain ones in float64, on the device at hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragcache_kernels.bench.checks import excess
from ragcache_kernels.bench.layer import BLOCK_SIZE, layout
from ragcache_kernels.interface import AttentionBackend, LayerCache
from ragcache_kernels.layer_ops import Norm, Rotation
from ragcache_kernels.torch_layer_ops import TorchLayerOps, rotate

TOKENS, SIZE, GATED, EPS = 33, 4096, 512, 1e-5
HEADS, KV_HEADS, DIM = 8, 2, 128


@dataclass(frozen=True, slots=True)
class OpsCheck:
    """Norms, gates, and rotated keys on their way into the cache."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What is checked."""
        return f"norms, gates and rotation, {str(self.dtype).removeprefix('torch.')}"

    def error(self, backend: AttentionBackend[Any], device: torch.device) -> float:
        """As `checks.Check.error`."""
        parts = (*self._ops(backend, device), *self._rotation(backend, device))
        return max(excess(found, expected) for found, expected in parts)

    def _ops(
        self, backend: AttentionBackend[Any], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        plain = TorchLayerOps()
        hidden, update = (self._random(device, TOKENS, SIZE) for _ in range(2))
        weight, gates = self._random(device, SIZE), self._random(device, 2 * GATED, SIZE)
        norm, exact = Norm(weight, EPS), Norm(_double(weight), EPS)
        yield backend.ops.rms_norm(hidden, norm), plain.rms_norm(_double(hidden), exact)
        total, normed = backend.ops.add_rms_norm(update, hidden, norm)
        yield total, _double(update) + _double(hidden)
        yield normed, plain.rms_norm(_double(total), exact)
        small = gates / SIZE**0.5
        out = backend.ops.gated(hidden, small, "silu")
        yield out, plain.gated(_double(hidden), _double(small), "silu")

    def _rotation(
        self, backend: AttentionBackend[Any], device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        qkv = self._random(device, TOKENS, HEADS + 2 * KV_HEADS, DIM)
        angles = torch.rand(TOKENS, DIM // 2, device=device).repeat(1, 2)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        # Small, since two terms are summed that may cancel each other, but not their rounding.
        norms = [self._random(device, DIM) / 16 for _ in range(2)]
        rotation = Rotation(cos, sin, *(Norm(norm, EPS) for norm in norms))
        exact = Rotation(_double(cos), _double(sin), *(Norm(_double(norm), EPS) for norm in norms))
        blocks = torch.randperm(-(-TOKENS // BLOCK_SIZE))
        slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:TOKENS]
        step = layout(blocks[None], TOKENS, TOKENS)
        step.slot_mapping.copy_(slots)
        shape = (len(blocks), BLOCK_SIZE, KV_HEADS, DIM)
        cache = LayerCache(*(qkv.new_zeros(shape) for _ in range(2)))
        query = backend.rotate_and_write(qkv, rotation, cache, backend.plan(step, device))
        stored = (tensor.flatten(0, 1)[slots.to(device)] for tensor in (cache.key, cache.value))
        yield from zip((query, *stored), rotate(_double(qkv), KV_HEADS, exact), strict=True)

    def _random(self, device: torch.device, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(self.dtype)


def _double(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()
