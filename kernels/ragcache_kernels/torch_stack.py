"""Work items as the torch backend runs them: stacks of equal items, with their index tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache_kernels.interface import StepLayout
from ragcache_kernels.planner import IntArray, Visibility, WorkItem, plan_items

# Keys of one call: what is gathered must still be in the CPU's cache when it is used.
CPU_KEYS_PER_THREAD = 1024
GPU_KEYS = 32768
# Up to so many queries gathering costs as much as attending: whole blocks, shared by the threads.
FEW_QUERIES = 8
MIN_SPLIT_KEYS = 128
# Items stacked with a longer one are padded to its length.
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class Stack:
    """S work items of t queries each, run by one call over S·splits parts of c keys."""

    tokens: slice | Tensor  # S·t query rows
    size: int  # S
    splits: int  # a power of two; the parts of an item are S apart
    few: bool  # the query heads of a KV head become rows of one matrix
    blocks: Tensor  # int64, the physical blocks of all parts
    span: slice  # of the gathered slots, those that count: in a single part exactly its keys
    blank: Tensor | None  # otherwise the gathered slots outside of their part, over all parts
    causal: bool
    mask: Tensor | None  # [S·splits, 1, 1 or t, c] float32, added to the scores
    first: bool  # no earlier stack has results for these tokens
    views: dict[tuple[str, torch.Size], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)


def build_stacks(layout: StepLayout, window: int | None, device: torch.device) -> list[Stack]:
    """All work of a step for the layers with this window, in the order in which to run it."""
    on_cpu = device.type == "cpu"
    max_keys = CPU_KEYS_PER_THREAD * torch.get_num_threads() if on_cpu else GPU_KEYS
    groups = _group(plan_items(layout, window, max_keys), max_keys)
    return [_stack(group, layout, window, device) for group in groups]


def _group(items: list[WorkItem], max_keys: int) -> Iterator[list[WorkItem]]:
    """Single queries of equal rank and similar length together, everything else alone."""
    group: list[WorkItem] = []
    for item in sorted(items, key=lambda item: (item.rank, len(item.tokens), -item.keys)):
        if group and not _fits(item, group, max_keys):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _fits(item: WorkItem, group: list[WorkItem], max_keys: int) -> bool:
    longest = group[0]
    return (
        len(item.tokens) == len(longest.tokens) == 1
        and item.rank == longest.rank
        and item.visibility is longest.visibility is Visibility.ALL
        and item.keys >= (1 - MAX_PADDING) * longest.keys
        and (len(group) + 1) * longest.keys <= max_keys
    )


def _stack(
    items: list[WorkItem], layout: StepLayout, window: int | None, device: torch.device
) -> Stack:
    """The index tensors of items with equally many tokens, the first of them the longest."""
    tokens = np.concatenate([item.tokens for item in items])
    visibility = items[0].visibility
    few = visibility is Visibility.ALL and len(items[0].tokens) <= FEW_QUERIES
    size = layout.block_size
    splits = _splits(len(items), items[0].keys, size) if few and device.type == "cpu" else 1
    bounds = np.array([_bounds(item, splits, size) for item in items]).T  # [splits + 1, S]
    start, stop = bounds[:-1].reshape(-1, 1), bounds[1:].reshape(-1, 1)
    first, last = start // size, (stop - 1) // size
    blocks = first + np.arange((last - first).max() + 1)
    keys = (blocks[..., None] * size + np.arange(size)).reshape(len(blocks), 1, -1)
    span = slice(None)
    if len(keys) == 1:
        span = slice(*(np.array([start, stop]) - first * size).ravel().tolist())
        keys = keys[..., span]
    outside = (keys < start[..., None]) | (keys >= stop[..., None])
    hidden = outside
    if visibility is Visibility.WINDOW:
        assert window is not None
        queries = items[0].position + np.arange(len(tokens))[:, None]
        hidden = (keys > queries) | (keys <= queries - window)
    rows = np.tile([item.sequence for item in items], splits)[:, None]
    physical = layout.block_table.numpy()[rows, np.minimum(blocks, last)].ravel()
    return Stack(
        tokens=_rows(tokens, device),
        size=len(items),
        splits=splits,
        few=few,
        blocks=_to(physical, device),
        span=span,
        blank=_to(outside.ravel().nonzero()[0], device) if outside.any() else None,
        causal=visibility is Visibility.CAUSAL,
        mask=_mask(hidden).to(device) if hidden.any() else None,
        first=items[0].rank == 0,
    )


def _splits(items: int, keys: int, block_size: int) -> int:
    """In how many parts to cut the keys of each item, so that every thread has work."""
    splits, smallest = 1, max(block_size, MIN_SPLIT_KEYS)
    while splits * items < torch.get_num_threads() and keys >= 2 * splits * smallest:
        splits *= 2
    return splits


def _bounds(item: WorkItem, splits: int, size: int) -> list[int]:
    """Where the parts of an item begin, and where it ends; parts meet between blocks."""
    inner = [(item.start + item.keys * i // splits) // size * size for i in range(1, splits)]
    return [item.start, *inner, item.stop]


def _rows(tokens: IntArray, device: torch.device) -> slice | Tensor:
    """A slice where the tokens are consecutive: a view instead of a copy."""
    if (np.diff(tokens) == 1).all():
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return _to(tokens, device)


def _to(index: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(index.astype(np.int64)).to(device)


def _mask(hidden: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32)).unsqueeze(1)
