"""What is timed of a layer: every step in turn with a control, and against both floors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ragcache_kernels.bench.clock import Call, Ceilings, Clock, Work
from ragcache_kernels.bench.layer import BLOCK_SIZE, Layer, blocks_for, layout
from ragcache_kernels.bench.varlen import Unavailable, varlen_decodes
from ragcache_kernels.quantise import quantised_dtypes

GROWING = "growing shared prefix"
SHARED_LENGTHS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """A step and its control; `key` says what is compared, whatever the sizes are."""

    key: str
    name: str
    control_name: str
    step: Call
    control: Call | Unavailable
    work: Work

    def measure(self, clock: Clock, ceilings: Ceilings, rounds: int) -> dict[str, Any]:
        """Medians of the rounds in seconds; the gain is the control's time over the step's."""
        memory, compute = ceilings.floors(self.work)
        names = {"key": self.key, "name": self.name, "control_name": self.control_name}
        result = names | {"memory_seconds": memory, "compute_seconds": compute}
        if isinstance(self.control, Unavailable):
            seconds = clock.median(self.step, rounds)
            return result | {"seconds": seconds, "unavailable": self.control.reason}
        times = clock.turns([self.step, self.control], rounds)
        step, control = (median(side) for side in zip(*times, strict=True))
        gain = median(other / mine for mine, other in times)
        return result | {"seconds": step, "control_seconds": control, "gain": gain}


def decode_cases(layer: Layer, rows: int, length: int) -> Iterator[Case]:
    """Pages in random places against pages in a row, no pages, and torch's paged attention."""
    per_row = blocks_for(length)
    in_a_row = torch.arange(rows * per_row).view(rows, per_row)
    scattered = torch.randperm(rows * per_row).view(rows, per_row)
    name, work = f"decode {rows} over {length} each", layer.work(rows, 1, length, rows * length)
    query, step = layer.queries(rows), layout(scattered, 1, length)
    paged = layer.paged(query, step)
    control: Call | Unavailable = layer.decodes(in_a_row, length)
    yield Case("pages in a row", name, "pages in a row", paged, control, work)
    if layer.backend.name == "triton":  # the other one copies whole pages
        one_each = layout(torch.arange(rows)[:, None], 1, length, per_row * BLOCK_SIZE)
        control = layer.paged(query, one_each)
        yield Case("contiguous", name, "one page each", paged, control, work)
    if layer.backend.name == "native":
        yield Case("torch", name, "in torch", paged, layer.in_torch(query, step), work)
    control_name, control = varlen_decodes(layer, query, step)
    yield Case("varlen", name, control_name, paged, control, work)


def quantised_cases(layer: Layer, rows: int, length: int) -> Iterator[Case]:
    """Keys and values of eight bits against those in the layer's dtype."""
    per_row = blocks_for(length)
    step = layout(torch.randperm(rows * per_row).view(rows, per_row), 1, length)
    query = layer.queries(rows)
    for dtype in quantised_dtypes(layer.device):
        name = str(dtype).removeprefix("torch.")
        yield Case(
            name,
            f"decode {rows} over {length} each in {name}",
            "not quantised",
            layer.quantised(query, step, dtype),
            layer.paged(query, step),
            layer.work(rows, 1, length, rows * length, dtype),
        )


def shared_case(layer: Layer, rows: int, shared: int, own: int, key: str = "shared") -> Case:
    """A prefix that is read once for all against one that each sequence reads for itself."""
    length, common = shared + own, shared // BLOCK_SIZE
    per_row = blocks_for(length)
    distinct = torch.randperm(rows * per_row).view(rows, per_row)
    sharing = distinct.clone()
    sharing[:, :common] = distinct[0, :common]
    unshared = sharing.clone()
    unshared[:, 0] = distinct[:, 0]  # nothing is shared behind a block that differs
    keys = common * BLOCK_SIZE + rows * (length - common * BLOCK_SIZE)
    return Case(
        key,
        f"decode {rows} over {shared} shared + {own}",
        "each on its own",
        layer.decodes(sharing, length),
        layer.decodes(unshared, length),
        layer.work(rows, 1, length, keys),
    )


def chunk_cases(layer: Layer, queries: int, context: int) -> Iterator[Case]:
    """A chunk over cached keys against torch's attention without pages, and with them."""
    length = context + queries
    name, work = f"chunk of {queries} over {context}", layer.work(1, queries, length, length)
    query, step = layer.queries(queries), layout(_pages(length), queries, length)
    paged = layer.paged(query, step)
    yield Case("chunk", name, "dense", paged, layer.dense(queries, length), work)
    if layer.backend.name == "native":
        yield Case("torch chunk", name, "in torch", paged, layer.in_torch(query, step), work)


def break_even_cases(layer: Layer, rows: int, own: int) -> Iterator[Case]:
    """Shared prefixes of growing length."""
    return (shared_case(layer, rows, shared, own, GROWING) for shared in SHARED_LENGTHS)


def break_even(results: list[dict[str, Any]]) -> int | None:
    """The length from which sharing gains, given the results of `break_even_cases`."""
    best = None
    for length, result in reversed(list(zip(SHARED_LENGTHS, results, strict=True))):
        if result["gain"] < 1:
            break
        best = length
    return best


def _pages(length: int) -> Tensor:
    return torch.randperm(blocks_for(length))[None]
