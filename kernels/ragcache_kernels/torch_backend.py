"""Attention in plain torch, on any device.

What decides the speed on a CPU (measured, float32): gathered keys must be used while they are
still in the cache, so work is run in stacks of bounded size through one scratch buffer; and the
query heads of a KV head must be the rows of one matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionBackend, AttentionSpec, StepLayout
from ragcache_kernels.torch_partial import Partial, attend_partial, merge
from ragcache_kernels.torch_stack import Stack, build_stacks


@dataclass(slots=True)
class TorchPlan:
    """A step's slots, and its stacks by window."""

    layout: StepLayout
    device: torch.device
    rows: Tensor | None  # the tokens that have a slot; None: all have
    slots: Tensor
    stacks: dict[int | None, list[Stack]] = field(default_factory=dict)

    def stacks_for(self, window: int | None) -> list[Stack]:
        """The stacks for layers with this window, built when the first of them asks."""
        if window is not None and window >= int(self.layout.kv_len.max()):
            window = None
        if window not in self.stacks:
            self.stacks[window] = build_stacks(self.layout, window, self.device)
        return self.stacks[window]


class TorchBackend(AttentionBackend[TorchPlan]):
    """Gathers the keys of a stack of work items, then attends in one call; for one thread."""

    name = "torch"

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def plan(self, layout: StepLayout, device: torch.device) -> TorchPlan:
        """Do the step's host work once; all layers share the result."""
        slots, rows = layout.slot_mapping, None
        if bool((slots < 0).any()):
            rows = (slots >= 0).nonzero().squeeze(1)
            slots, rows = slots[rows], rows.to(device)
        return TorchPlan(layout, device, rows, slots.to(device))

    def write_kv(
        self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, plan: TorchPlan
    ) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""
        if plan.rows is not None:
            key, value = key[plan.rows], value[plan.rows]
        key_cache.flatten(0, 1).index_copy_(0, plan.slots, key)
        value_cache.flatten(0, 1).index_copy_(0, plan.slots, value)

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        plan: TorchPlan,
        spec: AttentionSpec,
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        stacks, heads = plan.stacks_for(spec.window), query.shape[1]
        if len(stacks) == 1 and spec.sinks is None and stacks[0].tokens == slice(0, len(query)):
            return _by_token(self._attend(stacks[0], query, key_cache, value_cache, spec)[0], heads)
        out = query.new_zeros(*query.shape[:2], value_cache.shape[-1], dtype=torch.float32)
        lse = query.new_zeros(query.shape[:2], dtype=torch.float32)
        for stack in stacks:
            part = self._attend(stack, query, key_cache, value_cache, spec)
            part = _by_token(part[0].float(), heads), _by_token(part[1], heads)
            if not stack.first:
                part = merge((out[stack.tokens], lse[stack.tokens]), part)
            out[stack.tokens], lse[stack.tokens] = part
        if spec.sinks is not None:
            out *= torch.sigmoid(lse - spec.sinks.float()).unsqueeze(-1)
        return out.to(query.dtype)

    def copy_blocks(self, caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block src to block dst in every cache; all sources are read before any write."""
        for cache in caches:
            source, target = torch.tensor(pairs, device=cache.device).unbind(1)
            cache.index_copy_(0, target, cache.index_select(0, source))

    def _attend(
        self,
        stack: Stack,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        spec: AttentionSpec,
    ) -> Partial:
        """Output `[S, groups, t·Hq/groups, Dv]`, its log-sum-exp `[S, groups, t·Hq/groups]`."""
        key = self._gather(stack, "key", key_cache)
        value = self._gather(stack, "value", value_cache)
        heads, dim = query.shape[1:]
        groups = key.shape[1] if stack.few else heads
        rows = query[stack.tokens].view(stack.size, -1, groups, heads // groups, dim)
        rows = rows.transpose(1, 2).reshape(stack.size, groups, -1, dim)
        if stack.splits > 1:
            rows = rows.expand(stack.splits, -1, -1, -1, -1).flatten(0, 1)
        part = attend_partial(rows, key, value, spec, causal=stack.causal, mask=stack.mask)
        for _ in range(stack.splits.bit_length() - 1):  # halves onto each other, until one is left
            (out, other_out), (lse, other_lse) = part[0].chunk(2), part[1].chunk(2)
            part = merge((out, lse), (other_out, other_lse))
        return part

    def _gather(self, stack: Stack, name: str, cache: Tensor) -> Tensor:
        """Keys or values of a stack, `[S·splits, Hkv, c, D]`, valid until the next stack."""
        views = stack.views.get((name, cache.shape))
        if views is None:
            views = stack.views[name, cache.shape] = self._views(stack, name, cache)
        target, slots, parts = views
        torch.index_select(cache, 0, stack.blocks, out=target)
        if stack.blank is not None:  # it may be NaN, which a weight of zero does not silence
            slots.index_fill_(0, stack.blank, 0.0)
        return parts

    def _views(self, stack: Stack, name: str, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch memory for a stack as blocks, as slots and as parts.

        It is the same memory for all stacks of all steps: fresh pages would cost more than the
        copy itself.
        """
        shape = (len(stack.blocks), *cache.shape[1:])
        key = (name, cache.dtype, cache.device)
        if key not in self._scratch or len(self._scratch[key]) < math.prod(shape):
            self._scratch[key] = cache.new_empty(math.prod(shape))
        blocks = self._scratch[key][: math.prod(shape)].view(shape)
        slots = blocks.flatten(0, 1)
        parts = slots.view(stack.size * stack.splits, -1, *shape[2:])[:, stack.span]
        return blocks, slots, parts.transpose(1, 2)


def _by_token(part: Tensor, heads: int) -> Tensor:
    """From `[S, groups, t·Hq/groups, …]` to `[S·t, Hq, …]`."""
    size, groups = part.shape[:2]
    part = part.reshape(size, groups, -1, heads // groups, *part.shape[3:]).transpose(1, 2)
    return part.reshape(-1, heads, *part.shape[4:])
