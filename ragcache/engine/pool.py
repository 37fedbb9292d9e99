"""The K and V tensors behind the block ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ragcache_kernels.interface import LayerCache
from ragcache_kernels.quantise import LIMITS
from torch import Tensor

from ragcache.engine.machine import free_memory
from ragcache.errors import ConfigError

Pairs = Sequence[tuple[int, int]]  # ids of blocks, source and target
STAGING = 128 << 20  # bytes on a GPU through which blocks are swapped, some at a time
FREE_MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.9}  # of what is free once the model is loaded


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K heads and head dims of one layer; they may differ between layers, and K from V."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """`layers[l]`: keys and values of layer l.

    The block is the outermost unit, so copies and eviction need not know what is inside: a dtype
    of eight bits brings scales with it. A page is touched by the first write to it only, so a large
    pool costs little memory until it is used: with huge pages, 2 MiB at a time of each tensor.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype = dtype

        def rows(layer: LayerShape, dim: int) -> Tensor:
            shape = (num_blocks, block_size, layer.num_kv_heads, dim)
            return torch.empty(shape, dtype=dtype, device=device)

        def scales(layer: LayerShape) -> Tensor | None:
            shape = (num_blocks, block_size, layer.num_kv_heads)
            return torch.empty(shape, device=device) if dtype in LIMITS else None

        self.layers = [
            LayerCache(
                rows(each, each.key_dim), rows(each, each.value_dim), scales(each), scales(each)
            )
            for each in layers
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the pool; a block is row `block_id` of each of them."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(tensor[0].nbytes for tensor in self.tensors)


def pool_blocks(
    block_bytes: int,
    memory: int | None,
    device: torch.device,
    ranks: int = 1,
    reserved: int = 0,
) -> int:
    """How many blocks fit into `memory` bytes, or into a share of what is free.

    Steps take `reserved` bytes of that share. `ranks` processes do the same, each on a GPU of its
    own or all in the host's memory.

    Raises:
        ConfigError: when not even one block fits.
    """
    if memory is None:
        share = FREE_MEMORY_SHARE[device.type] / (ranks if device.type == "cpu" else 1)
        memory = int(free_memory(device) * share) - reserved
    blocks = memory // block_bytes
    if blocks < 1:
        raise ConfigError(
            f"kv_cache_memory: {memory} bytes hold no block; one block takes {block_bytes} bytes"
        )
    return blocks
