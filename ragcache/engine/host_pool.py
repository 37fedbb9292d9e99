"""Blocks in host memory, to which those of the device are swapped.

What is in a block does not matter: it is the bytes that all tensors of the pool have of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from ragcache_kernels.registry import takes_kernels
from torch import Tensor, uint8

from ragcache.engine.pool import Pairs
from ragcache.errors import ConfigError


class HostPool(Protocol):
    """`num_blocks` blocks. Swaps run in the order in which they are asked for."""

    num_blocks: int

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks to the host, for each pair of a device id and a host id."""

    def swap_in(self, pairs: Pairs) -> None:
        """Copy blocks to the device, for each pair of a host id and a device id."""

    def close(self) -> None:
        """Give the memory back, after the last swap."""


class PlainHostPool:
    """Where the device is the CPU: a second pool in the same memory.

    numpy copies them on this thread: torch would spread the many small copies over threads, which
    all wait for the slowest on a busy machine (measured: 30 times slower). A page is touched by
    the first write to it only; a huge one has 2 MiB, of one tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._device = [tensor.view(len(tensor), -1).view(uint8).numpy() for tensor in tensors]
        self._host = [np.empty((num_blocks, each.shape[1]), np.uint8) for each in self._device]

    def swap_out(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        _copy(self._device, self._host, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `HostPool`."""
        _copy(self._host, self._device, pairs)

    def close(self) -> None:
        """See `HostPool`; there is nothing."""


def _copy(sources: list[NDArray[Any]], targets: list[NDArray[Any]], pairs: Pairs) -> None:
    if pairs:
        read, written = np.array(pairs).T
        for source, target in zip(sources, targets, strict=True):
            target[written] = source[read]


def host_pool(tensors: Sequence[Tensor], memory: int) -> HostPool:
    """As many blocks as fit into `memory` bytes, for those of the device's `tensors` `[N, ...]`.

    Raises:
        ConfigError: when not even one block fits, or the memory cannot be had.
    """
    block_bytes = sum(tensor[0].nbytes for tensor in tensors)
    num_blocks = memory // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"host_cache_memory: {memory} bytes hold no block; one block takes {block_bytes} bytes"
        )
    device = tensors[0].device
    if device.type == "cuda" and not takes_kernels(device):
        raise ConfigError(
            "host_cache_memory: on a GPU this takes compute capability 8.0 and Triton 3.6"
        )
    try:
        if device.type == "cuda":
            from ragcache.engine.pinned_pool import PinnedHostPool

            return PinnedHostPool(tensors, num_blocks)
        return PlainHostPool(tensors, num_blocks)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"host_cache_memory: {memory} bytes cannot be had: {error}") from error
