"""When a swap is worth it, and that both sides of that rule are really measured."""

import pytest
import torch

from ragcache.bench.hashing import HashRunner
from ragcache.engine.host_pool import PlainHostPool
from ragcache.engine.swap_costs import SwapCosts, measure


@pytest.mark.parametrize(
    ("overhead", "swap", "compute", "blocks"),
    [
        (0.0, 0.001, 0.01, 1),
        (0.02, 0.0, 0.01, 3),  # at two blocks both take as long
        (0.025, 0.005, 0.01, 6),
        (0.0, 0.01, 0.01, None),
        (1.0, 0.02, 0.01, None),
    ],
)
def test_the_rule_weighs_overhead_and_blocks(overhead, swap, compute, blocks):
    costs = SwapCosts(overhead, swap, compute)
    assert costs.min_swap == blocks
    if blocks is not None:
        assert overhead + blocks * swap < blocks * compute
        assert overhead + (blocks - 1) * swap >= (blocks - 1) * compute


class Recorder(HashRunner):
    """Keeps the batches that it runs."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, 4, 11)
        self.batches = []

    def run(self, batch, *meanwhile):
        self.batches.append(batch)
        return super().run(batch, *meanwhile)


@pytest.mark.parametrize(
    ("num_blocks", "host_blocks", "max_tokens", "tokens", "blocks"),
    [(200, 300, 512, 256, 64), (200, 10, 512, 40, 10), (5, 9, 512, 20, 5), (9, 9, 3, 3, 1)],
)
def test_a_chunk_and_swaps_of_its_size_are_run(
    monkeypatch, num_blocks, host_blocks, max_tokens, tokens, blocks
):
    runner, host = Recorder(num_blocks), PlainHostPool([torch.zeros(num_blocks, 8)], host_blocks)
    swaps = []
    monkeypatch.setattr(host, "swap_in", lambda pairs: swaps.append(len(pairs)))
    costs = measure(runner, host, num_blocks=num_blocks, block_size=4, max_tokens=max_tokens)
    assert costs.compute > 0
    assert min(costs.overhead, costs.swap) >= 0
    assert {batch.input_ids.shape[1] for batch in runner.batches} == {tokens}
    assert set(swaps) == {1, blocks}
