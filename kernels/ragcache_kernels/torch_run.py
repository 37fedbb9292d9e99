"""Running a stack of work items: gather its inputs, attend in one call, hand back by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionSpec, LayerCache
from ragcache_kernels.torch_partial import Partial, attend_partial
from ragcache_kernels.torch_stack import Stack


class Scratch:
    """Memory that is the same at every call: fresh pages would cost more than the copy into it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Uninitialised; valid until something else is written to the same name."""
        key, size = (name, like.dtype, like.device), math.prod(shape)
        if key not in self._memory or len(self._memory[key]) < size:
            with torch.inference_mode(False):  # or it could be written in inference mode only
                self._memory[key] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._memory[key][:size].view(shape)


class StackRun:
    """A stack with the tensors that its call takes, for all layers of one shape.

    Packed queries are `[S, groups, M, D]`. When there are few, the query heads of a KV head form
    one group, padded to a multiple of four rows: matrix products are up to 1.5 times faster with
    four rows than with three. When there are many, every query head is its own group.
    """

    def __init__(self, stack: Stack, query: Tensor, cache: LayerCache, scratch: Scratch) -> None:
        self.stack = stack
        heads, dim = query.shape[1:]
        groups = cache.key.shape[2] if stack.few else heads
        self._shape = (stack.size, stack.queries, groups, heads // groups)
        self._count = stack.queries * heads // groups
        if stack.few:
            padded = query.new_zeros(stack.size, groups, -(-self._count // 4) * 4, dim)
            used = padded[:, :, : self._count].view(stack.size, groups, stack.queries, -1, dim)
            self._query, self._query_by_token = padded, used.transpose(1, 2)
        self._key = self._views("key", cache.key, scratch)
        self._value = self._views("value", cache.value, scratch)

    def attend(self, query: Tensor, cache: LayerCache, spec: AttentionSpec) -> Partial:
        """Packed output and log-sum-exp, for `by_token`."""
        query = query[self.stack.tokens]
        if self.stack.few:
            self._query_by_token.copy_(query.view(*self._shape, -1))
            query = self._query
        else:
            query = query.unsqueeze(0).transpose(1, 2)
        key = self._gather(cache.key, *self._key)
        value = self._gather(cache.value, *self._value)
        return attend_partial(query, key, value, spec, self.stack.causal, self.stack.mask)

    def by_token(self, packed: Tensor) -> Tensor:
        """From `[S, groups, M, …]` to `[S·t, Hq, …]`."""
        size, queries, groups, per_group = self._shape
        last = packed.shape[3:]
        packed = packed[:, :, : self._count]
        if queries > 1:
            packed = packed.reshape(size, groups, queries, per_group, *last).transpose(1, 2)
        return packed.reshape(size * queries, groups * per_group, *last)

    def _gather(self, cache: Tensor, blocks: Tensor, slots: Tensor, keys: Tensor) -> Tensor:
        torch.index_select(cache, 0, self.stack.blocks, out=blocks)
        if self.stack.blank is not None:  # NaN there would outlive a weight of zero
            slots.index_fill_(0, self.stack.blank, 0.0)
        return keys

    def _views(self, name: str, cache: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor]:
        """One piece of memory as blocks, as slots, and as the `[S, Hkv, c, D]` attended to."""
        blocks = scratch.take(name, (len(self.stack.blocks), *cache.shape[1:]), cache)
        slots = blocks.flatten(0, 1)
        keys = slots.view(self.stack.size, -1, *cache.shape[2:])[:, self.stack.span]
        return blocks, slots, keys.transpose(1, 2)
