"""Steps whose launches are recorded once and replayed read everything from where it stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ragcache_kernels import AttentionSpec, LayerCache, StepLayout
from ragcache_kernels.triton.backend import TritonBackend
from ragcache_kernels.triton.configs import Case, Phase, default
from step_layouts import layout_of

SIZE, HEADS, KV_HEADS, DIM = 4, 6, 2, 16
CPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPECS = [
    AttentionSpec(scale=0.25),
    AttentionSpec(scale=0.25, window=7, softcap=20.0),
    AttentionSpec(scale=0.25, sinks=torch.linspace(-1, 2, HEADS, device=CPU)),
]


@pytest.fixture
def cache() -> LayerCache:
    torch.manual_seed(0)
    return LayerCache(*torch.randn(2, 400, SIZE, KV_HEADS, DIM, device=CPU))


def decodes(lengths: list[int], shared: int, tokens: int) -> StepLayout:
    """One query for each sequence, whose first `shared` blocks are the same; then padding."""
    tables = [
        [*range(shared), *range(100 + 40 * i, 100 + 40 * i - (-n // SIZE) - shared)]
        for i, n in enumerate(lengths)
    ]
    layout = layout_of([(1, n) for n in lengths], tables, SIZE)
    padding = torch.full((tokens - len(lengths),), -1)
    return replace(layout, slot_mapping=torch.cat([layout.slot_mapping, padding]))


def test_a_plan_that_stays_in_place_attends_like_a_new_one(cache: LayerCache) -> None:
    backend, other = TritonBackend(), TritonBackend()
    query = torch.randn(5, HEADS, DIM, device=CPU)
    steps = [
        decodes([31, 9, 18], 2, 5),
        decodes([32, 10, 19], 2, 5),
        decodes([120, 121, 122, 123, 124], 25, 5),  # the shared run is worth tiles of its own
        decodes([1], 0, 5),
    ]
    first = backend.plan(steps[0], CPU)
    for spec in SPECS:
        backend.attend(query, cache, first, spec)
    fixed = backend.fixed_plan(5, 140, 1600, SIZE, CPU)
    assert fixed is not None
    places = [fixed.slots.data_ptr(), fixed.table.data_ptr()]
    for step in steps:
        assert fixed.update(step)
        plan = other.plan(step, CPU)
        for spec in SPECS:
            torch.testing.assert_close(
                backend.attend(query, cache, fixed, spec), other.attend(query, cache, plan, spec)
            )
    assert places == [fixed.slots.data_ptr(), fixed.table.data_ptr()]


def test_a_step_that_does_not_fit_leaves_the_plan_alone(cache: LayerCache) -> None:
    backend = TritonBackend()
    query = torch.randn(2, HEADS, DIM, device=CPU)
    backend.attend(query, cache, backend.plan(decodes([9, 5], 1, 2), CPU), SPECS[0])
    fixed = backend.fixed_plan(2, 20, 1600, SIZE, CPU)
    assert fixed is not None
    assert fixed.update(decodes([9, 5], 1, 2))
    before = backend.attend(query, cache, fixed, SPECS[0])
    assert not fixed.update(decodes([9, 60], 1, 2))
    assert torch.equal(backend.attend(query, cache, fixed, SPECS[0]), before)


def test_what_is_recorded_takes_the_same_tiles_as_what_is_not() -> None:
    for arch in (80, 89, 90, 100, 120):
        for dim in (64, 80, 128, 256):
            for dtype in ("torch.bfloat16", "torch.int8", "torch.float8_e4m3fn"):
                rows = [default(Case(arch, dim, 4, dtype, phase)).bm for phase in Phase]
                narrow, wide, narrow_recorded, wide_recorded = rows
                assert (narrow, wide) == (narrow_recorded, wide_recorded), (arch, dim, dtype)
