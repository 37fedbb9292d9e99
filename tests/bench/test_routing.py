from __future__ import annotations

import json

import pytest

from ragcache.bench.options import RoutingBench
from ragcache.bench.routing import Setup, one_node, render, routed, run
from ragcache.bench.traces import generate, read_trace

REPLICAS, BLOCKS = 4, 300


@pytest.fixture(scope="module")
def requests():
    return generate(rate=2.0, seconds=500.0, seed=1)


@pytest.fixture(scope="module")
def reference(requests):
    return one_node(requests, REPLICAS, BLOCKS)["hit_rate"]


@pytest.mark.parametrize(("gateways", "lag"), [(1, 0.0), (2, 1.0), (4, 10.0), (8, 0.0), (8, 10.0)])
def test_routed_replicas_hit_like_one_node_with_their_memory(requests, reference, gateways, lag):
    figures = routed(requests, Setup(REPLICAS, BLOCKS, gateways, lag))
    assert figures["hit_rate"] > reference - 0.02
    assert figures["imbalance"] < 1.5


def test_hits_come_from_knowledge(requests, reference):
    blind = routed(requests, Setup(REPLICAS, BLOCKS, 2, informed=False))["hit_rate"]
    informed = routed(requests, Setup(REPLICAS, BLOCKS, 2))["hit_rate"]
    nothing_fits = one_node(requests, REPLICAS, BLOCKS // 3)["hit_rate"]
    assert blind < informed
    assert nothing_fits < reference - 0.05


def test_a_seed_generates_the_same_mix():
    first, again, other = (generate(3.0, 600.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    calls = sum(request.blocks[:1] == (1,) for request in first)
    assert 0.2 < calls / len(first) < 0.55
    assert all(-(-each.input_tokens // 512) == len(each.blocks) for each in first)
    assert [each.at for each in first] == sorted(each.at for each in first)


def test_a_trace_is_read_and_the_command_shows_every_run(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 3000 * i, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, i]}
        for i in range(2, 12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert len(trace) == 10
    assert trace[0].input_tokens == 1100
    options = RoutingBench(trace=path, replicas=2, blocks=50, gateways=[1, 2], lags=[0, 1])
    results = run(options)
    assert results["one_node"]["hit_rate"] == pytest.approx(9 * 1024 / 11000)
    assert len(results["runs"]) == 5
    assert render(results).row_count == 6
