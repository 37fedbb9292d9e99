"""`python -m ragcache_kernels.triton.tune`: finds launch configurations for the GPU at hand.

For every case it times candidates in turn with the default, and writes those that are faster into
the table that `configs.choose` reads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from ragcache_kernels.bench.clock import Call, Clock
from ragcache_kernels.bench.layer import BLOCK_SIZE, Heads, Layer, blocks_for, layout
from ragcache_kernels.interface import StepLayout
from ragcache_kernels.quantise import FLOAT8_CAPABILITY, LIMITS, quantised_dtypes
from ragcache_kernels.triton.attention import attend_tiles
from ragcache_kernels.triton.backend import Gpu, TritonBackend
from ragcache_kernels.triton.configs import TUNED, Case, Config, Phase, default, read_table

GAIN = 1.03  # what is faster by less may be chance
KV_HEADS = 8
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
RECORDED = (Phase.NARROW_RECORDED, Phase.WIDE_RECORDED)


class Refused(Exception):
    """A configuration that cannot be compiled or launched, or whose registers spill."""


# The time of a case with a configuration over that with the default; raises Refused.
Compare = Callable[[Case, Config], float]


def candidates(case: Case) -> Iterator[Config]:
    """Configurations with as many rows as the default; what tiles are made depends on those."""
    standard = default(case)
    # Four stages give the same code as three.
    for keys, warps, stages in product((16, 32, 64, 128), (2, 4, 8), (2, 3, 5)):
        config = Config(standard.bm, keys, warps, stages)
        if config != standard:
            yield config


def search(case: Case, compare: Compare) -> Config | None:
    """The fastest candidate, if it beats the default by more than chance."""
    best, least = None, 1 / GAIN
    for config in candidates(case):
        try:
            ratio = compare(case, config)
        except Refused as error:
            print(f"  {_brief(config)}: refused, {error}", flush=True)
            continue
        print(f"  {_brief(config)}: {ratio:.3f} of the default's time", flush=True)
        if ratio < least:
            best, least = config, ratio
    return best


def merged(table: Mapping[Case, Config], found: Mapping[Case, Config | None]) -> dict[Case, Config]:
    """The table with what was found; without entries for cases whose default was found best."""
    both = {**table, **found}
    return {case: config for case, config in both.items() if config is not None}


def write_table(path: Path, table: Mapping[Case, Config]) -> None:
    """Write what `configs.read_table` reads, a case on a line."""
    rows = [
        json.dumps({"case": case._asdict(), "config": asdict(config)})
        for case, config in sorted(table.items())
    ]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n" if rows else "[]\n")


@dataclass(frozen=True, slots=True)
class Workload:
    """A step that consists of the tiles of one phase, as nearly as there is one."""

    rows: int = 64
    length: int = 4096
    chunk: int = 1024

    @property
    def blocks(self) -> int:
        """Blocks of a cache that holds it."""
        return self.rows * blocks_for(self.length)

    def layout(self, phase: Phase) -> StepLayout:
        """Decodes apart, decodes that share all but their last block, or a chunk."""
        per_row = blocks_for(self.length)
        if phase is Phase.WIDE:
            return layout(torch.randperm(per_row)[None], self.chunk, self.length)
        table = torch.randperm(self.blocks).view(self.rows, per_row)
        if phase is Phase.WIDE_RECORDED:
            table[:, :-1] = table[0, :-1].clone()
        return layout(table, 1, self.length)

    def call(self, layer: Layer, backend: TritonBackend, query: Tensor, step: StepLayout) -> Call:
        """The step by a backend, in the ordinary way."""
        plan = backend.plan(step, layer.device)
        return lambda: backend.attend(query, layer.cache, plan, layer.spec)

    def recorded(
        self, layer: Layer, backend: TritonBackend, query: Tensor, step: StepLayout
    ) -> Call:
        """The step as it is recorded."""
        self.call(layer, backend, query, step)()  # only layers that have run have fixed plans
        tokens = len(layer.cache.key) * BLOCK_SIZE
        plan = backend.fixed_plan(len(query), self.length, tokens, BLOCK_SIZE, layer.device)
        if plan is None or not plan.update(step):
            raise AssertionError("the step does not fit in a plan that was made for it")
        return lambda: backend.attend(query, layer.cache, plan, layer.spec)


class Timer:
    """Compares configurations on a GPU."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._clock = Clock(device)
        self._rounds = rounds
        self._workload = Workload()
        self._calls: dict[Case, tuple[Callable[[TritonBackend], Call], Call]] = {}

    def compare(self, case: Case, config: Config) -> float:
        """See `Compare`."""
        if case not in self._calls:
            self._calls = {case: self._build(case)}  # of one case only: caches are large
        build, control = self._calls[case]
        backend = TritonBackend(lambda asked: config if asked == case else default(asked))
        before = set(_compiled())
        try:
            call = build(backend)
            call()
        except (TritonError, RuntimeError) as error:
            raise Refused(str(error).splitlines()[0]) from error
        if any(kernel.n_spills for key, kernel in _compiled().items() if key not in before):
            raise Refused("its registers spill")
        times = self._clock.turns([call, control], self._rounds)
        return median(mine / other for mine, other in times)

    def _build(self, case: Case) -> tuple[Callable[[TritonBackend], Call], Call]:
        standard, workload = TritonBackend(default), self._workload
        heads = Heads(KV_HEADS * case.group, KV_HEADS, case.dim)
        dtype = getattr(torch, case.dtype.removeprefix("torch."))
        plain = torch.bfloat16 if dtype in LIMITS else dtype
        layer = Layer(standard, heads, workload.blocks, self._clock.device, plain)
        if dtype in LIMITS:
            layer.cache = layer.quantised_cache(dtype)
        step = workload.layout(case.phase)
        query = layer.queries(len(step.slot_mapping))
        way = workload.recorded if case.phase in RECORDED else workload.call
        return lambda backend: way(layer, backend, query, step), way(layer, standard, query, step)


def _compiled() -> Mapping[Any, Any]:
    """The variants of the attention kernel that are loaded on the GPU."""
    kernels: Mapping[Any, Any] = attend_tiles.device_caches[torch.cuda.current_device()][0]
    return kernels


def _brief(config: Config) -> str:
    return f"{config.bn} keys, {config.num_warps} warps, {config.num_stages} stages"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as a program."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("tuning measures a GPU, and torch finds no CUDA device here")
    device = torch.device("cuda")
    timer, arch = Timer(device, options.rounds), Gpu.of(device).arch
    if "fp8" in options.dtypes and torch.float8_e4m3fn not in quantised_dtypes(device):
        sys.exit(f"fp8 takes a GPU of compute capability {FLOAT8_CAPABILITY} or later")
    known = read_table(options.output) if options.output.exists() else {}
    kinds = product(options.dims, options.groups, options.dtypes, options.phases)
    for dim, group, dtype, phase in kinds:
        case = Case(arch, dim, group, str(DTYPES[dtype]), Phase(phase))
        print(*case, flush=True)
        known = merged(known, {case: search(case, timer.compare)})
        write_table(options.output, known)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Find launch configurations for this GPU.")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128, 256], help="head dims")
    parser.add_argument(
        "--groups", type=int, nargs="+", default=[1, 4, 8], help="query heads of a KV head"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["bfloat16"], choices=list(DTYPES), help="of KV"
    )
    parser.add_argument(
        "--phases", nargs="+", default=list(Phase), choices=list(Phase), help="kinds of launches"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each candidate")
    parser.add_argument("--output", type=Path, default=TUNED, help="table to add to")
    return parser


if __name__ == "__main__":
    main()
