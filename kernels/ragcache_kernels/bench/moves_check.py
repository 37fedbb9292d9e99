"""Copies of blocks, and masks over the vocabulary: every bit as the plain way, on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragcache_kernels.interface import AttentionBackend
from ragcache_kernels.masks import LOWEST, apply_masks

BLOCKS, BLOCK = 40, (16, 8, 128)  # tokens, heads, elements
ROWS, VOCAB_SIZE = 7, 128_256 + 5  # the last word of a mask is not full


@dataclass(frozen=True, slots=True)
class CopiesCheck:
    """Blocks copied within caches of several layers, some of them both source and target."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        """What is checked."""
        return f"copies of blocks, {str(self.dtype).removeprefix('torch.')}"

    def error(self, backend: AttentionBackend[Any], device: torch.device) -> float:
        """0, or infinity where a block is not what it should be."""
        shapes = [(BLOCKS, *BLOCK)] * 4 + [(BLOCKS, *BLOCK[:2])] * 2  # with scales of eight bits
        caches = [torch.randn(shape, device=device).to(self.dtype) for shape in shapes]
        sources = torch.randperm(BLOCKS)[: BLOCKS // 2]
        targets = torch.randperm(BLOCKS)[: BLOCKS // 2]
        expected = [cache.cpu().clone() for cache in caches]
        for cache in expected:
            cache[targets] = cache[sources]
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        backend.copy_blocks(caches, pairs)
        found = zip(caches, expected, strict=True)
        return 0.0 if all(torch.equal(mine.cpu(), other) for mine, other in found) else math.inf


@dataclass(frozen=True, slots=True)
class MasksCheck:
    """Masks of a grammar on some rows of logits."""

    name: str = "masks over the vocabulary"

    def error(self, _backend: AttentionBackend[Any], device: torch.device) -> float:
        """0, or infinity where a logit is not what it should be."""
        logits = torch.randn(ROWS, VOCAB_SIZE, device=device)
        logits[::2, ::3] = -torch.inf  # allowed, it becomes the lowest
        rows = [5, 0, 2]
        flags = np.random.default_rng(0).random((len(rows), -(-VOCAB_SIZE // 32) * 32)) < 0.3
        expected = logits.cpu().clone()
        for row, allowed in zip(rows, torch.from_numpy(flags[:, :VOCAB_SIZE]), strict=True):
            expected[row] = expected[row].clamp(min=LOWEST).masked_fill(~allowed, -torch.inf)
        apply_masks(logits, rows, np.packbits(flags, axis=1, bitorder="little").view(np.int32))
        return 0.0 if torch.equal(logits.cpu(), expected) else math.inf
