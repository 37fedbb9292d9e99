"""Attention on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ragcache_kernels.interface import AttentionBackend, AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.triton.attention import LOG2E, attend_tiles, merge_partials
from ragcache_kernels.triton.blocks import copy_blocks
from ragcache_kernels.triton.configs import NARROW_ROWS, Config, choose
from ragcache_kernels.triton.tiles import TilePlanner, Tiles
from ragcache_kernels.triton.write import write_tokens

_MERGE_HEADS = 8  # query heads of a program that merges


class DeviceTiles:
    """The tiles of a step on the device, where they arrive in one copy.

    Each array starts at a multiple of 16 bytes: kernels are compiled anew for other alignments.
    """

    def __init__(self, tiles: Tiles, device: torch.device) -> None:
        parts = [tiles.narrow, tiles.wide, tiles.tokens, tiles.positions, tiles.ends, tiles.order]
        aligned = [part.size + -part.size % 4 for part in parts]
        packed = torch.empty(sum(aligned), dtype=torch.int32, pin_memory=device.type == "cuda")
        for place, part in zip(packed.split(aligned), parts, strict=True):  # type: ignore[no-untyped-call]
            place[: part.size] = torch.from_numpy(part.ravel())
        on_device = packed.to(device, non_blocking=True)
        self.narrow, self.wide, self.tokens, self.positions, self.ends, self.order = (
            place[: part.size]
            for place, part in zip(on_device.split(aligned), parts, strict=True)  # type: ignore[no-untyped-call]
        )
        self.num_partials = len(tiles.order)


class TritonPlan:
    """A step's block table and slots on the device; its tiles by window and shape of layer."""

    def __init__(self, layout: StepLayout, device: torch.device, planner: TilePlanner) -> None:
        self.slots = layout.slot_mapping.to(device)
        self.table = layout.block_table.contiguous().to(device)
        self.block_size = layout.block_size
        self._layout = layout
        self._device = device
        self._planner = planner
        self._tiles: dict[tuple[int | None, int, int], DeviceTiles] = {}

    def tiles(self, window: int | None, group: int, wide_rows: int) -> DeviceTiles:
        """The work of layers with `group` query heads per KV head."""
        if window is not None and window >= int(self._layout.kv_len.max()):
            window = None
        key = window, group, wide_rows
        if key not in self._tiles:
            queries = (max(1, rows // group) for rows in (NARROW_ROWS, wide_rows))
            self._tiles[key] = DeviceTiles(
                self._planner.plan(self._layout, window, *queries), self._device
            )
        return self._tiles[key]


class TritonBackend(AttentionBackend[TritonPlan]):
    """Tiles of queries and keys, merged by log-sum-exp.

    On a CPU it runs in Triton's interpreter, for tests: where `TRITON_INTERPRET=1` was set before
    triton was imported.
    """

    name = "triton"

    def __init__(self) -> None:
        self._planner = TilePlanner()

    def plan(self, layout: StepLayout, device: torch.device) -> TritonPlan:
        """Do the step's host work once; all layers share the result."""
        return TritonPlan(layout, device, self._planner)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, plan: TritonPlan) -> None:
        """Store key `[T, Hkv, D]` and value `[T, Hkv, Dv]` in their slots."""
        key, value = _dense(key), _dense(value)
        tokens, heads, dim = key.shape
        write_tokens[(tokens,)](
            key,
            value,
            cache.key,
            cache.value,
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

    def attend(
        self, query: Tensor, cache: LayerCache, plan: TritonPlan, spec: AttentionSpec
    ) -> Tensor:
        """Attention of query `[T, Hq, D]`, after `write_kv`: `[T, Hq, Dv]` in the query's dtype."""
        tokens, heads, dim = query.shape
        group, value_dim = heads // cache.key.shape[2], cache.value.shape[3]
        widest = max(dim, value_dim)
        wide = choose(NARROW_ROWS + 1, widest)
        work = plan.tiles(spec.window, group, wide.bm)
        partials = query.new_empty(work.num_partials, heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(work.num_partials, heads, dtype=torch.float32)
        args = (_dense(query), cache, plan, work, spec)
        narrow = choose(max(NARROW_ROWS, group), widest)
        for tiles, config in ((work.narrow, narrow), (work.wide, wide)):
            if len(tiles):
                _launch(tiles, config, group, partials, lse, *args)
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
    tiles: Tensor,
    config: Config,
    group: int,
    partials: Tensor,
    lse: Tensor,
    query: Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    work: DeviceTiles,
    spec: AttentionSpec,
) -> None:
    kv_heads, dim = cache.key.shape[2:]
    value_dim = cache.value.shape[3]
    attend_tiles[(len(tiles) // 7, kv_heads)](
        query,
        cache.key,
        cache.value,
        plan.table,
        tiles,
        work.tokens,
        work.positions,
        partials,
        lse,
        *query.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        plan.table.stride(0),
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
        UPCAST=_INTERPRETED and query.dtype is torch.bfloat16,
        **config.options,
    )


# The interpreter multiplies the bit patterns of bfloat16.
_INTERPRETED = triton.knobs.runtime.interpret


def _padded(dim: int) -> int:
    """A size that a matrix instruction takes."""
    return max(16, int(triton.next_power_of_2(dim)))


def _dense(tensor: Tensor) -> Tensor:
    """With its last dimension in a row; the others may have any stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
