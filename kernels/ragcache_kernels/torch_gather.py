"""The paged keys or values of a stack, gathered into memory in which they lie in a row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragcache_kernels.quantise import as_integers
from ragcache_kernels.torch_stack import Stack


class Scratch:
    """Memory that is the same at every call: fresh pages would cost more than the copy into it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Uninitialised; valid until something else is written to the same name."""
        key, size = (name, dtype, device), math.prod(shape)
        if key not in self._memory or len(self._memory[key]) < size:
            with torch.inference_mode(False):  # or it could be written in inference mode only
                self._memory[key] = torch.empty(size, dtype=dtype, device=device)
        return self._memory[key][:size].view(shape)


class Gather:
    """One piece of scratch memory as blocks, as slots, and as the `[S, Hkv, c, D]` attended to.

    What is quantised is gathered as it is, then unfolded while still in the processor's cache.
    """

    def __init__(
        self, name: str, stack: Stack, cache: Tensor, dtype: torch.dtype, scratch: Scratch
    ) -> None:
        self._stack = stack
        shape, device = (len(stack.blocks), *cache.shape[1:]), cache.device
        self._blocks = scratch.take(name, shape, dtype, device)
        self._slots = self._blocks.flatten(0, 1)
        rows = self._slots.view(stack.size, -1, *cache.shape[2:])[:, stack.span]
        self._rows = rows.transpose(1, 2)
        self._stored = self._blocks
        if cache.dtype is not dtype:
            self._stored = scratch.take("stored", shape, cache.dtype, device)
            self._scale = scratch.take("scale", shape[:3], torch.float32, device)

    def load(self, cache: Tensor, scale: Tensor | None) -> Tensor:
        """The rows of a layer, valid until the next call."""
        torch.index_select(as_integers(cache), 0, self._stack.blocks, out=as_integers(self._stored))
        if scale is not None:
            torch.index_select(scale, 0, self._stack.blocks, out=self._scale)
            self._blocks.copy_(self._stored).mul_(self._scale.unsqueeze(-1))
        if self._stack.blank is not None:  # NaN there would outlive a weight of zero
            self._slots.index_fill_(0, self._stack.blank, 0.0)
        return self._rows
