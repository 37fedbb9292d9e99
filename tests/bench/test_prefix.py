from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from ragcache.bench.prefix import CALLS, measure, render, unfilled_share


def test_every_pool_is_measured_and_shown():
    results = json.loads(json.dumps(_measure()))
    assert [pool["blocks"] for pool in results["pools"]] == [80, 200]
    for pool in results["pools"]:
        parts = sum(pool[f"{call}_ms"] for call in CALLS)
        assert pool["total_ms"] > 0
        assert pool["total_ms"] <= 2 * parts
        assert pool["evict_us"] > 0
        assert pool["retain_us"] > 0
        assert pool["hottest_ms"] > 0
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(results))
    assert "256 cached tokens" in shown.get()
    assert "explaining 400 tokens" in shown.get()


def _measure() -> dict[str, Any]:
    return measure((80, 200), prompt_tokens=256, repeats=2, steps=10, explained_tokens=400)


def test_less_than_a_block_per_request_is_unfilled():
    assert 0 < unfilled_share(steps=600) < 0.04
