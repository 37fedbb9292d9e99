"""Attention in plain torch, on any device.

What decides the speed on a CPU (measured, float32): gathered keys must be used while they are
still in the cache, so work runs in stacks of bounded size through one scratch memory; and the
query heads of a KV head must be the rows of one matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.quantise import as_integers, quantise
from ragcache_kernels.torch_gather import Scratch
from ragcache_kernels.torch_layer_ops import TorchLayerOps
from ragcache_kernels.torch_partial import merge
from ragcache_kernels.torch_run import StackRun
from ragcache_kernels.torch_stack import Stack, build_stacks

Shapes = tuple[torch.Size, torch.Size, torch.Size, torch.dtype]


class TorchPlan:
    """A step's slots; its stacks by window; their runs by window and kind of layer."""

    def __init__(self, layout: StepLayout, device: torch.device, scratch: Scratch) -> None:
        slots = layout.slot_mapping
        self.tokens: Tensor | None = None  # those that have a slot; None: all have
        if bool((slots < 0).any()):
            tokens = (slots >= 0).nonzero().squeeze(1)
            self.tokens, slots = tokens.to(device), slots[tokens]
        self.slots = slots.to(device)
        self._layout = layout
        self._device = device
        self._scratch = scratch
        self._stacks: dict[int | None, list[Stack]] = {}
        self._runs: dict[tuple[int | None, Shapes], list[StackRun]] = {}

    def runs(self, window: int | None, query: Tensor, cache: LayerCache) -> list[StackRun]:
        """The work of a layer, in the order in which to run it; built for the first of its kind."""
        key = window, (query.shape, cache.key.shape, cache.value.shape, cache.key.dtype)
        if key not in self._runs:
            self._runs[key] = [
                StackRun(stack, query, cache, self._scratch) for stack in self._stacks_for(window)
            ]
        return self._runs[key]

    def _stacks_for(self, window: int | None) -> list[Stack]:
        if window is not None and window >= int(self._layout.kv_len.max()):
            window = None
        if window not in self._stacks:
            self._stacks[window] = build_stacks(self._layout, window, self._device)
        return self._stacks[window]


class TorchBackend(AttentionBackend[TorchPlan]):
    """Partial attention per stack of work items, merged by log-sum-exp. Not thread-safe."""

    name = "torch"
    ops = TorchLayerOps()

    def __init__(self) -> None:
        self._scratch = Scratch()

    def plan(self, layout: StepLayout, device: torch.device) -> TorchPlan:
        """Do the step's host work once; all layers share the result."""
        return TorchPlan(layout, device, self._scratch)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, plan: TorchPlan) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""
        if plan.tokens is not None:
            key, value = key[plan.tokens], value[plan.tokens]
        _write(key, cache.key, cache.key_scale, plan.slots)
        _write(value, cache.value, cache.value_scale, plan.slots)

    def attend(
        self, query: Tensor, cache: LayerCache, plan: TorchPlan, spec: AttentionSpec
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        runs = plan.runs(spec.window, query, cache)
        if len(runs) == 1 and runs[0].stack.whole and spec.sinks is None:
            return runs[0].by_token(runs[0].attend(query, cache, spec)[0])
        out = query.new_zeros(*query.shape[:2], cache.value.shape[-1], dtype=torch.float32)
        lse = query.new_zeros(query.shape[:2], dtype=torch.float32)
        for run in runs:
            packed_out, packed_lse = run.attend(query, cache, spec)
            part = run.by_token(packed_out).float(), run.by_token(packed_lse)
            tokens = run.stack.tokens
            if not run.stack.first:
                part = merge((out[tokens], lse[tokens]), part)
            out[tokens], lse[tokens] = part
        if spec.sinks is not None:
            out *= torch.sigmoid(lse - spec.sinks.float()).unsqueeze(-1)
        return out.to(query.dtype)


def _write(rows: Tensor, cache: Tensor, scale: Tensor | None, slots: Tensor) -> None:
    if scale is not None:
        rows, scales = quantise(rows, cache.dtype)
        scale.flatten(0, 1).index_copy_(0, slots, scales)
    as_integers(cache).flatten(0, 1).index_copy_(0, slots, as_integers(rows))
