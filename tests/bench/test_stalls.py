"""A stream beside a long prompt: the two sides differ in the length of chunks alone."""

from __future__ import annotations

from io import StringIO
from time import sleep

import pytest
from rich.console import Console

from ragcache.bench import stalls
from ragcache.bench.hashing import HashRunner

TOKEN = 2e-4  # seconds


class Slow(HashRunner):
    """Tokens take time; it keeps how many there were in each step with a decode and a chunk."""

    def __init__(self) -> None:
        super().__init__(stalls.NUM_BLOCKS, stalls.BLOCK_SIZE, 61)
        self.mixed: list[int] = []

    def run(self, batch, *meanwhile):
        sleep(TOKEN * batch.input_ids.shape[1])
        if len(batch.layout.kv_len) > 1:
            self.mixed.append(batch.input_ids.shape[1])
        return super().run(batch, *meanwhile)


@pytest.fixture(scope="module")
def measured():
    runner = Slow()
    return runner, stalls.measure(runner, 0.02, repeats=1)


def test_only_one_side_keeps_the_time(measured):
    runner, _ = measured
    unbounded = [tokens for tokens in runner.mixed if tokens > 110]
    assert unbounded == [512] * 16
    assert len(runner.mixed) > 2 * 4096 / 110


def test_everything_is_measured_on_both_sides(measured):
    _, results = measured
    assert results["bounded"].keys() == results["unbounded"].keys()
    assert min(results["bounded"].values()) > 0
    for side in ("bounded", "unbounded"):
        p50, p99, longest = (
            results[side][f"time between tokens {x}"] for x in ("p50", "p99", "max")
        )
        assert p50 <= p99 <= longest
    output = StringIO()
    Console(file=output, width=120).print(stalls.render(results))
    assert "4096 tokens" in output.getvalue()
