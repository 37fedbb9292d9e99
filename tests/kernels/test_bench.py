"""What the benchmarks time is what they say; no time is looked at."""

from __future__ import annotations

import pytest
import torch
from ragcache_kernels import get_backend
from ragcache_kernels.bench.cases import SHARED_LENGTHS, break_even
from ragcache_kernels.bench.clock import Ceilings, Clock, Work
from ragcache_kernels.bench.layer import Heads, Layer, layout
from ragcache_kernels.reference import reference_attention

CPU = torch.device("cpu")
LAYER = Layer(get_backend("torch"), Heads(4, 2, 16), 12, CPU, torch.float32)


@pytest.mark.parametrize("block_size", [16, 64])
def test_steps_over_pages_of_any_size_see_the_same_cache(block_size: int) -> None:
    query, pages = LAYER.queries(3), 12 * 16 // 3 // block_size
    step = layout(torch.arange(3 * pages).view(3, pages), 1, 60, block_size)
    plain = layout(torch.arange(12).view(3, 4), 1, 60)
    expected = reference_attention(query, LAYER.cache, plain, LAYER.spec)
    out = LAYER.paged(query, step)()
    torch.testing.assert_close(out, expected.float())


def test_a_dense_chunk_has_the_shape_of_a_paged_one() -> None:
    out = LAYER.dense(5, 60)()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (1, 4, 5, 16)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([2, 2, 2, 2, 2], 64),
        ([2, 0.9, 1, 2, 3], 256),
        ([0.1, 0.2, 0.3, 0.4, 1.5], 1024),
        ([2, 2, 2, 2, 0.9], None),
    ],
)
def test_sharing_pays_from_the_length_behind_which_it_always_does(
    gains: list[float], expected: int | None
) -> None:
    assert len(gains) == len(SHARED_LENGTHS)
    assert break_even([{"gain": gain} for gain in gains]) == expected


def test_floors_are_work_over_what_the_device_does_at_best() -> None:
    assert Ceilings(100.0, 1000.0).floors(Work(50, 250)) == (0.5, 0.25)


def test_calls_take_turns_and_the_first_round_does_not_count() -> None:
    seen: list[str] = []
    times = Clock(CPU).turns([lambda: seen.append("a"), lambda: seen.append("b")], 2)
    assert seen == ["a", "b"] * 3
    assert [len(each) for each in times] == [2, 2]
