"""Work items as the torch backend runs them: stacks of equal items, with their index tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragcache_kernels.interface import StepLayout
from ragcache_kernels.planner import IntArray, SharingCost, Visibility, WorkItem, plan_items

# Keys of one call: what is gathered must still be in the CPU's cache when it is used.
CPU_KEYS_PER_THREAD = 1024
GPU_KEYS = 32768
# Measured on a CPU: 2 queries gain from 512 shared keys on, 16 from 64 on.
SHARING = SharingCost(per_run=450, per_query=30, together=1 << 16)
# Up to so many queries the query heads of a KV head are put into one matrix.
FEW_QUERIES = 16
# Items stacked with a longer one are padded to its length.
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class Stack:
    """S work items of t queries and up to c keys each, run by one call."""

    tokens: slice | Tensor  # S·t query rows
    size: int  # S
    queries: int  # t
    few: bool  # the query heads of a KV head become rows of one matrix
    blocks: Tensor  # int64, the physical blocks of all items, equally many each
    span: slice  # which of an item's gathered slots are its keys: c of them
    blank: Tensor | None  # S > 1, ragged: gathered slots that are not their item's keys, flat
    causal: bool
    mask: Tensor | None  # [S, 1, 1 or t, c] float32, added to the scores
    first: bool  # no earlier stack has results for these tokens
    whole: bool  # its tokens are all tokens of the step, in order


def build_stacks(layout: StepLayout, window: int | None, device: torch.device) -> list[Stack]:
    """All work of a step for the layers with this window, in the order in which to run it."""
    on_cpu = device.type == "cpu"
    max_keys = CPU_KEYS_PER_THREAD * torch.get_num_threads() if on_cpu else GPU_KEYS
    groups = _group(plan_items(layout, window, max_keys, SHARING), max_keys)
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
    """Index tensors and mask of items with equally many tokens, the first of them the longest."""
    tokens, one = np.concatenate([item.tokens for item in items]), items[0]
    start, stop = np.array([[[item.start], [item.stop]] for item in items]).swapaxes(0, 1)
    first, last = start // layout.block_size, (stop - 1) // layout.block_size
    blocks = first + np.arange((last - first).max() + 1)  # [S, blocks of an item]
    keys = blocks.repeat(layout.block_size, 1) * layout.block_size
    keys += np.arange(keys.shape[1]) % layout.block_size
    outside = (keys < start) | (keys >= stop)
    inside = np.flatnonzero(~outside.all(0))
    span = slice(int(inside[0]), int(inside[-1]) + 1)
    ragged = bool(np.any(outside[:, span]))
    hidden = outside[:, None, span] if one.visibility is Visibility.ALL else None
    if one.visibility is Visibility.WINDOW and window is not None:
        behind = one.position + np.arange(len(tokens))[:, None] - keys[:, None, span]
        hidden = (behind < 0) | (behind >= window)
    sequences = np.array([[item.sequence] for item in items])
    physical = layout.block_table.numpy()[sequences, np.minimum(blocks, last)]
    return Stack(
        tokens=_rows(tokens, device),
        size=len(items),
        queries=len(one.tokens),
        few=one.visibility is Visibility.ALL and len(one.tokens) <= FEW_QUERIES,
        blocks=_to(physical.ravel(), device),
        span=span,
        blank=_to(np.flatnonzero(outside), device) if ragged else None,
        causal=one.visibility is Visibility.CAUSAL,
        mask=_mask(hidden).to(device) if hidden is not None and np.any(hidden) else None,
        first=one.rank == 0,
        whole=np.array_equal(tokens, np.arange(len(layout.slot_mapping))),
    )


def _rows(tokens: IntArray, device: torch.device) -> slice | Tensor:
    """A slice where the tokens are consecutive: a view instead of a copy."""
    if (np.diff(tokens) == 1).all():
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return _to(tokens, device)


def _to(index: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(index.astype(np.int64)).to(device)


def _mask(hidden: NDArray[np.bool_]) -> Tensor:
    """What to add to the scores, with a dimension for the heads."""
    return torch.from_numpy(np.where(hidden, -np.inf, 0.0).astype(np.float32)).unsqueeze(1)
