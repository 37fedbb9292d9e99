"""One layer's attention as it is timed: over pages, and by what torch has to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ragcache_kernels.bench.clock import Call, Work
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.quantise import quantise
from ragcache_kernels.torch_backend import TorchBackend

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the elements of each."""

    query: int
    kv: int
    dim: int


class Layer:
    """A layer with a random cache of `blocks` blocks; steps attend to parts of it."""

    def __init__(
        self,
        backend: AttentionBackend[Any],
        heads: Heads,
        blocks: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.backend = backend
        self.heads = heads
        self.blocks = blocks
        self.device = device
        self.dtype = dtype
        self.spec = AttentionSpec(scale=heads.dim**-0.5)
        shape = (blocks, BLOCK_SIZE, heads.kv, heads.dim)
        self.cache = LayerCache(self.random(*shape), self.random(*shape))

    def random(self, *shape: int) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def queries(self, tokens: int) -> Tensor:
        """Random queries `[T, Hq, D]`."""
        return self.random(tokens, self.heads.query, self.heads.dim)

    def decodes(self, table: Tensor, length: int) -> Call:
        """The last token of each row of the table, over `length` tokens."""
        return self.paged(self.queries(len(table)), layout(table, 1, length))

    def paged(self, query: Tensor, step: StepLayout) -> Call:
        """A step of the backend, planned; pages of any size cover the same cache."""
        return self._attend(query, self._with_pages_of(step.block_size), step)

    def in_torch(self, query: Tensor, step: StepLayout) -> Call:
        """The same step by the backend that runs everywhere."""
        backend = TorchBackend()
        plan = backend.plan(step, self.device)
        return lambda: backend.attend(query, self.cache, plan, self.spec)

    def quantised(self, query: Tensor, step: StepLayout, dtype: torch.dtype) -> Call:
        """The same step over a cache that was quantised."""
        return self._attend(query, self.quantised_cache(dtype), step)

    def quantised_cache(self, dtype: torch.dtype) -> LayerCache:
        """The cache, quantised."""
        rows, scales = zip(*(quantise(each, dtype) for each in self.cache.tensors), strict=True)
        return LayerCache(*rows, *scales)

    def _attend(self, query: Tensor, cache: LayerCache, step: StepLayout) -> Call:
        plan = self.backend.plan(step, self.device)
        return lambda: self.backend.attend(query, cache, plan, self.spec)

    def dense(self, queries: int, length: int) -> Call:
        """Torch's attention of the last `queries` of `length` tokens, without pages."""
        query = self.random(1, self.heads.query, queries, self.heads.dim)
        key, value = (self.random(1, self.heads.kv, length, self.heads.dim) for _ in range(2))
        mask: Tensor
        if self.device.type == "cuda":
            mask = causal_lower_right(queries, length)  # flash attention takes no other mask
        else:
            mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        return lambda: scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )

    def work(
        self, rows: int, queries: int, length: int, keys: int, storage: torch.dtype | None = None
    ) -> Work:
        """Of `rows` sequences' last `queries` of `length` tokens, over `keys` different ones.

        Keys and values are quantised if there is a `storage` for them.
        """
        heads, query = self.heads, self.heads.dim * self.dtype.itemsize
        key = query if storage is None else heads.dim * storage.itemsize + 4  # bytes of a scale
        pairs = rows * queries * (2 * length - queries + 1) // 2
        moved = 2 * (keys * heads.kv * key + rows * queries * heads.query * query)
        return Work(moved, 4 * pairs * heads.query * heads.dim)

    def _with_pages_of(self, block_size: int) -> LayerCache:
        slots = self.blocks * BLOCK_SIZE // block_size * block_size
        pages = (-1, block_size, self.heads.kv, self.heads.dim)
        each = (tensor.flatten(0, 1)[:slots].view(pages) for tensor in self.cache.tensors)
        return LayerCache(*each)


def blocks_for(tokens: int) -> int:
    """Blocks of so many tokens of a sequence."""
    return -(-tokens // BLOCK_SIZE)


def layout(table: Tensor, queries: int, length: int, block_size: int = BLOCK_SIZE) -> StepLayout:
    """Of sequences that are all alike; their keys are in the cache already."""
    rows = len(table)
    return StepLayout(
        cu_q=torch.arange(rows + 1, dtype=torch.int32) * queries,
        kv_len=torch.full((rows,), length, dtype=torch.int32),
        block_table=table.int(),
        slot_mapping=torch.full((rows * queries,), -1),
        block_size=block_size,
    )
