"""Attention on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ragcache_kernels.growth import TilePlanner
from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.layer_ops import Rotation
from ragcache_kernels.tiles import NARROW_SPLIT, TILE_FIELDS
from ragcache_kernels.triton.attention import LOG2E, attend_tiles, merge_partials
from ragcache_kernels.triton.blocks import copy_blocks
from ragcache_kernels.triton.configs import Case, Config, Phase, choose
from ragcache_kernels.triton.layer_ops import TritonLayerOps
from ragcache_kernels.triton.plan import DeviceTiles, Kind, TritonFixedPlan, TritonPlan
from ragcache_kernels.triton.rope import rotate_and_write
from ragcache_kernels.triton.write import write_tokens

_MERGE_HEADS = 8  # query heads of a program that merges
_PER_PROCESSOR = 3  # programs of narrow tiles that fit on a multiprocessor at once


class Gpu(NamedTuple):
    """What the launches depend on; in the interpreter there is one small processor."""

    arch: int  # 90 is sm_90
    processors: int

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Gpu:
        """The properties of a device."""
        if device.type != "cuda":
            return cls(0, 1)
        found = torch.cuda.get_device_properties(device)
        return cls(10 * found.major + found.minor, found.multi_processor_count)

    def programs(self, kv_heads: int) -> int:
        """Programs for each KV head that together fill the device."""
        return max(1, _PER_PROCESSOR * self.processors // kv_heads)


class TritonBackend(AttentionBackend[TritonPlan | TritonFixedPlan]):
    """Tiles of queries and keys, merged by log-sum-exp.

    On a CPU it runs in Triton's interpreter, for tests: where `TRITON_INTERPRET=1` was set before
    triton was imported. `table` tells how to launch.
    """

    name = "triton"
    ops = TritonLayerOps()

    def __init__(self, table: Callable[[Case], Config] = choose) -> None:
        self._table = table
        self._planner = TilePlanner()
        self._kinds: dict[Kind, None] = {}  # of the layers met so far, in order

    def plan(self, layout: StepLayout, device: torch.device) -> TritonPlan:
        """Do the step's host work once; all layers share the result."""
        return TritonPlan(layout, device, self._planner, self._kinds)

    def fixed_plan(
        self,
        tokens: int,
        max_kv_len: int,
        pool_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> TritonFixedPlan | None:
        """A plan for decodes that stays in place; None before layers have run."""
        if not self._kinds:
            return None
        kinds = tuple(self._kinds)
        # A row is cut where a split or a run of shared blocks ends; of what is shared, each key is
        # read once, so that all of them together are few more than the pool has.
        parts = tokens * (-(-max_kv_len // NARROW_SPLIT) + 2)
        parts = min(parts, -(-pool_tokens // NARROW_SPLIT) + 4 * tokens)
        table = tokens * -(-max_kv_len // block_size)
        return TritonFixedPlan(tokens, parts, table, block_size, device, self._planner, kinds)

    def prepare(self, layout: StepLayout) -> None:
        """Plan a step that may come next, so that less is left to do if it does."""
        for kind in self._kinds:
            self._planner.plan(layout, *kind)

    def write_kv(
        self, key: Tensor, value: Tensor, cache: LayerCache, plan: TritonPlan | TritonFixedPlan
    ) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""
        key, value = _dense(key), _dense(value)
        tokens, heads, dim = key.shape
        write_tokens[(tokens,)](
            key,
            value,
            *_tensors(cache),
            plan.slots,
            *key.stride()[:2],
            *value.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            HEADS=heads,
            PADDED_HEADS=triton.next_power_of_2(heads),
            DIM=dim,
            VALUE_DIM=value.shape[2],
            PADDED_DIM=triton.next_power_of_2(dim),
            PADDED_VALUE_DIM=triton.next_power_of_2(value.shape[2]),
            BLOCK_SIZE=plan.block_size,
        )

    def rotate_and_write(
        self,
        qkv: Tensor,
        rotation: Rotation,
        cache: LayerCache,
        plan: TritonPlan | TritonFixedPlan,
    ) -> Tensor:
        """Rotate queries and keys of qkv `[T, Hq + 2·Hkv, D]`, and store the keys and values."""
        return rotate_and_write(_dense(qkv), rotation, cache, plan.slots, plan.block_size)

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        plan: TritonPlan | TritonFixedPlan,
        spec: AttentionSpec,
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        tokens, heads, dim = query.shape
        group, value_dim = heads // cache.key.shape[2], cache.value.shape[3]
        gpu = Gpu.of(query.device)
        phases = (Phase.NARROW, Phase.WIDE)
        if plan.recorded:
            phases = (Phase.NARROW_RECORDED, Phase.WIDE_RECORDED)
        case = gpu.arch, max(dim, value_dim), group, str(cache.key.dtype)
        configs = [self._table(Case(*case, phase)) for phase in phases]
        kind = Kind(spec.window, *(max(1, config.bm // group) for config in configs))
        self._kinds[kind] = None
        work = plan.tiles(kind)
        partials = query.new_empty(work.num_partials, heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(work.num_partials, heads, dtype=torch.float32)
        launches = (work.narrow, work.num_narrow), (work.wide, work.num_wide)
        for (tiles, count), config in zip(launches, configs, strict=True):
            kv_heads = cache.key.shape[2]
            programs = gpu.programs(kv_heads) if plan.recorded else len(tiles) // TILE_FIELDS
            if programs:
                args = (_dense(query), cache, plan, work, spec)
                _launch((programs, kv_heads), tiles, count, config, group, partials, lse, *args)
        out = query.new_empty(tokens, heads, value_dim)
        merged = min(_MERGE_HEADS, triton.next_power_of_2(heads))
        merge_partials[(tokens, triton.cdiv(heads, merged))](
            partials,
            lse,
            work.ends,
            work.order,
            lse if spec.sinks is None else spec.sinks,
            out,
            heads,
            VALUE_DIM=value_dim,
            PADDED_VALUE_DIM=triton.next_power_of_2(value_dim),
            BH=merged,
            SINKS=spec.sinks is not None,
        )
        return out

    def copy_blocks(self, caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block src to block dst in every cache; all sources are read before any write."""
        copy_blocks(caches, pairs)


def _launch(
    grid: tuple[int, int],
    tiles: Tensor,
    count: Tensor,
    config: Config,
    group: int,
    partials: Tensor,
    lse: Tensor,
    query: Tensor,
    cache: LayerCache,
    plan: TritonPlan | TritonFixedPlan,
    work: DeviceTiles,
    spec: AttentionSpec,
) -> None:
    dim, value_dim = cache.key.shape[3], cache.value.shape[3]
    attend_tiles[grid](
        query,
        *_tensors(cache),
        plan.table,
        tiles,
        count,
        work.tokens,
        work.positions,
        partials,
        lse,
        *query.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        query.shape[1],
        spec.scale * LOG2E.value,
        (spec.softcap or 0.0) * LOG2E.value,
        spec.window or 0,
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        PADDED_DIM=_padded(dim),
        PADDED_VALUE_DIM=_padded(value_dim),
        BLOCK_SIZE=plan.block_size,
        BM=max(config.bm, triton.next_power_of_2(group)),
        BN=config.bn,
        SOFTCAP=spec.softcap is not None,
        WINDOW=spec.window is not None,
        PERSISTENT=plan.recorded,
        UPCAST=_INTERPRETED and query.dtype is torch.bfloat16,
        **config.options,
    )


def _tensors(cache: LayerCache) -> tuple[Tensor | None, ...]:
    """What a cache may consist of, in the order of the kernels' arguments."""
    return cache.key, cache.value, cache.key_scale, cache.value_scale


# The interpreter multiplies the bit patterns of bfloat16.
_INTERPRETED = triton.knobs.runtime.interpret


def _padded(dim: int) -> int:
    """A size that a matrix instruction takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def _dense(tensor: Tensor) -> Tensor:
    """With its last dimension in a row; the others may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
