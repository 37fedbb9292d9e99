"""Checks and times the kernels on the GPU at hand, in at most three minutes.

    python kernels/check_gpu.py --output DIR

Writes DIR/results.json, anew after every part, and DIR/results.svg; exits with 1 if a kernel gave
a wrong result. Needs torch and triton, and for swaps and steps of whole models what ragcache needs.
Without CUDA it runs with tiny sizes on the CPU, whose times say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

sys.path.append(str(Path(__file__).parents[1]))  # where ragcache lies, if it is not installed

import torch
from ragcache_kernels import best_backend, get_backend
from ragcache_kernels.bench.cases import (
    GROWING,
    SHARED_LENGTHS,
    Case,
    break_even,
    break_even_cases,
    chunk_cases,
    decode_cases,
    quantised_cases,
    shared_case,
)
from ragcache_kernels.bench.chart import chart
from ragcache_kernels.bench.checks import checks
from ragcache_kernels.bench.clock import Ceilings, Clock
from ragcache_kernels.bench.goals import GOALS
from ragcache_kernels.bench.layer import Heads, Layer, blocks_for
from ragcache_kernels.bench.moves_check import CopiesCheck, MasksCheck
from ragcache_kernels.bench.ops_check import OpsCheck
from ragcache_kernels.interface import AttentionBackend
from ragcache_kernels.quantise import quantised_dtypes

# Seconds after which nothing of a part is begun any more.
CHECKS_END, CASES_END, STEP_END = 80, 130, 140


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is attended to."""

    heads: Heads
    decodes: int
    length: int
    own: int  # tokens behind a shared prefix
    chunk: int
    swapped: int  # blocks; more than fit into the staging
    sharing: int  # sequences whose least shared length that pays is looked for
    model: dict[str, int]  # what differs from the 8B model
    rounds: int

    @property
    def blocks(self) -> int:
        """Enough for all steps."""
        decoding = self.decodes * blocks_for(self.length + self.own)
        sharing = self.sharing * blocks_for(SHARED_LENGTHS[-1] + self.own)
        return max(decoding, sharing, blocks_for(self.length + self.chunk))


FULL = Sizes(Heads(32, 8, 128), 64, 8192, 256, 2048, 1200, 16, {}, 20)
TINY = Sizes(
    Heads(4, 2, 16),
    4,
    256,
    32,
    64,
    9,
    4,
    {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    2,
)


class AnyCheck(Protocol):
    """Something that is right or wrong on the device."""

    @property
    def name(self) -> str:
        """What is checked."""

    def error(self, backend: AttentionBackend[Any], device: torch.device) -> float:
        """How far it is off, as a multiple of what rounding excuses."""


class Script:
    """Runs the parts in order and keeps what they found."""

    def __init__(self, device: torch.device, output: Path) -> None:
        cuda = device.type == "cuda"
        self.device = device
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.sizes = FULL if cuda else TINY
        self.clock = Clock(device)
        self.backend = get_backend(best_backend(device, self.dtype, [self.sizes.heads.dim]))
        self._output = output
        self._started = monotonic()
        self.results: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device) if cuda else "CPU, tiny sizes",
            "torch": torch.__version__,
            "backend": self.backend.name,
            "dtype": str(self.dtype),
            "checks": [],
            "cases": [],
            "goals": [],
            "not_run": [],
            "failed": [],
        }

    def run(self) -> bool:
        """Everything; False where a result was wrong, or something failed."""
        recorded, storages = self.backend.name == "triton", quantised_dtypes(self.device)
        every: list[AnyCheck] = [*checks(self.dtype, storages, recorded=recorded)]
        every += [OpsCheck(self.dtype), CopiesCheck(self.dtype), CopiesCheck(torch.int8)]
        for check in [*every, MasksCheck()]:
            self._part(check.name, CHECKS_END, partial(self._check, check))
        self._part("what surrounds the kernels in a step", CHECKS_END, self._check_steps)
        self.ceilings = Ceilings.measure(self.clock, self.dtype, self.sizes.rounds)
        self.results["copy_bytes_per_second"] = self.ceilings.bytes_per_second
        self.results["product_flops_per_second"] = self.ceilings.flops_per_second
        for name, cases in self._cases():
            self._part(name, CASES_END, partial(self._measure, cases))
        self._part("decode step of a model", STEP_END, self._decode_step)
        self._judge()
        title = f"{self.results['device']}: share of the floor's speed"
        self._output.joinpath("results.svg").write_text(chart(title, self.results["cases"]))
        right = all(check["right"] for check in self.results["checks"])
        return right and not self.results["failed"]

    def _part(self, name: str, end: float, work: Callable[[], None]) -> None:
        """Time on a GPU is scarce: what fails must not keep the rest from running."""
        if monotonic() - self._started > end:
            self._keep("not_run", {"name": name, "reason": "out of time"})
            self._say(f"{name}: not run, out of time")
            return
        try:
            work()
        except Exception as error:
            self._keep("failed", {"name": name, "error": traceback.format_exc()})
            self._say(f"{name}: FAILED, {error!r}")

    def _check_steps(self) -> None:
        from ragcache.bench.step_checks import ReplayCheck, SwapsCheck

        for dtype in (self.dtype, torch.int8):
            self._check(SwapsCheck(dtype, self.sizes.swapped))
        if self.backend.name == "triton":
            self._check(ReplayCheck(self.dtype))

    def _check(self, check: AnyCheck) -> None:
        error = check.error(self.backend, self.device)
        self._keep("checks", {"name": check.name, "error": error, "right": error <= 1})
        self._say(f"{check.name}: {error:.2f} of the error that rounding excuses")

    def _cases(self) -> Iterator[tuple[str, Callable[[], Iterable[Case]]]]:
        sizes = self.sizes
        layer = Layer(self.backend, sizes.heads, sizes.blocks, self.device, self.dtype)
        yield "decode", lambda: decode_cases(layer, sizes.decodes, sizes.length)
        yield "quantised", lambda: quantised_cases(layer, sizes.decodes, sizes.length)
        yield "shared", lambda: [shared_case(layer, sizes.decodes, sizes.length, sizes.own)]
        yield "chunk", lambda: [*chunk_cases(layer, sizes.chunk, sizes.length)]
        yield GROWING, lambda: break_even_cases(layer, sizes.sharing, sizes.own)

    def _measure(self, cases: Callable[[], Iterable[Case]]) -> None:
        for case in cases():
            result = case.measure(self.clock, self.ceilings, self.sizes.rounds)
            self._keep("cases", result)
            against = result.get("unavailable") or f"gain {result['gain']:.2f}"
            milliseconds = result["seconds"] * 1e3
            self._say(f"{case.name} in {milliseconds:.3f} ms; {case.control_name}: {against}")

    def _decode_step(self) -> None:
        from ragcache.bench.decode import LLAMA_8B, decode_step

        result = decode_step(
            LLAMA_8B | self.sizes.model,
            self.device,
            self.dtype,
            batch=8,
            context=128,
            rounds=self.sizes.rounds,
            bytes_per_second=self.ceilings.bytes_per_second,
        )
        self._keep("cases", result)
        self._say(f"{result['name']}: {result['seconds'] * 1e3:.2f} ms")

    def _judge(self) -> None:
        measured: dict[str, dict[str, Any]] = {}
        if self.device.type == "cuda":  # the goals are a GPU's
            measured = {case["key"]: case for case in self.results["cases"]}
            growing = [case for case in self.results["cases"] if case["key"] == GROWING]
            if len(growing) == len(SHARED_LENGTHS):
                measured[GROWING] = {"tokens": break_even(growing)}
        for goal in GOALS:
            judged = goal.judge(measured)
            self._keep("goals", judged)
            value = "" if judged["value"] is None else f": {judged['value']:.3g}"
            self._say(f"{judged['verdict']}: {goal.name}{value} (goal {goal.target:g})")

    def _keep(self, part: str, result: dict[str, Any]) -> None:
        self.results[part].append(result)
        self._output.joinpath("results.json").write_text(json.dumps(self.results, indent=2) + "\n")

    def _say(self, line: str) -> None:
        print(f"{monotonic() - self._started:6.1f} s  {line}", flush=True)


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        print("There is no GPU: tiny sizes on the CPU, whose times say nothing of a GPU.")
    sys.exit(0 if Script(device, options.output).run() else 1)


if __name__ == "__main__":
    main()
