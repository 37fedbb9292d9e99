"""`ragcache bench kernels`: one layer's attention against what memory and arithmetic allow.

Every case runs in turn with a control: pages in random places against pages in a row and torch's
paged attention, the kernels in C against torch, a prefix that is read once for all against one that
each sequence reads for itself, a chunk over cached keys against dense attention, keys and values of
eight bits against those in the model's dtype. The floors are the times in which a copy
of the device moves what must be read and written, and a dense product does as many operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragcache_kernels import best_backend, get_backend
from ragcache_kernels.bench.cases import (
    SHARED_LENGTHS,
    Case,
    break_even,
    break_even_cases,
    chunk_cases,
    decode_cases,
    quantised_cases,
    shared_case,
)
from ragcache_kernels.bench.clock import Ceilings, Clock
from ragcache_kernels.bench.layer import Heads, Layer, blocks_for
from rich.progress import track
from rich.table import Table

from ragcache.bench.options import KernelsBench
from ragcache.engine.model import choose_device, choose_dtype

SHARING = 16  # requests of which the least shared length that pays is looked for


def run(options: KernelsBench) -> dict[str, Any]:
    """Measure every case; seconds are medians of the rounds."""
    device = choose_device("auto")
    dtype = choose_dtype(options.dtype, device)
    backend = get_backend(best_backend(device, dtype, [options.head_dim]))
    heads = Heads(options.heads, options.kv_heads, options.head_dim)
    layer = Layer(backend, heads, _blocks(options), device, dtype)
    clock = Clock(device)
    ceilings = Ceilings.measure(clock, dtype, options.repeats)
    cases = [
        case.measure(clock, ceilings, options.repeats)
        for case in track([*_cases(layer, options)], "kernels")
    ]
    return {
        "device": str(device),
        "backend": backend.name,
        "dtype": str(dtype),
        "copy_bytes_per_second": ceilings.bytes_per_second,
        "product_flops_per_second": ceilings.flops_per_second,
        "cases": cases,
        "break_even": break_even(cases[-len(SHARED_LENGTHS) :]),
    }


def _blocks(options: KernelsBench) -> int:
    decoding = options.batch * blocks_for(options.shared + options.own)
    return max(decoding, SHARING * blocks_for(SHARED_LENGTHS[-1] + options.own))


def _cases(layer: Layer, options: KernelsBench) -> Iterator[Case]:
    yield from decode_cases(layer, options.batch, options.shared + options.own)
    yield from quantised_cases(layer, options.batch, options.shared + options.own)
    yield shared_case(layer, options.batch, options.shared, options.own)
    yield from chunk_cases(layer, options.own, options.shared)
    yield from break_even_cases(layer, SHARING, options.own)


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `run` out as a table."""
    table = Table(
        title=f"{results['backend']} on {results['device']}, {results['dtype']}, milliseconds",
        caption=_caption(results),
    )
    for column in ("attention", "control"):
        table.add_column(column)
    for column in ("time", "control", "gain", "memory", "compute", "reached"):
        table.add_column(column, justify="right")
    for case in results["cases"]:
        table.add_row(case["name"], case["control_name"], *_figures(case))
    return table


def _figures(case: dict[str, Any]) -> Iterator[str]:
    yield f"{case['seconds'] * 1e3:.2f}"
    if "unavailable" in case:
        yield from ("not available here", "")
    else:
        yield from (f"{case['control_seconds'] * 1e3:.2f}", f"{case['gain']:.2f} ×")
    floors = case["memory_seconds"], case["compute_seconds"]
    yield from (f"{floor * 1e3:.3f}" for floor in floors)
    yield f"{max(floors) / case['seconds']:.0%}"


def _caption(results: dict[str, Any]) -> str:
    speed, rate = (results[name] for name in ("copy_bytes_per_second", "product_flops_per_second"))
    paying = results["break_even"]
    least = f"from {paying}" if paying else f"not up to {SHARED_LENGTHS[-1]}"
    lines = [
        f"memory: a copy moves {speed / 1e9:.0f} GB/s; "
        f"compute: a product does {rate / 1e12:.2g} TFLOP/s; "
        f"sharing pays for {SHARING} requests: {least} tokens",
    ]
    missing = (case for case in results["cases"] if "unavailable" in case)
    lines += [f"{case['control_name']} is not available: {case['unavailable']}" for case in missing]
    return "\n".join(lines)
