from __future__ import annotations

import json

import pytest
import torch
from pydantic import ValidationError
from ragcache_kernels import best_backend
from rich.console import Console

from ragcache.bench.kernels import render, run
from ragcache.bench.options import KernelsBench

SMALL = KernelsBench(
    batch=4, shared=1024, own=32, heads=4, kv_heads=2, head_dim=16, dtype="float32", repeats=2
)
IN_C = best_backend(torch.device("cpu"), torch.float32, [16]) == "native"
NAMES = [
    ("decode 4 over 1056 each", "pages in a row"),
    *([("decode 4 over 1056 each", "in torch")] if IN_C else []),
    ("decode 4 over 1056 each", "torch's varlen_attn"),
    ("decode 4 over 1056 each in int8", "not quantised"),
    ("decode 4 over 1056 each in float8_e4m3fn", "not quantised"),
    ("decode 4 over 1024 shared + 32", "each on its own"),
    ("chunk of 32 over 1024", "dense"),
    *([("chunk of 32 over 1024", "in torch")] if IN_C else []),
    *((f"decode 16 over {n} shared + 32", "each on its own") for n in (64, 128, 256, 512, 1024)),
]


@pytest.fixture(scope="module")
def results():
    return json.loads(json.dumps(run(SMALL)))


def test_every_case_is_timed_against_its_control(results):
    assert [(case["name"], case["control_name"]) for case in results["cases"]] == NAMES
    for case in results["cases"]:
        times = [case["seconds"], case.get("control_seconds", 1), case.get("gain", 1)]
        assert min(times) > 0


def test_the_floors_are_what_must_be_moved_and_computed(results):
    head, query = 16 * 4, 4 * 16 * 4  # bytes of a head, and of all heads of a token's query
    expected = [(4 * 1056, 4, 4 * 1056, head)] * 2  # different keys, queries, pairs of both
    expected += [(4 * 1056, 4, 4 * 1056, 16 + 4)] * 2
    expected += [(1024 + 4 * 32, 4, 4 * 1056, head), (1056, 32, 32 * 1024 + 33 * 16, head)]
    cases = [case for case in results["cases"] if case["control_name"] != "in torch"]
    for case, (keys, queries, pairs, key) in zip(cases[:6], expected, strict=True):
        moved = 2 * keys * 2 * key + 2 * queries * query
        memory, compute = (case[f"{kind}_seconds"] for kind in ("memory", "compute"))
        assert memory == pytest.approx(moved / results["copy_bytes_per_second"])
        operations = 2 * 2 * 16 * 4 * pairs  # two products, a multiplication and a sum each
        assert compute == pytest.approx(operations / results["product_flops_per_second"])


def test_the_table_shows_all_and_why_something_is_not_available(results):
    console = Console(width=160)
    with console.capture() as shown:
        console.print(render(results))
    text = shown.get()
    assert all(name in text for names in NAMES for name in names)
    assert "not available here" in text
    assert "FA3: " in text


def test_heads_that_make_no_groups_are_refused():
    with pytest.raises(ValidationError, match="heads must be a multiple of kv_heads"):
        KernelsBench(heads=6, kv_heads=4)
