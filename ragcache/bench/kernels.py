"""`ragcache bench kernels`: one layer's attention against what the memory allows.

Every case runs in turn with a control of the same shape: pages in random places against pages in a
row, a prefix that is read once for all against one that each sequence reads for itself, a chunk
over cached keys against dense attention. The floor is the time in which a copy of the device moves
the keys and values that must be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from ragcache_kernels import AttentionSpec, LayerCache, StepLayout, best_backend, get_backend
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ragcache.bench.options import KernelsBench
from ragcache.engine.model import choose_device, choose_dtype

BLOCK_SIZE = 16
COPIED = 1 << 28  # bytes; more than any cache of a processor

Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A step, its control, and the keys of which each KV head reads its part at least once."""

    name: str
    control_name: str
    step: Step
    control: Step
    keys: int


def run(options: KernelsBench) -> dict[str, Any]:
    """Measure every case; seconds are medians of the rounds."""
    bench = _Bench(options)
    bandwidth = bench.bandwidth()
    cases = [bench.measure(case, bandwidth) for case in track([*bench.cases()], "kernels")]
    return {
        "device": str(bench.device),
        "backend": bench.backend.name,
        "dtype": str(bench.dtype),
        "copy_bytes_per_second": bandwidth,
        "cases": cases,
    }


def render(results: dict[str, Any]) -> Table:
    """Lay the results of `run` out as a table."""
    speed = results["copy_bytes_per_second"] / 1e9
    table = Table(
        title=f"{results['backend']} on {results['device']}, {results['dtype']}, milliseconds",
        caption=f"a copy moves {speed:.0f} GB/s",
    )
    for column in ("attention", "control"):
        table.add_column(column)
    for column in ("time", "control", "gain", "floor", "of it"):
        table.add_column(column, justify="right")
    for case in results["cases"]:
        times = (f"{case[name] * 1e3:.2f}" for name in ("seconds", "control_seconds"))
        gain, reached = case["gain"], case["floor_seconds"] / case["seconds"]
        floor = f"{case['floor_seconds'] * 1e3:.2f}"
        row = (*times, f"{gain:.2f} ×", floor, f"{reached:.0%}")
        table.add_row(case["name"], case["control_name"], *row)
    return table


class _Bench:
    """Caches, queries and tables of one layer."""

    def __init__(self, options: KernelsBench) -> None:
        self.options = options
        self.device = choose_device("auto")
        self.dtype = choose_dtype(options.dtype, self.device)
        self.backend = get_backend(best_backend(self.device, self.dtype, [options.head_dim]))
        self._spec = AttentionSpec(scale=options.head_dim**-0.5)
        blocks = options.batch * -(-(options.shared + options.own) // BLOCK_SIZE)
        shape = (blocks, BLOCK_SIZE, options.kv_heads, options.head_dim)
        self._cache = LayerCache(self._random(*shape), self._random(*shape))
        self._blocks = blocks

    def cases(self) -> Iterable[Case]:
        """All cases; they share the caches."""
        options = self.options
        batch, length = options.batch, options.shared + options.own
        per_row = -(-length // BLOCK_SIZE)
        shared = options.shared // BLOCK_SIZE
        in_a_row = torch.arange(self._blocks).view(batch, per_row)
        scattered = torch.randperm(self._blocks).view(batch, per_row)
        common = scattered.clone()
        common[:, :shared] = scattered[0, :shared]
        unshared = common.clone()
        unshared[:, 0] = scattered[:, 0]  # nothing is shared behind a block that differs
        yield Case(
            f"decode {batch} over {length} each",
            "pages in a row",
            self._step(scattered, [1] * batch, length),
            self._step(in_a_row, [1] * batch, length),
            batch * length,
        )
        yield Case(
            f"decode {batch} over {options.shared} shared + {options.own}",
            "each on its own",
            self._step(common, [1] * batch, length),
            self._step(unshared, [1] * batch, length),
            shared * BLOCK_SIZE + batch * (length - shared * BLOCK_SIZE),
        )
        yield Case(
            f"chunk of {options.own} over {options.shared}",
            "dense",
            self._step(scattered[:1], [options.own], length),
            self._dense(options.own, length),
            length,
        )

    def measure(self, case: Case, bandwidth: float) -> dict[str, Any]:
        """Run a case and its control in turn."""
        rounds = [(self._timed(case.step), self._timed(case.control)) for _ in range(self._rounds)]
        seconds, control = (median(side) for side in zip(*rounds[1:], strict=True))
        token = 2 * self.options.kv_heads * self.options.head_dim * self.dtype.itemsize
        return {
            "name": case.name,
            "control_name": case.control_name,
            "seconds": seconds,
            "control_seconds": control,
            "gain": median(other / mine for mine, other in rounds[1:]),
            "floor_seconds": case.keys * token / bandwidth,
        }

    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes."""
        source = torch.zeros(COPIED, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = [self._timed(lambda: target.copy_(source)) for _ in range(self._rounds)]
        return 2 * COPIED / median(seconds[1:])

    @property
    def _rounds(self) -> int:
        return self.options.repeats + 1  # the first one warms up

    def _step(self, table: Tensor, q_len: list[int], length: int) -> Step:
        layout = StepLayout(
            cu_q=torch.tensor([0, *q_len]).cumsum(0).int(),
            kv_len=torch.full((len(q_len),), length, dtype=torch.int32),
            block_table=table.int(),
            slot_mapping=torch.full((sum(q_len),), -1),
            block_size=BLOCK_SIZE,
        )
        query = self._random(sum(q_len), self.options.heads, self.options.head_dim)
        plan = self.backend.plan(layout, self.device)
        return lambda: self.backend.attend(query, self._cache, plan, self._spec)

    def _dense(self, queries: int, length: int) -> Step:
        """Attention of the last queries over keys without pages."""
        options = self.options
        query = self._random(1, options.heads, queries, options.head_dim)
        key, value = (self._random(1, options.kv_heads, length, options.head_dim) for _ in range(2))
        seen = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        mask = seen.to(self.device)
        return lambda: scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True
        )

    def _timed(self, step: Step) -> float:
        self._wait()
        started = perf_counter()
        step()
        self._wait()
        return perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)
