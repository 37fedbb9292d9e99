from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from rich.console import Console

from ragcache.bench.kernels import render, run
from ragcache.bench.options import KernelsBench

SMALL = KernelsBench(
    batch=4, shared=1024, own=32, heads=4, kv_heads=2, head_dim=16, dtype="float32", repeats=2
)


def test_every_case_is_timed_against_its_control_and_the_floor():
    results = json.loads(json.dumps(run(SMALL)))
    names = [(case["name"], case["control_name"]) for case in results["cases"]]
    assert names == [
        ("decode 4 over 1056 each", "pages in a row"),
        ("decode 4 over 1024 shared + 32", "each on its own"),
        ("chunk of 32 over 1024", "dense"),
    ]
    token = 2 * 2 * 16 * 4  # bytes of key and value
    for case, keys in zip(results["cases"], (4 * 1056, 1024 + 4 * 32, 1056), strict=True):
        assert min(case["seconds"], case["control_seconds"], case["gain"]) > 0
        floor = keys * token / results["copy_bytes_per_second"]
        assert case["floor_seconds"] == pytest.approx(floor)
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render(results))
    assert all(name in shown.get() for name, _ in names)


def test_heads_that_make_no_groups_are_refused():
    with pytest.raises(ValidationError, match="heads must be a multiple of kv_heads"):
        KernelsBench(heads=6, kv_heads=4)
