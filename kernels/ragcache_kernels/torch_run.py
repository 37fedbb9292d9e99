"""Running a stack of work items: gather its inputs, attend in one call, hand back by token."""

from __future__ import annotations

from torch import Tensor

from ragcache_kernels.interface import AttentionSpec, LayerCache
from ragcache_kernels.torch_gather import Gather, Scratch
from ragcache_kernels.torch_partial import Partial, attend_partial
from ragcache_kernels.torch_stack import Stack


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
        self._key = Gather("key", stack, cache.key, query.dtype, scratch)
        self._value = Gather("value", stack, cache.value, query.dtype, scratch)

    def attend(self, query: Tensor, cache: LayerCache, spec: AttentionSpec) -> Partial:
        """Packed output and log-sum-exp, for `by_token`."""
        query = query[self.stack.tokens]
        if self.stack.few:
            self._query_by_token.copy_(query.view(*self._shape, -1))
            query = self._query
        else:
            query = query.unsqueeze(0).transpose(1, 2)
        key = self._key.load(cache.key, cache.key_scale)
        value = self._value.load(cache.value, cache.value_scale)
        return attend_partial(query, key, value, spec, self.stack.causal, self.stack.mask)

    def by_token(self, packed: Tensor) -> Tensor:
        """From `[S, groups, M, …]` to `[S·t, Hq, …]`."""
        size, queries, groups, per_group = self._shape
        last = packed.shape[3:]
        packed = packed[:, :, : self._count]
        if queries > 1:
            packed = packed.reshape(size, groups, queries, per_group, *last).transpose(1, 2)
        return packed.reshape(size * queries, groups * per_group, *last)
